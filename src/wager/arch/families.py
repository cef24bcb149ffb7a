"""From a model's own description to a ModelSpec: families are rows of a table, not classes.

Reads a Hugging Face configuration (a mapping). Knows which keys change the computation and refuses, by name, those it
cannot honour. Knows no tensors; gguf_families.py does the same for GGUF metadata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from wager.arch.config_keys import Keys
from wager.arch.mixtures import ExpertKeys, read_experts, read_latent
from wager.arch.rope import read_rope
from wager.arch.spec import ModelSpec, Rope
from wager.errors import ModelError

Windows = Literal["never", "always", "switched", "flagged"]


@dataclass(frozen=True, slots=True)
class Family:
    """What the configuration of one architecture leaves unsaid.

    A bias is always there (True), never (False), or there if the configuration key of that name says so. `windows`:
    the sliding window is unknown to it, holds in every layer, or (switched) in every layer if use_sliding_window, or
    where use_sliding_window and layer_types say. `latent`: attention is over a latent, whose rotated rows lie
    interleaved (True), or as the key of that name says. `defaults` are the values of keys a configuration may leave
    out, `names` the tensors that go by names of their own.
    """

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    windows: Windows = "never"
    experts: ExpertKeys | None = None
    latent: bool | str = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"max_position_embeddings": 2048},
    ),
    "MistralForCausalLM": Family(
        windows="always",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows="flagged", defaults=_QWEN),
    "Qwen3ForCausalLM": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        windows="flagged",
        defaults={**_QWEN, "head_dim": 128},
    ),
    "MixtralForCausalLM": Family(
        windows="always",
        experts=ExpertKeys(count=("num_local_experts", "num_experts"), width="intermediate_size"),
        defaults={
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0, "num_experts_per_tok": 2, "num_local_experts": 8,
        },
        names={
            "router": "model.layers.{}.block_sparse_moe.gate",
            "expert_gate": "model.layers.{}.block_sparse_moe.experts.{}.w1",
            "expert_up": "model.layers.{}.block_sparse_moe.experts.{}.w3",
            "expert_down": "model.layers.{}.block_sparse_moe.experts.{}.w2",
        },
    ),
    "Qwen3MoeForCausalLM": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        windows="switched",
        experts=ExpertKeys(
            count=("num_experts", "num_local_experts"), normalised="norm_topk_prob", sparse="stepped"
        ),
        defaults={"max_position_embeddings": 32768, "sliding_window": 4096},
    ),
    "DeepseekV2ForCausalLM": Family(
        latent=True,
        experts=ExpertKeys(
            count=("n_routed_experts",), normalised=False, scale="routed_scaling_factor", shared="n_shared_experts",
            sparse="after", methods=(("greedy",), ("group_limited_greedy",)),
        ),
        defaults={"max_position_embeddings": 2048, "topk_method": "greedy"},
    ),
    "DeepseekV3ForCausalLM": Family(
        latent="rope_interleave",
        experts=ExpertKeys(
            count=("n_routed_experts",), score="sigmoid", corrected=True, normalised="norm_topk_prob",
            scale="routed_scaling_factor", shared="n_shared_experts", sparse="after",
            methods=((), ("noaux_tc",)), group_best=2,
        ),
        defaults={"max_position_embeddings": 4096, "rope_interleave": True, "norm_topk_prob": True},
    ),
}  # fmt: skip

NAMES: Mapping[str, str] = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "model.layers.{}.input_layernorm",
    "mlp_norm": "model.layers.{}.post_attention_layernorm",
    "q": "model.layers.{}.self_attn.q_proj",
    "k": "model.layers.{}.self_attn.k_proj",
    "v": "model.layers.{}.self_attn.v_proj",
    "o": "model.layers.{}.self_attn.o_proj",
    "q_norm": "model.layers.{}.self_attn.q_norm",
    "k_norm": "model.layers.{}.self_attn.k_norm",
    "gate": "model.layers.{}.mlp.gate_proj",
    "up": "model.layers.{}.mlp.up_proj",
    "down": "model.layers.{}.mlp.down_proj",
    "router": "model.layers.{}.mlp.gate",
    "correction": "=model.layers.{}.mlp.gate.e_score_correction_bias",
    "shared_gate": "model.layers.{}.mlp.shared_experts.gate_proj",
    "shared_up": "model.layers.{}.mlp.shared_experts.up_proj",
    "shared_down": "model.layers.{}.mlp.shared_experts.down_proj",
    "expert_gate": "model.layers.{}.mlp.experts.{}.gate_proj",
    "expert_up": "model.layers.{}.mlp.experts.{}.up_proj",
    "expert_down": "model.layers.{}.mlp.experts.{}.down_proj",
    "q_a": "model.layers.{}.self_attn.q_a_proj",
    "q_a_norm": "model.layers.{}.self_attn.q_a_layernorm",
    "q_b": "model.layers.{}.self_attn.q_b_proj",
    "kv_a": "model.layers.{}.self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "model.layers.{}.self_attn.kv_a_layernorm",
    "kv_b": "model.layers.{}.self_attn.kv_b_proj",
}
"""Canonical tensor name (ModelSpec.tensors, without places and suffix) -> its name in a Hugging Face checkpoint. A name
after = is whole; the others get the suffix."""

IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"lm_head\.weight")
"""Tensors a checkpoint may carry that say nothing new: stored frequencies, and the head of a tied model."""


_MOST_LAYERS, _MOST_HEAD_DIM = 10_000, 8192
"""Beyond these a description is damaged, and believing it would exhaust the memory."""


def source_name(names: Mapping[str, str], canonical: str) -> str:
    """The name in a checkpoint of a tensor named as in ModelSpec.tensors."""
    *places, part, suffix = canonical.split(".")
    name = names[part].format(*places[1:])
    return name[1:] if name.startswith("=") else f"{name}.{suffix}"


def checkpoint_names(architecture: str) -> Mapping[str, str]:
    """NAMES with those that the architecture has of its own."""
    return {**NAMES, **FAMILIES[architecture].names}


def ignored_tensors(config: Mapping[str, Any], spec: ModelSpec) -> tuple[str, ...]:
    """Patterns of the tensors a checkpoint may carry besides: IGNORED, and layers that predict further tokens."""
    further = int(config.get("num_nextn_predict_layers") or 0)
    layers = tuple(rf"model\.layers\.{spec.layers + i}\..*" for i in range(further))
    return (*(IGNORED if spec.tied else IGNORED[:1]), *layers)


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a Hugging Face configuration (config.json as a mapping).

    ModelError names an architecture, a scaling, an activation or a quantisation that is not supported, or a key that
    is missing.
    """
    architecture, family = _family(config)
    keys = Keys({**family.defaults, **config})
    _refuse_unsupported(keys)
    heads, hidden, layers = (keys.integer(name) for name in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    latent = None
    if family.latent:
        latent = read_latent(keys, heads=heads, interleaved=keys.flag(family.latent))
    head_dim = latent.rank + latent.rope if latent else keys.integer("head_dim", hidden // heads)
    kv_heads = 1 if latent else keys.integer("num_key_value_heads", heads)
    context = keys.integer("max_position_embeddings")
    check_sizes(layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    return ModelSpec(
        architecture=architecture,
        vocab=keys.integer("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        width=keys.integer("intermediate_size"),
        context=context,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope=_rope(keys, head_dim=latent.rope if latent else head_dim, context=context),
        windows=_windows(keys, family, layers=layers),
        tied=keys.flag("tie_word_embeddings"),
        qkv_bias=keys.flag(family.qkv_bias),
        output_bias=keys.flag(family.output_bias),
        mlp_bias=keys.flag(family.mlp_bias),
        qk_norm=family.qk_norm,
        experts=read_experts(keys, family.experts, layers=layers) if family.experts else None,
        latent=latent,
    )


def check_sizes(*, layers: int, heads: int, kv_heads: int, head_dim: int) -> None:
    """ModelError unless query heads divide evenly among key-value heads, head_dim is even, and nothing is absurd."""
    for name, value, most in (("number of layers", layers, _MOST_LAYERS), ("head_dim", head_dim, _MOST_HEAD_DIM)):
        if value > most:
            raise ModelError(f"A {name} of {value} cannot be right.", "The model's description is damaged.")
    if heads % kv_heads:
        raise ModelError(f"{heads} query heads cannot share {kv_heads} key-value heads evenly.")
    if head_dim % 2:
        raise ModelError(f"head_dim = {head_dim} is odd; rotation needs pairs.")


def _family(config: Mapping[str, Any]) -> tuple[str, Family]:
    named = config.get("architectures") or []
    if not named and isinstance(config.get("model_type"), str):
        model_type = config["model_type"]
        spelled = model_type.replace("_", "") + "forcausallm"
        named = [name for name in FAMILIES if name.lower() == spelled] or [model_type]
    if not isinstance(named, Sequence) or isinstance(named, str) or not named:
        raise ModelError("config.json names no architecture.", f"Supported are: {', '.join(FAMILIES)}.")
    for name in named:
        if name in FAMILIES:
            return name, FAMILIES[name]
    raise ModelError(f"Architecture {named[0]!r} is not supported.", f"Supported are: {', '.join(FAMILIES)}.")


def _refuse_unsupported(keys: Keys) -> None:
    if keys.get("quantization_config"):
        method = keys.get("quantization_config")
        name = method.get("quant_method", "unnamed") if isinstance(method, Mapping) else method
        raise ModelError(
            f"quantization_config ({name}) is not supported in a Hugging Face directory.",
            "Use the unquantised checkpoint, or a GGUF of the model.",
        )
    if keys.get("hidden_act") not in (None, "silu", "swish"):
        raise ModelError(f"hidden_act = {keys.get('hidden_act')!r} is not supported.", "Supported is: silu.")
    unknown = sorted(set(keys.get("layer_types") or ()) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelError(
            f"layer_types has {unknown[0]!r}, which is not supported.",
            "Supported are: full_attention, sliding_attention.",
        )


def _rope(keys: Keys, *, head_dim: int, context: int) -> Rope:
    """From rope_parameters, or from rope_scaling and rope_theta as older configurations have them."""
    values = dict(keys.get("rope_parameters") or keys.get("rope_scaling") or {})
    nested = [name for name, value in values.items() if isinstance(value, Mapping)]
    if nested:
        raise ModelError(
            f"rope_parameters differ by layer type ({', '.join(nested)}), which is not supported.",
            "wager serves models with one rotation for all layers.",
        )
    theta = values.pop("rope_theta", None) or keys.number("rope_theta", 10000.0)
    if keys.get("original_max_position_embeddings") is not None:
        values["original_max_position_embeddings"] = keys.get("original_max_position_embeddings")
    values.setdefault("partial_rotary_factor", keys.get("partial_rotary_factor"))
    return read_rope(values, theta=float(theta), head_dim=head_dim, context=context)


def _windows(keys: Keys, family: Family, *, layers: int) -> tuple[int | None, ...]:
    types = keys.get("layer_types")
    if types and len(types) != layers:
        raise ModelError(f"layer_types has {len(types)} entries for {layers} layers.")
    sliding = [kind == "sliding_attention" for kind in types or ()]
    unheard = {"never": any(sliding), "always": bool(types) and not all(sliding), "switched": False, "flagged": False}[
        family.windows
    ]
    if unheard:
        raise ModelError(
            "layer_types mixes full and sliding attention, which this architecture does not have.",
            "The model's configuration names the wrong architecture.",
        )
    on = family.windows == "always" or (family.windows in ("switched", "flagged") and keys.flag("use_sliding_window"))
    if not on or keys.get("sliding_window") is None:
        return (None,) * layers
    window = keys.integer("sliding_window")
    if family.windows in ("always", "switched"):
        sliding = [True] * layers
    elif not types:
        first = int(keys.get("max_window_layers") or 0)
        sliding = [layer >= first for layer in range(layers)]
    return tuple(window if slides else None for slides in sliding)
