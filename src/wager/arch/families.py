"""The families of models: how the config.json and the GGUF metadata of each are read, and what the engine needs to run
it.

To add a family, add a row to FAMILIES, under its model_type of Hugging Face. A row names a reader for the attention and
one for the feed-forwards, of readers.py. A family without `engine` can be planned for (`wager plan`), but not run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from wager.arch import readers
from wager.arch.config_keys import short_repr
from wager.arch.layers import Attention, Gqa, Parallel
from wager.arch.spec import FamilyDetails
from wager.errors import ModelError


@dataclass(frozen=True, slots=True)
class GatingKeys:
    """The keys of a configuration that describe the router: see layers.Gating.

    `correction_bias` and `normalised` as the biases of EngineSupport. `single_group` are the values of topk_method that
    mean one group of all experts, `grouped` those that mean n_group groups. `score` and `normalised` False are checked
    against the configuration's own keys.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool | str = False
    normalised: bool | str = True
    scale: str | None = None
    single_group: tuple[str, ...] = ()
    grouped: tuple[str, ...] = ()
    group_best: int = 1
    expert_scales: bool = False


@dataclass(frozen=True, slots=True)
class GgufLayout:
    """How llama.cpp's converter writes the family, under the architecture that is its model_type, or `architecture`;
    its models with experts or with other inputs than text, if theirs are others, under those of `others`.

    `attention`, `ffn` and `scales` replace the family's own readers; `defaults` are values of keys, by their names in
    config.json, that files leave out. `interleaved_rope`: rotated pairs of the query and key projections lie side by
    side, as the checkpoint has them or because the converter reorders rows. `read` are the keys among
    gguf_config.REFUSED that the family reads. `experts`: files with experts are read; `normalised`: the weights of a
    row's experts are, where the file does not say. `truncated`: YaRN's ramp begins and ends at whole dimensions.
    """

    architecture: str | None = None
    others: tuple[str, ...] = ()
    attention: readers.AttentionReader = readers.gguf_windows
    ffn: readers.FeedForwardReader | None = None
    scales: readers.ScaleReader | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    interleaved_rope: bool = False
    read: tuple[str, ...] = ()
    experts: bool = False
    normalised: bool = False
    truncated: bool = True


@dataclass(frozen=True, slots=True)
class EngineSupport(FamilyDetails):
    """Details of a family that the engine runs which its configuration does not state; see spec.DecoderDetails, which
    has the same `norm_offset`.

    A bias is always present (True), never (False), or present if the configuration's key of that name is set; likewise
    `interleaved_rope` and `qk_norm`. `partial_rope`: it may rotate a part of each head. `names` are tensors' that
    differ from weights.NAMES; parts of one name are rows of one tensor, in the order q, k, v and gate, up. `root` is
    what published checkpoints write for the `model` that names begin with. `sinks`, `shared_gate`, `apart` and
    `expert_bias` are of layers.Gqa and layers.Experts (there `biased`). `layer_embedding` is the key of
    ModelSpec.layer_embedding. `gguf` is None for a family that is not read from GGUF files.
    """

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool | str = False
    interleaved_rope: bool | str = False
    partial_rope: bool = False
    norm_offset: float = 0.0
    scales: readers.ScaleReader = readers.no_scales
    names: Mapping[str, str] = field(default_factory=dict)
    root: str = "model"
    gating: GatingKeys | None = None
    gguf: GgufLayout | None = None
    sinks: bool = False
    expert_bias: bool = False
    shared_gate: bool = False
    apart: bool = False
    layer_embedding: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """How a family's config.json is read. `defaults` are the values of keys that it may leave out; `cache` is the
    number format of its keys and values where its own code fixes one; `wrapper` the architecture of models with other
    inputs whose text part it is, if the engine runs that."""

    architecture: str
    attention: readers.AttentionReader
    ffn: readers.FeedForwardReader
    defaults: Mapping[str, Any] = field(default_factory=dict)
    engine: EngineSupport | None = None
    cache: str | None = None
    wrapper: str | None = None


_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 256000,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA3 = {**_GEMMA, "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6}
_GEMMA_NORMS = {
    "attn_post_norm": "model.layers.{}.post_attention_layernorm",
    "mlp_norm": "model.layers.{}.pre_feedforward_layernorm",
    "mlp_post_norm": "model.layers.{}.post_feedforward_layernorm",
}
_GEMMA_ENGINE = EngineSupport(
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    activation="gelu",
    post_norms=True,
    norm_offset=1.0,
    scales=readers.gemma_scales,
    names=_GEMMA_NORMS,
)
_GEMMA4 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
_GEMMA4_ENGINE = EngineSupport(
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    activation="gelu",
    qk_norm=True,
    value_norm=True,
    layer_scales=True,
    post_norms=True,
    apart=True,
    layer_embedding="hidden_size_per_layer_input",
    scales=readers.gemma4_scales,
    names={
        **_GEMMA_NORMS,
        **{f"shared_{part}": f"model.layers.{{}}.mlp.{part}_proj" for part in ("gate", "up", "down")},
        "shared_post_norm": "model.layers.{}.post_feedforward_layernorm_1",
        "router": "model.layers.{}.router.proj",
        "router_norm": "=model.layers.{}.router.scale",
        "expert_scales": "=model.layers.{}.router.per_expert_scale",
        "expert_norm": "model.layers.{}.pre_feedforward_layernorm_2",
        "expert_post_norm": "model.layers.{}.post_feedforward_layernorm_2",
        **dict.fromkeys(("expert_gate", "expert_up"), "=model.layers.{}.experts.gate_up_proj[{}]"),
        "expert_down": "=model.layers.{}.experts.down_proj[{}]",
    },
    gating=GatingKeys(expert_scales=True),
    gguf=GgufLayout(
        architecture="gemma4",
        attention=readers.gguf_two_shapes,
        ffn=readers.gguf_widths,
        defaults={"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0},
        read=("final_logit_softcapping",),
        experts=True,
        normalised=True,
    ),
)
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_FUSED_INTO = {"gate": "model.layers.{}.mlp.gate_up_proj", "up": "model.layers.{}.mlp.gate_up_proj"}
_GRANITE_GGUF = GgufLayout(
    attention=readers.gguf_granite,
    interleaved_rope=True,
    read=("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
)
_GRANITE_ENGINE = EngineSupport(
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
    scales=readers.granite_scales,
    gguf=_GRANITE_GGUF,
)
_OLMO_ENGINE = EngineSupport(
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm=True,
    whole_qk_norm=True,
    pre_norms=False,
    post_norms=True,
    names={
        "attn_post_norm": "model.layers.{}.post_attention_layernorm",
        "mlp_post_norm": "model.layers.{}.post_feedforward_layernorm",
    },
)
_GLM_ENGINE = EngineSupport(
    qkv_bias="attention_bias",
    interleaved_rope=True,
    partial_rope=True,
    names=_FUSED_INTO,
)
_GLM = {
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
}
_GLM_MIXTURE = {"n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True}
_SHARED_EXPERT = {
    "shared_gate": "model.layers.{}.mlp.shared_expert.gate_proj",
    "shared_up": "model.layers.{}.mlp.shared_expert.up_proj",
    "shared_down": "model.layers.{}.mlp.shared_expert.down_proj",
    "shared_router": "model.layers.{}.mlp.shared_expert_gate",
}
_HYBRID = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_HYBRID_ENGINE = EngineSupport(
    qk_norm=True,
    partial_rope=True,
    norm_offset=1.0,
    names={"q_gate": "model.layers.{}.self_attn.q_proj"},
)
_MIXTRAL_NAMES = {
    "router": "model.layers.{}.block_sparse_moe.gate",
    "expert_gate": "model.layers.{}.block_sparse_moe.experts.{}.w1",
    "expert_up": "model.layers.{}.block_sparse_moe.experts.{}.w3",
    "expert_down": "model.layers.{}.block_sparse_moe.experts.{}.w2",
}
_LFM2 = {
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "conv_L_cache": 3,
    "tie_word_embeddings": True,
}
_LFM2_NAMES = {
    "norm": "model.embedding_norm",
    "attn_norm": "model.layers.{}.operator_norm",
    "mlp_norm": "model.layers.{}.ffn_norm",
    "o": "model.layers.{}.self_attn.out_proj",
    "q_norm": "model.layers.{}.self_attn.q_layernorm",
    "k_norm": "model.layers.{}.self_attn.k_layernorm",
    "gate": "model.layers.{}.feed_forward.w1",
    "up": "model.layers.{}.feed_forward.w3",
    "down": "model.layers.{}.feed_forward.w2",
    "z": "model.layers.{}.conv.in_proj",
    "conv": "model.layers.{}.conv.conv",
    "state_out": "model.layers.{}.conv.out_proj",
}
_GRANITE_EXPERTS = {
    "router": "model.layers.{}.block_sparse_moe.router.layer",
    **dict.fromkeys(("expert_gate", "expert_up"), "model.layers.{}.block_sparse_moe.input_linear[{}]"),
    "expert_down": "model.layers.{}.block_sparse_moe.output_linear[{}]",
}
_MAMBA_NAMES = {
    **dict.fromkeys(("z", "mixed", "step"), "model.layers.{}.mamba.in_proj"),
    "conv": "model.layers.{}.mamba.conv1d",
    "rates": "=model.layers.{}.mamba.A_log",
    "dt": "=model.layers.{}.mamba.dt_bias",
    "skip": "=model.layers.{}.mamba.D",
    "state_norm": "model.layers.{}.mamba.norm",
    "state_out": "model.layers.{}.mamba.out_proj",
}
_MAMBA = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
_CORRECTED_SIGMOID = GatingKeys(
    score="sigmoid",
    correction_bias=True,
    normalised="norm_topk_prob",
    scale="routed_scaling_factor",
    grouped=("noaux_tc",),
    group_best=2,
)
"""DeepSeek-V3's router, which Nemotron-H has too."""

_NEMOTRON_NAMES = {
    **{part: name.replace(".mamba.", ".mixer.") for part, name in _MAMBA_NAMES.items()},
    **{part: f"model.layers.{{}}.mixer.{part}_proj" for part in ("q", "k", "v", "o", "up", "down")},
    **{f"shared_{part}": f"model.layers.{{}}.mixer.shared_experts.{part}_proj" for part in ("up", "down")},
    **{f"expert_{part}": f"model.layers.{{}}.mixer.experts.{{}}.{part}_proj" for part in ("up", "down")},
    "router": "model.layers.{}.mixer.gate",
    "correction": "=model.layers.{}.mixer.gate.e_score_correction_bias",
    "latent_in": "model.layers.{}.mixer.fc1_latent_proj",
    "latent_out": "model.layers.{}.mixer.fc2_latent_proj",
    **dict.fromkeys(("attn_norm", "mlp_norm"), "model.layers.{}.norm"),
    "embed": "model.embeddings",
    "norm": "model.norm_f",
}
_MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131072}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        readers.full_attention,
        readers.dense_ffn,
        {"max_position_embeddings": 2048},
        EngineSupport(
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            mlp_bias="mlp_bias",
            gguf=GgufLayout(attention=readers.sliding_attention, interleaved_rope=True, experts=True, normalised=True),
        ),
    ),
    "mistral": Family(
        "MistralForCausalLM",
        readers.sliding_attention,
        readers.dense_ffn,
        {**_MISTRAL, "sliding_window": 4096},
        EngineSupport(),
        wrapper="Mistral3ForConditionalGeneration",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        readers.sliding_by_layer,
        readers.dense_ffn,
        _QWEN,
        EngineSupport(qkv_bias=True, gguf=GgufLayout(others=("qwen2vl",))),
        wrapper="Qwen2_5_VLForConditionalGeneration",
    ),
    "mimo": Family("MiMoForCausalLM", readers.sliding_by_layer, readers.dense_ffn, _QWEN, EngineSupport(qkv_bias=True)),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        readers.sliding_by_layer,
        readers.dense_ffn,
        {**_QWEN, "head_dim": 128},
        EngineSupport(
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm=True,
            gguf=GgufLayout(others=("qwen3vl",)),
        ),
        wrapper="Qwen3VLForConditionalGeneration",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        readers.sliding_attention,
        readers.experts_everywhere,
        {
            **_MISTRAL,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
        EngineSupport(
            names=_MIXTRAL_NAMES,
            gating=GatingKeys(),
        ),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        readers.alternating_windows,
        readers.dense_ffn,
        {**_GEMMA, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        replace(
            _GEMMA_ENGINE,
            gguf=GgufLayout(
                scales=partial(readers.gguf_gemma_scales, widest=46),
                defaults={
                    readers.GGUF_PATTERN: 2,
                    "sliding_window": 4096,
                    "attn_logit_softcapping": 50.0,
                    "final_logit_softcapping": 30.0,
                },
                read=_CAPS,
            ),
        ),
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        readers.interleaved_windows,
        readers.dense_ffn,
        {**_GEMMA3, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0},
        replace(
            _GEMMA_ENGINE,
            qk_norm=True,
            gguf=GgufLayout(
                attention=partial(readers.gguf_windows, rotation="local"),
                scales=partial(readers.gguf_gemma_scales, widest=62),
                defaults={readers.GGUF_PATTERN: 6, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0},
                read=_CAPS,
            ),
        ),
        wrapper="Gemma3ForConditionalGeneration",
    ),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        readers.two_shapes,
        readers.wide_where_shared,
        {**_GEMMA4, "sliding_window": 512, "hidden_size_per_layer_input": 256},
        _GEMMA4_ENGINE,
        wrapper="Gemma4ForConditionalGeneration",
    ),
    "gemma4_unified": Family(
        "Gemma4UnifiedForCausalLM",
        readers.two_shapes,
        readers.wide_where_shared,
        {**_GEMMA4, "sliding_window": 1024, "max_position_embeddings": 262144},
        replace(_GEMMA4_ENGINE, gguf=None),
        wrapper="Gemma4UnifiedForConditionalGeneration",
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        readers.sliding_attention,
        readers.dense_ffn,
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        EngineSupport(
            partial_rope=True,
            names={**dict.fromkeys(("q", "k", "v"), "model.layers.{}.self_attn.qkv_proj"), **_FUSED_INTO},
            gguf=GgufLayout(attention=readers.sliding_attention),
        ),
    ),
    "glm": Family(
        "GlmForCausalLM",
        readers.full_attention,
        readers.dense_ffn,
        {**_GLM, "head_dim": 128},
        replace(
            _GLM_ENGINE,
            gguf=GgufLayout(architecture="chatglm", interleaved_rope=True),
        ),
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        readers.full_attention,
        readers.dense_ffn,
        {**_GLM, "head_dim": 128},
        replace(
            _GLM_ENGINE,
            post_norms=True,
            names={
                **_FUSED_INTO,
                "attn_post_norm": "model.layers.{}.post_self_attn_layernorm",
                "mlp_post_norm": "model.layers.{}.post_mlp_layernorm",
            },
            gguf=GgufLayout(interleaved_rope=True),
        ),
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        readers.full_attention,
        readers.experts_after_dense,
        {**_GLM, "attention_bias": False, "rms_norm_eps": 1e-5, **_GLM_MIXTURE},
        EngineSupport(
            qkv_bias="attention_bias",
            qk_norm="use_qk_norm",
            partial_rope=True,
            gating=_CORRECTED_SIGMOID,
            gguf=GgufLayout(architecture="glm4moe", experts=True, normalised=True),
        ),
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        readers.latent_attention,
        readers.experts_after_dense,
        {"max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "rope_interleave": True, **_GLM_MIXTURE},
        EngineSupport(interleaved_rope="rope_interleave", gating=_CORRECTED_SIGMOID),
    ),
    "glm_moe_dsa": Family("GlmMoeDsaForCausalLM", readers.indexed_attention, readers.experts_after_dense),
    "llama4": Family(
        "Llama4ForCausalLM", readers.chunked_attention, readers.experts_interleaved, {"attention_chunk_size": 8192}
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        readers.full_attention,
        readers.dense_ffn,
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        replace(
            _OLMO_ENGINE,
            gguf=GgufLayout(
                attention=partial(readers.gguf_windows, rotation="local"), defaults={readers.GGUF_PATTERN: 4}
            ),
        ),
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        readers.interleaved_windows,
        readers.dense_ffn,
        {
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
        },
        _OLMO_ENGINE,
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        readers.full_attention,
        readers.experts_everywhere,
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "norm_topk_prob": False},
        EngineSupport(
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm=True,
            whole_qk_norm=True,
            gating=GatingKeys(normalised="norm_topk_prob"),
            gguf=GgufLayout(experts=True),
        ),
    ),
    "granite": Family(
        "GraniteForCausalLM",
        readers.full_attention,
        readers.dense_ffn,
        {"max_position_embeddings": 2048, "attention_multiplier": 1.0},
        _GRANITE_ENGINE,
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        readers.mamba_by_layer,
        readers.experts_if_any,
        {
            "max_position_embeddings": 2048,
            "attention_multiplier": 1.0,
            **_MAMBA,
        },
        replace(
            _GRANITE_ENGINE,
            mlp_bias=False,
            names={
                **_MAMBA_NAMES,
                **_GRANITE_EXPERTS,
                **dict.fromkeys(("gate", "up", "shared_gate", "shared_up"), "model.layers.{}.shared_mlp.input_linear"),
                **dict.fromkeys(("down", "shared_down"), "model.layers.{}.shared_mlp.output_linear"),
            },
            gating=GatingKeys(),
            gguf=replace(
                _GRANITE_GGUF, architecture="granitehybrid", attention=readers.gguf_mamba, experts=True, normalised=True
            ),
        ),
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        readers.full_attention,
        readers.experts_everywhere,
        {"max_position_embeddings": 2048, "attention_multiplier": 1.0},
        replace(
            _GRANITE_ENGINE,
            mlp_bias=False,
            names=_GRANITE_EXPERTS,
            gating=GatingKeys(),
            gguf=replace(_GRANITE_GGUF, experts=True, normalised=True),
        ),
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        partial(readers.interleaved_windows, rotation="global"),
        readers.dense_ffn,
        {"tie_word_embeddings": True, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        readers.unrotated_by_layer,
        readers.dense_ffn,
        {"max_position_embeddings": 32768, "tie_word_embeddings": True, "rope_theta": 2000000.0},
        EngineSupport(
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            mlp_bias="mlp_bias",
            gguf=GgufLayout(attention=readers.unrotated_by_layer, interleaved_rope=True),
        ),
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        readers.full_attention,
        readers.experts_everywhere,
        {"max_position_embeddings": 196608, "rope_theta": 5000000.0},
        EngineSupport(
            qk_norm=True,
            whole_qk_norm=True,
            partial_rope=True,
            names={
                **_MIXTRAL_NAMES,
                "correction": "=model.layers.{}.block_sparse_moe.e_score_correction_bias",
            },
            gating=GatingKeys(score="sigmoid", correction_bias=True),
            gguf=GgufLayout(architecture="minimax-m2", experts=True, normalised=True),
        ),
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        readers.sliding_by_layer,
        readers.experts_stepped,
        {**_QWEN, "qkv_bias": True},
        EngineSupport(
            qkv_bias="qkv_bias",
            names=_SHARED_EXPERT,
            gating=GatingKeys(normalised="norm_topk_prob"),
            shared_gate=True,
            gguf=GgufLayout(architecture="qwen2moe", experts=True),
        ),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        readers.sliding_if_enabled,
        readers.experts_stepped,
        {"max_position_embeddings": 32768, "sliding_window": 4096},
        EngineSupport(
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm=True,
            gating=GatingKeys(normalised="norm_topk_prob"),
            gguf=GgufLayout(architecture="qwen3moe", others=("qwen3vlmoe",), experts=True, normalised=True),
        ),
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        readers.delta_net,
        readers.experts_stepped,
        {**_HYBRID, "norm_topk_prob": True},
        replace(
            _HYBRID_ENGINE,
            names={
                **_SHARED_EXPERT,
                **_HYBRID_ENGINE.names,
                **dict.fromkeys(("mixed", "z"), "model.layers.{}.linear_attn.in_proj_qkvz"),
                **dict.fromkeys(("step", "decay"), "model.layers.{}.linear_attn.in_proj_ba"),
            },
            gating=GatingKeys(normalised="norm_topk_prob"),
            shared_gate=True,
            gguf=GgufLayout(
                architecture="qwen3next",
                attention=partial(readers.gguf_delta_net, tiled=False),
                experts=True,
                normalised=True,
            ),
        ),
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForCausalLM",
        readers.delta_net,
        readers.experts_stepped,
        _HYBRID,
        replace(
            _HYBRID_ENGINE,
            names={**_SHARED_EXPERT, **_HYBRID_ENGINE.names},
            gating=GatingKeys(),
            shared_gate=True,
            gguf=GgufLayout(architecture="qwen35moe", attention=readers.gguf_delta_net, experts=True, normalised=True),
        ),
        wrapper="Qwen3_5MoeForConditionalGeneration",
    ),
    "qwen3_5": Family(
        "Qwen3_5ForCausalLM",
        readers.delta_net,
        readers.dense_ffn,
        _HYBRID,
        replace(_HYBRID_ENGINE, gguf=GgufLayout(architecture="qwen35", attention=readers.gguf_delta_net)),
        wrapper="Qwen3_5ForConditionalGeneration",
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        readers.convolutions,
        readers.dense_adjusted,
        _LFM2,
        EngineSupport(
            qk_norm=True,
            names=_LFM2_NAMES,
            gguf=GgufLayout(attention=readers.gguf_convolutions, defaults={"block_auto_adjust_ff_dim": False}),
        ),
    ),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM",
        readers.convolutions,
        readers.experts_after_num_dense,
        {**_LFM2, "num_dense_layers": 2, "norm_topk_prob": True, "use_expert_bias": True},
        EngineSupport(
            qk_norm=True,
            names={
                **_LFM2_NAMES,
                "router": "model.layers.{}.feed_forward.gate",
                "correction": "=model.layers.{}.feed_forward.expert_bias",
                "expert_gate": "model.layers.{}.feed_forward.experts.{}.w1",
                "expert_up": "model.layers.{}.feed_forward.experts.{}.w3",
                "expert_down": "model.layers.{}.feed_forward.experts.{}.w2",
            },
            gating=GatingKeys(
                score="sigmoid",
                correction_bias="use_expert_bias",
                normalised="norm_topk_prob",
                scale="routed_scaling_factor",
            ),
            gguf=GgufLayout(architecture="lfm2moe", attention=readers.gguf_convolutions, experts=True, normalised=True),
        ),
    ),
    "falcon_h1": Family(
        "FalconH1ForCausalLM",
        readers.parallel_mamba,
        readers.dense_ffn,
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "mamba_d_ssm": 1024,
            **_MAMBA,
            "mamba_norm_before_gate": True,
        },
        EngineSupport(
            mlp_bias="mlp_bias",
            scales=readers.falcon_scales,
            names={
                **_MAMBA_NAMES,
                **{part: f"model.layers.{{}}.feed_forward.{part}_proj" for part in ("gate", "up", "down")},
                "norm": "model.final_layernorm",
                "mlp_norm": "model.layers.{}.pre_ff_layernorm",
            },
            gguf=GgufLayout(architecture="falcon-h1", attention=readers.gguf_parallel_mamba, scales=readers.no_scales),
        ),
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        readers.mixers_alone,
        readers.feed_forwards_alone,
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096,
            "layer_norm_epsilon": 1e-5,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "norm_topk_prob": True,
        },
        EngineSupport(
            mlp_bias="mlp_bias",
            activation="relu2",
            partial_rope=True,  # files state rotated dimensions, though there is no rotation
            names=_NEMOTRON_NAMES,
            root="backbone",
            gating=_CORRECTED_SIGMOID,
            gguf=GgufLayout(
                others=("nemotron_h_moe",),
                attention=readers.gguf_mixers_alone,
                ffn=readers.gguf_feed_forwards_alone,
                experts=True,
                normalised=True,
            ),
        ),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        readers.alternating_windows,
        readers.experts_everywhere,
        {"attention_bias": True, "head_dim": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
        EngineSupport(
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            activation="clamped",
            names={
                "router": "model.layers.{}.mlp.router",
                "expert_gate": "model.layers.{}.mlp.experts.gate_proj[{}]",
                "expert_up": "model.layers.{}.mlp.experts.up_proj[{}]",
                "expert_down": "model.layers.{}.mlp.experts.down_proj[{}]",
            },
            gating=GatingKeys(),
            sinks=True,
            expert_bias=True,
            gguf=GgufLayout(
                architecture="gpt-oss",
                attention=readers.alternating_windows,
                experts=True,
                normalised=True,
                truncated=False,
            ),
        ),
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        readers.latent_attention,
        readers.experts_after_dense,
        {"max_position_embeddings": 2048, "topk_method": "greedy"},
        EngineSupport(
            interleaved_rope=True,
            gating=GatingKeys(
                normalised=False,
                scale="routed_scaling_factor",
                single_group=("greedy",),
                grouped=("group_limited_greedy",),
            ),
            gguf=GgufLayout(
                architecture="deepseek2",
                attention=readers.gguf_latent,
                interleaved_rope=True,
                read=("rope.scaling.yarn_log_multiplier",),
                experts=True,
            ),
        ),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        readers.latent_attention,
        readers.experts_after_dense,
        {"max_position_embeddings": 4096, "rope_interleave": True, "norm_topk_prob": True},
        EngineSupport(
            interleaved_rope="rope_interleave",
            gating=_CORRECTED_SIGMOID,
        ),
    ),
    "deepseek_v32": Family("DeepseekV32ForCausalLM", readers.indexed_attention, readers.experts_after_dense),
    "kimi_k2": Family("DeepseekV3ForCausalLM", readers.latent_attention, readers.experts_after_dense),
    "deepseek_v4": Family(
        "DeepseekV4ForCausalLM", readers.compressed_attention, readers.experts_after_dense, cache="fp8"
    ),
}
"""By model_type. If two rows have the same architecture, a lookup by architecture returns the first."""


def find_gguf(architecture: str) -> tuple[Family, EngineSupport, GgufLayout]:
    """The family whose GGUF files have that architecture; ModelError if there is none."""
    known = {
        family.engine.gguf.architecture or name: (family, family.engine, family.engine.gguf)
        for name, family in FAMILIES.items()
        if family.engine and family.engine.gguf
    }
    for row in [*known.values()]:
        known |= dict.fromkeys(row[2].others, row)
    if architecture not in known:
        raise ModelError(
            f"Architecture {short_repr(architecture)} is not supported in a GGUF file.",
            f"Supported are: {', '.join(known)}.",
        )
    return known[architecture]


def with_sinks(attention: Sequence[Attention], engine: EngineSupport) -> Sequence[Attention]:
    """The attention of every layer, with sinks in a family that has them."""
    return [replace(kind, sinks=engine.sinks) if isinstance(kind, Gqa) else kind for kind in attention]


def without_norm(attention: Attention) -> Attention:
    """A layer whose recurrent part has no norm, if it can be without."""
    if isinstance(attention, Parallel):
        return replace(attention, state=replace(attention.state, normed=False))
    return attention


def find_family(config: Mapping[str, Any], *, runnable: bool) -> Family:
    """The family of a config.json: by `architectures`, which is more exact, else by model_type.

    ModelError if neither is known; with `runnable` also if `architectures` names none that is known, since wrappers
    with other heads or inputs (classifiers, vision models) have the model_type of the model that they wrap.
    """
    named = config.get("architectures")
    named = [] if named is None else named
    if not isinstance(named, list | tuple):
        raise ModelError(
            f"config.json names no architecture: architectures = {short_repr(named)}.", "It must be a list."
        )
    for name in named:
        for family in FAMILIES.values():
            if name in (family.architecture, family.wrapper):
                return family
        if str(name).endswith("AssistantForCausalLM"):
            raise ModelError(
                f"It is the head of a drafter (architecture {short_repr(name)}), not a model.",
                "Give it beside the model that it was made for: --drafter mtp:PATH.",
            )
    model_type = str(config.get("model_type") or "")
    if named and (runnable or not model_type):
        raise ModelError(f"Architecture {short_repr(named[0])} is not supported.", _known_families(config))
    known_family = FAMILIES.get(model_type.removesuffix("_text"))
    if known_family is None:
        cause = "which is not known" if model_type else "and it names no architecture"
        raise ModelError(
            f"The model_type of config.json is {short_repr(model_type)[1:-1] or 'none'}, {cause}.{_unread(config)}",
            _known_families(config),
        )
    return known_family


def is_wrapped(config: Mapping[str, Any]) -> bool:
    """Whether a config.json whose family is known is of a model with other inputs beside the text."""
    named = config.get("architectures")
    return isinstance(named, list) and any(family.wrapper in named for family in FAMILIES.values() if family.wrapper)


_PLAIN = {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"}
_SHAPING = re.compile(
    r"expert|moe|lora|latent|window|chunk|linear_|ssm|mamba|conv|index_|compress|layer_types|recurrent|state_|head_dim"
)
"""Keys of a configuration that change the shape of a layer."""


def _unread(config: Mapping[str, Any]) -> str:
    """What keeps a configuration from being read as a plain decoder, as a sentence that begins with a space."""
    missing = sorted(name for name in _PLAIN if config.get(name) is None)
    shaping = sorted(name for name, value in config.items() if _SHAPING.search(name) and value not in (None, False, 0))
    cause = f" It lacks {', '.join(missing)}." if missing else ""
    if shaping:
        cause += f" Its layers depend on {', '.join(shaping[:8])}, which were not understood."
    return cause


def _known_families(config: Mapping[str, Any]) -> str:
    """The known families, and, for a configuration with all keys of a plain decoder, how to have it read as one."""
    known = f"Known are: {', '.join(FAMILIES)}."
    plain = all(config.get(name) is not None for name in _PLAIN) and not _unread(config)
    advice = ' If its layers are shaped as a known family\'s, write that model_type, such as "llama", into a copy.'
    return known + (advice if plain else "")
