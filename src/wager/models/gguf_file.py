"""Reads a GGUF file: metadata and tensor directory when it is opened, tensors on demand.

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

from wager.arch.config_keys import shown
from wager.arch.gguf_config import TensorSize, check_tokenizer_keys, read_alignment
from wager.errors import ModelError
from wager.kernels.arrays import Array, DType
from wager.kernels.blocks import BLOCK_FORMATS, Bytes, QuantisedMatrix
from wager.models.gguf_blocks import FLOATS, StoredAs, converted, dequantised, stored_as
from wager.models.gguf_types import BLOCK_SIZES, GgufType

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_SMALLEST_ENTRY, _SMALLEST_INFO = 13, 24
"""Bytes of the shortest metadata entry and of the shortest description of a tensor."""
_CHUNK = 1 << 22
"""Elements dequantised at a time: 16 MB of float32."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The position of a tensor in the file, in bytes. `shape` is with the contiguous dimension last."""

    shape: tuple[int, ...]
    kind: GgufType
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
        cursor.need(keys * _SMALLEST_ENTRY + tensors * _SMALLEST_INFO)
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            name = cursor.name()
            if name in self.metadata:
                raise ModelError(f"{path} has the key {shown(name)} twice.", "The file is damaged; fetch it again.")
            self.metadata[name] = cursor.value(int(cursor.scalar("I")))
        check_tokenizer_keys(self.metadata, self.where)
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

    def read(self, name: str, dtype: DType) -> Array:
        """One tensor as `dtype`, dequantised in parts, so that there is never a float32 copy of all of it."""
        stored = self.tensors[name]
        if stored.kind.name.lower() in BLOCK_FORMATS:
            return self.read_blocks(name).dequantise(dtype).reshape(stored.shape)
        if stored.kind in FLOATS:
            with np.errstate(all="ignore"):
                return self._raw(stored).view(FLOATS[stored.kind]).astype(dtype).reshape(stored.shape)
        block, size = BLOCK_SIZES[stored.kind]
        out: Array = np.empty(math.prod(stored.shape), dtype)
        raw = self._raw(stored)
        step = max(1, _CHUNK // block)
        for first in range(0, len(out) // block, step):
            part = raw[first * size : (first + step) * size]
            try:
                with np.errstate(all="ignore"):  # whoever reads weights checks that they are finite
                    values = dequantised(_rows(part, size), stored.kind).reshape(-1)
                    out[first * block : first * block + len(values)] = values
            except NotImplementedError as error:
                raise self._unreadable(name) from error
        return out.reshape(stored.shape)

    def stored(self, name: str) -> StoredAs:
        return stored_as(self.tensors[name].kind)

    def read_blocks(self, name: str) -> QuantisedMatrix:
        """A quantised tensor as rows of the format that `stored` gives: the file's own bytes, or converted."""
        stored = self.tensors[name]
        try:
            return converted(self._raw(stored).reshape(math.prod(stored.shape[:-1]), -1), stored.kind, stored.shape[-1])
        except NotImplementedError as error:
            raise self._unreadable(name) from error

    def _raw(self, stored: StoredTensor) -> Bytes:
        return np.frombuffer(self._data, dtype=np.uint8, count=stored.size, offset=stored.offset)

    def _unreadable(self, name: str) -> ModelError:
        return ModelError(
            f"{name} in {self.where} is stored as {self.tensors[name].kind.name}, which cannot be dequantised.",
            "Use another quantisation of the model, for example Q4_K_M or Q8_0.",
        )

    def _directory(self, cursor: _Cursor, count: int) -> dict[str, StoredTensor]:
        """The tensors, which must lie one after the other, each at the next multiple of the alignment, as ggml's own
        reader demands: no two overlap."""
        entries = []
        for _ in range(count):
            name, rank = cursor.name(), int(cursor.scalar("I"))
            if not 1 <= rank <= _MOST_DIMENSIONS:
                raise ModelError(f"{shown(name)} in {self.where} has {rank} dimensions.", "The file is damaged.")
            dimensions = [int(cursor.scalar("Q")) for _ in range(rank)]
            entries.append((name, tuple(reversed(dimensions)), int(cursor.scalar("I")), int(cursor.scalar("Q"))))
        alignment = read_alignment(self.metadata, self.where)
        start = -(-cursor.offset // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        expected = 0
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise ModelError(f"{self.where} has the tensor {shown(name)} twice.", "The file is damaged.")
            if offset != expected:
                raise ModelError(
                    f"{shown(name)} in {self.where} begins at byte {offset} of the data, the one before it ends at "
                    f"{expected}.",
                    "The file is damaged; fetch it again.",
                )
            tensors[name] = stored = self._place(name, shape, kind, start + offset)
            expected += -(-stored.size // alignment) * alignment
        return tensors

    def _place(self, name: str, shape: tuple[int, ...], code: int, offset: int) -> StoredTensor:
        try:
            kind = GgufType(code)
        except ValueError as error:
            raise ModelError(
                f"{shown(name)} in {self.where} has the unknown tensor type {code}.",
                "The file is damaged, or of a type that this wager does not know.",
            ) from error
        block, size = BLOCK_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            raise ModelError(f"{shown(name)} in {self.where} has shape {list(shape)}, which {kind.name} cannot store.")
        bytes_needed = math.prod(shape) // block * size
        if offset + bytes_needed > len(self._data):
            end = offset + bytes_needed
            raise ModelError(
                f"{self.where} is truncated: {shown(name)} ends at byte {end}, the file at {len(self._data)}.",
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
        self.need(size)
        self.offset += size
        return self._data[self.offset - size : self.offset]

    def scalar(self, code: str) -> int | float | bool:
        value: int | float | bool = struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]
        return value

    def string(self) -> str:
        return self.take(int(self.scalar("Q"))).decode("utf-8", errors="replace")

    def name(self) -> str:
        """Of a key or a tensor; unlike text it must be valid UTF-8."""
        raw = self.take(int(self.scalar("Q")))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ModelError(
                f"{self._where} has a key or tensor whose name is no UTF-8: {shown(raw)}.", "The file is damaged."
            ) from error

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
        self.need(8 * count)
        data, at, length, strings = self._data, self.offset, struct.Struct("<Q").unpack_from, []
        last = len(data) - 8
        for _ in range(count):
            if at > last:  # a string before this one goes on beyond the end
                break
            end = at + 8 + length(data, at)[0]
            strings.append(data[at + 8 : end].decode("utf-8", errors="replace"))
            at = end
        self.need(at - self.offset if len(strings) == count else len(data))
        self.offset = at
        return strings

    def need(self, size: int) -> None:
        """ModelError unless the file has that many bytes more."""
        if self.offset + size > len(self._data):
            raise ModelError(
                f"{self._where} is truncated: its header goes on to byte {self.offset + size} of {len(self._data)}.",
                "Fetch the file again.",
            )
