"""The native sampler against kernels/noise.py, the float64 definition of the field."""

from __future__ import annotations

import numpy as np
import pytest

from wager.kernels.arrays import zeros
from wager.kernels.cpu import SampleRequest
from wager.kernels.noise import argmax_gumbel


def sample(kernels, logits, requests):
    """Tokens of requests (row, temperature, seed, position, choice)."""
    return kernels.sample(logits, [SampleRequest(*request) for request in requests])


@pytest.mark.parametrize("vocab", [49152, 1, 2, 31, 32, 33, 65, 1000])
def test_token_is_that_of_the_definition_on_any_threads(kernels, threaded, vocab):
    rng = np.random.default_rng(vocab)
    spread = np.array([[0.0], [1.0], [3.0], [4.0], [12.0], [80.0]])
    logits = (rng.normal(size=(6, vocab)) * spread).astype(np.float32)
    requests = [
        (row, temperature, int(rng.integers(0, 2**64, dtype=np.uint64)), int(rng.integers(5000)), int(rng.integers(5)))
        for row in range(6)
        for temperature in (0.01, 0.3, 1.0, 5.0, 1000.0)
    ]
    wanted = [argmax_gumbel(logits[row], *request) for row, *request in requests]
    assert sample(kernels, logits, requests) == wanted
    assert [sample(kernels, logits, [request])[0] for request in requests] == wanted
    assert sample(threaded(1), logits, requests) == wanted


def test_greedy_ties_and_rows_that_are_not_finite(kernels):
    logits = zeros(4, 100)
    logits[0, [30, 70]] = 5.0
    logits[1, 99] = float("nan")
    logits[2, 0] = float("inf")
    logits[3, 50] = -float("inf")
    requests = [(0, 0.0, 1, 1, 0), (0, 1e-4, 1, 1, 0), (1, 1.0, 1, 1, 0), (2, 0.0, 1, 1, 0), (3, 0.5, 1, 1, 0)]
    tokens = sample(kernels, logits, requests)
    assert tokens == [30, 30, -1, -1, -1]
    assert all(type(token) is int for token in tokens)
    assert sample(kernels, logits, []) == []
