"""What guesses cost in seconds, and what a second is worth. Knows no drafter's skill and no sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wager.economics.latency_model import LatencyModel

_FRESH = 32
"""Prices are asked for again after this many steps: the surface learns and contexts grow."""

_MEMORY = 0.98
"""Of what a second is worth, from one step to the next."""

_HURDLE_RATE = 0.1

NEAR = 4
"""Rows on either side within which the price of a row at the margin is looked for."""

_FINE = 16
"""Up to this many extra rows every one is priced, beyond it fewer and fewer."""


class Prices:
    """A surface's seconds, asked for rarely: call `tick` once a step."""

    def __init__(self, surface: LatencyModel) -> None:
        self.surface = surface
        self._steps = 0
        self._extra: dict[tuple[int, int, int], list[float]] = {}
        self._plain: dict[tuple[int, int], float] = {}
        self._draft: dict[tuple[str, int, int], float] = {}
        self._marginal: dict[tuple[str, int, int], NDArray[np.float64]] = {}

    def tick(self) -> None:
        """A step begins."""
        self._steps += 1
        if self._steps % _FRESH == 0:
            self._extra.clear()
            self._plain.clear()
            self._draft.clear()
            self._marginal.clear()

    def plain(self, requests: int, context: int) -> float:
        """Seconds of a step that decodes one token for each of `requests`, with `context` cached positions in all."""
        key = requests, _coarse(context)
        if key not in self._plain:
            self._plain[key] = self.surface.seconds(requests, requests, context)
        return self._plain[key]

    def extra(self, rows: int, requests: int, context: int, *, count: int) -> list[float]:
        """Seconds that 0, 1, ... `count` rows or more add to a step of `rows`; never falling."""
        key = rows, requests, _coarse(context)
        curve = self._extra.get(key)
        if curve is None or len(curve) <= count:
            knots = _knots(1 << max(3, count.bit_length()))
            at = np.array([self.surface.seconds(rows + knot, requests, context) for knot in knots])
            dense = np.interp(np.arange(knots[-1] + 1), knots, np.maximum.accumulate(at - at[0]))
            curve = self._extra[key] = dense.tolist()
        return curve

    def draft(self, drafter: str, requests: int, depth: int) -> float:
        """Seconds of drafting for `requests` sequences, each to `depth`."""
        if requests == 0 or depth == 0:
            return 0.0
        key = drafter, requests, depth
        seconds = self._draft.get(key)
        if seconds is None:
            seconds = self._draft[key] = self.surface.draft_seconds(drafter, requests, depth)
        return seconds

    def ragged(self, drafter: str, depths: Sequence[int]) -> float:
        """Seconds of drafting to `depths`, one for each sequence: at every depth a pass for those who go that deep."""
        total, done, left = 0.0, 0, len(depths)
        for depth in sorted(depths):
            if depth > done:
                total += self.draft(drafter, left, depth) - self.draft(drafter, left, done)
                done = depth
            left -= 1
        return total

    def marginal(self, drafter: str, requests: int, depth: int) -> NDArray[np.float64]:
        """What the j-th sequence that drafts at depth k adds: seconds [requests, depth], rows j - 1, columns k - 1."""
        key = drafter, requests, depth
        if key in self._marginal:
            return self._marginal[key]
        knots = [0, *sorted({min(requests, 1 << power) for power in range(requests.bit_length() + 1)})]
        at = np.array([[self.draft(drafter, j, k) for k in range(depth + 1)] for j in knots])
        passes = np.diff(at, axis=1)
        every = np.arange(requests + 1)
        dense = np.stack([np.interp(every, knots, passes[:, k]) for k in range(depth)], axis=1)
        marginal = self._marginal[key] = np.diff(dense, axis=0)
        return marginal


def _coarse(context: int) -> int:
    """Contexts within a few per cent of each other share a curve."""
    return int(8 * math.log2(context + 64))


def _knots(most: int) -> list[int]:
    """0, 1, 2, ... one by one at first, then ever fewer, and `most`."""
    knots = list(range(min(most, _FINE) + 1))
    while knots[-1] < most:
        knots.append(min(most, knots[-1] + max(1, knots[-1] // 8)))
    return knots


class Rates:
    """What a second and a row are worth lately, by size of batch (in powers of two).

    Maximising tokens - price x seconds in every step maximises tokens over seconds in the long run, if the price is the
    rate that this brings (Dinkelbach's method). It is kept as a factor on the plain rate of the batch at hand, which
    starts at 1, and that is never too dear: a guess that pays at the plain rate brings a gain, if not yet the largest.
    Both sides are expectations, so luck does not move it.
    """

    def __init__(self) -> None:
        self._worth, self._plain = [0.0] * 32, [0.0] * 32
        self._hurdles: dict[int, float] = {}

    def factor(self, live: int) -> float:
        """How many times the plain rate, at least 1."""
        size = live.bit_length()
        return max(1.0, self._worth[size] / self._plain[size]) if self._plain[size] else 1.0

    def hurdle(self, live: int) -> float | None:
        """What a row must bring, in tokens' worth; None while no step taught it."""
        return self._hurdles.get(live.bit_length())

    def learn(self, live: int, *, worth: float, plain: float) -> None:
        """A step of `live` sequences promised `worth`; plain decoding would have promised `plain` in its seconds."""
        size = live.bit_length()
        self._worth[size] = worth + _MEMORY * self._worth[size]
        self._plain[size] = plain + _MEMORY * self._plain[size]

    def learn_hurdle(self, live: int, *, extra: Sequence[float], rows: int, cut: float | None, price: float) -> None:
        """A step took `rows` guesses where n would cost extra[n] seconds; `cut` is what the last that found room
        brought. On a staircase a row is worth anything from the price of the rows below it to that of the rows above,
        and then as much as the last one brings."""
        if rows:
            low = max(0, rows - NEAR)
            below = (extra[rows] - extra[low]) / (rows - low)
        else:
            below = min([extra[each] / each for each in range(1, NEAR + 1)])
        hurdle = price * below
        if cut is not None:
            hurdle = max(hurdle, min(cut, price * (extra[rows + NEAR] - extra[rows]) / NEAR))
        size = live.bit_length()
        before = self._hurdles.get(size, hurdle)
        self._hurdles[size] = before + _HURDLE_RATE * (hurdle - before)
