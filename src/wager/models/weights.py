"""Opens a model's file or directory and reads its tensors under canonical names, for every supported format.

`open_weights` checks every name and shape before a tensor is read.
"""

from __future__ import annotations

import json
import math
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from wager.arch.attention import Mla
from wager.arch.config_keys import brief
from wager.arch.gguf_config import gguf_layout, read_gguf
from wager.arch.gguf_keys import read_parts_count
from wager.arch.hf_config import read_config
from wager.arch.spec import ModelSpec
from wager.errors import ModelError
from wager.kernels.arrays import BFLOAT16, FLOAT32, Array, DType, all_finite
from wager.models.gguf_file import GgufFile, open_gguf
from wager.models.tensors import (
    GGUF_NAMES,
    ROPE_FACTORS,
    checkpoint_names,
    ignored_tensors,
    source_name,
    tensor_shapes,
)

_FLOATS: Mapping[str, DType] = {
    "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": BFLOAT16, "F64": np.dtype("<f8"),
}  # fmt: skip


class Source(Protocol):
    """Named tensors in one file or several. `where` names it in errors."""

    where: str

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, dtype: DType) -> Array: ...


class Weights(Protocol):
    """A model's tensors under the names of tensors.tensor_shapes."""

    spec: ModelSpec

    def read(self, name: str, dtype: DType = FLOAT32) -> Array:
        """One tensor, contiguous, in the shape that tensor_shapes gives."""


class StoredWeights:
    """Weights in a checkpoint. `permuted`: query and key rows are in llama.cpp's order, which `read` reverts."""

    def __init__(self, spec: ModelSpec, source: Source, names: Mapping[str, str], *, permuted: bool = False) -> None:
        self.spec = spec
        self._source, self._names, self._permuted = source, names, permuted

    def read(self, name: str, dtype: DType = FLOAT32) -> Array:
        tensor = self._source.read(source_name(self._names, name), dtype)
        self._check_finite(tensor, name)
        attention, part = self.spec.attention, name.split(".")[-2]
        if isinstance(attention, Mla):
            if self.spec.details.interleaved_rope and part in ("q", "q_b", "kv_a"):
                return _half_split(tensor, heads=1 if part == "kv_a" else attention.heads, rotated=attention.rope)
        elif self._permuted and part in ("q", "k"):
            heads = attention.heads if part == "q" else attention.kv_heads
            return _half_split(tensor, heads=heads, rotated=attention.head_dim)
        return tensor

    def _check_finite(self, tensor: Array, name: str) -> None:
        if not all_finite(tensor):
            raise ModelError(
                f"{source_name(self._names, name)} in {self._source.where} has weights that are no finite numbers.",
                "The file is damaged; fetch it again.",
            )


def _half_split(tensor: Array, *, heads: int, rotated: int) -> Array:
    """The rows of each head, the last `rotated` of them reordered from interleaved pairs to half-split order."""
    rows = tensor.reshape(heads, tensor.shape[0] // heads, -1).copy()
    pairs = rows[:, -rotated:].reshape(heads, rotated // 2, 2, -1)
    rows[:, -rotated:] = pairs.swapaxes(1, 2).reshape(heads, rotated, -1)
    return rows.reshape(tensor.shape)


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


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model. ModelError if it is absent, damaged or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is absent.", "A model directory needs it; fetch the model again.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", "The file is damaged; fetch it again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object.", "The file is damaged; fetch it again.")
    return value


def _open_directory(path: Path) -> Weights:
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


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a mapped safetensors file; `start` is its first byte in the file."""

    data: mmap.mmap
    kind: str
    shape: tuple[int, ...]
    start: int

    def view(self, dtype: DType) -> Array:
        return np.frombuffer(self.data, dtype, math.prod(self.shape), self.start).reshape(self.shape)


class SafetensorsSource:
    """model.safetensors, or the shards that model.safetensors.index.json lists; mapped, read tensor by tensor."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._tensors: dict[str, _Stored] = {}
        for file in _shards(path):
            self._tensors.update(_open_shard(file))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self._tensors.items()}

    def read(self, name: str, dtype: DType) -> Array:
        stored = self._tensors[name]
        if stored.kind not in _FLOATS:
            raise ModelError(
                f"{name} in {self.where} is stored as {stored.kind}, which is not supported.",
                f"Supported are: {', '.join(_FLOATS)}. Use the unquantised checkpoint.",
            )
        with np.errstate(all="ignore"):  # whoever reads weights checks that they are finite
            return stored.view(_FLOATS[stored.kind]).astype(dtype)  # a copy outlives the mapped file


def _shards(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if not index.exists():
        single = path / "model.safetensors"
        if not single.exists():
            raise ModelError(
                f"{path} has neither model.safetensors nor model.safetensors.index.json.",
                "wager reads safetensors; convert other checkpoints first (save_pretrained does).",
            )
        return [single]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map.", "The file is damaged; fetch it again.")
    files = [path / str(name) for name in dict.fromkeys(weight_map.values())]
    for file in files:
        if not file.exists():
            raise ModelError(f"{file}, which {index.name} lists, is absent.", "Fetch the model again.")
    return files


def _open_shard(file: Path) -> dict[str, _Stored]:
    """The tensors of one file, whose header the library has checked: offsets, sizes and types agree with the file."""
    try:
        with safe_open(file, framework="numpy"), file.open("rb") as opened:
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"{file} cannot be read: {brief(error)}.", "The file is truncated or damaged; fetch it again."
        ) from error
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: _Stored(data, item["dtype"], tuple(item["shape"]), 8 + length + item["data_offsets"][0])
        for name, item in header.items()
    }
