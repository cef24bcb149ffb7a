"""What a module gave, by position, until the next module has its entries."""

from __future__ import annotations

import numpy as np

from wager.kernels.arrays import FLOAT32, Array, empty


class GivenStates:
    """Rows of the positions `first` to `end` - 1 of a sequence."""

    def __init__(self) -> None:
        self.first = 0
        self._rows: Array = empty(0, 0)

    @property
    def end(self) -> int:
        return self.first + len(self._rows)

    def add(self, start: int, rows: Array) -> None:
        """Rows of the positions from `start` on. Known positions are left out; rows behind a gap begin anew."""
        if start > self.end or not len(self._rows):
            self.first, self._rows = start, np.array(rows, FLOAT32)
        elif start + len(rows) > self.end:
            self._rows = np.concatenate([self._rows, rows[self.end - start :]])

    def drop(self, below: int) -> None:
        """Forget the positions below."""
        rows = max(0, min(below - self.first, len(self._rows)))
        self.first, self._rows = self.first + rows, self._rows[rows:]

    def cut(self, end: int) -> None:
        """Forget the positions from `end` on."""
        self._rows = self._rows[: max(0, end - self.first)]

    def rows(self, start: int, end: int) -> Array:
        """The rows of those positions."""
        return self._rows[start - self.first : end - self.first]
