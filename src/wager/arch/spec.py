"""What a decoder is, as plain values: shapes, rotation, windows, experts, and the physics that follows from them.

Knows no family names that decide anything, no files and no torch: whoever fills a ModelSpec (families.py) has already
turned every difference between families into a value here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding with whatever scaling, reduced to numbers.

    Pair i of a head turns by position * theta^(-2i/d) / factors[i]; no factors means all ones. `magnitude` multiplies
    both cosine and sine (YaRN's attention factor, which thereby scales queries and keys alike).
    """

    theta: float
    factors: tuple[float, ...] = ()
    magnitude: float = 1.0

    def table(self, positions: int, head_dim: int) -> NDArray[np.float32]:
        """cos | sin of every angle, float32 [positions, head_dim], computed in float64.

        The frequencies are rounded to float32 first, because that is what models are trained with.
        """
        exponents = np.arange(0, head_dim, 2) / head_dim
        frequencies = self.theta**-exponents / np.array(self.factors or 1.0)
        angles = np.outer(np.arange(positions), frequencies.astype(np.float32).astype(np.float64))
        return (self.magnitude * np.concatenate([np.cos(angles), np.sin(angles)], axis=1)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture-of-experts feed-forward: each row goes to `chosen` of `count` SwiGLU experts of inner size `width`.

    A row's scores are the softmax or the sigmoid of its router's logits. Where `corrected`, a learned bias is added for
    the choice alone. With `groups` above 1 the experts lie in that many equal groups, and only those of the
    `top_groups` best are eligible; a group is as good as the sum of its `group_best` best scores. The chosen scores
    are divided by their sum where `normalised`, and multiplied by `scale`. `layers` says which layers have experts
    (the others are dense); `shared` is the inner size of a feed-forward that all rows take besides, 0 for none.
    """

    count: int
    chosen: int
    width: int
    layers: tuple[bool, ...]
    shared: int = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    corrected: bool = False
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1), in the absorbed form.

    What is cached per position is one latent of `rank` elements, RMS-normed, and one rotated key of `rope`, shared by
    all heads. A head's query has `nope` elements for the latent, which its part of the key projection takes to `rank`,
    and `rope` rotated ones; its output, `rank` wide, is taken to `value`. `q_rank` is the size of the compressed
    query, 0 where queries are projected in one matrix. `scale` multiplies scores. `interleaved`: in the checkpoint,
    rotated dimensions pair up as (2i, 2i + 1).
    """

    rank: int
    rope: int
    nope: int
    value: int
    scale: float
    q_rank: int = 0
    interleaved: bool = False
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A pre-norm decoder with grouped-query or latent attention and SwiGLUs, every size and switch of it.

    `width` is the dense feed-forward's inner size, `context` the most positions the model was made for. `windows` gives
    each layer's sliding window (None: all positions). `tied`: the head is the embedding matrix. With `latent`, what is
    cached is one key-value head (`kv_heads` 1) of `head_dim` latent.rank + latent.rope.
    """

    architecture: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    context: int
    norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None
    latent: Latent | None = None

    @property
    def qkv(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def queries(self) -> int:
        """Elements of a row's queries before the rotation, all heads."""
        return self.heads * (self.latent.nope + self.latent.rope if self.latent else self.head_dim)

    @property
    def mixed(self) -> int:
        """Elements of a row that attention hands to the output projection."""
        return self.heads * (self.latent.value if self.latent else self.head_dim)

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.latent.rope if self.latent else self.head_dim

    @property
    def attention_elements(self) -> int:
        """Elements of the matrices of one layer's attention."""
        latent, hidden = self.latent, self.hidden
        if latent is None:
            return hidden * (self.qkv + self.mixed)
        queries = latent.q_rank * (hidden + self.queries) if latent.q_rank else hidden * self.queries
        expanded = latent.rank * self.heads * (latent.nope + latent.value)
        return queries + hidden * (latent.rank + latent.rope) + expanded + self.mixed * hidden

    @property
    def expert_elements(self) -> int:
        """Elements of the matrices of one expert, 0 for a dense model."""
        return 3 * self.hidden * self.experts.width if self.experts else 0

    @property
    def expert_layers(self) -> int:
        """Layers that have experts."""
        return sum(self.experts.layers) if self.experts else 0

    @property
    def layer_elements(self) -> int:
        """Elements of the matrices of one dense layer: what a pass streams for it."""
        return self.attention_elements + 3 * self.hidden * self.width

    @property
    def head_elements(self) -> int:
        return self.vocab * self.hidden

    @property
    def steady_elements(self) -> int:
        """Matrix elements every pass reads whatever its rows: all but the experts; head included."""
        sparse = self.expert_layers
        shared = 3 * self.hidden * self.experts.shared if self.experts else 0
        dense = (self.layers - sparse) * self.layer_elements
        return dense + sparse * (self.attention_elements + shared) + self.head_elements

    @property
    def streamed_elements(self) -> int:
        """Matrix elements that a pass of one row reads, head included, embedding rows excluded."""
        chosen = self.experts.chosen if self.experts else 0
        return self.steady_elements + self.expert_layers * chosen * self.expert_elements

    @property
    def matrix_elements(self) -> int:
        """Elements of all matrices that stay in memory in the kernels' layout: head included, embedding excluded."""
        count = self.experts.count if self.experts else 0
        return self.steady_elements + self.expert_layers * count * self.expert_elements

    @property
    def vector_elements(self) -> int:
        """Norm weights, biases and routers: what is kept in float32."""
        latent, experts = self.latent, self.experts
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        norms += latent.rank + latent.q_rank if latent else 0
        biases = (self.qkv if self.qkv_bias else 0) + (self.hidden if self.output_bias else 0)
        inner = 2 * self.width + self.hidden if self.mlp_bias else 0
        router = experts.count * (self.hidden + experts.corrected) if experts else 0
        sparse = self.expert_layers
        return self.layers * (norms + biases) + (self.layers - sparse) * inner + sparse * router + self.hidden

    @property
    def parameters(self) -> int:
        """Distinct parameters: a tied head counts once."""
        embedding = 0 if self.tied else self.head_elements
        return self.matrix_elements + embedding + self.vector_elements

    @property
    def kv_elements(self) -> int:
        """Elements that one position caches, all layers: keys and values, or the latent that is both."""
        return self.layers * (1 if self.latent else 2) * self.kv_heads * self.head_dim

    def kv_reads(self, context: int) -> int:
        """Cached positions one row at position `context` reads, summed over layers; windows cap them."""
        return sum(min(context, window or context) for window in self.windows)

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model under its canonical name, with its shape; matrices are [outputs, inputs].

        Names are `part.kind` before and after the layers, `layers.L.part.kind` in them, and of expert E
        `layers.L.E.part.kind`.
        """
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in self._layer_tensors(layer)}
        shapes["norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["head.weight"] = (self.vocab, self.hidden)
        return shapes

    def _layer_tensors(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, experts = self.hidden, self.experts
        yield from (("attn_norm.weight", (hidden,)), ("mlp_norm.weight", (hidden,)))
        yield from self._attention_tensors()
        if experts is None or not experts.layers[layer]:
            yield from self._feed_forward("", self.width, biased=self.mlp_bias)
            return
        yield "router.weight", (experts.count, hidden)
        if experts.corrected:
            yield "correction.bias", (experts.count,)
        if experts.shared:
            yield from self._feed_forward("shared_", experts.shared)
        for expert in range(experts.count):
            yield from ((f"{expert}.{name}", shape) for name, shape in self._feed_forward("expert_", experts.width))

    def _attention_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, latent = self.hidden, self.latent
        if latent is None:
            keys = self.kv_heads * self.head_dim
            if self.qk_norm:
                yield from (("q_norm.weight", (self.head_dim,)), ("k_norm.weight", (self.head_dim,)))
            for part, size in (("q", self.queries), ("k", keys), ("v", keys)):
                yield f"{part}.weight", (size, hidden)
                if self.qkv_bias:
                    yield f"{part}.bias", (size,)
        else:
            if latent.q_rank:
                yield from (("q_a.weight", (latent.q_rank, hidden)), ("q_a_norm.weight", (latent.q_rank,)))
            yield (
                ("q_b.weight", (self.queries, latent.q_rank)) if latent.q_rank else ("q.weight", (self.queries, hidden))
            )
            yield "kv_a.weight", (latent.rank + latent.rope, hidden)
            yield "kv_a_norm.weight", (latent.rank,)
            yield "kv_b.weight", (self.heads * (latent.nope + latent.value), latent.rank)
        yield "o.weight", (hidden, self.mixed)
        if self.output_bias:
            yield "o.bias", (hidden,)

    def _feed_forward(self, prefix: str, width: int, *, biased: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
        sizes = {"gate": (width, self.hidden), "up": (width, self.hidden), "down": (self.hidden, width)}
        for part, shape in sizes.items():
            yield f"{prefix}{part}.weight", shape
            if biased:
                yield f"{prefix}{part}.bias", shape[:1]
