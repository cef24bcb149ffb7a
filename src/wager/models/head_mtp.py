"""Runs modules of multi-token prediction on the engine's kernels, with a cache of their own.

A row of a module stands for a position of the text: its inputs are the state of that position and the embedding of a
later token (the next one for the first module, one further for each module after it), and it guesses the token after
that. The first module's states are the target's, behind all its layers; a module's are what the one before it gave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wager.arch.spec import ModelSpec
from wager.errors import UsageError
from wager.kernels.arrays import FLOAT32, INT32, Array, DType, empty
from wager.kernels.base import BLOCK_SIZE, Kernels, Tape, TargetOutput
from wager.models import footprint
from wager.models.head_files import HeadFiles
from wager.models.head_fusion import row_tape, run_rows
from wager.models.head_mtp_spec import MtpSpec, layer_names, read_mtp
from wager.models.head_output import TREE_ROWS
from wager.models.head_weights import HeadForm, HeadWeights
from wager.models.layer_recorder import LayerBuffers, LayerRecorder, layer_cache, needed_rows
from wager.models.layer_weights import LayerWeights
from wager.models.matrices import Matrices
from wager.models.packed_cache import PackedStore
from wager.models.tensors import tensor_shapes
from wager.models.transformer import Decoder
from wager.models.weights import StoredWeights, Weights
from wager.types import PackedBatch


class MtpHead:
    """The modules beside the target `decoder`, whose limits and, where they have none of their own, whose embedding and
    output matrix they use. `num_blocks` is the size of their cache, which holds a layer for each.

    `taps`: the target's layer whose states they need; a position's are `state_width` elements of `state_dtype`.
    """

    def __init__(
        self, spec: MtpSpec, weights: HeadWeights, decoder: Decoder, target: Weights, *, num_blocks: int
    ) -> None:
        self.spec, self.vocab, self.modules = spec, decoder.vocab, spec.modules
        self.max_rows, self.max_sequences, self.max_blocks = (
            decoder.max_rows,
            decoder.max_sequences,
            decoder.max_blocks,
        )
        self.max_logits_rows = min(self.max_rows, max(self.max_sequences, TREE_ROWS))
        self.max_context = self.max_blocks * BLOCK_SIZE
        kernels, attention, hidden = weights.form.kernels, spec.decoder.attention, spec.decoder.hidden
        self.hidden = self.state_width = hidden
        self.state_dtype: DType = FLOAT32
        self.taps: tuple[int, ...] = (target.spec.num_layers,)
        self.cache = layer_cache(spec.decoder, kernels, layers=spec.modules, num_blocks=num_blocks, kv_dtype="bf16")
        tape = kernels.tape(
            max_rows=self.max_rows,
            max_sequences=self.max_sequences,
            max_blocks=self.max_blocks,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
        )
        self.buffers, self._inputs = tape.buffers, tape.inputs
        self._state = empty(self.max_rows, hidden)
        self._target_norm = _TargetNorm(weights, target, self.max_rows) if spec.after_norm else None
        recorder = _ModuleRecorder(self, weights, decoder)
        self._modules = [
            recorder.record(module, tape.beside() if module else tape, self._state) for module in range(spec.modules)
        ]

    def forward(self, batch: PackedBatch, states: Array, fed: Array, module: int = 0) -> TargetOutput:
        """One pass of a module over the packed rows: the first of them have the target's `states` [n, hidden] and the
        others what a module gave before, `fed` f32 [m, hidden].

        `last_hidden` is what is fed to the next row; with several modules `taps` has under 0 what all rows gave, for
        the next module. UsageError if the batch exceeds the buffers.
        """
        rows = batch.rows
        if rows > self.max_rows or batch.num_sequences > self.max_sequences or len(states) + len(fed) != rows:
            raise UsageError(
                f"A pass of {rows} rows and {batch.num_sequences} sequences with {len(states)} + {len(fed)} states "
                "does not fit these modules."
            )
        if len(states):
            self._state[: len(states)] = self._target_norm.run(states) if self._target_norm else states
        self._state[len(states) : rows] = fed
        if self.buffers is None or self.buffers.packed is not batch:
            self._inputs.fill(batch)
        return self._modules[module].run(batch)


class _TargetNorm:
    """The target's last norm, of states that it handed over without."""

    def __init__(self, weights: HeadWeights, target: Weights, rows: int) -> None:
        hidden = target.spec.hidden
        self._states, self._normed = empty(rows, hidden), empty(rows, hidden, dtype=weights.form.kernels.act)
        self._tape = row_tape(weights, rows)
        self._tape.rms_norm(self._states, target.read("norm.weight"), target.spec.details.norm_eps, self._normed)

    def run(self, states: Array) -> Array:
        self._states[: len(states)] = states
        run_rows(self._tape, len(states))
        return self._normed[: len(states)]


@dataclass(frozen=True)
class _Module:
    """A module's tape and what it gives: f32 logits and their greedy ids, `normed` of the rows with logits and, with
    several modules, of all rows. `embed` is a tape of its own where the first position's embedding is zeroed."""

    tape: Tape
    embed: Tape | None
    embedded: Array
    logits: Array
    greedy: Array
    normed: Array
    all_normed: Array | None

    def run(self, batch: PackedBatch) -> TargetOutput:
        rows, logits_rows = batch.rows, len(batch.logits_indices)
        if self.embed is not None:
            self.embed.inputs.tokens[:rows] = batch.tokens
            run_rows(self.embed, rows)
            self.embedded[:rows][batch.positions == 0] = 0
        self.tape.run(rows=rows, sequences=batch.num_sequences, logits_rows=logits_rows)
        given = {} if self.all_normed is None else {0: self.all_normed[:rows].astype(FLOAT32)}
        fed = self.normed[:logits_rows].astype(FLOAT32)
        return TargetOutput(self.logits[:logits_rows], self.greedy[:logits_rows], fed, given)


class _ModuleRecorder:
    """Records modules one after the other; they share buffers."""

    def __init__(self, head: MtpHead, weights: HeadWeights, decoder: Decoder) -> None:
        spec = self.spec = head.spec
        self.head, self.weights, self.decoder, kernels = head, weights, decoder, weights.form.kernels
        rotation = spec.decoder.details.rope.table(head.max_context, spec.decoder.attention.rope_dim)
        rows, self._logits_rows = head.max_rows, head.max_logits_rows
        self.to = LayerBuffers(spec.decoder, kernels, rotation, max_rows=rows, max_logits_rows=self._logits_rows)
        self.embedded = empty(rows, head.hidden)
        self.embedded_normed, self.state_normed = (empty(rows, head.hidden, dtype=kernels.act) for _ in range(2))
        layers = StoredWeights(spec.decoder, weights.files, layer_names(spec.decoder))
        matrices = Matrices(layers, "q8" if weights.form.quantised else "bf16", kernels.act, only_layers=True)
        known = tensor_shapes(spec.decoder)
        self._layers = [
            LayerWeights(layers, matrices, PackedStore(kernels), known, index=index) for index in range(spec.modules)
        ]

    def record(self, module: int, tape: Tape, state: Array) -> _Module:
        spec, to, weights, eps = self.spec, self.to, self.weights, self.spec.decoder.details.norm_eps
        embed = row_tape(weights, self.head.max_rows) if spec.zeroed else None
        (embed or tape).embed(self._matrix(module, "embed", self.decoder.embedding), self.embedded)
        tape.rms_norm(self.embedded, self._vector(module, "enorm"), eps, self.embedded_normed)
        tape.rms_norm(state, self._vector(module, "hnorm"), eps, self.state_normed)
        first, second = self.embedded_normed, self.state_normed
        if spec.hidden_first:
            first, second = second, first
        hidden, name = self.head.hidden, self._name(module, "proj")
        tape.linear(first, weights.pack([name], slice(hidden)), to.x)
        tape.linear(second, weights.pack([name], slice(hidden, None)), to.x, add=True)
        of = needed_rows(spec.layer) if spec.modules == 1 else "rows"
        recorder = LayerRecorder(spec.decoder, weights.form.kernels, tape, self.head.cache, to)
        recorder.record(self._layers[module], spec.layer, module, of=of)
        if of == "rows":
            tape.select(to.x, to.selected)
        return self._record_output(module, tape, embed)

    def _record_output(self, module: int, tape: Tape, embed: Tape | None) -> _Module:
        to, rows, eps, act = (
            self.to,
            self._logits_rows,
            self.spec.decoder.details.norm_eps,
            self.weights.form.kernels.act,
        )
        norm = self._vector(module, "norm")
        every = None
        if self.spec.modules > 1:
            every = empty(self.head.max_rows, self.head.hidden, dtype=act)
            tape.rms_norm(to.x, norm, eps, every)
        normed = empty(rows, self.head.hidden, dtype=act)
        logits, greedy = empty(rows, self.head.vocab), empty(rows, dtype=INT32)
        tape.rms_norm(to.selected, norm, eps, normed, of="logits")
        tape.linear(normed, self._matrix(module, "head", self.decoder.head), logits, of="logits")
        tape.argmax(logits, greedy)
        return _Module(tape, embed, self.embedded, logits, greedy, normed, every)

    def _name(self, module: int, part: str) -> str:
        return f"modules.{0 if self.spec.shared else module}.{part}.weight"

    def _vector(self, module: int, part: str) -> Array:
        return self.weights.vector(self._name(module, part))

    def _matrix(self, module: int, part: str, shared: Any) -> Any:
        """A module's own matrix, or else the target's."""
        name = self._name(module, part)
        return self.weights.pack([name]) if name in self.weights.files.shapes else shared


@dataclass(frozen=True)
class OpenedMtp:
    """Modules whose files were checked against their target, but not loaded."""

    files: HeadFiles
    spec: MtpSpec
    quantised: bool

    def weight_bytes(self, kernels: Kernels) -> int:
        own = {name: shape for name, shape in self.files.shapes.items() if name.startswith("modules.")}
        return HeadForm(kernels, self.quantised).weight_bytes(own)

    def workspace_bytes(self, kernels: Kernels, *, rows: int, sequences: int, context: int) -> int:
        """Bytes of the buffers of a pass."""
        spec, act, hidden = self.spec, kernels.act.itemsize, self.spec.decoder.hidden
        limits, logits_rows = {"max_rows": rows, "max_sequences": sequences}, min(rows, max(sequences, TREE_ROWS))
        blocks = -(-context // BLOCK_SIZE)
        layer = footprint.workspace_bytes(
            spec.decoder, kernels, **limits, max_blocks=blocks, max_logits_rows=logits_rows
        )
        several = spec.modules - 1
        around = rows * hidden * (3 * 4 + 3 * act + several * act)
        return layer + around + several * logits_rows * (4 * spec.decoder.vocab + act * hidden)

    def token_bytes(self, kernels: Kernels) -> int:
        """Bytes of keys and values per position."""
        return footprint.block_bytes(self.spec.decoder, kernels) // BLOCK_SIZE

    def load(self, decoder: Decoder, target: Weights, *, num_blocks: int) -> MtpHead:
        weights = HeadWeights(self.files, HeadForm(decoder.kernels, self.quantised))
        return MtpHead(self.spec, weights, decoder, target, num_blocks=num_blocks)


def open_mtp(
    files: HeadFiles, target: ModelSpec, *, quantised: bool, inside: bool = False, after_norm: bool | None = None
) -> OpenedMtp:
    """ModelError if they are absent, damaged, of a kind that is not supported, or of another target."""
    return OpenedMtp(files, read_mtp(files, target, inside=inside, after_norm=after_norm), quantised)
