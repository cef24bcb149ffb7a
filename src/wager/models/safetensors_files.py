"""Reads a directory's safetensors: one file or shards, memory-mapped, tensor by tensor; writes one file. Pickled
weights are only found, and never read: a pickle may run any code.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from wager.arch.config_keys import one_line, read_json
from wager.errors import ModelError
from wager.inputs import replacing
from wager.kernels.arrays import BFLOAT16, Array, DType
from wager.kernels.blocks import QuantisedMatrix
from wager.models.gguf import StoredAs, part_of

_PATTERNS = ("pytorch_model.bin", "pytorch_model-*-of-*.bin", "*lm_head.pt", "model.pt")
"""As transformers and the repositories of EAGLE and Medusa name them; others, such as optimizer.pt, are none."""


def pickled_weights(folder: Path) -> list[Path]:
    """The files, in order of their names."""
    return sorted({file for pattern in _PATTERNS for file in folder.glob(pattern)})


_FLOATS: Mapping[str, DType] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
    "F64": np.dtype("<f8"),
}

_INTEGERS: Mapping[str, DType] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}

_SMALL_FLOATS: Mapping[str, DType] = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""Types that mean nothing without scales."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a mapped safetensors file; `start` is its first byte in the file."""

    data: mmap.mmap
    kind: str
    shape: tuple[int, ...]
    start: int

    def view(self, dtype: DType) -> Array:
        return np.frombuffer(self.data, dtype, math.prod(self.shape), self.start).reshape(self.shape)

    def part(self, index: int) -> _Stored:
        """The part of that number along the first dimension."""
        item = {**_FLOATS, **_INTEGERS}.get(self.kind, np.dtype(np.uint8)).itemsize
        start = self.start + index * math.prod(self.shape[1:]) * item
        return _Stored(self.data, self.kind, self.shape[1:], start)


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A tensor as it is stored: its type by the format's name, such as BF16, its shape, and its bytes."""

    kind: str
    shape: tuple[int, ...]
    data: bytes


class SafetensorsSource:
    """model.safetensors, or else the shards that model.safetensors.index.json lists; mapped, read tensor by tensor."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._tensors: dict[str, _Stored] = {}
        for file in _shards(path):
            self._tensors.update(_open_shard(file))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self._tensors.items()}

    def read(self, name: str, dtype: DType) -> Array:
        """A tensor, or with [i] after its name a part of it, see weights.Source."""
        stored = self._find(name)
        if stored.kind not in _FLOATS:
            raise ModelError(
                f"{name} in {self.where} is stored as {stored.kind}, which is not supported.",
                f"Supported are: {', '.join(_FLOATS)}. Use the unquantised checkpoint.",
            )
        with np.errstate(all="ignore"):  # Weights.read checks that they are finite
            return stored.view(_FLOATS[stored.kind]).astype(dtype)  # a copy outlives the mapped file

    def raw(self, name: str) -> Array:
        """A tensor as it is stored, or a part of one, as a view of the mapped file. ModelError for a type that is not
        supported."""
        stored = self._find(name)
        dtype = {**_FLOATS, **_INTEGERS, **_SMALL_FLOATS}.get(stored.kind)
        if dtype is None:
            raise ModelError(f"{name} in {self.where} is stored as {stored.kind}, which is not supported.")
        return stored.view(dtype)

    def read_integers(self, name: str) -> Array:
        """A tensor of whole numbers or truth values, as int64."""
        stored = self._tensors[name]
        if stored.kind not in _INTEGERS:
            raise ModelError(f"{name} in {self.where} is stored as {stored.kind}, not as whole numbers.")
        return stored.view(_INTEGERS[stored.kind]).astype(np.int64)

    def _find(self, name: str) -> _Stored:
        tensor, index = part_of(name)
        stored = self._tensors[tensor]
        return stored if index is None else stored.part(index)

    def read_bytes(self, name: str) -> TensorBytes:
        """A tensor as it is stored. ModelError for a type that is not supported."""
        stored = self._tensors[name]
        return TensorBytes(stored.kind, stored.shape, self.raw(name).tobytes())

    def stored(self, name: str) -> StoredAs:
        return StoredAs(self._find(name).kind)

    def read_blocks(self, name: str) -> QuantisedMatrix:
        raise ModelError(f"{name} in {self.where} is not quantised.")


def _shards(path: Path) -> list[Path]:
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if single.exists():  # an index beside it is of what was saved here before: transformers passes over it, too
        return [single]
    if not index.exists():
        raise _absent(path)
    weight_map = read_json(index).get("weight_map")
    named = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
    if not named or not weight_map:
        raise ModelError(f"{index} has no weight_map of files by tensor.", "The file is damaged; fetch it again.")
    files = [path / name for name in dict.fromkeys(weight_map.values())]
    for file in files:
        if not os.path.isfile(file):  # which takes a name that no file can have
            raise ModelError(f"{one_line(file)}, which {index.name} lists, is absent.", "Fetch the model again.")
    return files


def _absent(path: Path) -> ModelError:
    if files := pickled_weights(path):
        return ModelError(
            f"{files[0]} is a pickle, which may run any code when it is read, and wager reads safetensors.",
            f"Convert it (needs wager[train]): python -m wager.train.convert {shlex.quote(str(path))}",
        )
    return ModelError(
        f"{path} has neither model.safetensors nor model.safetensors.index.json.",
        "wager reads safetensors; convert other checkpoints first (save_pretrained does).",
    )


def _open_shard(file: Path) -> dict[str, _Stored]:
    """The tensors of one file, whose header the library has checked: offsets, sizes and types agree with the file."""
    try:
        with safe_open(file, framework="numpy"), file.open("rb") as opened:
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"{file} cannot be read: {one_line(error)}.", "The file is truncated or damaged; fetch it again."
        ) from error
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: _Stored(data, item["dtype"], tuple(item["shape"]), 8 + length + item["data_offsets"][0])
        for name, item in header.items()
    }


def write_tensors(path: Path, tensors: Mapping[str, TensorBytes]) -> None:
    """A safetensors file: the length of the header, the header (JSON, padded to 8 bytes), the bytes. The library's own
    writer for numpy knows no bfloat16."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + len(tensor.data)
        header[name] = {"dtype": tensor.kind, "shape": tensor.shape, "data_offsets": [start, end]}
    written = json.dumps(header).encode()
    written += b" " * (-len(written) % 8)
    with replacing(path) as file:
        file.write(len(written).to_bytes(8, "little") + written)
        for tensor in tensors.values():
            file.write(tensor.data)
