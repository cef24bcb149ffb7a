"""Block heads, DFlash and DSpark: a reference in torch (test_heads.py compares with it), and files that do not fit are
refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle_heads import HIDDEN, VOCAB, ReferenceLayers, layer_config, save_head
from tiny_models import spec
from torch import Tensor

from wager.arch import Dense, Gqa
from wager.errors import ModelError
from wager.kernels.arrays import Array
from wager.models.head_block import open_block
from wager.models.head_files import HeadFiles
from wager.models.random_models import RandomWeights

TARGET = spec((Gqa(6, 2, 16),) * 4, (Dense(64),) * 4)
WEIGHTS = RandomWeights(TARGET, 1)
MASK, SLOTS = 81, 4


@dataclass(frozen=True)
class Kind:
    taps: tuple[int, ...] = (1, 3)
    layers: int = 2
    draft_vocab: int = 40
    anchor_guesses: bool = False
    rank: int = 0
    confidence: bool = False
    own: bool = False
    native: bool = False


KINDS = {
    "dflash": Kind(),
    "dspark": Kind(anchor_guesses=True, rank=8, confidence=True, own=True),
    "native dspark": Kind(anchor_guesses=True, rank=8, native=True, draft_vocab=VOCAB, own=True),
    "native dflash": Kind(native=True, draft_vocab=VOCAB, taps=(0, 2, 3)),
}


class ReferenceBlock(ReferenceLayers):
    """A block head, of random tensors if none are given, and its guesses by the whole sequence at once."""

    def __init__(self, kind: Kind, tensors: dict[str, Tensor] | None = None) -> None:
        super().__init__(3)
        self.kind = kind
        self.ids = np.sort(np.random.default_rng(1).permutation(VOCAB)[: kind.draft_vocab])
        self.tensors = t = tensors or self._random()
        embedding = torch.from_numpy(WEIGHTS.read("embed.weight"))
        self._embedding = t.get("embed_tokens.weight", embedding)
        self._output = t.get("lm_head.weight", embedding[torch.from_numpy(self.ids)])

    def _random(self) -> dict[str, Tensor]:
        kind = self.kind
        t = {"fc.weight": self._matrix(HIDDEN, len(kind.taps) * HIDDEN)}
        t |= {f"{name}.weight": self._norm_weight() for name in ("hidden_norm", "norm")}
        for layer in range(kind.layers):
            made = self._layer(bias=False, qk_norm=True)
            t |= {f"layers.{layer}.{name}": value for name, value in made.items()}
        if kind.own:
            t["embed_tokens.weight"] = self._matrix(VOCAB, HIDDEN) * 5
            t["lm_head.weight"] = self._matrix(kind.draft_vocab, HIDDEN) * 3
        if kind.rank:
            t["markov_head.markov_w1.weight"] = self._matrix(VOCAB, kind.rank) * 3
            t["markov_head.markov_w2.weight"] = self._matrix(kind.draft_vocab, kind.rank) * 2
        if kind.confidence:
            t["confidence_head.proj.weight"] = self._matrix(1, HIDDEN + kind.rank)
            t["confidence_head.proj.bias"] = torch.tensor([0.5])
        return t

    def config(self) -> dict[str, Any]:
        kind = self.kind
        layer = layer_config("qwen3", kind.layers)
        markov = {"markov_rank": kind.rank, "markov_head_type": "vanilla"} if kind.rank else {}
        confidence = {"enable_confidence_head": kind.confidence, "confidence_head_with_markov": True}
        if kind.native:
            ids = [tap - 1 for tap in kind.taps]
            if kind.rank:
                return {**layer, "block_size": SLOTS, "mask_token_id": MASK, "target_layer_ids": ids, **markov}
            return {**layer, "block_size": SLOTS, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": ids}}
        return {
            "speculators_model_type": "dspark" if kind.rank else "dflash",
            "transformer_layer_config": layer,
            "block_size": SLOTS,
            "mask_token_id": MASK,
            "aux_hidden_state_layer_ids": list(kind.taps),
            "draft_vocab_size": kind.draft_vocab,
            "sample_from_anchor": kind.anchor_guesses,
            **markov,
            **confidence,
        }

    def save(self, folder: Path, **changes: Any) -> Path:
        tensors = dict(self.tensors)
        if self.kind.draft_vocab < VOCAB:
            tensors["d2t"] = torch.from_numpy(self.ids - np.arange(len(self.ids)))
        return save_head(folder, {**self.config(), **changes}, tensors)

    def slots(self, taps: Array, tokens: Sequence[int]) -> Tensor:
        """What the slots that guess give, after the last norm."""
        kind, t, known = self.kind, self.tensors, len(tokens) - 1
        context = self._normed(torch.from_numpy(taps[:known]).float() @ t["fc.weight"].T, "hidden_norm.weight")
        x = self._embedding[torch.tensor([tokens[-1]] + [MASK] * (SLOTS - 1))]
        for layer in range(kind.layers):
            name = f"layers.{layer}"
            normed = self._normed(x, f"{name}.input_layernorm.weight")
            both = torch.cat([context, normed])  # keys and values of the context are of its own states
            mask = torch.zeros(SLOTS, len(both))
            x = self._mlp(x + self._attention(normed, both, f"{name}.self_attn", mask), name)
        return self._normed(x, "norm.weight")[0 if kind.anchor_guesses else 1 :]

    def slot_logits(self, state: Tensor, before: int) -> tuple[Tensor, float]:
        """The logits of a slot behind the token `before`, and how sure its best guess is."""
        kind, t = self.kind, self.tensors
        logits, code = state @ self._output.T, torch.zeros(0)
        if kind.rank:
            code = t["markov_head.markov_w1.weight"][before]
            logits = logits + t["markov_head.markov_w2.weight"] @ code
        if not kind.confidence:
            return logits, float(logits.softmax(-1).max())
        weight, bias = t["confidence_head.proj.weight"][0], t["confidence_head.proj.bias"]
        return logits, float(torch.sigmoid(weight @ torch.cat([state, code]) + bias))


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("dflash", {"aux_hidden_state_layer_ids": [1, 4]}, "taps the target after layer 4; test has 4 layers"),
        ("native dspark", {"target_layer_ids": [0, 3]}, "taps the target after layer 4"),
        ("dflash", {"aux_hidden_state_layer_ids": None}, "lacks 'aux_hidden_state_layer_ids'"),
        ("dflash", {"mask_token_id": None}, "lacks 'mask_token_id'"),
        ("dflash", {"mask_token_id": 83}, "mask_token_id = 83"),
        ("dflash", {"block_size": 1}, "leaves no slot to guess in"),
        ("dspark", {"markov_head_type": "gated"}, "markov_head_type = 'gated'"),
        ("dspark", {"markov_rank": 9}, r"markov_w1.weight .* has shape \[83, 8\]"),
        ("dspark", {"enable_confidence_head": False}, "confidence_head.proj.* that is not used"),
        ("dspark", {"target_hidden_size": 64}, "trained for a target of hidden size 64; test has 48"),
        ("dspark", {"speculators_model_type": "eagle3"}, "is a 'eagle3' head"),
    ],
)
def test_what_does_not_fit_is_named(name: str, changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=complaint):
        open_block(HeadFiles(ReferenceBlock(KINDS[name]).save(tmp_path, **changes)), TARGET, dtype="bf16")
