"""Quantised products of the native kernels: the oracle's numbers bit for bit, and a row's own among any others."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from cases import chain_inputs, run_chain

from oracle.kernels import ReferenceQuantised
from quantised_cases import matrix
from wager.kernels.blocks import BLOCK_FORMATS

FORMATS = list(BLOCK_FORMATS)
ROWS = 64


def activations(rows, k, seed=1):
    return np.random.default_rng(seed).normal(size=(rows, k)).astype(ml_dtypes.bfloat16)


class Linear:
    """One linear op with quantised weights."""

    def __init__(self, kernels, weight, *, bias=None):
        self.x = np.zeros((ROWS, weight.k), ml_dtypes.bfloat16)
        self.wide = np.zeros((ROWS, weight.shape[0] + 7), np.float32)
        self.out = self.wide[:, 3 : 3 + weight.shape[0]]
        self.tape = kernels.tape(max_rows=ROWS, max_sequences=1, max_blocks=4, heads=1, kv_heads=1, head_dim=16)
        chain_inputs(self.tape)
        self.tape.linear(self.x, kernels.pack(weight, bias), self.out)

    def __call__(self, x):
        self.x[: len(x)] = x
        self.wide[:] = np.nan
        run_chain(self.tape, len(x))
        assert np.isnan(self.wide[len(x) :]).all() and np.isnan(self.wide[:, :3]).all()
        assert np.isnan(self.wide[:, 3 + self.out.shape[1] :]).all()
        return self.out[: len(x)].copy()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(1, 256), (33, 768), (100, 1536)])
def test_products_are_the_oracles_bit_for_bit(kernels, name, n, k):
    weight = matrix(name, n, k, seed=n)
    bias = np.random.default_rng(3).normal(size=n).astype(np.float32)
    x = activations(5, k)
    x[1, 32:64] = 0
    expected = np.array([ReferenceQuantised(weight, bias).product(row.astype(np.float32)) for row in x])
    found = Linear(kernels, weight, bias=bias)(x)
    if kernels.name == "native portable":  # without fused multiply-adds
        size = np.linalg.norm(weight.dequantise(), axis=1) * np.linalg.norm(x[0].astype(np.float32))
        assert (np.abs(found - expected) <= 1e-6 * size).all()
    else:
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_is_the_same_among_any_others(kernels, name):
    weight, x = matrix(name, 70, 512), activations(ROWS, 512)
    product = Linear(kernels, weight)
    whole = product(x)
    for rows in (1, 2, 3, 4, 5, 8, 9, 13, 16, 17, 31, 33, 63):
        first = (7 * rows) % (ROWS - rows + 1)
        assert np.array_equal(product(x[first : first + rows]), whole[first : first + rows]), rows


@pytest.mark.parametrize("name", FORMATS)
def test_values_that_are_not_finite_stay_in_their_row(kernels, name):
    weight, x = matrix(name, 40, 256), activations(6, 256)
    clean = Linear(kernels, weight)(x)
    x[2, 40], x[4, 255] = np.inf, np.nan
    found = Linear(kernels, weight)(x)
    assert np.isnan(found[[2, 4]]).all()
    assert np.array_equal(found[[0, 1, 3, 5]], clean[[0, 1, 3, 5]])


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_a_table_are_dequantised(backend, name):
    table = matrix(name, 50, 512)
    tape = backend.tape(max_rows=16, max_sequences=1, max_blocks=1, heads=1, kv_heads=1, head_dim=16)
    chain_inputs(tape)
    out = np.full((16, 512), np.nan, np.float32)
    tape.embed(backend.pack(table), out)
    tape.inputs.tokens[:9] = [0, 49, 31, 32, 33, 5, 5, 1, 48]
    run_chain(tape, 9)
    assert np.array_equal(out[:9], table.dequantise()[tape.inputs.tokens[:9]])
    assert np.isnan(out[9:]).all()
