"""The policy as users write it, such as `threshold:0.3`: the one parser of --policy, for the engine and for replay."""

from __future__ import annotations

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
