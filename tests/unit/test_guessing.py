"""Candidates of a row of logits: those of the definition, with their probabilities, in whatever way they are found."""

from __future__ import annotations

import numpy as np
import pytest

from wager.draft.guessing import GuessedRow, GuessSampler
from wager.kernels.base import TargetOutput
from wager.kernels.noise import gumbel
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
