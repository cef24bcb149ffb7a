"""Seconds of one step by its roofline: for each stream the larger of bytes / bandwidth and FLOPs / peak, summed.

A step is a list of loads: sequences with a context and rows (query positions). A model's shape and a device's datasheet
give seconds by part; what a real step adds to its roofline is one fixed overhead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from wager.arch import Experts, Layer, ModelSpec, Stream
from wager.errors import UsageError
from wager.planner.devices import Device
from wager.planner.experts import ExpertRouting, experts_on_fullest_rank
from wager.planner.links import COLLECTIVE_LATENCY, Cluster

_RELATIVE_CHANGE = 1e-6
"""Step of the finite difference behind a marginal cost."""


@dataclass(frozen=True, slots=True)
class SequenceLoad:
    """`count` identical sequences of a step: `context` cached positions, `rows` query positions, and `logits_rows` of
    these that need logits (None: all, as in decoding). Real numbers, so that marginal costs can be derivatives."""

    context: float
    rows: float
    count: float = 1
    logits_rows: float | None = None


@dataclass(frozen=True, slots=True)
class StepPart:
    """One component of a step. `bound` is what it waits for: memory, compute, both (layers differ), link, fixed."""

    seconds: float
    bytes: float = 0.0
    flops: float = 0.0
    bound: str = "memory"


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step, and of its parts."""

    seconds: float
    parts: Mapping[str, StepPart]

    @property
    def binding(self) -> str:
        """The part that takes most of the step."""
        return max(self.parts, key=lambda name: self.parts[name].seconds)


_UNIFORM_ROUTING = ExpertRouting()


class CostModel:
    """Seconds of a step of `model` on `device`.

    `tp` devices share every matrix and cache; `ep` ranks share the experts, in ep / tp groups each with a load of its
    own like the given one (see Cluster), and a step waits for the rank with most experts to read; `balanced` counts the
    mean instead, as if experts were placed by their load. `overhead` are seconds that every step takes beside its
    roofline, `link_latency` those of every collective. `fusion` are elements of a further matrix that a draft head has:
    it brings the target's hidden states to the head's width.
    """

    def __init__(
        self,
        model: ModelSpec,
        device: Device,
        *,
        routing: ExpertRouting = _UNIFORM_ROUTING,
        tp: int = 1,
        ep: int = 1,
        overhead: float = 0.0,
        link_latency: float = COLLECTIVE_LATENCY,
        balanced: bool = False,
        fusion: int = 0,
    ) -> None:
        self.model, self.device, self.routing, self.overhead = model, device, routing, overhead
        self.balanced, self.fusion = balanced, fusion
        self.cluster = Cluster(device, tp, ep, link_latency)
        self.cluster.check(model)
        elements = {**model.elements(), "fusion": fusion}
        self._matrices = {
            part: elements[part] / tp for part in ("fusion", "projections", "ffn", "router") if elements.get(part)
        }
        self._head = model.head_elements / tp

    def seconds(self, loads: Sequence[SequenceLoad]) -> float:
        """Seconds of the step."""
        return self.step(loads).seconds

    def step(self, loads: Sequence[SequenceLoad], *, distinct_experts: float | None = None) -> StepCost:
        """Seconds of the step by part. `distinct_experts` replaces the expected number per layer by a measured one.

        A step without rows costs nothing; negative rows, contexts or counts are a UsageError.
        """
        for load in loads:
            if min(load.context, load.rows, load.count, load.logits_rows or 0) < 0:
                raise UsageError(f"{load} is no part of a step.", "Contexts, rows and counts are zero or more.")
        loads = [load for load in loads if load.rows * load.count > 0]
        if not loads:
            return StepCost(0.0, {})
        rows = sum(load.rows * load.count for load in loads)
        total = _StepSum(self.device)
        precision = self.model.precision
        for part, size in self._matrices.items():
            stored = precision.weights if part == "fusion" else precision.format_of(part)
            total.add(Stream(part, 2 * size * rows, size * stored.bytes, stored.compute))
        for load in loads:
            self._add_attention(total, load)
        for layer in self.model.layers:
            if isinstance(layer.ffn, Experts):
                self._add_experts(total, layer, layer.ffn, loads=loads, rows=rows, distinct=distinct_experts)
        head_rows = sum(load.count * (load.rows if load.logits_rows is None else load.logits_rows) for load in loads)
        if self._head and head_rows:
            stored = precision.head
            total.add(Stream("head", 2 * self._head * head_rows, self._head * stored.bytes, stored.compute))
        for part, transfer in self.cluster.traffic(self.model, rows).items():
            total.parts[part] = StepPart(transfer.seconds, transfer.bytes, 0.0, "link")
        if self.overhead:
            total.parts["overhead"] = StepPart(self.overhead, bound="fixed")
        return StepCost(sum(part.seconds for part in total.parts.values()), total.parts)

    def marginal_cost(self, loads: Sequence[SequenceLoad]) -> Mapping[str, float]:
        """Relative marginal cost of a row by part: d log seconds / d log rows, all loads growing alike. 0 where another
        row is free, 1 where it costs as much as an average one. The step's own is under "step"."""
        more = [replace(load, rows=load.rows * (1 + _RELATIVE_CHANGE)) for load in loads]
        base, grown = self.step(loads), self.step(more)
        by_part = {
            part: (grown.parts[part].seconds / cost.seconds - 1) / _RELATIVE_CHANGE if cost.seconds else 0.0
            for part, cost in base.parts.items()
        }
        return {"step": (grown.seconds / base.seconds - 1) / _RELATIVE_CHANGE, **by_part}

    # ---- the parts --------------------------------------------------------------------------------------------------

    def _add_attention(self, total: _StepSum, load: SequenceLoad) -> None:
        tp = self.cluster.tp
        for layer in self.model.layers:
            for stream in layer.attention.streams(load.context, load.rows, self.model.precision):
                size = stream.bytes / tp + stream.cached * self.cluster.kept_share(stream.shards)
                total.add(replace(stream, flops=stream.flops / tp, bytes=size), times=layer.count * load.count)

    def _add_experts(
        self,
        total: _StepSum,
        layer: Layer,
        ffn: Experts,
        *,
        loads: Sequence[SequenceLoad],
        rows: float,
        distinct: float | None,
    ) -> None:
        """Routed experts are read if a token of any rank picks them; each rank holds its share of them. Shared experts
        join the routed ones' stream where both are stored in the same format."""
        model, cluster = self.model, self.cluster
        precision, expert = model.precision, ffn.expert(model.hidden)
        tokens = cluster.groups * sum(load.count * self.routing.unrelated_tokens(load.rows) for load in loads)
        if distinct is None:
            distinct = self.routing.distinct_experts(ffn.count, ffn.active, tokens)
        if cluster.ep > 1 and not self.balanced:
            held = -(-ffn.count // cluster.ep)
            read = experts_on_fullest_rank(held, distinct / ffn.count, cluster.ep) * expert
        else:
            read = distinct * expert / cluster.devices
        flops = 2 * ffn.active * expert * rows / cluster.tp
        size, shared = read * precision.experts.bytes, ffn.shared_weights(model.hidden) / cluster.tp
        together = precision.shared == precision.experts
        if together:
            flops, size = flops + 2 * shared * rows, size + shared * precision.experts.bytes
        total.add(Stream("experts", flops, size, precision.experts.compute), times=layer.count)
        if shared and not together:
            stored = precision.shared
            total.add(
                Stream("shared experts", 2 * shared * rows, shared * stored.bytes, stored.compute), times=layer.count
            )


class _StepSum:
    """Adds streams up by part; each waits for memory or compute on its own, since kernels run one after another."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.parts: dict[str, StepPart] = {}

    def add(self, stream: Stream, *, times: float = 1) -> None:
        read, computed = stream.bytes / self._device.bandwidth, stream.flops / self._device.peak(stream.compute)
        before = self.parts.get(stream.part, StepPart(0.0, bound=""))
        bound = "compute" if computed > read else "memory"
        if before.bound not in ("", bound):
            bound = "both"
        self.parts[stream.part] = StepPart(
            before.seconds + times * self._device.seconds(stream.bytes, stream.flops, compute=stream.compute),
            before.bytes + times * stream.bytes,
            before.flops + times * stream.flops,
            bound,
        )
