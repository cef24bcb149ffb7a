"""A small head of each kind for any target, for tests of what happens around heads: wrong guesses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from wager.arch.spec import ModelSpec

_HEADS, _SIZE, _INNER = 2, 16, 32

Shapes = dict[str, tuple[int, ...]]


def _save(folder: Path, config: Mapping[str, Any], shapes: Shapes, *, random: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(5)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) * 0.2 + (1.0 if len(shape) == 1 else 0.0)
        if random
        else torch.full(shape, 0.01)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def _layer(target: ModelSpec, model_type: str, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": target.hidden,
        "intermediate_size": _INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _SIZE,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 128,
        "vocab_size": target.vocab,
        **changes,
    }


def _layer_shapes(name: str, hidden: int, *, reads: int = 0, queries: int = _HEADS * _SIZE, keys: int = 0) -> Shapes:
    """A layer whose attention reads `reads` elements (0: `hidden`), with keys and values of `keys` (0: `queries`)."""
    shapes: Shapes = {f"{name}.{norm}": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
    for part, size in (("q", queries), ("k", keys or queries), ("v", keys or queries)):
        shapes[f"{name}.self_attn.{part}_proj"] = (size, reads or hidden)
    shapes |= {f"{name}.self_attn.o_proj": (hidden, queries), f"{name}.mlp.down_proj": (hidden, _INNER)}
    return shapes | {f"{name}.mlp.{part}_proj": (_INNER, hidden) for part in ("gate", "up")}


def eagle_head(folder: Path, target: ModelSpec, **further: Any) -> Path:
    """One layer in speculators' format, whose weights are all 0.01."""
    hidden = target.hidden
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": _layer(target, "llama"),
        "eagle_aux_hidden_state_layer_ids": [0, target.num_layers - 1],
        **further,
    }
    shapes: Shapes = {"fc": (hidden, 2 * hidden), "norm": (hidden,), "layers.0.hidden_norm": (hidden,)}
    return _save(folder, config, shapes | _layer_shapes("layers.0", hidden, reads=2 * hidden), random=False)


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
    shapes: Shapes = {}
    for head in range(3):
        shapes[f"blocks.{head}.layers.0"] = (hidden, hidden)
        shapes[f"lm_heads.{head}"] = (vocab, hidden)
    return _save(folder, config, shapes)


def block_head(folder: Path, target: ModelSpec, **further: Any) -> Path:
    """One layer and four slots in speculators' format."""
    hidden = target.hidden
    config = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": _layer(target, "qwen3", hidden_act="silu"),
        "block_size": 4,
        "mask_token_id": 1,
        "aux_hidden_state_layer_ids": [0, target.num_layers - 1],
        "draft_vocab_size": target.vocab,
        "sample_from_anchor": False,
        **further,
    }
    shapes: Shapes = {"fc": (hidden, 2 * hidden), "hidden_norm": (hidden,), "norm": (hidden,)}
    shapes |= {f"layers.0.self_attn.{part}_norm": (_SIZE,) for part in "qk"}
    return _save(folder, config, shapes | _layer_shapes("layers.0", hidden))


def mtp_modules(folder: Path, target: ModelSpec, **further: Any) -> Path:
    """One module in speculators' format, of the target's attention."""
    hidden, attention = target.hidden, target.attention
    layer = _layer(
        target,
        "llama",
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=target.num_layers,
        num_attention_heads=attention.heads,
        num_key_value_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        max_position_embeddings=target.context,
        tie_word_embeddings=True,
    )
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    config = {
        "speculators_model_type": "mtp",
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "mtp", "proposal_methods": methods},
        **further,
    }
    name, size = "mtp_layers.0", attention.head_dim
    shapes: Shapes = {f"{name}.{norm}_layernorm": (hidden,) for norm in ("token", "hidden", "final")}
    shapes[f"{name}.input_proj"] = (hidden, 2 * hidden)
    shapes |= _layer_shapes(name, hidden, queries=attention.heads * size, keys=attention.kv_heads * size)
    return _save(folder, config, shapes)


HEADS: Mapping[str, Callable[..., Path]] = {
    "eagle3": eagle_head,
    "medusa": medusa_head,
    "dflash": block_head,
    "mtp": mtp_modules,
}
"""A head of each kind, by the drafter's name: written into a folder for a target."""
