"""The oracle's quantised arithmetic against exact rationals, and against the definition block by block."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from oracle.kernels import ReferenceQuantised, fused, quantise_row
from quantised_cases import matrix
from wager.kernels.blocks import BLOCK_FORMATS

FORMATS = list(BLOCK_FORMATS)


def activations(k: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=k).astype(ml_dtypes.bfloat16).astype(np.float32)


def rounded(exact: Fraction) -> np.float32:
    """The float32 nearest to a rational, ties to even, in the range of normal numbers."""
    if exact == 0:
        return np.float32(0)
    near = np.float32(float(exact))
    candidates = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    return min(candidates, key=lambda c: (abs(Fraction(float(c)) - exact), int(c.view(np.int32)) & 1))


def fma(a: float, b: float, c: float) -> np.float32:
    return rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def test_fused_rounds_once() -> None:
    rng = np.random.default_rng(0)
    a, b, c = (np.ldexp(rng.normal(size=4000), rng.integers(-20, 20, 4000)).astype(np.float32) for _ in range(3))
    c[:1000] = -(a * b)[:1000]  # cancels
    expected = [fma(*parts) for parts in zip(a, b, c, strict=True)]
    assert np.array_equal(fused(a, b, c), np.array(expected, dtype=np.float32))


def test_fused_settles_ties_of_the_first_rounding() -> None:
    """float64 loses 2^-60 beside 1, which decides between two float32: there rounding twice ends at the wrong one."""
    a = np.float32(2.0**-24 * (1 + 2.0**-18))
    b = np.float32(1 - 2.0**-18)  # a * b is 2^-24 - 2^-60
    c = np.float32(1 + 2.0**-23)
    for sign in (1, -1):
        for value, expected in ((a, c), (-a, c)):
            twice = np.float32(np.float64(sign * value) * np.float64(b) + np.float64(sign * c))
            found = fused(np.array([sign * value]), b, np.array([sign * c]))[0]
            assert found == fma(sign * value, b, sign * c) == sign * expected != twice
    half = np.array([2.0**-24], dtype=np.float32)  # an exact tie goes to the even one
    assert fused(half, np.float32(1), np.array([1], dtype=np.float32))[0] == 1
    assert fused(half, np.float32(1), np.array([c]))[0] == np.float32(1 + 2.0**-22)


def test_activations_are_rounded_to_nearest_even() -> None:
    x = activations(320)
    row = quantise_row(x)
    for block, codes, scale, total in zip(x.reshape(-1, 32), row.codes, row.scales, row.sums, strict=True):
        largest = np.abs(block).max()
        assert scale == np.float32(largest / np.float32(127))
        exact = [Fraction(float(np.float32(v * (np.float32(127) / largest)))) for v in block]
        assert codes.tolist() == [round(value) for value in exact]
        assert np.abs(codes).max() == 127 and total == codes.sum()
        assert np.abs(block - codes * scale).max() <= scale * 0.5001


def test_blocks_of_activations_that_are_zero_or_not_finite() -> None:
    x = activations(192).reshape(6, 32)
    x[0] = 0
    x[1] = 1e-31
    x[2, 3] = np.inf
    x[3, 31] = np.nan
    x[4] = np.float32(1e-30)
    with np.errstate(all="raise"):
        row = quantise_row(x.reshape(-1))
    assert row.scales[:2].tolist() == [0, 0] and not row.codes[:4].any() and not row.sums[:4].any()
    assert np.isnan(row.scales[2:4]).all()
    assert (row.codes[4] == 127).all() and row.scales[4] > 0
    out = ReferenceQuantised(matrix("q4_1", 5, 192)).product(x.reshape(-1))
    assert np.isnan(out).all()
    x[2:4] = 1
    assert np.isfinite(ReferenceQuantised(matrix("q4_1", 5, 192)).product(x.reshape(-1))).all()


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_that_of_the_definition(name: str) -> None:
    """Block by block, in rationals rounded once an operation."""
    found, x = matrix(name, 3, 512, seed=7), activations(512)
    codes, row = found.codes(), quantise_row(x)
    per_block = 32 // found.format.group
    bias = np.array([0.5, -1, 3], dtype=np.float32)
    expected = []
    for n in range(3):
        total = np.float32(0)
        for group, scale in enumerate(codes.scales[n]):
            block, inputs = group // per_block, found.format.group
            part = slice(group * inputs, (group + 1) * inputs)
            products = codes.values[n, part].astype(int) * row.codes.reshape(-1)[part].astype(int)
            total = fma(float(products.sum()), scale * row.scales[block], total)
            if codes.minima is not None:
                total = fma(codes.minima[n, group], row.scales[block] * row.sums[block], total)
        expected.append(total)
    product = ReferenceQuantised(found).product(x)
    assert product.dtype == np.float32 and np.array_equal(product, expected)
    assert np.array_equal(ReferenceQuantised(found, bias).product(x), product + bias)


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_near_that_of_the_dequantised_weights(name: str) -> None:
    found, x = matrix(name, 200, 768), activations(768)
    exact = found.dequantise().astype(np.float64) @ x
    error = ReferenceQuantised(found).product(x) - exact
    assert np.linalg.norm(error) < 0.01 * np.linalg.norm(found.dequantise()) * np.sqrt((x**2).mean())
    row = quantise_row(x)
    rounded_x = (row.codes * row.scales[:, None]).reshape(-1).astype(np.float64)
    close = found.dequantise().astype(np.float64) @ rounded_x
    assert np.abs(ReferenceQuantised(found).product(x) - close).max() < 1e-5 * np.abs(close).max()
