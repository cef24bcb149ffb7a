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
from wager.kernels.arrays import FLOAT32, Array, empty
from wager.kernels.base import TargetOutput
from wager.kernels.cpu import Kernels
from wager.models.head_files import (
    CheckedHead,
    HeadFiles,
    HeadVocabulary,
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
class CheckedMedusa(CheckedHead):
    """Medusa heads whose files were checked: `heads` heads of `layers` residual blocks each. `outputs` are their output
    matrices: one each, one for all, or none, where they use the target's."""

    heads: int
    layers: int
    hidden: int
    outputs: tuple[str, ...]
    vocabulary: HeadVocabulary

    @property
    def depth(self) -> int:
        """Guesses of a round."""
        return self.heads

    def workspace_bytes(self, kernels: Kernels, *, rows: int, sequences: int, context: int) -> int:
        logits = len(self.vocabulary.ids) + (0 if self.vocabulary.whole else self.vocabulary.size)
        return sequences * (16 * self.hidden + self.heads * (4 * logits + 4 * self.hidden))

    def token_bytes(self, kernels: Kernels) -> int:
        """They cache nothing."""
        return 0

    def load(self, decoder: Decoder, target: Weights, *, num_blocks: int) -> MedusaHead:
        return MedusaHead(self, decoder, target)


def open_medusa(files: HeadFiles, target: ModelSpec, *, quantised: bool) -> CheckedMedusa:
    """The heads in some files; all tensors' names and shapes are checked. ModelError names what does not fit."""
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
    outputs: tuple[str, ...] = ("lm_head.weight",) if "lm_head.weight" in shapes else ()
    if "lm_heads.0.weight" in shapes:
        outputs = tuple(f"lm_heads.{head}.weight" for head in range(heads))
        if keys.flag("original_lm_head"):
            raise ModelError(f"{files.where} has lm_heads, and its config.json says that all heads have one.")
    ids = _ids(files, keys.integer("truncated_vocab_size", default=vocab), vocab)
    expected: dict[str, tuple[int, ...]] = {}
    for name in [f"blocks.{head}.layers.{layer}" for head in range(heads) for layer in range(layers)]:
        expected[f"{name}.weight"] = (hidden, hidden)
        if f"{name}.bias" in shapes:
            expected[f"{name}.bias"] = (hidden,)
    for name in outputs:
        expected[name] = (vocab if shapes.get(name, (0,))[0] == vocab else len(ids), hidden)
    if "token_map" in shapes:
        expected["token_map"] = (len(ids),)
    files.check(expected)
    return CheckedMedusa(files, quantised, heads, layers, hidden, outputs, HeadVocabulary(ids, vocab))


def medusa_config(
    target: ModelSpec, *, heads: int, guessed: int, layers: int = 1, biased: bool = True, one_output: bool = True
) -> dict[str, Any]:
    """config.json of heads that guess `guessed` tokens, in vLLM's format, since speculators' has no Medusa. No further
    key may hold "num" with "heads" or "layers": readers take any such key for the number of heads."""
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": target.hidden,
        "vocab_size": target.vocab,
        "num_heads": heads,
        "num_hidden_layers": layers,
        "truncated_vocab_size": guessed,
        "original_lm_head": one_output,
        "medusa_fc_bias": biased,
        "logit_scale": 1.0,
        "torch_dtype": "bfloat16",
    }


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


class MedusaHead:
    """Medusa heads for the target `decoder`, for as many sequences as its passes may have."""

    def __init__(self, head: CheckedMedusa, decoder: Decoder, target: Weights) -> None:
        weights, ids = head.weights(decoder.kernels), head.vocabulary.ids
        act, rows = decoder.kernels.act, decoder.max_sequences
        self.vocab = decoder.vocab
        self.max_depth = head.heads
        self.max_sequences = rows
        self._state = empty(rows, head.hidden)
        self._normed = empty(rows, head.hidden, dtype=act)
        self._norm = row_tape(weights, rows)
        self._norm.rms_norm(self._state, target.read("norm.weight"), target.spec.details.norm_eps, self._normed)
        self._x = empty(rows, head.hidden, dtype=act)
        self._y = empty(rows, head.hidden)
        self._blocks = [[row_tape(weights, rows) for _ in range(head.layers)] for _ in range(head.heads)]
        for number, blocks in enumerate(self._blocks):
            for layer, tape in enumerate(blocks):
                tape.linear(self._x, weights.pack([f"blocks.{number}.layers.{layer}.weight"]), self._y)
        # One output matrix takes the states of all heads as rows of one product.
        self._one_output = len(head.outputs) < 2
        output_rows = rows * (head.heads if self._one_output else 1)
        self._last = empty(output_rows, head.hidden, dtype=act)
        self._logits = empty(output_rows, len(ids))
        self._target = TargetLogits(head.vocabulary, rows * head.heads)
        self._outputs = []
        for name in head.outputs or ("",):
            if name:
                matrix = weights.matrix(name)
                packed = weights.pack_values(matrix if len(matrix) == len(ids) else matrix[ids])
            else:
                packed = output_matrix(weights, head.vocabulary, decoder, target)
            tape = row_tape(weights, output_rows)
            tape.linear(self._last, packed, self._logits)
            self._outputs.append(tape)

    def forward(self, states: Array, depth: int) -> TargetOutput:
        """states f32 [n, hidden]: what enters the target's last norm. The logits, by the target's ids, of the first
        `depth` heads: row i * depth + j is head j's for state i."""
        n = len(states)
        self._state[:n] = states
        run_rows(self._norm, n)
        found = np.empty((n, depth, states.shape[1]), self._x.dtype)
        for head in range(depth):
            x = self._normed[:n].astype(FLOAT32)
            for tape in self._blocks[head]:
                self._x[:n] = x
                run_rows(tape, n)
                x = x + _silu(self._y[:n])
            found[:, head] = x
        logits = self._output(found).reshape(n * depth, -1)
        greedy = np.where(np.isfinite(logits).all(axis=1), logits.argmax(axis=1), -1).astype(np.int32)
        return self._target.take(logits, greedy)

    def _output(self, states: Array) -> Array:
        """states act [n, depth, hidden] -> logits of each."""
        n, depth, hidden = states.shape
        if self._one_output:
            self._last[: n * depth] = states.reshape(-1, hidden)
            run_rows(self._outputs[0], n * depth)
            return self._logits[: n * depth]
        logits = np.empty((n, depth, self._logits.shape[1]), np.float32)
        for head in range(depth):
            self._last[:n] = states[:, head]
            run_rows(self._outputs[head], n)
            logits[:, head] = self._logits[:n]
        return logits


def _silu(x: Array) -> Array:
    with np.errstate(over="ignore"):
        found: Array = x / (1 + np.exp(-x))
    return found
