"""Distinct experts: golden counts, marginal bytes, knees, popularity and locality."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wager.errors import UsageError
from wager.planner.devices import DEVICES
from wager.planner.routing import ExpertRouting, distinct_by_popularity, distinct_experts, experts_on_fullest_rank
from wager.simulation.latency import distinct_with_replacement

LOCALITY = 0.79
"""Measured exponent of one sequence's run: T tokens in a row touch as many experts as T^0.79 unrelated ones (by
popularity, Qwen3.6-35B-A3B). With uniform popularity 0.74 fits the same measurement, since it must absorb the skew."""

GOLDEN = """
256 6 | 6.00 11.86 23.17 44.24 80.84 136.15 199.89 243.70 255.41
256 8 | 8.00 15.75 30.53 57.42 101.96 163.31 222.44 251.60 255.92
128 8 | 8.00 15.50 29.12 51.62 82.42 111.77 125.94 127.97 128.00
128 4 | 4.00 7.88 15.27 28.71 50.98 81.66 111.22 125.80 127.96
32 4 | 4.00 7.50 13.24 21.00 28.22 31.55 31.99 32.00 32.00
384 8 | 8.00 15.83 31.01 59.52 109.82 188.23 284.19 358.06 382.25
384 6 | 6.00 11.91 23.44 45.46 85.53 152.01 243.85 332.85 377.19
"""


@pytest.mark.parametrize("line", GOLDEN.strip().splitlines(), ids=lambda line: line.split("|")[0].strip())
def test_distinct_experts(line: str) -> None:
    head, cells = line.split("|")
    count, active = (int(word) for word in head.split())
    for power, expected in enumerate(cells.split()):
        assert distinct_experts(count, active, 2**power) == pytest.approx(float(expected), abs=0.0051)


@settings(deadline=None)
@given(st.integers(1, 300), st.data())
def test_distinct_experts_lie_between_one_tokens_and_all(count: int, data: st.DataObject) -> None:
    active = data.draw(st.integers(1, count))
    tokens = data.draw(st.floats(1, 1e5))
    found = distinct_experts(count, active, tokens)
    assert active - 1e-9 <= found <= count + 1e-9
    assert found <= active * tokens + 1e-6
    assert distinct_with_replacement(count, active, tokens) <= found + 1e-9 * count
    assert distinct_by_popularity([active / count] * count, tokens) == pytest.approx(found, rel=1e-6)


def test_with_replacement_gives_a_token_fewer_experts_than_it_picks() -> None:
    plotted = {1: 7.89, 2: 15.54, 3: 22.95, 4: 30.14, 6: 43.85, 8: 56.72, 12: 80.18, 16: 100.88}
    for tokens, expected in plotted.items():
        assert distinct_with_replacement(256, 8, tokens) == pytest.approx(expected, abs=0.0051)


def marginal_bytes(count: int, active: int, shared: int, tokens: float) -> float:
    """d log bytes / d log tokens of an expert layer: t A'(t) / (A(t) + s), by finite difference."""
    before, after = (distinct_experts(count, active, each) + shared for each in (tokens, tokens * (1 + 1e-6)))
    return math.log(after / before) / math.log1p(1e-6)


def test_the_marginal_bytes_of_a_token() -> None:
    golden = {
        1: 0.847,
        2: 0.901,
        4: 0.914,
        8: 0.888,
        16: 0.812,
        32: 0.663,
        43: 0.572,
        64: 0.424,
        128: 0.153,
        256: 0.014,
    }
    for tokens, expected in golden.items():
        assert marginal_bytes(256, 6, 1, tokens) == pytest.approx(expected, abs=5.1e-4)
    largest = max((marginal_bytes(256, 6, 1, t / 10), t / 10) for t in range(10, 100))
    assert largest[0] == pytest.approx(0.914, abs=5e-4)
    assert largest[1] == pytest.approx(3.6, abs=0.11)


def test_intensity_of_an_expert_layer() -> None:
    golden = {1: 3.77, 2: 4.11, 8: 4.67, 43: 6.90, 128: 13.82, 512: 52.62, 4096: 421.0}
    for tokens, expected in golden.items():
        found = 2 * tokens * 7 / (0.53 * (distinct_experts(256, 6, tokens) + 1))
        assert found == pytest.approx(expected, rel=1.1e-3)


def test_tokens_per_active_expert() -> None:
    for tokens, expected in {1: 1, 8: 1.1146, 32: 1.5675, 64: 2.3017, 128: 4.0699}.items():
        assert tokens / 32 / (1 - (31 / 32) ** tokens) == pytest.approx(expected, abs=5.1e-5)
        assert 8 * tokens / distinct_experts(256, 8, tokens) == pytest.approx(expected, abs=5.1e-5)


def knee(count: int, active: int, shared: int, *, ridge: float, bytes_each: float) -> float:
    """Tokens at which an expert layer turns compute-bound: (E + s) b R / (2 (k + s)), R in FLOPs per byte."""
    return (count + shared) * bytes_each * ridge / (2 * (active + shared))


TOUCHED = """
32 4 0 | 5.2 22.4 | 2250 2385 1649 437
128 8 0 | 10.7 46.4 | 4500 4770 3298 874
128 4 0 | 21.8 94.4 | 9000 9540 6597 1748
256 8 1 | 21.8 94.4 | 8031 8513 5887 1560
256 6 1 | 29.2 126.3 | 10326 10945 7568 2006
384 8 1 | 32.9 142.3 | 12031 12753 8818 2337
384 6 1 | 44.0 190.2 | 15469 16397 11338 3005
"""


@pytest.mark.parametrize("line", TOUCHED.strip().splitlines(), ids=lambda line: line.split("|")[0].strip())
def test_half_and_nearly_all_experts_and_the_knees(line: str) -> None:
    head, shares, knees = (cell.split() for cell in line.split("|"))
    count, active, shared = (int(word) for word in head)
    for share, word in zip((0.5, 0.95), shares, strict=True):
        before, after = (distinct_experts(count, active, float(word) + by) / count for by in (-0.0501, 0.0501))
        assert before <= share <= after
    b200, h200 = DEVICES["B200"], DEVICES["H200"]
    found = [
        knee(count, active, shared, ridge=b200.ridge("fp8"), bytes_each=1),
        knee(count, active, shared, ridge=b200.ridge("fp4"), bytes_each=0.53),
        knee(count, active, shared, ridge=h200.ridge("fp8"), bytes_each=1),
        knee(count, active, shared, ridge=h200.ridge("fp4"), bytes_each=0.53),  # done as bf16
    ]
    assert found == pytest.approx([float(word) for word in knees], abs=0.7)
    assert knee(count, active, shared, ridge=b200.ridge("bf16"), bytes_each=2) == pytest.approx(found[0])


def test_locality_reproduces_the_measured_run_within_two_per_cent() -> None:
    """A run of T tokens against unrelated ones: width at T^0.79 by popularity; or uniform with 0.74."""
    run = {1: 8.00, 2: 13.27, 3: 17.81, 4: 21.85, 6: 29.07, 8: 35.42, 12: 46.18, 16: 55.05}
    uniform = ExpertRouting(locality=0.74)
    for tokens, expected in run.items():
        assert uniform.distinct_experts(256, 8, uniform.unrelated_tokens(tokens)) == pytest.approx(expected, rel=0.021)
    equal = {2: 1.73, 3: 2.38, 4: 2.99, 6: 4.12, 8: 5.17, 12: 7.12, 16: 8.94}
    for tokens, expected in equal.items():
        assert ExpertRouting(locality=LOCALITY).unrelated_tokens(tokens) == pytest.approx(expected, abs=0.0051)


def test_width_by_popularity() -> None:
    """One expert that every third token chooses means fewer distinct ones; by hand for two tokens."""
    skewed = ExpertRouting(popularity=(0.5, 0.25, 0.25))
    assert skewed.distinct_experts(3, 1, 2) == pytest.approx((1 - 0.25) + 2 * (1 - 0.75**2))
    assert skewed.distinct_experts(3, 1, 2) < ExpertRouting().distinct_experts(3, 1, 2)


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
