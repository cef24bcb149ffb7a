"""Runs an EAGLE-3 head on the engine's kernels, with a cache of its own.

A row stands for a position of the text: its inputs are the state of that position and the embedding of the token after
it, and it guesses the token after that. States are the target's, fused from the layers that the head taps, or else
what the head gave one row before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wager.arch.spec import ModelSpec
from wager.errors import UsageError
from wager.kernels.arrays import Array, DType, empty, zeros
from wager.kernels.base import BLOCK_SIZE, Kernels, RowSet, Tape, TargetOutput
from wager.models.head_eagle_spec import EagleSpec, read_eagle
from wager.models.head_files import HeadFiles
from wager.models.head_fusion import StateFusion
from wager.models.head_output import TREE_ROWS, HeadOutput
from wager.models.head_weights import HeadForm, HeadWeights
from wager.models.transformer import Decoder
from wager.models.weights import Weights
from wager.types import PackedBatch


class EagleHead:
    """An EAGLE-3 head beside the target `decoder`, whose limits and, where it has none of its own, whose embedding and
    output matrix it uses. `num_blocks` is the size of its cache.

    `taps`: the target's layers whose states it needs; a position's are `state_width` elements of `state_dtype`.
    """

    def __init__(
        self, spec: EagleSpec, weights: HeadWeights, decoder: Decoder, target: Weights, *, num_blocks: int
    ) -> None:
        self.spec, self.taps, self.vocab = spec, spec.taps, decoder.vocab
        self.max_rows, self.max_sequences, self.max_blocks = (
            decoder.max_rows,
            decoder.max_sequences,
            decoder.max_blocks,
        )
        self.max_logits_rows = min(self.max_rows, max(self.max_sequences, TREE_ROWS))
        self.max_context = self.max_blocks * BLOCK_SIZE
        kernels, attention, layers = weights.form.kernels, spec.attention, spec.decoder.num_layers
        self.state_width = spec.state_width
        self.hidden = spec.decoder.hidden
        self.cache = kernels.cache(
            layers=layers, num_blocks=num_blocks, kv_heads=attention.kv_heads, head_dim=attention.head_dim
        )
        self._tape = kernels.tape(
            max_rows=self.max_rows,
            max_sequences=self.max_sequences,
            max_blocks=self.max_blocks,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
        )
        self.buffers = self._tape.buffers
        self._state = empty(self.max_rows, self.hidden)  # what the rows read, then the residual stream
        self._fusion = StateFusion(spec, weights, self._state)
        self.state_dtype: DType = self._fusion.dtype
        recorder = _EagleRecorder(self, weights, self._tape, self._state)
        output = recorder.record(decoder.embedding)
        self._output = HeadOutput(self, weights, self._tape, output, decoder=decoder, target=target)

    def forward(self, batch: PackedBatch, states: Array, fed: Array) -> TargetOutput:
        """One pass over the packed rows: the first of them have the target's `states` [n, state_width] and the others
        what the head gave before, `fed` f32 [m, hidden].

        The logits are by the target's ids, with those that the head cannot guess far below all others; `last_hidden`
        is what is fed to the next row. UsageError if the batch exceeds the buffers.
        """
        rows = batch.rows
        if rows > self.max_rows or batch.num_sequences > self.max_sequences or len(states) + len(fed) != rows:
            raise UsageError(
                f"A pass of {rows} rows and {batch.num_sequences} sequences with {len(states)} + {len(fed)} states "
                "does not fit this head."
            )
        if len(states):
            self._fusion.run(states)
        self._state[len(states) : rows] = fed
        if self.buffers is None or self.buffers.packed is not batch:
            self._tape.inputs.fill(batch)
        self._tape.run(rows=rows, sequences=batch.num_sequences, logits_rows=len(batch.logits_indices))
        return self._output.take(len(batch.logits_indices))


class _EagleRecorder:
    """Records the layers of a head. Only what gives logits is computed past the last layer's keys and values."""

    def __init__(self, head: EagleHead, weights: HeadWeights, tape: Tape, state: Array) -> None:
        spec = self.spec = head.spec
        self.head, self.weights, self.tape, self.x = head, weights, tape, state
        rows, hidden, attention, act = head.max_rows, head.hidden, spec.attention, weights.form.kernels.act
        self.embedded = empty(rows, hidden)
        self.embedded_normed, self.normed = (empty(rows, hidden, dtype=act) for _ in range(2))
        self.qkv = empty(rows, attention.qkv_width)
        self.q = zeros(rows, attention.query_width, dtype=act)
        self.attention_out = empty(rows, attention.output_width, dtype=act)
        self.inner = empty(rows, spec.inner, dtype=act)
        self.selected = empty(head.max_logits_rows, hidden)
        self.rotation = spec.decoder.details.rope.table(head.max_context, attention.rope_dim)

    def record(self, target_embedding: Any) -> Array:
        """The residual stream of the rows that give logits, behind the last layer."""
        spec, tape = self.spec, self.tape
        embedding = self.weights.pack(["embed_tokens.weight"]) if spec.own_embedding else target_embedding
        tape.embed(embedding, self.embedded)
        self._norm(self.embedded, "layers.0.input_layernorm", self.embedded_normed)
        self._norm(self.x, "layers.0.hidden_norm", self.normed)
        if spec.norm_before_residual:
            tape.copy(self.normed, self.x)
        last = spec.decoder.num_layers - 1
        for index, layer in enumerate(spec.decoder.ordered_layers):
            self._attend(index, getattr(layer.attention, "window", None), of="logits" if index == last else "rows")
            self._feed_forward(index, of="logits" if index == last else "rows")
        return self.selected

    def _norm(self, x: Array, name: str, out: Array, *, of: RowSet = "rows") -> None:
        self.tape.rms_norm(x, self.weights.vector(f"{name}.weight"), self.spec.decoder.details.norm_eps, out, of=of)

    def _attend(self, index: int, window: int | None, *, of: RowSet) -> None:
        tape, weights, name, hidden = self.tape, self.weights, f"layers.{index}.self_attn", self.head.hidden
        projections = [f"{name}.{part}_proj.weight" for part in "qkv"]
        if index:
            self._norm(self.x, f"layers.{index}.input_layernorm", self.normed)
            tape.linear(self.normed, weights.pack(projections), self.qkv)
        else:  # the columns of the embedding come first
            tape.linear(self.embedded_normed, weights.pack(projections, slice(hidden)), self.qkv)
            tape.linear(self.normed, weights.pack(projections, slice(hidden, None), biased=False), self.qkv, add=True)
        norms, details = None, self.spec.decoder.details
        if details.qk_norm:
            q_norm, k_norm = (weights.vector(f"{name}.{part}_norm.weight") for part in "qk")
            norms = (q_norm, k_norm, details.norm_eps)
        cache = self.head.cache
        tape.rotary(self.qkv, self.rotation, norms, cache, index, self.q)
        tape.attention(self.q, cache, index, window=window, out=self.attention_out, of=of)
        if of == "logits":
            tape.select(self.x, self.selected)
        out = self.selected if of == "logits" else self.x
        tape.linear(self.attention_out, weights.pack([f"{name}.o_proj.weight"]), out, add=True, of=of)

    def _feed_forward(self, index: int, *, of: RowSet) -> None:
        tape, weights, name = self.tape, self.weights, f"layers.{index}.mlp"
        out = self.selected if of == "logits" else self.x
        self._norm(out, f"layers.{index}.post_attention_layernorm", self.normed, of=of)
        into = weights.pack_gated(f"{name}.gate_proj.weight", f"{name}.up_proj.weight")
        tape.gated(self.normed, into, self.inner, of=of)
        tape.linear(self.inner, weights.pack([f"{name}.down_proj.weight"]), out, add=True, of=of)


@dataclass(frozen=True)
class OpenedEagle:
    """An EAGLE-3 head whose files were checked against its target, but not loaded."""

    files: HeadFiles
    spec: EagleSpec
    quantised: bool

    def weight_bytes(self, kernels: Kernels) -> int:
        return HeadForm(kernels, self.quantised).weight_bytes(self.files.shapes)

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
        weights = HeadWeights(self.files, HeadForm(decoder.kernels, self.quantised))
        return EagleHead(self.spec, weights, decoder, target, num_blocks=num_blocks)


def open_eagle(files: HeadFiles, target: ModelSpec, *, quantised: bool) -> OpenedEagle:
    """ModelError if it is damaged, of a kind that is not supported, or of another target."""
    return OpenedEagle(files, read_eagle(files, target), quantised)
