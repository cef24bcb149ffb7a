"""The policy that maximises goodput: a token is drafted, and verified, only if it is worth its seconds.

A second is worth the weighted tokens that this machine lately yields in one (`prices`). Which drafter drafts for which
sequence, and how deep, is planned every few steps (`planning`); what to verify is decided in every step, over the whole
batch at once (`admit`). Steps that were taken are learned from together every few steps, while the tables are in the
processor's caches. Now and then a step is taken to learn what no other shows (`exploration`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from wager.economics.acceptance import AGING_INTERVAL, LARGE_BATCH, AcceptanceModel, token_judge
from wager.economics.latency import LatencyModel
from wager.economics.options import THROUGHPUT, Objective
from wager.economics.policy.base import (
    EARLY_STEPS,
    SMOOTHING,
    UPDATE_INTERVAL,
    DrafterCapabilities,
    Policy,
    PolicyFigures,
    truncate_to,
)
from wager.economics.policy.collapse import CollapseWatch
from wager.economics.policy.explain import ObservedSteps, explain
from wager.economics.policy.exploration import EXPLORATION_SHARE, DrafterReadiness, DraftExploration, RowExploration
from wager.economics.policy.learning import DeferredLearning
from wager.economics.policy.planning import MAX_INTERVAL, Planner
from wager.economics.policy.prices import ADJACENT_ROWS, Prices
from wager.economics.policy.state import DrafterProfile, PlannedSequence, PolicyStep
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

_LEAST_BENEFIT = 0.002  # share of the step's weight that judging must gain beyond what it takes


class JudgedDrafts(NamedTuple):
    """What is verified, and how many `rows` that are; their expected gain; `cut`, between the gain of the last token
    taken and that of the first one left; the profit beyond that of verifying everything; and what 0, 1, ... more rows
    add to the step."""

    admitted: Mapping[str, Draft]
    rows: int
    gain: float
    cut: float | None
    benefit: float
    extra: Sequence[float]


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
        self._draws_tokens = RULES[rule].needs_draft_probs
        self._prices = Prices(latency, self._drafters, objective)
        self._planner = Planner(self._drafters, self._prices)
        self._readiness = DrafterReadiness(self._drafters)
        self._exploration = DraftExploration(self._drafters, self._prices, self._readiness, share=exploration_share)
        self._rows = RowExploration(self._drafters, self._prices, self._readiness, share=exploration_share)
        models = list(self.acceptance.values())
        self._learning = DeferredLearning(models, latency, own=self._prices.own, draws_tokens=self._draws_tokens)
        self._observed = ObservedSteps()
        self._collapse = CollapseWatch()
        self._planner.unused = self._collapse.unused

        self._request_weights: dict[str, float] = {}  # of sequences that have not decoded yet, where it is not 1
        self._sequences: dict[str, PlannedSequence] = {}
        self._decoding: dict[str, None] = {}  # the sequences of the last step that have not ended, in order
        self._ids: list[str] | None = None  # the same, until one of them ends
        self._step = self._planned = PolicyStep()  # the last step, and the last one that did not repeat a plan
        self._steps = 0
        self._next_aging = AGING_INTERVAL
        self._interval = 1  # steps after which the policy learns, and looks at its plan again
        self._repeats_until = 0  # the step until which the same sequences repeat the plan
        self._next_measuring = UPDATE_INTERVAL  # the step from which it is asked again whether to measure

        self._judging_interval = 0  # steps between those whose drafts are judged
        self._unjudged_steps = 0  # since the last one
        self._judged_steps = 0
        self._judging_benefit = 0.0  # lately, as a share of the weight of one token of each sequence
        self._recorded = 0  # the step whose goodput was last recorded
        self._record_interval = UPDATE_INTERVAL

        self._taken: list[PolicyStep] = []  # steps that are not learned from yet
        self._counted = 0  # how many of them were counted for `explain`
        self._verdicts_learned = 0  # and how many had their verdicts learned
        self._verified = 0  # draft tokens in the last step that was taken as planned

    def begin(self, sequence: str, *, weight: float) -> None:
        if weight != 1.0:
            self._request_weights[sequence] = weight

    def end(self, sequence: str) -> None:
        self._request_weights.pop(sequence, None)
        state = self._sequences.get(sequence)
        if state is not None:
            self._learn_verdicts()
            self._step.ended = {**self._step.ended, sequence: self._sequences.pop(sequence)}
            self._decoding.pop(sequence, None)
            self._ids = None
            self._planner.decisions.pop(sequence, None)
            self._learning.end_sequence(state)

    def leave_out(self, drafters: frozenset[str]) -> None:
        self._planner.left_out = self._readiness.left_out = drafters
        self._planner.plan_now()
        self._repeats_until = 0

    # ---- plan -------------------------------------------------------------------------------------------------------

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
                self._step = step = planned.repeat(now, spans)
                return step.plan
        return self._plan(spans, budget)

    def _plan(self, spans: Sequence[Span], budget: int) -> Plan:
        """Plan anew, as far as it is time to."""
        now, planner, readiness = self._steps, self._planner, self._readiness
        self._prices.latency.tick(now - self._planned.number)
        if now >= self._next_aging:
            self._next_aging += AGING_INTERVAL
            for model in self.acceptance.values():
                model.age()
        step = self._step = self._planned = PolicyStep(
            now, spans, plain=self._step.plain, states=self._sequences, drafter_index=self._drafter_index
        )
        self._repeats_until = 0
        self._find_sequences(step)
        if not step.spans or not self._drafters:
            return {}
        if planner.due(step.decoding, now=now) and step.candidates:
            self._learn_steps()
            self._learning.learn()
            readiness.note_drafted(step, planner.decisions)
            planner.plan(step)
            step.planned = True
            self._unjudged_steps = self._judging_interval  # its drafts are judged once at least
        readiness.update(step, planner.decisions)
        if may_measure := now >= self._next_measuring:
            self._next_measuring = now + UPDATE_INTERVAL
            step.measures_plain = self._rows.takes_plain_step(step, speculates=planner.speculates)
        if not step.measures_plain:
            self._request_planned(step)
            self._plan_repeats(step)
            if not (may_measure and self._measure_rows(step)):
                steps = max(1, self._repeats_until - now)
                self._exploration.explore(step, draws_tokens=self._draws_tokens, steps=steps)
            if (ready := readiness.next_ready(now)) is not None:
                self._repeats_until = min(self._repeats_until, ready)
        if self._draws_tokens:
            step.fit(budget)
        return step.plan

    def _find_sequences(self, step: PolicyStep) -> None:
        """Which sequences decode; those that were not known before are started."""
        spans = step.all_spans
        step.ids = ids = [span.seq_id for span in spans if span.needs_logits]
        step.spans = spans if len(ids) == len(spans) else [span for span in spans if span.needs_logits]
        new: list[str] = []
        if ids != self._ids:
            before, self._ids = list(self._decoding), ids
            continued = ids[: len(before)] == before  # new ones come last
            new, self._decoding = (ids[len(before) :], self._decoding) if continued else (ids, {})
            for seq_id in new:
                if seq_id not in self._sequences:
                    self._start_sequence(step, seq_id)
                self._decoding[seq_id] = None
        step.plain = self._prices.plain_step(step, self._sequences, new=len(new))

    def _start_sequence(self, step: PolicyStep, seq_id: str) -> None:
        weight = self._prices.weights.start_sequence(self._request_weights.pop(seq_id, 1.0))
        acceptance = [profile.acceptance.start_sequence() for profile in self._drafters]
        plan, count = self._planner.start_sequence(seq_id), len(self._drafters)
        self._sequences[seq_id] = PlannedSequence(seq_id, weight, acceptance, plan, [0] * count, [-1] * count)
        step.catches_up |= plan.depth > 0 and self._drafters[plan.drafter].capabilities.catch_up_s > 0

    def _request_planned(self, step: PolicyStep) -> None:
        decisions = self._planner.decisions
        if len(self._sequences) == step.decoding:
            step.plan = decisions.copy()
        else:  # some sequences wait
            step.plan = {seq_id: decisions[seq_id] for seq_id in self._decoding if seq_id in decisions}
        if unready := self._readiness.unready(self._steps):
            step.plan = {seq_id: each for seq_id, each in step.plan.items() if each.drafter not in unready}
        deepest = self._planner.deepest
        for span in [span for span in step.spans if span.max_draft_tokens < deepest]:
            decision = step.plan.get(span.seq_id)
            if decision is not None and not span.max_draft_tokens:
                del step.plan[span.seq_id]
            elif decision is not None and decision.depth > span.max_draft_tokens:
                step.plan[span.seq_id] = decision._replace(depth=span.max_draft_tokens)

    def _plan_repeats(self, step: PolicyStep) -> None:
        """Until which step this one's plan is repeated, and when the policy learns from what was taken until then."""
        now, early = self._steps, self._steps < EARLY_STEPS or self._prices.weights.learns
        self._interval = 1 if early or step.sequences > LARGE_BATCH else round(UPDATE_INTERVAL * self._prices.own.pace)
        step.repeated_plan = step.plan
        if not step.plan and not early:
            self._repeats_until = now + max(UPDATE_INTERVAL, self._interval - len(self._taken))
        elif not self._draws_tokens:
            self._repeats_until = min(now + self._interval - len(self._taken), self._planner.next_plan)

    def _measure_rows(self, step: PolicyStep) -> bool:
        """Replace what is planned by a step that shows what rows cost, if that is worth it; returns whether it is."""
        measuring = self._rows.measure(step, planned_rows=self._verified if step.plan else 0)
        if measuring is None:
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

    # ---- admit ------------------------------------------------------------------------------------------------------

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        """Judging drafts takes time, so it must gain more than that: where rows are so cheap that every token is taken,
        the drafts of the next steps are verified as they are. Tokens drawn from draft_probs, under a rule that needs
        these, are verified whatever they are."""
        step = self._step
        if step.skipped:
            return {}
        step.drafted = drafts
        if step.measures_rows:
            step.admitted = truncate_to(drafts, budget)
            return step.admitted
        now, drawn, rows = self._steps, self._draws_tokens, 0
        records = now >= self._recorded + self._record_interval
        if not step.spans or not (drafts or records):
            return {}
        if drafts and not (drawn or step.explored) and self._planner.deepest * len(drafts) <= budget:
            self._unjudged_steps += 1
            if self._unjudged_steps <= self._judging_interval:
                step.admitted = drafts
                return drafts
        step.judged = bool(drafts)
        unjudged = self._drawn(step) if drawn else {}
        if unjudged:
            rows = sum([len(draft) for draft in unjudged.values()])
            drafts = {seq_id: draft for seq_id, draft in drafts.items() if seq_id not in unjudged}
        judged = self._judge(step, drafts, limit=budget - rows, first=rows)
        if drafts and not unjudged:
            self._schedule_judging(step, judged.benefit)
        if records:
            self._record_goodput(step, judged, unjudged)
        step.admitted = {**unjudged, **judged.admitted} if unjudged else judged.admitted
        return step.admitted

    def _drawn(self, step: PolicyStep) -> dict[str, Draft]:
        """Drafts sampled from draft_probs, which are verified as planned."""
        for seq_id, draft in step.drafted.items():
            step.states[seq_id].unjudged = draft.draft_probs is not None
        return {seq_id: draft for seq_id, draft in step.drafted.items() if draft.draft_probs is not None}

    def _judge(self, step: PolicyStep, drafts: Mapping[str, Draft], *, limit: int, first: int) -> JudgedDrafts:
        """The most profitable tokens of `drafts`, at most `limit`, beside `first` other rows."""
        count = first + sum([len(draft.tokens) for draft in drafts.values()]) + ADJACENT_ROWS
        extra = self._prices.latency.extra_seconds(*step.plain.shape, count=count)
        if not drafts:
            return JudgedDrafts({}, 0, 0.0, None, 0.0, extra)
        used, offsets, weights, states = self._drafters, None, None, step.states
        if len(used) > 1:
            used = [used[self._drafter_index[step.plan[seq_id].drafter]] for seq_id in drafts]
        scores = [draft.scores for draft in drafts.values()]
        if not all(scores):
            index, plan = self._drafter_index, step.plan
            offsets = [states[seq_id].acceptance[index[plan[seq_id].drafter]].odds for seq_id in drafts]
        if not self._prices.weights.uniform:
            weights = [self._prices.weights.weight(states[seq_id].weight) for seq_id in drafts]
        kept, rows, gain, cut, benefit = token_judge.judge(
            scores,
            [draft.parents for draft in drafts.values()],
            [profile.acceptance.bins.odds for profile in used],
            [profile.acceptance.depths.odds for profile in used],
            offsets,
            weights,
            extra,
            first,
            step.plain.goodput,
            limit,
        )
        for profile, draft in zip(used, drafts.values(), strict=False):
            profile.acceptance.has_scores = len(draft.scores) == len(draft.tokens)
        if kept is not None:
            kept_of = zip(drafts.items(), kept, strict=True)
            drafts = {seq_id: keep_nodes(draft, nodes) for (seq_id, draft), nodes in kept_of if nodes}
        return JudgedDrafts(drafts, rows, gain, cut, benefit, extra)

    def _schedule_judging(self, step: PolicyStep, benefit: float) -> None:
        """A step was judged, which gained `benefit`, in weighted tokens: whether the next ones are judged."""
        goodput, weight, own = step.plain.goodput, step.plain.weight, self._prices.own
        self._judged_steps += 1  # at first a plain mean, not one that starts from 0
        share = max(SMOOTHING, 1 / self._judged_steps)
        self._judging_benefit += share * (benefit / weight - self._judging_benefit)
        self._unjudged_steps = 0
        if self._judging_benefit > goodput * own.judging / weight + _LEAST_BENEFIT:
            self._judging_interval = 0
        else:
            longest = max(MAX_INTERVAL, round(own.judging_interval))
            self._judging_interval = min(longest, 2 * self._judging_interval + 1)

    def _record_goodput(self, step: PolicyStep, judged: JudgedDrafts, unjudged: Mapping[str, Draft]) -> None:
        """Update the goodput and the cost of a row with what is expected of the step, for those since the last time."""
        prices, plain, decoding = self._prices, step.plain, step.decoding
        gain, rows = judged.gain, judged.rows + sum([len(draft) for draft in unjudged.values()])
        for seq_id, draft in unjudged.items():
            state = step.states[seq_id]
            forecasts, drafter = state.plan.forecasts, self._drafter_index[step.plan[seq_id].drafter]
            if forecasts:
                survival = float(forecasts[drafter][state.plan.row, : len(draft)].sum())
                gain += prices.weights.weight(state.weight) * survival
        seconds = plain.seconds + judged.extra[rows] + prices.drafting(step.passes())
        steps = min(step.number - self._recorded, self._record_interval)
        prices.goodput.record(
            decoding, expected=plain.weight + gain, plain=plain.weight / plain.seconds * seconds, steps=steps
        )
        prices.goodput.record_row_cost(
            decoding, extra=judged.extra, rows=rows, cut=judged.cut, goodput=plain.goodput, steps=steps
        )
        self._recorded, self._record_interval = step.number, round(UPDATE_INTERVAL * prices.own.pace)

    # ---- learn ------------------------------------------------------------------------------------------------------

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        self._step.verdicts = verdicts if isinstance(verdicts, list) else list(verdicts)
        self._taken.append(self._step)

    def observe(self, record: StepRecord) -> None:
        step, taken = self._step, self._taken
        step.record = record
        if not taken or taken[-1] is not step:
            taken.append(step)
        if len(taken) >= self._interval or step.measures:
            self._learn_steps()
            self._repeats_until = min(self._repeats_until, self._planner.next_plan)

    def _learn_steps(self) -> None:
        """Learn from all steps that were taken."""
        self._count()
        if self._collapse.add(self._taken):
            self._planner.plan_now()
        self._learn_verdicts()
        self._learn_records()
        self._taken.clear()
        self._counted = self._verdicts_learned = 0

    def _count(self) -> None:
        """Count them for `explain`, which changes nothing that is decided."""
        self._observed.add(self._taken[self._counted :] if self._counted else self._taken)
        self._counted = len(self._taken)

    def _learn_verdicts(self) -> None:
        steps, self._verdicts_learned = self._taken[self._verdicts_learned :], len(self._taken)
        weights = self._prices.weights
        for step in steps:
            if weights.learns:
                for verdict in step.verdicts:
                    if verdict.seq_id in step.states:
                        weights.learn(step.states[verdict.seq_id].weight, len(verdict.tokens))
            if step.explored:
                tokens = {verdict.seq_id: verdict.tokens[:1] for verdict in step.verdicts}
                drafted = [(seq_id, step.drafted[seq_id]) for seq_id in step.explored if seq_id in step.drafted]
                if any(draft.tokens[:1] == tokens.get(seq_id) for seq_id, draft in drafted):
                    self._planner.plan_soon()
            self._learning.add_verdicts(step)

    def _learn_records(self) -> None:
        prices, together, steps = self._prices, 0.0, 0
        for step in self._taken:
            if (record := step.record) is None:
                continue
            seconds = sum(record.seconds.values())
            together, steps = together + seconds, steps + 1
            if prices.weights.learns:
                prices.weights.observe(seconds)
            prices.own.observe(record.seconds.get(POLICY_STAGE, 0.0), step_seconds=seconds, kind=step.kind)
            self._learning.add_record(step, record)
            if step.measures:
                self._learning.learn()
                prices.latency.clear()
                self._planner.plan_now()
            elif step.plan:
                self._verified = record.drafted
            drafting = record.seconds.get(DRAFT_STAGE, 0.0)
            if step.explored:  # which drafter of the step took longer than expected is not known
                expected = prices.drafting(step.passes()) + step.explored_catch_up
                self._exploration.budget.charge(max(0.0, drafting - expected))
            prices.learn_drafting(step, drafting)
            step.release()
        if steps:
            self._rows.steps += steps
            self._exploration.budget.earn(together, steps=steps)
            self._rows.budget.earn(together, steps=steps)

    # ---- explain ----------------------------------------------------------------------------------------------------

    @property
    def collapsed(self) -> Mapping[str, str]:
        return self._collapse.collapsed

    @property
    def inactive_drafters(self) -> frozenset[str]:
        return self._readiness.inactive

    def explain(self) -> str:
        self._count()
        return explain(
            self._step,
            self._drafters,
            prices=self._prices,
            observed=self._observed,
            slo=self._prices.weights.slo_report([state.weight for state in self._step.decoding_states]),
            collapsed=self.collapsed,
            inactive=self.inactive_drafters,
        )

    def figures(self) -> PolicyFigures | None:
        step, decoding = self._step, len(self._step.decoding_states)
        if not decoding:
            return None
        self._count()
        goodput, speed = self._prices.goodput, self._observed.speed(self._prices.latency.plain_seconds)
        observed = speed.ratio if speed else None
        return PolicyFigures(goodput.row_cost(decoding), goodput.ratio(decoding), observed, step.plain.seconds)


def keep_nodes(draft: Draft, nodes: Sequence[int]) -> Draft:
    """The draft with these nodes alone, ascending and closed under parents."""
    size = len(nodes)
    if not size or nodes[-1] == size - 1:
        return draft.truncate(size)
    new_index = {-1: -1, **{node: index for index, node in enumerate(nodes)}}
    return Draft(
        draft.seq_id,
        tuple([draft.tokens[node] for node in nodes]),
        tuple([new_index[draft.parents[node]] for node in nodes]),
        tuple([draft.scores[node] for node in nodes]) if draft.scores else (),
        draft.drafter,
        None if draft.draft_probs is None else draft.draft_probs[list(nodes)],
    )
