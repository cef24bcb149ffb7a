"""Reads GGUF files: the types of their tensors, quantised blocks in formats that the kernels multiply, and the file
itself (metadata and directory when it is opened, tensors on demand).

To add a type, state its code and the size of a block in GgufType. If its name is in BLOCK_FORMATS of
kernels/blocks.py, the kernels multiply the file's own bytes. Every other type is converted when it is read: exactly by
a function in _CONVERT; else by gguf's dequantiser, and is quantised again to q8_0.

The file is parsed here and not by gguf's own reader, because importing that takes longer than opening a file, a
vocabulary of 150,000 strings then takes a tenth of a second instead of several, and errors can name a truncated file.
A file that llama-gguf-split cut into parts is read as one, whichever of its parts is given.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wager.arch.config_keys import short_repr
from wager.arch.gguf_config import TensorSize, check_tokenizer_keys, read_alignment, read_split
from wager.errors import ModelError
from wager.kernels.arrays import BFLOAT16, Array, DType
from wager.kernels.blocks import BLOCK, BLOCK_FORMATS, Bytes, QuantisedMatrix, quantise
from wager.models.names import part_paths

# ---- types -----------------------------------------------------------------------------------------------------------


class GgufType(IntEnum):
    """The code of a type in files; a block of it has so many `elements` in so many bytes."""

    elements: int
    size: int

    def __new__(cls, code: int, elements: int, size: int) -> GgufType:
        kind = int.__new__(cls, code)
        kind._value_, kind.elements, kind.size = code, elements, size
        return kind

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q8_1 = 9, 32, 40
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    Q8_K = 15, 256, 292
    IQ2_XXS = 16, 256, 66
    IQ2_XS = 17, 256, 74
    IQ3_XXS = 18, 256, 98
    IQ1_S = 19, 256, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, 256, 110
    IQ2_S = 22, 256, 82
    IQ4_XS = 23, 256, 136
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    IQ1_M = 29, 256, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54
    TQ2_0 = 35, 256, 66
    MXFP4 = 39, 32, 17
    NVFP4 = 40, 64, 36
    Q1_0 = 41, 128, 18


# ---- quantised blocks in formats that the kernels multiply -----------------------------------------------------------

FLOATS: Mapping[GgufType, DType] = {
    GgufType.F32: np.dtype("<f4"),
    GgufType.F16: np.dtype("<f2"),
    GgufType.BF16: BFLOAT16,
    GgufType.F64: np.dtype("<f8"),
}
"""Types that are read as they are, and numpy's types of them."""

_INTEGERS = {GgufType.I8: "i1", GgufType.I16: "<i2", GgufType.I32: "<i4", GgufType.I64: "<i8"}

_PART = 1 << 20
"""Weights converted at a time."""


@dataclass(frozen=True, slots=True)
class StoredAs:
    """How a tensor is stored: its file's name of the type, the block format that it is read in (None: floats), and
    whether every value is the same there."""

    kind: str
    format: str | None = None
    exact: bool = True


def part_of(name: str) -> tuple[str, int | None]:
    """The tensor in a checkpoint that `name` is a part of, and which part along its first dimension: None for all."""
    tensor, _, index = name.removesuffix("]").partition("[")
    return tensor, int(index) if index else None


def stored_as(kind: GgufType) -> StoredAs:
    """What a type of GGUF is read as. One that is read in no way fails when it is dequantised."""
    name = kind.name
    if kind in FLOATS:
        return StoredAs(name)
    if kind in _CONVERT:
        return StoredAs(name, _CONVERT[kind].format)
    if name.lower() in BLOCK_FORMATS:
        return StoredAs(name, name.lower())
    return StoredAs(name, "q8_0", exact=False)


def convert_blocks(raw: Bytes, kind: GgufType, k: int) -> QuantisedMatrix:
    """The rows `raw` uint8 [n, bytes] of a quantised type as a matrix [n, k]: the same bytes where the kernels know
    the type. NotImplementedError if gguf cannot dequantise it."""
    target = stored_as(kind).format or ""
    if kind not in _CONVERT and target == kind.name.lower():
        return QuantisedMatrix(BLOCK_FORMATS[target], raw, k)
    known, size = BLOCK_FORMATS[target], kind.size
    data = np.empty((len(raw), k // known.inputs * known.bytes), dtype=np.uint8)
    step = max(1, _PART // k)
    for first in range(0, len(raw), step):
        part = raw[first : first + step]
        with np.errstate(all="ignore"):  # Weights.read checks that they are finite
            if kind in _CONVERT:
                blocks = _CONVERT[kind].convert(part.reshape(-1, size))
            else:
                blocks = quantise(dequantise_rows(part, kind), target).data
        data[first : first + step] = blocks.reshape(len(part), -1)
    return QuantisedMatrix(known, data, k)


def dequantise_rows(rows: Bytes, kind: GgufType) -> NDArray[np.float32]:
    """The values of rows uint8 [n, bytes] by the gguf library. NotImplementedError for a type it cannot dequantise."""
    from gguf.constants import GGMLQuantizationType  # importing it takes longer than opening a file
    from gguf.quants import dequantize

    values: NDArray[np.float32] = dequantize(rows, GGMLQuantizationType(kind))
    return values


def _ternary(kind: GgufType) -> Callable[[Bytes], Bytes]:
    """-1, 0 and 1 as codes of q4_0 under the float16 that is the last of the block."""

    def convert(blocks: Bytes) -> Bytes:
        unit = blocks.copy()
        unit[:, -2:] = np.frombuffer(np.float16(1).tobytes(), dtype=np.uint8)
        codes = (dequantise_rows(unit, kind).reshape(-1, 8, BLOCK) + 8).astype(np.uint8)
        scales = np.broadcast_to(blocks[:, None, -2:], (len(blocks), 8, 2))
        return np.concatenate([scales, codes[..., :16] | codes[..., 16:] << 4], axis=-1)

    return convert


@cache
def _grid(kind: str) -> Bytes:
    """The codebook of a type: the position of each of its values in the type's list of them, [entries, 8 or 4]."""
    from gguf import quants

    known = getattr(quants, kind)
    known.init_grid()
    places = {float(value): place for place, value in enumerate(known.grid_map)}
    found: Bytes = np.vectorize(places.__getitem__, otypes=[np.uint8])(known.grid).reshape(known.grid_shape)
    return found


@cache
def _pairs_of(kind: str) -> NDArray[np.uint16]:
    """Codebook entries of eight values as pairs of bits, the first value lowest."""
    shifted = _grid(kind).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16)
    packed: NDArray[np.uint16] = np.bitwise_or.reduce(shifted, axis=1)
    return packed


@cache
def _sign_bits() -> Bytes:
    """The signs of eight values by the seven bits that are stored: the eighth makes their number even."""
    from gguf.quants import IQ2_XXS

    return np.frombuffer(IQ2_XXS.ksigns, dtype=np.uint8)


def _bytes_of(values: NDArray[Any]) -> Bytes:
    """Whole numbers [blocks, ...] as their bytes [blocks, n]."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)


def _words(blocks: Bytes, first: int, last: int, kind: str = "<u4") -> NDArray[Any]:
    return np.ascontiguousarray(blocks[:, first:last]).view(kind)


_BOTH_NIBBLES = 0x11
"""A factor of 32 inputs as the factors of both halves."""


def _shared_signs(words: NDArray[Any]) -> Bytes:
    """Sign bits [blocks, 32] of words with four times seven bits; the other four are a factor."""
    bits: Bytes = _sign_bits()[words[..., None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127]
    return bits.reshape(len(words), 32)


def _steps(words: NDArray[Any]) -> Bytes:
    return ((words >> 28) * _BOTH_NIBBLES).astype(np.uint8)


def _iq2_xxs(blocks: Bytes) -> Bytes:
    words = _words(blocks, 2, 66).reshape(-1, 8, 2)
    pairs = _pairs_of("IQ2_XXS")[_bytes_of(words[..., 0])]
    return np.concatenate(
        [blocks[:, :2], _steps(words[..., 1]), _shared_signs(words[..., 1]), _bytes_of(pairs)], axis=1
    )


def _iq2_xs(blocks: Bytes) -> Bytes:
    words = _words(blocks, 2, 66, "<u2")
    pairs = _pairs_of("IQ2_XS")[words & 511]
    return np.concatenate([blocks[:, :2], blocks[:, 66:], _sign_bits()[words >> 9], _bytes_of(pairs)], axis=1)


def _iq2_s(blocks: Bytes) -> Bytes:
    high = blocks[:, 66:74, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    pairs = _pairs_of("IQ2_S")[blocks[:, 2:34] | high.reshape(-1, 32).astype(np.uint16) << 8]
    return np.concatenate([blocks[:, :2], blocks[:, 74:], blocks[:, 34:66], _bytes_of(pairs)], axis=1)


def _with_signs(quads: Bytes, signs: Bytes) -> Bytes:
    """Nibbles as in q4_0 [blocks, 128] of codes [blocks, 64, 4] and sign bits [blocks, 32]."""
    high = np.unpackbits(signs, axis=1, bitorder="little").reshape(-1, 8, 32) << np.uint8(3)
    codes = quads.reshape(-1, 8, 32) | high
    return _in_nibbles(codes).reshape(len(codes), -1)


def _in_nibbles(codes: Bytes) -> Bytes:
    """[..., 32] -> [..., 16]."""
    packed: Bytes = codes[..., :16] | codes[..., 16:] << np.uint8(4)
    return packed


def _iq3_xxs(blocks: Bytes) -> Bytes:
    words = _words(blocks, 66, 98)
    nibbles = _with_signs(_grid("IQ3_XXS")[blocks[:, 2:66]], _shared_signs(words))
    return np.concatenate([blocks[:, :2], _steps(words), nibbles], axis=1)


def _iq3_s(blocks: Bytes) -> Bytes:
    ninth = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little").astype(np.uint16)
    nibbles = _with_signs(_grid("IQ3_S")[blocks[:, 2:66] | ninth << 8], blocks[:, 74:106])
    return np.concatenate([blocks[:, :2], _nibbles_in_turn(blocks[:, 106:]) * np.uint8(_BOTH_NIBBLES), nibbles], axis=1)


def _nibbles_in_turn(packed: Bytes) -> Bytes:
    """Low and high half of each byte, one after the other."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def _iq1_s(blocks: Bytes) -> Bytes:
    words = _words(blocks, 34, 50, "<u2")
    high = (words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 32)
    pairs = _pairs_of("IQ1_S")[blocks[:, 2:34] | high << 8]
    shifts = np.repeat((words >> 15).astype(np.uint8) * np.uint8(255), 4, axis=1)
    steps = ((words >> 12 & 7) * _BOTH_NIBBLES).astype(np.uint8)
    return np.concatenate([blocks[:, :2], steps, shifts, _bytes_of(pairs)], axis=1)


def _iq1_m(blocks: Bytes) -> Bytes:
    """The float16 lies in the high nibbles of four words; a step in three bits of each of the others' four."""
    high = _nibbles_in_turn(blocks[:, 32:48])
    words = _words(blocks, 48, 56, "<u2")
    scale = np.bitwise_or.reduce((words & 0xF000) >> np.array([12, 8, 4, 0], dtype=np.uint16), axis=1)
    pairs = _pairs_of("IQ1_S")[blocks[:, :32] | (high & 7).astype(np.uint16) << 8]
    factors = (words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).astype(np.uint8).reshape(-1, 8, 2)
    steps = factors[..., 0] | factors[..., 1] << 4
    shifts = (high >> 3) * np.uint8(255)
    return np.concatenate([_bytes_of(scale.astype("<u2")[:, None]), steps, shifts, _bytes_of(pairs)], axis=1)


@dataclass(frozen=True, slots=True)
class _Conversion:
    """What a type is written as: a format of the kernels that holds every value, and how its blocks get there."""

    format: str
    convert: Callable[[Bytes], Bytes]


_CONVERT: Mapping[GgufType, _Conversion] = {
    GgufType.TQ1_0: _Conversion("q4_0", _ternary(GgufType.TQ1_0)),
    GgufType.TQ2_0: _Conversion("q4_0", _ternary(GgufType.TQ2_0)),
    GgufType.IQ3_S: _Conversion("iq3_s", _iq3_s),
    GgufType.IQ3_XXS: _Conversion("iq3_xxs", _iq3_xxs),
    GgufType.IQ2_S: _Conversion("iq2_s", _iq2_s),
    GgufType.IQ2_XS: _Conversion("iq2_s", _iq2_xs),
    GgufType.IQ2_XXS: _Conversion("iq2_xxs", _iq2_xxs),
    GgufType.IQ1_S: _Conversion("iq1", _iq1_s),
    GgufType.IQ1_M: _Conversion("iq1", _iq1_m),
}


# ---- the file --------------------------------------------------------------------------------------------------------

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_SMALLEST_ENTRY, _SMALLEST_INFO = 13, 24
"""Bytes of the shortest metadata entry and of the shortest description of a tensor."""
_CHUNK = 1 << 22
"""Elements dequantised at a time: 16 MB of float32."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The bytes of a tensor, in the file's memory. `shape` is with the contiguous dimension last."""

    shape: tuple[int, ...]
    kind: GgufType
    data: mmap.mmap
    offset: int
    size: int


class GgufFile:
    """A GGUF file, memory-mapped, or all parts of one. `metadata` has every key of the first part, `tensors` the place
    of every tensor. ModelError names a part that is missing or of another file."""

    def __init__(self, path: Path) -> None:
        parts = _all_parts(_Part(path), path)
        self.where, self.metadata = parts[0].where, parts[0].metadata
        self.tensors: dict[str, StoredTensor] = {}
        for part in parts:
            for name in part.tensors.keys() & self.tensors.keys():
                raise ModelError(
                    f"{part.where} has the tensor {short_repr(name)}, which a part before it has too.",
                    "The parts are not of one file; fetch them again.",
                )
            self.tensors |= part.tensors
        expected = read_split(self.metadata, self.where).tensors
        if expected not in (None, len(self.tensors)):
            raise ModelError(
                f"{self.where} and its other parts have {len(self.tensors)} tensors together, not {expected}.",
                "The parts are not of one file; fetch them again.",
            )

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
        """One tensor, or with [i] after its name a part of it, as `dtype`, dequantised in parts, so that there is never
        a float32 copy of all of it."""
        stored = self._find(name)
        if stored.kind.name.lower() in BLOCK_FORMATS:
            return self.read_blocks(name).dequantise(dtype).reshape(stored.shape)
        if stored.kind in FLOATS:
            with np.errstate(all="ignore"):
                return self._raw(stored).view(FLOATS[stored.kind]).astype(dtype).reshape(stored.shape)
        block, size = stored.kind.elements, stored.kind.size
        out: Array = np.empty(math.prod(stored.shape), dtype)
        raw = self._raw(stored)
        step = max(1, _CHUNK // block)
        for first in range(0, len(out) // block, step):
            part = raw[first * size : (first + step) * size]
            try:
                with np.errstate(all="ignore"):  # whoever reads weights checks that they are finite
                    values = dequantise_rows(_rows(part, size), stored.kind).reshape(-1)
                    out[first * block : first * block + len(values)] = values
            except NotImplementedError as error:
                raise self._unreadable(name) from error
        return out.reshape(stored.shape)

    def read_integers(self, name: str) -> Array:
        """One tensor of whole numbers, as int64. ModelError for one of another type."""
        stored = self._find(name)
        if stored.kind not in _INTEGERS:
            raise ModelError(
                f"{name} in {self.where} is stored as {stored.kind.name}, and must hold whole numbers.",
                "The file is damaged, or not what its metadata says.",
            )
        return self._raw(stored).view(_INTEGERS[stored.kind]).astype(np.int64).reshape(stored.shape)

    def stored(self, name: str) -> StoredAs:
        return stored_as(self._find(name).kind)

    def read_blocks(self, name: str) -> QuantisedMatrix:
        """A quantised tensor, or a part of one, as rows of the format that `stored` gives: the file's own bytes, or
        converted."""
        stored = self._find(name)
        try:
            return convert_blocks(
                self._raw(stored).reshape(math.prod(stored.shape[:-1]), -1), stored.kind, stored.shape[-1]
            )
        except NotImplementedError as error:
            raise self._unreadable(name) from error

    def _find(self, name: str) -> StoredTensor:
        """A tensor; of `name[i]` the i-th part along the first dimension."""
        tensor, index = part_of(name)
        stored = self.tensors[tensor]
        if index is None:
            return stored
        size = stored.size // stored.shape[0]
        return replace(stored, shape=stored.shape[1:], offset=stored.offset + index * size, size=size)

    def _raw(self, stored: StoredTensor) -> Bytes:
        return np.frombuffer(stored.data, dtype=np.uint8, count=stored.size, offset=stored.offset)

    def _unreadable(self, name: str) -> ModelError:
        return ModelError(
            f"{name} in {self.where} is stored as {self._find(name).kind.name}, which cannot be dequantised.",
            "Use another quantisation of the model, for example Q4_K_M or Q8_0.",
        )


class _Part:
    """One file: all of a model, or a part."""

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
                raise ModelError(
                    f"{path} has the key {short_repr(name)} twice.", "The file is damaged; fetch it again."
                )
            self.metadata[name] = cursor.value(int(cursor.scalar("I")))
        check_tokenizer_keys(self.metadata, self.where)
        self.tensors = self._directory(cursor, tensors)

    def _directory(self, cursor: _Cursor, count: int) -> dict[str, StoredTensor]:
        """The tensors, which must lie one after the other, each at the next multiple of the alignment, as ggml's own
        reader demands: no two overlap."""
        entries = []
        for _ in range(count):
            name, rank = cursor.name(), int(cursor.scalar("I"))
            if not 1 <= rank <= _MOST_DIMENSIONS:
                raise ModelError(f"{short_repr(name)} in {self.where} has {rank} dimensions.", "The file is damaged.")
            dimensions = [int(cursor.scalar("Q")) for _ in range(rank)]
            entries.append((name, tuple(reversed(dimensions)), int(cursor.scalar("I")), int(cursor.scalar("Q"))))
        alignment = read_alignment(self.metadata, self.where)
        start = -(-cursor.offset // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        expected = 0
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise ModelError(f"{self.where} has the tensor {short_repr(name)} twice.", "The file is damaged.")
            if offset != expected:
                raise ModelError(
                    f"{short_repr(name)} in {self.where} begins at byte {offset} of the data, the tensor before it "
                    f"ends at {expected}.",
                    "The file is damaged; fetch it again.",
                )
            tensors[name] = stored = self._place(name, shape, kind, start + offset)
            expected += -(-stored.size // alignment) * alignment
        return tensors

    def _place(self, name: str, shape: tuple[int, ...], code: int, offset: int) -> StoredTensor:
        kind = next((kind for kind in GgufType if kind == code), None)
        if kind is None:
            raise ModelError(
                f"{short_repr(name)} in {self.where} has the unknown tensor type {code}.",
                "The file is damaged, or of a type that this wager does not know.",
            )
        if 0 in shape or shape[-1] % kind.elements:
            raise ModelError(
                f"{short_repr(name)} in {self.where} has shape {list(shape)}, which {kind.name} cannot store."
            )
        bytes_needed = math.prod(shape) // kind.elements * kind.size
        end = offset + bytes_needed
        if end > len(self._data):
            raise ModelError(
                f"{self.where} is truncated: {short_repr(name)} ends at byte {end}, the file at {len(self._data)}.",
                "Fetch the file again.",
            )
        return StoredTensor(shape, kind, self._data, offset, bytes_needed)


def _all_parts(given: _Part, path: Path) -> list[_Part]:
    """All parts of a file, of which one is given; that one alone if it is whole. ModelError names a part that is
    missing, or says that it is another part."""
    count = read_split(given.metadata, given.where).count
    if count == 1:
        return [given]
    paths = part_paths(path)
    if len(paths) != count:
        raise ModelError(
            f"{path} is one of {count} parts of a split GGUF, and the others are not found by its name.",
            f"Name the parts NAME-00001-of-{count:05d}.gguf and so on, in one folder.",
        )
    missing = [other.name for other in paths if not other.is_file()]
    if missing:
        raise ModelError(
            f"{path} is one of {count} parts of a split GGUF; {' and '.join(missing[:5])} "
            f"{'is' if len(missing) == 1 else 'are'} missing in {path.parent}{', and others' * (len(missing) > 5)}.",
            "Fetch all parts into one folder.",
        )
    parts = [given if other == path else _Part(other) for other in paths]
    for number, part in enumerate(parts):
        split = read_split(part.metadata, part.where)
        if split.number != number or split.count != count:
            raise ModelError(
                f"{part.where} says that it is part {split.number + 1} of {split.count}.",
                "Its name is that of another part: fetch it again.",
            )
    return parts


def open_gguf(path: Path) -> GgufFile:
    """The parsed file; parsed again only if it, or another of its parts, has changed on disk."""
    changed = []
    try:
        path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.", "Give a GGUF file or a directory.") from error
    for part in part_paths(path):
        with suppress(OSError):
            status = part.stat()
            changed.append((status.st_mtime_ns, status.st_size))
    return _open(path, tuple(changed))


@lru_cache(maxsize=2)
def _open(path: Path, changed: tuple[tuple[int, int], ...]) -> GgufFile:
    return GgufFile(path)


def _rows(part: Bytes, size: int) -> Bytes:
    """Blocks of `size` bytes as rows of up to 256 blocks: gguf takes 16 rows at a time, and few long rows need fewer
    calls."""
    blocks = len(part) // size
    width = next(w for w in (256, 64, 16, 4, 1) if blocks % w == 0)
    return part.reshape(blocks // width, width * size)


class _Cursor:
    """Reads the header from its beginning; ModelError if it extends beyond the end of the file."""

    def __init__(self, data: mmap.mmap, where: str) -> None:
        self._data = data
        self._where = where
        self.offset = 0

    def take(self, size: int) -> bytes:
        self.need(size)
        self.offset += size
        return self._data[self.offset - size : self.offset]

    def scalar(self, code: str) -> int | float | bool:
        value: int | float | bool = struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]
        return value

    def name(self) -> str:
        """The name of a key or a tensor; unlike text it must be valid UTF-8."""
        raw = self.take(int(self.scalar("Q")))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ModelError(
                f"{self._where} has a key or tensor whose name is no UTF-8: {short_repr(raw)}.", "The file is damaged."
            ) from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._strings(1)[0]
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
        data = self._data
        at = self.offset
        length = struct.Struct("<Q").unpack_from
        strings = []
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
