"""Reads the metadata of a GGUF file, whose keys are llama.cpp's: a ModelSpec from the keys of its architecture, checks
of the keys that all architectures share, and number formats from the types of the tensors."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from wager.arch.config_keys import GGUF_KEYS, MOST_NORM_EPS, ConfigKeys, read_num_layers, short_repr
from wager.arch.families import GgufLayout, find_gguf, with_sinks, without_norm
from wager.arch.formats import FORMATS, Format, Precision
from wager.arch.gguf_experts import SPLIT_LATENT, latent_scores, read_feed_forwards
from wager.arch.layers import Gqa, Mla
from wager.arch.readers import with_values_of
from wager.arch.rope import Rope, read_rope, read_scale, read_theta
from wager.arch.spec import DecoderDetails, ModelSpec, stacked, with_scales
from wager.errors import ModelError, TokenizerError

REFUSED = (
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.temperature_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "use_parallel_residual",
    "rope.scaling.yarn_log_multiplier",
)
"""Keys that change the computation: they must be absent or zero in a family that does not read them."""

HEADS: Mapping[str, str] = {"eagle3": "eagle3", "dflash": "dflash", "gemma4-assistant": "mtp"}
"""Architectures of files that are the head of a drafter -> the drafter that runs it."""

_RENAMED = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


@dataclass(frozen=True, slots=True)
class TensorSize:
    """How a tensor is stored: ggml's name of its type, elements, bytes."""

    kind: str
    elements: int
    bytes: int


def read_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    *,
    name: str = "",
    precision: Precision | None = None,
    where: str = "the GGUF file",
    layers_of: str | None = None,
) -> ModelSpec:
    """The model of a GGUF file from its metadata and the names and shapes of its tensors (for biases and a tied head).

    `precision` are the number formats to count in (None: bf16). `layers_of`: the architecture whose layers a file has
    that is a drafter's head. ModelError names the file as `where`, and what is not supported, missing or damaged.
    Factors stored as a tensor are not in the spec yet.
    """
    every = ConfigKeys(metadata, where=where)
    architecture = every.text("general.architecture") or "none"
    if layers_of is None and architecture in HEADS:
        raise ModelError(
            f"{where} is the head of a drafter (general.architecture = {architecture!r}), not a model.",
            f"Give it beside the model that it was made for: --drafter {HEADS[architecture]}:PATH.",
        )
    family, engine, layout = find_gguf(layers_of or architecture)
    keys = _keys(metadata, architecture, layout, where)
    for refused in REFUSED:
        if keys.get(refused) and refused not in layout.read:
            raise ModelError(
                f"The GGUF key {refused} = {short_repr(keys.get(refused))} is not supported.",
                "The engine's decoder does not support this computation.",
            )
    layers = read_num_layers(keys) - read_further_layers(metadata, where)
    if layers < 1:
        raise keys.wrong("nextn_predict_layers", "fewer than all layers")
    attentions = with_sinks(layout.attention(keys, layers), engine)
    if not any(name.endswith(".ssm_norm.weight") for name in tensors):
        attentions = [without_norm(kind) for kind in attentions]
    if engine.value_norm:
        attentions = with_values_of(attentions, tensors)
    mixture = bool(keys.count("expert_count"))
    reader = layout.ffn or family.ffn
    ffn = read_feed_forwards(keys, engine, layout, layers, tensors) if mixture else reader(keys, layers)
    shapes, order = stacked(attentions, ffn)
    context = keys.integer("max_position_embeddings")
    spec = ModelSpec(
        name=name or architecture,
        hidden=keys.integer("hidden_size"),
        vocab=keys.integer("vocab_size", default=len(every.texts("tokenizer.ggml.tokens") or ()) or None),
        tied="output.weight" not in tensors,
        layers=shapes,
        precision=precision or Precision.of("bf16"),
        context=context,
        source="the model's own files",
        layer_embedding=keys.count(engine.layer_embedding) if engine.layer_embedding else 0,
    )
    everywhere = [kind for kind in spec.attentions if isinstance(kind, Gqa) and kind.window is None]
    attention = (*everywhere, spec.attention)[0]
    rope, scale = _rope(keys, rope_dim=spec.rope_dim("global"), context=context, truncated=layout.truncated), None
    if isinstance(attention, Mla):
        rope, scale = latent_scores(keys, attention, rope)
    else:
        _check_head_sizes(keys, attention, partial=engine.partial_rope)
    local_rope = None
    if "local" in spec.rotations:
        local_rope = Rope(read_theta(keys, "rope_local_base_freq", default=rope.theta))
    names = gguf_names(tensors)
    biased = {part: f"{names[part].format(0)}.bias" in tensors for part in ("q", "o", "gate")}
    details = DecoderDetails(
        architecture=architecture,
        layer_order=order,
        rope=rope,
        local_rope=local_rope,
        norm_eps=keys.number("rms_norm_eps", most=MOST_NORM_EPS),
        qkv_bias=biased["q"],
        output_bias=biased["o"],
        mlp_bias=biased["gate"],
        qk_norm=engine.qk_norm if isinstance(engine.qk_norm, bool) else "blk.0.attn_q_norm.weight" in tensors,
        attention_scale=scale,
        interleaved_rope=layout.interleaved_rope,
        split_latent=SPLIT_LATENT in tensors,
        **engine.family_details(),
    )
    details = replace(details, layer_scales=details.layer_scales and "blk.0.layer_output_scale.weight" in tensors)
    return replace(spec, decoder=with_scales(details, (layout.scales or engine.scales)(keys)))


GGUF_NAMES: Mapping[str, str] = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attn_norm": "blk.{}.attn_norm",
    "attn_post_norm": "blk.{}.post_attention_norm",
    "mlp_norm": "blk.{}.ffn_norm",
    "mlp_post_norm": "blk.{}.post_ffw_norm",
    "q": "blk.{}.attn_q",
    "k": "blk.{}.attn_k",
    "v": "blk.{}.attn_v",
    "o": "blk.{}.attn_output",
    "q_norm": "blk.{}.attn_q_norm",
    "k_norm": "blk.{}.attn_k_norm",
    "gate": "blk.{}.ffn_gate",
    "up": "blk.{}.ffn_up",
    "down": "blk.{}.ffn_down",
    "sinks": "blk.{}.attn_sinks",
    "router": "blk.{}.ffn_gate_inp",
    "correction": "blk.{}.exp_probs_b",
    "shared_gate": "blk.{}.ffn_gate_shexp",
    "shared_up": "blk.{}.ffn_up_shexp",
    "shared_down": "blk.{}.ffn_down_shexp",
    "shared_router": "blk.{}.ffn_gate_inp_shexp",
    "expert_gate": "blk.{}.ffn_gate_exps[{}]",
    "expert_up": "blk.{}.ffn_up_exps[{}]",
    "expert_down": "blk.{}.ffn_down_exps[{}]",
    "q_a": "blk.{}.attn_q_a",
    "q_a_norm": "blk.{}.attn_q_a_norm",
    "q_b": "blk.{}.attn_q_b",
    "kv_a": "blk.{}.attn_kv_a_mqa",
    "kv_a_norm": "blk.{}.attn_kv_a_norm",
    "kv_b": "blk.{}.attn_kv_b",
    "k_b": "blk.{}.attn_k_b",
    "v_b": "blk.{}.attn_v_b",
    "z": "blk.{}.attn_gate",
    "step": "blk.{}.ssm_beta",
    "decay": "blk.{}.ssm_alpha",
    "conv": "blk.{}.ssm_conv1d",
    "rates": "=blk.{}.ssm_a",
    "dt": "=blk.{}.ssm_dt.bias",
    "skip": "=blk.{}.ssm_d",
    "state_norm": "blk.{}.ssm_norm",
    "state_out": "blk.{}.ssm_out",
    "layer_embed": "per_layer_token_embd",
    "layer_project": "per_layer_model_proj",
    "layer_norm": "per_layer_proj_norm",
    "into_embed": "blk.{}.inp_gate",
    "out_of_embed": "blk.{}.proj",
    "embed_post_norm": "blk.{}.post_norm",
    "scale": "blk.{}.layer_output_scale",
    "router_norm": "=blk.{}.ffn_gate_inp.scale",
    "expert_scales": "=blk.{}.ffn_down_exps.scale",
    "latent_in": "blk.{}.ffn_latent_down",
    "latent_out": "blk.{}.ffn_latent_up",
    "expert_norm": "blk.{}.pre_ffw_norm_2",
    "expert_post_norm": "blk.{}.post_ffw_norm_2",
    "shared_post_norm": "blk.{}.post_ffw_norm_1",
}
"""Canonical name (as in weights.tensor_shapes, without places and suffix) -> llama.cpp's."""


def gguf_names(tensors: Collection[str]) -> Mapping[str, str]:
    """GGUF_NAMES, with those of matrices that the file stores as rows of one: queries, keys and values, or the gate and
    up projections; and with the names of hybrids. Where no other norm stands behind attention, the one that is named so
    is the feed-forward's."""
    names = dict(GGUF_NAMES)
    norms = {name.split(".")[-2] for name in tensors if name.endswith("norm.weight")}
    if "post_attention_norm" in norms and not norms & {"ffn_norm", "post_ffw_norm"}:
        names["mlp_norm"] = names.pop("attn_post_norm")
    if any(name.endswith(".ssm_in.weight") for name in tensors):
        names |= dict.fromkeys(("z", "mixed", "step"), "blk.{}.ssm_in")
        if "blk.0.ffn_norm" in tensors:  # of Falcon-H1, whose converter drops the suffix
            names["mlp_norm"] = "=blk.{}.ffn_norm"
        elif not any(name.endswith(".ffn_norm.weight") for name in tensors):
            names["mlp_norm"] = names["attn_norm"]  # layers have attention or a feed-forward
    elif any(name.endswith(".ssm_a") for name in tensors):
        names |= {"mixed": "blk.{}.attn_qkv", "q_gate": names["q"]}
        if "blk.0.ssm_ba.weight" in tensors:
            names |= dict.fromkeys(("step", "decay"), "blk.{}.ssm_ba")
    elif any(name.endswith("shortconv.conv.weight") for name in tensors):
        parts = {"z": "in_proj", "conv": "conv", "state_out": "out_proj"}
        names |= {part: f"blk.{{}}.shortconv.{name}" for part, name in parts.items()} | {"norm": "token_embd_norm"}
    elif "blk.0.attn_qkv.weight" in tensors:
        names |= dict.fromkeys(("q", "k", "v"), "blk.{}.attn_qkv")
    if "blk.0.ffn_up.weight" in tensors and "blk.0.ffn_gate.weight" not in tensors:
        names["gate"] = names["up"]
    if "blk.0.pre_ffw_norm_2.weight" in tensors:  # the dense feed-forward of Gemma 4 beside its experts
        names |= {f"shared_{part}": names[part] for part in ("gate", "up", "down")}
    if "blk.0.ffn_gate_up_exps.weight" in tensors:
        names |= dict.fromkeys(("expert_gate", "expert_up"), "blk.{}.ffn_gate_up_exps[{}]")
    return names


def read_further_layers(metadata: Mapping[str, Any], where: str) -> int:
    """How many of the file's layers predict further tokens; they are the last."""
    keys = ConfigKeys(metadata, where=where)
    return keys.count(f"{keys.text('general.architecture')}.nextn_predict_layers", most=_MOST_FURTHER)


_MOST_FURTHER = 100


def read_original_context(metadata: Mapping[str, Any], where: str) -> int | None:
    """Positions of the original training that the scaling of RoPE extends."""
    keys = ConfigKeys(metadata, where=where)
    architecture = keys.text("general.architecture")
    return keys.count(f"{architecture}.rope.scaling.original_context_length") or None


_PARTS = (
    ("embedding", r"(per_layer_)?token_embd\.weight"),
    ("head", r"output\.weight"),
    (
        "projections",
        r"blk\.\d+\.(attn_(q|k|v|qkv|gate|output|kv_a_mqa|[a-z]+_[ab])|ssm_(in|out|ba|beta|alpha)|shortconv\.(in|out)_proj|per_layer_model_proj)\.weight",
    ),
    ("router", r"blk\.\d+\.ffn_gate_inp\.weight"),
    ("experts", r"blk\.\d+\.ffn_\w+_exps\.weight"),
    ("shared", r"blk\.\d+\.ffn_\w+_shexp\.weight"),
    ("weights", r"blk\.\d+\.(ffn_(gate|up|down)|inp_gate|proj)\.weight"),
)
"""The parts of a model by the names of their tensors."""


def gguf_precision(tensors: Mapping[str, TensorSize]) -> Precision:
    """The number formats of a GGUF file, part by part. Files mix types within a part, which then has their mean bytes
    per element and the arithmetic of most of its elements. llama.cpp keeps recurrent states in float32."""
    parts: dict[str, list[TensorSize]] = {}
    for name, size in tensors.items():
        part = next((part for part, pattern in _PARTS if re.fullmatch(pattern, name)), None)
        if part is not None:
            parts.setdefault(part, []).append(size)
    formats = {part: _mean_format(sizes) for part, sizes in parts.items()}
    weights = formats.get("weights") or formats.get("experts") or FORMATS["bf16"]
    precision = Precision.of(
        weights,
        formats.get("experts"),
        shared=formats.get("shared"),
        projections=formats.get("projections"),
        router=formats.get("router"),
        head=formats.get("head") or formats.get("embedding"),
        embedding=formats.get("embedding"),
    )
    return replace(precision, state=4.0)


def _mean_format(sizes: list[TensorSize]) -> Format:
    elements: Counter[str] = Counter()
    for size in sizes:
        elements[size.kind.lower()] += size.elements
    name = "+".join(kind for kind, _ in elements.most_common())
    most = elements.most_common(1)[0][0]
    wide = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}
    if len(elements) == 1 and most in wide:
        return FORMATS[wide[most]]
    # quantised weights are multiplied with activations in 8-bit integers
    return Format(name, sum(size.bytes for size in sizes) / elements.total(), wide.get(most, "int8"))


def _keys(metadata: Mapping[str, Any], architecture: str, layout: GgufLayout, where: str) -> ConfigKeys:
    """The metadata of the architecture. A list with the same number for every layer is replaced by that number."""
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    constant = {
        key: value[0]
        for key, value in values.items()
        if isinstance(value, list) and len(set(value)) == 1 and not isinstance(value[0], bool)
    }
    return ConfigKeys({**layout.defaults, **values, **constant}, where=where, prefix=prefix, renamed=GGUF_KEYS)


def _check_head_sizes(keys: ConfigKeys, attention: Gqa, *, partial: bool) -> None:
    head_dim = attention.head_dim
    for name in ("attention.value_length", *(() if partial else ("rope.dimension_count",))):
        if keys.integer(name, default=head_dim) != head_dim:
            raise ModelError(
                f"{keys.prefix}{name} = {short_repr(keys.get(name))} in {keys.where} is not the head size {head_dim}, "
                "which is not supported.",
                "Supported are models whose keys, values and rotation have the size of a head.",
            )


def _rope(keys: ConfigKeys, *, rope_dim: int, context: int, truncated: bool) -> Rope:
    kind = keys.text("rope.scaling.type") or "none"
    # LongRoPE's factors are tensors, see models/weights.py
    values: dict[str, Any] = {"rope_type": "default" if kind in ("none", "longrope") else kind, "truncate": truncated}
    for gguf_name, name in _RENAMED.items():
        key = f"rope.scaling.{gguf_name}"
        values[name] = None if keys.get(key) in (None, 0) else keys.number(key)
    if kind == "none" and keys.get("rope.scale_linear") not in (None, 0):
        values |= {"rope_type": "linear", "factor": keys.number("rope.scale_linear")}
    if keys.get("rope.scaling.yarn_ext_factor") not in (None, 1):
        raise ModelError(
            f"rope.scaling.yarn_ext_factor = {short_repr(keys.get('rope.scaling.yarn_ext_factor'))} is not supported.",
            "Supported are models that use YaRN in full (a factor of 1).",
        )
    scaling = ConfigKeys(values, where=keys.where, prefix=f"{keys.prefix}rope.scaling.")
    rope = read_rope(scaling, theta=read_theta(keys, "rope_theta"), head_dim=rope_dim, context=context)
    names = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")
    scale = next((name for name in names if keys.get(name)), None)
    return rope if scale is None else replace(rope, magnitude=rope.magnitude * read_scale(keys, scale))


# ---- keys of every architecture: checked once, when a file is opened ------------------------------------------------

log = logging.getLogger("wager")

_ALIGNMENT = 32
_MOST_ALIGNMENT = 1 << 20
_MOST_PARTS = 1 << 16
_TOKENS = "tokenizer.ggml.tokens"
_TEXTS = ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template")
_FLAGS = ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix")
_IDS, _OPTIONAL_IDS = ("bos", "eos", "unknown"), ("eot", "eom", "padding")
_TOKEN_KINDS = range(7)
"""llama.cpp's types of tokens: 3 control, 4 user-defined, 6 byte."""


def read_alignment(metadata: Mapping[str, Any], where: str) -> int:
    """Bytes at whose multiples tensors begin."""
    keys = ConfigKeys(metadata, where=where)
    alignment = keys.integer("general.alignment", default=_ALIGNMENT, most=_MOST_ALIGNMENT)
    if alignment & (alignment - 1) or alignment < 8:
        raise keys.wrong("general.alignment", "a power of 2 from 8 on")
    return alignment


@dataclass(frozen=True, slots=True)
class Split:
    """Which part of how many a file is, from 0, and how many `tensors` all have together, if it says so."""

    number: int
    count: int
    tensors: int | None


def read_split(metadata: Mapping[str, Any], where: str) -> Split:
    """How the file was split: part 0 of 1 if it was not."""
    keys = ConfigKeys(metadata, where=where)
    count = 1 if keys.get("split.count") == 0 else keys.integer("split.count", default=1, most=_MOST_PARTS)
    return Split(keys.count("split.no", most=_MOST_PARTS), count, keys.count("split.tensors.count") or None)


def check_tokenizer_keys(metadata: Mapping[str, Any], where: str) -> None:
    """TokenizerError unless every key of the tokenizer that the file has is of its type, lists have an entry for each
    token, and special tokens are ids of the vocabulary."""
    keys = ConfigKeys(metadata, where=where, error=TokenizerError)
    for name in _TEXTS:
        keys.text(name)
    for name in _FLAGS:
        keys.flag(name)
    tokens, scores = keys.texts(_TOKENS), keys.numbers("tokenizer.ggml.scores")
    kinds = keys.integers("tokenizer.ggml.token_type")
    keys.texts("tokenizer.ggml.merges")
    if tokens is None:
        return
    for name, values in (("scores", scores), ("types", kinds)):
        if values is not None and len(values) != len(tokens):
            raise TokenizerError(f"{where} has {len(values)} {name} for {len(tokens)} tokens.", "The file is damaged.")
    if kinds is not None and not set(kinds) <= set(_TOKEN_KINDS):
        raise keys.wrong("tokenizer.ggml.token_type", f"a list of types from 0 to {_TOKEN_KINDS[-1]}")
    for name in _IDS + _OPTIONAL_IDS:
        _check_id(keys, name, len(tokens))
    keys.token_ids("tokenizer.ggml.suppress_tokens", vocab=len(tokens))


def _check_id(keys: ConfigKeys, name: str, vocab: int) -> None:
    """A token that a model can do without only gets a warning if it is outside the vocabulary, as in llama.cpp."""
    key = f"tokenizer.ggml.{name}_token_id"
    if isinstance(keys.get(key), list):
        raise keys.wrong(key, "one token id")
    if name in _OPTIONAL_IDS and type(keys.get(key)) is int and not 0 <= keys.get(key) < vocab:
        log.warning(
            "%s = %d in %s is no id of the vocabulary of %d tokens; it is not used.",
            key,
            keys.get(key),
            keys.where,
            vocab,
        )
        return
    keys.token_ids(key, vocab=vocab)
