"""Exploration of what rows cost: a step that verifies more or fewer draft tokens than planned.

Steps of the planned number of rows are observed all the time, others never, so a policy that believes that they are too
expensive would never learn that they are not. One is taken if it would pay, were it as much faster than believed as is
plausible; what it loses if it is not is paid from the exploration budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wager.economics.acceptance import LARGE_BATCH, Floats
from wager.economics.latency_cache import LatencyCache
from wager.economics.latency_model import LatencyModel
from wager.economics.policy.base import LONGEST_INTERVAL, UPDATE_INTERVAL
from wager.economics.policy.exploration import ExplorationBudget
from wager.economics.policy.own_seconds import OwnSeconds
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

    gain: Floats
    seconds: Floats
    deviation: Floats


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

    def measure(self, step: PolicyStep, *, planned_rows: int) -> MeasuringStep | None:
        """How to draft in this step to measure; None: as planned, which verifies about `planned_rows` draft tokens."""
        if not (self._latency.learns and self._is_due(step)):
            return None
        count, load = len(step.candidates), step.load
        every = 1 + count // LARGE_BATCH  # some sequences' forecasts are averaged
        plans = [state.plan for state in step.candidates[::every] if state.plan.forecasts]
        if not plans or load.goodput <= 0:
            return None
        best, best_value, cost = None, 0.0, 0.0
        own_seconds = _STEPS_PLANNED * self._own.of_planning
        for index in range(len(self._drafters)):
            width = min([plan.forecasts[index].shape[1] for plan in plans])
            survival = np.mean([plan.forecasts[index][plan.row, :width] for plan in plans], axis=0)
            prices = self._prices(step, index, survival, planned_rows)
            depths = np.arange(len(prices.gain))
            profit = prices.gain - load.goodput * prices.seconds
            better = profit - float(np.interp(planned_rows / count, depths, profit))
            hoped = better + load.goodput * _PLAUSIBLE * prices.deviation
            loss = np.maximum(-better / load.goodput, self._budget.least_cost(load.plain_seconds)) + own_seconds
            worth = (hoped > _NEGLIGIBLE * load.weight) & (loss <= self._budget.seconds)
            worth &= np.abs(depths - planned_rows / count) >= 0.5  # nearer ones are the plan
            value = np.where(worth, hoped / loss, 0.0)
            depth = int(value.argmax())
            if value[depth] > best_value:
                best, best_value, cost = MeasuringStep(index, depth), float(value[depth]), float(loss[depth])
        if best is None or not self._budget.spend(cost, load.plain_seconds):
            return None
        self._intervals[step.decoding.bit_length()] = _FIRST_INTERVAL
        return best

    def _is_due(self, step: PolicyStep) -> bool:
        size = step.decoding.bit_length()
        interval = self._intervals.get(size, _FIRST_INTERVAL)
        if self._now - self._asked.setdefault(size, self._now) < interval:
            return False
        self._asked[size], self._intervals[size] = self._now, min(LONGEST_INTERVAL, 2 * interval)
        return True

    def _prices(self, step: PolicyStep, index: int, survival: Floats, planned_rows: int) -> DepthPrices:
        (name, capabilities, _), count, load = self._drafters[index], len(step.candidates), step.load
        depth = len(survival)
        missed = sum([state.catch_up_seconds(index, capabilities) for state in step.candidates
                      if state.seq_id not in step.plan]) if capabilities.catch_up_s else 0.0  # fmt: skip
        extra = self._cache.extra_seconds(*load.shape, count=count * depth)
        depths = range(depth + 1)
        drafting = [0.0, *(missed + self._cache.draft_seconds(name, count, deep) for deep in depths[1:])]
        (rows, requests, context_sum), deviation = load.shape, self._latency.difference_deviation
        planned = rows + planned_rows
        return DepthPrices(
            gain=np.concatenate([[0.0], np.cumsum(survival)]) * load.weight / step.decoding * count,
            seconds=np.array([extra[count * deep] for deep in depths]) + drafting,
            deviation=np.array(
                [deviation(planned, rows + count * deep, requests=requests, context_sum=context_sum) for deep in depths]
            ),
        )
