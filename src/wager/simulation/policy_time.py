"""What a policy's own decisions take, so that the simulated clock can be charged for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from wager.economics.latency import LatencyModel
from wager.economics.policy.base import Policy
from wager.types import Draft, Plan, Span, StepRecord, Verdict

_T = TypeVar("_T")


class PolicyClock:
    """Seconds that a policy takes: those that this thread computes, since the wall clock's depend on what else the
    machine does. With `seconds` every step is taken to need that long instead (reproducible runs)."""

    def __init__(self, seconds: float | None = None) -> None:
        self._fixed, self._taken = seconds, 0.0

    def take(self) -> float:
        """Seconds since the last call, or the fixed ones of a step."""
        taken, self._taken = self._taken, 0.0
        return taken if self._fixed is None else self._fixed

    def count(self, call: Callable[[], _T], *, sign: float = 1.0) -> _T:
        """The result of a call, whose seconds are added; with a `sign` of -1 it is a part that does not count."""
        if self._fixed is not None:
            return call()
        begin = time.thread_time()
        result = call()
        self._taken += sign * (time.thread_time() - begin)
        return result


class TimedPolicy(Policy):
    """A policy whose calls are timed by the clock."""

    def __init__(self, policy: Policy, clock: PolicyClock) -> None:
        self._policy, self._clock = policy, clock

    def begin(self, sequence: str, *, weight: float) -> None:
        self._clock.count(lambda: self._policy.begin(sequence, weight=weight))

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        return self._clock.count(lambda: self._policy.plan(spans, budget))

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        return self._clock.count(lambda: self._policy.admit(drafts, budget))

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        self._clock.count(lambda: self._policy.learn(verdicts))

    def observe(self, record: StepRecord) -> None:
        self._clock.count(lambda: self._policy.observe(record))

    def end(self, sequence: str) -> None:
        self._clock.count(lambda: self._policy.end(sequence))

    def explain(self) -> str:
        return self._policy.explain()


class UncountedLatency:
    """A latency model that a policy asks: its seconds are not the policy's, since an engine asks measured step times,
    which take a microsecond where the cost model takes thirty. (Timing a call takes about that microsecond, and stays
    counted.)"""

    def __init__(self, latency: LatencyModel, clock: PolicyClock) -> None:
        self._latency, self._clock = latency, clock

    @property
    def learns(self) -> bool:
        return self._latency.learns

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        """See LatencyModel."""
        return self._clock.count(lambda: self._latency.seconds(rows, requests, context_sum), sign=-1.0)

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        """See LatencyModel."""
        return self._clock.count(lambda: self._latency.draft_seconds(drafter, requests, depth), sign=-1.0)

    def difference_deviation(self, rows: int, other_rows: int, *, requests: int, context_sum: int) -> float:
        """See LatencyModel."""
        return self._latency.difference_deviation(rows, other_rows, requests=requests, context_sum=context_sum)

    def observe(self, record: StepRecord) -> None:
        """See LatencyModel."""
        self._latency.observe(record)

    def observe_draft(self, drafter: str, requests: int, depth: int, *, seconds: float) -> None:
        """See LatencyModel."""
        self._latency.observe_draft(drafter, requests, depth, seconds=seconds)
