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

from wager.arch.config_keys import short_repr
from wager.arch.spec import ModelSpec
from wager.errors import ModelError
from wager.kernels.arrays import Array, empty
from wager.kernels.cpu import Kernels
from wager.kernels.tape import Tape
from wager.models.head_files import (
    CheckedHead,
    HeadFiles,
    HeadLogits,
    HeadOutput,
    HeadVocabulary,
    check_ids,
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
    """Medusa heads whose files were checked: `depth` heads of `layers` residual blocks each. `outputs` are their output
    matrices: one each, one for all, or none, where they use the target's."""

    depth: int
    layers: int
    hidden: int
    outputs: tuple[str, ...]
    vocabulary: HeadVocabulary

    def workspace_bytes(self, kernels: Kernels, *, rows: int, sequences: int, context: int) -> int:
        logits = len(self.vocabulary.ids) + (0 if self.vocabulary.whole else self.vocabulary.size)
        return sequences * (16 * self.hidden + self.depth * (4 * logits + 4 * self.hidden))

    def load(self, decoder: Decoder, target: Weights, *, num_blocks: int) -> MedusaHead:
        return MedusaHead(self, decoder, target)


def open_medusa(files: HeadFiles, target: ModelSpec, *, dtype: str) -> CheckedMedusa:
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
    draft, ids = keys.integer("truncated_vocab_size", default=vocab), None
    expected: dict[str, tuple[int, ...]] = {}
    if "token_map" in shapes:
        expected["token_map"] = (draft,)
        files.check_shape("token_map", (draft,))
        ids = files.integers("token_map")
    vocabulary = check_ids(files, "token_map", ids, draft=draft, size=vocab)
    for name in [f"blocks.{head}.layers.{layer}" for head in range(heads) for layer in range(layers)]:
        expected[f"{name}.weight"] = (hidden, hidden)
        if f"{name}.bias" in shapes:
            expected[f"{name}.bias"] = (hidden,)
    for name in outputs:
        expected[name] = (vocab if shapes.get(name, (0,))[0] == vocab else draft, hidden)
    files.check(expected)
    return CheckedMedusa(files, dtype, heads, layers, hidden, outputs, vocabulary)


def medusa_config(target: ModelSpec, *, heads: int, guessed: int) -> dict[str, Any]:
    """config.json of heads that guess `guessed` tokens, in vLLM's format, since speculators' has no Medusa. No further
    key may hold "num" with "heads" or "layers": readers take any such key for the number of heads."""
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": target.hidden,
        "vocab_size": target.vocab,
        "num_heads": heads,
        "num_hidden_layers": 1,
        "truncated_vocab_size": guessed,
        "original_lm_head": True,
        "medusa_fc_bias": True,
        "logit_scale": 1.0,
        "torch_dtype": "bfloat16",
    }


def _count_heads(shapes: Mapping[str, tuple[int, ...]]) -> int:
    found = [int(match[1]) + 1 for name in shapes if (match := re.match(r"blocks\.(\d{1,2})\.", name))]
    return max((count for count in found if count <= _MOST_HEADS), default=0)


class MedusaHead:
    """Medusa heads for the target `decoder`, for as many sequences as its passes may have."""

    def __init__(self, head: CheckedMedusa, decoder: Decoder, target: Weights) -> None:
        self._weights = weights = head.weights(decoder.kernels)
        act, rows, ids = decoder.kernels.act, decoder.max_sequences, head.vocabulary.ids
        self.vocab = decoder.vocab
        self.max_depth = head.depth
        self.max_sequences = rows
        self._hidden, self._layers = head.hidden, head.layers
        self._state, self._y = empty(rows, head.hidden), empty(rows, head.hidden)
        self._norm = target.read("norm.weight"), target.spec.details.norm_eps
        self._blocks = {
            (number, layer): weights.pack([f"blocks.{number}.layers.{layer}.weight"])
            for number in range(head.depth)
            for layer in range(head.layers)
        }
        self._outputs = []
        for name in head.outputs:
            matrix = weights.matrix(name)
            self._outputs.append(weights.pack_wide(matrix if len(matrix) == len(ids) else matrix[ids]))
        if not self._outputs:
            self._outputs.append(output_matrix(weights, head.vocabulary, decoder, target))
        self._last, self._logits = empty(rows * head.depth, head.hidden, dtype=act), empty(rows * head.depth, len(ids))
        self.guesses = HeadLogits(head.vocabulary, rows * head.depth)
        self._output = row_tape(weights, rows * head.depth)
        if len(self._outputs) == 1:  # it takes the states of all heads as rows of one product
            self._output.linear(self._last, self._outputs[0], self._logits)
        self.guesses.record(self._output, self._logits, of="rows")
        self._tapes: dict[int, Tape] = {}

    def forward(self, states: Array, depth: int) -> HeadOutput:
        """states f32 [n, hidden]: what enters the target's last norm. The logits of the first `depth` heads: row
        i * depth + j is head j's for state i."""
        n = len(states)
        self._state[:n] = states
        if depth not in self._tapes:
            self._tapes[depth] = self._record(depth)
        run_rows(self._tapes[depth], n)
        run_rows(self._output, n * depth)
        return self.guesses.output(self._logits[: n * depth])

    def _record(self, depth: int) -> Tape:
        """A tape from the states of sequences to what the first `depth` heads multiply with their output matrix, side
        by side; and those products, where each head has a matrix of its own."""
        rows, hidden, act = self.max_sequences, self._hidden, self._weights.kernels.act
        ids = self._logits.shape[1]
        last = self._last.reshape(-1)[: rows * depth * hidden].reshape(rows, depth * hidden)
        logits = self._logits.reshape(-1)[: rows * depth * ids].reshape(rows, depth * ids)
        tape, normed = row_tape(self._weights, rows), empty(rows, hidden, dtype=act)
        tape.rms_norm(self._state, *self._norm, normed)
        for head in range(depth):
            x = normed
            for layer in range(self._layers):
                tape.linear(x, self._blocks[head, layer], self._y)
                shared = layer == self._layers - 1 and len(self._outputs) == 1
                out = last[:, head * hidden : (head + 1) * hidden] if shared else empty(rows, hidden, dtype=act)
                tape.add_silu(x, self._y, out)
                x = out
            if len(self._outputs) > 1:
                tape.linear(x, self._outputs[head], logits[:, head * ids : (head + 1) * ids])
        return tape
