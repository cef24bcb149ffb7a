"""A small head of each kind for any target, for tests of what happens around heads: random weights, wrong guesses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from unit.eagle_heads import blank_head
from wager.arch.spec import ModelSpec

_HEADS, _SIZE, _INNER = 2, 16, 32


def _random(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        f"{name}.weight": torch.randn(shape, generator=generator) * 0.2 + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in shapes.items()
    }


def _save(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_random(shapes), folder / "model.safetensors")
    return folder


def medusa_head(folder: Path, target: ModelSpec, **further: Any) -> Path:
    """Three heads in vLLM's format."""
    hidden, vocab = target.hidden, target.vocab
    config = {
        "model_type": "medusa",
        "hidden_size": hidden,
        "vocab_size": vocab,
        "num_heads": 3,
        "num_hidden_layers": 1,
        "truncated_vocab_size": vocab,
        "medusa_fc_bias": False,
        **further,
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(3):
        shapes[f"blocks.{head}.layers.0"] = (hidden, hidden)
        shapes[f"lm_heads.{head}"] = (vocab, hidden)
    return _save(folder, config, shapes)


def block_head(folder: Path, target: ModelSpec, **further: Any) -> Path:
    """One layer and four slots in speculators' format."""
    hidden = target.hidden
    layer = {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": _INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _SIZE,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 128,
        "vocab_size": target.vocab,
        "hidden_act": "silu",
    }
    config = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": layer,
        "block_size": 4,
        "mask_token_id": 1,
        "aux_hidden_state_layer_ids": [0, target.num_layers - 1],
        "draft_vocab_size": target.vocab,
        "sample_from_anchor": False,
        **further,
    }
    shapes: dict[str, tuple[int, ...]] = {"fc": (hidden, 2 * hidden), "hidden_norm": (hidden,), "norm": (hidden,)}
    shapes |= {f"layers.0.{name}": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    shapes |= {f"layers.0.self_attn.{part}_proj": (_HEADS * _SIZE, hidden) for part in "qkv"}
    shapes |= {f"layers.0.self_attn.{part}_norm": (_SIZE,) for part in "qk"}
    shapes |= {"layers.0.self_attn.o_proj": (hidden, _HEADS * _SIZE), "layers.0.mlp.down_proj": (hidden, _INNER)}
    shapes |= {f"layers.0.mlp.{part}_proj": (_INNER, hidden) for part in ("gate", "up")}
    return _save(folder, config, shapes)


def mtp_modules(folder: Path, target: ModelSpec, **further: Any) -> Path:
    """One module in speculators' format, of the target's attention."""
    hidden, attention = target.hidden, target.attention
    queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    layer = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": _INNER,
        "num_hidden_layers": target.num_layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "rope_theta": 1e4,
        "max_position_embeddings": target.context,
        "vocab_size": target.vocab,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    config = {
        "speculators_model_type": "mtp",
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "mtp", "proposal_methods": methods},
        **further,
    }
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm", "post_attention_layernorm")
    shapes: dict[str, tuple[int, ...]] = {f"mtp_layers.0.{name}": (hidden,) for name in norms}
    shapes["mtp_layers.0.input_proj"] = (hidden, 2 * hidden)
    for part, size in (("q", queries), ("k", keys), ("v", keys)):
        shapes[f"mtp_layers.0.self_attn.{part}_proj"] = (size, hidden)
    shapes["mtp_layers.0.self_attn.o_proj"] = (hidden, queries)
    shapes |= {f"mtp_layers.0.mlp.{part}_proj": (_INNER, hidden) for part in ("gate", "up")}
    shapes["mtp_layers.0.mlp.down_proj"] = (hidden, _INNER)
    return _save(folder, config, shapes)


HEADS: Mapping[str, Callable[..., Path]] = {
    "eagle3": blank_head,
    "medusa": medusa_head,
    "dflash": block_head,
    "mtp": mtp_modules,
}
"""A head of each kind, by the drafter's name: written into a folder for a target."""
