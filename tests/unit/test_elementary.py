"""log, exp, cosine and sine: near those of the C library, and with bits that are the same on every machine."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from wager.elementary import cosine_and_sine, exp, log

COUNT = 20_000
PINNED = ["5a3b3dd0dfca8bdd", "13a5b60ceba2b8d3", "bdd70a46c783b497", "218f42e5645659ff"]


def places(last: float) -> np.ndarray:
    """From 0 to `last`, any numpy's alike."""
    return np.random.default_rng(1).integers(0, 1 << 52, COUNT) * 2.0**-52 * last


def digest(x: np.ndarray) -> str:
    return hashlib.sha256(x.tobytes()).hexdigest()[:16]


def test_values() -> None:
    x = np.concatenate([places(1.0) + 2.0**-53, 1 - places(1e-9), places(1e300) + 1e-300])
    assert np.allclose(log(x), [math.log(value) for value in x], rtol=1e-15, atol=0)
    y = np.concatenate([places(700.0), -places(700.0), places(1.0)])
    assert np.allclose(exp(y), [math.exp(value) for value in y], rtol=5e-16, atol=0)
    z = np.concatenate([places(1e6), places(10.0), np.arange(100.0)])
    cosine, sine = cosine_and_sine(z)
    assert np.abs(cosine - [math.cos(value) for value in z]).max() < 4e-16
    assert np.abs(sine - [math.sin(value) for value in z]).max() < 4e-16
    assert [digest(found) for found in (log(x), exp(y), cosine, sine)] == PINNED


def test_ends() -> None:
    assert exp([0.0, -800.0, -np.inf, np.inf, 1e9]).tolist() == [1.0, 0.0, 0.0, np.inf, np.inf]
    assert np.isnan(exp(np.nan)) and exp(-740.0) == pytest.approx(math.exp(-740), rel=0.1)
    assert log(1.0) == 0 and log(1.0).shape == () and float(log(2.0)) == math.log(2)
    cosine, sine = cosine_and_sine(np.zeros((2, 3)))
    assert (cosine == 1).all() and not sine.any() and sine.shape == (2, 3)
