"""Survival learned online: priors, calibration of confidence, sequences that differ, untested depths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from oracle.planning import forecast
from wager.economics.acceptance import DFLASH_SURVIVAL, MTP_SURVIVAL, AcceptanceModel
from wager.kernels._native import SequenceAcceptance
from wager.simulation.traces import DraftTrace, SyntheticDrafter, SyntheticTraces
from wager.types import Draft

DEPTH = 7


def play(
    model: AcceptanceModel,
    sequences: Sequence[SequenceAcceptance],
    rates: Sequence[float],
    *,
    rounds: int,
    depth: int,
    seed: int = 0,
) -> None:
    """Rounds of drafts whose tokens are accepted at depth d with probability rates[d - 1] if accepted above."""
    draw = np.random.default_rng(seed)
    for _ in range(rounds):
        for sequence in sequences:
            wrong = draw.random(depth) >= np.array(rates)[:depth]
            run = int(wrong.argmax()) if wrong.any() else depth
            model.learn_round(sequence, accepted=run, tested=min(run + 1, depth))


def opened(count: int) -> tuple[AcceptanceModel, list[SequenceAcceptance]]:
    model = AcceptanceModel()
    return model, [model.start_sequence() for _ in range(count)]


def conditional(model: AcceptanceModel, sequences: Sequence[SequenceAcceptance], depth: int) -> np.ndarray:
    """Mean acceptance rate of each depth given the one above."""
    survival = forecast(model, sequences, depth).mean(axis=0)
    quotient: np.ndarray = survival / np.concatenate([[1.0], survival[:-1]])
    return quotient


def test_the_prior_is_the_published_curve() -> None:
    for model, curve in ((AcceptanceModel(), MTP_SURVIVAL), (AcceptanceModel(DFLASH_SURVIVAL), DFLASH_SURVIVAL)):
        survival = forecast(model, [model.start_sequence()], 8)[0]
        assert survival == pytest.approx(curve[:8], abs=0.12), "a little optimistic, since sequences differ"
        certain = forecast(model, [SequenceAcceptance(0.0, 0.0)], 8)[0]
        assert certain == pytest.approx(curve[:8], abs=1e-6)


def test_the_nodes_of_a_tree_stand_for_the_depths_of_a_chain() -> None:
    """However many of them are siblings: what is forecast of n guesses is what the n likeliest nodes bring."""
    model, sequences = opened(1)
    draw = np.random.default_rng(3)
    for _ in range(400):
        first = draw.uniform(0.2, 0.5)
        draft = Draft("r", (0, 1, 2, 3), (-1,) * 4, (0.5 * first, first, 0.4 * first, 0.1 * first), "d")
        emitted = int(np.searchsorted(np.cumsum(draft.scores), draw.random()))
        model.learn_draft(sequences[0], draft, [emitted], depth=4)
    survival = forecast(model, sequences, 4)[0]
    assert survival == pytest.approx([0.35, 0.175, 0.14, 0.035], abs=0.03)


def test_rates_are_learned_by_depth_and_a_change_is_followed() -> None:
    rates = [0.6, 0.9, 0.5, 0.95, 0.7, 0.8, 0.85]
    model, sequences = opened(16)
    play(model, sequences, rates, rounds=150, depth=DEPTH)
    assert conditional(model, sequences, 4) == pytest.approx(rates[:4], abs=0.08)
    play(model, sequences, [0.2] * DEPTH, rounds=100, depth=DEPTH)
    assert forecast(model, sequences, 1).max() < 0.4


def test_untested_depths_follow_the_ones_above() -> None:
    good, sequences = opened(16)
    play(good, sequences, [0.95, 0.95], rounds=100, depth=2)
    poor, others = opened(16)
    play(poor, others, [0.3, 0.3], rounds=100, depth=2)
    assert conditional(good, sequences, 5)[2:].min() > 0.9
    assert conditional(poor, others, 5)[2:].max() < 0.5
    assert good.depths.trials[2] == poor.depths.trials[2] == 0


def test_sequences_are_distinguished_and_a_new_one_is_an_average_one() -> None:
    model, sequences = opened(20)
    for block in range(12):
        play(model, sequences[:10], [0.9] * 4, rounds=5, depth=4, seed=block)
        play(model, sequences[10:], [0.5] * 4, rounds=5, depth=4, seed=100 + block)
    first = forecast(model, sequences, 4)[:, 0]
    assert first[:10].mean() == pytest.approx(0.9, abs=0.08)
    assert first[10:].mean() == pytest.approx(0.5, abs=0.13)
    assert first[:10].min() > first[10:].max()
    assert first[10:].mean() < forecast(model, [model.start_sequence()], 1)[0, 0] < first[:10].mean()


def test_a_new_sequence_is_expected_to_be_like_those_that_ended() -> None:
    model = AcceptanceModel()
    prior = forecast(model, [model.start_sequence()], 1)[0, 0]
    for number in range(60):
        sequence = model.start_sequence()
        play(model, [sequence], [0.2], rounds=30, depth=1, seed=number)
        model.end_sequence(sequence)
    assert forecast(model, [model.start_sequence()], 1)[0, 0] < prior - 0.3


def drafts(texts: Sequence[DraftTrace], position: int) -> list[Draft]:
    scores = [text.scores[position, :DEPTH].tolist() for text in texts if text.scores is not None]
    return [Draft.chain(f"r{i}", range(DEPTH), drafter="d", scores=said) for i, said in enumerate(scores)]


def expected_calibration_error(said: np.ndarray, was: np.ndarray) -> float:
    bins = np.minimum((said * 10).astype(int), 9)
    gaps = [abs(said[bins == b].mean() - was[bins == b].mean()) * (bins == b).sum() for b in np.unique(bins)]
    return float(sum(gaps) / len(said))


def test_confidence_is_calibrated() -> None:
    """A drafter whose confidence is 1.5 too high in log-odds; corrected by its earlier accepted tokens."""
    source = SyntheticTraces({"d": SyntheticDrafter(MTP_SURVIVAL[:DEPTH], score_bias=1.5)}, output_tokens=400)
    model, sequences = opened(8)
    texts = [source.request(i).drafts["d"] for i in range(8)]
    said, raw, was = [], [], []
    for position in range(400):
        right = [int(min(text.num_matching[position], DEPTH)) for text in texts]
        for draft, sequence, run in zip(drafts(texts, position), sequences, right, strict=True):
            judged = model.survival(draft, sequence)
            if position >= 100:
                said.append(judged[0])
                raw.append(draft.scores[0])
                was.append(run > 0)
            model.learn_draft(sequence, draft, [*range(run), -1], depth=DEPTH)
    outcome = np.array(was, dtype=float)
    assert expected_calibration_error(np.array(raw), outcome) > 0.08
    assert expected_calibration_error(np.array(said), outcome) < 0.04
