"""Quantised tensors of GGUF in formats that the kernels multiply: as they are stored, or converted.

Types without kernels of their own become the nearest that have: exactly where every value can be written (IQ4_NL and
MXFP4, TQ1_0 and TQ2_0, Q3_K), with the same codes and scales rounded to float16 (IQ4_XS), or quantised again to q8_0,
which adds less than a hundredth of what such types lose themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wager.kernels.arrays import BFLOAT16, DType
from wager.kernels.blocks import BLOCK, BLOCK_FORMATS, Bytes, QuantisedMatrix
from wager.kernels.quantise import quantise
from wager.models.gguf_types import BLOCK_SIZES
from wager.models.gguf_types import GgufType as Kind

FLOATS: Mapping[Kind, DType] = {
    Kind.F32: np.dtype("<f4"),
    Kind.F16: np.dtype("<f2"),
    Kind.BF16: BFLOAT16,
    Kind.F64: np.dtype("<f8"),
}
"""Types that are read as they are, and numpy's types of them."""

_PART = 1 << 20
"""Weights converted at a time."""


@dataclass(frozen=True, slots=True)
class StoredAs:
    """How a tensor is stored: its file's name of the type, the block format that it is read in (None: floats), and
    whether every value is the same there."""

    kind: str
    format: str | None = None
    exact: bool = True


def stored_as(kind: Kind) -> StoredAs:
    """What a type of GGUF is read as. One that is read in no way fails when it is dequantised."""
    name = kind.name
    if kind in FLOATS:
        return StoredAs(name)
    if name.lower() in BLOCK_FORMATS:
        return StoredAs(name, name.lower())
    return StoredAs(name, _EXACT.get(kind, "q8_0"), exact=kind in _EXACT)


def converted(raw: Bytes, kind: Kind, k: int) -> QuantisedMatrix:
    """The rows `raw` uint8 [n, bytes] of a quantised type as a matrix [n, k]: the same bytes where the kernels know
    the type. NotImplementedError if gguf cannot dequantise it."""
    target = stored_as(kind).format or ""
    if target == kind.name.lower():
        return QuantisedMatrix(BLOCK_FORMATS[target], raw, k)
    known, size = BLOCK_FORMATS[target], BLOCK_SIZES[kind].bytes
    data = np.empty((len(raw), k // known.inputs * known.bytes), dtype=np.uint8)
    step = max(1, _PART // k)
    for first in range(0, len(raw), step):
        part = raw[first : first + step]
        with np.errstate(all="ignore"):  # whoever reads weights checks that they are finite
            if kind in _CONVERT:
                blocks = _CONVERT[kind](part.reshape(-1, size))
            else:
                blocks = quantise(dequantised(part, kind), target).data
        data[first : first + step] = blocks.reshape(len(part), -1)
    return QuantisedMatrix(known, data, k)


def dequantised(rows: Bytes, kind: Kind) -> NDArray[np.float32]:
    """The values of rows uint8 [n, bytes] by the gguf library. NotImplementedError for a type it cannot dequantise."""
    from gguf.constants import GGMLQuantizationType  # importing it takes longer than opening a file
    from gguf.quants import dequantize

    values: NDArray[np.float32] = dequantize(rows, GGMLQuantizationType(kind))
    return values


def _half(values: NDArray[Any]) -> Bytes:
    """float16 bytes [..., 2]."""
    return values.astype("<f2")[..., None].view(np.uint8)


def _nibbles(packed: Bytes) -> Bytes:
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _iq4_nl(blocks: Bytes) -> Bytes:
    """Codes of q8_0 looked up in the table of the type."""
    return np.concatenate([blocks[:, :2], _looked_up(blocks[:, 2:])], axis=1)


def _looked_up(packed: Bytes) -> Bytes:
    from gguf.quants import IQ4_NL

    return np.array(IQ4_NL.kvalues, dtype=np.int8).view(np.uint8)[_nibbles(packed)]


def _iq4_xs(blocks: Bytes) -> Bytes:
    """As IQ4_NL; the scale of 32 inputs is the block's float16 times a 6-bit factor, rounded to float16."""
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    factors = (low | high.astype(np.uint8) << 4).astype(np.int8) - np.int8(32)
    scales = _half(np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32) * factors)
    return np.concatenate([scales, _looked_up(blocks[:, 8:].reshape(-1, 8, 16))], axis=-1)


def _mxfp4(blocks: Bytes) -> Bytes:
    """Codes of q5_0. Scales are powers of two; one below the least float16, 2^-24, becomes it and its codes are
    rounded. One above the largest becomes infinite."""
    from gguf.quants import MXFP4

    scales = MXFP4.e8m0_to_fp32_half(blocks[:, :1]).astype(np.float64)
    written = scales.clip(2.0**-24)
    codes = np.array(MXFP4.kvalues, dtype=np.int8)[_nibbles(blocks[:, 1:])]
    stored = (np.rint(codes * (scales / written)) + 16).astype(np.uint8)
    fifth = np.packbits(stored >> 4, axis=1, bitorder="little")
    nibbles = stored[:, :16] & 15 | (stored[:, 16:] & 15) << 4
    return np.concatenate([_half(written[:, 0]), fifth, nibbles], axis=1)


def _ternary(kind: Kind) -> Callable[[Bytes], Bytes]:
    """-1, 0 and 1 as codes of q4_0 under the float16 that is the last of the block."""

    def convert(blocks: Bytes) -> Bytes:
        unit = blocks.copy()
        unit[:, -2:] = np.frombuffer(np.float16(1).tobytes(), dtype=np.uint8)
        codes = (dequantised(unit, kind).reshape(-1, 8, BLOCK) + 8).astype(np.uint8)
        scales = np.broadcast_to(blocks[:, None, -2:], (len(blocks), 8, 2))
        return np.concatenate([scales, codes[..., :16] | codes[..., 16:] << 4], axis=-1)

    return convert


def _q3_k(blocks: Bytes) -> Bytes:
    """Codes -4 to 3 and the 6-bit scales of 16 inputs as those of q6_k."""
    unit = blocks.copy()
    unit[:, 96:108] = _UNIT_SCALES
    unit[:, 108:110] = np.frombuffer(np.float16(1).tobytes(), dtype=np.uint8)
    codes = (dequantised(unit, Kind.Q3_K) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = codes & 15, codes >> 4
    packed_low = low[:, :, :2] | low[:, :, 2:] << 4
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    packed_high = np.bitwise_or.reduce(high << shifts, axis=2)
    parts = (packed_low, packed_high, _q3_k_scales(blocks), blocks[:, 108:110])
    return np.concatenate([part.reshape(len(blocks), -1) for part in parts], axis=1)


_UNIT_SCALES = np.array([0x11] * 8 + [0xAA] * 4, dtype=np.uint8)
"""The 12 bytes of Q3_K that make every scale 33 - 32 = 1."""


def _q3_k_scales(blocks: Bytes) -> Bytes:
    """int8 [blocks, 16]: 6 bits less 32."""
    low = _nibbles(blocks[:, 96:104])
    high = blocks[:, None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    scales = (low | high.reshape(-1, 16) << 4).astype(np.int8) - np.int8(32)
    return scales.view(np.uint8)


_EXACT: Mapping[Kind, str] = {
    Kind.IQ4_NL: "q8_0",
    Kind.MXFP4: "q5_0",
    Kind.TQ1_0: "q4_0",
    Kind.TQ2_0: "q4_0",
    Kind.Q3_K: "q6_k",
}
"""Types whose every value can be written in a format of the kernels."""

_CONVERT: Mapping[Kind, Callable[[Bytes], Bytes]] = {
    Kind.IQ4_NL: _iq4_nl,
    Kind.IQ4_XS: _iq4_xs,
    Kind.MXFP4: _mxfp4,
    Kind.TQ1_0: _ternary(Kind.TQ1_0),
    Kind.TQ2_0: _ternary(Kind.TQ2_0),
    Kind.Q3_K: _q3_k,
}
