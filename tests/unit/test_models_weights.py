"""Incomplete, damaged or mismatched model directories: an error that names the cause, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from tiny_models import SIZES, edit, oracle, save, spec

from wager.errors import ModelError
from wager.kernels.arrays import BFLOAT16, Array, zeros
from wager.models.random_models import random_weights
from wager.models.weights import open_weights, tensor_shapes


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(oracle("LlamaForCausalLM"), tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def refusal(path: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        open_weights(path)
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value


def index(folder: Path) -> dict[str, str]:
    placed: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return placed


def test_shards_are_many_here(saved: Path) -> None:
    assert len(set(index(saved).values())) > 3


def test_one_file_and_shards_are_the_same_model(saved: Path, tmp_path: Path) -> None:
    model = oracle("LlamaForCausalLM")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    one, many = open_weights(tmp_path), open_weights(saved)
    assert one.spec == many.spec
    for name in tensor_shapes(one.spec):
        assert np.array_equal(one.read(name), many.read(name))
        assert one.read(name, BFLOAT16).dtype == BFLOAT16


def test_an_absent_directory(tmp_path: Path) -> None:
    assert "nowhere" in refusal(tmp_path / "nowhere").message
    assert "config.json" in refusal(tmp_path).message


@pytest.mark.parametrize("content", ["{", "[1, 2]", "\xff", ""])
def test_damaged_config(content: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    assert "config.json" in refusal(folder).message


def test_no_weights_at_all(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    assert "neither model.safetensors nor" in refusal(folder).message


def test_a_shard_that_is_absent(folder: Path) -> None:
    name = index(folder)["model.norm.weight"]
    (folder / name).unlink()
    assert name in refusal(folder).message


@pytest.mark.parametrize("size", [0, 5, 200, -8])
def test_a_truncated_shard(size: int, folder: Path) -> None:
    file = folder / index(folder)["model.norm.weight"]
    file.write_bytes(file.read_bytes()[:size])
    assert file.name in refusal(folder).message


def test_a_damaged_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "weight_map" in refusal(folder).message


def test_a_missing_tensor(folder: Path) -> None:
    change(folder, "model.layers.1.mlp.up_proj.weight", None)
    error = refusal(folder)
    assert "model.layers.1.mlp.up_proj.weight [80, 48]" in error.message


def test_a_misshapen_tensor(folder: Path) -> None:
    change(folder, "model.layers.2.self_attn.k_proj.weight", zeros(16, 47))
    message = refusal(folder).message
    assert "model.layers.2.self_attn.k_proj.weight" in message
    assert "[16, 47]" in message
    assert "[16, 48]" in message


def test_an_unexpected_tensor(folder: Path) -> None:
    change(folder, "model.layers.0.self_attn.q_proj.bias", zeros(48))
    assert "model.layers.0.self_attn.q_proj.bias" in refusal(folder).message


def test_stored_frequencies_and_a_tied_head_are_ignored(folder: Path) -> None:
    change(folder, "model.layers.0.self_attn.rotary_emb.inv_freq", zeros(4))
    edit(folder / "config.json", tie_word_embeddings=True)
    assert open_weights(folder).spec.tied


def test_an_untied_head_that_is_missing(folder: Path) -> None:
    change(folder, "lm_head.weight", None)
    assert "lm_head.weight" in refusal(folder).message


def test_weights_of_another_model(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=SIZES["vocab_size"] + 1)
    assert "model.embed_tokens.weight" in refusal(folder).message


def test_a_type_that_is_not_a_float(folder: Path) -> None:
    change(folder, "model.norm.weight", np.ones(48, np.int8))
    weights = open_weights(folder)
    with pytest.raises(ModelError, match=r"model.norm.weight .* I8"):
        weights.read("norm.weight")


def change(folder: Path, name: str, value: Array | None) -> None:
    """Put one tensor in its shard (or, if it is new, any), or take it out."""
    placed = index(folder)
    file = folder / placed.get(name, next(iter(placed.values())))
    tensors = safetensors.numpy.load_file(file)
    tensors.pop(name, None)
    if value is not None:
        tensors[name] = value
    safetensors.numpy.save_file(tensors, file)


def test_random_weights_are_the_same_for_the_same_seed() -> None:
    shape = spec(qk_norm=True, qkv_bias=True, mlp_bias=True, output_bias=True, tied=False)
    first, again, other = random_weights(shape, 3), random_weights(shape, 3), random_weights(shape, 4)
    for name, size in tensor_shapes(shape).items():
        assert first.read(name).shape == size
        assert np.array_equal(first.read(name), again.read(name))
        assert not np.array_equal(first.read(name), other.read(name))
    assert not np.array_equal(first.read("layers.0.k.weight"), first.read("layers.0.v.weight"))
