"""Rounds that wait to be learned from, so that learning costs a few array operations per many rounds. Knows nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wager.economics.ratings import Bools, Floats, Ints

_MANY, _LONG, _EARLY = 256, 12, 64


@dataclass(frozen=True, slots=True)
class Noted:
    """One step's rounds of one drafter, as they were expected: `slots` [rounds], `chance` and `cells` (of the table)
    [rounds, nodes], and what became of them: nodes from `first` on and before `seen` were put to the test, and right
    up to `run`, by round; or, of trees, `trial` and `right` by round and node."""

    slots: Ints
    chance: Floats
    cells: Ints
    run: Sequence[int] = ()
    seen: Sequence[int] = ()
    first: int = 0
    trial: Bools | None = None
    right: Bools | None = None


@dataclass(frozen=True, slots=True)
class Rounds:
    """Several steps side by side: `slots` [rounds], the others [rounds, nodes]; `right` only under `trial`."""

    slots: Ints
    chance: Floats
    cells: Ints
    trial: Bools
    right: Bools


class Ledger:
    """Steps that wait. `due` says that it is time to take them."""

    def __init__(self) -> None:
        self._noted: list[Noted] = []
        self._size = self._taken = 0

    def add(self, noted: Noted) -> None:
        """Note one step's rounds."""
        self._noted.append(noted)
        self._size += len(noted.slots)

    @property
    def due(self) -> bool:
        """Many rounds wait, or some have waited long, or little is known yet."""
        early = self._size > 0 and self._size + self._taken < _EARLY
        return self._size >= _MANY or len(self._noted) >= _LONG or early

    @property
    def empty(self) -> bool:
        return not self._noted

    def take(self) -> Rounds:
        """All rounds that wait."""
        shape = self._size, max([each.chance.shape[1] for each in self._noted])
        chance, cells = np.zeros(shape), np.zeros(shape, np.intp)
        trial, right = np.zeros(shape, bool), np.zeros(shape, bool)
        node, start = np.arange(shape[1]), 0
        for each in self._noted:
            rows, width = each.chance.shape
            place = slice(start, start + rows), slice(width)
            chance[place], cells[place] = each.chance, each.cells
            if each.trial is not None and each.right is not None:
                trial[place], right[place] = each.trial, each.right
            else:
                here = node[:width]
                trial[place] = here < np.array(each.seen)[:, None]
                right[place] = here < np.array(each.run)[:, None]
                trial[place] &= here >= each.first
            start += rows
        slots = np.concatenate([each.slots for each in self._noted])
        self._taken += self._size
        self._noted, self._size = [], 0
        return Rounds(slots, chance, cells, trial, right & trial)
