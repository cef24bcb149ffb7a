"""The losses in plain numpy, row by row in float64: what losses.py is tested against."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Law = NDArray[np.float64]


def law(logits: Sequence[float] | NDArray[np.floating]) -> Law:
    """The softmax of one row."""
    shifted = np.asarray(logits, np.float64)
    found = np.exp(shifted - shifted.max())
    return np.asarray(found / found.sum(), np.float64)


def kl(q: Law, p: Law) -> float:
    """Nats; terms with p = 0 count nothing."""
    return float(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0))


def tv(q: Law, p: Law) -> float:
    """Half the sum of absolute differences."""
    return 0.5 * float(np.abs(p - q).sum())


def ce(q: Law, p: Law) -> float:
    """Nats of the likeliest token under p, the first of equals."""
    return -math.log(q[int(np.argmax(p))])


def lk(q: Law, p: Law) -> float:
    """KL where the laws hardly overlap, TV where they do."""
    share = math.exp(-3 * (1 - tv(q, p)))
    return share * kl(q, p) + (1 - share) * tv(q, p)
