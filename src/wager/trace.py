"""Times the stages of a step: wraps their functions and adds up the wall seconds of each.

The step itself has no timing code; the engine wraps its stages with `Trace.timed` once, when it is constructed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from wager.kernels import _native

R = TypeVar("R")

Clock = Callable[[], float]


class Trace:
    """Seconds by stage of the current step. `clock` gives seconds and may be a fake one in tests."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self._seconds: dict[str, float] = {}
        self._none: dict[str, float] = {}  # 0 for every stage
        # The same in C++ (csrc/stage_bindings.cpp): it takes part in every stage.
        self._native = _native.StageSeconds() if clock is time.perf_counter else None

    def timed(self, stage: str, function: Callable[..., R], *last: object) -> Callable[..., R]:
        """`function`, with its wall seconds added to `stage`. It is called with a few arguments, by position, and then
        with `last`."""
        if self._native is not None:
            native: Callable[..., R] = self._native.timed(stage, function, *last)
            return native
        clock = self.clock
        self._none[stage] = 0.0
        self._seconds.setdefault(stage, 0.0)

        def run(*args: object) -> R:
            begin = clock()
            try:
                return function(*args, *last)
            finally:
                self._seconds[stage] += clock() - begin

        return run

    def take(self) -> Mapping[str, float]:
        """Seconds since the last call, by stage; 0 for one that was not called."""
        if self._native is not None:
            taken: Mapping[str, float] = self._native.take()
            return taken
        seconds, self._seconds = self._seconds, self._none.copy()
        return seconds
