"""Kinds of attention: their sizes, elements of their projections, bytes of their cache, FLOPs and bytes of a step.

All figures are of one layer; `kv_bytes` and `streams` are of one sequence with `context` positions cached before the
step and `rows` query positions in it (a real number, so that marginal costs can be derivatives).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from wager.arch.formats import Precision, Stream


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
    wide as the queries. FLOPs 4 n_h d per pair; elements 2 n_kv d per cached position, n_h d per query."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    gated: bool = False

    @property
    def query_width(self) -> int:
        """Elements of a row's queries, all heads."""
        return self.heads * self.head_dim

    @property
    def output_width(self) -> int:
        """Elements of a row that go into the output projection."""
        return self.heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Elements of a row's queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that RoPE rotates."""
        return self.head_dim

    @property
    def cache_width(self) -> int:
        """Elements cached per position."""
        return 2 * self.kv_heads * self.head_dim

    def weights(self, hidden: int) -> int:
        return hidden * self.head_dim * ((3 if self.gated else 2) * self.heads + 2 * self.kv_heads)

    def kv_bytes(self, context: float, precision: Precision) -> float:
        return self.cache_width * precision.cache * self._attended(context)

    def streams(self, context: float, rows: float, precision: Precision) -> tuple[Stream, ...]:
        part = "attention" if self.window is None else "window attention"
        flops = 4 * self.query_width * self._attended(context) * rows
        cached = self.kv_bytes(context, precision)
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
        """Of an entry's key; at 8 bits with a scale of 4 bytes."""
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
            attended, read = min(self.indexer.picks, context), min(self.indexer.picks * rows, context)
        flops = 2 * self.heads * (2 * self.kv_rank + self.rope) * attended * rows
        query = self.heads * (self.kv_rank + self.rope) * precision.query * rows
        name, cached = "sparse attention" if self.indexer else "latent attention", self.cache_width * precision.cache
        streams = (Stream(name, flops, query, precision.attention, cached * read),)
        if not self.indexer or not self.indexer.heads:
            return streams
        return (*streams, self.indexer.stream(context, rows, precision))


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated linear attention: a state of value_heads x key_dim x value_dim and a convolution's last inputs, both read
    in every step for any context; about 8 FLOPs per state element and row.

    The decay and step-size projections (two scalars a value head) are left out of the weights, as in the catalog.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int

    @property
    def _mixed(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def weights(self, hidden: int) -> int:
        value = self.value_heads * self.value_dim
        return hidden * (self._mixed + value) + value * hidden + self.conv * self._mixed

    def kv_bytes(self, context: float, precision: Precision) -> float:
        del context  # the state does not grow
        return (self._state + self.conv * self._mixed) * precision.cache

    @property
    def _state(self) -> int:
        return self.value_heads * self.key_dim * self.value_dim

    def streams(self, context: float, rows: float, precision: Precision) -> tuple[Stream, ...]:
        cached = self.kv_bytes(context, precision)
        return (Stream("recurrence", 8 * self._state * rows, 0.0, precision.attention, cached, self.value_heads),)


@dataclass(frozen=True, slots=True)
class Quoted:
    """Attention of which only published constants are known: elements of its projections, FLOPs per pair of query and
    cached position, bytes per cached position and per query."""

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
