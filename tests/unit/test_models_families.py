"""Logits of every family against transformers, from Hugging Face directories in small shards."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import SIZES, TOKENS, edit, logits, oracle, oracle_logits, save, spread

import wager
from closeness import assert_close
from wager.arch import Gqa, ModelSpec, read_config
from wager.errors import ModelError
from wager.loading.load import load
from wager.models import hub
from wager.models.weights import open_weights

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
    "rope_theta": 500.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "rope_theta": 1000.0}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}

LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "q_lora_rank": None,
}
QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "head_dim": 16}
DELTA = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
QWEN35_MOE = {**QWEN_MOE, "shared_expert_intermediate_size": 24}
MAGNIFIED = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.6}

GEMMA3 = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "sliding_window": 7,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 24,
}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_hidden_layers": 4,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 83,
    "final_logit_softcapping": 30.0,
    "pad_token_id": 0,
}
GEMMA4_EDGE = {
    **GEMMA4,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 16}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.5,
}
FALCON_MAMBA = {"mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 32, "pad_token_id": 0}
FALCON_SCALES = {
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.8,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.6,
    "key_multiplier": 0.7,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.4,
    "ssm_multipliers": [0.7, 1.3, 0.8, 1.4, 0.6],
    "mlp_multipliers": [0.9, 0.5],
}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
    "head_dim": 16,
    "time_step_min": 1e-30,  # steps have no least length outside of transformers
    "pad_token_id": 0,
}
NEMOTRON_EXPERTS = {
    **NEMOTRON,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "routed_scaling_factor": 1.7,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.2, 1.5],
    "long_factor": [1.5, 2.0, 4.0],
    "original_max_position_embeddings": 48,
}
LFM2_MOE = {
    "layer_types": ["conv", "full_attention", "conv"],
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 1.3,
    "pad_token_id": 0,
}
GLM_MOE = {
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 1.7,
    "num_mtp_layers": 0,
}
GLM_LITE = {**LATENT, "q_lora_rank": 24, "n_routed_experts": 8, "routed_scaling_factor": 1.8}
MINIMAX = {
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral window": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 7}),
    "qwen3 moe": (
        "Qwen3MoeForCausalLM",
        {**QWEN_MOE, "norm_topk_prob": True, "tie_word_embeddings": True, "mlp_only_layers": [0]},
    ),
    "qwen3 moe stepped": ("Qwen3MoeForCausalLM", {**QWEN_MOE, "attention_bias": True, "decoder_sparse_step": 2}),
    "qwen3 next": ("Qwen3NextForCausalLM", {**DELTA, **QWEN_MOE, "shared_expert_intermediate_size": 24}),
    "qwen3 next dense layers": (
        "Qwen3NextForCausalLM",
        {
            **DELTA,
            **QWEN_MOE,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        },
    ),
    "qwen3.5": ("Qwen3_5ForCausalLM", DELTA),
    "qwen3.5 moe": ("Qwen3_5MoeForCausalLM", {**DELTA, **QWEN35_MOE}),
    "lfm2": (
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8, "pad_token_id": 0},
    ),
    "granite 4 hybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            **GRANITE,
            "num_local_experts": 0,
            "shared_intermediate_size": 72,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_n_heads": 6,
            "mamba_n_groups": 2,
            "mamba_d_state": 32,
        },
    ),
    "granite 4 hybrid, experts": (
        "GraniteMoeHybridForCausalLM",
        {
            **GRANITE,
            "intermediate_size": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 40,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_n_heads": 6,
            "mamba_d_state": 16,
        },
    ),
    "falcon h1": ("FalconH1ForCausalLM", {**FALCON_MAMBA, **FALCON_SCALES}),
    "falcon h1, norm before the gate": (
        "FalconH1ForCausalLM",
        {**FALCON_MAMBA, "mamba_rms_norm": True, "tie_word_embeddings": True, "mlp_bias": True},
    ),
    "falcon h1, norm behind the gate": (
        "FalconH1ForCausalLM",
        {**FALCON_MAMBA, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "nemotron h": ("NemotronHForCausalLM", NEMOTRON),
    "nemotron h, biases": (
        "NemotronHForCausalLM",
        {**NEMOTRON, "layers_block_type": ["mlp", "full_attention", "linear_attention"], "mlp_bias": True},
    ),
    "nemotron h, experts": ("NemotronHForCausalLM", NEMOTRON_EXPERTS),
    "nemotron h, experts of latents in groups": (
        "NemotronHForCausalLM",
        {**NEMOTRON_EXPERTS, "moe_latent_size": 32, "n_routed_experts": 8, "n_group": 2, "norm_topk_prob": False},
    ),
    "lfm2 moe": ("Lfm2MoeForCausalLM", LFM2_MOE),
    "lfm2 moe without a correction": (
        "Lfm2MoeForCausalLM",
        {**LFM2_MOE, "use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0},
    ),
    "glm 4.5": ("Glm4MoeForCausalLM", {**GLM_MOE, "use_qk_norm": True}),
    "glm 4.5 air": ("Glm4MoeForCausalLM", {**GLM_MOE, "attention_bias": True, "n_group": 2}),
    "glm 4.7 flash": ("Glm4MoeLiteForCausalLM", GLM_LITE),
    "minimax m2": ("MiniMaxM2ForCausalLM", MINIMAX),
    "deepseek v2 greedy": ("DeepseekV2ForCausalLM", {**LATENT, "n_routed_experts": 4, "first_k_dense_replace": 1}),
    "deepseek v2 grouped": (
        "DeepseekV2ForCausalLM",
        {
            **LATENT,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "q_lora_rank": 20,
            "routed_scaling_factor": 1.7,
            "rope_parameters": MAGNIFIED,
        },
    ),
    "deepseek v3": (
        "DeepseekV3ForCausalLM",
        {
            **LATENT,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 24,
            "first_k_dense_replace": 1,
            "rope_parameters": MAGNIFIED,
        },
    ),
    "deepseek v3 half-split": (
        "DeepseekV3ForCausalLM",
        {
            **LATENT,
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 0,
            "rope_interleave": False,
            "norm_topk_prob": False,
        },
    ),
    "deepseek v3 one group": (
        "DeepseekV3ForCausalLM",
        {**LATENT, "n_routed_experts": 6, "n_group": 1, "topk_group": 1, "n_shared_experts": 2},
    ),
    "llama biases": (
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "yarn with everything": (
        "Qwen2ForCausalLM",
        {
            "rope_parameters": {
                **YARN,
                "beta_fast": 16,
                "beta_slow": 2,
                "mscale": 1.2,
                "mscale_all_dim": 0.7,
                "truncate": False,
            }
        },
    ),
    "yarn attention factor": ("LlamaForCausalLM", {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "mistral window": ("MistralForCausalLM", {"sliding_window": 7}),
    "mimo": ("MiMoForCausalLM", {}),
    "qwen2 layer types": (
        "Qwen2ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma 3": ("Gemma3ForCausalLM", GEMMA3),
    "gemma 3 scaled": (
        "Gemma3ForCausalLM",
        {
            **GEMMA3,
            "final_logit_softcapping": 7.0,
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            },
        },
    ),
    "gemma 2": (
        "Gemma2ForCausalLM",
        {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0},
    ),
    "gemma 4": ("Gemma4ForCausalLM", {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma 4, embeddings by layer": ("Gemma4ForCausalLM", GEMMA4_EDGE),
    "gemma 4, experts": (
        "Gemma4ForCausalLM",
        {**GEMMA4, **GEMMA4_EXPERTS, "attention_k_eq_v": True, "num_global_key_value_heads": 3},
    ),
    "gemma 4 unified": (
        "Gemma4UnifiedForCausalLM",
        {
            **{name: value for name, value in GEMMA4.items() if "per_layer" not in name},
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 900.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            },
        },
    ),
    "phi 3": ("Phi3ForCausalLM", {"sliding_window": 9, "pad_token_id": 0}),
    "phi 4 mini": (
        "Phi3ForCausalLM",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 48,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
        },
    ),
    "phi 4 mini below its original context": ("Phi3ForCausalLM", {"rope_parameters": LONGROPE, "pad_token_id": 0}),
    "granite": ("GraniteForCausalLM", {**GRANITE, "attention_bias": True, "tie_word_embeddings": True}),
    "granite 4": (
        "GraniteMoeHybridForCausalLM",
        {
            **GRANITE,
            "num_local_experts": 0,
            "shared_intermediate_size": 72,
            "layer_types": ["full_attention"] * 3,
            "position_embedding_type": "rope",
            "mamba_n_heads": 6,
        },
    ),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    "olmo 2": ("Olmo2ForCausalLM", {"pad_token_id": 0}),
    "olmo 3": (
        "Olmo3ForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": 7, "pad_token_id": 0, "rope_scaling": YARN},
    ),
    "glm": ("GlmForCausalLM", {"head_dim": 16, "pad_token_id": 0}),
    "glm 4": ("Glm4ForCausalLM", {"head_dim": 16, "pad_token_id": 0}),
    "qwen3 biases, tied": ("Qwen3ForCausalLM", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_agree_with_transformers(case: str, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    model = oracle(architecture.replace("MiMo", "Qwen2"), **config)  # of which transformers has no class
    weights = open_weights(save(model, tmp_path, architectures=[architecture]))
    expected = oracle_logits(model, TOKENS)
    assert expected.std() > 0.5
    found = logits(weights, TOKENS)
    assert_close(found, expected, atol=3e-4, rtol=3e-4)
    assert np.array_equal(found.argmax(axis=1), expected.argmax(axis=1))


@pytest.mark.parametrize("scaling", [LLAMA3, YARN, LINEAR])
def test_the_older_spelling_of_rope_is_the_same_model(scaling: dict[str, Any], tmp_path: Path) -> None:
    model = oracle("LlamaForCausalLM", rope_parameters=dict(scaling))
    old = {key: value for key, value in scaling.items() if key != "rope_theta"}
    old["type"] = old.pop("rope_type")
    new, expected = open_weights(save(model, tmp_path / "new")), oracle_logits(model, TOKENS)
    assert_close(logits(new, TOKENS), expected, atol=3e-4, rtol=3e-4)
    for parameters in (None, scaling):
        save(model, tmp_path, rope_parameters=parameters, rope_scaling=old, rope_theta=scaling["rope_theta"])
        assert open_weights(tmp_path).spec == new.spec


def test_a_factor_of_attention_beside_yarns_own() -> None:
    """As published with DeepSeek-R1-0528-Qwen3-8B: it takes YaRN's own back."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
    own, given = (
        read_config({**CONFIG, "rope_scaling": {**scaling, **more}}, runnable=True).details.rope
        for more in ({}, {"attn_factor": 0.8782488562869419})
    )
    assert (own.magnitude, given.magnitude) == pytest.approx((1.1386294, 1))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layers_block_type": ["mamba", "wheel", "attention"]}, "layers of kind 'wheel'"),
        ({"hybrid_override_pattern": "M*"}, "2 kinds for 3 layers"),
        ({"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        ({"mamba_num_heads": 5}, "mamba_num_heads = 5"),
    ],
)
def test_what_nemotron_h_may_not_have(changes: dict[str, Any], named: str) -> None:
    config = {
        "architectures": ["NemotronHForCausalLM"],
        **SIZES,
        **NEMOTRON,
        "layers_block_type": ["mamba", "mlp", "attention"],
    }
    for none in ([0.0, float("inf")], [0.0, 1e308], [0.0, {"__float__": "Infinity"}]):  # as published
        read_config({**config, "time_step_limit": none}, runnable=True)
    with pytest.raises(ModelError, match=named):
        read_config({**config, **changes}, runnable=True)


def test_published_nemotron_h_has_another_root(tmp_path: Path) -> None:
    model = oracle("NemotronHForCausalLM", **NEMOTRON)
    expected = logits(open_weights(save(model, tmp_path / "model")), TOKENS)
    renamed = {name.replace("model.", "backbone."): values for name, values in model.state_dict().items()}
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((tmp_path / "model" / "config.json").read_text())
    assert np.array_equal(logits(open_weights(tmp_path), TOKENS), expected)


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.attention.window for layer in spec.ordered_layers if isinstance(layer.attention, Gqa)]


def test_windows_without_layer_types(tmp_path: Path) -> None:
    """As configurations were before layer_types: full attention in the first max_window_layers."""
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    model = oracle("Qwen2ForCausalLM", **window)
    weights = open_weights(save(model, tmp_path, layer_types=None))
    assert windows(weights.spec) == [None, 5, 5]
    assert_close(logits(weights, TOKENS), oracle_logits(model, TOKENS), atol=3e-4, rtol=3e-4)


def test_rotations_by_layer_type_without_their_bases(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 3.0}
    model = oracle("Gemma3ForCausalLM", **{**GEMMA3, "rope_parameters": {"full_attention": linear}})
    weights = open_weights(save(model, tmp_path, rope_parameters={"full_attention": linear}))
    assert_close(logits(weights, TOKENS), oracle_logits(model, TOKENS), atol=3e-4, rtol=3e-4)


CONFIG = {"architectures": ["LlamaForCausalLM"], **SIZES}


def test_absent_keys_take_the_family_defaults() -> None:
    for class_ in ("mistral", "qwen2", "qwen3"):
        sizes = {k: SIZES[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
        config = {"model_type": class_, **sizes, "num_attention_heads": 32, "hidden_size": 256}
        spec = read_config(config, runnable=True)
        assert spec.details.architecture == f"{class_.capitalize()}ForCausalLM"
        assert spec.attention.kv_heads == (8 if class_ == "mistral" else 32)
        assert spec.attention.head_dim == (128 if class_ == "qwen3" else 8)
        assert windows(spec) == ([4096] * 3 if class_ == "mistral" else [None] * 3)
    config = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"}
    spec = read_config(config, runnable=True)
    attention, details = spec.attention, spec.details
    assert (attention.kv_heads, attention.head_dim) == (6, 8)
    assert (details.norm_eps, details.rope.theta, spec.tied) == (1e-6, 10000.0, False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"architectures": "LlamaForCausalLM", "model_type": "llama"}, "no architecture"),
        ({"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}, "LlamaForSequenceClass"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "short_factor"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "linear", "factor": 4.0}}, "differ"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ({"num_key_value_heads": 4}, "4 key-value heads"),
        ({"hidden_size": float("inf")}, "hidden_size"),
    ],
)
def test_unsupported_values_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    read_config(CONFIG, runnable=True)
    with pytest.raises(ModelError, match=named) as caught:
        read_config({**CONFIG, **change}, runnable=True)
    assert "\n" not in caught.value.message


# ---- mixtures, and models that are generated ----

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    **SIZES,
    **LATENT,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ({"attention_bias": True}, "attention_bias"),
        ({"n_group": 7}, "7 groups"),
        ({"topk_group": 9}, "9 of 8 groups"),
        ({"num_experts_per_tok": 129}, "129 of 256"),
        ({"n_routed_experts": None}, "n_routed_experts"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim = 63 in config.json is odd"),
        ({"architectures": ["DeepseekV2ForCausalLM"], "scoring_func": None, "topk_method": "greedy"}, "norm_topk_prob"),
    ],
)
def test_router_options_that_are_not_supported_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read_config({**V3, **changes}, runnable=True)


@pytest.mark.parametrize(
    ("model", "named"),
    [("random:gpt:1b", "family 'gpt'"), ("random:llama:9b", "llama of size '9b'"), ("random:", "family ''")],
)
def test_unknown_names_are_named(model: str, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        load(wager.EngineConfig.from_options(model=model))
    with pytest.raises(ModelError, match="is generated, not fetched"):
        hub.pull(model)


SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [4, 2, 2]}}


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("Qwen3_5", DELTA),
        ("Qwen3_5Moe", {**DELTA, **QWEN35_MOE}),
        ("Qwen3VL", {"head_dim": 16, **SECTIONS}),
        ("Qwen2_5_VL", {"num_attention_heads": 3, "num_key_value_heads": 1, **SECTIONS}),
    ],
)
def test_the_text_part_of_a_model_that_sees(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    """As it is published: the language model under a name of its own, beside a vision model; experts of a layer
    in one tensor."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "depth": 1, "out_hidden_size": 48}
    text = {**SIZES, **more, "bos_token_id": None, "eos_token_id": None}
    config = getattr(transformers, f"{family}Config")(
        text_config=text, vision_config=sizes, attn_implementation="eager"
    )
    whole = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    path = save(spread(whole.eval()), tmp_path)
    expected = oracle_logits(whole, TOKENS)
    assert_close(logits(open_weights(path), TOKENS), expected, atol=3e-4, rtol=3e-4)
    if "num_experts" in more:
        for shard in path.glob("*.safetensors*"):
            shard.unlink()
        save_file(
            {name: values.contiguous() for name, values in whole.state_dict().items()}, path / "model.safetensors"
        )
        assert_close(logits(open_weights(path), TOKENS), expected, atol=3e-4, rtol=3e-4)


@pytest.mark.parametrize("family", ["Gemma4", "Gemma4Unified"])
def test_the_text_part_of_gemma_4(family: str, tmp_path: Path) -> None:
    """As it is published: beside what reads images and sounds, and with projections of keys and values in layers that
    share those of others."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    inputs = {"vision_config": {**sizes, "num_key_value_heads": 2, "head_dim": 16}, "audio_config": sizes}
    layers = GEMMA4_EDGE
    if family == "Gemma4Unified":
        inputs = {"vision_config": {"mm_embed_dim": 32}, "audio_config": {}}
        layers = {name: value for name, value in layers.items() if "per_layer" not in name}
    text = {**SIZES, **layers, "eos_token_id": None, "bos_token_id": None, "attn_implementation": "eager"}
    config = getattr(transformers, f"{family}Config")(text_config=text, **inputs, attn_implementation="eager")
    whole = spread(getattr(transformers, f"{family}ForConditionalGeneration")(config).eval())
    expected = oracle_logits(whole, TOKENS)
    state = {name: values.contiguous() for name, values in whole.state_dict().items()}
    root = "model.language_model.layers.5.self_attn"
    state |= {f"{root}.{part}_proj.weight": torch.randn(64, 48) for part in "kv"}
    state[f"{root}.k_norm.weight"] = torch.randn(32)
    config.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", architectures=[f"{family}ForConditionalGeneration"])
    save_file(
        {name: values for name, values in state.items() if name != "lm_head.weight"}, tmp_path / "model.safetensors"
    )
    assert sum("vision" in name for name in state) > 2
    weights = open_weights(tmp_path)
    assert weights.spec.left_out == "its part for images and sounds is not used"
    assert_close(logits(weights, TOKENS), expected, atol=3e-4, rtol=3e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Gemma3", "Mistral3"])
def test_the_text_part_of_a_model_under_the_names_of_older_checkpoints(family: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"image_size": 16, "patch_size": 4, "head_dim": 16}
    text = {**SIZES, "head_dim": 16, "bos_token_id": None, "eos_token_id": None}
    if family == "Gemma3":
        text |= {"sliding_window": 8, "rope_parameters": None}
    else:
        text |= {"model_type": "mistral", "sliding_window": None}
    inputs = {"vision_config": sizes, "mm_tokens_per_image": 4, "tie_word_embeddings": family == "Gemma3"}
    config = getattr(transformers, f"{family}Config")(text_config=text, **inputs, attn_implementation="eager")
    whole = spread(getattr(transformers, f"{family}ForConditionalGeneration")(config).eval())
    path = save(whole, tmp_path)
    assert '"language_model.model.embed_tokens.weight"' in (path / "model.safetensors.index.json").read_text()
    weights = open_weights(path)
    assert weights.spec.left_out == "its part for images is not used"
    assert_close(logits(weights, TOKENS), oracle_logits(whole, TOKENS), atol=3e-4, rtol=3e-4)
    rename_to_newer(path)
    assert_close(logits(open_weights(path), TOKENS), oracle_logits(whole, TOKENS), atol=3e-4, rtol=3e-4)


def rename_to_newer(path: Path) -> None:
    """Give the tensors the names under which transformers has them in memory since 4.52."""
    tensors: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (path / "model.safetensors.index.json").unlink()
    for pattern, name in (
        (r"language_model\.model", "model.language_model"),
        (r"language_model\.lm_head", "lm_head"),
        (r"(vision_tower|multi_modal_projector)", r"model.\1"),
    ):
        tensors = {re.sub(f"^{pattern}", name, old): value for old, value in tensors.items()}
    save_file(tensors, path / "model.safetensors")


def test_yarn_extends_the_context_that_a_configuration_states() -> None:
    """Qwen's cards have it added by hand, and max_position_embeddings left as it is."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = {"architectures": ["Qwen3ForCausalLM"], **SIZES}
    assert read_config({**config, "rope_scaling": yarn}, runnable=True).context == 256
    assert read_config({**config, "rope_scaling": {**yarn, "factor": 1.5}}, runnable=True).context == 96
    assert read_config(config, runnable=True).context == 96


def test_queries_that_grow_with_their_position_are_refused() -> None:
    """Ministral 3, whose configuration is otherwise that of Mistral."""
    rope = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16, "rope_theta": 1e6}
    text = {**SIZES, "model_type": "ministral3", "rope_parameters": {**rope, "llama_4_scaling_beta": 0.1}}
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    with pytest.raises(ModelError, match=r"llama_4_scaling_beta = 0.1"):
        read_config(config, runnable=True)


def test_layers_that_share_keys_and_values_need_a_layer_that_has_some() -> None:
    config = {"architectures": ["Gemma4ForCausalLM"], **SIZES, **GEMMA4}
    for shared, types in ((4, GEMMA4["layer_types"]), (1, ["sliding_attention"] * 3 + ["full_attention"])):
        with pytest.raises(ModelError, match=f"{shared} of 4 layers in config.json share keys and values"):
            read_config({**config, "num_kv_shared_layers": shared, "layer_types": types}, runnable=True)
