"""Writes a pruned draft model as a Hugging Face directory: config.json, model.safetensors and the tokenizer's files.

It is a model like any other of its family, for `--drafter model:PATH`, transformers and other engines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wager.arch.families import FAMILIES
from wager.arch.layers import Gqa
from wager.arch.spec import ModelSpec
from wager.errors import UsageError
from wager.train.checkpoint import Provenance
from wager.train.draft_module import DraftSizes
from wager.train.export import float_tensors, replace_file, save_tensors
from wager.train.pruned import PrunedModule
from wager.train.training_target import TrainingTarget


def check_prunable(spec: ModelSpec) -> None:
    """UsageError for a model whose layers no configuration that is written here describes."""
    if any(isinstance(layer.attention, Gqa) and layer.attention.window is not None for layer in spec.layers):
        raise UsageError(
            f"{spec.name} has layers with a sliding window, of which no draft model is made.",
            "Give a model with full attention, or train a head: --kind eagle3.",
        )


def model_config(
    sizes: DraftSizes, target: TrainingTarget, provenance: Provenance, scaling: Mapping[str, Any] | None
) -> dict[str, Any]:
    """config.json of a model with the target's shape and fewer layers."""
    spec = target.weights.spec
    details = spec.details
    kind = "qwen3" if details.qk_norm else "qwen2" if details.qkv_bias and not details.output_bias else "llama"
    return {
        "architectures": [FAMILIES[kind].architecture],
        "model_type": kind,
        "hidden_size": spec.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": len(sizes.kept_layers),
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": sizes.norm_eps,
        "rope_theta": details.rope.theta,
        "rope_scaling": dict(scaling) if scaling else None,
        "max_position_embeddings": spec.context,
        "vocab_size": spec.vocab,
        "tie_word_embeddings": spec.tied,
        "attention_bias": details.output_bias,
        "mlp_bias": details.mlp_bias,
        "use_sliding_window": False,
        "eos_token_id": list(target.eos_ids),
        "torch_dtype": "bfloat16",
        "wager": {**asdict(provenance), "kept_layers": list(sizes.kept_layers)},
    }


def write_pruned(
    folder: Path,
    module: PrunedModule,
    target: TrainingTarget,
    provenance: Provenance,
    scaling: Mapping[str, Any] | None,
) -> None:
    """Write all files, each under another name first. ModelError for weights that are no numbers."""
    tensors = {**module.state_dict(), "model.embed_tokens.weight": module.embedding}
    if not target.weights.spec.tied:
        tensors["lm_head.weight"] = module.head
    config = model_config(module.sizes, target, provenance, scaling)
    texts = {**target.tokenizer.files(), "config.json": json.dumps(config, indent=2) + "\n"}
    written = float_tensors(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / "model.safetensors", written)
    for name, text in texts.items():
        replace_file(folder / name, text.encode())
