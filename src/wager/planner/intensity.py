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
class PartIntensity:
    """FLOPs per byte of a part: `at` of a batch size or of a number of query rows, with which it rises. `ridge` is the
    device's in the part's `arithmetic`."""

    name: str
    arithmetic: str
    ridge: float
    at: Callable[[float], float]

    @property
    def knee(self) -> float | None:
        """The count from which the part is compute-bound, to a relative 1e-9; None: at no count."""
        low, high = 2.0**-20, _MOST
        if self.at(high) < self.ridge:
            return None
        while high > low * (1 + 1e-9):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if self.at(middle) >= self.ridge else (middle, high)
        return high


def feed_forward_intensities(cost: CostModel) -> list[PartIntensity]:
    """The feed-forward by batch, in plain decoding: a mixture of experts, I(t) = 2 t (k + s) / (b (A(t) + s)),
    and of its dense twin, a feed-forward of as many weights as a token uses, 2 t / b; or of a dense model's.

    Shared experts count with the routed ones where they are stored in the same format.
    """

    def of_part(part: str) -> Callable[[float], float]:
        return lambda batch: cost.step(0, 1, batch=batch).parts[part].intensity

    precision = cost.model.precision
    if not cost.model.sparse:
        return [_intensity(cost, FEED_FORWARD, precision.weights.compute, of_part("ffn"))]
    compute, size = precision.experts.compute, precision.experts.bytes
    return [
        _intensity(cost, MIXTURE, compute, of_part("experts")),
        _intensity(cost, DENSE_TWIN, compute, lambda batch: 2 * batch / size),
    ]


def attention_intensities(cost: CostModel, *, context: float) -> list[PartIntensity]:
    """Each kind of attention of the model by query rows of a sequence, whatever the batch: each sequence reads a
    cache of its own. Kinds without work at that context, such as compressed entries before there are any, are left out.
    """

    def of_part(part: str) -> Callable[[float], float]:
        return lambda rows: cost.step(context, rows).parts[part].intensity

    parts = {
        stream.part: stream.compute
        for layer in cost.model.layers
        for stream in layer.attention.streams(context, 1, cost.model.precision)
    }
    names = dict(_KINDS)
    if any(isinstance(layer.attending, Gqa) for layer in cost.model.layers):
        names["attention"] = "GQA"
    found = [_intensity(cost, names.get(part, part), compute, of_part(part)) for part, compute in parts.items()]
    return [each for each in found if each.at(1) > 0]


def _intensity(cost: CostModel, name: str, compute: str, at: Callable[[float], float]) -> PartIntensity:
    return PartIntensity(name, cost.device.arithmetic(compute), cost.device.ridge(compute), at)


def knees(cost: CostModel, contexts: Sequence[int]) -> dict[str, Any]:
    """For JSON: of plain decoding's feed-forward by the requests of a group, and of each kind of attention by the rows
    of a request at every context: its arithmetic, the device's ridge in it, the intensity at 1, and the knee (None: at
    no count)."""

    def described(parts: Sequence[PartIntensity]) -> list[dict[str, Any]]:
        return [
            {"name": each.name, "arithmetic": each.arithmetic, "ridge": each.ridge}
            | {"at_one": each.at(1), "knee": each.knee}
            for each in parts
        ]

    return {
        "feed_forward": described(feed_forward_intensities(cost)),
        "attention": {str(each): described(attention_intensities(cost, context=each)) for each in contexts},
    }
