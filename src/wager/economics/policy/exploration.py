"""Exploration: drafts and plain steps that are not expected to pay, taken to keep the estimates current. They may take
a fixed share of the running time, so their cost is bounded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wager.economics.acceptance import Floats
from wager.economics.policy.sequence_state import PolicyStep

EXPLORATION_SHARE = 0.004  # of the running time: hardly noticeable, yet enough to notice a change within seconds
_MAX_SAVED = 1500  # steps whose budget can accumulate, so that a burst costs no more than a few steps
_MIN_COST = 0.005  # of a plain step: the least an exploration draft counts for, so that it is not made in every step
_INITIAL_STEPS = 500  # steps whose share can be spent at once: at first nothing is known, and all that follow gain
_FIRST_INTERVAL, _MAX_INTERVAL = 8, 128  # steps before a plain or wide one; the interval doubles each time
_NEGLIGIBLE = 0.01  # of a plain step's tokens: a smaller gain is not looked for
_PLAUSIBLE = 2.0  # standard deviations by which rows may be cheaper than believed: beyond, one in fifty


class ExplorationBudget:
    """Seconds that may be spent on exploration; `share` of the running time."""

    def __init__(self, share: float) -> None:
        self._share, self._seconds = share, -1.0  # -1: no step was taken
        self._streaks: dict[int, int] = {}  # speculating steps since a plain one, by batch size in powers of two
        self._intervals: dict[int, int] = {}  # how long a streak must be before the next plain step
        self._since_wide: dict[int, int] = {}  # planned steps since rows were last looked at, by batch size
        self._wide_intervals: dict[int, int] = {}  # how many there must be

    def earn(self, step_seconds: float) -> None:
        if self._seconds < 0:
            self._seconds = self._share * _INITIAL_STEPS * step_seconds
        self._seconds = min(self._seconds + self._share * step_seconds, self._share * _MAX_SAVED * step_seconds)

    def affords_draft(self, plain_seconds: float) -> bool:
        """Whether the budget covers the cheapest exploration draft."""
        return self._seconds >= _MIN_COST * plain_seconds

    def spend(self, seconds: float, plain_seconds: float) -> bool:
        """Take `seconds` from the budget; False if it has fewer. `plain_seconds` are those of a step without drafts."""
        cost = max(seconds, _MIN_COST * plain_seconds)
        if cost > self._seconds:
            return False
        self._seconds -= cost
        return True

    def takes_plain_step(self, step: PolicyStep, *, speculates: bool) -> bool:
        """Whether to take this step without drafts, to measure its latency where every step `speculates`."""
        size = step.decoding.bit_length()
        self._streaks[size] = streak = self._streaks.get(size, 0) + 1 if speculates else 0
        interval = self._intervals.get(size, _FIRST_INTERVAL)
        if streak < interval or not self.spend(step.speculation_gain, step.plain_seconds):
            return False
        self._streaks[size], self._intervals[size] = 0, min(_MAX_INTERVAL, 2 * interval)
        return True

    def considers_rows(self, step: PolicyStep) -> bool:
        """Whether to ask in this step if more rows than planned are worth a look."""
        size = step.decoding.bit_length()
        self._since_wide[size] = steps = self._since_wide.get(size, 0) + 1
        interval = self._wide_intervals.get(size, _FIRST_INTERVAL)
        if steps < interval:
            return False
        self._since_wide[size], self._wide_intervals[size] = 0, min(_MAX_INTERVAL, 2 * interval)
        return True

    def wide_depth(self, step: PolicyStep, prices: WidePrices) -> int:
        """The depth to which all sequences draft in a step that shows what rows cost; 0: it is not worth it.

        It is where rows that are as much cheaper than believed as is plausible would make drafting deeper than planned
        pay; its cost, if they are as dear as believed, is spent.
        """
        cost = step.goodput * (prices.extra + prices.drafting)
        hoped = prices.gain - cost + step.goodput * np.minimum(prices.extra, _PLAUSIBLE * prices.deviation)
        depths = np.arange(len(cost))
        better = hoped - np.interp(prices.planned, depths, hoped)
        better[depths <= prices.planned] = 0.0
        profit = prices.gain - cost
        for depth in np.argsort(-better).tolist():
            if better[depth] <= _NEGLIGIBLE * step.weight:
                break
            loss = float(np.interp(prices.planned, depths, profit)) - float(profit[depth])
            if self.spend(max(0.0, loss) / step.goodput, step.plain_seconds):
                return int(depth)
        return 0


@dataclass(frozen=True, slots=True)
class WidePrices:
    """What drafting to each depth, from 0, for all sequences would bring: weighted tokens, the believed seconds of its
    rows and of drafting, and the standard deviation of those of the rows; `planned` is the mean depth planned."""

    gain: Floats
    extra: Floats
    drafting: Floats
    deviation: Floats
    planned: float
