"""What a step waits for drafts that are made while the step before it runs (speculative speculative decoding, arXiv
2603.03251), and how often they are ready.

A draft that is ready (a hit) costs what drafting took longer than the step beside it; one that is not (a miss) is made
while the target waits. In a batch the step waits for the hits together, and for the misses together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from wager.economics.acceptance import conditional
from wager.economics.latency import LatencyModel
from wager.types import StepRecord

OTHER_RATES = (0.69, 0.18)
"""How often the second choice of a drafter is right, and the third, where its first is wrong, under `match`: the lower
ends of what was found on synthetic rows at temperature 1 (0.69 to 0.79, with the third 0.87 to 0.94)."""

_PRIOR_RATE, _PRIOR_WEIGHT = 0.5, 4.0
"""The hit rate that is assumed until there are drafts, and how many of them it counts for."""

_MEMORY = 200.0  # drafts that count of those seen
_SMOOTHING = 0.05  # weight of a step's context in its running mean


class AheadCounts(Protocol):
    """What a drafter that drafts ahead reports: drafts that were ready and those that were not, of how many sequences
    it makes drafts at a time at least, and its calls."""

    @property
    def hits(self) -> int: ...

    @property
    def misses(self) -> int: ...

    @property
    def least_drafted(self) -> int: ...

    def take_drafted(self) -> Sequence[tuple[int, int, float]]:
        """Its calls since this was asked last: sequences, the depth of the deepest, and seconds."""


class HitRate:
    """The share of drafts that were ready, learned; older ones count less."""

    def __init__(self, prior: float = _PRIOR_RATE) -> None:
        self._hits, self._weight = prior * _PRIOR_WEIGHT, _PRIOR_WEIGHT
        self._seen = 0, 0

    @property
    def value(self) -> float:
        return self._hits / self._weight

    def learn(self, hits: int, misses: int) -> None:
        """The counts since the start."""
        new, missed = hits - self._seen[0], misses - self._seen[1]
        self._seen = hits, misses
        kept = min(1.0, max(0.0, 1 - (new + missed) / _MEMORY) if self._weight >= _MEMORY else 1.0)
        self._hits, self._weight = kept * self._hits + new, kept * self._weight + new + missed


def waited_seconds(*, prepared: float, step: float, redrafted: float, requests: int, hit_rate: float) -> float:
    """What a step of `requests` sequences waits for drafts: if any was ready, for what preparing took longer than the
    step beside it; if any was not, for drafting again, `redrafted` seconds for those that are expected then."""
    any_hit, any_miss = 1 - (1 - hit_rate) ** requests, 1 - hit_rate**requests
    return any_hit * max(0.0, prepared - step) + any_miss * redrafted


def expected_misses(requests: int, hit_rate: float) -> int:
    """Of a batch, given that there is one: at least 1."""
    any_miss = 1 - hit_rate**requests
    return max(1, round(requests * (1 - hit_rate) / any_miss)) if any_miss > 0 else 1


def hit_rate_of(survival: Sequence[float], outcomes: int, *, others: Sequence[float] = OTHER_RATES) -> float:
    """The share of rounds whose outcome is among the `outcomes` likeliest ones. `survival` are S_1, S_2, ... of the
    round's guesses; then its outcomes are: all are accepted and the drafter's own next token comes, S_k a_(k+1) with
    the last guess's rate for the next; or guess j + 1 is the first wrong one and the drafter's choice of rank r should
    have been it, (S_j - S_(j+1)) `others`[r]."""
    reached = (1.0, *survival)
    rates = conditional(survival)
    chances = [reached[-1] * (rates[-1] if rates else 0.0)]
    for before, after in zip(reached, survival, strict=False):
        chances += [(before - after) * share for share in others]
    return min(1.0, sum(sorted(chances, reverse=True)[:outcomes]))


class DraftsAheadLatency(LatencyModel):
    """`latency` for an engine where `drafters` draft ahead: their seconds are what a step waits for them."""

    def __init__(self, latency: LatencyModel, drafters: Mapping[str, AheadCounts], *, prior: float = 0.5) -> None:
        self._latency, self._counts = latency, dict(drafters)
        self.hit_rates = {name: HitRate(prior) for name in drafters}
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
        """See LatencyModel; of a drafter ahead what the step waits for it: the larger of both where its drafts are
        ready."""
        drafting = self._latency.draft_seconds
        if drafter not in self._counts or requests <= 0 or depth <= 0:
            return drafting(drafter, requests, depth)
        rate = self.hit_rates[drafter].value
        prepared = max(requests, self._counts[drafter].least_drafted)
        return waited_seconds(
            prepared=drafting(drafter, prepared, depth + 1),
            step=self._latency.seconds(requests * (depth + 1), requests, round(requests * self._context)),
            redrafted=drafting(drafter, expected_misses(requests, rate), depth),
            requests=requests,
            hit_rate=rate,
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
            self._context += (_SMOOTHING if self._context else 1.0) * (context - self._context)
        self._latency.observe(record)

    def observe_draft(self, drafter: str, requests: int, depth: int, *, seconds: float) -> None:
        """See LatencyModel. Of a drafter ahead its own counts tell more than what the step saw of it: how often its
        drafts were ready, and what they took."""
        counts = self._counts.get(drafter)
        if counts is None:
            self._latency.observe_draft(drafter, requests, depth, seconds=seconds)
            return
        self.hit_rates[drafter].learn(counts.hits, counts.misses)
        for sequences, deepest, took in counts.take_drafted():
            self._latency.observe_draft(drafter, sequences, deepest, seconds=took)
