"""The drafter of `wager plan` from its options: its shape or a fixed cost, and what it runs on."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from wager.arch import ModelSpec
from wager.economics.options import DEEPEST, is_time, parse_seconds
from wager.errors import UsageError
from wager.inputs import shown
from wager.planner.calibrated import CalibratedCostModel, CalibratedDraftCost
from wager.planner.devices import Device
from wager.planner.draft_chains import RemoteDraftCost, StagedDraftCost
from wager.planner.draft_cost import (
    ConstantDraftCost,
    DraftCost,
    DraftHeadCost,
    DraftModelCost,
    FractionalDraftCost,
    FreeDraftCost,
    block_drafter_cost,
    eagle_cost,
    medusa_cost,
    mtp_cost,
)
from wager.planner.links import Cluster, DrafterLink
from wager.planner.roofline import CostModel
from wager.planner.values import parse_speed

SHAPES = "free, mtp, eagle[:VOCAB], block[:N], medusa[:HEADS], model:NAME and staged:NAME,INNER,P[,DEPTH]"
_HEADS = ("mtp", "eagle", "block", "medusa")
_STAGED_DEPTH = 3
"""Guesses of the inner drafter where none are given."""

_MOST_EXPENSIVE = 10.0
"""Plain steps that a draft token may cost; more is a slip of the keyboard."""

ModelFinder = Callable[[str], ModelSpec]
"""Finds a model by the name in a shape."""


@dataclass(frozen=True, slots=True)
class DrafterOptions:
    """`shape` or a fixed `cost`; `tp` devices that divide the drafter (None: as the target is divided), `hardware` of
    its own (None: the target's devices) and the `link` to it (None: the slower of both devices' own)."""

    shape: str | None = None
    cost: str | None = None
    tp: int | None = None
    hardware: Device | None = None
    link: str | None = None

    def refuse_placement(self, drafter: str) -> None:
        """UsageError if a place is given for a drafter whose time does not depend on it."""
        for flag, value in (("tp", self.tp), ("hardware", self.hardware), ("link", self.link)):
            if value is not None:
                raise UsageError(
                    f"--drafter-{flag} has no effect on {drafter}.",
                    "Leave it out, or give a --drafter-shape with weights.",
                )


def draft_cost(cost: CostModel, options: DrafterOptions, *, models: ModelFinder) -> DraftCost:
    """What drafting for the target of `cost` costs; without shape or cost, by the first calibrated drafter, or mtp."""
    if options.shape is not None and options.cost is not None:
        raise UsageError("--drafter-shape and --drafter-cost both define the cost of drafting.", "Give one of the two.")
    if options.cost is not None:
        options.refuse_placement("a fixed --drafter-cost")
        return _fixed(cost, options.cost)
    curves = cost.measured.drafters if isinstance(cost, CalibratedCostModel) else {}
    shape = next(iter(curves), "mtp") if options.shape is None else options.shape
    if shape in curves:
        options.refuse_placement("the calibrated drafter " + shape)
        return CalibratedDraftCost(shape, curves[shape])
    if shape == "free":
        options.refuse_placement("the shape 'free'")
        return FreeDraftCost()
    drafter = _shaped(cost, shape, _cluster(cost, shape, options), models=models)
    if options.hardware is None:
        return drafter
    if isinstance(drafter, DraftHeadCost):
        drafter = replace(drafter, shares_head=False)  # the target's head is not on that device
    return RemoteDraftCost(drafter, options.hardware, _link(cost, options.hardware, options.link))


def _fixed(cost: CostModel, text: str) -> DraftCost:
    if is_time(text):
        return ConstantDraftCost(parse_seconds("drafter-cost", text))
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= _MOST_EXPENSIVE:
        raise UsageError(
            f"drafter-cost = {shown(text)} is neither a fraction nor a time.",
            f"Write 0.1 (of a plain step; {_MOST_EXPENSIVE:g} at most) or 300us, 2ms.",
        )
    return FractionalDraftCost(cost, share)


# ---- where it runs --------------------------------------------------------------------------------------------------


def _cluster(cost: CostModel, shape: str, options: DrafterOptions) -> Cluster:
    """The devices of the drafter: the target's as it uses them, fewer of them, or its own."""
    here, tp = cost.cluster, options.tp
    if tp is not None and tp < 1:
        raise UsageError(f"drafter-tp = {tp} is out of range.", "It is the number of devices: 1 or more.")
    if options.hardware is not None:
        return Cluster(options.hardware, tp=tp or 1, latency=here.latency)
    if options.link is not None:
        raise UsageError("--drafter-link has no effect without --drafter-hardware.", "Leave it out.")
    if tp is None:
        return here
    if tp > here.tp:
        raise UsageError(
            f"drafter-tp = {tp} is more than the {here.tp} devices that share a batch (--tp {here.tp}).",
            "Use fewer, or give the drafter devices of its own with --drafter-hardware.",
        )
    if shape == "mtp" and here.ep > 1:
        raise UsageError(
            "--drafter-tp has no effect on mtp under --ep: its experts are spread as the target's are.", "Leave it out."
        )
    return replace(here, tp=tp, ep=1)


def _link(cost: CostModel, there: Device, text: str | None) -> DrafterLink:
    """Of the given speed; else that inside a node where both are of one kind, or of the slower network card."""
    here = cost.device
    speed = None
    if text is not None:
        speed = parse_speed("drafter-link", text)
    elif here.name == there.name:
        speed = here.intra or here.inter
    elif here.inter and there.inter:
        speed = min(here.inter, there.inter)
    if not speed:
        raise UsageError(
            f"The speed of a link between {here.name} and {there.name} is not known.", "Give it: --drafter-link 50GB/s."
        )
    return DrafterLink(speed, cost.cluster.latency)


# ---- shapes ---------------------------------------------------------------------------------------------------------


def _shaped(cost: CostModel, shape: str, cluster: Cluster, *, models: ModelFinder) -> DraftCost:
    """By its shape, on `cluster`."""
    kind, colon, argument = shape.partition(":")
    if kind == "free" and not colon:
        return FreeDraftCost()
    if kind in _HEADS and (not colon or (argument and kind != "mtp")):
        return _head(cost, kind, argument, cluster=cluster, shape=shape)
    if kind == "model" and argument:
        return DraftModelCost(_model(models(argument), cluster))
    if kind == "staged" and argument:
        return _staged(argument, cluster, models=models)
    raise unknown_shape(shape)


def unknown_shape(shape: str) -> UsageError:
    """The error that lists the shapes there are."""
    return UsageError(f"The drafter shape {shown(shape)} is not known.", f"Known are {SHAPES}.")


def _head(cost: CostModel, kind: str, argument: str, *, cluster: Cluster, shape: str) -> DraftHeadCost:
    if kind == "mtp":
        return mtp_cost(cost.model, cluster, routing=cost.routing, balanced=cost.balanced)
    number = None
    if argument:
        if not re.fullmatch(r"[0-9]{1,9}", argument) or not int(argument):
            raise unknown_shape(shape)
        number = int(argument)
    if kind == "eagle":
        return eagle_cost(cost.model, cluster, vocab=number)
    if number is not None and number > DEEPEST:
        raise UsageError(f"{shape} is deeper than any draft.", f"Give at most {DEEPEST}.")
    if kind == "medusa":
        return medusa_cost(cost.model, cluster, heads=number or 5)
    return block_drafter_cost(cost.model, cluster, width=number or 16)


def _model(model: ModelSpec, cluster: Cluster) -> CostModel:
    """A draft model, divided over the devices that share a batch; with experts, too, as tensor parallelism divides."""
    try:
        return CostModel(model, cluster.device, tp=cluster.tp, link_latency=cluster.latency)
    except UsageError as error:
        raise UsageError(f"The drafter: {error.message}", "Give it fewer devices: --drafter-tp 1.") from error


def _staged(argument: str, cluster: Cluster, *, models: ModelFinder) -> StagedDraftCost:
    """NAME,INNER,P[,DEPTH]: a small model, the shape of its drafter, that one's acceptance and depth."""
    fields = [field.strip() for field in argument.split(",")]
    form = "Write staged:NAME,INNER,P[,DEPTH], such as staged:Llama-3.1-8B,free,0.5,3."
    if len(fields) not in (3, 4) or not all(fields):
        raise UsageError(f"The drafter shape {shown('staged:' + argument)} is incomplete.", form)
    try:
        acceptance = float(fields[2])
    except ValueError:
        acceptance = -1.0
    depth = fields[3] if len(fields) == 4 else str(_STAGED_DEPTH)
    if not 0 <= acceptance <= 1:
        raise UsageError(f"The inner acceptance {shown(fields[2])} is not between 0 and 1.", form)
    if not re.fullmatch(r"[0-9]{1,3}", depth) or not 0 < int(depth) <= DEEPEST:
        raise UsageError(f"The inner depth {shown(depth)} is out of range.", f"It is 1 to {DEEPEST}.")
    small = DraftModelCost(_model(models(fields[0]), cluster))
    if fields[1].partition(":")[0] not in ("free", *_HEADS):
        raise UsageError(
            f"The inner drafter {shown(fields[1])} is not known.", "It is free, mtp, eagle, block or medusa."
        )
    inner = _shaped(small.cost, fields[1], small.cost.cluster, models=models)
    if inner.max_depth is not None:
        depth = str(min(int(depth), inner.max_depth))
    return StagedDraftCost(small, inner, acceptance, int(depth))
