"""Best depth and speed-up of the published charts, every cell, and the rules that find them."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from economics.published import B200_CHARTS, FLAT_ATTENTION, REAL_LAYERS
from wager.arch import ModelSpec
from wager.economics.acceptance import survival, tokens_per_round
from wager.economics.surface import LatencySurface
from wager.errors import UsageError
from wager.planner.cost import Cluster, CostModel
from wager.planner.drafting import fractional_cost
from wager.planner.plan import TreeDrafts, best_outcome, break_even_acceptance, depth_outcomes
from wager.planner.routing import ExpertRouting

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
MOST = 64

FLAT_ROWS = """
.60 4096 .10 | 1 1.071 | 0 | 0 | 0 | 0 | 2 1.043 | 3 1.297 | 2 1.415 | 2 1.327 | 1 1.212 | 1 1.110 | 0
.75 4096 .10 | 1 1.171 | 1 1.064 | 0 | 0 | 3 1.028 | 5 1.352 | 4 1.668 | 3 1.743 | 3 1.584 | 2 1.380 | 1 1.214 | 1 1.041
.85 4096 .10 | 2 1.299 | 2 1.135 | 1 1.053 | 3 1.047 | 9 1.352 | 8 1.799 | 6 2.122 | 5 2.144 | 4 1.877 | 3 1.569 | 2 1.328 | 1 1.100
.90 4096 .10 | 3 1.399 | 3 1.200 | 3 1.107 | 14 1.259 | 14 1.710 | 11 2.199 | 9 2.513 | 7 2.471 | 6 2.108 | 4 1.716 | 3 1.414 | 1 1.130
.60 32768 .10 | 1 1.053 | 0 | 0 | 0 | 0 | 0 | 1 1.093 | 1 1.121 | 1 1.047 | 0 | 0 | 0
.75 32768 .10 | 1 1.152 | 1 1.052 | 0 | 0 | 1 1.008 | 2 1.119 | 2 1.246 | 1 1.226 | 1 1.145 | 1 1.068 | 1 1.018 | 0
.85 32768 .10 | 2 1.260 | 1 1.112 | 1 1.048 | 1 1.032 | 5 1.134 | 5 1.338 | 3 1.433 | 2 1.358 | 1 1.211 | 1 1.129 | 1 1.076 | 1 1.030
.75 4096 .02 | 2 1.270 | 1 1.118 | 1 1.044 | 1 1.025 | 7 1.170 | 8 1.676 | 6 2.095 | 5 2.140 | 4 1.842 | 3 1.527 | 2 1.301 | 1 1.093
.75 4096 0 | 2 1.298 | 1 1.133 | 1 1.057 | 1 1.037 | 9 1.234 | 9 1.809 | 7 2.269 | 5 2.288 | 4 1.936 | 3 1.580 | 2 1.331 | 1 1.106
"""  # noqa: E501

MIXED_ROWS = """
.75 4096 1 | 1 1.174 | 1 1.066 | 0 | 0 | 4 1.043 | 6 1.426 | 5 1.825 | 4 2.013 | 4 1.956 | 3 1.795 | 3 1.605 | 2 1.172
.75 32768 1 | 1 1.175 | 1 1.067 | 0 | 0 | 4 1.045 | 6 1.422 | 5 1.815 | 4 1.996 | 4 1.928 | 3 1.769 | 3 1.589 | 2 1.247
.75 262144 1 | 2 1.181 | 1 1.076 | 1 1.012 | 0 | 3 1.067 | 5 1.421 | 4 1.788 | 4 1.943 | 3 1.874 | 3 1.767 | 3 1.666 | 2 1.517
.60 4096 .79 | 1 1.154 | 1 1.068 | 1 1.010 | 0 | 1 1.018 | 2 1.127 | 3 1.390 | 3 1.562 | 3 1.535 | 2 1.446 | 2 1.323 | 1 1.067
.75 4096 .79 | 2 1.331 | 2 1.190 | 2 1.107 | 2 1.092 | 3 1.171 | 5 1.455 | 5 1.827 | 4 2.013 | 4 1.956 | 3 1.795 | 3 1.605 | 2 1.172
.85 4096 .79 | 4 1.555 | 3 1.354 | 3 1.252 | 5 1.267 | 8 1.493 | 9 1.953 | 7 2.390 | 7 2.574 | 6 2.455 | 5 2.204 | 4 1.904 | 2 1.304
.75 262144 .79 | 2 1.337 | 2 1.202 | 2 1.123 | 2 1.112 | 3 1.194 | 5 1.455 | 4 1.793 | 4 1.943 | 3 1.874 | 3 1.767 | 3 1.666 | 2 1.517
"""  # noqa: E501

Row = tuple[float, int, float, list[tuple[int, float]]]


def parse(table: str) -> list[Row]:
    """Acceptance, context, the third figure, and (depth, speed-up) for each batch."""
    rows = []
    for line in table.strip().splitlines():
        head, *cells = line.split("|")
        acceptance, context, third = head.split()
        pairs = [cell.split() for cell in cells]
        found = [(int(pair[0]), float(pair[1]) if len(pair) > 1 else 1.0) for pair in pairs]
        rows.append((float(acceptance), int(context), float(third), found))
    return rows


def curves(
    model: ModelSpec, *, batch: int, context: int, share: float, locality: float
) -> tuple[list[float], list[float]]:
    cost = CostModel(model, Cluster(B200_CHARTS), routing=ExpertRouting(locality=locality))
    drafter = fractional_cost(cost, share)
    steps = [cost.seconds(context, depth + 1, batch=batch) for depth in range(MOST + 1)]
    return steps, [drafter.seconds(batch, depth, context=context) for depth in range(MOST + 1)]


def check(model: ModelSpec, row: Row, *, share: float, locality: float) -> None:
    acceptance, context, _, expected = row
    for batch, (depth, speedup) in zip(BATCHES, expected, strict=True):
        steps, drafts = curves(model, batch=batch, context=context, share=share, locality=locality)
        found = best_outcome(depth_outcomes(steps, drafts, survival(acceptance, MOST)))
        assert (found.depth, round(found.speedup, 3)) == (depth, speedup), f"batch {batch}"


@pytest.mark.parametrize("row", parse(FLAT_ROWS), ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}")
def test_the_published_cost_model(row: Row) -> None:
    check(FLAT_ATTENTION, row, share=row[2], locality=1.0)


@pytest.mark.parametrize("row", parse(MIXED_ROWS), ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}")
def test_the_same_with_the_real_layers_and_with_locality(row: Row) -> None:
    check(REAL_LAYERS, row, share=0.10, locality=row[2])


TOKENS = """
.60 1.6000 1.9600 2.1760 2.3056 2.3834 2.4580 2.4748 2.4993
.75 1.7500 2.3125 2.7344 3.0508 3.2881 3.5995 3.6997 3.9599
.85 1.8500 2.5725 3.1866 3.7086 4.1523 4.8501 5.1226 6.1717
.90 1.9000 2.7100 3.4390 4.0951 4.6856 5.6953 6.1258 8.1470
"""


def test_tokens_per_round() -> None:
    for line in TOKENS.strip().splitlines():
        acceptance, *expected = (float(word) for word in line.split())
        for depth, tokens in zip((1, 2, 3, 4, 5, 7, 8, 15), expected, strict=True):
            assert tokens_per_round(survival(acceptance, depth)) == pytest.approx(tokens, abs=5e-5)
    assert tokens_per_round(survival(1.0, 5)) == 6


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), max_size=8), st.integers(0, 12))
def test_survival_never_rises(rates: list[float], depth: int) -> None:
    alive = survival(rates, depth)
    assert len(alive) == depth
    assert all(later <= earlier for earlier, later in zip(alive, alive[1:], strict=False))
    assert all(value == 0 for value in alive[len(rates) :])


def test_an_acceptance_beyond_one_is_refused() -> None:
    with pytest.raises(UsageError, match=r"acceptance of 1\.2"):
        survival(1.2, 3)


# ---- the CPU: step times that rise in jumps ------------------------------------------------------------------------

ROWS = (1, 2, 4, 8, 12, 16)
KERNEL = LatencySurface(ROWS, [5.25e-3, 5.79e-3, 6.26e-3, 6.87e-3, 9.9e-3, 11.3e-3])
TORCH_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
TORCH = LatencySurface(TORCH_ROWS, [10.3e-3, 10.7e-3, 10.9e-3, 12.1e-3, 14.2e-3, 18.6e-3, 28.1e-3, 42.3e-3])


def measured(surface: LatencySurface, *, batch: int, most: int, share: float = 0.0) -> tuple[list[float], list[float]]:
    steps = [surface.seconds(batch * (depth + 1), batch, 0) for depth in range(most + 1)]
    return steps, [share * depth * steps[0] for depth in range(most + 1)]


@pytest.mark.parametrize(
    ("surface", "acceptance", "batch", "expected"),
    [
        (KERNEL, 0.80, 1, {1: 1.632, 3: 2.476, 7: 3.180, 11: 2.469, 15: 2.258}),
        (KERNEL, 0.90, 1, {1: 1.723, 3: 2.884, 7: 4.352, 11: 3.805, 15: 3.785}),
        (TORCH, 0.60, 1, {1: 1.540, 3: 2.056, 7: 2.092, 15: 1.813, 31: 1.384}),
        (TORCH, 0.75, 1, {1: 1.685, 3: 2.584, 7: 3.064, 15: 2.872, 31: 2.215}),
        (TORCH, 0.90, 1, {1: 1.829, 3: 3.250, 7: 4.848, 15: 5.909, 31: 5.347}),
        (TORCH, 0.60, 16, {1: 1.222, 3: 1.100, 7: 0.825}),
        (TORCH, 0.75, 16, {1: 1.336, 3: 1.382, 7: 1.208}),
    ],
)
def test_free_drafts_at_measured_widths(
    surface: LatencySurface, acceptance: float, batch: int, expected: dict[int, float]
) -> None:
    steps, drafts = measured(surface, batch=batch, most=max(expected))
    found = depth_outcomes(steps, drafts, survival(acceptance, max(expected)))
    for depth, speedup in expected.items():
        assert found[depth].speedup == pytest.approx(speedup, abs=1.1e-3)


@settings(deadline=None)
@given(st.floats(0.0, 0.99), st.integers(1, 15))
def test_break_even_is_where_the_speed_up_is_one(share: float, depth: int) -> None:
    steps, drafts = measured(TORCH, batch=8, most=depth, share=share)
    rate = break_even_acceptance(steps, drafts, depth)
    certain = depth_outcomes(steps, drafts, survival(1.0, depth))[depth].speedup
    if rate is None:
        assert certain < 1
        return
    at = depth_outcomes(steps, drafts, survival(rate, depth))[depth].speedup
    assert at == pytest.approx(1, abs=1e-6) or (rate == 0 and at >= 1)


# ---- trees -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [(0.7, 0.5, 0.6), (0.1, 0.9, 0.2)])
def test_no_tree_of_so_many_nodes_yields_more_tokens(rates: tuple[float, ...]) -> None:
    """Of all trees of up to three children and levels: a node is its ranks from the root on, and needs its parent and
    elder sibling."""
    sibling = 0.3
    paths = [path for level in range(1, 4) for path in product(range(3), repeat=level)]

    def chance(path: tuple[int, ...]) -> float:
        ranks = zip(rates, path, strict=False)
        return prod(a if rank == 0 else (1 - a) * (1 - sibling) ** (rank - 1) * sibling for a, rank in ranks)

    trees: set[frozenset[tuple[int, ...]]] = {frozenset()}
    for nodes in range(1, 6):
        trees = {
            tree | {path}
            for tree in trees
            for path in paths
            if path not in tree
            and (len(path) == 1 or path[:-1] in tree)
            and (path[-1] == 0 or (*path[:-1], path[-1] - 1) in tree)
        }
        best = max(sum(map(chance, tree)) for tree in trees)
        found = TreeDrafts(3, sibling).survival(rates, nodes)
        assert len(found) == nodes
        if rates[0] > sibling:  # else an elder sibling that is right less often stands before a younger one
            assert sum(found) == pytest.approx(best)
        assert sum(found) <= best + 1e-12
