"""Products against float64, and bitwise: a row among any others is the row alone."""

from __future__ import annotations

import pytest
import torch
from cases import chain_inputs, run_chain

from wager.errors import ModelError


class Product:
    """One linear or gated op over n outputs and k inputs."""

    def __init__(self, kernels, n, k, *, gated=False, bias=False, add=False, seed=0):
        make = torch.Generator().manual_seed(seed)
        self.weights = [torch.randn(n, k, generator=make) / k**0.5 for _ in range(1 + gated)]
        self.biases = [torch.randn(n, generator=make) for _ in self.weights] if bias else None
        self.gated, self.add = gated, add
        self.x = torch.zeros(256, k, dtype=torch.bfloat16)
        self.out = torch.zeros(256, n, dtype=torch.bfloat16 if gated else torch.float32)
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
        self.out.fill_(float("nan"))
        self.out[: len(x)] = 0 if before is None else before
        run_chain(self.tape, len(x))
        assert self.out[len(x) :].isnan().all(), "rows beyond the step were written"
        return self.out[: len(x)].clone()

    def exact(self, x):
        """In float64 over the bf16-rounded values."""
        ys = [x.double() @ w.bfloat16().double().T for w in self.weights]
        if self.biases:
            ys = [y + b.double() for y, b in zip(ys, self.biases, strict=True)]
        return ys[0] * torch.sigmoid(ys[0]) * ys[1] if self.gated else ys[0]


def activations(rows, k, seed=1):
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("n", [1, 16, 31, 32, 33, 100, 257])
@pytest.mark.parametrize("k", [2, 14, 16, 64, 130, 576])
@pytest.mark.parametrize("rows", [1, 13, 29])
def test_linear_is_the_product(kernels, n, k, rows):
    x = activations(rows, k)
    plain = Product(kernels, n, k)
    torch.testing.assert_close(plain(x).double(), plain.exact(x), rtol=1e-5, atol=1e-5)
    full = Product(kernels, n, k, bias=True, add=True)
    before = torch.randn(rows, n)
    torch.testing.assert_close(full(x, before).double(), full.exact(x) + before.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 96, 250])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_is_silu_times_up(kernels, n, bias):
    for k, rows in ((576, 1), (62, 30)):
        op = Product(kernels, n, k, gated=True, bias=bias)
        x = activations(rows, k) * 4
        # The result is rounded to bf16: half a unit in the last place is 2^-9 relative.
        torch.testing.assert_close(op(x).double(), op.exact(x), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("gated", [False, True])
def test_every_batch_size_gives_the_row_alone(kernels, gated):
    n, k = 72, 146
    op = Product(kernels, n, k, gated=gated)
    x = activations(256, k)
    alone = torch.cat([op(row[None]) for row in x])
    for rows in range(1, 257):
        assert torch.equal(op(x[:rows]), alone[:rows]), f"{rows} rows"
    for seed in range(5):
        order = torch.randperm(256, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(op(x[order]), alone[order])


def test_the_real_shapes_are_invariant(kernels):
    for n, k, gated, add in ((960, 576, False, False), (576, 1536, False, True), (1536, 576, True, False)):
        op = Product(kernels, n, k, gated=gated, add=add)
        x, before = activations(200, k), None if gated else torch.randn(200, n)
        full = op(x, before)
        for rows in (1, 2, 8, 12, 13, 16, 100):
            part = None if before is None else before[:rows]
            assert torch.equal(op(x[:rows], part), full[:rows])


def test_a_row_that_is_not_finite_does_not_change_the_others(kernels):
    op = Product(kernels, 64, 64)
    x = activations(9, 64)
    alone = op(x)
    x[4] = float("nan")
    got = op(x)
    assert got[4].isnan().all()
    assert torch.equal(got[[0, 3, 5, 8]], alone[[0, 3, 5, 8]])


def test_threads_do_not_change_a_row(kernels, one_thread):
    if kernels.isa.name != one_thread.isa.name:
        pytest.skip("another instruction set")
    x = activations(50, 128)
    assert torch.equal(Product(kernels, 200, 128)(x), Product(one_thread, 200, 128)(x))


def test_many_threads_on_few_panels(kernels):
    from wager.kernels.cpu import CpuKernels

    isa = {"avx512-bf16": "avx512"}.get(kernels.isa.name, kernels.isa.name)
    crowd, x = CpuKernels(isa=isa, threads=5), activations(7, 64)
    assert torch.equal(Product(crowd, 40, 64)(x), Product(kernels, 40, 64)(x))


def test_what_cannot_be_packed_is_refused(kernels):
    with pytest.raises(ModelError, match="K even"):
        kernels.pack(torch.zeros(4, 3))
    with pytest.raises(ModelError, match="does not fit 4 outputs"):
        kernels.pack(torch.zeros(4, 2), torch.zeros(3))
    with pytest.raises(ModelError, match="one shape"):
        kernels.pack_gated(torch.zeros(4, 2), torch.zeros(6, 2))


def test_buffers_of_the_wrong_kind_are_refused(kernels):
    tape = kernels.tape(max_rows=4, max_sequences=1, max_blocks=1, heads=1, kv_heads=1, head_dim=16)
    packed = kernels.pack(torch.zeros(8, 16))
    x, out = torch.zeros(4, 16, dtype=torch.bfloat16), torch.zeros(4, 8)
    for bad_x, bad_out in ((x.float(), out), (x[:, :8], out), (x, out.bfloat16()), (x, out[:, :7]), (x[0], out)):
        with pytest.raises(ModelError, match="must be contiguous"):
            tape.linear(bad_x, packed, bad_out)
    with pytest.raises(ModelError, match="max_rows"):
        tape.linear(x[:3], packed, out)
