"""Writes what was trained: a head in speculators' format, EAGLE-3's and DSpark's (Medusa in vLLM's), or a pruned model
as a Hugging Face directory.

config.json with every flag, because readers differ in what a missing one means; model.safetensors with bfloat16 tensors
under the format's names, d2t as offsets. A head's embedding is the target's and is not written. A pruned model is one
like any other of its family, for `--drafter model:PATH`, transformers and other engines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from wager.arch.config_keys import read_json
from wager.arch.families import FAMILIES
from wager.arch.layers import Gqa
from wager.arch.spec import ModelSpec
from wager.errors import ModelError, UsageError
from wager.inputs import replacing
from wager.train.data import DraftVocabulary, TrainingTarget
from wager.train.draft_module import DraftModule, DraftSizes
from wager.train.pruned import PrunedModule
from wager.train.trainer import Provenance

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


def decoder_config(
    sizes: DraftSizes, spec: ModelSpec, layers: int, scaling: Mapping[str, Any] | None
) -> dict[str, Any]:
    """transformer_layer_config: a Llama configuration of the draft layers."""
    found: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
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
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return found if len(sizes.taps) == _USUAL_TAPS else {**found, "num_aux_hidden_states": len(sizes.taps)}


def envelope(kind: str, architecture: str, *, tokens: int, provenance: Provenance, spec: ModelSpec) -> dict[str, Any]:
    """What every export of speculators' format has, and our provenance under "wager"."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {"name_or_path": provenance.target, "architectures": [spec.details.architecture]}
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": verifier,
        },
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "wager": asdict(provenance),
    }


def eagle_config(
    sizes: DraftSizes,
    vocabulary: DraftVocabulary,
    spec: ModelSpec,
    provenance: Provenance,
    *,
    depth: int,
    scaling: Mapping[str, Any] | None,
) -> dict[str, Any]:
    return {
        **envelope("eagle3", "Eagle3Speculator", tokens=depth, provenance=provenance, spec=spec),
        "transformer_layer_config": decoder_config(sizes, spec, 1, scaling),
        "draft_vocab_size": len(vocabulary.ids),
        "norm_before_residual": sizes.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": sizes.fc_norm,
        "wager": {**asdict(provenance), "taps": list(sizes.taps)},
        "norm_output": sizes.norm_output,
        "target_hidden_size": spec.hidden,
        "eagle_aux_hidden_state_layer_ids": list(sizes.taps),
        "embed_requires_grad": False,
    }


def block_config(
    sizes: DraftSizes,
    vocabulary: DraftVocabulary,
    spec: ModelSpec,
    provenance: Provenance,
    *,
    depth: int,
    scaling: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Of a DSpark drafter, whose anchor slot guesses too: as many guesses as slots. Its layers are Qwen3's, with norms
    of queries and keys, and attend within a block in both directions."""
    layer = decoder_config(sizes, spec, sizes.layers, scaling)
    layer |= {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "layer_types": ["full_attention"] * sizes.layers,
        "use_sliding_window": False,
        "sliding_window": None,
    }
    del layer["mlp_bias"]
    return {
        **envelope("dspark", "DSparkDraftModel", tokens=depth, provenance=provenance, spec=spec),
        "transformer_layer_config": layer,
        "draft_vocab_size": len(vocabulary.ids),
        "block_size": depth,
        "wager": {**asdict(provenance), "taps": list(sizes.taps)},
        "aux_hidden_state_layer_ids": list(sizes.taps),
        "mask_token_id": sizes.mask_token,
        "sample_from_anchor": True,
        "sliding_window_non_causal": True,
        "markov_rank": sizes.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "target_hidden_size": spec.hidden,
    }


def medusa_config(
    sizes: DraftSizes,
    vocabulary: DraftVocabulary,
    spec: ModelSpec,
    provenance: Provenance,
    *,
    depth: int,
    scaling: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """vLLM's format, since speculators' has no Medusa. No further key may hold "num" with "heads" or "layers": readers
    take any such key for the number of heads."""
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": sizes.hidden,
        "vocab_size": spec.vocab,
        "num_heads": depth,
        "num_hidden_layers": 1,
        "truncated_vocab_size": len(vocabulary.ids),
        "original_lm_head": True,
        "medusa_fc_bias": True,
        "logit_scale": 1.0,
        "torch_dtype": "bfloat16",
        "wager": asdict(provenance),
    }


def write_export(
    folder: Path,
    config: Mapping[str, Any],
    module: DraftModule,
    vocabulary: DraftVocabulary,
    *,
    tokenizer: Mapping[str, str],
) -> None:
    """Write all files, each under another name first: those of the head, and the texts of the tokenizer's by their
    names, so that who uses the head with another one is told where they differ. ModelError for weights that are no
    numbers."""
    tensors = float_tensors(module.state_dict())
    if config.get("model_type") == "medusa":
        tensors |= {} if vocabulary.whole else {"token_map": torch.from_numpy(vocabulary.ids)}
    elif not vocabulary.whole:
        tensors["d2t"] = torch.from_numpy(vocabulary.offsets())
        tensors["t2d"] = torch.from_numpy(vocabulary.known())
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / "model.safetensors", tensors)
    for name, text in tokenizer.items():
        replace_file(folder / name, text.encode())
    replace_file(folder / "config.json", (json.dumps(dict(config), indent=2) + "\n").encode())


def float_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In bfloat16 on the CPU. ModelError for weights that are no numbers."""
    found = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in tensors.items()}
    bad = [name for name, value in found.items() if not torch.isfinite(value).all()]
    if bad:
        raise ModelError(f"{bad[0]} has weights that are no finite numbers.", "Train again with a smaller --rate.")
    return found


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file, complete or not there at all."""
    replace_file(path, save(dict(tensors), metadata={"format": "pt"}))


def replace_file(path: Path, data: bytes) -> None:
    """Write a file all at once, to the disk."""
    with replacing(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


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
