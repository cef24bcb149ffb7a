"""The drafter's own roofline: what guessing costs, by the drafter's shape. Seconds, never a share of the verifier's,
except where a published chart did it that way.

Knows shapes and a device, no drafter of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from wager.arch import Attention, DeltaNet, Dense, Experts, Gqa, ModelSpec, Precision
from wager.economics.costmodel.experts import distinct, with_replacement
from wager.economics.costmodel.links import Cluster
from wager.economics.costmodel.roofline import CostModel, SequenceLoad


class DraftCost(Protocol):
    """What drafting costs. `resident_bytes` are the drafter's own weights, the target's shared head left out;
    `most` is the deepest draft it can make (None: any)."""

    @property
    def name(self) -> str: ...

    @property
    def resident_bytes(self) -> float: ...

    @property
    def most(self) -> int | None: ...

    def seconds(self, requests: float, depth: int, *, context: float) -> float:
        """Drafting `depth` guesses for each of `requests` sequences of that context."""

    def kv_bytes(self, context: float) -> float:
        """Bytes of cache the drafter keeps for a sequence of that context."""


@dataclass(frozen=True, slots=True)
class Free:
    """Looks guesses up: next to nothing, on paper nothing."""

    name: str = "free"
    resident_bytes: float = 0.0
    most: int | None = None

    def seconds(self, requests: float, depth: int, *, context: float) -> float:
        return 0.0

    def kv_bytes(self, context: float) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Fraction:
    """Every guess costs `share` of a plain step of the target at the same batch: the constant of published charts,
    which forgets that a drafter has a roofline of its own."""

    cost: CostModel
    share: float
    name: str = "fraction"
    resident_bytes: float = 0.0
    most: int | None = None

    def seconds(self, requests: float, depth: int, *, context: float) -> float:
        return self.share * depth * self.cost.seconds([SequenceLoad(context, 1, requests)]) if depth else 0.0

    def kv_bytes(self, context: float) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Every guess costs the same known seconds, whatever the batch."""

    per_guess: float
    name: str = "measured"
    resident_bytes: float = 0.0
    most: int | None = None

    def seconds(self, requests: float, depth: int, *, context: float) -> float:
        return self.per_guess * depth

    def kv_bytes(self, context: float) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Passes:
    """Weights that a draft head streams: `dense` elements read in every pass (the target's head among them), and the
    experts of its layer, if it has any.

    Depth `width` or less costs one pass over `width` positions a sequence (a block drafter), or, with `width` None, one
    pass over one position for every guess (an autoregressive one).

    `lump` "streams" bounds dense weights and experts each on its own, as in the target's bill. "whole" takes one
    maximum over all of them and lets tokens pick an expert twice, as published drafter curves do; on a saturated pass
    it is up to a third cheaper. Its matrices divide over a cluster as the target's do; its few messages are left out.
    """

    name: str
    cluster: Cluster
    precision: Precision
    dense: int
    own: int
    attention: Attention
    layers: int = 1
    hidden: int = 0
    experts: Experts | None = None
    width: int | None = None
    lump: Literal["streams", "whole"] = "streams"

    @property
    def most(self) -> int | None:
        return None if self.width is None else self.width - 1

    @property
    def resident_bytes(self) -> float:
        routed = self.experts.count * self.experts.expert(self.hidden) if self.experts else 0
        shared = self.experts.shared_weights(self.hidden) if self.experts else 0
        return self.own * self.precision.weights.bytes + (routed + shared) * self.precision.experts.bytes

    def kv_bytes(self, context: float) -> float:
        return self.layers * self.attention.kv_bytes(context, self.precision)

    def seconds(self, requests: float, depth: int, *, context: float) -> float:
        del context  # the few layers of a draft head read little cache
        if depth <= 0 or requests <= 0:
            return 0.0
        return depth * self._pass(requests) if self.width is None else self._pass(requests * self.width)

    def _pass(self, tokens: float) -> float:
        """Seconds of one pass: elements multiplied per token and bytes read, of dense weights and of experts."""
        device, tp, ep = self.cluster.device, self.cluster.tp, self.cluster.ep
        weights, stored = self.precision.weights, self.precision.experts
        peak = device.peak(weights.compute)
        parts = [(float(self.dense), self.dense * weights.bytes, peak)]
        if self.experts:
            hit = with_replacement if self.lump == "whole" else distinct
            expert, shared = self.experts.expert(self.hidden), self.experts.shared_weights(self.hidden)
            read = hit(self.experts.count, self.experts.active, tokens * ep) * expert / ep + shared
            parts.append((self.experts.active * expert + shared, read * stored.bytes, device.peak(stored.compute)))
        if self.lump == "whole":
            parts = [(sum(used for used, _, _ in parts), sum(read for _, read, _ in parts), peak)]
        return sum(max(2 * used * tokens / top, read / device.bandwidth) for used, read, top in parts) / tp


def mtp(model: ModelSpec, cluster: Cluster, *, lump: Literal["streams", "whole"] = "streams") -> Passes:
    """The multi-token-prediction module of a target: one layer like the target's last, a fusion of 2 d into d, and the
    target's own head, in the target's numbers. Guesses cost a pass each."""
    layers = [layer for layer in model.layers if not isinstance(layer.attention, DeltaNet)] or list(model.layers)
    layer = layers[-1]
    own = layer.attention.weights(model.hidden) + 2 * model.hidden**2
    if isinstance(layer.ffn, Dense):
        own += layer.ffn.weights(model.hidden)
    experts = layer.ffn if isinstance(layer.ffn, Experts) else None
    return Passes("mtp", cluster, model.precision, own + model.vocab * model.hidden, own, layer.attention,
                  hidden=model.hidden, experts=experts, lump=lump)  # fmt: skip


def block(
    model: ModelSpec, cluster: Cluster, *, width: int = 16, lump: Literal["streams", "whole"] = "streams"
) -> Passes:
    """A block drafter of DFlash's proportions: 8 dense layers of the target's hidden size d (2 d of query width, one
    key-value head per 8, feed-forward 3 d), a fusion of 5 d into d, the target's head; `width` positions a pass."""
    heads = max(8, 2 * model.hidden // 128)
    attention = Gqa(heads, heads // 8, 128)
    own = 8 * (attention.weights(model.hidden) + 3 * model.hidden * 3 * model.hidden) + 5 * model.hidden**2
    return Passes("block", cluster, model.precision, own + model.vocab * model.hidden, own, attention, 8,
                  width=width, lump=lump)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Small:
    """A smaller model of the same vocabulary: a pass of its own for every guess, priced like any model's."""

    cost: CostModel
    most: int | None = None

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
