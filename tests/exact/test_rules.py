"""Every outcome of a round under rejection, block and traversal, by the production rules: texts follow the target's p.

Verification rules, section 5. Coins are enumerated, not drawn: both outcomes, weighted by probability. Rules that are
broken on purpose must be noticed (TV > 1e-3), or the enumeration proves nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import worlds
from worlds import EXACT, KINDS, Context, World, chains, deviation, distinct, emitted, fixed, independent, trees

from wager.draft.model import DraftModel
from wager.errors import UsageError
from wager.testing import ToyDistribution, ToyTarget
from wager.types import Draft, DraftRequest, SamplingParams
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
            for siblings in (independent, distinct, worlds.continued, worlds.mixed)
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


@pytest.mark.parametrize(
    ("one", "other", "widths", "siblings"),
    [
        (rejection, traversal, (3,), distinct),
        (rejection, block, (1,), independent),
        (rejection, block, (1, 1, 1), fixed),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_rules_that_are_the_same_there(one, other, widths, siblings, kind):
    """Traversal of one level is rejection; block of one guess, or of deterministic ones, too."""
    for seed in SEEDS:
        world = World(3, seed, kind)
        first, second = (emitted(world, rule, trees(world, widths, siblings))[0] for rule in (one, other))
        for tokens in {*first, *second}:
            assert first.get(tokens, 0.0) == pytest.approx(second.get(tokens, 0.0), abs=EXACT)


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
def test_a_guess_that_its_own_q_excludes_counts_as_not_proposed(rule):
    world = World(4, 6)
    q = np.where(np.arange(4) == 2, 0.0, world.q(()))
    draft = Draft("s", (2,), (-1,), draft_probs=np.array([q / q.sum()]))
    out, accepted = emitted(world, rule, [(1.0, draft)], lambda draft: np.array([world.p(()), world.p(())]))
    assert accepted == 0 and deviation(world, out, 1) < EXACT


@EVERY_RULE
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_draft_probs_that_are_not_finite_still_yield_tokens(rule, broken):
    """Invalid draft_probs may bias their own round under `rejection`, but never fail a request or leave p's support."""
    world = World(4, 7, "zeros_p")
    for first, row in itertools.product(range(4), ([0.5, 0.5, broken, 0.0], [0.25] * 4)):
        draft = Draft("s", (first, 2), (-1, 0), draft_probs=np.array([row, [broken, 0.5, 0.5, 0.0]]))
        p = world.rows(draft)
        outcomes = list(worlds.explore(lambda coins, draft=draft, p=p: rule(draft, p, coins=coins)))
        assert sum(mass for mass, _ in outcomes) == pytest.approx(1)
        assert all(world.truth(len(v.tokens))[v.tokens] > 0 for mass, v in outcomes if mass > 0)


def test_only_rows_on_the_accepted_path_are_read():
    world, draft, read = World(4, 8), Draft("s", (0, 1, 2), (-1, -1, 0)), []

    class Rows:
        def __getitem__(self, row):
            read.append(row)
            return world.rows(draft)[row]

    refuse_node_0_take_node_1 = worlds.Exploring([0, 1])
    assert rejection(draft, Rows(), coins=refuse_node_0_take_node_1).accepted == (1,)
    assert read == [0, 2]


def test_without_replacement_is_the_distribution_of_the_next_draw():
    q = np.array([0.5, 0.3, 0.2, 0.0])
    rows = without_replacement(q, [1, 0, 2])
    assert rows == pytest.approx(np.array([[0.5, 0.3, 0.2, 0], [5 / 7, 0, 2 / 7, 0], [0, 0, 1, 0]]))
    for tokens in ([0, 3], [1, 1]):
        with pytest.raises(UsageError, match=f"Token {tokens[1]}"):
            without_replacement(q, tokens)


# ---- which guesses may be left out, by what was drawn ---------------------------------------------------------------


def without_unsure(world, *, verified: int):
    """Chains that end at a guess whose own q is low, with it (`verified` 1) or without it (0)."""
    for mass, draft in chains(world, 2):
        unsure = [node for node in range(2) if draft.draft_probs[node, draft.tokens[node]] < 0.5]
        yield mass, draft.truncate(unsure[0] + verified) if unsure else draft


def below_likely_nodes(world):
    """Two children of the root, and two of each that is likely enough: of the others there are none."""
    for mass, draft in trees(world, (2,), distinct):
        likely = [node for node in range(2) if world.q(())[draft.tokens[node]] >= 0.35]
        yield from worlds.grown(world, mass, draft, likely, 2, distinct)


def likely_nodes(world):
    for mass, draft in trees(world, (2,), distinct):
        kept = [node for node in range(2) if world.q(())[draft.tokens[node]] >= 0.35]
        tokens = tuple(draft.tokens[node] for node in kept)
        yield mass, Draft("s", tokens, (-1,) * len(kept), draft_probs=draft.draft_probs[kept])


def test_a_draft_may_end_behind_an_unlikely_guess_but_not_before_it():
    """An admission that reads a guess anticipates the verdict (section 4); `min_survival` stops after the guess."""
    for rule in (rejection, block, traversal):
        assert worst(rule, partial(without_unsure, verified=1)) < EXACT
        assert worst(rule, partial(without_unsure, verified=0)) > NOTICED
    for rule in (rejection, traversal):
        assert worst(rule, below_likely_nodes) < EXACT
        assert worst(rule, likely_nodes, depth=1) > NOTICED


def cousins(world):
    """Two children of the root, and one of each, drawn with noise of their depth, so that both get the same token."""
    q = world.q((0,))
    for mass, draft in trees(world, (2,), distinct):
        for token in range(world.vocab):
            rows = np.vstack((draft.draft_probs, q, q))
            yield mass * q[token], Draft("s", (*draft.tokens, token, token), (-1, -1, 0, 1), draft_probs=rows)


def test_nodes_of_one_depth_need_noise_of_their_own_for_traversal():
    """It decides on a node by what was drawn below its siblings; rejection never reads that."""
    assert worst(rejection, cousins) < EXACT
    assert worst(traversal, cousins) > NOTICED


@pytest.mark.parametrize(
    ("rule", "stale", "safe"), [(block, False, True), (rejection, True, True), (block, True, False)]
)
def test_private_noise_must_be_fresh_in_every_round_for_block(rule, stale, safe):
    """Why private draws carry the guess's depth: under `block` later guesses decide on earlier ones too.

    The second token of two rounds of two guesses, context-free p and q; `stale` draws a position that is guessed again
    in the second round with the noise of the first, so that (q being the same) the same token comes out.
    """
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    rows, probs = np.tile(p, (3, 1)), np.zeros(3)

    def round_of(*guesses):
        draft = Draft("s", guesses, (-1, 0), draft_probs=np.tile(q, (2, 1)))
        return worlds.explore(lambda coins: rule(draft, rows, coins=coins))

    for pair in itertools.product(range(3), repeat=2):
        for mass, verdict in round_of(*pair):
            mass *= q[pair[0]] * q[pair[1]]
            if len(verdict.tokens) > 1:
                probs[verdict.tokens[1]] += mass
                continue
            for first, third in itertools.product([pair[1]] if stale else range(3), range(3)):
                weight = mass * q[third] * (1 if stale else q[first])
                for share, then in round_of(first, third):
                    probs[then.tokens[0]] += weight * share
    assert (0.5 * np.abs(probs - p).sum() < EXACT) == safe


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


# ---- what the production draft model states of its guesses, whose rows are not the target's ids ----------------------

DRAWN = SamplingParams(temperature=1.0)


@dataclass
class Padded(World):
    """q of a draft model of `rows` logits, for a target of `vocab`; none behind an id that it has no row for."""

    rows_of_draft: int = 4
    params: SamplingParams = DRAWN

    def __post_init__(self) -> None:
        law = ToyDistribution(vocab=self.rows_of_draft, sharpness=4.0, salt=self.seed)
        self._drafter = DraftModel(ToyTarget(law), vocab=self.vocab)

    def q(self, context: Context) -> np.ndarray:
        if ("q", context) not in self.cache:
            known = [0, *context]
            self._drafter.begin("s", known, self.params)
            (draft,) = self._drafter.propose([DraftRequest("s", len(known), 1, self.params, 7, needs_draft_probs=True)])
            stated = np.zeros(self.vocab) if draft.draft_probs is None else draft.draft_probs[0]
            self.cache["q", context] = stated
        return self.cache["q", context]


@pytest.mark.parametrize("rows", [2, 3, 5, 13])
@pytest.mark.parametrize("params", [DRAWN, SamplingParams(temperature=1.3, top_k=3, top_p=0.8)])
def test_drafts_of_a_model_with_more_or_fewer_rows_keep_the_distribution(rows: int, params: SamplingParams) -> None:
    for seed in range(3):
        world = Padded(4, seed, rows_of_draft=rows, params=params)
        stated = world.q(())
        assert stated.sum() == pytest.approx(1, abs=EXACT) and not stated[rows:].any()
        for drafts, rules in (
            (list(chains(world, 2)), (rejection, block, traversal)),
            (list(trees(world, (2, 2), distinct)), (rejection, traversal)),
        ):
            for rule in rules:
                out, accepted = emitted(world, rule, drafts)
                assert accepted > 0.1 and deviation(world, out, 3) < EXACT


def test_behind_an_id_without_a_row_nothing_is_guessed() -> None:
    world = Padded(4, 0, rows_of_draft=3)
    assert world.q((1, 2)).any() and not world.q((3,)).any() and not world.q((1, 3, 0)).any()
