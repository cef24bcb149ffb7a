"""The decoder of every family: a tape of kernel ops recorded once from a ModelSpec, and passes that replay it.

Every difference between families is a value of the spec. Kernels are used through kernels/base.py only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from wager.arch.attention import Gqa, Mla
from wager.arch.feed_forward import Experts
from wager.arch.spec import Layer
from wager.errors import UsageError
from wager.kernels.arrays import INT32, Array, empty, zeros
from wager.kernels.base import BLOCK_SIZE, Kernels, Routing, RowSet, Tap, Tape, TargetOutput
from wager.models import footprint as memory
from wager.models.layer_weights import LayerWeights
from wager.models.matrices import Matrices, in_one_form
from wager.models.packed_cache import PackedStore
from wager.models.tensors import tensor_shapes
from wager.models.weights import Weights
from wager.types import KVDtype, PackedBatch


def refuse_int8_latents(kv_dtype: KVDtype) -> None:
    """UsageError if a latent cache is to hold int8."""
    if kv_dtype != "bf16":
        raise UsageError(
            f"kv_dtype = {kv_dtype!r} is not possible with latent attention, whose cache is small already.",
            "Leave out --kv-dtype for this model.",
        )


class Decoder:
    """A target: packs the weights, allocates cache and buffers, records the tape once. Implements kernels.base.Target.

    `num_blocks` is the size of the cache, `max_rows` the maximum rows of one pass, `max_logits_rows` the maximum
    of them with logits (None: all), `max_sequences` the maximum sequences of one pass, `max_blocks` the maximum cache
    blocks of one sequence. ModelError if a tensor cannot be read.

    `dtype` says in which form matrices are multiplied, see matrices.WANTED (with kernels of float32 all are floats);
    `weight_form` describes the result. `store` has packed weights, or keeps those that are packed here.
    `expert_choices` holds, with `keep_expert_choices`, the experts that each layer with experts chose in the last pass,
    int32 [max_rows, top_k] for each, ascending in a row; without it all layers share one buffer and it is empty.
    `embedding` and `head` are the packed matrices, for drafters that share them. `layers` are those of the model that
    are run, ascending (None: all); the norm and the head follow the last of them.
    """

    def __init__(
        self,
        weights: Weights,
        kernels: Kernels,
        *,
        num_blocks: int,
        max_rows: int,
        max_sequences: int,
        max_blocks: int,
        max_logits_rows: int | None = None,
        dtype: str = "auto",
        keep_expert_choices: bool = False,
        store: PackedStore | None = None,
        kv_dtype: KVDtype = "bf16",
        layers: Sequence[int] | None = None,
    ) -> None:
        spec = self.spec = weights.spec
        attention = spec.attention
        self.layers = tuple(range(spec.num_layers)) if layers is None else tuple(layers)
        self.kernels = kernels
        self.vocab, self.max_rows, self.max_sequences = spec.vocab, max_rows, max_sequences
        self.max_logits_rows = max_rows if max_logits_rows is None else min(max_logits_rows, max_rows)
        self.max_blocks = max_blocks
        num_layers, kv_heads, head_dim = len(self.layers), attention.kv_heads, attention.head_dim
        if isinstance(attention, Mla):
            refuse_int8_latents(kv_dtype)
            rank, rope = attention.kv_rank, attention.rope
            self.cache = kernels.latent_cache(layers=num_layers, num_blocks=num_blocks, rank=rank, rope=rope)
        else:
            shape = {"layers": num_layers, "num_blocks": num_blocks, "kv_heads": kv_heads, "head_dim": head_dim}
            self.cache = kernels.cache(**shape, kv_dtype=kv_dtype)
        limits = {"max_rows": max_rows, "max_sequences": max_sequences, "max_blocks": max_blocks}
        matrices = Matrices(weights, dtype, kernels.act)
        self.weight_form, self.weight_bytes = matrices.description, memory.weight_bytes(matrices, kernels)
        self.workspace_bytes = memory.workspace_bytes(spec, kernels, **limits, max_logits_rows=self.max_logits_rows)
        self.expert_choices: list[Array] = []
        self._keep_expert_choices = keep_expert_choices
        self._tape: Tape = kernels.tape(**limits, heads=attention.heads, kv_heads=kv_heads, head_dim=head_dim)
        self.buffers = self._tape.buffers
        self._outputs: dict[int, TargetOutput] = {}  # views of the buffers, by rows of logits
        self._places: list[Tap] = []  # where each layer begins
        self._tapped: dict[int, Array] = {}
        self._logits = empty(self.max_logits_rows, spec.vocab)
        self._greedy_tokens = empty(self.max_logits_rows, dtype=INT32)
        self._record(weights, matrices, store or PackedStore(kernels))

    def forward(self, batch: PackedBatch) -> TargetOutput:
        """One pass over the packed rows; see kernels.base.Target. UsageError if the batch exceeds the buffers."""
        if self.buffers is not None and self.buffers.packed is batch:
            rows, sequences, logits_rows, _ = self.buffers.sizes
            if logits_rows > self.max_logits_rows:
                self._check(batch)
        else:
            self._check(batch)
            self._tape.inputs.fill(batch)
            rows, sequences, logits_rows = batch.rows, batch.num_sequences, len(batch.logits_indices)
        self._tape.run(rows=rows, sequences=sequences, logits_rows=logits_rows)
        output = self._outputs.get(logits_rows)
        if output is None:
            views = (self._logits[:logits_rows], self._greedy_tokens[:logits_rows], self._selected[:logits_rows])
            output = self._outputs[logits_rows] = TargetOutput(*views)
        if self._tapped:
            return replace(output, taps={layer: rows[: batch.rows] for layer, rows in self._tapped.items()})
        return output

    def _check(self, batch: PackedBatch) -> None:
        for name, size, limit in (
            ("rows", batch.rows, self.max_rows),
            ("logits rows", len(batch.logits_indices), self.max_logits_rows),
            ("sequences", batch.num_sequences, self.max_sequences),
            ("blocks of a sequence", batch.block_tables.shape[1], self.max_blocks),
        ):
            if size > limit:
                raise UsageError(f"A pass of {size} {name} exceeds this decoder's limit of {limit}.")

    def tap(self, layers: Collection[int]) -> None:
        """From now on passes give the residual stream after so many layers, from 0 (the embeddings) to one less than
        all, and after no other number: TargetOutput.taps. UsageError for a layer that there is not."""
        for layer in layers:
            if not 0 <= layer < len(self._places):
                raise UsageError(
                    f"Layer {layer} cannot be tapped: {self.spec.name} has {len(self._places)} layers.",
                    f"Tap layers 0 to {len(self._places) - 1}; what the last one gives is TargetOutput.last_hidden.",
                )
        buffers = {layer: self._tapped.get(layer) for layer in layers}
        self._tapped = {
            layer: empty(self.max_rows, self.spec.hidden) if rows is None else rows for layer, rows in buffers.items()
        }
        for layer, place in enumerate(self._places):
            place.copy_to(self._tapped.get(layer))

    def _record(self, weights: Weights, matrices: Matrices, store: PackedStore) -> None:
        """Record a pass. A matrix that the store does not have is read and packed, one after the other, so that at most
        one layer is in memory twice."""
        spec, tape, kernels = self.spec, self._tape, self.kernels
        x = empty(self.max_rows, spec.hidden)
        normed = empty(self.max_rows, spec.hidden, dtype=kernels.act)
        rotation = spec.details.rope.table(self.max_blocks * BLOCK_SIZE, spec.attention.rope_dim)
        buffers = _Buffers(self, x, normed, rotation)
        self._selected = buffers.selected
        embedding = store.get("embed", lambda: kernels.pack(matrices.read("embed.weight")))
        tape.embed(embedding, x)
        known = tensor_shapes(spec)
        for place, index in enumerate(self.layers):
            self._places.append(tape.tap(x))
            tensors = LayerWeights(weights, matrices, store, known, index=index)
            self._record_layer(tensors, spec.ordered_layers[index], place, buffers, of=self._rows_of(place))
        selected_normed = empty(self.max_logits_rows, spec.hidden, dtype=kernels.act)
        head = embedding if spec.tied else store.get("head", lambda: kernels.pack(matrices.read("head.weight")))
        self.embedding, self.head = embedding, head
        if self._rows_of(len(self.layers) - 1) == "rows":
            tape.select(x, buffers.selected)
        norm, eps = weights.read("norm.weight"), spec.details.norm_eps
        tape.rms_norm(buffers.selected, norm, eps, selected_normed, of="logits")
        tape.linear(selected_normed, head, self._logits, of="logits")
        tape.argmax(self._logits, self._greedy_tokens)

    def _rows_of(self, place: int) -> RowSet:
        """The rows that a layer computes past its keys and values. Of the last layer those with logits are enough, for
        nothing reads the others. (Latent attention has products of all rows, and the choice of experts is recorded.)"""
        layer = self.spec.ordered_layers[self.layers[place]]
        plain = isinstance(layer.attention, Gqa) and not isinstance(layer.ffn, Experts)
        return "logits" if plain and place == len(self.layers) - 1 else "rows"

    def _record_layer(self, tensors: LayerWeights, layer: Layer, index: int, to: _Buffers, *, of: RowSet) -> None:
        tape, kernels, eps = self._tape, self.kernels, self.spec.details.norm_eps
        tape.rms_norm(to.x, tensors.vector("attn_norm"), eps, to.normed)
        if isinstance(layer.attention, Mla):
            self._record_latent_attention(tensors, layer.attention, index, to)
        elif isinstance(layer.attention, Gqa):
            self._record_attention(tensors, layer.attention, index, to, of=of)
        x = to.x
        if of == "logits":
            x = to.selected
            tape.select(to.x, x)
        out = tensors.packed("o", lambda: kernels.pack(tensors.matrix("o"), tensors.bias("o")))
        tape.linear(to.attention_out, out, x, add=True, of=of)
        tape.rms_norm(x, tensors.vector("mlp_norm"), eps, to.normed, of=of)
        if isinstance(layer.ffn, Experts):
            self._record_experts(tensors, layer.ffn, to)
        else:
            self._record_feed_forward(tensors, "", to.inner, to, of=of)

    def _record_attention(self, tensors: LayerWeights, attention: Gqa, index: int, to: _Buffers, *, of: RowSet) -> None:
        details, tape, first = self.spec.details, self._tape, 0
        for group in tensors.groups("q", "k", "v"):
            packed = tensors.packed("+".join(group), partial(self._pack_stacked, tensors, group))
            last = first + tensors.outputs(group)
            tape.linear(to.normed, packed, to.qkv[:, first:last])
            first = last
        norms = (tensors.vector("q_norm"), tensors.vector("k_norm"), details.norm_eps) if details.qk_norm else None
        tape.rotary(to.qkv, to.rotation, norms, self.cache, index, to.q)
        tape.attention(to.q, self.cache, index, window=attention.window, out=to.attention_out, of=of)

    def _pack_stacked(self, tensors: LayerWeights, group: Sequence[str]) -> Any:
        return self.kernels.pack(*tensors.stacked(group))

    def _record_latent_attention(self, tensors: LayerWeights, attention: Mla, index: int, to: _Buffers) -> None:
        """The absorbed form: each head's key half of kv_b is applied to its query, so that queries are compared with
        latents, and its value half to the attention output."""
        details, tape, kernels = self.spec.details, self._tape, self.kernels
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

    def _record_experts(self, tensors: LayerWeights, experts: Experts, to: _Buffers) -> None:
        tape, routing = self._tape, to.routing
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
            self._record_feed_forward(tensors, "shared_", to.shared_inner, to, of="rows")

    def _record_feed_forward(
        self, tensors: LayerWeights, prefix: str, inner: Array, to: _Buffers, *, of: RowSet
    ) -> None:
        kernels = self.kernels

        def into() -> Any:
            gate, up = in_one_form([tensors.matrix(prefix + part) for part in ("gate", "up")])
            biases = [tensors.bias(prefix + part) for part in ("gate", "up")]
            both = (biases[0], biases[1]) if biases[0] is not None and biases[1] is not None else None
            return kernels.pack_gated(gate, up, bias=both)

        def down() -> Any:
            return kernels.pack(tensors.matrix(prefix + "down"), tensors.bias(prefix + "down"))

        out = to.x if of == "rows" else to.selected
        self._tape.gated(to.normed, tensors.packed(prefix + "gate+up", into), inner, of=of)
        self._tape.linear(inner, tensors.packed(prefix + "down", down), out, add=True, of=of)


class _Buffers:
    """Buffers that all layers share, [max_rows, ...] each: residual `x` and its norm, queries (and keys and values)
    before the rotation, rotated `q`, the input of the output projection, the inner layers of the feed-forwards; those
    of latent attention and of experts where the model has them; and `selected`, the logits rows of `x`."""

    def __init__(self, decoder: Decoder, x: Array, normed: Array, rotation: Array) -> None:
        spec, rows, act = decoder.spec, decoder.max_rows, decoder.kernels.act
        attention = spec.attention
        heads = attention.heads
        self.x, self.normed, self.rotation = x, normed, rotation
        self.selected = empty(decoder.max_logits_rows, spec.hidden)
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
