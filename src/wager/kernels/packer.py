"""Packs a step natively, straight into the buffers that a tape reads.

verify/pack.py has the same in plain Python; it is what packs wherever this one declines.
"""

from __future__ import annotations

from dataclasses import fields

from wager.kernels import _native
from wager.kernels.arrays import address
from wager.kernels.base import BatchBuffers
from wager.kernels.inputs import Inputs
from wager.types import PackedBatch


def input_packer(inputs: Inputs) -> BatchBuffers:
    """Writes batches into `inputs`; see BatchBuffers. A batch is a view of the buffers, kept by its sizes."""
    buffers = {field.name: getattr(inputs, field.name) for field in fields(PackedBatch)}

    def view(rows: int, sequences: int, logits_rows: int, blocks: int) -> PackedBatch:
        sizes = {"query_start_loc": sequences + 1, "num_computed_tokens": sequences, "logits_indices": logits_rows}
        views = {name: buffer[: sizes.get(name, rows)] for name, buffer in buffers.items()}
        views["block_tables"] = buffers["block_tables"][:sequences, :blocks]
        return PackedBatch(**views)

    names = (
        "tokens",
        "positions",
        "parents",
        "slot_mapping",
        "seq_ids",
        "logits_indices",
        "query_start_loc",
        "num_computed_tokens",
        "block_tables",
    )
    addresses = tuple(address(buffers[name]) for name in names)
    max_sequences, max_blocks = inputs.block_tables.shape
    return _native.BatchPacker(addresses, len(inputs.tokens), max_sequences, max_blocks, view)
