"""Medusa heads: a reference in numpy (compared in test_heads.py), and files that do not fit are refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoder_engines import decoder_on, native
from safetensors.numpy import save_file
from tiny_models import spec

from closeness import assert_close
from wager.arch import Dense, Gqa
from wager.errors import ModelError
from wager.kernels.arrays import Array
from wager.models.head_files import HeadFiles
from wager.models.head_medusa import MedusaHead, open_medusa
from wager.models.random_models import RandomWeights
from wager.models.transformer import Decoder

TARGET = spec((Gqa(6, 2, 16),) * 3, (Dense(64),) * 3)
WEIGHTS = RandomWeights(TARGET, 1)
HIDDEN, VOCAB, COUNT = 48, 83, 3
IDS = np.sort(np.random.default_rng(2).permutation(VOCAB)[:40])


def randn(*shape: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tensors(*, layers: int = 1, biased: bool = True, output: str = "heads", rows: int = VOCAB) -> dict[str, Array]:
    found = {}
    for head in range(COUNT):
        for layer in range(layers):
            name = f"blocks.{head}.layers.{layer}"
            found[f"{name}.weight"] = randn(HIDDEN, HIDDEN, seed=10 * head + layer) * HIDDEN**-0.5
            if biased:
                found[f"{name}.bias"] = randn(HIDDEN, seed=100 + head)
        if output == "heads":
            found[f"lm_heads.{head}.weight"] = randn(rows, HIDDEN, seed=200 + head)
    if output == "one":
        found["lm_head.weight"] = randn(rows, HIDDEN, seed=200)
    return found


def original(values: Mapping[str, Array], layers: int) -> dict[str, Array]:
    """The same under the names of the original repository."""
    renamed = {}
    for name, value in values.items():
        parts = name.split(".")
        if parts[0] == "blocks":
            renamed[f"{parts[1]}.{parts[3]}.linear.{parts[4]}"] = value
        else:
            renamed[f"{parts[1]}.{layers}.weight"] = value
    return renamed


VLLM = {
    "model_type": "medusa",
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "num_heads": COUNT,
    "num_hidden_layers": 1,
    "truncated_vocab_size": VOCAB,
    "medusa_fc_bias": True,
}
TRUNCATED = {**VLLM, "truncated_vocab_size": len(IDS)}
MAP = {"token_map": IDS.astype(np.int64)}
FORMATS: dict[str, tuple[dict[str, Any], dict[str, Array], dict[str, Array]]] = {
    "own outputs": (VLLM, tensors(), tensors()),
    "one output": (
        {**TRUNCATED, "original_lm_head": True},
        {**tensors(output="one", rows=len(IDS)), **MAP},
        tensors(output="one", rows=len(IDS)),
    ),
    "the target's output": (TRUNCATED, {**tensors(output="none"), **MAP}, tensors(output="none")),
    "whole outputs, cut": (
        TRUNCATED,
        {**tensors(biased=False), **MAP},
        {k: v[IDS] if "lm" in k else v for k, v in tensors(biased=False).items()},
    ),
    "original": (
        {"medusa_num_heads": COUNT, "medusa_num_layers": 2, "base_model_name_or_path": "x"},
        original(tensors(layers=2), 2),
        tensors(layers=2),
    ),
}


def save(folder: Path, config: Mapping[str, Any], values: Mapping[str, Array]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(values), folder / "model.safetensors")
    return folder


def loaded(folder: Path, decoder: Decoder, *, dtype: str = "bf16") -> MedusaHead:
    return open_medusa(HeadFiles(folder), TARGET, dtype=dtype).load(decoder, WEIGHTS, num_blocks=4)


def expected_logits(values: Mapping[str, Array], state: Array, ids: Array) -> Array:
    """Logits [heads, ids] from what enters the last norm."""
    normed = state / np.sqrt(np.square(state).mean() + TARGET.details.norm_eps) * WEIGHTS.read("norm.weight")
    rows = []
    for head in range(COUNT):
        x, layer = normed, 0
        while f"blocks.{head}.layers.{layer}.weight" in values:
            name = f"blocks.{head}.layers.{layer}"
            y = values[f"{name}.weight"] @ x + values.get(f"{name}.bias", np.zeros(HIDDEN, np.float32))
            x, layer = x + y / (1 + np.exp(-y)), layer + 1
        matrix = values.get(f"lm_heads.{head}.weight", values.get("lm_head.weight"))
        rows.append((WEIGHTS.read("embed.weight")[ids] if matrix is None else matrix) @ x)
    return np.stack(rows)


def test_the_native_kernels_guess_as_the_reference(tmp_path: Path) -> None:
    config, files, values = FORMATS["own outputs"]
    states = randn(4, HIDDEN, seed=5)
    for dtype in ("bf16", "q8"):
        head = loaded(save(tmp_path, config, files), decoder_on(WEIGHTS, native()), dtype=dtype)
        logits = head.forward(states, COUNT).logits.copy().reshape(4, COUNT, VOCAB)
        for state, found in zip(states, logits, strict=True):
            assert_close(found, expected_logits(values, state, np.arange(VOCAB)), rtol=0.05, atol=0.5)
        alone = head.forward(states[2:3], 2).logits
        assert np.array_equal(alone, logits[2, :2])


@pytest.mark.parametrize(
    ("config", "files", "complaint"),
    [
        ({**VLLM, "hidden_size": 64}, tensors(), "trained for a target of hidden size 64; test has 48"),
        ({**VLLM, "vocab_size": 90}, tensors(), "trained for a target of vocabulary 90; test has 83"),
        ({**VLLM, "num_heads": 4}, tensors(), "lacks the tensor blocks.3.layers.0.weight"),
        ({**VLLM, "num_heads": 2}, tensors(), "has a tensor '?blocks.2.layers.0.* that is not used"),
        ({**VLLM, "original_lm_head": True}, tensors(), "has lm_heads, and its config.json says that all heads"),
        ({**VLLM, "logit_scale": 0.5}, tensors(), "logit_scale = 0.5"),
        ({**VLLM, "model_type": "t5"}, tensors(), "is no Medusa head: its model_type is 't5'"),
        (TRUNCATED, tensors(output="none"), "guesses 40 ids of a vocabulary of 83 and has no token_map"),
        (TRUNCATED, {**tensors(output="none"), "token_map": IDS[:39]}, r"token_map .* has shape \[39\]"),
        (TRUNCATED, {**tensors(output="none"), "token_map": IDS + 60}, "token_map .* names ids that the target"),
        (VLLM, {**tensors(), "blocks.1.layers.0.weight": np.zeros((48, 47), np.float32)}, r"has shape \[48, 47\]"),
    ],
)
def test_what_does_not_fit_is_named(
    config: dict[str, Any], files: dict[str, Array], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=complaint):
        open_medusa(HeadFiles(save(tmp_path, config, files)), TARGET, dtype="bf16")
