"""Spans and their drafts laid out as the rows of one ragged pass.

Integers only: knows pages by number, no tensors and no model. Row j of a span is cached at the slot of position
start + j; a guess of depth d sits at position n - 1 + d, wherever it is cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from wager.errors import CacheIntegrityError, UsageError
from wager.kernels.base import BLOCK_SIZE
from wager.types import Draft, PackedBatch, Span

Ints = NDArray[np.int32]


def pack(spans: Sequence[Span], drafts: Mapping[str, Draft], tables: Mapping[str, Sequence[int]]) -> PackedBatch:
    """The batch of a step. `tables[sequence]` lists the pages of a sequence, one for each PAGE positions.

    Heads: for each live span the row of its last known token, then every guess in node order; spans in order. A span
    that is not live has none. Raises UsageError for a span without rows or guesses where none may be, and
    CacheIntegrityError for pages that do not cover the rows.
    """
    tokens: list[int] = []
    positions: list[int] = []
    parents: list[int] = []
    heads: list[int] = []
    starts: list[int] = []
    ends: list[int] = []
    for span in spans:
        first, last = len(tokens), len(tokens) + len(span.tokens) - 1
        starts.append(first)
        draft = drafts.get(span.seq_id)
        _check(span, draft)
        tokens += span.tokens
        positions += range(span.num_computed_tokens, span.num_computed_tokens + len(span.tokens))
        parents.append(-1)
        parents += range(first, last)
        if draft is not None and draft.tokens:
            behind = span.num_computed_tokens + len(span.tokens) - 1
            tokens += draft.tokens
            positions += [behind + depth for depth in draft.depths]
            parents += [last + 1 + parent for parent in draft.parents]
        if span.needs_logits:
            heads += range(last, len(tokens))
        ends.append(len(tokens))
    first_rows = np.array(starts, np.int32)
    counts = np.array(ends, np.int32) - first_rows
    bases = np.array([span.num_computed_tokens for span in spans], np.int32)
    pages = _tables(spans, tables, bases + counts)
    owners = np.repeat(np.arange(len(spans), dtype=np.int32), counts)
    places = np.arange(len(tokens), dtype=np.int32) + np.repeat(bases - first_rows, counts)
    return PackedBatch(
        tokens=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        parents=np.array(parents, np.int32),
        slot_mapping=pages[owners, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE,
        seq_ids=owners,
        query_start_loc=first_rows,
        num_computed_tokens=bases,
        block_tables=pages,
        logits_indices=np.array(heads, np.int32),
    )


def _check(span: Span, draft: Draft | None) -> None:
    if not span.tokens:
        raise UsageError(f"The span of {span.seq_id!r} has no rows.", "Run at least the last known token.")
    if draft is not None and draft.tokens and not span.needs_logits:
        raise UsageError(f"Guesses for {span.seq_id!r} would follow a prompt chunk.", "Draft for live spans only.")


def _tables(spans: Sequence[Span], tables: Mapping[str, Sequence[int]], ends: Ints) -> Ints:
    """[spans, pages]: as many pages as the longest span needs, padded with 0."""
    needs = (-(-ends // BLOCK_SIZE)).tolist()
    padded = np.zeros((len(spans), max(needs, default=0)), np.int32)
    for row, span, need in zip(padded, spans, needs, strict=True):
        pages = tables[span.seq_id]
        if len(pages) < need:
            raise CacheIntegrityError(
                f"{span.seq_id!r} holds {len(pages)} pages and its rows need {need}.", "Reserve before packing."
            )
        row[:need] = pages[:need]
    return padded
