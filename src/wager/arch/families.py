"""The families of models: how the configuration of each is read, and the details that the engine needs to run it.

One row for each model_type of Hugging Face. Of a family without `engine` only the shape is known, for `wager plan`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from wager.arch import hf_layers as read
from wager.arch.config_keys import shown
from wager.arch.hf_layers import AttentionReader, FeedForwardReader
from wager.errors import ModelError


@dataclass(frozen=True, slots=True)
class GatingKeys:
    """The keys of a configuration that describe the router: see feed_forward.Gating.

    `normalised` as the biases of EngineSupport. `single_group` are the values of topk_method that mean one group of all
    experts, `grouped` those that mean n_group groups. `scoring` and `normalised` False are checked against the
    configuration's own keys.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool = False
    normalised: bool | str = True
    scale: str | None = None
    single_group: tuple[str, ...] = ()
    grouped: tuple[str, ...] = ()
    group_best: int = 1


@dataclass(frozen=True, slots=True)
class GgufLayout:
    """How llama.cpp's converter writes the family, under the architecture that is its model_type.

    `permuted`: it reorders each head's rows of the query and key projections so that rotated pairs lie side by side.
    `windowed`: the sliding window, if the file has one, holds in every layer.
    """

    permuted: bool = False
    windowed: bool = False


@dataclass(frozen=True, slots=True)
class EngineSupport:
    """Details of a family that the engine runs which its configuration does not state.

    A bias is always present (True), never (False), or present if the configuration's key of that name is set; likewise
    `interleaved_rope`. `gguf` is None for a family that is not read from GGUF files.
    """

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    interleaved_rope: bool | str = False
    gating: GatingKeys | None = None
    gguf: GgufLayout | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """How a family's config.json is read. `defaults` are the values of keys that it may leave out; `cache` is the
    number format of its keys and values where its own code fixes one."""

    architecture: str
    attention: AttentionReader
    ffn: FeedForwardReader
    defaults: Mapping[str, Any] = field(default_factory=dict)
    engine: EngineSupport | None = None
    cache: str | None = None


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
_GLM = {"vocab_size": 151552, "max_position_embeddings": 131072}
_MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131072}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        read.full,
        read.dense,
        {"max_position_embeddings": 2048},
        EngineSupport(
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            mlp_bias="mlp_bias",
            gguf=GgufLayout(permuted=True, windowed=True),
        ),
    ),
    "mistral": Family(
        "MistralForCausalLM", read.sliding, read.dense, {**_MISTRAL, "sliding_window": 4096}, EngineSupport()
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", read.sliding_by_layer, read.dense, _QWEN, EngineSupport(qkv_bias=True, gguf=GgufLayout())
    ),
    "mimo": Family("MiMoForCausalLM", read.sliding_by_layer, read.dense, _QWEN, EngineSupport(qkv_bias=True)),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        read.sliding_by_layer,
        read.dense,
        {**_QWEN, "head_dim": 128},
        EngineSupport(qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True, gguf=GgufLayout()),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        read.sliding,
        read.experts_everywhere,
        {
            **_MISTRAL,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
        EngineSupport(gating=GatingKeys()),
    ),
    "gemma2": Family("Gemma2ForCausalLM", read.alternating, read.dense, {**_GEMMA, "max_position_embeddings": 8192}),
    "gemma3": Family("Gemma3ForCausalLM", read.sliding_between, read.dense, _GEMMA3),
    "phi3": Family("Phi3ForCausalLM", read.sliding, read.dense, {"max_position_embeddings": 4096}),
    "glm": Family("GlmForCausalLM", read.full, read.dense, {**_GLM, "head_dim": 128}),
    "glm4": Family("Glm4ForCausalLM", read.full, read.dense, {**_GLM, "head_dim": 128}),
    "glm4_moe": Family("Glm4MoeForCausalLM", read.full, read.experts_after_dense, _GLM),
    "glm_moe_dsa": Family("GlmMoeDsaForCausalLM", read.indexed, read.experts_after_dense),
    "llama4": Family("Llama4ForCausalLM", read.chunked, read.experts_interleaved, {"attention_chunk_size": 8192}),
    "olmo2": Family("Olmo2ForCausalLM", read.full, read.dense, {"max_position_embeddings": 2048}),
    "olmo3": Family(
        "Olmo3ForCausalLM", read.sliding_between, read.dense, {"sliding_window": 4096, "sliding_window_pattern": 4}
    ),
    "olmoe": Family("OlmoeForCausalLM", read.full, read.experts_everywhere),
    "granite": Family("GraniteForCausalLM", read.full, read.dense),
    "granitemoe": Family("GraniteMoeForCausalLM", read.full, read.experts_everywhere),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        read.sliding_between,
        read.dense,
        {"tie_word_embeddings": True, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "smollm3": Family("SmolLM3ForCausalLM", read.sliding_by_layer, read.dense, {"tie_word_embeddings": True}),
    "minimax_m2": Family("MiniMaxM2ForCausalLM", read.full, read.experts_everywhere),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", read.sliding_by_layer, read.experts_stepped),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        read.sliding_if_enabled,
        read.experts_stepped,
        {"max_position_embeddings": 32768, "sliding_window": 4096},
        EngineSupport(
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm=True,
            gating=GatingKeys(normalised="norm_topk_prob"),
        ),
    ),
    "qwen3_next": Family("Qwen3NextForCausalLM", read.delta_net, read.experts_stepped),
    "qwen3_5_moe": Family("Qwen3_5MoeForCausalLM", read.delta_net, read.experts_stepped),
    "qwen3_5": Family("Qwen3_5ForCausalLM", read.delta_net, read.dense),
    "gpt_oss": Family("GptOssForCausalLM", read.alternating, read.experts_everywhere),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        read.latent,
        read.experts_after_dense,
        {"max_position_embeddings": 2048, "topk_method": "greedy"},
        EngineSupport(
            interleaved_rope=True,
            gating=GatingKeys(
                normalised=False,
                scale="routed_scaling_factor",
                single_group=("greedy",),
                grouped=("group_limited_greedy",),
            ),
        ),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        read.latent,
        read.experts_after_dense,
        {"max_position_embeddings": 4096, "rope_interleave": True, "norm_topk_prob": True},
        EngineSupport(
            interleaved_rope="rope_interleave",
            gating=GatingKeys(
                score="sigmoid",
                correction_bias=True,
                normalised="norm_topk_prob",
                scale="routed_scaling_factor",
                grouped=("noaux_tc",),
                group_best=2,
            ),
        ),
    ),
    "deepseek_v32": Family("DeepseekV32ForCausalLM", read.indexed, read.experts_after_dense),
    "kimi_k2": Family("DeepseekV3ForCausalLM", read.latent, read.experts_after_dense),
    "deepseek_v4": Family("DeepseekV4ForCausalLM", read.compressed, read.experts_after_dense, cache="fp8"),
}
"""By model_type. If two rows have the same architecture, a lookup by architecture returns the first."""


def find_family(config: Mapping[str, Any], *, runnable: bool) -> Family:
    """The family of a config.json: by `architectures`, which is more exact, else by model_type.

    ModelError if neither is known; with `runnable` also if `architectures` names none that is known, since wrappers
    with other heads or inputs (classifiers, vision models) have the model_type of the model that they wrap.
    """
    named = config.get("architectures")
    named = [] if named is None else named
    if not isinstance(named, list | tuple):
        raise ModelError(f"config.json names no architecture: architectures = {shown(named)}.", "It must be a list.")
    for name in named:
        for family in FAMILIES.values():
            if family.architecture == name:
                return family
    model_type = str(config.get("model_type") or "")
    if named and (runnable or not model_type):
        raise ModelError(f"Architecture {shown(named[0])} is not supported.", _known_families(config))
    known_family = FAMILIES.get(model_type.removesuffix("_text"))
    if known_family is None:
        cause = "which is not known" if model_type else "and it names no architecture"
        raise ModelError(
            f"The model_type of config.json is {shown(model_type)[1:-1] or 'none'}, {cause}.{_unread(config)}",
            _known_families(config),
        )
    return known_family


_PLAIN = {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"}
_SHAPING = re.compile(
    r"expert|moe|lora|latent|window|chunk|linear_|ssm|mamba|conv|index_|compress|layer_types|recurrent|state_|head_dim"
)
"""Keys of a configuration that change the shape of a layer."""


def _unread(config: Mapping[str, Any]) -> str:
    """What keeps a configuration from being read as a plain decoder, as a sentence that begins with a space."""
    missing = sorted(name for name in _PLAIN if config.get(name) is None)
    shaping = sorted(name for name, value in config.items() if _SHAPING.search(name) and value not in (None, False, 0))
    cause = f" Of a plain decoder's keys it lacks {', '.join(missing)}." if missing else ""
    if shaping:
        cause += f" Its layers depend on {', '.join(shaping[:8])}, which were not understood."
    return cause


def _known_families(config: Mapping[str, Any]) -> str:
    """The known families, and, for a configuration with all keys of a plain decoder, how to have it read as one."""
    known = f"Known are: {', '.join(FAMILIES)}."
    plain = all(config.get(name) is not None for name in _PLAIN) and not _unread(config)
    advice = ' If its layers are shaped as a known family\'s, write that model_type, such as "llama", into a copy.'
    return known + (advice if plain else "")
