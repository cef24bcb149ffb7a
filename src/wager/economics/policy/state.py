"""What the adaptive policy keeps: of each sequence, of the step that is being decided, and of costs and worth.

A second is worth the weighted tokens that this machine lately yields in one (goodput). The policy's own seconds are
part of the step that it plans.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from wager.economics.latency import LatencyCache, LatencyModel, Table
from wager.economics.options import Objective
from wager.economics.policy.base import SLOW_SMOOTHING, SMOOTHING, UPDATE_INTERVAL, DrafterCapabilities
from wager.kernels import _native
from wager.types import Draft, DraftDecision, Span, StepRecord, Verdict

ADJACENT_ROWS = 4  # on either side of a step's rows, over which the cost of one more is averaged
_BUDGET = 0.015  # of a step's seconds for the policy: to keep to it learning is slowed down
_PLANNING_BUDGET = 0.005  # the share of it for planning
_SHARE_AT_REST = 0.25  # of that, where nothing drafts
_REMEMBERED = 0.95  # of what it takes beside drafts, by each plan that makes none
_MAX_PACE = 4.0  # the most by which learning is slowed down
_INITIAL_TOKENS = 1.5  # per step, expected of a sequence before any was observed
_GROWTH, _DECAY, _MAX_FACTOR = 1.05, 0.98, 8.0  # of the SLO's factor: change per step, and bound
_SLO_MARGIN = 0.93  # share of the SLO that is aimed at, since the time per token scatters
_FIRST_SHARE = 0.3  # of sequences for which guesses are computed together, until that was seen
MAX_LATE_STEPS = 80  # at the greatest factor, before a sequence is given up


# ---- a sequence, and a step ------------------------------------------------------------------------------------------


StepKind = Literal["planned", "plain", "unjudged", "judged"]


class PlainStep(NamedTuple):
    """A step without drafts. `shape`: its rows, its sequences and the cached positions of all of them; `weight`: that
    of one token of each sequence that decodes, together; `goodput`: the weighted tokens that a second must yield."""

    shape: tuple[int, int, int] = 0, 0, 0
    weight: float = 0.0
    seconds: float = 0.0
    goodput: float = 0.0


_NO_PLAIN_STEP = PlainStep()
_NO_PLAN: dict[str, DraftDecision] = {}
NO_DRAFTS: Mapping[str, Draft] = {}
_NONE_COMPUTED: Mapping[str, int] = {}
_NO_STATES: Mapping[str, PlannedSequence] = {}


@dataclass(slots=True, eq=False)
class PlannedSequence:
    """A sequence that decodes. `tokens`, `slo_factor` and `late_steps` decide what its tokens count (see
    ObjectiveWeights): its recent tokens per step, the factor of the SLO, and for how many steps it was late at the
    greatest factor."""

    seq_id: str
    request_weight: float
    tokens: float
    acceptance: dict[str, _native.SequenceAcceptance]  # by drafter
    forecasts: Mapping[str, Table]  # by drafter, of survival as of the last plan, [sequences, depth]
    row: int  # its row of these
    slo_factor: float = 1.0
    late_steps: int = 0
    last_position: dict[str, int] = field(default_factory=dict)  # by drafter: known tokens when it last was to draft
    last_step: dict[str, int] = field(default_factory=dict)  # by drafter: the step in which that was
    known: int = 0  # tokens, when it was last a candidate
    room: int = 0  # for draft tokens, then
    known_before: bool = False  # whether it was a candidate before the last plan
    computed_before: bool = False  # whether a drafter that weighs prices has computed guesses for it
    unjudged: bool = False  # its last draft was verified whatever its scores

    def catch_up_seconds(self, drafter: str, capabilities: DrafterCapabilities) -> float:
        """What a drafter with a cache of its own takes to process the tokens of the sequence that it missed."""
        missed = self.known - self.last_position.get(drafter, 0) - capabilities.max_depth
        return max(0, missed) * capabilities.catch_up_s


class PolicyStep:
    """A step as the policy decides it. Most steps repeat a plan and set little; an object that is made after a pass of
    the target takes longer the more it holds."""

    spans: Sequence[Span] = ()  # of the sequences that decode; none where planning is skipped since none draft
    ids: Sequence[str] = ()  # of the sequences that decode
    measured_depth: int | None = None  # the depth to which all draft, and all is verified, to measure what that takes
    catches_up: bool = False  # a drafter has to catch up, so its seconds are not comparable
    kind: StepKind = "plain"  # what the policy's own seconds are counted as
    plan: dict[str, DraftDecision] = _NO_PLAN  # as the step decided it, not changed later
    repeated_plan: dict[str, DraftDecision] = _NO_PLAN  # the same without what is done only to learn
    explored: frozenset[str] = frozenset()  # sequences of the plan that draft for exploration only
    explored_catch_up: float = 0.0  # seconds that their drafters were expected to take to catch up
    drafted: Mapping[str, Draft] = NO_DRAFTS
    admitted: Mapping[str, Draft] = NO_DRAFTS
    computed: Mapping[str, int] = _NONE_COMPUTED  # guesses, for sequences whose drafter decides itself how many
    verdicts: Sequence[Verdict] = ()
    record: StepRecord | None = None  # what it took

    def __init__(
        self, number: int = 0, states: Mapping[str, PlannedSequence] = _NO_STATES, *, plain: PlainStep = _NO_PLAIN_STEP
    ) -> None:
        """`states` are those of all sequences by now, by id; `plain` is that of the last step with sequences to plan,
        where planning is skipped."""
        self.number, self.states, self.plain = number, states, plain

    def repeat(self, number: int, spans: Sequence[Span]) -> PolicyStep:
        """A later step of the same sequences with the same plan."""
        step = PolicyStep(number, self.states, plain=self.plain)
        step.ids = self.ids
        if self.repeated_plan:
            step.plan, step.spans = self.repeated_plan, spans
        return step

    @cached_property
    def candidates(self) -> list[PlannedSequence]:
        """Sequences with room for draft tokens, with what is known of them in this step."""
        found = []
        for span in self.spans:
            state = self.states[span.seq_id]
            state.known, state.room = span.num_computed_tokens + 1, span.max_draft_tokens
            if state.room > 0:
                found.append(state)
        return found

    def passes(self) -> dict[str, list[int]]:
        """By drafter, the passes that each of its sequences took; where it can stop early and has not drafted yet, as
        many as were asked for."""
        passes: dict[str, list[int]] = {}
        drafted = self.drafted
        decisions = list(self.plan.values())
        if drafted and decisions.count(decisions[0]) == len(decisions) and decisions[0].min_survival:
            sizes = [len(draft.tokens) for draft in drafted.values()]
            return {decisions[0].drafter: sizes + [1] * (len(decisions) - len(sizes))}
        for seq_id, decision in self.plan.items():
            depth = decision.depth
            if seq_id in self.computed:
                depth = self.computed[seq_id]
            elif decision.min_survival and drafted:
                depth = len(drafted[seq_id].tokens) if seq_id in drafted else 1
            passes.setdefault(decision.drafter, []).append(depth)
        return passes


# ---- costs and worth -------------------------------------------------------------------------------------------------


class ObjectiveWeights:
    """What a token of each sequence counts under an objective.

    throughput: the weight w of its request. latency: the time per token averaged over sequences, sum w C / m, is least
    where a token of a sequence that gets m tokens a step counts w / m^2. slo: w times a factor (the multiplier of the
    constraint) that grows while the sequence is slower than its target and shrinks while it is faster; one that stays
    too slow at the greatest factor is given up. A new sequence is taken to be as fast as the average one.
    """

    def __init__(self, objective: Objective) -> None:
        self.slo = objective.seconds_per_token
        self.learns = objective.kind != "throughput"  # whether weights depend on what sequences got
        self.uniform = not self.learns  # whether a token of any sequence counts 1: there was no other weight
        self.mean_tokens = _INITIAL_TOKENS  # per step and sequence, lately
        self.step_seconds = 0.0

    def weight(self, state: PlannedSequence) -> float:
        """What one of its tokens counts."""
        if not self.learns:
            return state.request_weight
        if self.slo:
            return state.request_weight * state.slo_factor
        return state.request_weight * (self.mean_tokens / state.tokens) ** 2

    def lateness(self, states: Collection[PlannedSequence]) -> tuple[float, int]:
        """The factor and the late steps that a new sequence begins with beside these: else those that have been late
        for long would go before it."""
        if not (self.slo and states):
            return 1.0, 0
        return sum([each.slo_factor for each in states]) / len(states), min([each.late_steps for each in states])

    def learn(self, state: PlannedSequence, tokens: int) -> None:
        """The sequence got that many tokens in the step."""
        state.tokens += SMOOTHING * (tokens - state.tokens)
        self.mean_tokens += SLOW_SMOOTHING * (tokens - self.mean_tokens)
        if self.slo and self.step_seconds:
            late = self.step_seconds > _SLO_MARGIN * self.slo * state.tokens
            state.late_steps = 0 if not late else state.late_steps + (state.slo_factor >= _MAX_FACTOR)
            change = _DECAY if not late or state.late_steps >= MAX_LATE_STEPS else _GROWTH
            state.slo_factor = min(_MAX_FACTOR, max(1.0, state.slo_factor * change))

    def observe(self, seconds: float) -> None:
        """The step took this long."""
        self.step_seconds += (SMOOTHING if self.step_seconds else 1.0) * (seconds - self.step_seconds)


class Goodput:
    """Goodput and cost of a row in the latest steps, by batch size in powers of two.

    Maximising tokens - goodput * seconds in every step maximises tokens / seconds in the long run for the goodput that
    this yields (Dinkelbach's method). It is kept as a ratio to plain decoding of the batch at hand, 1 at first and
    never less. Expected tokens and seconds enter, not observed ones, so the luck of a step does not move it.
    """

    def __init__(self) -> None:
        self._expected = [0.0] * 32  # weighted tokens as planned
        self._plain = [0.0] * 32  # and by plain decoding
        self._row_cost: dict[int, float] = {}

    def ratio(self, decoding: int) -> float:
        """Goodput of batches of about `decoding` sequences, as a multiple of plain decoding's; at least 1."""
        size = decoding.bit_length()
        return max(1.0, self._expected[size] / self._plain[size]) if self._plain[size] else 1.0

    def row_cost(self, decoding: int) -> float | None:
        """Weighted tokens that one more row must bring; None before a step of that size was recorded."""
        return self._row_cost.get(decoding.bit_length())

    def record(self, decoding: int, *, expected: float, plain: float, row_cost: float) -> None:
        """A step of `decoding` sequences, for the last UPDATE_INTERVAL: the weighted tokens expected of it, those that
        plain decoding would yield in its seconds, and what one more row costs."""
        size, kept = decoding.bit_length(), 1 - SMOOTHING
        self._expected[size] = expected + kept * self._expected[size]
        self._plain[size] = plain + kept * self._plain[size]
        before = self._row_cost.get(size, row_cost)
        self._row_cost[size] = before + UPDATE_INTERVAL * SMOOTHING * (row_cost - before)


def cost_of_a_row(extra: Sequence[float], *, rows: int, cut: float | None, goodput: float) -> float:
    """In weighted tokens, of a step that verifies `rows` draft tokens, n of which add extra[n] seconds, where the first
    token left out gained about `cut`. Where seconds jump, the rows below cost less than those above, and one more costs
    what the cut gains; where they flatten, one more costs what those above do."""
    above = goodput * (extra[rows + ADJACENT_ROWS] - extra[rows]) / ADJACENT_ROWS
    if rows:
        first = max(0, rows - ADJACENT_ROWS)
        below = goodput * (extra[rows] - extra[first]) / (rows - first)
    else:
        below = goodput * min([extra[count] / count for count in range(1, ADJACENT_ROWS + 1)])
    cost = min(below, above)
    return cost if cut is None else max(cost, min(cut, above))


class PolicySeconds:
    """Running means of the policy's own seconds, by kind of step: those it planned in, and of the others those without
    drafts, with drafts that are verified as they are, and with drafts that it judged. On a clock that does not count
    them they are 0, and nothing is slowed down."""

    def __init__(self) -> None:
        self._pace = 1.0  # by how much fewer steps than usual it learns from
        self._means = {kind: [0.0, 0] for kind in get_args(StepKind)}  # seconds, and steps that they are the mean of
        self._drafting: dict[int, float] = {}  # of steps with drafts, by sequences in powers of two
        self._step_seconds = 0.0
        self._share = 0.0
        self.update_interval = UPDATE_INTERVAL  # steps between updates, more where all of the policy takes long

    def observe(self, seconds: float, *, step_seconds: float, kind: StepKind, drafting: int = 0) -> None:
        """A step of `step_seconds`, `seconds` of them the policy's; they count for as many as the others at most, since
        a pause of the machine would end planning for as long as it is remembered. `drafting`: how many sequences
        decode in it, if it repeats a plan with drafts."""
        rest = step_seconds - seconds
        if seconds > rest:
            seconds, step_seconds = rest, 2 * rest
        if drafting:
            size = drafting.bit_length()
            before = self._drafting.get(size, seconds)
            self._drafting[size] = before + SMOOTHING * (seconds - before)
        mean = self._means[kind]
        mean[1] += 1
        mean[0] += max(SMOOTHING, 1 / mean[1]) * (seconds - mean[0])  # at first a plain mean
        self._step_seconds += (SMOOTHING if self._step_seconds else 1.0) * (step_seconds - self._step_seconds)
        if step_seconds > 0:
            self._share += SLOW_SMOOTHING * (seconds / step_seconds - self._share)
            over = min(2.0, self._share / _BUDGET) - 1
            self._pace = min(_MAX_PACE, max(1.0, self._pace * (1 + SMOOTHING * over)))
            self.update_interval = round(UPDATE_INTERVAL * self._pace)

    @property
    def planning(self) -> float:
        """The policy's seconds in a step that it plans."""
        return self._means["planned"][0]

    @property
    def exploring(self) -> float:
        """The policy's seconds in a step with drafts beyond those in one without."""
        return max(0.0, self._means["judged"][0] - self._means["plain"][0])

    @property
    def judging(self) -> float:
        """Seconds of judging the drafts of a step; before a step without it was timed, half of a judged step's."""
        judged, (unjudged, count) = self._means["judged"][0], self._means["unjudged"]
        return max(0.0, judged - unjudged) if count else judged / 2

    def drafting(self, sequences: int) -> float:
        """The policy's seconds in a step with drafts in which so many decode."""
        return self._drafting.get(sequences.bit_length(), 0.0)

    def forget_drafting(self, sequences: int) -> None:
        """It was too long for drafts to pay; a part is forgotten, so that these are tried again."""
        size = sequences.bit_length()
        if size in self._drafting:
            self._drafting[size] *= _REMEMBERED

    @property
    def rest(self) -> int:
        """Steps between decisions where nothing drafts: these get a part of the budget for planning."""
        return round(self.interval(self.planning) / _SHARE_AT_REST)

    def interval(self, seconds: float) -> float:
        """Steps between decisions that take `seconds` each, to keep them within the budget for planning."""
        return seconds / (_PLANNING_BUDGET * self._step_seconds) if self._step_seconds else 0.0


class SharedPasses:
    """Of a drafter that decides itself what to compute: for how many sequences of a step it computes guesses if it does
    for one, lately."""

    def __init__(self) -> None:
        self._together = 0.0  # 0: nothing was learned

    def together(self, sequences: int) -> int:
        """Sequences that share a pass where so many decode."""
        return max(1, min(sequences, round(self._together or _FIRST_SHARE * sequences)))

    def learn(self, sequences: int) -> None:
        """For so many it computed guesses in a step."""
        if sequences:
            self._together += (2 * SMOOTHING if self._together else 1.0) * (sequences - self._together)


class Prices:
    """What a row costs and a token counts. The price of a row is the seconds that it adds (`latency`, cached answers of
    the latency model) times the tokens that a second is worth (`goodput`, see PlainStep); `weights`: what the tokens of
    each sequence count; `own`: the policy's own seconds."""

    def __init__(self, latency: LatencyModel, objective: Objective) -> None:
        self.latency = LatencyCache(latency)
        self.weights = ObjectiveWeights(objective)
        self.goodput = Goodput()
        self.own = PolicySeconds()
        self._next_plain = 0  # the step in which a plain one is computed anew
        self._next_drafting = UPDATE_INTERVAL  # the step from which drafting is learned from again

    def plain_step(self, step: PolicyStep, spans: Sequence[Span], *, changed: bool) -> PlainStep:
        """The step without drafts, with `spans` in all. It changes slowly, so it is computed anew every few steps while
        as many sequences decode, mostly the same ones (else `changed`), and no prompts are computed."""
        (rows, before, _), count, decoding = step.plain.shape, len(spans), len(step.ids)
        if step.number < self._next_plain and rows == before == count == decoding and not changed:
            return step.plain
        self._next_plain = step.number + UPDATE_INTERVAL
        if not decoding:
            return PlainStep()
        context = sum([span.num_computed_tokens for span in spans])
        cached = context if decoding == count else sum([span.num_computed_tokens for span in step.spans])
        weight = float(decoding)
        if not self.weights.uniform:
            weight = sum([self.weights.weight(step.states[span.seq_id]) for span in step.spans])
        seconds = self.latency.plain_seconds(decoding, cached)
        shape = sum([len(span.tokens) for span in spans]), count, context
        return PlainStep(shape, weight, seconds, self.goodput.ratio(decoding) * weight / seconds)

    def drafting(self, passes: Mapping[str, Sequence[int]]) -> float:
        """Expected seconds of drafting with these passes (PolicyStep.passes)."""
        return sum([self.latency.ragged_draft_seconds(drafter, depths) for drafter, depths in passes.items()])

    def learn_drafting(self, step: PolicyStep, taken: float) -> None:
        """Drafting took that long. It is learned from every few steps. The model knows drafts of one depth for all
        sequences, so it gets what such a draft would have taken, were it as far from its expectation."""
        model = self.latency.model
        if not model.learns or step.catches_up or not step.plan or step.number < self._next_drafting:
            return
        passes = {drafter: [n for n in depths if n] for drafter, depths in step.passes().items() if any(depths)}
        if not passes:  # what was made took no pass, so it says nothing of what one takes
            return
        self._next_drafting = step.number + self.own.update_interval
        expected = self.drafting(passes)
        for drafter, depths in passes.items():
            count, depth = len(depths), max(depths)
            even = self.latency.draft_seconds(drafter, count, depth)
            seconds = taken * even / expected if expected > 0 else taken / len(passes)
            model.observe_draft(drafter, count, depth, seconds=seconds)
