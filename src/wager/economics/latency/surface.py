"""The latency model of this machine: seconds of a step by its shape, corrected by every step that is taken.

Starts from measured points (fit.py), linear between them. Cheap enough to be evaluated hundreds of times before every
step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wager.economics.latency.draft_curve import DraftCurve
from wager.economics.latency.kalman import covariance, latency_filter
from wager.economics.latency.knots import ascends, locate
from wager.errors import MALFORMED, UsageError
from wager.types import DRAFT_STAGE, POLICY_STAGE, StepRecord

_SCALE_SD, _ROW_COST_SD, _KNOT_SD, _REQUEST_SD = 0.3, 0.5, 0.15, 0.01
"""Standard deviations of the errors of prices after a full calibration: of all of it, of what rows cost beyond the
first measured count, of one row count (these three relative), and of the cost of a request (in steps of the first row
count). The fit itself is nearer (5 %); these allow for what other programs do to a machine later."""

MAX_UNCERTAINTY = 5.0
"""Uncertainty of prices that were hardly measured: standard deviations of 1.5 and 2.5 in the logarithm, anything."""

_NOT_OF_ROWS = (DRAFT_STAGE, POLICY_STAGE)
"""Stages that a step's rows have no part in; now and then the policy plans, which would pass for dear rows."""

_RELATED_DOUBLINGS = 3.0
"""The errors of two row counts that are so many doublings apart correlate by 1/e: what slows 12 rows slows 16."""

_NOISE_SD = 0.08
"""How far steps of one shape scatter, relative."""


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One measured step (the median of several): its shape as in LatencyModel, and seconds without drafting."""

    rows: int
    requests: int
    context_sum: int
    seconds: float


class LatencySurface:
    """Seconds = scale x (curve(rows) + per_request R + per_context S + per_pair rows S / R), R requests, S context_sum.

    `rows` are the measured row counts, ascending; `seconds` the curve there, linear in between, and beyond the last two
    along their line. `per_context` are seconds of reading a cached position once a request, `per_pair` of a row's work
    on it. `drafters` hold draft times by name; a drafter never measured takes no time until it is observed.
    `uncertainty` is how many times larger the standard deviations of the values are than after a full calibration.
    """

    def __init__(
        self,
        rows: Sequence[int],
        seconds: Sequence[float],
        *,
        per_request: float = 0.0,
        per_context: float = 0.0,
        per_pair: float = 0.0,
        drafters: Mapping[str, DraftCurve] | None = None,
        uncertainty: float = 1.0,
    ) -> None:
        self.rows = list(rows)
        self.per_request, self.per_context, self.per_pair = per_request, per_context, per_pair
        self.drafters = dict(drafters or {})
        self.scale = 1.0
        _check_curve(self.rows, seconds)
        self._fitted = [float(value) for value in seconds]
        self._fitted_per_request = per_request
        self.uncertainty = uncertainty
        # The filter follows the logs of the scale, of what rows cost and of each knot, and the cost of a request.
        change = covariance(
            [_SCALE_SD, _ROW_COST_SD, *[_KNOT_SD] * len(self.rows), _REQUEST_SD],
            related=slice(2, 2 + len(self.rows)),
            places=[math.log2(count) / _RELATED_DOUBLINGS for count in self.rows],
        )
        self._filter = latency_filter(change, noise_sd=_NOISE_SD, uncertainty=uncertainty)
        self._correct()

    @property
    def learns(self) -> bool:
        """See LatencyModel."""
        return True

    def seconds(self, rows: float, requests: float, context_sum: float) -> float:
        """See LatencyModel; about a microsecond. A step without rows takes no time. Real numbers, for derivatives."""
        if rows <= 0:
            return 0.0
        right, share = locate(self.rows, rows)
        curve = self._corrected[right]
        if right:
            left = self._corrected[right - 1]
            curve = left + (curve - left) * share if share <= 1 else curve + max(0.0, curve - left) * (share - 1)
        return self.scale * (curve + self._others(rows, requests, context_sum))

    def seconds_by_rows(self, rows: Sequence[int], requests: int, context_sum: int) -> list[float]:
        """`seconds` of several counts of rows, ascending from 1, in a third of the time."""
        knots, values, right, last, taken = self.rows, self._corrected, 0, len(self.rows), []
        of_requests, of_context, scale = self.per_request * requests, self.per_context * context_sum, self.scale
        for count in rows:
            while right < last and knots[right] <= count:
                right += 1
            if right == 0 or last == 1:
                curve = values[0]
            else:
                at = min(right, last - 1)
                left = values[at - 1]
                share = (count - knots[at - 1]) / (knots[at] - knots[at - 1])
                rise = values[at] - left
                curve = left + rise * share if share <= 1 else values[at] + max(0.0, rise) * (share - 1)
            pairs = count * context_sum / requests if requests else 0.0
            taken.append(scale * (curve + (of_requests + of_context + self.per_pair * pairs)))
        return taken

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        """See LatencyModel."""
        curve = self.drafters.get(drafter)
        return curve.seconds(requests, depth) if curve and requests > 0 and depth > 0 else 0.0

    def draft_seconds_by_depth(self, drafter: str, requests: int, depth: int) -> list[float]:
        """`draft_seconds` to 0, 1, ... `depth`."""
        curve = self.drafters.get(drafter)
        if curve is None or requests <= 0:
            return [0.0] * (depth + 1)
        return [0.0, *curve.seconds_by_depth(requests, range(1, depth + 1))]

    def observe(self, record: StepRecord) -> None:
        """Correct from a step: how fast the machine is now, how this number of rows differs from the rest, and what a
        request adds.

        Steps that compute prompts (their rows need no logits) are ignored; those with more rows than were measured move
        the end of the curve.
        """
        if record.rows > record.sequences + record.drafted:
            return
        taken = sum([value for stage, value in record.seconds.items() if stage not in _NOT_OF_ROWS])
        if taken <= 0 or record.rows <= 0:
            return
        expected = self.seconds(record.rows, record.sequences, sum(record.context_lens))
        slopes = self._slopes(record.rows, record.sequences, sum(record.context_lens))
        self._filter.update([slope / expected for slope in slopes], math.log(taken / expected))
        self._correct()

    def difference_deviation(self, rows: int, other_rows: int, *, requests: int, context_sum: int) -> float:
        """See LatencyModel."""
        return self.difference_deviations(rows, [other_rows], requests=requests, context_sum=context_sum)[0]

    def difference_deviations(
        self, rows: int, others: Sequence[int], *, requests: int, context_sum: int
    ) -> list[float]:
        """`difference_deviation` from each of several counts of rows."""
        deviation, one, deviations = self._filter.deviation, self._slopes(rows, requests, context_sum), []
        for count in others:
            other = self._slopes(count, requests, context_sum)
            deviations.append(deviation([right - left for left, right in zip(one, other, strict=True)]))
        return deviations

    def _slopes(self, rows: int, requests: int, context_sum: int) -> list[float]:
        """Seconds that a unit of each unknown of the filter adds to a step; beyond the last knot they are its own."""
        slopes, curve = [0.0] * (len(self.rows) + 3), 0.0
        right, share = locate(self.rows, rows)
        share = min(1.0, share)
        for knot, weight in ((right - 1, 1 - share), (right, share)) if right else ((0, 1.0),):
            seconds = weight * self.scale * self._corrected[knot]
            slopes[1] += seconds * (1 - self._fitted[0] / self._uncorrected[knot])
            slopes[2 + knot] = seconds
            curve += seconds
        slopes[0] = curve + self.scale * self._others(rows, requests, context_sum)
        slopes[-1] = self.scale * self._fitted[0] * requests
        return slopes

    def _correct(self) -> None:
        log_scale, log_row_cost, *curve, request = self._filter.values()
        self.scale, row_cost, first = math.exp(log_scale), math.exp(log_row_cost), self._fitted[0]
        self._uncorrected = [first + max(row_cost * (value - first), 1e-3 * first - first) for value in self._fitted]
        self._corrected = [value * math.exp(off) for value, off in zip(self._uncorrected, curve, strict=True)]
        self.per_request = max(0.0, self._fitted_per_request + first * request)

    def observe_draft(self, drafter: str, requests: int, depth: int, *, seconds: float) -> None:
        """See LatencyModel."""
        if requests > 0 and depth > 0 and seconds > 0:
            if drafter not in self.drafters:
                self.drafters[drafter] = DraftCurve.unmeasured()
            self.drafters[drafter].observe(requests, depth, seconds=seconds)

    def _others(self, rows: float, requests: float, context_sum: float) -> float:
        pairs = rows * context_sum / requests if requests else 0.0
        return self.per_request * requests + self.per_context * context_sum + self.per_pair * pairs

    # ---- to a file and back ----------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a file, corrections included; `from_dict` reads them."""
        return {
            "rows": list(self.rows),
            "seconds": [self.scale * value for value in self._corrected],
            "per_request": self.scale * self.per_request,
            "per_context": self.scale * self.per_context,
            "per_pair": self.scale * self.per_pair,
            "uncertainty": self.uncertainty,
            "drafters": {name: curve.as_dict() for name, curve in self.drafters.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LatencySurface:
        """The inverse of as_dict. UsageError if a key is missing or a value is not a number."""
        try:
            drafters = {name: DraftCurve.from_dict(curve) for name, curve in values["drafters"].items()}
            costs = {name: float(values[name]) for name in ("per_request", "per_context", "per_pair")}
            costs["uncertainty"] = float(values.get("uncertainty", 1.0))  # files without it are of full calibrations
            return cls([int(r) for r in values["rows"]], values["seconds"], drafters=drafters, **costs)
        except MALFORMED as error:
            raise UsageError(f"Stored step times are damaged: {error!r}.", "Run `wager calibrate` again.") from error


def _check_curve(rows: Sequence[int], seconds: Sequence[float]) -> None:
    ascending = ascends(rows)
    sound = all(math.isfinite(value) and value > 0 for value in seconds)
    if not rows or rows[0] < 1 or len(rows) != len(seconds) or not ascending or not sound:
        raise UsageError(
            f"Step times of {list(seconds)} s at {list(rows)} rows are not valid.",
            "Rows ascend from 1 or more, and each has seconds above 0.",
        )
