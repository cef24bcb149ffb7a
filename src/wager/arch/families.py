"""The families of models: how the configuration of each is read, and the details that the engine needs to run it.

One row for each model_type of Hugging Face. Of a family without `engine` only the shape is known, for `wager plan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from wager.arch import hf_layers as read
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
_MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131072}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM", read.full, read.dense, {"max_position_embeddings": 2048},
        EngineSupport(
            qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias",
            gguf=GgufLayout(permuted=True, windowed=True),
        ),
    ),
    "mistral": Family(
        "MistralForCausalLM", read.sliding, read.dense, {**_MISTRAL, "sliding_window": 4096}, EngineSupport()
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", read.sliding_by_layer, read.dense, _QWEN, EngineSupport(qkv_bias=True, gguf=GgufLayout())
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", read.sliding_by_layer, read.dense, {**_QWEN, "head_dim": 128},
        EngineSupport(qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True, gguf=GgufLayout()),
    ),
    "mixtral": Family(
        "MixtralForCausalLM", read.sliding, read.experts_everywhere,
        {
            **_MISTRAL, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
        EngineSupport(gating=GatingKeys()),
    ),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", read.sliding_by_layer, read.experts_stepped),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", read.sliding_if_enabled, read.experts_stepped,
        {"max_position_embeddings": 32768, "sliding_window": 4096},
        EngineSupport(
            qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True,
            gating=GatingKeys(normalised="norm_topk_prob"),
        ),
    ),
    "qwen3_next": Family("Qwen3NextForCausalLM", read.delta_net, read.experts_stepped),
    "qwen3_5_moe": Family("Qwen3_5MoeForCausalLM", read.delta_net, read.experts_stepped),
    "qwen3_5": Family("Qwen3_5ForCausalLM", read.delta_net, read.dense),
    "gpt_oss": Family("GptOssForCausalLM", read.alternating, read.experts_everywhere),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM", read.latent, read.experts_after_dense,
        {"max_position_embeddings": 2048, "topk_method": "greedy"},
        EngineSupport(
            interleaved_rope=True,
            gating=GatingKeys(
                normalised=False, scale="routed_scaling_factor",
                single_group=("greedy",), grouped=("group_limited_greedy",),
            ),
        ),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM", read.latent, read.experts_after_dense,
        {"max_position_embeddings": 4096, "rope_interleave": True, "norm_topk_prob": True},
        EngineSupport(
            interleaved_rope="rope_interleave",
            gating=GatingKeys(
                score="sigmoid", correction_bias=True, normalised="norm_topk_prob", scale="routed_scaling_factor",
                grouped=("noaux_tc",), group_best=2,
            ),
        ),
    ),
    "kimi_k2": Family("DeepseekV3ForCausalLM", read.latent, read.experts_after_dense),
    "deepseek_v4": Family("DeepseekV4ForCausalLM", read.compressed, read.experts_after_dense, cache="fp8"),
}  # fmt: skip
"""By model_type. If two rows have the same architecture, a lookup by architecture returns the first."""


def find_family(config: Mapping[str, Any], *, runnable: bool) -> Family:
    """The family of a config.json: by `architectures`, which is more exact, else by model_type.

    ModelError if neither is known; with `runnable` also if `architectures` names none that is known, since wrappers
    with other heads or inputs (classifiers, vision models) have the model_type of the model that they wrap.
    """
    named = config.get("architectures") or []
    if not isinstance(named, list | tuple):
        raise ModelError(f"config.json names no architecture: architectures = {named!r}.", "It must be a list.")
    for name in named:
        for family in FAMILIES.values():
            if family.architecture == name:
                return family
    model_type = str(config.get("model_type") or "")
    known = f"Known are: {', '.join(FAMILIES)}."
    if named and (runnable or not model_type):
        raise ModelError(f"Architecture {named[0]!r} is not supported.", known)
    known_family = FAMILIES.get(model_type.removesuffix("_text"))
    if known_family is None:
        cause = "which is not known" if model_type else "and it names no architecture"
        raise ModelError(f"The model_type of config.json is {model_type or 'none'}, {cause}.", known)
    return known_family
