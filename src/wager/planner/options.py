"""The options of `wager plan` as a deployment: the cost model of the target, and the drafter by its shape or cost.

A wrong value is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from wager.arch import RELEASED_HEADS, Precision, find_head
from wager.arch.config_keys import ConfigKeys
from wager.drafter_spec import DRAFTERS, DrafterSpec
from wager.economics.options import DEEPEST, is_time, parse_seconds
from wager.economics.surface import DraftCurve
from wager.errors import UsageError, WagerError
from wager.inputs import shown, whole_number
from wager.models import hub
from wager.planner.calibrated import calibrated_cost
from wager.planner.cost import COLLECTIVE_LATENCY, Cluster, CostModel
from wager.planner.drafting import (
    FREE,
    DraftCost,
    block_drafter_cost,
    calibrated_draft_cost,
    constant_cost,
    draft_model_cost,
    eagle_cost,
    fractional_cost,
    medusa_cost,
    mtp_cost,
    released_cost,
)
from wager.planner.inputs import (
    check_origin,
    find_hardware,
    find_plan_model,
    number,
    read_popularity,
    with_formats,
)
from wager.planner.plan import DEFAULT_MAX_DEPTH, SIBLING_RATE, WIDEST, Deployment, TreeDrafts
from wager.planner.routing import ExpertRouting
from wager.terminal import console


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """The options of `wager plan` beside model, hardware and grid, as they were typed."""

    shape: str | None = None
    drafter_cost: str | None = None
    drafter_tp: int | None = None
    tree: str | None = None
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
    dispatch: str | None = None
    overhead: str = "0us"
    any_model: bool = False

    def given(self, names: Sequence[str]) -> list[str]:
        """The `names` whose value is not the default."""
        default = PlanSettings()
        return [name for name in names if getattr(self, name) != getattr(default, name)]


def plan_deployment(model: str, hardware: str, settings: PlanSettings) -> Deployment:
    """Everything but the grid. UsageError or ModelError names what is not known, out of range or without effect."""
    cost = target_cost(model, hardware, settings)
    drafter = draft_cost(cost, settings)
    tree = None if settings.tree is None else parse_tree(settings.tree)
    if tree and drafter.name in _curves(cost):
        raise UsageError(
            f"--tree has no effect on {drafter.name}.", "Leave it out: a calibrated drafter was timed as it is."
        )
    if None not in (settings.depth, settings.max_depth):
        raise UsageError("--depth and --max-depth both say how deep to draft.", "Give one of the two.")
    max_depth = DEFAULT_MAX_DEPTH if settings.max_depth is None else settings.max_depth
    return Deployment(cost, drafter, max_depth, settings.depth, tree)


def parse_tree(text: str) -> TreeDrafts:
    """WIDTH[:P]; UsageError for anything else."""
    width, colon, rate = text.partition(":")
    size, sibling = whole_number(width) or 0, number(rate) if colon else SIBLING_RATE
    if not (2 <= size <= WIDEST and 0 <= sibling <= 1):
        raise UsageError(
            f"tree = {shown(text)} is not the shape of a tree.",
            f"Write --tree 4 for up to 4 children of a node (2 to {WIDEST}), or --tree 4:0.2 with the rate at which a "
            "sibling is right where those before it are wrong.",
        )
    return TreeDrafts(size, sibling)


# ---- the target -----------------------------------------------------------------------------------------------------

_MEASURED = (
    *("tp", "ep", "balanced", "link_latency", "locality", "popularity"),
    *("precision", "cache", "dispatch", "overhead"),
)
"""Settings that describe a device or a model, which a calibration measured instead."""


def target_cost(model: str, hardware: str, settings: PlanSettings) -> CostModel:
    """By calibration, if the hardware is this machine or a file that `wager calibrate` wrote; else by datasheet."""
    measured = calibrated_cost(model, hardware)
    if measured is None:
        return _datasheet_cost(model, hardware, settings)
    given = [f"--{name.replace('_', '-')}" for name in settings.given(_MEASURED)]
    if given:
        raise UsageError(
            f"{', '.join(given)} cannot be combined with measurements: the step times of {hardware} are what was "
            "measured.",
            f"Leave {'it' if len(given) == 1 else 'them'} out with --hardware {hardware}.",
        )
    return measured


def _datasheet_cost(model: str, hardware: str, settings: PlanSettings) -> CostModel:
    precision = None if settings.precision is None else Precision.parse(settings.precision)
    spec = with_formats(find_plan_model(model, precision), settings.precision, settings.cache, settings.dispatch)
    routing = ExpertRouting()
    if settings.popularity is not None:
        routing, noted = read_popularity(settings.popularity)
        check_origin(noted, model, spec, allowed=settings.any_model)
    if settings.locality is not None:
        routing = replace(routing, locality=settings.locality)
    for flag, is_set in (("popularity", routing.popularity is not None), ("locality", routing.locality != 1)):
        if is_set and not spec.sparse:
            raise UsageError(f"--{flag} has no effect: {spec.name} has no experts.", "Leave it out.")
    if settings.ep == 1:
        for name in settings.given(("balanced", "dispatch")):
            raise UsageError(f"--{name} has no effect without --ep: all experts are on one device.", "Leave it out.")
    latency = COLLECTIVE_LATENCY
    if settings.link_latency is not None:
        latency = parse_seconds("link-latency", settings.link_latency)
        if settings.tp == settings.ep == 1:
            raise UsageError("--link-latency has no effect on a single device.", "Leave it out.")
    device = find_hardware(hardware)
    if settings.dispatch is None and spec.precision.experts.compute not in device.peaks:  # multiplied as 16 bits
        spec = replace(spec, precision=replace(spec.precision, dispatch=2.0))
    cluster = Cluster(device, settings.tp, settings.ep, latency)
    return CostModel(spec, cluster, routing, parse_seconds("overhead", settings.overhead), settings.balanced)


# ---- the drafter ----------------------------------------------------------------------------------------------------

SHAPES = (
    "free, mtp, eagle3[:TARGET], dflash[:TARGET], dspark[:TARGET], eagle[:VOCAB], block[:N], medusa[:HEADS] and "
    "model:NAME"
)
_MOST_EXPENSIVE = 10.0
"""Plain steps that a draft token may cost; more is a slip of the keyboard."""


def draft_cost(cost: CostModel, settings: PlanSettings) -> DraftCost:
    """What drafting for the target of `cost` costs; without shape or cost, by the first calibrated drafter, or mtp."""
    if settings.shape is not None and settings.drafter_cost is not None:
        raise UsageError("--drafter-shape and --drafter-cost both define the cost of drafting.", "Give one of the two.")
    if settings.drafter_cost is not None:
        _refuse_division(settings, "a fixed --drafter-cost")
        return _fixed(cost, settings.drafter_cost)
    curves = _curves(cost)
    shape = next(iter(curves), "mtp") if settings.shape is None else settings.shape
    if shape in curves:
        _refuse_division(settings, f"the calibrated drafter {shape}")
        return calibrated_draft_cost(shape, curves[shape])
    if shape == "free":
        _refuse_division(settings, "the shape 'free'")
        return FREE
    return _shaped(cost, shape, _drafter_cluster(cost, shape, settings.drafter_tp))


def _curves(cost: CostModel) -> Mapping[str, DraftCurve]:
    """The calibrated drafters."""
    return {} if cost.measured is None else cost.measured.drafters


def _refuse_division(settings: PlanSettings, drafter: str) -> None:
    """UsageError if a drafter is to be divided whose time does not depend on it."""
    if settings.drafter_tp is not None:
        raise UsageError(
            f"--drafter-tp has no effect on {drafter}.", "Leave it out, or give a --drafter-shape with weights."
        )


def _fixed(cost: CostModel, text: str) -> DraftCost:
    if is_time(text):
        return constant_cost(parse_seconds("drafter-cost", text))
    share = number(text)
    if not 0 <= share <= _MOST_EXPENSIVE:
        raise UsageError(
            f"drafter-cost = {shown(text)} is neither a fraction nor a time.",
            f"Write 0.1 (of a plain step; {_MOST_EXPENSIVE:g} at most) or 300us, 2ms.",
        )
    return fractional_cost(cost, share)


def _drafter_cluster(cost: CostModel, shape: str, tp: int | None) -> Cluster:
    """The devices of the drafter: the target's as it uses them, or fewer of them."""
    here = cost.cluster
    if tp is None:
        return here
    if tp < 1:
        raise UsageError(f"drafter-tp = {tp} is out of range.", "It is the number of devices: 1 or more.")
    if tp > here.tp:
        raise UsageError(
            f"drafter-tp = {tp} is more than the {here.tp} devices that share a batch (--tp {here.tp}).", "Use fewer."
        )
    if shape == "mtp" and here.ep > 1:
        raise UsageError(
            "--drafter-tp has no effect on mtp under --ep: its experts are spread as the target's are.", "Leave it out."
        )
    return replace(here, tp=tp, ep=1)


def _shaped(target: CostModel, shape: str, cluster: Cluster) -> DraftCost:
    """A drafter for the target by its shape, on `cluster`."""
    kind, colon, argument = shape.partition(":")
    if shape == "mtp":
        return mtp_cost(target, cluster)
    if kind == "model" and argument:
        return draft_model_cost(find_plan_model(argument), cluster)
    if kind in RELEASED_HEADS and bool(argument) == bool(colon):
        head = find_head(kind, argument or target.model.name, hidden=target.model.hidden)
        return released_cost(target, cluster, head, name=f"{kind}:{head.name}" if head.name else kind)
    size = int(argument) if re.fullmatch(r"[0-9]{1,9}", argument) else 0
    if kind not in ("eagle", "block", "medusa") or (colon and not size):
        raise UsageError(f"The drafter shape {shown(shape)} is not known.", f"Known are {SHAPES}.")
    if kind == "eagle":
        return eagle_cost(target.model, cluster, vocab=size or None)
    if size > DEEPEST:
        raise UsageError(f"{shape} is deeper than any draft.", f"Give at most {DEEPEST}.")
    if kind == "medusa":
        return medusa_cost(target.model, cluster, heads=size or 5)
    return block_drafter_cost(target.model, cluster, width=size or 16)


def check_drafter(noted: ConfigKeys, deployment: Deployment, shape: str | None) -> None:
    """A warning if the acceptance of a file is of another kind of drafter than the one that is priced, or of one that
    reads other files: than a calibrated one, or than the draft model of `shape`."""
    drafter, fingerprint = noted.text("drafter") or "", noted.text("drafter_fingerprint")
    priced, measured = deployment.drafter.name, deployment.cost.measured
    names = [name.partition(":")[0] for name in drafter.split(",")]  # several of a server's
    *kinds, kind = map(_shape_of, (*names, priced.partition(":")[0]))
    if not {*names} <= {*DRAFTERS} or kind in ("fraction", "given"):
        return
    kinds = [each for each in kinds if each != "free"] or kinds  # beside others lookup hardly costs anything
    own = kind if kind in kinds else kinds[0]
    other = measured.drafters[priced].fingerprint if measured and priced in measured.drafters else ""
    if own == kind == "model" and fingerprint and shape and (name := shape.partition(":")[2]):
        from wager.models.companions import drafter_fingerprint

        with suppress(WagerError):  # of a name without files here
            other = drafter_fingerprint(DrafterSpec("model", name)) if hub.find(name) else ""
    if own != kind:
        known = f"{own}:NAME" if own == "model" else own
        differs = f"of {drafter}, and drafting is priced as {priced}; --drafter-shape {known} prices it"
    elif fingerprint and other and fingerprint != other:
        differs = f"of another {drafter} than the one whose time is planned, by the files that it reads"
    else:
        return
    console.warn(f"{noted.where} is the acceptance {differs}.")


def _shape_of(drafter: str) -> str:
    """What a drafter is called among the shapes of `plan`; a shape as it is."""
    option = DRAFTERS.get(drafter)
    if option is None or option.runs_a_head:
        return {"eagle3": "eagle", "dflash": "block"}.get(drafter, drafter)
    return "model" if option.argument in ("path", "layers") else "free"
