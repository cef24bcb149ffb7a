"""Times, policies and objectives as people write them: 2ms, threshold:0.3, slo:20ms; the one parser of each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from wager.errors import UsageError
from wager.inputs import did_you_mean, shown, whole_number

DEEPEST = 256
"""The deepest draft that may be requested, of an engine, a plan or a replay."""

DEFAULT_THRESHOLD = 0.4
"""Likelihood at which the threshold policy starts."""

ENGINE_FORMS = {"adaptive": "adaptive", "threshold": "threshold[:P]", "fixed": "fixed"}
REPLAY_FORMS = {
    "none": "none",
    "fixed": "fixed[:DRAFTER]:K",
    "threshold": "threshold[:[DRAFTER:]P]",
    "adaptive": "adaptive",
}
"""What may be written, by kind of policy. The engine takes its depth and its drafter from options of their own."""


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A parsed policy. `drafter` "" is the first available one, `depth` the guesses of `fixed` (None: not given),
    `threshold` the likelihood at which `threshold` starts."""

    kind: Literal["none", "fixed", "threshold", "adaptive"]
    drafter: str = ""
    depth: int | None = None
    threshold: float = DEFAULT_THRESHOLD


def parse_policy(text: str, *, replay: bool = False) -> PolicySpec:
    """One of ENGINE_FORMS, or of REPLAY_FORMS; raises UsageError for anything else."""
    forms = REPLAY_FORMS if replay else ENGINE_FORMS
    kind, colon, argument = text.partition(":")
    if kind == "adaptive" and not colon:
        return PolicySpec("adaptive")
    if kind == "none" and replay and not colon:
        return PolicySpec("none")
    if kind == "fixed" and replay:
        drafter, _, number = argument.rpartition(":")
        depth = whole_number(number)
        if depth is not None and depth > DEEPEST:
            raise UsageError(f"policy = {shown(text)} is out of range.", f"A depth is 0 to {DEEPEST}.")
        if depth is not None:
            return PolicySpec("fixed", drafter, depth)
    elif kind == "fixed" and not colon:
        return PolicySpec("fixed")
    if kind == "threshold":
        return _parse_threshold(text, argument, replay=replay)
    hint = f"Write {forms[kind]}." if kind in forms else did_you_mean(kind, forms, otherwise="")
    hint = hint or f"Known policies: {', '.join(forms.values())}."
    raise UsageError(f"policy = {shown(text)} is not known.", hint)


def _parse_threshold(text: str, argument: str, *, replay: bool) -> PolicySpec:
    drafter, _, number = argument.rpartition(":")
    threshold = _number(number) if argument else DEFAULT_THRESHOLD
    if threshold is None or not 0 < threshold < 1 or (drafter and not replay):
        raise UsageError(f"policy = {shown(text)} has no threshold between 0 and 1.", "Write threshold:0.4.")
    return PolicySpec("threshold", drafter, threshold=threshold)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


LONGEST_SECONDS = 1e6
"""Longer times are refused: no step, draft or target takes eleven days."""

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ns": 1e-9}
"""Seconds by unit; the micro sign and the Greek letter look alike."""

_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([a-z\u00b5\u03bc]+)", re.IGNORECASE)


def is_time(text: str) -> bool:
    """Whether the text is a number with a unit of time, in or out of range."""
    match = _TIME.fullmatch(text.strip())
    return match is not None and match[2].lower() in _UNITS


def parse_seconds(name: str, text: str) -> float:
    """Seconds of a time in s, ms, us (µs) or ns. UsageError names the option: not a time, or longer than a million
    seconds."""
    match = _TIME.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(f"{name} = {shown(text)} is not a time.", "Write it with its unit: 50us, 2ms, 0.1s.")
    seconds = float(match[1]) * _UNITS[match[2].lower()]
    if not seconds <= LONGEST_SECONDS:
        raise UsageError(f"{name} = {shown(text)} is out of range.", "A time is at most a million seconds.")
    return seconds


@dataclass(frozen=True, slots=True)
class Objective:
    """`seconds_per_token` is the target of an SLO, and 0 for the other kinds."""

    kind: Literal["throughput", "latency", "slo"] = "throughput"
    seconds_per_token: float = 0.0

    def __post_init__(self) -> None:
        known = self.kind in ("throughput", "latency", "slo")
        if not known or (self.kind == "slo") != (self.seconds_per_token > 0):
            cause = f"objective = {self.kind!r} with {self.seconds_per_token!r} seconds per token is not possible."
            raise UsageError(cause, "Use throughput, latency, or slo with its seconds per token, above 0.")


THROUGHPUT = Objective()


def parse_objective(text: str) -> Objective:
    """`throughput`, `latency` or `slo:TIME` (per token, see `parse_seconds`); UsageError for anything else."""
    if text in ("throughput", "latency"):
        return Objective("latency") if text == "latency" else THROUGHPUT
    kind, _, time = text.partition(":")
    if kind == "slo" and is_time(time) and parse_seconds("objective", time):
        return Objective("slo", parse_seconds("objective", time))
    hint = "Use throughput, latency, or slo with a time per token above 0: slo:20ms, slo:500us."
    raise UsageError(f"objective = {text!r} is not known.", hint)
