"""Before drafting: which drafter each sequence uses, how deep, or none.

Each drafter is evaluated for every sequence and depth. Draft tokens with scores can still be rejected before they are
verified, so one gains what survives that, and takes a row only then. Plans are made for assumed costs of a
row, and the most profitable one is kept; profit is weighted tokens - goodput * seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from wager.economics.acceptance import AcceptanceModel, Bools, Floats, Ints
from wager.economics.latency_cache import LatencyCache
from wager.economics.policy.base import LONGEST_INTERVAL, UPDATE_INTERVAL
from wager.economics.policy.goodput import GoodputEstimator
from wager.economics.policy.objective import ObjectiveWeights
from wager.economics.policy.own_seconds import OwnSeconds
from wager.economics.policy.sequence_state import DrafterProfile, PolicyStep, SequencePlan
from wager.types import DraftDecision

MAX_INTERVAL = 32  # steps between plans; as many plans in which the interval grows to that
_EARLY_PLANNING = 2.0  # by how much the first plans may exceed the time that planning may take
_SIZE_RATIO = 1.5  # a batch that grew or shrank by more is planned anew
_SEVERAL_DRAFTERS = 0.93  # factor of profit per drafter beyond the first: the best of several estimates is biased
_MAX_MIN_SURVIVAL = 0.95  # the greatest min_survival given to a drafter


class Planner:
    """Plans every sequence anew every few steps; the only one to write SequencePolicyState.plan. `standing` is what
    drafters are asked for until then, by sequence, without those that decode plainly, and `deepest` its depth."""

    def __init__(
        self, drafters: Sequence[DrafterProfile], latency: LatencyCache, *, goodput: GoodputEstimator, own: OwnSeconds
    ) -> None:
        self.standing: dict[str, DraftDecision] = {}
        self.deepest = 0
        self.speculates = True  # whether any sequence drafts, by the last plan
        self._drafters, self._latency, self._goodput, self._own = drafters, latency, goodput, own
        self._default = SequencePlan()  # of sequences that come between two plans
        self._uniform = False  # whether all sequences got the same plan
        self._due = self._now = self._planned = self._newcomers = 0
        self._interval = 0.0
        self._default_decision: DraftDecision | None = None

    @property
    def next_plan(self) -> int:
        """The step in which the same sequences are planned anew."""
        return self._due

    def due(self, size: int, *, now: int) -> bool:
        """Whether to plan in step number `now`, of `size` sequences: the interval is over, the batch grew or shrank, or
        as many sequences are new as others (counted in every step) and not all plans are the same."""
        self._now = now
        if now >= self._due or max(size, self._planned) > _SIZE_RATIO * min(size, self._planned):
            return True
        return not self._uniform and self._newcomers >= size

    def plan_soon(self) -> None:
        """An exploration draft was right: plan within a few steps."""
        if not self.speculates:
            self._due = min(self._due, self._now + UPDATE_INTERVAL)

    def plan_now(self) -> None:
        """Prices have changed: plan in the next step."""
        self._due = self._now

    def start_sequence(self, seq_id: str) -> SequencePlan:
        """A sequence came; until the next plan it gets one that many got."""
        self._newcomers += 1
        if self._default_decision is not None:
            self.standing[seq_id] = self._default_decision
        return self._default

    def end_sequence(self, seq_id: str) -> None:
        self.standing.pop(seq_id, None)

    def plan(self, step: PolicyStep, weights: ObjectiveWeights) -> None:
        """Plan the candidates of the step."""
        affordable = self._own.planning_interval
        longest = max(MAX_INTERVAL if self.speculates else LONGEST_INTERVAL, affordable)
        self._interval = min(longest, max(self._interval + longest / MAX_INTERVAL, affordable / _EARLY_PLANNING))
        self._due = self._now + round(self._interval)
        self._planned, self._newcomers = step.decoding, 0
        candidates = step.candidates
        rooms = np.array([state.room for state in candidates])
        each = (
            np.ones(len(rooms)) if weights.uniform else np.array([weights.weight(state.weight) for state in candidates])
        )
        batch = PlannedBatch(step, rooms, each)
        forecasts = [self._forecast(index, batch) for index in range(len(self._drafters))]
        choice = self._most_profitable(forecasts, batch)
        survival = [forecast.survival for forecast in forecasts]
        self.standing = {}
        columns = choice.drafters.tolist(), choice.depths.tolist(), choice.min_survival.tolist()
        keys = list(zip(*columns, strict=True))
        plans = {key: self._decide(*key) for key in set(keys)}
        for row, (state, key) in enumerate(zip(candidates, keys, strict=True)):
            score, decision = plans[key]
            state.plan = SequencePlan(key[0], key[1], score, survival, row, False)
            if decision is not None:
                self.standing[state.seq_id] = decision
        self.deepest = int(choice.depths.max())
        order = np.lexsort((choice.depths, choice.drafters))
        middle = candidates[int(order[len(order) // 2])]
        self._default = middle.plan._replace(is_default=True)
        self._default_decision = self.standing.get(middle.seq_id)
        self.speculates = bool(self.standing)
        self._uniform = len(order) > 1 and all(np.ptp(column) == 0 for column in (choice.depths, choice.drafters))

    def _decide(self, drafter: int, depth: int, stop: float) -> tuple[float, DraftDecision | None]:
        """The score after which the drafter stops, 0 if after none, and what it is asked for."""
        if not depth:
            return 0.0, None
        name, _, model = self._drafters[drafter]
        score = model.score_of(stop) if stop > 0 else 0.0
        return score, DraftDecision(depth, name, score)

    def _forecast(self, index: int, batch: PlannedBatch) -> DrafterForecast:
        (name, capabilities, model), states = self._drafters[index], batch.step.candidates
        depth = min(capabilities.max_depth, int(batch.rooms.max()))
        model.compare_sequences([state.acceptance[index] for state in states])
        survival = model.forecast([state.acceptance[index] for state in states], depth)
        survival = np.where(np.arange(depth) < batch.rooms[:, None], survival, 0.0)
        seconds = self._latency.marginal_draft_seconds(name, len(states), depth)
        catch_up = np.zeros(len(states))
        if capabilities.catch_up_s:
            catch_up[:] = [state.catch_up_seconds(index, capabilities) / (2 * MAX_INTERVAL) for state in states]
        unjudged = np.array([state.unjudged for state in states])
        return DrafterForecast(model, survival, seconds, catch_up, unjudged, capabilities.stops_early)

    def _most_profitable(self, forecasts: Sequence[DrafterForecast], batch: PlannedBatch) -> PlanChoice:
        """Of the plans for two costs of a row: the recent one and, if it is less, that of one draft token for everyone.
        Where rows get cheaper the more there are (experts are shared), drafting nothing and drafting much can each be
        consistent, and their profits are compared."""
        step, size = batch.step, len(batch.weights)
        extra = self._latency.extra_seconds(*step.load.shape, count=size)
        everyone, recent = step.load.goodput * extra[size] / size, self._goodput.row_cost(step.decoding)
        best = PlanChoice(np.full(size, -1), np.zeros(size, np.intp), np.full(size, -1.0))
        for row_cost in [everyone] if recent is None else [recent, everyone][: 1 + (recent > everyone)]:
            values = [evaluate(forecast, batch, row_cost=row_cost) for forecast in forecasts]
            choice = choose_depths(values, choose_drafters(values), batch, self._latency)
            best = choice if choice.profit > best.profit else best
            if best.depths.all():
                break
        return best


class PlannedBatch(NamedTuple):
    """The step before drafting; of each candidate the room for draft tokens and the weight of a token, [sequences]."""

    step: PolicyStep
    rooms: Ints
    weights: Floats


@dataclass(frozen=True, slots=True)
class DrafterForecast:
    """What one drafter is expected to do: survival, 0 beyond a sequence's room, and the seconds that the j-th sequence
    to draft at a depth adds, [sequences, depth]; seconds of catching up, [sequences]."""

    model: AcceptanceModel
    survival: Floats
    seconds: Floats
    catch_up: Floats
    unjudged: Bools  # [sequences]
    stops_early: bool

    def min_survival(self, batch: PlannedBatch, row_cost: float) -> Floats:
        """Survival of a token after which the next pass does not pay (-1: none), [sequences]: it takes a pass and then
        a row, and its token survives less."""
        if not (self.stops_early and self.model.has_scores):
            return np.full(len(batch.weights), -1.0)
        next_rate = float(1.0 / (1.0 + np.exp(-self.model.depths.log_odds[1])))
        cost = (row_cost + batch.step.load.goodput * float(self.seconds[-1, 0])) / next_rate
        return np.minimum(cost / batch.weights, _MAX_MIN_SURVIVAL)


class DrafterValue(NamedTuple):
    """What one drafter is worth to every sequence, in weighted tokens, down to the depth to which passes pay for all of
    them together: [sequences, depth] and, last but one, [sequences]."""

    gain: Floats
    rows: Floats  # expected
    drafted: Floats  # probability that the pass is made
    net: Floats  # gain after rows, never rising with depth
    seconds: Floats  # as in DrafterForecast
    profit: Floats  # at the best depth, after the sequence's own share of drafting
    min_survival: Floats
    shared_cost: float  # of drafting, beyond those shares


class PlanChoice(NamedTuple):
    """Each sequence's drafter (-1: none), depth and min_survival (-1: none), [sequences], and the total profit."""

    drafters: Ints
    depths: Ints
    min_survival: Floats
    profit: float = 0.0


def evaluate(forecast: DrafterForecast, batch: PlannedBatch, *, row_cost: float) -> DrafterValue:
    """What one drafter is worth to each sequence."""
    seconds, weights, goodput = forecast.seconds, batch.weights, batch.step.load.goodput
    min_survival = forecast.min_survival(batch, row_cost)
    accepted, rows, drafted = forecast.model.forecast_admission(
        forecast.survival, min_admitted=row_cost / weights, min_survival=min_survival, unjudged=forecast.unjudged
    )
    gain = accepted * weights[:, None]
    net = np.minimum.accumulate(gain - row_cost * rows, axis=1)
    profit = np.cumsum(net - goodput * seconds[-1] * drafted, axis=1)
    shared_cost = goodput * np.cumsum(shared_seconds(seconds, (drafted * (profit > 0)).sum(0)))
    best = np.maximum.accumulate(profit, axis=1) - goodput * forecast.catch_up[:, None]
    total = best.clip(0.0).sum(0) - shared_cost
    depth = int(total.argmax()) + 1
    gain, rows, drafted, net, seconds = (array[:, :depth] for array in (gain, rows, drafted, net, seconds))
    profit, shared = best[:, depth - 1].clip(0.0), float(shared_cost[depth - 1])
    return DrafterValue(gain, rows, drafted, net, seconds, profit, min_survival, shared)


def shared_seconds(seconds: Floats, drafting: Floats) -> Floats:
    """By depth, the seconds of a pass for `drafting` sequences beyond what each would add as the last one."""
    beyond = np.vstack([np.zeros(seconds.shape[1]), np.cumsum(seconds - seconds[-1], axis=0)])
    rows, columns = np.minimum(drafting.astype(np.intp), len(seconds) - 1), np.arange(len(drafting))
    lower = beyond[rows, columns]  # interpolated for all depths at once
    between: Floats = np.maximum(lower + (beyond[rows + 1, columns] - lower) * (drafting - rows), 0.0)
    return between


def choose_drafters(values: Sequence[DrafterValue]) -> Ints:
    """Each sequence's drafter (-1: none), of the set of drafters that is the most profitable together."""
    if len(values) == 1:
        return np.where(values[0].profit > 0, 0, -1)
    best, choice = 0.0, np.full(len(values[0].profit), -1)
    numbers = range(1, len(values) + 1) if len(values) <= 3 else (1, len(values))
    for drafters in (subset for number in numbers for subset in combinations(range(len(values)), number)):
        profits = np.stack([values[index].profit for index in drafters])
        assigned = np.where(profits.max(0) > 0, np.array(drafters)[profits.argmax(0)], -1)
        used = [index for index in drafters if (assigned == index).any()]
        total = float(profits.max(0).sum()) - sum([values[index].shared_cost for index in used])
        total *= _SEVERAL_DRAFTERS ** (len(used) - 1)
        if total > best:
            best, choice = total, assigned
    return choice


def _ranks(values: Floats) -> Ints:
    """Of each value in its column, from 0 for the least."""
    order = np.argsort(values, axis=0, kind="stable")
    ranks = np.empty_like(order)
    ranks[order, np.arange(values.shape[1])] = np.arange(len(values))[:, None]
    return ranks


def choose_depths(
    values: Sequence[DrafterValue], drafters: Ints, batch: PlannedBatch, latency: LatencyCache
) -> PlanChoice:
    """How deep each sequence drafts: the tokens of greatest net gain, as many as are most profitable."""
    size, width, step = len(drafters), max([value.net.shape[1] for value in values]), batch.step
    net, gain, rows, seconds, possible = (np.zeros((size, width)) for _ in range(5))
    for index, value in enumerate(values):
        mine, depth = np.flatnonzero(drafters == index), value.net.shape[1]
        net[mine, :depth], gain[mine, :depth], rows[mine, :depth] = value.net[mine], value.gain[mine], value.rows[mine]
        rank = _ranks(-value.net[mine])
        seconds[mine, :depth] = value.seconds[rank, np.arange(depth)] * value.drafted[mine]
        possible[mine, :depth] = np.arange(depth) < batch.rooms[mine, None]
    cells = np.flatnonzero(possible)
    cells = cells[np.argsort(-net.ravel()[cells], kind="stable")]
    sums = [np.concatenate([[0.0], np.cumsum(amount.ravel()[cells])]) for amount in (gain, rows, seconds)]
    extra = latency.extra_array(*step.load.shape, count=int(sums[1][-1]) + 2)
    below = sums[1].astype(np.intp)  # rows, between which the extra seconds are interpolated
    of_rows = (extra[below + 1] - extra[below]) * (sums[1] - below) + extra[below]
    profit = sums[0] - step.load.goodput * (of_rows + sums[2])
    taken = cells[: int(profit.argmax())]
    min_survival = np.choose(drafters + 1, [np.full(size, -1.0), *[value.min_survival for value in values]])
    return PlanChoice(drafters, np.bincount(taken // width, minlength=size), min_survival, float(profit.max()))
