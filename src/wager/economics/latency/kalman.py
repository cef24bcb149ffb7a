"""A Kalman filter over a few slowly drifting unknowns, corrected by the error of each observation.

Robust in two ways: one observation that is far off moves little (a pause of the machine), and several in a row that are
off in the same direction make all unknowns more uncertain (the machine has changed).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wager.kernels import _native

_MAX_SURPRISE = 2.0
"""An error of more standard deviations than this counts as this many: normal errors exceed it once in twenty times."""

_MEMORY = 1000.0
"""Observations over which an unknown drifts as far as a change of the machine would move it."""

_DRIFT_INTERVAL = 16
"""Observations between those that add to the uncertainty, to save time."""

_NOISE_WEIGHT, _MOST_NOISE = 0.05, 0.3
"""Weight of a new error in the mean scatter of observations, and the most that this may be, as a standard deviation."""

_TREND_WEIGHT, _TREND = 0.25, 1.15
"""Weight of a new error in the running mean of errors, in standard deviations; and the mean that means a change: three
errors in a row that count as _MAX_SURPRISE (2 (1 - 0.75^3) = 1.16), three times what chance makes it scatter."""


class LatencyFilter(Protocol):
    """`values` are the unknowns, 0 at first."""

    def update(self, slopes: Sequence[float], error: float) -> None:
        """An observation exceeded its prediction by `error`; a unit of unknown i moves it by `slopes[i]`."""

    def deviation(self, slopes: Sequence[float]) -> float:
        """Standard deviation of the sum of all unknowns times `slopes`."""

    def values(self) -> list[float]: ...


def latency_filter(change: NDArray[np.float64], *, noise_sd: float, uncertainty: float = 1.0) -> LatencyFilter:
    """A KalmanFilter in C++ (csrc/kalman.h): a dozen calls of numpy after a pass of the target take 0.1 ms."""
    rules = (
        _MAX_SURPRISE,
        _DRIFT_INTERVAL / _MEMORY,
        _NOISE_WEIGHT,
        _MOST_NOISE,
        _TREND_WEIGHT,
        _TREND,
        _DRIFT_INTERVAL,
    )
    return _native.KalmanFilter(rules, change.ravel().tolist(), noise_sd**2, uncertainty)


class KalmanFilter:
    """`change` is the covariance of how far a change of the machine moves them,
    [unknowns, unknowns], and `uncertainty` the factor by which the standard deviations are larger at first; `noise_sd`
    is that of an observation, at least."""

    def __init__(self, change: NDArray[np.float64], *, noise_sd: float, uncertainty: float = 1.0) -> None:
        self._values = np.zeros(len(change))
        self._change, self._covariance = change, change * uncertainty**2
        self._variances = np.diag(self._covariance).copy()
        self._noise = self._least_noise = noise_sd**2
        self._trend, self._observations = 0.0, 0

    def update(self, slopes: Sequence[float], error: float) -> None:
        """An observation exceeded its prediction by `error`; a unit of unknown i moves it by `slopes[i]`."""
        at = [unknown for unknown, slope in enumerate(slopes) if slope]
        slope = np.array([slopes[unknown] for unknown in at])
        self._observations += 1
        if self._observations % _DRIFT_INTERVAL == 0:
            drifts = np.diag(self._covariance) < self._variances
            self._covariance += np.where(np.outer(drifts, drifts), self._change * (_DRIFT_INTERVAL / _MEMORY), 0.0)
        towards = self._covariance[:, at] @ slope
        known = float(slope @ towards[at])
        variance = known + self._noise
        surprise = max(-_MAX_SURPRISE, min(_MAX_SURPRISE, error / variance**0.5))
        self._values += towards * (surprise / variance**0.5)
        if abs(surprise) < _MAX_SURPRISE:  # one that is far off makes nothing more certain
            self._covariance -= np.outer(towards, towards / variance)
        scatter = min(error * error, variance * _MAX_SURPRISE**2) - known
        self._noise += _NOISE_WEIGHT * (min(max(scatter, self._least_noise), _MOST_NOISE**2) - self._noise)
        self._trend += _TREND_WEIGHT * (surprise - self._trend)
        if abs(self._trend) > _TREND:
            self._covariance, self._trend = self._covariance + self._change, 0.0

    def deviation(self, slopes: Sequence[float]) -> float:
        """Standard deviation of the sum of all unknowns times `slopes`."""
        slope = np.array(slopes)
        return float(max(0.0, slope @ self._covariance @ slope) ** 0.5)

    def values(self) -> list[float]:
        values: list[float] = self._values.tolist()
        return values


def covariance(
    deviations: Sequence[float], *, related: slice | None = None, places: Sequence[float] = ()
) -> NDArray[np.float64]:
    """Of unknowns with these standard deviations, [unknowns, unknowns]. Those in `related` are at `places`: two of them
    correlate by exp(-distance). All others are independent."""
    correlation = np.eye(len(deviations))
    if related is not None:
        at = np.array(places)
        correlation[related, related] = np.exp(-np.abs(at[:, None] - at))
    result: NDArray[np.float64] = correlation * np.outer(deviations, deviations)
    return result
