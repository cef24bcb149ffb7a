"""Exploration: drafts and plain steps that are not expected to pay, taken to keep the estimates current. They may take
a fixed share of the running time, so their cost is bounded."""

from __future__ import annotations

EXPLORATION_SHARE = 0.004  # of the running time: hardly noticeable, yet enough to notice a change within seconds
_MAX_SAVED = 1500  # steps whose budget can accumulate, so that a burst costs no more than a few steps
_MIN_COST = 0.005  # of a plain step
_MOST_DEBT_S = 10.0  # of running time whose share may be owed: a pause of the machine must not end all exploration


class ExplorationBudget:
    """Seconds that may be spent on exploration; `share` of the running time. `saved_up`: as many as can accumulate may
    be spent at once, since what is learned at first helps most."""

    def __init__(self, share: float, *, saved_up: bool = False) -> None:
        self._share, self._saved_up = share, saved_up
        self.seconds = 0.0  # those that are left; negative if something took longer than was expected

    def earn(self, seconds: float, *, steps: int = 1) -> None:
        """`steps` steps took so long together."""
        most = self._share * _MAX_SAVED * seconds / steps
        self.seconds = most if self._saved_up else min(self.seconds + self._share * seconds, most)
        self._saved_up = False

    def affords_draft(self, plain_seconds: float) -> bool:
        """Whether the budget covers the cheapest exploration draft."""
        return self.seconds >= self.least_cost(plain_seconds)

    def least_cost(self, plain_seconds: float) -> float:
        """What any exploration costs at least, so that it is not made in every step."""
        return _MIN_COST * plain_seconds

    def spend(self, seconds: float, plain_seconds: float) -> bool:
        """Take `seconds` from the budget; False if it has fewer. `plain_seconds` are those of a step without drafts."""
        cost = max(seconds, self.least_cost(plain_seconds))
        if cost > self.seconds:
            return False
        self.seconds -= cost
        return True

    def owe(self, seconds: float) -> None:
        """What was spent on took so much longer than was expected."""
        self.seconds = max(-self._share * _MOST_DEBT_S, self.seconds - seconds)
