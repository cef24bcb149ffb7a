"""Mixtures of experts from GGUF files and gpt-oss from both formats: transformers' logits, each expert in its own bits,
parts of files read alone, and damage named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from mixture_files import ARCHITECTURES, mixture_gguf, stored_tensors
from safetensors.numpy import save_file
from test_models_families import CASES as DIRECTORIES
from test_models_families import DELTA, GLM_LITE, GLM_MOE, LATENT, LFM2_MOE, MAGNIFIED, MINIMAX, QWEN_MOE, YARN
from test_models_gguf import ARCHITECTURES as DENSE_FILES
from test_models_gguf import FAMILIES as FILES
from test_models_gguf import apart, computed
from tiny_models import TOKENS, edit, logits, oracle, oracle_logits, save, write_gguf
from tokenizer_models import gguf_metadata, train

from closeness import assert_close
from wager.arch import gguf_precision, read_gguf
from wager.arch.families import FAMILIES, find_gguf
from wager.cli import main
from wager.errors import MemoryPlanError, ModelError
from wager.kernels.arrays import FLOAT32
from wager.kernels.cpu import select
from wager.loading import memory
from wager.models.gguf import GgufFile
from wager.models.transformer import weight_bytes
from wager.models.weights import Matrices, open_weights

SQUARE = {**MAGNIFIED, "mscale": 0.6}
"""mscale and mscale_all_dim are equal in every published configuration, and a GGUF file has only the latter."""

GPT_OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "head_dim": 16,
    "sliding_window": 7,
    "layer_types": None,
    "rope_parameters": {**YARN, "truncate": False},
}
OLMOE = {"num_experts": 6, "num_experts_per_tok": 3}
GRANITE = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.7,
}
QWEN2_MOE = {**QWEN_MOE, "shared_expert_intermediate_size": 24}
GRANITE_HYBRID = {
    **GRANITE,
    "shared_intermediate_size": 40,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 6,
    "mamba_d_state": 16,
}
HYBRID_MOE = {**DELTA, **QWEN2_MOE, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
DEEPSEEK = {**LATENT, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3 moe": ("Qwen3MoeForCausalLM", {**QWEN_MOE, "norm_topk_prob": True}, {}),
    "mixtral window": (
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 7},
        {},
    ),
    "qwen2 moe": ("Qwen2MoeForCausalLM", QWEN2_MOE, {}),
    "deepseek v2 grouped": (
        "DeepseekV2ForCausalLM",
        {
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "q_lora_rank": 20,
            "routed_scaling_factor": 1.7,
            "rope_parameters": SQUARE,
        },
        {},
    ),
    "deepseek v2 lite, older": ("DeepseekV2ForCausalLM", {**DEEPSEEK, "n_group": 1}, {"absorbed": False}),
    "deepseek v3": ("DeepseekV3ForCausalLM", {**DEEPSEEK, "q_lora_rank": 24, "rope_parameters": SQUARE}, {}),
    "deepseek v3, older": (
        "DeepseekV3ForCausalLM",
        {**DEEPSEEK, "q_lora_rank": 24, "n_shared_experts": 2},
        {"absorbed": False, "without": ("expert_gating_func",)},
    ),
    "gpt-oss": ("GptOssForCausalLM", GPT_OSS, {}),
    "olmoe": ("OlmoeForCausalLM", OLMOE, {"fused": True}),
    "granite moe": ("GraniteMoeForCausalLM", GRANITE, {}),
    "granite 4 hybrid": ("GraniteMoeHybridForCausalLM", GRANITE_HYBRID, {}),
    "qwen3 next": ("Qwen3NextForCausalLM", HYBRID_MOE, {}),
    "qwen3.5 moe": ("Qwen3_5MoeForCausalLM", HYBRID_MOE, {"fused": True}),
    "qwen3 vl moe": (
        "Qwen3MoeForCausalLM",
        {**QWEN_MOE, "norm_topk_prob": True},
        {"architecture": "qwen3vlmoe", "rope__dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3},
    ),
    "glm 4.5": ("Glm4MoeForCausalLM", {**GLM_MOE, "use_qk_norm": True}, {}),
    "glm 4.5 air": ("Glm4MoeForCausalLM", {**GLM_MOE, "attention_bias": True}, {}),
    "glm 4.7 flash": ("Glm4MoeLiteForCausalLM", GLM_LITE, {}),
    "lfm2 moe": ("Lfm2MoeForCausalLM", {**LFM2_MOE, "routed_scaling_factor": 1.0}, {}),
    "minimax m2": ("MiniMaxM2ForCausalLM", MINIMAX, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_of_a_gguf_file_agree_with_transformers(case: str, tmp_path: Path) -> None:
    architecture, config, options = CASES[case]
    model = oracle(architecture, **config)
    folder = save(model, tmp_path / "hf")
    expected = oracle_logits(model, TOKENS)
    assert expected.std() > 0.5
    found = logits(open_weights(mixture_gguf(folder, tmp_path / "m.gguf", **options)), TOKENS)
    assert_close(found, expected, atol=3e-4, rtol=3e-4)
    assert np.array_equal(found.argmax(axis=1), expected.argmax(axis=1))


HUGGING_FACE: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": ("GptOssForCausalLM", GPT_OSS),
    "qwen2 moe": ("Qwen2MoeForCausalLM", {**QWEN2_MOE, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "olmoe": ("OlmoeForCausalLM", {**OLMOE, "norm_topk_prob": True}),
    "granite moe": ("GraniteMoeForCausalLM", GRANITE),
}


@pytest.mark.parametrize("case", HUGGING_FACE)
def test_logits_of_a_directory_agree_with_transformers(case: str, tmp_path: Path) -> None:
    architecture, config = HUGGING_FACE[case]
    model = oracle(architecture, **config)
    expected = oracle_logits(model, TOKENS)
    assert_close(logits(open_weights(save(model, tmp_path)), TOKENS), expected, atol=3e-4, rtol=3e-4)


def test_the_page_of_models_has_what_is_compared() -> None:
    """Each cell of its tables of families is a case of these files, and each family that runs has its cells."""
    directories = {architecture for architecture, _ in (*DIRECTORIES.values(), *HUGGING_FACE.values())}
    files = {(class_, architecture) for architecture, class_ in DENSE_FILES.items()}
    files |= {(DIRECTORIES[case][0], architecture) for case, (architecture, _, _) in FILES.items()}
    files |= {(name, options.get("architecture", ARCHITECTURES[name])) for name, _, options in CASES.values()}
    running = {name: family.architecture for name, family in FAMILIES.items() if family.engine}
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    shown: set[str] = set()
    read: set[str] = set()
    for row in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|.*?\|.*?\| (.*?) \| (.*?) \|", page, re.MULTILINE):
        names, directory, file = re.findall(r"`(\w+)`", row[0]), row[1], row[2]
        classes = {running[name] for name in names}
        assert directory.startswith("yes") and classes <= directories, row
        if file.startswith("yes"):
            written = re.findall(r"`([\w-]+)`", file.partition(")")[0])
            assert all(any((each, name) in files for each in classes) for name in written), row
            assert all(any((each, name) in files for name in written) for each in classes), row
            read |= {*written}
        shown |= {*names}
    assert shown == running.keys()
    with pytest.raises(ModelError) as caught:
        find_gguf("none")
    assert sorted(read) == sorted((caught.value.hint or "").removeprefix("Supported are: ").strip(".").split(", "))


def as_mxfp4(folder: Path) -> dict[str, np.ndarray]:
    """Rewrite a saved gpt-oss in MXFP4 as it was published: blocks of 32 inputs, two in turn in a byte, and exponents.
    Returns the values [experts, outputs, inputs] that the joined tensors then have."""
    tensors, values = stored_tensors(folder), {}
    for name in [name for name in tensors if re.search(r"experts\.\w+_proj$", name)]:
        whole = tensors.pop(name).swapaxes(1, 2)
        rows = quantize(np.ascontiguousarray(whole).reshape(-1, whole.shape[-1]), Kind.MXFP4)
        blocks = rows.reshape(*whole.shape[:2], -1, 17)
        codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
        tensors[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        tensors[f"{name}_scales"] = blocks[..., 0].copy()
        values[name] = dequantize(rows, Kind.MXFP4).reshape(whole.shape)
    for file in folder.glob("model*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")
    edit(folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    return values


WIDE_GPT_OSS = {**GPT_OSS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


@pytest.mark.slow
def test_mxfp4_is_read_in_its_own_bits_from_both_formats(tmp_path: Path) -> None:
    model = oracle("GptOssForCausalLM", **WIDE_GPT_OSS)
    folder = save(model, tmp_path / "hf")
    file = mixture_gguf(folder, tmp_path / "m.gguf", kind_of=lambda name: Kind.MXFP4 if "_exps" in name else Kind.F32)
    values = as_mxfp4(folder)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name in values:
                value.copy_(torch.from_numpy(values[name].swapaxes(1, 2).copy()))
    expected = oracle_logits(model, TOKENS)
    for weights in (open_weights(folder), open_weights(file)):
        matrices = Matrices(weights, "auto")
        experts = {form for name, form in matrices.formats.items() if ".expert_" in name}
        assert experts == {"mxfp4"} and matrices.converted == {}
        assert_close(logits(weights, TOKENS), expected, atol=3e-4, rtol=3e-4)
        assert apart(computed(weights, "auto"), expected) < 0.06
        assert apart(computed(weights, "auto", select(threads=1)), computed(weights, "auto")) < 0.03


@pytest.mark.slow
def test_every_expert_is_multiplied_in_the_types_of_its_layer(tmp_path: Path) -> None:
    """As Q4_K_M files mix them: the down projections of some layers are wider."""
    config = {**QWEN_MOE, "hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}
    model = oracle("Qwen3MoeForCausalLM", **config, norm_topk_prob=True, tie_word_embeddings=True)
    folder = save(model, tmp_path / "hf")

    def kind_of(name: str) -> Kind:
        if "_exps" not in name:
            return Kind.Q8_0
        return Kind.Q5_1 if name.startswith("blk.1.ffn_down") else Kind.Q4_0

    weights = open_weights(mixture_gguf(folder, tmp_path / "m.gguf", kind_of=kind_of))
    formats = Matrices(weights, "auto").formats
    assert {formats[f"layers.{layer}.4.expert_{part}.weight"] for layer in (0, 1) for part in ("gate", "up")} == {
        "q4_0"
    }
    assert [formats[f"layers.{layer}.5.expert_down.weight"] for layer in (0, 1)] == ["q4_0", "q5_1"]
    assert {formats[f"layers.0.{part}.weight"] for part in ("q", "k", "v", "o")} == {"q8_0"}
    expected = logits(weights, TOKENS)  # in float32 over the file's values
    assert apart(expected, oracle_logits(model, TOKENS)) < 0.4
    assert apart(computed(weights, "auto"), expected) < 0.06
    native = select(threads=1)
    assert apart(computed(weights, "auto", native), computed(weights, "auto")) < 0.03
    assert set(Matrices(weights, "q4").formats.values()) <= {None, "q4_0", "q4_1", "q5_1", "q8_0"}


def test_parts_of_a_stacked_tensor_are_read_alone(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(3, 4, 64)).astype(np.float32)
    tensors = {"blk.0.ffn_up_exps.weight": (values, Kind.Q8_0), "blk.0.ffn_up_exps.bias": (values[..., 0], Kind.F32)}
    file = GgufFile(write_gguf(tmp_path / "t.gguf", "llama", {}, tensors))
    whole = file.read_blocks("blk.0.ffn_up_exps.weight").data.reshape(3, 4, -1)
    for index in range(3):
        part = file.read_blocks(f"blk.0.ffn_up_exps.weight[{index}]")
        assert part.shape == (4, 64) and np.array_equal(part.data, whole[index])
        assert np.array_equal(file.read(f"blk.0.ffn_up_exps.bias[{index}]", FLOAT32), values[index, :, 0])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"expert_used_count": 9}, "9 experts active out of 6"),
        ({"expert_count": 5}, r"ffn_gate_inp.weight .* \[6, 48\].* \[5, 48\]"),
        ({"expert_feed_forward_length": 15}, r"ffn_gate_exps.weight .* \[6, 16, 48\].* \[6, 15, 48\]"),
        ({"expert_gating_func": 7}, "expert_gating_func = 7"),
        ({"expert_count": 2048}, "of 2048 experts"),
        ({"expert_count": 1024, "block_count": 9999}, "1024 experts in each of 9999 layers"),
        ({"leading_dense_block_count": 1 << 31}, "lacks the tensor blk.0.ffn_gate.weight"),
        ({"expert_group_count": 4, "expert_group_used_count": 1}, "from 1 of 4 groups"),
    ],
)
def test_unsupported_values_are_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    folder = save(oracle("Qwen3MoeForCausalLM", **QWEN_MOE), tmp_path / "hf")
    with pytest.raises(ModelError, match=named):
        open_weights(mixture_gguf(folder, tmp_path / "m.gguf", **changes))


def test_a_file_larger_than_memory_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum counts every expert in its own bits."""
    config = {**QWEN_MOE, "hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}
    folder = save(oracle("Qwen3MoeForCausalLM", **config), tmp_path / "hf")
    path = mixture_gguf(folder, tmp_path / "m.gguf", kind_of=lambda name: Kind.Q4_0 if "_exps" in name else Kind.Q8_0)
    weights = open_weights(path)
    monkeypatch.setattr(GgufFile, "_raw", None)
    kernels = select(threads=1)
    needed = weight_bytes(Matrices(weights, "auto"), kernels)
    experts = 2 * 6 * 3 * 256 * 256 * 18 // 32
    assert experts < needed < 1.3 * experts
    with pytest.raises(MemoryPlanError, match=rf"weights {needed / 2**20:.1f} MiB"):
        memory.plan(budget=needed, weights=needed, workspace=1, drafter=0, token_bytes=1, max_context=96)


def test_plan_counts_experts_in_the_types_of_a_file(tmp_path: Path) -> None:
    """Matrices, part by part; a pass over one token reads the experts that it uses."""
    config = {**DEEPSEEK, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "q_lora_rank": 32}
    folder = save(oracle("DeepseekV3ForCausalLM", **config), tmp_path / "hf")
    kinds = {"_exps": Kind.Q4_0, "_shexp": Kind.Q8_0, "attn_kv_a_mqa": Kind.Q5_1}

    def kind_of(name: str) -> Kind:
        return next((kind for part, kind in kinds.items() if part in name), Kind.F32)

    path = mixture_gguf(folder, tmp_path / "m.gguf", kind_of=kind_of)
    file = GgufFile(path)
    found = gguf_precision(file.sizes)
    assert (found.experts.name, found.shared.name, found.experts.bytes) == ("q4_0", "q8_0", 18 / 32)
    assert "q5_1" in found.projections.name
    spec = read_gguf(file.metadata, file.shapes, precision=found)
    experts = sum(size.bytes for name, size in file.sizes.items() if "_exps" in name)
    matrices = sum(size.bytes for name, size in file.sizes.items() if len(file.shapes[name]) > 1)
    assert spec.resident_bytes == pytest.approx(matrices)
    idle = experts * (1 - config["num_experts_per_tok"] / config["n_routed_experts"])
    embedding = file.sizes["token_embd.weight"].bytes
    assert spec.streamed_bytes == pytest.approx(matrices - idle - embedding)


PROVEN: dict[str, tuple[str, dict[str, Any], dict[str, Kind]]] = {
    "qwen3 moe": (
        "Qwen3MoeForCausalLM",
        {**QWEN_MOE, "moe_intermediate_size": 32},
        {"_exps": Kind.Q4_0, "blk.1.ffn_down_exps": Kind.Q5_1},
    ),
    "deepseek v3": (
        "DeepseekV3ForCausalLM",
        {**DEEPSEEK, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16},
        {"attn_k_b": Kind.Q8_0, "attn_v_b": Kind.Q4_0, "attn_q_b": Kind.Q8_0},
    ),
    "gpt-oss": ("GptOssForCausalLM", {**GPT_OSS, "intermediate_size": 64}, {"_exps": Kind.MXFP4}),
}


@pytest.mark.parametrize("case", PROVEN)
def test_answers_from_a_file_are_the_same_with_every_drafter(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wager prove: greedy and sampled, alone and together, preempted, with a warm prefix."""
    architecture, config, kinds = PROVEN[case]
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path / "cache"))
    tokenizer = gguf_metadata(train("qwen2"), "qwen2")
    vocab = len(tokenizer["tokenizer.ggml.tokens"])
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 1024, "vocab_size": vocab}
    folder = save(oracle(architecture, **{**config, **sizes}), tmp_path / "hf")

    def kind_of(name: str) -> Kind:
        found = [kind for part, kind in kinds.items() if part in name]
        return found[-1] if found else Kind.Q8_0 if "attn_q.weight" in name else Kind.F32

    path = mixture_gguf(folder, tmp_path / "m.gguf", kind_of=kind_of, **tokenizer)
    out = tmp_path / "proof.json"
    arguments = ["--limit", "2", "--max-tokens", "12", "--threads", "1", "--json", str(out)]
    assert main(["prove", "--model", str(path), *arguments]) == 0
    summary = json.loads(out.read_text())["summary"]
    assert summary["differing"] == 0 and summary["tokens"] == 768
