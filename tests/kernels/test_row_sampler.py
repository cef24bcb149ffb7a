"""The token of a row under penalties, biases, a grammar and filters: native against its definition, which chooses among
the ids and scores of `verify.distribution.process`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from wager.kernels.arrays import zeros
from wager.kernels.cpu import SampleRequest
from wager.kernels.noise import argmax_gumbel
from wager.kernels.sampling import RowSampler
from wager.types import Grammar, SamplingParams
from wager.verify.distribution import History, changed_logits, choose, process

VOCABS = (1, 2, 7, 40, 300, 5000, 49152)
CHOICES: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 1e-4, 0.01, 0.3, 0.8, 1.0, 2.0),
    "top_k": (0, 0, 1, 2, 20, 1000, 60_000),
    "top_p": (1.0, 1.0, 1e-6, 0.3, 0.9, 0.95, 0.999),
    "min_p": (0.0, 0.0, 0.0, 1e-6, 0.02, 0.5, 1.0),
    "repetition_penalty": (1.0, 1.0, 0.5, 1.1, 3.0),
    "presence_penalty": (0.0, 0.0, -1.0, 0.5),
    "frequency_penalty": (0.0, 0.0, -0.4, 0.5),
}


def drawn_logits(rng: np.random.Generator, vocab: int) -> np.ndarray:
    """Flat and peaked rows, some with many ties."""
    logits = rng.normal(size=vocab) * rng.choice([0.3, 2.5, 8.0, 60.0])
    if rng.random() < 0.3:
        logits = np.round(logits)
    logits[rng.integers(0, vocab, 5)] += rng.choice([0.0, 5.0, 12.0])
    return logits.astype(np.float32)


def drawn_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    fields = {name: values[rng.integers(len(values))] for name, values in CHOICES.items()}
    count = rng.choice([0, 0, 0, 1, 40])
    biases = {int(token): float(rng.uniform(-100, 100)) for token in rng.integers(0, vocab, count)}
    return SamplingParams(**fields, logit_bias=biases)


class Subset(set[int]):
    """A grammar that always allows the same ids."""

    def ids(self, vocab: int) -> np.ndarray:
        return np.array(sorted(self))

    def append(self, tokens: object) -> None: ...

    def allowed(self, path: object) -> Subset:
        return self

    def forced(self, path: object) -> list[int]:
        return []

    def complete(self) -> bool:
        return False


@pytest.mark.parametrize("seed", range(8))
def test_token_is_that_of_the_definition(kernels: Any, seed: int) -> None:
    rng, sampler, undecided = np.random.default_rng(seed), RowSampler(kernels), 0
    for case in range(60):
        vocab = int(rng.choice(VOCABS))
        logits, params = drawn_logits(rng, vocab), drawn_params(rng, vocab)
        history = History(rng.integers(0, vocab, 30).tolist(), rng.integers(0, vocab, 50).tolist())
        place = {"seed": int(rng.integers(0, 2**64, dtype=np.uint64)), "position": case, "choice": case % 3}
        edits = changed_logits(logits, params, history)
        token = sampler.sample(logits, params, edits=edits, allowed=None, **place)
        undecided += token is None
        wanted = process(logits, params, history).choose(*place.values())
        assert token in (None, wanted), (vocab, params)
        assert choose(sampler, logits, params, history, **place) == wanted
    assert undecided < 3


@pytest.mark.parametrize("seed", range(4))
def test_only_ids_that_are_allowed_are_sampled(kernels: Any, seed: int) -> None:
    rng, sampler = np.random.default_rng(seed), RowSampler(kernels)
    for position in range(40):
        vocab = int(rng.choice(VOCABS))
        logits = drawn_logits(rng, vocab)
        params = replace(drawn_params(rng, vocab), grammar=Grammar.regex("a"))
        if position % 10 == 0:
            logits[1 % vocab :] = np.finfo(np.float32).min  # an allowed id may have the least logit of all
        ids = np.unique(rng.integers(0, vocab, int(rng.choice([1, 3, 1 + vocab // 2]))))
        history = History([1 % vocab], grammar=Subset(ids.tolist()))
        wanted = process(logits, params, history).choose(seed, position)
        assert wanted in ids
        assert choose(sampler, logits, params, history, seed=seed, position=position, choice=0) == wanted


@pytest.mark.parametrize(("base", "temperature"), [(60_000.0, 1.1e-4), (140_000.0, 1.1e-4), (1e7, 0.01), (3e38, 1.0)])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_p": 0.5, "min_p": 0.01}, {"top_k": 30, "top_p": 0.8}])
def test_changes_smaller_than_a_float_tells(kernels: Any, base: float, temperature: float, filters: Any) -> None:
    """Logits so large beside the temperature that their rounding to a float is many units of z / T."""
    rng, sampler = np.random.default_rng(6), RowSampler(kernels)
    logits = np.full(400, base, np.float32)
    logits[40:] -= 50 * np.spacing(np.float32(base))
    biases = {token: float(min(100, rng.uniform(0, 3) * temperature + 1e-6)) for token in range(30)}
    params = SamplingParams(temperature=temperature, logit_bias=biases, **filters)
    for position in range(40):
        wanted = process(logits, params).choose(1, position)
        assert choose(sampler, logits, params, None, seed=1, position=position, choice=0) == wanted


def test_what_is_not_finite_is_left_to_the_definition(kernels: Any) -> None:
    sampler, place = RowSampler(kernels), {"seed": 1, "position": 2, "choice": 0}
    for wrong in (np.nan, np.inf, -np.inf):
        logits = np.zeros(100, np.float32)
        logits[50] = wrong
        for params in (SamplingParams(temperature=0.5, top_p=0.5), SamplingParams(logit_bias={3: 1.0})):
            edits = changed_logits(logits, params, None)
            assert sampler.sample(logits, params, edits=edits, allowed=None, **place) is None
    edits = (np.array([5]), np.array([np.nan]))
    assert sampler.sample(np.zeros(9, np.float32), SamplingParams(), edits=edits, allowed=None, **place) is None


def test_a_nucleus_that_ends_at_its_limit_is_left_to_the_definition(kernels: Any) -> None:
    """Of ten equal probabilities: whether five reach a half is a matter of rounding."""
    sampler, logits = RowSampler(kernels), np.zeros(10, np.float32)
    for top_p, decided in ((0.5, False), (0.55, True), (0.5 - 1e-7, True), (0.5 + 1e-7, True)):
        params, tokens = SamplingParams(temperature=1.0, top_p=top_p), []
        for position in range(80):
            place = {"seed": 1, "position": position, "choice": 0}
            tokens.append(sampler.sample(logits, params, edits=None, allowed=None, **place))
            assert choose(sampler, logits, params, None, **place) == process(logits, params).choose(1, position)
        assert (None not in tokens) == decided


# ---- without edits and filters ---------------------------------------------------------------------------------------


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
