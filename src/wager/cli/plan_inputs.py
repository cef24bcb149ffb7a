"""The options of `wager plan` as values: a model's shape, a device, a drafter, acceptance, numbers.

A wrong value is an error that names it. Reads configuration files, but no weights.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wager.arch import ModelSpec, Precision, find_format, find_model, read_config, read_gguf
from wager.economics.costmodel.calibrated import CalibratedCostModel, CalibratedDraftCost
from wager.economics.costmodel.devices import Device, find_device
from wager.economics.costmodel.draft_cost import (
    ConstantDraftCost,
    DraftCost,
    DraftModelCost,
    FractionalDraftCost,
    FreeDraftCost,
    block_drafter_cost,
    mtp_cost,
)
from wager.economics.costmodel.experts import ExpertRouting
from wager.economics.costmodel.measured_rounds import MeasuredRound
from wager.economics.costmodel.plan import AcceptanceRates, PlanQuery
from wager.economics.costmodel.published import B200_ROUNDED, PUBLISHED_MODELS
from wager.economics.costmodel.roofline import CostModel
from wager.errors import ModelError, UsageError

_TIME = re.compile(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(s|ms|us|µs|ns)")
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_MEASURE = "Write it with `wager acceptance -o FILE`."
_SHAPES = "free, mtp, block[:N] and model:NAME"


@dataclass(frozen=True, slots=True)
class PlanGrid:
    """The points to plan: all combinations."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    acceptances: tuple[AcceptanceRates, ...]


def plan_query(
    model: str, hardware: str, *, shape: str | None, drafter_cost: str | None, depth: int | None, max_depth: int,
    tp: int, ep: int, locality: float, popularity: Path | None, precision: str | None, cache: str | None, overhead: str,
) -> PlanQuery:  # fmt: skip
    """Everything but the grid. UsageError or ModelError names what is not known or out of range."""
    seconds = parse_seconds("overhead", overhead)
    cost: CostModel | None = calibrated_cost(model, hardware)
    if cost is None:
        cost = CostModel(
            with_formats(find_plan_model(model, parse_precision(precision)), precision, cache),
            find_hardware(hardware),
            routing=ExpertRouting(None if popularity is None else read_popularity(popularity), locality),
            tp=tp,
            ep=ep,
            overhead=seconds,
        )
    elif (tp, ep, locality, seconds) != (1, 1, 1.0, 0.0) or any(
        option is not None for option in (popularity, precision, cache)
    ):
        raise UsageError(
            "--tp, --ep, --locality, --popularity, --precision, --cache and --overhead do not change measurements.",
            f"Leave them out with --hardware {hardware}.",
        )
    return PlanQuery(cost, draft_cost(cost, shape=shape, drafter_cost=drafter_cost), max_depth, depth)


def calibrated_cost(model: str, hardware: str) -> CalibratedCostModel | None:
    """Step times by calibration, if the hardware is this machine or a file that `wager calibrate` wrote; else None."""
    from wager.cli import calibrated

    if hardware.lower() == calibrated.THIS:
        return calibrated.cost(model, None)
    if not hardware.endswith(".json"):
        return None
    values = _json(Path(hardware).expanduser())
    return calibrated.cost(model, values, where=hardware) if "surface" in values else None


def find_plan_model(model: str, precision: Precision | None = None) -> ModelSpec:
    """A published model by name, or the shape of a directory or GGUF file on this machine. With a `precision` the
    number formats of a directory's configuration need not be known."""
    published = {name.lower(): spec for name, spec in PUBLISHED_MODELS.items()}.get(model.lower())
    if published is not None:
        return published
    path = Path(model).expanduser()
    if not path.exists() and not model.startswith(("/", ".", "~")) and not model.endswith(".gguf"):
        return find_model(model)
    from wager.models import hub

    local = hub.find(model)
    if local is not None and local.is_dir():
        return read_config(_json(local / "config.json"), name=local.resolve().name, precision=precision)
    from wager.models.gguf_file import open_gguf

    file = open_gguf(path if local is None else local)
    return read_gguf(file.metadata, file.shapes, name=path.name)


def parse_precision(text: str | None) -> Precision | None:
    """See Precision.parse; None without a text."""
    return None if text is None else Precision.parse(text)


def with_formats(model: ModelSpec, precision: str | None, cache: str | None) -> ModelSpec:
    """The model in other number formats than it was published in."""
    published, override = model.precision, parse_precision(precision)
    if precision is not None and not model.sparse and precision.partition(":")[2].partition(":")[0].strip():
        raise UsageError(
            f"precision = {precision!r} gives experts a format, and {model.name} has no experts.",
            "Write WEIGHTS alone, or WEIGHTS::HEAD for a head of its own.",
        )
    chosen = published if override is None else replace(override, cache=published.cache)
    return replace(model, precision=chosen if cache is None else replace(chosen, cache=find_format(cache).bytes))


def find_hardware(name: str) -> Device:
    """A device of the table, or one described in a JSON file."""
    if name.endswith(".json"):
        return Device.from_dict(_json(Path(name).expanduser()))
    return B200_ROUNDED if name.lower() == B200_ROUNDED.name.lower() else find_device(name)


def draft_cost(cost: CostModel, *, shape: str | None, drafter_cost: str | None) -> DraftCost:
    """From a shape or from a fixed `drafter_cost`; without either, the first calibrated drafter, or else `mtp`."""
    if shape is not None and drafter_cost is not None:
        raise UsageError("--drafter-shape and --drafter-cost both define the cost of drafting.", "Give one of the two.")
    if drafter_cost is not None:
        return _fixed_draft_cost(cost, drafter_cost)
    curves = cost.measured.drafters if isinstance(cost, CalibratedCostModel) else {}
    shape = shape or next(iter(curves), "mtp")
    if shape in curves:
        return CalibratedDraftCost(shape, curves[shape])
    kind, _, argument = shape.partition(":")
    if kind == "free" and not argument:
        return FreeDraftCost()
    if kind == "mtp" and not argument:
        return mtp_cost(cost.model, cost.cluster)
    if kind == "block" and (not argument or argument.isdigit()) and argument != "0":
        return block_drafter_cost(cost.model, cost.cluster, width=int(argument or 16))
    if kind == "model" and argument:
        return DraftModelCost(CostModel(find_plan_model(argument), cost.device))
    raise UsageError(f"The drafter shape {shape!r} is not known.", f"Known are {_SHAPES}.")


def _fixed_draft_cost(cost: CostModel, text: str) -> DraftCost:
    if _TIME.fullmatch(text.strip().lower()):
        return ConstantDraftCost(parse_seconds("drafter-cost", text))
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < math.inf:
        raise UsageError(
            f"drafter-cost = {text!r} is neither a fraction nor a time.", "Write 0.1 (of a plain step) or 300us, 2ms."
        )
    return FractionalDraftCost(cost, share)


def parse_acceptances(text: str) -> list[AcceptanceRates]:
    """Rates between 0 and 1, or a JSON file with rates or survival by depth."""
    rates = []
    for word in (part.strip() for part in text.split(",")):
        try:
            rate = float(word)
        except ValueError:
            rates.append(_acceptance_file(Path(word).expanduser()))
            continue
        if not 0 <= rate <= 1:
            raise UsageError(f"acceptance = {word} is out of range.", "Acceptance lies between 0 and 1.")
        rates.append(AcceptanceRates(word, rate))
    return rates


def _acceptance_file(path: Path) -> AcceptanceRates:
    values = _json(path)
    keys = [name for name in ("acceptance", "survival") if isinstance(values.get(name), list) and values[name]]
    if len(keys) != 1:
        forms = '{"acceptance": [...]} or {"survival": [...]}'
        raise UsageError(f"{path} gives no acceptance.", f"It holds {forms} by depth.")
    rates = values[keys[0]]
    if not all(isinstance(rate, int | float) and not isinstance(rate, bool) and 0 <= rate <= 1 for rate in rates):
        raise UsageError(f"{keys[0]} in {path} has a value outside 0 to 1.", "Give one probability for each depth.")
    if keys[0] == "acceptance":
        return AcceptanceRates(path.stem, tuple(float(rate) for rate in rates))
    if any(later > earlier for earlier, later in zip(rates, rates[1:], strict=False)):
        raise UsageError(f"survival in {path} rises with depth.", "Survival cannot be higher at a deeper token.")
    before = [1.0, *rates]
    conditional = tuple(rate / reached if reached else 0.0 for rate, reached in zip(rates, before, strict=False))
    return AcceptanceRates(path.stem, conditional, _measured_rounds(values, path, deepest=len(rates)))


def _measured_rounds(values: Mapping[str, Any], path: Path, *, deepest: int) -> tuple[MeasuredRound, ...]:
    """The rounds of every depth in a file of `wager acceptance`; none in a file without "depths"."""
    rounds = []
    for depth, value in enumerate(values.get("depths", ()), 1):
        try:
            measured = MeasuredRound(float(value["tau"]), tuple(map(float, value["lengths"])))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"depths in {path} has no tau or lengths at depth {depth}.", _MEASURE) from error
        shares = measured.lengths
        sound = len(shares) == depth + 1 and min(shares) >= 0 and abs(sum(shares) - 1) < 1e-6
        if not (sound and 1 <= measured.tokens <= depth + 1):
            raise UsageError(f"depths in {path} has impossible values at depth {depth}.", _MEASURE)
        rounds.append(measured)
    if rounds and len(rounds) != deepest:
        raise UsageError(f"depths in {path} has {len(rounds)} depths, and survival {deepest}.", _MEASURE)
    return tuple(rounds)


def read_popularity(path: Path) -> tuple[float, ...]:
    """How likely a token is to choose each expert, from a JSON file."""
    shares = _json(path.expanduser()).get("popularity")
    if not isinstance(shares, list) or not all(isinstance(share, int | float) and 0 <= share <= 1 for share in shares):
        raise UsageError(
            f"{path} gives no popularity.", 'It holds {"popularity": [...]}, a probability for each expert of a layer.'
        )
    return tuple(float(share) for share in shares)


def parse_integers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers of zero or more, separated by commas; each once, in order."""
    numbers = []
    for word in text.split(","):
        if not word.strip().isdigit():
            raise UsageError(f"{name} = {word.strip()!r} is out of range.", f"Write --{name} 1,2,4 with whole numbers.")
        numbers.append(int(word))
    return tuple(dict.fromkeys(numbers))


def parse_seconds(name: str, text: str) -> float:
    """A time such as 50us, 2ms or 0.1s."""
    match = _TIME.fullmatch(text.strip().lower())
    if not match:
        raise UsageError(f"{name} = {text!r} is not a time.", "Write it with its unit: 50us, 2ms, 0.1s.")
    return float(match[1]) * _UNITS[match[2]]


def _json(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"There is no file {path}.", "Check the path.") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", "It must hold JSON.") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} does not hold a JSON object.", "It must begin with a brace.")
    return values
