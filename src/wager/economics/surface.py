"""The latency model of this machine: seconds of a step and of drafting by shape, fitted to measured points and
corrected by steps that were taken (policy/learning.py says which).

Both are linear between measured points. What steps show corrects them by a Kalman filter (csrc/step_times.h, kalman.h).
Cheap enough to be evaluated hundreds of times before every step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wager.economics.latency import LatencyModel
from wager.economics.policy.base import SMOOTHING
from wager.errors import MALFORMED, UsageError
from wager.kernels import _native
from wager.types import DRAFT_STAGE, POLICY_STAGE, REQUESTED_STAGE, StepRecord

_SCALE_SD, _ROW_COST_SD, _KNOT_SD, _REQUEST_SD = 0.3, 0.5, 0.15, 0.01
"""Standard deviations of the errors of prices after a full calibration: of all of it, of what rows cost beyond the
first measured count, of one row count (these three relative), and of the cost of a request (in steps of the first row
count). The fit itself is nearer (5 %); these allow for what other programs do to a machine later."""

MAX_UNCERTAINTY = 5.0
"""Uncertainty of prices that were hardly measured: standard deviations of 1.5 and 2.5 in the logarithm, anything."""

_NOT_OF_ROWS = (DRAFT_STAGE, POLICY_STAGE, REQUESTED_STAGE)
"""Stages that a step's rows have no part in; now and then the policy plans, which would pass for dear rows."""

_RELATED_DOUBLINGS = 3.0
"""Doublings between two row counts whose errors correlate by 1/e: what slows 12 rows slows 16."""

_NOISE_SD = 0.08
"""How far steps of one shape scatter, relative."""


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One measured step (the median of several): its shape as in LatencyModel, and seconds without drafting."""

    rows: int
    requests: int
    context_sum: int
    seconds: float

    @property
    def drafted(self) -> bool:
        """Whether draft tokens were verified."""
        return self.rows > self.requests


class LatencySurface(LatencyModel):
    """Seconds = scale x (curve(rows) + per_request R + per_context S + per_pair rows S / R), R requests, S context_sum.

    `rows` are the measured row counts, ascending; `seconds` the curve there, linear in between, and beyond the last two
    along their line. `per_context` are seconds of reading a cached position once a request, `per_pair` of a row's work
    on it. `drafters` hold draft times by name; a drafter never measured takes no time until it is observed.
    `uncertainty` is how many times larger the standard deviations of the values are than after a full calibration.
    `others` is the covariance of what a subclass follows besides, as `latency_filter` takes it.
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
        others: NDArray[np.float64] | None = None,
    ) -> None:
        self.rows = list(rows)
        self.per_context, self.per_pair = per_context, per_pair
        self.drafters = dict(drafters or {})
        if not _is_sound(self.rows, seconds) or self.rows[0] < 1 or min(seconds) <= 0:
            raise UsageError(
                f"Step times of {list(seconds)} s at {list(rows)} rows are not valid.",
                "Rows ascend from 1 or more, and each has seconds above 0.",
            )
        self.uncertainty = uncertainty
        # The filter follows the logs of the scale, of what rows cost and of each knot, and the cost of a request.
        change = covariance(
            [_SCALE_SD, _ROW_COST_SD, *[_KNOT_SD] * len(self.rows), _REQUEST_SD],
            related=slice(2, 2 + len(self.rows)),
            places=[math.log2(count) / _RELATED_DOUBLINGS for count in self.rows],
        )
        if others is not None:
            corner = np.zeros((len(change), len(others)))
            change = np.block([[change, corner], [corner.T, others]])
        self._times = _native.StepTimes(
            latency_filter(change, noise_sd=_NOISE_SD, uncertainty=uncertainty),
            rows=self.rows,
            seconds=list(seconds),
            per_request=per_request,
            per_context=per_context,
            per_pair=per_pair,
        )

    @property
    def scale(self) -> float:
        """How much slower the machine is now than it was when it was measured."""
        return self._times.scale

    @property
    def per_request(self) -> float:
        """Seconds of a request, corrected."""
        return self._times.per_request

    @property
    def learns(self) -> bool:
        """See LatencyModel."""
        return True

    def seconds(self, rows: float, requests: float, context_sum: float) -> float:
        """See LatencyModel; about a microsecond. A step without rows takes no time. Real numbers, for derivatives."""
        return self._times.seconds(rows, requests, context_sum)

    def seconds_by_rows(self, rows: Sequence[float], requests: float, context_sum: float) -> list[float]:
        """See LatencyModel."""
        return self._times.seconds_by_rows(rows, requests, context_sum)

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        """See LatencyModel."""
        curve = self.drafters.get(drafter)
        return curve.seconds(requests, depth) if curve and requests > 0 and depth > 0 else 0.0

    def draft_seconds_by_depth(self, drafter: str, requests: int, depth: int) -> list[float]:
        """See LatencyModel."""
        curve = self.drafters.get(drafter)
        if curve is None or requests <= 0:
            return [0.0] * (depth + 1)
        return [0.0, *curve.seconds_by_depth(requests, range(1, depth + 1))]

    def observe(self, record: StepRecord) -> None:
        """Correct from a step: how fast the machine is now, how this number of rows differs from the rest, and what a
        request adds.

        Steps that compute prompts (their rows need no logits) are ignored; those with more rows than were measured move
        its last line.
        """
        if record.rows > record.sequences + record.drafted:
            return
        taken = sum([value for stage, value in record.seconds.items() if stage not in _NOT_OF_ROWS])
        if not 0 < taken < math.inf or record.rows <= 0:
            return
        self._times.observe(record.rows, record.sequences, sum(record.context_lens), taken)

    def difference_deviations(
        self, rows: int, others: Sequence[int], *, requests: int, context_sum: int
    ) -> list[float]:
        """See LatencyModel."""
        return self._times.deviations(rows, others, requests, context_sum)

    def observe_draft(self, drafter: str, requests: int, depth: int, *, seconds: float) -> None:
        """See LatencyModel."""
        if requests > 0 and depth > 0 and 0 < seconds < math.inf:
            if drafter not in self.drafters:
                self.drafters[drafter] = DraftCurve.unmeasured()
            self.drafters[drafter].observe(requests, depth, seconds=seconds)

    # ---- to a file and back ----------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a file, corrections included; `from_dict` reads them."""
        return {
            "rows": list(self.rows),
            "seconds": [self.scale * value for value in self._times.corrected],
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
            costs: dict[str, Any] = {name: float(values[name]) for name in ("per_request", "per_context", "per_pair")}
            costs["uncertainty"] = float(values.get("uncertainty", 1.0))  # files without it are of full calibrations
            return cls([int(r) for r in values["rows"]], values["seconds"], drafters=drafters, **costs)
        except MALFORMED as error:
            raise UsageError(f"Stored step times are damaged: {error!r}.", "Run `wager calibrate` again.") from error


_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PRICE_SD, _DRAFT_KNOT_SD = 0.2, 0.1
"""Standard deviations of the errors of measured draft times, relative: of what a call and what a draft token costs, and
of both at one number of requests."""

_UNMEASURED = 3.0
"""How many times larger they are where one call is all that is known."""

_DRAFT_NOISE_SD = 0.3
"""How far calls of one shape scatter, relative: most take microseconds, so pauses of the machine count more."""


@dataclass(frozen=True, slots=True)
class DraftPoint:
    """One measured call (the median of several): drafting for `requests` sequences, each to `depth`."""

    requests: int
    depth: int
    seconds: float


class DraftCurve:
    """`requests` are measured batch sizes, ascending; `per_call` and `per_token` the seconds there, linear in between
    and beyond along the last line, if that rises. `fingerprint`: of the files that the drafter reads
    (models/opening.py), or ""."""

    def __init__(self, requests: Sequence[int], per_call: Sequence[float], per_token: Sequence[float]) -> None:
        if not _is_sound(requests, per_call, per_token):
            raise UsageError(
                f"Draft times over {list(requests)} requests are not valid: {list(per_call)} s a call and "
                f"{list(per_token)} s a draft token.",
                "Requests ascend, and each has two times of zero or more.",
            )
        self.requests = list(requests)
        self.fingerprint = ""
        self._start(per_call, per_token)

    def _start(self, per_call: Sequence[float], per_token: Sequence[float], *, uncertainty: float = 1.0) -> None:
        # The filter follows the logs of what a call and a token cost, and of both at each number of requests.
        changes = [_PRICE_SD, _PRICE_SD, *[_DRAFT_KNOT_SD] * len(self.requests)]
        self._times = _native.DraftTimes(
            latency_filter(covariance(changes), noise_sd=_DRAFT_NOISE_SD, uncertainty=uncertainty),
            requests=self.requests,
            per_call=list(per_call),
            per_token=list(per_token),
        )

    @property
    def per_call(self) -> list[float]:
        """Seconds of a call by number of requests, corrected."""
        return self._times.per_call

    @property
    def per_token(self) -> list[float]:
        """Seconds of a draft token by number of requests, corrected."""
        return self._times.per_token

    @classmethod
    def unmeasured(cls) -> DraftCurve:
        """A drafter that was never measured: takes no time until it is observed."""
        return cls(_KNOTS, [0.0] * len(_KNOTS), [0.0] * len(_KNOTS))

    def seconds(self, requests: float, depth: float) -> float:
        """Seconds of one call for `requests` sequences, each to `depth`."""
        return self.seconds_by_depth(requests, [depth])[0]

    def seconds_by_depth(self, requests: float, depths: Sequence[float]) -> list[float]:
        """`seconds` to several depths."""
        return self._times.seconds_by_depth(requests, depths)

    def observe(self, requests: int, depth: int, *, seconds: float) -> None:
        """Correct from an observed call. The first one ever holds for every batch size; half of it is the call's own
        until calls of other depths show what is."""
        if not self._times.observe(requests, depth, seconds):
            count = len(self.requests)
            self._start([seconds / 2] * count, [seconds / 2 / depth] * count, uncertainty=_UNMEASURED)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a calibration file; `from_dict` reads them."""
        own = {"fingerprint": self.fingerprint} if self.fingerprint else {}
        return {"requests": self.requests, "fixed": self.per_call, "each": self.per_token, **own}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DraftCurve:
        """The inverse of as_dict. KeyError, TypeError or UsageError if something is missing or not valid."""
        curve = cls(values["requests"], values["fixed"], values["each"])
        curve.fingerprint = str(values.get("fingerprint", ""))
        return curve


_CURVE_PENALTY, _REQUEST_PENALTY, _PENALTY = 1e-5, 1e-4, 1e-3
"""Weights of squared coefficients in a fit: of rows, of requests, and of contexts and drafting. What the points do not
tell apart goes to the first of them: of one context, nothing goes to contexts."""

_MOST_KNOTS = 32  # row counts at which a curve is fitted at most


def fit_surface(
    points: Sequence[StepPoint],
    *,
    drafters: Mapping[str, DraftCurve] | None = None,
    uncertainty: float = 1.0,
    speculation: str = "",
) -> LatencySurface:
    """The surface nearest to measured points in relative error, with no negative cost: its curve never falls.

    Needs two or more row counts, or raises UsageError. A cost that the points do not determine (all of one context, or
    of one request) comes out as zero. `speculation` names a drafter whose time is part of the points that have more
    rows than requests: what these take beyond their rows, by the others, becomes its draft time; without others, none.
    """
    counts = {point.rows for point in points}
    if len(counts) < 2 or any(point.seconds <= 0 or point.requests <= 0 for point in points):
        raise UsageError(
            f"{len(points)} measured steps with {len(counts)} row counts do not make a surface.",
            "Measure at least two row counts, each with seconds above 0.",
        )
    plain = {point.rows for point in points if not (speculation and point.drafted)}
    drafted = bool(speculation) and any(point.drafted for point in points)
    rows = _knots(plain | {count for count in counts if count > max(plain, default=0)})
    # The curve is the first knot's seconds, and what each further one adds; beyond the last its line goes on.
    shares = np.maximum(0.0, (np.array([[point.rows] for point in points]) - rows[:-1]) / np.diff(rows))
    shares[:, :-1] = np.minimum(1.0, shares[:, :-1])
    terms = [(point.requests, point.context_sum, point.rows * point.context_sum / point.requests) for point in points]
    drafts = [_draft_terms(point) if plain and drafted else (0.0,) * 4 for point in points]
    system = np.hstack([np.ones((len(points), 1)), shares, terms, drafts])
    taken = np.array([point.seconds for point in points])
    penalties = [0.0, *[_CURVE_PENALTY] * (len(rows) - 1), _REQUEST_PENALTY, *[_PENALTY] * (2 + len(drafts[0]))]
    coefficients = _solve(system / taken[:, None], np.ones(len(points)), np.array(penalties))
    curve, (per_request, per_context, per_pair) = np.cumsum(coefficients[: len(rows)]), coefficients[len(rows) :][:3]
    if drafted:
        sizes, (call, request, token, pair) = (1, max(point.requests for point in points)), coefficients[-4:].tolist()
        curve_of = DraftCurve(sizes, [call + n * request for n in sizes], [token + n * pair for n in sizes])
        drafters = {**(drafters or {}), speculation: curve_of}
    return LatencySurface(
        rows,
        [max(float(value), 1e-9) for value in curve],
        per_request=float(per_request),
        per_context=float(per_context),
        per_pair=float(per_pair),
        drafters=drafters,
        uncertainty=uncertainty,
    )


def _knots(counts: Set[int]) -> list[int]:
    """Row counts at which the curve is fitted: all, or as many as are kept, evenly spaced in their logarithm."""
    ascending = sorted(counts)
    ratio = (ascending[-1] / ascending[0]) ** (1 / (_MOST_KNOTS - 1)) if len(ascending) > _MOST_KNOTS else 1.0
    knots = ascending[:1]
    for count in ascending[1:]:
        if count >= ratio * knots[-1]:
            knots.append(count)
    return knots


def _draft_terms(point: StepPoint) -> tuple[float, ...]:
    """The terms of a drafting call: 1, its requests, its depth, its draft tokens; zeros without draft tokens."""
    depth = point.rows / point.requests - 1
    return (1.0, point.requests, depth, point.requests * depth) if depth else (0.0,) * 4


def _solve(
    system: NDArray[np.float64], target: NDArray[np.float64], penalties: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Least squares in which no coefficient with a penalty may be negative.

    The most negative one is dropped until none is. The penalties are slight, and decide what the system does not.
    """
    active = list(range(system.shape[1]))
    while True:
        scale = np.linalg.norm(system[:, active], axis=0)
        scale[scale == 0] = 1.0
        rows = np.vstack([system[:, active] / scale, np.diag(penalties[active])])
        scaled = np.linalg.lstsq(rows, np.concatenate([target, np.zeros(len(active))]), rcond=None)[0]
        worst = min(range(len(active)), key=lambda at: scaled[at] if penalties[active[at]] else 0.0)
        if not penalties[active[worst]] or scaled[worst] >= 0:
            solution = np.zeros(system.shape[1])
            solution[active] = scaled / scale
            return solution
        del active[worst]


def fit_draft_curve(points: Sequence[DraftPoint]) -> DraftCurve:
    """A drafter's curve from measured calls: for each number of requests the seconds of a call and of each draft token,
    nearest in relative error, neither below zero. UsageError without points."""
    requests = sorted({point.requests for point in points})
    per_call, per_token = [], []
    for count in requests:
        calls = [point for point in points if point.requests == count]
        system = np.array([[1 / point.seconds, point.depth / point.seconds] for point in calls])
        call, token = np.linalg.lstsq(system, np.ones(len(calls)), rcond=None)[0]
        if call < 0 or token < 0:  # the best fit with one of them alone
            alone = 1 if call < 0 else 0
            column = system[:, alone]
            best = float(column.sum() / (column @ column))
            call, token = (0.0, best) if alone else (best, 0.0)
        per_call.append(float(call))
        per_token.append(float(token))
    return DraftCurve(requests, per_call, per_token)


_MAX_SURPRISE = 2.0
"""An error of more standard deviations than this counts as this many: normal errors exceed it once in twenty times."""

_MEMORY = 1000.0
"""Observations over which an unknown drifts as far as a change of the machine would move it."""

_DRIFT_INTERVAL = 16
"""Observations between those that add to the uncertainty, to save time."""

_MOST_NOISE = 0.3
"""The most that the mean scatter of observations may be, as a standard deviation."""

_PASSING = 0.93
"""What is left at the next observation of an offset that successive errors share: programs beside this one slow some 25
steps in a row, whatever their rows."""

_FIRST_TREND_WEIGHT, _TREND_WEIGHT, _TREND_GROWTH = 0.25, 0.03, 6
"""Weight of a new error in the running mean of errors at first, and in the long run; and the observations that make one
more of the errors it is a mean of: what was just loaded may be wrong altogether, and what has held for a hundred steps
is not wrong because a neighbour on the host slows the next twenty."""

_TREND = 1.15
"""The mean of errors that means a change, in standard deviations: at first three in a row that count as _MAX_SURPRISE
(2 (1 - 0.75^3) = 1.16), later 28."""


def latency_filter(change: NDArray[np.float64], *, noise_sd: float, uncertainty: float = 1.0) -> _native.KalmanFilter:
    """A Kalman filter over slowly drifting unknowns (csrc/kalman.h). `change` is the covariance of how far a change of
    the machine moves them, [unknowns, unknowns], `noise_sd` the standard deviation of an observation, at least, and
    `uncertainty` the factor by which the unknowns' are larger at first.

    Robust in three ways: one observation that is far off moves little (a pause of the machine); what successive errors
    share is followed as one unknown more, which passes (a neighbour on the host), so that it is not taken for the price
    of the rows that were seen meanwhile; and many in a row that are off in the same direction make all unknowns more
    uncertain (the machine has changed)."""
    return _native.KalmanFilter(
        max_surprise=_MAX_SURPRISE,
        drift=_DRIFT_INTERVAL / _MEMORY,
        noise_weight=SMOOTHING,
        most_noise=_MOST_NOISE,
        passing=_PASSING,
        first_trend_weight=_FIRST_TREND_WEIGHT,
        trend_weight=_TREND_WEIGHT,
        trend=_TREND,
        drift_interval=_DRIFT_INTERVAL,
        trend_growth=_TREND_GROWTH,
        change=change.ravel().tolist(),
        noise=noise_sd**2,
        uncertainty=uncertainty,
    )


def covariance(
    deviations: Sequence[float], *, related: slice | None = None, places: Sequence[float] = ()
) -> NDArray[np.float64]:
    """The covariance of unknowns with these standard deviations, [unknowns, unknowns]. Two of the `related` ones
    correlate by exp(-distance) of their `places`; all others are independent."""
    correlation = np.eye(len(deviations))
    if related is not None:
        at = np.array(places)
        correlation[related, related] = np.exp(-np.abs(at[:, None] - at))
    result: NDArray[np.float64] = correlation * np.outer(deviations, deviations)
    return result


def _is_sound(knots: Sequence[float], *curves: Sequence[float]) -> bool:
    """Whether knots ascend, and each curve has a finite value of 0 or more at each of them."""
    ascend = len(knots) > 0 and all(left < right for left, right in pairwise(knots))
    same = all(len(curve) == len(knots) for curve in curves)
    return ascend and same and all(math.isfinite(value) and value >= 0 for curve in curves for value in curve)


def locate(knots: Sequence[float], value: float) -> tuple[int, float]:
    """The index of the knot right of `value` and the share of the way to it from its left neighbour, in [0, 1]; above 1
    beyond the last knot. (0, 0.0) below the first knot, and where there is only one."""
    right = bisect_right(knots, value)
    if right == 0 or len(knots) == 1:
        return 0, 0.0
    right = min(right, len(knots) - 1)
    left = knots[right - 1]
    return right, (value - left) / (knots[right] - left)
