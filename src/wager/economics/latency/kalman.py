"""A Kalman filter over a few slowly drifting unknowns, corrected by the error of each observation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MAX_SURPRISE = 2.0
"""An error of more standard deviations than this counts as this many: the rest is taken for an outlier."""


class KalmanFilter:
    """`values` are the unknowns, 0 at first. `initial_sd` and `drift_sd` are standard deviations of each: at first, and
    from one observation to the next; `noise_sd` is that of an observation."""

    def __init__(self, initial_sd: Sequence[float], *, drift_sd: Sequence[float], noise_sd: float) -> None:
        self.values = np.zeros(len(initial_sd))
        self._covariance = np.diag(np.square(np.array(initial_sd, dtype=np.float64)))
        self._drift = np.square(np.array(drift_sd, dtype=np.float64))
        self._noise = noise_sd**2

    def update(self, indices: Sequence[int], slopes: Sequence[float], *, error: float) -> None:
        """An observation exceeded its prediction by `error`; a unit of unknown `indices[i]` moves it by `slopes[i]`."""
        at, slope = list(indices), np.array(slopes)
        self._covariance.flat[:: len(self.values) + 1] += self._drift
        towards = self._covariance[:, at] @ slope
        variance = float(slope @ towards[at]) + self._noise
        most = _MAX_SURPRISE * variance**0.5
        self.values += towards * (max(-most, min(most, error)) / variance)
        self._covariance -= np.outer(towards, towards / variance)
