"""What the policies and the simulation need of a latency model: seconds of a step by its shape.

A measured surface (latency), a roofline (costmodel) and the published curves (simulation) all provide it.
"""

from __future__ import annotations

from typing import Protocol

from wager.types import StepRecord


class LatencyModel(Protocol):
    """Seconds of a step by its shape. `rows` are all rows of the pass, known tokens and guesses; `requests` the
    sequences in it; `context_sum` the cached positions of all of them together, before the step."""

    @property
    def learns(self) -> bool:
        """Whether observed steps correct it."""

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        """The step without drafting: schedule, policy, forward, accept, commit, observe."""

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        """Drafting for `requests` sequences, each to `depth`; 0 for none."""

    def observe(self, record: StepRecord) -> None:
        """A step was taken."""

    def observe_draft(self, drafter: str, requests: int, depth: int, *, seconds: float) -> None:
        """Drafting for `requests` sequences to `depth` took that long."""


class StaticLatency:
    """The part of a LatencyModel that never changes what it says: observed steps are ignored."""

    @property
    def learns(self) -> bool:
        return False

    def observe(self, record: StepRecord) -> None:
        del record

    def observe_draft(self, drafter: str, requests: int, depth: int, *, seconds: float) -> None:
        del drafter, requests, depth, seconds
