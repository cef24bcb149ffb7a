"""The arithmetic of betting: what guesses cost in seconds, and which set of them is worth it.

Guesses are taken in the order of what they bring, so that any number of them is the best set of that size and, since
survival never rises along a path, closed under parents. How many is found by looking at every number: a machine's cost
is a staircase, and stopping at the first guess that does not pay would stop below a step that does. Knows no drafter
and learns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from wager.economics.ratings import Bools, Floats
from wager.economics.surface import StepSurface
from wager.types import Draft

_FRESH = 32
"""Curves are asked for again after this many steps: the surface learns and contexts grow."""

_MEMORY = 0.995
"""Of what a second is worth, from one step to the next."""

_FINE = 32
"""Up to this many extra rows every one is priced, beyond it fewer and fewer."""


def best_count(gains: Floats, seconds: Floats, price: float) -> int:
    """How many of the first guesses to take: argmax over n of gains[:n].sum() - price x seconds[n].

    `gains` [N] in the order of admission, `seconds` [N + 1] what n guesses take beyond none. Every n is looked at.
    """
    profit = gains.cumsum() - price * (seconds[1:] - seconds[0])
    best = int(profit.argmax()) if len(profit) else 0
    return best + 1 if len(profit) and profit[best] > 0 else 0


@dataclass(frozen=True, slots=True)
class Selection:
    """Which guesses of several groups of drafts were taken (as masks like the gains), how many, and what they bring."""

    taken: tuple[Bools, ...]
    count: int
    gain: float


def select(gains: Sequence[Floats], seconds: Callable[[int], Floats], *, price: float) -> Selection:
    """The best set of guesses over all groups: `gains` [drafts, nodes] by group, 0 where there is no guess.

    `seconds(n)` gives what 0 .. n guesses take beyond none.
    """
    flat = np.concatenate([each.ravel() for each in gains]) if len(gains) > 1 else gains[0].ravel()
    order = (-flat).argsort(kind="stable")
    ranked = flat[order]
    ranked = ranked[: int(np.count_nonzero(ranked))]
    count = best_count(ranked, seconds(len(ranked)), price)
    taken = np.zeros(len(flat), dtype=bool)
    taken[order[:count]] = True
    masks, start = [], 0
    for each in gains:
        masks.append(taken[start : start + each.size].reshape(each.shape))
        start += each.size
    return Selection(tuple(masks), count, float(ranked[:count].sum()))


def kept(drafts: Sequence[Draft], taken: Bools) -> dict[str, Draft]:
    """What is left of drafts of which the `taken` [drafts, nodes] were taken; nothing of those without any."""
    left = {}
    for row, (draft, count) in enumerate(zip(drafts, taken.sum(axis=1).tolist(), strict=True)):
        if count == len(draft.tokens):
            left[draft.sequence] = draft
        elif count:
            left[draft.sequence] = keep(draft, taken[row].nonzero()[0].tolist())
    return left


def keep(draft: Draft, nodes: Sequence[int]) -> Draft:
    """The draft with these nodes alone, ascending and closed under parents; a chain keeps a beginning."""
    size = len(nodes)
    if not size or nodes[-1] == size - 1:
        return draft.cut(size)
    place = {-1: -1, **{node: index for index, node in enumerate(nodes)}}
    return Draft(
        draft.sequence,
        tuple(draft.tokens[node] for node in nodes),
        tuple(place[draft.parents[node]] for node in nodes),
        tuple(draft.scores[node] for node in nodes) if draft.scores else (),
        draft.drafter,
        None if draft.law is None else draft.law[list(nodes)],
    )


class Prices:
    """A surface's seconds as arrays, asked for rarely: call `tick` once a step."""

    def __init__(self, surface: StepSurface) -> None:
        self.surface = surface
        self._steps = 0
        self._extra: dict[tuple[int, int, int], Floats] = {}
        self._plain: dict[tuple[int, int], float] = {}
        self._drafting: dict[tuple[str, int, int], Floats] = {}

    def tick(self) -> None:
        """A step begins."""
        self._steps += 1
        if self._steps % _FRESH == 0:
            self._extra.clear()
            self._plain.clear()
            if self._steps % (2 * _FRESH) == 0:
                self._drafting.clear()

    def plain(self, requests: int, context: int) -> float:
        """Seconds of a step that decodes one token for each of `requests`, with `context` cached positions in all."""
        key = requests, _coarse(context)
        if key not in self._plain:
            self._plain[key] = self.surface.seconds(requests, requests, context)
        return self._plain[key]

    def extra(self, rows: int, requests: int, context: int, *, count: int) -> Floats:
        """Seconds that 0, 1, ... `count` rows add to a step of `rows`; never falling. [count + 1]"""
        key = rows, requests, _coarse(context)
        curve = self._extra.get(key)
        if curve is None or len(curve) <= count:
            most = 1 << max(3, count.bit_length())
            knots = _knots(most)
            at = np.array([self.surface.seconds(rows + knot, requests, context) for knot in knots])
            curve = np.interp(np.arange(most + 1), knots, np.maximum.accumulate(at - at[0]))
            self._extra[key] = curve
        return curve[: count + 1]

    def drafting(self, drafter: str, requests: int, depth: int) -> Floats:
        """What the j-th sequence that drafts at depth k adds: seconds [requests, depth], rows j - 1, columns k - 1.

        Summed over a ragged set of depths this is the sum over depths of one pass for those who draft that deep.
        """
        key = drafter, 1 << (requests - 1).bit_length(), depth
        marginal = self._drafting.get(key)
        if marginal is None:
            knots = _knots(key[1])
            ask = self.surface.draft_seconds
            at = np.array([[ask(drafter, j, k) if j and k else 0.0 for k in range(depth + 1)] for j in knots])
            passes = np.diff(at, axis=1)
            every = np.arange(key[1] + 1)
            dense = np.stack([np.interp(every, knots, passes[:, k]) for k in range(depth)], axis=1)
            marginal = self._drafting[key] = np.diff(dense, axis=0)
        return marginal[:requests]


def _coarse(context: int) -> int:
    """Contexts within a few per cent of each other share a curve."""
    return int(8 * np.log2(context + 64.0))


def _knots(most: int) -> list[int]:
    """0, 1, 2, ... one by one at first, then ever fewer, and `most`."""
    knots = list(range(min(most, _FINE) + 1))
    while knots[-1] < most:
        knots.append(min(most, knots[-1] + max(1, knots[-1] // 16)))
    return knots


class Going:
    """What a second is worth: the plain rate of the batch at hand, times how much faster the last steps went.

    The factor is kept by size of batch (in powers of two) and starts at 1, which is never too dear: a guess that pays
    at the plain rate brings a gain, if not yet the largest. Both sides are expectations, so luck does not move it.
    """

    def __init__(self) -> None:
        self._worth = [0.0] * 32
        self._plain = [0.0] * 32

    def factor(self, live: int) -> float:
        """How many times the plain rate, at least 1."""
        size = live.bit_length()
        return max(1.0, self._worth[size] / self._plain[size]) if self._plain[size] else 1.0

    def learn(self, live: int, *, worth: float, plain: float) -> None:
        """A step of `live` sequences promised `worth`; plain decoding would have promised `plain` in its seconds."""
        size = live.bit_length()
        self._worth[size] = worth + _MEMORY * self._worth[size]
        self._plain[size] = plain + _MEMORY * self._plain[size]
