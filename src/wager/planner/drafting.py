"""What drafting costs, by the drafter's shape: seconds by its own roofline, as measured, or as the user says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from wager.arch import Dense, Gqa, Layer, ModelSpec, ReleasedHead, find_format
from wager.arch.formats import Format
from wager.arch.layers import Absent, Compressed
from wager.economics.surface import DraftCurve
from wager.errors import UsageError
from wager.planner.cost import Cluster, CostModel


@dataclass(frozen=True, kw_only=True)
class DraftCost(ABC):
    """What drafting costs, on the target's devices. `max_depth` is the deepest draft (None: any), `max_context` the
    positions it was made for (None: as many as the target)."""

    name: str
    max_depth: int | None = None
    max_context: int | None = None

    @property
    def resident_bytes(self) -> float:
        """Its own weights, a head shared with the target left out."""
        return 0.0

    @property
    def device_bytes(self) -> float:
        """The part of them on one of the devices that it runs on."""
        return 0.0

    def kv_bytes(self, context: float) -> float:
        """Bytes of cache that it keeps for a sequence of that context, on one of the devices that it runs on."""
        return 0.0

    def prefill_seconds(self, context: float) -> float:
        """Filling its cache with a prompt of that many positions."""
        return 0.0

    def seconds(self, requests: float, depth: int, *, context: float, width: int = 1) -> float:
        """Drafting `depth` tokens for each of `requests` sequences of that context; of a tree that many levels, of up
        to `width` tokens that are looked at further."""
        return self._seconds(requests, depth, context, width) if depth > 0 and requests > 0 else 0.0

    @abstractmethod
    def _seconds(self, requests: float, depth: int, context: float, width: int) -> float:
        """`seconds` where `requests` and `depth` are above 0."""


@dataclass(frozen=True)
class KnownDraftCost(DraftCost):
    """Drafting whose seconds are known by requests, depth and context. Its memory is not, and counts as 0."""

    name: str
    known: Callable[[float, int, float], float]

    def _seconds(self, requests: float, depth: int, context: float, width: int) -> float:
        return self.known(requests, depth, context)


FREE = KnownDraftCost("free", lambda _requests, _depth, _context: 0.0)
"""Drafts by lookup: its time is taken as 0."""


def fractional_cost(cost: CostModel, share: float) -> DraftCost:
    """Every draft token costs `share` of a plain step of the target at the same batch: the constant of published
    charts, which leaves out that a drafter has a roofline of its own."""
    return KnownDraftCost(
        "fraction", lambda requests, depth, context: share * depth * cost.seconds(context, 1, batch=requests)
    )


def constant_cost(seconds_per_token: float) -> DraftCost:
    """Every draft token costs the same known seconds, whatever the batch."""
    return KnownDraftCost("given", lambda _requests, depth, _context: seconds_per_token * depth)


def calibrated_draft_cost(name: str, measured: DraftCurve) -> DraftCost:
    """Drafting as measured, whatever the context."""
    return KnownDraftCost(name, lambda requests, depth, _context: measured.seconds(requests, depth))


@dataclass(frozen=True)
class PassDraftCost(DraftCost):
    """A draft head on the target, or a smaller model: `cost` is that of its pass, a head over the vocabulary among its
    matrices.

    With `max_depth` None a pass over one position is made for every draft token (an autoregressive drafter), of a tree
    for every level, over one position and then `width`; otherwise one pass over `rows` positions of a sequence makes up
    to `max_depth` of them, and each is multiplied with `markov` elements after the one before it. Its attention reads
    the cache that its own layers keep of every sequence. `reads_states`: it is a draft head, on hidden states of the
    target; `shares_head`: the head is the target's and is in memory already.

    Dense weights and experts are bounded each on its own, as the target's streams are. (Published drafter curves take
    one maximum over all of them, which is up to a third cheaper on a saturated pass.) Left out: that an autoregressive
    head's first pass also takes in the positions accepted in the round before, which costs time only where its matrices
    are compute-bound.
    """

    name: str
    cost: CostModel
    rows: int = 1
    reads_states: bool = True
    shares_head: bool = False
    markov: int = 0

    @property
    def _stored(self) -> ModelSpec:
        return replace(self.cost.model, head=False) if self.shares_head else self.cost.model

    @property
    def _fusion_bytes(self) -> float:
        return self.cost.fusion * self.cost.model.precision.fusion.bytes

    @property
    def resident_bytes(self) -> float:
        return self._stored.resident_bytes + self._fusion_bytes + self._markov_bytes

    @property
    def device_bytes(self) -> float:
        return self.cost.weight_bytes(self._stored) + (self._fusion_bytes + self._markov_bytes) / self.cost.cluster.tp

    @property
    def _markov_bytes(self) -> float:
        """Bytes of the output matrix and of the table that is looked up by the token before."""
        return 2 * self.markov * self._markov_format.bytes

    @property
    def _markov_format(self) -> Format:
        """16 bits, in DeepSeek-V4's releases too."""
        precision = self.cost.model.precision
        return max(precision.weights, precision.head, key=lambda kind: kind.bytes)

    def kv_bytes(self, context: float) -> float:
        return self.cost.cache_bytes(context)

    def prefill_seconds(self, context: float) -> float:
        return self.cost.prefill(context).seconds if self.cost.model.layers else 0.0

    def _seconds(self, requests: float, depth: int, context: float, width: int) -> float:
        seconds = self.cost.seconds(context, self.rows, batch=requests)
        if self.max_depth is None:
            return seconds + (depth - 1) * self.cost.seconds(context, width, batch=requests)
        if not self.markov:
            return seconds
        stored, size = self._markov_format, self.markov / self.cost.cluster.tp
        product = self.cost.device.seconds(size * stored.bytes, 2 * size * requests * width, compute=stored.compute)
        return seconds + depth * product


_OF_HEADS: Mapping[str, Any] = {"tied": True, "head": True, "decoder": None, "layer_embedding": 0}
"""What a head has otherwise than its target."""


def mtp_cost(target: CostModel, cluster: Cluster) -> PassDraftCost:
    """The multi-token-prediction module of a target (DeepSeek-V3, arXiv 2412.19437, section 2.2): one layer like the
    target's last, a fusion of 2 d into d, and the target's own head, in the target's number formats, of which the
    fusion has one of its own (Precision). Every draft token costs a pass. It is divided as the target is: its experts,
    too, are spread over the ranks of `cluster`. DeepSeek-V4's has its window alone."""
    model = target.model
    layers = [layer for layer in model.layers if not (layer.recurrent or isinstance(layer.attention, Absent))]
    last = (layers or model.layers)[-1]
    if isinstance(last.attention, Compressed):
        last = replace(last, attention=last.attention.near)
    spec = replace(model, name="mtp", layers=(replace(last, count=1),), **_OF_HEADS)
    cluster = cluster if spec.sparse else replace(cluster, ep=1)
    cost = CostModel(spec, cluster, target.routing, balanced=target.balanced, fusion=2 * model.hidden**2)
    return PassDraftCost("mtp", cost, shares_head=True)


def block_drafter_cost(model: ModelSpec, cluster: Cluster, *, width: int = 16) -> PassDraftCost:
    """A block drafter of DFlash's proportions (arXiv 2602.06036): 8 dense layers of the target's hidden size d (2 d of
    query width, one key-value head per 8, feed-forward 3 d), a fusion of 5 d into d, the target's head; one pass over
    `width` positions makes width - 1 draft tokens, and each of these rows attends to the sequence's cache."""
    if width < 2:
        raise UsageError(f"A block of {width} positions makes no draft token.", "Give 2 or more.")
    layer = Layer(_plain_attention(model.hidden), Dense(3 * model.hidden), 8)
    cost = _head_cost("block", model, cluster, layers=(layer,), fusion=5 * model.hidden**2)
    return PassDraftCost("block", cost, rows=width, max_depth=width - 1, shares_head=True)


def eagle_cost(model: ModelSpec, cluster: Cluster, *, vocab: int | None = None) -> PassDraftCost:
    """EAGLE-3 (arXiv 2503.01840): hidden states of three layers of the target are fused, 3 d into d; one decoder layer
    whose query, key and value projections read 2 d (embedding and hidden state), with the target's attention where that
    is grouped-query and the target's dense feed-forward where it has one (else 3 d); a head of its own over `vocab`
    frequent tokens, or the target's (None). Every draft token costs a pass over one position."""
    if vocab is not None and not 0 < vocab <= model.vocab:
        raise UsageError(
            f"A draft vocabulary of {vocab} tokens is out of range.", f"{model.name} has {model.vocab} tokens."
        )
    plain = next((kind for layer in model.layers if isinstance(kind := layer.attending, Gqa)), None)
    attention = _plain_attention(model.hidden) if plain is None else replace(plain, window=None, gated=False)
    ffn = model.dense or Dense(3 * model.hidden)
    fusion = 3 * model.hidden**2 + model.hidden * attention.qkv_width
    cost = _head_cost("eagle", model, cluster, layers=(Layer(attention, ffn),), fusion=fusion, vocab=vocab)
    return PassDraftCost("eagle", cost, shares_head=vocab is None)


def released_cost(target: CostModel, cluster: Cluster, head: ReleasedHead, *, name: str) -> PassDraftCost:
    """A head that was released for the target: EAGLE-3 (arXiv 2503.01840), DFlash (2602.06036) or DSpark (2607.05147),
    whose Markov head adds what the draft token before says of the next one to the logits of a block."""
    model = target.model
    fusion = head.taps * model.hidden**2
    first = head.layers[0].attention
    if head.reads_embedding and isinstance(first, Gqa):
        fusion += model.hidden * first.qkv_width
    if head.native:
        spec = replace(model, name=name, layers=head.layers, **_OF_HEADS)
        cost = CostModel(spec, cluster, target.routing, balanced=target.balanced, fusion=fusion)
    else:
        cost = _head_cost(name, model, cluster, layers=head.layers, fusion=fusion, vocab=head.vocab)
    return PassDraftCost(
        name,
        cost,
        max_depth=head.block or None,
        rows=head.rows,
        shares_head=head.vocab is None,
        markov=head.markov * cost.model.vocab,
    )


def medusa_cost(model: ModelSpec, cluster: Cluster, *, heads: int = 5) -> PassDraftCost:
    """Medusa (arXiv 2401.10774): `heads` heads on the target's last hidden state, each a residual block of d x d and a
    matrix of its own over the vocabulary; one pass over one position runs all of them, one draft token each. Nothing is
    cached."""
    cost = _head_cost("medusa", model, cluster, layers=(), fusion=heads * model.hidden**2, vocab=heads * model.vocab)
    return PassDraftCost("medusa", cost, max_depth=heads)


def draft_model_cost(model: ModelSpec, cluster: Cluster) -> PassDraftCost:
    """A smaller model of the same vocabulary: every draft token costs a pass of its own. It is divided over the devices
    that share a batch, with experts, too, as tensor parallelism divides."""
    try:
        cost = CostModel(model, replace(cluster, ep=1))
    except UsageError as error:
        raise UsageError(f"The drafter: {error.message}", "Give it fewer devices: --drafter-tp 1.") from error
    return PassDraftCost(f"model:{model.name}", cost, max_context=model.context, reads_states=False)


def _plain_attention(hidden: int) -> Gqa:
    """2 d of query width in heads of 128 (a multiple of 8 of them, so that devices can share them), one key-value head
    for 8."""
    groups = max(1, round(hidden / 512))
    return Gqa(8 * groups, groups, 128)


def _head_cost(
    name: str, model: ModelSpec, cluster: Cluster, *, layers: tuple[Layer, ...], fusion: int, vocab: int | None = None
) -> CostModel:
    """The pass of a dense head that was trained for a target; under expert parallelism every group has a copy of it.

    Its matrices have 16 bits where the target's have fewer, as such heads are published; a head over the vocabulary
    that it shares with the target (`vocab` None) has the target's format.
    """
    given = model.precision
    wide = given.weights if given.weights.bytes >= 2 else find_format("bf16")
    spec = replace(
        model,
        name=name,
        layers=layers,
        vocab=vocab or model.vocab,
        precision=replace(
            given, weights=wide, projections=wide, fusion=wide, head=given.head if vocab is None else wide
        ),
        **_OF_HEADS,
    )
    return CostModel(spec, replace(cluster, ep=1), fusion=fusion)
