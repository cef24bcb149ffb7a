"""What one step costs on paper: for each stream the larger of bytes over bandwidth and FLOPs over peak, summed.

A step is a list of loads: sequences with a context and rows (query positions). Takes a model's physics and a device's
datasheet, returns seconds by part. Knows no drafter and no policy; what kernels add to the roofline are Overheads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from wager.arch import Experts, Layer, ModelSpec, Stream
from wager.economics.costmodel.devices import Device
from wager.economics.costmodel.experts import ExpertRouting, loaded
from wager.economics.costmodel.links import Cluster
from wager.errors import UsageError

_SLIVER = 1e-6


@dataclass(frozen=True, slots=True)
class SequenceLoad:
    """`count` sequences alike in a step: `context` cached positions, `rows` query positions, and `heads` of these that
    need logits (None: all, as in decoding). Real numbers, so that prices can be derivatives."""

    context: float
    rows: float
    count: float = 1
    heads: float | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One component of a step. `bound` says what it waits for: memory, compute, link, or fixed."""

    seconds: float
    bytes: float = 0.0
    flops: float = 0.0
    bound: str = "memory"


@dataclass(frozen=True, slots=True)
class StepCost:
    """The bill of a step: seconds, and what they are made of."""

    seconds: float
    parts: Mapping[str, Part]

    @property
    def binding(self) -> str:
        """The part that takes most of the step."""
        return max(self.parts, key=lambda name: self.parts[name].seconds)


@dataclass(frozen=True, slots=True)
class Overheads:
    """How far reality is from the roofline: seconds per step and per sequence, and a factor per part (1: none)."""

    fixed: float = 0.0
    per_sequence: float = 0.0
    slowdown: Mapping[str, float] = field(default_factory=dict)


UNIFORM, IDEAL = ExpertRouting(), Overheads()


class CostModel:
    """Seconds of a step of `model` on `device`.

    `tp` devices share every matrix and cache; `ep` ranks share the experts, each with loads of its own like the ones
    that are asked about. One of the two may exceed 1. `balanced` takes the experts as evenly spread over the ranks,
    else the step waits for the fullest.
    """

    def __init__(
        self,
        model: ModelSpec,
        device: Device,
        *,
        routing: ExpertRouting = UNIFORM,
        tp: int = 1,
        ep: int = 1,
        balanced: bool = False,
        overheads: Overheads = IDEAL,
    ) -> None:
        self.model, self.device, self.routing, self.overheads = model, device, routing, overheads
        self.cluster = Cluster(device, tp, ep)
        self.balanced = balanced
        if ep > 1 and not model.sparse:
            raise UsageError(f"{model.name} has no experts to spread over {ep} ranks.", "Use tensor parallelism (tp).")
        elements = model.elements()
        self._matrices = {part: elements[part] / tp for part in ("projections", "ffn", "router") if elements.get(part)}
        self._head = model.head_elements / tp

    def seconds(self, loads: Sequence[SequenceLoad]) -> float:
        """Seconds of the step."""
        return self.step(loads).seconds

    def step(self, loads: Sequence[SequenceLoad], *, experts: float | None = None) -> StepCost:
        """The bill of the step. `experts` replaces the expected distinct experts of a layer by a measured number.

        A step without rows costs nothing; negative rows, contexts or counts are a UsageError.
        """
        for load in loads:
            if min(load.context, load.rows, load.count, load.heads or 0) < 0:
                raise UsageError(f"{load} is no part of a step.", "Contexts, rows and counts are zero or more.")
        loads = [load for load in loads if load.rows * load.count > 0]
        if not loads:
            return StepCost(0.0, {})
        rows = sum(load.rows * load.count for load in loads)
        bill = _Bill(self)
        weights = self.model.precision.weights
        for part, size in self._matrices.items():
            bill.add(Stream(part, 2 * size * rows, size * weights.bytes, weights.compute))
        for load in loads:
            self._attend(bill, load)
        for layer in self.model.layers:
            if isinstance(layer.ffn, Experts):
                self._route(bill, layer, layer.ffn, loads=loads, rows=rows, hit=experts)
        heads = sum(load.count * (load.rows if load.heads is None else load.heads) for load in loads)
        if self._head and heads:
            bill.add(Stream("head", 2 * self._head * heads, self._head * weights.bytes, weights.compute))
        for part, (sent, taken) in self.cluster.traffic(self.model, rows).items():
            bill.parts[part] = Part(taken, sent, 0.0, "link")
        return bill.closed(sum(load.count for load in loads))

    def price(self, loads: Sequence[SequenceLoad]) -> Mapping[str, float]:
        """d log seconds / d log rows of each part, all loads growing alike: 0 where another row is free, 1 where it
        is paid in full. The whole step's is under "step"."""
        more = [replace(load, rows=load.rows * (1 + _SLIVER)) for load in loads]
        here, there = self.step(loads), self.step(more)
        prices = {
            part: (there.parts[part].seconds / cost.seconds - 1) / _SLIVER if cost.seconds else 0.0
            for part, cost in here.parts.items()
        }
        return {"step": (there.seconds / here.seconds - 1) / _SLIVER, **prices}

    def marginal(self, loads: Sequence[SequenceLoad], index: int, *, rows: float = 1) -> float:
        """Seconds that `rows` more rows of the load at `index` add to the step."""
        grown = replace(loads[index], rows=loads[index].rows + rows)
        return self.seconds([*loads[:index], grown, *loads[index + 1 :]]) - self.seconds(loads)

    # ---- the parts --------------------------------------------------------------------------------------------------

    def _attend(self, bill: _Bill, load: SequenceLoad) -> None:
        tp = self.cluster.tp
        for layer in self.model.layers:
            for stream in layer.attention.streams(load.context, load.rows, self.model.precision):
                share = min(tp, stream.shards)
                size = stream.bytes / tp + stream.cached / share
                bill.add(replace(stream, flops=stream.flops / tp, bytes=size), times=layer.count * load.count)

    def _route(
        self, bill: _Bill, layer: Layer, ffn: Experts, *, loads: Sequence[SequenceLoad], rows: float, hit: float | None
    ) -> None:
        """Routed experts read what is hit by the tokens of all ranks; each rank holds its share of them. Shared experts
        join the routed ones' stream where both are stored alike."""
        model, cluster = self.model, self.cluster
        precision, expert = model.precision, ffn.expert(model.hidden)
        tokens = cluster.ep * sum(load.count * self.routing.effective(load.rows) for load in loads)
        found = self.routing.hit(ffn.count, ffn.active, tokens) if hit is None else hit
        if cluster.ep > 1 and not self.balanced:
            slots = -(-ffn.count // cluster.ep)
            read = loaded(slots, found / ffn.count, cluster.ep) * expert
        else:
            read = found * expert / cluster.ep / cluster.tp
        flops = 2 * ffn.active * expert * rows / cluster.tp
        size, shared = read * precision.experts.bytes, ffn.shared_weights(model.hidden) / cluster.tp
        together = precision.shared == precision.experts
        if together:
            flops, size = flops + 2 * shared * rows, size + shared * precision.experts.bytes
        bill.add(Stream("experts", flops, size, precision.experts.compute), times=layer.count)
        if shared and not together:
            stored = precision.shared
            bill.add(
                Stream("shared experts", 2 * shared * rows, shared * stored.bytes, stored.compute), times=layer.count
            )


class _Bill:
    """Adds streams up by part; each waits for memory or compute on its own, since kernels run one after another."""

    def __init__(self, cost: CostModel) -> None:
        self._device, self._overheads = cost.device, cost.overheads
        self.parts: dict[str, Part] = {}

    def add(self, stream: Stream, *, times: float = 1) -> None:
        read, computed = stream.bytes / self._device.bandwidth, stream.flops / self._device.peak(stream.compute)
        taken = times * max(read, computed) * self._overheads.slowdown.get(stream.part, 1.0)
        past = self.parts.get(stream.part, Part(0.0, bound=""))
        bound = "compute" if computed > read else "memory"
        if past.bound not in ("", bound):
            bound = "both"
        self.parts[stream.part] = Part(
            past.seconds + taken, past.bytes + times * stream.bytes, past.flops + times * stream.flops, bound
        )

    def closed(self, sequences: float) -> StepCost:
        fixed = self._overheads.fixed + self._overheads.per_sequence * sequences
        if fixed:
            self.parts["overhead"] = Part(fixed, bound="fixed")
        return StepCost(sum(part.seconds for part in self.parts.values()), self.parts)
