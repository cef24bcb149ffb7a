"""Merged trees; and templates of greatest expected acceptance, against every one that there is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from wager.draft.trees import TokenTree, TreeTemplate, children, merge, sequoia

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


def test_merged_trees_share_what_they_have_in_common() -> None:
    chain = rebuilt([(1,), (1, 2), (1, 2, 3)], [0.8, 0.5, 0.1])
    other = rebuilt([(1,), (4,), (1, 5), (4, 6)], [0.6, 0.3, 0.4, 0.2])
    tree = merge([chain, other], 99)
    values = dict(zip(paths_of(tree), tree.scores, strict=True))
    assert values == {(1,): 0.8, (1, 2): 0.5, (1, 5): 0.4, (4,): 0.3, (4, 6): 0.2, (1, 2, 3): 0.1}
    assert paths_of(merge([chain, other], 4)) == [(1,), (1, 2), (1, 5), (4,)]
    assert merge([], 4) == TokenTree() and merge([chain], 99) == chain


def test_a_merged_node_is_never_likelier_than_its_parent() -> None:
    """One drafter doubts the first token, the other is sure of what follows it."""
    doubting, sure = rebuilt([(1,), (2,)], [0.2, 0.1]), rebuilt([(1,), (1, 3)], [0.1, 0.1])
    rng = random.Random(3)
    for _ in range(50):
        some = []
        for _ in range(3):
            paths = sorted({path[:depth] for path in rng.sample(PATHS, 2) for depth in (1, 2, 3)}, key=len)
            some.append(rebuilt(paths, [rng.random() ** 2 for _ in paths]))
        tree = merge([doubting, sure, *some], rng.randint(1, 9))
        assert all(p < 0 or tree.scores[p] >= s for p, s in zip(tree.parents, tree.scores, strict=True))
        paths_of(tree)


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
