"""A calibration: what a model's steps cost on this machine, how far the fit missed what it did not see, and its file.

Turns timed steps into values and values into a file and back. A calibration belongs to one setup (machine, model,
kernels, threads, number type): in another it is refused, and what differs is named. Knows no engine and no clock.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wager.arch.spec import ModelSpec
from wager.economics.latency.draft_curve import DraftCurve
from wager.economics.latency.surface import LatencySurface, StepPoint
from wager.errors import UsageError

FORMAT = 1
FOLDER = "calibrations"
"""Where they are kept, below the folder that everything fetched is kept in."""

AGAIN = "Run `wager calibrate` again."

_WINDOW, _ROUNDS = 8, 6
"""Steps before and after one that tell the machine's pace at it, and how often pace and steps are told apart."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a calibration holds for. `model` is its name for people; `shape` stands for all of its sizes and decides."""

    machine: str
    model: str
    shape: str
    kernels: str
    threads: int | None
    dtype: str

    def differences(self, here: Setup) -> list[str]:
        """What is another here, in words."""
        found = [] if self.shape == here.shape else [f"model {self.model} (here one of other sizes, {here.model})"]
        for name in ("machine", "kernels", "threads", "dtype"):
            then, now = getattr(self, name), getattr(here, name)
            if then != now:
                found.append(f"{name} {then} (here {now})")
        return found

    @property
    def filename(self) -> str:
        """One for each setup; the model's name does not count."""
        told = f"{self.machine}\n{self.kernels}\n{self.threads}\n{self.dtype}"
        return f"{self.shape}-{hashlib.sha256(told.encode()).hexdigest()[:8]}.json"


def fingerprint(spec: ModelSpec) -> str:
    """Stands for every size of a model: two of one fingerprint cost the same."""
    shape = spec.details, spec.layers, spec.hidden, spec.vocab, spec.tied, spec.context
    return f"{spec.details.architecture}-{hashlib.sha256(repr(shape).encode()).hexdigest()[:12]}"


@dataclass(frozen=True, slots=True)
class Errors:
    """|predicted / measured - 1| over `count` shapes or steps: its median, 90th percentile and largest."""

    count: int
    median: float
    p90: float
    worst: float

    @classmethod
    def of(cls, predicted: Sequence[float], measured: Sequence[float]) -> Errors:
        missed = np.abs(np.array(predicted) / np.array(measured) - 1)
        return cls(len(missed), *(float(np.quantile(missed, at)) for at in (0.5, 0.9, 1.0)))

    def __str__(self) -> str:
        return f"{self.median:.1%} (median), {self.p90:.1%} (90th percentile), {self.worst:.1%} (worst)"


@dataclass(frozen=True, slots=True)
class Calibration:
    """One calibration. `when` it was made, `seconds` what measuring took, `fitted` the surface's own values;
    `points` were fitted, `held_out` were not, and `errors` say how far the surface is from these."""

    setup: Setup
    when: datetime
    seconds: float
    fitted: Mapping[str, Any]
    points: tuple[StepPoint, ...]
    held_out: tuple[StepPoint, ...]
    errors: Errors

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
        """Fit `points`, judge by `held_out`. UsageError if there are too few of either."""
        if not held_out:
            raise UsageError(
                "Neither time nor memory was left for steps to judge the fit by.", "Give --seconds or --memory more."
            )
        surface = LatencySurface.fit(points, drafters=drafters)
        errors = Errors.of(
            [surface.seconds(p.rows, p.requests, p.context_sum) for p in held_out], [p.seconds for p in held_out]
        )
        now = datetime.now(UTC).replace(microsecond=0)
        return cls(setup, now, seconds, surface.as_dict(), tuple(points), tuple(held_out), errors)

    def surface(self) -> LatencySurface:
        """A surface of the caller's own, for steps to correct."""
        return LatencySurface.from_dict(self.fitted)

    @property
    def age(self) -> str:
        """How long ago it was measured, for people."""
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
            "surface": dict(self.fitted),
            "points": [_row(point) for point in self.points],
            "held_out": [_row(point) for point in self.held_out],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str) -> Calibration:
        """The inverse of as_dict. UsageError, naming `where`, if something is missing, of another format, or absurd."""
        if values.get("format") != FORMAT:
            found = values.get("format", "none")
            raise UsageError(f"The calibration in {where} has format {found}; this wager reads {FORMAT}.", AGAIN)
        try:
            return cls(
                Setup(**values["setup"]),
                _moment(values["when"]),
                float(values["seconds"]),
                LatencySurface.from_dict(values["surface"]).as_dict(),
                tuple(_point(*row) for row in values["points"]),
                tuple(_point(*row) for row in values["held_out"]),
                _errors(**values["errors"]),
            )
        except (KeyError, TypeError, ValueError, UsageError) as error:
            cause = error.message if isinstance(error, UsageError) else repr(error)
            raise UsageError(f"The calibration in {where} is damaged: {cause}", AGAIN) from error

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """From a file. UsageError if it cannot be read or is no calibration."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"The calibration in {path} cannot be read: {error}.", AGAIN) from error
        if not isinstance(values, dict):
            raise UsageError(f"The calibration in {path} is damaged: it is no JSON object.", AGAIN)
        return cls.from_dict(values, where=str(path))

    def write(self, folder: Path) -> Path:
        """Into `folder`, in place of an older one of the same setup; all or nothing."""
        path = folder / self.setup.filename
        beside = path.with_suffix(f".{os.getpid()}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
            beside.replace(path)
        except OSError as error:
            raise UsageError(
                f"The calibration cannot be stored in {folder}: {error.strerror or error}.", "Set WAGER_CACHE."
            ) from error
        return path


def find(folder: Path, here: Setup) -> tuple[Calibration | None, str]:
    """The stored calibration for this setup, and why there is none ("" if there is): a file that is damaged or of
    another setup is not used, and the reason names it or what differs."""
    path = folder / here.filename
    for file in (path, *sorted(folder.glob(f"{here.shape}-*.json"))):
        if not file.exists():
            continue
        try:
            found = Calibration.read(file)
        except UsageError as error:
            return None, error.message
        differing = found.setup.differences(here)
        return (None, f"The calibration in {file} was made for {', '.join(differing)}.") if differing else (found, "")
    return None, f"{here.model} was never calibrated here."


def latest(folder: Path, *, shape: str, machine: str) -> Calibration:
    """The newest calibration of a model's shape on a machine, whatever its kernels and threads. UsageError if there is
    none; it names the machines that there are calibrations of, and files that are damaged."""
    found = [Calibration.read(file) for file in sorted(folder.glob(f"{shape}-*.json"))]
    ours = [each for each in found if each.setup.machine == machine]
    if ours:
        return max(ours, key=lambda each: each.when)
    others = ", ".join(sorted({each.setup.machine for each in found}))
    raise UsageError(
        f"This model was never calibrated on this machine ({machine})" + (f", only on {others}." if others else "."),
        "Run `wager calibrate` with it.",
    )


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return moment


def _errors(count: int, median: float, p90: float, worst: float) -> Errors:
    return Errors(int(count), float(median), float(p90), float(worst))


def _point(rows: int, requests: int, context_sum: int, seconds: float) -> StepPoint:
    return StepPoint(int(rows), int(requests), int(context_sum), float(seconds))


def _row(point: StepPoint) -> tuple[int, int, int, float]:
    return point.rows, point.requests, point.context_sum, point.seconds


# ---- from timed steps to points ---------------------------------------------------------------------------------


def typical(steps: Sequence[tuple[int, StepPoint]], *, fitted: Container[int]) -> dict[int, StepPoint]:
    """The typical step of each kind, from steps of many kinds in the order they were taken; `fitted` names the kinds
    that a surface may be fitted to.

    A machine that others use too changes its pace from second to second. Where steps that lie close together are slower
    than a surface expects, all alike, that is put down to the pace; the median of the rest is a kind's own.
    """
    members: dict[int, list[int]] = {}
    for at, (kind, _) in enumerate(steps):
        members.setdefault(kind, []).append(at)
    log = np.log([step.seconds for _, step in steps])
    pace = np.zeros(len(log))
    for _ in range(_ROUNDS):
        own = {kind: _median([steps[at][1] for at in each], log[each] - pace[each]) for kind, each in members.items()}
        teaching = [step for kind, step in own.items() if kind in fitted]
        if len({step.rows for step in teaching}) < 2:
            return own
        expected = LatencySurface.fit(teaching)
        left = log - np.log([expected.seconds(s.rows, s.requests, s.context_sum) for _, s in steps])
        pace = np.array([np.median(left[max(0, at - _WINDOW) : at + _WINDOW + 1]) for at in range(len(left))])
        pace -= np.median(pace)
    return own


def _median(steps: Sequence[StepPoint], log: NDArray[np.float64]) -> StepPoint:
    cached = round(float(np.median([step.context_sum for step in steps])))
    return StepPoint(steps[0].rows, steps[0].requests, cached, float(np.exp(np.median(log))))


def draft_curve(samples: Mapping[tuple[int, int], float]) -> DraftCurve:
    """A drafter's curve from seconds by (requests, depth): for each number of requests what a call costs and what each
    guess adds, nearest in relative error, neither below zero. Raises UsageError without samples."""
    requests = sorted({each for each, _ in samples})
    fixed, each_guess = [], []
    for count in requests:
        taken = [(depth, seconds) for (n, depth), seconds in samples.items() if n == count]
        system = np.array([[1 / seconds, depth / seconds] for depth, seconds in taken])
        once, more = np.linalg.lstsq(system, np.ones(len(taken)), rcond=None)[0]
        if once < 0 or more < 0:  # the best with one of them alone
            alone = 1 if once < 0 else 0
            column = system[:, alone]
            best = float(column.sum() / (column @ column))
            once, more = (0.0, best) if alone else (best, 0.0)
        fixed.append(float(once))
        each_guess.append(float(more))
    return DraftCurve(requests, fixed, each_guess)
