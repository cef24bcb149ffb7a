"""config.json files: as many weights as transformers builds, as published; layers by kind; number formats of
quantisations; refusals that name the key."""

from __future__ import annotations

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
    Indexer,
    Layer,
    Mla,
    ModelSpec,
    Precision,
    read_config,
)
from wager.errors import ModelError
from wager.models.weights import num_parameters
from wager.planner.inputs import with_formats

_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def config(text: str) -> dict[str, Any]:
    """TYPE HIDDEN LAYERS HEADS KV FFN VOCAB CONTEXT [KEY=VALUE ...] as a configuration."""
    kind, *words = text.split()
    sizes = dict(zip((*_KEYS, "vocab_size", "max_position_embeddings"), map(int, words[:7]), strict=True))
    further = dict(word.split("=") for word in words[7:])
    return {"model_type": kind, **sizes, **{key: SPELT.get(value) or int(value) for key, value in further.items()}}


SPELT: dict[str, Any] = {"True": True}
LLAMA = config("llama 4096 32 32 8 14336 128256 131072")
MIXTRAL = config("mixtral 4096 32 32 8 14336 32000 32768 num_local_experts=8 num_experts_per_tok=2")
MIXTRAL["sliding_window"] = None
QWEN = config(
    "qwen3_moe 2048 48 32 4 6144 151936 40960 head_dim=128 num_experts=128 num_experts_per_tok=8 "
    "moe_intermediate_size=768 norm_topk_prob=True"
)
_LATENT = "kv_lora_rank=512 qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=128"
_V3 = "n_routed_experts=256 num_experts_per_tok=8 n_shared_experts=1 moe_intermediate_size=2048 first_k_dense_replace=3"
DEEPSEEK = config(f"deepseek_v3 7168 61 128 128 18432 129280 163840 q_lora_rank=1536 {_LATENT} {_V3}")
DEEPSEEK["quantization_config"] = {"quant_method": "fp8"}
LITE = config(
    f"deepseek_v2 2048 27 16 16 10944 102400 163840 {_LATENT} n_routed_experts=64 num_experts_per_tok=6 "
    "n_shared_experts=2 moe_intermediate_size=1408 first_k_dense_replace=1"
) | {"topk_method": "greedy", "q_lora_rank": None}
_INDEX = "index_head_dim=128 index_n_heads=64 index_topk=2048"
V32 = config(f"deepseek_v32 7168 61 128 128 18432 129280 163840 q_lora_rank=1536 {_LATENT} {_V3} {_INDEX}")
GLM5 = config(f"glm_moe_dsa 6144 78 64 64 12288 154880 202752 q_lora_rank=2048 {_LATENT} {_V3} {_INDEX}")
GLM5 |= {"qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32}
GEMMA3 = config(
    "gemma3_text 5376 62 32 16 21504 262208 131072 head_dim=128 sliding_window=1024 sliding_window_pattern=6"
)
GEMMA2 = config("gemma2 3584 42 16 8 14336 256000 8192 head_dim=256 sliding_window=4096")
_SCOUT = "head_dim=128 intermediate_size_mlp=16384 num_experts_per_tok=1"
MAVERICK = config(
    f"llama4_text 5120 48 40 8 8192 202048 1048576 {_SCOUT} num_local_experts=128 interleave_moe_layer_step=2 "
    "attention_chunk_size=8192"
)
NEXT = config(
    "qwen3_next 2048 48 16 2 5120 151936 262144 head_dim=256 num_experts=512 num_experts_per_tok=10 "
    "moe_intermediate_size=512 shared_expert_intermediate_size=512 linear_num_key_heads=16 linear_num_value_heads=32 "
    "linear_key_head_dim=128 linear_value_head_dim=128 linear_conv_kernel_dim=4"
)
GPT_OSS = config(
    "gpt_oss 2880 24 64 8 2880 201088 131072 head_dim=64 sliding_window=128 num_local_experts=32 num_experts_per_tok=4"
)

PUBLISHED = [(671.9, V32), (743.9, GLM5), (9.242, GEMMA2), (27.009, GEMMA3), (79.67, NEXT), (400.7, MAVERICK)]
"""Billions of parameters. Other families are compared with transformers alone."""


def test_published_totals() -> None:
    for billions, values in PUBLISHED:
        model = read_config(values)
        assert num_parameters(model) / 1e9 == pytest.approx(billions, rel=1e-3), values["model_type"]
        assert model.kv_bytes(1000) > 0


CLASSES = """
Llama Mistral Qwen2 Qwen3 Mixtral Qwen2Moe Qwen3Moe Qwen3Next Qwen3_5MoeText GptOss Gemma2 Gemma3Text Phi3 Glm
Glm4 Glm4Moe Glm4MoeLite GlmMoeDsa Llama4Text Olmo2 Olmo3 Olmoe Granite GraniteMoe Cohere2 SmolLM3 MiniMaxM2 DeepseekV32
DeepseekV2 DeepseekV3 DeepseekV4
"""
CHANGES: dict[str, dict[str, Any]] = {
    "Qwen2Moe": {"mlp_only_layers": [0, 3]},
    "Qwen3Moe": {"decoder_sparse_step": 2},
    "Phi3": {"pad_token_id": 0},
    "Llama4Text": {"moe_layers": [1, 3]},
    "DeepseekV2": {"num_experts_per_tok": 6},
    "Glm4Moe": {"head_dim": 128},  # the class's default is 4096 / 96, and half of it is turned: no pairs
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES.split())
def test_parameters_are_what_transformers_builds(name: str) -> None:
    """Matrices as the library makes them, without its norms, biases, sinks and the residual mixing of V4."""
    import transformers

    config = getattr(transformers, f"{name}Config")(num_hidden_layers=6, **CHANGES.get(name, {}))
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    small = ("norm", "bias", "sinks", "hc_", "_hc", "A_log", "conv1d")
    sizes = {key: value.numel() for key, value in built.named_parameters() if not any(word in key for word in small)}
    model = read_config({**config.to_dict(), "model_type": config.model_type})
    ours = num_parameters(model) - (2 * model.num_layers + 1) * model.hidden
    assert ours == pytest.approx(sum(sizes.values()), rel=1.5e-3)


def test_published_files_give_the_tables_shapes_and_nested_ones_theirs() -> None:
    assert read_config(LLAMA).layers == TABLE["Llama-3.1-8B"].layers
    model = read_config(DEEPSEEK, name="V3")
    assert model.layers == TABLE["DeepSeek-V3"].layers
    assert model.precision == TABLE["DeepSeek-V3"].precision
    assert (model.name, model.context, model.tied) == ("V3", 163840, False)
    nested = read_config({"model_type": "kimi_k25", "text_config": {**DEEPSEEK, "model_type": "kimi_k2"}})
    dense, sparse = nested.layers
    assert (dense.ffn, dense.count, sparse.count) == (Dense(18432), 3, 58)
    assert isinstance(dense.attention, Mla)


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [(MIXTRAL, 46.70, 12.75), (QWEN, 30.53, 3.042), (LITE, 15.71, 2.451), (DEEPSEEK, 671.0, 36.63)],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_the_engine_runs_the_shape_that_plan_counts(config: dict[str, Any], billions: float, active: float) -> None:
    model = same_figures(config)
    assert num_parameters(model) / 1e9 == pytest.approx(billions, rel=5e-4)
    assert model.active / 1e9 == pytest.approx(active, rel=5e-4)


def test_windows_and_dense_layers_among_experts_have_the_same_figures() -> None:
    assert same_figures({**MIXTRAL, "sliding_window": 4096}).kv_bytes(5000) == 32 * 2 * 2 * 8 * 128 * 4096
    stepped = same_figures({**QWEN, "mlp_only_layers": [0, 5, 7], "decoder_sparse_step": 2})
    assert [(layer.count, type(layer.ffn)) for layer in stepped.layers] == [(26, Dense), (22, Experts)]


def same_figures(config: dict[str, Any]) -> ModelSpec:
    """The engine's shape of a configuration is the one that `plan` counts, and its tensors add up to it."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    spec, model = read_config(plain, runnable=True), read_config(plain)
    assert replace(spec, decoder=None, layers=tuple(map(without_gating, spec.layers))) == model
    assert num_parameters(spec) == pytest.approx(num_parameters(model), rel=1e-3)
    elements = sum(model.elements().values()) - model.elements()["embedding"]
    assert model.resident_bytes == 2 * (elements + model.head_elements)
    for context in (100, 5000):
        read = [min(context, getattr(layer.attention, "window", None) or context) for layer in spec.ordered_layers]
        assert model.kv_bytes(context) == 2 * spec.attention.cache_width * sum(read)
    return model


def without_gating(layer: Layer) -> Layer:
    return replace(layer, ffn=replace(layer.ffn, gating=Gating())) if isinstance(layer.ffn, Experts) else layer


def windows(values: dict[str, Any]) -> dict[int | None, int]:
    found: dict[int | None, int] = {}
    for layer in read_config(values).layers:
        assert isinstance(layer.attention, Gqa)
        found[layer.attention.window] = found.get(layer.attention.window, 0) + layer.count
    return found


def test_kinds_and_windows_by_layer() -> None:
    """Five of six layers of Gemma 3, every other one of Gemma 2, three of four of Llama 4 look back a limited way."""
    linear = read_config(NEXT)
    assert {type(layer.attention): layer.count for layer in linear.layers} == {DeltaNet: 36, Gqa: 12}
    assert linear.layers[0].ffn == Experts(512, 10, 1, 512, 512)
    assert windows(GPT_OSS) == {128: 12, None: 12}
    assert windows(GEMMA3) == {1024: 52, None: 10}
    assert windows(GEMMA2) == {4096: 21, None: 21}
    assert windows(MAVERICK) == {8192: 36, None: 12}
    assert windows({**GEMMA3, "layer_types": ["full_attention"] * 62}) == {None: 62}
    assert read_config(GEMMA3).kv_bytes(100_000) == 2 * 2 * 16 * 128 * (52 * 1024 + 10 * 100_000)
    assert sum(layer.count for layer in read_config(MAVERICK).layers if isinstance(layer.ffn, Experts)) == 24


def test_an_indexer_before_latent_attention() -> None:
    """DeepSeek-V3.2 reads 2,048 latents of a long context, and a key of 128 elements of every position."""
    model, stored = read_config(V32), Precision.of("bf16")
    kind = model.layers[0].attention
    assert isinstance(kind, Mla)
    main, index = kind.streams(100_000, 2, stored)
    assert (main.part, main.flops, main.cached) == ("sparse attention", 2 * 128 * 1088 * 2048 * 2, 576 * 2 * 4096)
    assert (index.part, index.flops, index.cached) == ("indexer", 2 * 64 * 128 * 100_000 * 2, 256 * 100_000)
    short, _ = kind.streams(100, 1, stored)
    assert short.flops == 2 * 128 * 1088 * 100
    assert model.kv_bytes(1) == 61 * (576 * 2 + 256)
    dense = Mla(128, 1536, 512, 128, 64, 128)
    assert kind.weights(7168) - dense.weights(7168) == 1536 * 64 * 128 + 7168 * (128 + 64)


def test_layers_that_share_an_indexers_picks() -> None:
    """GLM-5.2 has an indexer in 21 of 78 layers; the other layers score nothing and store no keys."""
    every = [("full" if layer < 3 or (layer - 2) % 4 == 0 else "shared") for layer in range(78)]
    for further in (
        {"indexer_types": every},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_pattern": "".join(kind[0].upper() for kind in every)},
    ):
        model = read_config({**GLM5, **further})
        own = {
            layer.attention.indexer: layer.count
            for layer in model.layers
            if isinstance(layer.attention, Mla) and isinstance(layer.ffn, Experts)
        }
        assert own == {Indexer(32, 128, 2048): 18, Indexer(0, 128, 2048): 57}
        assert model.kv_bytes(1) == 89_856 + 21 * 256


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


def wide(weights: str, experts: str | None = None, **parts: str) -> Precision:
    """With router and head in 16 bits."""
    return Precision.of(weights, experts, router="bf16", head="bf16", **parts)


KEPT: list[tuple[dict[str, Any], Precision]] = [
    ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": None}, wide("int4")),
    (
        {
            "quant_method": "gptq",
            "bits": 4,
            "dynamic": {
                "-:.*self_attn.*": {},
                r"+:.*mlp\.down_proj": {"bits": 8},
                r"+:.*mlp\.(gate|up)_proj": {"bits": 8},
            },
        },
        wide("w8a16", "int4", projections="bf16"),
    ),
    (
        {
            "quant_method": "fp8",
            "ignored_layers": [f"model.layers.{n}.self_attn.{p}_proj" for n in range(31) for p in "qkvo"],
        },
        wide("fp8", projections="bf16"),
    ),
    (packed(W8A8, "lm_head"), wide("int8")),
    (packed({**FP8, "input_activations": None}, "lm_head"), wide("w8a16")),
    (packed(NVFP4, "lm_head"), wide("nvfp4")),
    (
        {
            "quant_method": "compressed-tensors",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {**FP8, "targets": ["re:.*self_attn.*"]},
                "group_1": {**W4A16, "targets": ["Linear"]},
            },
        },
        wide("int4", projections="fp8"),
    ),
    (packed(FP8, "lm_head", kv_cache_scheme={"num_bits": 8, "type": "float"}), wide("fp8", cache="fp8")),
    (
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head", "model.layers.*.self_attn*"],
        },
        wide("nvfp4", projections="bf16", cache="fp8"),
    ),
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": ["lm_head"]},
        wide("nf4"),
    ),
    (
        {
            "quant_method": "quark",
            "exclude": ["lm_head"],
            "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}, "input_tensors": {"dtype": "fp8_e4m3"}},
        },
        wide("fp8"),
    ),
    (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        Precision.of("bf16", "mxfp4", shared="bf16"),
    ),
]


def test_quantisations_leave_parts_in_16_bits() -> None:
    for stored, expected in KEPT:
        assert quantised(**stored) == expected, stored


def test_quantised_experts() -> None:
    """A list for every layer, a list by patterns, and what the file says is replaced by a precision that is given."""
    listed = [f"model.layers.{layer}.mlp.gate" for layer in range(48)]
    fp8 = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", *listed]}
    assert quantised(QWEN, **fp8) == TABLE["Qwen3-235B-A22B-FP8"].precision
    assert quantised(DEEPSEEK, quant_method="fp8") == TABLE["DeepSeek-V3"].precision
    ignored = ("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*")
    kimi = {**DEEPSEEK, "model_type": "kimi_k2"}
    grouped = {**W4A16, "weights": {**W4A16["weights"], "group_size": 32}}
    assert quantised(kimi, **packed(grouped, *ignored)) == TABLE["Kimi-K2-Thinking"].precision
    assert quantised(kimi, quant_method="fp8") == TABLE["Kimi-K2"].precision
    assert quantised(kimi, **packed(grouped, *(each.replace("re:", "re:(?i)") for each in ignored))) == quantised(
        kimi, **packed(grouped, *ignored)
    ), "a flag at an expression's beginning"
    v4 = {**DEEPSEEK, "expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8"}}
    cached = replace(read_config(v4).precision, cache=1.0)
    assert cached == TABLE["DeepSeek-V4-Flash"].precision
    unknown = {**LLAMA, "quantization_config": {"quant_method": "magic"}}
    assert read_config(unknown, precision=Precision.of("fp8")).precision == Precision.of("fp8")


def test_states_are_no_keys_and_values_and_a_given_precision_is_that_of_weights() -> None:
    """Qwen3.5's and Nemotron-H's configurations state the format of states, by which vLLM goes; 8 bits of the cache are
    not theirs. With a precision that is given, keys and values keep the format of the configuration."""
    narrow = {"quantization_config": packed(FP8, "lm_head", kv_cache_scheme={"num_bits": 8, "type": "float"})}
    state = 36 * (32 * 128 * 128 + 4 * (2 * 16 * 128 + 32 * 128))
    keys = 12 * 2 * 2 * 256
    for further, size, wide in (
        ({}, 2, 2),
        ({"mamba_ssm_dtype": "float32"}, 2, 4),
        ({"mamba_ssm_cache_dtype": "float32", **narrow}, 1, 4),
    ):
        for model in (
            read_config({**NEXT, **further}),
            read_config({**NEXT, **further}, precision=Precision.of("fp8")),
        ):
            assert model.kv_bytes(1000) == keys * size * 1000 + state * wide
            assert with_formats(model, "int4", "fp8").kv_bytes(1000) == keys * 1000 + state * wide


def test_what_is_not_quantised_has_the_dtypes_format_and_so_has_a_tied_head() -> None:
    tied = {**LLAMA, "tie_word_embeddings": True}
    assert quantised(LLAMA, **packed(FP8)).head.name == "fp8"
    assert quantised(LLAMA, **packed({**FP8, "targets": "Linear"})) == quantised(LLAMA, **packed(FP8))
    assert quantised(tied, **packed(FP8)).head.name == "bf16"
    gemma = {**LLAMA, "model_type": "gemma2", "sliding_window": 4096}  # tied by default
    assert quantised(gemma, **packed(FP8)).head.name == "bf16"
    assert read_config({**LLAMA, "torch_dtype": "float32"}).precision == Precision.of("fp32")
    half = {**LLAMA, "torch_dtype": "float16"}
    assert read_config(half).precision == Precision.of("fp16")
    assert quantised(half, quant_method="awq", bits=4).head.name == "fp16"


def test_v4_by_layer_types_or_by_ratios() -> None:
    values = config(
        "deepseek_v4 4096 4 64 1 0 129280 1048576 head_dim=512 q_lora_rank=1024 o_groups=8 o_lora_rank=1024 "
        "sliding_window=128 index_n_heads=64 index_head_dim=128 index_topk=512 n_routed_experts=256 "
        "num_experts_per_tok=6 n_shared_experts=1 moe_intermediate_size=2048"
    ) | {"compress_ratios": [0, 4, 128, 4, 0]}
    model = read_config(values)
    assert read_config(values, precision=Precision.of("fp8", "fp4")).kv_bytes(8192) == model.kv_bytes(8192)
    kinds = [(layer.attention, layer.count) for layer in model.layers]
    assert {kind.ratio: count for kind, count in kinds if isinstance(kind, Compressed)} == {0: 1, 4: 2, 128: 1}
    assert model.layers[1].attention == TABLE["DeepSeek-V4-Flash"].layers[1].attention
    with pytest.raises(ModelError, match="layer type '7'"):
        read_config({**values, "compress_ratios": [0, 4, 7, 4]})


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gpt2"}, "model_type of config.json is gpt2"),
    ({key: value for key, value in LLAMA.items() if key != "intermediate_size"}, "lacks 'intermediate_size'"),
    ({key: value for key, value in DEEPSEEK.items() if key != "kv_lora_rank"}, "lacks 'kv_lora_rank'"),
    ({**LLAMA, "hidden_size": -4096}, "hidden_size = -4096"),
    ({**LLAMA, "num_hidden_layers": 10**6}, "num_hidden_layers = 1000000 cannot be right"),
    ({**LLAMA, "num_key_value_heads": 5}, "32 query heads cannot share 5"),
    ({**LLAMA, "quantization_config": {"quant_method": "magic"}}, "quantisation 'magic'"),
    ({**LLAMA, "quantization_config": packed(W8A8, "re:(")}, "pattern 're:"),
    ({**LLAMA, "quantization_config": {"quant_method": "fp8", "ignored_layers": "lm_head"}}, "no list of modules"),
    ({**LLAMA, "quantization_config": packed({"weights": {"num_bits": 5}})}, "group_0 .* weights of 5 bits"),
    ({**DEEPSEEK, "num_experts_per_tok": 300}, "300 experts active out of 256"),
    ({**LLAMA, "model_type": "qwen3", "sliding_window": 64, "layer_types": ["full_attention"]}, "layer_types"),
    ({**GEMMA3, "sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
    ({**MAVERICK, "no_rope_layers": [1, 0]}, "no_rope_layers .* each of the 48 layers"),
    ({**GLM5, "indexer_types": ["full"]}, "indexer_types"),
    ({key: value for key, value in V32.items() if key != "index_topk"}, "lacks 'index_topk'"),
]


def test_a_bad_configuration_is_named() -> None:
    for values, message in BAD:
        with pytest.raises(ModelError, match=message):
            read_config(values)


def test_families_known_by_their_shape_are_refused_by_the_engine() -> None:
    for values in (V32, {**MAVERICK, "architectures": ["Llama4ForCausalLM"]}, MAVERICK):
        assert read_config(values).num_layers == values["num_hidden_layers"]
        with pytest.raises(ModelError, match="engine does not run"):
            read_config(values, runnable=True)


def test_an_unknown_family_is_named_with_what_is_missing() -> None:
    odd = config("mamba9 64 2 4 2 128 100 10 ssm_state_size=16 n_routed_experts=4")
    with pytest.raises(ModelError, match=r"mamba9.*depend on n_routed_experts, ssm_state_size") as caught:
        read_config(odd)
    assert "gemma3" in (caught.value.hint or "")
    with pytest.raises(ModelError, match=r"gpt2.*lacks hidden_size, intermediate_size, num_attention_heads"):
        read_config({"model_type": "gpt2", "n_embd": 768, "vocab_size": 50257})
    with pytest.raises(ModelError, match=r"model_type of config.json is yi, which is not known\.\n") as caught:
        read_config(config("yi 64 2 4 2 128 100 10"))
    assert 'write that model_type, such as "llama"' in (caught.value.hint or "")
