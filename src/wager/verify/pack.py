"""Spans and their drafts packed as the rows of one ragged pass.

Row j of a span is cached at the slot of position num_computed_tokens + j; a draft token of depth d has position
n - 1 + d (n known tokens), wherever it is cached. Integers only, written in C++ (csrc/step_bindings.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wager.kernels._native import BatchPacker, BlockPool
from wager.kernels.base import BLOCK_SIZE
from wager.kernels.inputs import Inputs
from wager.types import Draft, PackedBatch, Span


def pack(
    spans: Sequence[Span],
    drafts: Mapping[str, Draft],
    pool: BlockPool,
    *,
    into: BatchPacker | None = None,
) -> PackedBatch:
    """The batch of a step. `pool` has the blocks of its sequences. `into` writes to the buffers that a tape reads
    (None: to arrays of its own), and the batch is valid until it packs again.

    Logits rows: for each span that needs logits the row of its last known token, then every draft token in node order;
    spans in order. Raises UsageError for a span without rows, a draft behind a span without logits, or more than the
    buffers hold, and CacheIntegrityError for blocks that do not cover the rows.
    """
    if into is None:
        counts = [len(span.tokens) + len(drafts.get(span.seq_id) or ()) for span in spans]
        ends = [span.num_computed_tokens + count for span, count in zip(spans, counts, strict=True)]
        most = -(-max(ends, default=0) // BLOCK_SIZE)
        into = Inputs.allocate(max_rows=sum(counts), max_sequences=len(counts), max_blocks=most).packer()
    return into.pack(spans, drafts, pool)
