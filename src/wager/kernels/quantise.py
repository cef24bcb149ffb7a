"""Quantises matrices to q8_0, q4_0 or q4_1, in parts, so that there is never a float32 copy of all of one.

q8_0: the scale is max|x| / 127, rounded to float16, and codes are x / scale rounded to the nearest even integer.

q4_0 and q4_1 search: several scales (and minima) span the block's values, or a little less than all of them; for the
codes that each of them gives, the scale and minimum of least squared error are solved for; the best of these, rounded
to float16, gives the final codes, nearest again. Zero stays zero in q8_0 and q4_0. Scales that float16 cannot hold
become its largest finite number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wager.errors import ModelError
from wager.kernels.blocks import BLOCK, BLOCK_FORMATS, Bytes, Floats, QuantisedMatrix

_PART = 1 << 19
"""Weights quantised at a time: 2 MB of float32, with a few temporaries of the size in the second-level cache."""
_LARGEST = np.float32(65504.0)
_SHRINKS_0 = (8.0, 7.0, 7.6, 8.6)
"""The largest |x| of a q4_0 block as a multiple of candidate scales: at 8 it is code 0 exactly, at 7 code 15."""
_SHRINKS_1 = (1.0, 0.95, 0.9, 0.85)
"""The parts of a q4_1 block's range that candidate scales span."""


def quantise(values: NDArray[Any], format_name: str) -> QuantisedMatrix:
    """A matrix [n, k] of any float type in that format. ModelError if it cannot be written, or k is no multiple of 32.

    Values that are not finite give a scale that is NaN.
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


def _q8_0(x: Floats) -> Bytes:
    """x [32, blocks] -> uint8 [blocks, 34]; so below."""
    scale = _rounded(np.abs(x).max(axis=0) / np.float32(127))
    codes = np.rint(x * _inverse(scale)).clip(-127, 127)
    return np.concatenate([_bytes(scale), codes.T.astype(np.int8).view(np.uint8)], axis=1)


def _q4_0(x: Floats) -> Bytes:
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


def _q4_1(x: Floats) -> Bytes:
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


_QUANTISE: Mapping[str, Callable[[Floats], Bytes]] = {"q8_0": _q8_0, "q4_0": _q4_0, "q4_1": _q4_1}


def _nearest(x: Floats, scale: Floats, minimum: Floats | None, lowest: int) -> Floats:
    """The nearest of 16 codes from `lowest` up, as floats."""
    codes = x * _inverse(scale) if minimum is None else (x - minimum) * _inverse(scale)
    np.rint(codes, out=codes)
    return np.clip(codes, lowest, lowest + 15, out=codes)


def _dot(a: Floats, b: Floats) -> Floats:
    """Sum of products by block."""
    sums: Floats = np.einsum("ib,ib->b", a, b)
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
