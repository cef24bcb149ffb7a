"""What steps and drafting take by their shape, corrected by what they took, in Python: the reference of
csrc/step_times.h."""

from __future__ import annotations

import math
from collections.abc import Sequence

from oracle.kalman import KalmanFilter
from wager.economics.surface import locate


class StepTimes:
    """`filter_` follows the logs of the scale, of what rows cost and of each knot, and the cost of a request."""

    def __init__(
        self,
        filter_: KalmanFilter,
        *,
        rows: Sequence[float],
        seconds: Sequence[float],
        per_request: float,
        per_context: float,
        per_pair: float,
    ) -> None:
        self.rows, self.per_context, self.per_pair = list(rows), per_context, per_pair
        self._filter, self._fitted, self._fitted_per_request = filter_, list(seconds), per_request
        self._correct()

    def seconds(self, rows: float, requests: float, context_sum: float) -> float:
        right, share = locate(self.rows, rows)
        left, rise = self._corrected[max(0, right - 1)], 0.0
        if right:
            rise = self._corrected[right] - left
        curve = left + rise * share if share <= 1 else self._corrected[right] + max(0.0, rise) * (share - 1)
        pairs = rows * context_sum / requests if requests else 0.0
        others = self.per_request * requests + self.per_context * context_sum + self.per_pair * pairs
        return self.scale * (curve + others) if rows > 0 else 0.0

    def observe(self, rows: int, requests: int, context_sum: int, taken: float) -> None:
        expected = self.seconds(rows, requests, context_sum)
        slopes = self.slopes(rows, requests, context_sum)
        self._filter.update([slope / expected for slope in slopes], math.log(taken / expected))
        self._correct()

    def deviations(self, rows: int, others: Sequence[int], requests: int, context_sum: int) -> list[float]:
        one, deviations = self.slopes(rows, requests, context_sum), []
        for count in others:
            other = self.slopes(count, requests, context_sum)
            deviations.append(
                self._filter.deviation([after - before for before, after in zip(one, other, strict=True)])
            )
        return deviations

    def slopes(self, rows: int, requests: int, context_sum: int) -> list[float]:
        """Seconds that a unit of each unknown of the filter adds to a step."""
        slopes, curve = [0.0] * (len(self.rows) + 3), 0.0
        right, share = locate(self.rows, rows)
        if right and self._corrected[right] < self._corrected[right - 1]:  # it stays level beyond the last
            share = min(1.0, share)
        for knot, weight in ((right - 1, 1 - share), (right, share)) if right else ((0, 1.0),):
            seconds = weight * self.scale * self._corrected[knot]
            slopes[1] += seconds * (1 - self._fitted[0] / self._uncorrected[knot])
            slopes[2 + knot] = seconds
            curve += seconds
        pairs = rows * context_sum / requests if requests else 0.0
        others = self.per_request * requests + self.per_context * context_sum + self.per_pair * pairs
        slopes[0] = curve + self.scale * others
        slopes[-1] = self.scale * self._fitted[0] * requests
        return slopes

    def _correct(self) -> None:
        self._filter.keep_above(len(self.rows) + 2, -self._fitted_per_request / self._fitted[0])
        log_scale, log_row_cost, *curve, request = self._filter.values()[: len(self.rows) + 3]
        self.scale, row_cost, first = math.exp(log_scale), math.exp(log_row_cost), self._fitted[0]
        self._uncorrected = [first + max(row_cost * (value - first), 1e-3 * first - first) for value in self._fitted]
        self._corrected = [value * math.exp(off) for value, off in zip(self._uncorrected, curve, strict=True)]
        self.per_request = max(0.0, self._fitted_per_request + first * request)


class DraftTimes:
    """`filter_` follows the logs of what a call and a token cost, and of both at each number of requests."""

    def __init__(
        self,
        filter_: KalmanFilter,
        *,
        requests: Sequence[int],
        per_call: Sequence[float],
        per_token: Sequence[float],
    ) -> None:
        self.requests, self._filter, self._fitted = list(requests), filter_, (list(per_call), list(per_token))
        self.per_call, self.per_token = (list(values) for values in self._fitted)

    def seconds_by_depth(self, requests: float, depths: Sequence[float]) -> list[float]:
        right, share = locate(self.requests, requests)
        left = max(0, right - 1)
        call, token = self.per_call[left], self.per_token[left]
        call_right, token_right = self.per_call[right], self.per_token[right]
        found = []
        for depth in depths:
            fewer, more = call + depth * token, call_right + depth * token_right
            found.append(fewer + min(share, 1) * (more - fewer) + max(0, share - 1) * max(0, more - fewer))
        return found

    def observe(self, requests: int, depth: int, seconds: float) -> bool:
        """False, and nothing is learned, where it was believed to take no time."""
        [expected] = self.seconds_by_depth(requests, [depth])
        if expected <= 0:
            return False
        requests = min(requests, self.requests[-1])
        [nearest] = self.seconds_by_depth(requests, [depth])
        right, share = locate(self.requests, requests)
        slopes, call = [0.0] * (2 + len(self.requests)), 0.0
        for knot, weight in ((right - 1, 1 - share), (right, share)) if right else ((0, 1.0),):
            call += weight * self.per_call[knot] / nearest
            slopes[2 + knot] = weight * (self.per_call[knot] + depth * self.per_token[knot]) / nearest
        slopes[:2] = call, 1 - call
        self._filter.update(slopes, math.log(seconds / expected))
        log_call, log_token, *knots = self._filter.values()
        self.per_call = [value * math.exp(log_call + off) for value, off in zip(self._fitted[0], knots, strict=True)]
        self.per_token = [value * math.exp(log_token + off) for value, off in zip(self._fitted[1], knots, strict=True)]
        return True
