"""A Kalman filter in plain numpy; csrc/kalman.h has the one that is used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wager.economics.policy.base import SMOOTHING
from wager.economics.surface import (
    _DRIFT_INTERVAL,
    _FIRST_TREND_WEIGHT,
    _MAX_SURPRISE,
    _MEMORY,
    _MOST_NOISE,
    _PASSING,
    _TREND,
    _TREND_GROWTH,
    _TREND_WEIGHT,
)


class KalmanFilter:
    """`change` is the covariance of how far a change of the machine moves them,
    [unknowns, unknowns], and `uncertainty` the factor by which the standard deviations are larger at first; `noise_sd`
    is that of an observation, at least."""

    def __init__(self, change: NDArray[np.float64], *, noise_sd: float, uncertainty: float = 1.0) -> None:
        self._change, self._variances = change, np.diag(change) * uncertainty**2
        self._noise = self._jitter = self._least_noise = noise_sd**2
        self._trend, self._last, self._observations = 0.0, 0.0, 0
        # an unknown more, the last one: what passes
        size = len(change) + 1
        self._values, self._covariance = np.zeros(size), np.zeros((size, size))
        self._covariance[:-1, :-1] = change * uncertainty**2

    def update(self, slopes: Sequence[float], error: float) -> None:
        """An observation exceeded its prediction by `error`; a unit of unknown i moves it by `slopes[i]`."""
        slope = np.array([*slopes, 1.0])
        self._observations += 1
        prices = self._covariance[:-1, :-1]  # a view
        if self._observations % _DRIFT_INTERVAL == 0:
            drifts = np.diag(prices) < self._variances
            prices += np.where(np.outer(drifts, drifts), self._change * (_DRIFT_INTERVAL / _MEMORY), 0.0)
        alone = min(self._noise, self._jitter)
        self._values[-1] *= _PASSING
        self._covariance[-1] *= _PASSING
        self._covariance[:, -1] *= _PASSING
        self._covariance[-1, -1] += (1 - _PASSING**2) * (self._noise - alone)
        towards = self._covariance @ slope
        known = float(slope[:-1] @ prices @ slope[:-1])
        variance = float(slope @ towards) + alone
        surprise = _bounded((error - self._values[-1]) / variance**0.5)
        self._values += towards * (surprise / variance**0.5)
        if abs(surprise) < _MAX_SURPRISE:  # one that is far off makes nothing more certain
            self._covariance -= np.outer(towards, towards / variance)
        self._noise += SMOOTHING * (self._scatter(error**2, known + self._noise, less=known) - self._noise)
        shift = error - self._last if self._observations > 1 else 0.0
        self._jitter += SMOOTHING * (self._scatter(shift**2 / 2, self._jitter) - self._jitter)
        self._last = error
        weight = max(_TREND_WEIGHT, 1 / (1 / _FIRST_TREND_WEIGHT + self._observations / _TREND_GROWTH))
        self._trend += weight * (_bounded(error / (known + self._jitter) ** 0.5) - self._trend)
        if abs(self._trend) > _TREND:
            prices += self._change
            self._trend = 0.0

    def _scatter(self, square: float, variance: float, *, less: float = 0.0) -> float:
        return min(max(min(square, variance * _MAX_SURPRISE**2) - less, self._least_noise), _MOST_NOISE**2)

    def keep_above(self, unknown: int, least: float) -> None:
        """The mean, given that the unknown is `least` if it was below."""
        missing = least - self._values[unknown]
        if missing > 0:
            self._values += self._covariance[unknown] * (missing / self._covariance[unknown, unknown])

    def deviation(self, slopes: Sequence[float]) -> float:
        """Standard deviation of the sum of all unknowns times `slopes`."""
        slope = np.array(slopes)
        return float(max(0.0, slope @ self._covariance[:-1, :-1] @ slope) ** 0.5)

    def values(self) -> list[float]:
        values: list[float] = self._values[:-1].tolist()
        return values


def _bounded(surprise: float) -> float:
    return max(-_MAX_SURPRISE, min(_MAX_SURPRISE, surprise))
