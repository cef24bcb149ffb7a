"""Opens a model's file or directory and reads its tensors under canonical names, for every supported format.

`open_weights` checks every name and shape before a tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from wager.arch.config_keys import brief
from wager.arch.gguf_config import gguf_layout, read_gguf, read_parts_count
from wager.arch.hf_config import read_config
from wager.arch.layers import Mla
from wager.arch.spec import ModelSpec
from wager.errors import ModelError
from wager.kernels.arrays import BFLOAT16, FLOAT32, Array, DType, all_finite
from wager.kernels.blocks import QuantisedMatrix
from wager.kernels.quantise import quantise
from wager.models.gguf_blocks import StoredAs
from wager.models.gguf_file import GgufFile, open_gguf
from wager.models.json_files import read_json
from wager.models.tensors import (
    GGUF_NAMES,
    ROPE_FACTORS,
    checkpoint_names,
    ignored_tensors,
    source_name,
    tensor_shapes,
)


class Source(Protocol):
    """Named tensors in one file or several. `where` names it in errors."""

    where: str

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, dtype: DType) -> Array: ...

    def stored(self, name: str) -> StoredAs: ...

    def read_blocks(self, name: str) -> QuantisedMatrix:
        """A matrix in the format that `stored` gives, which is not None."""


class Weights(Protocol):
    """A model's tensors under the names of tensors.tensor_shapes."""

    spec: ModelSpec

    def read(self, name: str, dtype: DType = FLOAT32) -> Array:
        """One tensor, contiguous, in the shape that tensor_shapes gives."""

    def stored(self, name: str) -> StoredAs:
        """How a tensor is stored."""

    def quantised(self, name: str, format_name: str) -> QuantisedMatrix:
        """A matrix in that format: as it is stored, or quantised from bfloat16. Its rows are ordered as by `read`."""


class StoredWeights:
    """Weights in a checkpoint. `permuted`: query and key rows are in llama.cpp's order, which `read` reverts."""

    def __init__(self, spec: ModelSpec, source: Source, names: Mapping[str, str], *, permuted: bool = False) -> None:
        self.spec = spec
        self._source, self._names, self._permuted = source, names, permuted

    def read(self, name: str, dtype: DType = FLOAT32) -> Array:
        tensor = self._source.read(source_name(self._names, name), dtype)
        self._check_finite(name, finite=all_finite(tensor))
        order = self._order(name, len(tensor))
        return tensor if order is None else tensor[order]

    def stored(self, name: str) -> StoredAs:
        return self._source.stored(source_name(self._names, name))

    def quantised(self, name: str, format_name: str) -> QuantisedMatrix:
        if self.stored(name).format != format_name:
            return quantise(self.read(name, BFLOAT16), format_name)
        matrix = self._source.read_blocks(source_name(self._names, name))
        self._check_finite(name, finite=matrix.is_finite())
        order = self._order(name, matrix.shape[0])
        return matrix if order is None else matrix.take(order)

    def _order(self, name: str, rows: int) -> Array | None:
        """The stored row of each row of a tensor, where they differ."""
        attention, part = self.spec.attention, name.split(".")[-2]
        if isinstance(attention, Mla):
            if self.spec.details.interleaved_rope and part in ("q", "q_b", "kv_a"):
                return _half_split(rows, heads=1 if part == "kv_a" else attention.heads, rotated=attention.rope)
        elif self._permuted and part in ("q", "k"):
            heads = attention.heads if part == "q" else attention.kv_heads
            return _half_split(rows, heads=heads, rotated=attention.head_dim)
        return None

    def _check_finite(self, name: str, *, finite: bool) -> None:
        if not finite:
            raise ModelError(
                f"{source_name(self._names, name)} in {self._source.where} has weights that are no finite numbers.",
                "The file is damaged; fetch it again.",
            )


def _half_split(rows: int, *, heads: int, rotated: int) -> Array:
    """The order of rows that brings the last `rotated` of each head from interleaved pairs to half-split order."""
    order = np.arange(rows).reshape(heads, rows // heads)
    pairs = order[:, -rotated:].reshape(heads, rotated // 2, 2)
    order[:, -rotated:] = pairs.swapaxes(1, 2).reshape(heads, rotated)
    return order.ravel()


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
    from wager.models.safetensors_files import SafetensorsSource  # imports its library, which a GGUF does not need

    config = read_json(path / "config.json")
    spec = read_config(config, runnable=True, where=str(path / "config.json"))
    source, names = SafetensorsSource(path), checkpoint_names(spec.details.architecture)
    check_tensors(spec, source, names, ignored=ignored_tensors(config, spec))
    return StoredWeights(spec, source, names)


def _open_gguf(file: GgufFile) -> Weights:
    parts = read_parts_count(file.metadata, file.where)
    if parts > 1:
        raise ModelError(
            f"{file.where} is one of {parts} parts of a split GGUF, which is not supported.",
            "Merge the parts first: llama-gguf-split --merge FIRST_PART OUTPUT.",
        )
    spec = read_gguf(file.metadata, file.shapes, where=file.where)
    if ROPE_FACTORS in file.tensors:
        spec = _with_factors(spec, file)
    check_tensors(spec, file, GGUF_NAMES, ignored=(re.escape(ROPE_FACTORS),))
    return StoredWeights(spec, file, GGUF_NAMES, permuted=gguf_layout(spec.details.architecture).permuted)


def _with_factors(spec: ModelSpec, file: GgufFile) -> ModelSpec:
    """The spec with the RoPE factors that the file stores as a tensor, multiplied by those of its metadata."""
    decoder, pairs = spec.details, spec.attention.head_dim // 2
    _check_shape(file.where, ROPE_FACTORS, found=file.shapes[ROPE_FACTORS], expected=(pairs,))
    stored = file.read(ROPE_FACTORS, np.dtype(np.float64))
    if not ((stored >= 1e-6) & (stored <= 1e6)).all():
        raise ModelError(
            f"{ROPE_FACTORS} in {file.where} has factors that are not above 0 and finite.",
            "The file is damaged; fetch it again.",
        )
    factors = stored * np.array(decoder.rope.factors or (1.0,))
    rope = replace(decoder.rope, factors=tuple(factors.tolist()))
    return replace(spec, decoder=replace(decoder, rope=rope))


def check_tensors(spec: ModelSpec, source: Source, names: Mapping[str, str], *, ignored: tuple[str, ...]) -> None:
    """ModelError unless the source holds exactly the tensors of the spec, each in its shape.

    `ignored` are patterns of further names that are allowed.
    """
    shapes = source.shapes
    expected = {source_name(names, name): shape for name, shape in tensor_shapes(spec).items()}
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
                f"{source.where} has a tensor {brief(name)} that {spec.details.architecture} does not use.",
                "The model has parts that its configuration does not describe, so the result would be wrong.",
            )


def _check_shape(where: str, name: str, *, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise ModelError(
            f"{name} in {where} has shape {list(found)}; its configuration requires {list(expected)}.",
            "Weights and configuration do not match; fetch the model again.",
        )
