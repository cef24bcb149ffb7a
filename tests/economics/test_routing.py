"""How experts are chosen: distinct ones by formula against published tables, and popularity and locality measured from
recorded choices, against a plain recount, known routers and a published measurement.
"""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
from numpy.typing import NDArray

from wager.errors import UsageError
from wager.planner.routing import (
    ExpertRouting,
    MeasuredRouting,
    distinct_experts,
    experts_on_fullest_rank,
    fit_locality,
    measure_routing,
)

GOLDEN = """
256 6 | 6.00 11.86 23.17 44.24 80.84 136.15 199.89 243.70 255.41
256 8 | 8.00 15.75 30.53 57.42 101.96 163.31 222.44 251.60 255.92
128 8 | 8.00 15.50 29.12 51.62 82.42 111.77 125.94 127.97 128.00
128 4 | 4.00 7.88 15.27 28.71 50.98 81.66 111.22 125.80 127.96
32 4 | 4.00 7.50 13.24 21.00 28.22 31.55 31.99 32.00 32.00
384 8 | 8.00 15.83 31.01 59.52 109.82 188.23 284.19 358.06 382.25
384 6 | 6.00 11.91 23.44 45.46 85.53 152.01 243.85 332.85 377.19
"""


def test_distinct_experts() -> None:
    for line in GOLDEN.strip().splitlines():
        head, cells = line.split("|")
        count, active = (int(word) for word in head.split())
        for power, expected in enumerate(cells.split()):
            assert distinct_experts(count, active, 2**power) == pytest.approx(float(expected), abs=0.0051), line


def test_locality_reproduces_the_measured_run_within_two_per_cent() -> None:
    """Of Qwen3.6-35B-A3B, 8 of 256 experts: a run of T tokens chooses as many as T^0.79 unrelated ones by popularity,
    T^0.74 by uniform routing, whose exponent must absorb the skew."""
    run = {1: 8.00, 2: 13.27, 3: 17.81, 4: 21.85, 6: 29.07, 8: 35.42, 12: 46.18, 16: 55.05}
    uniform = ExpertRouting(locality=0.74)
    for tokens, expected in run.items():
        assert uniform.distinct_experts(256, 8, uniform.unrelated_tokens(tokens)) == pytest.approx(expected, rel=0.021)
    by_popularity = {1: 1, 2: 1.71, 3: 2.35, 4: 2.95, 6: 4.09, 8: 5.17, 12: 7.20, 16: 9.07}
    assert fit_locality(by_popularity) == pytest.approx(0.79, abs=0.006)
    assert fit_locality({t: np.log1p(-n / 256) / np.log1p(-8 / 256) for t, n in run.items()}) == pytest.approx(
        0.74, abs=0.006
    )


def test_bad_routing_is_named() -> None:
    with pytest.raises(UsageError, match=r"locality = 1\.5"):
        ExpertRouting(locality=1.5)
    with pytest.raises(UsageError, match="lists 2 experts; a layer has 3"):
        ExpertRouting(popularity=(0.5, 0.5)).distinct_experts(3, 1, 2)
    with pytest.raises(UsageError, match=r"sums to 1; a token chooses 2"):
        ExpertRouting(popularity=(0.5, 0.25, 0.25)).distinct_experts(3, 2, 1)
    with pytest.raises(UsageError, match="probability"):
        ExpertRouting(popularity=(2.0, 0.5))


def test_the_fullest_rank_by_enumeration() -> None:
    """Two ranks of two experts, each touched with probability a third: all sixteen outcomes."""
    share, expected = 1 / 3, 0.0
    for outcome in range(16):
        bits = [(outcome >> i) & 1 for i in range(4)]
        weight = math.prod(share if bit else 1 - share for bit in bits)
        expected += weight * max(sum(bits[:2]), sum(bits[2:]))
    assert experts_on_fullest_rank(2, share, 2) == pytest.approx(expected)
    assert experts_on_fullest_rank(16, 0.3, 1) == pytest.approx(4.8)
    assert 4.8 < experts_on_fullest_rank(16, 0.3, 8) < experts_on_fullest_rank(16, 0.3, 32) < 16
    assert experts_on_fullest_rank(16, 1.0, 32) == 16


Texts = list[NDArray[np.int32]]


def random_texts(
    lengths: list[int], *, layers: int, experts: int, active: int, stays: float = 0.0, skew: float = 0.0, seed: int = 1
) -> Texts:
    """Texts whose tokens choose at random, experts of lower ids more often with `skew`, or with probability `stays` as
    the token before in every layer."""
    rng = np.random.default_rng(seed)
    weights = np.exp(-skew * np.arange(experts))
    texts = []
    for length in lengths:
        text = np.zeros((length, layers, active), np.int32)
        for position in range(length):
            if position and rng.random() < stays:
                text[position] = text[position - 1]
                continue
            for layer in range(layers):
                chosen = rng.choice(experts, active, replace=False, p=weights / weights.sum())
                text[position, layer] = np.sort(chosen)
        texts.append(text)
    return texts


def runs_by_hand(texts: Texts, tokens: int) -> float:
    """Every run of consecutive tokens in every layer, as sets."""
    return fmean(
        len({int(expert) for row in text[start : start + tokens, layer] for expert in row})
        for text in texts
        for start in range(len(text) - tokens + 1)
        for layer in range(text.shape[1])
    )


def counts_of(routing: MeasuredRouting) -> dict[int, tuple[float | None, float | None]]:
    return {count.tokens: (count.run, count.unrelated) for count in routing.counts}


def test_a_plain_recount_of_runs_and_popularity() -> None:
    texts = random_texts([40, 7, 1, 25], layers=3, experts=12, active=2, stays=0.3, skew=0.2)
    routing = measure_routing(texts, 12)
    assert (routing.texts, routing.positions) == (4, 73)
    for tokens, (run, _) in counts_of(routing).items():
        assert run == pytest.approx(runs_by_hand([text for text in texts if len(text) >= tokens], tokens))
    for layer in range(3):
        for expert in range(12):
            chosen = sum(expert in row for text in texts for row in text[:, layer].tolist())
            assert routing.layers[layer][expert] == pytest.approx(chosen / 73)
    ranked = [sorted(layer, reverse=True) for layer in routing.layers]
    assert routing.popularity == pytest.approx([fmean(rank) for rank in zip(*ranked, strict=True)])
    assert sum(routing.popularity) == pytest.approx(2)
    assert all(a >= b for a, b in pairwise(routing.popularity))


def test_unrelated_tokens_by_enumeration() -> None:
    """Two texts, one and two tokens: each pair of positions by hand; no group of three texts exists."""
    one = np.array([[[0, 1]]], np.int32)
    two = np.array([[[0, 1]], [[2, 3]]], np.int32)
    routing = measure_routing([one, two], 4)
    counted = counts_of(routing)
    assert counted[2][1] == pytest.approx((2 + 4) / 2, abs=0.1)
    assert counted[2][0] == 4  # the only run
    assert counted[3] == (None, None)


def test_a_router_that_often_repeats_itself() -> None:
    """Where a token repeats the choice before it with probability r, a run of T has 1 + Binomial(T - 1, 1 - r)
    independent choices; tokens of different texts are as unrelated as before."""
    stays, experts, active = 0.5, 24, 3
    logs = []
    texts = random_texts([500] * 20, layers=2, experts=experts, active=active, stays=stays)
    routing = measure_routing(texts, experts)
    for count in routing.counts:
        fresh = count.tokens - 1
        share = 1 - active / experts
        # E share^n over n = 1 + Binomial(fresh, 1 - stays)
        expected = experts * (1 - share * (stays + (1 - stays) * share) ** fresh)
        assert count.run == pytest.approx(expected, rel=0.02)
        assert count.unrelated == pytest.approx(distinct_experts(experts, active, count.tokens), rel=0.02)
        equal = np.log1p(-expected / experts) / np.log1p(-active / experts)
        logs.append((np.log(count.tokens), np.log(equal)))
    x, y = np.array(logs).T
    assert routing.locality == pytest.approx(np.linalg.lstsq(x[:, None], y, rcond=None)[0][0], abs=0.02)
    assert routing.expected_in_run(8) == pytest.approx(routing.counts[5].run, rel=0.05)


def test_what_cannot_be_measured_is_said() -> None:
    with pytest.raises(UsageError, match="No text has two tokens"):
        measure_routing(random_texts([1, 1], layers=1, experts=4, active=1), 4)
    everything = measure_routing(random_texts([9, 9], layers=1, experts=2, active=2), 2)
    assert everything.locality is None
    assert everything.expected_in_run(4) == pytest.approx(2)
    assert measure_routing(random_texts([9, 9], layers=1, experts=64, active=2), 64).is_short
