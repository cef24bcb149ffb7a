"""Whether a batch fits: weights, drafter and cache against a device's memory, in bytes per device.

Activations and whatever else a runtime keeps are covered by a share of the memory that is left free.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from wager.planner.draft_cost import DraftCost
from wager.planner.roofline import CostModel

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

    def as_dict(self) -> dict[str, float | bool | None]:
        """Plain values for JSON."""
        return {**asdict(self), "total": self.total, "fits": self.fits}


def footprint(cost: CostModel, drafter: DraftCost, *, batch: float, context: float) -> Footprint:
    """Bytes that `batch` sequences of `context` positions take (per device; under expert parallelism, of each rank).
    A drafter on a device of its own takes nothing here: see drafter_footprint."""
    cluster, here = cost.cluster, drafter.own_device is None
    cache = cluster.cache_bytes(cost.model, context) + (drafter.kv_bytes(context) if here else 0.0)
    weights = drafter.device_bytes if here else 0.0
    return Footprint(cluster.weight_bytes(cost.model), weights, batch * cache, cost.device.memory)


def drafter_footprint(drafter: DraftCost, *, batch: float, context: float) -> Footprint | None:
    """Bytes on a drafter's own device; None for a drafter on the target's devices."""
    if drafter.own_device is None:
        return None
    return Footprint(0.0, drafter.device_bytes, batch * drafter.kv_bytes(context), drafter.own_device.memory)


def largest_batch(cost: CostModel, drafter: DraftCost, *, context: float) -> int | None:
    """Most sequences of that context that fit, on the target's devices and on the drafter's own; 0 if not even the
    weights do, None if the memory is unknown."""
    here = footprint(cost, drafter, batch=1, context=context)
    there = drafter_footprint(drafter, batch=1, context=context)
    limits = [_room(one) for one in (here, there) if one is not None and one.memory is not None]
    if here.memory is None or not limits:
        return None
    finite = [limit for limit in limits if limit is not None]
    return min(finite) if finite else 0


def _room(one: Footprint) -> int | None:
    """Sequences beside the weights, from the footprint of one; None where a sequence takes nothing and weights fit."""
    left = (one.memory or 0.0) * (1 - SPARE_SHARE) - one.weights - one.drafter
    if one.cache > 0:
        return max(0, int(left // one.cache))
    return None if left >= 0 else 0
