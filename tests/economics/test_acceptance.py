"""Survival learned online: priors, calibration of confidence, sequences that differ, depths nobody tried."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from wager.economics.acceptance import Acceptance, Skill
from wager.economics.envelopes import DFLASH_SURVIVAL, MTP_SURVIVAL
from wager.economics.ledger import Ledger, Noted
from wager.economics.worlds import Curve, Guesses, Synthetic
from wager.types import Draft

DEPTH = 7


def play(skill: Skill, slots: Sequence[int], rates: Sequence[float], *, rounds: int, depth: int, seed: int = 0) -> None:
    """Rounds of drafts without scores, right at depth d with chance rates[d - 1] if right above."""
    draw = np.random.default_rng(seed)
    place = np.array(slots)
    for _ in range(rounds):
        _, chance = skill.expect(place, depth)
        wrong = draw.random((len(place), depth)) >= np.array(rates)[:depth]
        run = np.where(wrong.any(axis=1), wrong.argmax(axis=1), depth)
        skill.learn_offers(place, run=run.tolist(), seen=np.minimum(run + 1, depth).tolist(), chance=chance)
        skill.digest()


def opened(count: int, drafter: str = "d") -> tuple[Acceptance, Skill, np.ndarray]:
    acceptance = Acceptance()
    skill = acceptance.skill(drafter)
    return acceptance, skill, np.array([acceptance.slot(f"r{i}") for i in range(count)])


def test_the_prior_is_the_published_curve() -> None:
    acceptance = Acceptance({"block": DFLASH_SURVIVAL})
    for name, curve in (("anything", MTP_SURVIVAL), ("block", DFLASH_SURVIVAL)):
        slot = np.array([acceptance.slot("r")])
        survival, chance = acceptance.skill(name).expect(slot, 8)
        assert survival[0] == pytest.approx(curve[:8], abs=0.12), "a little hopeful, since sequences differ"
        assert np.cumprod(chance[0]) == pytest.approx(curve[:8], abs=1e-6)


def test_rates_are_learned_by_depth() -> None:
    rates = [0.6, 0.9, 0.5, 0.95, 0.7, 0.8, 0.85]
    _, skill, slots = opened(16)
    play(skill, slots.tolist(), rates, rounds=150, depth=DEPTH)
    chance = skill.expect(slots, DEPTH)[1].mean(axis=0)
    assert chance[:4] == pytest.approx(rates[:4], abs=0.07)


def test_depths_nobody_tried_continue_the_ones_above() -> None:
    _, good, slots = opened(16)
    play(good, slots.tolist(), [0.95, 0.95], rounds=100, depth=2)
    _, poor, poor_slots = opened(16)
    play(poor, poor_slots.tolist(), [0.3, 0.3], rounds=100, depth=2)
    deep, shallow = good.expect(slots, 5)[1].mean(axis=0), poor.expect(poor_slots, 5)[1].mean(axis=0)
    assert deep[2:].min() > 0.9
    assert shallow[2:].max() < 0.45
    assert good.offers.tried(3) == poor.offers.tried(3) == 0


def test_censored_depths_are_unobserved_not_failed() -> None:
    _, skill, slots = opened(8)
    play(skill, slots.tolist(), [1.0] * DEPTH, rounds=200, depth=3)
    survival, _ = skill.expect(slots, DEPTH)
    assert survival[:, 2].min() > 0.95
    assert survival[:, 6].min() > 0.8, "always right as far as it was tried"


def test_sequences_are_told_apart_and_a_new_one_is_an_average_one() -> None:
    acceptance, skill, slots = opened(20)
    easy, hard = slots[:10].tolist(), slots[10:].tolist()
    for block in range(12):
        play(skill, easy, [0.9] * 4, rounds=5, depth=4, seed=block)
        play(skill, hard, [0.5] * 4, rounds=5, depth=4, seed=100 + block)
    first = skill.expect(slots, 4)[0][:, 0]
    assert first[:10].mean() == pytest.approx(0.9, abs=0.08)
    assert first[10:].mean() == pytest.approx(0.5, abs=0.13)
    assert first[:10].min() > first[10:].max()
    new = np.array([acceptance.slot("new")])
    assert first[10:].mean() < skill.expect(new, 1)[0][0, 0] < first[:10].mean()


def test_a_change_is_followed() -> None:
    _, skill, slots = opened(8)
    play(skill, slots.tolist(), [0.9] * DEPTH, rounds=200, depth=DEPTH)
    play(skill, slots.tolist(), [0.2] * DEPTH, rounds=100, depth=DEPTH)
    assert skill.expect(slots, 1)[0].max() < 0.4


def drafts(texts: Sequence[Guesses], position: int) -> list[Draft]:
    scores = [text.scores[position, :DEPTH].tolist() for text in texts if text.scores is not None]
    return [Draft.chain(f"r{i}", range(DEPTH), drafter="d", scores=said) for i, said in enumerate(scores)]


def expected_calibration_error(said: np.ndarray, was: np.ndarray) -> float:
    bins = np.minimum((said * 10).astype(int), 9)
    gaps = [abs(said[bins == b].mean() - was[bins == b].mean()) * (bins == b).sum() for b in np.unique(bins)]
    return float(sum(gaps) / len(said))


def test_confidence_is_calibrated() -> None:
    """A drafter that overrates itself by 1.5 in log-odds; judged by what it was right about before."""
    world = Synthetic({"d": Curve(MTP_SURVIVAL[:DEPTH], bias=1.5)}, output=400)
    _, skill, slots = opened(8)
    texts = [world.text(i).guesses["d"] for i in range(8)]
    said, raw, was = [], [], []
    for position in range(400):
        made = drafts(texts, position)
        judged = skill.judge(slots, made)
        right = [int(min(text.right[position], DEPTH)) for text in texts]
        if position >= 100:
            said.append(judged.survival[:, 0])
            raw.append([draft.scores[0] for draft in made])
            was.append([run > 0 for run in right])
        skill.learn_guesses(slots, judged, run=right, seen=[min(run + 1, DEPTH) for run in right])
        skill.digest()
    outcome = np.array(was, dtype=float).ravel()
    before = expected_calibration_error(np.array(raw).ravel(), outcome)
    after = expected_calibration_error(np.array(said).ravel(), outcome)
    assert before > 0.08
    assert after < 0.03


def test_a_boaster_is_found_out_within_a_few_rounds() -> None:
    _, skill, slots = opened(4)
    boast = [Draft.chain(f"r{i}", range(DEPTH), drafter="d", scores=[1.0] * DEPTH) for i in range(4)]
    for _ in range(5):
        judged = skill.judge(slots, boast)
        skill.learn_guesses(slots, judged, run=[0] * 4, seen=[1] * 4)
        skill.digest()
    assert skill.judge(slots, boast).survival.max() < 0.2


def test_survival_never_rises_along_a_path_and_padding_is_worth_nothing() -> None:
    _, skill, slots = opened(2)
    made = [
        Draft.chain("r0", range(3), drafter="d", scores=[0.5, 0.5, 0.4]),
        Draft.chain("r1", range(5), drafter="d", scores=[0.99] * 5),
    ]
    judged = skill.judge(slots, made)
    assert (np.diff(judged.survival, axis=1) <= 0).all()
    assert judged.survival[0, 3:].tolist() == [0.0, 0.0]
    assert judged.made.tolist() == [[True] * 3 + [False] * 2, [True] * 5]


def test_siblings_of_a_tree_share_the_chance_of_their_depth() -> None:
    _, skill, slots = opened(1)
    tree = Draft("r0", (1, 2, 3), (-1, -1, 0), drafter="d")
    chain = Draft.chain("r0", (1, 2), drafter="d")
    branched, straight = skill.judge(slots, [tree]).survival[0], skill.judge(slots, [chain]).survival[0]
    assert branched[0] == branched[1] == pytest.approx(straight[0] / 2)
    assert branched[2] == pytest.approx(straight[1] / 2)
    scored = Draft("r0", (1, 2, 3), (-1, -1, 0), (0.6, 0.3, 0.3), "d")
    judged = skill.judge(slots, [scored]).survival[0]
    assert judged == pytest.approx([0.6, 0.3, 0.3], abs=0.1)


def test_options_are_worth_more_than_their_average_where_confidence_tells() -> None:
    _, skill, _ = opened(1)
    survival = np.full((1, 2), 0.5)
    hurdle = np.array([[0.6]])
    nothing = np.array([[-1.0]])
    gain, rows, _ = skill.option(survival, hurdle=hurdle, floor=nothing)
    assert gain.max() == rows.max() == 0, "as far as is known, it will be 0.5 whatever it says"
    for _ in range(400):
        skill.learn_spread(survival, np.array([[0.95, 0.95]]), asked=np.ones((1, 2), bool))
        skill.learn_spread(survival, np.array([[0.05, 0.05]]), asked=np.ones((1, 2), bool))
    gain, rows, above = skill.option(survival, hurdle=hurdle, floor=np.array([[0.99]]))
    assert rows[0] == pytest.approx([0.5, 0.5], abs=0.02)
    assert gain[0] == pytest.approx([0.48, 0.48], abs=0.05)
    assert above.max() == 0


def test_slots_are_handed_out_again_clean() -> None:
    acceptance, skill, slots = opened(3)
    play(skill, slots.tolist(), [0.05], rounds=60, depth=1)
    assert skill.before.mean[slots[1]] < -0.1
    acceptance.end("r1")
    acceptance.end("never seen")
    assert acceptance.slot("fresh") == slots[1]
    assert skill.before.mean[slots[1]] == skill.before.average
    assert acceptance.slots == 3


def test_many_sequences_grow_the_arrays_of_drafters_old_and_new() -> None:
    acceptance = Acceptance()
    acceptance.skill("old")
    slots = np.array([acceptance.slot(f"r{i}") for i in range(300)])
    for name in ("old", "new"):
        assert acceptance.skill(name).expect(slots, 3)[0].shape == (300, 3)


def test_the_ledger_keeps_rounds_of_different_widths_apart() -> None:
    ledger = Ledger()
    assert not ledger.due
    slots = np.array([0, 1])
    ledger.add(Noted(slots, np.full((2, 2), 0.5), np.array([0, 1]), run=[1, 2], seen=[2, 2]))
    ledger.add(Noted(slots[:1], np.full((1, 4), 0.5), np.arange(4), run=[3], seen=[4], first=2))
    rounds = ledger.take()
    assert rounds.trial.tolist() == [[True, True, False, False], [True, True, False, False], [False, False, True, True]]
    assert rounds.right.tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, False, True, False],
    ]
    assert rounds.slots.tolist() == [0, 1, 0]
    assert ledger.empty
