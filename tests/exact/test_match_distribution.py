"""The distribution of `match`: exact by enumeration of the coupled field, and by counting draws of the real field.

Verification rules, sections 1.2 to 1.4. Enumeration uses the closed form of the joint distribution of the target's
token and the drafter's guess; counting uses the numbers that production draws from.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import worlds
from worlds import KINDS, NOTHING, World, agreement, deviation, joint

from wager.types import Draft, SamplingParams
from wager.verify.accept import match
from wager.verify.distribution import process

EXACT = 1e-12
PARAMS = SamplingParams(temperature=1.0)


def logits(probs: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(probs), NOTHING).astype(np.float32)


def coupled_rounds(world: World, depth: int):
    """{emitted tokens: mass} and mean accepted guesses of chains under `match`, by the joint distribution at each node.

    Once a guess has missed, nothing behind it is read: targets and guesses there are filled with zeros.
    """
    out: dict[tuple[int, ...], float] = {}
    accepted = 0.0
    todo = [(1.0, ())]
    for step in range(depth):
        grown = []
        for mass, path in todo:
            probs = joint(world.p(path), world.q(path))
            grown += [(mass * probs[x, x], (*path, x)) for x in range(world.vocab)]
            for t, d in itertools.permutations(range(world.vocab), 2):
                guesses = (*path, d, *[0] * (depth - step - 1))
                verdict = match(Draft.chain("s", guesses, drafter=""), [*path, t, *[0] * (depth - step)])
                out[verdict.tokens] = out.get(verdict.tokens, 0.0) + mass * probs[t, d]
                accepted += mass * probs[t, d] * len(verdict.accepted)
        todo = grown
    for mass, path in todo:
        for bonus, weight in enumerate(world.p(path)):
            verdict = match(Draft.chain("s", path, drafter=""), [*path, bonus])
            out[verdict.tokens] = out.get(verdict.tokens, 0.0) + mass * weight
            accepted += mass * weight * len(verdict.accepted)
    return out, accepted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "depth"), [(3, 3), (4, 2)])
def test_chains_keep_the_distribution_and_accept_as_the_closed_form(kind, vocab, depth):
    for seed in range(6):
        world = World(vocab, seed, kind)
        out, accepted = coupled_rounds(world, depth)
        assert sum(out.values()) == pytest.approx(1, abs=EXACT)
        assert deviation(world, out, depth + 1) < EXACT
        expected = 0.0
        for length in range(1, depth + 1):
            for path in itertools.product(range(vocab), repeat=length):
                shares = [joint(world.p(path[:i]), world.q(path[:i]))[x, x] for i, x in enumerate(path)]
                expected += float(np.prod(shares))
        assert accepted == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("widths", [(2, 2), (3, 2), (2, 2, 1)])
def test_deterministic_trees_keep_the_distribution_and_accept_the_sum_of_p(kind, widths):
    """Targets at the nodes are independent draws of p; guesses without noise are a fixed tree."""
    world = World(3, 3, kind)
    ((_, draft),) = worlds.fixed_tree(world, widths)
    p = world.rows(draft)
    out: dict[tuple[int, ...], float] = {}
    first = 0.0

    def walk(here: int, mass: float, targets: dict[int, int]) -> None:
        """Enumerate targets along the path taken; unread rows stay at 0."""
        nonlocal first
        for token in range(world.vocab):
            weight = mass * p[1 + here, token]
            known = {**targets, 1 + here: token}
            verdict = match(draft, [known.get(row, 0) for row in range(1 + len(draft))])
            if len(verdict.tokens) > len(known):
                walk(verdict.accepted[len(known) - 1], weight, known)
                continue
            child = [i for i, edge in enumerate(zip(draft.parents, draft.tokens, strict=True)) if edge == (here, token)]
            if child:
                walk(child[0], weight, known)
            else:
                out[verdict.tokens] = out.get(verdict.tokens, 0.0) + weight
                first += weight * bool(verdict.accepted)

    walk(-1, 1.0, {})
    assert deviation(world, out, len(widths) + 1) < EXACT
    roots = [x for x, parent in zip(draft.tokens, draft.parents, strict=True) if parent < 0]
    assert first == pytest.approx(world.p(())[roots].sum(), abs=EXACT)


def test_joint_distribution_has_the_right_margins_and_bounds():
    rng = np.random.default_rng(0)
    for vocab in (2, 3, 5, 9):
        for _ in range(20):
            p, q = rng.dirichlet(np.full(vocab, 0.4), 2)
            probs = joint(p, q)
            assert np.abs(probs.sum(1) - p).max() < 1e-9
            assert np.abs(probs.sum(0) - q).max() < 1e-9
            far = 0.5 * np.abs(p - q).sum()
            assert (1 - far) / (1 + far) - EXACT <= agreement(p, q) <= 1 - far + EXACT


def test_uniform_distributions_agree_by_their_jaccard_index():
    p = np.array([1, 1, 1, 0, 0]) / 3
    q = np.array([0, 1, 1, 1, 0]) / 3
    assert agreement(p, q) == pytest.approx(2 / 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "zeros", "point_q"])
def test_the_production_field_has_the_joint_distribution(kind):
    """Target and guess as production draws them, over many positions, seeds and choices: chi-square on the pairs."""
    world = World(4, 1, kind)
    p, q = process(logits(world.p(())), PARAMS), process(logits(world.q(())), PARAMS)
    count, probs = 6000, joint(world.p(()), world.q(()))
    seen = np.zeros((4, 4))
    for i in range(count):
        seed, position, choice = i % 7, i // 7, i % 3
        seen[p.choose(seed, position, choice), q.choose(seed, position, choice)] += 1
    assert seen[probs < 1e-12].sum() == 0
    cells = probs * count >= 5
    statistic = ((seen - probs * count)[cells] ** 2 / (probs * count)[cells]).sum()
    assert statistic < cells.sum() + 6 * np.sqrt(2 * cells.sum())
    assert abs(np.trace(seen) / count - agreement(world.p(()), world.q(()))) < 4 * np.sqrt(0.25 / count)


def test_tree_children_are_gumbel_top_b_and_are_accepted_more_often():
    """Top-b of log q + g with the shared field contains the target's token more often than one guess does."""
    rng = np.random.default_rng(3)
    z = rng.normal(0, 2, 60)
    p = process(z.astype(np.float32), PARAMS)
    q = process((z + rng.normal(0, 1, 60)).astype(np.float32), PARAMS)
    caught = np.zeros(3)
    count = 1500
    for position in range(count):
        target = p.choose(5, position)
        ranked = [token for token, _ in q.top(3, 5, position)]
        assert ranked[0] == q.choose(5, position)
        caught += [target in ranked[:b] for b in (1, 2, 3)]
    one = agreement(p.probabilities(60), q.probabilities(60))
    assert caught[0] / count == pytest.approx(one, abs=4 * np.sqrt(0.25 / count))
    assert caught[1] / count > one + 0.05
    assert caught[2] > caught[1]


def test_text_does_not_depend_on_the_draft():
    """The guarantee of `match`: whatever is guessed, the same field gives the same text."""
    world = World(5, 9)
    rng = np.random.default_rng(1)

    def target(path):
        return process(logits(world.p(path[-2:])), PARAMS).choose(42, len(path))

    plain: tuple[int, ...] = ()
    while len(plain) < 40:
        plain = (*plain, target(plain))
    for _ in range(20):
        text: tuple[int, ...] = ()
        while len(text) < 40:
            nodes = int(rng.integers(0, 9))
            parents = tuple(int(rng.integers(-1, i)) if i else -1 for i in range(nodes))
            draft = Draft("s", tuple(rng.integers(-1, 6, nodes).tolist()), parents)
            paths = [tuple(draft.tokens[n] for n in draft.path(i)) for i in range(nodes)]
            targets = [target((*text, *path)) if all(0 <= x < 5 for x in path) else 0 for path in [(), *paths]]
            text = (*text, *match(draft, targets).tokens)
        assert text[:40] == plain
