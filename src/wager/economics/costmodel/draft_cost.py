"""What drafting costs, by the drafter's shape: seconds by its own roofline, or a cost that the user gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from wager.arch import Attention, DeltaNet, Dense, Experts, Format, Gqa, ModelSpec, Precision
from wager.economics.costmodel.experts import distinct_experts
from wager.economics.costmodel.links import Cluster
from wager.economics.costmodel.roofline import CostModel, SequenceLoad


class DraftCost(Protocol):
    """What drafting costs. `resident_bytes` are the drafter's own weights, the target's shared head left out;
    `max_depth` is the deepest draft it can make (None: any)."""

    @property
    def name(self) -> str: ...

    @property
    def resident_bytes(self) -> float: ...

    @property
    def max_depth(self) -> int | None: ...

    def seconds(self, requests: float, depth: int, *, context: float) -> float:
        """Drafting `depth` tokens for each of `requests` sequences of that context."""

    def kv_bytes(self, context: float) -> float:
        """Bytes of cache the drafter keeps for a sequence of that context."""


@dataclass(frozen=True, slots=True)
class FreeDraftCost:
    """Drafts by lookup: its time is taken as 0."""

    name: str = "free"
    resident_bytes: float = 0.0
    max_depth: int | None = None

    def seconds(self, requests: float, depth: int, *, context: float) -> float:
        return 0.0

    def kv_bytes(self, context: float) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class FractionalDraftCost:
    """Every draft token costs `share` of a plain step of the target at the same batch: the constant of published
    charts, which leaves out that a drafter has a roofline of its own."""

    cost: CostModel
    share: float
    name: str = "fraction"
    resident_bytes: float = 0.0
    max_depth: int | None = None

    def seconds(self, requests: float, depth: int, *, context: float) -> float:
        return self.share * depth * self.cost.seconds([SequenceLoad(context, 1, requests)]) if depth else 0.0

    def kv_bytes(self, context: float) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class ConstantDraftCost:
    """Every draft token costs the same known seconds, whatever the batch."""

    seconds_per_token: float
    name: str = "measured"
    resident_bytes: float = 0.0
    max_depth: int | None = None

    def seconds(self, requests: float, depth: int, *, context: float) -> float:
        return self.seconds_per_token * depth

    def kv_bytes(self, context: float) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class DraftHeadCost:
    """A draft head on the target: `dense_elements` are weights read in every pass (the target's LM head among them),
    `own_elements` those of them that are the drafter's own; `experts` are those of its layer, if it has any.

    With `width` None a pass over one position is made for every draft token (an autoregressive head); otherwise one
    pass over `width` positions per sequence makes up to width - 1 draft tokens (a block drafter).

    Dense weights and experts are bounded each on its own, as the target's streams are. (Published drafter curves take
    one maximum over all of them: simulation/published_latency.py. On a saturated pass that is up to a third cheaper.)
    Matrices divide over a cluster as the target's do; the drafter's few messages are left out.
    """

    name: str
    cluster: Cluster
    precision: Precision
    dense_elements: int
    own_elements: int
    attention: Attention
    layers: int = 1
    hidden: int = 0
    experts: Experts | None = None
    width: int | None = None

    @property
    def max_depth(self) -> int | None:
        return None if self.width is None else self.width - 1

    @property
    def resident_bytes(self) -> float:
        routed = self.experts.count * self.experts.expert(self.hidden) if self.experts else 0
        shared = self.experts.shared_weights(self.hidden) if self.experts else 0
        return self.own_elements * self.precision.weights.bytes + (routed + shared) * self.precision.experts.bytes

    def kv_bytes(self, context: float) -> float:
        return self.layers * self.attention.kv_bytes(context, self.precision)

    def seconds(self, requests: float, depth: int, *, context: float) -> float:
        del context  # the few layers of a draft head read little cache
        if depth <= 0 or requests <= 0:
            return 0.0
        if self.width is None:
            return depth * self._pass_seconds(requests)
        return self._pass_seconds(requests * self.width)

    def _pass_seconds(self, tokens: float) -> float:
        """Seconds of one pass over that many positions."""
        own = self._dense_seconds(self.own_elements, self.precision.weights, tokens=tokens)
        head = self._dense_seconds(self.dense_elements - self.own_elements, self.precision.head, tokens=tokens)
        return (own + head + self._expert_seconds(tokens)) / self.cluster.tp

    def _dense_seconds(self, elements: int, stored: Format, *, tokens: float) -> float:
        device = self.cluster.device
        return max(2 * elements * tokens / device.peak(stored.compute), elements * stored.bytes / device.bandwidth)

    def _expert_seconds(self, tokens: float) -> float:
        if self.experts is None:
            return 0.0
        device, stored, ranks = self.cluster.device, self.precision.experts, self.cluster.ep
        expert, shared = self.experts.expert(self.hidden), self.experts.shared_weights(self.hidden)
        read = distinct_experts(self.experts.count, self.experts.active, tokens * ranks) * expert / ranks + shared
        multiplied = self.experts.active * expert + shared
        return max(2 * multiplied * tokens / device.peak(stored.compute), read * stored.bytes / device.bandwidth)


def mtp_cost(model: ModelSpec, cluster: Cluster) -> DraftHeadCost:
    """The multi-token-prediction module of a target: one layer like the target's last, a fusion of 2 d into d, and the
    target's own head, in the target's number formats. Every draft token costs a pass."""
    layers = [layer for layer in model.layers if not isinstance(layer.attention, DeltaNet)] or list(model.layers)
    layer = layers[-1]
    own = layer.attention.weights(model.hidden) + 2 * model.hidden**2
    if isinstance(layer.ffn, Dense):
        own += layer.ffn.weights(model.hidden)
    experts = layer.ffn if isinstance(layer.ffn, Experts) else None
    return DraftHeadCost("mtp", cluster, model.precision, own + model.vocab * model.hidden, own, layer.attention,
                         hidden=model.hidden, experts=experts)  # fmt: skip


def block_drafter_cost(model: ModelSpec, cluster: Cluster, *, width: int = 16) -> DraftHeadCost:
    """A block drafter of DFlash's proportions: 8 dense layers of the target's hidden size d (2 d of query width, one
    key-value head per 8, feed-forward 3 d), a fusion of 5 d into d, the target's head; `width` positions a pass."""
    heads = max(8, 2 * model.hidden // 128)
    attention = Gqa(heads, heads // 8, 128)
    own = 8 * (attention.weights(model.hidden) + 3 * model.hidden * 3 * model.hidden) + 5 * model.hidden**2
    return DraftHeadCost("block", cluster, model.precision, own + model.vocab * model.hidden, own, attention, 8,
                         width=width)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DraftModelCost:
    """A smaller model of the same vocabulary: every draft token costs a pass of its own, by its cost model."""

    cost: CostModel
    max_depth: int | None = None

    @property
    def name(self) -> str:
        return f"model:{self.cost.model.name}"

    @property
    def resident_bytes(self) -> float:
        return self.cost.model.resident_bytes

    def kv_bytes(self, context: float) -> float:
        return self.cost.model.kv_bytes(context)

    def seconds(self, requests: float, depth: int, *, context: float) -> float:
        return depth * self.cost.seconds([SequenceLoad(context, 1, requests)]) if depth and requests else 0.0
