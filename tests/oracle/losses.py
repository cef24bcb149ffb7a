"""The losses in plain numpy, row by row in float64: what train/trainer.py is tested against."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Distribution = NDArray[np.float64]


def distribution(logits: Sequence[float] | NDArray[np.floating]) -> Distribution:
    """The softmax of one row."""
    shifted = np.asarray(logits, np.float64)
    found = np.exp(shifted - shifted.max())
    return np.asarray(found / found.sum(), np.float64)


def kl(q: Distribution, p: Distribution) -> float:
    """Nats; terms with p = 0 count nothing."""
    return float(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0))


def tv(q: Distribution, p: Distribution) -> float:
    """Half the sum of absolute differences."""
    return 0.5 * float(np.abs(p - q).sum())


def ce(q: Distribution, p: Distribution) -> float:
    """Nats of the likeliest token under p, the first of equals."""
    return -math.log(q[int(np.argmax(p))])


def lk(q: Distribution, p: Distribution) -> float:
    """KL where the distributions hardly overlap, TV where they do."""
    share = math.exp(-3 * (1 - tv(q, p)))
    return share * kl(q, p) + (1 - share) * tv(q, p)
