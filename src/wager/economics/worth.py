"""What a token of a sequence is worth: the objective, turned into one weight per sequence.

Throughput: its request's weight w. Latency: the time per token averaged over whoever is being served, sum w C / m, is
least where a token of a sequence that gets m tokens a step counts w / m^2: who is served slowly counts more, and the
slowest gain most. SLO: w, times a factor that grows while the sequence is slower than its target and relaxes while it
is faster (a multiplier of the constraint); who cannot be brought there is given up rather than paid for by the others.
Knows no prices and no drafter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from wager.economics.ratings import Floats, Ints
from wager.errors import UsageError

Objective = Literal["throughput", "latency"] | tuple[Literal["slo"], float]

_RATE = 0.04
_UP, _DOWN, _MOST = 1.05, 0.98, 8.0
_AIM = 0.93
"""The SLO is aimed at with a margin, since paces scatter."""

_GIVE_UP = 80
"""Steps that a sequence may stay late at the greatest factor."""

_UNLIKE = 20.0
"""Under the latency objective sequences count at most this much more or less than the average one."""


class Worth:
    """Weights by slot. `weights` gives a request's weight by its id (1 without); SLO seconds are per token."""

    def __init__(self, objective: Objective = "throughput", weights: Mapping[str, float] | None = None) -> None:
        _check(objective, weights or {})
        self.objective = objective
        self.target = objective[1] if isinstance(objective, tuple) else 0.0
        self._weights = dict(weights or {})
        self._base, self._tokens, self._press, self._strain = (np.ones(64) for _ in range(4))
        self._mean = 1.5
        self._seconds = 0.0

    # ---- slots ----------------------------------------------------------------------------------------------------

    def fit(self, slots: int) -> None:
        """Make room for slots 0 .. slots - 1."""
        while slots > len(self._base):
            self._base, self._tokens, self._press, self._strain = (
                np.concatenate([values, np.ones_like(values)])
                for values in (self._base, self._tokens, self._press, self._strain)
            )

    def open(self, slot: int, sequence: str) -> None:
        """A sequence starts in a slot; it is taken to be an average one."""
        self._base[slot] = self._weights.get(sequence.partition("#")[0], 1.0)
        self._tokens[slot], self._press[slot], self._strain[slot] = self._mean, 1.0, 0.0

    def close(self, slot: int) -> None:
        """Nothing is kept of a sequence that ended."""

    def weigh(self, request: str, weight: float) -> None:
        """Give a request its weight, before its first step."""
        _check("throughput", {request: weight})
        self._weights[request] = weight

    def forget(self, request: str) -> None:
        """The request ended."""
        self._weights.pop(request, None)

    # ---- the weights ------------------------------------------------------------------------------------------------

    def of(self, slots: Ints) -> Floats:
        """What one token is worth, by sequence."""
        worth: Floats = self._base[slots]
        if self.objective == "latency":
            worth = worth * np.clip((self._mean / self._tokens[slots]) ** 2, 1 / _UNLIKE, _UNLIKE)
        elif self.target:
            worth = worth * self._press[slots]
        return worth

    def learn(self, tokens: Mapping[int, int]) -> None:
        """How many tokens the sequence in each slot got in the step."""
        if self.objective == "throughput" or not tokens:
            return
        slots, got = np.array([*tokens]), np.array([*tokens.values()])
        self._tokens[slots] += _RATE * (got - self._tokens[slots])
        self._mean += _RATE * (float(got.mean()) - self._mean)
        if self.target and self._seconds:
            late = self._seconds > _AIM * self.target * self._tokens[slots]
            strain = self._strain[slots] + (late & (self._press[slots] >= _MOST))
            press = self._press[slots] * np.where(late & (strain < _GIVE_UP), _UP, _DOWN)
            self._press[slots], self._strain[slots] = np.clip(press, 1.0, _MOST), strain

    def clock(self, seconds: float) -> None:
        """How long the step took."""
        self._seconds += (_RATE if self._seconds else 1.0) * (seconds - self._seconds)


def _check(objective: Objective, weights: Mapping[str, float]) -> None:
    named = objective in ("throughput", "latency")
    timed = isinstance(objective, tuple) and len(objective) == 2 and objective[0] == "slo" and objective[1] > 0
    if not named and not timed:
        raise UsageError(
            f"objective = {objective!r} is not known.", "Use throughput, latency, or slo with its seconds per token."
        )
    for request, weight in weights.items():
        if not (np.isfinite(weight) and weight > 0):
            raise UsageError(f"The weight of request {request!r} is {weight!r}.", "Weights are numbers above 0.")
