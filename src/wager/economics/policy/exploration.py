"""Exploration: drafts and plain steps that are not expected to pay, taken to keep the estimates current. They may take
a fixed share of the running time, so their cost is bounded."""

from __future__ import annotations

from wager.economics.policy.sequence_state import PolicyStep

EXPLORATION_SHARE = 0.004  # of the running time: hardly noticeable, yet enough to notice a change within seconds
_MAX_SAVED = 1500  # steps whose budget can accumulate, so that a burst costs no more than a few steps
_MIN_COST = 0.005  # of a plain step: the least an exploration draft counts for, so that it is not made in every step
_FIRST_INTERVAL, _MAX_INTERVAL = 8, 128  # speculating steps before a plain one; the interval doubles each time


class ExplorationBudget:
    """Seconds that may be spent on exploration; `share` of the running time."""

    def __init__(self, share: float) -> None:
        self._share, self._seconds = share, 0.0
        self._streaks: dict[int, int] = {}  # speculating steps since a plain one, by batch size in powers of two
        self._intervals: dict[int, int] = {}  # how long a streak must be before the next plain step

    def earn(self, step_seconds: float) -> None:
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
