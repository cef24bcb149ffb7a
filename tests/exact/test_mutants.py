"""Rules broken on purpose: the enumeration must detect each of them (TV > 1e-3), or it proves nothing.

Verification rules, section 5.5 and the shared-stream mutants of section 6.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import worlds
from worlds import NOTHING, World, deviation, emitted

from wager.types import Draft, SamplingParams
from wager.verify import accept
from wager.verify.accept import NoiseCoins, block, rejection, traversal
from wager.verify.distribution import process

NOTICED = 1e-3
BOTH = pytest.mark.parametrize("rule", [rejection, block, traversal])
ON_TREES = pytest.mark.parametrize("rule", [rejection, traversal])
SEEDS = range(5)


def worst(rule, *, drafts=None, rows=None, vocab: int = 3, depth: int = 2) -> float:
    """The largest TV over a few worlds."""
    deviations = []
    for seed in SEEDS:
        world = World(vocab, seed)
        chosen = (drafts or (lambda w: worlds.chains(w, depth)))(world)
        out, _ = emitted(world, rule, chosen, None if rows is None else lambda d, w=world: rows(w, d))
        deviations.append(deviation(world, out, depth + 1))
    assert np.isfinite(deviations).all()
    return max(deviations)


@BOTH
def test_the_rules_themselves_pass(rule):
    assert worst(rule) < 1e-12


@BOTH
def test_inverted_ratio(rule, monkeypatch):
    right = accept._ratio
    monkeypatch.setattr(accept, "_ratio", lambda p, draft, node: 1 / right(p, draft, node))
    assert worst(rule) > NOTICED


@BOTH
def test_residual_with_the_q_of_the_next_row(rule, monkeypatch):
    right = accept._positive_part
    monkeypatch.setattr(accept, "_positive_part", lambda p, draft, node: right(p, draft, min(node + 1, len(draft) - 1)))
    assert worst(rule) > NOTICED


@BOTH
@pytest.mark.parametrize("residual", [lambda p, q: np.abs(p - q), lambda p, q: p], ids=["absolute", "p"])
def test_residual_that_is_not_clipped(rule, residual, monkeypatch):
    monkeypatch.setattr(accept, "_positive_part", lambda p, draft, node: residual(p, draft.draft_probs[node]))
    assert worst(rule) > NOTICED


@BOTH
def test_unprocessed_draft_probs(rule):
    """Guesses drawn at the request's temperature, judged with q before the temperature."""

    def sharpened(world):
        for _, draft in worlds.chains(world, 2):
            draft_probs = draft.draft_probs**2 / (draft.draft_probs**2).sum(axis=1, keepdims=True)
            yield float(np.prod(draft_probs[range(2), draft.tokens])), draft

    assert worst(rule, drafts=sharpened) > NOTICED


@BOTH
@pytest.mark.parametrize("shift", [-1, 1], ids=["row before", "row after"])
def test_rows_off_by_one(rule, shift):
    """Shift -1 takes the bonus token from the last guess's own row; +1 resamples behind the rejected token."""

    def shifted(world, draft):
        return world.rows(draft)[np.clip(np.arange(1 + len(draft)) + shift, 0, len(draft))]

    assert worst(rule, rows=shifted) > NOTICED


@BOTH
def test_bonus_token_from_the_wrong_row(rule):
    def wrong_bonus(world, draft):
        rows = world.rows(draft)
        rows[-1] = rows[-2]
        return rows

    assert worst(rule, rows=wrong_bonus) > NOTICED


@BOTH
def test_admission_that_reads_the_guess(rule):
    """A guess is verified only if its own q is high: an anticipating policy (section 4)."""

    def admitted(world):
        for mass, draft in worlds.chains(world, 2):
            unsure = [node for node in range(2) if draft.draft_probs[node, draft.tokens[node]] < 0.5]
            yield mass, draft.truncate(unsure[0]) if unsure else draft

    assert worst(rule, drafts=admitted) > NOTICED


@BOTH
def test_admission_that_stops_after_the_unsure_guess_is_safe(rule):
    """The counterpart: the unsure guess itself is still verified."""

    def admitted(world):
        for mass, draft in worlds.chains(world, 2):
            unsure = [node for node in range(2) if draft.draft_probs[node, draft.tokens[node]] < 0.5]
            yield mass, draft.truncate(unsure[0] + 1) if unsure else draft

    assert worst(rule, drafts=admitted) < 1e-12


def _siblings(change):
    def mutated(world):
        for mass, draft in worlds.trees(world, (2, 1), worlds.distinct):
            yield mass, replace(draft, draft_probs=change(world, draft))

    return mutated


def _not_renormalised(world, draft):
    probs = draft.draft_probs.copy()
    probs[1] = np.where(draft.draft_probs[1] > 0, world.q(()), 0)
    return probs


def _first_row_for_all(world, draft):
    probs = draft.draft_probs.copy()
    probs[1] = probs[0]
    return probs


@ON_TREES
@pytest.mark.parametrize("change", [_not_renormalised, _first_row_for_all])
def test_siblings_whose_q_is_not_that_of_their_draw(rule, change):
    assert worst(rule, drafts=_siblings(change)) > NOTICED
    assert worst(rule, drafts=_siblings(lambda world, draft: draft.draft_probs)) < 1e-12


@ON_TREES
def test_siblings_judged_by_the_first_residual(rule, monkeypatch):
    monkeypatch.setattr(accept, "_normalised", lambda weights, *, otherwise: otherwise)
    assert worst(rule, drafts=_siblings(lambda world, draft: draft.draft_probs)) > NOTICED


def test_residual_that_is_not_normalised(monkeypatch):
    monkeypatch.setattr(accept, "_normalised", lambda weights, *, otherwise: weights if weights.any() else otherwise)
    assert worst(rejection, drafts=_siblings(lambda world, draft: draft.draft_probs)) > NOTICED


def cousins(world, *, independent: bool):
    """Two children of the root, drawn without replacement, and one of each, drawn from one q: with noise of its own, or
    with noise of their depth, so that both get the same token."""
    q = world.q((0,))
    for mass, tokens, probs in worlds.distinct(world.q(()), 2):
        for below in itertools.product(range(world.vocab), repeat=2):
            weight = float(np.prod(q[list(below)])) if independent else float(q[below[0]]) * (below[0] == below[1])
            if weight > 0:
                rows = np.vstack((probs, q, q))
                yield mass * weight, Draft("s", (*tokens, *below), (-1, -1, 0, 1), draft_probs=rows)


def test_nodes_of_one_depth_need_noise_of_their_own_for_traversal():
    """It decides on a node by what was drawn below its siblings; rejection never reads that."""
    assert worst(traversal, drafts=lambda world: cousins(world, independent=True)) < 1e-12
    assert worst(rejection, drafts=lambda world: cousins(world, independent=False)) < 1e-12
    assert worst(traversal, drafts=lambda world: cousins(world, independent=False)) > NOTICED


def stopping(world):
    """Two children of the root, and two of each that is likely enough: of the others there are none."""
    first = world.q(())
    for mass, tokens, probs in worlds.distinct(first, 2):
        outcomes = [(mass, tokens, (-1, -1), tuple(probs))]
        for node in range(2):
            if first[tokens[node]] >= 0.35:
                outcomes = [
                    (m * dm, t + x, ps + (node,) * len(x), ls + tuple(rows))
                    for m, t, ps, ls in outcomes
                    for dm, x, rows in worlds.distinct(world.q((tokens[node],)), 2)
                ]
        yield from ((m, Draft("s", t, ps, draft_probs=np.array(ls))) for m, t, ps, ls in outcomes)


@ON_TREES
def test_a_tree_that_ends_below_unlikely_nodes_is_safe(rule):
    """As trees do below `min_survival`: the unlikely node itself is verified."""
    assert worst(rule, drafts=stopping) < 1e-12


@ON_TREES
def test_a_tree_without_its_unlikely_nodes_is_noticed(rule):
    def pruned(world):
        for mass, tokens, probs in worlds.distinct(world.q(()), 2):
            kept = [i for i in range(2) if world.q(())[tokens[i]] >= 0.35]
            yield mass, Draft("s", tuple(tokens[i] for i in kept), (-1,) * len(kept), draft_probs=probs[kept])

    assert worst(rule, drafts=pruned, depth=1) > NOTICED


def test_a_tree_judged_with_the_reach_of_its_first_leaf(monkeypatch):
    """After a refused child its parent's pi must fall, too."""
    right = accept._positive_part
    monkeypatch.setattr(accept, "_positive_part", lambda p, draft, node: 2.0 * right(p, draft, node))
    assert worst(traversal, drafts=lambda world: worlds.trees(world, (2, 1), worlds.distinct)) > NOTICED


def test_siblings_tried_in_another_order_than_drawn():
    def reordered(world):
        for mass, draft in worlds.trees(world, (2,), worlds.distinct):
            yield mass, replace(draft, tokens=draft.tokens[::-1], draft_probs=draft.draft_probs[::-1])

    assert worst(rejection, drafts=reordered, depth=1) > NOTICED


def test_block_that_stops_at_the_first_failure():
    """The coins of `block` are not a chain of conditions: the longest success counts."""

    class FirstFailure:
        """Flips from the shortest prefix up and stops at the first failure; the rule flips from the longest."""

        def __init__(self, coins, passes):
            self.draw = coins.draw
            reached = 0
            while reached < len(passes) and coins.flip(passes[reached]):
                reached += 1
            self.answers = [size == reached for size in range(len(passes), 0, -1)]

        def flip(self, probability):
            return self.answers.pop(0)

    class RecordingCoins:
        def __init__(self):
            self.passes = []

        def flip(self, probability):
            self.passes.insert(0, probability)
            return False

        def draw(self, weights):
            return 0

    def mutant(draft, p, *, coins):
        recorder = RecordingCoins()
        block(draft, p, coins=recorder)
        return block(draft, p, coins=FirstFailure(coins, recorder.passes))

    assert worst(mutant) > NOTICED


def second_token(rule, *, stale: bool) -> float:
    """TV of the second token over two rounds of two guesses, context-free p and q, against p.

    Guesses are drawn by position; `stale` draws a position that is guessed again in the second round with the noise of
    the first, so that (q being the same) the same token comes out.
    """
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    probs = np.zeros(3)
    rows = np.tile(p, (3, 1))
    for pair in itertools.product(range(3), repeat=2):
        draft = Draft("s", pair, (-1, 0), draft_probs=np.tile(q, (2, 1)))
        for mass, verdict in worlds.explore(lambda coins, d=draft: rule(d, rows, coins=coins)):
            mass *= q[pair[0]] * q[pair[1]]
            if len(verdict.tokens) > 1:
                probs[verdict.tokens[1]] += mass
                continue
            for third, first in itertools.product(range(3), [pair[1]] if stale else range(3)):
                weight = mass * q[third] * (1 if stale else q[first])
                again = Draft("s", (first, third), (-1, 0), draft_probs=np.tile(q, (2, 1)))
                for share, then in worlds.explore(lambda coins, d=again: rule(d, rows, coins=coins)):
                    probs[then.tokens[0]] += weight * share
    assert probs.sum() == pytest.approx(1)
    return 0.5 * float(np.abs(probs - p).sum())


def test_private_noise_must_be_fresh_in_every_round_for_block():
    """Why private draws carry the guess's depth: under `block` later guesses decide on earlier ones too."""
    assert second_token(block, stale=False) < 1e-12
    assert second_token(rejection, stale=True) < 1e-12
    assert second_token(block, stale=True) > NOTICED


class OneStream(NoiseCoins):
    """The mutant of section 6: the residual is drawn with the same noise as the guess."""

    def draw(self, weights):
        seed, position, choice = self._key
        with np.errstate(divide="ignore"):
            row = process(np.maximum(np.log(weights), NOTHING).astype(np.float32), SamplingParams(temperature=1.0))
        return row.choose(seed, position, choice, private=1)


class OneCoin(NoiseCoins):
    """The mutant of section 6: every coin of a round is the same number."""

    def flip(self, probability):
        self._flips = 0
        return super().flip(probability)


def through_the_field(coins_type, p: list[float], q: list[float], *, depth: int, count: int = 3000) -> float:
    """Chi-square of the token at `depth`, in rounds that got that far, against its distribution p."""
    rows, draft_probs = np.tile(p, (1 + depth, 1)), np.tile(q, (depth, 1))
    shaped = process(np.maximum(np.log(q), NOTHING).astype(np.float32), SamplingParams(temperature=1.0))
    seen = np.zeros(len(p))
    for position in range(count):
        guesses = tuple(shaped.choose(3, position + i, private=1 + i) for i in range(depth))
        draft = Draft("s", guesses, tuple(range(-1, depth - 1)), draft_probs=draft_probs)
        tokens = rejection(draft, rows, coins=coins_type(3, position)).tokens
        if len(tokens) >= depth:
            seen[tokens[depth - 1]] += 1
    expected = np.array(p) * seen.sum()
    return float(((seen - expected) ** 2 / expected).sum())


def test_shared_noise_is_noticed_through_the_field():
    p, q = [0.62, 0.3, 0.05, 0.03], [0.41, 0.01, 0.28, 0.3]
    assert through_the_field(NoiseCoins, p, q, depth=1) < 28  # 3 degrees of freedom: p > 4e-6
    assert through_the_field(OneStream, p, q, depth=1) > 60


@pytest.mark.slow
def test_a_reused_coin_is_noticed_through_the_field():
    p, q = [0.5, 0.4, 0.1], [0.8, 0.1, 0.1]
    assert through_the_field(NoiseCoins, p, q, depth=2) < 25  # 2 degrees of freedom: p > 4e-6
    assert through_the_field(OneCoin, p, q, depth=2) > 60
