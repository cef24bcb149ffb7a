"""Follows slowly drifting causes from how far each observation missed: a Kalman filter over a few unknowns.

Knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_FAR = 2.0
"""An observation further off than so many standard deviations counts as that far: the rest is an accident."""


class KalmanFilter:
    """`values` are the unknowns, 0 at first. `doubt` and `drift` are standard deviations of each: at first, and from
    one observation to the next; `noise` is that of an observation."""

    def __init__(self, doubt: Sequence[float], *, drift: Sequence[float], noise: float) -> None:
        self.values = np.zeros(len(doubt))
        self._covariance = np.diag(np.square(np.array(doubt, dtype=np.float64)))
        self._drift = np.square(np.array(drift, dtype=np.float64))
        self._noise = noise**2

    def learn(self, causes: Sequence[int], slopes: Sequence[float], *, missed: float) -> None:
        """An observation missed what was expected by `missed`; a unit of each of the `causes` moves it by its slope."""
        at, slope = list(causes), np.array(slopes)
        self._covariance.flat[:: len(self.values) + 1] += self._drift
        towards = self._covariance[:, at] @ slope
        variance = float(slope @ towards[at]) + self._noise
        most = _FAR * variance**0.5
        self.values += towards * (max(-most, min(most, missed)) / variance)
        self._covariance -= np.outer(towards, towards / variance)
