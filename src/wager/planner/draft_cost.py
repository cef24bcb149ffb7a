"""What drafting costs, by the drafter's shape: seconds by its own roofline, or a cost that the user gives."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from wager.arch import DeltaNet, Dense, Gqa, Layer, ModelSpec, find_format
from wager.errors import UsageError
from wager.planner.devices import Device
from wager.planner.experts import ExpertRouting
from wager.planner.links import Cluster
from wager.planner.roofline import CostModel, SequenceLoad

_UNIFORM = ExpertRouting()


class DraftCost(Protocol):
    """What drafting costs. What a class does not say of itself: no limit, no memory, on the target's devices."""

    @property
    def name(self) -> str: ...

    @property
    def max_depth(self) -> int | None:
        """The deepest draft it can make; None: any."""
        return None

    @property
    def max_context(self) -> int | None:
        """Positions it was made for; None: as many as the target."""
        return None

    @property
    def resident_bytes(self) -> float:
        """Its own weights, a head shared with the target left out."""
        return 0.0

    @property
    def device_bytes(self) -> float:
        """Of those, bytes on one of the devices that it runs on."""
        return 0.0

    @property
    def own_device(self) -> Device | None:
        """What it runs on; None: the target's devices."""
        return None

    def seconds(self, requests: float, depth: int, *, context: float) -> float:
        """Drafting `depth` tokens for each of `requests` sequences of that context."""

    def kv_bytes(self, context: float) -> float:
        """Bytes of cache that it keeps for a sequence of that context, on one of the devices that it runs on."""
        return 0.0

    def hidden_bytes(self, depth: int) -> float:
        """Bytes of the target's hidden states that it needs of a sequence after a round of that depth."""
        return 0.0


@dataclass(frozen=True, slots=True)
class FreeDraftCost(DraftCost):
    """Drafts by lookup: its time is taken as 0."""

    name: str = "free"

    def seconds(self, requests: float, depth: int, *, context: float) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class FractionalDraftCost(DraftCost):
    """Every draft token costs `share` of a plain step of the target at the same batch: the constant of published
    charts, which leaves out that a drafter has a roofline of its own."""

    cost: CostModel
    share: float
    name: str = "fraction"

    def seconds(self, requests: float, depth: int, *, context: float) -> float:
        return self.share * depth * self.cost.seconds([SequenceLoad(context, 1, requests)]) if depth else 0.0


@dataclass(frozen=True, slots=True)
class ConstantDraftCost(DraftCost):
    """Every draft token costs the same known seconds, whatever the batch."""

    seconds_per_token: float
    name: str = "measured"

    def seconds(self, requests: float, depth: int, *, context: float) -> float:
        return self.seconds_per_token * depth


@dataclass(frozen=True, slots=True)
class DraftHeadCost(DraftCost):
    """A draft head on the target: `cost` is that of its pass, the head over the vocabulary among its matrices.

    With `max_depth` None a pass over one position is made for every draft token (an autoregressive head); otherwise one
    pass over `rows` positions of a sequence makes up to `max_depth` of them. Its attention reads the cache that its own
    layers keep of every sequence. `taps` are elements of hidden state that it gets of a row of the target;
    `shares_head`: the head is the target's and is in memory already.

    Dense weights and experts are bounded each on its own, as the target's streams are. (Published drafter curves take
    one maximum over all of them: simulation/published_latency.py. On a saturated pass that is up to a third cheaper.)
    Left out: that an autoregressive head's first pass also takes in the positions accepted in the round before, which
    costs time only where its matrices are compute-bound.
    """

    name: str = field()  # required, although the base has a property of that name
    cost: CostModel = field()
    rows: int = 1
    max_depth: int | None = None
    taps: int = 0
    shares_head: bool = True

    @property
    def _stored(self) -> ModelSpec:
        return replace(self.cost.model, head=False) if self.shares_head else self.cost.model

    @property
    def own_elements(self) -> int:
        """Elements of its own matrices that every pass reads, experts left out."""
        elements = self._stored.elements()
        return self.cost.fusion + sum(size for part, size in elements.items() if part not in ("experts", "shared"))

    @property
    def resident_bytes(self) -> float:
        return self._stored.resident_bytes + self.cost.fusion * self.cost.model.precision.weights.bytes

    @property
    def device_bytes(self) -> float:
        fusion = self.cost.fusion * self.cost.model.precision.weights.bytes / self.cost.cluster.tp
        return self.cost.cluster.weight_bytes(self._stored) + fusion

    def kv_bytes(self, context: float) -> float:
        return self.cost.cluster.cache_bytes(self.cost.model, context)

    def hidden_bytes(self, depth: int) -> float:
        """Of every verified row where it keeps a cache; without one, of the last."""
        rows = depth + 1 if self.cost.model.layers else 1
        return rows * self.taps * self.cost.model.precision.activations

    def seconds(self, requests: float, depth: int, *, context: float) -> float:
        if depth <= 0 or requests <= 0:
            return 0.0
        passes = depth if self.max_depth is None else 1
        return passes * self.cost.seconds([SequenceLoad(context, self.rows, requests)])


def mtp_cost(
    model: ModelSpec, cluster: Cluster, *, routing: ExpertRouting = _UNIFORM, balanced: bool = False
) -> DraftHeadCost:
    """The multi-token-prediction module of a target (DeepSeek-V3, arXiv 2412.19437, section 2.2): one layer like the
    target's last, a fusion of 2 d into d, and the target's own head, in the target's number formats. Every draft token
    costs a pass. It is divided as the target is: its experts, too, are spread over the ranks of `cluster`."""
    layers = [layer for layer in model.layers if not isinstance(layer.attention, DeltaNet)] or list(model.layers)
    spec = replace(model, name="mtp", layers=(replace(layers[-1], count=1),), tied=True, head=True, decoder=None)
    ep = cluster.ep if spec.sparse else 1
    cost = CostModel(
        spec,
        cluster.device,
        routing=routing,
        tp=cluster.tp,
        ep=ep,
        link_latency=cluster.latency,
        balanced=balanced,
        fusion=2 * model.hidden**2,
    )
    return DraftHeadCost("mtp", cost, taps=model.hidden)


def block_drafter_cost(model: ModelSpec, cluster: Cluster, *, width: int = 16) -> DraftHeadCost:
    """A block drafter of DFlash's proportions (arXiv 2602.06036): 8 dense layers of the target's hidden size d (2 d of
    query width, one key-value head per 8, feed-forward 3 d), a fusion of 5 d into d, the target's head; one pass over
    `width` positions makes width - 1 draft tokens, and each of these rows attends to the sequence's cache."""
    if width < 2:
        raise UsageError(f"A block of {width} positions makes no draft token.", "Give 2 or more.")
    layer = Layer(_plain_attention(model.hidden), Dense(3 * model.hidden), 8)
    cost = _head_cost("block", model, cluster, layers=(layer,), fusion=5 * model.hidden**2)
    return DraftHeadCost("block", cost, rows=width, max_depth=width - 1, taps=5 * model.hidden)


def eagle_cost(model: ModelSpec, cluster: Cluster, *, vocab: int | None = None) -> DraftHeadCost:
    """EAGLE-3 (arXiv 2503.01840): hidden states of three layers of the target are fused, 3 d into d; one decoder layer
    whose query, key and value projections read 2 d (embedding and hidden state), with the target's attention where that
    is grouped-query and the target's dense feed-forward where it has one (else 3 d); a head of its own over `vocab`
    frequent tokens, or the target's (None). Every draft token costs a pass over one position."""
    if vocab is not None and not 0 < vocab <= model.vocab:
        raise UsageError(
            f"A draft vocabulary of {vocab} tokens is out of range.", f"{model.name} has {model.vocab} tokens."
        )
    kinds = [layer.attention for layer in model.layers]
    plain = next((kind for kind in kinds if isinstance(kind, Gqa)), None)
    attention = _plain_attention(model.hidden) if plain is None else replace(plain, window=None, gated=False)
    ffn = model.dense or Dense(3 * model.hidden)
    fusion = 3 * model.hidden**2 + model.hidden * attention.qkv_width
    cost = _head_cost("eagle", model, cluster, layers=(Layer(attention, ffn),), fusion=fusion, vocab=vocab)
    return DraftHeadCost("eagle", cost, taps=3 * model.hidden, shares_head=vocab is None)


def medusa_cost(model: ModelSpec, cluster: Cluster, *, heads: int = 5) -> DraftHeadCost:
    """Medusa (arXiv 2401.10774): `heads` heads on the target's last hidden state, each a residual block of d x d and a
    matrix of its own over the vocabulary; one pass over one position runs all of them, one draft token each. Nothing is
    cached."""
    if heads < 1:
        raise UsageError(f"{heads} heads make no draft token.", "Give 1 or more.")
    cost = _head_cost("medusa", model, cluster, layers=(), fusion=heads * model.hidden**2, vocab=heads * model.vocab)
    return DraftHeadCost("medusa", cost, max_depth=heads, taps=model.hidden, shares_head=False)


def _plain_attention(hidden: int) -> Gqa:
    """2 d of query width in heads of 128 (a multiple of 8 of them, so that devices can share them), one key-value head
    for 8."""
    groups = max(1, round(hidden / 512))
    return Gqa(8 * groups, groups, 128)


def _head_cost(
    name: str, model: ModelSpec, cluster: Cluster, *, layers: tuple[Layer, ...], fusion: int, vocab: int | None = None
) -> CostModel:
    """Of a pass of a dense head that was trained for a target; under expert parallelism every group has a copy of it.

    Its matrices have 16 bits where the target's have fewer, as such heads are published; a head over the vocabulary
    that it shares with the target (`vocab` None) has the target's format.
    """
    given = model.precision
    wide = given.weights if given.weights.bytes >= 2 else find_format("bf16")
    precision = replace(given, weights=wide, projections=wide, head=given.head if vocab is None else wide)
    spec = replace(
        model,
        name=name,
        layers=layers,
        vocab=vocab or model.vocab,
        precision=precision,
        tied=True,
        head=True,
        decoder=None,
    )
    return CostModel(spec, cluster.device, tp=cluster.tp, link_latency=cluster.latency, fusion=fusion)


@dataclass(frozen=True, slots=True)
class DraftModelCost(DraftCost):
    """A smaller model of the same vocabulary: every draft token costs a pass of its own, by its cost model, which also
    says over how many devices it is divided."""

    cost: CostModel
    max_depth: int | None = None

    @property
    def name(self) -> str:
        return f"model:{self.cost.model.name}"

    @property
    def max_context(self) -> int | None:
        return self.cost.model.context

    @property
    def resident_bytes(self) -> float:
        return self.cost.model.resident_bytes

    @property
    def device_bytes(self) -> float:
        return self.cost.cluster.weight_bytes(self.cost.model)

    def kv_bytes(self, context: float) -> float:
        return self.cost.cluster.cache_bytes(self.cost.model, context)

    def seconds(self, requests: float, depth: int, *, context: float) -> float:
        return depth * self.cost.seconds([SequenceLoad(context, 1, requests)]) if depth and requests else 0.0
