"""What drafting costs, for any drafter: seconds = per_call(requests) + depth x per_token(requests).

An autoregressive drafter takes `per_token` seconds alone, a block drafter `per_call` alone, a lookup hardly any of
both. Starts from measured points and is corrected by every observed call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wager.economics.latency.knots import ascends, locate
from wager.errors import UsageError

_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_RATE = 0.2
_MAX_SURPRISE = 1.0
"""A call may miss the expected seconds by this many times them; the rest is put down to a pause of the machine."""


@dataclass(frozen=True, slots=True)
class DraftPoint:
    """One measured call (the median of several): drafting for `requests` sequences, each to `depth`."""

    requests: int
    depth: int
    seconds: float


class DraftCurve:
    """`requests` are measured batch sizes, ascending; `per_call` and `per_token` the seconds there, linear in between
    and along the last line beyond."""

    def __init__(self, requests: Sequence[int], per_call: Sequence[float], per_token: Sequence[float]) -> None:
        ascending = ascends(requests)
        sound = all(math.isfinite(value) and value >= 0 for value in (*per_call, *per_token))
        if not requests or not len(requests) == len(per_call) == len(per_token) or not ascending or not sound:
            raise UsageError(
                f"Draft times over {list(requests)} requests are not valid: {list(per_call)} s a call and "
                f"{list(per_token)} s a draft token.",
                "Requests ascend, and each has two times of zero or more.",
            )
        self.requests = list(requests)
        self.per_call = [float(value) for value in per_call]
        self.per_token = [float(value) for value in per_token]

    @classmethod
    def unmeasured(cls) -> DraftCurve:
        """A drafter that was never measured: takes no time until it is observed."""
        return cls(_KNOTS, [0.0] * len(_KNOTS), [0.0] * len(_KNOTS))

    def seconds(self, requests: float, depth: int) -> float:
        """Seconds of one call for `requests` sequences, each to `depth`."""
        right, share = locate(self.requests, requests)
        at = [(right - 1, 1 - share), (right, share)] if right else [(0, 1.0)]
        return max(0.0, sum(weight * (self.per_call[knot] + depth * self.per_token[knot]) for knot, weight in at))

    def observe(self, requests: int, depth: int, *, seconds: float) -> None:
        """Move towards an observed call; the first one ever holds for every batch size."""
        if not any(self.per_call) and not any(self.per_token):
            self.per_token = [seconds / depth] * len(self.per_token)
            return
        expected = self.seconds(requests, depth)
        bound = _MAX_SURPRISE * max(expected, 1e-7)
        step = _RATE * max(-bound, min(bound, seconds - expected)) / (1 + depth * depth)
        right, share = locate(self.requests, min(requests, self.requests[-1]))
        for knot, weight in ((right - 1, 1 - share), (right, share)) if right else ((0, 1.0),):
            self.per_call[knot] = max(0.0, self.per_call[knot] + weight * step)
            self.per_token[knot] = max(0.0, self.per_token[knot] + weight * step * depth)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a calibration file; `from_dict` reads them."""
        return {"requests": self.requests, "fixed": self.per_call, "each": self.per_token}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DraftCurve:
        """The inverse of as_dict. KeyError, TypeError or UsageError if something is missing or not valid."""
        return cls(values["requests"], values["fixed"], values["each"])
