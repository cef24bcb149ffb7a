"""EAGLE-3 heads (arXiv 2503.01840) with the normalisations of 3.1 (arXiv 2605.09992), on the engine's kernels.

A row stands for a position of the text: its inputs are the state of that position and the embedding of the token after
it, and it guesses the token after that. States are the target's, fused from the layers that the head taps, or else
what the head gave one row before.

Two formats are read: that of vLLM's speculators (the decoder's configuration under transformer_layer_config, the flags
beside it) and that of the original repository (one flat configuration, tensors under `midlayer.`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wager.arch.config_keys import ConfigKeys
from wager.arch.spec import ModelSpec
from wager.errors import ModelError
from wager.kernels.arrays import Array, empty
from wager.kernels.cpu import Kernels
from wager.kernels.tape import HeadRows, RowSet
from wager.models.head_files import (
    TREE_ROWS,
    CachedHead,
    CheckedLayers,
    HeadFiles,
    HeadLogits,
    HeadOutput,
    HeadWeights,
    check_taps,
    read_layers,
    read_proposed,
)
from wager.models.transformer import (
    Decoder,
    LayerBuffers,
    LayerRecorder,
    buffer_bytes,
    last_layer_rows,
    of_width,
)
from wager.models.weights import Weights
from wager.types import PackedBatch


@dataclass(frozen=True)
class CheckedEagle(CheckedLayers):
    """An EAGLE-3 head whose files were checked.

    norm_before_residual: the residual stream is the normed state. norm_before_fc: one norm over all taps; fc_norm: one
    for each. norm_output: the state fed back is the one behind the last norm. depth: guesses of a round.
    """

    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    depth: int | None

    def workspace_bytes(self, kernels: Kernels, *, rows: int, sequences: int, context: int) -> int:
        """Bytes of the buffers of a pass, and of those that the target copies the tapped states to."""
        act, hidden, vocabulary = kernels.act.itemsize, self.decoder.hidden, self.vocabulary
        logits_rows = min(rows, max(sequences, TREE_ROWS))
        layers = buffer_bytes(self.decoder, kernels, positions=context, max_rows=rows, max_logits_rows=logits_rows)
        row = 4 * (hidden + 2 * self.state_width) + act * (hidden + self.state_width)
        logits = len(vocabulary.ids) + (0 if vocabulary.whole else vocabulary.size)
        return layers + rows * row + logits_rows * (4 * logits + 4 * hidden + 2 * act * hidden)

    def load(self, decoder: Decoder, target: Weights, *, num_blocks: int) -> EagleHead:
        return EagleHead(self, decoder, target, num_blocks=num_blocks)


def open_eagle(files: HeadFiles, target: ModelSpec, *, dtype: str) -> CheckedEagle:
    """The head in some files; all of its tensors' names and shapes are checked. ModelError names what does not fit the
    target, and what is not supported."""
    files.rename({"model\\.": "", "midlayer\\.": "layers.0."})
    keys = files.keys
    kind = keys.text("speculators_model_type")
    if kind is not None and kind != "eagle3":
        raise ModelError(f"The head in {files.where} is a {kind} head.", "An eagle3 head is wanted here.")
    head = CheckedEagle(
        files,
        dtype,
        **read_layers(files, target),
        taps=_read_taps(keys, files.layer_keys, target),
        norm_before_residual=keys.flag("norm_before_residual", default=not files.flat),
        norm_before_fc=keys.flag("norm_before_fc") or keys.section("eagle_config").flag("norm_before_fc"),
        fc_norm=keys.flag("fc_norm"),
        norm_output=keys.flag("norm_output"),
        depth=read_proposed(keys),
    )
    if head.norm_before_fc and head.fc_norm:
        raise ModelError(f"norm_before_fc and fc_norm in {files.where}/config.json exclude each other.")
    further = {"layers.0.hidden_norm.weight": (head.decoder.hidden,)}
    if head.norm_before_fc:
        further["input_norm.weight"] = (head.state_width,)
    if head.fc_norm:
        further |= {f"fc_norm.{tap}.weight": (head.target_hidden,) for tap in range(len(head.taps))}
    head.check_tensors(further, first_width=2 * head.decoder.hidden)  # it reads the embedding beside the state
    return head


def _read_taps(keys: ConfigKeys, layer: ConfigKeys, target: ModelSpec) -> tuple[int, ...]:
    name = "eagle_aux_hidden_state_layer_ids"
    sections = (keys, keys.section("eagle_config"), layer)
    found = next((found for section in sections if (found := section.integers(name))), None)
    layers = target.num_layers
    taps = tuple(found) if found else (2, layers // 2, layers - 3)
    count = layer.integer("num_aux_hidden_states", default=len(taps))
    if count != len(taps):
        raise ModelError(f"{name} in {keys.where} lists {len(taps)} layers, and num_aux_hidden_states is {count}.")
    check_taps(keys, taps, target)
    return taps


class EagleHead(CachedHead):
    """An EAGLE-3 head for the target `decoder`, whose embedding and output matrix it uses where it has none of its
    own. `num_blocks` is the size of its cache.

    `taps`: the target's layers whose states it needs; a position's are `state_width` elements.
    """

    def __init__(self, head: CheckedEagle, decoder: Decoder, target: Weights, *, num_blocks: int) -> None:
        weights = head.weights(decoder.kernels)
        super().__init__(decoder, decoder.kernels, head.decoder.hidden, state_width=head.state_width)
        self.taps = head.taps
        self._outputs: dict[int, HeadOutput] = {}  # views of the buffers, by rows of logits
        self.cache = head.cache(decoder.kernels, num_blocks=num_blocks)
        self._record_fusion(head, weights)
        states = self._record_layers(head, weights, head.embedding(weights, decoder))
        rows = self.max_logits_rows
        self.guesses, self._logits = HeadLogits(head.vocabulary, rows), empty(rows, len(head.vocabulary.ids))
        normed = empty(rows, self.hidden, dtype=decoder.kernels.act)
        self._fed = normed if head.norm_output else states
        norm = weights.vector("norm.weight")
        self._tape.rms_norm(states, norm, head.decoder.details.norm_eps, normed, of="logits")
        self._tape.linear(normed, head.output(weights, decoder, target), self._logits, of="logits")
        self.guesses.record(self._tape, self._logits)
        self._tape.feed(self._fed, self._state, first=self._fused)
        self.follows = True

    def forward(self, batch: PackedBatch, states: Array, fed: Array) -> HeadOutput:
        """One pass over the packed rows: the first of them have the target's `states` [n, state_width] and the others
        what the head gave before, `fed` [m, hidden]. UsageError if the batch exceeds the buffers."""
        rows = self._run(batch, states, fed)
        output = self._outputs.get(rows)
        if output is None:
            output = self._outputs[rows] = self.guesses.output(self._logits[:rows], self._fed[:rows])
        return output

    def _record_fusion(self, head: CheckedEagle, weights: HeadWeights) -> None:
        """From the taps of each position, side by side, to `_state`."""
        rows, eps, width = self.max_rows, head.decoder.details.norm_eps, head.state_width
        ready = empty(rows, width, dtype=weights.kernels.act)
        if head.norm_before_fc:
            self._tape.rms_norm(self._target_states, weights.vector("input_norm.weight"), eps, ready)
        else:
            for index in range(len(head.taps) if head.fc_norm else 0):
                part = self._target_states[:, index * head.target_hidden : (index + 1) * head.target_hidden]
                self._tape.rms_norm(part, weights.vector(f"fc_norm.{index}.weight"), eps, part)
            self._tape.narrow(self._target_states, ready)
        self._tape.linear(ready, weights.pack(["fc.weight"]), self._state)
        self._fused = self._tape.mark

    def _record_layers(self, head: CheckedEagle, weights: HeadWeights, embedding: Any) -> Array:
        """The residual stream of the rows that give logits, behind the last layer."""
        model, tape, kernels = head.decoder, self._tape, weights.kernels
        rows, logits_rows = self.max_rows, self.max_logits_rows
        buffers = LayerBuffers(model, kernels, positions=self.max_context, max_rows=rows, max_logits_rows=logits_rows)
        buffers.x = self._state
        embedded = empty(rows, self.hidden)
        tape.embed(embedding, embedded)
        recorder = LayerRecorder(model, kernels, tape, self.cache, buffers)
        for index, tensors in enumerate(head.layers(weights)):
            layer = model.ordered_layers[index]
            of = last_layer_rows(layer) if index == model.num_layers - 1 else "rows"
            if index:
                recorder.record(tensors, layer, index, of=of)
            else:
                self._record_first(head, weights, embedded, buffers, of=of)
                recorder.record_rest(tensors, layer, index, of=of)
        return buffers.selected

    def _record_first(
        self, head: CheckedEagle, weights: HeadWeights, embedded: Array, buffers: LayerBuffers, *, of: RowSet
    ) -> None:
        """Up to the keys and values of the first layer, which reads the embedding beside the state, and the queries of
        the rows `of` that it goes on with."""
        tape, inputs, normed = self._tape, (embedded, buffers.x), buffers.normed
        self._record_heads(head, weights, inputs, normed, buffers, heads="qkv" if of == "rows" else "kv")
        if of == "logits":
            selected = empty(len(buffers.selected), self.hidden), buffers.selected
            for x, out in zip(inputs, selected, strict=True):
                tape.select(x, out)
        if head.norm_before_residual:
            tape.copy(normed, buffers.x)
        if of == "logits":
            self._record_heads(head, weights, selected, normed, buffers, heads="q", of=of)

    def _record_heads(
        self,
        head: CheckedEagle,
        weights: HeadWeights,
        inputs: tuple[Array, Array],
        normed: Array,
        buffers: LayerBuffers,
        *,
        heads: HeadRows,
        of: RowSet = "rows",
    ) -> None:
        """These heads of the first layer, rotated, of some rows' embeddings and states, whose norm is `normed`."""
        tape, details, name = self._tape, head.decoder.details, "layers.0.self_attn"
        projections = [f"{name}.{part}_proj.weight" for part in heads]
        projected = of_width(buffers.qkv, sum(weights.files.shapes[each][0] for each in projections))
        embedded = empty(*inputs[0].shape, dtype=weights.kernels.act)
        for x, norm, out in zip(inputs, ("input_layernorm", "hidden_norm"), (embedded, normed), strict=True):
            tape.rms_norm(x, weights.vector(f"layers.0.{norm}.weight"), details.norm_eps, out, of=of)
        own, state = slice(self.hidden), slice(self.hidden, None)  # the columns of the embedding come first
        tape.linear(embedded, weights.pack(projections, own), projected, of=of)
        tape.linear(normed, weights.pack(projections, state, biased=False), projected, add=True, of=of)
        norms = None
        if details.qk_norm:
            q_norm, k_norm = (weights.vector(f"{name}.{part}_norm.weight") for part in "qk")
            norms = (q_norm, k_norm, details.norm_eps)
        tape.rotary(projected, buffers.rotations["global"], norms, self.cache, 0, buffers.q, rows=heads, of=of)
