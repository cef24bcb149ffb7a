"""Whether a batch fits: weights, drafter and cache against a device's memory, in bytes per device.

Activations and whatever else a runtime keeps are covered by a share of the memory that is left free.
"""

from __future__ import annotations

from dataclasses import dataclass

from wager.arch import ModelSpec
from wager.economics.costmodel.draft_cost import DraftCost
from wager.economics.costmodel.roofline import CostModel

SPARE_SHARE = 0.1
"""Share of a device's memory that the plan leaves to activations and the runtime."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on one device. `memory` is what it has, None where that is unknown."""

    weights: float
    drafter: float
    cache: float
    memory: float | None

    @property
    def total(self) -> float:
        return self.weights + self.drafter + self.cache

    @property
    def fits(self) -> bool | None:
        """Whether it fits beside the spare share; None if the memory is unknown."""
        return None if self.memory is None else self.total <= self.memory * (1 - SPARE_SHARE)


def footprint(cost: CostModel, drafter: DraftCost, *, batch: float, context: float) -> Footprint:
    """Bytes that `batch` sequences of `context` positions take (per device; under expert parallelism, of each rank)."""
    cluster = cost.cluster
    cache = batch * (_cache(cost.model, context, tp=cluster.tp) + drafter.kv_bytes(context) / cluster.tp)
    return Footprint(_weights(cost), drafter.resident_bytes / cluster.tp, cache, cost.device.memory)


def largest_batch(cost: CostModel, drafter: DraftCost, *, context: float) -> int | None:
    """Most sequences of that context that fit; 0 if not even the weights do, None if the memory is unknown."""
    one = footprint(cost, drafter, batch=1, context=context)
    if one.memory is None:
        return None
    left = one.memory * (1 - SPARE_SHARE) - one.weights - one.drafter
    return max(0, int(left // one.cache)) if one.cache > 0 else 0


def _weights(cost: CostModel) -> float:
    """Matrices divide among tensor-parallel devices; expert-parallel ranks hold all but the routed experts in full."""
    model, cluster = cost.model, cost.cluster
    experts = model.elements().get("experts", 0) * model.precision.experts.bytes
    return (model.resident_bytes - experts) / cluster.tp + experts / cluster.devices


def _cache(model: ModelSpec, context: float, *, tp: int) -> float:
    """One sequence's cache on one device: heads are divided, a latent that all heads share is not."""
    total = 0.0
    for layer in model.layers:
        shards = min(stream.shards for stream in layer.attention.streams(context, 1, model.precision))
        total += layer.count * layer.attention.kv_bytes(context, model.precision) / min(tp, shards)
    return total
