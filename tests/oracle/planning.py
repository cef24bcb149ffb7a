"""How much each sequence is to draft, with arrays: the reference of csrc/planning.h."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wager.economics.acceptance import _MAX_DEPTH, AcceptanceModel, Floats
from wager.kernels._native import SequenceAcceptance

MAX_MIN_SURVIVAL = 0.95
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]
_HERMITE_POINTS = np.array([-math.sqrt(3.0), 0.0, math.sqrt(3.0)])[:, None, None]  # Gauss-Hermite quadrature
_HERMITE_WEIGHTS = np.array([1 / 6, 2 / 3, 1 / 6])[:, None, None]


def forecast(model: AcceptanceModel, sequences: Sequence[SequenceAcceptance], depth: int) -> Floats:
    """Survival of depths 1 .. `depth`, [sequences, depth], averaged over what the offset of a sequence may be."""
    log_odds = np.array([model.depths.log_odds[min(index, _MAX_DEPTH - 1)] for index in range(depth)])
    mean = np.array([sequence.mean for sequence in sequences])[:, None]
    deviation = np.sqrt(np.array([sequence.variance for sequence in sequences]))[:, None]
    log_odds = log_odds + mean + deviation * _HERMITE_POINTS  # [points, sequences, depth]
    survival = np.cumprod(1.0 / (1.0 + np.exp(-log_odds)), axis=2)
    expected: Floats = (survival * _HERMITE_WEIGHTS).sum(0)
    return expected


def forecast_admission(
    model: AcceptanceModel, survival: Floats, *, min_admitted: Floats, min_survival: Floats, unjudged: Bools
) -> tuple[Floats, Floats, Floats]:
    """What to expect of drafting tokens of this survival: the probabilities that one is accepted, verified at all, and
    drafted at all, each [sequences, depth]. Once drafted, those with scores are verified only above `min_admitted`, and
    the drafter stops after one below `min_survival`, except for sequences that are `unjudged` (each [sequences]).
    Scores are taken to move survival as they lately did; they distinguish tokens and leave the average unchanged."""
    everything = survival, (survival > 0).astype(np.float64), np.ones_like(survival)
    if not model.has_scores:
        return everything
    shifts = np.reshape(model.shifts(), (-1, _MAX_DEPTH))[:, np.minimum(np.arange(survival.shape[1]), _MAX_DEPTH - 1)]
    later = (survival / np.maximum(1 - survival, 1e-6))[:, None] * shifts  # odds, [sequences, samples, depth]
    later /= 1 + later
    later *= (survival / np.maximum(later.mean(1), 1e-9))[:, None]
    np.minimum(later, 1.0, out=later)
    drafted = np.ones(later.shape, dtype=bool)
    drafted[:, :, 1:] = later[:, :, :-1] > min_survival[:, None, None]
    verified = drafted & (later > min_admitted[:, None, None])
    judged = [each.mean(1) for each in (later * verified, verified, drafted)]
    accepted, rows, made = (np.where(unjudged[:, None], *pair) for pair in zip(everything, judged, strict=True))
    return accepted, rows, made


class PlannedBatch(NamedTuple):
    """Goodput, and of each candidate the room for draft tokens and the weight of a token, [sequences]."""

    goodput: float
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
        a row, and its token survives less. What a call takes beside its passes is paid by then."""
        if not (self.stops_early and self.model.has_scores):
            return np.full(len(batch.weights), -1.0)
        next_rate = float(1.0 / (1.0 + np.exp(-self.model.depths.log_odds[1])))
        cost = (row_cost + batch.goodput * float(self.seconds[-1, :2][-1])) / next_rate
        return np.minimum(cost / batch.weights, MAX_MIN_SURVIVAL)


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
    seconds, weights, goodput = forecast.seconds, batch.weights, batch.goodput
    min_survival = forecast.min_survival(batch, row_cost)
    accepted, rows, drafted = forecast_admission(
        forecast.model,
        forecast.survival,
        min_admitted=row_cost / weights,
        min_survival=min_survival,
        unjudged=forecast.unjudged,
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
    """Each sequence's drafter (-1: none): the one that is worth most to it, of those that are left when none is more
    profitable to leave out."""

    def assign(drafters: Sequence[int]) -> tuple[float, Ints]:
        profits = np.stack([values[index].profit for index in drafters])
        assigned = np.where(profits.max(0) > 0, np.array(drafters)[profits.argmax(0)], -1)
        return profits.max(0).sum() - sum([values[i].shared_cost for i in drafters if (assigned == i).any()]), assigned

    left = list(range(len(values)))
    best, choice = assign(left)
    while len(left) > 1:
        fewer = [[index for index in left if index != gone] for gone in left]
        tried = [assign(drafters) for drafters in fewer]
        number = max(range(len(tried)), key=lambda number: tried[number][0])
        if tried[number][0] <= best:
            break
        (best, choice), left = tried[number], fewer[number]
    return choice


def _ranks(values: Floats) -> Ints:
    """Of each value in its column, from 0 for the least."""
    order = np.argsort(values, axis=0, kind="stable")
    ranks = np.empty_like(order)
    ranks[order, np.arange(values.shape[1])] = np.arange(len(values))[:, None]
    return ranks


def choose_depths(values: Sequence[DrafterValue], drafters: Ints, batch: PlannedBatch, extra: Floats) -> PlanChoice:
    """How deep each sequence drafts: the tokens of greatest net gain, as many as are most profitable."""
    size, width = len(drafters), max([value.net.shape[1] for value in values])
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
    below = sums[1].astype(np.intp)  # rows, between which the extra seconds are interpolated
    of_rows = (extra[below + 1] - extra[below]) * (sums[1] - below) + extra[below]
    profit = sums[0] - batch.goodput * (of_rows + sums[2])
    taken = cells[: int(profit.argmax())]
    min_survival = np.choose(drafters + 1, [np.full(size, -1.0), *[value.min_survival for value in values]])
    return PlanChoice(drafters, np.bincount(taken // width, minlength=size), min_survival, float(profit.max()))


def most_profitable(
    forecasts: Sequence[DrafterForecast], batch: PlannedBatch, extra: Floats, *, row_costs: Sequence[float]
) -> PlanChoice:
    """Of the plans for each cost of a row, in turn until one drafts for every sequence."""
    size = len(batch.weights)
    best = PlanChoice(np.full(size, -1), np.zeros(size, np.intp), np.full(size, -1.0))
    for row_cost in row_costs:
        values = [evaluate(forecast, batch, row_cost=row_cost) for forecast in forecasts]
        choice = choose_depths(values, choose_drafters(values), batch, extra)
        best = choice if choice.profit > best.profit else best
        if best.depths.all():
            break
    return best
