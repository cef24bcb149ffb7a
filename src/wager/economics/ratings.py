"""Log-odds learned online: tables by depth and confidence, and one rating per sequence on top of them.

The model is log-odds(guess is right) = table[depth, column] + rating[sequence]: an item-response (Rasch) model, the
table saying how hard a kind of guess is and the rating how easy a sequence's text is. Both forget. Knows no drafter.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]

_MOST = 6.0
"""Log-odds stay within this of even."""

WINDOW = 400.0
"""A table cell remembers about this many trials."""

_CHAIN_WEIGHT = 12.0
"""How many trials the depth above counts for."""


def sigmoid(odds: Floats) -> Floats:
    """Chance from log-odds."""
    chance: Floats = 1.0 / (1.0 + np.exp(-odds))
    return chance


def logit(chance: Floats) -> Floats:
    """Log-odds from chance, kept finite."""
    clipped = np.clip(chance, 1e-3, 1 - 1e-3)
    odds: Floats = np.log(clipped / (1 - clipped))
    return odds


class Table:
    """Log-odds per depth and column, from decayed counts; a depth nobody tried continues the one above it.

    `first` are the prior log-odds of each column at depth 1, `slope` how depth d + 1 is expected to differ from depth d
    (both in log-odds), `weight` how many trials the prior at depth 1 counts for.
    """

    def __init__(self, first: Floats, slope: Floats, *, weight: float) -> None:
        shape = (len(slope) + 1, len(first))
        self._first, self._slope, self._weight = first, slope, weight
        self._right, self._tried, self._tilt = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self._news = self._seen = 0.0
        self._age = 0
        self.odds: Floats = np.clip(first[None, :] + np.concatenate([[0.0], np.cumsum(slope)])[:, None], -_MOST, _MOST)

    def learn(self, cells: Ints, right: Floats, ratings: Floats) -> None:
        """Trials by flat cell index (depth * columns + column): right or not, and the rating of their sequence."""
        size = self._tried.size
        for counts, weights in ((self._tried, None), (self._right, right), (self._tilt, ratings)):
            counts += np.bincount(cells, weights, minlength=size).reshape(counts.shape)
        self._news += len(cells)
        self._age += 1
        if self._news and (self._news * 16 >= self._seen or self._age >= 8):
            self._refresh()

    def tried(self, depth: int) -> float:
        """Trials remembered at a depth (1 is the first)."""
        return float(self._tried[depth - 1].sum())

    def _refresh(self) -> None:
        keep = np.minimum(1.0, WINDOW / np.maximum(self._tried, 1e-9))
        for counts in (self._tried, self._right, self._tilt):
            counts *= keep
        self._seen = min(self._seen + self._news, 16 * WINDOW)
        self._news, self._age = 0.0, 0
        known = int(np.flatnonzero(self._tried.any(axis=1)).max(initial=0)) + 1
        prior, weight = self._first, self._weight
        for depth in range(known):
            total = self._tried[depth] + weight
            tilt = self._tilt[depth] / total
            right = (self._right[depth] + weight / (1 + np.exp(-prior - tilt))) / total
            here = np.log(right / (1 - right)) - tilt
            np.minimum(np.maximum(here, -_MOST, out=here), _MOST, out=self.odds[depth])
            if depth < len(self._slope):
                prior, weight = self.odds[depth] + self._slope[depth], _CHAIN_WEIGHT
        deeper = self.odds[known - 1] + np.cumsum(self._slope[known - 1 :])[:, None]
        np.minimum(np.maximum(deeper, -_MOST, out=deeper), _MOST, out=self.odds[known:])


class Ratings:
    """One log-odds offset per slot with its variance, updated by Kalman steps (Elo, in chess).

    A new sequence starts where sequences were seen to end up, with the variance they were seen to have; `drift` is what
    a text may change in a round.
    """

    def __init__(self, *, variance: float, drift: float) -> None:
        self.average, self.population = 0.0, variance
        self._drift = drift
        self.mean = np.zeros(64)
        self.variance = np.full(64, variance)

    def fit(self, slots: int) -> None:
        """Make room for slots 0 .. slots - 1."""
        while slots > len(self.mean):
            self.mean = np.concatenate([self.mean, np.zeros_like(self.mean)])
            self.variance = np.concatenate([self.variance, np.full_like(self.variance, self.population)])

    def open(self, slot: int, sequence: str) -> None:
        """Start a sequence in a slot."""
        del sequence  # all start alike
        self.mean[slot], self.variance[slot] = self.average, self.population

    def close(self, slot: int) -> None:
        """A sequence ended: what it was tells how much sequences differ (one step of expectation-maximisation)."""
        if self.variance[slot] < 0.7 * self.population:
            away = float(self.mean[slot]) - self.average
            self.average += 0.03 * away
            found = away**2 + self.variance[slot]
            self.population = float(np.clip(self.population + 0.03 * (found - self.population), 0.05, 4.0))

    def learn(self, slots: Ints, surprise: Floats, information: Floats) -> None:
        """Rounds of sequences: summed (right - expected), and summed variance of what was expected, of their trials."""
        rounds = np.bincount(slots)
        seen = np.flatnonzero(rounds)
        spread = self.variance[seen] + self._drift * rounds[seen]
        spread = 1.0 / (1.0 / spread + np.bincount(slots, information)[seen])
        self.variance[seen] = np.minimum(spread, self.population)
        mean = self.mean[seen] + spread * np.bincount(slots, surprise)[seen]
        self.mean[seen] = np.minimum(np.maximum(mean, -_MOST), _MOST)
