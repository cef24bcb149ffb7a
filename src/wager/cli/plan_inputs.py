"""What the user of `wager plan` wrote, as values: a model's shape, a machine, a drafter, acceptance, numbers.

Every mistake is an error that names it. Opens configuration files; no weights.
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
from wager.economics.costmodel.bill import AcceptanceRates, PlanQuery
from wager.economics.costmodel.calibrated import CalibratedCostModel, CalibratedDraftCost
from wager.economics.costmodel.devices import Device, find_device
from wager.economics.costmodel.draft_cost import DraftCost, Fraction, Free, Measured, Small, block, mtp
from wager.economics.costmodel.experts import ExpertRouting
from wager.economics.costmodel.published import B200_ROUNDED, MODELS
from wager.economics.costmodel.roofline import CostModel, Overheads
from wager.errors import ModelError, UsageError

_TIME = re.compile(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(s|ms|us|µs|ns)")
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_SHAPES = "free, mtp, block[:N] and model:NAME"
_AS_IT_IS = (1, 1, 1.0, None, None, None, 0.0)
"""Values of the options that only paper can follow."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The points that are asked about."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    acceptances: tuple[AcceptanceRates, ...]


def question(
    model: str, hardware: str, *, shape: str | None, price: str | None, depth: int | None, most: int, tp: int, ep: int,
    locality: float, popularity: Path | None, precision: str | None, cache: str | None, overhead: str,
) -> PlanQuery:  # fmt: skip
    """Everything but the grid. UsageError or ModelError names what is not known or out of range."""
    cost: CostModel | None = measured(model, hardware)
    if cost is None:
        cost = CostModel(
            stored(find(model, formats(precision)), precision, cache),
            find_hardware(hardware),
            routing=ExpertRouting(None if popularity is None else wanted(popularity), locality),
            tp=tp,
            ep=ep,
            overheads=Overheads(fixed=seconds("overhead", overhead)),
        )
    elif (tp, ep, locality, popularity, precision, cache, seconds("overhead", overhead)) != _AS_IT_IS:
        raise UsageError(
            "What was measured is what it is: --tp, --ep, --locality, --popularity, --precision, --cache and "
            "--overhead are for paper.", f"Leave them out with --hardware {hardware}.",
        )  # fmt: skip
    return PlanQuery(cost, drafter(cost, shape=shape, price=price), most, depth)


def measured(model: str, hardware: str) -> CalibratedCostModel | None:
    """The cost of steps by a calibration, if the hardware is this machine or a file that `wager calibrate` wrote."""
    from wager.cli import calibrated

    if hardware.lower() == calibrated.THIS:
        return calibrated.cost(model, None)
    if not hardware.endswith(".json"):
        return None
    values = _json(Path(hardware).expanduser())
    return calibrated.cost(model, values, where=hardware) if "surface" in values else None


def find(model: str, precision: Precision | None = None) -> ModelSpec:
    """A published model by name, or the shape of a directory or GGUF file on this machine. With a `precision` the
    number formats of a directory's configuration need not be known."""
    named = {name.lower(): each for name, each in MODELS.items()}.get(model.lower())
    if named is not None:
        return named
    path = Path(model).expanduser()
    if not path.exists() and not model.startswith(("/", ".", "~")) and not model.endswith(".gguf"):
        return find_model(model)
    from wager.models import hub

    found = hub.find(model)
    if found is not None and found.is_dir():
        return read_config(_json(found / "config.json"), name=found.resolve().name, precision=precision)
    from wager.models.gguf_file import open_gguf

    file = open_gguf(path if found is None else found)
    return read_gguf(file.metadata, file.shapes, name=path.name)


def formats(text: str | None) -> Precision | None:
    """WEIGHTS or WEIGHTS:EXPERTS, each the name of a number format."""
    if text is None:
        return None
    weights, _, experts = text.partition(":")
    return Precision.of(weights, experts or None)


def stored(model: ModelSpec, precision: str | None, cache: str | None) -> ModelSpec:
    """The model in other number formats than it is published in."""
    kept, given = model.precision, formats(precision)
    chosen = kept if given is None else replace(given, cache=kept.cache)
    return replace(model, precision=chosen if cache is None else replace(chosen, cache=find_format(cache).bytes))


def find_hardware(name: str) -> Device:
    """A machine of the table, or one described in a JSON file."""
    if name.endswith(".json"):
        return Device.from_dict(_json(Path(name).expanduser()))
    return B200_ROUNDED if name.lower() == B200_ROUNDED.name.lower() else find_device(name)


def drafter(cost: CostModel, *, shape: str | None, price: str | None) -> DraftCost:
    """By shape or by price; without either, one that was calibrated, or else one layer like the target's."""
    if shape is not None and price is not None:
        raise UsageError("--drafter-shape and --drafter-cost both say what a guess costs.", "Give one of the two.")
    if price is not None:
        return _priced(cost, price)
    curves = cost.surface.drafters if isinstance(cost, CalibratedCostModel) else {}
    shape = shape or next(iter(curves), "mtp")
    if shape in curves:
        return CalibratedDraftCost(shape, curves[shape])
    kind, _, argument = shape.partition(":")
    if kind == "free" and not argument:
        return Free()
    if kind == "mtp" and not argument:
        return mtp(cost.model, cost.cluster)
    if kind == "block" and (not argument or argument.isdigit()) and argument != "0":
        return block(cost.model, cost.cluster, width=int(argument or 16))
    if kind == "model" and argument:
        return Small(CostModel(find(argument), cost.device))
    raise UsageError(f"The drafter shape {shape!r} is not known.", f"Known are {_SHAPES}.")


def _priced(cost: CostModel, price: str) -> DraftCost:
    if _TIME.fullmatch(price.strip().lower()):
        return Measured(seconds("drafter-cost", price))
    try:
        share = float(price)
    except ValueError:
        share = -1.0
    if not 0 <= share < math.inf:
        raise UsageError(
            f"drafter-cost = {price!r} is neither a share nor a time.", "Write 0.1 (of a plain step) or 300us, 2ms."
        )
    return Fraction(cost, share)


def acceptances(text: str) -> list[AcceptanceRates]:
    """Rates between 0 and 1, or a JSON file with rates or survival by depth."""
    found = []
    for word in (each.strip() for each in text.split(",")):
        try:
            rate = float(word)
        except ValueError:
            found.append(_acceptance_file(Path(word).expanduser()))
            continue
        if not 0 <= rate <= 1:
            raise UsageError(f"acceptance = {word} is out of range.", "Acceptance lies between 0 and 1.")
        found.append(AcceptanceRates(word, rate))
    return found


def _acceptance_file(path: Path) -> AcceptanceRates:
    values = _json(path)
    given = [name for name in ("acceptance", "survival") if isinstance(values.get(name), list) and values[name]]
    if len(given) != 1:
        forms = '{"acceptance": [...]} or {"survival": [...]}'
        raise UsageError(f"{path} gives no acceptance.", f"It holds {forms} by depth.")
    rates = values[given[0]]
    if not all(isinstance(rate, int | float) and not isinstance(rate, bool) and 0 <= rate <= 1 for rate in rates):
        raise UsageError(f"{given[0]} in {path} has a value outside 0 to 1.", "Give one probability for each depth.")
    if given[0] == "acceptance":
        return AcceptanceRates(path.stem, tuple(float(rate) for rate in rates))
    if any(later > earlier for earlier, later in zip(rates, rates[1:], strict=False)):
        raise UsageError(f"survival in {path} rises with depth.", "A deeper guess cannot be reached more often.")
    before = [1.0, *rates]
    return AcceptanceRates(path.stem, tuple(
        rate / reached if reached else 0.0 for rate, reached in zip(rates, before, strict=False)
    ))  # fmt: skip


def wanted(path: Path) -> tuple[float, ...]:
    """How likely a token is to choose each expert, from a JSON file."""
    shares = _json(path.expanduser()).get("popularity")
    if not isinstance(shares, list) or not all(isinstance(share, int | float) and 0 <= share <= 1 for share in shares):
        raise UsageError(
            f"{path} gives no popularity.", 'It holds {"popularity": [...]}, a probability for each expert of a layer.'
        )
    return tuple(float(share) for share in shares)


def whole(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers of zero or more, separated by commas; each once, in order."""
    found = []
    for word in text.split(","):
        if not word.strip().isdigit():
            raise UsageError(f"{name} = {word.strip()!r} is out of range.", f"Write --{name} 1,2,4 with whole numbers.")
        found.append(int(word))
    return tuple(dict.fromkeys(found))


def seconds(name: str, text: str) -> float:
    """A time such as 50us, 2ms or 0.1s."""
    found = _TIME.fullmatch(text.strip().lower())
    if not found:
        raise UsageError(f"{name} = {text!r} is not a time.", "Write it with its unit: 50us, 2ms, 0.1s.")
    return float(found[1]) * _UNITS[found[2]]


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
