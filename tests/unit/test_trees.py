"""Trees and templates of greatest expected acceptance: against every one that there is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from wager.draft.guessing import Candidate
from wager.draft.trees import GrowingTree, TokenTree, TreeTemplate, best_first, children, merge, sequoia

Path = tuple[int, ...]
VOCAB, DEPTH = 3, 3


class Chances:
    """Probabilities of tokens after every path, drawn once; those of a path sum to 1 at most."""

    def __init__(self, seed: int, *, by_depth: bool = False) -> None:
        self._seed, self._by_depth = seed, by_depth
        self.asked: list[Path] = []

    def __call__(self, path: Path) -> list[Candidate]:
        rng = random.Random(f"{self._seed}/{len(path) if self._by_depth else path}")
        weights = [rng.random() ** 3 for _ in range(VOCAB)]
        total = sum(weights) * rng.uniform(1.0, 1.3)
        return sorted([Candidate(v, w / total) for v, w in enumerate(weights)], key=lambda each: -each.probability)

    def counted(self, path: Path) -> list[Candidate]:
        self.asked.append(path)
        return self(path)

    def value(self, path: Path) -> float:
        value = 1.0
        for end, token in enumerate(path):
            value *= next(each.probability for each in self(path[:end]) if each.token == token)
        return value


PATHS = [path for depth in range(1, DEPTH + 1) for path in itertools.product(range(VOCAB), repeat=depth)]


def connected(size: int) -> Iterator[tuple[Path, ...]]:
    """Every set of `size` paths that has the beginning of each of its paths."""
    for paths in itertools.combinations(PATHS, size):
        held = {(), *paths}
        if all(path[:-1] in held for path in paths):
            yield paths


TREES = {size: list(connected(size)) for size in (1, 2, 3, 4)}


def paths_of(tree: TokenTree) -> list[Path]:
    paths: list[Path] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        assert -1 <= parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    return paths


def check(tree: TokenTree, chances: Chances) -> None:
    assert list(tree.scores) == pytest.approx([chances.value(path) for path in paths_of(tree)])


def grown(chances: Chances, nodes: int, *, min_survival: float = 0.0) -> tuple[TokenTree, int]:
    """The tree, and the levels it took."""
    tree, levels = GrowingTree(nodes, min_survival=min_survival), 0
    while levels < DEPTH and (frontier := tree.expandable(99)):
        found = []
        for node in frontier:
            found.append((node, chances(tuple(tree.tokens[each] for each in tree.path(node)))))
        tree.extend(found)
        levels += 1
    return tree.best(), levels


@pytest.mark.parametrize("nodes", TREES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("by_depth", [False, True])
def test_no_tree_is_expected_to_be_accepted_more(nodes: int, seed: int, by_depth: bool) -> None:
    chances = Chances(seed, by_depth=by_depth)
    best = max(sum(chances.value(path) for path in paths) for paths in TREES[nodes])
    tree = best_first(chances.counted, nodes, max_depth=DEPTH)
    assert len(set(chances.asked)) == len(chances.asked) <= nodes
    for found in (tree, grown(chances, nodes)[0]):
        check(found, chances)
        assert sum(found.scores) == pytest.approx(best) and len(found.tokens) == nodes


def test_growing_stops_when_no_level_can_improve_the_tree() -> None:
    sure, levels = 0, []
    for seed in range(40):
        chances = Chances(seed)
        tree, taken = grown(chances, 3)
        levels.append(taken)
        deepest = max(map(len, paths_of(tree)))
        assert deepest <= taken
        sure += taken < DEPTH
    assert sure > 5 and len(set(levels)) > 1


@pytest.mark.parametrize("seed", range(3))
def test_unlikely_nodes_are_neither_kept_nor_expanded(seed: int) -> None:
    chances, floor = Chances(seed), 0.2
    expected = {path for path in PATHS if chances.value(path) >= floor}
    tree = best_first(chances, 99, max_depth=DEPTH, min_survival=floor)
    assert set(paths_of(tree)) == expected
    by_levels, levels = grown(chances, 99, min_survival=floor)
    best = max(PATHS, key=chances.value)
    assert set(paths_of(by_levels)) == (expected or {best})
    assert levels <= max(map(len, expected), default=0) + 1


def test_nothing_is_asked_where_there_is_no_room() -> None:
    chances = Chances(0)
    assert best_first(chances.counted, 0) == TokenTree() and best_first(chances.counted, 5, max_depth=0) == TokenTree()
    assert chances.asked == [] and GrowingTree(0).expandable(4) == [] and GrowingTree(0).best() == TokenTree()
    assert best_first(lambda path: [], 5) == TokenTree()


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
        some = [rebuilt(p, [rng.random() ** 2 for _ in p]) for p in rng.sample(TREES[4], 3)]
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


def test_sure_ranks_make_a_chain_and_doubtful_ones_a_fan() -> None:
    assert sequoia((0.95, 0.02), 4, 9) == (-1, 0, 1, 2) and sequoia((0.3, 0.29, 0.28), 3, 9) == (-1, -1, -1)
    assert sequoia((0.9, 0.0), 3, 2) == (-1, 0) and sequoia((0.0, 0.0), 3, 2) == ()
