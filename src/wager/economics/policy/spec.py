"""The policy as users write it, such as `threshold:0.3`: the one parser of --policy, for the engine and for replay."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal

from wager.errors import UsageError

DEFAULT_THRESHOLD = 0.4  # likelihood at which the threshold policy starts
ENGINE_FORMS = ("adaptive", "threshold[:P]", "fixed")  # P between 0 and 1; depth and drafter are options of their own
REPLAY_FORMS = ("none", "fixed:K", "threshold[:P]", "adaptive")  # K and P after a drafter, if any: fixed:mtp:4


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A parsed policy: `drafter` "" is the first one at hand, `depth` is that of `fixed` (None: not given)."""

    kind: Literal["none", "fixed", "threshold", "adaptive"]
    drafter: str = ""
    depth: int | None = None
    threshold: float = DEFAULT_THRESHOLD


def parse_policy(text: str, *, replay: bool = False) -> PolicySpec:
    """One of ENGINE_FORMS, or of REPLAY_FORMS; raises UsageError for anything else."""
    kind, _, argument = text.partition(":")
    drafter, _, number = argument.rpartition(":")
    if text in ("adaptive", "threshold", "none" if replay else "fixed"):
        return PolicySpec(text)  # type: ignore[arg-type]
    if kind == "fixed" and replay and number.isdecimal():
        return PolicySpec("fixed", drafter, int(number))
    if kind == "threshold" and (replay or not drafter) and re.fullmatch(r"0?\.\d*[1-9]\d*", number):
        return PolicySpec("threshold", drafter, threshold=float(number))
    forms = REPLAY_FORMS if replay else ENGINE_FORMS
    near = [form for form in forms if form.startswith(kind)] if kind else []
    near = near or difflib.get_close_matches(kind, forms, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known policies: {', '.join(forms)}."
    raise UsageError(f"policy = {text!r} is not known.", hint + " Write threshold:0.4." * (kind == "threshold"))
