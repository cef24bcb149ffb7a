"""Arithmetic intensity, FLOPs per byte, of the parts of a step, and the knee where a part turns compute-bound.

A part is compute-bound where its intensity is above the device's ridge, peak / bandwidth. All figures are those of the
cost model: FLOPs over bytes of the parts of its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wager.arch import Gqa, ModelSpec
from wager.planner.roofline import CostModel, SequenceLoad, StepPart

MIXTURE, DENSE_TWIN, FEED_FORWARD = "experts", "dense twin", "feed-forward"
_MOST = 2.0**40
"""A count beyond any batch, at which a part that is still memory-bound is said to have no knee."""
_KINDS = {
    "window attention": "sliding window",
    "latent attention": "MLA",
    "sparse attention": "CSA",
    "compressed attention": "HCA",
    "recurrence": "DeltaNet",
}
"""Usual names of the parts that are attention."""


@dataclass(frozen=True, slots=True)
class IntensityCurve:
    """FLOPs per byte of a part at each of `counts`, which are batch sizes or query rows. `ridge` is the device's in the
    part's arithmetic, `compute`; from the count `knee` on the part is compute-bound (None: at no count)."""

    name: str
    counts: tuple[float, ...]
    values: tuple[float, ...]
    compute: str
    ridge: float
    knee: float | None


def feed_forward_curves(cost: CostModel, batches: Sequence[float]) -> list[IntensityCurve]:
    """Of the feed-forward by batch, in plain decoding: of a mixture of experts, I(t) = 2 t (k + s) / (b (A(t) + s)),
    and of its dense twin, a feed-forward of as many weights as a token uses, 2 t / b; or of a dense model's.

    Shared experts count with the routed ones where they are stored in the same format.
    """
    precision = cost.model.precision
    if not cost.model.sparse:
        return [_curve(cost, FEED_FORWARD, batches, precision.weights.compute, _part_by_batch(cost, "ffn"))]
    compute, size = precision.experts.compute, precision.experts.bytes
    return [
        _curve(cost, MIXTURE, batches, compute, _part_by_batch(cost, "experts")),
        _curve(cost, DENSE_TWIN, batches, compute, lambda batch: 2 * batch / size),
    ]


def step_intensity(cost: CostModel, *, batch: float, context: float, rows: float = 1) -> float:
    """FLOPs per byte of memory of a whole step, without what devices send to each other."""
    parts = [part for part in cost.step([SequenceLoad(context, rows, batch)]).parts.values() if part.bound != "link"]
    return _intensity(StepPart(0.0, sum(part.bytes for part in parts), sum(part.flops for part in parts)))


def attention_curves(cost: CostModel, rows: Sequence[float], *, context: float) -> list[IntensityCurve]:
    """Of each kind of attention of the model by query rows of a sequence, whatever the batch: each sequence reads a
    cache of its own. Kinds without work at that context, such as compressed entries before there are any, are left out.
    """

    def by_rows(part: str) -> Callable[[float], float]:
        return lambda count: _intensity(cost.step([SequenceLoad(context, count)]).parts[part])

    curves = []
    for part, compute in _attention_parts(cost.model, context).items():
        if by_rows(part)(1) > 0:
            curves.append(_curve(cost, _kind(cost.model, part), rows, compute, by_rows(part)))
    return curves


def _attention_parts(model: ModelSpec, context: float) -> dict[str, str]:
    """The parts of a step that are attention, each with its arithmetic."""
    return {
        stream.part: stream.compute
        for layer in model.layers
        for stream in layer.attention.streams(context, 1, model.precision)
    }


def _kind(model: ModelSpec, part: str) -> str:
    if part == "attention" and any(isinstance(layer.attention, Gqa) for layer in model.layers):
        return "GQA"
    return _KINDS.get(part, part)


def _part_by_batch(cost: CostModel, part: str) -> Callable[[float], float]:
    return lambda batch: _intensity(cost.step([SequenceLoad(0, 1, batch)]).parts[part])


def _intensity(part: StepPart) -> float:
    return part.flops / part.bytes if part.bytes else 0.0


def _curve(
    cost: CostModel, name: str, counts: Sequence[float], compute: str, intensity: Callable[[float], float]
) -> IntensityCurve:
    ridge = cost.device.ridge(compute)
    values = tuple(intensity(count) for count in counts)
    return IntensityCurve(name, tuple(counts), values, cost.device.arithmetic(compute), ridge, _knee(intensity, ridge))


def _knee(intensity: Callable[[float], float], ridge: float) -> float | None:
    """The count at which an intensity that rises with it reaches the ridge, to a relative 1e-9."""
    low, high = 2.0**-20, _MOST
    if intensity(high) < ridge:
        return None
    while high > low * (1 + 1e-9):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if intensity(middle) >= ridge else (middle, high)
    return high
