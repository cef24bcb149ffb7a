"""The decoder of every family: a tape of kernel ops recorded once from a ModelSpec, and passes that replay it.

Every difference between families is a value of the spec. Kernels are used through kernels/base.py only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from wager.arch.layers import Mla
from wager.arch.spec import Layer
from wager.errors import UsageError
from wager.kernels.arrays import INT32, Array, empty
from wager.kernels.base import BLOCK_SIZE, Kernels, Tap, Tape, TargetOutput
from wager.models import footprint as memory
from wager.models.last_layer import LastLayer
from wager.models.layer_recorder import LayerBuffers, LayerRecorder, layer_cache, needed_rows
from wager.models.layer_weights import LayerWeights
from wager.models.matrices import Matrices
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
        if isinstance(attention, Mla):
            refuse_int8_latents(kv_dtype)
        self.cache = layer_cache(spec, kernels, layers=len(self.layers), num_blocks=num_blocks, kv_dtype=kv_dtype)
        limits = {"max_rows": max_rows, "max_sequences": max_sequences, "max_blocks": max_blocks}
        matrices = Matrices(weights, dtype, kernels.act)
        self.weight_form, self.weight_bytes = matrices.description, memory.weight_bytes(matrices, kernels)
        self.workspace_bytes = memory.workspace_bytes(spec, kernels, **limits, max_logits_rows=self.max_logits_rows)
        kv_heads, head_dim = attention.kv_heads, attention.head_dim
        self._tape: Tape = kernels.tape(**limits, heads=attention.heads, kv_heads=kv_heads, head_dim=head_dim)
        self.buffers = self._tape.buffers
        self._outputs: dict[int, TargetOutput] = {}  # views of the buffers, by rows of logits
        self._places: list[Tap] = []  # where each layer begins
        self._tap_buffers: dict[int, Array] = {}  # of every layer that was tapped once
        self._tapped: dict[int, Array] = {}
        self._last: LastLayer | None = None  # where a pass computes the last layer for the rows with logits alone
        self._taps_last = False
        self._logits = empty(self.max_logits_rows, spec.vocab)
        self._greedy_tokens = empty(self.max_logits_rows, dtype=INT32)
        self._record(weights, matrices, store or PackedStore(kernels), keep_expert_choices=keep_expert_choices)

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
        return replace(output, taps=self._taps(batch)) if self._tapped or self._taps_last else output

    def _taps(self, batch: PackedBatch) -> dict[int, Array]:
        found = {layer: rows[: batch.rows] for layer, rows in self._tapped.items()}
        if self._taps_last and self._last is not None:
            found[len(self.layers)] = self._last.rows(batch)
        return found

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
        """From now on passes give the residual stream after so many layers, from 0 (the embeddings) to all (before the
        last norm), and after no other number: TargetOutput.taps. UsageError for a layer that there is not.

        Rows without logits are computed past the last layer's keys and values only while that layer is tapped."""
        last = len(self.layers)
        for layer in layers:
            if not 0 <= layer <= last:
                raise UsageError(
                    f"Layer {layer} cannot be tapped: {self.spec.name} has {last} layers.",
                    f"Tap layers 0 to {last}.",
                )
        self._taps_last = self._last is not None and last in layers
        before, self._tapped = self._tapped, {}
        for layer in [layer for layer in layers if layer < len(self._places)]:
            if layer not in self._tap_buffers:
                self._tap_buffers[layer] = empty(self.max_rows, self.spec.hidden)
            self._tapped[layer] = self._tap_buffers[layer]
        for layer in before.keys() ^ self._tapped.keys():
            self._places[layer].copy_to(self._tapped.get(layer))

    def _record(self, weights: Weights, matrices: Matrices, store: PackedStore, *, keep_expert_choices: bool) -> None:
        """Record a pass. A matrix that the store does not have is read and packed, one after the other, so that at most
        one layer is in memory twice."""
        spec, tape, kernels = self.spec, self._tape, self.kernels
        rotation = spec.details.rope.table(self.max_blocks * BLOCK_SIZE, spec.attention.rope_dim)
        rows, logits_rows = self.max_rows, self.max_logits_rows
        buffers = LayerBuffers(spec, kernels, rotation, max_rows=rows, max_logits_rows=logits_rows)
        self._selected = buffers.selected
        embedding = store.get("embed", lambda: kernels.pack(matrices.read("embed.weight")))
        tape.embed(embedding, buffers.x)
        recorder = LayerRecorder(spec, kernels, tape, self.cache, buffers, keep_expert_choices=keep_expert_choices)
        known, last = tensor_shapes(spec), len(self.layers) - 1
        for place, index in enumerate(self.layers):
            self._places.append(tape.tap(buffers.x))
            tensors, layer = LayerWeights(weights, matrices, store, known, index=index), spec.ordered_layers[index]
            recorder.record(tensors, layer, place, of=needed_rows(layer) if place == last else "rows")
        self.expert_choices = recorder.expert_choices
        if needed_rows(layer) == "logits":
            self._last = LastLayer(buffers, partial(self._record_last, tensors, layer, buffers))
        else:
            self._places.append(tape.tap(buffers.x))
            tape.select(buffers.x, buffers.selected)
        selected_normed = empty(self.max_logits_rows, spec.hidden, dtype=kernels.act)
        head = embedding if spec.tied else store.get("head", lambda: kernels.pack(matrices.read("head.weight")))
        self.embedding, self.head = embedding, head
        norm, eps = weights.read("norm.weight"), spec.details.norm_eps
        tape.rms_norm(buffers.selected, norm, eps, selected_normed, of="logits")
        tape.linear(selected_normed, head, self._logits, of="logits")
        tape.argmax(self._logits, self._greedy_tokens)

    def _record_last(self, tensors: LayerWeights, layer: Layer, buffers: LayerBuffers) -> Tape:
        """The rest of the last layer for all rows."""
        tape = self._tape.beside()
        recorder = LayerRecorder(self.spec, self.kernels, tape, self.cache, buffers)
        recorder.record_rest(tensors, layer, len(self.layers) - 1, of="rows")
        return tape
