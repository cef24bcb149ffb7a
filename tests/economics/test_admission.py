"""Which draft tokens are worth their seconds: the published golden case, staircases, trees, and search as a check."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wager.economics.acceptance import AcceptanceModel
from wager.economics.latency import LatencyCache, LatencyModel
from wager.economics.policy.base import draft_selector
from wager.types import Draft

# economics reference, section 11: conditional confidences of three requests, and two cost curves by rows of the step
CONFIDENCE = [[0.95, 0.90, 0.85], [0.60, 0.50, 0.40], [0.80, 0.30, 0.20]]
SMOOTH = [1.00, 1.04, 1.09, 1.15, 1.24, 1.36, 1.52, 1.72, 1.96, 2.24]
STAIRS = [1.00, 1.00, 1.40, 1.40, 1.40, 1.40, 2.00, 2.00, 2.00, 2.00]
SURVIVAL = np.cumprod(CONFIDENCE, axis=1)


def judged(chains: Sequence[Sequence[float]], seconds: list[float], *, goodput: float) -> tuple[list[int], float]:
    """How many tokens of each chain are taken, of which these survive, and their gain."""
    drafts = {str(i): Draft.chain("r", range(len(each)), drafter="d", scores=each) for i, each in enumerate(chains)}
    model = AcceptanceModel()  # which takes confidences at their word
    kept, _, gain, _, _ = draft_selector.select(drafts, [model], None, None, seconds, 0, goodput, 10_000)
    assert all(draft.is_chain for draft in kept.values()), "prefixes"
    return [len(kept.get(seq_id, ())) for seq_id in drafts], gain


def consistent(cost: list[float]) -> tuple[list[int], float]:
    """Depths by request, and the goodput that equals what a step of these depths yields."""
    goodput = 3 / cost[0]
    for _ in range(20):
        depths, gain = judged(SURVIVAL.tolist(), cost, goodput=goodput)
        goodput = (3 + gain) / cost[sum(depths)]
    return depths, goodput


def test_the_golden_cases_on_a_smooth_curve_and_past_the_step_where_the_first_stop_would_end() -> None:
    for curve, expected, goodput in ((SMOOTH, [3, 0, 1], 5.1062), (STAIRS, [3, 1, 1], 4.9512)):
        depths, rate = consistent(curve)
        assert depths == expected
        assert rate == pytest.approx(goodput, abs=1e-4)
    rates = (3 + np.concatenate([[0], np.cumsum(np.sort(SURVIVAL.ravel())[::-1])])) / STAIRS
    assert next(n for n in range(9) if rates[n + 1] < rates[n]) == 1, "the first stop, far from the best"
    assert rates[1] == pytest.approx(3.95, abs=1e-3)


acceptance_rates = st.lists(st.lists(st.floats(0.01, 0.999), min_size=2, max_size=3), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(acceptance_rates, st.integers(0, 10_000), st.floats(0.05, 5.0))
def test_the_selection_is_the_best_of_all_sets_of_prefixes(rates: list[list[float]], seed: int, goodput: float) -> None:
    chains = [np.cumprod(chain).tolist() for chain in rates]
    size = sum(map(len, chains))
    steps = np.random.default_rng(seed).exponential(size=size) * (np.arange(size) % 3 == 0)
    seconds = (1.0 + np.concatenate([[0.0], np.cumsum(steps)])).tolist()

    def profit(depths: Sequence[int]) -> float:
        gain = sum(sum(chain[:depth]) for chain, depth in zip(chains, depths, strict=True))
        return float(gain - goodput * seconds[sum(depths)])

    best = max(map(profit, product(*(range(len(chain) + 1) for chain in rates))))
    assert profit(judged(chains, seconds, goodput=goodput)[0]) == pytest.approx(best, abs=1e-9)


def test_nothing_is_taken_that_does_not_pay_or_has_no_gain() -> None:
    assert judged([[0.4, 0.3]], [0.0, 1.0, 2.0], goodput=0.5)[0] == [0]
    assert judged([], [0.0], goodput=1.0)[0] == []
    assert judged([[0.4, 0.0]], [1.0, 1.0, 1.0], goodput=1.0)[0] == [1]


def test_a_tree_keeps_any_set_closed_under_parents_renumbered() -> None:
    tree = Draft("r", (1, 2, 3, 4, 5), (-1, -1, 0, 1, 3), (0.5, 0.4, 0.1, 0.3, 0.2), "d", np.eye(5, 8))
    draft = draft_selector.keep(tree, [1, 3, 4])
    assert (draft.tokens, draft.parents, draft.scores) == ((2, 4, 5), (-1, 0, 1), (0.4, 0.3, 0.2))
    assert draft.draft_probs is not None
    assert draft.draft_probs.argmax(axis=1).tolist() == [1, 3, 4]


class Stairs(LatencyModel):
    """Rows come in tiles of eight; a drafter `slow` takes a pass a depth, 2 ms and 0.1 ms a sequence; `block` one."""

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        return 1e-3 * -(-rows // 8) + 1e-6 * requests + 1e-9 * context_sum

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        if drafter == "block":
            return 4e-3 + 1e-4 * requests if depth else 0.0
        return depth * (2e-3 + 1e-4 * requests)


@pytest.mark.parametrize("drafter", ["slow", "block"])
def test_what_each_sequence_adds_to_drafting_sums_to_the_passes(drafter: str) -> None:
    surface = Stairs()
    marginal = np.array(LatencyCache(surface).marginal_draft_seconds(drafter, 5, 3))
    assert marginal.shape == (5, 3)
    ragged = [3, 3, 1, 1, 1]  # five sequences draft once, two of them three times
    summed = sum(marginal[rank, :depth].sum() for rank, depth in enumerate(ragged))
    of = surface.draft_seconds
    passes = of(drafter, 5, 1) + of(drafter, 2, 2) - of(drafter, 2, 1) + of(drafter, 2, 3) - of(drafter, 2, 2)
    assert summed == pytest.approx(passes)
    assert LatencyCache(surface).ragged_draft_seconds(drafter, [1, 3, 1, 3, 1]) == pytest.approx(passes)
