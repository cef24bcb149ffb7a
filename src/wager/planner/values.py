"""Numbers, lists and files in the options of `wager plan` and `wager replay`.

A wrong value is an error that names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wager.errors import ModelError, UsageError
from wager.inputs import expand_path, read_text, shown
from wager.planner.measured_rounds import MeasuredRound
from wager.planner.plan import AcceptanceRates

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([km]?)", re.IGNORECASE)
_MULTIPLE = {"": 1, "k": 1 << 10, "m": 1 << 20}
_MOST_DIGITS = 15
"""A longer number is a slip of the keyboard, and need not be converted to say so."""

_SPEED = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([gm])B(?:/s)?", re.IGNORECASE)


def split(name: str, text: str) -> list[str]:
    """The items of a list; UsageError for an empty one, as after a trailing comma."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UsageError(
            f"{name} = {shown(text)} has an empty item.", "Write values separated by commas, without one at the end."
        )
    return words


def parse_integers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers of zero or more, separated by commas, each once, in order. k and m multiply by 1024 and 1024^2, as
    contexts are named: 128k is 131072."""
    return tuple(dict.fromkeys(_integer(name, word) for word in split(name, text)))


def _integer(name: str, word: str) -> int:
    match = _SIZE.fullmatch(word)
    value = float(match[1]) * _MULTIPLE[match[2].lower()] if match and len(word) <= _MOST_DIGITS else -1.0
    if value < 0 or value != int(value):
        raise UsageError(
            f"{name} = {shown(word)} is out of range.",
            f"Write --{name} 1,2,4 with whole numbers; k is 1024 and m is 1024 k, so 128k is 131072.",
        )
    return int(value)


def parse_speed(name: str, text: str) -> float:
    """Bytes/s of a link: 50GB/s, 900MB/s. A GB is 1e9 bytes."""
    match = _SPEED.fullmatch(text.strip())
    if match is None or len(match[1]) > _MOST_DIGITS or not float(match[1]):
        raise UsageError(
            f"{name} = {shown(text)} is not a speed above 0.", "Write it as 50GB/s (1e9 bytes) or 900MB/s."
        )
    return float(match[1]) * {"g": 1e9, "m": 1e6}[match[2].lower()]


# ---- acceptance -----------------------------------------------------------------------------------------------------


def parse_acceptances(text: str) -> list[AcceptanceRates]:
    """Rates between 0 and 1, or JSON files with rates or survival by depth; each once. Files of one name are told
    apart by their path."""
    rates: dict[str, AcceptanceRates] = {}
    for word in split("acceptance", text):
        try:
            rate = float("file" if "_" in word else word)
        except ValueError:
            found = _acceptance_file(expand_path(word))
            again = found.label in rates and rates[found.label] != found
            found = replace(found, label=word) if again else found
        else:
            if not 0 <= rate <= 1:
                raise UsageError(
                    f"acceptance = {shown(word)[1:-1]} is out of range.", "Acceptance lies between 0 and 1."
                )
            found = AcceptanceRates(word, rate)
        rates[found.label] = found
    return list(rates.values())


def _acceptance_file(path: Path) -> AcceptanceRates:
    """From {"acceptance": [...]} or {"survival": [...]}; what else the file holds is not read, but for the "drafter",
    which is the label, and the rounds of each depth that `wager acceptance` writes beside survival."""
    values = read_json(path)
    keys = [name for name in ("acceptance", "survival") if isinstance(values.get(name), list) and values[name]]
    if len(keys) != 1:
        forms = '{"acceptance": [...]} or {"survival": [...]}'
        raise UsageError(f"{path} gives no acceptance.", f"It holds {forms} by depth.")
    rates = values[keys[0]]
    if not all(isinstance(rate, int | float) and not isinstance(rate, bool) and 0 <= rate <= 1 for rate in rates):
        raise UsageError(f"{keys[0]} in {path} has a value outside 0 to 1.", "Give one probability for each depth.")
    drafter = values.get("drafter")
    label = drafter.strip()[:40] if isinstance(drafter, str) and drafter.strip() else path.stem
    if keys[0] == "acceptance":
        return AcceptanceRates(label, tuple(float(rate) for rate in rates))
    if any(later > earlier for earlier, later in zip(rates, rates[1:], strict=False)):
        raise UsageError(f"survival in {path} rises with depth.", "Survival cannot be higher at a deeper token.")
    before = [1.0, *rates]
    conditional = tuple(rate / reached if reached else 0.0 for rate, reached in zip(rates, before, strict=False))
    return AcceptanceRates(label, conditional, _measured_rounds(values.get("depths"), path, deepest=len(rates)))


def _measured_rounds(depths: Any, path: Path, *, deepest: int) -> tuple[MeasuredRound, ...]:
    """The rounds of depths 1, 2, ... `deepest`; none without "depths"."""
    if depths is None:
        return ()
    rounds = []
    try:
        for depth, value in enumerate(depths, 1):
            shares = tuple(float(share) for share in value["lengths"])
            rounds.append(MeasuredRound(float(value["tau"]), shares))
            if len(shares) != depth + 1 or not min(shares) >= 0 or not abs(sum(shares) - 1) < 1e-6:
                raise ValueError(f"lengths at depth {depth}")
            if not 1 <= rounds[-1].tokens <= depth + 1:
                raise ValueError(f"tau at depth {depth}")
        if len(rounds) != deepest:
            raise ValueError(f"{len(rounds)} depths, and survival of {deepest}")
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"depths in {path} does not hold the rounds of every depth: {error}.",
            "Write the file with `wager acceptance -o FILE`.",
        ) from error
    return tuple(rounds)


@dataclass(frozen=True, slots=True)
class RoutingFile:
    """The popularity of a layer's experts, and the locality that `wager popularity` measured with it, if it did."""

    popularity: tuple[float, ...]
    locality: float | None


def read_popularity(path: Path) -> RoutingFile:
    """How likely a token is to choose each expert, from a JSON file such as `wager popularity` writes."""
    values = read_json(expand_path(str(path)))
    shares, locality = values.get("popularity"), values.get("locality")
    if not isinstance(shares, list) or not all(_is_number(share) and 0 <= share <= 1 for share in shares):
        raise UsageError(
            f"{path} gives no popularity.", 'It holds {"popularity": [...]}, a probability for each expert of a layer.'
        )
    if locality is not None and not (_is_number(locality) and 0 < locality <= 1):
        raise UsageError(f"locality = {locality!r} in {path} is out of range.", "It is above 0 and at most 1.")
    return RoutingFile(tuple(float(share) for share in shares), locality)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- files ----------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file. UsageError if there is no file, ModelError if it holds something else."""
    if not path.exists():
        percent = str(path).endswith("%")
        hint = "Write a probability as a fraction, such as 0.75." if percent else "Check the path."
        raise UsageError(f"There is no file {path}.", hint)
    try:
        values = json.loads(read_text(path, "file", "It must hold JSON."), parse_int=_json_integer)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", "It must hold JSON.") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} does not hold a JSON object.", "It must begin with a brace.")
    return values


def _json_integer(text: str) -> int | float:
    """Very long numbers as floats, which checks of ranges refuse."""
    return int(text) if len(text) <= _MOST_DIGITS else float(text)


def check_finite(values: Any, *, where: str = "") -> None:
    """UsageError that names a figure which is not a finite number: JSON has none, and it means that a size or a speed
    that was given is absurd."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            check_finite(value, where=f"{where}.{key}" if where else str(key))
    elif isinstance(values, list | tuple):
        for value in values:
            check_finite(value, where=where)
    elif isinstance(values, float) and not abs(values) < float("inf"):
        raise UsageError(f"{where} of the plan is not a finite number.", "Check the figures of --hardware and --model.")
