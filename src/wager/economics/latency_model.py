"""What the policies and the simulation need of a latency model: seconds of a step by its shape.

Provided by the calibrated surface (latency/surface.py), by the roofline (planner/latency.py) and by the published
measurements (simulation/published_latency.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from wager.types import StepRecord


class LatencyModel(Protocol):
    """Seconds of a step by its shape. `rows` are all rows of the pass, known tokens and draft tokens; `requests` the
    sequences in it; `context_sum` the cached positions of all of them together, before the step."""

    @property
    def learns(self) -> bool:
        """Whether observed steps correct it."""

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        """The step without drafting: schedule, policy, forward, accept, commit, observe."""

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        """Drafting for `requests` sequences, each to `depth`; 0 for none."""

    def difference_deviation(self, rows: int, other_rows: int, *, requests: int, context_sum: int) -> float:
        """How uncertain the difference in seconds of steps of two row counts is: its standard deviation; 0 where
        nothing is learned."""

    def observe(self, record: StepRecord) -> None:
        """A step was taken."""

    def observe_draft(self, drafter: str, requests: int, depth: int, *, seconds: float) -> None:
        """Drafting for `requests` sequences to `depth` took that long."""


def seconds_by_rows(latency: LatencyModel, rows: Sequence[int], requests: int, context_sum: int) -> list[float]:
    """Seconds of a step of each of several row counts, ascending from 1; a model may have a quicker method for it."""
    method: Callable[[Sequence[int], int, int], list[float]] | None = getattr(latency, "seconds_by_rows", None)
    if method is not None:
        return method(rows, requests, context_sum)
    return [latency.seconds(count, requests, context_sum) for count in rows]


def difference_deviations(
    latency: LatencyModel, rows: int, others: Sequence[int], *, requests: int, context_sum: int
) -> list[float]:
    """`difference_deviation` from each of several counts of rows; a model may have a quicker method for it."""
    method: Callable[..., list[float]] | None = getattr(latency, "difference_deviations", None)
    if method is not None:
        return method(rows, others, requests=requests, context_sum=context_sum)
    one = latency.difference_deviation
    return [one(rows, other, requests=requests, context_sum=context_sum) for other in others]


class StaticLatency:
    """Base of latency models that never change: observed steps are ignored."""

    @property
    def learns(self) -> bool:
        return False

    def difference_deviation(self, rows: int, other_rows: int, *, requests: int, context_sum: int) -> float:
        del rows, other_rows, requests, context_sum
        return 0.0

    def observe(self, record: StepRecord) -> None:
        del record

    def observe_draft(self, drafter: str, requests: int, depth: int, *, seconds: float) -> None:
        del drafter, requests, depth, seconds
