"""Kinds of layers: attention and feed-forward, their sizes and the cost of a step.

Figures are of one layer. `kv_bytes` and `streams` are of one sequence with `context` positions cached before the step
and `rows` query positions in it (a real number, so that marginal costs can be derivatives).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol

from wager.arch.formats import Precision, Stream
from wager.errors import UsageError

Rotation = Literal["global", "local", "none"]
Activation = Literal["silu", "gelu", "clamped", "relu2"]
"""Of the gate of a feed-forward; gelu is its approximation by tanh; clamped is gpt-oss's, g sigmoid(1.702 g) (u + 1)
for a gate g of at most 7 and an up projection u within 7 of zero. relu2, max(u, 0)^2, is of a feed-forward without a
gate."""


class Attention(Protocol):
    """The properties of a layer's attention that the cost model needs."""

    def weights(self, hidden: int) -> int:
        """Elements of the projections; every step reads them all."""

    def kv_bytes(self, context: float, precision: Precision) -> float:
        """Bytes that a sequence of `context` positions caches in this layer."""

    def streams(self, context: float, rows: float, precision: Precision) -> tuple[Stream, ...]:
        """The work of attention itself, without the projections."""


@dataclass(frozen=True, slots=True)
class Gqa:
    """Grouped-query attention over all positions or a sliding `window`; `gated`: the output is gated by a projection as
    wide as the queries. FLOPs 4 n_h d per pair; elements 2 n_kv d per cached position, n_h d per query.

    `rotation` names the layer's RoPE: the model's, that of its local layers where the two differ, or none. `rotated`
    are the first dimensions of a head that it turns (None: all). With `sinks` each head has a learned score that takes
    part in the softmax without a value. `keys_as_values`: values are what the key projection gives. `shared`: the layer
    has queries alone, and reads the keys and values of the last layer before it that has some and the same window.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    gated: bool = False
    rotation: Rotation = "global"
    rotated: int | None = None
    sinks: bool = False
    keys_as_values: bool = False
    shared: bool = False

    @property
    def query_width(self) -> int:
        """Elements of a row's queries, all heads."""
        return self.heads * self.head_dim

    @property
    def projected(self) -> Literal["qkv", "qk", "q"]:
        """What the layer projects: queries, keys and values, or not all of them."""
        return "q" if self.shared else "qk" if self.keys_as_values else "qkv"

    @property
    def output_width(self) -> int:
        """Elements of a row that go into the output projection."""
        return self.heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Elements of what is projected of a row."""
        return (self.heads + (len(self.projected) - 1) * self.kv_heads) * self.head_dim

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that RoPE rotates."""
        return self.head_dim if self.rotated is None else self.rotated

    @property
    def cache_width(self) -> int:
        """Elements of a cached position that a row reads."""
        return 2 * self.kv_heads * self.head_dim

    def weights(self, hidden: int) -> int:
        return hidden * (self.qkv_width + (2 if self.gated else 1) * self.query_width)

    def kv_bytes(self, context: float, precision: Precision) -> float:
        return 0.0 if self.shared else self._read_bytes(context, precision)

    def _read_bytes(self, context: float, precision: Precision) -> float:
        return self.cache_width * precision.cache * self._attended(context)

    def streams(self, context: float, rows: float, precision: Precision) -> tuple[Stream, ...]:
        part = "attention" if self.window is None else "window attention"
        flops = 4 * self.query_width * self._attended(context) * rows
        cached = self._read_bytes(context, precision)
        return (
            Stream(part, flops, self.query_width * precision.query * rows, precision.attention, cached, self.kv_heads),
        )

    def _attended(self, context: float) -> float:
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True, slots=True)
class Indexer:
    """Scores every cached entry with `heads` small heads of `dim` elements against one shared key; attention reads the
    `picks` (index_topk) best. 0 heads: the layer reads the picks of a layer before it."""

    heads: int
    dim: int
    picks: int

    def weights(self, hidden: int, q_rank: int) -> int:
        """Elements of its query projection and of its heads' weights."""
        return q_rank * self.heads * self.dim + hidden * self.heads

    def key_bytes(self, precision: Precision) -> float:
        """Bytes of an entry's key; at 8 bits with a scale of 4 bytes."""
        return (self.dim * precision.cache + (0 if precision.cache >= 2 else 4)) if self.heads else 0.0

    def stream(self, entries: float, rows: float, precision: Precision) -> Stream:
        """Scoring that many entries."""
        flops = 2 * self.heads * self.dim * entries * rows
        return Stream("indexer", flops, 0.0, precision.index, entries * self.key_bytes(precision))


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) in its absorbed form.

    Per position, one latent of `kv_rank` elements and one rotated key of `rope` elements are cached, shared by all
    heads. A head's query has `nope` elements, which the key projection maps to the latent's `kv_rank`, and `rope`
    rotated ones; its output is mapped from `kv_rank` to `value` elements. `q_rank` is the size of the compressed query,
    None where queries are projected by one matrix. Their keys in config.json: kv_lora_rank, qk_rope_head_dim,
    qk_nope_head_dim, v_head_dim and q_lora_rank. With an `indexer` (DeepSeek-V3.2) attention reads only its picks,
    counted as distinct for every row, which is the worst case.

    FLOPs 2 n_h (2 d_c + d_r) per pair; elements d_c + d_r per cached position, n_h (d_c + d_r) per query.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int
    indexer: Indexer | None = None

    @property
    def kv_heads(self) -> int:
        """In the absorbed form all heads read one key-value head."""
        return 1

    @property
    def head_dim(self) -> int:
        """Elements of that key-value head."""
        return self.kv_rank + self.rope

    @property
    def query_width(self) -> int:
        """Elements of a row's queries as projected, all heads."""
        return self.heads * (self.nope + self.rope)

    @property
    def output_width(self) -> int:
        """Elements of a row that go into the output projection."""
        return self.heads * self.value

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that RoPE rotates."""
        return self.rope

    @property
    def cache_width(self) -> int:
        """Elements cached per position."""
        return self.kv_rank + self.rope

    def score_scale(self, factor: float = 1.0, weight: float = 0.0) -> float:
        """The factor of scores: the root of a query's elements, and under YaRN's `factor` the square of the magnitude
        for `weight` (DeepSeek-V2, section 3.1.4)."""
        plain: float = (self.nope + self.rope) ** -0.5
        magnitude = 1.0 if factor <= 1 else weight * math.log(factor) + 1.0
        return plain * magnitude**2

    def weights(self, hidden: int) -> int:
        query = self.query_width
        queries = hidden * query if self.q_rank is None else self.q_rank * (hidden + query)
        latent = hidden * self.cache_width + self.kv_rank * self.heads * (self.nope + self.value)
        elements = queries + latent + self.output_width * hidden
        if self.indexer and self.indexer.heads:
            elements += self.indexer.weights(hidden, self.q_rank or hidden) + hidden * self.indexer.dim
        return elements

    def kv_bytes(self, context: float, precision: Precision) -> float:
        key = self.indexer.key_bytes(precision) if self.indexer else 0.0
        return (self.cache_width * precision.cache + key) * context

    def streams(self, context: float, rows: float, precision: Precision) -> tuple[Stream, ...]:
        attended = read = context
        if self.indexer:
            attended = min(self.indexer.picks, context)
            read = min(self.indexer.picks * rows, context)
        flops = 2 * self.heads * (2 * self.kv_rank + self.rope) * attended * rows
        query = self.heads * (self.kv_rank + self.rope) * precision.query * rows
        name = "sparse attention" if self.indexer else "latent attention"
        cached = self.cache_width * precision.cache
        streams = (Stream(name, flops, query, precision.attention, cached * read),)
        if not self.indexer or not self.indexer.heads:
            return streams
        return (*streams, self.indexer.stream(context, rows, precision))


@dataclass(frozen=True, slots=True)
class StateShape:
    """What a sequence keeps in a recurrent layer, and what a row brings: the last `taps` - 1 inputs of a convolution
    over `channels`, and `heads` states of key_dim x value_dim. A row is `width` elements, the channels and what gates
    are made of."""

    taps: int
    channels: int
    width: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        """Elements that a sequence keeps."""
        return (self.taps - 1) * self.channels + self.head_elements

    @property
    def head_elements(self) -> int:
        """State elements of the heads."""
        return self.heads * self.key_dim * self.value_dim


class _StateLayer(ABC):
    """A layer that keeps a state, of one size for any context, instead of keys and values. `conv` are the rows that its
    convolution mixes; `part` names its work in a step. Every step reads and writes a sequence's state once."""

    __slots__ = ()
    conv: int
    part: ClassVar[str]
    written: bool = True

    @property
    @abstractmethod
    def value_width(self) -> int:
        """Elements of a row's values, and of what goes into the output projection."""

    @property
    @abstractmethod
    def channels(self) -> int:
        """Elements of a row that the convolution mixes."""

    @property
    @abstractmethod
    def state(self) -> StateShape:
        """What a sequence keeps in float32."""

    @property
    @abstractmethod
    def row_flops(self) -> int:
        """FLOPs of a row beside the projections."""

    @property
    def beside_width(self) -> int:
        """Elements of a row that do not go through the state: the gate of the output."""
        return self.value_width

    def kv_bytes(self, context: float, precision: Precision) -> float:
        del context
        return self.state.elements * precision.state

    def streams(self, context: float, rows: float, precision: Precision) -> tuple[Stream, ...]:
        moved, shards = (1 + self.written) * self.kv_bytes(context, precision), max(1, self.state.heads)
        return (Stream(self.part, self.row_flops * rows, 0.0, precision.attention, moved, shards),)


@dataclass(frozen=True, slots=True)
class DeltaNet(_StateLayer):
    """Gated DeltaNet (arXiv 2412.06464): a short causal convolution of queries, keys and values over `conv` rows, then
    in each value head a state of key_dim x value_dim that every row decays and corrects. Both are read and written in
    every step, for any context; about 8 FLOPs per state element and row.

    The decay and step-size projections (two scalars a value head) are left out of the weights, as in the catalog.
    Value heads share key heads evenly: neighbours one, or with `tiled` every key_heads-th (as GGUF files have them).
    Without `written` a step is counted to read states alone, as some published charts do.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    tiled: bool = False
    written: bool = True
    part: ClassVar[str] = "DeltaNet"

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_width

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def state(self) -> StateShape:
        width = self.channels + 2 * self.value_heads
        return StateShape(self.conv, self.channels, width, self.value_heads, self.key_dim, self.value_dim)

    def weights(self, hidden: int) -> int:
        value = self.value_width
        return hidden * (self.channels + value) + value * hidden + self.conv * self.channels

    def kv_bytes(self, context: float, precision: Precision) -> float:
        del context
        return (self.state.head_elements + self.conv * self.channels) * precision.state

    @property
    def row_flops(self) -> int:
        return 8 * self.state.head_elements


@dataclass(frozen=True, slots=True)
class Mamba2(_StateLayer):
    """Mamba-2 (arXiv 2405.21060): a short causal convolution with bias of values, keys and queries (x, B and C) over
    `conv` rows, then in each head a state of state_dim x head_dim that every row decays and adds to. The heads of a
    group share keys and queries. Outputs have an RMS norm of each group, if they are `normed`, behind their gate or
    before it (`gate_first` False)."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    conv: int
    normed: bool = True
    gate_first: bool = True
    part: ClassVar[str] = "Mamba-2"

    @property
    def value_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.value_width + 2 * self.groups * self.state_dim

    @property
    def state(self) -> StateShape:
        width = self.channels + self.heads
        return StateShape(self.conv, self.channels, width, self.heads, self.state_dim, self.head_dim)

    def weights(self, hidden: int) -> int:
        return hidden * (2 * self.value_width + self.channels + self.heads) + self.conv * self.channels

    @property
    def row_flops(self) -> int:
        return 6 * self.state.head_elements


@dataclass(frozen=True, slots=True)
class ShortConv(_StateLayer):
    """LFM2's gated convolution over `conv` rows: out = C * convolution(B * x), three projections of `width`."""

    width: int
    conv: int
    part: ClassVar[str] = "short convolution"

    @property
    def value_width(self) -> int:
        return self.width

    @property
    def channels(self) -> int:
        return self.width

    @property
    def state(self) -> StateShape:
        return StateShape(self.conv, self.width, self.width, 0, 0, 0)

    @property
    def beside_width(self) -> int:
        """Elements of a row before the convolution: B, C and x."""
        return 3 * self.width

    def weights(self, hidden: int) -> int:
        return 4 * hidden * self.width + self.conv * self.width

    @property
    def row_flops(self) -> int:
        return 2 * self.conv * self.width


Recurrent = DeltaNet | Mamba2 | ShortConv
"""Layers that keep a state instead of keys and values."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """Attention and a recurrent part that read the same rows, and whose outputs are added (Falcon-H1)."""

    attention: Gqa
    state: Mamba2

    def weights(self, hidden: int) -> int:
        return self.attention.weights(hidden) + self.state.weights(hidden)

    def kv_bytes(self, context: float, precision: Precision) -> float:
        return self.attention.kv_bytes(context, precision) + self.state.kv_bytes(context, precision)

    def streams(self, context: float, rows: float, precision: Precision) -> tuple[Stream, ...]:
        parts = (self.attention, self.state)
        return tuple(stream for part in parts for stream in part.streams(context, rows, precision))


@dataclass(frozen=True, slots=True)
class Absent:
    """No attention, or no feed-forward, in a layer that has the other alone (Nemotron-H)."""

    def weights(self, hidden: int) -> int:
        del hidden
        return 0

    def kv_bytes(self, context: float, precision: Precision) -> float:
        del context, precision
        return 0.0

    def streams(self, context: float, rows: float, precision: Precision) -> tuple[Stream, ...]:
        del context, rows, precision
        return ()


@dataclass(frozen=True, slots=True)
class Quoted:
    """Attention by its constants alone: elements of its projections, FLOPs per pair of query and cached position, bytes
    per cached position and per query."""

    elements: int
    flops: float
    cache: float
    query: float = 0.0

    def weights(self, hidden: int) -> int:
        del hidden
        return self.elements

    def kv_bytes(self, context: float, precision: Precision) -> float:
        del precision
        return self.cache * context

    def streams(self, context: float, rows: float, precision: Precision) -> tuple[Stream, ...]:
        flops = self.flops * context * rows
        return (Stream("attention", flops, self.query * rows, precision.attention, self.cache * context),)


@dataclass(frozen=True, slots=True)
class Compressed:
    """DeepSeek-V4's attention: one shared key-value vector of `width` elements (its last `rope` rotary) per position.

    Every layer reads a window of uncompressed entries; with `ratio` r it also reads one compressed entry per r
    positions: all of them (heavily compressed attention, HCA), or those an indexer picks (compressed sparse attention,
    CSA). Keys are values, so FLOPs are 4 n_h width per pair; queries are read and outputs written, n_h width each. An
    indexer's picks are counted as distinct for every row, which is the worst case.
    """

    heads: int
    width: int
    rope: int
    q_rank: int
    groups: int
    group_rank: int
    window: int
    ratio: int = 0
    indexer: Indexer | None = None

    @property
    def near(self) -> Compressed:
        """Its window alone, as draft heads have it."""
        return replace(self, ratio=0, indexer=None)

    def weights(self, hidden: int) -> int:
        query = self.heads * self.width
        elements = hidden * self.q_rank + self.q_rank * query + hidden * self.width
        elements += query * self.group_rank + self.groups * self.group_rank * hidden
        return elements + (self.indexer.weights(hidden, self.q_rank) if self.indexer else 0)

    def compressors(self, hidden: int) -> int:
        """Elements of what compresses entries, and an indexer's keys: key and gate projections and position biases;
        with an indexer each entry mixes two strides of positions."""
        width = 2 * (self.width + self.indexer.dim) if self.indexer else self.width
        return width * (2 * hidden + self.ratio) if self.ratio else 0

    def kv_bytes(self, context: float, precision: Precision) -> float:
        entries = min(context, self.window) + (context / self.ratio if self.ratio else 0.0)
        keys = context / self.ratio * self.indexer.key_bytes(precision) if self.indexer else 0.0
        return entries * self._entry(precision) + keys

    def streams(self, context: float, rows: float, precision: Precision) -> tuple[Stream, ...]:
        near, far = min(context, self.window), context // self.ratio if self.ratio else 0.0
        attended = read = far
        if self.indexer:
            attended, read = min(self.indexer.picks, far), min(self.indexer.picks * rows, far)
        query = self.heads * self.width
        name = "sparse attention" if self.indexer else "compressed attention" if self.ratio else "window attention"
        flops = 4 * query * (near + attended) * rows
        cached = (near + read) * self._entry(precision)
        streams = (Stream(name, flops, 2 * query * precision.query * rows, precision.attention, cached),)
        if not self.indexer:
            return streams
        return (*streams, self.indexer.stream(far, rows, precision))

    def _entry(self, precision: Precision) -> float:
        """Bytes of an entry: at 8 bits the rotary part stays 16 bits wide, and 8 bytes of scales are added."""
        if precision.cache >= 2:
            return self.width * precision.cache
        return (self.width - self.rope) * precision.cache + 2 * self.rope + 8


@dataclass(frozen=True, slots=True)
class Dense:
    """A feed-forward of inner size `width`: gate (SwiGLU), if it is `gated`, up and down projection."""

    width: int
    gated: bool = True

    def weights(self, hidden: int) -> int:
        """Elements of the projections."""
        return (2 + self.gated) * hidden * self.width


@dataclass(frozen=True, slots=True)
class Gating:
    """How a router chooses a row's experts and weights their outputs.

    A row's scores are the softmax or the sigmoid of its router's logits. With `correction_bias`, a learned bias is
    added to them for the choice alone (DeepSeek-V3). With `groups` above 1 the experts form that many equal groups and
    only those in the `top_groups` best groups are eligible; a group's score is the sum of its `group_best` best scores.
    The weights of the chosen experts are their scores, divided by their sum where `normalised`, times `scale`, and with
    `expert_scales` times a learned factor of each expert.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool = False
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    expert_scales: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: `count` routed SwiGLU experts of inner size `width`, `active` of them per token, and
    `shared` ones of inner size `shared_width` (None: `width`) that every token uses.

    The cost of a mixture does not depend on the rest, which only the engine reads: the `gating`; `biased`, whether the
    router and the experts' projections have biases; `shared_gate`, whether the shared experts' output is multiplied by
    the sigmoid of a projection to one number; and `apart`, whether router, routed and shared experts read the residual
    stream through norms of their own, and the outputs of both are normed before they are added (Gemma 4). Experts that
    are not `gated` have no gate projections (Nemotron-H); with a `latent` size the routed ones read and write vectors
    of that size, from a projection of the row and to one back.
    """

    count: int
    active: int
    shared: int
    width: int
    shared_width: int | None = None
    gating: Gating = Gating()
    biased: bool = False
    shared_gate: bool = False
    apart: bool = False
    gated: bool = True
    latent: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.active <= self.count or self.shared < 0 or self.width < 1:
            raise UsageError(
                f"{self.count} experts of width {self.width} with {self.active} active and {self.shared} shared "
                "are not a layer.",
                "Between one and all of the experts are active.",
            )

    @property
    def shared_inner(self) -> int:
        """Inner size of all shared experts together, 0 for none."""
        return self.shared * (self.shared_width or self.width)

    def outer(self, hidden: int) -> int:
        """Elements of what a routed expert reads, and gives."""
        return self.latent or hidden

    def expert(self, hidden: int) -> int:
        """Elements of one routed expert."""
        return (2 + self.gated) * self.outer(hidden) * self.width

    def shared_weights(self, hidden: int) -> int:
        """Elements of all shared experts, and of the projections around the routed ones."""
        return hidden * ((2 + self.gated) * self.shared_inner + 2 * self.latent)

    def router(self, hidden: int) -> int:
        """Elements of the router's matrix."""
        return hidden * self.count


FeedForward = Dense | Experts | Absent
"""What follows attention in a layer."""
