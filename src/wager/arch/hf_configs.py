"""From a published config.json to a model's physics. A key that is missing is named, never guessed.

Knows more families than the engine can run: for a bill, shapes are enough. Knows no files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from wager.arch.attention import Attention, Compressed, DeltaNet, Gqa, Indexer, Mla
from wager.arch.formats import Precision
from wager.arch.shape import Dense, Experts, Layer, Model
from wager.errors import ModelError

_MOST = 1 << 40
"""No size of a model is larger; beyond it a configuration is damaged."""


class Keys:
    """A configuration whose sizes are checked as they are read; null counts as absent."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is there: a whole number above 0."""
        value = next((self.values[name] for name in names if self.values.get(name) is not None), default)
        if value is None:
            raise ModelError(
                f"config.json lacks {names[0]!r}, which the bill of this model needs.",
                "Give the model's complete configuration.",
            )
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MOST:
            raise ModelError(f"{names[0]} = {value!r} in config.json must be a whole number above 0.")
        return value

    def count(self, name: str, default: int = 0) -> int:
        """A whole number of zero or more."""
        value = self.values.get(name)
        return default if value is None else 0 if value == 0 and not isinstance(value, bool) else self.size(name)

    def has(self, name: str) -> bool:
        return bool(self.values.get(name))

    def names(self, name: str, layers: int) -> Sequence[str] | None:
        """One word a layer, or None if the key is absent. Entries beyond the layers (of draft modules) are left out."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < layers:
            raise ModelError(f"{name} in config.json must list each of the {layers} layers.")
        return [str(each) for each in value[:layers]]


def from_config(config: Mapping[str, Any], *, name: str = "", precision: Precision | None = None) -> Model:
    """The physics of a Hugging Face configuration (config.json as a mapping), in its own number formats or in those of
    `precision`.

    ModelError names a family that is not known, a key that is missing or a size that is none.
    """
    nested = config.get("text_config")
    text = {**config, **nested} if isinstance(nested, Mapping) else config
    family = str(text.get("model_type", "")).removesuffix("_text")
    if family not in FAMILIES:
        named = family or "none"
        raise ModelError(f"The model_type of config.json is {named}, whose shape is not known.",
                         f"Known are: {', '.join(FAMILIES)}.")  # fmt: skip
    keys = Keys(text)
    layers = keys.size("num_hidden_layers")
    if layers > 10_000:
        raise ModelError(f"num_hidden_layers = {layers} cannot be right.", "The configuration is damaged.")
    attention, ffn = FAMILIES[family]
    stack = Counter(zip(attention(keys, layers), ffn(keys, layers), strict=True))
    return Model(
        name=name or str(config.get("_name_or_path") or family),
        hidden=keys.size("hidden_size"),
        vocab=keys.size("vocab_size"),
        tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        layers=tuple(Layer(kind, feed, count) for (kind, feed), count in stack.items()),
        precision=precision or _precision(text, family),
        context=keys.size("max_position_embeddings"),
        source="config.json",
    )


def _precision(config: Mapping[str, Any], family: str) -> Precision:
    """What the configuration says about its numbers: a quantisation, else 16 bits."""
    stored = config.get("quantization_config")
    if family == "deepseek_v4":
        return Precision.of("fp8", "fp4", cache="fp8")
    if not isinstance(stored, Mapping):
        wide = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").endswith("float32")
        return Precision.of("fp32" if wide else "bf16")
    method = str(stored.get("quant_method", "unnamed"))
    known = {"fp8": "fp8", "mxfp4": "mxfp4"}.get(method) or {"4": "int4", "8": "int8"}.get(_bits(stored))
    if known is None:
        raise ModelError(
            f"The quantisation {method!r} of config.json is not known.",
            "Say how its weights are stored with --precision.",
        )
    spared = [str(each) for key in ("ignore", "modules_to_not_convert") for each in stored.get(key) or ()]
    if any("self_attn" in each for each in spared):  # the routed experts alone are narrow
        return Precision.of("bf16", known, shared="bf16")
    return Precision.of(known)


def _bits(stored: Mapping[str, Any]) -> str:
    """Bits of a quantised weight, where the usual methods say them."""
    found: Any = stored
    for name in ("config_groups", "group_0", "weights"):
        found = found.get(name, found) if isinstance(found, Mapping) else found
    values = found if isinstance(found, Mapping) else {}
    return str(values.get("num_bits", stored.get("bits")))


# ---- attention ----------------------------------------------------------------------------------------------------


def _gqa(keys: Keys, *, window: int | None = None, gated: bool = False) -> Gqa:
    heads = keys.size("num_attention_heads")
    kv_heads = keys.size("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ModelError(f"{heads} query heads cannot share {kv_heads} key-value heads evenly.")
    return Gqa(heads, kv_heads, keys.size("head_dim", default=keys.size("hidden_size") // heads), window, gated)


def _full(keys: Keys, layers: int) -> list[Attention]:
    return [_gqa(keys)] * layers


def _sliding(keys: Keys, layers: int) -> list[Attention]:
    """Windows as layer_types says; without it in all layers, or in none where use_sliding_window is off."""
    types, wide = keys.names("layer_types", layers), keys.values.get("sliding_window")
    if wide is None or keys.values.get("use_sliding_window") is False:
        return _full(keys, layers)
    narrow = _gqa(keys, window=keys.size("sliding_window"))
    return [narrow if kind == "sliding_attention" else _gqa(keys) for kind in types or ["sliding_attention"] * layers]


def _alternating(keys: Keys, layers: int) -> list[Attention]:
    """gpt-oss: every other layer has a window, unless layer_types says otherwise."""
    types = keys.names("layer_types", layers) or ["sliding_attention", "full_attention"] * layers
    narrow = _gqa(keys, window=keys.size("sliding_window"))
    return [narrow if types[layer] == "sliding_attention" else _gqa(keys) for layer in range(layers)]


def _linear(keys: Keys, layers: int) -> list[Attention]:
    """Qwen3-Next and later: gated delta networks with full attention in every fourth layer."""
    every = keys.size("full_attention_interval", default=4)
    pattern = ["full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(layers)]
    types = keys.names("layer_types", layers) or pattern
    state = DeltaNet(
        keys.size("linear_num_key_heads"), keys.size("linear_num_value_heads"), keys.size("linear_key_head_dim"),
        keys.size("linear_value_head_dim"), keys.size("linear_conv_kernel_dim"),
    )  # fmt: skip
    full = _gqa(keys, gated=keys.values.get("attn_output_gate", True) is not False)
    return [state if kind == "linear_attention" else full for kind in types]


def _latent(keys: Keys, layers: int) -> list[Attention]:
    rank = keys.values.get("q_lora_rank")
    return [
        Mla(
            keys.size("num_attention_heads"), None if rank is None else keys.size("q_lora_rank"),
            keys.size("kv_lora_rank"), keys.size("qk_nope_head_dim"), keys.size("qk_rope_head_dim"),
            keys.size("v_head_dim"),
        )
    ] * layers  # fmt: skip


_V4_KINDS = {"0": "sliding_attention", "4": "compressed_sparse_attention", "128": "heavily_compressed_attention"}


def _compressed(keys: Keys, layers: int) -> list[Attention]:
    """DeepSeek-V4: layer_types, or compress_ratios with 0, 4 or 128 a layer."""
    types = keys.names("layer_types", layers) or keys.names("compress_ratios", layers)
    if types is None:
        raise ModelError("config.json lacks 'layer_types' (or 'compress_ratios'), which the bill of this model needs.")
    rates = Keys(keys.values.get("compress_rates") or {})
    near = Compressed(
        heads=keys.size("num_attention_heads"), width=keys.size("head_dim"),
        rope=keys.size("qk_rope_head_dim", default=64), q_rank=keys.size("q_lora_rank"), groups=keys.size("o_groups"),
        group_rank=keys.size("o_lora_rank"), window=keys.size("sliding_window"),
    )  # fmt: skip
    indexer = Indexer(keys.size("index_n_heads"), keys.size("index_head_dim"), keys.size("index_topk"))
    sparse, heavy = "compressed_sparse_attention", "heavily_compressed_attention"
    kinds = {
        "sliding_attention": near,
        sparse: replace(near, ratio=rates.size(sparse, default=4), indexer=indexer),
        heavy: replace(near, ratio=rates.size(heavy, default=128)),
    }
    named = [_V4_KINDS.get(kind, kind) for kind in types]
    unknown = sorted(set(named) - set(kinds))
    if unknown:
        known = f"Known are: {', '.join(kinds)}."
        raise ModelError(f"The layer type {unknown[0]!r} in config.json is not known.", known)
    return [kinds[kind] for kind in named]


# ---- feed-forward -------------------------------------------------------------------------------------------------

Feed = list[Dense | Experts]


def _dense(keys: Keys, layers: int) -> Feed:
    return [Dense(keys.size("intermediate_size"))] * layers


def _all_experts(keys: Keys, layers: int) -> Feed:
    """Mixtral and gpt-oss: experts everywhere, as wide as intermediate_size says."""
    count, active = keys.size("num_local_experts", "num_experts"), keys.size("num_experts_per_tok", "experts_per_token")
    return [_experts(count, active, shared=0, width=keys.size("intermediate_size"))] * layers


def _qwen(keys: Keys, layers: int) -> Feed:
    """Experts in every decoder_sparse_step-th layer except mlp_only_layers; perhaps one shared expert."""
    shared = keys.count("shared_expert_intermediate_size")
    moe = _experts(
        keys.size("num_experts", "num_local_experts"), keys.size("num_experts_per_tok"), shared=1 if shared else 0,
        width=keys.size("moe_intermediate_size"), shared_width=shared or None,
    )  # fmt: skip
    step, dense = keys.size("decoder_sparse_step", default=1), set(keys.values.get("mlp_only_layers") or ())
    sparse = [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
    return [moe if each else Dense(keys.size("intermediate_size")) for each in sparse]


def _deepseek(keys: Keys, layers: int) -> Feed:
    """Experts beyond the first first_k_dense_replace layers, in every moe_layer_freq-th."""
    moe = _experts(
        keys.size("n_routed_experts", "num_local_experts"), keys.size("num_experts_per_tok"),
        shared=keys.count("n_shared_experts"), width=keys.size("moe_intermediate_size"),
    )  # fmt: skip
    first, step = keys.count("first_k_dense_replace"), keys.size("moe_layer_freq", default=1)
    sparse = [layer >= first and layer % step == 0 for layer in range(layers)]
    return [moe if each else Dense(keys.size("intermediate_size")) for each in sparse]


def _experts(count: int, active: int, *, shared: int, width: int, shared_width: int | None = None) -> Experts:
    if active > count:
        raise ModelError(f"config.json has {active} experts active out of {count}.", "The configuration is damaged.")
    return Experts(count, active, shared, width, shared_width)


FAMILIES: Mapping[str, tuple[Callable[[Keys, int], list[Attention]], Callable[[Keys, int], Feed]]] = {
    "llama": (_full, _dense),
    "mistral": (_sliding, _dense),
    "qwen2": (_sliding, _dense),
    "qwen3": (_sliding, _dense),
    "mixtral": (_sliding, _all_experts),
    "qwen2_moe": (_sliding, _qwen),
    "qwen3_moe": (_sliding, _qwen),
    "qwen3_next": (_linear, _qwen),
    "qwen3_5_moe": (_linear, _qwen),
    "qwen3_5": (_linear, _dense),
    "gpt_oss": (_alternating, _all_experts),
    "deepseek_v2": (_latent, _deepseek),
    "deepseek_v3": (_latent, _deepseek),
    "kimi_k2": (_latent, _deepseek),
    "deepseek_v4": (_compressed, _deepseek),
}
"""model_type -> how its attention and its feed-forward are read, layer by layer."""
