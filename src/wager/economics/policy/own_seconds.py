"""What the policy itself takes, and what it can afford: its own seconds are part of the step that it plans."""

from __future__ import annotations

from typing import Literal

StepKind = Literal["plain", "unjudged", "judged"]

BUDGET = 0.015  # of a step's seconds: what planning and learning are slowed down to
_SMOOTHING = 0.05  # weight of a new step in the running means
_MAX_PACE = 16.0


class OwnSeconds:
    """Running means of the policy's seconds in steps without drafts, with drafts that are verified as they are, and
    with drafts that it judges. On a clock that does not count them they are 0, and nothing is slowed down."""

    def __init__(self) -> None:
        self.pace = 1.0
        """By how much less often than usual it plans and learns, to keep to BUDGET."""
        self._seconds: dict[StepKind, float] = {}
        self._drafts = 0.0

    def observe(self, seconds: float, *, step_seconds: float, kind: StepKind, drafts: int) -> None:
        """A step of `step_seconds` with that many drafts, `seconds` of them the policy's."""
        before = self._seconds.get(kind, seconds)
        self._seconds[kind] = before + _SMOOTHING * (seconds - before)
        if drafts:
            self._drafts += _SMOOTHING * (drafts - self._drafts)
        over = min(2.0, seconds / (BUDGET * step_seconds)) - 1 if step_seconds > 0 else 0.0
        self.pace = min(_MAX_PACE, max(1.0, self.pace * (1 + _SMOOTHING * over)))

    @property
    def per_draft(self) -> float:
        """What one more draft takes; before a step without drafts was timed, half of what those with drafts take."""
        drafting = max(self._seconds.get("judged", 0.0), self._seconds.get("unjudged", 0.0))
        plain = self._seconds.get("plain", drafting / 2)
        return max(0.0, drafting - plain) / self._drafts if self._drafts else 0.0

    @property
    def of_judging(self) -> float:
        """What judging the drafts of a step takes; before one without it was timed, half of such a step's."""
        judged = self._seconds.get("judged", 0.0)
        return max(0.0, judged - self._seconds.get("unjudged", judged / 2))
