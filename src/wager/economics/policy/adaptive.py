"""The policy that maximises goodput: a token is drafted, and verified, only if it is worth its seconds.

A second is worth the weighted tokens that this machine lately yields in one (`goodput`). Which drafter drafts for which
sequence, and how deep, is planned every few steps (`planning`); what to verify is decided in every step (`admission`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from wager.economics.acceptance import AGING_INTERVAL, LARGE_BATCH, AcceptanceModel
from wager.economics.latency import LatencyCache, LatencyModel
from wager.economics.options import THROUGHPUT, Objective
from wager.economics.policy.base import (
    EARLY_STEPS,
    UPDATE_INTERVAL,
    DrafterCapabilities,
    Policy,
    PolicyFigures,
    truncate_to,
)
from wager.economics.policy.collapse import CollapseWatch
from wager.economics.policy.draft_exploration import DraftExploration
from wager.economics.policy.draft_seconds import DraftSeconds
from wager.economics.policy.explain import explain
from wager.economics.policy.exploration import EXPLORATION_SHARE
from wager.economics.policy.goodput import GoodputEstimator
from wager.economics.policy.judging import DraftJudge
from wager.economics.policy.learning import DeferredLearning
from wager.economics.policy.objective import ObjectiveWeights
from wager.economics.policy.observed import ObservedSteps
from wager.economics.policy.own_seconds import OwnSeconds
from wager.economics.policy.planning import Planner
from wager.economics.policy.readiness import PAUSE, DrafterReadiness
from wager.economics.policy.row_exploration import RowExploration
from wager.economics.policy.sequence_state import DrafterProfile, PolicyStep, SequencePolicyState
from wager.economics.policy.step_load import StepLoads
from wager.economics.policy.taken_steps import TakenSteps
from wager.types import RULES, Draft, DraftDecision, Plan, Span, StepRecord, Verdict, VerifyRule


class Adaptive(Policy):
    """`latency` gives the seconds of steps and drafting and, if it `learns`, observes them. `rule` is the
    acceptance rule: under another than `match`, drafts sampled from draft_probs are verified as planned, since whether
    they are verified must not depend on their tokens. `exploration_share` of the running time may go to exploration."""

    def __init__(
        self,
        latency: LatencyModel,
        *,
        drafters: Mapping[str, DrafterCapabilities],
        objective: Objective = THROUGHPUT,
        rule: VerifyRule = "match",
        exploration_share: float = EXPLORATION_SHARE,
    ) -> None:
        self.acceptance = {name: AcceptanceModel() for name, capabilities in drafters.items() if capabilities.max_depth}
        self._drafters = [DrafterProfile(name, drafters[name], model) for name, model in self.acceptance.items()]
        self._drafter_index = {name: index for index, name in enumerate(self.acceptance)}
        self._latency, self._goodput = LatencyCache(latency), GoodputEstimator()
        self._weights = ObjectiveWeights(objective)
        self._exploration = DraftExploration(self._drafters, self._latency, share=exploration_share)
        self._readiness = DrafterReadiness(self._drafters)
        own = self._own = OwnSeconds()
        self._observed, self._watch = ObservedSteps(), CollapseWatch()
        self._loads = StepLoads(self._latency, self._weights, goodput=self._goodput)
        self._rows = RowExploration(latency, self._latency, self._drafters, share=exploration_share, own=self._own)
        self._planner = Planner(self._drafters, self._latency, goodput=self._goodput, own=self._own)
        self._planner.unused = self._watch.unused
        self._draft_seconds = DraftSeconds(latency, self._latency, self._drafters, own=self._own)
        self._judge = DraftJudge(
            self._drafters, self._latency, self._weights, drafting=self._draft_seconds, goodput=self._goodput, own=own
        )
        self._learning = DeferredLearning(list(self.acceptance.values()), latency, own=self._own)
        self._exact = RULES[rule].needs_draft_probs
        self._taken = TakenSteps(
            self._learning,
            self._own,
            latency=self._latency,
            drafting=self._draft_seconds,
            weights=self._weights,
            planner=self._planner,
            exploration=self._exploration,
            rows=self._rows,
            observed=self._observed,
            watch=self._watch,
        )
        self._request_weights: dict[str, float] = {}  # of sequences that have not decoded yet, where it is not 1
        self._sequences: dict[str, SequencePolicyState] = {}
        self._decoding: dict[str, None] = {}  # the sequences of the last step that have not ended, in order
        self._ids: list[str] | None = None  # the same, until one of them ends
        self._step = self._planned = PolicyStep()  # the last step, and the last one that did not repeat a plan
        self._steps, self._next_aging = 0, AGING_INTERVAL
        self._interval = 1  # steps after which the policy learns, and looks at its plan again
        self._pause = 1  # of so many steps without drafts one is learned from
        self._repeats_until = 0  # the step until which the same sequences repeat the plan
        self._next_measuring = UPDATE_INTERVAL  # the step from which it is asked again whether to measure

    def begin(self, sequence: str, *, weight: float) -> None:
        if weight != 1.0:
            self._request_weights[sequence] = weight

    def end(self, sequence: str) -> None:
        self._request_weights.pop(sequence, None)
        state = self._sequences.get(sequence)
        if state is not None:
            self._taken.learn_verdicts()
            self._step.ended = {**self._step.ended, sequence: self._sequences.pop(sequence)}
            self._decoding.pop(sequence, None)
            self._ids = None
            self._planner.end_sequence(sequence)
            self._learning.end_sequence(state)

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        """Most steps of sequences that go on repeat the plan. These few lines are all that is done in them: after a
        pass the processor's caches hold weights, and every function more takes microseconds."""
        self._steps = now = self._steps + 1
        ids = self._ids
        if now < self._repeats_until and ids is not None and len(spans) == len(ids):
            planned = self._planned
            deepest = self._planner.deepest if planned.repeated_plan else 0
            for span, seq_id in zip(spans, ids, strict=True):
                if span.seq_id != seq_id or span.max_draft_tokens < deepest or not span.needs_logits:
                    break
            else:
                self._step = step = planned.repeat(now, spans) if now % self._pause == 0 else planned.pass_over(spans)
                return step.plan
        return self._plan(spans, budget)

    def _plan(self, spans: Sequence[Span], budget: int) -> Plan:
        """Plan anew, as far as it is time to."""
        now, last = self._steps, self._planned
        self._latency.tick(now - last.number)
        if now >= self._next_aging:
            self._next_aging += AGING_INTERVAL
            for model in self.acceptance.values():
                model.age()
        step = self._step = self._planned = PolicyStep(
            now,
            spans,
            load=self._step.load,
            states=self._sequences,
            drafter_index=self._drafter_index,
            draws_tokens=self._exact,
        )
        self._repeats_until = 0
        self._meet(step)
        if not step.spans or not self._drafters:
            return {}
        if self._planner.due(step.decoding, now=now) and step.candidates:
            self._taken.learn()
            self._learning.learn()
            self._readiness.note_drafted(step, self._planner.standing)
            self._planner.plan(step, self._weights)
            step.planned = True
            self._judge.judge_next()
        self._readiness.settle(step, self._planner.standing)
        if may_measure := now >= self._next_measuring:
            self._next_measuring = now + UPDATE_INTERVAL
            step.measures_plain = self._rows.takes_plain_step(step, speculates=self._planner.speculates)
        if not step.measures_plain:
            self._request_planned(step)
            self._plan_repeats(step)
            if not (may_measure and self._measure_rows(step)):
                steps = max(1, self._repeats_until - now)
                for state, drafter in self._exploration.explore(step, self._readiness, steps=steps):
                    self._readiness.note_request(state, drafter, now)
            if (ready := self._readiness.next_ready(now)) is not None:
                self._repeats_until, self._pause = min(self._repeats_until, ready), 1
        if self._exact:
            step.fit(budget)
        return step.plan

    def _plan_repeats(self, step: PolicyStep) -> None:
        """Until which step this one's plan is repeated, and when the policy learns from what was taken until then."""
        now, early = self._steps, self._steps < EARLY_STEPS or self._weights.learns
        self._interval = 1 if early or step.sequences > LARGE_BATCH else round(UPDATE_INTERVAL * self._own.pace)
        self._pause = PAUSE if self._readiness.all_rest and not early else 1
        step.repeated_plan = step.plan
        if not step.plan and not early:
            self._repeats_until = now + self._pause * max(UPDATE_INTERVAL, self._interval - len(self._taken.steps))
        elif not self._exact:
            self._repeats_until = min(now + self._interval - len(self._taken.steps), self._planner.next_plan)

    def _meet(self, step: PolicyStep) -> None:
        """Which sequences decode; those that were not known before are started."""
        spans = step.all_spans
        step.ids = ids = [span.seq_id for span in spans if span.needs_logits]
        step.spans = spans if len(ids) == len(spans) else [span for span in spans if span.needs_logits]
        new = 0 if ids == self._ids else self._meet_new(step, ids)
        step.load = self._loads.load(step, new=new)

    def _meet_new(self, step: PolicyStep, ids: list[str]) -> int:
        """Start those that were not known before; how many did not decode in the last step."""
        before, self._ids = list(self._decoding), ids
        continued = ids[: len(before)] == before  # new ones come last
        new, self._decoding = (ids[len(before) :], self._decoding) if continued else (ids, {})
        for seq_id in new:
            if seq_id not in self._sequences:
                self._start_sequence(step, seq_id)
            self._decoding[seq_id] = None
        return len(new)

    def _start_sequence(self, step: PolicyStep, seq_id: str) -> None:
        weight, count = self._weights.start_sequence(self._request_weights.pop(seq_id, 1.0)), len(self._drafters)
        acceptance = [profile.acceptance.start_sequence() for profile in self._drafters]
        plan = self._planner.start_sequence(seq_id)
        self._sequences[seq_id] = SequencePolicyState(seq_id, weight, acceptance, plan, [0] * count, [-1] * count)
        step.catches_up |= plan.depth > 0 and self._drafters[plan.drafter].capabilities.catch_up_s > 0

    def _request_planned(self, step: PolicyStep) -> None:
        standing, states = self._planner.standing, self._sequences
        if len(states) == step.decoding:
            step.plan = standing.copy()
        else:  # some sequences wait
            step.plan = {seq_id: standing[seq_id] for seq_id in self._decoding if seq_id in standing}
        if unready := self._readiness.unready(self._steps):
            step.plan = {seq_id: each for seq_id, each in step.plan.items() if each.drafter not in unready}
        deepest = self._planner.deepest
        for span in [span for span in step.spans if span.max_draft_tokens < deepest]:
            decision = step.plan.get(span.seq_id)
            if decision is not None and not span.max_draft_tokens:
                del step.plan[span.seq_id]
            elif decision is not None and decision.depth > span.max_draft_tokens:
                step.plan[span.seq_id] = replace(decision, depth=span.max_draft_tokens)

    def _measure_rows(self, step: PolicyStep) -> bool:
        """Replace what is planned by a step that shows what rows cost, if that is worth it; returns whether it is."""
        planned_rows = self._taken.verified if step.plan else 0
        if (measuring := self._rows.measure(step, self._readiness, planned_rows=planned_rows)) is None:
            return False
        step.measures_rows, step.measures_plain = measuring.depth > 0, measuring.depth == 0
        name, capabilities, _ = self._drafters[measuring.drafter]
        planned, step.plan = step.plan, {}
        for state in step.candidates if measuring.depth else ():
            if state.seq_id not in planned:
                step.catches_up |= state.catch_up_seconds(measuring.drafter, capabilities) > 0
                self._readiness.note_request(state, measuring.drafter, self._steps)
            step.plan[state.seq_id] = DraftDecision(min(measuring.depth, state.room), name)
        return True

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        step = self._step
        if step.skipped:
            return {}
        step.drafted = drafts
        if step.measures_rows:
            step.admitted = truncate_to(drafts, budget)
        else:
            step.admitted = self._judge.admit(step, budget, now=self._steps, deepest=self._planner.deepest)
        return step.admitted

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        step = self._step
        if step.passed_over:
            self._taken.passed_over += 1
            return
        step.verdicts = verdicts if isinstance(verdicts, list) else list(verdicts)
        self._taken.steps.append(step)

    def observe(self, record: StepRecord) -> None:
        step, taken = self._step, self._taken.steps
        step.record = record
        if step.passed_over:
            return
        if not taken or taken[-1] is not step:
            taken.append(step)
        if len(taken) >= self._interval or step.measures_plain or step.measures_rows:
            self._taken.learn()
            self._repeats_until = min(self._repeats_until, self._planner.next_plan)

    def leave_out(self, drafters: frozenset[str]) -> None:
        self._planner.left_out = self._readiness.left_out = drafters
        self._planner.plan_now()
        self._repeats_until = 0

    @property
    def collapsed(self) -> Mapping[str, str]:
        return self._watch.collapsed

    @property
    def resting(self) -> frozenset[str]:
        return self._readiness.resting

    def explain(self) -> str:
        self._taken.count()
        slo = self._weights.slo_report([state.weight for state in self._step.decoding_states])
        return explain(
            self._step,
            self._drafters,
            latency=self._latency,
            goodput=self._goodput,
            observed=self._observed,
            slo=slo,
            collapsed=self.collapsed,
            resting=self.resting,
        )

    def figures(self) -> PolicyFigures | None:
        step, decoding = self._step, len(self._step.decoding_states)
        if not decoding:
            return None
        self._taken.count()
        speed, cost = self._observed.speed(self._latency.plain_seconds), self._goodput.row_cost(decoding)
        ratio = self._goodput.ratio(decoding)
        return PolicyFigures(cost, ratio, speed.ratio if speed else None, step.load.plain_seconds)
