"""The policy that maximises goodput: a token is drafted, and verified, only if it is worth its seconds.

A second is worth the weighted tokens that this machine lately yields in one (`prices`). Which drafter drafts for which
sequence, and how deep, is planned every few steps (`planning`); what to verify is decided in every step, over the whole
batch at once (`admit`). Steps that were taken are learned from together every few steps, while the tables are in the
processor's caches (`learning`). Now and then a step is taken to learn what no other shows (`exploration`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from wager.economics.acceptance import LARGE_BATCH, AcceptanceModel, token_judge
from wager.economics.latency import LatencyModel
from wager.economics.options import THROUGHPUT, Objective
from wager.economics.policy.base import (
    EARLY_STEPS,
    NEGLIGIBLE,
    SLOW_INTERVAL,
    SMOOTHING,
    UPDATE_INTERVAL,
    DrafterCapabilities,
    Policy,
    PolicyFigures,
    longest_that_fits,
    truncate_to,
)
from wager.economics.policy.explain import LOOK_BACK, explain, forget_drafts, observed_speed
from wager.economics.policy.exploration import EXPLORATION_SHARE, DrafterReadiness, Exploration
from wager.economics.policy.learning import CollapseWatch, DeferredLearning
from wager.economics.policy.planning import Planner
from wager.economics.policy.prices import ADJACENT_ROWS, Prices
from wager.economics.policy.state import PlannedSequence, PolicyStep
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
        self._drafters = {name: capabilities for name, capabilities in drafters.items() if capabilities.max_depth}
        self.acceptance = {name: AcceptanceModel() for name in self._drafters}
        self._draws_tokens = RULES[rule].needs_draft_probs
        self._prices = prices = Prices(latency, objective)
        self._collapse = CollapseWatch()
        self._planner = Planner(self._drafters, self.acceptance, prices, unused=self._collapse.collapsed)
        self._readiness = DrafterReadiness(self._drafters)
        self._exploration = Exploration(self._drafters, prices, self._readiness, share=exploration_share)
        self._learning = DeferredLearning(self.acceptance, latency, own=prices.own, draws_tokens=self._draws_tokens)

        self._request_weights: dict[str, float] = {}  # of sequences that have not decoded yet, where it is not 1
        self._sequences: dict[str, PlannedSequence] = {}
        self._ended: dict[str, PlannedSequence] = {}  # those that ended since the last step was planned
        self._decoding: dict[str, None] = {}  # the sequences of the last step that have not ended, in order
        self._ids: list[str] | None = None  # the same, until one of them ends
        self._step = self._planned = PolicyStep()  # the last step, and the last one that did not repeat a plan
        self._steps = 0
        self._next_aging = SLOW_INTERVAL
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
        self._verdicts_learned = 0  # how many of them had their verdicts learned
        self._latest = deque[PolicyStep](maxlen=LOOK_BACK)  # steps that were learned from, for `explain`
        self._verified = 0  # draft tokens in the last step that was taken as planned

    def begin(self, sequence: str, *, weight: float) -> None:
        if weight != 1.0:
            self._request_weights[sequence] = weight
            self._prices.weights.uniform = False

    def end(self, sequence: str) -> None:
        self._request_weights.pop(sequence, None)
        if sequence in self._sequences:
            self._learn_verdicts()
            self._ended[sequence] = state = self._sequences.pop(sequence)
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
        now, planner, readiness, exploration = self._steps, self._planner, self._readiness, self._exploration
        self._prices.latency.tick(now - self._planned.number)
        if now >= self._next_aging:
            self._next_aging += SLOW_INTERVAL
            for model in self.acceptance.values():
                model.age()
        step = self._step = self._planned = PolicyStep(now, self._sequences, plain=self._step.plain)
        self._repeats_until = 0
        self._ended = {}
        self._find_sequences(step, spans)
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
            step.measures_plain = exploration.takes_plain_step(step, speculates=planner.speculates)
        if not step.measures_plain:
            step.plan = step.repeated_plan = self._standing_plan(step)
            self._set_intervals(step, batch=len(spans))
            if not (may_measure and self._measure_rows(step)):
                steps = max(1, self._repeats_until - now)
                exploration.add_drafts(step, draws_tokens=self._draws_tokens, steps=steps)
            if (ready := readiness.next_ready(now)) is not None:
                self._repeats_until = min(self._repeats_until, ready)
        if self._draws_tokens:  # what is verified as planned must fit before it is drafted
            step.plan = within(step.plan, budget)
        return step.plan

    def _find_sequences(self, step: PolicyStep, spans: Sequence[Span]) -> None:
        """Which sequences decode; those that were not known before are started."""
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
        step.plain = self._prices.plain_step(step, spans, new=len(new))

    def _start_sequence(self, step: PolicyStep, seq_id: str) -> None:
        weight, tokens = self._request_weights.pop(seq_id, 1.0), self._prices.weights.mean_tokens
        acceptance = {name: model.start_sequence() for name, model in self.acceptance.items()}
        forecasts, row = self._planner.start_sequence(seq_id)
        self._sequences[seq_id] = PlannedSequence(seq_id, weight, tokens, acceptance, forecasts, row)
        decision = self._planner.decisions.get(seq_id)
        step.catches_up |= decision is not None and self._drafters[decision.drafter].catch_up_s > 0

    def _standing_plan(self, step: PolicyStep) -> dict[str, DraftDecision]:
        """What the last plan decided for the sequences of the step, as far as drafters are ready and there is room."""
        decisions = self._planner.decisions
        if len(self._sequences) == step.decoding:
            plan = decisions.copy()
        else:  # some sequences wait
            plan = {seq_id: decisions[seq_id] for seq_id in self._decoding if seq_id in decisions}
        if unready := self._readiness.unready(self._steps):
            plan = {seq_id: decision for seq_id, decision in plan.items() if decision.drafter not in unready}
        deepest = self._planner.deepest
        for span in [span for span in step.spans if span.max_draft_tokens < deepest]:
            decision = plan.get(span.seq_id)
            if decision is not None and not span.max_draft_tokens:
                del plan[span.seq_id]
            elif decision is not None and decision.depth > span.max_draft_tokens:
                plan[span.seq_id] = decision._replace(depth=span.max_draft_tokens)
        return plan

    def _set_intervals(self, step: PolicyStep, *, batch: int) -> None:
        """Until which step the plan is repeated, and when the policy learns from what was taken until then, in a batch
        of so many sequences."""
        now, early = self._steps, self._steps < EARLY_STEPS or self._prices.weights.learns
        self._interval = 1 if early or batch > LARGE_BATCH else round(UPDATE_INTERVAL * self._prices.own.pace)
        if not step.plan and not early:
            self._repeats_until = now + max(UPDATE_INTERVAL, self._interval - len(self._taken))
        elif not self._draws_tokens:
            self._repeats_until = min(now + self._interval - len(self._taken), self._planner.next_plan)

    def _measure_rows(self, step: PolicyStep) -> bool:
        """Replace what is planned by a step that shows what rows cost, if that is worth it; returns whether it is."""
        measuring = self._exploration.measure(step, planned_rows=self._verified if step.plan else 0)
        if measuring is None:
            return False
        drafter, depth = measuring
        step.measures_rows, step.measures_plain = depth > 0, depth == 0
        planned, step.plan = step.plan, {}
        for state in step.candidates if depth else ():
            if state.seq_id not in planned:
                step.catches_up |= state.catch_up_seconds(drafter, self._drafters[drafter]) > 0
                self._readiness.note_request(state, drafter, self._steps)
            step.plan[state.seq_id] = DraftDecision(min(depth, state.room), drafter)
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
        records = self._steps >= self._recorded + self._record_interval
        if not step.spans or not (drafts or records):
            return {}
        if drafts and not (self._draws_tokens or step.explored) and self._planner.deepest * len(drafts) <= budget:
            self._unjudged_steps += 1
            if self._unjudged_steps <= self._judging_interval:
                step.admitted = drafts
                return drafts
        step.judged = bool(drafts)
        drawn, first = dict[str, Draft](), 0
        count = ADJACENT_ROWS + sum([len(draft.tokens) for draft in drafts.values()])
        if self._draws_tokens:  # those sampled from draft_probs are verified as planned
            for seq_id, draft in drafts.items():
                step.states[seq_id].unjudged = draft.draft_probs is not None
            drawn = {seq_id: draft for seq_id, draft in drafts.items() if draft.draft_probs is not None}
            first = sum([len(draft.tokens) for draft in drawn.values()])
            drafts = {seq_id: draft for seq_id, draft in drafts.items() if seq_id not in drawn}
        extra = self._prices.latency.extra_seconds(step.plain.shape, count=count)
        admitted, rows, gain, cut = drafts, 0, 0.0, None
        if drafts:
            admitted, rows, gain, cut, benefit = self._judge(step, drafts, extra, first=first, limit=budget - first)
            if not drawn:
                self._schedule_judging(step, benefit)
        if records:
            self._record_goodput(step, drawn, extra, gain=gain, rows=first + rows, cut=cut)
        step.admitted = {**drawn, **admitted} if drawn else admitted
        return step.admitted

    def _judge(
        self, step: PolicyStep, drafts: Mapping[str, Draft], extra: Sequence[float], *, first: int, limit: int
    ) -> tuple[Mapping[str, Draft], int, float, float | None, float]:
        """The most profitable tokens of `drafts`, at most `limit`, beside `first` other rows; how many they are; their
        expected gain; `cut`, between the gain of the last token taken and that of the first one left; and the profit
        beyond that of verifying everything. `extra` are the seconds that 0, 1, ... more rows add."""
        models, states, weights = list(self.acceptance.values()), step.states, self._prices.weights
        if len(models) > 1:
            models = [self.acceptance[step.plan[seq_id].drafter] for seq_id in drafts]
        scores, offsets = [draft.scores for draft in drafts.values()], None
        if not all(scores):
            offsets = [states[seq_id].acceptance[step.plan[seq_id].drafter].odds for seq_id in drafts]
        kept, rows, gain, cut, benefit = token_judge.judge(
            scores,
            [draft.parents for draft in drafts.values()],
            [model.bins.odds for model in models],
            [model.depths.odds for model in models],
            offsets,
            None if weights.uniform else [weights.weight(states[seq_id]) for seq_id in drafts],
            extra,
            first,
            step.plain.goodput,
            limit,
        )
        for model, draft in zip(models, drafts.values(), strict=False):
            model.has_scores = len(draft.scores) == len(draft.tokens)
        if kept is not None:
            kept_of = zip(drafts.items(), kept, strict=True)
            drafts = {seq_id: keep_nodes(draft, nodes) for (seq_id, draft), nodes in kept_of if nodes}
        return drafts, rows, gain, cut, benefit

    def _schedule_judging(self, step: PolicyStep, benefit: float) -> None:
        """A step was judged, which gained `benefit`, in weighted tokens: whether the next ones are judged."""
        weight, own = step.plain.weight, self._prices.own
        self._judged_steps += 1  # at first a plain mean, not one that starts from 0
        share = max(SMOOTHING, 1 / self._judged_steps)
        self._judging_benefit += share * (benefit / weight - self._judging_benefit)
        self._unjudged_steps = 0
        if self._judging_benefit > step.plain.goodput * own.judging / weight + NEGLIGIBLE:
            self._judging_interval = 0
        else:
            longest = max(SLOW_INTERVAL, round(own.judging_interval))
            self._judging_interval = min(longest, 2 * self._judging_interval + 1)

    def _record_goodput(
        self,
        step: PolicyStep,
        drawn: Mapping[str, Draft],
        extra: Sequence[float],
        *,
        gain: float,
        rows: int,
        cut: float | None,
    ) -> None:
        """Update the goodput and the cost of a row with what is expected of the step, for those since the last time."""
        prices, plain, decoding = self._prices, step.plain, step.decoding
        for seq_id, draft in drawn.items():
            state = step.states[seq_id]
            if state.forecasts:
                forecast = state.forecasts[step.plan[seq_id].drafter][state.row, : len(draft)]
                gain += prices.weights.weight(state) * float(forecast.sum())
        seconds = plain.seconds + extra[rows] + prices.drafting(step.passes())
        steps = min(step.number - self._recorded, self._record_interval)
        plain_tokens = plain.weight / plain.seconds * seconds
        prices.goodput.record(decoding, expected=plain.weight + gain, plain=plain_tokens, steps=steps)
        prices.goodput.record_row_cost(decoding, extra=extra, rows=rows, cut=cut, goodput=plain.goodput, steps=steps)
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
        if self._collapse.add(self._taken):
            self._planner.plan_now()
        self._learn_verdicts()
        self._learn_records()
        self._latest += self._taken
        self._taken.clear()
        self._verdicts_learned = 0

    def _learn_verdicts(self) -> None:
        steps, self._verdicts_learned = self._taken[self._verdicts_learned :], len(self._taken)
        weights = self._prices.weights
        for step in steps:
            if weights.learns:
                for verdict in step.verdicts:
                    if verdict.seq_id in step.states:
                        weights.learn(step.states[verdict.seq_id], len(verdict.tokens))
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
                self._exploration.for_drafts.charge(max(0.0, drafting - expected))
            prices.learn_drafting(step, drafting)
            forget_drafts(step)
        if steps:
            self._exploration.earn(together, steps=steps)

    # ---- explain ----------------------------------------------------------------------------------------------------

    @property
    def collapsed(self) -> Mapping[str, str]:
        return dict(self._collapse.collapsed)

    @property
    def inactive_drafters(self) -> frozenset[str]:
        return self._readiness.inactive

    def explain(self) -> str:
        sequences = {**self._ended, **self._sequences}
        return explain(
            self._step,
            [sequences[seq_id] for seq_id in self._step.ids],
            [*self._latest, *self._taken][-LOOK_BACK:],
            prices=self._prices,
            models=self.acceptance,
            collapsed=self._collapse.collapsed.values(),
            inactive=self.inactive_drafters,
        )

    def figures(self) -> PolicyFigures | None:
        step, goodput = self._step, self._prices.goodput
        if not step.decoding:
            return None
        speed = observed_speed([*self._latest, *self._taken][-LOOK_BACK:], self._prices.latency)
        observed = speed.ratio if speed else None
        return PolicyFigures(
            goodput.row_cost(step.decoding), goodput.ratio(step.decoding), observed, step.plain.seconds
        )


def within(plan: dict[str, DraftDecision], budget: int) -> dict[str, DraftDecision]:
    """The plan with depths that take `budget` rows together."""
    longest = longest_that_fits([decision.depth for decision in plan.values()], budget)
    return {
        seq_id: decision if decision.depth <= longest else decision._replace(depth=longest)
        for seq_id, decision in plan.items()
        if longest
    }


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
