"""From GGUF metadata to a ModelSpec: the architectures of llama.cpp's converter, as rows of a table.

Knows llama.cpp's key names and what its converter does to tensors. Knows no bytes of the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wager.arch.families import check_sizes
from wager.arch.rope import read_rope
from wager.arch.spec import ModelSpec, Rope
from wager.errors import ModelError


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """What one GGUF architecture implies.

    `permuted`: the converter reordered each head's rows of the query and key projections so that rotated pairs lie
    side by side. `windowed`: its sliding window, if given, holds in all layers.
    """

    permuted: bool = False
    qk_norm: bool = False
    windowed: bool = False


GGUF_FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily(permuted=True, windowed=True),
    "qwen2": GgufFamily(),
    "qwen3": GgufFamily(qk_norm=True),
}

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
"""The tensor that carries llama3 scaling: what each pair's frequency is divided by."""

_REFUSED = (
    "expert_count",
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
"""Keys that would change the computation in ways the decoder does not have; absent or zero is fine."""

_RENAMED = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def spec_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> ModelSpec:
    """The spec of a GGUF file from its metadata and the names and shapes of its tensors (for biases and a tied head).

    ModelError names what is not supported or missing. Factors stored as a tensor are not in the spec yet.
    """
    architecture = str(metadata.get("general.architecture"))
    family = GGUF_FAMILIES.get(architecture)
    if family is None:
        raise ModelError(
            f"Architecture {architecture!r} is not supported in a GGUF file.",
            f"Supported are: {', '.join(GGUF_FAMILIES)}.",
        )
    keys = _Keys(metadata, architecture)
    _refuse_unsupported(keys)
    heads, hidden, layers = (keys.integer(k) for k in ("attention.head_count", "embedding_length", "block_count"))
    head_dim = keys.integer("attention.key_length", hidden // heads)
    kv_heads = keys.integer("attention.head_count_kv", heads)
    context = keys.integer("context_length")
    check_sizes(layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    for name in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(name, head_dim) != head_dim:
            raise ModelError(
                f"{architecture}.{name} = {keys.get(name)} is not the head size {head_dim}, which is not supported.",
                "wager serves models whose keys, values and rotation span the whole head.",
            )
    return ModelSpec(
        architecture=architecture,
        vocab=keys.integer("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        width=keys.integer("feed_forward_length"),
        context=context,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(keys, head_dim=head_dim, context=context),
        windows=(_window(keys, family),) * layers,
        tied="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=family.qk_norm,
    )


class _Keys:
    """The metadata of one architecture, values checked as they are read."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata, self._architecture = metadata, architecture

    def get(self, name: str) -> Any:
        return self._metadata.get(f"{self._architecture}.{name}")

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if value is None:
            raise ModelError(f"The GGUF file lacks {self._architecture}.{name}.", "The file is damaged or incomplete.")
        if isinstance(value, list):
            raise ModelError(
                f"{self._architecture}.{name} differs from layer to layer, which is not supported.",
                "wager serves models whose layers have one shape.",
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelError(f"{self._architecture}.{name} = {value!r} must be a number above 0.")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        return int(self.number(name, default))


def _refuse_unsupported(keys: _Keys) -> None:
    for name in _REFUSED:
        if keys.get(name):
            raise ModelError(
                f"The GGUF key {name} = {keys.get(name)} is not supported.",
                "The model computes something beyond the Llama family's decoder.",
            )


def _rope(keys: _Keys, *, head_dim: int, context: int) -> Rope:
    kind = keys.get("rope.scaling.type") or "none"
    values: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind}
    values |= {ours: keys.get(f"rope.scaling.{theirs}") for theirs, ours in _RENAMED.items()}
    if kind == "none" and keys.get("rope.scale_linear"):
        values |= {"rope_type": "linear", "factor": keys.get("rope.scale_linear")}
    if keys.get("rope.scaling.yarn_ext_factor") not in (None, 1):
        raise ModelError(
            f"rope.scaling.yarn_ext_factor = {keys.get('rope.scaling.yarn_ext_factor')} is not supported.",
            "wager serves models that use YaRN whole (a factor of 1).",
        )
    rope = read_rope(values, theta=keys.number("rope.freq_base", 10000.0), head_dim=head_dim, context=context)
    scale = keys.get("rope.scaling.attn_factor") or keys.get("rope.scaling.yarn_attn_factor")
    return rope if scale is None else Rope(rope.theta, rope.factors, rope.magnitude * float(scale))


def _window(keys: _Keys, family: GgufFamily) -> int | None:
    window = keys.get("attention.sliding_window")
    if not window:
        return None
    if not family.windowed:
        raise ModelError(
            f"The GGUF file has a sliding window of {window} but does not say in which layers it holds.",
            "Use the model's Hugging Face directory.",
        )
    return keys.integer("attention.sliding_window")
