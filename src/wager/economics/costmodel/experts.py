"""How many distinct experts a pass touches: uniform routing, by popularity, and with the locality of text.

Pure formulas over token counts, which may be real numbers so that prices can be derivatives. Knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from wager.errors import UsageError

LOCALITY = 0.79
"""Measured exponent of one sequence's run: T tokens in a row touch as many experts as T^0.79 unrelated ones (by
popularity, Qwen3.6-35B-A3B). With uniform popularity 0.74 fits the same measurement, since it must absorb the skew."""


def distinct(count: int, active: int, tokens: float) -> float:
    """Expected distinct experts of `count` when each of `tokens` picks `active` different ones: E(1 - (1 - k/E)^t)."""
    return count * -math.expm1(tokens * math.log1p(-active / count)) if active < count else count * float(tokens > 0)


def with_replacement(count: int, active: int, tokens: float) -> float:
    """The variant in which a token may pick an expert twice: E(1 - (1 - 1/E)^(kt)). For published figures only."""
    return count * -math.expm1(active * tokens * math.log1p(-1 / count)) if count > 1 else float(tokens > 0)


def by_popularity(popularity: Sequence[float] | NDArray[np.float64], tokens: float) -> float:
    """Expected distinct experts where a token picks expert e with probability p_e, k in all: sum 1 - (1 - p_e)^t."""
    return float(np.sum(-np.expm1(tokens * np.log1p(-np.minimum(np.asarray(popularity), 1 - 1e-12)))))


def tokens_for(count: int, active: int, share: float) -> float:
    """Tokens at which that share of the experts has been touched: ln(1 - share) / ln(1 - k/E)."""
    return math.log1p(-share) / math.log1p(-active / count)


def knee(count: int, active: int, shared: int, *, ridge: float, bytes_each: float) -> float:
    """Tokens at which an expert layer turns compute-bound: (E + s) b R / (2 (k + s)), R in FLOPs per byte."""
    return (count + shared) * bytes_each * ridge / (2 * (active + shared))


def memory_price(count: int, active: int, shared: int, tokens: float) -> float:
    """d log bytes / d log tokens of an expert layer: t A'(t) / (A(t) + s), below the knee."""
    if active == count:
        return 0.0
    rate = math.log1p(-active / count)
    slope = -count * rate * math.exp(tokens * rate)
    return tokens * slope / (distinct(count, active, tokens) + shared)


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """How tokens choose experts. `popularity` p_e holds per-expert probabilities that sum to k (None: uniform);
    `locality` eta counts T tokens of one sequence as T^eta unrelated ones (1: no locality)."""

    popularity: tuple[float, ...] | None = None
    locality: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.locality <= 1:
            raise UsageError(f"locality = {self.locality!r} is out of range.", "It lies above 0 and at most at 1.")
        if self.popularity is not None and not all(0 <= each <= 1 for each in self.popularity):
            raise UsageError("The popularity of an expert is a probability.", "Give values between 0 and 1.")

    def effective(self, rows: float) -> float:
        """Unrelated tokens that `rows` consecutive tokens of one sequence are worth."""
        return rows if self.locality == 1 or rows <= 0 else rows**self.locality

    def hit(self, count: int, active: int, tokens: float) -> float:
        """Expected distinct experts for that many unrelated tokens."""
        if self.popularity is None:
            return distinct(count, active, tokens)
        if len(self.popularity) != count:
            raise UsageError(
                f"The popularity lists {len(self.popularity)} experts; a layer has {count}.",
                "Give one probability for each expert of a layer.",
            )
        if abs(sum(self.popularity) - active) > 0.01 * active:
            raise UsageError(
                f"The popularity sums to {sum(self.popularity):.4g}; a token chooses {active} experts.",
                "Give probabilities that a token chooses an expert, not shares of all choices.",
            )
        return by_popularity(self.popularity, tokens)


@lru_cache(maxsize=4096)
def loaded(slots: int, share: float, ranks: int) -> float:
    """Expected maximum over `ranks` of how many of their `slots` experts are touched, each with probability `share`.

    The step waits for the rank with most experts to read. Ranks are taken as independent.
    """
    if ranks == 1 or share <= 0 or share >= 1:
        return slots * min(max(share, 0.0), 1.0)
    k = np.arange(slots + 1)
    logs = np.array([math.lgamma(slots + 1) - math.lgamma(i + 1) - math.lgamma(slots - i + 1) for i in k])
    law = np.exp(logs + k * math.log(share) + (slots - k) * math.log1p(-share))
    below = np.minimum(np.cumsum(law), 1.0)
    return float(np.sum(1 - below[:-1] ** ranks))
