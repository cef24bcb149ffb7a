"""Fits a latency surface to measured steps: nonnegative least squares in relative error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from wager.economics.latency.draft_curve import DraftCurve, DraftPoint
from wager.economics.latency.surface import LatencySurface, StepPoint
from wager.errors import UsageError

_PENALTY = 1e-3


def fit_surface(
    points: Sequence[StepPoint], *, drafters: Mapping[str, DraftCurve] | None = None, uncertainty: float = 1.0
) -> LatencySurface:
    """The surface nearest to measured points in relative error, with no negative cost.

    Needs two or more row counts, or raises UsageError. A cost that the points do not determine (all of one context, or
    of one request) comes out as zero.
    """
    rows = sorted({point.rows for point in points})
    if len(rows) < 2 or any(point.seconds <= 0 or point.requests <= 0 for point in points):
        raise UsageError(
            f"{len(points)} measured steps with {len(rows)} row counts do not make a surface.",
            "Measure at least two row counts, each with seconds above 0.",
        )
    system = np.array([[*_knot_weights(rows, point.rows), *_terms(point)] for point in points], dtype=np.float64)
    taken = np.array([point.seconds for point in points])
    coefficients = _solve(system / taken[:, None], np.ones(len(points)), first_bounded=len(rows))
    curve, (per_request, per_context, per_pair) = coefficients[: len(rows)], coefficients[len(rows) :]
    return LatencySurface(
        rows,
        [max(float(value), 1e-9) for value in curve],
        per_request=float(per_request),
        per_context=float(per_context),
        per_pair=float(per_pair),
        drafters=drafters,
        uncertainty=uncertainty,
    )


def _knot_weights(knots: Sequence[int], rows: int) -> list[float]:
    """1 at the knot of that row count, 0 elsewhere (every point's row count is a knot)."""
    return [float(knot == rows) for knot in knots]


def _terms(point: StepPoint) -> tuple[float, float, float]:
    return point.requests, point.context_sum, point.rows * point.context_sum / point.requests


def _solve(system: NDArray[np.float64], target: NDArray[np.float64], *, first_bounded: int) -> NDArray[np.float64]:
    """Least squares in which columns from `first_bounded` on may not be negative, and are zero where the system does
    not determine them.

    The most negative column is dropped until none is negative. A slight penalty on these columns alone decides what the
    system does not determine.
    """
    active = list(range(system.shape[1]))
    while True:
        scale = np.linalg.norm(system[:, active], axis=0)
        scale[scale == 0] = 1.0
        penalty = np.diag([_PENALTY * (column >= first_bounded) for column in active])
        rows = np.vstack([system[:, active] / scale, penalty])
        scaled = np.linalg.lstsq(rows, np.concatenate([target, np.zeros(len(active))]), rcond=None)[0]
        worst = min(range(len(active)), key=lambda at: scaled[at] if active[at] >= first_bounded else 0.0)
        if active[worst] < first_bounded or scaled[worst] >= 0:
            solution = np.zeros(system.shape[1])
            solution[active] = scaled / scale
            return solution
        del active[worst]


def fit_draft_curve(points: Sequence[DraftPoint]) -> DraftCurve:
    """A drafter's curve from measured calls: for each number of requests the seconds of a call and of each draft token,
    nearest in relative error, neither below zero. UsageError without points."""
    requests = sorted({point.requests for point in points})
    per_call, per_token = [], []
    for count in requests:
        calls = [point for point in points if point.requests == count]
        system = np.array([[1 / point.seconds, point.depth / point.seconds] for point in calls])
        call, token = np.linalg.lstsq(system, np.ones(len(calls)), rcond=None)[0]
        if call < 0 or token < 0:  # the best fit with one of them alone
            alone = 1 if call < 0 else 0
            column = system[:, alone]
            best = float(column.sum() / (column @ column))
            call, token = (0.0, best) if alone else (best, 0.0)
        per_call.append(float(call))
        per_token.append(float(token))
    return DraftCurve(requests, per_call, per_token)
