"""The states of recurrent layers in memory of the C++ side (csrc/recurrence.h); csrc/state_slots.h gives out slots."""

from __future__ import annotations

from wager.arch.layers import StateShape
from wager.errors import ModelError
from wager.kernels import _native

_MOST_TAPS, _MOST_KEY_DIM = 8, 512  # as kMaxTaps in csrc/ops.h


class CpuStates:
    """States of `slots` sequences and snapshots in `layers` layers, float32, zeros at first; and what passes of
    `max_rows` rows save of their guesses."""

    def __init__(self, shape: StateShape, *, layers: int, slots: int, max_rows: int) -> None:
        multiples = {"channels": shape.channels, "key dimension": shape.key_dim, "value dimension": shape.value_dim}
        for name, size in multiples.items():
            if size % 16:
                raise ModelError(f"A {name} of {size} in a recurrent layer is not a multiple of 16, as kernels need.")
        if not 2 <= shape.taps <= _MOST_TAPS or shape.key_dim > _MOST_KEY_DIM:
            raise ModelError(
                f"A recurrent layer with a convolution over {shape.taps} rows and keys of {shape.key_dim} is not "
                f"supported: the kernels take 2 to {_MOST_TAPS} rows and keys of at most {_MOST_KEY_DIM}."
            )
        self.shape, self.layers, self.slots, self.max_rows = shape, layers, slots, max_rows
        tails = 4 * layers * slots * (shape.taps - 1) * shape.channels
        heads = 4 * layers * slots * shape.heads * shape.key_dim * shape.value_dim
        counts = (layers, slots, max_rows, shape.taps, shape.channels, shape.width)
        kept, matrices, saved = (
            _native.Buffer(nbytes, huge_pages=False) for nbytes in (tails, heads, 4 * layers * max_rows * shape.width)
        )
        self._buffers = (kept, matrices, saved)
        self.view = _native.StateView(kept, matrices, saved, (*counts, shape.heads, shape.key_dim, shape.value_dim))

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)


def state_bytes(shape: StateShape, *, layers: int, slots: int, max_rows: int) -> int:
    """Bytes of CpuStates."""
    return 4 * layers * (slots * shape.elements + max_rows * shape.width)
