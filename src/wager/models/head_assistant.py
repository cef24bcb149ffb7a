"""Assistants: small decoders without keys and values of their own, which Google publishes for Gemma 4 (its drafters for
multi-token prediction).

A row stands for the last known token: its inputs are the embedding of that token by the target and the state of the
position before it, behind the target's last norm. Every layer has queries alone, and attends to the keys and values
that the target cached in its last layer of the same kind, with a sliding window or without. What the row gives is a
guess and, projected back, the state that is fed with the guess. All guesses of a round are made at one place, since the
target has no keys beyond it.

The engine lets a row attend to what is cached at its own place: a row lies at the last position that the target
computed, and its rotation is that of the next one, where the last known token stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from wager.arch.layers import Dense, Gqa
from wager.arch.spec import Layer, ModelSpec
from wager.errors import ModelError, UsageError
from wager.kernels.arrays import Array, empty
from wager.kernels.base import BLOCK_SIZE
from wager.kernels.cpu import Kernels
from wager.models.head_files import (
    CheckedHead,
    HeadFiles,
    HeadLogits,
    HeadOutput,
    HeadVocabulary,
    check_sizes,
    layer_weights,
)
from wager.models.transformer import Decoder, LayerBuffers, LayerRecorder, workspace_bytes
from wager.models.weights import Weights, source_name, stored_shapes, tensor_shapes
from wager.types import PackedBatch

_UNUSED = r"(model\.)?masked_emb.*|lm_head\.weight"
"""Clusters of tokens by which others compute a part of the logits alone, and what a file may repeat."""

_MOST_GUESSES = 8


@dataclass(frozen=True)
class CheckedAssistant(CheckedHead):
    """An assistant whose files were checked. `decoder` has its layers; layer i reads layer `cached[i]` of those that
    the target caches; `names` are its tensors', as weights.NAMES has them; `wide` is the target's hidden size."""

    decoder: ModelSpec
    names: Mapping[str, str]
    cached: tuple[int, ...]
    wide: int
    depth: int | None = None

    def tensors(self) -> dict[str, tuple[int, ...]]:
        hidden, own = self.decoder.hidden, tensor_shapes(self.decoder)
        around = {"pre_projection.weight": (hidden, 2 * self.wide), "post_projection.weight": (self.wide, hidden)}
        return {**around, **stored_shapes({name: own[name] for name in own if name != "head.weight"}, self.names)}

    def workspace_bytes(self, kernels: Kernels, *, rows: int, sequences: int, context: int) -> int:
        """Bytes of the buffers of a pass, which has a row for each sequence."""
        sizes = {"max_rows": sequences, "max_sequences": sequences, "max_blocks": -(-context // BLOCK_SIZE)}
        return workspace_bytes(self.decoder, kernels, **sizes) + sequences * self.wide * (3 * 4 + 2 * 2)

    def load(self, decoder: Decoder, target: Weights, *, num_blocks: int) -> AssistantHead:
        return AssistantHead(self, decoder, target)


def open_assistant(files: HeadFiles, target: ModelSpec, *, dtype: str) -> CheckedAssistant:
    """The assistant in some files; all tensors' names and shapes are checked. ModelError names what does not fit the
    target, and what is not supported."""
    spec, wide = files.read_layers(), files.keys.integer("backbone_hidden_size")
    check_sizes(files, target, hidden=wide, vocab=spec.vocab)
    caching = [layer.caching for layer in target.ordered_layers if layer.caching]
    places: list[int] = []
    layers: list[Layer] = []
    for layer in spec.layers:
        kind, windowed = layer.attention, getattr(layer.attention, "window", None) is not None
        found = [
            (place, own)
            for place, own in enumerate(caching)
            if isinstance(own, Gqa) and (own.window is not None) == windowed
        ]
        if not isinstance(kind, Gqa) or not isinstance(layer.ffn, Dense) or not found:
            raise ModelError(
                f"The layers of the assistant in {files.where} are of a kind that {target.name} does not have.",
                "Give an assistant of this target.",
            )
        place, own = found[-1]
        if own.head_dim != kind.head_dim or kind.heads % own.kv_heads:
            raise ModelError(
                f"The assistant in {files.where} has {kind.heads} heads of {kind.head_dim}, which do not fit the "
                f"{own.kv_heads} of {own.head_dim} whose keys {target.name} caches.",
                "Give an assistant of this target.",
            )
        reading = replace(kind, kv_heads=own.kv_heads, window=own.window, shared=True, keys_as_values=False)
        layers.append(replace(layer, attention=reading))
        places.append(place)
    decoder = replace(spec, layers=tuple(layers), tied=True)
    names, cached = files.layer_names(spec.details.architecture), tuple(places[at] for at in spec.details.layer_order)
    head = CheckedAssistant(files, dtype, decoder, names, cached, wide)
    files.check(head.tensors(), optional=(_UNUSED,))
    return head


class AssistantHead:
    """An assistant of the target `decoder`, whose cache it reads: positions are the target's, and so are blocks."""

    def __init__(self, head: CheckedAssistant, decoder: Decoder, target: Weights) -> None:
        kernels, spec, weights = decoder.kernels, head.decoder, head.weights(decoder.kernels)
        rows = self.max_sequences = decoder.max_sequences
        self.vocab, self.max_depth = decoder.vocab, _MOST_GUESSES
        positions, act, eps = decoder.max_blocks * BLOCK_SIZE, kernels.act, spec.details.norm_eps
        tape = self._tape = kernels.tape(max_rows=rows, max_sequences=rows, max_blocks=decoder.max_blocks)
        self.buffers = tape.buffers
        buffers = LayerBuffers(spec, kernels, positions=positions, max_rows=rows, max_logits_rows=1)
        for kind in buffers.rotations:
            if (rope := spec.details.rope_of(kind)) is not None:
                table = rope.table(positions + 1, spec.rope_dim(kind))
                buffers.rotations[kind] = np.ascontiguousarray(table[1:])
        self._state, embedded = empty(rows, head.wide), empty(rows, head.wide)
        states, inputs = (empty(rows, head.wide, dtype=act) for _ in range(2))
        details = target.spec.details
        tape.rms_norm(self._state, target.read("norm.weight"), details.norm_eps, states)
        self._normed = tape.mark
        tape.narrow(self._state, states)
        self._narrowed = tape.mark
        tape.embed(decoder.embedding, embedded, scale=details.embedding_scale)
        tape.narrow(embedded, inputs)
        tape.linear(inputs, weights.pack(["pre_projection.weight"], slice(head.wide)), buffers.x)
        tape.linear(states, weights.pack(["pre_projection.weight"], slice(head.wide, None)), buffers.x, add=True)
        recorder = LayerRecorder(spec, kernels, tape, decoder.cache, buffers)
        for tensors, layer, at in zip(
            layer_weights(weights, spec, head.names), spec.ordered_layers, head.cached, strict=True
        ):
            recorder.record(tensors, layer, at, of="rows")
        normed = empty(rows, spec.hidden, dtype=act)
        self._logits, self._fed = empty(rows, self.vocab), empty(rows, head.wide)
        norm, table_name = (source_name(head.names, f"{part}.weight") for part in ("norm", "embed"))
        tape.rms_norm(buffers.x, weights.vector(norm) + np.float32(spec.details.norm_offset), eps, normed)
        tape.linear(normed, weights.pack([table_name]), self._logits)
        tape.linear(normed, weights.pack(["post_projection.weight"]), self._fed)
        self.guesses = HeadLogits(HeadVocabulary(np.arange(self.vocab), self.vocab), rows)
        self.guesses.record(tape, self._logits, of="rows")

    def forward(self, batch: PackedBatch, states: Array, *, fed: bool) -> HeadOutput:
        """One pass over a row for each sequence, packed into `buffers` at the last position that the target computed.
        `states` f32 [n, wide] are the target's, or what the rows before gave (`fed`). UsageError if it exceeds the
        buffers."""
        rows = batch.rows
        if rows > self.max_sequences or batch.num_sequences != rows:
            raise UsageError(f"A pass of {rows} rows and {batch.num_sequences} sequences does not fit this assistant.")
        if self.buffers.packed is not batch:
            self._tape.inputs.fill(batch)
        self._state[:rows] = states
        sizes = {"rows": rows, "sequences": rows, "logits_rows": 0}
        if not fed:
            self._tape.run(**sizes, last=self._normed)
        self._tape.run(**sizes, first=self._normed if fed else self._narrowed)
        return self.guesses.output(self._logits[:rows], self._fed[:rows])
