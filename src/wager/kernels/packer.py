"""Packs a step natively, straight into the buffers that a tape reads.

verify/pack.py has the same in plain Python; it is what packs wherever this one declines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from wager.kernels import _native
from wager.kernels.arrays import address
from wager.kernels.inputs import Inputs
from wager.types import Draft, PackedBatch, Span

_MOST_BATCHES = 256
"""Batches that are kept; each is some views of the buffers."""


class InputPacker:
    """Writes batches into `inputs`. A batch is valid until the next one is packed: it is a view of the buffers."""

    def __init__(self, inputs: Inputs) -> None:
        self._buffers = {field.name: getattr(inputs, field.name) for field in fields(PackedBatch)}
        tables = self._buffers["block_tables"]
        names = (
            "tokens", "positions", "parents", "slot_mapping", "seq_ids", "logits_indices", "query_start_loc",
            "num_computed_tokens", "block_tables",
        )  # fmt: skip
        addresses = tuple(address(self._buffers[name]) for name in names)
        self._native = _native.BatchPacker(addresses, len(self._buffers["tokens"]), *tables.shape)
        self._batches: dict[tuple[int, int, int, int], PackedBatch] = {}  # by rows, sequences, logits rows and blocks
        self.packed: PackedBatch | None = None
        """The batch that the buffers hold."""

    def pack(
        self, spans: Sequence[Span], drafts: Mapping[str, Draft], block_tables: Mapping[str, Sequence[int]]
    ) -> PackedBatch | None:
        """The batch of a step, as verify.pack.pack gives it; None if the buffers have no room for it, or if something
        is not as it should be."""
        sizes = self._native.pack(spans, drafts, block_tables)
        if sizes is None:
            self.packed = None
            return None
        batch = self._batches.get(sizes)
        if batch is None:
            if len(self._batches) == _MOST_BATCHES:
                self._batches.clear()
            batch = self._batches[sizes] = self._view(*sizes)
        self.packed = batch
        return batch

    def _view(self, rows: int, sequences: int, logits_rows: int, blocks: int) -> PackedBatch:
        sizes = {"query_start_loc": sequences + 1, "num_computed_tokens": sequences, "logits_indices": logits_rows}
        views = {name: buffer[: sizes.get(name, rows)] for name, buffer in self._buffers.items()}
        views["block_tables"] = self._buffers["block_tables"][:sequences, :blocks]
        return PackedBatch(**views)
