"""The options of `wager plan` as values: a model's shape, a device, a drafter, acceptance, numbers.

A wrong value is an error that names it. Reads configuration files, but no weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wager.arch import ModelSpec, Precision, find_format, find_model, gguf_precision, read_config, read_gguf
from wager.economics.options import parse_seconds
from wager.errors import ModelError, UsageError
from wager.inputs import expand_path
from wager.planner import drafters as plan_drafters
from wager.planner.calibrated import CalibratedCostModel
from wager.planner.devices import Device, find_device
from wager.planner.draft_cost import DraftCost
from wager.planner.drafters import DrafterOptions
from wager.planner.experts import ExpertRouting
from wager.planner.links import COLLECTIVE_LATENCY
from wager.planner.plan import DEFAULT_MAX_DEPTH, AcceptanceRates, PlanQuery
from wager.planner.published import B200_ROUNDED, PUBLISHED_MODELS
from wager.planner.roofline import CostModel
from wager.planner.values import read_json, read_popularity

LARGEST_GRID, MOST_CELLS = 2000, 200
"""Points of a plan, and pairs of context and acceptance, each of which takes up to half a second."""


@dataclass(frozen=True, slots=True)
class PlanGrid:
    """The points to plan: all combinations. UsageError for absurdly many of them."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    acceptances: tuple[AcceptanceRates, ...]

    def __post_init__(self) -> None:
        cells = len(self.contexts) * len(self.acceptances)
        points = cells * len(self.batches)
        if points > LARGEST_GRID or cells > MOST_CELLS:
            raise UsageError(
                f"{len(self.batches)} batches, {len(self.contexts)} contexts and {len(self.acceptances)} acceptance "
                f"rates are {points} points.",
                f"Plan at most {LARGEST_GRID} at once, of {MOST_CELLS} pairs of context and acceptance.",
            )


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """The options of `wager plan` beside model, hardware and grid, as they were typed."""

    shape: str | None = None
    drafter_cost: str | None = None
    drafter_tp: int | None = None
    drafter_hardware: str | None = None
    drafter_link: str | None = None
    draft_async: bool = False
    hit_rate: float | None = None
    draft_outcomes: int | None = None
    depth: int | None = None
    max_depth: int | None = None
    tp: int = 1
    ep: int = 1
    balanced: bool = False
    link_latency: str | None = None
    locality: float | None = None
    popularity: Path | None = None
    precision: str | None = None
    cache: str | None = None
    overhead: str = "0us"

    def given(self, names: Sequence[str]) -> list[str]:
        """Those of `names` whose value is not the default."""
        default = PlanSettings()
        return [name for name in names if getattr(self, name) != getattr(default, name)]


def plan_query(model: str, hardware: str, settings: PlanSettings) -> PlanQuery:
    """Everything but the grid. UsageError or ModelError names what is not known, out of range or without effect."""
    cost: CostModel = calibrated_cost(model, hardware) or _datasheet_cost(model, hardware, settings)
    if isinstance(cost, CalibratedCostModel):
        _refuse_for_measurements(settings, hardware)
    hit_rate = parse_hit_rate(settings.hit_rate, draft_async=settings.draft_async, outcomes=settings.draft_outcomes)
    own = None if settings.drafter_hardware is None else find_hardware(settings.drafter_hardware)
    options = DrafterOptions(settings.shape, settings.drafter_cost, settings.drafter_tp, own, settings.drafter_link)
    drafter = plan_drafters.draft_cost(cost, options, models=find_plan_model)
    if None not in (settings.depth, settings.max_depth):
        raise UsageError("--depth and --max-depth both say how deep to draft.", "Give one of the two.")
    max_depth = DEFAULT_MAX_DEPTH if settings.max_depth is None else settings.max_depth
    return PlanQuery(cost, drafter, max_depth, settings.depth, hit_rate, settings.draft_outcomes)


def parse_hit_rate(hit_rate: float | None, *, draft_async: bool, outcomes: int | None = None) -> float | None:
    """The share of drafts that are ready; None where drafting is not asynchronous, and where that follows from how many
    `outcomes` are drafted for."""
    for flag, value in (("hit-rate", hit_rate), ("outcomes", outcomes)):
        if value is not None and not draft_async:
            raise UsageError(
                f"--draft-{flag} has no effect without --draft-async.", "Leave it out, or add --draft-async."
            )
    if outcomes is not None:
        if hit_rate is not None:
            raise UsageError(
                "--draft-hit-rate and --draft-outcomes both say how often drafts are ready.", "Give one of the two."
            )
        return None
    return (1.0 if hit_rate is None else hit_rate) if draft_async else None


def _datasheet_cost(model: str, hardware: str, settings: PlanSettings) -> CostModel:
    spec = with_formats(find_plan_model(model, parse_precision(settings.precision)), settings.precision, settings.cache)
    routing = _routing(settings)
    for flag, is_set in (("popularity", routing.popularity is not None), ("locality", routing.locality != 1)):
        if is_set and not spec.sparse:
            raise UsageError(f"--{flag} has no effect: {spec.name} has no experts.", "Leave it out.")
    if settings.balanced and settings.ep == 1:
        raise UsageError(
            "--balanced has no effect without --ep: experts on one device have no balance.", "Leave it out."
        )
    latency = COLLECTIVE_LATENCY
    if settings.link_latency is not None:
        latency = parse_seconds("link-latency", settings.link_latency)
        if settings.tp == settings.ep == 1 and settings.drafter_hardware is None and (settings.drafter_tp or 1) == 1:
            raise UsageError("--link-latency has no effect on a single device.", "Leave it out.")
    return CostModel(
        spec,
        find_hardware(hardware),
        routing=routing,
        tp=settings.tp,
        ep=settings.ep,
        balanced=settings.balanced,
        link_latency=latency,
        overhead=parse_seconds("overhead", settings.overhead),
    )


def _routing(settings: PlanSettings) -> ExpertRouting:
    """By the file of --popularity, whose locality --locality replaces."""
    file = None if settings.popularity is None else read_popularity(settings.popularity)
    locality = settings.locality if file is None or settings.locality is not None else file.locality
    return ExpertRouting(None if file is None else file.popularity, 1.0 if locality is None else locality)


def _refuse_for_measurements(settings: PlanSettings, hardware: str) -> None:
    """UsageError for options that describe a device or a model that was measured instead."""
    names = ("tp", "ep", "balanced", "link_latency", "locality", "popularity", "precision", "cache", "overhead")
    given = [f"--{name.replace('_', '-')}" for name in settings.given(names)]
    if given:
        raise UsageError(
            f"{', '.join(given)} cannot be combined with measurements: the step times of {hardware} are what was "
            "measured.",
            f"Leave {'it' if len(given) == 1 else 'them'} out with --hardware {hardware}.",
        )


def calibrated_cost(model: str, hardware: str) -> CalibratedCostModel | None:
    """Step times by calibration, if the hardware is this machine or a file that `wager calibrate` wrote; else None."""
    from wager.planner import calibrations

    if hardware.lower() == calibrations.THIS:
        return calibrations.cost(model, None)
    if not hardware.endswith(".json"):
        return None
    values = read_json(expand_path(hardware))
    return calibrations.cost(model, values, where=hardware) if "surface" in values else None


def find_plan_model(model: str, precision: Precision | None = None) -> ModelSpec:
    """A published model by name, or the shape of a config.json, a directory or a GGUF file on this machine. With a
    `precision` the number formats of a configuration need not be known. ModelError if there is none."""
    if not model.strip():
        raise ModelError("The name of the model is empty.", "Give a name, a config.json, its directory or a GGUF file.")
    published = {name.lower(): spec for name, spec in PUBLISHED_MODELS.items()}.get(model.lower())
    if published is not None:
        return published
    path = expand_path(model)
    if path.is_file() and path.suffix == ".json":
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return read_config(_model_config(path), name=name, precision=precision)
    if not path.exists() and not model.startswith(("/", ".", "~")) and not model.endswith((".gguf", ".json")):
        try:
            return find_model(model)
        except UsageError as error:
            raise ModelError(error.message, error.hint) from error  # as `wager run` has it
    if model.endswith(".json"):
        raise ModelError(f"There is no file {model}.", "Give a config.json, its directory, a GGUF file or a name.")
    from wager.models import hub

    local = hub.find(model)
    if local is not None and local.is_dir():
        return read_config(_model_config(local / "config.json"), name=local.resolve().name, precision=precision)
    from wager.models.gguf import open_gguf

    file = open_gguf(path if local is None else local)
    return read_gguf(file.metadata, file.shapes, name=path.name, precision=gguf_precision(file.sizes))


_QUANTISATIONS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files of modelopt, GPTQ and AWQ that older checkpoints have beside a config.json without quantization_config."""


def _model_config(path: Path) -> Mapping[str, Any]:
    values = read_json(path)
    beside = next((path.parent / name for name in _QUANTISATIONS if (path.parent / name).is_file()), None)
    if beside is None or values.get("quantization_config") is not None:
        return values
    return {**values, "quantization_config": read_json(beside)}


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
        values = read_json(expand_path(name))
        try:
            return Device.from_dict(values)
        except UsageError as error:
            raise UsageError(f"{name}: {error.message}", error.hint) from error
    return B200_ROUNDED if name.lower() == B200_ROUNDED.name.lower() else find_device(name)


def draft_cost(
    cost: CostModel,
    *,
    shape: str | None,
    drafter_cost: str | None,
    hardware: str | None = None,
    link: str | None = None,
) -> DraftCost:
    """A drafter, from a shape or from a fixed `drafter_cost`, on the target's devices or on `hardware` of its own."""
    own = None if hardware is None else find_hardware(hardware)
    options = DrafterOptions(shape, drafter_cost, hardware=own, link=link)
    return plan_drafters.draft_cost(cost, options, models=find_plan_model)
