"""Equality of arrays up to stated tolerances."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def assert_close(got: ArrayLike, want: ArrayLike, *, rtol: float, atol: float) -> None:
    """Every element within atol + rtol * |want|, of arrays of one shape and any float types; NaN equals nothing."""
    assert np.shape(got) == np.shape(want)
    np.testing.assert_allclose(
        np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=rtol, atol=atol, equal_nan=False
    )
