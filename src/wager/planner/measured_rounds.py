"""Rounds of a fixed depth as `wager acceptance` measured them: tokens, and how many draft tokens were really made.

A drafter may make fewer draft tokens than requested, or none; the rows of a step are then a sum over its requests, and
its seconds are averaged over that sum, since they are not linear in rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_POINTS = 16
"""Equally likely sums that stand for the distribution of the rows of a step."""


@dataclass(frozen=True, slots=True)
class MeasuredRound:
    """The rounds of one depth: mean `tokens` per round, bonus token included; `lengths` are the shares of rounds with
    0, 1, ... depth draft tokens, which add up to 1."""

    tokens: float
    lengths: tuple[float, ...]

    @property
    def drafted(self) -> float:
        """Draft tokens per round."""
        return sum(length * share for length, share in enumerate(self.lengths))

    def rows(self, batch: float) -> tuple[float, ...]:
        """Rows per request in a step of `batch` requests with independent lengths: equally likely values, that is, the
        distribution of the sum at evenly spaced quantiles, shifted so that their mean is exact."""
        count = max(1, round(batch))
        if max(self.lengths) == 1.0:
            return (1.0 + self.drafted,)
        size = count * (len(self.lengths) - 1) + 1
        total = np.fft.irfft(np.fft.rfft(self.lengths, size) ** count, size)
        below = np.cumsum(np.clip(total, 0.0, None))
        sums = np.searchsorted(below / below[-1], (np.arange(_POINTS) + 0.5) / _POINTS)
        means = sums / count
        return tuple((1.0 + np.maximum(0.0, means + self.drafted - means.mean())).tolist())
