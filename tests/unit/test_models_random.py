"""Mixtures, published and generated: their sizes, their names, and an engine on every family."""

from __future__ import annotations

from typing import Any

import pytest

import wager
from wager.arch import read_config
from wager.errors import ModelError
from wager.loading.load import load
from wager.models import hub
from wager.models.random_models import MODELS, byte_tokenizer

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 163840,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"num_key_value_heads": 8}, "num_key_value_heads = 8"),
        ({"attention_bias": True}, "attention_bias"),
        ({"n_group": 7}, "7 groups"),
        ({"topk_group": 9}, "9 of 8 groups"),
        ({"num_experts_per_tok": 300}, "300 experts active out of 256"),
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


@pytest.mark.parametrize("family", MODELS)
def test_sizes_are_near_their_names(family: str) -> None:
    for size, keys in MODELS[family][1].items():
        spec = read_config({"architectures": [MODELS[family][0]], **keys}, runnable=True)
        if size != "tiny":
            scale = {"m": 1e6, "b": 1e9}[size[-1]]
            assert spec.parameters / (float(size[:-1]) * scale) == pytest.approx(1.0, abs=0.25)


def test_the_tokenizer_encodes_bytes_and_decodes_every_id() -> None:
    bytewise = byte_tokenizer(600, where="test")
    text = "Grüße, 世界\n"
    assert bytewise.encode(text) == list(text.encode())
    assert bytewise.decode(bytewise.encode(text)) == text
    assert bytewise.decode([256, 598, 599]) == " 256 598"
    assert bytewise.eos_ids == (599,)
    assert bytewise.chat([{"role": "user", "content": "hello"}]) == "user: hello\nassistant: "


@pytest.mark.parametrize(
    ("model", "named"),
    [("random:gpt:1b", "family 'gpt'"), ("random:llama:9b", "llama of size '9b'"), ("random:", "family ''")],
)
def test_unknown_names_are_named(model: str, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        load(wager.EngineConfig.from_options(model=model))
    with pytest.raises(ModelError, match="is generated, not fetched"):
        hub.pull(model)
