"""What the last layer gives for every row of a pass, where a decoder computes it only for the rows with logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from wager.kernels.arrays import Array
from wager.kernels.base import Tape
from wager.models.layer_recorder import LayerBuffers
from wager.types import PackedBatch


class LastLayer:
    """`record` makes a tape of what follows the layer's keys and values, for all rows, on the decoder's buffers and
    inputs; it is called when rows are first wanted."""

    def __init__(self, buffers: LayerBuffers, record: Callable[[], Tape]) -> None:
        self._buffers, self._record = buffers, record
        self._tape: Tape | None = None

    def rows(self, batch: PackedBatch) -> Array:
        """The residual stream of all rows behind the layer, f32 [R, hidden], after the decoder's pass over the batch.
        Where all rows have logits, as those of a step that decodes do, nothing is computed."""
        rows, indices = batch.rows, batch.logits_indices
        if len(indices) == rows and np.array_equal(indices, np.arange(rows)):
            return self._buffers.selected[:rows]
        if self._tape is None:
            self._tape = self._record()
        self._tape.run(rows=rows, sequences=batch.num_sequences, logits_rows=0)
        return self._buffers.x[:rows]
