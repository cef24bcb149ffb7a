"""Measured step times in place of the roofline's, for `plan --hardware this`.

The seconds of a step are what was measured; their division into parts is the roofline's, scaled to that sum. The
measurements are passed as the protocols below, so that the cost model needs no calibration code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from wager.arch import ModelSpec
from wager.planner.devices import Device
from wager.planner.draft_cost import DraftCost
from wager.planner.roofline import CostModel, SequenceLoad, StepCost, StepPart


class MeasuredDrafting(Protocol):
    """Measured seconds of drafting for `requests` sequences, each to `depth`."""

    def seconds(self, requests: float, depth: int) -> float: ...


class MeasuredSteps(Protocol):
    """Measured seconds of a step by its shape, as LatencyModel.seconds; `rows` are the row counts that were measured,
    ascending; `drafters` the drafters that were, by name."""

    @property
    def rows(self) -> Sequence[int]: ...

    @property
    def drafters(self) -> Mapping[str, MeasuredDrafting]: ...

    def seconds(self, rows: float, requests: float, context_sum: float) -> float: ...


class CalibratedCostModel(CostModel):
    """Seconds of steps of `model` as `measured`. Its device is what the measurements imply: see `implied_device`."""

    def __init__(self, model: ModelSpec, measured: MeasuredSteps, *, memory: float | None, label: str) -> None:
        super().__init__(model, implied_device(model, measured, memory=memory, label=label))
        self.measured = measured

    def step(self, loads: Sequence[SequenceLoad], *, distinct_experts: float | None = None) -> StepCost:
        """See CostModel."""
        roofline = super().step(loads, distinct_experts=distinct_experts)
        if not roofline.seconds:
            return roofline
        rows = sum(load.rows * load.count for load in loads)
        requests = sum(load.count for load in loads)
        cached = sum(load.context * load.count for load in loads)
        seconds = self.measured.seconds(rows, requests, cached)
        scale = seconds / roofline.seconds
        parts = {
            name: StepPart(part.seconds * scale, part.bytes, part.flops, part.bound)
            for name, part in roofline.parts.items()
        }
        return StepCost(seconds, parts)


def implied_device(model: ModelSpec, measured: MeasuredSteps, *, memory: float | None, label: str) -> Device:
    """The machine as a datasheet: bandwidth is the bytes per second of a one-row step, peak the FLOPs per second that
    the last measured rows add."""
    compute = model.precision.weights.compute
    one, many = measured.rows[0], measured.rows[-1]
    first = measured.seconds(one, 1, 0)
    added = measured.seconds(many, 1, 0) - measured.seconds(max(one, many // 2), 1, 0)
    rate = 2 * model.active * (many - max(one, many // 2)) / added if added > 0 else 0.0
    peak = rate or 2 * model.active * many / first
    kinds = {compute, model.precision.attention}  # attention is not quantised with the weights
    return Device("this machine", dict.fromkeys(kinds, peak), model.streamed_bytes / first, memory, label=label)


@dataclass(frozen=True, slots=True)
class CalibratedDraftCost(DraftCost):
    """A DraftCost by measurement. Its memory is not measured and counts as 0."""

    name: str = field()  # required, although the base has a property of that name
    measured: MeasuredDrafting = field()

    def seconds(self, requests: float, depth: int, *, context: float) -> float:
        """See DraftCost; the measurements do not depend on the context."""
        return self.measured.seconds(requests, depth) if depth and requests else 0.0
