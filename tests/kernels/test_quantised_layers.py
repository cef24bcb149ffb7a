"""Quantised weights in the other ops: gated, one matrix per head, experts; and bitwise, a row among any others."""

from __future__ import annotations

import numpy as np
import pytest
from cases import chain_inputs, randn, run_chain

import quantised_cases
from closeness import assert_close
from oracle.kernels import ReferenceQuantised, silu
from wager.arch.layers import Experts
from wager.errors import ModelError
from wager.kernels.arrays import BFLOAT16, zeros
from wager.kernels.blocks import BLOCK_FORMATS
from wager.kernels.tape import Routing

FORMATS = tuple(BLOCK_FORMATS)
ROWS = 64


def matrix(name, n, k, seed=0):
    """Weights that give sums of order one."""
    return quantised_cases.matrix(name, n, k, seed, size=3e-4 if BLOCK_FORMATS[name].inputs == 256 else 3e-3)


def activations(rows: int, k: int, seed: int = 1):
    return randn(rows, k, seed=seed).astype(BFLOAT16)


def tape_of(kernels):
    tape = kernels.tape(max_rows=ROWS, max_sequences=1, max_blocks=16, heads=1, kv_heads=1, head_dim=16)
    chain_inputs(tape)
    return tape


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
    op, x = Gated(kernels, matrix(name, 40, 256), matrix(name, 40, 256, seed=3)), activations(9, 256) * 2
    assert_close(op(x).astype(np.float32), op.exact(x), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_every_batch_size_gives_the_row_alone(kernels, name):
    op, x = Gated(kernels, matrix(name, 72, 256), matrix(name, 72, 256, seed=3)), activations(ROWS, 256)
    alone = np.concatenate([op(row[None]) for row in x])
    for rows in range(1, ROWS + 1):
        assert np.array_equal(op(x[:rows]), alone[:rows]), rows
    order = np.random.default_rng(0).permutation(ROWS)
    assert np.array_equal(op(x[order]), alone[order])


@pytest.mark.parametrize("name", FORMATS)
def test_threads_do_not_change_a_row(one_thread, kernels, name):
    if one_thread.isa.name != kernels.isa.name:
        pytest.skip("the same instruction set alone")
    weights, x = (matrix(name, 200, 256), matrix(name, 200, 256, seed=3)), activations(33, 256)
    assert np.array_equal(Gated(one_thread, *weights)(x), Gated(kernels, *weights)(x))


@pytest.mark.parametrize("name", ["q8_0", "q4_1", "q6_k"])
def test_one_matrix_per_head(kernels, name):
    heads, n, k = 3, 40, 256
    weights = [matrix(name, n, k, seed=seed) for seed in range(heads)]
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
            matrix(name, width, hidden, seed=3 * e),
            matrix(name, width, hidden, seed=3 * e + 1),
            matrix(name, hidden, width, seed=3 * e + 2),
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
    a, b = matrix("q4_0", 32, 32), matrix("q8_0", 32, 32)
    with pytest.raises(ModelError, match="one format"):
        kernels.pack_gated(a, b)
    with pytest.raises(ModelError, match="Expert 1 is q8_0"):
        kernels.pack_experts(iter([(a, a, a), (b, b, b)]), count=2)
    with pytest.raises(ModelError, match="Head 1 is q8_0"):
        kernels.pack_heads([a, b])
