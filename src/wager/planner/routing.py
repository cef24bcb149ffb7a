"""How a router chooses experts: how many distinct ones a pass reads, by formula, and popularity and locality measured
from the experts chosen at every position of some texts.

Two curves are counted for T tokens: distinct experts of a layer over T consecutive tokens of one text, and over one
token each of T texts. By popularity p_e unrelated tokens choose sum 1 - (1 - p_e)^T; a run of T tokens chooses as many
as T^X unrelated ones, which defines the locality X. Token counts may be real numbers, so that marginal costs can be
derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wager.errors import UsageError

TOKENS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of tokens whose distinct experts are counted."""

_DRAWS = 1000
"""Random groups of unrelated tokens: their mean is within 1 % of its expectation (2 tokens of 8 experts)."""
_PER_EXPERT = 100
"""Choices for each expert with which the standard error of an even share is a tenth of it."""
_SATURATED = 0.98
"""Counts above this share of all experts ever chosen say nothing about locality and are left out of its fit."""


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


# ---- measured routing ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DistinctCount:
    """Distinct experts of a layer, means over layers: of `run` consecutive tokens of one text, of as many `unrelated`
    ones of as many texts, and of unrelated ones `by_popularity`; None where no text, or not enough of them, has so many
    tokens. `equal_tokens` unrelated tokens choose as many as the run (None: more than all of them)."""

    tokens: int
    run: float | None
    unrelated: float | None
    by_popularity: float
    equal_tokens: float | None


@dataclass(frozen=True, slots=True)
class MeasuredRouting:
    """`popularity` is the probability that a token chooses a layer's most popular expert, its second and so on, means
    over layers, k in all; `layers` the same by expert, layer by layer. `locality` is the X of plan's --locality, None
    where two consecutive tokens already choose nearly all experts."""

    popularity: tuple[float, ...]
    locality: float | None
    layers: tuple[tuple[float, ...], ...]
    counts: tuple[DistinctCount, ...]
    texts: int
    positions: int

    @property
    def is_short(self) -> bool:
        """Whether there are too few positions to tell a rare expert from an even share: fewer than _PER_EXPERT choices
        for each expert of a layer."""
        return self.positions * sum(self.popularity) < _PER_EXPERT * len(self.popularity)

    def expected_in_run(self, tokens: float) -> float:
        """Distinct experts of that many consecutive tokens of one text, by popularity and locality."""
        return distinct_by_popularity(self.popularity, tokens ** (1.0 if self.locality is None else self.locality))

    def as_dict(self) -> dict[str, Any]:
        """Plain values; `wager plan --popularity` reads the popularity and the locality."""
        return {**asdict(self), "counts": [asdict(count) for count in self.counts]}


def measure_routing(texts: Sequence[NDArray[np.int32]], experts: int) -> MeasuredRouting:
    """From [positions, layers, top_k] expert ids of each text, of `experts` to choose from. Unrelated tokens are drawn
    from different texts, a text as often as it has positions. UsageError if no text has two positions."""
    if not any(len(text) > 1 for text in texts):
        raise UsageError("No text has two tokens, so locality cannot be measured.", "Give longer prompts.")
    chosen = [_one_hot(text, experts) for text in texts]
    positions = sum(len(text) for text in texts)
    layers = np.sum([text.sum(axis=0, dtype=np.int64) for text in chosen], axis=0) / positions  # [layers, experts]
    popularity = np.sort(layers, axis=1)[:, ::-1].mean(axis=0)
    rng = np.random.default_rng(0)
    counts = []
    for tokens in TOKENS:
        run = _distinct_in_runs(chosen, tokens)
        equal = None if run is None else _equal_tokens(popularity, run)
        unrelated = _distinct_in_unrelated(chosen, tokens, rng)
        counts.append(DistinctCount(tokens, run, unrelated, distinct_by_popularity(popularity, tokens), equal))
    equal_by_tokens = {count.tokens: count.equal_tokens for count in counts if count.equal_tokens is not None}
    return MeasuredRouting(
        tuple(popularity.tolist()),
        fit_locality(equal_by_tokens),
        tuple(tuple(layer) for layer in layers.tolist()),
        tuple(counts),
        len(texts),
        positions,
    )


def fit_locality(equal_tokens: Mapping[int, float]) -> float | None:
    """X by least squares of log T_eff = X log T, for runs of T tokens that choose as many experts as T_eff unrelated
    ones; at most 1. None without a T above 1."""
    pairs = [(math.log(tokens), math.log(equal)) for tokens, equal in equal_tokens.items() if tokens > 1]
    if not pairs:
        return None
    return min(1.0, sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs))


def _one_hot(text: NDArray[np.int32], experts: int) -> NDArray[np.bool_]:
    """[positions, layers, experts]: whether a position chose an expert."""
    chosen = np.zeros((*text.shape[:2], experts), np.bool_)
    np.put_along_axis(chosen, text.astype(np.int64), True, axis=2)
    return chosen


def _distinct_in_runs(chosen: Sequence[NDArray[np.bool_]], tokens: int) -> float | None:
    """Mean over all runs of consecutive positions and over layers; None if no text is that long."""
    total, runs = 0.0, 0
    for text in chosen:
        if len(text) < tokens:
            continue
        sums = np.concatenate([np.zeros_like(text[:1], np.int32), np.cumsum(text, axis=0, dtype=np.int32)])
        total += float(np.count_nonzero(sums[tokens:] != sums[:-tokens]))
        runs += (len(text) - tokens + 1) * text.shape[1]
    return total / runs if runs else None


def _distinct_in_unrelated(chosen: Sequence[NDArray[np.bool_]], tokens: int, rng: np.random.Generator) -> float | None:
    """Mean over random groups of positions of different texts and over layers; None if there are fewer texts."""
    if len(chosen) < tokens:
        return None
    lengths = np.array([len(text) for text in chosen], np.float64)
    total = 0.0
    for _ in range(_DRAWS):
        group = rng.choice(len(chosen), tokens, replace=False, p=lengths / lengths.sum())
        hit = np.logical_or.reduce([chosen[index][rng.integers(len(chosen[index]))] for index in group])
        total += np.count_nonzero(hit) / len(hit)
    return total / _DRAWS


def _equal_tokens(popularity: NDArray[np.float64], distinct: float) -> float | None:
    """Unrelated tokens that choose that many distinct experts by popularity; None if `distinct` is close to all."""
    if distinct > _SATURATED * np.count_nonzero(popularity):
        return None
    low, high = 0.0, 1.0
    while distinct_by_popularity(popularity, high) < distinct:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if distinct_by_popularity(popularity, middle) < distinct else (low, middle)
    return high
