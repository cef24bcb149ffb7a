"""Matrices in quantised block formats: their table, their bytes, the numbers that the bytes stand for, and how matrices
are quantised.

A row is blocks of 32, 128 or 256 inputs. A weight is scale * (a whole number for its code), plus a minimum in the
formats that have one; a scale and a minimum belong to 32 inputs or 16. Layouts are those of ggml-common.h, but

- types with a large codebook are written with a code for each weight (CODEBOOKS): float16 scale, 8 bytes with the
  factors of 32 inputs (four bits for each half, a factor is what they say plus 1/2), then the codes. Of iq3 these are
  nibbles as in q4_0, 32 inputs at a time; of iq2 and iq1 256 high bits, then 256 pairs of low bits, in order;
- q4_z and q4_z128, of AWQ and GPTQ, are float16 scale, uint8 zero and nibbles as in q4_0, 32 inputs at a time: a weight
  is scale * (code - zero);
- the codes of mxfp4 are floats of four bits, twice which are whole numbers, and its scales powers of two;
- the codes of e4m3 and e4m3_128 are floats of eight bits behind a float32 scale, that of a whole row or of 128 inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from wager.errors import ModelError
from wager.kernels.arrays import Array

BLOCK = 32
"""Inputs that share a scale of the activations, and at most those that share a scale of the weights."""

_CHUNK = 1 << 20
"""Weights dequantised at a time: 4 MB of float32."""

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A format: `inputs` and `bytes` of a block, the byte offsets of its float16 `fields`, bits per weight in the
    panels of the kernels (`packed_bits`), where scales of 256 inputs are spread to groups, and the bytes of a row
    before its blocks (`head`)."""

    name: str
    inputs: int
    bytes: int
    fields: tuple[int, ...]
    packed_bits: float
    head: int = 0

    def row_bytes(self, k: int) -> int:
        return self.head + k // self.inputs * self.bytes


BLOCK_FORMATS: Mapping[str, BlockFormat] = {
    known.name: known
    for known in (
        BlockFormat("q8_0", 32, 34, (0,), 8.5),
        BlockFormat("q4_0", 32, 18, (0,), 4.5),
        BlockFormat("q4_1", 32, 20, (0, 2), 5.0),
        BlockFormat("q5_0", 32, 22, (0,), 5.5),
        BlockFormat("q5_1", 32, 24, (0, 2), 6.0),
        BlockFormat("q4_k", 256, 144, (0, 2), 4.625),
        BlockFormat("q5_k", 256, 176, (0, 2), 5.625),
        BlockFormat("q6_k", 256, 210, (208,), 6.5625),
        BlockFormat("q2_k", 256, 84, (80, 82), 2.625),
        BlockFormat("q3_k", 256, 110, (108,), 3.5625),
        BlockFormat("iq4_nl", 32, 18, (0,), 4.5),
        BlockFormat("iq4_xs", 256, 136, (0,), 4.3125),
        BlockFormat("iq3_s", 256, 138, (0,), 4.3125),
        BlockFormat("iq3_xxs", 256, 138, (0,), 4.3125),
        BlockFormat("iq2_s", 256, 106, (0,), 3.3125),
        BlockFormat("iq2_xxs", 256, 106, (0,), 3.3125),
        BlockFormat("iq1", 256, 106, (0,), 3.3125),
        BlockFormat("q4_z", 32, 19, (0,), 4.75),
        BlockFormat("q4_z128", 128, 67, (0,), 4.1875),
        BlockFormat("mxfp4", 32, 17, (), 4.25),
        BlockFormat("e4m3", 32, 32, (), 8.0, head=4),
        BlockFormat("e4m3_128", 128, 132, (), 8.25),
    )
}
"""The formats that the kernels multiply."""

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of iq4_nl and iq4_xs stand for."""


@dataclass(frozen=True, slots=True)
class Codebook:
    """What each code of a format stands for, and what its scale is multiplied with; `bits` of a code; `halves` that
    have a factor of their own."""

    numbers: tuple[int, ...]
    unit: float
    bits: int
    halves: int


def _signed(*sizes: int) -> tuple[int, ...]:
    """The high bit of a code is the sign of the number."""
    return (*sizes, *(-size for size in sizes))


CODEBOOKS: Mapping[str, Codebook] = {
    "iq3_s": Codebook(_signed(1, 3, 5, 7, 9, 11, 13, 15), 2.0, 4, 1),
    "iq3_xxs": Codebook(_signed(4, 12, 20, 28, 36, 44, 52, 62), 0.5, 4, 1),
    "iq2_s": Codebook(_signed(8, 25, 43, 0), 0.25, 3, 2),
    "iq2_xxs": Codebook(_signed(8, 25, 43, 0), 0.25, 3, 1),
    "iq1": Codebook((-7, 1, 9, 0, -9, -1, 7, 0), 0.25, 3, 2),
}
"""The formats whose blocks have steps. A code of iq1 is -1, 0 or 1 and the sign of a shift by 1/8, in eighths."""


@dataclass(frozen=True)
class Codes:
    """What the blocks of n rows stand for: weight = scale * code (+ minimum), each operation rounded to float32."""

    values: NDArray[np.int8] | Floats  # [n, k], the offset subtracted
    scales: Floats  # [n, k / group]
    minima: Floats | None  # [n, k / 32], or as the scales

    def weights(self) -> Floats:
        """float32 [n, k]."""
        rows, groups = self.scales.shape
        found: Floats = self.values.reshape(rows, groups, -1) * self.scales[..., None]
        if self.minima is not None:
            found += self.minima[..., None]
        return found.reshape(rows, -1)


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix [n, k] whose rows are stored exactly as GGUF stores them: `data` uint8 [n, row_bytes(k)], each row
    contiguous. ModelError if k is no multiple of the format's inputs or `data` has another width."""

    format: BlockFormat
    data: Bytes
    k: int

    def __post_init__(self) -> None:
        known = self.format
        expected = known.row_bytes(self.k)
        if self.k % known.inputs or not self.k:
            raise ModelError(f"{known.name} stores {known.inputs} inputs a block, which do not divide {self.k}.")
        if self.data.ndim != 2 or self.data.shape[1] != expected or self.data.dtype != np.uint8:
            raise ModelError(
                f"Rows of {self.k} inputs in {known.name} are {expected} bytes; {self.data.dtype} "
                f"{list(self.data.shape)} was given."
            )

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.data), self.k

    def take(self, rows: Any) -> QuantisedMatrix:
        """A copy of these rows (a slice or int [m]) in this order."""
        return QuantisedMatrix(self.format, np.ascontiguousarray(self.data[rows]), self.k)

    def columns(self, first: int, last: int) -> QuantisedMatrix | None:
        """A copy of these inputs of every row; None if that cuts a block."""
        known, head = self.format, self.format.head
        if first % known.inputs or last % known.inputs:
            return None
        part = self.data[:, head + first // known.inputs * known.bytes : head + last // known.inputs * known.bytes]
        return QuantisedMatrix(known, np.concatenate([self.data[:, :head], part], axis=1), last - first)

    def _blocks(self) -> Bytes:
        """[n, blocks, bytes]; a row with a head is one block."""
        return self.data.reshape(len(self.data), *((1, -1) if self.format.head else (-1, self.format.bytes)))

    def codes(self) -> Codes:
        return _UNPACK[self.format.name](self._blocks())

    def dequantise(self, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """[n, k] as float32, or rounded to `dtype`, in parts, so that there is never a float32 copy of all of it."""
        out = np.empty(self.shape, dtype)
        step = max(1, _CHUNK // self.k)
        with np.errstate(invalid="ignore", over="ignore"):  # whoever reads weights checks that they are finite
            for first in range(0, len(out), step):
                part = QuantisedMatrix(self.format, self.data[first : first + step], self.k)
                out[first : first + step] = part.codes().weights()
        return out

    def is_finite(self) -> bool:
        """Whether all weights are finite: their float16 scales and minima are, or (mxfp4) no exponent is 255, or (e4m3)
        no code is NaN and all scales are finite."""
        blocks = self._blocks()
        if self.format.name == "mxfp4":
            return bool((blocks[..., 0] != 255).all())
        if _UNPACK[self.format.name] is _e4m3:
            return bool(np.isfinite(_singles(blocks)).all() and ((blocks[..., 4:] & 127) != 127).all())
        return all(bool(np.isfinite(_half(blocks, at)).all()) for at in self.format.fields)


Matrix = Array | QuantisedMatrix
"""A matrix [n, k]: of floats, or quantised."""


def stack(parts: Sequence[Matrix]) -> Matrix:
    """The rows of several matrices of one form and width. ModelError if they differ."""
    first = parts[0]
    if len(parts) == 1:
        return first
    quantised = [part for part in parts if isinstance(part, QuantisedMatrix)]
    floats = [part for part in parts if not isinstance(part, QuantisedMatrix)]
    if not quantised:
        return np.concatenate(floats)
    if floats or any((part.format, part.k) != (quantised[0].format, quantised[0].k) for part in quantised):
        forms = [
            f"{part.format.name if isinstance(part, QuantisedMatrix) else part.dtype} {list(part.shape)}"
            for part in parts
        ]
        raise ModelError(f"Matrices of {', '.join(forms)} cannot be one.")
    return QuantisedMatrix(quantised[0].format, np.concatenate([part.data for part in quantised]), quantised[0].k)


def _half(blocks: Bytes, at: int) -> NDArray[np.float16]:
    """The little-endian float16 at that byte of each block [n, b, bytes] -> [n, b]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0].astype(np.float16, copy=False)


def _scale(blocks: Bytes, at: int) -> Floats:
    return _half(blocks, at).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[..., m] -> [..., 2 m]: the low halves of the bytes, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _rows(values: NDArray[Any], rows: int) -> NDArray[np.int8]:
    return values.astype(np.int8, copy=False).reshape(rows, -1)


def _q8_0(blocks: Bytes) -> Codes:
    return Codes(_rows(np.ascontiguousarray(blocks[..., 2:]).view(np.int8), len(blocks)), _scale(blocks, 0), None)


def _simple(*, minimum: bool, bits: int) -> Callable[[Bytes], Codes]:
    """q4_0, q4_1, q5_0 and q5_1: scale, minimum, fifth bits, nibbles."""

    def unpack(blocks: Bytes) -> Codes:
        head = 4 if minimum else 2
        values = _nibbles(blocks[..., head + (4 if bits == 5 else 0) :])
        if bits == 5:
            values |= np.unpackbits(blocks[..., head : head + 4], axis=-1, bitorder="little") << 4
        codes = values.view(np.int8) - np.int8(0 if minimum else 1 << (bits - 1))
        return Codes(_rows(codes, len(blocks)), _scale(blocks, 0), _scale(blocks, 2) if minimum else None)

    return unpack


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and minima [n, b * 8] of q4_k and q5_k: 6-bit factors of the block's two float16."""
    low, high, both = (blocks[..., at : at + 4] for at in (4, 8, 12))
    factors = np.concatenate([low & 63, (both & 15) | (low >> 2 & 48)], axis=-1)
    lifts = np.concatenate([high & 63, (both >> 4) | (high >> 2 & 48)], axis=-1)
    scales = _scale(blocks, 0)[..., None] * factors
    minima = -(_scale(blocks, 2)[..., None] * lifts)
    return scales.reshape(len(blocks), -1), minima.reshape(len(blocks), -1)


def _q4_k(blocks: Bytes) -> Codes:
    values = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return Codes(_rows(values, len(blocks)), *_k_scales(blocks))


def _q5_k(blocks: Bytes) -> Codes:
    values = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)).reshape(*blocks.shape[:2], 8, 32)
    fifth = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return Codes(_rows(values | fifth << 4, len(blocks)), *_k_scales(blocks))


def _q6_k(blocks: Bytes) -> Codes:
    count = blocks.shape[:2]
    low = _nibbles(blocks[..., :128].reshape(*count, 2, 64))  # [n, b, 2, 128]
    high = blocks[..., 128:192].reshape(*count, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    codes = (low.reshape(*count, -1) | high.reshape(*count, -1) << 4).view(np.int8) - np.int8(32)
    factors = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    scales = _scale(blocks, 208)[..., None] * factors
    return Codes(_rows(codes, len(blocks)), scales.reshape(len(blocks), -1), None)


def _q2_k(blocks: Bytes) -> Codes:
    fields = _pairs(blocks[..., 16:80].reshape(*blocks.shape[:2], 2, 32))  # [n, b, 2, 4, 32]
    scales = _scale(blocks, 80)[..., None] * (blocks[..., :16] & 15)
    minima = -(_scale(blocks, 82)[..., None] * (blocks[..., :16] >> 4))
    return Codes(_rows(fields, len(blocks)), *(part.reshape(len(blocks), -1) for part in (scales, minima)))


def _q3_k(blocks: Bytes) -> Codes:
    count = blocks.shape[:2]
    low = _pairs(blocks[..., 32:96].reshape(*count, 2, 32)).reshape(*count, 8, 32)
    high = blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    high_scales = (blocks[..., None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(*count, 16)
    factors = (_nibbles(blocks[..., 96:104]) | high_scales << 4).view(np.int8) - np.int8(32)
    codes = (low | high << 2).view(np.int8) - np.int8(4)
    return Codes(_rows(codes, len(blocks)), (_scale(blocks, 108)[..., None] * factors).reshape(len(blocks), -1), None)


def _pairs(packed: Bytes) -> Bytes:
    """[..., m] -> [..., 4, m]: the bits of each byte two by two, the lowest first."""
    pairs: Bytes = packed[..., None, :] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)
    return pairs


def _iq4_nl(blocks: Bytes) -> Codes:
    return Codes(_rows(_IQ4[_nibbles(blocks[..., 2:])], len(blocks)), _scale(blocks, 0), None)


def _iq4_xs(blocks: Bytes) -> Codes:
    """The scale of 32 inputs is the block's float16 times a 6-bit factor."""
    count = blocks.shape[:2]
    low = np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], axis=-1).reshape(*count, 8)
    high = np.ascontiguousarray(blocks[..., 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    factors = (low | high.astype(np.uint8) << 4).astype(np.int8) - np.int8(32)
    codes = _IQ4[_nibbles(blocks[..., 8:].reshape(*count, 8, 16))]
    return Codes(_rows(codes, len(blocks)), (_scale(blocks, 0)[..., None] * factors).reshape(len(blocks), -1), None)


_IQ4 = np.array(IQ4, dtype=np.int8)


def _of_codebook(name: str) -> Callable[[Bytes], Codes]:
    known = CODEBOOKS[name]
    numbers = np.array(known.numbers, dtype=np.int8)

    def unpack(blocks: Bytes) -> Codes:
        count, codes = blocks.shape[:2], blocks[..., 10:]
        if known.bits == 4:
            values: NDArray[Any] = _nibbles(codes.reshape(*count, 8, 16))
        else:
            high = np.unpackbits(codes[..., :32], axis=-1, bitorder="little")
            values = _pairs(codes[..., 32:]).swapaxes(-1, -2).reshape(*count, 256) | high << 2
        steps = np.stack([blocks[..., 2:10] & 15, blocks[..., 2:10] >> 4], axis=-1)[..., : known.halves]
        factors = (steps.reshape(*count, -1) + np.float32(0.5)) * np.float32(known.unit)
        scales = _scale(blocks, 0)[..., None] * factors
        return Codes(_rows(numbers[values], len(blocks)), scales.reshape(len(blocks), -1), None)

    return unpack


def _q4_z(blocks: Bytes) -> Codes:
    """The minimum is minus scale times zero, exactly; so are all sums of it and scale times code."""
    count, values = blocks.shape[:2], _nibbles(blocks[..., 3:].reshape(*blocks.shape[:2], -1, 16))
    repeated = values.shape[2]
    scales = _scale(blocks, 0)
    minima = -(scales * blocks[..., 2])
    spread = (np.repeat(part.reshape(count[0], -1), repeated, axis=1) for part in (scales, minima))
    return Codes(_rows(values, len(blocks)), *spread)


FOUR_BIT_FLOATS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the floats of one sign, two exponent and one fraction bits (e2m1), by their bits."""


def _mxfp4(blocks: Bytes) -> Codes:
    """The exponent e of a block means 2^(e - 127), of which half belongs to doubled codes; 255 is no number."""
    exponents = blocks[..., 0].astype(np.int32)
    scales = np.ldexp(np.float32(0.5), exponents - 127)
    scales[exponents == 255] = np.inf
    return Codes(_rows(FOUR_BIT_FLOATS[_nibbles(blocks[..., 1:])], len(blocks)), scales, None)


E4M3: Floats = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""The floats of one sign, four exponent and three fraction bits, by their bits; 127 and 255 are NaN."""


def _singles(blocks: Bytes) -> Floats:
    """The little-endian float32 at the beginning of each block."""
    return np.ascontiguousarray(blocks[..., :4]).view("<f4")[..., 0].astype(np.float32, copy=False)


def _e4m3(blocks: Bytes) -> Codes:
    return Codes(E4M3[blocks[..., 4:]].reshape(len(blocks), -1), _singles(blocks), None)


_UNPACK: Mapping[str, Callable[[Bytes], Codes]] = {
    "q8_0": _q8_0,
    "q4_0": _simple(minimum=False, bits=4),
    "q4_1": _simple(minimum=True, bits=4),
    "q5_0": _simple(minimum=False, bits=5),
    "q5_1": _simple(minimum=True, bits=5),
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
    **{name: _of_codebook(name) for name in CODEBOOKS},
    "q4_z": _q4_z,
    "q4_z128": _q4_z,
    "mxfp4": _mxfp4,
    "e4m3": _e4m3,
    "e4m3_128": _e4m3,
}


_PART = 1 << 19
"""Weights quantised at a time: 2 MB of float32, with a few temporaries of the size in the second-level cache."""
_LARGEST = np.float32(65504.0)
_SHRINKS_0 = (8.0, 7.0, 7.6, 8.6)
"""The largest |x| of a q4_0 block as a multiple of candidate scales: at 8 it is code 0 exactly, at 7 code 15."""
_SHRINKS_1 = (1.0, 0.95, 0.9, 0.85)
"""The parts of a q4_1 block's range that candidate scales span."""


def quantise(values: NDArray[Any], format_name: str) -> QuantisedMatrix:
    """A matrix [n, k] of any float type in q8_0, q4_0 or q4_1, part by part, so that there is never a float32 copy of
    all of it. ModelError for another format, or if k is no multiple of 32.

    q8_0: the scale is max|x| / 127, rounded to float16, and codes are x / scale rounded to the nearest even integer.
    q4_0 and q4_1 search: several scales (and minima) span the block's values, or a little less than all of them; for
    the codes that each of them gives, the scale and minimum of least squared error are solved for; the best of these,
    rounded to float16, gives the final codes, nearest again. Zero stays zero in q8_0 and q4_0. Scales that float16
    cannot hold become its largest finite number; values that are not finite give a scale that is NaN.
    """
    if format_name not in _QUANTISE:
        raise ModelError(f"Weights cannot be quantised to {format_name}.", f"Choose one of: {', '.join(_QUANTISE)}.")
    known, (n, k) = BLOCK_FORMATS[format_name], values.shape
    if k % BLOCK or not k:
        raise ModelError(f"{known.name} stores {BLOCK} inputs a block, which do not divide {k}.")
    data = np.empty((n, k // BLOCK * known.bytes), dtype=np.uint8)
    step = max(1, _PART // k)
    with np.errstate(all="ignore"):
        for first in range(0, n, step):
            part = np.asarray(values[first : first + step], dtype=np.float32)
            columns = np.ascontiguousarray(part.reshape(-1, BLOCK).T)  # sums over a block add whole rows
            blocks = _QUANTISE[format_name](columns)
            finite = np.isfinite(np.abs(columns).max(axis=0))
            if not finite.all():
                blocks[~finite, :2] = np.frombuffer(np.float16(np.nan).tobytes(), dtype=np.uint8)
            data[first : first + step] = blocks.reshape(len(part), -1)
    return QuantisedMatrix(known, data, k)


def _to_q8_0(x: Floats) -> Bytes:
    """x [32, blocks] -> uint8 [blocks, 34]; so below."""
    scale = _rounded(np.abs(x).max(axis=0) / np.float32(127))
    codes = np.rint(x * _inverse(scale)).clip(-127, 127)
    return np.concatenate([_bytes(scale), codes.T.astype(np.int8).view(np.uint8)], axis=1)


def _to_q4_0(x: Floats) -> Bytes:
    at = np.abs(x).argmax(axis=0)
    largest = np.take_along_axis(x, at[None], axis=0)[0]
    best = np.zeros_like(largest)
    least = np.full_like(largest, np.inf)
    for shrink in _SHRINKS_0:
        codes = _nearest(x, -largest / np.float32(shrink), None, -8)
        scale = _dot(codes, x) * _inverse(_dot(codes, codes))
        gained = -scale * _dot(codes, x)  # the squared error, less the sum of squares
        better = gained < least
        best[better], least[better] = scale[better], gained[better]
    scale = _rounded(best)
    return np.concatenate([_bytes(scale), _packed(_nearest(x, scale, None, -8) + np.float32(8))], axis=1)


def _to_q4_1(x: Floats) -> Bytes:
    low, high, total = x.min(axis=0), x.max(axis=0), x.sum(axis=0)
    middle, spread = (low + high) / np.float32(2), high - low
    best, offset = np.zeros_like(low), low
    least = np.full_like(low, np.inf)
    for shrink in _SHRINKS_1:
        start = spread * np.float32(shrink / 15)
        codes = _nearest(x, start, middle - start * np.float32(7.5), 0)
        count, squares, product = codes.sum(axis=0), _dot(codes, codes), _dot(codes, x)
        spread_codes = squares - count * count / np.float32(BLOCK)
        covariance = product - count * total / np.float32(BLOCK)
        scale = covariance * _inverse(spread_codes)
        better = -scale * covariance < least
        best = np.where(better, scale, best)
        offset = np.where(better, (total - scale * count) / np.float32(BLOCK), offset)
        least = np.where(better, -scale * covariance, least)
    scale, minimum = _rounded(best), _rounded(offset)
    return np.concatenate([_bytes(scale), _bytes(minimum), _packed(_nearest(x, scale, minimum, 0))], axis=1)


_QUANTISE: Mapping[str, Callable[[Floats], Bytes]] = {"q8_0": _to_q8_0, "q4_0": _to_q4_0, "q4_1": _to_q4_1}


def _nearest(x: Floats, scale: Floats, minimum: Floats | None, lowest: int) -> Floats:
    """The nearest of 16 codes from `lowest` up, as floats."""
    codes = x * _inverse(scale) if minimum is None else (x - minimum) * _inverse(scale)
    np.rint(codes, out=codes)
    return np.clip(codes, lowest, lowest + 15, out=codes)


def _dot(a: Floats, b: Floats) -> Floats:
    """Sum of products by block, not fused: einsum's are on some processors."""
    sums: Floats = (a * b).sum(axis=0)
    return sums


def _inverse(scale: Floats) -> Floats:
    """1 / scale, 0 for 0."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _rounded(scale: Floats) -> Floats:
    """The nearest finite float16, as float32."""
    return scale.clip(-_LARGEST, _LARGEST).astype(np.float16).astype(np.float32)


def _bytes(scale: Floats) -> Bytes:
    return scale.astype("<f2").view(np.uint8).reshape(-1, 2)


def _packed(codes: Floats) -> Bytes:
    """Codes 0 to 15 [32, blocks] as nibbles [blocks, 16]: byte i has input i in its low half, 16 + i in its high."""
    whole = codes.astype(np.uint8)
    whole[:16] |= whole[16:] << 4
    return whole[:16].T
