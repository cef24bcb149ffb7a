"""Intensity, FLOPs per byte of memory: of the feed-forward by batch, of attention by query rows; and knees, the counts
from which a part is compute-bound. All figures are those of the cost model: FLOPs over bytes of the parts of its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from wager.arch import Gqa
from wager.planner.cost import CostModel

MIXTURE, DENSE_TWIN, FEED_FORWARD = "experts", "dense twin", "feed-forward"
_MOST = 2.0**40
"""A count beyond any batch, at which a part that is still memory-bound is said to have no knee."""
_KINDS = {
    "window attention": "sliding window",
    "latent attention": "MLA",
    "sparse attention": "CSA",
    "compressed attention": "HCA",
}
"""Usual names of the parts that are attention."""


@dataclass(frozen=True, slots=True)
class IntensityCurve:
    """FLOPs per byte of a part, a value for each of the given batch sizes or query rows. `ridge` is the device's in the
    part's arithmetic, `compute`; from the count `knee` on the part is compute-bound (None: at no count)."""

    name: str
    values: tuple[float, ...]
    compute: str
    ridge: float
    knee: float | None


def feed_forward_curves(cost: CostModel, batches: Sequence[float]) -> list[IntensityCurve]:
    """The feed-forward by batch, in plain decoding: a mixture of experts, I(t) = 2 t (k + s) / (b (A(t) + s)),
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


def attention_curves(cost: CostModel, rows: Sequence[float], *, context: float) -> list[IntensityCurve]:
    """Each kind of attention of the model by query rows of a sequence, whatever the batch: each sequence reads a
    cache of its own. Kinds without work at that context, such as compressed entries before there are any, are left out.
    """

    def by_rows(part: str) -> Callable[[float], float]:
        return lambda rows: cost.step(context, rows).parts[part].intensity

    parts = {
        stream.part: stream.compute
        for layer in cost.model.layers
        for stream in layer.attention.streams(context, 1, cost.model.precision)
    }
    names = dict(_KINDS)
    if any(isinstance(layer.attending, Gqa) for layer in cost.model.layers):
        names["attention"] = "GQA"
    return [
        _curve(cost, names.get(part, part), rows, compute, by_rows(part))
        for part, compute in parts.items()
        if by_rows(part)(1) > 0
    ]


def _part_by_batch(cost: CostModel, part: str) -> Callable[[float], float]:
    return lambda batch: cost.step(0, 1, batch=batch).parts[part].intensity


def _curve(
    cost: CostModel, name: str, counts: Sequence[float], compute: str, intensity: Callable[[float], float]
) -> IntensityCurve:
    ridge = cost.device.ridge(compute)
    values = tuple(intensity(count) for count in counts)
    return IntensityCurve(name, values, cost.device.arithmetic(compute), ridge, _knee(intensity, ridge))


def _knee(intensity: Callable[[float], float], ridge: float) -> float | None:
    """The count at which an intensity that rises with it reaches the ridge, to a relative 1e-9."""
    low, high = 2.0**-20, _MOST
    if intensity(high) < ridge:
        return None
    while high > low * (1 + 1e-9):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if intensity(middle) >= ridge else (middle, high)
    return high


def knees(cost: CostModel, contexts: Sequence[int]) -> dict[str, Any]:
    """For JSON: of plain decoding's feed-forward by the requests of a group, and of each kind of attention by the rows
    of a request at every context: its arithmetic, the device's ridge in it, the intensity at 1, and the knee (None: at
    no count)."""

    def described(curves: Sequence[IntensityCurve]) -> list[dict[str, Any]]:
        return [
            {"name": each.name, "arithmetic": each.compute, "ridge": each.ridge, "at_one": each.values[0]}
            | {"knee": each.knee}
            for each in curves
        ]

    return {
        "feed_forward": described(feed_forward_curves(cost, [1])),
        "attention": {str(each): described(attention_curves(cost, [1], context=each)) for each in contexts},
    }
