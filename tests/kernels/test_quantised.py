"""Quantised weights: the oracle's bits in products, near them in other ops; a row is the same among any others."""

from __future__ import annotations

import numpy as np
import pytest
from cases import chain_inputs, randn, run_chain

from closeness import assert_close
from oracle.kernels import ReferenceQuantised, silu
from quantised_cases import matrix
from wager.arch import Experts
from wager.errors import ModelError
from wager.kernels.arrays import BFLOAT16, zeros
from wager.kernels.blocks import BLOCK_FORMATS
from wager.kernels.tape import Routing

FORMATS = list(BLOCK_FORMATS)
ROWS = 64


def activations(rows: int, k: int, seed: int = 1):
    return randn(rows, k, seed=seed).astype(BFLOAT16)


def sized(name, n, k, seed=0):
    """Weights that give sums of order one."""
    return matrix(name, n, k, seed, size=3e-4 if BLOCK_FORMATS[name].inputs == 256 else 3e-3)


def tape_of(kernels):
    tape = kernels.tape(max_rows=ROWS, max_sequences=1, max_blocks=16, heads=1, kv_heads=1, head_dim=16)
    chain_inputs(tape)
    return tape


class Linear:
    """One linear op with quantised weights."""

    def __init__(self, kernels, weight, *, bias=None):
        self.x = np.zeros((ROWS, weight.k), BFLOAT16)
        self.wide = np.zeros((ROWS, weight.shape[0] + 7), np.float32)
        self.out = self.wide[:, 3 : 3 + weight.shape[0]]
        self.tape = tape_of(kernels)
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
def test_rows_of_a_table_are_dequantised(kernels, name):
    table = matrix(name, 50, 512)
    tape = kernels.tape(max_rows=16, max_sequences=1, max_blocks=1, heads=1, kv_heads=1, head_dim=16)
    chain_inputs(tape)
    out = np.full((16, 512), np.nan, np.float32)
    tape.embed(kernels.pack(table), out)
    tape.inputs.tokens[:9] = [0, 49, 31, 32, 33, 5, 5, 1, 48]
    run_chain(tape, 9)
    assert np.array_equal(out[:9], table.dequantise()[tape.inputs.tokens[:9]])
    assert np.isnan(out[9:]).all()


# ---- gated, one matrix per head, experts ----


class Gated:
    """silu(gate x) * up x, of n outputs."""

    def __init__(self, kernels, gate, up):
        self.weights = gate, up
        self.x, self.out = zeros(ROWS, gate.k, dtype=BFLOAT16), zeros(ROWS, gate.shape[0], dtype=BFLOAT16)
        self.tape = tape_of(kernels)
        self.tape.gated(self.x, kernels.pack_gated(gate, up), self.out)

    def __call__(self, x):
        self.x[: len(x)] = x
        self.out.fill(7)
        run_chain(self.tape, len(x))
        assert (self.out[len(x) :] == 7).all(), "rows beyond the step were written"
        return self.out[: len(x)].copy()

    def exact(self, x):
        gate, up = (
            np.stack([ReferenceQuantised(w).product(row.astype(np.float32)) for row in x]) for w in self.weights
        )
        return silu(gate) * up


@pytest.mark.parametrize("name", FORMATS)
def test_gated_is_silu_times_up(kernels, name):
    op, x = Gated(kernels, sized(name, 40, 256), sized(name, 40, 256, seed=3)), activations(9, 256) * 2
    assert_close(op(x).astype(np.float32), op.exact(x), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_every_batch_size_gives_a_gated_row_alone(kernels, name):
    op, x = Gated(kernels, sized(name, 72, 256), sized(name, 72, 256, seed=3)), activations(ROWS, 256)
    alone = np.concatenate([op(row[None]) for row in x])
    for rows in range(1, ROWS + 1):
        assert np.array_equal(op(x[:rows]), alone[:rows]), rows
    order = np.random.default_rng(0).permutation(ROWS)
    assert np.array_equal(op(x[order]), alone[order])


@pytest.mark.parametrize("name", FORMATS)
def test_threads_do_not_change_a_row(threaded, name):
    kernels, one_thread = threaded(2), threaded(1)
    weights, x = (sized(name, 200, 256), sized(name, 200, 256, seed=3)), activations(33, 256)
    assert np.array_equal(Gated(one_thread, *weights)(x), Gated(kernels, *weights)(x))


@pytest.mark.parametrize("name", ["q8_0", "q4_1", "q6_k"])
def test_one_matrix_per_head(kernels, name):
    heads, n, k = 3, 40, 256
    weights = [sized(name, n, k, seed=seed) for seed in range(heads)]
    tape, x, out = tape_of(kernels), zeros(ROWS, heads * k, dtype=BFLOAT16), zeros(ROWS, heads * 48, dtype=BFLOAT16)
    tape.per_head(x, kernels.pack_heads(weights), out)
    x[:] = activations(ROWS, heads * k)
    run_chain(tape, ROWS)
    whole = out.reshape(ROWS, heads, 48)[..., :n].copy()
    for head, weight in enumerate(weights):
        oracle = ReferenceQuantised(weight)
        for row in (0, 17, 63):
            wanted = oracle.product(x[row, head * k : (head + 1) * k].astype(np.float32))
            assert_close(whole[row, head].astype(np.float32), wanted, rtol=2**-8, atol=1e-6)
    for rows in (1, 5, 16, 17):
        out[:] = 0
        run_chain(tape, rows)
        assert np.array_equal(out.reshape(ROWS, heads, 48)[:rows, :, :n], whole[:rows]), rows


@pytest.mark.parametrize("name", ["q8_0", "q4_1", "q5_k"])
def test_experts_of_quantised_weights(kernels, name):
    hidden, width, count, top = 256, 512, 5, 2
    spec = Experts(count=count, active=top, shared=0, width=width)
    parts = [
        (
            sized(name, width, hidden, seed=3 * e),
            sized(name, width, hidden, seed=3 * e + 1),
            sized(name, hidden, width, seed=3 * e + 2),
        )
        for e in range(count)
    ]
    tape, x, out = tape_of(kernels), zeros(ROWS, hidden, dtype=BFLOAT16), zeros(ROWS, hidden)
    routing = Routing.allocate(spec, max_rows=ROWS, hidden=hidden, act=BFLOAT16)
    tape.route(x, randn(count, hidden, seed=2), None, spec, routing)
    tape.experts(x, kernels.pack_experts(iter(parts), count=count), spec, routing, out)
    x[:] = activations(ROWS, hidden)
    out[:] = 0
    run_chain(tape, ROWS)
    whole = out.copy()
    for row in (0, 40):
        wanted, value = np.zeros(hidden, np.float32), x[row].astype(np.float32)
        for expert, share in zip(routing.ids[row], routing.shares[row], strict=True):
            gate, up, down = (ReferenceQuantised(part) for part in parts[expert])
            inner = (silu(gate.product(value)) * up.product(value)).astype(BFLOAT16).astype(np.float32)
            wanted += share * down.product(inner)
        # an inner value may be rounded to the other bf16 neighbour, because exp differs in its last bits
        assert_close(whole[row], wanted, rtol=2e-2, atol=2e-3)
    for rows in (1, 3, 8, 9, 33):
        out[:] = 0
        run_chain(tape, rows)
        assert np.array_equal(out[:rows], whole[:rows]), rows


def test_matrices_that_differ_are_refused(kernels):
    a, b = sized("q4_0", 32, 32), sized("q8_0", 32, 32)
    with pytest.raises(ModelError, match="one format"):
        kernels.pack_gated(a, b)
    with pytest.raises(ModelError, match="Expert 1 is q8_0"):
        kernels.pack_experts(iter([(a, a, a), (b, b, b)]), count=2)
    with pytest.raises(ModelError, match="Head 1 is q8_0"):
        kernels.pack_heads([a, b])
