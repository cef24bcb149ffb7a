"""Templates: Sequoia's programme against every template that there is, and the shapes that are written down."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from wager.draft.trees import RankRates, TreeTemplate, of_paths, sequoia
from wager.errors import UsageError

Shape = tuple["Shape", ...]  # of a node: the subtrees of its children, by rank


RANKS = 3


def shapes(nodes: int, depth: int, ranks: int = RANKS, *, left: int | None = None) -> Iterator[Shape]:
    """Every way to hang `nodes` nodes below a node, in `depth` levels, at most `ranks` children each, and `left` more
    of this one."""
    left = ranks if left is None else left
    if nodes == 0:
        yield ()
    elif depth and left:
        for first in range(1, nodes + 1):
            for below in shapes(first - 1, depth - 1, ranks):
                for rest in shapes(nodes - first, depth, ranks, left=left - 1):
                    yield (below, *rest)


def expected(shape: Shape, rates: tuple[float, ...]) -> float:
    return sum(rate * (1 + expected(below, rates)) for rate, below in zip(rates, shape, strict=False))


def check(template: TreeTemplate) -> None:
    for node, parent in enumerate(template.parents):
        assert -1 <= parent < node
    for node in range(-1, len(template)):
        assert [template.ranks[child] for child in template.children(node)] == list(range(len(template.children(node))))
    assert list(template.depths) == sorted(template.depths)


@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (3, 1), (4, 2), (5, 3), (6, 6), (7, 3)])
@pytest.mark.parametrize("seed", range(6))
def test_no_template_is_expected_to_be_accepted_more(nodes: int, depth: int, seed: int) -> None:
    rng = random.Random(seed)
    rates = tuple(rng.random() ** 2 for _ in range(RANKS))  # not falling with the rank, too
    every = [shape for size in range(nodes + 1) for shape in shapes(size, depth)]
    best = max(expected(shape, rates) for shape in every)
    template = sequoia(rates, nodes, depth)
    check(template)
    assert len(template) <= nodes and max(template.depths) <= depth
    assert template.expected(rates) == pytest.approx(best)


def test_the_enumeration_has_every_template() -> None:
    """Without limits of depth and ranks they are the ordered trees, counted by Catalan's numbers."""
    assert [sum(1 for _ in shapes(n, 9, 9)) for n in range(6)] == [1, 1, 2, 5, 14, 42]


def test_sure_ranks_make_a_chain_and_doubtful_ones_a_fan() -> None:
    assert sequoia((0.95, 0.02), 4, 9) == of_paths([(0,) * depth for depth in range(1, 5)])
    assert sequoia((0.3, 0.29, 0.28), 3, 9) == of_paths([(0,), (1,), (2,)])
    assert sequoia((0.9, 0.0), 3, 2) == of_paths([(0,), (0, 0)]) and sequoia((0.0, 0.0), 3, 2) == TreeTemplate()


def test_templates_as_they_are_written() -> None:
    tree = of_paths([(0,), (0, 0), (1,), (0, 1), (0, 0, 0)])
    check(tree)
    assert (tree.parents, tree.ranks) == ((-1, -1, 0, 0, 2), (0, 1, 0, 1, 0)) and tree.depths == (1, 1, 2, 2, 3)
    with pytest.raises(UsageError, match=r"\(1, 0\)"):
        of_paths([(0,), (1, 0)])


def test_rates_of_ranks_are_what_was_seen() -> None:
    rates = RankRates(weight=4)
    for turn in range(4000):
        rates.learn(2, turn % 4 if turn % 4 < 2 else None)
    assert rates.rates[:2] == pytest.approx((0.25, 0.25), abs=0.01)
    assert rates.rates[2:] == pytest.approx(RankRates.PRIOR[2:], abs=0.01)
