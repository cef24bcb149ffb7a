"""Guesses and candidates of a row of logits: those of the definition, with their probabilities, however they are
found."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from wager.draft.guessing import GuessedRow, GuessSampler
from wager.kernels.base import TargetOutput
from wager.kernels.cpu import Kernels
from wager.kernels.noise import argmax_gumbel, gumbel
from wager.types import DraftRequest, SamplingParams


def output_of(logits: np.ndarray) -> TargetOutput:
    rows = logits.astype(np.float32)[None]
    return TargetOutput(rows, rows.argmax(axis=1).astype(np.int32))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("spread", [0.01, 1.0, 40.0])
@pytest.mark.parametrize("width", [5, 300, 3000])
def test_candidates_are_those_of_the_definition(width: int, spread: float, temperature: float) -> None:
    rng = np.random.default_rng(width)
    for seed in range(10):
        logits = (rng.standard_normal(width) * spread).astype(np.float32)
        logits[rng.integers(0, width, 3)] = logits[0]  # equal ones
        vocab = width - seed % 2
        request = DraftRequest("s", 7, 4, SamplingParams(temperature=temperature), seed)
        sampler = GuessSampler(width, vocab=vocab)
        row = GuessedRow(0, request, (1, 2))
        kept = logits[:vocab].astype(np.float64)
        searched = np.sort(np.argsort(-kept, kind="stable")[:256])
        if temperature:
            kept = kept + temperature * gumbel(seed, 9, vocab=vocab)
        values = kept[searched] if temperature else kept
        total = np.exp(values - values.max()).sum()
        for count in (1, 4, 8):
            found = sampler.candidates(output_of(logits), row, count)
            assert len(found) == min(count, vocab) and len({each.token for each in found}) == len(found)
            best = np.sort(values)[::-1][: len(found)]
            assert [kept[each.token] for each in found] == pytest.approx(list(best), rel=1e-6, abs=1e-6)
            shares = np.exp(best - values.max()) / total
            assert [each.probability for each in found] == pytest.approx(list(shares), rel=1e-4, abs=1e-9)


def test_guesses_have_the_ids_of_the_verified_model_and_the_q_that_was_asked_for() -> None:
    width, rng = 300, np.random.default_rng(1)
    for vocab, temperature, needs_draft_probs, seed in product((200, 300, 400), (0.0, 0.7), (False, True), range(5)):
        sampler = GuessSampler(width, vocab=vocab, kernels=Kernels())
        logits = rng.standard_normal(width).astype(np.float32)
        logits[-1] = 30 * (vocab < width)  # the likeliest id by far, if the verified model had it
        kept = logits[:vocab]
        request = DraftRequest("s", 7, 4, SamplingParams(temperature=temperature), seed, 0, needs_draft_probs)
        [guess] = sampler.guesses(output_of(logits), [GuessedRow(0, request, (1, 2))])
        row = GuessedRow(0, request, (1, 2))
        ranked = [each.token for each in sampler.candidates(output_of(logits), row, 4)]
        given = output_of(logits)
        others = sampler.alternatives(given, row, ranked[0], 3)
        assert others == ranked[1:] and (given.logits == logits).all()
        shares = np.exp(kept - kept.max().astype(np.float64))
        assert guess.probability == pytest.approx(shares[guess.token] / shares.sum(), rel=1e-4)
        if guess.probs is None:
            best = argmax_gumbel(kept, temperature, seed, 9, 0) if temperature else kept.argmax()
            assert guess.token == best and not (needs_draft_probs and temperature)
        else:
            assert needs_draft_probs and guess.probs.shape == (vocab,) and guess.probs[guess.token] > 0
            assert guess.probs.sum() == pytest.approx(1) and not guess.probs[width:].any()
