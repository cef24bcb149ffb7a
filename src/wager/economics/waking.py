"""Drafters asleep: how long ago each sequence was drafted for, and what catching up would cost.

A drafter with a cache of its own has to read what it missed before it can guess again. Also hands the surface what
drafting really took. Knows no policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from wager.economics.policy import Offer
from wager.economics.ratings import Floats, Ints
from wager.economics.settling import Asked
from wager.economics.surface import DRAFT_STAGE, StepSurface
from wager.types import StepRecord

_STAY = 64.0
"""Steps over which the cost of catching up is spread when a drafter is chosen."""


_SAMPLE = 4
"""What drafting took is told in every so many steps."""


class Waking:
    """By drafter and slot: the position it was last asked at and when. Costs are in seconds."""

    def __init__(self, drafters: Mapping[str, Offer], surface: StepSurface) -> None:
        self._offers = dict(drafters)
        self._surface = surface
        self._position = {name: np.zeros(64, np.intp) for name in drafters}
        self._when = {name: np.zeros(64, np.intp) for name in drafters}
        self._steps = 0

    def fit(self, slots: int) -> None:
        """Make room for slots 0 .. slots - 1."""
        for table in (self._position, self._when):
            for name, values in table.items():
                if slots > len(values):
                    table[name] = np.concatenate([values, np.zeros_like(values)])

    def open(self, slot: int, sequence: str) -> None:
        """No drafter has read anything of a new sequence."""
        del sequence
        for name in self._position:
            self._position[name][slot], self._when[name][slot] = 0, -1

    def close(self, slot: int) -> None:
        """Nothing is kept."""

    def since(self, drafter: str, slots: Ints) -> Ints:
        """The step in which each was last asked for; -1 for never."""
        return self._when[drafter][slots]

    def asked(self, drafter: str, slots: Ints, known: Ints) -> None:
        """The drafter is asked now, at `known` tokens each."""
        self._position[drafter][slots] = known
        self._when[drafter][slots] = self._steps

    def catching_up(self, drafter: str, slots: Ints, known: Ints) -> Floats:
        """Seconds to read what each sequence has gained since the drafter was last asked."""
        missed = np.maximum(known - self._position[drafter][slots] - self._offers[drafter].depth, 0)
        seconds: Floats = missed * self._offers[drafter].catch_up
        return seconds

    def seconds(self, drafter: str, slots: Ints, known: Ints) -> Floats:
        """The same, spread over the steps a drafter is expected to stay."""
        return self.catching_up(drafter, slots, known) / _STAY

    def observe(self, record: StepRecord, asked: Sequence[Asked]) -> None:
        """Tell the surface what the step and its drafting took, if it learns.

        What drafting took is shared out as expected. Depths differ from sequence to sequence, and a surface knows even
        ones: it is told what an even ask would have taken, were it as far off as this one.
        """
        self._steps += 1
        surface = self._surface
        if hasattr(surface, "observe"):
            surface.observe(record)
        taken = record.seconds.get(DRAFT_STAGE, 0.0)
        if not asked or taken <= 0 or self._steps % _SAMPLE or not hasattr(surface, "observe_draft"):
            return
        total = sum([each.seconds for each in asked])
        for each in asked:
            requests, depth = len(each.slots), int(each.passes.max())
            even = surface.draft_seconds(each.drafter, requests, depth)
            told = taken * even / total if total > 0 else taken / len(asked)
            surface.observe_draft(each.drafter, requests, depth, seconds=told)
