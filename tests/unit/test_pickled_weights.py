"""Published heads as their repositories have them: the fields of config.json and names, shapes and types of tensors, at
full size. Their values are zeros, which a sparse file holds without room, so only what is read at the opening is
tested; what heads compute from such names is tested on small ones elsewhere.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import VARIANTS
from safetensors.torch import load_file
from test_head_files import opened, reference

from wager.arch.hf_config import read_config
from wager.arch.spec import ModelSpec
from wager.errors import ModelError, UsageError
from wager.models.head_eagle import open_eagle
from wager.models.head_files import HeadFiles
from wager.models.head_medusa import open_medusa
from wager.models.weights import open_weights
from wager.train.convert import convert, main

LLAMA_8B: Mapping[str, Any] = json.loads(
    """
    {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": false,
    "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"}}
    """
)
VICUNA_7B: Mapping[str, Any] = json.loads(
    """
    {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": false}
    """
)


SPECULATORS: Mapping[str, Any] = json.loads(
    """
    {"architectures": ["Eagle3Speculator"], "auto_map": {"": "config.Eagle3SpeculatorConfig"}, "draft_vocab_size":
    32000, "eagle_aux_hidden_state_layer_ids": null, "has_no_defaults_at_init": false, "norm_before_residual":
    true, "speculators_model_type": "eagle3", "speculators_version": "0.1.0.dev42", "target_hidden_size": null,
    "tie_word_embeddings": false, "torch_dtype": "float32", "speculators_config": {"algorithm": "eagle3",
    "default_proposal_method": "greedy", "proposal_methods": [{"accept_tolerance": 0.0, "proposal_type": "greedy",
    "speculative_tokens": 5, "verifier_accept_k": 1}], "verifier": {"architectures": ["LlamaForCausalLM"],
    "name_or_path": "meta-llama/Llama-3.1-8B-Instruct"}}, "transformer_layer_config": {"attention_bias": false,
    "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range":
    0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 1, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "use_cache": true, "vocab_size": 128256, "rope_scaling":
    {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3"}}}
    """
)

MEDUSA_REPOSITORY: Mapping[str, Any] = {
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "medusa_num_heads": 2,
    "medusa_num_layers": 1,
    "transformers_version": "4.31.0",
}
"""medusa-vicuna-7b-v1.3, whose weights are of five heads."""

Shapes = dict[str, tuple[str, tuple[int, ...]]]


def eagle_tensors(layer: str, *, kind: str, embedded: bool) -> Shapes:
    hidden, inner, keys, draft = 4096, 14336, 1024, 32000
    matrices = {
        "fc": (hidden, 3 * hidden),
        f"{layer}.self_attn.q_proj": (hidden, 2 * hidden),
        f"{layer}.self_attn.k_proj": (keys, 2 * hidden),
        f"{layer}.self_attn.v_proj": (keys, 2 * hidden),
        f"{layer}.self_attn.o_proj": (hidden, hidden),
        f"{layer}.mlp.gate_proj": (inner, hidden),
        f"{layer}.mlp.up_proj": (inner, hidden),
        f"{layer}.mlp.down_proj": (hidden, inner),
        "lm_head": (draft, hidden),
        **({"embed_tokens": (128256, hidden)} if embedded else {}),
    }
    norms = ("norm", *(f"{layer}.{name}" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")))
    shapes: dict[str, tuple[int, ...]] = {**matrices, **dict.fromkeys(norms, (hidden,))}
    maps = {"d2t": ("I64", (draft,)), "t2d": ("BOOL", (128256,))}
    return {**{f"{name}.weight": (kind, shape) for name, shape in shapes.items()}, **maps}


def medusa_tensors(heads: int) -> Shapes:
    found: Shapes = {}
    for head in range(heads):
        found[f"{head}.0.linear.weight"] = ("F16", (4096, 4096))
        found[f"{head}.0.linear.bias"] = ("F16", (4096,))
        found[f"{head}.1.weight"] = ("F16", (32000, 4096))
    return found


_BYTES = {"F16": 2, "F32": 4, "I64": 8, "BOOL": 1}


def sparse(folder: Path, config: Mapping[str, Any], tensors: Shapes, *, known: int = 0) -> HeadFiles:
    """A head of zeros, except that the first `known` entries of t2d are true."""
    (folder / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for name, (kind, shape) in tensors.items():
        end = at + math.prod(shape) * _BYTES[kind]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
        if known:
            file.seek(8 + len(text) + header["t2d"]["data_offsets"][0])
            file.write(b"\x01" * known)
    return HeadFiles(folder)


def target(config: Mapping[str, Any]) -> ModelSpec:
    return read_config(config, runnable=True)


def test_eagle3_of_speculators(tmp_path: Path) -> None:
    files = sparse(tmp_path, SPECULATORS, eagle_tensors("layers.0", kind="F32", embedded=True), known=32000)
    spec = open_eagle(files, target(LLAMA_8B), quantised=False)
    assert spec.taps == (2, 16, 29)
    assert spec.norm_before_residual and not (spec.norm_before_fc or spec.fc_norm or spec.norm_output)
    assert spec.own_embedding and spec.own_output
    assert spec.depth == 5
    assert spec.decoder.details.rope.factors == target(LLAMA_8B).details.rope.factors


def test_medusa_of_the_original_repository_has_the_heads_of_its_weights(tmp_path: Path) -> None:
    """Its config.json names two."""
    files = sparse(tmp_path, MEDUSA_REPOSITORY, medusa_tensors(5))
    spec = open_medusa(files, target(VICUNA_7B), quantised=False)
    assert (spec.heads, spec.layers, len(spec.outputs), spec.vocabulary.whole) == (5, 1, 5, True)
    more = {**MEDUSA_REPOSITORY, "medusa_num_heads": 6}
    with pytest.raises(ModelError, match=r"lacks the tensor blocks\.5\.layers\.0\.weight"):
        open_medusa(sparse(tmp_path, more, medusa_tensors(5)), target(VICUNA_7B), quantised=False)
    with pytest.raises(ModelError, match=r"lm_heads\.0\.weight .* require \[128256, 4096\]|shape"):
        open_medusa(sparse(tmp_path, MEDUSA_REPOSITORY, medusa_tensors(5)), target(LLAMA_8B), quantised=False)


# ---- pickles ---------------------------------------------------------------------------------------------------------


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
    (tmp_path / "config.json").write_text(json.dumps(VICUNA_7B))
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="is a pickle"):
        open_weights(tmp_path)
