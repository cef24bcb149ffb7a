"""Readers of the attention, the feed-forwards and the multipliers of every family of models, which families.py names.

A reader takes the checked keys and the number of layers, and returns one value for each layer. It reads keys by their
names in config.json; GGUF_KEYS has llama.cpp's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from wager.arch.config_keys import (
    GGUF_KEYS,
    MOST_WINDOW,
    ConfigKeys,
    check_grouped_query,
    check_head_dim,
    read_head_dim,
    short_repr,
)
from wager.arch.layers import (
    Absent,
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
    head_dim = read_head_dim(keys, heads=heads)
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
    pattern = keys.get(GGUF_PATTERN)
    if not isinstance(pattern, list) or len(pattern) != layers or set(map(type, pattern)) != {bool}:
        raise keys.wrong(GGUF_PATTERN, f"true or false for each of the {layers} layers")
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


_NO_LIMIT = 1e30
"""Seconds from which on the limit of a step is none; an infinite one cannot be written in JSON."""


def _refuse_step_limits(keys: ConfigKeys) -> None:
    """An error if steps have limits; configurations write in several ways that they have none."""
    limits = keys.get("time_step_limit")
    most = limits[1] if isinstance(limits, list) and len(limits) == 2 and limits[0] == 0 else 0
    if most != {"__float__": "Infinity"} and not (isinstance(most, float) and most >= _NO_LIMIT):
        keys.refuse("time_step_limit", unless=([0.0, math.inf],))  # time_step_min and its like are of training


def _checked_mamba(keys: ConfigKeys, name: str, heads: int, inner: int, groups: int, state: int, conv: int) -> Mamba2:
    """Mamba-2 of that many `heads`, stated by the key `name`, and `inner` values of a row."""
    if inner % heads or heads % groups:
        raise keys.wrong(name, f"a divisor of {inner} and a multiple of the {groups} groups")
    _refuse_step_limits(keys)
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


GGUF_PATTERN = "attention.sliding_window_pattern"


def gguf_windows(keys: ConfigKeys, layers: int, *, rotation: Rotation = "global") -> Sequence[Attention]:
    """A GGUF whose sliding window, if it has one, holds in the layers that its pattern states: a flag for each layer,
    or the period of those without it."""
    window, pattern = _window(keys), keys.get(GGUF_PATTERN)
    if window is None:
        return [_gqa(keys)] * layers
    narrow, everywhere = _gqa(keys, window=window, rotation=rotation), _gqa(keys)
    if isinstance(pattern, list) and len(pattern) == layers and set(map(type, pattern)) == {bool}:
        return [narrow if sliding else everywhere for sliding in pattern]
    if pattern is not None:
        every = keys.integer(GGUF_PATTERN)
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
    """DeepSeek: experts after the first first_k_dense_replace layers, in every moe_layer_freq-th, unless
    mlp_layer_types is given."""
    experts = _experts(
        keys.integer("n_routed_experts", "num_local_experts"),
        keys.integer("num_experts_per_tok"),
        shared=keys.count("n_shared_experts"),
        width=keys.integer("moe_intermediate_size"),
    )
    types = keys.per_layer("mlp_layer_types", layers, known=("dense", "sparse", "moe", "hash_moe"))
    if types is not None:
        return _mixture(keys, experts, [kind != "dense" for kind in types])
    first = keys.count("first_k_dense_replace")
    step = keys.integer("moe_layer_freq", default=1)
    return _mixture(keys, experts, [layer >= first and layer % step == 0 for layer in range(layers)])


def experts_after_num_dense(keys: ConfigKeys, layers: int) -> Sequence[FeedForward]:
    """LFM2: experts after the first num_dense_layers."""
    first, width = keys.count("num_dense_layers"), keys.integer("moe_intermediate_size")
    experts = _experts(keys.integer("num_experts"), keys.integer("num_experts_per_tok"), shared=0, width=width)
    return _mixture(keys, experts, [layer >= first for layer in range(layers)])


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
    """Of families that multiply nothing."""
    del keys
    return {}


def gemma_scales(keys: ConfigKeys) -> Scales:
    """Gemma: embeddings times the root of the hidden size, scores by query_pre_attn_scalar, and soft caps."""
    heads = keys.integer("num_attention_heads")
    head_dim = read_head_dim(keys, heads=heads)
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
    head_dim = read_head_dim(keys, heads=heads)
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
