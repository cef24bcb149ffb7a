"""From many timed steps to the typical step of each shape, on a machine whose speed varies from second to second."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wager.economics.latency.fit import fit_surface
from wager.economics.latency.surface import StepPoint

_WINDOW, _ITERATIONS = 8, 6
"""Steps before and after one that give the machine's speed at that time, and how often speed and fit are alternated."""


@dataclass(frozen=True, slots=True)
class ShapeSample:
    """One timed step: the index of its shape, and what was measured."""

    shape: int
    point: StepPoint


def typical_steps(samples: Sequence[ShapeSample], *, fitted: Container[int]) -> dict[int, StepPoint]:
    """The typical step of each shape, from steps of many shapes in the order they were taken; `fitted` holds the shapes
    that a surface may be fitted to.

    A shared machine changes its speed from second to second. Where steps that lie close together are all slower than a
    surface expects, that is put down to the machine; the median of the rest is the shape's own.
    """
    members: dict[int, list[int]] = {}
    for at, sample in enumerate(samples):
        members.setdefault(sample.shape, []).append(at)
    points = [sample.point for sample in samples]
    log = np.log([point.seconds for point in points])
    slowdown = np.zeros(len(log))
    for _ in range(_ITERATIONS):
        typical = {
            shape: _median([points[at] for at in own], log[own] - slowdown[own]) for shape, own in members.items()
        }
        to_fit = [point for shape, point in typical.items() if shape in fitted]
        if len({point.rows for point in to_fit}) < 2:
            return typical
        expected = fit_surface(to_fit)
        residual = log - np.log([expected.seconds(p.rows, p.requests, p.context_sum) for p in points])
        slowdown = np.array(
            [np.median(residual[max(0, at - _WINDOW) : at + _WINDOW + 1]) for at in range(len(residual))]
        )
        slowdown -= np.median(slowdown)
    return typical


def _median(points: Sequence[StepPoint], log: NDArray[np.float64]) -> StepPoint:
    cached = round(float(np.median([point.context_sum for point in points])))
    return StepPoint(points[0].rows, points[0].requests, cached, float(np.exp(np.median(log))))
