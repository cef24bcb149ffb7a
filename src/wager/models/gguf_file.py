"""Reads a GGUF file: metadata and tensor directory when it is opened, tensors on demand. gguf dequantises them.

This module parses the directory instead of gguf's own reader because a vocabulary of 150,000 strings then takes a tenth
of a second instead of several, and because errors can name a truncated file.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from wager.arch.gguf_config import TensorSize
from wager.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32
_CHUNK = 1 << 22
"""Elements dequantised at a time: 16 MB of float32."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The position of a tensor in the file, in bytes. `shape` is in torch's order, the contiguous dimension last."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    size: int


class GgufFile:
    """One GGUF file, memory-mapped. `metadata` has every key, `tensors` the position of every tensor."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}.", "Give a GGUF file or a model directory.") from error
        cursor = _Cursor(self._data, self.where)
        if cursor.take(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file.", "Give a GGUF file or a directory with config.json.")
        version = int(cursor.scalar("I"))
        if version not in (2, 3):
            raise ModelError(
                f"{path} has GGUF version {version}, which is not supported.",
                "Supported are versions 2 and 3, little-endian.",
            )
        tensors, keys = int(cursor.scalar("Q")), int(cursor.scalar("Q"))
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            name = cursor.string()
            self.metadata[name] = cursor.value(int(cursor.scalar("I")))
        self.tensors = self._directory(cursor, tensors)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self.tensors.items()}

    @property
    def sizes(self) -> dict[str, TensorSize]:
        return {
            name: TensorSize(stored.kind.name, math.prod(stored.shape), stored.size)
            for name, stored in self.tensors.items()
        }

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor as `dtype`, dequantised in parts, so that there is never a float32 copy of all of it."""
        stored = self.tensors[name]
        block, size = GGML_QUANT_SIZES[stored.kind]
        out = torch.empty(math.prod(stored.shape), dtype=dtype)
        raw = np.frombuffer(self._data, dtype=np.uint8, count=stored.size, offset=stored.offset)
        step = max(1, _CHUNK // block)
        for first in range(0, len(out) // block, step):
            part = raw[first * size : (first + step) * size]
            try:
                values = dequantize(_rows(part, size), stored.kind).reshape(-1)
            except NotImplementedError as error:
                raise ModelError(
                    f"{name} in {self.where} is stored as {stored.kind.name}, which cannot be dequantised.",
                    "Use another quantisation of the model, for example Q4_K_M or Q8_0.",
                ) from error
            out[first * block : first * block + len(values)] = torch.from_numpy(
                np.require(values, requirements=["C", "W"])
            )
        return out.view(stored.shape)

    def _directory(self, cursor: _Cursor, count: int) -> dict[str, StoredTensor]:
        entries = []
        for _ in range(count):
            name = cursor.string()
            dimensions = [int(cursor.scalar("Q")) for _ in range(int(cursor.scalar("I")))]
            entries.append((name, tuple(reversed(dimensions)), int(cursor.scalar("I")), int(cursor.scalar("Q"))))
        alignment = int(self.metadata.get("general.alignment", _ALIGNMENT)) or _ALIGNMENT
        start = -(-cursor.offset // alignment) * alignment
        return {name: self._place(name, shape, kind, start + offset) for name, shape, kind, offset in entries}

    def _place(self, name: str, shape: tuple[int, ...], code: int, offset: int) -> StoredTensor:
        try:
            kind = GGMLQuantizationType(code)
        except ValueError as error:
            raise ModelError(
                f"{name} in {self.where} has the unknown tensor type {code}.",
                "The file is damaged, or newer than the installed gguf library: pip install -U gguf.",
            ) from error
        block, size = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise ModelError(f"{name} in {self.where} has shape {list(shape)}, which {kind.name} cannot store.")
        bytes_needed = math.prod(shape) // block * size
        if offset + bytes_needed > len(self._data):
            end = offset + bytes_needed
            raise ModelError(
                f"{self.where} is truncated: {name} ends at byte {end}, the file at {len(self._data)}.",
                "Fetch the file again.",
            )
        return StoredTensor(shape, kind, offset, bytes_needed)


def open_gguf(path: Path) -> GgufFile:
    """The parsed file; parsed again only if it has changed on disk."""
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.", "Give a GGUF file or a directory.") from error
    return _open(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=2)
def _open(path: Path, changed: int, size: int) -> GgufFile:
    return GgufFile(path)


def _rows(part: np.ndarray[Any, np.dtype[np.uint8]], size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Blocks of `size` bytes as rows of up to 256 blocks: gguf takes 16 rows at a time, and few long rows need fewer
    calls."""
    blocks = len(part) // size
    width = next(w for w in (256, 64, 16, 4, 1) if blocks % w == 0)
    return part.reshape(blocks // width, width * size)


class _Cursor:
    """Reads the header from its beginning; ModelError if it extends beyond the end of the file."""

    def __init__(self, data: mmap.mmap, where: str) -> None:
        self._data, self._where, self.offset = data, where, 0

    def take(self, size: int) -> bytes:
        self._need(size)
        self.offset += size
        return self._data[self.offset - size : self.offset]

    def scalar(self, code: str) -> int | float | bool:
        value: int | float | bool = struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]
        return value

    def string(self) -> str:
        return self.take(int(self.scalar("Q"))).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ModelError(f"{self._where} has a metadata value of unknown type {kind}.", "The file is damaged.")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = int(self.scalar("I")), int(self.scalar("Q"))
        if kind == _STRING:
            return self._strings(count)
        if kind not in _SCALARS:
            raise ModelError(f"{self._where} has a metadata array of unknown type {kind}.", "The file is damaged.")
        code = _SCALARS[kind]
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(code))))

    def _strings(self, count: int) -> list[str]:
        """Many strings in one loop: vocabularies take most of the time of opening a file."""
        self._need(8 * count)
        data, at, length, strings = self._data, self.offset, struct.Struct("<Q").unpack_from, []
        try:
            for _ in range(count):
                end = at + 8 + length(data, at)[0]
                strings.append(data[at + 8 : end].decode("utf-8", errors="replace"))
                at = end
        except struct.error:
            at = len(data) + 1
        self._need(at - self.offset)
        self.offset = at
        return strings

    def _need(self, size: int) -> None:
        if self.offset + size > len(self._data):
            raise ModelError(
                f"{self._where} is truncated: its header goes on to byte {self.offset + size} of {len(self._data)}.",
                "Fetch the file again.",
            )
