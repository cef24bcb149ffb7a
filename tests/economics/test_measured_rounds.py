"""Steps whose requests have drafts of random lengths: their mean seconds against an enumeration of all lengths."""

from __future__ import annotations

import json
from itertools import product
from math import prod
from pathlib import Path
from statistics import fmean

import pytest

from wager.errors import UsageError
from wager.planner.acceptance import AcceptanceRates, MeasuredRound, parse_acceptances

LENGTHS = (0.45, 0.1, 0.05, 0.4)
"""Mostly none or all of three draft tokens, as lookup drafts."""


def seconds(rows: float) -> float:
    """Steps that cost the same up to 16 rows and then rise: the mean is not that of the mean number of rows."""
    return 1.0 + 0.01 * rows + max(0.0, rows - 16) / 16


@pytest.mark.parametrize("batch", [1, 2, 4, 6])
def test_the_mean_seconds_are_those_of_all_lengths_together(batch: int) -> None:
    exact = sum(
        prod(LENGTHS[length] for length in lengths) * seconds(batch + sum(lengths))
        for lengths in product(range(4), repeat=batch)
    )
    rows = MeasuredRound(1.5, LENGTHS).rows(batch)
    assert fmean(seconds(batch * each) for each in rows) == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("batch", [1, 3, 16, 256, 4096])
def test_the_mean_number_of_rows_is_exact(batch: int) -> None:
    measured = MeasuredRound(1.5, LENGTHS)
    assert measured.drafted == pytest.approx(1.4)
    assert batch * fmean(measured.rows(batch)) == pytest.approx(batch * 2.4, rel=1e-3)
    assert all(1 <= each <= 4.1 for each in measured.rows(batch))


GOOD = [{"tau": 1.5, "lengths": [0.5, 0.5]}, {"tau": 1.8, "lengths": [0.5, 0.1, 0.4]}]


def read(tmp_path: Path, depths: object) -> AcceptanceRates:
    path = tmp_path / "acceptance.json"
    path.write_text(json.dumps({"survival": [0.6, 0.3], "depths": depths}))
    [rates] = parse_acceptances(str(path))
    return rates


def test_a_file_with_rounds_gives_their_tokens_and_rows(tmp_path: Path) -> None:
    rates = read(tmp_path, GOOD)
    assert rates.added_tokens(2) == pytest.approx((0.5, 0.3))
    assert rates.survival(2) == pytest.approx((0.6, 0.3))
    assert fmean(rates.rows(2, batch=7)) == pytest.approx(1.9, rel=1e-3)
    assert rates.rows(0, batch=7) == (1.0,)


@pytest.mark.parametrize(
    "depths",
    [
        [{"tau": 1.5, "lengths": [0.6, 0.4]}, {"tau": 1.7, "lengths": [0, 0, 1]}],
        [],
        GOOD[:1],
        [GOOD[1], GOOD[0]],
        [{"tau": 1.5}, GOOD[1]],
        [{"tau": 2.5, "lengths": [0.5, 0.5]}, GOOD[1]],
        [{"tau": float("nan"), "lengths": [0.5, 0.5]}, GOOD[1]],
        [{"tau": 1.5, "lengths": [0.6, 0.5]}, GOOD[1]],
        [{"tau": 1.5, "lengths": [1.5, -0.5]}, GOOD[1]],
        [{"tau": "x", "lengths": [0.5, 0.5]}, GOOD[1]],
        7,
        "deep",
    ],
)
def test_rounds_that_are_impossible_are_refused(tmp_path: Path, depths: object) -> None:
    with pytest.raises(UsageError, match=r"depths in .*acceptance\.json"):
        read(tmp_path, depths)
