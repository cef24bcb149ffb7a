"""The oracle against textbook formulas, its quantised arithmetic against exact rationals."""

from __future__ import annotations

import cmath
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from cases import Piece, World, angles

from closeness import assert_close
from oracle.kernels import ReferenceKernels, ReferenceQuantised, fused, quantise_row, rotate, softmax
from quantised_cases import matrix
from wager.kernels.blocks import BLOCK_FORMATS


def test_attention_is_the_formula() -> None:
    world = World(ReferenceKernels("float32"), heads=4, d=16, window=12)
    rows = world.rows(40, seed=1)
    out = world.step(Piece([4, 2, 3], 0, rows))[0].reshape(40, 4, 16)
    heads, keys, values = np.split(rows.reshape(40, -1, 16).astype(np.float64), [4, 6], axis=1)
    for part in (heads, keys):
        part[:] = np.stack([rotate(row, table) for row, table in zip(part, angles(40, 16), strict=True)])
    hidden = np.triu(np.ones((40, 40), bool), 1) | np.tril(np.ones((40, 40), bool), -12)
    for head in range(4):
        scores = heads[:, head] @ keys[:, head // 2].T / math.sqrt(16)
        expected = softmax(np.where(hidden, -np.inf, scores)) @ values[:, head // 2]
        assert_close(out[:, head], expected, atol=1e-5, rtol=0)


def test_rotation_turns_pairs_half_a_head_apart() -> None:
    table = np.array([math.cos(0.3), math.cos(0.5), math.sin(0.3), math.sin(0.5)])
    turned = [complex(1, 3) * cmath.exp(0.3j), complex(2, 4) * cmath.exp(0.5j)]
    expected = [turned[0].real, turned[1].real, turned[0].imag, turned[1].imag]
    assert_close(rotate(np.array([[1.0, 2, 3, 4]]), table)[0], np.array(expected), rtol=1e-12, atol=0)


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
    a, b, c = (np.ldexp(rng.normal(size=1000), rng.integers(-20, 20, 1000)).astype(np.float32) for _ in range(3))
    c[:300] = -(a * b)[:300]  # cancels
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


def activations(k: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=k).astype(ml_dtypes.bfloat16).astype(np.float32)


def test_activations_are_rounded_to_nearest_even() -> None:
    x = activations(320)
    row = quantise_row(x)
    for block, codes, scale, total in zip(x.reshape(-1, 32), row.codes, row.scales, row.sums, strict=True):
        largest = np.abs(block).max()
        assert scale == np.float32(largest / np.float32(127))
        exact = [Fraction(float(np.float32(v * (np.float32(127) / largest)))) for v in block]
        assert codes.tolist() == [round(value) for value in exact]
        assert np.abs(codes).max() == 127 and total == codes.sum()


def test_blocks_of_activations_that_are_zero_or_not_finite() -> None:
    x = activations(192).reshape(6, 32)
    x[0], x[1], x[4] = 0, 1e-31, np.float32(1e-30)
    x[2, 3], x[3, 31] = np.inf, np.nan
    row = quantise_row(x.reshape(-1))
    assert row.scales[:2].tolist() == [0, 0] and not row.codes[:4].any() and not row.sums[:4].any()
    assert np.isnan(row.scales[2:4]).all()
    assert (row.codes[4] == 127).all() and row.scales[4] > 0
    assert np.isnan(ReferenceQuantised(matrix("q4_1", 5, 192)).product(x.reshape(-1))).all()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_a_quantised_product_is_that_of_the_definition(name: str) -> None:
    """Block by block, in rationals rounded once an operation."""
    found, x = matrix(name, 3, 512, seed=7), activations(512)
    codes, row, inputs = found.codes(), quantise_row(x), found.format.group
    bias = np.array([0.5, -1, 3], dtype=np.float32)
    expected = []
    for n in range(3):
        total = np.float32(0)
        for group, scale in enumerate(codes.scales[n]):
            block, part = group * inputs // 32, slice(group * inputs, (group + 1) * inputs)
            products = codes.values[n, part].astype(int) * row.codes.reshape(-1)[part].astype(int)
            total = fma(float(products.sum()), scale * row.scales[block], total)
            if codes.minima is not None:
                total = fma(codes.minima[n, group], row.scales[block] * row.sums[block], total)
        expected.append(total)
    assert np.array_equal(ReferenceQuantised(found).product(x), expected)
    assert np.array_equal(ReferenceQuantised(found, bias).product(x), expected + bias)
