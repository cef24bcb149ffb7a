"""The seconds of stages."""

from __future__ import annotations

import time

import pytest

from wager.trace import Trace


def test_seconds_are_added_to_the_stage_until_they_are_taken_and_errors_pass() -> None:
    trace = Trace()
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
    trace = Trace()
    assert trace.timed("a", lambda *given: given, 3, 4)(1, 2) == (1, 2, 3, 4)
    assert trace.timed("a", lambda *given: given)() == ()

    def fail(seconds: float) -> None:
        time.sleep(seconds)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        trace.timed("fails", fail)(0.01)
    assert trace.take()["fails"] >= 0.01, "seconds until an error count too"
