"""The families of models: how the config.json and the GGUF metadata of each are read, and what the engine needs to run
it.

To add a family, add a row to FAMILIES, under its model_type of Hugging Face. A row names a reader for the attention and
one for the feed-forwards, which take the checked keys and the number of layers and return one value for each layer.
They read keys by their names in config.json; GGUF_KEYS has llama.cpp's. A family without `engine` can be planned for
(`wager plan`), but not run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from wager.arch.config_keys import (
    MOST_WINDOW,
    ConfigKeys,
    check_grouped_query,
    check_head_dim,
    read_head_dim,
    short_repr,
)
from wager.arch.layers import (
    Absent,
    Activation,
    Attention,
    Compressed,
    DeltaNet,
    Dense,
    Experts,
    FeedForward,
    Gqa,
    Indexer,
    Mamba2,
    Mla,
    Parallel,
    Rotation,
    ShortConv,
)
from wager.arch.spec import Multipliers
from wager.errors import ModelError

AttentionReader = Callable[[ConfigKeys, int], Sequence[Attention]]
FeedForwardReader = Callable[[ConfigKeys, int], Sequence[FeedForward]]
Scales = Mapping[str, float | Multipliers | None]
ScaleReader = Callable[[ConfigKeys], Scales]
"""Reads the multipliers and caps of spec.DecoderDetails, by its names of them."""

_FULL = "full_attention"
_SLIDING = "sliding_attention"
_LINEAR = "linear_attention"


# ---- attention ----------------------------------------------------------------------------------------------------


def _gqa(keys: ConfigKeys, *, window: int | None = None, gated: bool = False, rotation: Rotation = "global") -> Gqa:
    heads = keys.integer("num_attention_heads")
    head_dim = read_head_dim(keys, "head_dim", hidden="hidden_size", heads=heads)
    kv_heads = keys.integer("num_key_value_heads", default=heads)
    rotated = _rotated(keys, head_dim)
    return check_grouped_query(keys, Gqa(heads, kv_heads, head_dim, window, gated, rotation, rotated))


def _rotated(keys: ConfigKeys, head_dim: int) -> int | None:
    """The rotated dimensions of a head, from their number or their share; None: all."""
    if keys.get("rotary_dim") is not None:
        rotated = keys.integer("rotary_dim")
    else:
        scaling = keys.section("rope_parameters", "rope_scaling")
        stated = scaling if scaling.get("partial_rotary_factor") is not None else keys
        rotated = int(head_dim * stated.number("partial_rotary_factor", default=1, most=1))
    return None if rotated == head_dim else rotated


def full_attention(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """Llama: every layer attends to all positions."""
    if any(_sliding_types(keys, layers) or ()):
        raise _mixed()
    return [_gqa(keys)] * layers


def sliding_attention(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """Mistral, Mixtral: the window, if there is one, applies to every layer."""
    types = _sliding_types(keys, layers)
    if types and not all(types):
        raise _mixed()
    return [_gqa(keys, window=_window(keys))] * layers


def sliding_if_enabled(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """Qwen3-MoE: with use_sliding_window, the window applies to every layer."""
    _sliding_types(keys, layers)
    return [_gqa(keys, window=_window(keys) if keys.flag("use_sliding_window") else None)] * layers


def sliding_by_layer(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """Qwen2, Qwen3: with use_sliding_window, the window applies to the layers marked in layer_types; in
    configurations without it, from layer max_window_layers on."""
    types = _sliding_types(keys, layers)
    everywhere = _gqa(keys)
    if not keys.flag("use_sliding_window"):
        return [everywhere] * layers
    if not types:
        first = keys.count("max_window_layers")
        types = [layer >= first for layer in range(layers)]
    narrow = _gqa(keys, window=_window(keys))
    return [narrow if sliding else everywhere for sliding in types]


def interleaved_windows(keys: ConfigKeys, layers: int, *, rotation: Rotation = "local") -> Sequence[Attention]:
    """Gemma 3, OLMo 3, Cohere2: a window in every layer but each sliding_window_pattern-th, unless layer_types is
    given; `rotation` is that of the layers with a window."""
    every = keys.integer("sliding_window_pattern", "_sliding_window_pattern")
    pattern = [(layer + 1) % every != 0 for layer in range(layers)]
    narrow = _gqa(keys, window=keys.integer("sliding_window", most=MOST_WINDOW), rotation=rotation)
    everywhere = _gqa(keys)
    return [narrow if sliding else everywhere for sliding in _sliding_types(keys, layers) or pattern]


def two_shapes(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """Gemma 4: heads of layers without a window (each sixth, unless layer_types is given, and the last) have the size
    global_head_dim, and with attention_k_eq_v values are their keys. The last num_kv_shared_layers share those of the
    layers before."""
    pattern = [_SLIDING if (layer + 1) % 6 else _FULL for layer in range(layers)]
    types = [*(keys.per_layer("layer_types", layers, known=(_FULL, _SLIDING)) or pattern)[:-1], _FULL]
    near = _gqa(keys, window=keys.integer("sliding_window", most=MOST_WINDOW), rotation="local")
    as_keys, each = keys.flag("attention_k_eq_v"), keys.section("per_layer_config").section(str(types.index(_FULL)))
    size = each.get("head_dim") if keys.get("global_head_dim") is None else keys.integer("global_head_dim")
    count = each.get("num_key_value_heads")
    if count is None and as_keys:
        count = keys.get("num_global_key_value_heads")
    size, count = 512 if size is None else size, near.kv_heads if count is None else count
    values = {**keys.values, "head_dim": size, "num_key_value_heads": count}
    wide = ConfigKeys(values, where=keys.where, prefix=keys.prefix)
    kinds = {_SLIDING: near, _FULL: replace(_gqa(wide), keys_as_values=as_keys)}
    return _sharing(keys, [kinds[kind] for kind in types], keys.count("num_kv_shared_layers"))


def _sharing(keys: ConfigKeys, kinds: Sequence[Gqa], shared: int) -> Sequence[Gqa]:
    """The layers, of which the last `shared` have no keys and values of their own."""
    first = len(kinds) - shared
    if first < 1 or not {kind.window for kind in kinds} <= {kind.window for kind in kinds[:first]}:
        raise ModelError(
            f"{shared} of {len(kinds)} layers in {keys.where} share keys and values that no layer has.",
            "The configuration is damaged.",
        )
    own = [replace(kind, shared=True, keys_as_values=False) for kind in kinds[first:]]
    return [*kinds[:first], *own]


def gguf_two_shapes(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """The same as GGUF. That values are keys shows in the tensors: see `with_values_of`."""
    pattern = keys.get(_GGUF_PATTERN)
    if not isinstance(pattern, list) or len(pattern) != layers or set(map(type, pattern)) != {bool}:
        raise keys.wrong(_GGUF_PATTERN, f"true or false for each of the {layers} layers")
    counts = keys.get("num_key_value_heads")
    counts = keys.integers("num_key_value_heads") if isinstance(counts, list) else [counts] * layers
    if not counts or len(counts) != layers:
        raise keys.wrong("num_key_value_heads", "a number for each layer")
    kinds, window = [], keys.integer("sliding_window", most=MOST_WINDOW)
    for sliding, count in zip(pattern, counts, strict=True):
        size = keys.integer("attention.key_length_swa" if sliding else "head_dim")
        values = {**keys.values, GGUF_KEYS["head_dim"]: size, GGUF_KEYS["num_key_value_heads"]: count}
        values[GGUF_KEYS["rotary_dim"]] = keys.integer("rope.dimension_count_swa", default=size) if sliding else size
        own = ConfigKeys(values, where=keys.where, prefix=keys.prefix, renamed=GGUF_KEYS)
        kinds.append(_gqa(own, window=window, rotation="local") if sliding else _gqa(own))
    return _sharing(keys, kinds, keys.count("attention.shared_kv_layers"))


def with_values_of(attention: Sequence[Attention], tensors: Collection[str]) -> Sequence[Attention]:
    """The layers of a file: values are keys where it has no projection of values."""
    found = []
    for layer, kind in enumerate(attention):
        alone = isinstance(kind, Gqa) and not kind.shared and f"blk.{layer}.attn_v.weight" not in tensors
        found.append(replace(kind, keys_as_values=True) if alone and isinstance(kind, Gqa) else kind)
    return found


def unrotated_by_layer(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """SmolLM3: as Qwen's, without RoPE in the layers that have 0 in no_rope_layers, else in each
    no_rope_layer_interval-th."""
    every = keys.integer("no_rope_layer_interval", default=4)
    rotated = keys.integers("no_rope_layers") or [(layer + 1) % every for layer in range(layers)]
    if len(rotated) < layers:
        raise ModelError(f"no_rope_layers in {keys.where} must list each of the {layers} layers.")
    kinds = [kind for kind in sliding_by_layer(keys, layers) if isinstance(kind, Gqa)]
    return [kind if turns else replace(kind, rotation="none") for kind, turns in zip(kinds, rotated, strict=False)]


def mamba_by_layer(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """Granite 4: Mamba-2 in the layers that layer_types marks, without the key in none; with RoPE if
    position_embedding_type is rope."""
    everywhere = _gqa(keys, rotation="global" if keys.text("position_embedding_type") == "rope" else "none")
    known = ("attention", _FULL, "mamba", _LINEAR)
    types = keys.per_layer("layer_types", layers, known=known) or keys.per_layer(
        "layers_block_type", layers, known=known
    )
    if types is None or not {"mamba", _LINEAR} & set(types):
        return [everywhere] * layers
    state = _mamba(keys, inner=keys.integer("mamba_expand") * keys.integer("hidden_size"))
    return [state if kind in ("mamba", _LINEAR) else everywhere for kind in types]


def _mamba(keys: ConfigKeys, *, inner: int) -> Mamba2:
    keys.refuse("mamba_proj_bias", unless=(False,))
    keys.refuse("mamba_conv_bias", unless=(True,))
    heads = keys.integer("mamba_n_heads")
    sizes = (keys.integer(f"mamba_{name}") for name in ("n_groups", "d_state", "d_conv"))
    return _checked_mamba(keys, "mamba_n_heads", heads, inner, *sizes)


_NO_LIMITS = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
"""How configurations write that steps have no limits."""


def _checked_mamba(keys: ConfigKeys, name: str, heads: int, inner: int, groups: int, state: int, conv: int) -> Mamba2:
    """Mamba-2 of that many `heads`, stated by the key `name`, and `inner` values of a row."""
    if inner % heads or heads % groups:
        raise keys.wrong(name, f"a divisor of {inner} and a multiple of the {groups} groups")
    keys.refuse("time_step_limit", unless=_NO_LIMITS)  # time_step_min and its like are of training
    return Mamba2(heads, inner // heads, groups, state, conv)


def parallel_mamba(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """Falcon-H1: attention and Mamba-2 side by side in every layer."""
    for name in ("projectors_bias", "attention_bias"):
        keys.refuse(name, unless=(False,))
    inner = keys.count("mamba_d_ssm") or keys.integer("mamba_expand") * keys.integer("hidden_size")
    normed, gate_first = keys.flag("mamba_rms_norm"), not keys.flag("mamba_norm_before_gate")
    state = replace(_mamba(keys, inner=inner), normed=normed, gate_first=gate_first or not normed)
    return [Parallel(_gqa(keys), state)] * layers


def gguf_parallel_mamba(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """The same as GGUF."""
    return [Parallel(_gqa(keys), _gguf_mamba(keys))] * layers


_SUPPORTED_BLOCKS = {"mamba", "attention", "mlp", "moe"}
_BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe", _LINEAR: "mamba", _FULL: "attention"}


def _blocks(keys: ConfigKeys, layers: int) -> list[str]:
    """Nemotron-H: what each layer is, one of mamba, attention, mlp and moe."""
    pattern = keys.text("hybrid_override_pattern")
    types = list(pattern) if pattern else keys.per_layer("layers_block_type", layers)
    types = [_BLOCKS.get(kind, kind) for kind in types or keys.per_layer("layer_types", layers) or ()]
    unknown = sorted({*types} - _SUPPORTED_BLOCKS)
    if unknown or len(types) != layers:
        what = f"layers of kind {short_repr(unknown[0])}" if unknown else f"{len(types)} kinds for {layers} layers"
        raise ModelError(
            f"{keys.where} has {what}, which is not supported for this architecture.",
            f"Supported are: {', '.join(sorted(_SUPPORTED_BLOCKS))}.",
        )
    return types


def mixers_alone(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """Nemotron-H: Mamba-2, attention without RoPE, or neither."""
    keys.refuse("sliding_window", unless=())
    keys.refuse("use_bias", unless=(False,))
    keys.refuse("use_conv_bias", unless=(True,))
    keys.refuse("mamba_hidden_act", unless=("silu",))
    heads = keys.integer("mamba_num_heads")
    sizes = (keys.integer(name) for name in ("n_groups", "ssm_state_size", "conv_kernel"))
    state = _checked_mamba(keys, "mamba_num_heads", heads, heads * keys.integer("mamba_head_dim"), *sizes)
    head_dim = keys.integer("head_dim", "attention_head_dim", default=128)
    everywhere = _gqa(ConfigKeys({**keys.values, "head_dim": head_dim}, where=keys.where), rotation="none")
    kinds: Mapping[str, Attention] = {"mamba": state, "attention": everywhere}
    return [kinds.get(kind, Absent()) for kind in _blocks(keys, layers)]


def feed_forwards_alone(keys: ConfigKeys, layers: int) -> Sequence[FeedForward]:
    """Nemotron-H: a feed-forward, or experts, without gates in layers that have nothing else."""
    blocks, found = _blocks(keys, layers), list[FeedForward]()
    for kind in blocks:
        if kind == "mlp":
            found.append(Dense(keys.integer("intermediate_size"), gated=False))
        elif kind == "moe":
            count, active = keys.integer("n_routed_experts"), keys.integer("num_experts_per_tok")
            inner = {"width": keys.integer("moe_intermediate_size"), "shared": 1}
            experts = _experts(count, active, **inner, shared_width=keys.integer("moe_shared_expert_intermediate_size"))
            found.append(replace(experts, gated=False, latent=keys.count("moe_latent_size")))
        else:
            found.append(Absent())
    return found


def gguf_mixers_alone(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """The same as GGUF: attention where there are key-value heads, nothing where there is a feed-forward."""
    mixers = _where_heads_are(keys, layers, _gguf_mamba(keys), rotation="none")
    return [Absent() if width else kind for kind, width in zip(mixers, _widths(keys, layers), strict=True)]


def gguf_feed_forwards_alone(keys: ConfigKeys, layers: int) -> Sequence[FeedForward]:
    """Feed-forwards without a gate where the file states a width."""
    return [Dense(width, gated=False) if width else Absent() for width in _widths(keys, layers)]


def _widths(keys: ConfigKeys, layers: int) -> list[int]:
    """Of the feed-forward of each layer, 0 for none."""
    stated = keys.get("intermediate_size")
    widths = (
        keys.integers("intermediate_size") if isinstance(stated, list) else [keys.count("intermediate_size")] * layers
    )
    if not widths or len(widths) != layers or min(widths) < 0:
        raise keys.wrong("intermediate_size", "a width for each layer")
    return widths


def convolutions(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """LFM2: short convolutions, and attention in the layers of layer_types or full_attn_idxs."""
    keys.refuse("conv_bias", unless=(False,))
    conv = ShortConv(keys.integer("hidden_size"), keys.integer("conv_L_cache"))
    types = keys.per_layer("layer_types", layers, known=(_FULL, "conv"))
    if types is None:
        listed = keys.integers("full_attn_idxs")
        attends = set(range(layers) if listed is None else listed)
        types = [_FULL if layer in attends else "conv" for layer in range(layers)]
    everywhere = _gqa(keys)
    return [everywhere if kind == _FULL else conv for kind in types]


def gguf_granite(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """A GGUF of Granite: without RoPE if rope.scaling.finetuned is false."""
    rotated = keys.flag("rope.scaling.finetuned", default=True)
    return [_gqa(keys, rotation="global" if rotated else "none")] * layers


_GGUF_PATTERN = "attention.sliding_window_pattern"


def gguf_windows(keys: ConfigKeys, layers: int, *, rotation: Rotation = "global") -> Sequence[Attention]:
    """A GGUF whose sliding window, if it has one, holds in the layers that its pattern states: a flag for each layer,
    or the period of those without it."""
    window, pattern = _window(keys), keys.get(_GGUF_PATTERN)
    if window is None:
        return [_gqa(keys)] * layers
    narrow, everywhere = _gqa(keys, window=window, rotation=rotation), _gqa(keys)
    if isinstance(pattern, list) and len(pattern) == layers and set(map(type, pattern)) == {bool}:
        return [narrow if sliding else everywhere for sliding in pattern]
    if pattern is not None:
        every = keys.integer(_GGUF_PATTERN)
        return [narrow if (layer + 1) % every else everywhere for layer in range(layers)]
    raise ModelError(
        f"The GGUF file has a sliding window of {window} but does not state which layers it applies to.",
        "Use the model's Hugging Face directory.",
    )


def chunked_attention(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """Llama 4: layers without RoPE (each fourth, or 0 in no_rope_layers) attend to all positions, the others within
    chunks, which are counted as full."""
    rotated = keys.integers("no_rope_layers") or [(layer + 1) % 4 for layer in range(layers)]
    if len(rotated) < layers:
        raise ModelError(f"no_rope_layers in {keys.where} must list each of the {layers} layers.")
    near, everywhere = _gqa(keys, window=keys.integer("attention_chunk_size")), _gqa(keys)
    return [near if uses_rope else everywhere for uses_rope in rotated[:layers]]


def alternating_windows(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """gpt-oss, Gemma 2: every other layer has a window, unless layer_types is given."""
    types = keys.per_layer("layer_types", layers, known=(_FULL, _SLIDING)) or [_SLIDING, _FULL] * layers
    narrow = _gqa(keys, window=keys.integer("sliding_window", most=MOST_WINDOW))
    everywhere = _gqa(keys)
    return [narrow if types[layer] == _SLIDING else everywhere for layer in range(layers)]


def _window(keys: ConfigKeys) -> int | None:
    return None if keys.get("sliding_window") in (None, 0) else keys.integer("sliding_window", most=MOST_WINDOW)


def _sliding_types(keys: ConfigKeys, layers: int) -> list[bool] | None:
    """Which layers have a sliding window by layer_types, None without that key."""
    types = keys.per_layer("layer_types", layers, known=(_FULL, _SLIDING))
    if not types:
        return None
    count = len(keys.get("layer_types"))
    if count != layers:
        raise ModelError(f"layer_types in {keys.where} has {count} entries for {layers} layers.")
    return [kind == _SLIDING for kind in types]


def _mixed() -> ModelError:
    return ModelError(
        "layer_types mixes full and sliding attention, which this architecture does not have.",
        "The model's configuration names the wrong architecture.",
    )


def delta_net(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """Qwen3-Next and later: gated delta networks with full attention in every fourth layer."""
    every = keys.integer("full_attention_interval", default=4)
    pattern = [_FULL if (layer + 1) % every == 0 else _LINEAR for layer in range(layers)]
    types = keys.per_layer("layer_types", layers, known=(_FULL, _LINEAR)) or pattern
    state = DeltaNet(
        keys.integer("linear_num_key_heads"),
        keys.integer("linear_num_value_heads"),
        keys.integer("linear_key_head_dim"),
        keys.integer("linear_value_head_dim"),
        keys.integer("linear_conv_kernel_dim"),
    )
    everywhere = _gqa(keys, gated=keys.flag("attn_output_gate", default=True))
    return [state if kind == _LINEAR else everywhere for kind in types]


def gguf_delta_net(keys: ConfigKeys, layers: int, *, tiled: bool = True) -> Sequence[Attention]:
    """The same as GGUF, whose converter brings value heads of one key head far apart (`tiled`)."""
    every, values = keys.integer("full_attention_interval", default=4), keys.integer("ssm.time_step_rank")
    inner = keys.integer("ssm.inner_size")
    if inner % values:
        raise keys.wrong("ssm.inner_size", f"a multiple of the {values} value heads")
    state = DeltaNet(
        keys.integer("ssm.group_count"),
        values,
        keys.integer("ssm.state_size"),
        inner // values,
        keys.integer("ssm.conv_kernel"),
        tiled,
    )
    everywhere = _gqa(keys, gated=True)
    return [state if (layer + 1) % every else everywhere for layer in range(layers)]


def gguf_convolutions(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """LFM2 as GGUF: attention in the layers that have key-value heads."""
    conv = ShortConv(keys.integer("hidden_size"), keys.integer("shortconv.l_cache"))
    return _where_heads_are(keys, layers, conv, rotation="global")


def gguf_mamba(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """Granite 4 as GGUF: attention in the layers that have key-value heads, with RoPE as in `gguf_granite`."""
    rotated = keys.flag("rope.scaling.finetuned", default=True)
    return _where_heads_are(keys, layers, _gguf_mamba(keys), rotation="global" if rotated else "none")


def _gguf_mamba(keys: ConfigKeys) -> Mamba2:
    heads, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    sizes = (keys.integer(f"ssm.{name}") for name in ("group_count", "state_size", "conv_kernel"))
    return _checked_mamba(keys, "ssm.time_step_rank", heads, inner, *sizes)


def _where_heads_are(keys: ConfigKeys, layers: int, other: Attention, *, rotation: Rotation) -> Sequence[Attention]:
    """Attention in the layers that have key-value heads in a GGUF file, in the others `other`."""
    if not isinstance(keys.get("num_key_value_heads"), list):
        return [_gqa(keys, rotation=rotation)] * layers
    counts = keys.integers("num_key_value_heads") or []
    if len(counts) != layers or len({*counts} - {0}) != 1:
        raise keys.wrong("num_key_value_heads", "0 or one number for each layer")
    values = {**keys.values, GGUF_KEYS["num_key_value_heads"]: max(counts)}
    attends = _gqa(ConfigKeys(values, where=keys.where, prefix=keys.prefix, renamed=GGUF_KEYS), rotation=rotation)
    return [attends if count else other for count in counts]


def latent_attention(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """DeepSeek-V2, V3 and Kimi-K2: multi-head latent attention over all positions."""
    if any(_sliding_types(keys, layers) or ()):
        raise _mixed()
    return [_mla(keys)] * layers


def indexed_attention(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """DeepSeek-V3.2 and GLM-5: latent attention to the positions that an indexer picks. GLM-5 has an indexer in some
    layers (indexer_types, index_topk_pattern or index_topk_freq); the others use the picks of the last one."""
    kinds = keys.per_layer("indexer_types", layers)
    pattern = keys.get("index_topk_pattern")
    if kinds is None and isinstance(pattern, str | list):
        kinds = ConfigKeys({"index_topk_pattern": list(pattern)}, where=keys.where).per_layer(
            "index_topk_pattern", layers
        )
    if kinds is None:
        every = keys.integer("index_topk_freq", default=1)
        first = keys.count("index_skip_topk_offset", default=2)
        kinds = ["shared" if max(layer - first + 1, 0) % every else "full" for layer in range(layers)]
    own = Indexer(keys.integer("index_n_heads"), keys.integer("index_head_dim"), keys.integer("index_topk"))
    kind = _mla(keys)
    scored, picked = replace(kind, indexer=own), replace(kind, indexer=replace(own, heads=0))
    return [picked if name in ("shared", "S") else scored for name in kinds]


def _mla(keys: ConfigKeys) -> Mla:
    kind = Mla(
        heads=keys.integer("num_attention_heads"),
        q_rank=keys.count("q_lora_rank") or None,
        kv_rank=keys.integer("kv_lora_rank"),
        nope=keys.integer("qk_nope_head_dim"),
        rope=keys.integer("qk_rope_head_dim"),
        value=keys.integer("v_head_dim"),
    )
    check_head_dim(keys, "qk_rope_head_dim", kind.rope)
    check_head_dim(keys, "kv_lora_rank + qk_rope_head_dim", kind.head_dim)
    return kind


def gguf_latent(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """DeepSeek-V2 and V3 as GGUF. In files since llama.cpp multiplies latent attention in its absorbed form, key_length
    and value_length are those of the latent, and key_length_mla and value_length_mla those of a head."""
    suffix = "" if keys.get("attention.key_length_mla") is None else "_mla"
    rope, rank = keys.integer("rope.dimension_count"), keys.integer("attention.kv_lora_rank")
    key = keys.integer(f"attention.key_length{suffix}")
    if rope >= key:
        raise ModelError(
            f"{keys.prefix}rope.dimension_count = {rope} in {keys.where} leaves nothing of a key of {key}.",
            "The file is damaged.",
        )
    check_head_dim(keys, "rope.dimension_count", rope)
    check_head_dim(keys, "attention.kv_lora_rank + rope.dimension_count", rank + rope)
    value = keys.integer(f"attention.value_length{suffix}")
    q_rank = keys.count("attention.q_lora_rank") or None
    return [Mla(keys.integer("num_attention_heads"), q_rank, rank, key - rope, rope, value)] * layers


_V4_KINDS = {"0": _SLIDING, "4": "compressed_sparse_attention", "128": "heavily_compressed_attention"}


def compressed_attention(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """DeepSeek-V4: layer_types, or compress_ratios with 0, 4 or 128 a layer."""
    types = keys.per_layer("layer_types", layers) or keys.per_layer("compress_ratios", layers)
    if types is None:
        raise ModelError(
            f"{keys.where} lacks 'layer_types' (or 'compress_ratios').", "Give the complete configuration."
        )
    rates = keys.section("compress_rates")
    near = Compressed(
        heads=keys.integer("num_attention_heads"),
        width=keys.integer("head_dim"),
        rope=keys.integer("qk_rope_head_dim", default=64),
        q_rank=keys.integer("q_lora_rank"),
        groups=keys.integer("o_groups"),
        group_rank=keys.integer("o_lora_rank"),
        window=keys.integer("sliding_window", most=MOST_WINDOW),
    )
    indexer = Indexer(keys.integer("index_n_heads"), keys.integer("index_head_dim"), keys.integer("index_topk"))
    sparse, heavy = "compressed_sparse_attention", "heavily_compressed_attention"
    kinds = {
        _SLIDING: near,
        sparse: replace(near, ratio=rates.integer(sparse, default=4), indexer=indexer),
        heavy: replace(near, ratio=rates.integer(heavy, default=128)),
    }
    named = [_V4_KINDS.get(kind, kind) for kind in types]
    unknown = sorted(set(named) - set(kinds))
    if unknown:
        known = f"Known are: {', '.join(kinds)}."
        raise ModelError(f"The layer type {short_repr(unknown[0])} in {keys.where} is not known.", known)
    return [kinds[kind] for kind in named]


# ---- feed-forward -------------------------------------------------------------------------------------------------


def dense_ffn(keys: ConfigKeys, layers: int) -> Sequence[FeedForward]:
    """Every layer has one gated feed-forward."""
    return [Dense(keys.integer("intermediate_size"))] * layers


def dense_adjusted(keys: ConfigKeys, layers: int) -> Sequence[FeedForward]:
    """LFM2: two thirds of a stated width, times a factor, in whole multiples, unless it is taken as it is."""
    width = keys.integer("block_ff_dim", "intermediate_size")
    if keys.flag("block_auto_adjust_ff_dim", default=True):
        step, factor = (
            keys.integer("block_multiple_of", default=256),
            keys.number("block_ffn_dim_multiplier", default=1),
        )
        width = -(-int(factor * int(2 * width / 3)) // step) * step
    return [Dense(width)] * layers


def experts_if_any(keys: ConfigKeys, layers: int) -> Sequence[FeedForward]:
    """Granite 4: routed experts beside a shared one, which is the feed-forward of models without others."""
    shared = keys.integer("shared_intermediate_size", "intermediate_size")
    count = keys.count("num_local_experts")
    if not count:
        return [Dense(shared)] * layers
    active, width = keys.integer("num_experts_per_tok"), keys.integer("intermediate_size")
    return [_experts(count, active, shared=1, width=width, shared_width=shared)] * layers


def wide_where_shared(keys: ConfigKeys, layers: int) -> Sequence[FeedForward]:
    """Gemma 4: with enable_moe_block experts beside a dense feed-forward in every layer. Else with use_double_wide_mlp
    feed-forwards of layers without keys and values of their own are twice as wide."""
    width, doubled = keys.integer("intermediate_size"), keys.flag("use_double_wide_mlp")
    if keys.flag("enable_moe_block"):
        keys.refuse("use_double_wide_mlp", unless=(False,))
        count, active = keys.integer("num_experts"), keys.integer("top_k_experts")
        inner = keys.integer("moe_intermediate_size")
        return [_experts(count, active, shared=1, width=inner, shared_width=width)] * layers
    shared = keys.count("num_kv_shared_layers") if doubled else 0
    return [Dense(width if layer < layers - shared else 2 * width) for layer in range(layers)]


def gguf_widths(keys: ConfigKeys, layers: int) -> Sequence[FeedForward]:
    """A feed-forward of the width that a file states for each layer."""
    return [Dense(width) for width in _widths(keys, layers)]


def experts_everywhere(keys: ConfigKeys, layers: int) -> Sequence[FeedForward]:
    """Mixtral and gpt-oss: experts in every layer, of width intermediate_size."""
    count = keys.integer("num_local_experts", "num_experts")
    active = keys.integer("num_experts_per_tok", "experts_per_token")
    return [_experts(count, active, shared=0, width=keys.integer("intermediate_size"))] * layers


def experts_stepped(keys: ConfigKeys, layers: int) -> Sequence[FeedForward]:
    """Qwen: experts in every decoder_sparse_step-th layer except mlp_only_layers; perhaps one shared expert."""
    shared = keys.count("shared_expert_intermediate_size")
    experts = _experts(
        keys.integer("num_experts", "num_local_experts"),
        keys.integer("num_experts_per_tok"),
        shared=1 if shared else 0,
        width=keys.integer("moe_intermediate_size"),
        shared_width=shared or None,
    )
    step = keys.integer("decoder_sparse_step", default=1)
    without = set(keys.integers("mlp_only_layers") or ())
    return _mixture(keys, experts, [layer not in without and (layer + 1) % step == 0 for layer in range(layers)])


def experts_after_dense(keys: ConfigKeys, layers: int) -> Sequence[FeedForward]:
    """DeepSeek: experts after the first first_k_dense_replace layers, in every moe_layer_freq-th."""
    experts = _experts(
        keys.integer("n_routed_experts", "num_local_experts"),
        keys.integer("num_experts_per_tok"),
        shared=keys.count("n_shared_experts"),
        width=keys.integer("moe_intermediate_size"),
    )
    first = keys.count("first_k_dense_replace")
    step = keys.integer("moe_layer_freq", default=1)
    return _mixture(keys, experts, [layer >= first and layer % step == 0 for layer in range(layers)])


def experts_interleaved(keys: ConfigKeys, layers: int) -> Sequence[FeedForward]:
    """Llama 4: a shared and routed experts in the moe_layers, or in every interleave_moe_layer_step-th layer."""
    step = keys.integer("interleave_moe_layer_step", default=1)
    listed = keys.integers("moe_layers")
    sparse = set(range(step - 1, layers, step)) if listed is None else set(listed)
    count, active = keys.integer("num_local_experts"), keys.integer("num_experts_per_tok")
    experts = _experts(count, active, shared=1, width=keys.integer("intermediate_size"))
    wide = Dense(keys.integer("intermediate_size_mlp"))
    return [experts if layer in sparse else wide for layer in range(layers)]


def _mixture(keys: ConfigKeys, experts: Experts, sparse: Sequence[bool]) -> Sequence[FeedForward]:
    """Experts in the layers for which `sparse` is True, a dense feed-forward in the others."""
    if all(sparse):
        return [experts] * len(sparse)
    wide = Dense(keys.integer("intermediate_size"))
    return [experts if is_sparse else wide for is_sparse in sparse]


def _experts(count: int, active: int, *, shared: int, width: int, shared_width: int | None = None) -> Experts:
    if active > count:
        raise ModelError(f"config.json has {active} experts active out of {count}.", "The configuration is damaged.")
    return Experts(count, active, shared, width, shared_width)


# ---- multipliers and caps -----------------------------------------------------------------------------------------


def no_scales(keys: ConfigKeys) -> Scales:
    del keys
    return {}


def gemma_scales(keys: ConfigKeys) -> Scales:
    """Gemma: embeddings times the root of the hidden size, scores by query_pre_attn_scalar, and soft caps."""
    heads = keys.integer("num_attention_heads")
    head_dim = read_head_dim(keys, "head_dim", hidden="hidden_size", heads=heads)
    caps = {"attention_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping"}
    return {
        "embedding_scale": math.sqrt(keys.integer("hidden_size")),
        "attention_scale": keys.number("query_pre_attn_scalar", default=head_dim) ** -0.5,
        **{cap: None if keys.get(name) in (None, 0) else keys.number(name) for cap, name in caps.items()},
    }


def gemma4_scales(keys: ConfigKeys) -> Scales:
    """Gemma 4: scores as they are, since queries are normed."""
    cap = keys.get("final_logit_softcapping")
    return {
        "embedding_scale": math.sqrt(keys.integer("hidden_size")),
        "attention_scale": 1.0,
        "logit_cap": None if cap in (None, 0) else keys.number("final_logit_softcapping"),
    }


def gguf_gemma_scales(keys: ConfigKeys, *, widest: int) -> Scales:
    """As llama.cpp: the size of that number of layers (27B) scales its scores by hidden size / heads, not head_dim."""
    scalar = keys.integer("hidden_size") / keys.integer("num_attention_heads")
    wide = keys.integer("num_hidden_layers") == widest
    return {**gemma_scales(keys), **({"attention_scale": scalar**-0.5} if wide else {})}


def granite_scales(keys: ConfigKeys) -> Scales:
    """Granite: multipliers, and a divisor of the logits."""
    return {
        "embedding_scale": keys.number("embedding_multiplier", default=1.0),
        "residual_scale": keys.number("residual_multiplier", default=1.0),
        "attention_scale": keys.number("attention_multiplier") if keys.get("attention_multiplier") else None,
        "logit_scale": 1 / keys.number("logits_scaling", default=1.0),
    }


def falcon_scales(keys: ConfigKeys) -> Scales:
    """Falcon-H1: multipliers of every product. Those of attention's inputs and keys are of its scores and outputs."""

    def one(name: str) -> float:
        return keys.number(f"{name}_multiplier", default=1.0)

    def several(name: str, count: int) -> list[float]:
        found = keys.numbers(f"{name}_multipliers") or [1.0] * count
        if len(found) != count:
            raise keys.wrong(f"{name}_multipliers", f"a list of {count} numbers")
        return found

    heads = keys.integer("num_attention_heads")
    head_dim = read_head_dim(keys, "head_dim", hidden="hidden_size", heads=heads)
    gate, down = several("mlp", 2)
    state_gate, values, state_keys, queries, step = (one("ssm_in") * each for each in several("ssm", 5))
    return {
        "embedding_scale": one("embedding"),
        "logit_scale": one("lm_head"),
        "attention_scale": one("attention_in") ** 2 * one("key") * head_dim**-0.5,
        "multipliers": Multipliers(
            attention_out=one("attention_in") * one("attention_out"),
            state_out=one("ssm_out"),
            down=down,
            gate=gate,
            state_gate=state_gate,
            values=values,
            keys=state_keys,
            queries=queries,
            step=step,
        ),
    }


# ---- the table ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GatingKeys:
    """The keys of a configuration that describe the router: see layers.Gating.

    `normalised` as the biases of EngineSupport. `single_group` are the values of topk_method that mean one group of all
    experts, `grouped` those that mean n_group groups. `score` and `normalised` False are checked against the
    configuration's own keys.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool = False
    normalised: bool | str = True
    scale: str | None = None
    single_group: tuple[str, ...] = ()
    grouped: tuple[str, ...] = ()
    group_best: int = 1
    expert_scales: bool = False


@dataclass(frozen=True, slots=True)
class GgufLayout:
    """How llama.cpp's converter writes the family, under the architecture that is its model_type, or `architecture`;
    models with experts, if that is another, under `mixture`.

    `attention`, `ffn` and `scales` replace the family's own readers; `defaults` are values of keys, by their names in
    config.json, that files leave out. `interleaved_rope`: rotated pairs of the query and key projections lie side by
    side, as the checkpoint has them or because the converter reorders rows. `read` are the keys among
    gguf_config.REFUSED that the family reads. `experts`: files with experts are read; `normalised`: the weights of a
    row's experts are, where the file does not say. `truncated`: YaRN's ramp begins and ends at whole dimensions.
    """

    architecture: str | None = None
    mixture: str | None = None
    attention: AttentionReader = gguf_windows
    ffn: FeedForwardReader | None = None
    scales: ScaleReader | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    interleaved_rope: bool = False
    read: tuple[str, ...] = ()
    experts: bool = False
    normalised: bool = False
    truncated: bool = True


@dataclass(frozen=True, slots=True)
class EngineSupport:
    """Details of a family that the engine runs which its configuration does not state; see spec.DecoderDetails.

    A bias is always present (True), never (False), or present if the configuration's key of that name is set; likewise
    `interleaved_rope`. `partial_rope`: it may rotate a part of each head. `names` are tensors' that differ from
    weights.NAMES; parts of one name are rows of one tensor, in the order q, k, v and gate, up. `root` is what published
    checkpoints write for the `model` that names begin with. `sinks`, `shared_gate`, `apart` and `expert_bias` are of
    layers.Gqa and layers.Experts (there `biased`). `layer_embedding` is the key of ModelSpec.layer_embedding. `gguf` is
    None for a family that is not read from GGUF files.
    """

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    interleaved_rope: bool | str = False
    partial_rope: bool = False
    whole_qk_norm: bool = False
    activation: Activation = "silu"
    pre_norms: bool = True
    post_norms: bool = False
    norm_offset: float = 0.0
    scales: ScaleReader = no_scales
    names: Mapping[str, str] = field(default_factory=dict)
    root: str = "model"
    gating: GatingKeys | None = None
    gguf: GgufLayout | None = None
    sinks: bool = False
    expert_bias: bool = False
    shared_gate: bool = False
    value_norm: bool = False
    layer_scales: bool = False
    apart: bool = False
    layer_embedding: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """How a family's config.json is read. `defaults` are the values of keys that it may leave out; `cache` is the
    number format of its keys and values where its own code fixes one; `wrapper` the architecture of models with other
    inputs whose text part it is, if the engine runs that."""

    architecture: str
    attention: AttentionReader
    ffn: FeedForwardReader
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
    scales=gemma_scales,
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
    scales=gemma4_scales,
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
        attention=gguf_two_shapes,
        ffn=gguf_widths,
        defaults={"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0},
        read=("final_logit_softcapping",),
        experts=True,
        normalised=True,
    ),
)
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_FUSED_INTO = {"gate": "model.layers.{}.mlp.gate_up_proj", "up": "model.layers.{}.mlp.gate_up_proj"}
_GRANITE_GGUF = GgufLayout(
    attention=gguf_granite,
    interleaved_rope=True,
    read=("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
)
_GRANITE_ENGINE = EngineSupport(
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
    scales=granite_scales,
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
        full_attention,
        dense_ffn,
        {"max_position_embeddings": 2048},
        EngineSupport(
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            mlp_bias="mlp_bias",
            gguf=GgufLayout(attention=sliding_attention, interleaved_rope=True, experts=True, normalised=True),
        ),
    ),
    "mistral": Family(
        "MistralForCausalLM", sliding_attention, dense_ffn, {**_MISTRAL, "sliding_window": 4096}, EngineSupport()
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", sliding_by_layer, dense_ffn, _QWEN, EngineSupport(qkv_bias=True, gguf=GgufLayout())
    ),
    "mimo": Family("MiMoForCausalLM", sliding_by_layer, dense_ffn, _QWEN, EngineSupport(qkv_bias=True)),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        sliding_by_layer,
        dense_ffn,
        {**_QWEN, "head_dim": 128},
        EngineSupport(qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True, gguf=GgufLayout()),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        sliding_attention,
        experts_everywhere,
        {
            **_MISTRAL,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
        EngineSupport(
            names={
                "router": "model.layers.{}.block_sparse_moe.gate",
                "expert_gate": "model.layers.{}.block_sparse_moe.experts.{}.w1",
                "expert_up": "model.layers.{}.block_sparse_moe.experts.{}.w3",
                "expert_down": "model.layers.{}.block_sparse_moe.experts.{}.w2",
            },
            gating=GatingKeys(),
        ),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        alternating_windows,
        dense_ffn,
        {**_GEMMA, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        replace(
            _GEMMA_ENGINE,
            gguf=GgufLayout(
                scales=partial(gguf_gemma_scales, widest=46),
                defaults={
                    _GGUF_PATTERN: 2,
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
        interleaved_windows,
        dense_ffn,
        {**_GEMMA3, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0},
        replace(
            _GEMMA_ENGINE,
            qk_norm=True,
            gguf=GgufLayout(
                attention=partial(gguf_windows, rotation="local"),
                scales=partial(gguf_gemma_scales, widest=62),
                defaults={_GGUF_PATTERN: 6, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0},
                read=_CAPS,
            ),
        ),
    ),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        two_shapes,
        wide_where_shared,
        {**_GEMMA4, "sliding_window": 512, "hidden_size_per_layer_input": 256},
        _GEMMA4_ENGINE,
        wrapper="Gemma4ForConditionalGeneration",
    ),
    "gemma4_unified": Family(
        "Gemma4UnifiedForCausalLM",
        two_shapes,
        wide_where_shared,
        {**_GEMMA4, "sliding_window": 1024, "max_position_embeddings": 262144},
        replace(_GEMMA4_ENGINE, gguf=None),
        wrapper="Gemma4UnifiedForConditionalGeneration",
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        sliding_attention,
        dense_ffn,
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        EngineSupport(
            partial_rope=True,
            names={**dict.fromkeys(("q", "k", "v"), "model.layers.{}.self_attn.qkv_proj"), **_FUSED_INTO},
            gguf=GgufLayout(attention=sliding_attention),
        ),
    ),
    "glm": Family(
        "GlmForCausalLM",
        full_attention,
        dense_ffn,
        {**_GLM, "head_dim": 128},
        replace(
            _GLM_ENGINE,
            gguf=GgufLayout(architecture="chatglm", interleaved_rope=True),
        ),
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        full_attention,
        dense_ffn,
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
    "glm4_moe": Family("Glm4MoeForCausalLM", full_attention, experts_after_dense, _GLM),
    "glm_moe_dsa": Family("GlmMoeDsaForCausalLM", indexed_attention, experts_after_dense),
    "llama4": Family("Llama4ForCausalLM", chunked_attention, experts_interleaved, {"attention_chunk_size": 8192}),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        full_attention,
        dense_ffn,
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        replace(
            _OLMO_ENGINE,
            gguf=GgufLayout(attention=partial(gguf_windows, rotation="local"), defaults={_GGUF_PATTERN: 4}),
        ),
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        interleaved_windows,
        dense_ffn,
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
        full_attention,
        experts_everywhere,
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
        full_attention,
        dense_ffn,
        {"max_position_embeddings": 2048, "attention_multiplier": 1.0},
        _GRANITE_ENGINE,
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        mamba_by_layer,
        experts_if_any,
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
                _GRANITE_GGUF, architecture="granitehybrid", attention=gguf_mamba, experts=True, normalised=True
            ),
        ),
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        full_attention,
        experts_everywhere,
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
        partial(interleaved_windows, rotation="global"),
        dense_ffn,
        {"tie_word_embeddings": True, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        unrotated_by_layer,
        dense_ffn,
        {"max_position_embeddings": 32768, "tie_word_embeddings": True, "rope_theta": 2000000.0},
        EngineSupport(
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            mlp_bias="mlp_bias",
            gguf=GgufLayout(attention=unrotated_by_layer, interleaved_rope=True),
        ),
    ),
    "minimax_m2": Family("MiniMaxM2ForCausalLM", full_attention, experts_everywhere),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        sliding_by_layer,
        experts_stepped,
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
        sliding_if_enabled,
        experts_stepped,
        {"max_position_embeddings": 32768, "sliding_window": 4096},
        EngineSupport(
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm=True,
            gating=GatingKeys(normalised="norm_topk_prob"),
            gguf=GgufLayout(architecture="qwen3moe", experts=True, normalised=True),
        ),
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        delta_net,
        experts_stepped,
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
                attention=partial(gguf_delta_net, tiled=False),
                experts=True,
                normalised=True,
            ),
        ),
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForCausalLM",
        delta_net,
        experts_stepped,
        _HYBRID,
        replace(
            _HYBRID_ENGINE,
            names={**_SHARED_EXPERT, **_HYBRID_ENGINE.names},
            gating=GatingKeys(),
            shared_gate=True,
            gguf=GgufLayout(architecture="qwen35moe", attention=gguf_delta_net, experts=True, normalised=True),
        ),
        wrapper="Qwen3_5MoeForConditionalGeneration",
    ),
    "qwen3_5": Family(
        "Qwen3_5ForCausalLM",
        delta_net,
        dense_ffn,
        _HYBRID,
        replace(_HYBRID_ENGINE, gguf=GgufLayout(architecture="qwen35", attention=gguf_delta_net)),
        wrapper="Qwen3_5ForConditionalGeneration",
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        convolutions,
        dense_adjusted,
        {
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "conv_L_cache": 3,
            "tie_word_embeddings": True,
        },
        EngineSupport(
            qk_norm=True,
            names=_LFM2_NAMES,
            gguf=GgufLayout(attention=gguf_convolutions, defaults={"block_auto_adjust_ff_dim": False}),
        ),
    ),
    "falcon_h1": Family(
        "FalconH1ForCausalLM",
        parallel_mamba,
        dense_ffn,
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
            scales=falcon_scales,
            names={
                **_MAMBA_NAMES,
                **{part: f"model.layers.{{}}.feed_forward.{part}_proj" for part in ("gate", "up", "down")},
                "norm": "model.final_layernorm",
                "mlp_norm": "model.layers.{}.pre_ff_layernorm",
            },
            gguf=GgufLayout(architecture="falcon-h1", attention=gguf_parallel_mamba, scales=no_scales),
        ),
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        mixers_alone,
        feed_forwards_alone,
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
                mixture="nemotron_h_moe",
                attention=gguf_mixers_alone,
                ffn=gguf_feed_forwards_alone,
                experts=True,
                normalised=True,
            ),
        ),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        alternating_windows,
        experts_everywhere,
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
                attention=alternating_windows,
                experts=True,
                normalised=True,
                truncated=False,
            ),
        ),
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        latent_attention,
        experts_after_dense,
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
                attention=gguf_latent,
                interleaved_rope=True,
                read=("rope.scaling.yarn_log_multiplier",),
                experts=True,
            ),
        ),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        latent_attention,
        experts_after_dense,
        {"max_position_embeddings": 4096, "rope_interleave": True, "norm_topk_prob": True},
        EngineSupport(
            interleaved_rope="rope_interleave",
            gating=_CORRECTED_SIGMOID,
        ),
    ),
    "deepseek_v32": Family("DeepseekV32ForCausalLM", indexed_attention, experts_after_dense),
    "kimi_k2": Family("DeepseekV3ForCausalLM", latent_attention, experts_after_dense),
    "deepseek_v4": Family("DeepseekV4ForCausalLM", compressed_attention, experts_after_dense, cache="fp8"),
}
"""By model_type. If two rows have the same architecture, a lookup by architecture returns the first."""


GGUF_KEYS: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rotary_dim": "rope.dimension_count",
    "sliding_window": "attention.sliding_window",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
"""Keys of config.json -> llama.cpp's, without the architecture before them."""


def find_gguf(architecture: str) -> tuple[Family, EngineSupport, GgufLayout]:
    """The family whose GGUF files have that architecture; ModelError if there is none."""
    known = {
        family.engine.gguf.architecture or name: (family, family.engine, family.engine.gguf)
        for name, family in FAMILIES.items()
        if family.engine and family.engine.gguf
    }
    known |= {layout.mixture: (family, engine, layout) for family, engine, layout in known.values() if layout.mixture}
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
