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
from wager.arch.layers import Gqa
from wager.arch.spec import ModelSpec
from wager.errors import ModelError
from wager.kernels.arrays import FLOAT32, INT32, Array, DType, empty
from wager.kernels.base import TargetOutput
from wager.kernels.cpu import Kernels
from wager.kernels.tape import Tape
from wager.models.head_files import (
    CachedHead,
    HeadFiles,
    HeadVocabulary,
    HeadWeights,
    OpenedHeadFiles,
    Shapes,
    TargetLogits,
    check_shared,
    check_sizes,
    check_taps,
    layer_tensors,
    layer_weights,
    output_matrix,
    read_head_decoder,
    read_proposed,
    read_vocabulary,
    row_tape,
    run_rows,
    vocabulary_shapes,
)
from wager.models.transformer import Decoder, LayerBuffers, LayerRecorder, last_layer_rows
from wager.models.weights import NAMES, Weights
from wager.types import PackedBatch

_RENAMED = {"model\\.": "", "midlayer\\.": "layers.0."}
_OPTIONAL = (r".*rotary_emb\.inv_freq", r"verifier_.*")


@dataclass(frozen=True)
class EagleSpec:
    """What an EAGLE-3 head is. `decoder` has sizes, rotation and norms of its layers, which have one kind of
    `attention` and feed-forwards of the inner size `inner`; `taps` are the target's layers that it reads, of
    `target_hidden` elements each.

    norm_before_residual: the residual stream is the normed state. norm_before_fc: one norm over all taps; fc_norm: one
    for each. norm_output: the state fed back is the one behind the last norm. own_embedding, own_output: whether it has
    these matrices, or uses the target's.
    """

    decoder: ModelSpec
    attention: Gqa
    inner: int
    taps: tuple[int, ...]
    target_hidden: int
    vocabulary: HeadVocabulary
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    own_embedding: bool
    own_output: bool
    depth: int | None = None

    @property
    def state_width(self) -> int:
        """Elements of a position's tapped states."""
        return len(self.taps) * self.target_hidden


def read_eagle(files: HeadFiles, target: ModelSpec) -> EagleSpec:
    """The head's specification; all of its tensors' names and shapes are checked. ModelError names what does not fit
    the target, and what is not supported."""
    files.rename(_RENAMED)
    keys, flat = files.keys, "transformer_layer_config" not in files.config
    kind = keys.text("speculators_model_type")
    if kind is not None and kind != "eagle3":
        raise ModelError(f"The head in {files.where} is a {kind} head.", "An eagle3 head is wanted here.")
    layer = keys if flat else keys.section("transformer_layer_config")
    decoder, attention, inner = read_head_decoder(layer, files.where)
    taps = _read_taps(keys, layer, target)
    hidden = keys.integer("target_hidden_size", default=target.hidden)
    check_sizes(files, target, hidden=hidden, vocab=layer.integer("vocab_size", default=target.vocab))
    draft = keys.integer("draft_vocab_size", default=layer.integer("draft_vocab_size", default=target.vocab))
    spec = EagleSpec(
        decoder,
        attention,
        inner,
        taps,
        target.hidden,
        read_vocabulary(files, draft=draft, size=target.vocab),
        norm_before_residual=keys.flag("norm_before_residual", default=not flat),
        norm_before_fc=keys.flag("norm_before_fc") or keys.section("eagle_config").flag("norm_before_fc"),
        fc_norm=keys.flag("fc_norm"),
        norm_output=keys.flag("norm_output"),
        own_embedding="embed_tokens.weight" in files.shapes,
        own_output="lm_head.weight" in files.shapes,
        depth=read_proposed(keys),
    )
    check_shared(files, decoder.hidden, target)
    if spec.norm_before_fc and spec.fc_norm:
        raise ModelError(f"norm_before_fc and fc_norm in {files.where}/config.json exclude each other.")
    files.check(
        dict(_tensors(spec, target)) | vocabulary_shapes(files, draft=draft, size=target.vocab), optional=_OPTIONAL
    )
    return spec


def _read_taps(keys: ConfigKeys, layer: ConfigKeys, target: ModelSpec) -> tuple[int, ...]:
    name = "eagle_aux_hidden_state_layer_ids"
    for section in (keys, keys.section("eagle_config"), layer):
        found = section.integers(name)
        if found:
            break
    layers = target.num_layers
    taps = tuple(found) if found else (2, layers // 2, layers - 3)
    count = layer.integer("num_aux_hidden_states", default=len(taps))
    if count != len(taps):
        raise ModelError(f"{name} in {keys.where} lists {len(taps)} layers, and num_aux_hidden_states is {count}.")
    check_taps(keys, taps, target)
    return taps


def _tensors(spec: EagleSpec, target: ModelSpec) -> Shapes:
    hidden, taps = spec.decoder.hidden, len(spec.taps)
    yield "fc.weight", (hidden, spec.state_width)
    if spec.norm_before_fc:
        yield "input_norm.weight", (spec.state_width,)
    if spec.fc_norm:
        yield from ((f"fc_norm.{tap}.weight", (spec.target_hidden,)) for tap in range(taps))
    for index in range(spec.decoder.num_layers):
        width = 2 * hidden if index == 0 else hidden  # the first layer reads the embedding beside the state
        layer = layer_tensors(spec.decoder, spec.attention, spec.inner, width=width)
        yield from ((f"layers.{index}.{name}", shape) for name, shape in layer)
    yield "layers.0.hidden_norm.weight", (hidden,)
    yield "norm.weight", (hidden,)
    if spec.own_output:
        yield "lm_head.weight", (len(spec.vocabulary.ids), hidden)
    if spec.own_embedding:
        yield "embed_tokens.weight", (target.vocab, hidden)


class EagleHead(CachedHead):
    """An EAGLE-3 head for the target `decoder`, whose embedding and output matrix it uses where it has none of its
    own. `num_blocks` is the size of its cache.

    `taps`: the target's layers whose states it needs; a position's are `state_width` elements of `state_dtype`.
    """

    def __init__(
        self, spec: EagleSpec, weights: HeadWeights, decoder: Decoder, target: Weights, *, num_blocks: int
    ) -> None:
        kernels = weights.form.kernels
        attention = spec.attention
        layers = spec.decoder.num_layers
        super().__init__(decoder, kernels, attention, spec.decoder.hidden)
        self.spec = spec
        self.taps = spec.taps
        self.state_width = spec.state_width
        self.cache = kernels.cache(
            layers=layers, num_blocks=num_blocks, kv_heads=attention.kv_heads, head_dim=attention.head_dim
        )
        self._fusion = _StateFusion(spec, weights, self._state)
        self.state_dtype: DType = self._fusion.dtype
        output = self._record_layers(weights, decoder.embedding)
        self._output = _EagleOutput(self, weights, self._tape, output, decoder=decoder, target=target)

    def forward(self, batch: PackedBatch, states: Array, fed: Array) -> TargetOutput:
        """One pass over the packed rows: the first of them have the target's `states` [n, state_width] and the others
        what the head gave before, `fed` f32 [m, hidden].

        The logits are by the target's ids, with those that the head cannot guess far below all others; `last_hidden`
        is what is fed to the next row. UsageError if the batch exceeds the buffers.
        """
        self._prepare(batch, states, fed)
        self._tape.run(rows=batch.rows, sequences=batch.num_sequences, logits_rows=len(batch.logits_indices))
        return self._output.take(len(batch.logits_indices))

    def _read_target(self, states: Array) -> None:
        self._fusion.run(states)

    def _record_layers(self, weights: HeadWeights, embedding: Any) -> Array:
        """The residual stream of the rows that give logits, behind the last layer."""
        model, tape, kernels = self.spec.decoder, self._tape, weights.form.kernels
        rotation = model.details.rope.table(self.max_context, self.spec.attention.rope_dim)
        rows, logits_rows = self.max_rows, self.max_logits_rows
        buffers = LayerBuffers(model, kernels, rotation, max_rows=rows, max_logits_rows=logits_rows)
        buffers.x = self._state
        embedded = empty(rows, self.hidden)
        tape.embed(weights.pack(["embed_tokens.weight"]) if self.spec.own_embedding else embedding, embedded)
        recorder = LayerRecorder(model, kernels, tape, self.cache, buffers)
        names = {part: name.removeprefix("model.") for part, name in NAMES.items()}
        for index, tensors in enumerate(layer_weights(weights, model, names)):
            layer = model.ordered_layers[index]
            of = last_layer_rows(layer) if index == model.num_layers - 1 else "rows"
            if index:
                recorder.record(tensors, layer, index, of=of)
            else:
                self._record_first(weights, embedded, buffers)
                recorder.record_rest(tensors, layer, index, of=of)
        return buffers.selected

    def _record_first(self, weights: HeadWeights, embedded: Array, buffers: LayerBuffers) -> None:
        """Up to the keys and values of the first layer, which reads the embedding beside the state."""
        spec, tape, details, name = self.spec, self._tape, self.spec.decoder.details, "layers.0.self_attn"
        embedded_normed = empty(*embedded.shape, dtype=weights.form.kernels.act)
        norms = (("input_layernorm", embedded, embedded_normed), ("hidden_norm", buffers.x, buffers.normed))
        for norm, x, out in norms:
            tape.rms_norm(x, weights.vector(f"layers.0.{norm}.weight"), details.norm_eps, out)
        if spec.norm_before_residual:
            tape.copy(buffers.normed, buffers.x)
        projections = [f"{name}.{part}_proj.weight" for part in "qkv"]
        own, state = slice(self.hidden), slice(self.hidden, None)  # the columns of the embedding come first
        tape.linear(embedded_normed, weights.pack(projections, own), buffers.qkv)
        tape.linear(buffers.normed, weights.pack(projections, state, biased=False), buffers.qkv, add=True)
        head_norms = None
        if details.qk_norm:
            q_norm, k_norm = (weights.vector(f"{name}.{part}_norm.weight") for part in "qk")
            head_norms = (q_norm, k_norm, details.norm_eps)
        tape.rotary(buffers.qkv, buffers.rotation, head_norms, self.cache, 0, buffers.q)


class _StateFusion:
    """Writes to `out` f32 [max_rows, hidden], whose rows are as many as a pass has."""

    def __init__(self, spec: EagleSpec, weights: HeadWeights, out: Array) -> None:
        kernels, rows = weights.form.kernels, len(out)
        tape = self._tape = row_tape(weights, rows)
        normed = spec.fc_norm or spec.norm_before_fc
        self.dtype: DType = FLOAT32 if normed else kernels.act
        eps = spec.decoder.details.norm_eps
        width = spec.target_hidden
        total = spec.state_width
        step = width if spec.fc_norm else total
        self._parts = [empty(rows, step, dtype=self.dtype) for _ in range(total // step)]
        for index, part in enumerate(self._parts):
            ready = part
            if normed:
                ready = empty(rows, step, dtype=kernels.act)
                name = f"fc_norm.{index}.weight" if spec.fc_norm else "input_norm.weight"
                tape.rms_norm(part, weights.vector(name), eps, ready)
            matrix = weights.pack(["fc.weight"], slice(index * step, (index + 1) * step))
            tape.linear(ready, matrix, out, add=index > 0)

    def run(self, states: Array) -> None:
        """states [n, state_width]: the taps of each position side by side."""
        step, first = self._parts[0].shape[1], 0
        for part in self._parts:
            part[: len(states)] = states[:, first : first + step]
            first += step
        run_rows(self._tape, len(states))


class _EagleOutput:
    """Records norm, output matrix and argmax over `states` f32 [max_logits_rows, hidden]."""

    def __init__(
        self, head: EagleHead, weights: HeadWeights, tape: Tape, states: Array, *, decoder: Decoder, target: Weights
    ) -> None:
        spec, rows = head.spec, len(states)
        vocabulary, act = spec.vocabulary, weights.form.kernels.act
        self._target = TargetLogits(vocabulary, rows)
        self._normed = empty(rows, states.shape[1], dtype=act)
        self._fed = self._normed if spec.norm_output else states
        self._logits, self._greedy = empty(rows, len(vocabulary.ids)), empty(rows, dtype=INT32)
        tape.rms_norm(states, weights.vector("norm.weight"), spec.decoder.details.norm_eps, self._normed, of="logits")
        if spec.own_output:
            matrix = weights.pack(["lm_head.weight"])
        else:
            matrix = output_matrix(weights, vocabulary, decoder, target)
        tape.linear(self._normed, matrix, self._logits, of="logits")
        tape.argmax(self._logits, self._greedy)

    def take(self, rows: int) -> TargetOutput:
        """The logits of a pass and what is fed to the next."""
        fed = self._fed[:rows].astype(FLOAT32, copy=False)
        return self._target.take(self._logits[:rows], self._greedy[:rows], fed)


class OpenedEagle(OpenedHeadFiles[EagleSpec]):
    """An EAGLE-3 head whose files were checked."""

    def workspace_bytes(self, kernels: Kernels, *, rows: int, sequences: int, context: int) -> int:
        """Bytes of the buffers of a pass, and of those that the target copies the tapped states to."""
        spec, act = self.spec, kernels.act.itemsize
        hidden, attention = spec.decoder.hidden, spec.attention
        row = 4 * (2 * hidden + attention.qkv_width + 2 * spec.state_width) + act * (
            2 * hidden + attention.query_width + attention.output_width + spec.inner + spec.state_width
        )
        vocabulary = spec.vocabulary
        logits = len(vocabulary.ids) + (0 if vocabulary.whole else vocabulary.size)
        return rows * row + sequences * (4 * (2 * hidden + logits) + act * hidden) + 4 * context * attention.rope_dim

    def token_bytes(self, kernels: Kernels) -> int:
        """Bytes of keys and values per position."""
        return self.spec.decoder.num_layers * self.spec.attention.cache_width * kernels.act.itemsize

    def load(self, decoder: Decoder, target: Weights, *, num_blocks: int) -> EagleHead:
        return EagleHead(self.spec, self.weights(decoder), decoder, target, num_blocks=num_blocks)


def open_eagle(files: HeadFiles, target: ModelSpec, *, quantised: bool) -> OpenedEagle:
    """ModelError if it is damaged, of a kind that is not supported, or of another target."""
    return OpenedEagle(files, read_eagle(files, target), quantised)
