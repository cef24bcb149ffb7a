"""Reads attention and feed-forward of every layer from config.json of Hugging Face: one reader for each kind.

A reader takes the checked keys and the number of layers and returns one value per layer, first to last. ModelError
names a key that is missing, contradictory or not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from wager.arch.attention import Attention, DeltaNet, Gqa, Indexer, Mla
from wager.arch.compressed import Compressed
from wager.arch.config_keys import ConfigKeys, shown
from wager.arch.feed_forward import Dense, Experts
from wager.arch.sizes import MOST_WINDOW, check_grouped_query, check_head_dim, read_head_dim
from wager.errors import ModelError

FeedForward = Dense | Experts
AttentionReader = Callable[[ConfigKeys, int], Sequence[Attention]]
FeedForwardReader = Callable[[ConfigKeys, int], Sequence[FeedForward]]

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


# ---- attention ----------------------------------------------------------------------------------------------------


def _gqa(keys: ConfigKeys, *, window: int | None = None, gated: bool = False) -> Gqa:
    heads = keys.integer("num_attention_heads")
    head_dim = read_head_dim(keys, "head_dim", hidden="hidden_size", heads=heads)
    kv_heads = keys.integer("num_key_value_heads", default=heads)
    return check_grouped_query(keys, Gqa(heads, kv_heads, head_dim, window, gated))


def full(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """Llama: every layer attends to all positions."""
    if any(_sliding_types(keys, layers) or ()):
        raise _mixed()
    return [_gqa(keys)] * layers


def sliding(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
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


def sliding_between(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """Gemma 3, Cohere2, OLMo 3: a window in every layer but each sliding_window_pattern-th, unless layer_types is
    given."""
    every = keys.integer("sliding_window_pattern", "_sliding_window_pattern")
    pattern = [(layer + 1) % every != 0 for layer in range(layers)]
    narrow, everywhere = _gqa(keys, window=keys.integer("sliding_window", most=MOST_WINDOW)), _gqa(keys)
    return [narrow if sliding else everywhere for sliding in _sliding_types(keys, layers) or pattern]


def chunked(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """Llama 4: layers without RoPE (each fourth, or 0 in no_rope_layers) attend to all positions, the others within
    chunks, which are counted as full."""
    rotated = keys.integers("no_rope_layers") or [(layer + 1) % 4 for layer in range(layers)]
    if len(rotated) < layers:
        raise ModelError(f"no_rope_layers in {keys.where} must list each of the {layers} layers.")
    near, everywhere = _gqa(keys, window=keys.integer("attention_chunk_size")), _gqa(keys)
    return [near if uses_rope else everywhere for uses_rope in rotated[:layers]]


def alternating(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """gpt-oss, Gemma 2: every other layer has a window, unless layer_types is given."""
    types = keys.per_layer("layer_types", layers, known=(_FULL, _SLIDING)) or [_SLIDING, _FULL] * layers
    narrow, everywhere = _gqa(keys, window=keys.integer("sliding_window", most=MOST_WINDOW)), _gqa(keys)
    return [narrow if types[layer] == _SLIDING else everywhere for layer in range(layers)]


def _window(keys: ConfigKeys) -> int | None:
    return None if keys.get("sliding_window") is None else keys.integer("sliding_window", most=MOST_WINDOW)


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


def latent(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """DeepSeek-V2, V3 and Kimi-K2: multi-head latent attention over all positions."""
    if any(_sliding_types(keys, layers) or ()):
        raise _mixed()
    return [_mla(keys)] * layers


def indexed(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
    """DeepSeek-V3.2 and GLM-5: latent attention to the positions that an indexer picks. GLM-5 has an indexer in some
    layers (indexer_types, index_topk_pattern or index_topk_freq); the others use the picks of the last one."""
    kinds = keys.per_layer("indexer_types", layers)
    pattern = keys.get("index_topk_pattern")
    if kinds is None and isinstance(pattern, str | list):
        kinds = ConfigKeys({"index_topk_pattern": list(pattern)}, where=keys.where).per_layer(
            "index_topk_pattern", layers
        )
    if kinds is None:
        every, first = keys.integer("index_topk_freq", default=1), keys.count("index_skip_topk_offset", default=2)
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


_V4_KINDS = {"0": _SLIDING, "4": "compressed_sparse_attention", "128": "heavily_compressed_attention"}


def compressed(keys: ConfigKeys, layers: int) -> Sequence[Attention]:
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
        raise ModelError(f"The layer type {shown(unknown[0])} in {keys.where} is not known.", known)
    return [kinds[kind] for kind in named]


# ---- feed-forward -------------------------------------------------------------------------------------------------


def dense(keys: ConfigKeys, layers: int) -> Sequence[FeedForward]:
    """Every layer has one gated feed-forward."""
    return [Dense(keys.integer("intermediate_size"))] * layers


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
    step, without = keys.integer("decoder_sparse_step", default=1), set(keys.integers("mlp_only_layers") or ())
    return _mixture(keys, experts, [layer not in without and (layer + 1) % step == 0 for layer in range(layers)])


def experts_after_dense(keys: ConfigKeys, layers: int) -> Sequence[FeedForward]:
    """DeepSeek: experts after the first first_k_dense_replace layers, in every moe_layer_freq-th."""
    experts = _experts(
        keys.integer("n_routed_experts", "num_local_experts"),
        keys.integer("num_experts_per_tok"),
        shared=keys.count("n_shared_experts"),
        width=keys.integer("moe_intermediate_size"),
    )
    first, step = keys.count("first_k_dense_replace"), keys.integer("moe_layer_freq", default=1)
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
