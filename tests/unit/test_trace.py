"""The seconds of stages: natively timed and in Python alike."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable

import pytest

from wager.testing import FakeClock
from wager.trace import Trace


@pytest.mark.parametrize("clock", [time.perf_counter, lambda: time.perf_counter()], ids=["native", "python"])
def test_seconds_are_added_to_the_stage_until_they_are_taken(clock: Callable[[], float]) -> None:
    trace = Trace(clock)
    slow, none = trace.timed("slow", time.sleep), trace.timed("none", lambda: None)
    other = trace.timed("slow", time.sleep)
    assert trace.take() == {"slow": 0.0, "none": 0.0}
    begin = time.perf_counter()
    slow(0.02)
    other(0.01)
    none()
    taken, wall = trace.take(), time.perf_counter() - begin
    assert list(taken) == ["slow", "none"]
    assert 0.03 <= taken["slow"] <= wall
    assert taken["none"] < 0.01
    assert trace.take() == {"slow": 0.0, "none": 0.0}


@pytest.mark.parametrize("clock", [time.perf_counter, FakeClock()], ids=["native", "python"])
def test_a_timed_function_is_called_with_its_last_arguments_and_its_errors_pass(clock: Callable[[], float]) -> None:
    trace = Trace(clock)
    assert trace.timed("a", lambda *given: given, 3, 4)(1, 2) == (1, 2, 3, 4)
    assert trace.timed("a", lambda *given: given)() == ()

    def fail(seconds: float) -> None:
        time.sleep(seconds)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        trace.timed("fails", fail)(0.01)
    if clock is time.perf_counter:
        assert trace.take()["fails"] >= 0.01, "seconds until an error count too"


@pytest.mark.parametrize("clock", [time.perf_counter, FakeClock()], ids=["native", "python"])
def test_a_timed_method_and_its_object_are_freed_together(clock: Callable[[], float]) -> None:
    class Holder:
        def __init__(self) -> None:
            self.trace = Trace(clock)
            self.stage = self.trace.timed("a", self.run, self)

        def run(self, *_: object) -> None: ...

    holder = Holder()
    holder.stage(1)
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None
