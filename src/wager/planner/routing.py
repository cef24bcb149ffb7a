"""How many distinct experts a pass reads.

By popularity p_e unrelated tokens choose sum 1 - (1 - p_e)^T; a run of T tokens of one text chooses as many as T^X
unrelated ones, which defines the locality X. Token counts may be real numbers, so that marginal costs can be
derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from wager.errors import UsageError


def distinct_experts(count: int, active: int, tokens: float) -> float:
    """Expected distinct experts of `count` when each of `tokens` picks `active` different ones: E(1 - (1 - k/E)^t)."""
    return count * -math.expm1(tokens * math.log1p(-active / count)) if active < count else count * float(tokens > 0)


def distinct_by_popularity(popularity: Sequence[float] | NDArray[np.float64], tokens: float) -> float:
    """Expected distinct experts where a token picks expert e with probability p_e, k in all: sum 1 - (1 - p_e)^t."""
    return float(np.sum(-np.expm1(tokens * np.log1p(-np.minimum(np.asarray(popularity), 1 - 1e-12)))))


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """How tokens choose experts. `popularity` p_e holds per-expert probabilities that sum to k (None: uniform);
    `locality` eta counts T tokens of one sequence as T^eta unrelated ones (1: no locality)."""

    popularity: tuple[float, ...] | None = None
    locality: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.locality <= 1:
            raise UsageError(f"locality = {self.locality!r} is out of range.", "Give a number above 0 and at most 1.")
        if self.popularity is not None and not all(0 <= probability <= 1 for probability in self.popularity):
            raise UsageError("The popularity of an expert is a probability.", "Give values between 0 and 1.")

    def unrelated_tokens(self, rows: float) -> float:
        """The number of unrelated tokens that choose as many experts as `rows` consecutive tokens of one sequence."""
        return rows if self.locality == 1 or rows <= 0 else rows**self.locality

    def distinct_experts(self, count: int, active: int, tokens: float) -> float:
        """Expected distinct experts for that many unrelated tokens."""
        if self.popularity is None:
            return distinct_experts(count, active, tokens)
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
        return distinct_by_popularity(self.popularity, tokens)


UNIFORM = ExpertRouting()


@lru_cache(maxsize=4096)
def experts_on_fullest_rank(experts_per_rank: int, share: float, ranks: int) -> float:
    """Expected maximum over `ranks` of how many of their experts are read, each with probability `share`.

    An expert-parallel step waits for the rank with most experts to read. Ranks are taken as independent, so this is
    the expected largest of `ranks` binomial counts.
    """
    if ranks == 1 or share <= 0 or share >= 1:
        return experts_per_rank * min(max(share, 0.0), 1.0)
    n = experts_per_rank
    k = np.arange(n + 1)
    logs = np.array([math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in k])
    probs = np.exp(logs + k * math.log(share) + (n - k) * math.log1p(-share))
    below = np.minimum(np.cumsum(probs), 1.0)
    return float(np.sum(1 - below[:-1] ** ranks))
