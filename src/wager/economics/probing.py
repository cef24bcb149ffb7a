"""Probes: small bets that are not expected to pay, so that a closed door can open again.

An allowance of a fixed share of the time that passes is all that may be spent on them, so what they cost is bounded
whatever happens. Two kinds: a draft for a sequence that is left plain, to see whether the drafter would be right by
now, and a plain step where every step speculates, so that the price of doing nothing stays measured.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from wager.economics.admission import Prices
from wager.economics.bidding import Decided, View
from wager.economics.policy import Offer
from wager.economics.waking import Waking

ALLOWANCE = 0.004
"""Share of the running time that probes may cost."""

_SAVED = 400
"""Steps of allowance that can be saved up: a burst costs at most two steps or so."""

_CONTROL_EVERY = 200
"""Steps of the same size of batch, all speculating, before one is taken plain."""

_DEPTH = 4
_LEAST = 0.005
"""A probe counts as at least this share of a plain step, so that free drafters are not probed in every step."""


class Probing:
    """Spends the allowance. `forced`: what is probed is also verified, rows and all (the exact rules, under which an
    unverified guess teaches nothing)."""

    def __init__(
        self, offers: Mapping[str, Offer], prices: Prices, waking: Waking, *, share: float, forced: bool
    ) -> None:
        self._offers, self._prices, self._waking = dict(offers), prices, waking
        self._share, self._forced = share, forced
        self._learns = hasattr(prices.surface, "observe")
        self._seconds = 0.0
        self._streak: dict[int, int] = {}

    def earn(self, seconds: float) -> None:
        """A step took this long."""
        self._seconds = min(self._seconds + self._share * seconds, self._share * _SAVED * seconds)

    def control(self, view: View, decided: Decided, *, factor: float) -> bool:
        """Whether this step should be taken plain. That loses what speculation gains: `factor` times the plain rate."""
        size = view.live
        self._streak[size] = self._streak.get(size, 0) + 1 if decided.depths.any() else 0
        due = self._learns and self._streak[size] >= _CONTROL_EVERY
        if not due or not self._afford((factor - 1) * view.plain):
            return False
        self._streak[size] = 0
        return True

    def probe(self, view: View, decided: Decided) -> tuple[str, ...]:
        """Ask one sequence that is left plain, the one asked longest ago, of each drafter that can be afforded.

        Changes `decided` and returns whom.
        """
        asked = []
        for index, (name, offer) in enumerate(self._offers.items()):
            plain = np.flatnonzero(decided.depths == 0)
            if not len(plain):
                break
            if self._seconds < _LEAST * view.plain:
                continue
            row = int(plain[self._waking.since(name, view.slots[plain]).argmin()])
            depth = min(int(view.rooms[row]), offer.depth, _DEPTH)
            if self._afford(max(self._cost(name, view, decided, index, row, depth), _LEAST * view.plain)):
                decided.depths[row], decided.choice[row] = depth, index
                asked.append(view.sequences[row])
        return tuple(asked)

    def _cost(self, name: str, view: View, decided: Decided, index: int, row: int, depth: int) -> float:
        awake = bool(((decided.choice == index) & (decided.depths > 0)).any())
        passes = self._prices.drafting(name, view.open, depth)
        cost = float(passes[-1 if awake else 0].sum())
        cost += float(self._waking.catching_up(name, view.slots[row : row + 1], view.known[row : row + 1])[0])
        if self._forced:
            cost += float(self._prices.extra(view.rows, view.requests, view.context, count=depth)[-1])
        return cost

    def _afford(self, seconds: float) -> bool:
        if seconds > self._seconds:
            return False
        self._seconds -= seconds
        return True
