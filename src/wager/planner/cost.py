"""The cost model of a deployment: seconds of a step of a model on the devices of a cluster, and the bytes they keep.

The roofline: for each stream of a step the larger of bytes / bandwidth and FLOPs / peak, summed. A step is a batch of
equal sequences, each with a context (cached positions) and rows (query positions): real numbers, so that marginal costs
can be derivatives. What a real step adds is one fixed overhead; or the step's seconds are those that were measured, and
the roofline only divides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from wager.arch import Attention, Compressed, DeltaNet, Experts, Format, Gqa, Mamba2, Mla, ModelSpec, Quoted, Stream
from wager.economics.surface import LatencySurface
from wager.errors import UsageError
from wager.planner.devices import Device
from wager.planner.routing import UNIFORM, ExpertRouting, experts_on_fullest_rank

COLLECTIVE_LATENCY = 8e-6
"""Seconds of a collective of few bytes inside a node. NCCL's tuning table (src/graph/tuning.cc) counts 6.6 to 6.8 µs
for a low-latency collective and 0.6 µs for each of its steps over NVLink; the all-reduces that serving engines use for
small messages take two steps. Between nodes it is more (2.7 to 5 µs a step in the same table)."""

_RELATIVE_CHANGE = 1e-6
"""Step of the finite difference behind a marginal cost."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """`tp` devices that split every matrix and cache; `ep` ranks that split the experts, the `tp` devices of a group
    being `tp` of these ranks. ep / tp groups then decode side by side, each with a batch of its own and a full copy of
    everything but the routed experts: data-parallel attention, as vLLM's --tensor-parallel-size T --data-parallel-size
    D --enable-expert-parallel (tp = T, ep = T D) and SGLang's --tp N --dp D --enable-dp-attention with --ep N (tp = N /
    D, ep = N). `latency` is the seconds of a collective of few bytes. UsageError if a link's speed is not known.
    """

    device: Device
    tp: int = 1
    ep: int = 1
    latency: float = COLLECTIVE_LATENCY

    def __post_init__(self) -> None:
        device = self.device
        for name, size in (("tp", self.tp), ("ep", self.ep)):
            if size < 1:
                raise UsageError(f"{name} = {size} is out of range.", "It is the number of devices: 1 or more.")
        if self.ep > 1 and self.ep % self.tp:
            raise UsageError(
                f"tp = {self.tp} does not divide ep = {self.ep}.",
                "The experts are spread over all ep devices, which form ep / tp groups of tp.",
            )
        if self.tp > 1 and device.intra is None:
            raise self._unknown_link("between devices of a node")
        if self.ep > 1 and (device.intra is None or device.node is None):
            raise self._unknown_link("between devices of a node, or how many a node has")
        if self.tp > 1 and device.node is not None and self.tp > device.node:
            raise UsageError(f"tp = {self.tp} is more than the {device.node} devices of a node.", "Use a smaller tp.")
        if self.ep > 1 and device.node is not None and self.ep > device.node and device.inter is None:
            raise self._unknown_link("between nodes")

    def _unknown_link(self, where: str) -> UsageError:
        return UsageError(
            f"The link speed of {self.device.name} {where} is not known.",
            "Describe the machine in a JSON file with its links.",
        )

    @property
    def devices(self) -> int:
        """All of them."""
        return max(self.tp, self.ep)

    @property
    def groups(self) -> int:
        """Batches that are decoded side by side."""
        return self.devices // self.tp

    def kept_share(self, shards: int) -> float:
        """Share of a cache of that many heads that the fullest device keeps: ceil(heads / tp) of them, so heads that
        are fewer than the devices are kept by several."""
        return -(-shards // self.tp) / shards

    @property
    def dispatch_seconds_per_byte(self) -> float:
        """Seconds of a dispatched byte whose expert may be anywhere: the slower link, since links work side by side.

        max((f_on - f_local) / intra, f_off / inter), f_local = 1/w, f_on = min(1, M/w), f_off = max(0, 1 - M/w) for w
        ranks in nodes of M.
        """
        near = 0.0 if self.device.node is None else min(1.0, self.device.node / self.ep)
        local, far = min(1.0, 1 / self.ep), 1.0 - near
        inside = (near - local) / self.device.intra if self.device.intra else 0.0
        return max(inside, far / self.device.inter if far > 0 and self.device.inter else 0.0)


@dataclass(frozen=True, slots=True)
class StepPart:
    """One component of a step. `bound` is what it waits for: memory, compute, both (layers differ), link, fixed."""

    seconds: float
    bytes: float = 0.0
    flops: float = 0.0
    bound: str = "memory"

    @property
    def intensity(self) -> float:
        """FLOPs per byte; 0 without bytes."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step, and of its parts."""

    seconds: float
    parts: Mapping[str, StepPart]

    @property
    def binding(self) -> str:
        """The part that takes most of the step."""
        return max(self.parts, key=lambda name: self.parts[name].seconds)


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step of `model` on the devices of `cluster`, and the bytes that a device keeps.

    Under expert parallelism every group has a batch of its own like the given one, and a step waits for the rank with
    most experts to read; `balanced` counts the mean instead, as if experts were placed by their load. `overhead` are
    seconds that every step takes beside its roofline. `fusion` are elements of a further matrix that a draft head has:
    it brings the target's hidden states to the head's width. With `measured` steps take the measured seconds, and their
    division into parts is the roofline's.

    UsageError if the model cannot be split so: query heads that tp does not divide, no experts for ep, or fewer
    experts than ranks.
    """

    model: ModelSpec
    cluster: Cluster
    routing: ExpertRouting = UNIFORM
    overhead: float = 0.0
    balanced: bool = False
    fusion: int = 0
    measured: LatencySurface | None = None

    def __post_init__(self) -> None:
        model, tp, ep = self.model, self.cluster.tp, self.cluster.ep
        for layer in model.layers:
            for heads in map(query_heads, layer.mixers):
                if heads % tp:
                    raise UsageError(
                        f"tp = {tp} does not divide the {heads} attention heads of {model.name}.",
                        f"Use a divisor of {heads}.",
                    )
            if ep > 1 and isinstance(layer.ffn, Experts) and layer.ffn.count < ep:
                raise UsageError(
                    f"ep = {ep} is more than the {layer.ffn.count} experts of {model.name}.",
                    "Copies of experts are not modelled; use a smaller ep.",
                )
        if ep > 1 and not model.sparse:
            raise UsageError(f"{model.name} has no experts to spread over {ep} ranks.", "Use tensor parallelism (tp).")

    @property
    def device(self) -> Device:
        return self.cluster.device

    @cached_property
    def _matrices(self) -> Mapping[str, float]:
        """Elements on a device of the matrices that every row goes through, by part."""
        elements = {**self.model.elements(), "fusion": self.fusion}
        parts = ("fusion", "projections", "compressors", "ffn", "router")
        return {part: elements[part] / self.cluster.tp for part in parts if elements.get(part)}

    # ---- bytes of a device ------------------------------------------------------------------------------------------

    def weight_bytes(self, model: ModelSpec | None = None) -> float:
        """Weights of a `model` (the own one) on a device: matrices divide among a group, routed experts among all."""
        model = model or self.model
        experts = model.elements().get("experts", 0) * model.precision.experts.bytes
        return (model.resident_bytes - experts) / self.cluster.tp + experts / self.cluster.devices

    def cache_bytes(self, context: float) -> float:
        """Cache of a sequence on a device: heads are divided, a latent that all heads share is not."""
        total, precision = 0.0, self.model.precision
        for layer in self.model.layers:
            for mixer in layer.mixers:
                shards = min(stream.shards for stream in mixer.streams(context, 1, precision))
                total += layer.count * (mixer.kv_bytes(context, precision) * self.cluster.kept_share(shards))
        return total

    # ---- seconds of a step ------------------------------------------------------------------------------------------

    def seconds(self, context: float, rows: float, *, batch: float = 1) -> float:
        """Seconds of the step."""
        return self._seconds(context, rows, batch)

    @cached_property
    def _seconds(self) -> Callable[[float, float, float], float]:
        """Plans ask for the same steps many times; measured ones may change."""

        def seconds(context: float, rows: float, batch: float) -> float:
            return self.step(context, rows, batch=batch).seconds

        return lru_cache(maxsize=4096)(seconds) if self.measured is None else seconds

    def step(self, context: float, rows: float, *, batch: float = 1, distinct_experts: float | None = None) -> StepCost:
        """Seconds by part of a step of `batch` sequences, each of that context with `rows` rows; none without rows.
        `distinct_experts` replaces the expected number per layer by a measured one."""
        all_rows = rows * batch
        if all_rows <= 0:
            return StepCost(0.0, {})
        device, parts = self.device, dict[str, StepPart]()
        for stream, times in self._streams(context, rows, batch, distinct_experts):
            # each stream waits for memory or compute on its own, since kernels run one after another
            read, computed = stream.bytes / device.bandwidth, stream.flops / device.peak(stream.compute)
            bound = "compute" if computed > read else "memory"
            before = parts.get(stream.part, StepPart(0.0, bound=bound))
            parts[stream.part] = StepPart(
                before.seconds + times * device.seconds(stream.bytes, stream.flops, compute=stream.compute),
                before.bytes + times * stream.bytes,
                before.flops + times * stream.flops,
                bound if before.bound == bound else "both",
            )
        parts |= self._traffic(all_rows)
        if self.overhead:
            parts["overhead"] = StepPart(self.overhead, bound="fixed")
        seconds = sum(part.seconds for part in parts.values())
        if self.measured is None:
            return StepCost(seconds, parts)
        measured = self.measured.seconds(all_rows, batch, context * batch)
        scale = measured / seconds
        return StepCost(measured, {name: replace(part, seconds=part.seconds * scale) for name, part in parts.items()})

    def prefill(self, tokens: float) -> StepCost:
        """Computing a prompt of that many positions of one request in one step, of which each attends to those before
        it; the head is computed for the last one alone. Latent attention projects keys and values up to every head
        then, 2 (d_nope + d_rope + d_v) FLOPs per pair and head, which is cheaper than the absorbed form of decoding."""
        if tokens <= 0:
            return StepCost(0.0, {})
        model, one = self.model, self.step(0, 1)
        layers = tuple(replace(layer, attention=_of_prompts(layer.attention, model)) for layer in model.layers)
        cost = replace(self, model=replace(model, layers=layers, head=self.measured is not None))
        step = cost.step(tokens / 2, tokens)
        parts = {**step.parts, "head": one.parts["head"]} if model.head and self.measured is None else step.parts
        return StepCost(sum(part.seconds for part in parts.values()), parts)

    def marginal_cost(self, context: float, *, batch: float) -> dict[str, float]:
        """Relative marginal cost of a row by part: d log seconds / d log rows, from one row of each sequence on. 0
        where another row is free, 1 where it costs as much as an average one. The step's own is under "step"."""
        base = self.step(context, 1, batch=batch)
        grown = self.step(context, 1 + _RELATIVE_CHANGE, batch=batch)
        by_part = {
            part: (grown.parts[part].seconds / cost.seconds - 1) / _RELATIVE_CHANGE if cost.seconds else 0.0
            for part, cost in base.parts.items()
        }
        return {"step": (grown.seconds / base.seconds - 1) / _RELATIVE_CHANGE, **by_part}

    # ---- the parts --------------------------------------------------------------------------------------------------

    def _streams(
        self, context: float, rows: float, batch: float, distinct_experts: float | None
    ) -> Iterator[tuple[Stream, float]]:
        """What a device reads and computes, and how often."""
        model, cluster = self.model, self.cluster
        precision, all_rows = model.precision, rows * batch

        def product(part: str, size: float, stored: Format) -> Stream:
            return Stream(part, 2 * size * all_rows, size * stored.bytes, stored.compute)

        for part, size in self._matrices.items():
            yield product(part, size, precision.format_of(part)), 1
        for layer in model.layers:
            for stream in layer.attention.streams(context, rows, precision):
                read = stream.bytes / cluster.tp + stream.cached * cluster.kept_share(stream.shards)
                yield replace(stream, flops=stream.flops / cluster.tp, bytes=read), layer.count * batch
        for layer in model.layers:
            if not isinstance(layer.ffn, Experts):
                continue
            experts, stored = self._routed(layer.ffn, rows, batch, distinct_experts), precision.experts
            shared = layer.ffn.shared_weights(model.hidden) / cluster.tp
            beside = product("shared experts", shared, precision.shared)
            if precision.shared == stored:  # one stream
                experts = replace(experts, flops=experts.flops + beside.flops, bytes=experts.bytes + beside.bytes)
            yield experts, layer.count
            if shared and precision.shared != stored:
                yield beside, layer.count
        if model.head:
            yield product("head", model.head_elements / cluster.tp, precision.head), 1

    def _routed(self, ffn: Experts, rows: float, batch: float, distinct: float | None) -> Stream:
        """Routed experts of a layer: read if a token of any rank picks them; each rank holds its share of them."""
        cluster, stored, expert = self.cluster, self.model.precision.experts, ffn.expert(self.model.hidden)
        if distinct is None:
            tokens = cluster.groups * (batch * self.routing.unrelated_tokens(rows))
            distinct = self.routing.distinct_experts(ffn.count, ffn.active, tokens)
        if cluster.ep > 1 and not self.balanced:
            held = -(-ffn.count // cluster.ep)
            read = experts_on_fullest_rank(held, distinct / ffn.count, cluster.ep) * expert
        else:
            read = distinct * expert / cluster.devices
        flops = 2 * ffn.active * expert * (rows * batch) / cluster.tp
        return Stream("experts", flops, read * stored.bytes, stored.compute)

    def _traffic(self, rows: float) -> dict[str, StepPart]:
        """What a device sends, by kind, in a step of `rows` rows of its group.

        Tensor parallelism: two all-reduces a layer, each a ring, 2 (n - 1) / n of the activations through every link.
        Expert parallelism: a layer of experts sends each row to its k experts, in the bytes of `dispatch`, and back, in
        those of `combine`; the devices of a group dispatch a share of the rows each, so that there the two all-reduces
        become a reduce-scatter and an all-gather.
        """
        model, cluster = self.model, self.cluster
        parts: dict[str, StepPart] = {}
        spread = [(layer.count, layer.ffn) for layer in model.layers if isinstance(layer.ffn, Experts)]
        if cluster.ep == 1:
            spread = []
        dispatching, messages = sum(count for count, _ in spread), 0
        if cluster.tp > 1 and self.device.intra is not None:
            reduces = sum(layer.count * layer.sublayers for layer in model.layers) - dispatching
            ring = 2 * (cluster.tp - 1) / cluster.tp
            sent = reduces * rows * model.hidden * model.precision.activations * ring
            parts["all-reduce"] = StepPart(sent / self.device.intra, sent, bound="link")
            messages += reduces + dispatching
        if spread:
            copies = sum(count * ffn.active for count, ffn in spread)
            there_and_back = model.precision.dispatch + model.precision.combine
            sent = rows / cluster.tp * copies * model.hidden * there_and_back
            parts["dispatch"] = StepPart(sent * cluster.dispatch_seconds_per_byte, sent, bound="link")
            messages += 2 * dispatching
        if messages and cluster.latency:
            parts["link latency"] = StepPart(messages * cluster.latency, bound="link")
        return parts


def _of_prompts(attention: Attention, model: ModelSpec) -> Attention:
    if not isinstance(attention, Mla):
        return attention
    flops = 2.0 * attention.heads * (attention.nope + attention.rope + attention.value)
    cached = attention.cache_width * model.precision.cache
    query = attention.query_width * model.precision.query
    return Quoted(attention.weights(model.hidden), flops, cached, query)


def query_heads(attention: Attention) -> int:
    """Heads that tensor parallelism divides; 0 where no number is known."""
    if isinstance(attention, Gqa | Mla | Mamba2 | Compressed):
        return attention.heads
    return attention.value_heads if isinstance(attention, DeltaNet) else 0
