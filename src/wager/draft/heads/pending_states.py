"""The target's states of positions that a head has not computed yet, by sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from wager.kernels.arrays import FLOAT32, Array
from wager.kernels.base import TargetOutput

_NO_ROWS: Array = np.empty((0, 0), np.float32)

_LEAST_ROWS = 30

_BUDGET = 64 << 20
"""Bytes of states that are kept for all sequences together."""


@dataclass(slots=True)
class PendingStates:
    """States of the positions `first` to `end` - 1 of a sequence, `count` of them. Adding some costs the same however
    many wait: a head that rests gets one in every step."""

    first: int = 0
    count: int = 0
    _memory: Array = field(default_factory=lambda: _NO_ROWS)  # they are its rows from _begin on
    _begin: int = 0

    @property
    def end(self) -> int:
        return self.first + self.count

    def add(self, start: int, rows: Array) -> None:
        """Rows of the positions from `start` on. Known positions are left out; rows behind a gap begin anew."""
        end = self.end
        if start > end or not self.count:
            self.first, self.count, end = start, 0, start
        new = start + len(rows) - end
        if new > 0:
            self.room(end, new, width=rows.shape[1])[:] = rows[len(rows) - new :]

    def drop(self, below: int) -> None:
        """Forget the positions below."""
        rows = max(0, min(below - self.first, self.count))
        self.first, self.count, self._begin = self.first + rows, self.count - rows, self._begin + rows

    def cut(self, end: int) -> None:
        """Forget the positions from `end` on."""
        self.count = max(0, min(end - self.first, self.count))

    def rows(self, start: int, end: int) -> Array:
        """The states of those positions, until more are added."""
        return self._kept()[start - self.first : end - self.first]

    def take(self, rows: int) -> Array:
        """Remove and return the first rows, valid until more are added."""
        taken = self._memory[self._begin : self._begin + min(rows, self.count)]
        self.drop(self.first + rows)
        return taken

    def _kept(self) -> Array:
        return self._memory[self._begin : self._begin + self.count]

    def room(self, start: int, rows: int, *, width: int) -> Array:
        """Where to write the states of `rows` further positions from `start` on. Behind a gap they begin anew."""
        if start != self.end or not self.count:
            self.first, self.count, self._begin = start, 0, 0
        used = self._begin + self.count
        if used + rows > len(self._memory):
            memory = np.empty((2 * (self.count + rows) + _LEAST_ROWS, width), FLOAT32)
            if self.count:
                memory[: self.count] = self._kept()
            self._memory, self._begin, used = memory, 0, self.count
        self.count += rows
        return self._memory[used : used + rows]


@dataclass(frozen=True, slots=True)
class StateFormat:
    """What is kept of a position: the taps side by side, `width` elements of float32."""

    taps: tuple[int, ...]
    width: int

    @property
    def most_rows(self) -> int:
        """Positions that are kept for all sequences together, the latest ones."""
        return max(1, _BUDGET // (self.width * FLOAT32.itemsize))

    def write(self, output: TargetOutput, rows: Sequence[int], into: Array) -> None:
        """Copy those rows of a pass, ascending, to `into` [n, width]."""
        first, end = rows[0], rows[-1] + 1
        chosen: slice | list[int] = slice(first, end) if end - first == len(rows) else list(rows)
        np.concatenate([output.taps[tap][chosen] for tap in self.taps], axis=1, out=into)
