"""A clock that is set by hand."""

from __future__ import annotations


class FakeClock:
    """Stands in for `time.perf_counter`: call it for the seconds, `advance` it by hand."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds
