"""A calibration: step times of a model on this machine, how far the fit is off on steps it was not fitted to, its file.

A calibration belongs to one setup (machine, model, kernels, threads, number type): in another it is refused, and what
differs is named.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wager.arch.spec import ModelSpec
from wager.economics.surface import MAX_UNCERTAINTY, DraftCurve, LatencySurface, StepPoint, fit_surface
from wager.errors import MALFORMED, UsageError
from wager.inputs import replacing

FORMAT = 1  # version of the files
FOLDER = "calibrations"
"""Name of the folder that calibrations are kept in, below the user's cache folder."""

_FULL_ERROR = 0.05
"""Error of the fit (90th percentile) of a full calibration on an undisturbed machine: see docs/calibrate.md."""

_LARGEST_FALL = 0.2
"""Share by which step times may fall from a row count to a larger one: noise. More rows never take less time, and what
reads such a curve finds that guesses speed a step up."""

_LONGEST_STEP = 3600.0  # seconds: a file with a longer one is refused

_FOLDS = 64
"""Parts in which points are left out in turn; up to that many points, each is left out alone."""

SIZES = "sizes-"
"""The prefix of `Setup.shape` where another engine was measured."""

CALIBRATE_AGAIN = "Run `wager calibrate` again."


@dataclass(frozen=True, slots=True)
class Setup:
    """What a calibration is valid for. `shape` is the fingerprint of all sizes of the model; its name `model` is
    for display."""

    machine: str
    model: str
    shape: str
    kernels: str
    threads: int | None
    dtype: str

    def differences(self, current: Setup) -> list[str]:
        """What differs in `current`, in words."""
        same = self.shape == current.shape
        differences = [] if same else [f"model {self.model} (here {current.model}, of other sizes)"]
        for name in ("machine", "kernels", "threads", "dtype"):
            stored, value = getattr(self, name), getattr(current, name)
            if stored != value:
                differences.append(f"{name} {stored} (here {value})")
        return differences

    @property
    def foreign(self) -> bool:
        """Whether another engine was measured, by a table or over HTTP."""
        return self.shape.startswith(SIZES)

    @property
    def filename(self) -> str:
        """The name of the file of this setup; the model's name does not count."""
        text = f"{self.machine}\n{self.kernels}\n{self.threads}\n{self.dtype}"
        return f"{self.shape}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"


def fingerprint(spec: ModelSpec) -> str:
    """Identifies all sizes of a model: two with one fingerprint take the same time."""
    shape = spec.details, spec.layers, spec.hidden, spec.vocab, spec.tied, spec.context
    return f"{spec.details.architecture}-{hashlib.sha256(repr(shape).encode()).hexdigest()[:12]}"


def sizes_of(spec: ModelSpec) -> str:
    """As `fingerprint`, by the matrices alone, so that the engine need not know the model."""
    sizes = spec.num_layers, spec.hidden, spec.vocab, sorted(spec.elements().items()), spec.active_expert_elements
    return f"{SIZES}{hashlib.sha256(repr(sizes).encode()).hexdigest()[:12]}"


@dataclass(frozen=True, slots=True)
class PredictionErrors:
    """|predicted / measured - 1| over `count` shapes or steps: its median, 90th percentile and largest."""

    count: int
    median: float
    p90: float
    worst: float

    @classmethod
    def of(cls, predicted: Sequence[float], measured: Sequence[float]) -> PredictionErrors:
        errors = np.abs(np.array(predicted) / np.array(measured) - 1)
        return cls(len(errors), *(float(np.quantile(errors, at)) for at in (0.5, 0.9, 1.0)))

    def __str__(self) -> str:
        return f"{self.median:.1%} (median), {self.p90:.1%} (90th percentile), {self.worst:.1%} (worst)"


@dataclass(frozen=True, slots=True)
class Calibration:
    """One calibration: made at `when`, by measuring for `seconds`. `surface_values` are of LatencySurface.as_dict;
    `points` were fitted, `held_out` were not, and `errors` say how far the surface is off on these."""

    setup: Setup
    when: datetime
    seconds: float
    surface_values: Mapping[str, Any]
    points: tuple[StepPoint, ...]
    held_out: tuple[StepPoint, ...]
    errors: PredictionErrors

    def __post_init__(self) -> None:
        """UsageError for values that no machine has."""
        values = self.surface_values
        uncertainty, largest, at = values["uncertainty"], 0.0, 0
        if not 1 <= uncertainty <= MAX_UNCERTAINTY:
            raise UsageError(
                f"An uncertainty of {uncertainty:g} is out of range: it is 1 to {MAX_UNCERTAINTY:g}.", CALIBRATE_AGAIN
            )
        curves = [cost for curve in values["drafters"].values() for cost in (*curve["fixed"], *curve["each"])]
        costs = [values[name] for name in ("per_request", "per_context", "per_pair")]
        for seconds in (*values["seconds"], *costs, *curves):
            if not 0 <= seconds <= _LONGEST_STEP:
                raise UsageError(
                    f"A cost of {seconds:g} s is out of range: it is 0 to {_LONGEST_STEP:g}.", CALIBRATE_AGAIN
                )
        for rows, seconds in zip(values["rows"], values["seconds"], strict=True):
            if seconds < (1 - _LARGEST_FALL) * largest:
                raise UsageError(
                    f"Step times fall from {largest:.3g} s at {at} rows to {seconds:.3g} s at {rows}: more rows cannot "
                    "take less time.",
                    f"{CALIBRATE_AGAIN} While it measures, nothing else should run.",
                )
            if seconds > largest:
                largest, at = seconds, rows

    @classmethod
    def fit(
        cls,
        setup: Setup,
        points: Sequence[StepPoint],
        held_out: Sequence[StepPoint],
        *,
        seconds: float,
        drafters: Mapping[str, DraftCurve] | None = None,
    ) -> Calibration:
        """Fit `points`, test the fit on `held_out`: the greater its error there, the less the surface is trusted beside
        what steps show. UsageError if there are too few of either."""
        if not held_out:
            raise UsageError(
                "Too little time or memory for steps to test the fit with.",
                "Give --seconds or --memory more.",
            )
        surface = fit_surface(points, drafters=drafters)
        errors = PredictionErrors.of(_predict(surface, held_out), _seconds(held_out))
        return cls._judged(setup, surface, points, held_out, errors, seconds)

    @classmethod
    def cross_validate(
        cls, setup: Setup, points: Sequence[StepPoint], *, seconds: float, speculation: str = ""
    ) -> Calibration:
        """Fit all points; the error is that of each (with many, of every _FOLDS-th together) by a fit to the others.
        `speculation`: see fit_surface. UsageError if the points are too few."""
        folds = min(_FOLDS, len(points))
        predicted: list[float] = []
        tested: list[StepPoint] = []
        for fold in range(folds):
            rest = [point for at, point in enumerate(points) if at % folds != fold]
            if len({point.rows for point in rest}) > 1:
                tested += points[fold::folds]
                predicted += _predict(fit_surface(rest, speculation=speculation), points[fold::folds], speculation)
        if not tested:
            raise UsageError(f"{len(points)} steps are too few to test a fit with.", "Give steps of more row counts.")
        surface = fit_surface(points, speculation=speculation)
        return cls._judged(setup, surface, points, (), PredictionErrors.of(predicted, _seconds(tested)), seconds)

    @classmethod
    def _judged(
        cls,
        setup: Setup,
        surface: LatencySurface,
        points: Sequence[StepPoint],
        held_out: Sequence[StepPoint],
        errors: PredictionErrors,
        seconds: float,
    ) -> Calibration:
        values = {**surface.as_dict(), "uncertainty": min(MAX_UNCERTAINTY, max(1.0, errors.p90 / _FULL_ERROR))}
        now = datetime.now(UTC).replace(microsecond=0)
        return cls(setup, now, seconds, values, tuple(points), tuple(held_out), errors)

    def is_better_than(self, other: Calibration) -> bool:
        """Whether it was measured for longer and fits better."""
        return self.seconds > other.seconds and self.errors.p90 < other.errors.p90

    def surface(self) -> LatencySurface:
        """A new surface, which steps may correct."""
        return LatencySurface.from_dict(self.surface_values)

    @property
    def age(self) -> str:
        """How long ago it was measured, in words."""
        passed = (datetime.now(UTC) - self.when).total_seconds()
        for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
            count = int(passed // size)
            if count >= 1:
                return f"{count} {unit}{'s' * (count > 1)} ago"
        return "just now"

    # ---- to a file and back -----------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Plain values, read again by from_dict."""
        return {
            "format": FORMAT,
            "setup": asdict(self.setup),
            "when": self.when.isoformat(),
            "seconds": self.seconds,
            "errors": asdict(self.errors),
            "surface": dict(self.surface_values),
            "points": [astuple(point) for point in self.points],
            "held_out": [astuple(point) for point in self.held_out],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str) -> Calibration:
        """The inverse of as_dict. UsageError, naming `where`, if a value is missing, invalid, or of another format."""
        if values.get("format") != FORMAT:
            stored = values.get("format", "none")
            raise UsageError(
                f"The calibration in {where} has format {stored}; this wager reads {FORMAT}.", CALIBRATE_AGAIN
            )
        try:
            when, errors = datetime.fromisoformat(values["when"]), values["errors"]
            if when.tzinfo is None:
                raise ValueError(f"{values['when']!r} has no time zone")
            return cls(
                Setup(**values["setup"]),
                when,
                float(values["seconds"]),
                LatencySurface.from_dict(values["surface"]).as_dict(),
                tuple(_point(*row) for row in values["points"]),
                tuple(_point(*row) for row in values["held_out"]),
                PredictionErrors(int(errors["count"]), *(float(errors[name]) for name in ("median", "p90", "worst"))),
            )
        except (*MALFORMED, UsageError) as error:
            cause = error.message if isinstance(error, UsageError) else repr(error)
            raise UsageError(f"The calibration in {where} is damaged: {cause}", CALIBRATE_AGAIN) from error

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """From a file. UsageError if it cannot be read or is not a calibration."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, *MALFORMED) as error:
            raise UsageError(f"The calibration in {path} cannot be read: {error}.", CALIBRATE_AGAIN) from error
        if not isinstance(values, dict):
            raise UsageError(f"The calibration in {path} is damaged: it is not a JSON object.", CALIBRATE_AGAIN)
        return cls.from_dict(values, where=str(path))

    def write(self, folder: Path) -> Path:
        """Into `folder`, replacing an older one of the same setup atomically. UsageError if it cannot be written."""
        with _named_if_refused(folder):
            return _write(folder / self.setup.filename, self.as_dict())


def check_folder(folder: Path) -> None:
    """UsageError if no calibration can be stored there: better said before one is measured."""
    with _named_if_refused(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def _named_if_refused(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"The calibration cannot be stored in {folder}: {error.strerror or error}.", "Set WAGER_CACHE."
        ) from error


def _seconds(points: Sequence[StepPoint]) -> list[float]:
    return [point.seconds for point in points]


def _predict(surface: LatencySurface, points: Sequence[StepPoint], speculation: str = "") -> list[float]:
    """Seconds of steps of these shapes, drafting by `speculation` included."""
    curve = surface.drafters.get(speculation)
    return [
        surface.seconds(point.rows, point.requests, point.context_sum)
        + (curve.seconds(point.requests, point.rows / point.requests - 1) if curve and point.drafted else 0.0)
        for point in points
    ]


class CalibrationLookup(NamedTuple):
    """A stored calibration, or None and the reason why there is none."""

    calibration: Calibration | None
    reason: str


def find_calibration(folder: Path, setup: Setup) -> CalibrationLookup:
    """The stored calibration for this setup. A file that is damaged or of another setup is not used, and the reason
    names it or what differs."""
    path = folder / setup.filename
    for file in (path, *sorted(folder.glob(f"{setup.shape}-*.json"))):
        if not file.exists():
            continue
        try:
            calibration = Calibration.read(file)
        except UsageError as error:
            return CalibrationLookup(None, error.message)
        differing = calibration.setup.differences(setup)
        if differing:
            return CalibrationLookup(None, f"The calibration in {file} was made for {', '.join(differing)}.")
        return CalibrationLookup(calibration, "")
    return CalibrationLookup(None, f"{setup.model} was never calibrated here.")


def latest_calibration(folder: Path, *, shape: str, machine: str) -> Calibration:
    """The newest calibration of a model's shape on a machine, whatever its kernels and threads. UsageError if there is
    none, naming the machines that have one, or if a file is damaged."""
    calibrations = [Calibration.read(file) for file in sorted(folder.glob(f"{shape}-*.json"))]
    matching = [calibration for calibration in calibrations if calibration.setup.machine == machine]
    if matching:
        return max(matching, key=lambda calibration: calibration.when)
    others = ", ".join(sorted({calibration.setup.machine for calibration in calibrations}))
    raise UsageError(
        f"This model was never calibrated on this machine ({machine})" + (f", only on {others}." if others else "."),
        "Run `wager calibrate` with it.",
    )


def _point(rows: int, requests: int, context_sum: int, seconds: float) -> StepPoint:
    return StepPoint(int(rows), int(requests), int(context_sum), float(seconds))


def _write(path: Path, values: Mapping[str, Any]) -> Path:
    """All at once; OSError if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write((json.dumps(values, indent=1) + "\n").encode())
    return path


QUICK_FOLDER = "quick"
"""Name of their folder, below that of the calibrations."""

MAX_QUICK_AGE = timedelta(days=7)
"""Older ones are measured again: they were made in half a second, perhaps beside another program."""


def read_quick(calibrations: Path, setup: Setup) -> LatencySurface | None:
    """The stored measurement for this setup; None if there is none, or it is old, damaged or of another setup."""
    try:
        values = json.loads((calibrations / QUICK_FOLDER / setup.filename).read_text(encoding="utf-8"))
        age = datetime.now(UTC) - datetime.fromisoformat(values["when"])
        same = values["format"] == FORMAT and values["setup"] == {**asdict(setup), "model": values["setup"]["model"]}
        if not same or not timedelta(0) <= age <= MAX_QUICK_AGE:
            return None
        return LatencySurface.from_dict(values["surface"])
    except (OSError, *MALFORMED, UsageError):
        return None


def write_quick(calibrations: Path, setup: Setup, surface: LatencySurface) -> None:
    """Store a measurement, all at once; where that is impossible the next start measures again."""
    when = datetime.now(UTC).isoformat()
    values = {"format": FORMAT, "setup": asdict(setup), "when": when, "surface": surface.as_dict()}
    with suppress(OSError):  # a cache that is read-only or full
        _write(calibrations / QUICK_FOLDER / setup.filename, values)


def remove_quick(calibrations: Path, setup: Setup) -> None:
    """Remove the measurement for a setup that has been calibrated."""
    with suppress(OSError):
        (calibrations / QUICK_FOLDER / setup.filename).unlink()
