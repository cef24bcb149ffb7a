"""The decoder of every family: a tape of kernel ops recorded once from a ModelSpec, and passes that replay it.

Every difference between families is a value of the spec. LayerRecorder records attention and feed-forward of every
kind; MTP modules use it too. Kernels are used through kernels/cpu.py and kernels/tape.py only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from wager.arch.layers import Absent, DeltaNet, Experts, Gqa, Mamba2, Mla, Recurrent, ShortConv
from wager.arch.spec import Layer, ModelSpec
from wager.errors import ModelError, SetupError, UsageError
from wager.kernels.arrays import INT32, Array, DType, empty, unallocated, zeros
from wager.kernels.base import BLOCK_SIZE, TargetOutput
from wager.kernels.blocks import Matrix, QuantisedMatrix, stack
from wager.kernels.cpu import Kernels
from wager.kernels.cpu_cache import CpuCache, JoinedCache
from wager.kernels.cpu_states import CpuStates, state_bytes
from wager.kernels.tape import Gates, Heads, Routing, RowSet, Tap, Tape
from wager.models.packed_cache import PackedStore
from wager.models.weights import Matrices, Weights, in_one_form, num_parameters, tensor_shapes
from wager.types import KVDtype, PackedBatch

# ---- memory in bytes, known before anything is allocated -------------------------------------------------------------


def weight_bytes(matrices: Matrices, kernels: Kernels) -> int:
    """Bytes of the packed matrices, each in its form, and of the rest in float32. A tied embedding is the head."""
    packed = list(matrices.packed())
    rest = num_parameters(matrices.spec) - sum(outputs * inputs for (outputs, inputs), _ in packed)
    return sum(kernels.matrix_bytes(*shape, known) for shape, known in packed) + 4 * rest


def block_bytes(spec: ModelSpec, kernels: Kernels, kv_dtype: KVDtype = "bf16") -> int:
    """Bytes of one cache block: BLOCK_SIZE positions, keys and values or latents of all layers."""
    total = 0
    for layer in spec.layers:
        if kind := layer.caching:
            width = kind.cache_width
            scales = 4 * width // kind.head_dim  # float32, of each key and each value of a head in 8 bits
            total += layer.count * (width + scales if kv_dtype == "q8" else width * kernels.act.itemsize)
    return BLOCK_SIZE * total


def num_snapshots(max_sequences: int) -> int:
    """Snapshots of recurrent states that are kept beside those of running sequences."""
    return max(4, max_sequences // 2)


def states_bytes(
    spec: ModelSpec,
    *,
    max_rows: int,
    max_sequences: int,
    spare: int | None = None,
    layers: Sequence[int] | None = None,
) -> int:
    """Bytes of the recurrent states of running sequences, of `spare` others (None: of snapshots), and of what a pass
    saves of guesses, in these `layers` (None: all)."""
    kinds = spec.ordered_layers if layers is None else [spec.ordered_layers[index] for index in layers]
    recurrent = sum(layer.recurrent is not None for layer in kinds)
    if spec.recurrent is None or not recurrent:
        return 0
    slots = max_sequences + (num_snapshots(max_sequences) if spare is None else spare)
    return state_bytes(spec.recurrent.state, layers=recurrent, slots=slots, max_rows=max_rows)


def workspace_bytes(
    spec: ModelSpec,
    kernels: Kernels,
    *,
    max_rows: int,
    max_sequences: int,
    max_blocks: int,
    max_logits_rows: int | None = None,
) -> int:
    """Bytes of the buffers of a pass: activations, logits, integer inputs and the rotation tables."""
    logits_rows = max_rows if max_logits_rows is None else max_logits_rows
    limits = {"positions": max_blocks * BLOCK_SIZE, "max_rows": max_rows, "max_logits_rows": logits_rows}
    logits = logits_rows * (4 * (spec.vocab + 1) + kernels.act.itemsize * spec.hidden)
    integers = 4 * (7 * max_rows + max_sequences * (10 + max_blocks))
    return buffer_bytes(spec, kernels, **limits) + logits + integers


def buffer_bytes(spec: ModelSpec, kernels: Kernels, *, positions: int, max_rows: int, max_logits_rows: int) -> int:
    """Bytes of LayerBuffers."""
    limits = {"max_rows": max_rows, "max_logits_rows": max_logits_rows}
    buffers = LayerBuffers(spec, kernels, positions=0, **limits, make=unallocated)
    return buffers.nbytes + 4 * positions * sum(map(spec.rope_dim, spec.rotations))


def _widths(spec: ModelSpec) -> tuple[int, int, int]:
    """The most elements that layers have of a row's queries, of what goes into the output projection, and of what is
    projected."""
    kinds = spec.attentions
    projected = (kind.qkv_width for kind in kinds if isinstance(kind, Gqa))
    queries = (kind.heads * kind.head_dim for kind in kinds)
    return max(queries), max(kind.output_width for kind in kinds), max(projected, default=0)


def _ungated(spec: ModelSpec) -> int:
    """The widest inner layer of a feed-forward without a gate, which is made as floats; 0 for none."""
    dense, experts = spec.dense, spec.experts
    alone = dense.width if dense and not dense.gated else 0
    return max(alone, experts.shared_inner if experts and not experts.gated else 0)


# ---- layers ----------------------------------------------------------------------------------------------------------


class LayerWeights:
    """The tensors of layer `index` by their short names; `known` are the shapes of all the model's tensors."""

    def __init__(
        self,
        weights: Weights,
        matrices: Matrices,
        store: PackedStore,
        known: Mapping[str, Sequence[int]],
        *,
        index: int,
    ) -> None:
        self._weights = weights
        self._matrices = matrices
        self._store = store
        self._known = known
        self.index = index

    def _name(self, part: str, suffix: str) -> str:
        return f"layers.{self.index}.{part}.{suffix}"

    def packed(self, name: str, make: Callable[[], Any]) -> Any:
        """What the store has under that name for the layer, or `make` packs."""
        return self._store.get(f"layers.{self.index}.{name}", make)

    def matrix(self, part: str) -> Matrix:
        return self._matrices.read(self._name(part, "weight"))

    def floats(self, part: str, dtype: DType) -> Array:
        return self._weights.read(self._name(part, "weight"), dtype)

    def vector(self, part: str, suffix: str = "weight") -> Array:
        return self._weights.read(self._name(part, suffix))

    def product(self, *parts: str) -> Any:
        """Matrices of the same inputs, packed as one, with their biases."""

        def make() -> Any:
            biases = [bias for part in parts if (bias := self.bias(part)) is not None]
            matrix = stack([self.matrix(part) for part in parts])
            return self._store.kernels.pack(matrix, np.concatenate(biases) if biases else None)

        return self.packed("+".join(parts), make)

    def rows(self, part: str, heads: int, *, first: int = 0) -> list[Matrix]:
        """The rows of each head of a matrix, from its `first` on."""
        matrix = self.matrix(part)
        each = matrix.shape[0] // heads
        places = [slice(head * each + first, (head + 1) * each) for head in range(heads)]
        return [matrix.take(place) if isinstance(matrix, QuantisedMatrix) else matrix[place] for place in places]

    def refit(self, heads: Array) -> list[Matrix]:
        """Matrices of heads that were cut from one, each in the form that they are multiplied in."""
        return [self._matrices.refit(head) for head in heads]

    def expert(self, expert: int) -> tuple[Matrix | None, Matrix, Matrix]:
        """Gate, if it has one, up and down of one expert."""
        if self._name(f"{expert}.expert_gate", "weight") not in self._known:
            return None, self.matrix(f"{expert}.expert_up"), self.matrix(f"{expert}.expert_down")
        gate, up = in_one_form([self.matrix(f"{expert}.expert_{part}") for part in ("gate", "up")])
        return gate, up, self.matrix(f"{expert}.expert_down")

    def expert_biases(self, expert: int) -> tuple[Array, Array, Array]:
        """Of gate, up and down of one expert."""
        gate, up, down = (self.vector(f"{expert}.expert_{part}", "bias") for part in ("gate", "up", "down"))
        return gate, up, down

    def bias(self, part: str) -> Array | None:
        return self.vector(part, "bias") if self._name(part, "bias") in self._known else None

    def groups(self, *parts: str) -> list[list[str]]:
        """Matrices of the same inputs as few products: neighbours of one form are one."""
        groups: list[list[str]] = []
        for part in parts:
            same = groups and self._form(part) == self._form(groups[-1][-1])
            groups = [*groups[:-1], [*groups[-1], part]] if same else [*groups, [part]]
        return groups

    def outputs(self, group: Sequence[str]) -> int:
        return sum(self._known[self._name(part, "weight")][0] for part in group)

    def _form(self, part: str) -> str | None:
        return self._matrices.formats[self._name(part, "weight")]


def layer_cache(
    kinds: Sequence[Gqa | Mla], kernels: Kernels, *, num_blocks: int, kv_dtype: KVDtype = "bf16"
) -> CpuCache | JoinedCache:
    """A cache for layers of these kinds: keys and values, or latents."""
    if kinds and isinstance(latent := kinds[0], Mla):
        sizes = {"layers": len(kinds), "num_blocks": num_blocks, "rank": latent.kv_rank, "rope": latent.rope}
        return kernels.latent_cache(**sizes)
    shapes = [(kind.kv_heads, kind.head_dim) for kind in kinds]
    counts = Counter(shapes)
    parts = [
        kernels.cache(layers=count, num_blocks=num_blocks, kv_heads=kv_heads, head_dim=head_dim, kv_dtype=kv_dtype)
        for (kv_heads, head_dim), count in counts.items()
    ]
    order = list(counts)
    places = [(order.index(shape), shapes[:layer].count(shape)) for layer, shape in enumerate(shapes)]
    return parts[0] if len(parts) == 1 else JoinedCache(parts, places)


def last_layer_rows(layer: Layer) -> RowSet:
    """The rows that a last layer must compute past its keys and values where nothing reads the rows without logits.
    (Latent and gated attention have products of all rows, and the choice of experts is recorded.)"""
    attention = layer.attention
    plain = isinstance(attention, Absent) or (isinstance(attention, Gqa) and not attention.gated)
    return "logits" if plain and not isinstance(layer.ffn, Experts) else "rows"


def num_last_layers(layers: Sequence[Layer]) -> int:
    """How many layers at the end compute only the rows with logits past their keys and values (see `last_layer_rows`):
    the last one, and those before it while none behind has keys and values of its own, which other rows read."""
    count = 0
    for layer in reversed(layers):
        if last_layer_rows(layer) == "rows" or (count and layers[-count].caching) or layer.recurrent:
            break
        count += 1
    return count


def of_width(rows: Array, width: int) -> Array:
    """The memory of a buffer as as many rows of a smaller width, without gaps."""
    return rows.reshape(-1)[: len(rows) * width].reshape(len(rows), width)


class LayerBuffers:
    """Buffers that all layers share, [max_rows, ...] each: residual `x` and its norm, queries (and keys and values)
    before the rotation, rotated `q`, the input of the output projection, the inner layers of the feed-forwards; those
    of latent attention, of recurrent layers, of experts, of embeddings by layer and of norms behind sublayers where the
    model has them; and `selected`, the logits rows of `x`. `rotations` are tables for `positions` by Gqa.rotation."""

    def __init__(
        self,
        spec: ModelSpec,
        kernels: Kernels,
        *,
        positions: int,
        max_rows: int,
        max_logits_rows: int,
        make: Callable[..., Array] = zeros,
    ) -> None:
        rows = max_rows
        act = kernels.act
        attention = spec.attention
        heads, (queries, outputs, projected) = attention.heads, _widths(spec)
        ropes = {kind: spec.details.rope_of(kind) for kind in spec.rotations}
        self.rotations = {
            kind: rope.table(positions, spec.rope_dim(kind)) for kind, rope in ropes.items() if rope is not None
        }
        self.x, self.normed = make(rows, spec.hidden), make(rows, spec.hidden, dtype=act)
        self.selected = make(max_logits_rows, spec.hidden)
        if spec.details.post_norms:
            self.added = make(rows, spec.hidden)
        self.q = make(rows, queries, dtype=act)
        self.attention_out = make(rows, outputs, dtype=act)
        if isinstance(attention, Mla):
            q_rank = attention.q_rank or 0
            self.qkv = make(rows, attention.query_width)
            self.kv = make(rows, attention.cache_width)
            self.q_latent = make(rows, q_rank)
            self.q_latent_normed = make(rows, q_rank, dtype=act)
            self.q_nope = make(rows, heads * attention.nope, dtype=act)
            self.latent_out = make(rows, heads * attention.kv_rank, dtype=act)
        else:
            self.qkv = make(rows, projected)
            self.gate = make(rows if attention.gated else 0, attention.query_width)
        if recurrent := spec.recurrent:
            state = recurrent.state
            self.mixed = make(2 * rows, state.width)
            self.convolved = make(2 * rows, state.channels + 2 * state.heads)
            self.beside = make(rows, recurrent.beside_width)
            self.recurred = make(rows, recurrent.value_width)
            self.state_out = make(rows, recurrent.value_width, dtype=act)
        self.inner_floats = make(rows, _ungated(spec))
        if dense := spec.dense:
            self.inner = make(rows, dense.width, dtype=act)
        if experts := spec.experts:
            self.routing = Routing.allocate(
                experts, max_rows=rows, hidden=experts.outer(spec.hidden), act=act, make=make
            )
            self.latent = make(rows, experts.latent, dtype=act)
            self.latent_sum, self.no_latent = make(rows, experts.latent), make(rows, experts.latent)
            self.shared_inner = make(rows, experts.shared_inner, dtype=act)
            self.shared_out = make(rows if experts.shared_gate or experts.apart else 0, spec.hidden)
            self.nothing = make(rows if experts.apart else 0, spec.hidden)
        if further := spec.layer_embedding:
            self.layer_embeds = make(rows, spec.num_layers * further)
            self.projected = make(rows, spec.num_layers * further)
            self.into_embed, self.embed_gated = make(rows, further), make(rows, further, dtype=act)

    @property
    def nbytes(self) -> int:
        """Bytes of all but the tables of `rotations`."""
        return sum(each.nbytes for each in vars(self).values() if each is not self.rotations)


class LayerRecorder:
    """Records layers of `spec` one after the other; `states` are of its recurrent ones. `expert_choices` collects, with
    `keep_expert_choices`, a buffer of the experts that each layer with experts chooses, int32 [max_rows, top_k]."""

    def __init__(
        self,
        spec: ModelSpec,
        kernels: Kernels,
        tape: Tape,
        kv_cache: CpuCache | JoinedCache,
        buffers: LayerBuffers,
        *,
        states: CpuStates | None = None,
        keep_expert_choices: bool = False,
    ) -> None:
        self.states = states
        self.spec = spec
        self.kernels = kernels
        self.tape = tape
        self.cache = kv_cache
        self.buffers = buffers
        self.expert_choices: list[Array] = []
        self._keep_expert_choices = keep_expert_choices

    def record(
        self,
        tensors: LayerWeights,
        layer: Layer,
        index: int,
        *,
        of: RowSet,
        state_index: int = 0,
        selected: bool = False,
    ) -> None:
        """A layer over `x`, whose keys and values are layer `index` of the cache and whose state is layer `state_index`
        of the states. With `of` "logits" only those rows are computed past the keys and values, to `selected`, and x
        stays as it was; in a layer without keys and values of its own, and where they were `selected` before, these
        alone."""
        buffers = self.buffers
        if of == "logits" and not selected and layer.attending and not layer.caching:
            self.tape.select(buffers.x, buffers.selected)
            selected = True
        read: RowSet = "logits" if selected else "rows"
        if layer.mixers:
            self._enter(tensors, "attn", buffers.selected if selected else buffers.x, of=read)
        attention = layer.attending
        if isinstance(attention, Mla):
            self._latent_attention(tensors, attention, index)
        elif attention is not None:
            self._projections(tensors, attention, index, of=read)
        if layer.recurrent is not None:
            if self.states is None:
                raise ModelError("A recurrent layer needs states.", "This is a defect in wager.")
            self._recurrence(tensors, layer.recurrent, self.states, state_index)
        self.record_rest(tensors, layer, index, of=of, selected=selected)

    def record_rest(
        self, tensors: LayerWeights, layer: Layer, index: int, *, of: RowSet, selected: bool = False
    ) -> None:
        """What follows the keys and values of a layer: attention (of plain layers), its output and the feed-forward."""
        buffers = self.buffers
        tape = self.tape
        x = self.buffers.x
        details, attention = self.spec.details, layer.attending
        if isinstance(attention, Gqa):
            attention_out = of_width(buffers.attention_out, attention.output_width)
            cache, at = self.cache.of_layer(index)
            tape.attention(
                of_width(buffers.q, attention.query_width),
                cache,
                at,
                window=attention.window,
                out=attention_out,
                scale=details.attention_scale,
                soft_cap=details.attention_cap,
                sinks=tensors.vector("sinks") if attention.sinks else None,
                of=of,
            )
            if attention.gated:
                tape.sigmoid_gate(attention_out, buffers.gate)
        if of == "logits":
            x = buffers.selected
            if not selected:
                tape.select(buffers.x, x)
        if layer.recurrent is not None:
            scale = details.multipliers.state_out
            self._leave(tensors, "attn", buffers.state_out, "state_out", x, of=of, scale=scale)
        if attention is not None:
            scale = details.multipliers.attention_out
            inner = of_width(buffers.attention_out, attention.output_width)
            self._leave(tensors, "attn", inner, "o", x, of=of, scale=scale)
        if isinstance(layer.ffn, Absent):
            return
        if isinstance(layer.ffn, Experts) and layer.ffn.apart:
            self._experts_apart(tensors, layer.ffn)
        else:
            self._enter(tensors, "mlp", x, of=of)
            if isinstance(layer.ffn, Experts):
                self._experts(tensors, layer.ffn)
            else:
                inner = of_width(buffers.inner, layer.ffn.width)
                self._feed_forward(tensors, "", inner, of=of, gated=layer.ffn.gated)
        if self.spec.layer_embedding:
            self._layer_embedding(tensors, x, of=of)

    def _enter(self, tensors: LayerWeights, part: str, x: Array, *, of: RowSet) -> None:
        """What a sublayer reads of the residual stream x, to `normed`."""
        if self.spec.details.pre_norms:
            norm = tensors.vector(f"{part}_norm")
            self.tape.rms_norm(x, norm, self.spec.details.norm_eps, self.buffers.normed, of=of)
        else:
            self.tape.narrow(x, self.buffers.normed, of=of)

    def _layer_embedding(self, tensors: LayerWeights, x: Array, *, of: RowSet) -> None:
        """What a token's further embedding for the layer adds behind it."""
        tape, buffers, width = self.tape, self.buffers, self.spec.layer_embedding
        first = tensors.index * width
        tape.narrow(x, buffers.normed, of=of)
        tape.linear(buffers.normed, tensors.product("into_embed"), buffers.into_embed, of=of)
        embeds = buffers.layer_embeds[:, first : first + width]
        tape.multiply(buffers.into_embed, embeds, buffers.embed_gated, gelu=True, of=of)
        self._leave(tensors, "embed", buffers.embed_gated, "out_of_embed", x, of=of)

    def _leave(
        self, tensors: LayerWeights, part: str, inner: Array, matrix: str, x: Array, *, of: RowSet, scale: float = 1.0
    ) -> None:
        """The last product of a sublayer, times `scale`, added to the residual stream x."""
        details, weight = self.spec.details, tensors.product(matrix)
        if not details.post_norms:
            self.tape.linear(inner, weight, x, add=True, scale=details.residual_scale * scale, of=of)
            return
        self.tape.linear(inner, weight, self.buffers.added, scale=scale, of=of)
        self._add_normed(tensors, part, self.buffers.added, x, of=of)

    def _add_normed(self, tensors: LayerWeights, part: str, inner: Array, x: Array, *, of: RowSet) -> None:
        """What a sublayer gives, normed and added to the residual stream, which the last one of a layer scales."""
        details = self.spec.details
        last = details.layer_scales and part == ("embed" if self.spec.layer_embedding else "mlp")
        scale = float(tensors.vector("scale")[0]) if last else 1.0
        norm = tensors.vector(f"{part}_post_norm")
        self.tape.rms_norm(inner, norm, details.norm_eps, x, add=True, scale=scale, of=of)

    def _projections(self, tensors: LayerWeights, attention: Gqa, index: int, *, of: RowSet) -> None:
        details = self.spec.details
        tape = self.tape
        buffers = self.buffers
        qkv, first = of_width(buffers.qkv, attention.qkv_width), 0
        for group in tensors.groups(*attention.projected):
            last = first + tensors.outputs(group)
            tape.linear(buffers.normed, tensors.product(*group), qkv[:, first:last], of=of)
            first = last
        if attention.gated:
            tape.linear(buffers.normed, tensors.product("q_gate"), buffers.gate, of=of)
        weights = [tensors.vector(f"{part}_norm") for part in attention.projected[:2]] if details.qk_norm else []
        if details.whole_qk_norm:
            first = 0
            for norm in weights:
                columns = qkv[:, first : first + len(norm)]
                tape.rms_norm(columns, norm, details.norm_eps, columns, of=of)
                first += len(norm)
            weights = []
        norms = (weights[0], weights[1] if len(weights) > 1 else None, details.norm_eps) if weights else None
        table, q = buffers.rotations.get(attention.rotation), of_width(buffers.q, attention.query_width)
        cache, at = self.cache.of_layer(index)
        options: dict[str, Any] = {"rows": attention.projected, "norm_values": details.value_norm, "of": of}
        tape.rotary(qkv, table, norms, cache, at, q, **options)

    def _recurrence(self, tensors: LayerWeights, layer: Recurrent, states: CpuStates, index: int) -> None:
        tape = self.tape
        buffers = self.buffers
        rows = buffers.mixed[len(buffers.x) :]  # those of the pass; accepted guesses stand before them
        weight, multipliers = np.ascontiguousarray(tensors.vector("conv").T), self.spec.details.multipliers
        tape.linear(buffers.normed, tensors.product("z"), buffers.beside, scale=multipliers.state_gate)
        if isinstance(layer, ShortConv):
            b, c, x = (buffers.beside[:, first : first + layer.width] for first in np.arange(3) * layer.width)
            tape.multiply(b, x, rows)
            tape.convolve(buffers.mixed, weight, None, None, states, index, buffers.convolved, silu=False)
            tape.multiply(c, buffers.convolved[len(buffers.x) :], buffers.state_out)
            return
        delta, first, step = isinstance(layer, DeltaNet), 0, multipliers.step
        parts = tensors.groups("mixed", "step", *(("decay",) if delta else ()))
        for group in parts if step == 1 else [["mixed"], ["step"]]:
            last = first + tensors.outputs(group)
            scale = step if group == ["step"] else 1.0
            tape.linear(buffers.normed, tensors.product(*group), rows[:, first:last], scale=scale)
            first = last
        if isinstance(layer, Mamba2):  # scaled inputs of a convolution are a convolution with scaled weights
            sizes = (layer.value_width, layer.groups * layer.state_dim, layer.groups * layer.state_dim)
            scales = np.repeat((multipliers.values, multipliers.keys, multipliers.queries), sizes)
            weight = weight * scales.astype(np.float32)
        gates = Gates(tensors.vector("rates"), tensors.vector("dt"), delta)
        tape.convolve(buffers.mixed, weight, tensors.bias("conv"), gates, states, index, buffers.convolved)
        skip = tensors.vector("skip") if isinstance(layer, Mamba2) else None
        tape.recur(buffers.convolved, _heads(layer), states, index, buffers.recurred, delta=delta, skip=skip)
        mamba, eps = layer if isinstance(layer, Mamba2) else None, self.spec.details.norm_eps
        tape.gated_norm(
            buffers.recurred,
            buffers.beside,
            tensors.vector("state_norm") if mamba is None or mamba.normed else None,
            eps,
            buffers.state_out,
            heads=layer.groups if isinstance(layer, Mamba2) else layer.value_heads,
            gate_first=mamba is not None and mamba.gate_first,
        )

    def _latent_attention(self, tensors: LayerWeights, attention: Mla, index: int) -> None:
        """The absorbed form: each head's key half of kv_b is applied to its query, so that queries are compared with
        latents, and its value half to the attention output."""
        details = self.spec.details
        tape = self.tape
        kernels = self.kernels
        buffers = self.buffers
        eps, normed = details.latent_norm_eps, buffers.normed
        if attention.q_rank:
            tape.linear(normed, tensors.product("q_a"), buffers.q_latent)
            tape.rms_norm(buffers.q_latent, tensors.vector("q_a_norm"), eps, buffers.q_latent_normed)
            normed = buffers.q_latent_normed
        tape.linear(normed, tensors.product("q_b" if attention.q_rank else "q"), buffers.qkv)
        tape.linear(buffers.normed, tensors.product("kv_a"), buffers.kv)
        norm, (cache, at) = (tensors.vector("kv_a_norm"), eps), self.cache.of_layer(index)
        tape.latent(buffers.qkv, buffers.kv, buffers.rotations["global"], norm, cache, at, buffers.q_nope, buffers.q)

        heads = attention.heads

        def keys() -> Any:
            if details.split_latent:
                return kernels.pack_heads(tensors.rows("k_b", heads))
            kv_b = tensors.floats("kv_b", kernels.act).reshape(heads, -1, attention.kv_rank)
            return kernels.pack_heads(tensors.refit(kv_b[:, : attention.nope].swapaxes(1, 2)))

        def values() -> Any:
            if details.split_latent:
                return kernels.pack_heads(tensors.rows("v_b", heads))
            return kernels.pack_heads(tensors.rows("kv_b", heads, first=attention.nope))

        tape.per_head(buffers.q_nope, tensors.packed("kv_b_keys", keys), buffers.q)
        tape.attention(buffers.q, cache, at, window=None, out=buffers.latent_out, scale=details.attention_scale)
        tape.per_head(buffers.latent_out, tensors.packed("kv_b_values", values), buffers.attention_out)

    def _experts_apart(self, tensors: LayerWeights, experts: Experts) -> None:
        """Router, experts and a dense feed-forward that read the residual stream through norms of their own."""
        tape, buffers, eps = self.tape, self.buffers, self.spec.details.norm_eps
        x, normed, both = buffers.x, buffers.normed, buffers.shared_out
        tape.rms_norm(x, tensors.vector("router_norm") * np.float32(self.spec.hidden**-0.5), eps, normed)
        routing = self._route(tensors, experts)
        tape.rms_norm(x, tensors.vector("expert_norm"), eps, normed)
        tape.copy(buffers.nothing, buffers.added)
        self._routed(tensors, experts, routing, normed, buffers.added)
        tape.rms_norm(buffers.added, tensors.vector("expert_post_norm"), eps, both)
        tape.rms_norm(x, tensors.vector("mlp_norm"), eps, normed)
        self._into(tensors, "shared_", buffers.shared_inner, of="rows")
        tape.linear(buffers.shared_inner, tensors.product("shared_down"), buffers.added)
        tape.rms_norm(buffers.added, tensors.vector("shared_post_norm"), eps, both, add=True)
        self._add_normed(tensors, "mlp", both, x, of="rows")

    def _route(self, tensors: LayerWeights, experts: Experts) -> Routing:
        """The choice of experts by what is in `normed`."""
        routing = self.buffers.routing
        if self._keep_expert_choices:
            routing = replace(routing, ids=zeros(*routing.ids.shape, dtype=INT32))
            self.expert_choices.append(routing.ids)
        details = self.spec.details
        scaled = replace(experts.gating, scale=experts.gating.scale * details.residual_scale)
        experts = replace(experts, gating=scaled)
        bias = tensors.vector("correction", "bias") if experts.gating.correction_bias else None
        scales = tensors.vector("expert_scales") if experts.gating.expert_scales else None
        options = {"logit_bias": tensors.bias("router"), "scales": scales}
        self.tape.route(self.buffers.normed, tensors.vector("router"), bias, experts, routing, **options)
        return routing

    def _routed(self, tensors: LayerWeights, experts: Experts, routing: Routing, x: Array, out: Array) -> None:
        """Adds the outputs of the chosen experts for rows x."""

        def pack() -> Any:
            every = range(experts.count)
            biases = [tensors.expert_biases(expert) for expert in every] if experts.biased else None
            return self.kernels.pack_experts(map(tensors.expert, every), count=experts.count, biases=biases)

        packed = tensors.packed("experts", pack)
        self.tape.experts(x, packed, experts, routing, out, activation=self.spec.details.activation)

    def _experts(self, tensors: LayerWeights, experts: Experts) -> None:
        tape, buffers = self.tape, self.buffers
        routing = self._route(tensors, experts)
        if experts.latent:
            latent, floats = buffers.latent, buffers.latent_sum
            tape.linear(buffers.normed, tensors.product("latent_in"), floats)
            tape.narrow(floats, latent)
            tape.copy(buffers.no_latent, floats)
            self._routed(tensors, experts, routing, latent, floats)
            tape.narrow(floats, latent)
            tape.linear(latent, tensors.product("latent_out"), buffers.x, add=True)
        else:
            self._routed(tensors, experts, routing, buffers.normed, buffers.x)
        if experts.shared_gate:
            self._into(tensors, "shared_", buffers.shared_inner, of="rows")
            tape.linear(buffers.shared_inner, tensors.product("shared_down"), buffers.shared_out)
            tape.add_gated(buffers.normed, tensors.vector("shared_router"), buffers.shared_out, buffers.x)
        elif experts.shared:
            self._feed_forward(tensors, "shared_", buffers.shared_inner, of="rows", gated=experts.gated)

    def _feed_forward(
        self, tensors: LayerWeights, prefix: str, inner: Array, *, of: RowSet, gated: bool = True
    ) -> None:
        out = self.buffers.x if of == "rows" else self.buffers.selected
        if gated:
            self._into(tensors, prefix, inner, of=of)
        else:
            floats = of_width(self.buffers.inner_floats, inner.shape[-1])
            self.tape.linear(self.buffers.normed, tensors.product(prefix + "up"), floats, of=of)
            self.tape.narrow(floats, inner, squared_relu=True, of=of)
        scale = self.spec.details.multipliers.down
        self._leave(tensors, "mlp", inner, prefix + "down", out, of=of, scale=scale)

    def _into(self, tensors: LayerWeights, prefix: str, inner: Array, *, of: RowSet) -> None:
        """The inner values of a feed-forward."""
        kernels = self.kernels

        def into() -> Any:
            gate, up = in_one_form([tensors.matrix(prefix + part) for part in ("gate", "up")])
            biases = [tensors.bias(prefix + part) for part in ("gate", "up")]
            both = (biases[0], biases[1]) if biases[0] is not None and biases[1] is not None else None
            return kernels.pack_gated(gate, up, bias=both)

        details, packed = self.spec.details, tensors.packed(prefix + "gate+up", into)
        scale = details.multipliers.gate
        self.tape.gated(self.buffers.normed, packed, inner, activation=details.activation, gate_scale=scale, of=of)


def _heads(layer: DeltaNet | Mamba2) -> Heads:
    """Where queries, keys and values lie in the channels of a recurrent layer."""
    if isinstance(layer, Mamba2):
        width = layer.groups * layer.state_dim
        return Heads(layer.groups, q_at=layer.value_width + width, k_at=layer.value_width, v_at=0)
    width = layer.key_heads * layer.key_dim
    return Heads(layer.key_heads, q_at=0, k_at=width, v_at=2 * width, tiled=layer.tiled)


# ---- the decoder -----------------------------------------------------------------------------------------------------

NEVER = np.float32(-1e30)
"""The logit of a token that is never drawn: finite, and of probability 0 whatever is done to logits."""

_MOST_OUTPUTS = 256
"""Results whose views are kept; each is a few small objects."""


def refuse_int8_latents(kv_dtype: KVDtype) -> None:
    """SetupError if a latent cache is to hold int8."""
    if kv_dtype != "bf16":
        raise SetupError(
            f"kv_dtype = {kv_dtype!r} is not possible with latent attention, whose cache is small already.",
            "Leave out --kv-dtype for this model.",
        )


class Decoder:
    """A target: packs the weights, allocates cache and buffers, records the tape once. Implements kernels.base.Target.

    `num_blocks` is the size of the cache, `max_rows` the maximum rows of one pass, `max_logits_rows` the maximum
    of them with logits (None: all), `max_sequences` the maximum sequences of one pass, `max_blocks` the maximum cache
    blocks of one sequence. ModelError if a tensor cannot be read.

    `dtype` says in which form matrices are multiplied, see weights.FORMAT_OF_DTYPE; `weight_form` describes the
    result. `store` has packed weights, or keeps those that are packed here, and afterwards tells their digests.
    `expert_choices` holds, with `keep_expert_choices`, the experts that each layer with experts chose in the last pass,
    int32 [max_rows, top_k] for each, ascending in a row; without it all layers share one buffer and it is empty.
    `embedding` and `head` are the packed matrices, for drafters that share them. `layers` are those of the model that
    are run, ascending (None: all); the norm and the head follow the last of them. Beside the recurrent states of each
    sequence there is room for `spare_states` others (None: for as many snapshots as `num_snapshots` says). The tokens
    `suppressed` have logits that nothing draws, and which are finite.
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
        spare_states: int | None = None,
        suppressed: Sequence[int] = (),
    ) -> None:
        spec = self.spec = weights.spec
        self.layers = tuple(range(spec.num_layers)) if layers is None else tuple(layers)
        self.kernels = kernels
        self.vocab = spec.vocab
        self.max_rows = max_rows
        self.max_sequences = max_sequences
        self.max_logits_rows = max_rows if max_logits_rows is None else min(max_logits_rows, max_rows)
        self.max_blocks = max_blocks
        if isinstance(spec.attention, Mla):
            refuse_int8_latents(kv_dtype)
        kinds = [spec.ordered_layers[index] for index in self.layers]
        recurrent = sum(layer.recurrent is not None for layer in kinds)
        caching = [kind for layer in kinds if (kind := layer.caching)] or [spec.attention]
        self.cache = layer_cache(caching, kernels, num_blocks=num_blocks, kv_dtype=kv_dtype)
        self.num_states = max_sequences if recurrent else 0
        """Sequences whose recurrent states are kept; 0 without recurrent layers."""
        spare = num_snapshots(max_sequences) if spare_states is None else spare_states
        self.num_snapshots = spare if recurrent else 0
        self.states: CpuStates | None = None
        if spec.recurrent is not None and recurrent:
            slots = self.num_states + self.num_snapshots
            self.states = kernels.states(spec.recurrent.state, layers=recurrent, slots=slots, max_rows=max_rows)
        limits: dict[str, Any] = {"max_rows": max_rows, "max_sequences": max_sequences, "max_blocks": max_blocks}
        matrices = Matrices(weights, dtype, kernels.act)
        self.weight_form = matrices.description
        self.weight_bytes = weight_bytes(matrices, kernels)
        self.workspace_bytes = workspace_bytes(spec, kernels, **limits, max_logits_rows=self.max_logits_rows)
        self._tape: Tape = kernels.tape(**limits)
        self.buffers = self._tape.buffers
        self._outputs: dict[tuple[int, int], TargetOutput] = {}  # views of the buffers, by rows and those of logits
        self._places: list[Tap] = []  # where each layer begins that is computed for all rows
        self._tap_buffers: dict[int, Array] = {}  # of every layer that was tapped once
        self._tapped: dict[int, Array] = {}
        self._behind: frozenset[int] = frozenset()  # what is tapped behind those layers
        self._behind_tape: Tape | None = None
        self._behind_places: dict[int, Tap] = {}
        self._logits = empty(self.max_logits_rows, spec.vocab)
        self._greedy_tokens = empty(self.max_logits_rows, dtype=INT32)
        self.store = store or PackedStore(kernels)
        self._record(weights, matrices, self.store, suppressed, keep_expert_choices=keep_expert_choices)

    def forward(self, batch: PackedBatch) -> TargetOutput:
        """One pass over the packed rows; see kernels.base.Target. UsageError if the batch exceeds the buffers."""
        if self.buffers.packed is batch:
            rows, sequences, logits_rows, _ = self.buffers.sizes
            if logits_rows > self.max_logits_rows:
                self._check(batch)
        else:
            self._check(batch)
            self._tape.inputs.fill(batch)
            rows = batch.rows
            sequences = batch.num_sequences
            logits_rows = len(batch.logits_indices)
        self._tape.run(rows=rows, sequences=sequences, logits_rows=logits_rows)
        output = self._outputs.get((rows, logits_rows))
        if output is None:
            if len(self._outputs) == _MOST_OUTPUTS:
                self._outputs.clear()
            views = (self._logits[:logits_rows], self._greedy_tokens[:logits_rows], self._selected[:logits_rows])
            taps = {layer: tapped[:rows] for layer, tapped in self._tapped.items()}
            output = self._outputs[rows, logits_rows] = TargetOutput(*views, taps, self._suppressed)
        return replace(output, taps={**output.taps, **self._rows_behind(batch)}) if self._behind else output

    def _rows_behind(self, batch: PackedBatch) -> dict[int, Array]:
        """The residual stream of all rows behind layers that the pass over the batch computed for the rows with logits
        alone, f32 [R, hidden]. Nothing is computed for the last one where all have logits, as in a step that only
        decodes."""
        rows, indices, last = batch.rows, batch.logits_indices, len(self.layers)
        if self._behind == {last} and len(indices) == rows and np.array_equal(indices, np.arange(rows)):
            return {last: self._selected[:rows]}
        if self._behind_tape is None:
            self._behind_tape = self._record_behind()
        found = {layer: self._tap_buffer(layer) for layer in self._behind - {last}}
        for layer, buffer in found.items():
            self._behind_places[layer].copy_to(buffer)
        self._behind_tape.run(rows=rows, sequences=batch.num_sequences, logits_rows=0)
        return {layer: found.get(layer, self._layer_buffers.x)[:rows] for layer in self._behind}

    def _tap_buffer(self, layer: int) -> Array:
        if layer not in self._tap_buffers:
            self._tap_buffers[layer] = empty(self.max_rows, self.spec.hidden)
        return self._tap_buffers[layer]

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
        """From now on passes give the residual stream after these numbers of layers, from 0 (the embeddings) to all
        (before the last norm), in TargetOutput.taps. UsageError for a layer that the model does not have.

        Rows without logits are computed past the last keys and values only while a layer behind them is tapped."""
        last = len(self.layers)
        for layer in layers:
            if not 0 <= layer <= last:
                raise UsageError(
                    f"Layer {layer} cannot be tapped: {self.spec.name} has {last} layers.",
                    f"Tap layers 0 to {last}.",
                )
        self._behind = frozenset(layer for layer in layers if layer >= len(self._places))
        before, self._tapped = self._tapped, {}
        for layer in [layer for layer in layers if layer < len(self._places)]:
            self._tapped[layer] = self._tap_buffer(layer)
        self._outputs.clear()
        for layer in before.keys() ^ self._tapped.keys():
            self._places[layer].copy_to(self._tapped.get(layer))

    def _record(
        self,
        weights: Weights,
        matrices: Matrices,
        store: PackedStore,
        suppressed: Sequence[int],
        *,
        keep_expert_choices: bool,
    ) -> None:
        """Record a pass. A matrix that the store does not have is read and packed, one after the other, so that at most
        one layer is in memory twice."""
        spec = self.spec
        tape = self._tape
        kernels = self.kernels
        buffers = LayerBuffers(
            spec,
            kernels,
            positions=self.max_blocks * BLOCK_SIZE,
            max_rows=self.max_rows,
            max_logits_rows=self.max_logits_rows,
        )
        self._selected = buffers.selected
        embedding = store.get("embed", lambda: kernels.pack(matrices.read("embed.weight")))
        tape.embed(embedding, buffers.x, scale=spec.details.embedding_scale)
        if spec.layer_embedding:
            self._record_layer_embeddings(weights, matrices, store, buffers)
        recorder = LayerRecorder(
            spec, kernels, tape, self.cache, buffers, states=self.states, keep_expert_choices=keep_expert_choices
        )
        kinds = [spec.ordered_layers[index] for index in self.layers]
        known, first_selected = tensor_shapes(spec), len(kinds) - num_last_layers(kinds)
        behind: list[tuple[LayerWeights, Layer, int]] = []  # layers that are computed for rows with logits
        caching = stateful = 0  # layers with keys and values, and with a state, that are recorded
        latest: dict[int | None, int] = {}  # the last of the former by its window
        for place, index in enumerate(self.layers):
            if place <= first_selected:
                self._places.append(tape.tap(buffers.x))
            tensors = LayerWeights(weights, matrices, store, known, index=index)
            layer = kinds[place]
            of: RowSet = "rows" if place < first_selected else "logits"
            window = getattr(layer.attending, "window", None)
            at = caching if layer.caching else latest.get(window, caching)
            recorder.record(tensors, layer, at, of=of, state_index=stateful, selected=place > first_selected)
            if of == "logits":
                behind.append((tensors, layer, at))
            if layer.caching:
                latest[window], caching = caching, caching + 1
            stateful += layer.recurrent is not None
        self.expert_choices = recorder.expert_choices
        self._layer_buffers = buffers
        if behind:
            self._record_behind = partial(self._record_for_all_rows, behind, buffers)
        else:
            self._places.append(tape.tap(buffers.x))
            tape.select(buffers.x, buffers.selected)
        selected_normed = empty(self.max_logits_rows, spec.hidden, dtype=kernels.act)
        head = embedding if spec.tied else store.get("head", lambda: kernels.pack(matrices.read("head.weight")))
        self.embedding, self.head = embedding, head
        norm, eps = weights.read("norm.weight"), spec.details.norm_eps
        tape.rms_norm(buffers.selected, norm, eps, selected_normed, of="logits")
        tape.linear(selected_normed, head, self._logits, of="logits")
        if spec.details.logit_cap is not None:
            tape.soft_cap(self._logits, spec.details.logit_cap, of="logits")
        self._suppressed: tuple[Array, Array] | None = None
        if suppressed:
            never = kernels.pack(np.zeros((1, spec.hidden), kernels.act), np.full(1, NEVER))
            ids, ones = sorted({*suppressed}), np.ones((self.max_rows, 1), np.float32)
            kept = empty(self.max_logits_rows, len(ids))
            for place, token in enumerate(ids):
                column = self._logits[:, token : token + 1]
                tape.multiply(column, ones, kept[:, place : place + 1], of="logits")  # a copy
                tape.linear(selected_normed, never, column, of="logits")
            self._suppressed = np.array(ids), kept
        tape.argmax(self._logits, self._greedy_tokens)

    def _record_layer_embeddings(
        self, weights: Weights, matrices: Matrices, store: PackedStore, buffers: LayerBuffers
    ) -> None:
        """Each token's further embeddings, for each layer: its own, and a projection of the first, normed by layer."""
        spec, tape, kernels = self.spec, self._tape, self.kernels
        width, half = spec.layer_embedding, 2**-0.5  # the two are added, by half of their squares
        table = store.get("layer_embed", lambda: kernels.pack(matrices.read("layer_embed.weight")))
        project = store.get("layer_project", lambda: kernels.pack(matrices.read("layer_project.weight")))
        tape.embed(table, buffers.layer_embeds, scale=width**0.5 * half)
        tape.narrow(buffers.x, buffers.normed)
        tape.linear(buffers.normed, project, buffers.projected, scale=spec.hidden**-0.5)
        norm, into = weights.read("layer_norm.weight") * np.float32(half), buffers.layer_embeds
        tape.rms_norm(buffers.projected, norm, spec.details.norm_eps, into, add=True, groups=spec.num_layers)

    def _record_for_all_rows(self, behind: Sequence[tuple[LayerWeights, Layer, int]], buffers: LayerBuffers) -> Tape:
        """What follows the last keys and values, for all rows, on a tape of its own."""
        tape = self._tape.beside()
        recorder = LayerRecorder(self.spec, self.kernels, tape, self.cache, buffers)
        for place, (tensors, layer, index) in enumerate(behind, len(self.layers) - len(behind)):
            self._behind_places[place] = tape.tap(buffers.x)
            if len(behind) == 1:  # its queries are still there
                recorder.record_rest(tensors, layer, index, of="rows")
            else:
                recorder.record(tensors, layer, index, of="rows")
        return tape
