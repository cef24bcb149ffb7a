"""What drafting costs, for any drafter: seconds = fixed(requests) + depth x each(requests).

An autoregressive drafter is all `each`, a block drafter all `fixed`, a lookup next to nothing of both. Starts from
measured or modelled points and is corrected by every call. Knows no drafter.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from wager.errors import UsageError

_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_RATE = 0.2
_MOST_SURPRISE = 1.0
"""A call may miss the expected seconds by this many times them; the rest is put down to a pause of the machine."""


class DraftCurve:
    """`requests` are measured batch sizes, ascending; `fixed` and `each` the seconds there, linear in between and
    along the last line beyond."""

    def __init__(self, requests: Sequence[int], fixed: Sequence[float], each: Sequence[float]) -> None:
        ascending = all(left < right for left, right in zip(requests, requests[1:], strict=False))
        sound = all(math.isfinite(value) and value >= 0 for value in (*fixed, *each))
        if not requests or not len(requests) == len(fixed) == len(each) or not ascending or not sound:
            raise UsageError(
                f"A drafter's curve over {list(requests)} requests is not one: fixed {list(fixed)}, each {list(each)}.",
                "Requests ascend, and each has two prices of zero or more.",
            )
        self.requests = list(requests)
        self.fixed = [float(value) for value in fixed]
        self.each = [float(value) for value in each]

    @classmethod
    def free(cls) -> DraftCurve:
        """A drafter nobody has measured: free until it is observed."""
        return cls(_KNOTS, [0.0] * len(_KNOTS), [0.0] * len(_KNOTS))

    def seconds(self, requests: float, depth: int) -> float:
        """Seconds of one call for `requests` sequences, each to `depth`."""
        right, share = self._place(requests)
        at = [(right - 1, 1 - share), (right, share)] if right else [(0, 1.0)]
        return max(0.0, sum(weight * (self.fixed[knot] + depth * self.each[knot]) for knot, weight in at))

    def observe(self, requests: int, depth: int, *, seconds: float) -> None:
        """Move towards an observed call; the first ever is believed at every batch size."""
        if not any(self.fixed) and not any(self.each):
            self.each = [seconds / depth] * len(self.each)
            return
        expected = self.seconds(requests, depth)
        bound = _MOST_SURPRISE * max(expected, 1e-7)
        step = _RATE * max(-bound, min(bound, seconds - expected)) / (1 + depth * depth)
        right, share = self._place(min(requests, self.requests[-1]))
        for knot, weight in ((right - 1, 1 - share), (right, share)) if right else ((0, 1.0),):
            self.fixed[knot] = max(0.0, self.fixed[knot] + weight * step)
            self.each[knot] = max(0.0, self.each[knot] + weight * step * depth)

    def _place(self, requests: float) -> tuple[int, float]:
        right = bisect_right(self.requests, requests)
        if right == 0 or len(self.requests) == 1:
            return 0, 0.0
        right = min(right, len(self.requests) - 1)
        left = self.requests[right - 1]
        return right, (requests - left) / (self.requests[right] - left)

    def as_dict(self) -> dict[str, Any]:
        return {"requests": self.requests, "fixed": self.fixed, "each": self.each}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DraftCurve:
        return cls(values["requests"], values["fixed"], values["each"])
