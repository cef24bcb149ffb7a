"""`python -m wager.train.quantise`: what was written is read as the weights, rounded; what cannot be done is said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from wager.kernels.arrays import BFLOAT16, FLOAT32, Array
from wager.models.head_files import HeadFiles
from wager.models.safetensors_files import TensorBytes, write_tensors
from wager.train.quantise import main, quantise_head
from wager.train.rounding import as_rounded

MATRICES = {"layers.0.self_attn.q_proj.weight": (64, 96), "lm_head.weight": (40, 64), "fc.weight": (8, 48)}
Q, OUTPUT, FC = MATRICES


@pytest.fixture
def head(tmp_path: Path) -> dict[str, Array]:
    """Values of a folder `head`: of groups of other sizes, of one sign, and of zeros."""
    noise = np.random.default_rng(2)
    values: dict[str, Array] = {}
    for name, shape in MATRICES.items():
        values[name] = (noise.standard_normal(shape) * noise.uniform(0.01, 3, (shape[0], 1))).astype(np.float32)
    values[Q][0] = np.abs(values[Q][0])
    values[Q][1, :32] = 0
    values["norm.weight"] = np.ones(64, np.float32)
    folder = tmp_path / "head"
    folder.mkdir()
    write_tensors(
        folder / "model.safetensors",
        {name: TensorBytes("F32", value.shape, value.tobytes()) for name, value in values.items()},
    )
    (folder / "config.json").write_text(json.dumps({"speculators_model_type": "eagle3"}))
    (folder / "tokenizer.json").write_text("{}")
    return values


def test_matrices_are_read_as_they_were_rounded(head: dict[str, Array], tmp_path: Path) -> None:
    folder = tmp_path / "small"
    assert main([str(tmp_path / "head"), str(folder)]) == 0
    files = HeadFiles(folder)
    assert dict(files.shapes) == {name: value.shape for name, value in head.items()}
    assert (folder / "tokenizer.json").is_file()
    for name, levels in ((Q, 15), (OUTPUT, 255)):
        groups, read = (values.reshape(-1, 32) for values in (head[name], files.read(name, FLOAT32)))
        span = np.maximum(groups.max(1), 0) - np.minimum(groups.min(1), 0)
        if levels == 255:
            span = 2 * np.abs(groups).max(1) * 128 / 127
        plain = span / levels / np.sqrt(12)  # the error of even rounding over the whole range
        errors = np.sqrt(np.square(groups - read).mean(1))
        assert np.median(errors[span > 0] / plain[span > 0]) < 1.02
        assert not errors[span == 0].any()
    assert "4 bits" in files.stored(Q).kind and "8 bits" in files.stored(OUTPUT).kind
    for name in (FC, "norm.weight"):
        assert np.array_equal(files.read(name, FLOAT32), head[name]), "what groups do not fit stays"
    output = files.read_bytes(OUTPUT)
    assert (output.kind, output.shape, len(output.data)) == ("BF16", (40, 64), 2 * 40 * 64)
    assert output.data == files.read(OUTPUT, BFLOAT16).tobytes()


def test_a_head_that_was_trained_rounded_is_stored_with_the_values_of_its_training(
    head: dict[str, Array], tmp_path: Path
) -> None:
    config = tmp_path / "head" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "wager": {"rounded": True}}))
    files = HeadFiles(quantise_head(tmp_path / "head", tmp_path / "small"))
    parameters = {name: torch.nn.Parameter(torch.from_numpy(values)) for name, values in head.items()}
    inputs = torch.from_numpy(np.random.default_rng(3).standard_normal((3, 64)).astype(np.float32))
    with as_rounded(parameters.values()):
        for name, parameter in parameters.items():
            assert np.array_equal(files.read(name, FLOAT32), parameter.detach().numpy()), name
        loss = (inputs @ parameters[OUTPUT].T).square().sum()
        loss.backward()
    assert "4 bits" in files.stored(OUTPUT).kind
    gradient = 2 * (inputs @ torch.from_numpy(files.read(OUTPUT, FLOAT32)).T).T @ inputs
    torch.testing.assert_close(parameters[OUTPUT].grad, gradient)
    for name, parameter in parameters.items():
        assert np.array_equal(parameter.detach().numpy(), head[name]), "afterwards all have their own values again"


def test_what_cannot_be_quantised_is_said(
    head: dict[str, Array], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, small = str(tmp_path / "head"), str(tmp_path / "small")
    assert main([source]) == 2 and "Name two folders" in capsys.readouterr().err
    assert main([source, source]) == 2 and "is there already" in capsys.readouterr().err
    assert main([str(tmp_path / "none"), small]) == 1 and "none" in capsys.readouterr().err
    assert main([source, small]) == 0 and main([small, str(tmp_path / "smaller")]) == 2
    assert "quantised already" in capsys.readouterr().err
