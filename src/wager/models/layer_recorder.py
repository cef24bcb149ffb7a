"""Records the layers of a decoder on a tape: attention and feed-forward of every kind, over buffers that layers share.

It is used by decoders, and by modules that have a layer of the same kinds as their target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from wager.arch.layers import Experts, Gqa, Mla
from wager.arch.spec import Layer, ModelSpec
from wager.kernels.arrays import INT32, Array, empty, zeros
from wager.kernels.base import Kernels, KVCache, Routing, RowSet, Tape
from wager.models.layer_weights import LayerWeights
from wager.models.matrices import in_one_form
from wager.types import KVDtype


def layer_cache(spec: ModelSpec, kernels: Kernels, *, layers: int, num_blocks: int, kv_dtype: KVDtype) -> KVCache:
    """A cache for so many layers of a model's kind: keys and values, or latents."""
    attention = spec.attention
    if isinstance(attention, Mla):
        rank, rope = attention.kv_rank, attention.rope
        return kernels.latent_cache(layers=layers, num_blocks=num_blocks, rank=rank, rope=rope)
    shape = {"layers": layers, "num_blocks": num_blocks, "kv_heads": attention.kv_heads}
    return kernels.cache(**shape, head_dim=attention.head_dim, kv_dtype=kv_dtype)


def needed_rows(layer: Layer) -> RowSet:
    """The rows that a last layer must compute past its keys and values where nothing reads the rows without logits.
    (Latent attention has products of all rows, and the choice of experts is recorded.)"""
    plain = isinstance(layer.attention, Gqa) and not isinstance(layer.ffn, Experts)
    return "logits" if plain else "rows"


class LayerBuffers:
    """Buffers that all layers share, [max_rows, ...] each: residual `x` and its norm, queries (and keys and values)
    before the rotation, rotated `q`, the input of the output projection, the inner layers of the feed-forwards; those
    of latent attention and of experts where the model has them; and `selected`, the logits rows of `x`."""

    def __init__(
        self, spec: ModelSpec, kernels: Kernels, rotation: Array, *, max_rows: int, max_logits_rows: int
    ) -> None:
        rows, act, attention = max_rows, kernels.act, spec.attention
        heads = attention.heads
        self.rotation = rotation
        self.x, self.normed = empty(rows, spec.hidden), empty(rows, spec.hidden, dtype=act)
        self.selected = empty(max_logits_rows, spec.hidden)
        self.q = zeros(rows, heads * attention.head_dim, dtype=act)
        self.attention_out = empty(rows, attention.output_width, dtype=act)
        if isinstance(attention, Mla):
            q_rank = attention.q_rank or 0
            self.qkv, self.kv = empty(rows, attention.query_width), empty(rows, attention.cache_width)
            self.q_latent = empty(rows, q_rank)
            self.q_latent_normed = empty(rows, q_rank, dtype=act)
            self.q_nope = empty(rows, heads * attention.nope, dtype=act)
            self.latent_out = empty(rows, heads * attention.kv_rank, dtype=act)
        else:
            self.qkv = empty(rows, attention.qkv_width)
        if dense := spec.dense:
            self.inner = empty(rows, dense.width, dtype=act)
        if experts := spec.experts:
            self.routing = Routing.allocate(experts, max_rows=rows, hidden=spec.hidden, act=act)
            self.shared_inner = empty(rows, experts.shared_inner, dtype=act)


class LayerRecorder:
    """Records layers of `spec` one after the other. `expert_choices` collects, with `keep_expert_choices`, a buffer of
    the experts that each layer with experts chooses, int32 [max_rows, top_k]."""

    def __init__(
        self,
        spec: ModelSpec,
        kernels: Kernels,
        tape: Tape,
        kv_cache: KVCache,
        buffers: LayerBuffers,
        *,
        keep_expert_choices: bool = False,
    ) -> None:
        self.spec, self.kernels, self.tape, self.cache, self.to = spec, kernels, tape, kv_cache, buffers
        self.expert_choices: list[Array] = []
        self._keep_expert_choices = keep_expert_choices

    def record(self, tensors: LayerWeights, layer: Layer, index: int, *, of: RowSet) -> None:
        """A layer over `x`, whose keys and values are layer `index` of the cache. With `of` "logits" only those rows
        are computed past the keys and values, to `selected`, and x stays as it was."""
        self.tape.rms_norm(self.to.x, tensors.vector("attn_norm"), self.spec.details.norm_eps, self.to.normed)
        if isinstance(layer.attention, Mla):
            self._latent_attention(tensors, layer.attention, index)
        else:
            self._projections(tensors, index)
        self.record_rest(tensors, layer, index, of=of)

    def record_rest(self, tensors: LayerWeights, layer: Layer, index: int, *, of: RowSet) -> None:
        """What follows the keys and values of a layer: attention (of plain layers), its output and the feed-forward."""
        to, tape, kernels, x = self.to, self.tape, self.kernels, self.to.x
        if isinstance(layer.attention, Gqa):
            window = layer.attention.window
            tape.attention(to.q, self.cache, index, window=window, out=to.attention_out, of=of)
        if of == "logits":
            x = to.selected
            tape.select(to.x, x)
        out = tensors.packed("o", lambda: kernels.pack(tensors.matrix("o"), tensors.bias("o")))
        tape.linear(to.attention_out, out, x, add=True, of=of)
        tape.rms_norm(x, tensors.vector("mlp_norm"), self.spec.details.norm_eps, to.normed, of=of)
        if isinstance(layer.ffn, Experts):
            self._experts(tensors, layer.ffn)
        else:
            self._feed_forward(tensors, "", to.inner, of=of)

    def _projections(self, tensors: LayerWeights, index: int) -> None:
        details, tape, to, first = self.spec.details, self.tape, self.to, 0
        for group in tensors.groups("q", "k", "v"):
            packed = tensors.packed("+".join(group), partial(self._pack_stacked, tensors, group))
            last = first + tensors.outputs(group)
            tape.linear(to.normed, packed, to.qkv[:, first:last])
            first = last
        norms = (tensors.vector("q_norm"), tensors.vector("k_norm"), details.norm_eps) if details.qk_norm else None
        tape.rotary(to.qkv, to.rotation, norms, self.cache, index, to.q)

    def _pack_stacked(self, tensors: LayerWeights, group: Sequence[str]) -> Any:
        return self.kernels.pack(*tensors.stacked(group))

    def _latent_attention(self, tensors: LayerWeights, attention: Mla, index: int) -> None:
        """The absorbed form: each head's key half of kv_b is applied to its query, so that queries are compared with
        latents, and its value half to the attention output."""
        details, tape, kernels, to = self.spec.details, self.tape, self.kernels, self.to
        eps, normed = details.latent_norm_eps, to.normed
        if attention.q_rank:
            tape.linear(normed, tensors.packed("q_a", lambda: kernels.pack(tensors.matrix("q_a"))), to.q_latent)
            tape.rms_norm(to.q_latent, tensors.vector("q_a_norm"), eps, to.q_latent_normed)
            normed = to.q_latent_normed
        query = "q_b" if attention.q_rank else "q"
        tape.linear(normed, tensors.packed(query, lambda: kernels.pack(tensors.matrix(query))), to.qkv)
        tape.linear(to.normed, tensors.packed("kv_a", lambda: kernels.pack(tensors.matrix("kv_a"))), to.kv)
        norm = (tensors.vector("kv_a_norm"), eps)
        tape.latent(to.qkv, to.kv, to.rotation, norm, self.cache, index, to.q_nope, to.q)

        @cache
        def kv_b() -> Array:
            return tensors.floats("kv_b", kernels.act).reshape(attention.heads, -1, attention.kv_rank)

        def keys() -> Any:
            return kernels.pack_heads(tensors.refit(kv_b()[:, : attention.nope].swapaxes(1, 2)))

        def values() -> Any:
            return kernels.pack_heads(tensors.refit(kv_b()[:, attention.nope :]))

        tape.per_head(to.q_nope, tensors.packed("kv_b_keys", keys), to.q)
        tape.attention(to.q, self.cache, index, window=None, out=to.latent_out, scale=details.attention_scale)
        tape.per_head(to.latent_out, tensors.packed("kv_b_values", values), to.attention_out)

    def _experts(self, tensors: LayerWeights, experts: Experts) -> None:
        tape, to, routing = self.tape, self.to, self.to.routing
        if self._keep_expert_choices:
            routing = replace(routing, ids=zeros(*routing.ids.shape, dtype=INT32))
            self.expert_choices.append(routing.ids)
        bias = tensors.vector("correction", "bias") if experts.gating.correction_bias else None
        tape.route(to.normed, tensors.vector("router"), bias, experts, routing)

        def pack() -> Any:
            parts = (tensors.expert(expert) for expert in range(experts.count))
            return self.kernels.pack_experts(parts, count=experts.count)

        tape.experts(to.normed, tensors.packed("experts", pack), experts, routing, to.x)
        if experts.shared:
            self._feed_forward(tensors, "shared_", to.shared_inner, of="rows")

    def _feed_forward(self, tensors: LayerWeights, prefix: str, inner: Array, *, of: RowSet) -> None:
        kernels = self.kernels

        def into() -> Any:
            gate, up = in_one_form([tensors.matrix(prefix + part) for part in ("gate", "up")])
            biases = [tensors.bias(prefix + part) for part in ("gate", "up")]
            both = (biases[0], biases[1]) if biases[0] is not None and biases[1] is not None else None
            return kernels.pack_gated(gate, up, bias=both)

        def down() -> Any:
            return kernels.pack(tensors.matrix(prefix + "down"), tensors.bias(prefix + "down"))

        out = self.to.x if of == "rows" else self.to.selected
        self.tape.gated(self.to.normed, tensors.packed(prefix + "gate+up", into), inner, of=of)
        self.tape.linear(inner, tensors.packed(prefix + "down", down), out, add=True, of=of)
