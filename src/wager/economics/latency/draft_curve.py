"""What drafting costs, for any drafter: seconds = per_call(requests) + depth x per_token(requests).

An autoregressive drafter takes `per_token` seconds alone, a block drafter `per_call` alone, a lookup hardly any of
both. Starts from measured points and is corrected by every observed call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wager.economics.latency.kalman import covariance, latency_filter
from wager.economics.latency.knots import ascends, locate
from wager.errors import UsageError

_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PRICE_SD, _KNOT_SD = 0.2, 0.1
"""Standard deviations of the errors of measured draft times, relative: of what a call and what a draft token costs, and
of both at one number of requests."""

_UNMEASURED = 3.0
"""How many times larger they are where one call is all that is known."""

_NOISE_SD = 0.3
"""How far calls of one shape scatter, relative: most take microseconds, so pauses of the machine count more."""


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
        self._start(per_call, per_token)

    def _start(self, per_call: Sequence[float], per_token: Sequence[float], *, uncertainty: float = 1.0) -> None:
        self._fitted = [float(value) for value in per_call], [float(value) for value in per_token]
        self.per_call, self.per_token = (list(values) for values in self._fitted)
        # The filter follows the logs of what a call and a token cost, and of both at each number of requests.
        changes = [_PRICE_SD, _PRICE_SD, *[_KNOT_SD] * len(self.requests)]
        self._filter = latency_filter(covariance(changes), noise_sd=_NOISE_SD, uncertainty=uncertainty)

    @classmethod
    def unmeasured(cls) -> DraftCurve:
        """A drafter that was never measured: takes no time until it is observed."""
        return cls(_KNOTS, [0.0] * len(_KNOTS), [0.0] * len(_KNOTS))

    def seconds(self, requests: float, depth: int) -> float:
        """Seconds of one call for `requests` sequences, each to `depth`."""
        return self.seconds_by_depth(requests, [depth])[0]

    def seconds_by_depth(self, requests: float, depths: Sequence[int]) -> list[float]:
        """`seconds` to several depths."""
        right, share = locate(self.requests, requests)
        left = max(0, right - 1)
        call, token = self.per_call[left], self.per_token[left]
        call_right, token_right = self.per_call[right], self.per_token[right]
        return [
            max(0.0, (1 - share) * (call + depth * token) + share * (call_right + depth * token_right))
            for depth in depths
        ]

    def observe(self, requests: int, depth: int, *, seconds: float) -> None:
        """Correct from an observed call. The first one ever holds for every batch size; half of it is the call's own
        until calls of other depths show what is."""
        requests = min(requests, self.requests[-1])
        expected = self.seconds(requests, depth)
        if expected <= 0:
            count = len(self.requests)
            self._start([seconds / 2] * count, [seconds / 2 / depth] * count, uncertainty=_UNMEASURED)
            return
        right, share = locate(self.requests, requests)
        slopes, call = [0.0] * (2 + len(self.requests)), 0.0
        for knot, weight in ((right - 1, 1 - share), (right, share)) if right else ((0, 1.0),):
            call += weight * self.per_call[knot] / expected
            slopes[2 + knot] = weight * (self.per_call[knot] + depth * self.per_token[knot]) / expected
        slopes[:2] = call, 1 - call
        self._filter.update(slopes, math.log(seconds / expected))
        log_call, log_token, *knots = self._filter.values()
        self.per_call = [value * math.exp(log_call + off) for value, off in zip(self._fitted[0], knots, strict=True)]
        self.per_token = [value * math.exp(log_token + off) for value, off in zip(self._fitted[1], knots, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a calibration file; `from_dict` reads them."""
        return {"requests": self.requests, "fixed": self.per_call, "each": self.per_token}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DraftCurve:
        """The inverse of as_dict. KeyError, TypeError or UsageError if something is missing or not valid."""
        return cls(values["requests"], values["fixed"], values["each"])
