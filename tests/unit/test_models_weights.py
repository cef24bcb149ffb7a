"""Incomplete, damaged or mismatched model directories: an error that names the cause, never a traceback."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from tiny_models import edit, oracle, save

from wager.errors import ModelError
from wager.kernels.arrays import BFLOAT16, Array, zeros
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


def test_one_file_and_shards_are_the_same_model(saved: Path, tmp_path: Path) -> None:
    model = oracle("LlamaForCausalLM")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "gone"}}')
    one, many = open_weights(tmp_path), open_weights(saved)
    assert len(set(index(saved).values())) > 3
    assert one.spec == many.spec
    for name in tensor_shapes(one.spec):
        assert np.array_equal(one.read(name), many.read(name))
        assert one.read(name, BFLOAT16).dtype == BFLOAT16


def test_an_absent_directory(tmp_path: Path) -> None:
    assert "nowhere" in refusal(tmp_path / "nowhere").message
    assert "config.json" in refusal(tmp_path).message


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "config": (lambda f: (f / "config.json").write_bytes(b"\xff"), "config.json"),
    "config of another kind": (lambda f: (f / "config.json").write_text("[1, 2]"), "config.json"),
    "no weights": (lambda f: [file.unlink() for file in f.glob("*.safetensors*")], "neither model.safetensors nor"),
    "absent shard": (lambda f: (f / index(f)["model.norm.weight"]).unlink(), "model-000.*of.*absent"),
    "empty shard": (lambda f: (f / index(f)["model.norm.weight"]).write_bytes(b""), "model-000.*cannot be read"),
    "index": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "weight_map"),
    "missing tensor": (
        lambda f: change(f, "model.layers.1.mlp.up_proj.weight", None),
        r"model\.layers\.1\.mlp\.up_proj\.weight \[80, 48\]",
    ),
    "shape": (
        lambda f: change(f, "model.layers.2.self_attn.k_proj.weight", zeros(16, 47)),
        r"model\.layers\.2\.self_attn\.k_proj\.weight.*\[16, 47\].*\[16, 48\]",
    ),
    "unexpected tensor": (
        lambda f: change(f, "model.layers.0.self_attn.q_proj.bias", zeros(48)),
        r"model\.layers\.0\.self_attn\.q_proj\.bias",
    ),
    "untied head missing": (lambda f: change(f, "lm_head.weight", None), "lm_head.weight"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named(what: str, folder: Path) -> None:
    damage, named = DAMAGE[what]
    damage(folder)
    assert re.search(named, refusal(folder).message)


def test_stored_frequencies_and_a_tied_head_are_ignored(folder: Path) -> None:
    change(folder, "model.layers.0.self_attn.rotary_emb.inv_freq", zeros(4))
    change(folder, "lm_head.weight", open_weights(folder).read("embed.weight"))
    edit(folder / "config.json", tie_word_embeddings=True)
    assert open_weights(folder).spec.tied
    (folder / "config.json").write_text((folder / "config.json").read_text(), encoding="utf-8-sig")
    assert open_weights(folder).spec.tied, "with a byte order mark, as editors of Windows write it"


def test_a_head_of_its_own_is_not_tied_whatever_the_configuration_says(folder: Path) -> None:
    untied = open_weights(folder)
    edit(folder / "config.json", tie_word_embeddings=True)
    found = open_weights(folder)
    assert found.spec == untied.spec and not found.spec.tied
    assert np.array_equal(found.read("head.weight"), untied.read("head.weight"))


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
