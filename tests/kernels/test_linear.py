"""Products against float64, and bitwise: a row among any others is the row alone."""

from __future__ import annotations

import numpy as np
import pytest
from cases import chain_inputs, randn, run_chain

from closeness import assert_close
from wager.errors import ModelError
from wager.kernels.arrays import BFLOAT16, FLOAT32, zeros


class Product:
    """One linear or gated op over n outputs and k inputs."""

    def __init__(self, kernels, n, k, *, gated=False, bias=False, add=False, seed=0):
        make = np.random.default_rng(seed)
        self.weights = [make.standard_normal((n, k), np.float32) / k**0.5 for _ in range(1 + gated)]
        self.biases = [make.standard_normal((n), np.float32) for _ in self.weights] if bias else None
        self.gated, self.add = gated, add
        self.x = zeros(256, k, dtype=BFLOAT16)
        self.out = zeros(256, n, dtype=BFLOAT16 if gated else FLOAT32)
        self.tape = kernels.tape(max_rows=256, max_sequences=1, max_blocks=16, heads=1, kv_heads=1, head_dim=16)
        chain_inputs(self.tape)
        if gated:
            packed = kernels.pack_gated(*self.weights, bias=tuple(self.biases) if bias else None)
            self.tape.gated(self.x, packed, self.out)
        else:
            packed = kernels.pack(self.weights[0], self.biases[0] if bias else None)
            self.tape.linear(self.x, packed, self.out, add=add)

    def __call__(self, x, before=None):
        self.x[: len(x)] = x
        self.out.fill(float("nan"))
        self.out[: len(x)] = 0 if before is None else before
        run_chain(self.tape, len(x))
        assert np.isnan(self.out[len(x) :]).all(), "rows beyond the step were written"
        return self.out[: len(x)].copy()

    def exact(self, x):
        """In float64 over the bf16-rounded values."""
        ys = [x.astype(np.float64) @ w.astype(BFLOAT16).astype(np.float64).T for w in self.weights]
        if self.biases:
            ys = [y + b.astype(np.float64) for y, b in zip(ys, self.biases, strict=True)]
        return ys[0] / (1 + np.exp(-ys[0])) * ys[1] if self.gated else ys[0]


def activations(rows, k, seed=1):
    return randn(rows, k, seed=seed).astype(BFLOAT16)


@pytest.mark.parametrize("n", [1, 16, 31, 32, 33, 100, 257])
@pytest.mark.parametrize(("k", "rows"), [(2, 1), (14, 13), (16, 29), (64, 1), (130, 29), (576, 13)])
def test_linear_is_the_product(kernels, n, k, rows):
    x = activations(rows, k)
    plain = Product(kernels, n, k)
    assert_close(plain(x).astype(np.float64), plain.exact(x), rtol=1e-5, atol=1e-5)
    full = Product(kernels, n, k, bias=True, add=True)
    before = randn(rows, n)
    assert_close(full(x, before).astype(np.float64), full.exact(x) + before.astype(np.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 96, 250])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_is_silu_times_up(kernels, n, bias):
    for k, rows in ((576, 1), (62, 30)):
        op = Product(kernels, n, k, gated=True, bias=bias)
        x = activations(rows, k) * 4
        # The result is rounded to bf16: half a unit in the last place is 2^-9 relative.
        assert_close(op(x).astype(np.float64), op.exact(x), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("gated", [False, True])
def test_every_batch_size_gives_the_row_alone(kernels, gated):
    n, k = 72, 146
    op = Product(kernels, n, k, gated=gated)
    x = activations(256, k)
    alone = np.concatenate([op(row[None]) for row in x])
    for rows in (*range(1, 40), 100, 191, 192, 193, 256):
        assert np.array_equal(op(x[:rows]), alone[:rows]), f"{rows} rows"
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(256)
        assert np.array_equal(op(x[order]), alone[order])


def test_the_real_shapes_are_invariant(kernels):
    for n, k, gated, add in ((960, 576, False, False), (576, 1536, False, True), (1536, 576, True, False)):
        op = Product(kernels, n, k, gated=gated, add=add)
        x, before = activations(200, k), None if gated else randn(200, n)
        full = op(x, before)
        for rows in (1, 2, 8, 12, 13, 16, 100):
            part = None if before is None else before[:rows]
            assert np.array_equal(op(x[:rows], part), full[:rows])


def test_a_row_that_is_not_finite_does_not_change_the_others(kernels):
    op = Product(kernels, 64, 64)
    x = activations(9, 64)
    alone = op(x)
    x[4] = float("nan")
    got = op(x)
    assert np.isnan(got[4]).all()
    assert np.array_equal(got[[0, 3, 5, 8]], alone[[0, 3, 5, 8]])


def test_threads_do_not_change_a_row(threaded):
    kernels, one_thread = threaded(2), threaded(1)
    x = activations(50, 128)
    assert np.array_equal(Product(kernels, 200, 128)(x), Product(one_thread, 200, 128)(x))


def test_many_threads_on_few_panels(threaded):
    x = activations(7, 64)
    assert np.array_equal(Product(threaded(5), 40, 64)(x), Product(threaded(2), 40, 64)(x))


def test_what_cannot_be_packed_is_refused(kernels):
    with pytest.raises(ModelError, match="K even"):
        kernels.pack(zeros(4, 3))
    with pytest.raises(ModelError, match="does not fit 4 outputs"):
        kernels.pack(zeros(4, 2), zeros(3))
    with pytest.raises(ModelError, match="one shape"):
        kernels.pack_gated(zeros(4, 2), zeros(6, 2))


def test_buffers_of_the_wrong_kind_are_refused(kernels):
    tape = kernels.tape(max_rows=4, max_sequences=1, max_blocks=1, heads=1, kv_heads=1, head_dim=16)
    packed = kernels.pack(zeros(8, 16))
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
