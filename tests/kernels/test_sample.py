"""The native sampler against the float64 definition of the field, written out again in plain integers."""

from __future__ import annotations

import numpy as np
import pytest
from cases import randn

from wager.kernels.arrays import INT32, zeros

WORD = 0xFFFFFFFF


def words(seed: int, counter: list[int]) -> list[int]:
    """Philox4x32-10 of one counter, in Python's own integers."""
    c, key = list(counter), [seed & WORD, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ key[0], b & WORD, (a >> 32) ^ c[3] ^ key[1], a & WORD]
        key = [(key[0] + 0x9E3779B9) & WORD, (key[1] + 0xBB67AE85) & WORD]
    return c


def noise(seed: int, position: int, choice: int, vocab: int) -> np.ndarray:
    uniform = np.empty(vocab)
    for i in range(0, vocab, 2):
        w = words(seed, [i // 2, position, choice, 0])
        for j, (low, high) in enumerate(((w[0], w[1]), (w[2], w[3]))):
            if i + j < vocab:
                uniform[i + j] = (((low | high << 32) >> 12) + 0.5) / 2**52
    return -np.log(-np.log1p(-uniform))


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


def test_the_known_answer_of_philox():
    """Random123's published vectors for philox4x32-10."""
    assert words(0, [0, 0, 0, 0]) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words(2**64 - 1, [WORD] * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("vocab", [1, 2, 31, 32, 33, 65, 1000])
def test_token_is_that_of_the_definition(kernels, vocab):
    rng = np.random.default_rng(vocab)
    requests, wanted = [], []
    logits = (rng.normal(size=(6, vocab)) * 3).astype(np.float32)
    for row in range(6):
        for temperature in (0.01, 0.3, 1.0, 5.0, 1000.0):
            seed = int(rng.integers(0, 2**64, dtype=np.uint64))
            position, choice = int(rng.integers(0, 5000)), int(rng.integers(0, 5))
            requests.append((row, temperature, seed, position, choice))
            score = logits[row].astype(np.float64) / temperature + noise(seed, position, choice, vocab)
            wanted.append(int(score.argmax()))
    assert sample(kernels, logits, requests) == wanted
    assert [sample(kernels, logits, [request])[0] for request in requests] == wanted


def test_wide_vocabulary_agrees_with_the_package_field(kernels):
    from wager.kernels.noise import argmax_gumbel

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


def test_sample_rows_packs_the_arguments(backend):
    from wager.kernels.sampling import SampleRequest, sample_rows

    logits = randn(3, 301, seed=2) * 3
    logits[1, 7] = float("nan")
    requests = [(2, 0.8, 2**64 - 3, 70, 1), (0, 0.0, 5, 4000, 0), (1, 1.0, 6, 2, 2), (2, 0.8, 2**63, 70, 63)]
    got = sample_rows(backend, logits, [SampleRequest(*request) for request in requests])
    assert got == sample(backend, logits, requests)
    assert all(type(token) is int for token in got)
    assert got[2] == -1
    assert sample_rows(backend, logits, []) == []


def test_threads_do_not_change_a_row(kernels, one_thread):
    if kernels.isa.name != one_thread.isa.name:
        pytest.skip("another instruction set")
    logits = randn(3, 5003)
    requests = [(i % 3, 0.8, i, i, 0) for i in range(60)]
    assert sample(kernels, logits, requests) == sample(one_thread, logits, requests)
