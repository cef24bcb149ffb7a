"""Which drafter guesses for a request in a step, and how deep: the adaptive policy of wager, for another engine.

Knows nothing of vLLM. The proposer and the scheduler each keep one `Decisions`, and call it once a step: `plan` before
drafting, `admit` when the draft tokens are known, `learn` when the step that verified them was taken. The scheduler has
several steps in flight, so it names the `PlannedStep`; where none is named it is the last one. Sequences are vLLM's
requests: each of the n choices of a request has an id of its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

from wager.economics.latency import LatencyModel
from wager.economics.options import THROUGHPUT, Objective
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import DrafterCapabilities, PolicyFigures
from wager.economics.policy.state import PolicyStep
from wager.engine.wrapped_policies import TenantPolicies
from wager.trace import Clock, Trace
from wager.types import DRAFT_STAGE, FORWARD_STAGE, NO_TENANT, POLICY_STAGE, Draft, Plan, Span, StepRecord, Verdict

NO_ROOM = "no room"
NOT_WORTH = "not worth its rows"
NO_GUESS = "nothing to guess"
PAUSED = "drafter failed"
"""Why a request that decodes has no draft token in a step."""


@dataclass(slots=True, eq=False)
class PlannedStep:
    """A step that was planned and is not learned from yet: by `policy`, as its `step`. Drafting for it took
    `draft_seconds`."""

    policy: Adaptive
    step: PolicyStep
    spans: Sequence[Span]
    plan: Plan
    admitted: Mapping[str, Draft] = field(default_factory=dict)
    draft_seconds: float = 0.0

    @contextmanager
    def current(self) -> Iterator[None]:
        """What the policy is called for is about this step."""
        latest, self.policy.step = self.policy.step, self.step
        try:
            yield
        finally:
            self.policy.step = latest

    def shorten(self, depth: int) -> None:
        """Plan at most `depth` draft tokens of each request: others cannot be had."""
        if any(decision.depth > depth for decision in self.plan.values()):
            cut = {name: each._replace(depth=min(each.depth, depth)) for name, each in self.plan.items() if depth}
            self.plan = self.step.plan = cut

    def complete(self, taken: TakenStep) -> None:
        """Draft tokens that were not known (-1) are as far as they were verified: right ones and maybe a wrong one."""
        plan, drafts = dict(self.step.plan), dict(self.step.drafted)
        for name, draft in self.step.drafted.items():
            if draft.tokens[0] < 0:
                count, emitted = taken.verified.get(name, 0), taken.emitted.get(name, ())
                drafts[name] = replace(draft.truncate(count), tokens=(*emitted[:-1], *draft.tokens)[:count])
                plan[name] = plan[name]._replace(depth=count)
        empty = [name for name, draft in drafts.items() if not draft.tokens]
        self.step.plan = {name: decision for name, decision in plan.items() if name not in empty}
        self.step.drafted = {name: draft for name, draft in drafts.items() if name not in empty}


@dataclass(frozen=True, slots=True)
class Decided:
    """A request that has begun, and whose it is."""

    tenant: str


class TakenStep(NamedTuple):
    """A step that vLLM took. `rows`: tokens computed; `context_lens`: cached positions of each request in it, before
    it; `seconds`: without drafting and policy; `verified`: how many draft tokens of each request were verified;
    `emitted`: tokens of each request that got some."""

    rows: int
    context_lens: tuple[int, ...]
    seconds: float
    verified: Mapping[str, int]
    emitted: Mapping[str, Sequence[int]]


@dataclass(slots=True)
class Counts:
    """What was decided and what came of it, since the start. Keys: (drafter, depth), (drafter, position from 0), and
    the reason. A request counts once a step; `reaching` are draft tokens verified at a position."""

    decided: Counter[tuple[str, int]] = field(default_factory=Counter)
    reaching: Counter[tuple[str, int]] = field(default_factory=Counter)
    accepted: Counter[tuple[str, int]] = field(default_factory=Counter)
    off: Counter[str] = field(default_factory=Counter)
    steps: int = 0


class Decisions:
    """`latency` gives the seconds of steps and learns from them; `drafters` are those that may be named, with what they
    can do; a step verifies at most `max_rows` tokens. `clock` times the policy, in seconds.

    What one tenant's texts show decides nothing for another's (engine/wrapped_policies.py).
    """

    def __init__(
        self,
        latency: LatencyModel,
        drafters: Mapping[str, DrafterCapabilities],
        *,
        max_rows: int,
        objective: Objective = THROUGHPUT,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.latency = latency
        self.counts = Counts()
        self._max_rows = max_rows
        self._requests: dict[str, Decided] = {}
        self._failed: frozenset[str] = frozenset()
        make: Callable[[], Adaptive] = lambda: Adaptive(latency, drafters=drafters, objective=objective)  # noqa: E731
        self._policy = TenantPolicies(make, self._requests)
        self._trace = trace = Trace(clock)
        self._plan_step = trace.timed(POLICY_STAGE, self._policy.plan)
        self._admit_step = trace.timed(POLICY_STAGE, self._admit)
        self._learn_step = trace.timed(POLICY_STAGE, self._learn)
        self.planned = PlannedStep(self._adaptive, self._adaptive.step, (), {})
        """The last step that was planned."""

    def __contains__(self, request: object) -> bool:
        return request in self._requests

    def begin(self, request: str, *, tenant: str = NO_TENANT) -> None:
        """A request is about to decode for the first time."""
        self._requests[request] = Decided(tenant)
        self._policy.begin(request, weight=1.0)

    def end(self, request: str) -> None:
        """It finished or was aborted (not: preempted). Unknown ones are ignored."""
        if request in self._requests:
            self._policy.end(request)
            del self._requests[request]

    def leave_out(self, drafters: frozenset[str]) -> None:
        """These drafters, and no others, have failed and pause."""
        self._failed = drafters
        self._policy.leave_out(drafters)

    def plan(self, spans: Sequence[Span]) -> Plan:
        """Drafter and depth of each request for the next step; one that is absent decodes plainly. `spans`: the begun
        requests as they are expected in it, `tokens` as many as are to be computed (their ids do not count),
        `max_draft_tokens` as many draft tokens as vLLM has room for."""
        plan = self._plan_step(spans, self._max_rows - len(spans))
        self.planned = PlannedStep(self._adaptive, self._adaptive.step, spans, plan)
        return plan

    @property
    def _adaptive(self) -> Adaptive:
        """The policy that planned the last step: of a tenant, or of several."""
        return cast(Adaptive, self._policy.policy)

    def forget_prices(self) -> None:
        """The latency model is another by more than what the policy showed it."""
        self._adaptive.forget_prices()

    def admit(
        self, drafts: Mapping[str, Draft], *, seconds: float, planned: PlannedStep | None = None
    ) -> Mapping[str, Draft]:
        """The draft tokens of the plan that are worth their rows; tokens that are not known are -1. Drafting took
        `seconds`."""
        planned = planned or self.planned
        planned.draft_seconds = seconds
        planned.admitted = self._admit_step(planned, drafts)
        for span in planned.spans:
            if not span.needs_logits:
                continue
            decision = planned.plan.get(span.seq_id)
            if decision is not None and decision.depth:
                self.counts.decided[decision.drafter, decision.depth] += 1
            if span.seq_id not in planned.admitted:
                self.counts.off[self._reason(planned, span, drafted=span.seq_id in drafts)] += 1
        return planned.admitted

    def _admit(self, planned: PlannedStep, drafts: Mapping[str, Draft]) -> Mapping[str, Draft]:
        with planned.current():
            return planned.policy.admit(drafts, self._max_rows - len(planned.spans))

    def _reason(self, planned: PlannedStep, span: Span, *, drafted: bool) -> str:
        if span.max_draft_tokens < 1:
            return NO_ROOM
        if span.seq_id not in planned.plan:
            return PAUSED if self._failed else NOT_WORTH
        return NOT_WORTH if drafted else NO_GUESS

    def learn(self, step: TakenStep, *, planned: PlannedStep | None = None) -> None:
        """The planned step was taken. Requests that it has beside the planned ones, or without them, are no error: vLLM
        ends, preempts and adds requests between the two."""
        self._learn_step(planned or self.planned, step)

    def _learn(self, planned: PlannedStep, step: TakenStep) -> None:
        verdicts, drafted, accepted = [], sum(step.verified.values()), 0
        for span in planned.spans:
            tokens, count = step.emitted.get(span.seq_id), step.verified.get(span.seq_id, 0)
            if not tokens or not span.needs_logits:
                continue
            draft = planned.admitted.get(span.seq_id)
            if count > (len(draft) if draft else 0):
                continue  # not the tokens that were admitted: vLLM put others in their place
            right = len(tokens) - 1
            accepted += right
            verdicts.append(Verdict(span.seq_id, tuple(range(right)), tuple(tokens)))
            if draft is not None:
                for at in range(count):
                    self.counts.reaching[draft.drafter, at] += 1
                    self.counts.accepted[draft.drafter, at] += at < right
        self.counts.steps += 1
        seconds = {
            POLICY_STAGE: self._trace.take()[POLICY_STAGE],
            DRAFT_STAGE: planned.draft_seconds,
            FORWARD_STAGE: step.seconds,
        }
        emitted = sum([len(tokens) for tokens in step.emitted.values()])
        record = StepRecord(step.rows, len(step.context_lens), drafted, accepted, emitted, seconds, step.context_lens)
        planned.complete(step)
        with planned.current():
            planned.policy.learn(verdicts)
            planned.policy.observe(record)
        planned.spans, planned.admitted = (), {}  # once

    @property
    def plain_step_s(self) -> float:
        """Seconds of the last step that was planned, without draft tokens, as estimated."""
        return self.planned.step.plain.seconds

    def figures(self) -> PolicyFigures | None:
        """What the last step was planned by; None before one. Looks back on many steps, so not for every one."""
        return self._policy.figures()

    def explain(self) -> str:
        """Why the last step was planned as it was, in words."""
        return self._policy.explain()
