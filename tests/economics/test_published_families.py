"""Families by the config.json of a published model: its parameters, windows, indexers; unknown ones."""

from __future__ import annotations

from typing import Any

import pytest

from wager.arch import Dense, Experts, Gqa, Indexer, Mla, Precision, read_config
from wager.errors import ModelError


def config(
    model_type: str,
    layers: int,
    hidden: int,
    heads: int,
    *,
    kv: int,
    ffn: int,
    vocab: int,
    context: int,
    **further: Any,
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        **further,
    }


TIED = {"tie_word_embeddings": True}
GLM_MOE = {"head_dim": 128, "n_shared_experts": 1, "num_experts_per_tok": 8}
LATENT = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}
NEXT = {
    "head_dim": 256,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
SCOUT = {"head_dim": 128, "intermediate_size_mlp": 16384, "num_local_experts": 16, "num_experts_per_tok": 1}

V32 = config("deepseek_v32", 61, 7168, 128, kv=128, ffn=18432, vocab=129280, context=163840, **LATENT)
GLM5_LATENT = {**LATENT, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32}
GLM5 = config("glm_moe_dsa", 78, 6144, 64, kv=64, ffn=12288, vocab=154880, context=202752, **GLM5_LATENT)
GEMMA3 = config(
    "gemma3_text",
    62,
    5376,
    32,
    kv=16,
    ffn=21504,
    vocab=262208,
    context=131072,
    head_dim=128,
    sliding_window=1024,
    sliding_window_pattern=6,
)
GEMMA2 = config("gemma2", 42, 3584, 16, kv=8, ffn=14336, vocab=256000, context=8192, head_dim=256, sliding_window=4096)
PHI4 = config("phi3", 40, 5120, 40, kv=10, ffn=17920, vocab=100352, context=16384, sliding_window=None)
MAVERICK = config(
    "llama4_text",
    48,
    5120,
    40,
    kv=8,
    ffn=8192,
    vocab=202048,
    context=1048576,
    interleave_moe_layer_step=2,
    attention_chunk_size=8192,
    **{**SCOUT, "num_local_experts": 128},
)

PUBLISHED = [
    ("gemma-2-9b", GEMMA2, 9.242, None),
    ("gemma-3-27b, its text model", GEMMA3, 27.009, None),
    (
        "gemma-3-1b",
        config(
            "gemma3_text",
            26,
            1152,
            4,
            kv=1,
            ffn=6912,
            vocab=262144,
            context=32768,
            head_dim=256,
            sliding_window=512,
            sliding_window_pattern=6,
        ),
        0.99989,
        None,
    ),
    ("phi-4", PHI4, 14.660, None),
    (
        "Phi-3-mini-4k",
        config("phi3", 32, 3072, 32, kv=32, ffn=8192, vocab=32064, context=4096, sliding_window=2047),
        3.8211,
        None,
    ),
    ("Phi-4-mini", config("phi3", 32, 3072, 24, kv=8, ffn=8192, vocab=200064, context=131072, **TIED), 3.836, None),
    ("GLM-4-9B-0414", config("glm4", 40, 4096, 32, kv=2, ffn=13696, vocab=151552, context=32768), 9.4003, None),
    (
        "GLM-4.5",
        config(
            "glm4_moe",
            92,
            5120,
            96,
            kv=8,
            ffn=12288,
            vocab=151552,
            context=131072,
            n_routed_experts=160,
            moe_intermediate_size=1536,
            first_k_dense_replace=3,
            **GLM_MOE,
        ),
        352.8,
        32.8,
    ),
    (
        "GLM-4.5-Air",
        config(
            "glm4_moe",
            46,
            4096,
            96,
            kv=8,
            ffn=10944,
            vocab=151552,
            context=131072,
            n_routed_experts=128,
            moe_intermediate_size=1408,
            first_k_dense_replace=1,
            **GLM_MOE,
        ),
        106.85,
        12.8,
    ),
    ("DeepSeek-V3.2", V32, 671.9, 37.5),
    ("GLM-5", GLM5, 743.9, None),
    (
        "Qwen3-Next-80B-A3B",
        config("qwen3_next", 48, 2048, 16, kv=2, ffn=5120, vocab=151936, context=262144, **NEXT),
        79.67,
        None,
    ),
    (
        "Llama-4-Scout, its text model",
        config("llama4_text", 48, 5120, 40, kv=8, ffn=8192, vocab=202048, context=10485760, **SCOUT),
        107.77,
        None,
    ),
    ("Llama-4-Maverick, its text model", MAVERICK, 400.7, None),
    (
        "Mistral-7B-v0.3",
        config("mistral", 32, 4096, 32, kv=8, ffn=14336, vocab=32768, context=32768, sliding_window=None),
        7.2480,
        None,
    ),
    (
        "Mixtral-8x22B",
        config(
            "mixtral",
            56,
            6144,
            48,
            kv=8,
            ffn=16384,
            vocab=32768,
            context=65536,
            sliding_window=None,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        140.63,
        39.0,
    ),
    ("OLMo-2-7B", config("olmo2", 32, 4096, 32, kv=32, ffn=11008, vocab=100352, context=4096), 7.2986, None),
    (
        "OLMoE-1B-7B",
        config(
            "olmoe", 16, 2048, 16, kv=16, ffn=1024, vocab=50304, context=4096, num_experts=64, num_experts_per_tok=8
        ),
        6.919,
        1.18,
    ),
    (
        "granite-3.3-8b",
        config("granite", 40, 4096, 32, kv=8, ffn=12800, vocab=49159, context=131072, **TIED),
        8.1708,
        None,
    ),
    ("SmolLM3-3B", config("smollm3", 36, 2048, 16, kv=4, ffn=11008, vocab=128256, context=65536, **TIED), 3.0751, None),
    (
        "MiniMax-M2",
        config(
            "minimax_m2",
            62,
            3072,
            48,
            kv=8,
            ffn=1536,
            vocab=200064,
            context=196608,
            head_dim=128,
            num_local_experts=256,
            num_experts_per_tok=8,
        ),
        228.7,
        None,
    ),
    (
        "c4ai-command-r7b",
        config(
            "cohere2",
            32,
            4096,
            32,
            kv=8,
            ffn=14336,
            vocab=256000,
            context=8192,
            head_dim=128,
            sliding_window=4096,
            **TIED,
        ),
        8.028,
        None,
    ),
    (
        "gpt-oss-20b",
        config(
            "gpt_oss",
            24,
            2880,
            64,
            kv=8,
            ffn=2880,
            vocab=201088,
            context=131072,
            head_dim=64,
            sliding_window=128,
            num_local_experts=32,
            num_experts_per_tok=4,
        ),
        20.91,
        None,
    ),
]


@pytest.mark.parametrize(
    ("values", "billions", "active"), [row[1:] for row in PUBLISHED], ids=[r[0] for r in PUBLISHED]
)
def test_published_totals(values: dict[str, Any], billions: float, active: float | None) -> None:
    model = read_config(values)
    assert model.parameters / 1e9 == pytest.approx(billions, rel=1e-3)
    if active is not None:
        assert model.active / 1e9 == pytest.approx(active, rel=0.02)
    assert model.kv_bytes(1000) > 0


def windows(values: dict[str, Any]) -> dict[int | None, int]:
    found: dict[int | None, int] = {}
    for layer in read_config(values).layers:
        assert isinstance(layer.attention, Gqa)
        found[layer.attention.window] = found.get(layer.attention.window, 0) + layer.count
    return found


def test_windows_by_layer() -> None:
    """Five of six layers of Gemma 3, every other one of Gemma 2, three of four of Llama 4 look back a limited way."""
    assert windows(GEMMA3) == {1024: 52, None: 10}
    assert windows(GEMMA2) == {4096: 21, None: 21}
    assert windows(MAVERICK) == {8192: 36, None: 12}
    assert windows({**GEMMA3, "layer_types": ["full_attention"] * 62}) == {None: 62}
    assert read_config(GEMMA3).kv_bytes(100_000) == 2 * 2 * 16 * 128 * (52 * 1024 + 10 * 100_000)
    ffn = {type(layer.ffn): layer.count for layer in read_config(MAVERICK).layers if layer.attention == Gqa(40, 8, 128)}
    assert sum(layer.count for layer in read_config(MAVERICK).layers if isinstance(layer.ffn, Experts)) == 24
    assert set(ffn) <= {Dense, Experts}


def test_a_vision_models_text_part_is_planned_with_the_defaults_it_leaves_out() -> None:
    """gemma-3-4b's file states five sizes of its text model."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    model = read_config(
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    )
    assert model.parameters / 1e9 == pytest.approx(3.880, rel=1e-3)
    assert model.tied


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


def test_families_known_to_the_planner_alone_are_not_run() -> None:
    for values in (GEMMA3, V32, PHI4, MAVERICK):
        with pytest.raises(ModelError, match="engine does not run"):
            read_config(values, runnable=True)


def test_an_unknown_family_is_named_with_what_is_missing() -> None:
    odd = config("mamba9", 2, 64, 4, kv=2, ffn=128, vocab=100, context=10, ssm_state_size=16, n_routed_experts=4)
    with pytest.raises(ModelError, match=r"mamba9.*depend on n_routed_experts, ssm_state_size") as caught:
        read_config(odd)
    assert "gemma3" in (caught.value.hint or "")
    with pytest.raises(ModelError, match=r"gpt2.*lacks hidden_size, intermediate_size, num_attention_heads"):
        read_config({"model_type": "gpt2", "n_embd": 768, "vocab_size": 50257})
    with pytest.raises(ModelError, match=r"model_type of config.json is yi, which is not known\.\n") as caught:
        read_config(config("yi", 2, 64, 4, kv=2, ffn=128, vocab=100, context=10))
    assert 'write that model_type, such as "llama"' in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**GEMMA3, "sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        ({**MAVERICK, "no_rope_layers": [1, 0]}, "no_rope_layers .* each of the 48 layers"),
        ({**GLM5, "indexer_types": ["full"]}, "indexer_types"),
        ({key: value for key, value in V32.items() if key != "index_topk"}, "lacks 'index_topk'"),
    ],
)
def test_damaged_keys_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(values)
