"""A model's tensors: their names and shapes, read under canonical names from every supported format, and the form in
which its matrices are multiplied.

`open_weights` checks every name and shape before a tensor is read. What a family's checkpoints name otherwise is in
arch/families.py.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from wager.arch.config_keys import ConfigKeys, one_line, read_json
from wager.arch.families import FAMILIES, EngineSupport, is_wrapped
from wager.arch.gguf_config import (
    gguf_names,
    read_further_layers,
    read_gguf,
    read_original_context,
)
from wager.arch.hf_config import read_config
from wager.arch.layers import Absent, Attention, DeltaNet, Dense, Experts, Gqa, Mamba2, Mla, Recurrent, ShortConv
from wager.arch.spec import DecoderDetails, Layer, ModelSpec
from wager.elementary import exp
from wager.errors import ModelError
from wager.kernels.arrays import BFLOAT16, FLOAT32, Array, DType, all_finite
from wager.kernels.blocks import BLOCK, BLOCK_FORMATS, Matrix, QuantisedMatrix, quantise
from wager.models.gguf import GgufFile, StoredAs, open_gguf, part_of

if TYPE_CHECKING:
    from wager.models.safetensors_files import SafetensorsSource

# ---- names and shapes ------------------------------------------------------------------------------------------------

Shapes = Iterator[tuple[str, tuple[int, ...]]]

NAMES: Mapping[str, str] = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "model.layers.{}.input_layernorm",
    "attn_post_norm": "model.layers.{}.post_self_attn_layernorm",
    "mlp_norm": "model.layers.{}.post_attention_layernorm",
    "mlp_post_norm": "model.layers.{}.post_mlp_layernorm",
    "q": "model.layers.{}.self_attn.q_proj",
    "k": "model.layers.{}.self_attn.k_proj",
    "v": "model.layers.{}.self_attn.v_proj",
    "o": "model.layers.{}.self_attn.o_proj",
    "q_norm": "model.layers.{}.self_attn.q_norm",
    "k_norm": "model.layers.{}.self_attn.k_norm",
    "sinks": "=model.layers.{}.self_attn.sinks",
    "gate": "model.layers.{}.mlp.gate_proj",
    "up": "model.layers.{}.mlp.up_proj",
    "down": "model.layers.{}.mlp.down_proj",
    "router": "model.layers.{}.mlp.gate",
    "correction": "=model.layers.{}.mlp.gate.e_score_correction_bias",
    "shared_gate": "model.layers.{}.mlp.shared_experts.gate_proj",
    "shared_up": "model.layers.{}.mlp.shared_experts.up_proj",
    "shared_down": "model.layers.{}.mlp.shared_experts.down_proj",
    "expert_gate": "model.layers.{}.mlp.experts.{}.gate_proj",
    "expert_up": "model.layers.{}.mlp.experts.{}.up_proj",
    "expert_down": "model.layers.{}.mlp.experts.{}.down_proj",
    "q_a": "model.layers.{}.self_attn.q_a_proj",
    "q_a_norm": "model.layers.{}.self_attn.q_a_layernorm",
    "q_b": "model.layers.{}.self_attn.q_b_proj",
    "kv_a": "model.layers.{}.self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "model.layers.{}.self_attn.kv_a_layernorm",
    "kv_b": "model.layers.{}.self_attn.kv_b_proj",
    "z": "model.layers.{}.linear_attn.in_proj_z",
    "mixed": "model.layers.{}.linear_attn.in_proj_qkv",
    "step": "model.layers.{}.linear_attn.in_proj_b",
    "decay": "model.layers.{}.linear_attn.in_proj_a",
    "conv": "model.layers.{}.linear_attn.conv1d",
    "rates": "=model.layers.{}.linear_attn.A_log",
    "dt": "=model.layers.{}.linear_attn.dt_bias",
    "skip": "=model.layers.{}.linear_attn.D",
    "state_norm": "model.layers.{}.linear_attn.norm",
    "state_out": "model.layers.{}.linear_attn.out_proj",
    "layer_embed": "model.embed_tokens_per_layer",
    "layer_project": "model.per_layer_model_projection",
    "layer_norm": "model.per_layer_projection_norm",
    "into_embed": "model.layers.{}.per_layer_input_gate",
    "out_of_embed": "model.layers.{}.per_layer_projection",
    "embed_post_norm": "model.layers.{}.post_per_layer_input_norm",
    "scale": "=model.layers.{}.layer_scalar",
}
"""Canonical name (as in tensor_shapes, without places and suffix) -> name in a Hugging Face checkpoint. A name after =
is complete; the others get the suffix. One that ends with [{}] is a part of a tensor: see Source."""

STACKED_EXPERTS: Mapping[str, str] = {
    **dict.fromkeys(("expert_gate", "expert_up"), "=model.layers.{}.mlp.experts.gate_up_proj[{}]"),
    "expert_down": "=model.layers.{}.mlp.experts.down_proj[{}]",
}
"""The names of experts in checkpoints that hold those of a layer in one tensor, as transformers does."""

_MOST_FURTHER = 100
_MODULES = (r"mtp\..*", r"model\.mtp_layers\..*")
"""Tensors of modules that predict further tokens; see head_mtp.FORMATS."""

_IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"lm_head\.weight")
"""Tensors that a checkpoint may repeat: stored RoPE frequencies, and the embedding as the head of a tied model."""

_OTHER_INPUTS = (
    r"(model\.)?visual\..*",
    r"(model\.)?(vision|audio)_(tower|embedder)\..*",
    r"(model\.)?multi_modal_projector\..*",
    r"model\.embed_(vision|audio)\..*",
)
"""Tensors of what reads images and sounds in models with other inputs beside the text."""

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of llama3 scaling: the divisor of each pair's frequency."""
LONG_ROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
"""The tensors of LongRoPE scaling: the divisors up to the original context and beyond."""


def source_name(names: Mapping[str, str], canonical: str) -> str:
    """The name in a checkpoint of a tensor with that canonical name."""
    *places, part, suffix = canonical.split(".")
    name, bracket, rest = names[part].format(*places[1:]).partition("[")
    return (name[1:] if name.startswith("=") else f"{name}.{suffix}") + bracket + rest


def checkpoint_names(architecture: str) -> Mapping[str, str]:
    """NAMES, with the differences of the architecture."""
    return {**NAMES, **_support(architecture).names}


def _support(architecture: str) -> EngineSupport:
    engines = (family.engine for family in FAMILIES.values() if family.architecture == architecture)
    return next((engine for engine in engines if engine), EngineSupport())


def _under(names: Mapping[str, str], root: str) -> dict[str, str]:
    """The names with another root than `model`."""
    return {part: re.sub(r"^(=?)model\.", rf"\1{root}.", name) for part, name in names.items()}


def ignored_tensors(config: Mapping[str, Any], spec: ModelSpec) -> tuple[str, ...]:
    """Patterns of further tensors that a checkpoint may have: repeated ones, and layers that predict further tokens."""
    further = ConfigKeys(config).count("num_nextn_predict_layers", most=_MOST_FURTHER)
    layers = tuple(rf"model\.layers\.{spec.num_layers + i}\..*" for i in range(further))
    shared = (rf"model\.layers\.{layer}\.self_attn\.[kv]_(proj|norm)\..*" for layer in _sharing(spec))
    return (*(_IGNORED if spec.tied else _IGNORED[:1]), *_MODULES, *layers, *shared)


def _sharing(spec: ModelSpec) -> list[int]:
    """The layers without keys and values of their own, though a checkpoint may have their projections."""
    layers = enumerate(spec.ordered_layers)
    return [index for index, layer in layers if layer.attending is not None and layer.caching is None]


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model under its canonical name, with its shape; matrices are [outputs, inputs].

    Names are `part.kind` before and after the layers, `layers.L.part.kind` in them, and of expert E
    `layers.L.E.part.kind`.
    """
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (spec.vocab, spec.hidden)}
    further, hidden = spec.layer_embedding, spec.hidden
    if further:
        every = spec.num_layers * further
        shapes |= {"layer_embed.weight": (spec.vocab, every), "layer_project.weight": (every, hidden)}
        shapes["layer_norm.weight"] = (further,)
    for index, layer in enumerate(spec.ordered_layers):
        parts = dict(_layer(layer, spec.details, hidden))
        if further:
            parts |= {"into_embed.weight": (further, hidden), "out_of_embed.weight": (hidden, further)}
            parts["embed_post_norm.weight"] = (hidden,)
        if spec.details.layer_scales:
            parts["scale.weight"] = (1,)
        shapes |= {f"layers.{index}.{name}": shape for name, shape in parts.items()}
    shapes["norm.weight"] = (spec.hidden,)
    if not spec.tied:
        shapes["head.weight"] = (spec.vocab, spec.hidden)
    return shapes


def _layer(layer: Layer, decoder: DecoderDetails, hidden: int) -> Shapes:
    for part, sublayer in (("attn", layer.attention), ("mlp", layer.ffn)):
        if decoder.pre_norms and not isinstance(sublayer, Absent):
            yield f"{part}_norm.weight", (hidden,)
        if decoder.post_norms and not isinstance(sublayer, Absent):
            yield f"{part}_post_norm.weight", (hidden,)
    attention, ffn = layer.attending, layer.ffn
    if isinstance(attention, Gqa):
        yield from _grouped_query(attention, decoder, hidden)
    elif isinstance(attention, Mla):
        yield from _latent(attention, hidden, split=decoder.split_latent)
    if decoder.output_bias and attention:
        yield "o.bias", (hidden,)
    if recurrent := layer.recurrent:
        yield from _recurrent(recurrent, hidden)
    if isinstance(ffn, Dense):
        yield from _gated("", ffn.width, hidden, biased=decoder.mlp_bias, gated=ffn.gated)
    elif isinstance(ffn, Experts):
        yield from _experts(ffn, hidden)


def _grouped_query(attention: Gqa, decoder: DecoderDetails, hidden: int) -> Shapes:
    keys = attention.kv_heads * attention.head_dim
    if decoder.qk_norm:
        heads = (attention.heads, attention.kv_heads) if decoder.whole_qk_norm else (1, 1)
        sizes = zip("qk" if not attention.shared else "q", heads, strict=False)
        yield from ((f"{part}_norm.weight", (count * attention.head_dim,)) for part, count in sizes)
    for part in attention.projected:
        size = attention.query_width if part == "q" else keys
        yield f"{part}.weight", (size, hidden)
        if decoder.qkv_bias:
            yield f"{part}.bias", (size,)
    if attention.gated:
        yield "q_gate.weight", (attention.query_width, hidden)
    if attention.sinks:
        yield "sinks.weight", (attention.heads,)
    yield "o.weight", (hidden, attention.output_width)


def _latent(attention: Mla, hidden: int, *, split: bool) -> Shapes:
    if rank := attention.q_rank:
        yield from (("q_a.weight", (rank, hidden)), ("q_a_norm.weight", (rank,)))
        yield "q_b.weight", (attention.query_width, rank)
    else:
        yield "q.weight", (attention.query_width, hidden)
    yield "kv_a.weight", (attention.cache_width, hidden)
    yield "kv_a_norm.weight", (attention.kv_rank,)
    if split:
        yield "k_b.weight", (attention.heads * attention.kv_rank, attention.nope)
        yield "v_b.weight", (attention.heads * attention.value, attention.kv_rank)
    else:
        yield "kv_b.weight", (attention.heads * (attention.nope + attention.value), attention.kv_rank)
    yield "o.weight", (hidden, attention.output_width)


def _recurrent(layer: Recurrent, hidden: int) -> Shapes:
    """`mixed` goes through the convolution, with heads of queries, keys and values one after the other; `z` is the
    output's gate, and all that a short convolution reads."""
    if isinstance(layer, ShortConv):
        yield "z.weight", (3 * layer.width, hidden)
    else:
        gates = ("step", "decay") if isinstance(layer, DeltaNet) else ("step",)
        yield from (("z.weight", (layer.value_width, hidden)), ("mixed.weight", (layer.channels, hidden)))
        yield from ((f"{part}.weight", (layer.state.heads, hidden)) for part in gates)
        yield from ((f"{part}.weight", (layer.state.heads,)) for part in ("rates", "dt"))
    if isinstance(layer, Mamba2):
        yield from (("conv.bias", (layer.channels,)), ("skip.weight", (layer.heads,)))
        if layer.normed:
            yield "state_norm.weight", (layer.value_width,)
    elif isinstance(layer, DeltaNet):
        yield "state_norm.weight", (layer.value_dim,)
    yield "conv.weight", (layer.channels, layer.conv)
    yield "state_out.weight", (hidden, layer.value_width)


def _experts(experts: Experts, hidden: int) -> Shapes:
    yield "router.weight", (experts.count, hidden)
    if experts.gating.correction_bias:
        yield "correction.bias", (experts.count,)
    if experts.biased:
        yield "router.bias", (experts.count,)
    if experts.latent:
        yield from (("latent_in.weight", (experts.latent, hidden)), ("latent_out.weight", (hidden, experts.latent)))
    if experts.shared:
        yield from _gated("shared_", experts.shared_inner, hidden, gated=experts.gated)
    if experts.shared_gate:
        yield "shared_router.weight", (hidden,)
    if experts.gating.expert_scales:
        yield "expert_scales.weight", (experts.count,)
    if experts.apart:
        norms = ("router_norm", "expert_norm", "expert_post_norm", "shared_post_norm")
        yield from ((f"{norm}.weight", (hidden,)) for norm in norms)
    for expert in range(experts.count):
        parts = _gated("expert_", experts.width, experts.outer(hidden), biased=experts.biased, gated=experts.gated)
        yield from ((f"{expert}.{name}", shape) for name, shape in parts)


def _gated(prefix: str, width: int, hidden: int, *, biased: bool = False, gated: bool = True) -> Shapes:
    for part, shape in {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}.items():
        if part == "gate" and not gated:
            continue
        yield f"{prefix}{part}.weight", shape
        if biased:
            yield f"{prefix}{part}.bias", shape[:1]


# ---- reading ---------------------------------------------------------------------------------------------------------


class Source(Protocol):
    """Named tensors in one file or several. `where` names it in errors. `read`, `stored` and `read_blocks` also take
    the name of a tensor with [i] after it: the i-th part along its first dimension."""

    where: str

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, dtype: DType) -> Array: ...

    def stored(self, name: str) -> StoredAs: ...

    def read_blocks(self, name: str) -> QuantisedMatrix:
        """A matrix in the format that `stored` gives, which is not None."""


class Weights(Protocol):
    """A model's tensors under the names of `tensor_shapes`."""

    spec: ModelSpec

    def read(self, name: str, dtype: DType = FLOAT32) -> Array:
        """One tensor, contiguous, in the shape that tensor_shapes gives."""

    def stored(self, name: str) -> StoredAs:
        """How a tensor is stored."""

    def quantised(self, name: str, format_name: str) -> QuantisedMatrix:
        """A matrix in that format: as it is stored, or quantised from bfloat16. Its rows are ordered as by `read`."""


class StoredWeights:
    """Weights in a checkpoint, as the engine multiplies with them: rotated pairs half-split, matrices that are stored
    as one apart, norms with their offset, and the last norm with the logits' multiplier."""

    def __init__(self, spec: ModelSpec, source: Source, names: Mapping[str, str]) -> None:
        self.spec = spec
        self._source = source
        self._names = names
        shared = Counter(names.values())
        self._fused = {part: name for part, name in names.items() if shared[name] > 1}

    def read(self, name: str, dtype: DType = FLOAT32) -> Array:
        tensor = self._source.read(source_name(self._names, name), dtype)
        rows = self._rows(name)
        tensor = (tensor if rows is None else tensor[rows]).reshape(self._shapes[name])
        self._check_finite(name, finite=all_finite(tensor))
        order = self._order(name, len(tensor))
        tensor = tensor if order is None else tensor[order]
        details = self.spec.details
        if details.norm_offset and name.endswith("norm.weight") and not name.endswith("state_norm.weight"):
            tensor = tensor + tensor.dtype.type(details.norm_offset)
        if details.log_rates and name.endswith(".rates.weight"):
            tensor = -exp(tensor).astype(tensor.dtype)
        if details.logit_scale != 1 and name == "norm.weight":
            tensor = tensor * tensor.dtype.type(details.logit_scale)
        return tensor

    def stored(self, name: str) -> StoredAs:
        return self._source.stored(source_name(self._names, name))

    def quantised(self, name: str, format_name: str) -> QuantisedMatrix:
        if self.stored(name).format != format_name:
            return quantise(self.read(name, BFLOAT16), format_name)
        matrix = self._source.read_blocks(source_name(self._names, name))
        rows = self._rows(name)
        matrix = matrix if rows is None else QuantisedMatrix(matrix.format, matrix.data[rows], matrix.shape[1])
        self._check_finite(name, finite=matrix.is_finite())
        order = self._order(name, matrix.shape[0])
        return matrix if order is None else matrix.take(order)

    def _rows(self, name: str) -> slice | Array | None:
        """The rows of the stored tensor that are this one; None: all."""
        *places, part, suffix = name.split(".")
        if part not in self._fused:
            return None
        by_head = _rows_by_head(self.spec.ordered_layers[int(places[1])].attention, part) if places else None
        if by_head is not None:
            return by_head
        shapes, first = self._shapes, 0
        for other in NAMES:  # in the order in which they are stored
            rows = shapes.get(".".join((*places, other, suffix)), (0,))[0]
            if other == part:
                return slice(first, first + rows)
            first += rows if self._fused.get(other) == self._fused[part] else 0
        raise KeyError(name)

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return tensor_shapes(self.spec)

    def _order(self, name: str, rows: int) -> Array | None:
        """The stored row of each row of a tensor, where they differ."""
        attention, part = self.spec.attention, name.split(".")[-2]
        if not self.spec.details.interleaved_rope:
            return None
        if isinstance(attention, Mla):
            if part in ("q", "q_b", "kv_a"):
                heads = 1 if part == "kv_a" else attention.heads
                return half_split(rows, heads=heads, first=rows // heads - attention.rope, rotated=attention.rope)
        elif part in ("q", "k", "q_norm", "k_norm"):
            return half_split(rows, heads=rows // attention.head_dim, rotated=attention.rope_dim)
        return None

    def _check_finite(self, name: str, *, finite: bool) -> None:
        if not finite:
            raise ModelError(
                f"{source_name(self._names, name)} in {self._source.where} has weights that are no finite numbers.",
                "The file is damaged; fetch it again.",
            )


def _rows_by_head(attention: Attention, part: str) -> Array | None:
    """The rows of a part of a tensor that is stored head by head; None for one whose parts follow each other."""
    if isinstance(attention, Gqa) and attention.gated and part in ("q", "q_gate"):
        both = np.arange(2 * attention.query_width).reshape(attention.heads, 2, attention.head_dim)
        return both[:, int(part == "q_gate")].ravel()
    if not isinstance(attention, DeltaNet) or part not in ("mixed", "z", "step", "decay"):
        return None
    keys, values = attention.key_heads, attention.value_heads // attention.key_heads
    if part in ("step", "decay"):
        return np.arange(2 * keys * values).reshape(keys, 2, values)[:, int(part == "decay")].ravel()
    sizes = (attention.key_dim, attention.key_dim, values * attention.value_dim, values * attention.value_dim)
    every = np.arange(keys * sum(sizes)).reshape(keys, -1)
    q, k, v, z = np.split(every, np.cumsum(sizes)[:-1], axis=1)
    return z.ravel() if part == "z" else np.concatenate([q.ravel(), k.ravel(), v.ravel()])


def half_split(rows: int, *, heads: int, first: int = 0, rotated: int) -> Array:
    """The order of rows that brings `rotated` of each head, from the row `first` on, from interleaved pairs to
    half-split order."""
    order = np.arange(rows).reshape(heads, rows // heads)
    pairs = order[:, first : first + rotated].reshape(heads, rotated // 2, 2)
    order[:, first : first + rotated] = pairs.swapaxes(1, 2).reshape(heads, rotated)
    return order.ravel()


def stored_names(architecture: str, tensors: Collection[str]) -> Mapping[str, str]:
    """checkpoint_names, with those of experts as these tensors hold them: each by itself or all of a layer in one."""
    names = checkpoint_names(architecture)
    if "expert_gate" not in _support(architecture).names and any(
        name.endswith(".experts.gate_up_proj") for name in tensors
    ):
        return {**names, **STACKED_EXPERTS}
    if any(name.endswith(".experts.up_proj") for name in tensors):  # of experts without gates
        parts = ("expert_up", "expert_down")
        return {**names, **{part: "=" + re.sub(r"\.\{\}\.(\w+)$", r".\1[{}]", names[part]) for part in parts}}
    return names


def open_weights(path: Path) -> Weights:
    """Open a GGUF file, or a Hugging Face directory with config.json and safetensors (one file or shards).

    ModelError names a tensor or file that is missing, unknown, of the wrong shape or truncated. Arrays stay on disk
    until they are read.
    """
    path = Path(path)
    if path.is_dir():
        return _open_directory(path)
    if not path.exists():
        raise ModelError(f"No model at {path}.", "Give a model directory, a GGUF file, or the name of a known model.")
    return _open_gguf(open_gguf(path))


def _open_directory(path: Path) -> Weights:
    from wager.models.quantised_checkpoints import QuantisedSource
    from wager.models.safetensors_files import SafetensorsSource  # imports its library, which a GGUF does not need

    config = read_json(path / "config.json")
    spec = read_config(config, runnable=True, where=str(path / "config.json"))
    files = SafetensorsSource(path)
    names = stored_names(spec.details.architecture, files.shapes)
    source: Source = files
    ignored, support = ignored_tensors(config, spec), _support(spec.details.architecture)
    if is_wrapped(config):
        if any(name.startswith("language_model.") for name in files.shapes):  # Gemma 3, Mistral 3
            names = {part: re.sub("^=?", r"\g<0>language_model.", name) for part, name in names.items()}
            ignored = tuple(rf"language_model\.{pattern}" for pattern in ignored)
        elif any(name.startswith("model.language_model.") for name in files.shapes):
            names = _under(names, "model.language_model")
            ignored = tuple(pattern.replace(r"model\.layers", r"model\.language_model\.layers") for pattern in ignored)
        ignored = (*ignored, *_OTHER_INPUTS)
    elif any(name.startswith(f"{support.root}.") for name in files.shapes):
        names = _under(names, support.root)
    if spec.details.architecture == "GptOssForCausalLM":
        from wager.models.gpt_oss import JoinedExperts

        source = JoinedExperts(files, spec)
    elif config.get("quantization_config"):
        source = quantised = QuantisedSource(files, config["quantization_config"])
        ignored = (*ignored, *map(re.escape, quantised.zero_biases))
    if spec.tied and _has_own_head(files, names):
        spec = replace(spec, tied=False)
    check_tensors(spec, source, names, ignored=ignored)
    return StoredWeights(spec, source, names)


def _has_own_head(files: SafetensorsSource, names: Mapping[str, str]) -> bool:
    """Whether a checkpoint has an LM head that is not its embedding, whatever its configuration says: as transformers,
    which then takes both."""
    stored = [source_name(names, f"{part}.weight") for part in ("embed", "head")]
    if not files.shapes.keys() >= {*stored}:
        return False
    embedding, head = map(files.raw, stored)
    if (embedding.shape, embedding.dtype) != (head.shape, head.dtype):
        return True
    parts = (slice(row, row + _COMPARED) for row in range(0, len(head), _COMPARED))
    return not all(np.array_equal(embedding[part].view(np.uint8), head[part].view(np.uint8)) for part in parts)


_COMPARED = 1024
"""Rows that are compared at a time."""


def _open_gguf(file: GgufFile) -> Weights:
    further = read_further_layers(file.metadata, file.where)
    if further and not any(name.startswith("blk.0.") for name in file.tensors):
        raise ModelError(
            f"{file.where} has only what predicts further tokens (MTP), not the model whose states that reads.",
            "Give it beside the model's own file: --drafter mtp:PATH.",
        )
    spec = with_rope_factors(read_gguf(file.metadata, file.shapes, where=file.where), file)
    names = gguf_names(file.tensors)
    joined = (r"blk\.\d+\.attn_kv_b\.weight",) if spec.details.split_latent else ()
    modules = (rf"blk\.{spec.num_layers + i}\..*" for i in range(further))
    shared = (rf"blk\.{layer}\.attn_[kv](_norm)?\..*" for layer in _sharing(spec))
    factors = map(re.escape, (ROPE_FACTORS, *LONG_ROPE_FACTORS))
    check_tensors(spec, file, names, ignored=(*factors, *joined, *modules, *shared))
    return StoredWeights(spec, file, names)


def with_rope_factors(spec: ModelSpec, file: GgufFile) -> ModelSpec:
    """The spec with the factors of rotated pairs that a file stores as tensors. ModelError if they are damaged, or
    missing."""
    rope = spec.details.rope
    if ROPE_FACTORS in file.tensors:
        rope = replace(rope, factors=_factors(spec, file, ROPE_FACTORS))
    elif all(name in file.tensors for name in LONG_ROPE_FACTORS):
        short, long = (_factors(spec, file, name) for name in LONG_ROPE_FACTORS)
        original = read_original_context(file.metadata, file.where) or spec.context
        rope = replace(rope, factors=short, long_factors=long, original=original)
    elif file.metadata.get(f"{spec.details.architecture}.rope.scaling.type") == "longrope":
        raise ModelError(
            f"{file.where} has RoPE scaling 'longrope' without its tensors {' and '.join(LONG_ROPE_FACTORS)}.",
            "The file is damaged; fetch it again.",
        )
    return replace(spec, decoder=replace(spec.details, rope=rope))


_UNTURNED = 9e29
"""A factor that stands for infinity: llama.cpp writes 1e30 for pairs that do not turn."""


def _factors(spec: ModelSpec, file: GgufFile, name: str) -> tuple[float, ...]:
    """The RoPE factors that the file stores as a tensor, multiplied by those of its metadata."""
    _check_shape(file.where, name, found=file.shapes[name], expected=(spec.rope_dim("global") // 2,))
    stored = file.read(name, np.dtype(np.float64))
    stored = np.where(stored >= _UNTURNED, np.inf, stored)
    if not (((stored >= 1e-6) & (stored <= 1e6)) | np.isposinf(stored)).all():
        raise ModelError(
            f"{name} in {file.where} has factors that are not numbers from 1e-6 to 1e6, or infinite.",
            "The file is damaged; fetch it again.",
        )
    return tuple((stored * np.array(spec.details.rope.factors or (1.0,))).tolist())


def stored_shapes(shapes: Mapping[str, tuple[int, ...]], names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint that hold those of canonical names, of which several may be parts of one."""
    parts: dict[str, tuple[int, ...]] = {}
    for canonical, shape in shapes.items():
        name = source_name(names, canonical)
        rows = parts.get(name, (0,))[0]  # of other matrices that are stored in the same tensor
        parts[name] = (rows + shape[0], *shape[1:])
    found: dict[str, tuple[int, ...]] = {}
    for part, shape in parts.items():
        name, index = part_of(part)
        found[name] = shape if index is None else (index + 1, *shape)  # parts ascend: the last one counts them
    return found


def check_tensors(spec: ModelSpec, source: Source, names: Mapping[str, str], *, ignored: tuple[str, ...]) -> None:
    """ModelError unless the source holds exactly the tensors of the spec, each in its shape.

    `ignored` are patterns of further names that are allowed.
    """
    shapes, expected = source.shapes, stored_shapes(tensor_shapes(spec), names)
    for name, shape in expected.items():
        if name not in shapes:
            raise ModelError(
                f"{source.where} lacks the tensor {name} {list(shape)}.",
                f"The file is incomplete, or its architecture is not {spec.details.architecture}.",
            )
        _check_shape(source.where, name, found=shapes[name], expected=shape)
    for name in shapes:
        if name not in expected and not any(re.fullmatch(pattern, name) for pattern in ignored):
            raise ModelError(
                f"{source.where} has a tensor {one_line(name)} that {spec.details.architecture} does not use.",
                "The model has parts that its configuration does not describe, so the result would be wrong.",
            )


def _check_shape(where: str, name: str, *, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Leading dimensions may be split or joined, and a vector be cut in any way."""
    if len(expected) == 1 and math.prod(found) == expected[0]:
        return
    if (math.prod(found), found[-1:]) != (math.prod(expected), expected[-1:]):
        raise ModelError(
            f"{name} in {where} has shape {list(found)}; its configuration requires {list(expected)}.",
            "Weights and configuration do not match; fetch the model again.",
        )


# ---- the form in which matrices are multiplied -----------------------------------------------------------------------

FORMAT_OF_DTYPE: Mapping[str, str | None] = {"auto": None, "bf16": None, "q8": "q8_0", "q4": "q4_1"}
"""dtype -> the format of matrices that are not stored in as few bits already. q4 is q4_1 rather than q4_0: a tenth more
bytes and a sixth to two fifths less KL; see docs/quantisation.md."""

_WIDE = frozenset({"embed", "head", "layer_embed"})
"""Parts that q4 keeps in q8_0, as llama.cpp's files do."""

_PLAIN = frozenset({"F32", "F16", "BF16", "F64", "random"})
"""Types of floats, whose form needs no words."""

_FLOATS = frozenset({"router", "conv"})
"""Matrices that are read as float32."""


_OWN_BIASES = frozenset({"router", "correction", "conv"})
"""Parts whose biases are read as float32; others are packed with their matrices."""


def float_tensors(spec: ModelSpec) -> list[str]:
    """The names, as in tensor_shapes, of the tensors that are read as float32 and not packed: vectors, routers and
    convolutions."""
    found = []
    for name, shape in tensor_shapes(spec).items():
        *_, part, suffix = name.split(".")
        packed = part not in _OWN_BIASES if suffix == "bias" else len(shape) == 2 and part not in _FLOATS
        if not packed:
            found.append(name)
    return found


def num_parameters(spec: ModelSpec) -> int:
    """Distinct parameters: a tied head counts once. Where only the shape is known, vectors are the norms alone."""
    if spec.decoder is None:
        norms = sum(layer.count * layer.sublayers for layer in spec.layers) + 1
        return sum(spec.elements().values()) + norms * spec.hidden
    return sum(map(math.prod, tensor_shapes(spec).values()))


class Matrices:
    """The matrices of `weights`, by the names of `tensor_shapes`, in the form that `dtype` (a key of FORMAT_OF_DTYPE)
    asks for. Floats are of the kernels' activation type `act`."""

    def __init__(self, weights: Weights, dtype: str, act: DType = BFLOAT16, *, only_layers: bool = False) -> None:
        self._weights = weights
        self.spec = weights.spec
        self.act = act
        self._dtype = dtype
        self._shapes = {name: shape for name, shape in tensor_shapes(weights.spec).items() if len(shape) == 2}
        if only_layers:
            self._shapes = {name: shape for name, shape in self._shapes.items() if name.startswith("layers.")}
        self.formats = {name: self._format_of(name) for name in self._shapes}
        """Each matrix's block format; None: floats."""

    def read(self, name: str) -> Matrix:
        """A matrix [outputs, inputs]; ModelError as Weights.read."""
        known = self.formats[name]
        return self._weights.read(name, self.act) if known is None else self._weights.quantised(name, known)

    def refit(self, matrix: Array) -> Matrix:
        """A matrix that was made from others, quantised where `dtype` says so."""
        wanted = self._fitting(matrix.shape[1])
        return matrix if wanted is None else quantise(matrix, wanted)

    def packed(self) -> Iterator[tuple[tuple[int, int], str | None]]:
        """Shape and format of every matrix that is packed, the two halves of `kv_b` of each head."""
        attention = self.spec.attention
        for name, known in self.formats.items():
            part = name.split(".")[-2]
            if part in ("kv_b", "k_b", "v_b") and isinstance(attention, Mla):
                if part != "v_b":
                    form = known if part == "k_b" else self._fitting(attention.nope)
                    yield from repeat(((attention.kv_rank, attention.nope), form), attention.heads)
                if part != "k_b":
                    yield from repeat(((attention.value, attention.kv_rank), known), attention.heads)
            elif part not in _FLOATS:
                rows, inputs = self._shapes[name]
                yield (rows, inputs), known if self._beside(name) == known else None

    def _beside(self, name: str) -> str | None:
        """The form of the projection that a matrix is multiplied together with, or its own: see `in_one_form`."""
        *places, part, suffix = name.split(".")
        other = part.replace("gate", "up") if part.endswith("gate") else part.replace("up", "gate")
        return self.formats.get(".".join((*places, other, suffix)), self.formats[name])

    @property
    def description(self) -> str:
        """The formats and how many matrices have each, the most frequent first, such as `q4_1 x210 + q8_0 x1`; the name
        of the activation type alone where no matrix is quantised."""
        counts = Counter(name for name in self.formats.values() if name is not None)
        floats = sum(known is None for name, known in self.formats.items() if name.split(".")[-2] not in _FLOATS)
        if not counts:
            return str(self.act)
        if floats:
            counts[str(self.act)] = floats
        return " + ".join(f"{name} x{count}" for name, count in counts.most_common())

    @property
    def converted(self) -> dict[str, str]:
        """Types of the file that the kernels do not multiply -> what their tensors are read as instead, in words."""
        found = {}
        for name, known in self.formats.items():
            stored = self._weights.stored(name)
            if stored.format == known and known is not None and stored.kind.lower() != known:
                found[stored.kind] = known if stored.exact else f"{known} (rounded)"
            elif known is None and stored.format is None and stored.kind not in _PLAIN:
                found[stored.kind] = str(self.act) if stored.exact else f"{self.act} (rounded)"
        return found

    def _fitting(self, inputs: int) -> str | None:
        """Of a matrix that is made from others."""
        return block_format(self._dtype, None, inputs)

    def _format_of(self, name: str) -> str | None:
        part, own = name.split(".")[-2], self._weights.stored(name).format
        if part in _FLOATS:
            return None
        return block_format(self._dtype, own, self._shapes[name][1], wide=part in _WIDE)


def block_format(dtype: str, own: str | None, inputs: int, *, wide: bool = False) -> str | None:
    """The format in which a matrix of so many inputs is multiplied that is stored in `own` (of both None: floats),
    where `dtype` is asked for, a key of FORMAT_OF_DTYPE: its own, unless that has more bits; q4 keeps a `wide` one in
    q8_0."""
    if dtype == "bf16":
        return None
    wanted = "q8_0" if wide and dtype == "q4" else FORMAT_OF_DTYPE[dtype]
    if wanted is None or inputs % BLOCK or (own is not None and _bits(own) <= _bits(wanted)):
        return own
    return wanted


def _bits(name: str) -> float:
    return BLOCK_FORMATS[name].packed_bits


def in_one_form(parts: Sequence[Matrix]) -> list[Matrix]:
    """The matrices as they are if all are floats or of one format; otherwise all in bfloat16, because products that are
    taken together need one format."""
    kinds = {part.format.name if isinstance(part, QuantisedMatrix) else None for part in parts}
    if len(kinds) == 1:
        return list(parts)
    return [part.dequantise(BFLOAT16) if isinstance(part, QuantisedMatrix) else part for part in parts]
