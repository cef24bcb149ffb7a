"""Modules of multi-token prediction (MTP; DeepSeek-V3, arXiv 2412.19437) on the engine's kernels.

A row of a module stands for a position of the text: its inputs are the state of that position and the embedding of a
later token (the next one for the first module, one further for each module after it), it has one layer like its
target's, and it guesses the token after that. The first module's states are the target's, behind all its layers; a
module's are what the one before it gave.

Formats differ in the names of tensors, in which of both inputs comes first, and in which state is handed over: a new
one is a row of FORMATS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wager.arch.families import is_wrapped
from wager.arch.layers import Dense, FeedForward, Gqa, Mla
from wager.arch.spec import Layer, ModelSpec
from wager.errors import ModelError
from wager.inputs import whole_number
from wager.kernels.arrays import Array, empty
from wager.kernels.base import BLOCK_SIZE
from wager.kernels.cpu import Kernels
from wager.kernels.tape import Tape
from wager.models.head_files import (
    TREE_ROWS,
    CachedHead,
    CheckedHead,
    HeadFiles,
    HeadLogits,
    HeadOutput,
    HeadVocabulary,
    check_sizes,
    layer_weights,
    read_proposed,
    row_tape,
    run_rows,
)
from wager.models.transformer import (
    Decoder,
    LayerBuffers,
    LayerRecorder,
    LayerWeights,
    block_bytes,
    last_layer_rows,
    layer_cache,
    workspace_bytes,
)
from wager.models.weights import Weights, stored_shapes, tensor_shapes
from wager.types import PackedBatch

_MOST_MODULES = 16


@dataclass(frozen=True, slots=True)
class MtpFormat:
    """`layers` is a pattern of the beginning of a module's tensors, with its number; `found` one of a name that only
    modules have; `parts` patterns of the tensors around the layer and what they are called here: enorm and hnorm (norms
    of embedding and state), proj (their projection), norm (the last norm), head and embed (matrices of its own).

    shared: all modules have those of the first. hidden_first: the projection's first columns are the state's. zeroed:
    the first position's embedding is zero. after_norm: the state is the one behind the target's last norm. count: the
    configuration's key that has the number of modules.
    """

    name: str
    layers: str
    found: str
    parts: Mapping[str, str]
    shared: bool = False
    hidden_first: bool = False
    zeroed: bool = False
    after_norm: bool = True
    count: str = "num_nextn_predict_layers"


_MIMO_PARTS = {
    r"(modules\.\d+)\.token_layernorm\.": r"\1.enorm.",
    r"(modules\.\d+)\.hidden_layernorm\.": r"\1.hnorm.",
    r"(modules\.\d+)\.input_proj\.": r"\1.proj.",
    r"(modules\.\d+)\.final_layernorm\.": r"\1.norm.",
}

_NEXTN_PARTS = {"eh_proj": "proj", "shared_head_norm": "norm", "shared_head_head": "head", "embed_tokens": "embed"}

FORMATS = (
    MtpFormat(
        "GGUF",
        r"blk\.(\d+)\.",
        r"blk\.(\d+)\.nextn\..*",
        {
            **{rf"(modules\.\d+)\.nextn\.{name}\.": rf"\1.{part}." for name, part in _NEXTN_PARTS.items()},
            r"(modules\.\d+)\.nextn\.": r"\1.",
        },
    ),
    MtpFormat(
        "DeepSeek",
        r"model\.layers\.(\d+)\.",
        r"model\.layers\.(\d+)\.(?:enorm|hnorm|eh_proj|shared_head)\..*",
        {
            r"(modules\.\d+)\.eh_proj\.": r"\1.proj.",
            r"(modules\.\d+)\.shared_head\.norm\.": r"\1.norm.",
            r"(modules\.\d+)\.shared_head\.head\.": r"\1.head.",
            r"(modules\.\d+)\.embed_tokens\.": r"\1.embed.",
        },
        zeroed=True,
    ),
    MtpFormat(
        "Qwen",
        r"mtp\.layers\.(\d+)\.",
        r"mtp\..*",
        {
            r"mtp\.pre_fc_norm_embedding\.": "modules.0.enorm.",
            r"mtp\.pre_fc_norm_hidden\.": "modules.0.hnorm.",
            r"mtp\.fc\.": "modules.0.proj.",
            r"mtp\.norm\.": "modules.0.norm.",
        },
        shared=True,
        count="mtp_num_hidden_layers",
    ),
    MtpFormat(
        "speculators",
        r"mtp_layers\.(\d+)\.",
        r"mtp_layers\..*",
        {**_MIMO_PARTS, r"lm_head\.": "modules.0.head.", r"embed_tokens\.": "modules.0.embed."},
        after_norm=False,
    ),
    MtpFormat(
        "MiMo",
        r"model\.mtp_layers\.(\d+)\.",
        r"model\.mtp_layers\..*",
        _MIMO_PARTS,
        hidden_first=True,
        zeroed=True,
        after_norm=False,
    ),
)


@dataclass(frozen=True)
class CheckedMtp(CheckedHead):
    """Modules whose files were checked. `decoder` has as many layers as there are modules, all of the same shape; the
    flags are those of `format`, but for `after_norm`, which may be overridden. `depth`: guesses of a round that they
    were made for."""

    decoder: ModelSpec
    format: MtpFormat
    after_norm: bool
    depth: int | None = None

    @property
    def modules(self) -> int:
        return self.decoder.num_layers

    @property
    def layer_names(self) -> Mapping[str, str]:
        """The names of the layers' tensors, as weights.NAMES has them."""
        names = self.files.layer_names(self.decoder.details.architecture)
        return {part: re.sub(r"\b(model\.layers|blk)\.", "modules.", name) for part, name in names.items()}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        hidden, vocab = self.decoder.hidden, self.decoder.vocab
        found: dict[str, tuple[int, ...]] = {}
        for module in range(1 if self.format.shared else self.modules):
            found |= {f"modules.{module}.{part}.weight": (hidden,) for part in ("enorm", "hnorm", "norm")}
            found[f"modules.{module}.proj.weight"] = (hidden, 2 * hidden)
            own = (f"modules.{module}.{part}.weight" for part in ("head", "embed"))
            found |= {name: (vocab, hidden) for name in own if name in self.files.shapes}
        layers = {name: size for name, size in tensor_shapes(self.decoder).items() if name.startswith("layers.")}
        return found | stored_shapes(layers, self.layer_names)

    def workspace_bytes(self, kernels: Kernels, *, rows: int, sequences: int, context: int) -> int:
        """Bytes of the buffers of a pass."""
        act, hidden, several = kernels.act.itemsize, self.decoder.hidden, self.modules - 1
        logits_rows = min(rows, max(sequences, TREE_ROWS))
        layer = workspace_bytes(
            self.decoder,
            kernels,
            max_rows=rows,
            max_sequences=sequences,
            max_blocks=-(-context // BLOCK_SIZE),
            max_logits_rows=logits_rows,
        )
        around = rows * hidden * (3 * 4 + 3 * act + several * act)
        return layer + around + several * logits_rows * (4 * self.decoder.vocab + act * hidden)

    def token_bytes(self, kernels: Kernels) -> int:
        return block_bytes(self.decoder, kernels) // BLOCK_SIZE

    def load(self, decoder: Decoder, target: Weights, *, num_blocks: int) -> MtpHead:
        return MtpHead(self, decoder, target, num_blocks=num_blocks)


def open_mtp(
    files: HeadFiles, target: ModelSpec, *, dtype: str, inside: bool = False, after_norm: bool | None = None
) -> CheckedMtp:
    """The modules in some files; the names and shapes of all their tensors are checked. `inside`: they are the target's
    own files; `after_norm` overrides the format's. ModelError names what does not fit, and what is not supported."""
    kind = files.keys.text("speculators_model_type")
    if kind not in (None, "mtp"):
        raise ModelError(f"The head in {files.where} is a {kind} head.", "MTP modules are wanted here.")
    known = next((known for known in FORMATS if any(re.fullmatch(known.found, name) for name in files.shapes)), None)
    if known is None:
        raise ModelError(
            f"{files.where} has no MTP weights: no tensor is named as in modules of DeepSeek (model.layers.N.eh_proj), "
            "Qwen (mtp.fc), MiMo (model.mtp_layers.0.input_proj), speculators (mtp_layers.0.input_proj) or a GGUF file "
            "(blk.N.nextn.eh_proj).",
            "Give a directory or a GGUF file that has them, mtp:PATH, or another drafter.",
        )
    count = _rename(files, known)
    base = target if inside else _read_base(files, target)
    last = next(layer for layer in reversed(base.ordered_layers) if isinstance(layer.attention, Gqa | Mla))
    layers = (replace(last, ffn=_feed_forward(files, last), count=count),)
    decoder = replace(base, layers=layers, tied=True, decoder=replace(base.details, layer_order=(0,) * count))
    depth = None if inside else read_proposed(files.keys)
    head = CheckedMtp(files, dtype, decoder, known, known.after_norm if after_norm is None else after_norm, depth)
    among = inside or files.among_others
    others = r"(?!modules\.).*" if among else r"(model|lm_head)\..*|.*rotary_emb\.inv_freq|verifier_.*"
    files.check(head.tensors(), optional=(others,))
    return head


def _rename(files: HeadFiles, known: MtpFormat) -> int:
    """Let the tensors be called modules.N., numbered from 0, and return how many modules there are."""
    names = [match for name in files.shapes if (match := re.match(known.layers, name))]
    numbered = [match for name in files.shapes if (match := re.fullmatch(known.found, name)) and match.groups()]
    found = (whole_number(match[1]) for match in numbered or names)
    numbers = {number for number in found if number is not None} or {0}
    first = min(numbers)
    count = len(numbers)
    keys = files.keys.section("text_config") if is_wrapped(files.config) else files.keys
    stated = keys.count(known.count, default=count, most=_MOST_MODULES)
    if stated != count:
        raise ModelError(
            f"{known.count} in {files.keys.where} is {stated}, and its files have {count} MTP modules.",
            "The files are incomplete, or do not belong together.",
        )
    files.rename({known.layers.replace(r"(\d+)", str(first + i)): f"modules.{i}." for i in range(count)})
    files.rename(known.parts)
    return count


def _read_base(files: HeadFiles, target: ModelSpec) -> ModelSpec:
    """The model whose last layer is shaped as the modules', by their own configuration."""
    base = files.read_base()
    check_sizes(files, target, hidden=base.hidden, vocab=base.vocab)
    if files.among_others and base.num_layers != target.num_layers:
        raise ModelError(
            f"The MTP modules in {files.where} are of a model of {base.num_layers} layers; {target.name} has "
            f"{target.num_layers}.",
            "Give the file that was made for this target.",
        )
    return base


def _feed_forward(files: HeadFiles, layer: Layer) -> FeedForward:
    """A dense one where the module has it, else what the target's last layer has."""
    gate = files.shapes.get("modules.0.mlp.gate_proj.weight")
    return Dense(gate[0]) if gate else layer.ffn


class MtpHead(CachedHead):
    """The modules for the target `decoder`, whose embedding and output matrix they use where they have none of their
    own. `num_blocks` is the size of their cache, which holds a layer for each.

    `taps`: the target's layer whose states they need; a position's are `state_width` elements.
    """

    def __init__(self, head: CheckedMtp, decoder: Decoder, target: Weights, *, num_blocks: int) -> None:
        kernels, hidden = decoder.kernels, head.decoder.hidden
        super().__init__(decoder, kernels, hidden, state_width=hidden)
        self.modules = head.modules
        self.taps: tuple[int, ...] = (target.spec.num_layers,)
        self.cache = layer_cache([head.decoder.attention] * head.modules, kernels, num_blocks=num_blocks)
        self._head, self._decoder, self._weights = head, decoder, head.weights(kernels)
        if head.after_norm:  # the target hands its states over without it
            self._tape.rms_norm(
                self._target_states, target.read("norm.weight"), target.spec.details.norm_eps, self._state
            )
        else:
            self._tape.copy(self._target_states, self._state)
        self._fused = self._tape.mark
        rows, logits_rows = self.max_rows, self.max_logits_rows
        self._layer = LayerBuffers(
            head.decoder, kernels, positions=self.max_context, max_rows=rows, max_logits_rows=logits_rows
        )
        self._embedded = empty(rows, hidden)
        self._embedded_normed, self._state_normed = (empty(rows, hidden, dtype=kernels.act) for _ in range(2))
        self.guesses = HeadLogits(HeadVocabulary(np.arange(self.vocab), self.vocab), logits_rows)
        layers = layer_weights(self._weights, head.decoder, head.layer_names)
        self._modules = [self._record(module, layer) for module, layer in enumerate(layers)]

    def forward(self, batch: PackedBatch, states: Array, fed: Array, module: int = 0) -> HeadOutput:
        """One pass of a module over the packed rows: the first of them have the target's `states` [n, hidden] and the
        others what a module gave before, `fed` [m, hidden]; with several modules `given` is for the next one.
        UsageError if the batch exceeds the buffers."""
        recorded = self._modules[module]
        recorded.embed_tokens(batch)
        rows = self._run(batch, states, fed, further=recorded.tape if module else None)
        given = None if recorded.all_normed is None else recorded.all_normed[: batch.rows]
        return self.guesses.output(recorded.logits[:rows], recorded.normed[:rows], given)

    def _record(self, module: int, layer: LayerWeights) -> _Module:
        """Record a module; all of them share buffers, but for what they give."""
        head, buffers, act = self._head, self._layer, self._weights.kernels.act
        tape = self._tape.beside() if module else self._tape
        eps = head.decoder.details.norm_eps
        embed = row_tape(self._weights, self.max_rows) if head.format.zeroed else None
        (embed or tape).embed(self._matrix(module, "embed", self._decoder.embedding), self._embedded)
        tape.rms_norm(self._embedded, self._vector(module, "enorm"), eps, self._embedded_normed)
        tape.rms_norm(self._state, self._vector(module, "hnorm"), eps, self._state_normed)
        inputs = [self._embedded_normed, self._state_normed]
        if head.format.hidden_first:
            inputs.reverse()
        name = self._name(module, "proj")
        tape.linear(inputs[0], self._weights.pack([name], slice(self.hidden)), buffers.x)
        tape.linear(inputs[1], self._weights.pack([name], slice(self.hidden, None)), buffers.x, add=True)
        kind = head.decoder.layers[0]
        of = last_layer_rows(kind) if head.modules == 1 else "rows"
        LayerRecorder(head.decoder, self._weights.kernels, tape, self.cache, buffers).record(layer, kind, module, of=of)
        if of == "rows":
            tape.select(buffers.x, buffers.selected)
        norm, every = self._vector(module, "norm"), None
        if head.modules > 1:
            every = empty(self.max_rows, self.hidden, dtype=act)
            tape.rms_norm(buffers.x, norm, eps, every)
        rows = self.max_logits_rows
        normed = empty(rows, self.hidden, dtype=act)
        logits = empty(rows, self.vocab)
        tape.rms_norm(buffers.selected, norm, eps, normed, of="logits")
        tape.linear(normed, self._matrix(module, "head", self._decoder.head), logits, of="logits")
        self.guesses.record(tape, logits)
        return _Module(tape, embed, self._embedded, logits, normed, every)

    def _name(self, module: int, part: str) -> str:
        return f"modules.{0 if self._head.format.shared else module}.{part}.weight"

    def _vector(self, module: int, part: str) -> Array:
        """A norm."""
        return self._weights.vector(self._name(module, part)) + np.float32(self._head.decoder.details.norm_offset)

    def _matrix(self, module: int, part: str, shared: Any) -> Any:
        """A module's own matrix, or else the target's."""
        name = self._name(module, part)
        return self._weights.pack([name]) if name in self._weights.files.shapes else shared


@dataclass(frozen=True)
class _Module:
    """A module's tape and what it gives: logits f32 [L, vocab], and the states behind its last norm in act, of the rows
    with logits [L, hidden] and, with several modules, of all rows [R, hidden]. `embed` is a tape of its own where the
    first position's embedding, f32 [R, hidden] in `embedded`, is zeroed."""

    tape: Tape
    embed: Tape | None
    embedded: Array
    logits: Array
    normed: Array
    all_normed: Array | None

    def embed_tokens(self, batch: PackedBatch) -> None:
        """Before the pass."""
        if self.embed is not None:
            self.embed.inputs.tokens[: batch.rows] = batch.tokens
            run_rows(self.embed, batch.rows)
            self.embedded[: batch.rows][batch.positions == 0] = 0
