"""Which guesses are worth their seconds: the published golden case, staircases, trees, and sorting against search."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wager.economics.admission import Going, Prices, best_count, keep, kept, select
from wager.types import Draft

# economics reference, section 11: conditional confidences of three requests, and two cost curves by rows of the step
CONFIDENCE = [[0.95, 0.90, 0.85], [0.60, 0.50, 0.40], [0.80, 0.30, 0.20]]
SMOOTH = [1.00, 1.04, 1.09, 1.15, 1.24, 1.36, 1.52, 1.72, 1.96, 2.24]
STAIRS = [1.00, 1.00, 1.40, 1.40, 1.40, 1.40, 2.00, 2.00, 2.00, 2.00]
SURVIVAL = np.cumprod(CONFIDENCE, axis=1)


def settle(cost: list[float]) -> tuple[list[int], float]:
    """Depths by request and throughput where the price of a second agrees with what a step brings for it."""
    seconds = np.array(cost)
    price = 3 / seconds[0]
    for _ in range(20):
        chosen = select([SURVIVAL], lambda count: seconds[: count + 1], price=price)
        price = (3 + chosen.gain) / seconds[chosen.count]
    return chosen.taken[0].sum(axis=1).tolist(), price


def test_the_golden_case_on_a_smooth_curve() -> None:
    depths, rate = settle(SMOOTH)
    assert depths == [3, 0, 1]
    assert rate == pytest.approx(5.1062, abs=1e-4)


def test_the_golden_case_on_a_staircase_goes_past_the_step_where_the_first_stop_would_end() -> None:
    depths, rate = settle(STAIRS)
    assert depths == [3, 1, 1]
    assert rate == pytest.approx(4.9512, abs=1e-4)
    ranked = np.sort(SURVIVAL.ravel())[::-1]
    rates = (3 + np.concatenate([[0], np.cumsum(ranked)])) / STAIRS
    first_stop = next(n for n in range(9) if rates[n + 1] < rates[n])
    assert first_stop == 1
    assert rates[first_stop] == pytest.approx(3.95, abs=1e-3)


chances = st.lists(st.lists(st.floats(0.01, 0.999), min_size=2, max_size=3), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(chances, st.integers(0, 10_000), st.floats(0.05, 5.0))
def test_the_selection_is_the_best_of_all_sets_of_beginnings(rates: list[list[float]], seed: int, price: float) -> None:
    width = max(map(len, rates))
    gains = np.zeros((len(rates), width))
    for row, chain in enumerate(rates):
        gains[row, : len(chain)] = np.cumprod(chain)
    steps = np.random.default_rng(seed).exponential(size=gains.size) * (np.arange(gains.size) % 3 == 0)
    seconds = np.concatenate([[0.0], np.cumsum(steps)])
    chosen = select([gains], lambda count: seconds[: count + 1], price=price)
    depths = chosen.taken[0].sum(axis=1)
    assert [bool(row[:depth].all()) for row, depth in zip(chosen.taken[0], depths, strict=True)] == [True] * len(rates)

    def profit(depths: tuple[int, ...]) -> float:
        gain = sum(gains[row, :depth].sum() for row, depth in enumerate(depths))
        return float(gain - price * seconds[sum(depths)])

    best = max(map(profit, product(*(range(len(chain) + 1) for chain in rates))))
    assert profit(tuple(depths.tolist())) == pytest.approx(best, abs=1e-9)


def test_guesses_of_several_groups_compete() -> None:
    one, two = np.array([[0.9, 0.8]]), np.array([[0.85, 0.1, 0.05]])
    chosen = select([one, two], lambda count: np.arange(count + 1) * 1.0, price=0.5)
    assert [mask.tolist() for mask in chosen.taken] == [[[True, True]], [[True, False, False]]]
    assert (chosen.count, chosen.gain) == (3, pytest.approx(2.55))


def test_nothing_is_taken_that_does_not_pay() -> None:
    assert best_count(np.array([0.4, 0.3]), np.array([0.0, 1.0, 2.0]), price=0.5) == 0
    assert best_count(np.array([]), np.array([0.0]), price=1.0) == 0


def chain(size: int, *, law: bool = False) -> Draft:
    scores = tuple(0.9 ** (node + 1) for node in range(size))
    rows = np.eye(size, 8) if law else None
    return Draft("r", tuple(range(10, 10 + size)), tuple(range(-1, size - 1)), scores, "d", rows)


def test_a_chain_keeps_a_beginning_with_its_scores_and_law() -> None:
    draft = keep(chain(4, law=True), [0, 1])
    assert (draft.tokens, draft.parents, len(draft.scores)) == ((10, 11), (-1, 0), 2)
    assert draft.law is not None
    assert draft.law.shape == (2, 8)


def test_a_tree_keeps_any_set_closed_under_parents_renumbered() -> None:
    tree = Draft("r", (1, 2, 3, 4, 5), (-1, -1, 0, 1, 3), (0.5, 0.4, 0.1, 0.3, 0.2), "d", np.eye(5, 8))
    draft = keep(tree, [1, 3, 4])
    assert (draft.tokens, draft.parents, draft.scores) == ((2, 4, 5), (-1, 0, 1), (0.4, 0.3, 0.2))
    assert draft.law is not None
    assert draft.law.argmax(axis=1).tolist() == [1, 3, 4]


def test_drafts_without_a_taken_guess_are_left_out() -> None:
    first, second = chain(3), Draft.chain("s", (1, 2), drafter="d")
    taken = np.array([[True, True, False], [False, False, False]])
    left = kept([first, second], taken)
    assert list(left) == ["r"]
    assert left["r"].tokens == (10, 11)
    assert kept([first], np.ones((1, 3), bool))["r"] is first


class Stairs:
    """Rows come in tiles of eight; a drafter `slow` takes a pass a depth, 2 ms and 0.1 ms a sequence; `block` one."""

    asked = 0

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        self.asked += 1
        return 1e-3 * -(-rows // 8) + 1e-6 * requests + 1e-9 * context_sum

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        if drafter == "block":
            return 4e-3 + 1e-4 * requests if depth else 0.0
        return depth * (2e-3 + 1e-4 * requests)


def test_curves_follow_the_staircase_and_are_asked_for_once() -> None:
    surface = Stairs()
    prices = Prices(surface)
    extra = prices.extra(6, 6, 1000, count=20)
    assert extra[:3] == pytest.approx([0.0, 0.0, 0.0])
    assert extra[3] == pytest.approx(1e-3)
    assert all(a <= b for a, b in pairwise(extra.tolist()))
    asked = surface.asked
    prices.extra(6, 6, 1010, count=12)
    assert surface.asked == asked
    assert prices.plain(6, 1000) == surface.seconds(6, 6, 1000)


@pytest.mark.parametrize("drafter", ["slow", "block"])
def test_what_each_sequence_adds_to_drafting_sums_to_the_passes(drafter: str) -> None:
    surface = Stairs()
    marginal = Prices(surface).drafting(drafter, 5, 3)
    assert marginal.shape == (5, 3)
    ragged = [3, 3, 1, 1, 1]  # five sequences draft once, two of them three times
    summed = sum(marginal[rank, :depth].sum() for rank, depth in enumerate(ragged))
    ask = surface.draft_seconds
    passes = ask(drafter, 5, 1) + ask(drafter, 2, 2) - ask(drafter, 2, 1) + ask(drafter, 2, 3) - ask(drafter, 2, 2)
    assert summed == pytest.approx(passes)


def test_a_second_is_worth_what_steps_lately_brought_by_size_of_batch() -> None:
    going = Going()
    assert going.factor(4) == 1.0
    for _ in range(50):
        going.learn(4, worth=8.0, plain=5.0)
    assert going.factor(4) == pytest.approx(1.6)
    assert going.factor(5) == pytest.approx(1.6), "sizes up to the next power of two are alike"
    assert going.factor(32) == 1.0
    going.learn(32, worth=1.0, plain=5.0)
    assert going.factor(32) == 1.0, "a second is never worth less than plain decoding makes of it"
