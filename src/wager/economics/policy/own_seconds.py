"""What the policy itself takes, and what it can afford: its own seconds are part of the step that it plans."""

from __future__ import annotations

from typing import Literal

from wager.economics.policy.base import EARLY_STEPS, SMOOTHING

StepKind = Literal["planned", "plain", "unjudged", "judged"]

_BUDGET = 0.015  # of a step's seconds: to keep to it learning is slowed down
_PLANNING_BUDGET = 0.005  # the share of it for planning
_MAX_PACE = 4.0  # the most by which learning is slowed down
_SHARE_SMOOTHING = 0.01  # weight of a new step in the mean share, which spans several plans


class OwnSeconds:
    """Running means of the policy's seconds, by kind of step: those it planned in, and of the others those without
    drafts, with drafts that are verified as they are, and with drafts that it judged. On a clock that does not count
    them they are 0, and nothing is slowed down."""

    def __init__(self) -> None:
        self.pace = 1.0
        """By how much fewer steps than usual it learns from."""
        self.of_judging = 0.0
        """What judging the drafts of a step takes; before one without it was timed, half of such a step's."""
        self._seconds: dict[StepKind, float] = {}
        self._observed: dict[StepKind, int] = {}
        self._step_seconds = self._share = 0.0
        self._steps, self._last = 0, ""

    def observe(self, seconds: float, *, step_seconds: float, kind: StepKind) -> None:
        """A step of `step_seconds`, `seconds` of them the policy's."""
        before, count = self._seconds.get(kind, seconds), self._observed.get(kind, 0) + 1
        # judging after steps without it finds the caches cold, so that more does not show what it would take every time
        if kind != "judged" or self._last == kind or seconds < before or kind not in self._seconds:
            self._seconds[kind] = before + max(SMOOTHING, 1 / count) * (seconds - before)  # at first a plain mean
            self._observed[kind] = count
            judged = self._seconds.get("judged", 0.0)
            self.of_judging = max(0.0, judged - self._seconds.get("unjudged", judged / 2))
        self._last = kind
        self._step_seconds += (SMOOTHING if self._step_seconds else 1.0) * (step_seconds - self._step_seconds)
        self._steps += 1
        if self._steps > EARLY_STEPS and step_seconds > 0:
            self._share += _SHARE_SMOOTHING * (seconds / step_seconds - self._share)
            over = min(2.0, self._share / _BUDGET) - 1
            self.pace = min(_MAX_PACE, max(1.0, self.pace * (1 + SMOOTHING * over)))

    @property
    def of_planning(self) -> float:
        """What a step takes in which it plans."""
        return self._seconds.get("planned", 0.0)

    @property
    def planning_interval(self) -> float:
        """Steps between plans that keep planning within its budget."""
        if not self._step_seconds:
            return 0.0
        return self.of_planning / (_PLANNING_BUDGET * self._step_seconds)

    @property
    def judging_interval(self) -> float:
        """Steps between judged ones that keep judging to half of that, where it gains nothing."""
        return 2.0 * self.of_judging / (_PLANNING_BUDGET * self._step_seconds) if self._step_seconds else 0.0
