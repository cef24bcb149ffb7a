"""A Kalman filter over a few slowly drifting unknowns, corrected by the error of each observation.

Robust in two ways: one observation that is far off moves little (a pause of the machine), and several in a row that are
off in the same direction make all unknowns as uncertain as they were at first (the machine has changed).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MAX_SURPRISE = 2.0
"""An error of more standard deviations than this counts as this many: normal errors exceed it once in twenty times."""

_MEMORY = 1000.0
"""Observations without which an unknown is as uncertain again as at first."""

_DRIFT_INTERVAL = 16
"""Observations between those that add to the uncertainty, to save time."""

_TREND_WEIGHT, _TREND = 0.25, 1.15
"""Weight of a new error in the running mean of errors, in standard deviations; and the mean that means a change: three
errors in a row that count as _MAX_SURPRISE (2 (1 - 0.75^3) = 1.16), three times what chance makes it scatter."""


class KalmanFilter:
    """`values` are the unknowns, 0 at first. `initial_sd` are their standard deviations then; `noise_sd` is that of an
    observation."""

    def __init__(self, initial_sd: Sequence[float], *, noise_sd: float) -> None:
        self.values = np.zeros(len(initial_sd))
        self._initial = np.square(np.array(initial_sd, dtype=np.float64))
        self._covariance = np.diag(self._initial)
        self._noise, self._trend, self._observations = noise_sd**2, 0.0, 0

    def update(self, slopes: Sequence[float], *, error: float) -> None:
        """An observation exceeded its prediction by `error`; a unit of unknown i moves it by `slopes[i]`."""
        at = [unknown for unknown, slope in enumerate(slopes) if slope]
        slope = np.array([slopes[unknown] for unknown in at])
        self._observations += 1
        if self._observations % _DRIFT_INTERVAL == 0:
            diagonal = self._covariance.reshape(-1)[:: len(self.values) + 1]
            diagonal += np.where(diagonal < self._initial, self._initial * (_DRIFT_INTERVAL / _MEMORY), 0.0)
        towards = self._covariance[:, at] @ slope
        variance = float(slope @ towards[at]) + self._noise
        surprise = max(-_MAX_SURPRISE, min(_MAX_SURPRISE, error / variance**0.5))
        self.values += towards * (surprise / variance**0.5)
        if abs(surprise) < _MAX_SURPRISE:  # one that is far off makes nothing more certain
            self._covariance -= np.outer(towards, towards / variance)
        self._trend += _TREND_WEIGHT * (surprise - self._trend)
        if abs(self._trend) > _TREND:
            self._covariance, self._trend = np.diag(self._initial), 0.0

    def deviation(self, slopes: Sequence[float]) -> float:
        """Standard deviation of the sum of all unknowns times `slopes`."""
        slope = np.array(slopes)
        return float(max(0.0, slope @ self._covariance @ slope) ** 0.5)
