"""Reads a ModelSpec from config.json of Hugging Face.

A missing key without a published default is an error that names it. For models that the engine is to run, every key
that changes the computation is read, and a value that the decoder does not support is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from wager.arch.config_keys import MOST_NORM_EPS, ConfigKeys, read_num_layers, short_repr
from wager.arch.families import EngineSupport, Family, GatingKeys, find_family, with_sinks
from wager.arch.formats import Precision, read_precision
from wager.arch.layers import Experts, FeedForward, Gating, Gqa, Mla
from wager.arch.rope import Rope, read_rope, read_scale, read_theta, rope_kind
from wager.arch.spec import DecoderDetails, ModelSpec, not_runnable, stacked, with_scales
from wager.errors import ModelError

_MOST_EXPERTS, MOST_EXPERTS_OF_ALL_LAYERS = 1024, 1 << 17


def read_config(
    config: Mapping[str, Any],
    *,
    name: str = "",
    precision: Precision | None = None,
    runnable: bool = False,
    where: str = "config.json",
) -> ModelSpec:
    """The model of a config.json (as a mapping), in its own number formats or in those of `precision`. Errors name the
    file `where`.

    With `runnable` the spec has the DecoderDetails that the engine needs. ModelError names a family that is not known,
    a key that is missing or damaged, and with `runnable` also an activation, a RoPE scaling, a quantisation or a router
    that the engine does not compute, or a family of which only the shape is known.
    """
    outer = ConfigKeys(config, where=where)
    text = {**config, **outer.section("text_config").values}
    family = find_family(text, runnable=runnable)
    name = name or outer.text("_name_or_path") or outer.text("model_type") or family.architecture
    engine = family.engine if runnable else None
    if runnable and engine is None:
        raise not_runnable(name)
    kinds = text.get("layers_block_type")
    counted = {"num_hidden_layers": len(kinds)} if isinstance(kinds, list) else {}
    keys = ConfigKeys({**counted, **family.defaults, **text}, where=where)
    if engine:
        _refuse_unsupported(keys, engine)
    layers = read_num_layers(keys)
    attention, ffn = family.attention(keys, layers), family.ffn(keys, layers)
    if engine and engine.gating:
        ffn = _with_gating(keys, engine, engine.gating, ffn)
    if engine:
        attention = with_sinks(attention, engine)
    shapes, order = stacked(attention, ffn)
    spec = ModelSpec(
        name=name,
        hidden=keys.integer("hidden_size"),
        vocab=keys.integer("vocab_size"),
        tied=keys.flag("tie_word_embeddings"),
        layers=shapes,
        precision=read_precision(keys.values, layers, cache=family.cache, given=precision),
        context=_context(keys),
        source="config.json",
        layer_embedding=_layer_embedding(keys, family),
        other_inputs=tuple(name for key, name in _OTHER_INPUTS.items() if config.get(key)),
    )
    if engine is None:
        return spec
    return replace(spec, decoder=_decoder(keys, family, engine, spec=spec, order=order))


_OTHER_INPUTS = {"vision_config": "images", "audio_config": "sounds"}


def _context(keys: ConfigKeys) -> int:
    """The positions of the model: as many as YaRN makes of the original ones, where it was written into a configuration
    that states these still, as Qwen's cards say."""
    stated, scaling = keys.integer("max_position_embeddings"), keys.section("rope_parameters", "rope_scaling")
    original = scaling.get("original_max_position_embeddings")
    if rope_kind(scaling) != "yarn" or original is None or scaling.get("factor") is None:
        return stated
    return max(stated, int(scaling.integer("original_max_position_embeddings") * read_scale(scaling, "factor")))


def _layer_embedding(keys: ConfigKeys, family: Family) -> int:
    name = family.engine.layer_embedding if family.engine else None
    width = keys.count(name) if name else 0
    if width:
        keys.refuse("vocab_size_per_layer_input", unless=(keys.integer("vocab_size"),))
    return width


# ---- details for the engine beyond the shape -----------------------------------------------------------------------


_ACTIVATIONS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "silu": ("hidden_act", ("silu", "swish")),
    "gelu": ("hidden_activation", ("gelu_pytorch_tanh",)),
    "clamped": ("hidden_act", ("silu", "swish")),
    "relu2": ("mlp_hidden_act", ("relu2",)),
}
"""The key that names an activation, and its names."""

_NORM_EPS = ("norm_eps", "layer_norm_epsilon", "rms_norm_eps")
"""Keys of what is added to the mean square of norms, the first that is present."""

_READ_METHODS = ("fp8", "fbgemm_fp8", "awq", "gptq", "compressed-tensors", "modelopt")
"""Quantisations that models/quantised_checkpoints.py reads."""


def _refuse_unsupported(keys: ConfigKeys, engine: EngineSupport) -> None:
    method = keys.get("quantization_config")
    name = method.get("quant_method", "unnamed") if isinstance(method, Mapping) else method
    read = name in _READ_METHODS or (name == "mxfp4" and engine.activation == "clamped")
    if method and not (isinstance(method, Mapping) and read):
        raise ModelError(
            f"quantization_config ({short_repr(name)}) is not supported in a Hugging Face directory.",
            f"Use the unquantised checkpoint, a GGUF of the model, or one of: {', '.join(_READ_METHODS)}.",
        )
    name, known = _ACTIVATIONS[engine.activation]
    keys.refuse(name, unless=known)
    keys.refuse("swiglu_alpha", unless=(1.702,))
    keys.refuse("swiglu_limit", unless=(7.0,))
    keys.refuse("clip_qkv", unless=())
    keys.refuse("use_bidirectional_attention", unless=(False, "vision"))  # of images alone
    _refuse_two_rotations(keys)


def _refuse_two_rotations(keys: ConfigKeys) -> None:
    """ModelError if rope_scaling, as it is written into configurations by hand, is not what rope_parameters has, as
    transformers 5 writes it: that takes rope_scaling then, and forgets a base that the other alone states."""
    old, new = keys.section("rope_scaling"), keys.section("rope_parameters")
    if not old.values or not new.values:
        return
    new = new.section("full_attention") if new.get("full_attention") is not None else new
    stated = [name for name in old.values if name not in ("type", "rope_type") and old.get(name) is not None]
    if rope_kind(old) != rope_kind(new) or any(old.get(name) != new.get(name) for name in stated):
        raise ModelError(
            f"rope_scaling and rope_parameters in {keys.where} differ: {short_repr(dict(old.values))} and "
            f"{short_repr(dict(new.values))}.",
            "Write what the model needs into rope_parameters, and leave rope_scaling out.",
        )


def _decoder(
    keys: ConfigKeys, family: Family, engine: EngineSupport, *, spec: ModelSpec, order: tuple[int, ...]
) -> DecoderDetails:
    attention = spec.attention
    if attention.rope_dim != attention.head_dim and isinstance(attention, Gqa) and not engine.partial_rope:
        raise ModelError(
            f"partial_rotary_factor in {keys.where} is not supported for this architecture: {attention.rope_dim} of "
            f"{attention.head_dim} dimensions of each head would be rotated."
        )
    rope, local_rope = _ropes(keys, spec)
    eps = next((name for name in _NORM_EPS if keys.get(name) is not None), "rms_norm_eps")
    details = DecoderDetails(
        architecture=family.architecture,
        layer_order=order,
        rope=rope,
        local_rope=local_rope,
        norm_eps=keys.number(eps, default=1e-6, most=MOST_NORM_EPS),
        qkv_bias=keys.flag(engine.qkv_bias),
        output_bias=keys.flag(engine.output_bias),
        mlp_bias=keys.flag(engine.mlp_bias),
        qk_norm=keys.flag(engine.qk_norm),
        attention_scale=_latent_scale(keys, attention) if isinstance(attention, Mla) else None,
        interleaved_rope=keys.flag(engine.interleaved_rope),
        norm_offset=engine.norm_offset,
        log_rates=spec.recurrent is not None,
        **engine.family_details(),
    )
    return with_scales(details, engine.scales(keys))


def _ropes(keys: ConfigKeys, spec: ModelSpec) -> tuple[Rope, Rope | None]:
    """The model's rotation, and that of its local layers, if it has some: from rope_parameters by layer type, or from
    rope_scaling, which local layers do without, rope_theta and rope_local_base_freq as older configurations have
    them."""
    rope_dim, context = spec.rope_dim("global"), spec.context
    scaling = keys.section("rope_parameters", "rope_scaling")
    scaling.refuse("llama_4_scaling_beta", unless=(0,))  # Ministral 3: queries grow with their position
    nested = [name for name, value in scaling.values.items() if isinstance(value, Mapping)]
    local = "local" in spec.rotations
    if nested and not local:
        raise ModelError(
            f"rope_parameters differ by layer type ({short_repr(', '.join(map(str, nested)))}), which is not "
            "supported for this architecture.",
            "Supported are models of it with one rotation for all layers.",
        )
    if nested:
        theta = read_theta(keys, "rope_local_base_freq", default=read_theta(keys, "rope_theta"))
        near = scaling.section("sliding_attention")
        near.values = {"rope_theta": theta, **near.values}
        full = _rope(keys, scaling.section("full_attention"), rope_dim, context)
        return full, _rope(keys, near, spec.rope_dim("local"), context)
    rope = _rope(keys, scaling, rope_dim, context)
    return rope, Rope(read_theta(keys, "rope_local_base_freq", default=rope.theta)) if local else None


def _rope(keys: ConfigKeys, scaling: ConfigKeys, rope_dim: int, context: int) -> Rope:
    theta = read_theta(scaling if scaling.get("rope_theta") is not None else keys, "rope_theta")
    original = "original_max_position_embeddings"
    if keys.get(original) is not None:
        scaling.values = {**scaling.values, original: keys.get(original)}
    return read_rope(scaling, theta=theta, head_dim=rope_dim, context=context)


def _latent_scale(keys: ConfigKeys, attention: Mla) -> float:
    """The factor of latent attention's scores; the weight of YaRN is a tenth of mscale_all_dim."""
    keys.refuse("num_key_value_heads", unless=(attention.heads,))
    keys.refuse("attention_bias", unless=(False,))
    scaling = keys.section("rope_parameters", "rope_scaling")
    if rope_kind(scaling) == "default" or not scaling.get("mscale_all_dim"):
        return attention.score_scale()
    return attention.score_scale(scaling.number("factor"), 0.1 * scaling.number("mscale_all_dim"))


def _with_gating(
    keys: ConfigKeys, engine: EngineSupport, known: GatingKeys, ffn: Sequence[FeedForward]
) -> list[FeedForward]:
    """The feed-forwards with the router's gating; ModelError names a value that the engine does not support."""
    keys.refuse("scoring_func", unless=(known.score,))
    keys.refuse("moe_layer_freq", unless=(1,))
    if known.normalised is False:
        keys.refuse("norm_topk_prob", unless=(False,))
    groups = top_groups = 1
    if known.single_group or known.grouped:
        keys.refuse("topk_method", unless=known.single_group + known.grouped)
        if keys.get("topk_method") not in known.single_group:
            groups, top_groups = keys.integer("n_group", default=1), keys.integer("topk_group", default=1)
    gating = Gating(
        score=known.score,
        correction_bias=keys.flag(known.correction_bias),
        normalised=keys.flag(known.normalised),
        scale=keys.number(known.scale, default=1.0) if known.scale else 1.0,
        groups=groups,
        top_groups=top_groups,
        expert_scales=known.expert_scales,
    )
    total = sum(layer.count for layer in ffn if isinstance(layer, Experts))
    if total > MOST_EXPERTS_OF_ALL_LAYERS:
        raise ModelError(f"{total} experts in all layers of {keys.where} cannot be right.", "The file is damaged.")
    found: list[FeedForward] = []
    for layer in ffn:
        if not isinstance(layer, Experts):
            found.append(layer)
            continue
        shared_gate = engine.shared_gate and layer.shared > 0
        detailed = replace(layer, biased=engine.expert_bias, shared_gate=shared_gate, apart=engine.apart)
        found.append(check_gating(detailed, gating, group_best=known.group_best, where=keys.where))
    return found


def check_gating(experts: Experts, gating: Gating, *, group_best: int, where: str) -> Experts:
    """The experts with their gating, or ModelError unless that many can be chosen so."""
    count, active, groups, top_groups = experts.count, experts.active, gating.groups, gating.top_groups
    if count > _MOST_EXPERTS:
        raise ModelError(f"{active} of {count} experts in {where} cannot be right.", "The file is damaged.")
    if count % groups or top_groups > groups or active > count // groups * top_groups:
        raise ModelError(f"{active} of {count} experts cannot be chosen from {top_groups} of {groups} groups.")
    return replace(experts, gating=replace(gating, group_best=min(group_best, count // groups)))
