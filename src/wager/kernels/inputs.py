"""The integers that a tape reads: what a step's rows are and where they are cached."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from wager.kernels import _native
from wager.kernels.arrays import INT32, Array, address, zeros
from wager.types import PackedBatch

_STATE_INTS = 8


@dataclass(frozen=True)
class Inputs:
    """Integer buffers that a tape reads, int32, allocated once. See types.PackedBatch for their meaning."""

    tokens: Array  # [max_rows]
    positions: Array  # [max_rows]
    parents: Array  # [max_rows]
    slot_mapping: Array  # [max_rows]
    seq_ids: Array  # [max_rows]
    logits_indices: Array  # [max_rows]
    query_start_loc: Array  # [max_sequences + 1]
    num_computed_tokens: Array  # [max_sequences]
    block_tables: Array  # [max_sequences, max_blocks]
    state_uses: Array  # [max_sequences, 8]
    replays: Array  # [max_rows]

    @classmethod
    def allocate(cls, *, max_rows: int, max_sequences: int, max_blocks: int) -> Inputs:
        def row() -> Array:
            return zeros(max_rows, dtype=INT32)

        starts, lengths = (zeros(max_sequences + extra, dtype=INT32) for extra in (1, 0))
        tables = zeros(max_sequences, max_blocks, dtype=INT32)
        uses = zeros(max_sequences, _STATE_INTS, dtype=INT32)
        return cls(row(), row(), row(), row(), row(), row(), starts, lengths, tables, uses, row())

    def fill(self, batch: PackedBatch) -> None:
        """Copy a packed batch into the buffers."""
        rows, sequences = batch.rows, batch.num_sequences
        for name in ("tokens", "positions", "parents", "slot_mapping", "seq_ids"):
            getattr(self, name)[:rows] = getattr(batch, name)
        self.logits_indices[: len(batch.logits_indices)] = batch.logits_indices
        self.query_start_loc[: sequences + 1] = batch.query_start_loc
        self.num_computed_tokens[:sequences] = batch.num_computed_tokens
        self.block_tables[:sequences, : batch.block_tables.shape[1]] = batch.block_tables
        uses = self.state_uses[:sequences]
        if batch.state_uses is not None and batch.replays is not None:
            uses[:] = batch.state_uses
            self.replays[: len(batch.replays)] = batch.replays
            return
        uses[:, 0] = np.arange(sequences)
        uses[:, 1] = np.where(batch.num_computed_tokens > 0, uses[:, 0], -1)
        uses[:, 2], uses[:, 3], uses[:, 4:] = np.diff(batch.query_start_loc), 0, -1

    def packer(self) -> _native.BatchPacker:
        """Writes batches into the buffers (verify/pack.py). A batch is a view of them, kept by its sizes."""
        max_sequences, max_blocks = self.block_tables.shape
        addresses = tuple(address(getattr(self, name)) for name in _NAMES)
        return _native.BatchPacker(addresses, len(self.tokens), max_sequences, max_blocks, self._view)

    def _view(self, rows: int, sequences: int, logits_rows: int, blocks: int) -> PackedBatch:
        sizes = {"query_start_loc": sequences + 1, "num_computed_tokens": sequences, "logits_indices": logits_rows}
        views = {name: getattr(self, name)[: sizes.get(name, rows)] for name in _NAMES}
        views["block_tables"] = self.block_tables[:sequences, :blocks]
        views["state_uses"], views["replays"] = self.state_uses[:sequences], self.replays
        return PackedBatch(**views)


_NAMES = [field.name for field in fields(Inputs)]
