"""Merged trees; and templates of greatest expected acceptance, against every one that there is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from oracle import merging
from wager.draft.ngram import NgramDrafter
from wager.draft.trees import RankLearner, RankRates, TokenTree, TreeTemplate, children, sequoia
from wager.kernels import _native
from wager.types import Draft, DraftPrices, DraftRequest, SamplingParams

Path = tuple[int, ...]


PATHS = list(itertools.product(range(3), repeat=3))


def paths_of(tree: TokenTree) -> list[Path]:
    paths: list[Path] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        assert -1 <= parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    return paths


def rebuilt(paths: Sequence[Path], scores: Sequence[float]) -> TokenTree:
    place = {(): -1, **{path: index for index, path in enumerate(paths)}}
    return TokenTree(tuple(path[-1] for path in paths), tuple(place[path[:-1]] for path in paths), tuple(scores))


def drafted(tree: TokenTree) -> Draft:
    return Draft("s", *tree)


def tree_of(draft: Draft) -> TokenTree:
    return TokenTree(draft.tokens, draft.parents, draft.scores)


def merged(*trees: TokenTree, nodes: int) -> TokenTree:
    given = [(drafted(tree), 1.0) for tree in trees]
    return tree_of(_native.DraftMerger(Draft, "both").merge("s", given, nodes))


def test_merged_trees_share_what_they_have_in_common() -> None:
    chain = rebuilt([(1,), (1, 2), (1, 2, 3)], [0.8, 0.5, 0.1])
    other = rebuilt([(1,), (4,), (1, 5), (4, 6)], [0.6, 0.3, 0.4, 0.2])
    tree = merged(chain, other, nodes=99)
    values = dict(zip(paths_of(tree), tree.scores, strict=True))
    expected = {(1,): 0.8, (1, 2): 0.5, (1, 5): 0.4, (4,): 0.3, (4, 6): 0.2, (1, 2, 3): 0.1}
    assert values == pytest.approx(expected)
    assert paths_of(merged(chain, other, nodes=4)) == [(1,), (1, 2), (1, 5), (4,)]
    assert merged(nodes=4) == TokenTree() and paths_of(merged(chain, nodes=99)) == paths_of(chain)


def random_tree(rng: random.Random, *, scored: bool = True) -> TokenTree:
    paths = sorted({path[:depth] for path in rng.sample(PATHS, 2) for depth in (1, 2, 3)}, key=len)
    return rebuilt(paths, [rng.random() ** 2 * rng.randint(0, 3) / 3 for _ in paths] if scored else [])


def test_trees_are_merged_as_in_python() -> None:
    """And are borne out so; a node is never likelier than its parent."""
    rng, merger = random.Random(3), _native.DraftMerger(Draft, "both")
    for _ in range(300):
        trees = [(random_tree(rng, scored=rng.random() < 0.8), rng.choice([1.0, 0.4, 1.7])) for _ in range(3)]
        nodes = rng.randint(0, 9)
        given = [(drafted(tree), factor) for tree, factor in trees]
        draft = merger.merge("s", given, nodes)
        tree = tree_of(draft)
        assert tree == merging.merge([merging.judged(*each) for each in given], nodes)
        assert (draft.seq_id, draft.drafter, draft.computed, draft.draft_probs) == ("s", "both", None, None)
        assert all(p < 0 or tree.scores[p] >= s for p, s in zip(tree.parents, tree.scores, strict=True))
        paths_of(tree)
        own, other = _native.Reliability(), merging.Reliability()
        for draft, _ in given:
            tokens = rng.choices(range(3), k=rng.randint(0, 4))
            own.learn(draft, tokens)
            other.learn(draft, tokens)
            assert own.factor == other.factor


BORDERS, SHARE = [0.1, 0.4, 0.8], 0.02


@pytest.mark.slow
@pytest.mark.parametrize("keeping", [0.0, 0.1])
def test_a_second_drafter_is_asked_and_learned_of_as_in_python(keeping: float) -> None:
    rng, asked, rests = random.Random(4), 0, set()
    native, oracle = _native.BackedDrafts(Draft, "both", BORDERS, SHARE), merging.BackedDrafts(BORDERS, SHARE)
    for now in range(3000):
        assert native.until == oracle.until
        if now < native.until:
            rests.add(native.until)
            continue
        own = drafted(random_tree(rng, scored=rng.random() < 0.8)) if rng.random() < 0.8 else Draft("s")
        prices = DraftPrices(rng.choice([0.01, 0.2]), rng.choice([0.02, 0.2, 0.5]), 0.05, keeping)
        request = DraftRequest("s", 9, rng.randint(1, 9), SamplingParams(), 0, prices=prices)
        asked_for = native.ask(request, own or None, now, sequences=2, keeps=True)
        least = oracle.ask(own or None, prices, now, 2)
        assert asked_for == (None if least is None else request._replace(min_survival=least))
        second = drafted(random_tree(rng)) if rng.random() < 0.8 else Draft("s", (1, 2), (-1, 0), (0.7, 0.6))
        behind = drafted(random_tree(rng)) if rng.random() < 0.5 else None
        if least is not None:
            made, tree = native.join(request, own, second, behind), oracle.join(own, second, request.depth, behind)
            assert (tree_of(made), made.drafter, made.computed) == (tree, "both", len(second))
            asked += 1
        tokens = rng.choices(range(3), k=rng.randint(1, 5))
        native.accept("s", tokens)
        if least is not None:
            oracle.accept(tokens)
    assert asked > 200 and (len(rests) > 3 if keeping else not rests)


def test_what_cannot_be_merged_is_an_error() -> None:
    draft = Draft("s", (1, 2), (-1, 0), (0.5, 0.4))
    wrong = [Draft("s", (1, 2), (-1, 1)), Draft("s", (1, 2), (-1,)), Draft("s", (1, 2), (-1, 0), (0.5,))]
    for drafts in ([draft], *([(each, 1.0)] for each in wrong)):
        with pytest.raises((ValueError, TypeError)):
            _native.DraftMerger(Draft, "both").merge("s", cast(Any, drafts), 3)
    backed = _native.BackedDrafts(Draft, "both", BORDERS, SHARE)
    request = DraftRequest("s", 9, 3, SamplingParams(), 0)
    with pytest.raises(IndexError):
        backed.join(request, draft, draft)  # it was not asked
    backed.ask(request, draft, 1, 1, keeps=False)
    for first, second, behind in (*((each, draft, None) for each in wrong), (draft, Draft("s"), draft)):
        with pytest.raises(ValueError, match=r"draft|guess|behind"):
            backed.join(request, first, second, behind)


# ---- templates -------------------------------------------------------------------------------------------------------

Shape = tuple["Shape", ...]  # of a node: the subtrees of its children, by rank
RANKS = 3


def shapes(nodes: int, depth: int, *, left: int = RANKS) -> Iterator[Shape]:
    """Every way to hang `nodes` nodes below a node, in `depth` levels, as at most `left` children of it."""
    if nodes == 0:
        yield ()
    elif depth and left:
        for first in range(1, nodes + 1):
            for below in shapes(first - 1, depth - 1):
                for rest in shapes(nodes - first, depth, left=left - 1):
                    yield (below, *rest)


def expected(shape: Shape, rates: tuple[float, ...]) -> float:
    return sum(rate * (1 + expected(below, rates)) for rate, below in zip(rates, shape, strict=False))


def shape_of(template: TreeTemplate, node: int = -1) -> Shape:
    return tuple(shape_of(template, child) for child in children(template, node))


@pytest.mark.parametrize(("nodes", "depth"), [(5, 3), (1, 1), (3, 1), (4, 2), (6, 6), (7, 3)])
@pytest.mark.parametrize("seed", range(6))
def test_no_template_is_expected_to_be_accepted_more(nodes: int, depth: int, seed: int) -> None:
    rng = random.Random(seed)
    rates = tuple(rng.random() ** 2 for _ in range(RANKS))  # not falling with the rank, too
    every = {shape for size in range(nodes + 1) for shape in shapes(size, depth)}
    template = sequoia(rates, nodes, depth)
    depths = [0]
    for node, parent in enumerate(template):
        assert -1 <= parent < node
        depths.append(depths[parent + 1] + 1)
    assert depths == sorted(depths) and shape_of(template) in every
    assert expected(shape_of(template), rates) == pytest.approx(max(expected(shape, rates) for shape in every))


def test_the_rates_of_ranks_are_forgotten_with_the_requests_that_taught_them() -> None:
    class Learner(RankLearner, NgramDrafter):
        pass

    learner = Learner()
    learner.begin("s", [1, 2, 1, 2, 1], SamplingParams(), tenant="anna")
    assert learner.propose([DraftRequest("s", 5, 2, SamplingParams(), 0)])[0].tokens
    learner.accept("s", [2])
    learner.end("s")
    assert learner.rank_rates.get("anna").rates != RankRates().rates
    learner.forget()
    assert learner.rank_rates.get("anna").rates == RankRates().rates
