"""Writes what was trained: a head in speculators' format, EAGLE-3's and DSpark's (Medusa in vLLM's), or a pruned model
as a Hugging Face directory.

config.json with every flag, because readers differ in what a missing one means; model.safetensors with bfloat16 tensors
under the format's names, d2t as offsets. A head's embedding is the target's and is not written. A pruned model is one
like any other of its family, for `--drafter model:PATH`, transformers and other engines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from wager.arch.config_keys import read_json
from wager.arch.families import FAMILIES
from wager.arch.spec import ModelSpec
from wager.errors import ModelError, UsageError
from wager.inputs import replacing
from wager.models.head_medusa import medusa_config
from wager.train.data import DraftVocabulary, Provenance, TrainingTarget
from wager.train.draft_module import DraftModule, DraftSizes
from wager.train.pruned import PrunedModule

_USUAL_TAPS = 3
"""Taps that readers assume where nothing else is written."""


def rope_scaling(spec: ModelSpec, model: Path) -> dict[str, Any] | None:
    """The target's RoPE scaling as its config.json has it; None if there is none. UsageError if it is in another form,
    of which the format has no name."""
    rope = spec.details.rope
    if not rope.factors and rope.magnitude == 1:
        return None
    config = read_json(model / "config.json") if model.is_dir() else {}
    found = config.get("rope_scaling") or config.get("rope_parameters")  # as of transformers 5, with rope_theta
    if not isinstance(found, dict):
        raise UsageError(
            f"The RoPE scaling of {spec.name} cannot be written to an export.", "Train on its Hugging Face directory."
        )
    return {name: value for name, value in found.items() if name != "rope_theta"}


def _shape(sizes: DraftSizes, spec: ModelSpec, *, layers: int, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """The keys that every configuration of a decoder has."""
    return {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": sizes.norm_eps,
        "rope_theta": spec.details.rope.theta,
        "rope_scaling": dict(scaling) if scaling else None,
        "max_position_embeddings": spec.context,
        "vocab_size": spec.vocab,
        "torch_dtype": "bfloat16",
    }


def head_config(
    kind: str,
    sizes: DraftSizes,
    guessed: int,
    spec: ModelSpec,
    provenance: Provenance,
    *,
    depth: int,
    scaling: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """config.json of a head that guesses `guessed` tokens, and our provenance under "wager"."""
    if kind == "medusa":
        return {**medusa_config(spec, heads=depth, guessed=guessed), "wager": asdict(provenance)}
    eagle = kind == "eagle3"
    layers = 1 if eagle else sizes.layers
    layer: dict[str, Any] = {
        **_shape(sizes, spec, layers=layers, scaling=scaling),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    }
    if len(sizes.taps) != _USUAL_TAPS:
        layer["num_aux_hidden_states"] = len(sizes.taps)
    if eagle:
        layer |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "mlp_bias": False}
    else:
        layer |= {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "layer_types": ["full_attention"] * layers,
            "use_sliding_window": False,
            "sliding_window": None,
        }
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator" if eagle else "DSparkDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": provenance.target, "architectures": [spec.details.architecture]},
        },
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "draft_vocab_size": guessed,
        "target_hidden_size": spec.hidden,
        **(_eagle_keys(sizes) if eagle else _block_keys(sizes, depth)),
        "wager": {**asdict(provenance), "taps": list(sizes.taps)},
    }


def _eagle_keys(sizes: DraftSizes) -> dict[str, Any]:
    return {
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": sizes.state_norms,
        "norm_output": sizes.state_norms,
        "eagle_aux_hidden_state_layer_ids": list(sizes.taps),
        "embed_requires_grad": False,
    }


def _block_keys(sizes: DraftSizes, depth: int) -> dict[str, Any]:
    """The keys of a DSpark drafter, whose anchor slot guesses too: as many guesses as slots. Its layers are Qwen3's,
    with norms of queries and keys, and attend within a block in both directions."""
    return {
        "block_size": depth,
        "aux_hidden_state_layer_ids": list(sizes.taps),
        "mask_token_id": sizes.mask_token,
        "sample_from_anchor": True,
        "sliding_window_non_causal": True,
        "markov_rank": sizes.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


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
        **_shape(sizes, spec, layers=len(sizes.kept_layers), scaling=scaling),
        "tie_word_embeddings": spec.tied,
        "attention_bias": details.output_bias,
        "mlp_bias": details.mlp_bias,
        "use_sliding_window": False,
        "eos_token_id": list(target.tokenizer.eos_ids),
        "wager": {**asdict(provenance), "kept_layers": list(sizes.kept_layers)},
    }


def export(
    folder: Path,
    module: DraftModule,
    target: TrainingTarget,
    vocabulary: DraftVocabulary,
    provenance: Provenance,
    *,
    kind: str,
    depth: int,
    scaling: Mapping[str, Any] | None,
) -> None:
    """Write all files, each under another name first, the tokenizer's too, so that who uses the drafter with another
    one is told where they differ. ModelError for weights that are no numbers."""
    weights, spec = module.state_dict(), target.weights.spec
    if isinstance(module, PrunedModule):
        weights["model.embed_tokens.weight"] = module.embedding
        if not spec.tied:
            weights["lm_head.weight"] = module.head
        config = model_config(module.sizes, target, provenance, scaling)
    else:
        guessed = len(vocabulary.ids)
        config = head_config(kind, module.sizes, guessed, spec, provenance, depth=depth, scaling=scaling)
    tensors = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in weights.items()}
    bad = [name for name, value in tensors.items() if not torch.isfinite(value).all()]
    if bad:
        raise ModelError(f"{bad[0]} has weights that are no finite numbers.", "Train again with a smaller --rate.")
    if kind == "medusa" and not vocabulary.whole:
        tensors["token_map"] = torch.from_numpy(vocabulary.ids)
    elif kind != "pruned" and not vocabulary.whole:
        tensors["d2t"] = torch.from_numpy(vocabulary.offsets())
        tensors["t2d"] = torch.from_numpy(vocabulary.known())
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / "model.safetensors", tensors)
    texts = {**target.tokenizer.files(), "config.json": json.dumps(config, indent=2) + "\n"}
    for name, text in texts.items():
        with replacing(folder / name, durable=True) as file:
            file.write(text.encode())


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file."""
    with replacing(path, durable=True) as file:
        file.write(save(dict(tensors), metadata={"format": "pt"}))
