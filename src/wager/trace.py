"""Times the stages of a step: wraps their functions and adds up the wall seconds of each.

The step itself has no timing code; the engine wraps its stages with `Trace.timed` once, when it is constructed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Clock = Callable[[], float]


class Trace:
    """Seconds by stage of the current step. `clock` gives seconds and may be a fake one in tests."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self._seconds: dict[str, float] = {}
        self._none: dict[str, float] = {}  # 0 for every stage

    def timed(self, stage: str, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, with its wall seconds added to `stage`."""
        clock = self.clock
        self._none[stage] = 0.0
        self._seconds.setdefault(stage, 0.0)

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            begin = clock()
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds[stage] += clock() - begin

        return run

    def take(self) -> Mapping[str, float]:
        """Seconds since the last call, by stage; 0 for one that was not called."""
        seconds, self._seconds = self._seconds, self._none.copy()
        return seconds
