"""Steps whose requests have drafts of random lengths: their mean seconds against an enumeration of all lengths."""

from __future__ import annotations

from itertools import product
from math import prod
from statistics import fmean

import pytest

from wager.economics.costmodel.measured_rounds import MeasuredRound

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


def test_drafts_that_are_never_shorter_need_one_value() -> None:
    assert MeasuredRound(2.0, (0.0, 0.0, 1.0)).rows(8) == (3.0,)
