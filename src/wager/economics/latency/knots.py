"""Knots of a curve that is linear between them: whether they ascend, and between which two a value lies."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise


def ascends(knots: Sequence[float]) -> bool:
    """Whether each knot is greater than the one before."""
    return all(left < right for left, right in pairwise(knots))


def locate(knots: Sequence[float], value: float) -> tuple[int, float]:
    """The index of the knot right of `value` and the share of the way to it from its left neighbour, in [0, 1]; above 1
    beyond the last knot. (0, 0.0) below the first knot, and where there is only one."""
    right = bisect_right(knots, value)
    if right == 0 or len(knots) == 1:
        return 0, 0.0
    right = min(right, len(knots) - 1)
    left = knots[right - 1]
    return right, (value - left) / (knots[right] - left)
