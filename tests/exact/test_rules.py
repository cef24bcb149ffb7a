"""Every outcome of a round under rejection, block and traversal, by the production rules: texts follow the target's p.

Verification rules, section 5. Coins are enumerated, not drawn: both outcomes, weighted by probability.
"""

from __future__ import annotations

import numpy as np
import pytest
import worlds
from worlds import KINDS, World, deviation, emitted

from wager.errors import UsageError
from wager.types import Draft
from wager.verify.accept import block, match, rejection, traversal
from wager.verify.distribution import without_replacement

EXACT = 1e-12
SEEDS = range(4)


def distribution_error(world: World, rule, drafts, depth: int) -> float:
    out, _ = emitted(world, rule, drafts)
    assert sum(out.values()) == pytest.approx(1, abs=EXACT)
    return deviation(world, out, depth + 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [rejection, block, traversal])
@pytest.mark.parametrize(("vocab", "depth"), [(3, 0), (3, 1), (3, 3), (4, 2)])
def test_sampled_chains_keep_the_distribution(rule, kind, vocab, depth):
    for seed in SEEDS:
        world = World(vocab, seed, kind)
        assert distribution_error(world, rule, worlds.chains(world, depth), depth) < EXACT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [rejection, block, traversal])
def test_deterministic_chains_keep_the_distribution(rule, kind):
    for seed in SEEDS:
        world = World(4, seed, kind)
        assert distribution_error(world, rule, worlds.fixed_chain(world, 3), 3) < EXACT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("siblings", [worlds.independent, worlds.distinct, worlds.continued, worlds.mixed])
@pytest.mark.parametrize(("vocab", "widths"), [(3, (2, 2)), (3, (3,)), (3, (3, 1)), (4, (2, 1))])
@pytest.mark.parametrize("rule", [rejection, traversal])
def test_trees_keep_the_distribution(rule, siblings, kind, vocab, widths):
    world = World(vocab, 11, kind)
    assert distribution_error(world, rule, worlds.trees(world, widths, siblings), len(widths)) < EXACT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("widths", [(2, 2), (3, 2, 1), (4, 3)])
@pytest.mark.parametrize("rule", [rejection, traversal])
def test_deterministic_trees_keep_the_distribution(rule, kind, widths):
    for seed in SEEDS:
        world = World(4, seed, kind)
        assert distribution_error(world, rule, worlds.fixed_tree(world, widths), len(widths)) < EXACT


@pytest.mark.parametrize(("rule", "mean"), [(rejection, 10 / 9), (block, 11 / 9), (traversal, 11 / 9)])
def test_golden_means(rule, mean):
    """The toy of Sun et al.: p = (1/3, 2/3), q = (2/3, 1/3), two guesses."""
    world = World(2, 0)
    world.p = lambda context: np.array([1, 2]) / 3
    world.q = lambda context: np.array([2, 1]) / 3
    _, accepted = emitted(world, rule, worlds.chains(world, 2))
    assert accepted == pytest.approx(mean, abs=EXACT)


def test_block_accepts_at_least_as_much_as_rejection():
    gains = []
    for seed in range(12):
        world = World(3, seed)
        by_rejection, by_block = (emitted(world, rule, worlds.chains(world, 3))[1] for rule in (rejection, block))
        gains.append(by_block - by_rejection)
    assert min(gains) >= -EXACT
    assert max(gains) > 0.05


@pytest.mark.parametrize("drafts", [lambda w: worlds.chains(w, 3), lambda w: worlds.fixed_chain(w, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_traversal_of_a_chain_is_block(drafts, kind):
    for seed in SEEDS:
        world = World(3, seed, kind)
        by_block, by_traversal = (emitted(world, rule, drafts(world))[0] for rule in (block, traversal))
        for key in {*by_block, *by_traversal}:
            assert by_traversal.get(key, 0.0) == pytest.approx(by_block.get(key, 0.0), abs=EXACT)


@pytest.mark.parametrize("siblings", [worlds.independent, worlds.distinct])
def test_traversal_accepts_more_of_a_tree_than_rejection(siblings):
    gains = []
    for seed in range(6):
        world = World(3, seed)
        of = [emitted(world, rule, worlds.trees(world, (2, 2), siblings))[1] for rule in (rejection, traversal)]
        gains.append(of[1] - of[0])
    assert min(gains) >= -EXACT and max(gains) > 0.01


def test_traversal_of_one_level_is_rejection():
    for seed in SEEDS:
        world = World(4, seed)
        drafts = [list(worlds.trees(world, (3,), worlds.distinct)) for _ in range(2)]
        of = [emitted(world, rule, iter(d))[0] for rule, d in zip((rejection, traversal), drafts, strict=True)]
        assert all(of[0].get(key, 0.0) == pytest.approx(of[1].get(key, 0.0), abs=EXACT) for key in {*of[0], *of[1]})


@pytest.mark.parametrize("drafts", [lambda w: worlds.chains(w, 1), lambda w: worlds.fixed_chain(w, 3)])
def test_block_is_rejection_for_one_guess_and_for_deterministic_guesses(drafts):
    for seed in SEEDS:
        world = World(4, seed)
        by_rejection, by_block = (emitted(world, rule, drafts(world))[0] for rule in (rejection, block))
        assert by_rejection.keys() == by_block.keys()
        assert all(by_rejection[key] == pytest.approx(by_block[key], abs=EXACT) for key in by_rejection)


@pytest.mark.parametrize("rule", [rejection, block, traversal])
def test_the_acceptance_of_one_guess_is_the_overlap(rule):
    world = World(4, 5)
    _, accepted = emitted(world, rule, worlds.chains(world, 1))
    assert accepted == pytest.approx(np.minimum(world.p(()), world.q(())).sum(), abs=EXACT)


@pytest.mark.parametrize("rule", [rejection, block, traversal])
def test_a_greedy_target_is_followed_exactly(rule):
    """p a point mass: the rules are `match`, whatever the drafter draws."""
    world = World(3, 2, "point_p")
    for mass, draft in worlds.chains(world, 3):
        p = world.rows(draft)
        outcomes = list(worlds.explore(lambda coins, draft=draft, p=p: rule(draft, p, coins=coins)))
        possible = {verdict for weight, verdict in outcomes if weight > 0}
        assert possible == {match(draft, p.argmax(axis=1).tolist())}
        assert mass > 0


def test_identical_distributions_accept_everything():
    world = World(3, 4, "same")
    for rule in (rejection, block, traversal):
        _, accepted = emitted(world, rule, worlds.chains(world, 3))
        assert accepted == pytest.approx(3, abs=EXACT)


def test_block_refuses_a_tree():
    tree = Draft("s", (0, 1), (-1, -1))
    with pytest.raises(UsageError, match="tree"):
        block(tree, np.full((3, 4), 0.25), coins=worlds.Exploring([]))


@pytest.mark.parametrize("rule", [rejection, block, traversal])
@pytest.mark.parametrize("token", [4, 400, -1])
@pytest.mark.parametrize("with_draft_probs", [True, False])
def test_guesses_outside_the_vocabulary_never_change_the_distribution(rule, token, with_draft_probs):
    world = World(4, 6)
    probs = np.tile(world.q(()), (1, 1)) if with_draft_probs else None
    drafts = iter([(1.0, Draft("s", (token,), (-1,), draft_probs=probs))])
    rows = lambda draft: np.array([world.p(()), world.p(())])  # noqa: E731
    out, accepted = emitted(world, rule, drafts, rows)
    assert accepted == 0
    assert deviation(world, out, 1) < EXACT


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_draft_probs_that_are_not_finite_still_yield_tokens(broken):
    """Invalid draft_probs may bias their own round under `rejection`, but never fail a request or leave p's support."""
    world = World(4, 7, "zeros_p")
    draft = Draft("s", (1, 2), (-1, 0), draft_probs=np.array([[0.5, 0.5, broken, 0.0], [broken, 0.5, 0.5, 0.0]]))
    for rule in (rejection, block, traversal):
        outcomes = list(worlds.explore(lambda coins, rule=rule: rule(draft, world.rows(draft), coins=coins)))
        assert sum(mass for mass, _ in outcomes) == pytest.approx(1)
        assert all(world.truth(len(v.tokens))[v.tokens] > 0 for mass, v in outcomes if mass > 0)


def test_only_rows_on_the_accepted_path_are_read():
    world = World(4, 8)
    draft = Draft("s", (0, 1, 2), (-1, -1, 0))

    class Lazy:
        def __init__(self):
            self.read = []

        def __getitem__(self, row):
            self.read.append(row)
            return world.rows(draft)[row]

    lazy = Lazy()
    coins = worlds.Exploring([0, 1])  # refuse node 0, take node 1
    assert rejection(draft, lazy, coins=coins).accepted == (1,)
    assert lazy.read == [0, 2]


def test_without_replacement_is_the_distribution_of_the_next_draw():
    q = np.array([0.5, 0.3, 0.2, 0.0])
    rows = without_replacement(q, [1, 0, 2])
    assert rows == pytest.approx(np.array([[0.5, 0.3, 0.2, 0], [5 / 7, 0, 2 / 7, 0], [0, 0, 1, 0]]))
    with pytest.raises(UsageError, match="Token 3"):
        without_replacement(q, [0, 3])
    with pytest.raises(UsageError, match="Token 1"):
        without_replacement(q, [1, 1])
