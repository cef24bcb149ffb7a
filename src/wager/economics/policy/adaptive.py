"""The policy that maximises goodput: a token is drafted, and verified, only if it is worth its seconds.

A second is worth the weighted tokens that this machine lately yields in one (`goodput`). Which drafter drafts for which
sequence, and how deep, is planned every few steps (`planning`); what to verify is decided in every step (`admission`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from wager.economics.acceptance import AGING_INTERVAL, AcceptanceModel
from wager.economics.latency_cache import LatencyCache
from wager.economics.latency_model import LatencyModel
from wager.economics.policy.admission import keep_nodes, select
from wager.economics.policy.base import DrafterCapabilities, Policy
from wager.economics.policy.explain import explain
from wager.economics.policy.exploration import EXPLORATION_SHARE, ExplorationBudget
from wager.economics.policy.goodput import ADJACENT_ROWS, GoodputEstimator
from wager.economics.policy.learning import DeferredLearning
from wager.economics.policy.objective import THROUGHPUT, Objective, ObjectiveWeights
from wager.economics.policy.planning import Planner
from wager.economics.policy.row_exploration import RowExploration
from wager.economics.policy.sequence_state import DrafterProfile, PolicyStep, SequencePolicyState, StepDraft
from wager.types import (
    DRAFT_STAGE,
    POLICY_STAGE,
    RULES,
    Draft,
    DraftDecision,
    Plan,
    Span,
    StepRecord,
    Verdict,
    VerifyRule,
)

_EXPLORATION_DEPTH = 2  # of drafts made only to learn: the second token is a second observation for little more time
_SKIPPED_STEPS = 6  # steps without planning after a plan without drafts, while the batch is unchanged
_NEVER_SKIPPED = 64  # first steps, in which planning is never skipped
_GOODPUT_INTERVAL, _GOODPUT_INTERVAL_PLAIN = 2, 8  # steps between updates of goodput and row cost; in plain decoding
_DRAFT_TIME_INTERVAL = 4  # steps between those whose drafting the latency model learns; a multiple of _GOODPUT_INTERVAL


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
        self._model, self._latency, self._goodput = latency, LatencyCache(latency), GoodputEstimator()
        self._weights, self._exploration = ObjectiveWeights(objective), ExplorationBudget(exploration_share)
        self._rows = RowExploration(latency, self._latency, drafters=self._drafters, budget_share=exploration_share)
        self._planner = Planner(self._drafters, self._latency, self._goodput)
        self._learning = DeferredLearning(list(self.acceptance.values()), latency)
        self._exact = RULES[rule].needs_draft_probs
        self._request_weights: dict[str, float] = {}  # of sequences that have not decoded yet, where it is not 1
        self._sequences: dict[str, SequencePolicyState] = {}
        self._step = self._last_planned = PolicyStep()
        self._steps = self._skip = 0
        self._planned_rows = 0  # draft tokens admitted in the last step that measured nothing
        self._batch: tuple[int, str] = (0, "")  # sequences in the last step, and the last of them

    def begin(self, sequence: str, *, weight: float) -> None:
        if weight != 1.0:
            self._request_weights[sequence] = weight

    def end(self, sequence: str) -> None:
        self._request_weights.pop(sequence, None)
        state = self._sequences.pop(sequence, None)
        if state is not None:
            self._learning.end_sequence(state)

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        self._latency.tick()
        self._steps += 1
        if self._steps % AGING_INTERVAL == 0:
            for model in self.acceptance.values():
                model.age()
        step = self._step = PolicyStep()
        if self._skips_planning(spans):
            return {}
        self._describe(step, spans)
        if not step.candidates or not self._drafters:
            return {}
        self._last_planned = step
        if self._planner.due(step, now=self._steps):
            self._learning.learn()
            self._planner.plan(step, self._weights)
        speculates = self._planner.speculates
        step.measures_plain = self._rows.takes_plain_step(step, speculates=speculates)
        if not step.measures_plain:
            self._request_planned(step)
            if not self._measure_rows(step):
                self._explore(step)
        if self._exact:
            step.fit(budget)
        return {
            seq_id: DraftDecision(step_draft.depth, self._drafters[step_draft.drafter].name, step_draft.min_survival)
            for seq_id, step_draft in step.drafts.items()
        }

    def _skips_planning(self, spans: Sequence[Span]) -> bool:
        """Planning is skipped while the last plan was empty and the batch is unchanged; new sequences come last."""
        batch = len(spans), spans[-1].seq_id if spans else ""
        self._skip = self._skip - 1 if batch == self._batch else 0
        self._batch = batch
        return self._skip > 0

    def _describe(self, step: PolicyStep, spans: Sequence[Span]) -> None:
        step.sequences = len(spans)
        cached = 0  # positions of the sequences that decode
        for span in spans:
            step.rows += len(span.tokens)
            step.context_sum += span.num_computed_tokens
            if span.needs_logits:
                state = self._sequences.get(span.seq_id) or self._start_sequence(span.seq_id)
                state.known, state.room = span.num_computed_tokens + 1, span.max_draft_tokens
                step.decoding += 1
                step.weight += self._weights.weight(state.weight)
                cached += span.num_computed_tokens
                if state.room > 0:
                    step.candidates.append(state)
        if step.decoding:
            step.plain_seconds = self._latency.plain_seconds(step.decoding, cached)
            step.goodput = self._goodput.ratio(step.decoding) * step.weight / step.plain_seconds

    def _start_sequence(self, seq_id: str) -> SequencePolicyState:
        weight, count = self._weights.start_sequence(self._request_weights.pop(seq_id, 1.0)), len(self._drafters)
        acceptance = [profile.acceptance.start_sequence() for profile in self._drafters]
        state = SequencePolicyState(seq_id, weight, acceptance, self._planner.default_plan, [0] * count, [-1] * count)
        self._sequences[seq_id] = state
        return state

    def _request_planned(self, step: PolicyStep) -> None:
        for state in step.candidates:
            plan = state.plan
            if plan.depth:
                self._request(step, StepDraft(state, plan.drafter, min(plan.depth, state.room), plan.min_survival))
        self._skip = 0 if step.drafts or self._steps < _NEVER_SKIPPED else _SKIPPED_STEPS

    def _request(self, step: PolicyStep, step_draft: StepDraft) -> None:
        state, drafter = step_draft.state, step_draft.drafter
        step.catches_up |= state.catch_up_seconds(drafter, self._drafters[drafter].capabilities) > 0
        state.last_position[drafter], state.last_step[drafter] = state.known, self._steps
        step.drafts[state.seq_id] = step_draft

    def _explore(self, step: PolicyStep) -> None:
        """Exploration drafts for sequences that decode plainly or use another drafter, as the budget allows; before
        planning is skipped, those of the skipped steps too."""
        if len(step.drafts) == len(step.candidates) and len(self._drafters) == 1:
            return
        for _ in range(self._skip + 1):
            if self._exploration.affords_draft(step.plain_seconds):
                for index in range(len(self._drafters)):
                    self._explore_drafter(step, index)

    def _measure_rows(self, step: PolicyStep) -> bool:
        """Replace what is planned by a step that shows what rows cost, if that is worth it; returns whether it is."""
        measuring = self._rows.measure(step, planned_rows=self._planned_rows if step.drafts else 0)
        if measuring is None:
            return False
        step.drafts = {}
        step.measures_rows, step.measures_plain = measuring.depth > 0, measuring.depth == 0
        for state in step.candidates if measuring.depth else ():
            self._request(step, StepDraft(state, measuring.drafter, min(measuring.depth, state.room)))
        return True

    def _explore_drafter(self, step: PolicyStep, index: int) -> None:
        """Request a draft for the sequence that the drafter last drafted for the longest time ago."""
        name, capabilities, _ = self._drafters[index]
        drafts, candidates = step.drafts, step.candidates
        plain = [state for state in candidates if state.seq_id not in drafts]
        others = [state for state in candidates if state.seq_id in drafts and drafts[state.seq_id].drafter != index]
        if not plain and not others:
            return
        state = min(plain or others, key=lambda state: state.last_step[index])
        depth, depths = min(state.room, capabilities.max_depth, _EXPLORATION_DEPTH), step.passes().get(index, [])
        ragged = self._latency.ragged_draft_seconds
        cost = ragged(name, [*depths, depth]) - ragged(name, depths)
        if self._exact:  # it may be verified in any case
            cost += self._latency.extra_seconds(step.rows, step.sequences, step.context_sum, count=depth)[depth]
        cost += state.catch_up_seconds(index, capabilities) + self._planner.seconds_per_draft
        if not plain:  # what the other drafter's tokens would have gained
            cost += step.speculation_gain / len(candidates)
        if self._exploration.spend(cost, step.plain_seconds):
            self._request(step, StepDraft(state, index, depth, exploration=True))

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        step = self._step
        if not step.decoding or (not step.drafts and self._steps % _GOODPUT_INTERVAL_PLAIN):
            if step.decoding:
                self._goodput.record(step.decoding, expected=step.weight, plain=step.weight)
            return {}
        admitted: dict[str, Draft] = {}
        gains: list[float] = []
        unjudged_rows, unjudged_gain = 0, 0.0
        for seq_id, draft in drafts.items():
            step_draft = step.drafts.get(seq_id)
            if step_draft is None:
                continue
            step_draft.draft, state = draft, step_draft.state
            weight = self._weights.weight(state.weight)
            state.unjudged = self._exact and draft.draft_probs is not None
            if state.unjudged:
                admitted[seq_id] = draft
                unjudged_rows += len(draft)
                forecast = state.plan.forecast
                unjudged_gain += weight * sum(forecast[step_draft.drafter][: len(draft)] if forecast else ())
            else:
                model = self._drafters[step_draft.drafter].acceptance
                step_draft.survival = model.survival(draft, state.acceptance[step_draft.drafter])
                step_draft.first = len(gains)
                gains += [weight * survival for survival in step_draft.survival]
        count = unjudged_rows + len(gains) + ADJACENT_ROWS
        extra = self._latency.extra_seconds(step.rows, step.sequences, step.context_sum, count=count)
        seconds = extra[unjudged_rows:] if unjudged_rows else extra
        if step.measures_rows:
            seconds = [0.0] * len(seconds)
        chosen = select(gains, seconds, goodput=step.goodput, limit=budget - unjudged_rows)
        taken = sorted(chosen.taken)
        for seq_id, step_draft in step.drafts.items():
            if step_draft.draft and step_draft.survival:
                first, last = step_draft.first, step_draft.first + len(step_draft.survival)
                nodes = [index - first for index in taken[bisect_left(taken, first) : bisect_left(taken, last)]]
                if nodes:
                    admitted[seq_id] = keep_nodes(step_draft.draft, nodes)
        step.admitted = admitted
        if not step.measures_rows:
            self._planned_rows = unjudged_rows + len(chosen.taken)
        if self._steps % _GOODPUT_INTERVAL == 0 and not step.measures_rows:
            rows = unjudged_rows + len(chosen.taken)
            self._record_goodput(step, extra, rows, gain=unjudged_gain + chosen.gain, cut=chosen.cut)
        return admitted

    def _record_goodput(
        self, step: PolicyStep, extra: Sequence[float], rows: int, *, gain: float, cut: float | None
    ) -> None:
        """Update the goodput and the cost of a row with what is expected of the step."""
        ragged, drafters = self._latency.ragged_draft_seconds, self._drafters
        step.draft_seconds = sum([ragged(drafters[index].name, depths) for index, depths in step.passes().items()])
        seconds = step.plain_seconds + extra[rows] + step.draft_seconds
        plain = step.weight / step.plain_seconds * seconds
        self._goodput.record(step.decoding, expected=step.weight + gain, plain=plain)
        self._goodput.record_row_cost(step.decoding, extra=extra, rows=rows, cut=cut, goodput=step.goodput)

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        known = [verdict for verdict in verdicts if verdict.seq_id in self._sequences]
        for verdict in known:
            self._weights.learn(self._sequences[verdict.seq_id].weight, len(verdict.tokens))
            step_draft = self._step.drafts.get(verdict.seq_id)
            if (
                step_draft
                and step_draft.exploration
                and step_draft.draft
                and step_draft.draft.tokens[:1] == verdict.tokens[:1]
            ):
                self._planner.plan_soon()
        self._learning.add_verdicts(known, self._sequences, self._step.drafts)

    def observe(self, record: StepRecord) -> None:
        step, seconds = self._step, sum(record.seconds.values())
        self._weights.observe(seconds)
        self._exploration.earn(seconds)
        self._rows.earn(seconds)
        self._planner.observe(record.seconds.get(POLICY_STAGE, 0.0), len(step.drafts))
        self._learning.add_record(record, always=step.measures)
        if step.measures:
            self._learning.learn()
            self._latency.clear()
            self._planner.plan_now()
        if self._model.learns and self._steps % _DRAFT_TIME_INTERVAL == 0 and not step.catches_up:
            self._learn_draft_seconds(step, record.seconds.get(DRAFT_STAGE, 0.0))

    def _learn_draft_seconds(self, step: PolicyStep, taken: float) -> None:
        """Pass each drafter's seconds to the latency model. It models drafts of one depth for all sequences, so it gets
        what such a draft would have taken, were it as far from its expectation as this step's drafting."""
        passes = step.passes()
        for index, depths in passes.items():
            drafter, count, depth = self._drafters[index].name, len(depths), max(depths)
            even = self._latency.draft_seconds(drafter, count, depth)
            seconds = taken * even / step.draft_seconds if step.draft_seconds > 0 else taken / len(passes)
            self._model.observe_draft(drafter, count, depth, seconds=seconds)

    def explain(self) -> str:
        step = self._last_planned
        seconds = [self._latency.draft_seconds(profile.name, len(step.candidates), 1) for profile in self._drafters]
        return explain(step, self._drafters, draft_seconds=seconds, row_cost=self._goodput.row_cost(step.decoding))
