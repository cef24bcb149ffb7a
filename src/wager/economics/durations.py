"""Times as people write them, such as 50us, 2ms or 0.1s: one parser for overheads, draft costs and objectives."""

from __future__ import annotations

import re

from wager.errors import UsageError
from wager.inputs import shown

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
