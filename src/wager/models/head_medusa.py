"""Medusa heads (arXiv 2401.10774) on the engine's kernels: head i guesses the token i + 2 places behind the position
whose state it reads, all heads from one state.

A head is residual blocks x + SiLU(W x + b), x what enters the target's output matrix, and then an output matrix. Two
formats are read: vLLM's (`blocks.{head}.layers.{layer}`, `lm_heads.{head}` or one `lm_head`, `token_map`), and the
original repository's (`{head}.{layer}.linear`, `{head}.{layers}`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wager.arch.config_keys import short_repr
from wager.arch.spec import ModelSpec
from wager.errors import ModelError
from wager.kernels.arrays import FLOAT32, INT32, Array, empty
from wager.kernels.base import TargetOutput
from wager.kernels.cpu import Kernels
from wager.kernels.tape import Tape
from wager.models.head_files import (
    HeadFiles,
    HeadVocabulary,
    HeadWeights,
    OpenedHeadFiles,
    TargetLogits,
    check_sizes,
    output_matrix,
    row_tape,
    run_rows,
)
from wager.models.transformer import Decoder
from wager.models.weights import Weights

_RENAMED = {
    r"medusa_heads\.": "",
    r"(\d+)\.(\d+)\.linear\.": r"blocks.\1.layers.\2.",
    r"(\d+)\.(\d+)\.": r"lm_heads.\1.",
}
_MOST_HEADS, _MOST_LAYERS = 32, 16


@dataclass(frozen=True)
class MedusaSpec:
    """`heads` heads of `layers` residual blocks each. `output`: "heads" (a matrix each), "one" (the same for all) or
    "target" (the target's)."""

    heads: int
    layers: int
    hidden: int
    output: str
    vocabulary: HeadVocabulary

    @property
    def depth(self) -> int:
        """Guesses of a round."""
        return self.heads


class MedusaHead:
    """Medusa heads for the target `decoder`, for as many sequences as its passes may have."""

    def __init__(self, spec: MedusaSpec, weights: HeadWeights, decoder: Decoder, target: Weights) -> None:
        self.spec = spec
        self.vocab = decoder.vocab
        self.max_depth = spec.heads
        self.max_sequences = decoder.max_sequences
        act, rows = weights.form.kernels.act, decoder.max_sequences
        self._state = empty(rows, spec.hidden)
        self._normed = empty(rows, spec.hidden, dtype=act)
        self._norm = row_tape(weights, rows)
        self._norm.rms_norm(self._state, target.read("norm.weight"), target.spec.details.norm_eps, self._normed)
        self._x = empty(rows, spec.hidden, dtype=act)
        self._y = empty(rows, spec.hidden)
        self._blocks = [
            [self._block(weights, head, layer) for layer in range(spec.layers)] for head in range(spec.heads)
        ]
        self._output = _MedusaOutput(self, weights, decoder, target)

    def forward(self, states: Array, depth: int) -> TargetOutput:
        """states f32 [n, hidden]: what enters the target's last norm. The logits, by the target's ids, of the first
        `depth` heads: row i * depth + j is head j's for state i."""
        n = len(states)
        self._state[:n] = states
        run_rows(self._norm, n)
        found = np.empty((n, depth, self.spec.hidden), self._x.dtype)
        for head in range(depth):
            x = self._normed[:n].astype(FLOAT32)
            for tape in self._blocks[head]:
                self._x[:n] = x
                run_rows(tape, n)
                x = x + _silu(self._y[:n])
            found[:, head] = x
        return self._output.take(found)

    def _block(self, weights: HeadWeights, head: int, layer: int) -> Tape:
        tape = row_tape(weights, self.max_sequences)
        tape.linear(self._x, weights.pack([f"blocks.{head}.layers.{layer}.weight"]), self._y)
        return tape


class _MedusaOutput:
    """The output matrices: one for the states of all heads as rows of one product, or one for each head's."""

    def __init__(self, head: MedusaHead, weights: HeadWeights, decoder: Decoder, target: Weights) -> None:
        spec = head.spec
        self._shared = spec.output != "heads"
        rows = head.max_sequences * (spec.heads if self._shared else 1)
        self._x = empty(rows, spec.hidden, dtype=weights.form.kernels.act)
        self._logits = empty(rows, len(spec.vocabulary.ids))
        self._greedy = empty(rows, dtype=INT32)
        self._target = TargetLogits(spec.vocabulary, head.max_sequences * spec.heads)
        self._tapes = []
        for index in range(1 if self._shared else spec.heads):
            tape = row_tape(weights, rows)
            tape.linear(self._x, _matrix(spec, weights, decoder, target, index=index), self._logits)
            self._tapes.append(tape)

    def take(self, states: Array) -> TargetOutput:
        """states act [n, depth, hidden] -> rows of logits, those of one state together."""
        n, depth, hidden = states.shape
        if self._shared:
            self._x[: n * depth] = states.reshape(-1, hidden)
            run_rows(self._tapes[0], n * depth)
            logits = self._logits[: n * depth]
        else:
            logits = np.empty((n, depth, self._logits.shape[1]), np.float32)
            for head in range(depth):
                self._x[:n] = states[:, head]
                run_rows(self._tapes[head], n)
                logits[:, head] = self._logits[:n]
            logits = logits.reshape(n * depth, -1)
        greedy = np.where(np.isfinite(logits).all(axis=1), logits.argmax(axis=1), -1).astype(np.int32)
        return self._target.take(logits, greedy)


def _matrix(spec: MedusaSpec, weights: HeadWeights, decoder: Decoder, target: Weights, *, index: int) -> Any:
    if spec.output == "target":
        return output_matrix(weights, spec.vocabulary, decoder, target)
    matrix = weights.matrix("lm_head.weight" if spec.output == "one" else f"lm_heads.{index}.weight")
    ids = spec.vocabulary.ids
    return weights.pack_values(matrix if len(matrix) == len(ids) else matrix[ids])


def _silu(x: Array) -> Array:
    with np.errstate(over="ignore"):
        found: Array = x / (1 + np.exp(-x))
    return found


def read_medusa(files: HeadFiles, target: ModelSpec) -> MedusaSpec:
    """The heads' specification; all tensors' names and shapes are checked. ModelError names what does not fit."""
    files.rename(_RENAMED)
    keys, shapes = files.keys, files.shapes
    kind = keys.text("model_type") or "medusa"
    if kind not in ("medusa", target.details.architecture.lower(), "llama") or "speculators_model_type" in files.config:
        key = "speculators_model_type" if "speculators_model_type" in files.config else "model_type"
        raise ModelError(
            f"The head in {files.where} is no Medusa head: its {key} is {short_repr(str(files.config.get(key)))}.",
            "Medusa heads are wanted here.",
        )
    heads = keys.integer("num_heads", "medusa_num_heads", default=5, most=_MOST_HEADS)
    if keys.get("num_heads") is None:  # published configurations of the original format name fewer than there are
        heads = max(heads, _count_heads(shapes))
    layers = keys.integer("num_hidden_layers", "medusa_num_layers", default=1, most=_MOST_LAYERS)
    hidden = keys.integer("hidden_size", default=target.hidden)
    vocab = keys.integer("vocab_size", default=target.vocab)
    check_sizes(files, target, hidden=hidden, vocab=vocab)
    keys.refuse("logit_scale", unless=(1, 1.0))
    output = "heads" if "lm_heads.0.weight" in shapes else "one" if "lm_head.weight" in shapes else "target"
    if output == "heads" and keys.flag("original_lm_head"):
        raise ModelError(f"{files.where} has lm_heads, and its config.json says that all heads have one.")
    ids = _ids(files, keys.integer("truncated_vocab_size", default=vocab), vocab)
    spec = MedusaSpec(heads, layers, hidden, output, HeadVocabulary(ids, vocab))
    files.check(_tensors(spec, files))
    return spec


def _count_heads(shapes: Mapping[str, tuple[int, ...]]) -> int:
    found = [int(match[1]) + 1 for name in shapes if (match := re.match(r"blocks\.(\d{1,2})\.", name))]
    return max((count for count in found if count <= _MOST_HEADS), default=0)


def _ids(files: HeadFiles, count: int, vocab: int) -> Array:
    """The target's id of each of the heads' ids."""
    if "token_map" not in files.shapes:
        if count != vocab:
            raise ModelError(
                f"The head in {files.where} guesses {count} ids of a vocabulary of {vocab} and has no token_map to say "
                "which.",
                "The head is incomplete.",
            )
        return np.arange(vocab)
    files.check_shape("token_map", (count,))
    ids = files.integers("token_map")
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) < count:
        raise ModelError(f"token_map in {files.where} names ids that the target does not have, or one twice.")
    return ids


def _tensors(spec: MedusaSpec, files: HeadFiles) -> Mapping[str, tuple[int, ...]]:
    hidden = spec.hidden
    found: dict[str, tuple[int, ...]] = {}
    for head in range(spec.heads):
        for layer in range(spec.layers):
            name = f"blocks.{head}.layers.{layer}"
            found[f"{name}.weight"] = (hidden, hidden)
            if f"{name}.bias" in files.shapes:
                found[f"{name}.bias"] = (hidden,)
    names = {"heads": [f"lm_heads.{head}.weight" for head in range(spec.heads)], "one": ["lm_head.weight"]}
    for name in names.get(spec.output, []):
        whole = files.shapes.get(name, (0,))[0] == spec.vocabulary.size
        found[name] = (spec.vocabulary.size if whole else len(spec.vocabulary.ids), hidden)
    if "token_map" in files.shapes:
        found["token_map"] = (len(spec.vocabulary.ids),)
    return found


class OpenedMedusa(OpenedHeadFiles[MedusaSpec]):
    """Medusa heads whose files were checked."""

    def workspace_bytes(self, kernels: Kernels, *, rows: int, sequences: int, context: int) -> int:
        spec = self.spec
        logits = len(spec.vocabulary.ids) + (0 if spec.vocabulary.whole else spec.vocabulary.size)
        return sequences * (16 * spec.hidden + spec.heads * (4 * logits + 4 * spec.hidden))

    def token_bytes(self, kernels: Kernels) -> int:
        """They cache nothing."""
        return 0

    def load(self, decoder: Decoder, target: Weights, *, num_blocks: int) -> MedusaHead:
        return MedusaHead(self.spec, self.weights(decoder), decoder, target)


def open_medusa(files: HeadFiles, target: ModelSpec, *, quantised: bool) -> OpenedMedusa:
    """ModelError if they are damaged, of a kind that is not supported, or of another target."""
    return OpenedMedusa(files, read_medusa(files, target), quantised)
