"""The decoder of every family: a tape of kernel ops recorded once from a ModelSpec, and passes that replay it.

Every difference between families is a value of the spec. LayerRecorder records attention and feed-forward of every
kind; MTP modules use it too. Kernels are used through kernels/cpu.py and kernels/tape.py only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from wager.arch.layers import Absent, DeltaNet, Dense, Experts, Gqa, Mamba2, Mla, Recurrent, ShortConv
from wager.arch.spec import Layer, ModelSpec
from wager.errors import ModelError, UsageError
from wager.kernels.arrays import INT32, Array, DType, empty, zeros
from wager.kernels.base import BLOCK_SIZE, TargetOutput
from wager.kernels.blocks import Matrix, QuantisedMatrix, stack
from wager.kernels.cpu import Kernels
from wager.kernels.cpu_cache import CpuCache
from wager.kernels.cpu_states import CpuStates, state_bytes
from wager.kernels.tape import Gates, Heads, Routing, RowSet, Tap, Tape
from wager.models.packed_cache import PackedStore
from wager.models.weights import Matrices, Weights, in_one_form, tensor_shapes
from wager.types import KVDtype, PackedBatch

# ---- memory in bytes, known before anything is allocated -------------------------------------------------------------


def weight_bytes(matrices: Matrices, kernels: Kernels) -> int:
    """Bytes of the packed matrices, each in its form, and of the rest in float32. A tied embedding is the head."""
    spec = matrices.spec
    packed = sum(kernels.matrix_bytes(*shape, known) for shape, known in matrices.packed())
    convolutions = spec.num_recurrent * spec.recurrent.conv * spec.recurrent.channels if spec.recurrent else 0
    return packed + 4 * (spec.vector_elements + spec.elements()["router"] + convolutions)


def block_bytes(spec: ModelSpec, kernels: Kernels, kv_dtype: KVDtype = "bf16") -> int:
    """Bytes of one cache block: BLOCK_SIZE positions, keys and values or latents of all layers."""
    width, layers = spec.attention.cache_width, spec.num_attending
    if kv_dtype == "q8":  # and a float32 scale for each key and each value of a head
        return layers * BLOCK_SIZE * (width + 4 * width // spec.attention.head_dim)
    return layers * BLOCK_SIZE * width * kernels.act.itemsize


def num_snapshots(max_sequences: int) -> int:
    """Snapshots of recurrent states that are kept beside those of running sequences."""
    return max(4, max_sequences // 2)


def states_bytes(spec: ModelSpec, *, max_rows: int, max_sequences: int) -> int:
    """Bytes of the recurrent states of running sequences, of their snapshots, and of what a pass saves of guesses."""
    if spec.recurrent is None:
        return 0
    slots = max_sequences + num_snapshots(max_sequences)
    return state_bytes(spec.recurrent.state, layers=spec.num_recurrent, slots=slots, max_rows=max_rows)


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
    attention, act = spec.attention, kernels.act.itemsize
    row = 4 * spec.hidden + act * (spec.hidden + attention.heads * attention.head_dim + attention.output_width)
    row += _dense_row(spec.dense, act) if spec.dense else 0
    row += 4 * spec.hidden if spec.details.post_norms else 0
    row += _latent_row(attention, act) if isinstance(attention, Mla) else 4 * attention.qkv_width
    row += _expert_row(spec.hidden, spec.experts, act) if spec.experts else 0
    row += 4 * attention.query_width if isinstance(attention, Gqa) and attention.gated else 0
    row += _recurrent_row(spec.recurrent, act) if spec.recurrent else 0
    logits_row = 4 * (spec.hidden + spec.vocab + 1) + act * spec.hidden
    integers = 4 * (7 * max_rows + max_sequences * (10 + max_blocks))
    integers += 4 * (2 * spec.experts.count + 2) if spec.experts else 0
    table = 4 * max_blocks * BLOCK_SIZE * attention.rope_dim * len(spec.rotations)
    return max_rows * row + logits_rows * logits_row + integers + table


def _dense_row(dense: Dense, act: int) -> int:
    """Bytes per row of the inner layer of a feed-forward, without a gate also as floats."""
    return dense.width * (act if dense.gated else 4 + act)


def _latent_row(attention: Mla, act: int) -> int:
    """Bytes per row between the projections of latent attention."""
    q_rank = attention.q_rank or 0
    floats = attention.query_width + attention.head_dim + q_rank
    return 4 * floats + act * (q_rank + attention.heads * (attention.nope + attention.kv_rank))


def _recurrent_row(layer: Recurrent, act: int) -> int:
    """Bytes per row of a recurrent layer: its rows before and behind the convolution, with accepted guesses before
    them, what goes beside it, and the output."""
    state = layer.state
    mixed = 2 * 4 * (state.width + state.channels + 2 * state.heads)
    return mixed + 4 * (layer.beside_width + layer.value_width) + act * layer.value_width


def _expert_row(hidden: int, experts: Experts, act: int) -> int:
    """Bytes per row of kernels.tape.Routing and of the shared experts' inner layer."""
    choice = 4 + 4 + 4 + act * (hidden + experts.width)
    shared = act * experts.shared_inner + (4 * hidden if experts.shared_gate else 0)
    return 4 * experts.count + experts.active * choice + shared


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
        self._index = index
        self._packed: dict[str, Any] = {}

    def _name(self, part: str, suffix: str) -> str:
        return f"layers.{self._index}.{part}.{suffix}"

    def packed(self, name: str, make: Callable[[], Any]) -> Any:
        """What the store has under that name for the layer, or `make` packs, once."""
        if name not in self._packed:
            self._packed[name] = self._store.get(f"layers.{self._index}.{name}", make)
        return self._packed[name]

    def matrix(self, part: str) -> Matrix:
        return self._matrices.read(self._name(part, "weight"))

    def floats(self, part: str, dtype: DType) -> Array:
        return self._weights.read(self._name(part, "weight"), dtype)

    def vector(self, part: str, suffix: str = "weight") -> Array:
        return self._weights.read(self._name(part, suffix))

    def product(self, *parts: str) -> Any:
        """Matrices of the same inputs, packed as one, with their biases."""
        return self.packed("+".join(parts), lambda: self._store.kernels.pack(*self._stacked(parts)))

    def _stacked(self, parts: Sequence[str]) -> tuple[Matrix, Array | None]:
        biases = [bias for part in parts if (bias := self.bias(part)) is not None]
        return stack([self.matrix(part) for part in parts]), np.concatenate(biases) if biases else None

    def rows(self, part: str, heads: int, *, first: int = 0) -> list[Matrix]:
        """The rows of each head of a matrix, from its `first` on."""
        matrix = self.matrix(part)
        each = matrix.shape[0] // heads
        places = [slice(head * each + first, (head + 1) * each) for head in range(heads)]
        return [matrix.take(place) if isinstance(matrix, QuantisedMatrix) else matrix[place] for place in places]

    def refit(self, heads: Array) -> list[Matrix]:
        """Matrices of heads that were cut from one, each in the form that they are multiplied in."""
        return [self._matrices.refit(head) for head in heads]

    def expert(self, expert: int) -> tuple[Matrix, Matrix, Matrix]:
        """Gate, up and down of one expert."""
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


def layer_cache(spec: ModelSpec, kernels: Kernels, *, layers: int, num_blocks: int, kv_dtype: KVDtype) -> CpuCache:
    """A cache for that number of layers of a model's kind: keys and values, or latents."""
    attention = spec.attention
    if isinstance(attention, Mla):
        rank, rope = attention.kv_rank, attention.rope
        return kernels.latent_cache(layers=layers, num_blocks=num_blocks, rank=rank, rope=rope)
    shape = {"layers": layers, "num_blocks": num_blocks, "kv_heads": attention.kv_heads}
    return kernels.cache(**shape, head_dim=attention.head_dim, kv_dtype=kv_dtype)


def last_layer_rows(layer: Layer) -> RowSet:
    """The rows that a last layer must compute past its keys and values where nothing reads the rows without logits.
    (Latent and gated attention have products of all rows, and the choice of experts is recorded.)"""
    attention = layer.attention
    plain = isinstance(attention, Absent) or (isinstance(attention, Gqa) and not attention.gated)
    return "logits" if plain and not isinstance(layer.ffn, Experts) else "rows"


class LayerBuffers:
    """Buffers that all layers share, [max_rows, ...] each: residual `x` and its norm, queries (and keys and values)
    before the rotation, rotated `q`, the input of the output projection, the inner layers of the feed-forwards; those
    of latent attention, of recurrent layers, of experts and of norms behind sublayers where the model has them; and
    `selected`, the logits rows of `x`. `rotations` are the tables for `positions` by Gqa.rotation."""

    def __init__(
        self, spec: ModelSpec, kernels: Kernels, *, positions: int, max_rows: int, max_logits_rows: int
    ) -> None:
        rows = max_rows
        act = kernels.act
        attention = spec.attention
        heads = attention.heads
        ropes = {kind: spec.details.rope_of(kind) for kind in spec.rotations}
        self.rotations = {
            kind: rope.table(positions, attention.rope_dim) for kind, rope in ropes.items() if rope is not None
        }
        self.x, self.normed = empty(rows, spec.hidden), empty(rows, spec.hidden, dtype=act)
        self.selected = empty(max_logits_rows, spec.hidden)
        if spec.details.post_norms:
            self.added = empty(rows, spec.hidden)
        self.q = zeros(rows, heads * attention.head_dim, dtype=act)
        self.attention_out = empty(rows, attention.output_width, dtype=act)
        if isinstance(attention, Mla):
            q_rank = attention.q_rank or 0
            self.qkv = empty(rows, attention.query_width)
            self.kv = empty(rows, attention.cache_width)
            self.q_latent = empty(rows, q_rank)
            self.q_latent_normed = empty(rows, q_rank, dtype=act)
            self.q_nope = empty(rows, heads * attention.nope, dtype=act)
            self.latent_out = empty(rows, heads * attention.kv_rank, dtype=act)
        else:
            self.qkv = empty(rows, attention.qkv_width)
            self.gate = empty(rows if attention.gated else 0, attention.query_width)
        if recurrent := spec.recurrent:
            state = recurrent.state
            self.mixed = empty(2 * rows, state.width)
            self.convolved = empty(2 * rows, state.channels + 2 * state.heads)
            self.beside = empty(rows, recurrent.beside_width)
            self.recurred = empty(rows, recurrent.value_width)
            self.state_out = empty(rows, recurrent.value_width, dtype=act)
        if dense := spec.dense:
            self.inner = empty(rows, dense.width, dtype=act)
            self.inner_floats = empty(0 if dense.gated else rows, dense.width)
        if experts := spec.experts:
            self.routing = Routing.allocate(experts, max_rows=rows, hidden=spec.hidden, act=act)
            self.shared_inner = empty(rows, experts.shared_inner, dtype=act)
            self.shared_out = empty(rows if experts.shared_gate else 0, spec.hidden)


class LayerRecorder:
    """Records layers of `spec` one after the other; `states` are of its recurrent ones. `expert_choices` collects, with
    `keep_expert_choices`, a buffer of the experts that each layer with experts chooses, int32 [max_rows, top_k]."""

    def __init__(
        self,
        spec: ModelSpec,
        kernels: Kernels,
        tape: Tape,
        kv_cache: CpuCache,
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

    def record(self, tensors: LayerWeights, layer: Layer, index: int, *, of: RowSet, state_index: int = 0) -> None:
        """A layer over `x`, whose keys and values are layer `index` of the cache and whose state is layer `state_index`
        of the states. With `of` "logits" only those rows are computed past the keys and values, to `selected`, and x
        stays as it was."""
        if layer.mixers:
            self._enter(tensors, "attn", self.buffers.x, of="rows")
        attention = layer.attending
        if isinstance(attention, Mla):
            self._latent_attention(tensors, attention, index)
        elif attention is not None:
            self._projections(tensors, attention, index)
        if layer.recurrent is not None:
            if self.states is None:
                raise ModelError("A recurrent layer needs states.", "This is a defect in wager.")
            self._recurrence(tensors, layer.recurrent, self.states, state_index)
        self.record_rest(tensors, layer, index, of=of)

    def record_rest(self, tensors: LayerWeights, layer: Layer, index: int, *, of: RowSet) -> None:
        """What follows the keys and values of a layer: attention (of plain layers), its output and the feed-forward."""
        buffers = self.buffers
        tape = self.tape
        x = self.buffers.x
        details, attention = self.spec.details, layer.attending
        if isinstance(attention, Gqa):
            tape.attention(
                buffers.q,
                self.cache,
                index,
                window=attention.window,
                out=buffers.attention_out,
                scale=details.attention_scale,
                soft_cap=details.attention_cap,
                sinks=tensors.vector("sinks") if attention.sinks else None,
                of=of,
            )
            if attention.gated:
                tape.sigmoid_gate(buffers.attention_out, buffers.gate)
        if of == "logits":
            x = buffers.selected
            tape.select(buffers.x, x)
        if layer.recurrent is not None:
            scale = details.multipliers.state_out
            self._leave(tensors, "attn", buffers.state_out, "state_out", x, of=of, scale=scale)
        if attention is not None:
            scale = details.multipliers.attention_out
            self._leave(tensors, "attn", buffers.attention_out, "o", x, of=of, scale=scale)
        if isinstance(layer.ffn, Absent):
            return
        self._enter(tensors, "mlp", x, of=of)
        if isinstance(layer.ffn, Experts):
            self._experts(tensors, layer.ffn)
        else:
            self._feed_forward(tensors, "", buffers.inner, of=of, gated=layer.ffn.gated)

    def _enter(self, tensors: LayerWeights, part: str, x: Array, *, of: RowSet) -> None:
        """What a sublayer reads of the residual stream x, to `normed`."""
        if self.spec.details.pre_norms:
            norm = tensors.vector(f"{part}_norm")
            self.tape.rms_norm(x, norm, self.spec.details.norm_eps, self.buffers.normed, of=of)
        else:
            self.tape.narrow(x, self.buffers.normed, of=of)

    def _leave(
        self, tensors: LayerWeights, part: str, inner: Array, matrix: str, x: Array, *, of: RowSet, scale: float = 1.0
    ) -> None:
        """The last product of a sublayer, times `scale`, added to the residual stream x."""
        details, weight = self.spec.details, tensors.product(matrix)
        if not details.post_norms:
            self.tape.linear(inner, weight, x, add=True, scale=details.residual_scale * scale, of=of)
            return
        self.tape.linear(inner, weight, self.buffers.added, scale=scale, of=of)
        norm = tensors.vector(f"{part}_post_norm")
        self.tape.rms_norm(self.buffers.added, norm, details.norm_eps, x, add=True, of=of)

    def _projections(self, tensors: LayerWeights, attention: Gqa, index: int) -> None:
        details = self.spec.details
        tape = self.tape
        buffers = self.buffers
        first = 0
        for group in tensors.groups("q", "k", "v"):
            last = first + tensors.outputs(group)
            tape.linear(buffers.normed, tensors.product(*group), buffers.qkv[:, first:last])
            first = last
        if attention.gated:
            tape.linear(buffers.normed, tensors.product("q_gate"), buffers.gate)
        norms = (tensors.vector("q_norm"), tensors.vector("k_norm"), details.norm_eps) if details.qk_norm else None
        if norms and details.whole_qk_norm:
            first = 0
            for norm in norms[:2]:
                columns = buffers.qkv[:, first : first + len(norm)]
                tape.rms_norm(columns, norm, details.norm_eps, columns)
                first += len(norm)
            norms = None
        table = buffers.rotations.get(attention.rotation)
        tape.rotary(buffers.qkv, table, norms, self.cache, index, buffers.q)

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
        norm = (tensors.vector("kv_a_norm"), eps)
        tape.latent(
            buffers.qkv, buffers.kv, buffers.rotations["global"], norm, self.cache, index, buffers.q_nope, buffers.q
        )

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
        tape.attention(buffers.q, self.cache, index, window=None, out=buffers.latent_out, scale=details.attention_scale)
        tape.per_head(buffers.latent_out, tensors.packed("kv_b_values", values), buffers.attention_out)

    def _experts(self, tensors: LayerWeights, experts: Experts) -> None:
        tape = self.tape
        buffers = self.buffers
        routing = self.buffers.routing
        if self._keep_expert_choices:
            routing = replace(routing, ids=zeros(*routing.ids.shape, dtype=INT32))
            self.expert_choices.append(routing.ids)
        details = self.spec.details
        scaled = replace(experts.gating, scale=experts.gating.scale * details.residual_scale)
        experts = replace(experts, gating=scaled)
        bias = tensors.vector("correction", "bias") if experts.gating.correction_bias else None
        logit_bias = tensors.bias("router")
        tape.route(buffers.normed, tensors.vector("router"), bias, experts, routing, logit_bias=logit_bias)

        def pack() -> Any:
            every = range(experts.count)
            biases = [tensors.expert_biases(expert) for expert in every] if experts.biased else None
            return self.kernels.pack_experts(map(tensors.expert, every), count=experts.count, biases=biases)

        packed = tensors.packed("experts", pack)
        tape.experts(buffers.normed, packed, experts, routing, buffers.x, activation=details.activation)
        if experts.shared_gate:
            self._into(tensors, "shared_", buffers.shared_inner, of="rows")
            tape.linear(buffers.shared_inner, tensors.product("shared_down"), buffers.shared_out)
            tape.add_gated(buffers.normed, tensors.vector("shared_router"), buffers.shared_out, buffers.x)
        elif experts.shared:
            self._feed_forward(tensors, "shared_", buffers.shared_inner, of="rows")

    def _feed_forward(
        self, tensors: LayerWeights, prefix: str, inner: Array, *, of: RowSet, gated: bool = True
    ) -> None:
        out = self.buffers.x if of == "rows" else self.buffers.selected
        if gated:
            self._into(tensors, prefix, inner, of=of)
        else:
            floats = self.buffers.inner_floats
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

_MOST_OUTPUTS = 256
"""Results whose views are kept; each is a few small objects."""


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

    `dtype` says in which form matrices are multiplied, see weights.WANTED;
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
        self.vocab = spec.vocab
        self.max_rows = max_rows
        self.max_sequences = max_sequences
        self.max_logits_rows = max_rows if max_logits_rows is None else min(max_logits_rows, max_rows)
        self.max_blocks = max_blocks
        if isinstance(attention, Mla):
            refuse_int8_latents(kv_dtype)
        kinds = [spec.ordered_layers[index] for index in self.layers]
        recurrent = sum(layer.recurrent is not None for layer in kinds)
        attending = sum(layer.attending is not None for layer in kinds)
        self.cache = layer_cache(spec, kernels, layers=attending, num_blocks=num_blocks, kv_dtype=kv_dtype)
        self.num_states = max_sequences if recurrent else 0
        """Sequences whose recurrent states are kept; 0 without recurrent layers."""
        self.num_snapshots = num_snapshots(max_sequences) if recurrent else 0
        self.states: CpuStates | None = None
        if spec.recurrent is not None and recurrent:
            slots = self.num_states + self.num_snapshots
            self.states = kernels.states(spec.recurrent.state, layers=recurrent, slots=slots, max_rows=max_rows)
        limits: dict[str, Any] = {"max_rows": max_rows, "max_sequences": max_sequences, "max_blocks": max_blocks}
        matrices = Matrices(weights, dtype, kernels.act)
        self.weight_form = matrices.description
        self.weight_bytes = weight_bytes(matrices, kernels)
        self.workspace_bytes = workspace_bytes(spec, kernels, **limits, max_logits_rows=self.max_logits_rows)
        kv_heads, head_dim = attention.kv_heads, attention.head_dim
        self._tape: Tape = kernels.tape(**limits, heads=attention.heads, kv_heads=kv_heads, head_dim=head_dim)
        self.buffers = self._tape.buffers
        self._outputs: dict[tuple[int, int], TargetOutput] = {}  # views of the buffers, by rows and those of logits
        self._places: list[Tap] = []  # where each layer begins
        self._tap_buffers: dict[int, Array] = {}  # of every layer that was tapped once
        self._tapped: dict[int, Array] = {}
        self._taps_last = False
        self._last_tape: Tape | None = None
        self._logits = empty(self.max_logits_rows, spec.vocab)
        self._greedy_tokens = empty(self.max_logits_rows, dtype=INT32)
        self._record(weights, matrices, store or PackedStore(kernels), keep_expert_choices=keep_expert_choices)

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
            output = self._outputs[rows, logits_rows] = TargetOutput(*views, taps)
        if self._taps_last:
            return replace(output, taps={**output.taps, len(self.layers): self._last_rows(batch)})
        return output

    def _last_rows(self, batch: PackedBatch) -> Array:
        """The residual stream of all rows behind a last layer that the pass over the batch computed for the rows with
        logits alone, f32 [R, hidden]. Where all have logits, as in a step that only decodes, nothing is computed."""
        rows, indices = batch.rows, batch.logits_indices
        if len(indices) == rows and np.array_equal(indices, np.arange(rows)):
            return self._selected[:rows]
        if self._last_tape is None:
            self._last_tape = self._record_last()
        self._last_tape.run(rows=rows, sequences=batch.num_sequences, logits_rows=0)
        return self._layer_buffers.x[:rows]

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

        Rows without logits are computed past the last layer's keys and values only while that layer is tapped."""
        last = len(self.layers)
        for layer in layers:
            if not 0 <= layer <= last:
                raise UsageError(
                    f"Layer {layer} cannot be tapped: {self.spec.name} has {last} layers.",
                    f"Tap layers 0 to {last}.",
                )
        self._taps_last = last in layers and last >= len(self._places)
        before, self._tapped = self._tapped, {}
        for layer in [layer for layer in layers if layer < len(self._places)]:
            if layer not in self._tap_buffers:
                self._tap_buffers[layer] = empty(self.max_rows, self.spec.hidden)
            self._tapped[layer] = self._tap_buffers[layer]
        self._outputs.clear()
        for layer in before.keys() ^ self._tapped.keys():
            self._places[layer].copy_to(self._tapped.get(layer))

    def _record(self, weights: Weights, matrices: Matrices, store: PackedStore, *, keep_expert_choices: bool) -> None:
        """Record a pass. A matrix that the store does not have is read and packed, one after the other, so that at most
        one layer is in memory twice."""
        spec = self.spec
        tape = self._tape
        kernels = self.kernels
        limits = {"max_rows": self.max_rows, "max_logits_rows": self.max_logits_rows}
        buffers = LayerBuffers(spec, kernels, positions=self.max_blocks * BLOCK_SIZE, **limits)
        self._selected = buffers.selected
        embedding = store.get("embed", lambda: kernels.pack(matrices.read("embed.weight")))
        tape.embed(embedding, buffers.x, scale=spec.details.embedding_scale)
        recorder = LayerRecorder(
            spec, kernels, tape, self.cache, buffers, states=self.states, keep_expert_choices=keep_expert_choices
        )
        known, last = tensor_shapes(spec), len(self.layers) - 1
        attending = stateful = 0  # layers with keys and values, and with a state, that are recorded
        for place, index in enumerate(self.layers):
            self._places.append(tape.tap(buffers.x))
            tensors = LayerWeights(weights, matrices, store, known, index=index)
            layer = spec.ordered_layers[index]
            of: RowSet = last_layer_rows(layer) if place == last else "rows"
            recorder.record(tensors, layer, attending, of=of, state_index=stateful)
            attending += layer.attending is not None
            stateful += layer.recurrent is not None
        self.expert_choices = recorder.expert_choices
        self._layer_buffers = buffers
        if last_layer_rows(layer) == "logits":
            self._record_last = partial(self._record_rest, tensors, layer, buffers, attending - 1)
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
        tape.argmax(self._logits, self._greedy_tokens)

    def _record_rest(self, tensors: LayerWeights, layer: Layer, buffers: LayerBuffers, index: int) -> Tape:
        """What follows the keys and values of the last layer, for all rows, on a tape of its own."""
        tape = self._tape.beside()
        recorder = LayerRecorder(self.spec, self.kernels, tape, self.cache, buffers)
        recorder.record_rest(tensors, layer, index, of="rows")
        return tape
