"""What a model is, in digests: of each weight as it is multiplied, of its configuration, tokenizer and chat template.

All are SHA-256 in hex. Packed weights have the digests of their file in the cache; vectors, routers and convolutions,
which are kept as floats, are hashed here. Configuration and tokenizer are hashed in a form that depends on no class of
this package: see `configuration` and docs/receipts.md.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wager.arch.layers import DeltaNet, Dense, Experts, Gating, Gqa, Mamba2, Mla, ShortConv
from wager.arch.rope import Rope
from wager.arch.spec import DecoderDetails, ModelSpec, Multipliers
from wager.models.tokenizer import Tokenizer
from wager.models.tokenizer_files import CHAT_TEMPLATE
from wager.models.transformer import Decoder
from wager.models.weights import Weights, float_tensors

FORM = 1
"""Of the canonical forms of configuration and tokenizer; a part of both."""


@dataclass(frozen=True, slots=True)
class ModelDigests:
    """The digests of a model. `weights` are by name: packed matrices of the same inputs are one (`layers.0.q+k+v`),
    other tensors have their canonical names. `chat_template` is "" where there is none."""

    weights: Mapping[str, str]
    config: str
    tokenizer: str
    chat_template: str

    @classmethod
    def of(cls, decoder: Decoder, weights: Weights, tokenizer: Tokenizer) -> ModelDigests:
        """Those of a loaded model. Quick where its packed weights are in the cache, else a second a gigabyte or two."""
        floats = {
            name: _hashed(np.ascontiguousarray(weights.read(name), "<f4").tobytes())
            for name in float_tensors(weights.spec)
        }
        template = tokenizer.chat_template
        return cls(
            {**decoder.store.digests(), **floats},
            config_digest(weights.spec),
            tokenizer_digest(tokenizer),
            "" if template is None else _hashed(template.encode("utf-8", "surrogatepass")),
        )

    @property
    def summary(self) -> dict[str, str]:
        """One digest of all weights, and the others, by their names."""
        return {
            "weights": _hashed(canonical(dict(self.weights))),
            "config": self.config,
            "tokenizer": self.tokenizer,
            "chat_template": self.chat_template,
        }


def canonical(value: Any) -> bytes:
    """JSON in one form: ASCII, keys sorted, no blanks, whole numbers as integers, so that 1 and 1.0 are one."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and math.isinf(value):
        return "infinite"
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _hashed(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---- the configuration -----------------------------------------------------------------------------------------------


_ALWAYS = object()
"""Stands for the neutral value where there is none, and equals no value."""

_FORMS: Mapping[type, tuple[str, Mapping[str, Any]]] = {
    ModelSpec: ("", {"hidden": _ALWAYS, "vocab": _ALWAYS, "tied": False, "layer_embedding": 0}),
    DecoderDetails: (
        "",
        {
            "norm_eps": _ALWAYS,
            **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "qk_norm", "whole_qk_norm", "value_norm"), False),
            "pre_norms": True,
            **dict.fromkeys(("post_norms", "layer_scales"), False),
            "latent_norm_eps": 1e-6,
            "activation": "silu",
            **dict.fromkeys(("attention_scale", "attention_cap", "logit_cap")),
            **dict.fromkeys(("embedding_scale", "residual_scale"), 1),
            "multipliers": {},
        },
    ),
    Multipliers: (
        "",
        dict.fromkeys(
            ("attention_out", "state_out", "down", "gate", "state_gate", "values", "keys", "queries", "step"), 1
        ),
    ),
    Rope: ("", {"theta": _ALWAYS, "factors": [], "magnitude": 1, "long_factors": [], "original": 0}),
    Gqa: (
        "gqa",
        {
            **dict.fromkeys(("heads", "kv_heads", "head_dim", "rope_dim"), _ALWAYS),
            "window": None,
            "rotation": "global",
            **dict.fromkeys(("gated", "sinks", "keys_as_values", "shared"), False),
        },
    ),
    Mla: ("mla", {**dict.fromkeys(("heads", "kv_rank", "nope", "rope", "value"), _ALWAYS), "q_rank": None}),
    DeltaNet: (
        "delta_net",
        {**dict.fromkeys(("key_heads", "value_heads", "key_dim", "value_dim", "conv"), _ALWAYS), "tiled": False},
    ),
    Mamba2: (
        "mamba2",
        {
            **dict.fromkeys(("heads", "head_dim", "groups", "state_dim", "conv"), _ALWAYS),
            **dict.fromkeys(("normed", "gate_first"), True),
        },
    ),
    ShortConv: ("short_conv", dict.fromkeys(("width", "conv"), _ALWAYS)),
    Dense: ("dense", {"width": _ALWAYS, "gated": True}),
    Experts: (
        "experts",
        {
            **dict.fromkeys(("count", "active", "width"), _ALWAYS),
            "shared_inner": 0,
            "gating": {},
            **dict.fromkeys(("biased", "shared_gate", "apart"), False),
            "gated": True,
            "latent": 0,
        },
    ),
    Gating: (
        "",
        {
            "score": "softmax",
            **dict.fromkeys(("correction_bias", "expert_scales"), False),
            "normalised": True,
            **dict.fromkeys(("scale", "groups", "top_groups", "group_best"), 1),
        },
    ),
}
"""What is written of each class: its kind ("" where its place says it), and its values with what is neutral of each.
What only says how a checkpoint is read is left out: it shows in the digests of the weights."""


def configuration(spec: ModelSpec) -> dict[str, Any]:
    """Everything beside the weights that the decoder computes with, as values of JSON. A value that is neutral, as if
    the model had no such thing, is left out, so that what a later wager knows besides changes nothing."""
    details, parts = spec.details, ("attention", "state", "feed_forward")
    rope = {kind: _written(found) for kind in spec.rotations if (found := details.rope_of(kind))}
    layers = [
        {
            part: _written(value)
            for part, value in zip(parts, (layer.attending, layer.recurrent, layer.ffn), strict=True)
            if type(value) in _FORMS
        }
        for layer in spec.ordered_layers
    ]
    return {"form": FORM, **_written(spec), **_written(details), "rope": rope, "layers": layers}


def config_digest(spec: ModelSpec) -> str:
    return _hashed(canonical(configuration(spec)))


def _written(value: Any) -> Any:
    if type(value) in _FORMS:
        kind, neutral = _FORMS[type(value)]
        found = {name: _written(getattr(value, name)) for name in neutral}
        kept = {name: each for name, each in found.items() if each != neutral[name]}
        return {"kind": kind, **kept} if kind else kept
    return list(value) if isinstance(value, tuple) else value


# ---- the tokenizer ---------------------------------------------------------------------------------------------------


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Of the files of a Hugging Face directory with it, but for the chat template; of the ids that end a text, and of
    those that none has; and of where decoding removes a space, which these files do not say of a GGUF file's
    tokenizer."""
    files = {name: _stated(json.loads(text)) for name, text in tokenizer.files().items() if name != CHAT_TEMPLATE}
    rest: dict[str, Any] = {"eos_ids": list(tokenizer.eos_ids), "space_prefix": tokenizer.space_prefix}
    if tokenizer.suppressed_ids:
        rest["suppressed_ids"] = sorted({*tokenizer.suppressed_ids})
    return _hashed(canonical({"form": FORM, "files": files, **rest}))


def _stated(value: Any) -> Any:
    """Without what is null or false, since versions of the library differ in which of that they write, and with merges
    as pairs."""
    if isinstance(value, list):
        return [_stated(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {name: _stated(each) for name, each in value.items() if each is not None and each is not False}
    if isinstance(merges := found.get("merges"), list):
        found["merges"] = [each.split(" ", 1) if isinstance(each, str) else each for each in merges]
    return found
