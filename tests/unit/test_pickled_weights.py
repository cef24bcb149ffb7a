"""Weights as they are published: pickles, which are converted and not read; a config.json that misleads."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import VARIANTS
from safetensors.torch import load_file, save_file
from test_head_files import TARGET, opened, reference
from tiny_models import SIZES

from wager.errors import ModelError, UsageError
from wager.models.head_files import HeadFiles
from wager.models.head_medusa import open_medusa
from wager.models.weights import open_weights
from wager.train.convert import convert, main


def test_medusa_of_the_original_repository_has_the_heads_of_its_weights(tmp_path: Path) -> None:
    """The config.json of medusa-vicuna-7b-v1.3 names two heads; its weights are of five."""
    config = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 2, "medusa_num_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {"0.linear.weight": (48, 48), "0.linear.bias": (48,), "1.weight": (83, 48)}
    tensors = {f"{head}.{name}": torch.zeros(shape) for head in range(5) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    spec = open_medusa(HeadFiles(tmp_path), TARGET, dtype="bf16")
    assert (spec.depth, spec.layers, len(spec.outputs), spec.vocabulary.whole) == (5, 1, 5, True)


def pickled(folder: Path, name: str = "pytorch_model.bin") -> Path:
    """An EAGLE-3 head of the original repository as it is published, small."""
    reference(VARIANTS["eagle3"]).save(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / name)
    (folder / "model.safetensors").rename(folder / "kept")
    return folder


@pytest.mark.slow
def test_a_pickle_is_not_read_and_the_error_is_the_command_that_converts_it(tmp_path: Path) -> None:
    folder = pickled(tmp_path / "a head")
    with pytest.raises(ModelError, match="is a pickle, which may run any code") as refused:
        opened(folder)
    words = shlex.split(refused.value.hint.partition(": ")[2])
    assert words[0] == "python"
    done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, check=True)
    assert done.stdout == f"written to {folder / 'model.safetensors'}\n"
    assert opened(folder).taps == VARIANTS["eagle3"].taps
    expected, found = load_file(folder / "kept"), load_file(folder / "model.safetensors")
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_medusa_and_shards_are_converted(tmp_path: Path) -> None:
    values = {"0.0.linear.weight": torch.randn(4, 4), "0.1.weight": torch.randn(5, 4).half()}
    torch.save(values, tmp_path / "medusa_lm_head.pt")
    torch.save({"step": 3}, tmp_path / "optimizer.pt")
    assert load_file(convert(tmp_path)).keys() == values.keys()
    shards = tmp_path / "shards"
    shards.mkdir()
    shared = torch.arange(6.0)
    torch.save({"a": shared, "b": shared.view(2, 3).T}, shards / "pytorch_model-00001-of-00002.bin")
    torch.save({"c": torch.tensor([True])}, shards / "pytorch_model-00002-of-00002.bin")
    found = load_file(convert(shards))
    assert torch.equal(found["b"], shared.view(2, 3).T) and found["c"].dtype == torch.bool


class Runs:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch /tmp/wager-ran-a-pickle",)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"a": Runs()}, "cannot be read as plain tensors"),
        ({"a": 3}, "holds more than named tensors"),
        ([torch.zeros(2)], "holds more than named tensors"),
        ({"state_dict": {"a": torch.zeros(2)}}, "holds more than named tensors"),
    ],
)
def test_what_is_more_than_tensors_is_refused_and_not_run(
    values: Any, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(values, tmp_path / "pytorch_model.bin")
    assert main([str(tmp_path)]) == 1
    assert complaint in capsys.readouterr().err
    assert not Path("/tmp/wager-ran-a-pickle").exists()
    assert not (tmp_path / "model.safetensors").exists()


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Name one folder" in capsys.readouterr().err
    with pytest.raises(UsageError, match="has no pickled weights"):
        convert(tmp_path)
    pickled(tmp_path)
    convert(tmp_path)
    with pytest.raises(UsageError, match="is there already"):
        convert(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    whole = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="cannot be read as plain tensors"):
        convert(tmp_path)


def test_a_model_of_pickles_is_refused_the_same_way(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **SIZES}))
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="is a pickle"):
        open_weights(tmp_path)
