"""Probes: small bets that are not expected to pay, so that a closed door can open again.

An allowance of a fixed share of the time that passes is all that may be spent on them, so what they cost is bounded
whatever happens. Two kinds: a guess for a sequence that is left plain, to see whether the drafter would be right by
now, and a plain step where every step speculates, so that the price of doing nothing stays measured.
"""

from __future__ import annotations

ALLOWANCE = 0.004
"""Share of the running time that probes may cost."""

_SAVED = 1500
"""Steps of allowance that can be saved up: a burst costs a few steps at most."""

_PLAIN_FIRST, _PLAIN_EVERY = 8, 128
"""Steps of the same size of batch, all speculating, before the first is taken plain, and before a later one; every
time it takes twice as many."""

_LEAST = 0.005
"""A probe counts as at least this share of a plain step, so that free drafters are not probed in every step."""


class Allowance:
    """Seconds that may be spent on finding out."""

    def __init__(self, share: float = ALLOWANCE) -> None:
        self._share = share
        self._seconds = 0.0
        self._streak: dict[int, int] = {}
        self._patience: dict[int, int] = {}

    def earn(self, seconds: float) -> None:
        """A step took this long."""
        self._seconds = min(self._seconds + self._share * seconds, self._share * _SAVED * seconds)

    def any(self, plain: float) -> bool:
        """Whether the cheapest probe can be paid for; `plain` is what a plain step takes."""
        return self._seconds >= _LEAST * plain

    def spend(self, seconds: float, *, plain: float) -> bool:
        """Pay for a probe, if that is possible."""
        cost = max(seconds, _LEAST * plain)
        if cost > self._seconds:
            return False
        self._seconds -= cost
        return True

    def plain_step(self, live: int, *, speculates: bool, lost: float, plain: float) -> bool:
        """Whether a step of `live` sequences should be taken plain, which loses `lost` seconds."""
        size = live.bit_length()
        self._streak[size] = streak = self._streak.get(size, 0) + 1 if speculates else 0
        patience = self._patience.get(size, _PLAIN_FIRST)
        if streak < patience or not self.spend(lost, plain=plain):
            return False
        self._streak[size], self._patience[size] = 0, min(_PLAIN_EVERY, 2 * patience)
        return True
