"""Published config.json files: as many weights as transformers builds, and refusals that name the key."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from wager.arch import (
    TABLE,
    Compressed,
    DeltaNet,
    Dense,
    Experts,
    Gating,
    Gqa,
    Layer,
    Mla,
    ModelSpec,
    Precision,
    read_config,
)
from wager.errors import ModelError
from wager.models.weights import tensor_shapes

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8"},
}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": None,
}
QWEN = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
LITE = {
    **DEEPSEEK,
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "vocab_size": 102400,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "intermediate_size": 10944,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
}

CLASSES = [
    ("LlamaConfig", {}),
    ("MistralConfig", {}),
    ("Qwen2Config", {}),
    ("Qwen3Config", {}),
    ("MixtralConfig", {}),
    ("Qwen2MoeConfig", {"mlp_only_layers": [0, 3]}),
    ("Qwen3MoeConfig", {"decoder_sparse_step": 2}),
    ("Qwen3NextConfig", {}),
    ("Qwen3_5MoeTextConfig", {}),
    ("GptOssConfig", {}),
    ("Gemma2Config", {}),
    ("Gemma3TextConfig", {}),
    ("Phi3Config", {"pad_token_id": 0}),
    ("GlmConfig", {}),
    ("Glm4Config", {}),
    ("Glm4MoeConfig", {}),
    ("GlmMoeDsaConfig", {}),
    ("Llama4TextConfig", {"moe_layers": [1, 3]}),
    ("Olmo2Config", {}),
    ("Olmo3Config", {}),
    ("OlmoeConfig", {}),
    ("GraniteConfig", {}),
    ("GraniteMoeConfig", {}),
    ("Cohere2Config", {}),
    ("SmolLM3Config", {}),
    ("MiniMaxM2Config", {}),
    ("DeepseekV32Config", {}),
    ("DeepseekV2Config", {"num_experts_per_tok": 6}),
    ("DeepseekV3Config", {}),
    ("DeepseekV4Config", {}),
]


@pytest.mark.parametrize(("name", "changes"), CLASSES, ids=lambda value: value if isinstance(value, str) else "")
def test_parameters_are_what_transformers_builds(name: str, changes: dict[str, Any]) -> None:
    """Matrices as the library makes them, without its norms, biases, sinks and the residual mixing of V4."""
    import transformers

    config = getattr(transformers, name)(num_hidden_layers=6, **changes)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    small = ("norm", "bias", "sinks", "hc_", "_hc", "A_log", "conv1d")
    sizes = {key: value.numel() for key, value in built.named_parameters() if not any(word in key for word in small)}
    model = read_config({**config.to_dict(), "model_type": config.model_type})
    ours = model.parameters - (2 * model.num_layers + 1) * model.hidden
    assert ours == pytest.approx(sum(sizes.values()), rel=1.5e-3)


def test_the_published_files_give_the_tables_shapes() -> None:
    assert read_config(LLAMA).layers == TABLE["Llama-3.1-8B"].layers
    model = read_config(DEEPSEEK, name="V3")
    assert model.layers == TABLE["DeepSeek-V3"].layers
    assert model.precision == TABLE["DeepSeek-V3"].precision
    assert (model.name, model.context, model.tied) == ("V3", 163840, False)


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [(MIXTRAL, 46.70, 12.75), (QWEN, 30.53, 3.042), (LITE, 15.71, 2.451), (DEEPSEEK, 671.0, 36.63)],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_the_engine_runs_the_shape_that_plan_counts(config: dict[str, Any], billions: float, active: float) -> None:
    model = same_figures(config)
    assert model.parameters / 1e9 == pytest.approx(billions, rel=5e-4)
    assert model.active / 1e9 == pytest.approx(active, rel=5e-4)


def test_windows_and_dense_layers_among_experts_have_the_same_figures() -> None:
    assert same_figures({**MIXTRAL, "sliding_window": 4096}).kv_bytes(5000) == 32 * 2 * 2 * 8 * 128 * 4096
    stepped = same_figures({**QWEN, "mlp_only_layers": [0, 5], "decoder_sparse_step": 2})
    assert [(layer.count, type(layer.ffn)) for layer in stepped.layers] == [(25, Dense), (23, Experts)]


def same_figures(config: dict[str, Any]) -> ModelSpec:
    """The engine's shape of a configuration is the one that `plan` counts, and its tensors add up to it."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    spec, model = read_config(plain, runnable=True), read_config(plain)
    assert replace(spec, decoder=None, layers=tuple(map(without_gating, spec.layers))) == model
    assert sum(math.prod(shape) for shape in tensor_shapes(spec).values()) == spec.parameters
    elements = sum(model.elements().values()) - model.elements()["embedding"]
    assert model.resident_bytes == 2 * (elements + model.head_elements)
    for context in (100, 5000):
        read = [min(context, getattr(layer.attention, "window", None) or context) for layer in spec.ordered_layers]
        assert model.kv_bytes(context) == 2 * spec.attention.cache_width * sum(read)
    return model


def without_gating(layer: Layer) -> Layer:
    return replace(layer, ffn=replace(layer.ffn, gating=Gating())) if isinstance(layer.ffn, Experts) else layer


def test_layer_kinds_by_layer() -> None:
    linear = read_config(
        {
            "model_type": "qwen3_next",
            "hidden_size": 64,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "vocab_size": 100,
            "max_position_embeddings": 1000,
        }
    )
    kinds = {type(layer.attention): layer.count for layer in linear.layers}
    assert kinds == {DeltaNet: 6, Gqa: 2}
    assert linear.layers[0].ffn == Experts(8, 2, 1, 32, 48)
    stored = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    gpt = read_config(
        {
            **LLAMA,
            "model_type": "gpt_oss",
            "sliding_window": 128,
            "num_local_experts": 4,
            "experts_per_token": 2,
            "quantization_config": stored,
        }
    )
    assert [(layer.attention.window, layer.count) for layer in gpt.layers if isinstance(layer.attention, Gqa)] == [
        (128, 16),
        (None, 16),
    ]
    assert gpt.precision.experts.name == "mxfp4"
    assert gpt.precision.weights.name == "bf16"


def quantised(base: dict[str, Any] = LLAMA, **stored: Any) -> Precision:
    return read_config({**base, "quantization_config": stored}).precision


W8A8 = {"weights": {"num_bits": 8, "type": "int"}, "input_activations": {"num_bits": 8, "type": "int"}}
FP8 = {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 8, "type": "float"}}
NVFP4 = {
    "weights": {"num_bits": 4, "type": "float", "group_size": 16},
    "input_activations": {"num_bits": 4, "type": "float", "group_size": 16},
}
W4A16 = {"weights": {"num_bits": 4, "type": "int", "group_size": 128}, "input_activations": None}


def packed(group: dict[str, Any], *ignore: str, **further: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
        "ignore": list(ignore),
        **further,
    }


WIDE_HEAD: dict[str, Any] = {"router": "bf16", "head": "bf16"}
KEPT = [
    ("awq", {"quant_method": "awq", "bits": 4, "modules_to_not_convert": None}, Precision.of("int4", **WIDE_HEAD)),
    ("gptq", {"quant_method": "gptq", "bits": 4, "lm_head": False}, Precision.of("int4", **WIDE_HEAD)),
    (
        "gptq with its head",
        {"quant_method": "gptq", "bits": 8, "lm_head": True},
        Precision.of("w8a16", router="bf16", embedding="bf16"),
    ),
    (
        "gptq in places",
        {
            "quant_method": "gptq",
            "bits": 4,
            "dynamic": {
                "-:.*self_attn.*": {},
                r"+:.*mlp\.down_proj": {"bits": 8},
                r"+:.*mlp\.(gate|up)_proj": {"bits": 8},
            },
        },
        Precision.of("w8a16", "int4", projections="bf16", **WIDE_HEAD),
    ),
    ("fp8", {"quant_method": "fp8", "activation_scheme": "dynamic"}, Precision.of("fp8", **WIDE_HEAD)),
    (
        "fp8 in places",
        {
            "quant_method": "fp8",
            "ignored_layers": [f"model.layers.{n}.self_attn.{p}_proj" for n in range(31) for p in "qkvo"],
        },
        Precision.of("fp8", projections="bf16", **WIDE_HEAD),
    ),
    (
        "fp8 but one layer",
        {"quant_method": "fp8", "ignored_layers": ["model.layers.0.self_attn.q_proj"]},
        Precision.of("fp8", **WIDE_HEAD),
    ),
    ("8-bit floats", packed(FP8, "lm_head", "re:.*gate$"), Precision.of("fp8", **WIDE_HEAD)),
    ("8-bit floats with the head", packed(FP8), Precision.of("fp8", router="bf16", embedding="bf16")),
    ("8-bit integers", packed(W8A8, "lm_head"), Precision.of("int8", **WIDE_HEAD)),
    ("8-bit weights alone", packed({**FP8, "input_activations": None}, "lm_head"), Precision.of("w8a16", **WIDE_HEAD)),
    (
        "4-bit weights alone",
        packed(W4A16, "lm_head", "re:.*self_attn.*"),
        Precision.of("int4", projections="bf16", **WIDE_HEAD),
    ),
    ("nvfp4", packed(NVFP4, "lm_head"), Precision.of("nvfp4", **WIDE_HEAD)),
    (
        "nvfp4 weights alone",
        packed({**NVFP4, "input_activations": None}, "re:.*lm_head"),
        Precision.of("nvfp4a16", **WIDE_HEAD),
    ),
    (
        "groups by name",
        {
            "quant_method": "compressed-tensors",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {**FP8, "targets": ["re:.*self_attn.*"]},
                "group_1": {**W4A16, "targets": ["Linear"]},
            },
        },
        Precision.of("int4", projections="fp8", **WIDE_HEAD),
    ),
    (
        "a narrow cache",
        packed(FP8, "lm_head", kv_cache_scheme={"num_bits": 8, "type": "float"}),
        Precision.of("fp8", cache="fp8", **WIDE_HEAD),
    ),
    (
        "modelopt",
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head", "model.layers.*.self_attn*"],
        },
        Precision.of("nvfp4", projections="bf16", cache="fp8", **WIDE_HEAD),
    ),
    (
        "bitsandbytes",
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": ["lm_head"]},
        Precision.of("nf4", **WIDE_HEAD),
    ),
    (
        "quark",
        {
            "quant_method": "quark",
            "exclude": ["lm_head"],
            "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}, "input_tensors": {"dtype": "fp8_e4m3"}},
        },
        Precision.of("fp8", **WIDE_HEAD),
    ),
    (
        "mxfp4",
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        Precision.of("bf16", "mxfp4", shared="bf16"),
    ),
]


@pytest.mark.parametrize(("stored", "expected"), [row[1:] for row in KEPT], ids=[row[0] for row in KEPT])
def test_quantisations_leave_parts_in_16_bits(stored: dict[str, Any], expected: Precision) -> None:
    assert quantised(**stored) == expected


def test_quantised_experts() -> None:
    """A list for every layer, a list by patterns, and what the file says is replaced by a precision that is given."""
    listed = [f"model.layers.{layer}.mlp.gate" for layer in range(48)]
    fp8 = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", *listed]}
    assert quantised(QWEN, **fp8) == TABLE["Qwen3-235B-A22B"].precision
    assert quantised(DEEPSEEK, quant_method="fp8") == TABLE["DeepSeek-V3"].precision
    ignored = ("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*")
    kimi = {**DEEPSEEK, "model_type": "kimi_k2"}
    assert quantised(kimi, **packed(W4A16, *ignored)) == TABLE["Kimi-K2"].precision
    v4 = {**DEEPSEEK, "expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8"}}
    cached = replace(read_config(v4).precision, cache=1.0)
    assert cached == TABLE["DeepSeek-V4-Flash"].precision
    unknown = {**LLAMA, "quantization_config": {"quant_method": "magic"}}
    assert read_config(unknown, precision=Precision.of("fp8")).precision == Precision.of("fp8")


def test_a_head_that_is_the_embedding_is_not_quantised() -> None:
    tied = {**LLAMA, "tie_word_embeddings": True}
    assert quantised(LLAMA, **packed(FP8)).head.name == "fp8"
    assert quantised(LLAMA, **packed({**FP8, "targets": "Linear"})) == quantised(LLAMA, **packed(FP8))
    assert quantised(tied, **packed(FP8)).head.name == "bf16"
    gemma = {**LLAMA, "model_type": "gemma2", "sliding_window": 4096}  # tied unless it says otherwise
    del gemma["tie_word_embeddings"]
    assert quantised(gemma, **packed(FP8)).head.name == "bf16"


def test_formats_of_a_dtype() -> None:
    assert read_config({**LLAMA, "torch_dtype": "float32"}).precision == Precision.of("fp32")
    half = {**LLAMA, "torch_dtype": "float16"}
    assert read_config(half).precision == Precision.of("fp16")
    assert quantised(half, quant_method="awq", bits=4).head.name == "fp16"


def test_v4_by_layer_types_or_by_ratios() -> None:
    config = {
        "model_type": "deepseek_v4",
        "hidden_size": 4096,
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "vocab_size": 129280,
        "max_position_embeddings": 1048576,
        "compress_ratios": [0, 4, 128, 4, 0],
    }
    model = read_config(config)
    kinds = [(layer.attention, layer.count) for layer in model.layers]
    assert {kind.ratio: count for kind, count in kinds if isinstance(kind, Compressed)} == {0: 1, 4: 2, 128: 1}
    assert model.layers[1].attention == TABLE["DeepSeek-V4-Flash"].layers[1].attention
    with pytest.raises(ModelError, match="layer type '7'"):
        read_config({**config, "compress_ratios": [0, 4, 7, 4]})


def test_dense_layers_among_experts_and_a_nested_text_model() -> None:
    model = read_config({"model_type": "kimi_k25", "text_config": {**DEEPSEEK, "model_type": "kimi_k2"}})
    dense, sparse = model.layers
    assert (dense.ffn, dense.count, sparse.count) == (Dense(18432), 3, 58)
    assert isinstance(dense.attention, Mla)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt2"}, "model_type of config.json is gpt2"),
        ({}, "model_type of config.json is none"),
        ({key: value for key, value in LLAMA.items() if key != "intermediate_size"}, "lacks 'intermediate_size'"),
        ({key: value for key, value in LLAMA.items() if key != "num_hidden_layers"}, "lacks 'num_hidden_layers'"),
        ({key: value for key, value in DEEPSEEK.items() if key != "kv_lora_rank"}, "lacks 'kv_lora_rank'"),
        ({**LLAMA, "hidden_size": -4096}, "hidden_size = -4096"),
        ({**LLAMA, "hidden_size": "4096"}, "hidden_size = '4096'"),
        ({**LLAMA, "num_hidden_layers": 10**6}, "num_hidden_layers = 1000000 cannot be right"),
        ({**LLAMA, "num_key_value_heads": 5}, "32 query heads cannot share 5"),
        ({**LLAMA, "quantization_config": {"quant_method": "magic"}}, "quantisation 'magic'"),
        ({**LLAMA, "quantization_config": packed(W8A8, "re:(")}, "pattern 're:"),
        ({**LLAMA, "quantization_config": {"quant_method": "fp8", "ignored_layers": "lm_head"}}, "no list of modules"),
        ({**LLAMA, "quantization_config": packed({"weights": {"num_bits": 5}})}, "group_0 .* weights of 5 bits"),
        ({**LLAMA, "quantization_config": packed({"weights": None})}, "group_0 .* has no weights"),
        ({**DEEPSEEK, "num_experts_per_tok": 300}, "300 experts active out of 256"),
        ({**LLAMA, "model_type": "qwen3", "sliding_window": 64, "layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_a_bad_configuration_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(config)


def test_families_known_by_their_shape_are_refused_by_the_engine() -> None:
    config = {**LLAMA, "model_type": "gpt_oss", "sliding_window": 128, "num_local_experts": 4, "experts_per_token": 2}
    for further in ({}, {"architectures": ["GptOssForCausalLM"]}):
        assert read_config({**config, **further}).num_layers == 32
        with pytest.raises(ModelError, match="engine does not run gpt_oss"):
            read_config({**config, **further}, runnable=True)
