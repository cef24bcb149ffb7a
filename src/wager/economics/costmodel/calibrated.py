"""A measured surface in the place of the paper bill: what `plan` asks about the machine that a calibration was made on.

The sum of a step is what was measured; how it divides into parts is still the roofline's word, scaled to that sum.
Knows no file and no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wager.arch import ModelSpec
from wager.economics.costmodel.devices import Device
from wager.economics.costmodel.roofline import CostModel, Part, SequenceLoad, StepCost
from wager.economics.latency.draft_curve import DraftCurve
from wager.economics.latency.surface import LatencySurface


class CalibratedCostModel(CostModel):
    """Bills steps of `model` by `surface`. The device is what the surface implies: see `implied`."""

    def __init__(self, model: ModelSpec, surface: LatencySurface, *, memory: float | None, label: str) -> None:
        super().__init__(model, implied(model, surface, memory=memory, label=label))
        self.surface = surface

    def step(self, loads: Sequence[SequenceLoad], *, experts: float | None = None) -> StepCost:
        """See CostModel."""
        paper = super().step(loads, experts=experts)
        if not paper.seconds:
            return paper
        rows = sum(load.rows * load.count for load in loads)
        requests = sum(load.count for load in loads)
        cached = sum(load.context * load.count for load in loads)
        seconds = self.surface.seconds(rows, requests, cached)
        scale = seconds / paper.seconds
        parts = {
            name: Part(part.seconds * scale, part.bytes, part.flops, part.bound) for name, part in paper.parts.items()
        }
        return StepCost(seconds, parts)


def implied(model: ModelSpec, surface: LatencySurface, *, memory: float | None, label: str) -> Device:
    """The machine as a datasheet: bytes a second that one row reaches, FLOPs a second that the last rows add."""
    compute = model.precision.weights.compute
    one, many = surface.rows[0], surface.rows[-1]
    first = surface.seconds(one, 1, 0)
    added = surface.seconds(many, 1, 0) - surface.seconds(max(one, many // 2), 1, 0)
    rate = 2 * model.active * (many - max(one, many // 2)) / added if added > 0 else 0.0
    return Device(
        "this machine", {compute: rate or 2 * model.active * many / first}, model.streamed_bytes / first, memory,
        label=label,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CalibratedDraftCost:
    """A drafter by its measured curve. What it keeps in memory is the calibrated engine's business, not the bill's."""

    name: str
    curve: DraftCurve
    resident_bytes: float = 0.0
    most: int | None = None

    def seconds(self, requests: float, depth: int, *, context: float) -> float:
        return self.curve.seconds(requests, depth) if depth and requests else 0.0

    def kv_bytes(self, context: float) -> float:
        return 0.0
