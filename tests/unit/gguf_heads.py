"""GGUF files of heads as llama.cpp's converter writes them, from heads in directories."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open
from tiny_models import permute, write_gguf

from wager.arch.gguf_config import GGUF_NAMES
from wager.models.weights import NAMES

_LAYER_PARTS = ("attn_norm", "mlp_norm", "q", "k", "v", "o", "q_norm", "k_norm", "gate", "up", "down")
_AROUND = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "fc": "fc",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "input_norm": "enc.output_norm",
    "layers.0.hidden_norm": "blk.0.attn_norm_2",
    "hidden_norm": "enc.output_norm",
}


def head_gguf(
    folder: Path, path: Path, *, layers: int, kind: Kind = Kind.F32, without: tuple[str, ...] = (), **changes: Any
) -> Path:
    """The file of an EAGLE-3, DFlash or DSpark head in a directory, for a target of so many `layers`. Matrices are of
    that `kind`; `without` leaves tensors out, `changes` are of keys (dots as double underscores; None removes one)."""
    config = json.loads((folder / "config.json").read_text())
    layer = config.get("transformer_layer_config", config)
    tensors = {}
    with safe_open(folder / "model.safetensors", framework="np") as opened:
        for stored in opened.keys():  # noqa: SIM118
            if stored not in ("t2d", *without):
                tensors[stored] = opened.get_tensor(stored)
    block = "hidden_norm.weight" in tensors
    written = {}
    for stored, values in tensors.items():
        name = stored.replace("midlayer.", "layers.0.")
        if name == "d2t":
            ids = (values + np.arange(len(values))).astype("<i8")
            written["d2t"] = ids.view(np.uint8), Kind.I64
            continue
        whole, _, suffix = name.rpartition(".")
        if not block and whole.endswith((".q_proj", ".k_proj")):
            heads = layer["num_attention_heads" if whole.endswith("q_proj") else "num_key_value_heads"]
            values = permute(values, heads)
        values = np.atleast_1d(values.squeeze())
        written[f"{_name(whole)}.{suffix}"] = values, kind if values.ndim == 2 else Kind.F32
    metadata = _metadata(layer) | (_block(config, layer) if block else _eagle(config, layers))
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return write_gguf(path, "dflash" if block else "eagle3", metadata, written)


def _name(name: str) -> str:
    for part in _LAYER_PARTS:
        pattern = NAMES[part].removeprefix("model.").replace("{}", r"(\d+)")
        if match := re.fullmatch(pattern, name):
            return GGUF_NAMES[part].format(match[1])
    return _AROUND[name]


def _metadata(layer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "context_length": layer["max_position_embeddings"],
        "embedding_length": layer["hidden_size"],
        "block_count": layer["num_hidden_layers"],
        "feed_forward_length": layer["intermediate_size"],
        "attention.head_count": layer["num_attention_heads"],
        "attention.head_count_kv": layer["num_key_value_heads"],
        "attention.key_length": layer["head_dim"],
        "attention.value_length": layer["head_dim"],
        "attention.layer_norm_rms_epsilon": float(layer["rms_norm_eps"]),
        "rope.dimension_count": layer["head_dim"],
        "rope.freq_base": float(layer["rope_theta"]),
        "vocab_size": layer["vocab_size"],
    }


def _eagle(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    name = "eagle_aux_hidden_state_layer_ids"
    taps = config.get(name) or config.get("eagle_config", {}).get(name) or [2, layers // 2, layers - 3]
    return {
        "target_layers": taps,
        "target_hidden_size": config.get("target_hidden_size") or config.get("hidden_size"),
        "norm_before_residual": config.get("norm_before_residual", False),
        "norm_before_fc": config.get("norm_before_fc", False),
    }


def _block(config: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    native = config.get("dflash_config", config)
    ids = native.get("target_layer_ids")
    markov = bool(config.get("markov_rank"))
    return {
        "target_layers": [tap + 1 for tap in ids] if ids else config["aux_hidden_state_layer_ids"],
        "target_hidden_size": layer["hidden_size"],
        "block_size": config["block_size"],
        "sample_from_anchor": config.get("sample_from_anchor", markov),
        "tokenizer.ggml.mask_token_id": native["mask_token_id"],
    }
