"""Times the stages of a step: wraps their functions and adds up the wall seconds of each.

The step itself has no timing code; the engine wraps its stages with `Trace.timed` once, when it is constructed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from wager.kernels._native import StageSeconds

R = TypeVar("R")

Clock = Callable[[], float]


class Trace:
    """Seconds by stage of the current step. `clock` gives seconds and may be a fake one in tests."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self._seconds = StageSeconds(clock)
        self.take_into = self._seconds.take_into
        """Writes to a dict the seconds since the last call, by stage; 0 for one that was not called."""

    def timed(self, stage: str, function: Callable[..., R], *last: object) -> Callable[..., R]:
        """`function`, with its wall seconds added to `stage`. It is called with a few arguments, by position, and then
        with `last`."""
        return self._seconds.timed(stage, function, *last)

    def take(self) -> Mapping[str, float]:
        """A dict of the same."""
        taken: dict[str, float] = {}
        self.take_into(taken)
        return taken
