"""What it costs to spread a step over devices: all-reduces of tensor parallelism, dispatch of expert parallelism.

Bytes over published link speeds, and a latency for every collective; a link whose speed is not published is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wager.arch import Attention, Compressed, DeltaNet, Experts, Gqa, Mla, ModelSpec
from wager.errors import UsageError
from wager.planner.devices import Device

COLLECTIVE_LATENCY = 8e-6
"""Seconds of a collective of few bytes inside a node. NCCL's tuning table (src/graph/tuning.cc) counts 6.6 to 6.8 µs
for a low-latency collective and 0.6 µs for each of its steps over NVLink; the all-reduces that serving engines use for
small messages take two steps. Between nodes it is more (2.7 to 5 µs a step in the same table)."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes that a device sends in a step, and the seconds they take."""

    bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """`tp` devices that split every matrix and cache; `ep` ranks that split the experts, the `tp` devices of a group
    being `tp` of these ranks. ep / tp groups then decode side by side, each with a batch of its own and a full copy of
    everything but the routed experts: data-parallel attention, as vLLM's --tensor-parallel-size T --data-parallel-size
    D --enable-expert-parallel (tp = T, ep = T D) and SGLang's --tp N --dp D --enable-dp-attention with --ep N (tp = N /
    D, ep = N). `latency` is the seconds of a collective of few bytes.
    """

    device: Device
    tp: int = 1
    ep: int = 1
    latency: float = COLLECTIVE_LATENCY

    def __post_init__(self) -> None:
        for name, size in (("tp", self.tp), ("ep", self.ep)):
            if size < 1:
                raise UsageError(f"{name} = {size} is out of range.", "It is the number of devices: 1 or more.")
        if not 0 <= self.latency < float("inf"):
            raise UsageError(f"A link latency of {self.latency} seconds is out of range.", "It is zero or more.")
        if self.ep > 1 and self.ep % self.tp:
            raise UsageError(
                f"tp = {self.tp} does not divide ep = {self.ep}.",
                "The experts are spread over all ep devices, which form ep / tp groups of tp.",
            )
        self._check_links()

    def _check_links(self) -> None:
        device = self.device
        if self.tp > 1 and device.intra is None:
            raise self._unknown("between devices of a node")
        if self.ep > 1 and (device.intra is None or device.node is None):
            raise self._unknown("between devices of a node, or how many a node has")
        if self.tp > 1 and device.node is not None and self.tp > device.node:
            raise UsageError(f"tp = {self.tp} is more than the {device.node} devices of a node.", "Use a smaller tp.")
        if self.ep > 1 and device.node is not None and self.ep > device.node and device.inter is None:
            raise self._unknown("between nodes")

    def _unknown(self, where: str) -> UsageError:
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

    def check(self, model: ModelSpec) -> None:
        """UsageError if the model cannot be split so: query heads that `tp` does not divide, no experts for `ep`, or
        fewer experts than ranks."""
        for layer in model.layers:
            heads = query_heads(layer.attention)
            if heads % self.tp:
                raise UsageError(
                    f"tp = {self.tp} does not divide the {heads} attention heads of {model.name}.",
                    f"Use a divisor of {heads}.",
                )
            if self.ep > 1 and isinstance(layer.ffn, Experts) and layer.ffn.count < self.ep:
                raise UsageError(
                    f"ep = {self.ep} is more than the {layer.ffn.count} experts of {model.name}.",
                    "Copies of experts are not modelled; use a smaller ep.",
                )
        if self.ep > 1 and not model.sparse:
            raise UsageError(
                f"{model.name} has no experts to spread over {self.ep} ranks.", "Use tensor parallelism (tp)."
            )

    # ---- bytes of a device ------------------------------------------------------------------------------------------

    def kept_share(self, shards: int) -> float:
        """Share of a cache of that many heads that the fullest device keeps: ceil(heads / tp) of them, so heads that
        are fewer than the devices are kept by several."""
        return -(-shards // self.tp) / shards

    def weight_bytes(self, model: ModelSpec) -> float:
        """Of one device: matrices divide among the devices of a group, routed experts among all."""
        experts = model.elements().get("experts", 0) * model.precision.experts.bytes
        return (model.resident_bytes - experts) / self.tp + experts / self.devices

    def cache_bytes(self, model: ModelSpec, context: float) -> float:
        """Of one sequence on one device: heads are divided, a latent that all heads share is not."""
        total = 0.0
        for layer in model.layers:
            shards = min(stream.shards for stream in layer.attention.streams(context, 1, model.precision))
            kept = layer.attention.kv_bytes(context, model.precision) * self.kept_share(shards)
            total += layer.count * kept
        return total

    # ---- seconds of a step ------------------------------------------------------------------------------------------

    def traffic(self, model: ModelSpec, rows: float) -> Mapping[str, Transfer]:
        """What a device sends, by kind, in a step of `rows` rows of its group.

        Tensor parallelism: two all-reduces a layer, each a ring, 2 (n - 1) / n of the activations through every link.
        Expert parallelism: a layer of experts sends each row to its k experts and back; the devices of a group
        dispatch a share of the rows each, so that there the two all-reduces become a reduce-scatter and an all-gather.
        """
        transfers: dict[str, Transfer] = {}
        spread = [(layer.count, layer.ffn) for layer in model.layers if isinstance(layer.ffn, Experts)]
        if self.ep == 1:
            spread = []
        dispatching, messages = sum(count for count, _ in spread), 0
        if self.tp > 1 and self.device.intra is not None:
            reduces = 2 * model.num_layers - dispatching
            ring = 2 * (self.tp - 1) / self.tp
            sent = reduces * rows * model.hidden * model.precision.activations * ring
            transfers["all-reduce"] = Transfer(sent, sent / self.device.intra)
            messages += 2 * model.num_layers
        if spread:
            copies = sum(count * ffn.active for count, ffn in spread)
            sent = rows / self.tp * 2 * copies * model.hidden * model.precision.dispatch
            transfers["dispatch"] = Transfer(sent, sent * self._seconds_per_byte())
            messages += 2 * dispatching
        if messages and self.latency:
            transfers["link latency"] = Transfer(0.0, messages * self.latency)
        return transfers

    def _seconds_per_byte(self) -> float:
        """Of a dispatched byte whose expert may be anywhere: the slower of the links, which work side by side.

        max((f_on - f_local) / intra, f_off / inter), f_local = 1/w, f_on = min(1, M/w), f_off = max(0, 1 - M/w) for w
        ranks in nodes of M.
        """
        near = 0.0 if self.device.node is None else min(1.0, self.device.node / self.ep)
        local, far = min(1.0, 1 / self.ep), 1.0 - near
        inside = (near - local) / self.device.intra if self.device.intra else 0.0
        return max(inside, far / self.device.inter if far > 0 and self.device.inter else 0.0)


def query_heads(attention: Attention) -> int:
    """Heads that tensor parallelism divides; 0 where no number is known."""
    if isinstance(attention, Gqa | Mla | Compressed):
        return attention.heads
    return attention.value_heads if isinstance(attention, DeltaNet) else 0


@dataclass(frozen=True, slots=True)
class DrafterLink:
    """The link between a drafter's device and the target's: bytes/s per direction and seconds per message."""

    bandwidth: float
    latency: float = COLLECTIVE_LATENCY

    def seconds(self, payload: float, *, messages: int) -> float:
        """Of that many bytes in that many messages, one after another."""
        return payload / self.bandwidth + messages * self.latency
