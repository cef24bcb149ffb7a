"""What a token of a sequence is worth: the objective, turned into one weight per sequence.

Throughput: its request's weight w. Latency: the time per token averaged over whoever is being served, sum w C / m, is
least where a token of a sequence that gets m tokens a step counts w / m^2: who is served slowly counts more, and the
slowest gain most. SLO: w, times a factor that grows while the sequence is slower than its target and relaxes while it
is faster (a multiplier of the constraint); who cannot be brought there is given up rather than paid for by the others.
Knows no prices and no drafter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from wager.errors import UsageError

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6}
"""Seconds of each unit of time; the micro sign and the Greek letter look alike."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What a policy maximises; `seconds_per_token` is the target of an SLO, 0 for the other kinds."""

    kind: Literal["throughput", "latency", "slo"] = "throughput"
    seconds_per_token: float = 0.0

    def __post_init__(self) -> None:
        known = self.kind in ("throughput", "latency", "slo")
        if not known or (self.kind == "slo") != (self.seconds_per_token > 0):
            raise UsageError(
                f"objective = {self.kind!r} with {self.seconds_per_token!r} seconds per token is not possible.",
                "Use throughput, latency, or slo with its seconds per token, above 0.",
            )


THROUGHPUT = Objective()


def parse_objective(text: str) -> Objective:
    """`throughput`, `latency` or `slo:TIME` (per token, in s, ms, us or µs); UsageError for anything else."""
    if text in ("throughput", "latency"):
        return Objective("latency") if text == "latency" else THROUGHPUT
    kind, _, time = text.partition(":")
    if kind != "slo":
        raise UsageError(f"objective = {text!r} is not known.", "Use throughput, latency, or slo:20ms (per token).")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(\D+)", time)
    if not found or found[2] not in _UNITS or not float(found[1]):
        raise UsageError(f"objective = {text!r} has no time above 0.", "Write it with its unit: slo:20ms, slo:500us.")
    return Objective("slo", float(found[1]) * _UNITS[found[2]])


_RATE = 0.04
_UP, _DOWN, _MOST = 1.05, 0.98, 8.0
_AIM = 0.93
"""The SLO is aimed at with a margin, since paces scatter."""

_GIVE_UP = 80
"""Steps that a sequence may stay late at the greatest factor."""

_UNLIKE = 20.0
"""Under the latency objective sequences count at most this much more or less than the average one."""


class Merit:
    """One sequence: `weight`, `tokens` a step lately, the SLO's factor `press`, and steps late at its greatest."""

    __slots__ = ("press", "strain", "tokens", "weight")

    def __init__(self, weight: float, tokens: float) -> None:
        self.weight, self.tokens, self.press, self.strain = weight, tokens, 1.0, 0


class Worth:
    """What tokens are worth; SLO seconds are per token."""

    def __init__(self, objective: Objective) -> None:
        self._even = objective.kind == "throughput"
        self._target = objective.seconds_per_token
        self._mean = 1.5  # tokens a step of an average sequence
        self._seconds = 0.0  # of a step

    def open(self, weight: float) -> Merit:
        """A sequence starts; it is taken to be an average one."""
        return Merit(weight, self._mean)

    def of(self, merit: Merit) -> float:
        """What one token is worth."""
        if self._even:
            return merit.weight
        if self._target:
            return merit.weight * merit.press
        return merit.weight * min(_UNLIKE, max(1 / _UNLIKE, (self._mean / merit.tokens) ** 2))

    def learn(self, merit: Merit, tokens: int) -> None:
        """How many tokens the sequence got in the step."""
        if self._even:
            return
        merit.tokens += _RATE * (tokens - merit.tokens)
        self._mean += 0.2 * _RATE * (tokens - self._mean)
        if self._target and self._seconds:
            late = self._seconds > _AIM * self._target * merit.tokens
            merit.strain = 0 if not late else merit.strain + (merit.press >= _MOST)
            factor = _UP if late and merit.strain < _GIVE_UP else _DOWN
            merit.press = min(_MOST, max(1.0, merit.press * factor))

    def clock(self, seconds: float) -> None:
        """How long the step took."""
        self._seconds += (_RATE if self._seconds else 1.0) * (seconds - self._seconds)
