"""The arithmetic of quantised products, in numpy: what the C++ kernels must compute, bit for bit.

Activations are quantised per row in blocks of 32 to 8 bits. A block's sum of weight codes times activation codes is an
exact integer; the blocks' sums, times their scales, are added in order by fused multiply-adds in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wager.kernels.blocks import BLOCK, Floats, QuantisedMatrix

LEAST = np.float32(1e-30)
"""Blocks whose values are all smaller are zero."""

_LOWER_BITS = np.int64((1 << 29) - 1)
"""The bits of a float64 that float32 lacks."""
_TIE = np.int64(1 << 28)


@dataclass(frozen=True)
class QuantisedRow:
    """A row of activations: value = scale * code. `sums` are the blocks' sums of codes."""

    codes: Floats  # whole numbers from -127 to 127 [k / 32, 32]
    scales: Floats  # [k / 32]
    sums: Floats  # [k / 32]


def quantise_row(x: Floats) -> QuantisedRow:
    """x float32 [k]. The scale of 32 inputs is max|x| / 127, their codes are x * (127 / max|x|) rounded to the nearest
    even integer. A block below LEAST is zero; one with a value that is not finite has the scale NaN and codes 0."""
    blocks = x.reshape(-1, BLOCK)
    largest = np.abs(blocks).max(axis=1)
    finite, zero = np.isfinite(largest), largest < LEAST
    safe = np.where(finite & ~zero, largest, np.float32(1))
    scales = np.where(zero, np.float32(0), safe / np.float32(127))
    scales = np.where(finite, scales, np.float32(np.nan)).astype(np.float32)
    usable = np.where((finite & ~zero)[:, None], blocks, np.float32(0))
    codes = np.rint(usable * (np.float32(127) / safe)[:, None])
    return QuantisedRow(codes, scales, codes.sum(axis=1))


class ReferenceQuantised:
    """A quantised matrix [n, k] and its bias float32 [n], unpacked for products of one row."""

    def __init__(self, matrix: QuantisedMatrix, bias: Floats | None = None) -> None:
        unpacked = matrix.codes()
        n, groups = unpacked.scales.shape
        codes = unpacked.values.reshape(n, groups, -1).transpose(1, 0, 2)
        self.codes = np.ascontiguousarray(codes, dtype=np.float32)  # [k / group, n, group]
        self.scales = np.ascontiguousarray(unpacked.scales.T)  # [k / group, n]
        self.minima = None if unpacked.minima is None else np.ascontiguousarray(unpacked.minima.T)
        self.bias = bias
        self._matrix = matrix

    def row(self, index: int) -> Floats:
        """The weights of one output, float32 [k]."""
        found: Floats = self._matrix.take([index]).dequantise()[0]
        return found

    def product(self, x: Floats) -> Floats:
        """W x + b of one row x float32 [k] -> float32 [n]."""
        row = quantise_row(x)
        groups, n, inputs = self.codes.shape
        # integers below 2^24: exact in any order of summation
        sums = np.matmul(self.codes, row.codes.reshape(groups, inputs, 1))[..., 0]
        halves = BLOCK // inputs
        with np.errstate(invalid="ignore", over="ignore"):
            scales = self.scales * np.repeat(row.scales, halves)[:, None]
            lifts = row.scales * row.sums
            total = np.zeros(n, dtype=np.float32)
            for group in range(groups):
                total = fused(sums[group], scales[group], total)
                if self.minima is not None:
                    total = fused(self.minima[group], lifts[group], total)
        return total if self.bias is None else total + self.bias


def fused(a: Floats, b: Any, c: Floats) -> Floats:
    """a * b + c rounded once to float32, as std::fma (results in the range of normal numbers, infinities and NaN).

    The product is exact in float64 and the sum rounded to it. Rounding again to float32 can only go wrong where the
    first rounding ended halfway between two float32; there its error decides.
    """
    product = a.astype(np.float64) * b
    total = product + c
    rounded: Floats = total.astype(np.float32)
    ties = (total.view(np.int64) & _LOWER_BITS) == _TIE
    if not ties.any():
        return rounded
    settled: Floats = np.where(ties, _settled(product, c.astype(np.float64), total), rounded)
    return settled


def _settled(product: NDArray[np.float64], c: NDArray[np.float64], total: NDArray[np.float64]) -> Floats:
    """The float32 nearest to product + c, where `total` is that sum rounded to float64."""
    part = total - product
    error = (product - (total - part)) + (c - part)  # exact (Knuth's two-sum)
    return np.where(error == 0, total, np.nextafter(total, np.copysign(np.inf, error))).astype(np.float32)
