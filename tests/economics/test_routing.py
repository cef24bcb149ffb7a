"""Distinct experts by formula, against published tables, a published measurement and an enumeration."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from wager.errors import UsageError
from wager.planner.inputs import read_popularity
from wager.planner.routing import (
    ExpertRouting,
    distinct_experts,
    experts_on_fullest_rank,
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
    """Of Qwen3.6-35B-A3B, 8 of 256 experts: a run of T tokens chooses as many as T^0.74 unrelated ones by uniform
    routing, whose exponent must absorb the skew."""
    run = {1: 8.00, 2: 13.27, 3: 17.81, 4: 21.85, 6: 29.07, 8: 35.42, 12: 46.18, 16: 55.05}
    uniform = ExpertRouting(locality=0.74)
    for tokens, expected in run.items():
        assert uniform.distinct_experts(256, 8, uniform.unrelated_tokens(tokens)) == pytest.approx(expected, rel=0.021)


def test_bad_routing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"locality = 1\.5"):
        ExpertRouting(locality=1.5)
    with pytest.raises(UsageError, match="lists 2 experts; a layer has 3"):
        ExpertRouting(popularity=(0.5, 0.5)).distinct_experts(3, 1, 2)
    with pytest.raises(UsageError, match=r"sums to 1; a token chooses 2"):
        ExpertRouting(popularity=(0.5, 0.25, 0.25)).distinct_experts(3, 2, 1)
    with pytest.raises(UsageError, match="probability"):
        ExpertRouting(popularity=(2.0, 0.5))
    path = tmp_path / "routing.json"
    for locality in (0, 1.5, "x", True):
        path.write_text(json.dumps({"popularity": [0.5] * 4, "locality": locality}))
        with pytest.raises(UsageError, match=f"locality = {locality!r} in {path} is out of range"):
            read_popularity(path)
    path.write_text(json.dumps({"popularity": [0.5] * 4, "locality": 0.5}))
    assert read_popularity(path)[0] == ExpertRouting((0.5,) * 4, 0.5)


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
