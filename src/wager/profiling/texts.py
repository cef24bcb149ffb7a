"""What a decoder makes of whole texts: the logits after every token."""

from __future__ import annotations

import numpy as np

from wager.errors import UsageError
from wager.kernels.arrays import Array
from wager.kernels.base import BLOCK_SIZE
from wager.models.transformer import Decoder
from wager.types import PackedBatch


def logits_of(decoder: Decoder, tokens: Array) -> Array:
    """float32 [n, vocab] after each of n token ids (int32), read from an empty context. Overwrites the first blocks of
    the cache. UsageError for more tokens than a sequence may have."""
    blocks = -(-len(tokens) // BLOCK_SIZE)
    if blocks > min(decoder.max_blocks, decoder.cache.num_blocks):
        raise UsageError(f"{len(tokens)} tokens are more than the context holds.", "Raise --max-context.")
    step = min(decoder.max_rows, decoder.max_logits_rows)
    out = np.empty((len(tokens), decoder.vocab), np.float32)
    for first in range(0, len(tokens), step):
        rows = np.arange(min(step, len(tokens) - first), dtype=np.int32)
        batch = PackedBatch(
            tokens=tokens[first : first + len(rows)].astype(np.int32),
            positions=first + rows,
            parents=rows - 1,
            slot_mapping=first + rows,
            seq_ids=np.zeros_like(rows),
            query_start_loc=np.array([0, len(rows)], np.int32),
            num_computed_tokens=np.array([first], np.int32),
            block_tables=np.arange(blocks, dtype=np.int32)[None],
            logits_indices=rows,
        )
        out[first : first + len(rows)] = decoder.forward(batch).model_logits(slice(None))
    return out
