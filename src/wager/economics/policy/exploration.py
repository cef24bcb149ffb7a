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
_FIRST_INTERVAL, _MAX_INTERVAL = 8, 128  # steps before one is explored; the interval doubles each time
_NEGLIGIBLE = 0.01  # of a plain step's tokens: a smaller gain is not looked for
_PLAUSIBLE = 2.0  # standard deviations by which seconds may plausibly differ from what is believed


class ExplorationBudget:
    """Seconds that may be spent on exploration; `share` of the running time."""

    def __init__(self, share: float) -> None:
        self._share, self._seconds = share, -1.0  # -1: no step was taken
        self._streaks: dict[int, int] = {}  # speculating steps since a plain one, by batch size in powers of two
        self._intervals: dict[int, int] = {}  # how long a streak must be before the next plain step
        self._unasked: dict[int, int] = {}  # planned steps since it was asked what other rows cost, by batch size
        self._row_intervals: dict[int, int] = {}  # how many there must be

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
        """Whether to ask in this step if another number of rows than planned is worth a look."""
        size = step.decoding.bit_length()
        self._unasked[size] = steps = self._unasked.get(size, 0) + 1
        interval = self._row_intervals.get(size, _FIRST_INTERVAL)
        if steps < interval:
            return False
        self._unasked[size], self._row_intervals[size] = 0, min(_MAX_INTERVAL, 2 * interval)
        return True

    def depth_to_measure(self, step: PolicyStep, prices: DepthPrices) -> int | None:
        """The depth to which all sequences shall draft in a step that shows what its rows cost; None: it is not worth
        it.

        It is the depth that would gain most over the plan if the difference in rows between them were as far from what
        is believed as is plausible. What it loses if it is as believed is spent.
        """
        planned, profit = prices.planned, prices.gain - step.goodput * prices.seconds
        better = profit - float(np.interp(planned, np.arange(len(profit)), profit))
        hoped = better + step.goodput * _PLAUSIBLE * prices.deviation
        for depth in np.argsort(-hoped).tolist():
            if hoped[depth] <= _NEGLIGIBLE * step.weight:
                break
            if abs(depth - planned) >= 0.5 and self.spend(max(0.0, -better[depth]) / step.goodput, step.plain_seconds):
                self._row_intervals[step.decoding.bit_length()] = _FIRST_INTERVAL
                return int(depth)
        return None


@dataclass(frozen=True, slots=True)
class DepthPrices:
    """What drafting to each depth, from 0, for all sequences brings: weighted tokens, the believed seconds of rows and
    drafting, and the standard deviation of what rows differ from those planned; `planned` is the mean depth planned."""

    gain: Floats
    seconds: Floats
    deviation: Floats
    planned: float
