"""The tensors of a decoder: their canonical names and shapes, and their names in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from wager.arch.config_keys import ConfigKeys
from wager.arch.layers import Dense, Experts, Gqa, Mla
from wager.arch.spec import DecoderDetails, Layer, ModelSpec

Shapes = Iterator[tuple[str, tuple[int, ...]]]

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
"""Canonical name (as in tensor_shapes, without places and suffix) -> name in a Hugging Face checkpoint. A name after =
is complete; the others get the suffix."""

_ARCHITECTURE_NAMES: Mapping[str, Mapping[str, str]] = {
    "MixtralForCausalLM": {
        "router": "model.layers.{}.block_sparse_moe.gate",
        "expert_gate": "model.layers.{}.block_sparse_moe.experts.{}.w1",
        "expert_up": "model.layers.{}.block_sparse_moe.experts.{}.w3",
        "expert_down": "model.layers.{}.block_sparse_moe.experts.{}.w2",
    },
}
"""Names that differ from NAMES, by architecture."""

_MOST_FURTHER = 100
_MODULES = (r"mtp\..*", r"model\.mtp_layers\..*")
"""Tensors of modules that predict further tokens; see head_mtp_spec.FORMATS."""

_IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"lm_head\.weight")
"""Tensors that a checkpoint may repeat: stored RoPE frequencies, and the head of a tied model."""

GGUF_NAMES: Mapping[str, str] = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attn_norm": "blk.{}.attn_norm",
    "mlp_norm": "blk.{}.ffn_norm",
    "q": "blk.{}.attn_q",
    "k": "blk.{}.attn_k",
    "v": "blk.{}.attn_v",
    "o": "blk.{}.attn_output",
    "q_norm": "blk.{}.attn_q_norm",
    "k_norm": "blk.{}.attn_k_norm",
    "gate": "blk.{}.ffn_gate",
    "up": "blk.{}.ffn_up",
    "down": "blk.{}.ffn_down",
}

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of llama3 scaling: the divisor of each pair's frequency."""


def source_name(names: Mapping[str, str], canonical: str) -> str:
    """The name in a checkpoint of a tensor with that canonical name."""
    *places, part, suffix = canonical.split(".")
    name = names[part].format(*places[1:])
    return name[1:] if name.startswith("=") else f"{name}.{suffix}"


def checkpoint_names(architecture: str) -> Mapping[str, str]:
    """NAMES, with the architecture's differences."""
    return {**NAMES, **_ARCHITECTURE_NAMES.get(architecture, {})}


def ignored_tensors(config: Mapping[str, Any], spec: ModelSpec) -> tuple[str, ...]:
    """Patterns of further tensors that a checkpoint may have: repeated ones, and layers that predict further tokens."""
    further = ConfigKeys(config).count("num_nextn_predict_layers", most=_MOST_FURTHER)
    layers = tuple(rf"model\.layers\.{spec.num_layers + i}\..*" for i in range(further))
    return (*(_IGNORED if spec.tied else _IGNORED[:1]), *_MODULES, *layers)


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model under its canonical name, with its shape; matrices are [outputs, inputs].

    Names are `part.kind` before and after the layers, `layers.L.part.kind` in them, and of expert E
    `layers.L.E.part.kind`.
    """
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (spec.vocab, spec.hidden)}
    for index, layer in enumerate(spec.ordered_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer(layer, spec.details, spec.hidden)}
    shapes["norm.weight"] = (spec.hidden,)
    if not spec.tied:
        shapes["head.weight"] = (spec.vocab, spec.hidden)
    return shapes


def _layer(layer: Layer, decoder: DecoderDetails, hidden: int) -> Shapes:
    yield from (("attn_norm.weight", (hidden,)), ("mlp_norm.weight", (hidden,)))
    attention, ffn = layer.attention, layer.ffn
    if isinstance(attention, Gqa):
        yield from _grouped_query(attention, decoder, hidden)
    elif isinstance(attention, Mla):
        yield from _latent(attention, hidden)
    if decoder.output_bias:
        yield "o.bias", (hidden,)
    if isinstance(ffn, Dense):
        yield from _gated("", ffn.width, hidden, biased=decoder.mlp_bias)
    else:
        yield from _experts(ffn, hidden)


def _grouped_query(attention: Gqa, decoder: DecoderDetails, hidden: int) -> Shapes:
    keys = attention.kv_heads * attention.head_dim
    if decoder.qk_norm:
        yield from (("q_norm.weight", (attention.head_dim,)), ("k_norm.weight", (attention.head_dim,)))
    for part, size in (("q", attention.query_width), ("k", keys), ("v", keys)):
        yield f"{part}.weight", (size, hidden)
        if decoder.qkv_bias:
            yield f"{part}.bias", (size,)
    yield "o.weight", (hidden, attention.output_width)


def _latent(attention: Mla, hidden: int) -> Shapes:
    if rank := attention.q_rank:
        yield from (("q_a.weight", (rank, hidden)), ("q_a_norm.weight", (rank,)))
        yield "q_b.weight", (attention.query_width, rank)
    else:
        yield "q.weight", (attention.query_width, hidden)
    yield "kv_a.weight", (attention.cache_width, hidden)
    yield "kv_a_norm.weight", (attention.kv_rank,)
    yield "kv_b.weight", (attention.heads * (attention.nope + attention.value), attention.kv_rank)
    yield "o.weight", (hidden, attention.output_width)


def _experts(experts: Experts, hidden: int) -> Shapes:
    yield "router.weight", (experts.count, hidden)
    if experts.gating.correction_bias:
        yield "correction.bias", (experts.count,)
    if experts.shared:
        yield from _gated("shared_", experts.shared_inner, hidden)
    for expert in range(experts.count):
        yield from ((f"{expert}.{name}", shape) for name, shape in _gated("expert_", experts.width, hidden))


def _gated(prefix: str, width: int, hidden: int, *, biased: bool = False) -> Shapes:
    for part, shape in {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}.items():
        yield f"{prefix}{part}.weight", shape
        if biased:
            yield f"{prefix}{part}.bias", shape[:1]
