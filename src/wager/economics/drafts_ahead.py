"""What a step waits for drafts that are made while the step before it runs (speculative speculative decoding, arXiv
2603.03251), and how often they are ready.

A draft that is ready (a hit) costs what drafting took longer than the step beside it; one that is not (a miss) is made
while the target waits. In a batch the step waits for the hits together, and for the misses together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from wager.economics.latency import LatencyModel
from wager.economics.policy.base import SMOOTHING
from wager.types import NO_TENANT, StepRecord

ALTERNATIVE_RATES = (0.69, 0.18)
"""How often the second choice of a drafter is right, and the third, where its first is wrong, under `match`: the lower
ends of what was found on synthetic rows at temperature 1 (0.69 to 0.79, with the third 0.87 to 0.94)."""

_PRIOR_RATE, _PRIOR_WEIGHT = 0.5, 4.0
"""The hit rate that is assumed until there are drafts, and how many of them it counts for."""

_MEMORY = 200.0  # drafts that count of those seen
_CALLS_KEPT = 64  # of the drafter, until they are learned from


@dataclass(slots=True)
class HitRate:
    """The share of drafts that were ready, learned; older ones count less."""

    likely: float = _PRIOR_RATE
    drafts: int = 0

    def learn(self, *, ready: bool) -> None:
        self.drafts += 1
        self.likely += (ready - self.likely) / min(_MEMORY, _PRIOR_WEIGHT + self.drafts)


@dataclass(slots=True)
class AheadFigures:
    """What a drafter that drafts ahead, for `rows` sequences at a time at least, did so far. `hits` and `misses` count
    drafts that were ready and those that were not; `waited_s` is what requests for drafts took, as the step saw it,
    `drafted_s` what the drafter's thread spent on drafting; `branches` counts outcomes for which drafts were made.
    `whose`: the tenant whose sequences run, None: those of several. How often drafts are ready tells how well its texts
    are guessed, so each has a rate of its own."""

    rows: int = 1
    hits: int = 0
    misses: int = 0
    waited_s: float = 0.0
    drafted_s: float = 0.0
    branches: int = 0
    whose: str | None = NO_TENANT
    rates: dict[str | None, HitRate] = field(default_factory=dict)
    calls: deque[tuple[int, int, float]] = field(default_factory=lambda: deque(maxlen=_CALLS_KEPT))
    """The latest calls of the drafter that nobody has learned from: sequences, the depth of the deepest, seconds."""

    def requested(self, *, ready: bool) -> None:
        """A draft that was ready, or was not."""
        self.hits, self.misses = self.hits + ready, self.misses + (not ready)
        self.rate.learn(ready=ready)

    @property
    def rate(self) -> HitRate:
        """The hit rate of the tenant whose sequences run."""
        return self.rates.setdefault(self.whose, HitRate())

    def drafted(self, sequences: int, depth: int, seconds: float, *, whole: bool = True) -> None:
        """A call of the drafter; nothing is learned from one that was ended early (`whole` is False)."""
        self.drafted_s += seconds
        if whole:
            self.calls.append((sequences, depth, seconds))

    @property
    def hit_rate(self) -> float | None:
        """Hits among all requests but the first of a sequence; None before any."""
        requests = self.hits + self.misses
        return self.hits / requests if requests else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        names = ("hits", "misses", "waited_s", "drafted_s", "branches", "hit_rate")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        rate = "" if self.hit_rate is None else f" ({self.hit_rate:.0%})"
        return (
            f"{self.hits} drafts ready{rate}, {self.misses} not; "
            f"waited {self.waited_s:.2f} s for {self.drafted_s:.2f} s of drafting"
        )


def waited_seconds(*, prepared: float, step: float, redrafted: float, requests: int, hit_rate: float) -> float:
    """What a step of `requests` sequences waits for drafts: if any was ready, for what preparing took longer than the
    step beside it; if any was not, for drafting again, `redrafted` seconds for those that are expected then."""
    any_hit, any_miss = 1 - (1 - hit_rate) ** requests, 1 - hit_rate**requests
    return any_hit * max(0.0, prepared - step) + any_miss * redrafted


def expected_misses(requests: int, hit_rate: float) -> int:
    """The misses of a batch, given that there is one: at least 1."""
    any_miss = 1 - hit_rate**requests
    return max(1, round(requests * (1 - hit_rate) / any_miss)) if any_miss > 0 else 1


def outcome_chances(survival: Sequence[float]) -> list[tuple[float, int, int]]:
    """The outcomes of a round whose guesses have the survival S_1, S_2, ...: probability, accepted guesses, and the
    rank of the drafter's choice that comes behind them. Either all are accepted and the drafter's own next token comes
    (rank 0), S_k a_(k+1) with the last guess's rate for the next; or guess j + 1 is the first wrong one and the
    drafter's choice of another rank should have been it, (S_j - S_(j+1)) ALTERNATIVE_RATES."""
    reached = (1.0, *survival)
    next_rate = reached[-1] / reached[-2] if len(reached) > 1 and reached[-2] else 0.0
    chances = [(reached[-1] * next_rate, len(survival), 0)]
    for accepted, (before, after) in enumerate(pairwise(reached)):
        chances += [((before - after) * share, accepted, rank) for rank, share in enumerate(ALTERNATIVE_RATES, 1)]
    return chances


class DraftsAheadLatency(LatencyModel):
    """`latency` for an engine where drafters draft ahead, with these figures: their seconds are what a step waits for
    them."""

    def __init__(self, latency: LatencyModel, figures: Mapping[str, AheadFigures]) -> None:
        self._latency, self._figures = latency, figures
        self._context = 0.0  # cached positions of a sequence

    @property
    def learns(self) -> bool:
        """Hit rates are learned, whatever else is."""
        return True

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        """See LatencyModel."""
        return self._latency.seconds(rows, requests, context_sum)

    def seconds_by_rows(self, rows: Sequence[int], requests: int, context_sum: int) -> list[float]:
        """See LatencyModel."""
        return self._latency.seconds_by_rows(rows, requests, context_sum)

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        """See LatencyModel. For a drafter that drafts ahead, the seconds that the step waits for it."""
        drafting, figures = self._latency.draft_seconds, self._figures.get(drafter)
        if figures is None or requests <= 0 or depth <= 0:
            return drafting(drafter, requests, depth)
        return waited_seconds(
            prepared=drafting(drafter, max(requests, figures.rows), depth + 1),
            step=self._latency.seconds(requests * (depth + 1), requests, round(requests * self._context)),
            redrafted=drafting(drafter, expected_misses(requests, figures.rate.likely), depth),
            requests=requests,
            hit_rate=figures.rate.likely,
        )

    def difference_deviations(
        self, rows: int, others: Sequence[int], *, requests: int, context_sum: int
    ) -> list[float]:
        """See LatencyModel."""
        return self._latency.difference_deviations(rows, others, requests=requests, context_sum=context_sum)

    def observe(self, record: StepRecord) -> None:
        """See LatencyModel."""
        if record.context_lens:
            context = sum(record.context_lens) / len(record.context_lens)
            self._context += (SMOOTHING if self._context else 1.0) * (context - self._context)
        self._latency.observe(record)

    def observe_draft(self, drafter: str, requests: int, depth: int, *, seconds: float) -> None:
        """See LatencyModel. For a drafter that drafts ahead, its own calls are learned from, not what the step saw."""
        figures = self._figures.get(drafter)
        calls = [(requests, depth, seconds)] if figures is None else list(figures.calls)
        for sequences, deepest, took in calls:
            self._latency.observe_draft(drafter, sequences, deepest, seconds=took)
        if figures is not None:
            figures.calls.clear()
