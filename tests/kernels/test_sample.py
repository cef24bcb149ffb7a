"""The native sampler against kernels/noise.py, the float64 definition of the field."""

from __future__ import annotations

import numpy as np
import pytest
from cases import randn

from wager.kernels.arrays import INT32, zeros
from wager.kernels.noise import argmax_gumbel
from wager.kernels.sampling import SampleRequest, sample_rows


def sample(kernels, logits, requests):
    """Tokens of requests (row, temperature, seed, position, choice)."""
    rows, temperatures, seeds, positions, choices = zip(*requests, strict=True)
    signed = [s - 2**64 if s >= 2**63 else s for s in seeds]
    return kernels.sample(
        logits,
        np.array(rows, np.int32),
        np.array(temperatures, np.float64),
        np.array(signed, np.int64),
        np.array(positions, np.int32),
        np.array(choices, np.int32),
    ).tolist()


@pytest.mark.parametrize("vocab", [1, 2, 31, 32, 33, 65, 1000])
def test_token_is_that_of_the_definition(kernels, vocab):
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(size=(6, vocab)) * 3).astype(np.float32)
    requests = [
        (row, temperature, int(rng.integers(0, 2**64, dtype=np.uint64)), int(rng.integers(5000)), int(rng.integers(5)))
        for row in range(6)
        for temperature in (0.01, 0.3, 1.0, 5.0, 1000.0)
    ]
    wanted = [argmax_gumbel(logits[row], *request) for row, *request in requests]
    assert sample(kernels, logits, requests) == wanted
    assert [sample(kernels, logits, [request])[0] for request in requests] == wanted


def test_wide_vocabulary_agrees_with_the_package_field(kernels):
    rng = np.random.default_rng(3)
    spread = (0.0, 1.0, 4.0, 12.0, 80.0)
    logits = np.stack([rng.normal(size=49152) * s for s in spread]).astype(np.float32)
    requests = [(row, t, 1000 * row + i, 7 * i, i % 3) for row in range(5) for i, t in enumerate((0.2, 0.7, 1.0, 1.5))]
    wanted = [argmax_gumbel(logits[r], t, seed, at, choice) for r, t, seed, at, choice in requests]
    assert sample(kernels, logits, requests) == wanted
    assert len(set(wanted)) > 10


def test_frequencies_follow_the_softmax(kernels):
    logits = np.array([[2.0, 1.0, 0.0, -1.0, 1.0]], np.float32)
    n = 20000
    tokens = sample(kernels, logits, [(0, 1.0, 42, position, 0) for position in range(n)])
    expected = np.exp(logits[0], dtype=np.float64) / np.exp(logits[0], dtype=np.float64).sum() * n
    counts = np.bincount(tokens, minlength=5)
    assert ((counts - expected) ** 2 / expected).sum() < 23.5  # chi-square, 4 degrees of freedom, p = 1e-4


def test_greedy_ties_and_rows_that_are_not_finite(kernels):
    logits = zeros(4, 100)
    logits[0, [30, 70]] = 5.0
    logits[1, 99] = float("nan")
    logits[2, 0] = float("inf")
    logits[3, 50] = -float("inf")
    requests = [(0, 0.0, 1, 1, 0), (0, 1e-4, 1, 1, 0), (1, 1.0, 1, 1, 0), (2, 0.0, 1, 1, 0), (3, 0.5, 1, 1, 0)]
    assert sample(kernels, logits, requests) == [30, 30, -1, -1, -1]


def test_no_requests_no_tokens(kernels):
    empty = zeros(0, dtype=INT32)
    none = kernels.sample(zeros(1, 8), empty, empty.astype(np.float64), empty.astype(np.int64), empty, empty)
    assert none.shape == (0,) and none.dtype == np.int32


def test_sample_rows_packs_the_arguments(kernels):
    logits = randn(3, 301, seed=2) * 3
    logits[1, 7] = float("nan")
    requests = [(2, 0.8, 2**64 - 3, 70, 1), (0, 0.0, 5, 4000, 0), (1, 1.0, 6, 2, 2), (2, 0.8, 2**63, 70, 63)]
    got = sample_rows(kernels, logits, [SampleRequest(*request) for request in requests])
    assert got == sample(kernels, logits, requests)
    assert all(type(token) is int for token in got)
    assert got[2] == -1
    assert sample_rows(kernels, logits, []) == []


def test_threads_do_not_change_a_row(threaded):
    kernels, one_thread = threaded(2), threaded(1)
    logits = randn(3, 5003)
    requests = [(i % 3, 0.8, i, i, 0) for i in range(60)]
    assert sample(kernels, logits, requests) == sample(one_thread, logits, requests)
