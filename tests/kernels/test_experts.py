"""The router and the experts against the oracle, and bitwise: a row's result never depends on the rows beside it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import chain_inputs, randn, run_chain

from closeness import assert_close
from quantised_cases import matrix
from wager.arch import Experts, Gating
from wager.errors import ModelError
from wager.kernels.arrays import BFLOAT16, Array, zeros
from wager.kernels.cpu import Kernels
from wager.kernels.tape import Routing

HIDDEN = 72
SOFT = Experts(count=9, active=3, shared=0, width=40)
SIGMOID = Experts(
    count=16,
    active=4,
    shared=0,
    width=22,
    gating=Gating(score="sigmoid", correction_bias=True, scale=2.5, groups=4, top_groups=2, group_best=2),
)
GROUPED = replace(
    SIGMOID,
    gating=replace(SIGMOID.gating, score="softmax", correction_bias=False, normalised=False, group_best=1),
)
SCALED = replace(SOFT, gating=Gating(expert_scales=True))
SHAPES = {
    "soft": SOFT,
    "scaled": SCALED,
    "sigmoid": SIGMOID,
    "grouped": GROUPED,
    "wide": replace(SOFT, count=130, active=8),
}
QUANTISED = Experts(count=5, active=2, shared=0, width=512)
UNGATED = Experts(count=9, active=3, shared=0, width=56, gated=False)
"""As Nemotron-H's."""
BIASED = Experts(count=7, active=3, shared=0, width=40, biased=True)
"""As gpt-oss's, with its activation."""
CASES = [
    *((spec, None) for spec in (*SHAPES.values(), BIASED, UNGATED)),
    (replace(UNGATED, width=96), "q8_0"),
    *((QUANTISED, name) for name in ("q8_0", "q4_1", "q5_k")),
    (replace(BIASED, width=96), "mxfp4"),
]
CASE = pytest.mark.parametrize(("spec", "quantised"), CASES)


class Mixture:
    """One layer's router and experts over rows of its own; the weights of `spoiled` experts are not finite."""

    def __init__(
        self, kernels: Kernels, spec: Experts, quantised: str | None = None, *, spoiled: Collection[int] = ()
    ) -> None:
        self.spec, hidden, rows = spec, 256 if quantised else HIDDEN, 256
        self.router = randn(spec.count, hidden, seed=1) * hidden**-0.5 * 2
        self.bias = randn(spec.count, seed=2) * 0.1 if spec.gating.correction_bias else None
        self.x = zeros(rows, hidden, dtype=BFLOAT16)
        self.out = zeros(rows, hidden)
        self.routing = Routing.allocate(spec, max_rows=rows, hidden=hidden, act=BFLOAT16)
        self.tape: Any = kernels.tape(max_rows=rows, max_sequences=1, max_blocks=16)
        chain_inputs(self.tape)
        logit_bias = randn(spec.count, seed=5) if spec.biased else None
        scales = np.linspace(0.5, 1.5, spec.count, dtype=np.float32) if spec.gating.expert_scales else None
        self.tape.route(self.x, self.router, self.bias, spec, self.routing, logit_bias=logit_bias, scales=scales)
        parts = [randn(3, spec.width, hidden, seed=10 + index) * hidden**-0.5 for index in range(spec.count)]
        for index in spoiled:
            parts[index][0] = np.nan
        triples = [(gate, up, down.T) for gate, up, down in parts]
        if quantised:
            shapes = [(spec.width, hidden), (spec.width, hidden), (hidden, spec.width)]
            triples = [
                tuple(matrix(quantised, n, k, 3 * expert + i, size=3e-4) for i, (n, k) in enumerate(shapes))
                for expert in range(spec.count)
            ]
        if not spec.gated:
            triples = [(None, up, down) for _, up, down in triples]
        sizes = (spec.width, spec.width, hidden)
        biases = [tuple(3 * randn(size, seed=6 + index) for size in sizes) for index in range(spec.count)]
        packed = kernels.pack_experts(iter(triples), count=spec.count, biases=biases if spec.biased else None)
        activation = "clamped" if spec.biased else "silu" if spec.gated else "relu2"
        self.tape.experts(self.x, packed, spec, self.routing, self.out, activation=activation)

    def __call__(self, x: Array, before: Array | None = None) -> Array:
        rows = len(x)
        self.x[:rows] = x
        self.out.fill(np.nan)
        self.out[:rows] = 0.0 if before is None else before
        run_chain(self.tape, rows)
        assert np.isnan(self.out[rows:]).all(), "rows beyond the step were written"
        return self.out[:rows].copy()


def rows(count: int, hidden: int = HIDDEN) -> Array:
    return randn(count, hidden, seed=3).astype(BFLOAT16)


@CASE
def test_the_choice_and_the_result_are_the_oracles(kernels, oracle, spec, quantised):
    ours, theirs = Mixture(kernels, spec, quantised), Mixture(oracle, spec, quantised)
    x = rows(40, ours.x.shape[1])
    got, want = ours(x), theirs(x)
    assert np.array_equal(ours.routing.ids[:40], theirs.routing.ids[:40])
    assert_close(ours.routing.shares[:40], theirs.routing.shares[:40], rtol=1e-5, atol=1e-6)
    assert_close(got, want, rtol=2**-6, atol=0.01)  # the inner layer is rounded to bf16


@CASE
def test_every_batch_on_any_threads_gives_the_row_alone(kernels, threaded, spec, quantised):
    mixture = Mixture(kernels, spec, quantised)
    x, before = rows(230, mixture.x.shape[1]), randn(*mixture.out[:230].shape, seed=4)
    alone = np.concatenate([mixture(row[None], start[None]) for row, start in zip(x, before, strict=True)])
    for count in [*range(1, 65), 100, 193, 230]:
        assert np.array_equal(mixture(x[:count], before[:count]), alone[:count]), f"{count} rows"
    order = np.random.default_rng(0).permutation(230)
    assert np.array_equal(mixture(x[order], before[order]), alone[order])
    same, starts = np.tile(x[:1], (220, 1)), np.tile(before[:1], (220, 1))  # more for one expert than one block takes
    assert np.array_equal(mixture(same, starts), np.tile(alone[:1], (220, 1)))
    for threads in (1, 5):
        assert np.array_equal(Mixture(threaded(threads), spec, quantised)(x[:70], before[:70]), alone[:70])


@pytest.mark.parametrize("shape", SHAPES)
def test_ties_go_to_the_lowest(kernels, oracle, shape):
    spec = replace(SHAPES[shape], gating=replace(SHAPES[shape].gating, correction_bias=False))
    for each in (kernels, oracle):
        mixture = Mixture(each, spec)
        mixture(zeros(2, HIDDEN, dtype=BFLOAT16))
        assert mixture.routing.ids[:2].tolist() == [list(range(spec.active))] * 2


def test_a_row_that_is_not_finite_does_not_change_the_others(kernels):
    for spec in SHAPES.values():
        mixture, x = Mixture(kernels, spec), rows(9)
        alone = mixture(x)
        x[4, 7] = np.nan
        got = mixture(x)
        assert np.isnan(got[4]).all()
        others = [0, 1, 2, 3, 5, 6, 7, 8]
        assert np.array_equal(got[others], alone[others])


def test_experts_that_no_row_chose_are_not_read(kernels):
    mixture, x = Mixture(kernels, replace(SOFT, count=4, active=1)), rows(30)
    mixture(x)
    used = mixture.routing.ids[:30].ravel().tolist()
    spoiled = Mixture(kernels, mixture.spec, spoiled=set(range(4)) - {used[0]})
    assert np.isfinite(spoiled(x[:1])).all()
    assert np.isnan(spoiled(x)).any(axis=1).tolist() == [expert != used[0] for expert in used]


def test_what_cannot_be_packed_is_refused(kernels):
    parts = [(zeros(8, 4), zeros(8, 4), zeros(4, 8))] * 2
    with pytest.raises(ModelError, match="2 experts were given, not 3"):
        kernels.pack_experts(parts, count=3)
    with pytest.raises(ModelError, match="one too many"):
        kernels.pack_experts(parts, count=1)
    with pytest.raises(ModelError, match="shapes"):
        kernels.pack_experts([parts[0], (zeros(8, 4), zeros(8, 4), zeros(8, 4))], count=2)
    mixture = Mixture(kernels, SOFT)
    with pytest.raises(ModelError, match="9 of 41"):
        mixture.tape.experts(
            mixture.x, kernels.pack_experts(parts, count=2), replace(SOFT, width=41), mixture.routing, 0
        )


@pytest.mark.parametrize("width", [40, 72])
def test_what_is_added_behind_a_gate(kernels, oracle, width):
    """As the shared experts of Qwen2-MoE: the oracle's, and a row alone gives the same."""
    x, weight, y = rows(33), randn(HIDDEN, seed=1), randn(33, width, seed=2)
    found = []
    for each in (kernels, oracle):
        tape: Any = each.tape(max_rows=33, max_sequences=1, max_blocks=16)
        chain_inputs(tape)
        out, mine, other = np.ones((33, width), np.float32), x.copy(), y.copy()
        tape.add_gated(mine, weight, other, out)
        run_chain(tape, 33)
        found.append(out.copy())
        for row in (0, 17, 32) if each is kernels else ():
            mine[0], other[0], out[0] = x[row], y[row], 1
            run_chain(tape, 1)
            assert np.array_equal(out[0], found[0][row])
    assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
