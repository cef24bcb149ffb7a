"""Every outcome of a round under rejection, block and traversal, by the production rules: texts follow the target's p.

Verification rules, section 5. Coins are enumerated, not drawn: both outcomes, weighted by probability. Rules that are
broken on purpose must be noticed (TV > 1e-3), or the enumeration proves nothing.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import worlds
from worlds import EXACT, KINDS, World, chains, deviation, distinct, emitted, fixed, independent, trees

from wager.errors import UsageError
from wager.types import Draft
from wager.verify import accept
from wager.verify.accept import block, match, rejection, traversal
from wager.verify.distribution import without_replacement

NOTICED = 1e-3
SEEDS = range(4)
EVERY_RULE = pytest.mark.parametrize("rule", [rejection, block, traversal])


def worst(rule, drafts, *, vocab: int = 3, depth: int = 2, kind: str = "random", seeds=SEEDS) -> float:
    """The largest TV over a few worlds."""
    deviations = []
    for seed in seeds:
        world = World(vocab, seed, kind)
        deviations.append(deviation(world, emitted(world, rule, drafts(world))[0], depth + 1))
    assert np.isfinite(deviations).all()
    return max(deviations)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("vocab", "widths", "siblings"),
    [
        *((vocab, (1,) * depth, independent) for vocab, depth in ((3, 3), (4, 2), (3, 1), (3, 0))),
        (4, (1, 1, 1), fixed),
        *(
            (vocab, widths, siblings)
            for vocab, widths in ((3, (2, 2)), (3, (3,)), (3, (3, 1)), (4, (2, 1)))
            for siblings in (independent, distinct, worlds.mixed)
        ),
        *((4, widths, fixed) for widths in ((2, 2), (3, 2, 1), (4, 3))),
    ],
)
def test_drafts_keep_the_distribution(kind, vocab, widths, siblings):
    branches = max(widths, default=1) > 1
    seeds = [11] if branches and siblings is not fixed else SEEDS
    for rule in (rejection, traversal) if branches else (rejection, block, traversal):
        drafts = partial(trees, widths=widths, siblings=siblings)
        assert worst(rule, drafts, vocab=vocab, depth=len(widths), kind=kind, seeds=seeds) < EXACT


# ---- how much is accepted -------------------------------------------------------------------------------------------


def test_means_of_accepted_guesses():
    """The toy of Sun et al.: p = (1/3, 2/3), q = (2/3, 1/3), two guesses; of one guess, it is the overlap."""
    world = World(2, 0)
    world.cache = {
        (name, context): np.array(probs) / 3
        for name, probs in (("p", [1, 2]), ("q", [2, 1]))
        for context in ((), (0,), (1,))
    }
    other, same = World(4, 5), World(3, 4, "same")
    overlap = np.minimum(other.p(()), other.q(())).sum()
    for rule, mean in ((rejection, 10 / 9), (block, 11 / 9), (traversal, 11 / 9)):
        assert emitted(world, rule, chains(world, 2))[1] == pytest.approx(mean, abs=EXACT)
        assert emitted(other, rule, chains(other, 1))[1] == pytest.approx(overlap, abs=EXACT)
        assert emitted(same, rule, chains(same, 3))[1] == pytest.approx(3, abs=EXACT)


@pytest.mark.parametrize(
    ("better", "widths", "siblings"),
    [(block, (1, 1, 1), independent), (traversal, (2, 2), independent), (traversal, (2, 2), distinct)],
)
def test_block_and_traversal_accept_at_least_as_much_as_rejection(better, widths, siblings):
    gains = []
    for seed in range(6):
        world = World(3, seed)
        more, less = (emitted(world, rule, trees(world, widths, siblings))[1] for rule in (better, rejection))
        gains.append(more - less)
    assert min(gains) >= -EXACT and max(gains) > 0.01


@EVERY_RULE
def test_a_greedy_target_is_followed_exactly(rule):
    """p a point mass: the rules are `match`, whatever the drafter draws."""
    world = World(3, 2, "point_p")
    for _, draft in chains(world, 3):
        p = world.rows(draft)
        outcomes = list(worlds.explore(lambda coins, draft=draft, p=p: rule(draft, p, coins=coins)))
        assert {verdict for weight, verdict in outcomes if weight > 0} == {match(draft, p.argmax(axis=1).tolist())}


# ---- what is wrong with a draft -------------------------------------------------------------------------------------


def test_block_refuses_a_tree():
    with pytest.raises(UsageError, match="tree"):
        block(Draft("s", (0, 1), (-1, -1)), np.full((3, 4), 0.25), coins=worlds.Exploring([]))


@EVERY_RULE
@pytest.mark.parametrize("token", [4, 400, -1])
@pytest.mark.parametrize("with_draft_probs", [True, False])
def test_guesses_outside_the_vocabulary_never_change_the_distribution(rule, token, with_draft_probs):
    world = World(4, 6)
    draft = Draft("s", (token,), (-1,), draft_probs=np.array([world.q(())]) if with_draft_probs else None)
    out, accepted = emitted(world, rule, [(1.0, draft)], lambda draft: np.array([world.p(()), world.p(())]))
    assert accepted == 0 and deviation(world, out, 1) < EXACT


@EVERY_RULE
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_draft_probs_that_are_not_finite_still_yield_tokens(rule, broken):
    """Invalid draft_probs may bias their own round under `rejection`, but never fail a request or leave p's support."""
    world = World(4, 7, "zeros_p")
    draft = Draft("s", (1, 2), (-1, 0), draft_probs=np.array([[0.5, 0.5, broken, 0.0], [broken, 0.5, 0.5, 0.0]]))
    outcomes = list(worlds.explore(lambda coins: rule(draft, world.rows(draft), coins=coins)))
    assert sum(mass for mass, _ in outcomes) == pytest.approx(1)
    assert all(world.truth(len(v.tokens))[v.tokens] > 0 for mass, v in outcomes if mass > 0)


def test_without_replacement_is_the_distribution_of_the_next_draw():
    q = np.array([0.5, 0.3, 0.2, 0.0])
    rows = without_replacement(q, [1, 0, 2])
    assert rows == pytest.approx(np.array([[0.5, 0.3, 0.2, 0], [5 / 7, 0, 2 / 7, 0], [0, 0, 1, 0]]))
    for tokens in ([0, 3], [1, 1]):
        with pytest.raises(UsageError, match=f"Token {tokens[1]}"):
            without_replacement(q, tokens)


# ---- rules broken on purpose ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("_ratio", lambda right, p, draft, node: 1 / max(right(p, draft, node), 1e-9)),
        ("_positive_part", lambda right, p, draft, node: right(p, draft, min(node + 1, len(draft) - 1))),
        ("_positive_part", lambda right, p, draft, node: np.abs(p - draft.draft_probs[node])),
        ("_positive_part", lambda right, p, draft, node: p),
        ("_normalised", lambda right, weights, *, otherwise: otherwise),
    ],
    ids=["ratio inverted", "residual of the next row", "residual not clipped", "no residual", "first residual"],
)
def test_broken_rules_are_noticed(name, broken, monkeypatch):
    monkeypatch.setattr(accept, name, partial(broken, getattr(accept, name)))
    for rule in (rejection, traversal):
        assert worst(rule, partial(trees, widths=(2, 1), siblings=distinct)) > NOTICED
