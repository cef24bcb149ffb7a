"""What a step costs here and now, cheap enough to ask hundreds of times before every step.

A StepSurface says seconds from the shape of a step alone. MeasuredSurface starts from measured points (or from points
that the cost model made up), follows the staircase of real kernels between them, and is corrected by every step that
was taken. Knows no model, no drafter and no clock.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wager.economics.latency.draft_curve import DraftCurve
from wager.economics.latency.kalman import KalmanFilter
from wager.errors import UsageError
from wager.types import DRAFT_STAGE, StepRecord

_LEVEL, _KNOT, _REQUEST = (0.1, 0.01), (0.05, 1e-3), (0.01, 2e-4)
"""How far off a careful fit is believed to be, and to drift in a step: all of it (relative), one row count (relative),
and the price of a request (in steps of one row)."""

_NOISE = 0.1
"""How far steps of one kind scatter, relative."""

_PENALTY = 1e-3


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One measured step (the median of several): its shape as in StepSurface, and seconds without drafting."""

    rows: int
    requests: int
    context_sum: int
    seconds: float


class LatencySurface:
    """Seconds = level x (curve(rows) + per_request R + per_context S + per_pair rows S / R), R requests, S context_sum.

    `rows` are the measured row counts, ascending; `seconds` the curve there, linear in between, and beyond the last two
    along their line. `per_context` prices reading a cached position once a request, `per_pair` a row's work on it.
    `drafters` price drafting by name; one never measured is taken to be free until it is observed.
    `doubt` says how many times further off than a careful fit it may be, for steps to correct.
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
        doubt: float = 1.0,
    ) -> None:
        self.rows = list(rows)
        self.per_request, self.per_context, self.per_pair = per_request, per_context, per_pair
        self.drafters = dict(drafters or {})
        self.level = 1.0
        _check_curve(self.rows, seconds)
        self._base = [float(value) for value in seconds]
        self._now = list(self._base)
        self._request = per_request
        off, drift = zip(_LEVEL, *[_KNOT] * len(self.rows), _REQUEST, strict=True)
        # It follows the log level, the log curve at each knot, and the price of a request.
        self._tracker = KalmanFilter([doubt * each for each in off], drift=drift, noise=_NOISE)

    @property
    def learns(self) -> bool:
        """See LatencyModel."""
        return True

    def seconds(self, rows: float, requests: float, context_sum: float) -> float:
        """See StepSurface; about a microsecond. A step without rows costs nothing. Derivatives need real numbers."""
        if rows <= 0:
            return 0.0
        right, share = self._place(rows)
        curve = self._now[right]
        if right:
            left = self._now[right - 1]
            curve = left + (curve - left) * share if share <= 1 else curve + max(0.0, curve - left) * (share - 1)
        return self.level * (curve + self._others(rows, requests, context_sum))

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        """See StepSurface."""
        curve = self.drafters.get(drafter)
        return curve.seconds(requests, depth) if curve and requests > 0 and depth > 0 else 0.0

    def observe(self, record: StepRecord) -> None:
        """Learn from a step: how fast the machine is now, how this number of rows differs from the rest, and what a
        request adds.

        Steps that compute prompts (their rows need no logits) teach nothing; those with more rows than were measured
        move the end of the curve.
        """
        if record.rows > record.sequences + record.drafted:
            return
        taken = sum(value for stage, value in record.seconds.items() if stage != DRAFT_STAGE)
        if taken <= 0 or record.rows <= 0:
            return
        expected = self.seconds(record.rows, record.sequences, sum(record.context_lens)) / self.level
        right, share = self._place(record.rows)
        share = min(1.0, share)
        knots = {right: share, right - 1: 1 - share} if right else {0: 1.0}
        causes, slopes = [0, len(self.rows) + 1], [1.0, self._base[0] * record.sequences / expected]
        for knot, weight in knots.items():
            causes.append(knot + 1)
            slopes.append(weight * self._now[knot] / expected)
        self._tracker.learn(causes, slopes, missed=math.log(taken / (self.level * expected)))
        self._correct()

    def _correct(self) -> None:
        level, *curve, request = self._tracker.values.tolist()
        self.level = math.exp(level)
        self._now = [base * math.exp(off) for base, off in zip(self._base, curve, strict=True)]
        self.per_request = max(0.0, self._request + self._base[0] * request)

    def observe_draft(self, drafter: str, requests: int, depth: int, *, seconds: float) -> None:
        """Learn what drafting for `requests` sequences to `depth` took."""
        if requests > 0 and depth > 0 and seconds > 0:
            self.drafters.setdefault(drafter, DraftCurve.free()).observe(requests, depth, seconds=seconds)

    def _place(self, rows: float) -> tuple[int, float]:
        """The knot at or right of `rows` (0: at the first or below) and how far from its left neighbour, in [0, 1];
        above 1 beyond the last."""
        right = bisect_right(self.rows, rows)
        if right == 0 or len(self.rows) == 1:
            return 0, 0.0
        right = min(right, len(self.rows) - 1)
        left = self.rows[right - 1]
        return right, (rows - left) / (self.rows[right] - left)

    def _others(self, rows: float, requests: float, context_sum: float) -> float:
        pairs = rows * context_sum / requests if requests else 0.0
        return self.per_request * requests + self.per_context * context_sum + self.per_pair * pairs

    # ---- from measurements, and to a file --------------------------------------------------------------------------

    @classmethod
    def fit(
        cls, points: Sequence[StepPoint], *, drafters: Mapping[str, DraftCurve] | None = None, doubt: float = 1.0
    ) -> LatencySurface:
        """The surface nearest to measured points in relative error, with no negative price.

        Needs two or more row counts, or raises UsageError. A price that the points do not tell apart (one context,
        one request everywhere) comes out as zero rather than as a guess.
        """
        rows = sorted({point.rows for point in points})
        if len(rows) < 2 or any(point.seconds <= 0 or point.requests <= 0 for point in points):
            raise UsageError(
                f"{len(points)} measured steps with {len(rows)} row counts do not make a surface.",
                "Measure at least two row counts, each with seconds above 0.",
            )
        system = np.array([[*_hats(rows, point.rows), *_terms(point)] for point in points], dtype=np.float64)
        taken = np.array([point.seconds for point in points])
        found = _solve(system / taken[:, None], np.ones(len(points)), keep=len(rows))
        curve, (request, context, pair) = found[: len(rows)], found[len(rows) :]
        return cls(
            rows,
            [max(float(value), 1e-9) for value in curve],
            per_request=float(request),
            per_context=float(context),
            per_pair=float(pair),
            drafters=drafters,
            doubt=doubt,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a file, with what was learned since; `from_dict` reads them."""
        return {
            "rows": list(self.rows),
            "seconds": [self.level * value for value in self._now],
            "per_request": self.level * self.per_request,
            "per_context": self.level * self.per_context,
            "per_pair": self.level * self.per_pair,
            "drafters": {name: curve.as_dict() for name, curve in self.drafters.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LatencySurface:
        """The inverse of as_dict. UsageError if a key is missing or a value is not a number."""
        try:
            drafters = {name: DraftCurve.from_dict(curve) for name, curve in values["drafters"].items()}
            prices = {name: float(values[name]) for name in ("per_request", "per_context", "per_pair")}
            return cls([int(r) for r in values["rows"]], values["seconds"], drafters=drafters, **prices)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"Stored step times are damaged: {error!r}.", "Run `wager calibrate` again.") from error


def _check_curve(rows: Sequence[int], seconds: Sequence[float]) -> None:
    ascending = all(left < right for left, right in zip(rows, rows[1:], strict=False))
    sound = all(math.isfinite(value) and value > 0 for value in seconds)
    if not rows or rows[0] < 1 or len(rows) != len(seconds) or not ascending or not sound:
        raise UsageError(
            f"A step curve over rows {list(rows)} with seconds {list(seconds)} is not one.",
            "Rows ascend from 1 or more, and each has seconds above 0.",
        )


def _hats(knots: Sequence[int], rows: int) -> list[float]:
    """The weights of each knot at one of them: 1 there, 0 elsewhere (every point's rows are a knot)."""
    return [float(knot == rows) for knot in knots]


def _terms(point: StepPoint) -> tuple[float, float, float]:
    return point.requests, point.context_sum, point.rows * point.context_sum / point.requests


def _solve(system: NDArray[np.float64], target: NDArray[np.float64], *, keep: int) -> NDArray[np.float64]:
    """Least squares in which columns from `keep` on may not be negative, and are zero where nothing speaks for them.

    The most negative is dropped until none is. A slight penalty on these columns alone decides what the rows of the
    system leave open.
    """
    active = list(range(system.shape[1]))
    while True:
        scale = np.linalg.norm(system[:, active], axis=0)
        scale[scale == 0] = 1.0
        penalty = np.diag([_PENALTY * (column >= keep) for column in active])
        rows = np.vstack([system[:, active] / scale, penalty])
        found = np.linalg.lstsq(rows, np.concatenate([target, np.zeros(len(active))]), rcond=None)[0]
        worst = min(range(len(active)), key=lambda at: found[at] if active[at] >= keep else 0.0)
        if active[worst] < keep or found[worst] >= 0:
            whole = np.zeros(system.shape[1])
            whole[active] = found / scale
            return whole
        del active[worst]
