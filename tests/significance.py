"""p-values of counts and samples, with what scipy.special has: scipy.stats takes a second to import."""

from __future__ import annotations

import numpy as np
from scipy import special


def chi_squared(statistic: float, freedom: int) -> float:
    return float(special.chdtrc(freedom, statistic))


def contingency(table: np.ndarray) -> tuple[float, int]:
    """The G statistic of a table whose rows and columns should be independent, and its degrees of freedom."""
    expected = np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
    return 2 * float(special.xlogy(table, table / expected).sum()), (table.shape[0] - 1) * (table.shape[1] - 1)


def uniformity(values: np.ndarray) -> float:
    """Of Kolmogorov and Smirnov, for numbers that should be uniform in (0, 1)."""
    n, ordered = len(values), np.sort(values)
    farthest = max((np.arange(1, n + 1) / n - ordered).max(), (ordered - np.arange(n) / n).max())
    return float(special.kolmogorov(farthest * np.sqrt(n)))


def binomial(hits: int, count: int, rate: float) -> float:
    return float(min(1.0, 2 * min(special.bdtr(hits, count, rate), special.bdtrc(hits - 1, count, rate))))
