"""Products of bfloat16 and quantised weights: near float64, the oracle's bits where they are integers; a row among any
others is the row alone."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import chain_inputs, rand, randn, run_chain

from closeness import assert_close
from oracle.kernels import ReferenceQuantised
from oracle.kernels import gated as activated
from quantised_cases import floats_of_eight_bits, matrix
from wager.errors import ModelError
from wager.kernels.arrays import BFLOAT16, FLOAT32, Array, zeros
from wager.kernels.blocks import BLOCK_FORMATS, Matrix, QuantisedMatrix

ROWS = 256
FORMATS = ["bf16", *BLOCK_FORMATS]


def activations(rows: int, k: int, seed: int = 1) -> Array:
    return randn(rows, k, seed=seed).astype(BFLOAT16)


def sized(name: str, n: int, k: int, seed: int = 0) -> Matrix:
    """Weights that give sums of order one."""
    if name == "bf16":
        return randn(n, k, seed=seed) / np.float32(k**0.5)
    return matrix(name, n, k, seed, size=3e-4 if BLOCK_FORMATS[name].inputs == 256 else 3e-3)


def exact(weight: Matrix, x: Array) -> Array:
    """x W^T, of floats in float64 over the bf16-rounded values, of blocks as the oracle has it."""
    if isinstance(weight, QuantisedMatrix):
        oracle = ReferenceQuantised(weight)
        return np.stack([oracle.product(row.astype(np.float32)) for row in x])
    return x.astype(np.float64) @ weight.astype(BFLOAT16).astype(np.float64).T


def tape_of(kernels: Any, rows: int = ROWS) -> Any:
    tape = kernels.tape(max_rows=rows, max_sequences=1, max_blocks=16)
    chain_inputs(tape)
    return tape


class Product:
    """One linear op, or with two weights one gated op, over n outputs. A linear op's outputs are columns of a wider
    buffer."""

    def __init__(
        self,
        kernels: Any,
        *weights: Matrix,
        bias: list[Array] | None = None,
        add: bool = False,
        scale: float = 1.0,
        activation: str = "silu",
    ) -> None:
        self.weights, self.bias, (n, k) = weights, bias, weights[0].shape
        self.activation, self.scale = activation, scale
        gated = len(weights) == 2
        self.x, self.wide = zeros(ROWS, k, dtype=BFLOAT16), zeros(ROWS, n + 7, dtype=BFLOAT16 if gated else FLOAT32)
        self.out = zeros(ROWS, n, dtype=BFLOAT16) if gated else self.wide[:, 3 : 3 + n]
        self.tape = tape_of(kernels)
        if gated:
            packed = kernels.pack_gated(*weights, bias=tuple(bias) if bias else None)
            self.tape.gated(self.x, packed, self.out, activation=activation, gate_scale=scale)
        else:
            self.tape.linear(
                self.x, kernels.pack(weights[0], bias[0] if bias else None), self.out, add=add, scale=scale
            )

    def __call__(self, x: Array, before: Array | None = None) -> Array:
        self.x[: len(x)] = x
        self.wide.fill(np.nan)
        self.out.fill(np.nan)
        self.out[: len(x)] = 0 if before is None else before
        run_chain(self.tape, len(x))
        assert np.isnan(self.out[len(x) :]).all(), "rows beyond the step were written"
        assert np.isnan(self.wide[:, :3]).all() and np.isnan(self.wide[:, -4:]).all()
        return self.out[: len(x)].copy()

    def exact(self, x: Array) -> Array:
        ys = [exact(weight, x) for weight in self.weights]
        if self.bias:
            ys = [y + bias.astype(np.float64) for y, bias in zip(ys, self.bias, strict=True)]
        first = ys[0] * self.scale
        return activated(self.activation, first, ys[1]) if len(ys) == 2 else first


def given(kernels: Any, name: str, n: int, k: int, *, gated: bool) -> Product:
    return Product(kernels, *(sized(name, n, k, seed) for seed in range(1 + gated)))


@pytest.mark.parametrize("n", [1, 16, 31, 32, 33, 100, 257])
def test_linear_is_the_product(kernels, n):
    for k, rows in ((2, 1), (14, 13), (16, 29), (64, 1), (130, 29), (576, 13)):
        x, before = activations(rows, k), randn(rows, n)
        plain = Product(kernels, sized("bf16", n, k), scale=0.7 if n == 33 else 1.0)
        assert_close(plain(x).astype(np.float64), plain.exact(x), rtol=1e-5, atol=1e-5)
        full = Product(kernels, sized("bf16", n, k), bias=[randn(n)], add=True, scale=0.22)
        assert_close(full(x, before).astype(np.float64), full.exact(x) + before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_quantised_products_are_the_oracles_bit_for_bit(kernels, name):
    for n, k in ((1, 256), (33, 768), (100, 1536)):
        weight, bias, x = matrix(name, n, k, seed=n), randn(n, seed=3), activations(5, k)
        x[1, 32:64] = 0
        expected = np.array([ReferenceQuantised(weight, bias).product(row.astype(np.float32)) for row in x])
        found = Product(kernels, weight, bias=[bias])(x)
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("name", [name for name in BLOCK_FORMATS if not name.startswith("e4m3")])
def test_sums_of_the_largest_codes_and_activations_are_exact(kernels, name):
    """Rows of one byte each, so of the largest and least codes too, whose products all have the same sign."""
    known, k = BLOCK_FORMATS[name], 512
    data = np.repeat(np.arange(256, dtype=np.uint8), known.row_bytes(k)).reshape(256, -1)
    blocks = data.reshape(256, -1, known.bytes)
    for at in known.fields:
        blocks[..., at : at + 2] = np.frombuffer(np.float16(1e-3).tobytes(), np.uint8)
    if name == "mxfp4":
        blocks[..., 0] = 127  # the exponent
    weight, x = QuantisedMatrix(known, data, k), np.ones((5, k), BFLOAT16)
    x[1], x[2, ::2], x[3, 1::4], x[4, 2::4] = -1, -1, -1, -1
    assert np.array_equal(Product(kernels, weight)(x), exact(weight, x))


@pytest.mark.parametrize("name", ["e4m3", "e4m3_128"])
def test_every_float_of_eight_bits_is_multiplied_by_itself_and_no_number_gives_none(kernels, name):
    codes = np.zeros((256, 256), np.uint8)
    codes[:, 5] = codes[:, 138] = np.arange(256)
    data = floats_of_eight_bits(name, codes, np.full((256, 2), 0.75)).data
    data[:, 4 + 5] = codes[:, 5]  # NaN too
    op = Product(kernels, QuantisedMatrix(BLOCK_FORMATS[name], data, 256))
    x = np.zeros((9, 256), BFLOAT16)
    x[[1, 3], 5], x[5, 138], x[7, 77] = 1, -3, 1
    wanted = codes[:, 5].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(0.75)
    numbers = np.isfinite(wanted)
    for rows in (1, 2, 9):
        for first in range(0, 9, rows):
            found = op(x[first : first + rows])
            assert np.isnan(found[:, ~numbers]).all()
            for row, y in enumerate(found, first):
                assert np.array_equal(y[numbers], wanted[numbers] * {1: 1, 3: 1, 5: -3}.get(row, 0))
    table, out = tape_of(kernels, 256), np.empty((256, 256), np.float32)
    table.embed(kernels.pack(op.weights[0]), out)
    table.inputs.tokens[:] = np.arange(256)
    run_chain(table, 256)
    assert np.array_equal(out[:, 138][numbers], wanted[numbers]) and np.isnan(out[~numbers, 5]).all()


def test_rows_of_one_scale_need_not_be_of_whole_groups(kernels):
    for n, k in ((33, 32), (70, 96), (16, 576)):
        weight, x = matrix("e4m3", n, k, seed=n), activations(5, k)
        assert np.array_equal(Product(kernels, weight)(x), exact(weight, x))


@pytest.mark.parametrize("name", FORMATS)
def test_gated_is_the_activated_gate_times_up(kernels, name):
    sizes = [(40, 256)] if name != "bf16" else [(n, k) for n in (1, 15, 16, 17, 96, 250) for k in (576, 62)]
    for n, k in sizes:
        x = activations(9, k) * 2
        for bias, scale in ((None, 1.0), ([rand(n), rand(n)], 0.6)):
            for activation in ("silu", "gelu", "clamped"):
                weights = sized(name, n, k), sized(name, n, k, seed=3)
                op = Product(kernels, *weights, bias=bias, activation=activation, scale=scale)
                # The result is rounded to bf16: half a unit in the last place is 2^-9 relative.
                assert_close(op(x).astype(np.float64), op.exact(x), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_every_batch_size_gives_the_row_alone(kernels, name, gated):
    most = 256 if name == "bf16" else 64
    op, x = given(kernels, name, 72, 146 if name == "bf16" else 256, gated=gated), activations(256, 256)
    x = x[:most, : op.x.shape[1]]
    alone = np.concatenate([op(row[None]) for row in x])
    for rows in {*range(1, 65), 100, 191, 192, 193, most}:
        assert np.array_equal(op(x[:rows]), alone[:rows]), f"{rows} rows"
    order = np.random.default_rng(0).permutation(most)
    assert np.array_equal(op(x[order]), alone[order])
    # Sizes of a real model: a large panel is multiplied once with several rows.
    n, k = (40, 4096) if name != "bf16" else (1536, 576) if gated else (576, 1536)
    op, x = given(kernels, name, n, k, gated=gated), activations(200, k)
    full = op(x)
    assert all(np.array_equal(op(x[:rows]), full[:rows]) for rows in (*range(1, 18), 100))


@pytest.mark.parametrize("name", FORMATS)
def test_values_that_are_not_finite_stay_in_their_row(kernels, name):
    op, x = given(kernels, name, 40, 256, gated=False), activations(6, 256)
    clean = op(x)
    x[2, 40], x[4, 255] = np.inf, np.nan
    found = op(x)
    assert not np.isfinite(found[[2, 4]]).any()
    assert np.array_equal(found[[0, 1, 3, 5]], clean[[0, 1, 3, 5]])


@pytest.mark.parametrize("name", FORMATS)
def test_threads_do_not_change_a_row(threaded, name):
    x = activations(33, 256)
    for gated in (False, True):
        for n in (40, 200):
            alone = given(threaded(1), name, n, 256, gated=gated)(x)
            assert all(np.array_equal(given(threaded(count), name, n, 256, gated=gated)(x), alone) for count in (2, 5))


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_a_table_are_dequantised(kernels, name):
    table = sized(name, 50, 512)
    tape, out = tape_of(kernels, 16), np.full((16, 512), np.nan, np.float32)
    scaled = out.copy()
    tape.embed(kernels.pack(table), out)
    tape.embed(kernels.pack(table), scaled, scale=25.3)
    tape.inputs.tokens[:9] = [0, 49, 31, 32, 33, 5, 5, 1, 48]
    run_chain(tape, 9)
    wanted = table.dequantise() if isinstance(table, QuantisedMatrix) else table.astype(BFLOAT16).astype(np.float32)
    assert np.array_equal(out[:9], wanted[tape.inputs.tokens[:9]])
    assert np.array_equal(scaled[:9], out[:9] * np.float32(25.3))
    assert np.isnan(out[9:]).all()


@pytest.mark.parametrize("name", ["q8_0", "bf16", "q4_1", "q6_k", "e4m3", "e4m3_128"])
def test_one_matrix_per_head(kernels, name):
    heads, n, k, rows = 3, 40, 256, 64
    weights = [sized(name, n, k, seed=seed) for seed in range(heads)]
    tape, x = tape_of(kernels, rows), zeros(rows, heads * k, dtype=BFLOAT16)
    out = zeros(rows, heads * 48, dtype=BFLOAT16)
    tape.per_head(x, kernels.pack_heads(weights), out)
    x[:] = activations(rows, heads * k)
    run_chain(tape, rows)
    whole = out.reshape(rows, heads, 48)[..., :n].copy()
    for head, weight in enumerate(weights):
        wanted = exact(weight, x[[0, 17, 63], head * k : (head + 1) * k])
        assert_close(whole[[0, 17, 63], head].astype(np.float64), wanted, rtol=2**-8, atol=1e-6)
    for some in (1, 5, 16, 17):
        out[:] = 0
        run_chain(tape, some)
        assert np.array_equal(out.reshape(rows, heads, 48)[:some, :, :n], whole[:some]), some


def test_what_cannot_be_packed_is_refused(kernels):
    a, b = sized("q4_0", 32, 32), sized("q8_0", 32, 32)
    for pack, message in (
        (lambda: kernels.pack(zeros(4, 3)), "K even"),
        (lambda: kernels.pack(zeros(4, 2), zeros(3)), "does not fit 4 outputs"),
        (lambda: kernels.pack_gated(zeros(4, 2), zeros(6, 2)), "one shape"),
        (lambda: kernels.pack_gated(a, b), "one format"),
        (lambda: kernels.pack_experts(iter([(a, a, a), (b, b, b)]), count=2), "Expert 1 is q8_0"),
        (lambda: kernels.pack_heads([a, b]), "Head 1 is q8_0"),
    ):
        with pytest.raises(ModelError, match=message):
            pack()


def test_buffers_of_the_wrong_kind_are_refused(kernels):
    tape, packed = tape_of(kernels, 4), kernels.pack(zeros(8, 16))
    x, out = zeros(4, 16, dtype=BFLOAT16), zeros(4, 8)
    for bad_x, bad_out in (
        (x.astype(np.float32), out),
        (x[:, :8], out),
        (x, out.astype(BFLOAT16)),
        (x, out[:, :7]),
        (x[0], out),
    ):
        with pytest.raises(ModelError, match="must be contiguous"):
            tape.linear(bad_x, packed, bad_out)
    with pytest.raises(ModelError, match="max_rows"):
        tape.linear(x[:3], packed, out)
