"""Exploration of what rows cost: a step that verifies more or fewer draft tokens than planned.

Steps of the planned number of rows are observed all the time, others never, so a policy that believes that they are too
expensive would never learn that they are not. One is taken if it would pay, were it as much faster than believed as is
plausible; what it loses if it is not is paid from the exploration budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from wager.economics.acceptance import LARGE_BATCH
from wager.economics.latency import LatencyCache, LatencyModel, difference_deviations
from wager.economics.policy.base import LONGEST_INTERVAL, UPDATE_INTERVAL
from wager.economics.policy.exploration import ExplorationBudget
from wager.economics.policy.own_seconds import OwnSeconds
from wager.economics.policy.readiness import TRIAL, DrafterReadiness
from wager.economics.policy.sequence_state import DrafterProfile, PolicyStep

_PLAUSIBLE = 2.5  # standard deviations by which seconds may plausibly differ from what is believed
_NEGLIGIBLE = 0.01  # of the tokens of a plain step: what a step must be able to gain to be worth a look
_FIRST_INTERVAL = 2 * UPDATE_INTERVAL  # steps between those in which it is asked whether to explore; it doubles
_STEPS_PLANNED = 2  # in which the policy plans because of such a step: itself, and the next one with the new prices


class MeasuringStep(NamedTuple):
    """All sequences draft to `depth` with one drafter, by index, and all of it is verified; 0: none drafts."""

    drafter: int
    depth: int


@dataclass(frozen=True, slots=True)
class DepthPrices:
    """Drafting to each depth, from 0, for all sequences: its expected gain in weighted tokens, the seconds that its
    rows and drafting add, and how uncertain it is what the rows differ from those of the plan, in seconds."""

    gain: Sequence[float]
    seconds: Sequence[float]
    deviation: Sequence[float]


class RowExploration:
    """Decides when a step measures what rows cost, and how many. `latency` is the model behind `cache`."""

    def __init__(
        self,
        latency: LatencyModel,
        cache: LatencyCache,
        drafters: Sequence[DrafterProfile],
        *,
        share: float,
        own: OwnSeconds,
    ) -> None:
        self._latency, self._cache, self._drafters, self._own = latency, cache, drafters, own
        self._budget = ExplorationBudget(share, saved_up=True)
        self._streaks: dict[int, int] = {}  # speculating steps since a plain one, by batch size in powers of two
        self._plain_intervals: dict[int, int] = {}  # how long a streak must be before the next plain step
        self._last_asked = 0  # the step in which it was last asked whether to take a plain one
        self._now = 0  # steps taken; planning is skipped in most of those without drafts
        self._asked: dict[int, int] = {}  # when it was last asked whether to explore, by batch size
        self._intervals: dict[int, int] = {}  # how many steps there must be between
        self._postponed: MeasuringStep | None = None  # one that waits for its drafter

    def earn(self, seconds: float, *, steps: int) -> None:
        """So many steps took that long together."""
        self._now += steps
        self._budget.earn(seconds, steps=steps)

    def takes_plain_step(self, step: PolicyStep, *, speculates: bool) -> bool:
        """Whether to take this step without drafts, to measure its latency where every step `speculates`; to be asked
        every few steps."""
        if not self._latency.learns:
            return False
        size, passed = step.decoding.bit_length(), step.number - self._last_asked
        self._last_asked = step.number
        self._streaks[size] = streak = self._streaks.get(size, 0) + passed if speculates else 0
        interval = self._plain_intervals.get(size, _FIRST_INTERVAL)
        if streak < interval:
            return False
        cost = step.load.speculation_gain + _STEPS_PLANNED * self._own.of_planning
        if not self._budget.spend(cost, step.load.plain_seconds):
            return False
        self._streaks[size], self._plain_intervals[size] = 0, min(LONGEST_INTERVAL, 2 * interval)
        return True

    def measure(self, step: PolicyStep, readiness: DrafterReadiness, *, planned_rows: int) -> MeasuringStep | None:
        """How to draft in this step to measure; None: as planned, which verifies about `planned_rows` draft tokens. If
        it is by a drafter that rests, that wakes, and the step is taken when it is ready."""
        if (postponed := self._postponed) is not None:
            name = self._drafters[postponed.drafter].name
            if name in readiness.unready(step.number) and name not in readiness.resting:
                return None
            self._postponed = None
            if name not in readiness.resting and step.candidates:
                return postponed
        if not (self._latency.learns and self._is_due(step)):
            return None
        count, load = len(step.candidates), step.load
        own_seconds = _STEPS_PLANNED * self._own.of_planning
        least_cost, budget = self._budget.least_cost(load.plain_seconds), self._budget.seconds
        if not count or load.goodput <= 0 or least_cost + own_seconds > budget:
            return None
        every = 1 + count // LARGE_BATCH  # some sequences' forecasts are averaged
        plans = [state.plan for state in step.candidates[::every] if state.plan.forecasts]
        best, best_value, cost, planned = None, 0.0, 0.0, planned_rows / count
        for index in range(len(self._drafters) if plans else 0):
            width = min([plan.forecasts[index].shape[1] for plan in plans])
            forecasts = [plan.forecasts[index][plan.row, :width].tolist() for plan in plans]
            survival = [sum(column) / len(plans) for column in zip(*forecasts, strict=True)]
            prices = self._prices(step, index, survival, planned_rows)
            profit = [gain - load.goodput * seconds for gain, seconds in zip(prices.gain, prices.seconds, strict=True)]
            usual = _between(profit, planned)
            for depth, (mine, deviation) in enumerate(zip(profit, prices.deviation, strict=True)):
                better = mine - usual
                hoped = better + load.goodput * _PLAUSIBLE * deviation
                loss = max(-better / load.goodput, least_cost) + own_seconds
                worth = hoped > _NEGLIGIBLE * load.weight and loss <= budget and hoped > best_value * loss
                if worth and abs(depth - planned) >= 0.5:  # nearer ones are the plan
                    best, best_value, cost = MeasuringStep(index, depth), hoped / loss, loss
        if best is None or not self._budget.spend(cost, load.plain_seconds):
            return None
        self._intervals[step.decoding.bit_length()] = _FIRST_INTERVAL
        if best.depth and self._drafters[best.drafter].name in readiness.unready(step.number):
            readiness.keep(step, best.drafter, steps=TRIAL)
            self._postponed, best = best, None
        return best

    def _is_due(self, step: PolicyStep) -> bool:
        size = step.decoding.bit_length()
        interval = self._intervals.get(size, _FIRST_INTERVAL)
        if self._now - self._asked.setdefault(size, self._now) < interval:
            return False
        self._asked[size], self._intervals[size] = self._now, min(LONGEST_INTERVAL, 2 * interval)
        return True

    def _prices(self, step: PolicyStep, index: int, survival: Sequence[float], planned_rows: int) -> DepthPrices:
        (name, capabilities, _), count, load = self._drafters[index], len(step.candidates), step.load
        depth = len(survival)
        missed = (
            sum(
                [
                    state.catch_up_seconds(index, capabilities)
                    for state in step.candidates
                    if state.seq_id not in step.plan
                ]
            )
            if capabilities.catch_up_s
            else 0.0
        )
        extra, of_drafting = self._cache.extra_seconds(*load.shape, count=count * depth), self._cache.draft_seconds
        depths, weight = range(1, depth + 1), load.weight / step.decoding * count
        (rows, requests, context_sum), planned = load.shape, load.rows + planned_rows
        return DepthPrices(
            gain=[weight * sum_ for sum_ in accumulate(survival, initial=0.0)],
            seconds=[extra[0], *[extra[count * deep] + missed + of_drafting(name, count, deep) for deep in depths]],
            deviation=difference_deviations(
                self._latency,
                planned,
                [rows + count * deep for deep in range(depth + 1)],
                requests=requests,
                context_sum=context_sum,
            ),
        )


def _between(values: Sequence[float], at: float) -> float:
    """`values` at 0, 1, ..., interpolated; the last one beyond."""
    below = min(int(at), len(values) - 1)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (at - below)
