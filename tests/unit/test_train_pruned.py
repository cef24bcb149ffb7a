"""A draft model of some of the target's layers: what it computes, that it learns, and that its export is the same model
for the engine and for transformers."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from tiny_models import as_gguf, gguf_metadata, oracle, save, write_gguf
from tokenizer_models import save_model
from trained import MODEL, states_of, target_of, texts

import wager
from oracle.kernels import ReferenceKernels
from packing import batch, chain
from wager.errors import UsageError
from wager.kernels.arrays import Array
from wager.loading.load import load
from wager.loading.opened import open_draft, open_target
from wager.models.tokenizer import Tokenizer
from wager.models.transformer import Decoder
from wager.models.weights import Weights, open_weights
from wager.train.pruned import chosen_layers
from wager.train.session import RunOptions, TrainingSession, TrainSettings
from wager.train.target import TorchTarget

SETTINGS = TrainSettings(kind="pruned", steps=8, batch=160, precision="float32", rate=3e-3, warmup=2, seed=5)
OPTIONS = RunOptions(vocabulary=300, longest=32, save_every=2, layers=(1,), command="wager train")
FAMILIES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "untied": ("LlamaForCausalLM", {"tie_word_embeddings": False}),
    "tied": ("LlamaForCausalLM", {"tie_word_embeddings": True, "head_dim": 16}),
    "biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "wide": (
        "LlamaForCausalLM",
        {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16},
    ),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "scaled": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
}


def session(
    folder: Path,
    *,
    model: str = MODEL,
    settings: TrainSettings = SETTINGS,
    options: RunOptions = OPTIONS,
    vocab: int = 512,
) -> TrainingSession:
    folder.mkdir(exist_ok=True)
    return TrainingSession(target_of(model), texts(150, vocab=vocab), settings, options, folder)


def directory(folder: Path, family: str) -> str:
    """A target of three layers with random weights and a tokenizer."""
    architecture, changes = FAMILIES[family]
    return save_model(folder, architecture, **changes)


def logits(weights: Weights, tokens: list[int], layers: tuple[int, ...] | None = None) -> Array:
    """The engine's, in float32, of a model or of some of its layers."""
    kernels = ReferenceKernels("float32")
    decoder = Decoder(
        weights, kernels, num_blocks=4, max_rows=len(tokens), max_sequences=1, max_blocks=4, layers=layers
    )
    return decoder.forward(batch([chain(0, tokens, [3, 2, 1, 0])], range(len(tokens)))).logits.copy()


def test_layers_are_named_or_a_number_of_first_and_last_ones() -> None:
    assert chosen_layers(5, 30) == (0, 1, 2, 28, 29)
    assert chosen_layers(2, 30) == (0, 29)
    assert chosen_layers(1, 30) == (0,)
    assert chosen_layers(29, 30)[:2] == (0, 1) and len(set(chosen_layers(29, 30))) == 29
    assert chosen_layers((3, 0), 30) == (0, 3)
    for wanted, message in (
        (0, "0 of 30"),
        ((1, 1), "named twice"),
        (tuple(range(30)), "all that the model has"),
    ):
        with pytest.raises(UsageError, match=message):
            chosen_layers(wanted, 30)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_begins_as_the_targets_layers_and_its_export_is_the_same_model_everywhere(
    family: str, tmp_path: Path
) -> None:
    path = directory(tmp_path / "target", family)
    vocab = Tokenizer.load(Path(path)).vocab_size
    run = session(tmp_path / "run", model=path, options=replace(OPTIONS, layers=(0, 2)), vocab=vocab)
    tokens = [int(token) for token in np.random.default_rng(3).integers(0, vocab, 24)]
    whole = open_weights(Path(path))
    target = TorchTarget(whole, (0,), dtype=torch.float32, positions=96)
    with torch.no_grad():
        rows = next(run.module.steps(states_of(target, [tokens]), 1, None))
        found = run.module.logits(rows.take(0)).numpy()
    expected = logits(whole, tokens, (0, 2))[1:, run.vocabulary.ids]
    np.testing.assert_allclose(found, expected, atol=2e-3)
    module, frozen = run.module, (run.module.embedding, run.module.label_head)
    with torch.no_grad():  # so that every trained tensor differs from the target's, and none is rounded by the export
        for value in module.parameters():
            value.add_(torch.randn_like(value) * 0.05)
        for value in (*module.parameters(), *frozen):
            value.copy_(value.to(torch.bfloat16).float())
    run.export(tmp_path / "export")
    exported, text = open_weights(tmp_path / "export"), "Tell me, <|end|> please"
    assert exported.spec.num_layers == 2
    beside, own = Tokenizer.load(tmp_path / "export"), Tokenizer.load(Path(path))
    assert beside.encode(text) == own.encode(text) and beside.eos_ids == own.eos_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
        rows = next(run.module.steps(states_of(target, [tokens]), 1, None))
        ours = run.module.logits(rows.take(0)).numpy()
    np.testing.assert_allclose(logits(exported, tokens), theirs, atol=2e-3)
    np.testing.assert_allclose(ours, theirs[1:, run.vocabulary.ids], atol=2e-3)
    assert np.abs(ours - found).max() > 0.5


@pytest.mark.slow
def test_another_target_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = directory(tmp_path / "target", "tied")
    vocab = Tokenizer.load(Path(path)).vocab_size
    session(tmp_path / "run", model=path, vocab=vocab).export(tmp_path / "draft")
    options = {"model": path, "memory": "64MiB", "drafter": f"model:{tmp_path / 'draft'}"}
    with caplog.at_level(logging.WARNING, "wager"):
        load(wager.EngineConfig.from_options(**options))
    assert "was trained" not in caplog.text
    config = tmp_path / "draft" / "config.json"
    noted = json.loads(config.read_text())
    for key, message in (
        ("target_fingerprint", f"was trained for {path}, whose weights are not those of target"),
        ("tokenizer_fingerprint", "was trained with another tokenizer or chat template than that of target"),
    ):
        config.write_text(json.dumps({**noted, "wager": {**noted["wager"], key: "00"}}))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "wager"):
            load(wager.EngineConfig.from_options(**options))
        assert message in caplog.text


def test_a_target_with_sliding_windows_is_refused(tmp_path: Path) -> None:
    path = save_model(tmp_path / "target", "MistralForCausalLM", sliding_window=8)
    with pytest.raises(UsageError, match="layers with a sliding window"):
        session(tmp_path / "run", model=path, vocab=Tokenizer.load(Path(path)).vocab_size)


def test_beside_a_quantised_target_it_is_rounded_too(tmp_path: Path) -> None:
    path = directory(tmp_path / "target", "wide")
    config = wager.EngineConfig.from_options(model=path, memory="64MiB")
    floats = open_target(config)
    whole = save(oracle("LlamaForCausalLM", **FAMILIES["wide"][1]), tmp_path / "hf")
    spec = open_weights(whole).spec
    kinds = {"down": Kind.Q4_0}
    tensors = as_gguf(transformers.AutoModelForCausalLM.from_pretrained(whole), spec, kinds, permuted=True)
    blocks = open_weights(write_gguf(tmp_path / "m.gguf", "llama", gguf_metadata(spec, "llama"), tensors))
    for target, given, expected in (
        (floats, "auto", "auto"),
        (replace(floats, weights=blocks), "auto", "q8"),
        (replace(floats, weights=blocks), "bf16", "bf16"),
        (replace(floats, weights=blocks), "q4", "q4"),
    ):
        draft = open_draft(config.with_options(dtype=given), target, path)
        assert draft.dtype == expected
    rounded = open_draft(config, replace(floats, weights=blocks), path)
    assert set(rounded.matrices(ReferenceKernels()).formats.values()) == {"q8_0"}
