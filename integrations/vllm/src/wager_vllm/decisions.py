"""Which drafter guesses for a request in a step, and how deep: the adaptive policy of wager, for another engine.

Knows nothing of vLLM. The proposer and the scheduler each keep one `Decisions`, and call it once a step: `plan` before
drafting, `admit` when the draft tokens are known, `learn` when the step that verified them was taken. Sequences are
vLLM's requests: each of the n choices of a request has an id of its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from wager.economics.latency import LatencyModel
from wager.economics.options import THROUGHPUT, Objective
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import DrafterCapabilities, PolicyFigures
from wager.engine.policies import TenantPolicies
from wager.trace import Clock, Trace
from wager.types import DRAFT_STAGE, FORWARD_STAGE, NO_TENANT, POLICY_STAGE, Draft, Plan, Span, StepRecord, Verdict

NO_ROOM = "no room"
NOT_WORTH = "not worth its rows"
NO_GUESS = "nothing to guess"
PAUSED = "drafter failed"
"""Why a request that decodes has no draft token in a step."""


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

    What one tenant's texts show decides nothing for another's (engine/policies.py).
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
        self._policy = policy = TenantPolicies(make, self._requests)
        self._trace = trace = Trace(clock)
        self._plan_step = trace.timed(POLICY_STAGE, policy.plan)
        self._admit_step = trace.timed(POLICY_STAGE, policy.admit)
        self._learn_step = trace.timed(POLICY_STAGE, self._learn)
        self._spans: Sequence[Span] = ()
        self._plan: Plan = {}
        self._admitted: Mapping[str, Draft] = {}
        self._draft_seconds = 0.0

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
        self._spans, self._admitted = spans, {}
        self._plan = self._plan_step(spans, self._max_rows - len(spans))
        return self._plan

    def admit(self, drafts: Mapping[str, Draft], *, seconds: float) -> Mapping[str, Draft]:
        """The draft tokens of the plan that are worth their rows. Drafting took `seconds`."""
        self._draft_seconds = seconds
        self._admitted = self._admit_step(drafts, self._max_rows - len(self._spans))
        for span in self._spans:
            if not span.needs_logits:
                continue
            decision = self._plan.get(span.seq_id)
            draft = self._admitted.get(span.seq_id)
            if decision is not None and decision.depth:
                self.counts.decided[decision.drafter, decision.depth] += 1
            if draft is None:
                self.counts.off[self._reason(span, drafted=span.seq_id in drafts)] += 1
        return self._admitted

    def _reason(self, span: Span, *, drafted: bool) -> str:
        if span.max_draft_tokens < 1:
            return NO_ROOM
        if span.seq_id not in self._plan:
            return PAUSED if self._failed else NOT_WORTH
        return NOT_WORTH if drafted else NO_GUESS

    def learn(self, step: TakenStep) -> None:
        """The planned step was taken. Requests that it has beside the planned ones, or without them, are no error: vLLM
        ends, preempts and adds requests between the two."""
        self._learn_step(step)
        self._plan, self._admitted, self._spans, self._draft_seconds = {}, {}, (), 0.0

    def _learn(self, step: TakenStep) -> None:
        verdicts, drafted, accepted = [], sum(step.verified.values()), 0
        for span in self._spans:
            tokens, count = step.emitted.get(span.seq_id), step.verified.get(span.seq_id, 0)
            if not tokens or not span.needs_logits:
                continue
            draft = self._admitted.get(span.seq_id)
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
        self._policy.learn(verdicts)
        taken = self._trace.take()[POLICY_STAGE]
        seconds = {POLICY_STAGE: taken, DRAFT_STAGE: self._draft_seconds, FORWARD_STAGE: step.seconds}
        emitted = sum([len(tokens) for tokens in step.emitted.values()])
        self._policy.observe(
            StepRecord(step.rows, len(step.context_lens), drafted, accepted, emitted, seconds, step.context_lens)
        )

    def figures(self) -> PolicyFigures | None:
        """What the last step was planned by; None before one."""
        return self._policy.figures()

    def explain(self) -> str:
        """Why the last step was planned as it was, in words."""
        return self._policy.explain()
