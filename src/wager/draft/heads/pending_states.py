"""The target's states of positions that a head has not computed yet, by sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from wager.kernels.arrays import Array, DType
from wager.kernels.base import TargetOutput

_BUDGET = 64 << 20
"""Bytes of states that are kept for all sequences together."""


@dataclass(slots=True)
class PendingStates:
    """States of the positions `first` to `end` - 1 of a sequence."""

    first: int = 0
    parts: list[Array] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def end(self) -> int:
        return self.first + self.count

    def add(self, start: int, rows: Array) -> None:
        """Rows of the positions from `start` on. Those that are known are left out; those behind a gap begin anew."""
        end = self.end
        if start > end or not self.parts:
            self.first, self.parts, end = start, [], start
        if start + len(rows) > end:
            self.parts.append(rows[end - start :])

    def drop(self, below: int) -> None:
        """Forget the positions below."""
        rows = max(0, min(below - self.first, self.count))
        if rows:
            rest = self._joined()[rows:]
            self.first, self.parts = self.first + rows, [rest] if len(rest) else []

    def cut(self, end: int) -> None:
        """Forget the positions from `end` on."""
        rows = max(0, min(end - self.first, self.count))
        if rows < self.count:
            self.parts = [self._joined()[:rows]] if rows else []

    def rows(self, start: int, end: int) -> Array:
        """The states of those positions."""
        return self._joined()[start - self.first : end - self.first]

    def take(self, rows: int) -> Array:
        """Remove and return the first rows."""
        joined = self._joined()
        self.first, self.parts = self.first + rows, [joined[rows:]] if rows < len(joined) else []
        return joined[:rows]

    def _joined(self) -> Array:
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts)


@dataclass(frozen=True, slots=True)
class StateFormat:
    """What is kept of a position: the taps side by side, `width` elements of `dtype`."""

    taps: tuple[int, ...]
    width: int
    dtype: DType

    @property
    def most_rows(self) -> int:
        """Positions that are kept for all sequences together, the latest ones."""
        return max(1, _BUDGET // (self.width * self.dtype.itemsize))

    def rows(self, output: TargetOutput, rows: Sequence[int]) -> Array:
        """A copy of those rows of a pass, ascending, [n, width]."""
        first, end = rows[0], rows[-1] + 1
        chosen: slice | list[int] = slice(first, end) if end - first == len(rows) else list(rows)
        found = np.empty((len(rows), self.width), self.dtype)
        step = self.width // len(self.taps)
        for place, tap in enumerate(self.taps):
            found[:, place * step : (place + 1) * step] = output.taps[tap][chosen]
        return found
