"""Every part of a step is in a stage: the seconds of all stages of a run are the seconds of the run."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

from wager.economics.policy.heuristics import FixedDepth
from wager.kernels._native import StepState
from wager.kernels.base import TargetOutput
from wager.testing import FakeClock, OracleDrafter, ToyDistribution, ToyOracle
from wager.testing.toy import toy_engine
from wager.trace import Trace
from wager.types import Draft, Plan, Request, SamplingParams, Span, StepRecord, Verdict

LAW = ToyDistribution(vocab=48)


class SlowPolicy(FixedDepth):
    """A policy whose methods each take a different number of seconds."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(3)
        self.clock = clock
        self.records: list[StepRecord] = []

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        self.clock.advance(1.0)
        return super().plan(spans, budget)

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        self.clock.advance(2.0)
        return super().admit(drafts, budget)

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        self.clock.advance(4.0)

    def observe(self, record: StepRecord) -> None:
        self.clock.advance(8.0)
        self.records.append(record)

    def end(self, sequence: str) -> None:
        self.clock.advance(16.0)


class SlowDrafter(OracleDrafter):
    """A drafter whose methods each take a different number of seconds."""

    clock: FakeClock

    def propose(self, requests: Any) -> list[Draft]:
        self.clock.advance(32.0)
        return super().propose(requests)

    def observe(self, output: TargetOutput) -> None:
        self.clock.advance(64.0)

    def accept(self, sequence: str, tokens: Sequence[int]) -> None:
        self.clock.advance(128.0)
        super().accept(sequence, tokens)

    def end(self, sequence: str) -> None:
        self.clock.advance(256.0)
        super().end(sequence)


def slowed(clock: FakeClock, seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        clock.advance(seconds)
        return call(*args, **kwargs)

    return run


class SlowState:
    """A state whose verbs each take a different number of seconds."""

    def __init__(self, state: StepState, clock: FakeClock) -> None:
        self._state = state
        self.commit = slowed(clock, 1024.0, state.commit)
        self.next = slowed(clock, 2048.0, state.next)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


def test_every_second_of_a_run_is_counted_in_its_stage() -> None:
    clock = FakeClock()
    policy, drafter = SlowPolicy(clock), SlowDrafter(ToyOracle(LAW))
    drafter.clock = clock
    engine = toy_engine(LAW, drafter=drafter, policy=policy, trace=Trace(clock))
    engine.runner.target.forward = slowed(clock, 512.0, engine.runner.target.forward)  # type: ignore[method-assign]
    engine.scheduler._state = SlowState(engine.scheduler._state, clock)  # type: ignore[assignment]
    for i in range(2):
        engine.add(Request(f"r{i}", (1, 2, 3 + i), SamplingParams(max_tokens=30 if i else 12, seed=i)))
    begin = clock.seconds
    while engine.busy:
        engine.step()
    first, second, *_ = policy.records
    stages = {"schedule": 2048.0, "draft": 32.0, "forward": 512.0, "accept": 0.0, "commit": 1024.0}
    stages["observe"] = 64.0 + 2 * 128.0
    assert first.seconds == {**stages, "policy": 1.0 + 2.0 + 4.0}
    assert second.seconds == {**stages, "policy": 1.0 + 2.0 + 4.0 + 8.0}, "with the report of the first step"
    recorded = sum(sum(record.seconds.values()) for record in policy.records)
    assert recorded == clock.seconds - begin - 8.0, "all but the last report, which would count for the next step"


# ---- one stage -------------------------------------------------------------------------------------------------------


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
    for call in (lambda: none(a=1), lambda: none(*range(9))):
        with pytest.raises(TypeError, match="by position"):
            call()
    broken = Trace(lambda: "now")  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError):
        broken.timed("a", lambda: None)()


def test_an_engine_that_nobody_holds_is_collected_with_its_stages() -> None:
    engine = toy_engine(LAW)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
