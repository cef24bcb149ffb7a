"""Timing steps and drafts with the real engine, a toy target and a simulated clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cache

import pytest

from wager.draft.ngram import NgramDrafter
from wager.economics.calibration import Calibration, PredictionErrors, Setup
from wager.engine.core import Engine
from wager.engine.proposer import Proposer
from wager.engine.runner import Runner
from wager.kernels.base import TargetOutput
from wager.profiling.calibrate import (
    StepTimer,
    calibrate,
    grid_shapes,
    quick_surface,
    random_shapes,
    time_drafting,
    time_steps,
    uniform_shape,
)
from wager.testing import FakeClock, ToyDistribution, ToyTarget
from wager.testing.toy import toy_engine
from wager.trace import Trace
from wager.types import Draft, DraftRequest, PackedBatch, Request, SamplingParams

LAW = ToyDistribution(vocab=97, memory=0.5)
SETUP = Setup("toy", "toy", "toy-0", "none", None, "int64")


def true_seconds(rows: int, requests: int, cached: int) -> float:
    """Seconds that rise in steps, at row counts of the grid."""
    curve = 5e-3 + 2e-5 * min(rows, 16) + 3e-4 * max(0, rows - 16)
    return curve + 5e-5 * requests + 1e-6 * cached + 2e-7 * rows * cached / requests


class TimedTarget(ToyTarget):
    """Every pass takes `true_seconds` times the current slowdown; `shapes` are the passes' rows, requests, cached."""

    def __init__(
        self, clock: FakeClock, *, blocks: int = 512, slowdown: Callable[[float], float] = lambda _: 1.0
    ) -> None:
        super().__init__(LAW, num_blocks=blocks, max_rows=160, max_sequences=16)
        self.clock, self.slowdown = clock, slowdown
        self.shapes: list[tuple[int, int, int]] = []

    def forward(self, batch: PackedBatch) -> TargetOutput:
        shape = (batch.rows, batch.num_sequences, int(batch.num_computed_tokens.sum()))
        self.shapes.append(shape)
        self.clock.advance(true_seconds(*shape) * self.slowdown(self.clock.seconds))
        return super().forward(batch)


def step_timer(target: TimedTarget, *, max_context: int = 2048) -> StepTimer:
    trace = Trace(target.clock)
    return StepTimer(Runner(target, rule="match"), max_context=max_context, longest=640, sequences=8, trace=trace)


# ---- the step timer -------------------------------------------------------------------------------------------------


def test_the_time_limit_holds_except_for_the_steps_a_fit_needs() -> None:
    clock = FakeClock()
    timer = step_timer(TimedTarget(clock))
    reported: list[float] = []
    time_steps(timer, grid_shapes(timer.limits), seconds=1.0, report=reported.append)
    assert 1.0 <= clock.seconds < 1.1
    assert reported == sorted(reported)
    assert reported[-1] == 1.0
    shapes = [
        uniform_shape(1, 1, 32),
        uniform_shape(1, 1, 64),
        uniform_shape(16, 1, 64),
        uniform_shape(2, 1, 64),
        uniform_shape(3, 1, 96),
    ]
    few = time_steps(timer, shapes, seconds=0, seed=None)
    assert {timed.shape for timed in few} == {0, 1, 2, 3}
    judged = time_steps(timer, shapes, seconds=1e-9, seed=None, held_out=1)
    assert {timed.shape for timed in judged} == {0, 1, 2, 3, 4}


# ---- the fit -------------------------------------------------------------------------------------------------------


@cache
def fitted_to_the_truth() -> Calibration:
    return calibrate(step_timer(TimedTarget(FakeClock())), SETUP, seconds=4.0)


def test_a_calibration_predicts_steps_it_never_took() -> None:
    fitted = fitted_to_the_truth()
    assert len(fitted.held_out) >= 30
    ragged = fitted.errors.worst  # the mean context stands for each request's own
    assert ragged < 0.1
    assert fitted.errors.median < 0.005
    surface = fitted.surface()
    for rows, requests, cached in ((1, 1, 600), (5, 5, 320), (10, 2, 900), (40, 8, 800), (100, 4, 64)):
        assert surface.seconds(rows, requests, cached) == pytest.approx(true_seconds(rows, requests, cached), rel=0.01)


@pytest.mark.slow
def test_a_slowdown_of_all_shapes_does_not_distort_the_fit() -> None:
    wandering = TimedTarget(FakeClock(), slowdown=lambda now: 1.6 if math.sin(now / 0.4) > 0.3 else 1.0)
    errors = calibrate(step_timer(wandering), SETUP, seconds=8.0).errors
    assert errors.median < 0.01
    assert errors.p90 < 0.03


@pytest.mark.slow
def test_steps_correct_a_calibration_of_a_faster_machine() -> None:
    fitted = fitted_to_the_truth()
    slower = step_timer(TimedTarget(FakeClock(), slowdown=lambda _: 1.5))
    stored, corrected = fitted.surface(), fitted.surface()
    measured: list[float] = []
    as_stored: list[float] = []
    as_corrected: list[float] = []
    for step in time_steps(slower, random_shapes(slower.limits, 40, seed=7), seconds=2.0):
        point = step.point
        measured.append(point.seconds)
        as_stored.append(stored.seconds(point.rows, point.requests, point.context_sum))
        as_corrected.append(corrected.seconds(point.rows, point.requests, point.context_sum))
        corrected.observe(step.record)
    assert len(measured) > 100
    assert PredictionErrors.of(as_stored, measured).median == pytest.approx(1 / 3, abs=0.03)
    assert PredictionErrors.of(as_corrected, measured).median < 0.05


# ---- the quick surface ----------------------------------------------------------------------------------------------


def test_a_quick_surface_is_close_in_little_time() -> None:
    clock = FakeClock()
    surface = quick_surface(Runner(TimedTarget(clock), rule="match"), max_context=2048, seconds=0.4, trace=Trace(clock))
    assert clock.seconds < 0.45
    for rows, requests, cached in ((1, 1, 100), (8, 1, 32), (16, 4, 800), (64, 1, 64), (4, 4, 2000)):
        assert surface.seconds(rows, requests, cached) == pytest.approx(true_seconds(rows, requests, cached), rel=0.1)


class WaitingTarget(ToyTarget):
    """Every pass waits, as it does while other programs have the processor."""

    def forward(self, batch: PackedBatch) -> TargetOutput:
        time.sleep(0.02)
        return super().forward(batch)


def test_what_other_programs_take_is_no_part_of_a_quick_surface() -> None:
    surface = quick_surface(Runner(WaitingTarget(LAW), rule="match"), max_context=512, seconds=0.01)
    assert surface.seconds(1, 1, 16) < 0.02


def answers(engine: Engine) -> list[tuple[int, ...]]:
    prompts = [tuple(range(at, at + 40)) for at in (1, 20, 1)]  # the last finds the blocks of the first
    requests = [Request(str(at), prompt, SamplingParams(max_tokens=30)) for at, prompt in enumerate(prompts)]
    return [completion.token_ids for completion in engine.generate(requests, concurrency=2)]


def test_measuring_does_not_change_the_engines_text() -> None:
    """The toy's text depends on every cell of its cache, so a block with wrong contents would change the text."""
    plain, measured = (toy_engine(LAW, drafter=NgramDrafter(), num_blocks=96) for _ in range(2))
    quick_surface(measured.runner, max_context=512, seconds=0.01)
    assert measured.scheduler.block_pool.num_free_blocks == measured.scheduler.block_pool.num_blocks
    assert not measured.busy
    measured.check()
    assert answers(measured) == answers(plain)
    measured.check()


# ---- drafting -------------------------------------------------------------------------------------------------------


class TimedDrafter(NgramDrafter):
    """Takes 200 µs a call and 30 µs for every requested token."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock
        self.known: set[str] = set()

    def begin(self, sequence: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = "") -> None:
        self.known.add(sequence)
        super().begin(sequence, tokens, params)

    def end(self, sequence: str) -> None:
        self.known.discard(sequence)
        super().end(sequence)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.clock.advance(2e-4 + sum(3e-5 * request.depth for request in requests))
        return super().propose(requests)


def test_drafting_is_timed_by_requests_and_depth_and_its_sequences_end() -> None:
    clock = FakeClock()
    drafter = TimedDrafter(clock)
    curve = time_drafting(Proposer(drafter, vocab=500), vocab=500, hidden=8, seconds=9.0, clock=clock)
    for requests, depth in ((1, 1), (4, 8), (24, 3)):
        assert curve.seconds(requests, depth) == pytest.approx(2e-4 + 3e-5 * requests * depth)
    assert not drafter.known


# ---- the setup -----------------------------------------------------------------------------------------------------
