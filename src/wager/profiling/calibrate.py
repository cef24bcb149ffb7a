"""Calibrates a model on this machine: times real steps of many shapes and fits a latency model to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from wager.economics.calibration import (
    Calibration,
    PredictionErrors,
    Setup,
    ShapeSample,
    grid_shapes,
    quick_shapes,
    random_shapes,
    typical_steps,
)
from wager.economics.surface import DraftCurve, LatencySurface, StepPoint, fit_surface
from wager.engine.runner import Runner
from wager.profiling.timed_steps import ProgressReport, StepTimer, TimedStep, time_steps
from wager.trace import Trace

HELD_OUT = 32
"""Number of random shapes that the fit is tested with."""

CHECKED_SHAPES = 40

_QUICK_CONTEXT, _QUICK_TOKENS = 512, 3072
_QUICK_UNCERTAINTY = 3.0
"""Uncertainty of a quick surface relative to that of a full calibration."""


def calibrate(
    timer: StepTimer,
    setup: Setup,
    *,
    seconds: float,
    drafters: Mapping[str, DraftCurve] | None = None,
    report: ProgressReport | None = None,
) -> Calibration:
    """Time a grid of shapes, and random shapes to test the fit with, for about `seconds`."""
    fitted, held_out = grid_shapes(timer.limits), random_shapes(timer.limits, HELD_OUT, seed=0)
    taken = time_steps(timer, [*fitted, *held_out], seconds=seconds, held_out=len(held_out), report=report)
    typical = typical_steps([ShapeSample(step.shape, step.point) for step in taken], fitted=range(len(fitted)))
    return Calibration.fit(
        setup,
        [point for shape, point in typical.items() if shape < len(fitted)],
        [point for shape, point in typical.items() if shape >= len(fitted)],
        seconds=seconds,
        drafters=drafters,
    )


def quick_surface(
    runner: Runner, *, max_context: int, seconds: float = 0.5, trace: Trace | None = None
) -> LatencySurface:
    """A surface from about `seconds` of measuring, for an engine that was never calibrated.

    Call it before the target is used: its cache is overwritten, whatever a block pool has recorded about it. UsageError
    if the cache is too small to measure in.
    """
    timer = StepTimer(runner, max_context=max_context, longest=_QUICK_CONTEXT, tokens=_QUICK_TOKENS, trace=trace)
    taken = time_steps(timer, quick_shapes(timer.limits), seconds=seconds, seed=None, repeats=1)
    points = _fastest_steps(taken)
    if len({point.rows for point in points}) == 1:
        typical = median(point.seconds for point in points)
        return LatencySurface([points[0].rows], [typical], uncertainty=_QUICK_UNCERTAINTY)
    return fit_surface(points, uncertainty=_QUICK_UNCERTAINTY)


def _fastest_steps(taken: Sequence[TimedStep]) -> list[StepPoint]:
    """The fastest step of every shape: of so few steps, a pause of the machine would distort any other statistic."""
    fastest: dict[int, StepPoint] = {}
    for step in sorted(taken, key=lambda step: step.point.seconds):
        fastest.setdefault(step.shape, step.point)
    return list(fastest.values())


@dataclass(frozen=True, slots=True)
class CalibrationCheck:
    """Errors of predictions for single steps of shapes not fitted: by the stored surface, and by one that was corrected
    with every earlier step, as in an engine."""

    stored: PredictionErrors
    corrected: PredictionErrors


def check_calibration(
    timer: StepTimer, calibration: Calibration, *, seconds: float, seed: int, report: ProgressReport | None = None
) -> CalibrationCheck:
    """Take steps of random shapes for about `seconds`, and predict each before it is taken into account."""
    stored, corrected = calibration.surface(), calibration.surface()
    stored_s: list[float] = []
    corrected_s: list[float] = []
    shapes = random_shapes(timer.limits, CHECKED_SHAPES, seed=seed)
    taken = time_steps(timer, shapes, seconds=seconds, report=report)
    for step in taken:
        point = step.point
        stored_s.append(stored.seconds(point.rows, point.requests, point.context_sum))
        corrected_s.append(corrected.seconds(point.rows, point.requests, point.context_sum))
        corrected.observe(step.record)
    measured = [step.point.seconds for step in taken]
    return CalibrationCheck(PredictionErrors.of(stored_s, measured), PredictionErrors.of(corrected_s, measured))
