"""The policy that maximises goodput: a token is drafted, and verified, only if it is worth its seconds.

A second is worth the weighted tokens that this machine lately yields in one (`Prices`). Which drafter drafts for which
sequence, and how deep, is planned every few steps (csrc/planning.h); what to verify is decided in every step, over the
whole batch at once (csrc/judging.h). Steps are learned from together every few steps, while the tables are in the
processor's caches (`learning`); now and then one is taken to learn what no other shows (`exploration`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from wager.economics.acceptance import LARGE_BATCH, AcceptanceModel
from wager.economics.latency import LatencyCache, LatencyModel, Table
from wager.economics.options import THROUGHPUT, Objective
from wager.economics.policy.base import (
    EARLY_STEPS,
    LONGEST_INTERVAL,
    NEGLIGIBLE,
    PAUSE,
    SLOW_INTERVAL,
    SMOOTHING,
    UPDATE_INTERVAL,
    DrafterCapabilities,
    Policy,
    PolicyFigures,
    draft_selector,
    longest_that_fits,
    truncate_to,
)
from wager.economics.policy.exploration import (
    EXPLORATION_SHARE,
    DrafterReadiness,
    Exploration,
    keeping_seconds,
)
from wager.economics.policy.learning import CollapseWatch, Learning
from wager.economics.policy.state import (
    ADJACENT_ROWS,
    MAX_LATE_STEPS,
    NO_DRAFTS,
    ObjectiveWeights,
    PlannedSequence,
    PolicyStep,
    Prices,
    SharedPasses,
    cost_of_a_row,
)
from wager.kernels import _native
from wager.types import (
    DRAFT_STAGE,
    POLICY_STAGE,
    RULES,
    Draft,
    DraftDecision,
    DraftPrices,
    Plan,
    Span,
    StepRecord,
    Verdict,
    VerifyRule,
)

MAX_MIN_SURVIVAL = 0.95  # the greatest min_survival given to a drafter
_SURPRISING = 1.5  # standard deviations by which more guesses of exploration are right than were forecast
_NEVER = -50.0  # log-odds of what is not expected
LOOK_BACK = 64  # steps that are remembered: a second or less on most machines
_NEARLY_FREE = 0.005  # tokens: a cost of a row that would be printed as 0.00


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
        self._computed = {name: SharedPasses() for name, each in drafters.items() if each.weighs_prices}
        self._draws_tokens = draws_tokens = RULES[rule].needs_draft_probs
        self._prices = prices = Prices(latency, objective)
        self._collapse = CollapseWatch()
        self._readiness = DrafterReadiness(self._drafters)
        self._exploration = Exploration(
            self._drafters, prices, self._readiness, share=exploration_share, draws_tokens=draws_tokens
        )
        self._learning = Learning(self.acceptance, prices, draws_tokens=draws_tokens)

        self._request_weights: dict[str, float] = {}  # of sequences that have not decoded yet, where it is not 1
        self._sequences: dict[str, PlannedSequence] = {}
        self._ended: dict[str, None] = {}  # of these, since the last step was planned
        self._ids: Sequence[str] = ()  # of the sequences of the last step
        # The step that `admit`, `learn` and `observe` belong to: the last one, unless an engine with several steps in
        # flight sets it. And the last step that did not repeat a plan.
        self.step = self._planned = PolicyStep()
        self._steps = 0
        self._interval = 1  # steps after which the policy learns, and looks at its plan again
        self._repeats_until = 0  # the step until which the same sequences repeat the plan
        self._next_measuring = UPDATE_INTERVAL  # the step from which it is asked again whether to measure
        self._recorded = 0  # the step whose goodput was last recorded

        # the last plan: what drafters are asked for by sequence, without those that decode plainly; its greatest depth;
        # whether any drafted; how many sequences came and ended since; decision, forecasts and row of those that come
        self._decisions: dict[str, DraftDecision] = {}
        self._deepest, self._speculates, self._changes = 0, True, 0
        self._default: tuple[DraftDecision | None, Mapping[str, Table], int] = None, {}, 0
        self._next_plan, self._plan_interval = 0, 0.0  # the step in which the same sequences are planned anew
        self._last_use = 0  # the step that last planned drafts
        self._surprise = self._surprise_variance = 0.0  # right guesses of exploration beyond those forecast by the plan

        self._judging_interval = 0  # steps between those whose drafts are judged
        self._unjudged_steps = 0  # since the last one
        self._judged_steps = 0
        self._judging_benefit = 0.0  # lately, as a share of the weight of one token of each sequence

        self._taken: list[PolicyStep] = []  # steps that are not learned from yet
        self._latest = deque[PolicyStep](maxlen=LOOK_BACK)  # steps that were learned from, for `explain`

    def begin(self, sequence: str, *, weight: float) -> None:
        if weight != 1.0:
            self._request_weights[sequence] = weight
            self._prices.weights.uniform = False

    def end(self, sequence: str) -> None:
        self._request_weights.pop(sequence, None)
        self._decisions.pop(sequence, None)
        if sequence in self._sequences:
            self._ended[sequence] = None

    def leave_out(self, drafters: frozenset[str]) -> None:
        self._readiness.left_out = drafters
        self._next_plan = self._repeats_until = 0

    def forget_prices(self) -> None:
        """The latency model answers otherwise now, though not for what the policy showed it: ask it again."""
        self._prices.latency.clear()
        self._next_plan = self._repeats_until = 0

    # ---- plan -------------------------------------------------------------------------------------------------------

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        """Most steps of sequences that go on repeat the plan. These few lines are all that is done in them: after a
        pass the processor's caches hold weights, and every function more takes microseconds."""
        self._steps = now = self._steps + 1
        ids = self._ids
        if now < self._repeats_until and not self._ended and len(spans) == len(ids):
            planned = self._planned
            deepest = self._deepest if planned.repeated_plan else 0
            for span, seq_id in zip(spans, ids, strict=True):
                if span.seq_id != seq_id or span.max_draft_tokens < deepest or not span.needs_logits:
                    break
            else:
                self.step = step = planned.repeat(now, spans)
                return step.plan
        return self._plan(spans, budget)

    def _plan(self, spans: Sequence[Span], budget: int) -> Plan:
        """Plan anew, as far as it is time to."""
        now, readiness, exploration, before = self._steps, self._readiness, self._exploration, self._planned
        if self._ended:
            self._learn_steps()
            ended, self._ended = self._ended, {}
            for seq_id in ended:
                self._learning.end_sequence(self._sequences.pop(seq_id))
            self._changes += len(ended)
        if now // SLOW_INTERVAL > before.number // SLOW_INTERVAL:
            self._prices.latency.clear()  # contexts have grown
            for model in self.acceptance.values():
                model.age()
        step = self.step = self._planned = PolicyStep(now, self._sequences, plain=self.step.plain)
        self._repeats_until = 0
        changed = self._find_sequences(step, spans)
        if not step.spans or not self._drafters:
            return {}
        if (now >= self._next_plan or changed) and step.candidates:
            self._learn_steps()
            readiness.note_drafted(step, self._decisions)
            self._plan_sequences(step)
        readiness.update(step, self._decisions)
        step.plan = step.repeated_plan = self._usable_plan(step)
        early, large = now < EARLY_STEPS or self._prices.weights.learns, len(step.ids) > LARGE_BATCH
        pause = max(PAUSE, min(SLOW_INTERVAL, PAUSE * len(step.ids), self._rest))  # each sequence can be looked at once
        self._interval = 1 if early or large else self._prices.own.update_interval if step.plan else pause
        if not step.plan and not early:
            self._repeats_until = now + pause
        elif not self._draws_tokens:
            self._repeats_until = min(now + self._interval - len(self._taken), self._next_plan)
        if now >= self._next_measuring:
            self._next_measuring = now + UPDATE_INTERVAL
            exploration.measure(step, speculates=self._speculates)
        if step.measured_depth is None:
            exploration.add_drafts(step, steps=max(1, self._repeats_until - now))
        if not step.repeated_plan and readiness.watches:
            self._repeats_until = min(self._repeats_until, now + PAUSE)
        if self._draws_tokens:  # what is verified as planned must fit before it is drafted
            longest = longest_that_fits([decision.depth for decision in step.plan.values()], budget)
            step.plan = {
                seq_id: decision if decision.depth <= longest else decision._replace(depth=longest)
                for seq_id, decision in step.plan.items()
                if longest
            }
        return step.plan

    def _find_sequences(self, step: PolicyStep, spans: Sequence[Span]) -> bool:
        """Which sequences decode; those that were not known before are started. Whether as many have come or ended
        since the last plan as are half of the batch."""
        self._ids = step.ids = ids = [span.seq_id for span in spans if span.needs_logits]
        step.spans = spans if len(ids) == len(spans) else [span for span in spans if span.needs_logits]
        if new := [seq_id for seq_id in ids if seq_id not in self._sequences]:
            late = self._prices.weights.lateness(self._sequences.values())
            for seq_id in new:
                self._start_sequence(step, seq_id, late)
        changed = 2 * self._changes >= len(ids)
        step.plain = self._prices.plain_step(step, spans, changed=changed)
        return changed

    def _start_sequence(self, step: PolicyStep, seq_id: str, late: tuple[float, int]) -> None:
        """`late`: its factor and steps of lateness, as of those that run."""
        weight, tokens = self._request_weights.pop(seq_id, 1.0), self._prices.weights.mean_tokens
        acceptance = {name: model.start_sequence() for name, model in self.acceptance.items()}
        decision, forecasts, row = self._default  # until the next plan it gets a decision that many got
        self._changes += 1
        self._sequences[seq_id] = PlannedSequence(seq_id, weight, tokens, acceptance, forecasts, row, *late)
        if decision is not None:
            self._decisions[seq_id] = decision
            step.catches_up |= self._drafters[decision.drafter].catch_up_s > 0

    def _plan_sequences(self, step: PolicyStep) -> None:
        """Plan the candidates of the step."""
        own, names = self._prices.own, list(self._drafters)
        affordable = own.interval(own.planning)
        longest = max(SLOW_INTERVAL if self._speculates else LONGEST_INTERVAL, affordable)
        self._plan_interval = min(longest, max(self._plan_interval + longest / SLOW_INTERVAL, affordable))
        self._next_plan, self._changes = step.number + round(self._plan_interval), 0
        self._surprise = self._surprise_variance = 0.0
        drafters, depths, min_survival, forecasts = self._choose(step)
        keys = list(zip(drafters, depths, min_survival, strict=True))
        made: dict[tuple[int, int, float], DraftDecision] = {}
        for key in set(keys):
            index, depth, stop = key  # where a drafter is to stop after a token of survival `stop`, it is told a score
            if depth:
                score = self.acceptance[names[index]].score_of(stop) if stop > 0 else 0.0
                made[key] = DraftDecision(depth, names[index], score, self._draft_prices(step, names[index]))
        self._decisions = {}
        for row, (state, key) in enumerate(zip(step.candidates, keys, strict=True)):
            state.forecasts, state.row = forecasts, row
            if key in made:
                self._decisions[state.seq_id] = decision = made[key]
                step.catches_up |= state.catch_up_seconds(decision.drafter, self._drafters[decision.drafter]) > 0
        middle = sorted(range(len(keys)), key=lambda row: keys[row][:2])[len(keys) // 2]
        self._default = made.get(keys[middle]), forecasts, middle
        self._deepest, self._speculates = max(depths), bool(self._decisions)
        if self._speculates:
            self._last_use = step.number
        else:
            own.forget_drafting(len(step.ids))
        step.kind = "planned"
        self._unjudged_steps = self._judging_interval  # its drafts are judged once at least

    def _draft_prices(self, step: PolicyStep, drafter: str) -> DraftPrices:
        """For a drafter that weighs them: what guesses for a sequence must bring, if it computes some for as many as it
        is likely to in the step. A token of every sequence is taken to count the same."""
        shares, plain = self._computed.get(drafter), step.plain
        if shares is None:
            return DraftPrices()
        count, latency = shares.together(len(step.ids)), self._prices.latency
        one, two = (latency.draft_seconds(drafter, count, depth) for depth in (1, 2))
        a_second = plain.goodput / plain.weight * len(step.ids)  # tokens
        row = self._prices.goodput.row_cost(len(step.ids))
        if row is None:
            row = plain.goodput * latency.extra_seconds(plain.shape, count=1)[1]
        keeping = keeping_seconds(plain.seconds) if self._drafters[drafter].warm_up else 0.0
        return DraftPrices(
            row,
            a_second * max(0.0, 2 * one - two) / count,
            a_second * (two - one) / count,
            a_second * keeping / len(step.ids),
        )

    def _choose(self, step: PolicyStep) -> tuple[list[int], list[int], list[float], dict[str, Table]]:
        """Each sequence's drafter (-1: none), depth and min_survival (-1: none), and each drafter's forecast of
        survival, [sequences, depth]."""
        candidates, latency, goodput = step.candidates, self._prices.latency, self._prices.goodput
        unused = {*self._collapse.collapsed, *self._readiness.left_out}  # nothing is expected of these
        rooms = [state.room for state in candidates]
        most = max(rooms)
        depth_of = {name: min(each.max_depth, most) for name, each in self._drafters.items()}
        deepest = max(depth_of.values())
        extra = latency.extra_seconds(step.plain.shape, count=len(rooms) * deepest + 2)
        native = _native.DraftPlanner(
            rooms=rooms,
            weights=[self._prices.weights.weight(state) for state in candidates],
            extra=extra,
            goodput=step.plain.goodput,
            max_min_survival=MAX_MIN_SURVIVAL,
        )
        unjudged, forecasts = [state.unjudged for state in candidates], dict[str, Table]()
        for name, capabilities in self._drafters.items():
            model, sequences = self.acceptance[name], [state.acceptance[name] for state in candidates]
            model.compare_sequences(sequences)
            forecasts[name] = native.add(
                model=model,
                sequences=sequences,
                offset=_NEVER if name in unused else None,
                seconds=self._marginal_draft_seconds(name, len(rooms), depth_of[name]),
                # until the next plan each step takes its share of catching up
                catch_up=[state.catch_up_seconds(name, capabilities) / (2 * SLOW_INTERVAL) for state in candidates],
                unjudged=unjudged,
                stops_early=capabilities.stops_early,
            )
        # Plans are made for several costs of a row: the recent one and, where less, those of a first draft token for
        # everyone and of the depth whose tokens cost everyone least. Where rows get cheaper the more there are (shared
        # experts), drafting nothing, little and much can each be consistent.
        count, recent = len(rooms), goodput.row_cost(len(step.ids))
        by_depth = [
            step.plain.goodput * (extra[count * (depth + 1)] - extra[count * depth]) / count for depth in range(deepest)
        ]
        costs = [] if recent is None else [recent]
        for cost in (by_depth[0], max(0.0, min(by_depth))):
            if not costs or cost < costs[-1]:
                costs.append(cost)
        overhead = step.plain.goodput * self._prices.own.drafting(len(step.ids))
        return *native.choose(costs, overhead=overhead), forecasts

    def _marginal_draft_seconds(self, drafter: str, sequences: int, depth: int) -> Table:
        """See LatencyCache; none of a drafter that weighs prices: it takes time only where that pays."""
        if drafter in self._computed:
            return [[0.0] * depth] * sequences
        return self._prices.latency.marginal_draft_seconds(drafter, sequences, depth)

    @property
    def _rest(self) -> int:
        """Steps between decisions where nothing drafts: the more, the longer nothing has, as far as they cost much."""
        return min((self._steps - self._last_use) // SLOW_INTERVAL, self._prices.own.rest)

    def _usable_plan(self, step: PolicyStep) -> dict[str, DraftDecision]:
        """What the last plan decided for the sequences of the step, as far as drafters are ready and there is room."""
        decisions = self._decisions
        if len(self._sequences) == len(step.ids):
            plan = decisions.copy()
        else:  # some sequences wait
            plan = {seq_id: decisions[seq_id] for seq_id in step.ids if seq_id in decisions}
        if unready := self._readiness.unready(self._steps):
            plan = {seq_id: decision for seq_id, decision in plan.items() if decision.drafter not in unready}
        deepest = self._deepest
        for span in step.spans:
            if span.max_draft_tokens >= deepest:
                continue
            decision = plan.get(span.seq_id)
            if decision is not None and not span.max_draft_tokens:
                del plan[span.seq_id]
            elif decision is not None and decision.depth > span.max_draft_tokens:
                plan[span.seq_id] = decision._replace(depth=span.max_draft_tokens)
        return plan

    # ---- admit ------------------------------------------------------------------------------------------------------

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        """Tokens drawn from draft_probs, under a rule that needs these, are verified whatever they are."""
        step = self.step
        step.drafted = step.admitted = drafts
        if self._computed:
            step.computed = self._computed_guesses(step)
        if drafts and step.kind == "plain":
            step.kind = "unjudged"
        if step.measured_depth is not None:  # nor does it say what goodput or a row costs where the policy decides
            step.admitted = truncate_to(drafts, budget)
            return step.admitted
        records = self._steps >= self._recorded + self._prices.own.update_interval
        if not step.spans or not (drafts or records):
            return {}
        fits = self._deepest * len(drafts) <= budget and not (self._draws_tokens or step.explored)
        if drafts and fits:
            self._unjudged_steps += 1
            if self._unjudged_steps <= self._judging_interval:
                return drafts
        if step.kind == "unjudged":
            step.kind = "judged"
        drawn, first, count = NO_DRAFTS, 0, ADJACENT_ROWS
        for draft in drafts.values():  # loops, since a comprehension or a builtin is a function more to be read
            count += len(draft.tokens)
        if self._draws_tokens:  # those sampled from draft_probs are verified as planned
            for seq_id, draft in drafts.items():
                step.states[seq_id].unjudged = draft.draft_probs is not None
            drawn = {seq_id: draft for seq_id, draft in drafts.items() if draft.draft_probs is not None}
            first = sum([len(draft.tokens) for draft in drawn.values()])
            drafts = {seq_id: draft for seq_id, draft in drafts.items() if seq_id not in drawn}
        prices, plain = self._prices, step.plain
        extra = prices.latency.extra_seconds(plain.shape, count=count)
        admitted, rows, gain, cut = drafts, 0, 0.0, None
        if drafts:
            mine = drafts if type(drafts) is dict else dict(drafts)
            admitted, rows, gain, cut = self._judge(step, mine, extra, first=first, limit=budget - first)
        if records:
            rows, gain = first + rows, gain + sum([self._forecast_gain(step, draft) for draft in drawn.values()])
            seconds = plain.seconds + extra[rows] + prices.drafting(step.passes())
            prices.goodput.record(
                len(step.ids),
                expected=plain.weight + gain,
                plain=plain.weight / plain.seconds * seconds,
                row_cost=cost_of_a_row(extra, rows=rows, cut=cut, goodput=plain.goodput),
            )
            self._recorded = step.number
        step.admitted = {**drawn, **admitted} if drawn else admitted
        return step.admitted

    def _computed_guesses(self, step: PolicyStep) -> dict[str, int]:
        """Of drafters that weigh prices, by sequence. A sequence without a draft had none computed."""
        drafts = step.drafted
        return {
            seq_id: (drafts[seq_id].computed or 0) if seq_id in drafts else 0
            for seq_id, decision in step.plan.items()
            if decision.drafter in self._computed
        }

    def _judge(
        self, step: PolicyStep, drafts: dict[str, Draft], extra: Sequence[float], *, first: int, limit: int
    ) -> tuple[dict[str, Draft], int, float, float | None]:
        """The most profitable tokens of `drafts`, at most `limit`, beside `first` other rows; how many they are; their
        expected gain; and `cut`, between the gain of the last token taken and that of the first one left. `extra` are
        the seconds that 0, 1, ... more rows add. Where judging lately gained less than it takes, in profit beyond that
        of verifying everything, the drafts of the next steps are not judged."""
        models, states, weights = list(self.acceptance.values()), step.states, self._prices.weights
        if len(models) > 1:
            models = [self.acceptance[step.plan[seq_id].drafter] for seq_id in drafts]
        sequences = None
        for draft in drafts.values():
            if not draft.scores:
                sequences = [states[seq_id].acceptance[step.plan[seq_id].drafter] for seq_id in drafts]
                break
        drafts, rows, gain, cut, benefit = draft_selector.select(
            drafts,
            models,
            sequences,
            None if weights.uniform else [weights.weight(states[seq_id]) for seq_id in drafts],
            extra,
            first,
            step.plain.goodput,
            limit,
        )
        weight, own = step.plain.weight, self._prices.own
        self._judged_steps += 1  # at first a plain mean, not one that starts from 0
        share = 1 / self._judged_steps
        share = share if share > SMOOTHING else SMOOTHING
        self._judging_benefit += share * (benefit / weight - self._judging_benefit)
        if self._judging_benefit > step.plain.goodput * own.judging / weight + NEGLIGIBLE:
            self._judging_interval = 0
        else:  # to half of the budget for planning
            longest = max(SLOW_INTERVAL, round(2 * own.interval(own.judging)))
            self._judging_interval = min(longest, 2 * self._judging_interval + 1)
        self._unjudged_steps = 0
        return drafts, rows, gain, cut

    def _forecast_gain(self, step: PolicyStep, draft: Draft) -> float:
        """Weighted tokens expected of a draft that is verified whatever its scores."""
        state, drafter = step.states[draft.seq_id], step.plan[draft.seq_id].drafter
        survival = sum(state.forecasts[drafter][state.row][: len(draft)]) if state.forecasts else 0.0
        return self._prices.weights.weight(state) * survival

    # ---- learn ------------------------------------------------------------------------------------------------------

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        self.step.verdicts = verdicts if isinstance(verdicts, list) else list(verdicts)
        self._taken.append(self.step)

    def observe(self, record: StepRecord) -> None:
        step, taken = self.step, self._taken
        step.record = record if 0 <= sum(record.seconds.values()) < math.inf else None  # a broken clock
        if not taken or taken[-1] is not step:
            taken.append(step)
        shows = step.measured_depth is not None or (step.explored and not self._speculates)
        if shows or len(taken) >= self._interval:
            self._learn_steps()
            self._repeats_until = min(self._repeats_until, self._next_plan)

    def _learn_steps(self) -> None:
        """Learn from all steps that were taken."""
        if not self._taken:
            return
        if self._collapse.add(self._taken):
            self._next_plan = 0
        for step in self._taken:
            self._learn_verdicts(step)
        if taken := [self._learn_record(step, step.record) for step in self._taken if step.record is not None]:
            self._exploration.earn(sum(taken), steps=len(taken))
        self._latest += self._taken
        self._taken.clear()

    def _learn_verdicts(self, step: PolicyStep) -> None:
        weights = self._prices.weights
        for verdict in step.verdicts if weights.learns else ():
            if verdict.seq_id in step.states:
                weights.learn(step.states[verdict.seq_id], len(verdict.tokens))
        looks = self._learning.add_verdicts(step)
        if self._speculates or not looks:
            return
        own, surprised = self._prices.own, self._surprises(step, looks)
        if any(looks.values()):
            soon = round(own.interval(own.planning)) if surprised else own.rest
            self._next_plan = min(self._next_plan, self._planned.number + max(UPDATE_INTERVAL, soon))

    def _surprises(self, step: PolicyStep, looks: Mapping[str, bool]) -> bool:
        """Whether more guesses of exploration were right since the last plan than it forecast. `looks`: whether each of
        the step's was, by sequence."""
        for seq_id, right in looks.items():
            if (state := step.states.get(seq_id)) is not None and state.forecasts:
                rate = state.forecasts[step.plan[seq_id].drafter][state.row][0]
                self._surprise += right - rate
                self._surprise_variance += rate * (1 - rate)
        return self._surprise > _SURPRISING * math.sqrt(self._surprise_variance)

    def _learn_record(self, step: PolicyStep, record: StepRecord) -> float:
        """Learn what a step took; its seconds, all stages together."""
        prices, seconds, drafting = self._prices, sum(record.seconds.values()), record.seconds.get(DRAFT_STAGE, 0.0)
        if prices.weights.learns:
            prices.weights.observe(seconds)
        own = record.seconds.get(POLICY_STAGE, 0.0)
        repeats = step.kind in ("judged", "unjudged") and not step.explored and step.measured_depth is None
        prices.own.observe(own, step_seconds=seconds, kind=step.kind, drafting=len(step.ids) if repeats else 0)
        self._learning.add_record(step, record)
        if step.measured_depth is not None:
            prices.latency.clear()
            self._next_plan = 0
        elif step.plan:
            self._exploration.planned_rows = record.drafted
        if step.explored:  # which drafter of the step took longer than expected is not known
            late = max(0.0, drafting - prices.drafting(step.passes()) - step.explored_catch_up)
            judging = 0.0 if self._speculates else prices.own.exploring
            self._exploration.for_drafts.charge(late + judging)
        for seq_id, computed in step.computed.items():
            if computed and (state := step.states.get(seq_id)) is not None and not state.computed_before:
                state.computed_before = step.catches_up = True  # the prompt, too
        for drafter, shares in self._computed.items() if step.computed else ():
            shares.learn(sum(n > 0 and step.plan[seq_id].drafter == drafter for seq_id, n in step.computed.items()))
        prices.learn_drafting(step, drafting)
        if len(step.ids) > LARGE_BATCH:  # it is over: spans and drafts can be freed with it
            step.spans = step.verdicts = ()
            step.drafted = step.admitted = {}
        return seconds

    # ---- explain ----------------------------------------------------------------------------------------------------

    @property
    def collapsed(self) -> Mapping[str, str]:
        return dict(self._collapse.collapsed)

    @property
    def inactive_drafters(self) -> frozenset[str]:
        return self._readiness.inactive

    def explain(self) -> str:
        """What the last steps did and why, in lines of one or two sentences for users. What was observed and what is
        forecast are told apart."""
        step, latest = self.step, self._latest_steps()
        states = [self._sequences[seq_id] for seq_id in step.ids]
        if not states:
            return "No sequence decodes in this step, so there is nothing to draft."
        full = {span.seq_id for span in step.spans if not span.max_draft_tokens}
        lines = [
            f"{_count(len(states), 'sequence')} decode{'s' * (len(states) == 1)}; a step without drafts takes "
            f"{1e3 * step.plain.seconds:.2f} ms, as estimated.",
            observed(latest, self._prices.latency)[1],
            _forecast(self._prices.goodput.ratio(len(states)), self._row_cost(step)),
            *_slo(self._prices.weights, states),
        ]
        if full:
            lines.append(f"No room for drafts: {_count(len(full), 'sequence')}.")
        if not (step.plan or step is self._planned):
            lines.append("This step was not planned: nothing is drafted, and the next plan is made within some steps.")
        if step.measured_depth == 0:
            lines.append("This step is taken without drafts, to measure what such steps take.")
        elif step.measured_depth:
            deepest = max([decision.depth for decision in step.plan.values()], default=0)
            lines.append(f"This step drafts and verifies {deepest} deep for every sequence, to measure what rows cost.")
        candidates = [state for state in states if state.seq_id not in full] or states
        for drafter, model in self.acceptance.items():
            if drafter in self._collapse.collapsed or drafter in self._readiness.left_out:  # nothing is forecast of it
                lines.append(f"{drafter}: not used.")
                continue
            seconds = self._prices.latency.draft_seconds(drafter, len(states), 1)
            lines.append(_use(step, candidates, drafter, known=model.depths.trials[0] > 0, seconds=seconds))
        lines += self._collapse.collapsed.values()
        if self.inactive_drafters:
            lines.append(
                f"Inactive, and shown no states until tried again: {', '.join(sorted(self.inactive_drafters))}."
            )
        if step.explored:
            lines.append(f"Drafted for exploration only: {', '.join(sorted(step.explored))}.")
        if step.drafted:
            drafted, kept = (sum(map(len, drafts.values())) for drafts in (step.drafted, step.admitted))
            tokens, number = _count(drafted, "draft token"), _count(len(step.drafted), "draft")
            lines.append(f"{kept} of {tokens} admitted, in {len(step.admitted)} of {number}.")
        return "\n".join(lines)

    def figures(self) -> PolicyFigures | None:
        step, goodput = self.step, self._prices.goodput
        if not step.ids:
            return None
        speed, _ = observed(self._latest_steps(), self._prices.latency)
        return PolicyFigures(self._row_cost(step), goodput.ratio(len(step.ids)), speed, step.plain.seconds)

    def _row_cost(self, step: PolicyStep) -> float | None:
        """Tokens of a sequence of mean weight that one more row must bring; None before that is known."""
        cost = self._prices.goodput.row_cost(len(step.ids))
        return None if cost is None else cost * len(step.ids) / step.plain.weight

    def _latest_steps(self) -> list[PolicyStep]:
        return [*self._latest, *self._taken][-LOOK_BACK:]


# ---- what the last steps were, in words ------------------------------------------------------------------------------


def observed(steps: Iterable[PolicyStep], latency: LatencyCache) -> tuple[float | None, str]:
    """Tokens a second over those that plain decoding would have yielded, in the steps that computed no prompts (None if
    there was none); and the same in words."""
    taken = [(step.record, not step.record.drafted) for step in steps if step.record and step.record.decodes_only]
    timed = [(record, sum(record.seconds.values()), plain) for record, plain in taken if any(record.seconds.values())]
    if not timed:
        return None, "No step was observed yet."
    tokens, seconds = sum([record.emitted for record, _, _ in timed]), sum([seconds for _, seconds, _ in timed])
    expected = sum([latency.plain_seconds(each.sequences, sum(each.context_lens)) for each, _, _ in timed])
    speed = tokens / seconds * expected / sum([record.sequences for record, _, _ in timed])
    text = (
        f"Observed in the last {_count(len(timed), 'step')}: {_count(tokens, 'token')} in {seconds:.3g} s,"
        f" {speed:.2f} times the tokens a second that plain decoding would yield by that estimate"
    )
    without = [seconds for _, seconds, plain in timed if plain]
    if 0 < len(without) < len(timed):
        text += f"; {len(without)} of them verified no draft token and took {1e3 * sum(without) / len(without):.2f} ms"
        text += " on average" if len(without) > 1 else ""
    if verified := sum([record.drafted for record, _, _ in timed]):
        accepted = sum([record.accepted for record, _, _ in timed])
        counts = f"{_count(verified, 'draft token')} verified, {accepted} accepted"
        text += f". {counts} ({accepted / verified:.0%} of these)"
    return speed, text + "."


def _forecast(ratio: float, cost: float | None) -> str:
    """The forecast goodput, which is that of plain decoding at least, and the weighted tokens that a row must bring
    (None: no step of about this size was forecast)."""
    gain = f"{ratio:.2f} times the goodput of plain decoding" if ratio > 1 else "no more than plain decoding yields"
    if cost is None:
        return "Forecast: none yet."
    if cost < _NEARLY_FREE:
        free = f"one more row costs less than {_NEARLY_FREE:g} tokens, so nearly any draft token pays"
        return f"Forecast: {gain}; {free}."
    return f"Forecast: {gain}; one more row must bring {cost:.2f} tokens."


def _slo(weights: ObjectiveWeights, states: Sequence[PlannedSequence]) -> list[str]:
    """How an SLO is met lately; nothing under another objective, and before there is something to say."""
    if not weights.slo or not weights.step_seconds:
        return []
    target, of = f"The SLO of {1e3 * weights.slo:g} ms a token", f"of {_count(len(states), 'sequence')}"
    late = [state for state in states if weights.step_seconds / state.tokens > weights.slo]
    if given_up := sum([state.late_steps >= MAX_LATE_STEPS for state in late]):
        slowest = weights.step_seconds / min([state.tokens for state in states])
        pace = f"the slowest takes {1e3 * slowest:.3g} ms"
        return [f"{target} cannot be met for {given_up} {of}: {pace}; they are given up."]
    if late:
        return [f"{target} is not met by {len(late)} {of}, whose tokens count more."]
    return [f"{target} is met."]


def _use(step: PolicyStep, states: Sequence[PlannedSequence], drafter: str, *, known: bool, seconds: float) -> str:
    """How the drafter is used; `seconds` is what one draft token for every sequence takes it, `known` whether anything
    was observed of it."""

    def rate(those: Sequence[PlannedSequence]) -> str:
        rates = [state.forecasts[drafter][state.row][0] for state in those if state.forecasts]
        share = f"{sum(rates) / len(rates):.0%} of the time" if rates else "an unknown share of the time"
        return share if known or not rates else f"{share} by assumption: no observation yet"

    planned = step.plan.keys() - step.explored
    users = [state for state in states if state.seq_id in planned and step.plan[state.seq_id].drafter == drafter]
    plain = [state for state in states if state.seq_id not in planned]
    if not users:
        text = f"{drafter}: not used. Its first token would be accepted {rate(plain)}, and drafting one for every "
        return text + f"sequence would take {1e3 * seconds:.2f} ms besides the rows."
    deep = sorted({step.plan[state.seq_id].depth for state in users})
    text = f"{drafter}: depth {deep[0]}{f' to {deep[-1]}' * (len(deep) > 1)} for {_count(len(users), 'sequence')} "
    text += f"(forecast: first token accepted {rate(users)})"
    return text + (f"; {_count(len(plain), 'sequence')} without drafts (there {rate(plain)})." if plain else ".")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
