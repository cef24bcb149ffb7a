"""Spans and their drafts packed as the rows of one ragged pass.

Row j of a span is cached at the slot of position num_computed_tokens + j; a draft token of depth d has position
n - 1 + d (n known tokens), wherever it is cached. Integers only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from wager.errors import CacheIntegrityError, UsageError
from wager.kernels.base import BLOCK_SIZE, BatchBuffers
from wager.types import Draft, PackedBatch, Span

Ints = NDArray[np.int32]


@dataclass
class _Rows:
    """The rows packed so far; `starts` has the first row of each span."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    logits_indices: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def append(self, span: Span, draft: Draft | None) -> None:
        """The known tokens of a span, then the nodes of its draft."""
        first, start = len(self.tokens), span.num_computed_tokens
        last = first + len(span.tokens) - 1
        self.starts.append(first)
        self.tokens += span.tokens
        self.positions += range(start, start + len(span.tokens))
        self.parents.append(-1)
        self.parents += range(first, last)
        if draft is not None and draft.tokens:
            newest = start + len(span.tokens) - 1
            self.tokens += draft.tokens
            self.positions += [newest + depth for depth in draft.depths]
            self.parents += [last + 1 + parent for parent in draft.parents]
        if span.needs_logits:
            self.logits_indices += range(last, len(self.tokens))


def pack(
    spans: Sequence[Span],
    drafts: Mapping[str, Draft],
    block_tables: Mapping[str, Sequence[int]],
    *,
    into: BatchBuffers | None = None,
) -> PackedBatch:
    """The batch of a step. `block_tables[seq_id]` lists the blocks of a sequence, one for each BLOCK_SIZE positions;
    `into` are the buffers to pack it into, if it can be (None: arrays of its own).

    Logits rows: for each span that needs logits the row of its last known token, then every draft token in node order;
    spans in order. Raises UsageError for a span without rows or a draft behind a span without logits, and
    CacheIntegrityError for blocks that do not cover the rows.
    """
    if into is not None and (batch := into.pack(spans, drafts, block_tables)) is not None:
        return batch
    rows = _Rows()
    for span in spans:
        draft = drafts.get(span.seq_id)
        _check(span, draft)
        rows.append(span, draft)
    starts = np.array([*rows.starts, len(rows.tokens)], np.int32)
    counts = np.diff(starts)
    computed = np.array([span.num_computed_tokens for span in spans], np.int32)
    tables = _padded(spans, block_tables, computed + counts)
    seq_ids = np.repeat(np.arange(len(spans), dtype=np.int32), counts)
    places = np.arange(len(rows.tokens), dtype=np.int32) + np.repeat(computed - starts[:-1], counts)
    return PackedBatch(
        tokens=np.array(rows.tokens, np.int32),
        positions=np.array(rows.positions, np.int32),
        parents=np.array(rows.parents, np.int32),
        slot_mapping=tables[seq_ids, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE,
        seq_ids=seq_ids,
        query_start_loc=starts,
        num_computed_tokens=computed,
        block_tables=tables,
        logits_indices=np.array(rows.logits_indices, np.int32),
    )


def _check(span: Span, draft: Draft | None) -> None:
    if not span.tokens:
        raise UsageError(f"The span of {span.seq_id!r} has no rows.", "Run at least the last known token.")
    if draft is not None and draft.tokens and not span.needs_logits:
        raise UsageError(
            f"A draft for {span.seq_id!r} would follow a prompt chunk.", "Draft for spans that need logits only."
        )


def _padded(spans: Sequence[Span], block_tables: Mapping[str, Sequence[int]], ends: Ints) -> Ints:
    """[spans, blocks]: as many blocks as the longest span needs, padded with 0."""
    needs = (-(-ends // BLOCK_SIZE)).tolist()
    padded = np.zeros((len(spans), max(needs, default=0)), np.int32)
    for row, span, need in zip(padded, spans, needs, strict=True):
        blocks = block_tables[span.seq_id]
        if len(blocks) < need:
            raise CacheIntegrityError(
                f"{span.seq_id!r} holds {len(blocks)} blocks and its rows need {need}.", "Reserve before packing."
            )
        row[:need] = blocks[:need]
    return padded
