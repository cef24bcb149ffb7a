"""Small random models of every family, made with transformers, which is also the oracle of their logits.

`spread` makes the weights large enough that a mistake anywhere shows in the logits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from oracle.kernels import ReferenceKernels
from packing import batch, chain
from wager.arch import DecoderDetails, Dense, Experts, Gqa, Mla, ModelSpec, Precision, Rope
from wager.arch.gguf_config import GGUF_NAMES
from wager.arch.layers import Recurrent
from wager.arch.spec import stacked
from wager.kernels.arrays import Array
from wager.models.transformer import Decoder
from wager.models.weights import NAMES, Weights, source_name, tensor_shapes

SIZES = {
    "vocab_size": 83,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 83, 60)]


def spec(
    attention: Sequence[Gqa | Mla | Recurrent] = (Gqa(6, 2, 16),) * 2,
    ffn: Sequence[Dense | Experts] = (Dense(64),) * 2,
    *,
    tied: bool = True,
    rope: Rope = Rope(10000.0),  # noqa: B008
    layer_embedding: int = 0,
    **details: Any,
) -> ModelSpec:
    """A small spec with whole-number sizes, for tests that need no oracle."""
    layers, order = stacked(attention, ffn)
    decoder = DecoderDetails("test", order, rope, 1e-5, **details)
    return ModelSpec(
        "test", 48, 83, tied, layers, Precision.of("bf16"), 128, decoder=decoder, layer_embedding=layer_embedding
    )


def oracle(architecture: str, **config: Any) -> Any:
    """A random transformers model of an architecture, in float32, eager attention."""
    kind = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = kind(
        kind.config_class(**{**SIZES, **config}, attn_implementation="eager", bos_token_id=None, eos_token_id=None)
    )
    return spread(model.eval())


def spread(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = 1.0 if "embed" in name else (parameter.shape[-1] ** -0.5 if parameter.dim() >= 2 else 0.3)
        parameter.data = noise * scale + (1.0 if "norm" in name else 0.0)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = torch.randn(buffer.shape, generator=generator) * 0.2
        elif name.endswith("layer_scalar"):
            buffer.data = 1 + torch.rand(buffer.shape, generator=generator) / 2
    return model


def save(model: Any, path: Path, **changes: Any) -> Path:
    """Save in small shards; `changes` edit config.json (None removes a key)."""
    model.save_pretrained(path, max_shard_size="30KB")
    edit(path / "config.json", **changes)
    return path


def edit(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text())
    values.update(changes)
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def oracle_logits(model: Any, tokens: Sequence[int]) -> Array:
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0].float().numpy()


def logits(weights: Weights, tokens: Sequence[int], *, dtype: str = "float32", blocks: int = 8) -> Array:
    """Our logits of every position, in one pass over a cache of its own. In float32 weights are dequantised."""
    sizes = {"num_blocks": blocks, "max_rows": len(tokens), "max_sequences": 1, "max_blocks": blocks}
    decoder = Decoder(weights, ReferenceKernels(dtype), **sizes, dtype="bf16" if dtype == "float32" else "auto")
    packed = batch([chain(0, tokens, list(range(blocks))[::-1])], range(len(tokens)))
    return decoder.forward(packed).logits.copy()


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows of llama models."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def gguf_metadata(model_spec: ModelSpec, architecture: str) -> dict[str, Any]:
    width = model_spec.dense.width if model_spec.dense else 0
    return {
        "context_length": model_spec.context,
        "embedding_length": model_spec.hidden,
        "block_count": model_spec.num_layers,
        "feed_forward_length": width,
        "attention.head_count": model_spec.attention.heads,
        "attention.head_count_kv": model_spec.attention.kv_heads,
        "attention.key_length": model_spec.attention.head_dim,
        "attention.value_length": model_spec.attention.head_dim,
        "attention.layer_norm_rms_epsilon": model_spec.details.norm_eps,
        "rope.dimension_count": model_spec.attention.head_dim,
        "rope.freq_base": model_spec.details.rope.theta,
        "vocab_size": model_spec.vocab,
    }


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]],
    *,
    part_of: int = 0,
) -> Path:
    """A GGUF file, or the first of its parts of `part_of` tensors. Tensors are float arrays, quantised here, or already
    raw bytes of their type."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=part_of)
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in metadata.items():
        key = name if name.startswith(("tokenizer.", "general.", "split.")) else f"{architecture}.{name}"
        adders.get(type(value), writer.add_array)(key, value)
    for name, (values, kind) in tensors.items():
        raw = values if values.dtype == np.uint8 else gguf.quants.quantize(values.astype(np.float32), kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"), default=path)


PERMUTED = ("llama", "granite", "granitehybrid", "smollm3")
"""Architectures whose converter reorders the rows of queries and keys."""


def converted(model: Any, architecture: str) -> dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]:
    """A transformers model's tensors as llama.cpp's converter writes them for that architecture, in float32, under the
    names of the gguf library."""
    config = model.config
    known = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}
    for name, stored in model.state_dict().items():
        values, part = stored.numpy(), name.split(".")[-2]
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            values = values + 1
        if architecture == "gemma4" and not name.endswith("weight"):
            name = name.replace("router.per_expert_scale", "experts.down_proj.scale") + ".weight"
            name = name.replace("router.scale", "router.proj.scale").replace("scale.weight", "scale")
        if part in ("conv", "conv1d") and name.endswith("weight"):
            values = values.squeeze()
        if architecture == "falcon-h1":
            values = falcon_tensor(name, values, config.to_dict())
        if architecture.startswith("nemotron_h"):
            name = name.replace("model.", "backbone.").replace("e_score_correction_bias", "e_score_correction.bias")
            if ".experts." in name:
                name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.") + ".weight"
        if ".mamba." in name or (".mixer." in name and part not in ("up_proj", "down_proj")):
            groups = config.n_groups if architecture.startswith("nemotron_h") else config.mamba_n_groups
            name, values = mamba_tensor(name, values, groups=groups)
        if architecture == "qwen35":
            [(name, values)] = hybrid_tensors(name, values, config.to_dict(), tiled=True).items()
        if architecture in PERMUTED and part in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
            values = permute(values, heads)
        if part == "input_linear":  # of Granite 4
            layer = name.split(".")[2]
            for half, rows in zip(("gate", "up"), np.split(values, 2), strict=True):
                tensors[f"blk.{layer}.ffn_{half}.weight"] = rows
        elif part == "output_linear":
            tensors[f"blk.{name.split('.')[2]}.ffn_down.weight"] = values
        elif not (name == "lm_head.weight" and config.tie_word_embeddings):
            found = names.get_name(name, try_suffixes=(".weight", ".bias", ".scale"))
            assert found is not None, name
            tensors[found] = values
    return {name: (values, gguf.GGMLQuantizationType.F32) for name, values in tensors.items()}


def mamba_tensor(name: str, values: np.ndarray, *, groups: int) -> tuple[str, np.ndarray]:
    """Rates instead of their logarithms, and the shapes that llama.cpp's converter gives vectors."""
    if name.endswith("A_log"):
        return name, -np.exp(values)[:, None]
    if name.endswith(".D"):
        return name, values[:, None]
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return name, values.reshape(groups, -1)
    return name.replace("dt_bias", "dt_proj.bias"), values


def falcon_tensor(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """A tensor of Falcon-H1 times its multipliers, as llama.cpp's converter has it."""
    part, inner = name.split(".")[-2], config["mamba_d_ssm"] or 2 * config["hidden_size"]
    keys = config["mamba_n_groups"] * config["mamba_d_state"]
    attention_in = config["attention_in_multiplier"]
    scales = {
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "q_proj": attention_in,
        "k_proj": attention_in * config["key_multiplier"],
        "v_proj": attention_in,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "gate_proj": config["mlp_multipliers"][0],
        "down_proj": config["mlp_multipliers"][1],
    }
    if part == "in_proj":
        rows = np.repeat(config["ssm_multipliers"], (inner, inner, keys, keys, config["mamba_n_heads"]))
        return (values * (config["ssm_in_multiplier"] * rows)[:, None]).astype(np.float32)
    return values * np.float32(scales.get(part, 1))


def hybrid_tensors(name: str, values: np.ndarray, config: Mapping[str, Any], *, tiled: bool) -> dict[str, np.ndarray]:
    """A tensor of Qwen3-Next or Qwen3.5 as llama.cpp's converter has it: norms with their offset, rates instead of
    their logarithms, what is stored by key head apart, and, with `tiled`, value heads in turns of their key heads."""
    if "linear_attn." not in name:
        return {name: values + 1 if name.endswith("norm.weight") else values}
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    order = np.arange(heads).reshape(keys, -1).T.ravel() if tiled else np.arange(heads)
    rows = (order[:, None] * value_dim + np.arange(value_dim)).ravel()
    before, part = name.split("linear_attn.")
    mixed = 2 * keys * key_dim
    if part == "in_proj_qkvz.weight":
        sizes = np.cumsum([key_dim, key_dim, heads // keys * value_dim])
        groups = np.split(values.reshape(keys, -1, values.shape[1]), sizes, axis=1)
        q, k, v, z = (group.reshape(-1, values.shape[1]) for group in groups)
        before += "linear_attn.in_proj_"
        return {f"{before}qkv.weight": np.concatenate([q, k, v]), f"{before}z.weight": z}
    if part == "A_log":
        return {name: -np.exp(values[order])}
    if part == "dt_bias":
        return {name.replace("dt_bias", "dt_proj.bias"): values[order]}
    if part in ("in_proj_a.weight", "in_proj_b.weight"):
        return {name: values[order]}
    if part == "in_proj_z.weight":
        return {name: values[rows]}
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        values = values.reshape(len(values), -1)
        return {name: np.concatenate([values[:mixed], values[mixed:][rows]])}
    return {name: values[:, rows] if part == "out_proj.weight" else values}


def as_gguf(
    model: Any, model_spec: ModelSpec, kinds: Mapping[str, gguf.GGMLQuantizationType], *, permuted: bool
) -> dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]:
    """A transformers model's tensors under llama.cpp's names and order; `kinds` by short name, F32 otherwise."""
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    tensors = {}
    for name in tensor_shapes(model_spec):
        values, part = state[source_name(NAMES, name)], name.split(".")[-2]
        if permuted and part in ("q", "k"):
            values = permute(values, model_spec.attention.heads if part == "q" else model_spec.attention.kv_heads)
        kind = kinds.get(part, gguf.GGMLQuantizationType.F32) if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        tensors[source_name(GGUF_NAMES, name)] = (values, kind)
    return tensors
