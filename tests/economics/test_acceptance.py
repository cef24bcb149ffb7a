"""Survival learned online: priors, calibration of confidence, sequences that differ, depths nobody tried."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from wager.economics.policy.acceptance import Acceptance, Rating, Skill
from wager.economics.simulation.synthetic import SyntheticDrafter, SyntheticTraces
from wager.economics.simulation.traces import DraftTrace
from wager.economics.survival import DFLASH_SURVIVAL, MTP_SURVIVAL
from wager.types import Draft

DEPTH = 7


def play(
    skill: Skill, ratings: Sequence[Rating], rates: Sequence[float], *, rounds: int, depth: int, seed: int = 0
) -> None:
    """Rounds of guesses, right at depth d with chance rates[d - 1] if right above."""
    draw = np.random.default_rng(seed)
    for _ in range(rounds):
        for rating in ratings:
            wrong = draw.random(depth) >= np.array(rates)[:depth]
            run = int(wrong.argmax()) if wrong.any() else depth
            skill.learn_round(rating, right=run, tried=min(run + 1, depth))


def opened(count: int) -> tuple[Skill, list[Rating]]:
    skill = Acceptance().skill("d")
    return skill, [skill.open() for _ in range(count)]


def conditional(skill: Skill, ratings: Sequence[Rating], depth: int) -> np.ndarray:
    """Mean chance of each depth given the one above."""
    survival = skill.expect(ratings, depth).mean(axis=0)
    quotient: np.ndarray = survival / np.concatenate([[1.0], survival[:-1]])
    return quotient


def test_the_prior_is_the_published_curve() -> None:
    acceptance = Acceptance({"block": DFLASH_SURVIVAL})
    for name, curve in (("anything", MTP_SURVIVAL), ("block", DFLASH_SURVIVAL)):
        skill = acceptance.skill(name)
        survival = skill.expect([skill.open()], 8)[0]
        assert survival == pytest.approx(curve[:8], abs=0.12), "a little hopeful, since sequences differ"
        certain = skill.expect([Rating(0.0, 0.0)], 8)[0]
        assert certain == pytest.approx(curve[:8], abs=1e-6)


def test_rates_are_learned_by_depth() -> None:
    rates = [0.6, 0.9, 0.5, 0.95, 0.7, 0.8, 0.85]
    skill, ratings = opened(16)
    play(skill, ratings, rates, rounds=150, depth=DEPTH)
    assert conditional(skill, ratings, 4) == pytest.approx(rates[:4], abs=0.08)


def test_depths_nobody_tried_continue_the_ones_above() -> None:
    good, ratings = opened(16)
    play(good, ratings, [0.95, 0.95], rounds=100, depth=2)
    poor, others = opened(16)
    play(poor, others, [0.3, 0.3], rounds=100, depth=2)
    assert conditional(good, ratings, 5)[2:].min() > 0.9
    assert conditional(poor, others, 5)[2:].max() < 0.5
    assert good.depths.tried[2] == poor.depths.tried[2] == 0


def test_censored_depths_are_unobserved_not_failed() -> None:
    skill, ratings = opened(8)
    play(skill, ratings, [1.0] * DEPTH, rounds=200, depth=3)
    survival = skill.expect(ratings, DEPTH)
    assert survival[:, 2].min() > 0.95
    assert survival[:, 6].min() > 0.8, "always right as far as it was tried"


def test_sequences_are_told_apart_and_a_new_one_is_an_average_one() -> None:
    skill, ratings = opened(20)
    for block in range(12):
        play(skill, ratings[:10], [0.9] * 4, rounds=5, depth=4, seed=block)
        play(skill, ratings[10:], [0.5] * 4, rounds=5, depth=4, seed=100 + block)
    first = skill.expect(ratings, 4)[:, 0]
    assert first[:10].mean() == pytest.approx(0.9, abs=0.08)
    assert first[10:].mean() == pytest.approx(0.5, abs=0.13)
    assert first[:10].min() > first[10:].max()
    assert first[10:].mean() < skill.expect([skill.open()], 1)[0, 0] < first[:10].mean()


def test_what_sequences_were_is_expected_of_the_next() -> None:
    skill = Acceptance().skill("d")
    hopeful = skill.expect([skill.open()], 1)[0, 0]
    for number in range(60):
        rating = skill.open()
        play(skill, [rating], [0.2], rounds=30, depth=1, seed=number)
        skill.close(rating)
    assert skill.expect([skill.open()], 1)[0, 0] < hopeful - 0.3


def test_a_change_is_followed() -> None:
    skill, ratings = opened(8)
    play(skill, ratings, [0.9] * DEPTH, rounds=200, depth=DEPTH)
    play(skill, ratings, [0.2] * DEPTH, rounds=100, depth=DEPTH)
    assert skill.expect(ratings, 1).max() < 0.4


def drafts(texts: Sequence[DraftTrace], position: int) -> list[Draft]:
    scores = [text.scores[position, :DEPTH].tolist() for text in texts if text.scores is not None]
    return [Draft.chain(f"r{i}", range(DEPTH), drafter="d", scores=said) for i, said in enumerate(scores)]


def expected_calibration_error(said: np.ndarray, was: np.ndarray) -> float:
    bins = np.minimum((said * 10).astype(int), 9)
    gaps = [abs(said[bins == b].mean() - was[bins == b].mean()) * (bins == b).sum() for b in np.unique(bins)]
    return float(sum(gaps) / len(said))


def test_confidence_is_calibrated() -> None:
    """A drafter that overrates itself by 1.5 in log-odds; judged by what it was right about before."""
    world = SyntheticTraces({"d": SyntheticDrafter(MTP_SURVIVAL[:DEPTH], score_bias=1.5)}, output_tokens=400)
    skill, ratings = opened(8)
    texts = [world.request(i).drafts["d"] for i in range(8)]
    said, raw, was = [], [], []
    for position in range(400):
        right = [int(min(text.num_matching[position], DEPTH)) for text in texts]
        for draft, rating, run in zip(drafts(texts, position), ratings, right, strict=True):
            judged = skill.judge(draft, rating)
            if position >= 100:
                said.append(judged[0])
                raw.append(draft.scores[0])
                was.append(run > 0)
            skill.learn_guesses(draft, range(min(run + 1, DEPTH)), range(run))
    outcome = np.array(was, dtype=float)
    assert expected_calibration_error(np.array(raw), outcome) > 0.08
    assert expected_calibration_error(np.array(said), outcome) < 0.04


def test_a_boaster_is_found_out_within_a_few_rounds() -> None:
    skill, ratings = opened(4)
    boast = Draft.chain("r", range(DEPTH), drafter="d", scores=[1.0] * DEPTH)
    for _ in range(5):
        for _rating in ratings:
            skill.learn_guesses(boast, [0], ())
    assert skill.judge(boast, ratings[0])[0] < 0.25


def test_survival_never_rises_along_a_path() -> None:
    skill, ratings = opened(1)
    for scores in ([0.5, 0.5, 0.4], [0.99] * 5, [0.0, 0.0], []):
        chain = Draft.chain("r0", range(5), drafter="d", scores=scores)
        survival = skill.judge(chain if not scores else chain.truncate(len(scores)), ratings[0])
        assert (np.diff(survival) <= 0).all()


def test_siblings_of_a_tree_share_the_chance_of_their_depth() -> None:
    skill, [rating] = opened(1)
    tree = Draft("r0", (1, 2, 3), (-1, -1, 0), drafter="d")
    chain = Draft.chain("r0", (1, 2), drafter="d")
    branched, straight = skill.judge(tree, rating), skill.judge(chain, rating)
    assert branched[0] == branched[1] == pytest.approx(straight[0] / 2)
    assert branched[2] == pytest.approx(straight[1] / 2)
    scored = Draft("r0", (1, 2, 3), (-1, -1, 0), (0.6, 0.3, 0.3), "d")
    assert skill.judge(scored, rating) == pytest.approx([0.6, 0.3, 0.3], abs=0.1)


def test_options_are_worth_more_than_their_average_where_confidence_tells() -> None:
    skill, _ = opened(1)
    survival = np.full((1, 2), 0.5)
    hurdle, never = np.array([[0.6]]), np.array([[-1.0]])
    gain, rows, _ = skill.option(survival, hurdle=hurdle, floor=never)
    assert gain.max() == rows.max() == 0, "as far as is known, it will be 0.5 whatever it says"
    for _ in range(200):
        skill.learn_shift([0.5, 0.5], [0.95, 0.95])
        skill.learn_shift([0.5, 0.5], [0.05, 0.05])
    gain, rows, made = skill.option(survival, hurdle=hurdle, floor=np.array([[0.99]]))
    assert rows[0, 0] == pytest.approx(0.5, abs=0.02)
    assert gain[0, 0] == pytest.approx(0.48, abs=0.05)
    assert made[0].tolist() == [1.0, 0.0], "after a doubt none is made"
