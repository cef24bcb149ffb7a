"""The policy loses nowhere more than when its decisions were frozen (policy_goldens.py has all cells: minutes)."""

from __future__ import annotations

import pytest
from policy_goldens import SLACK, cells, frozen

SOME = (
    "prices processor lookup 4 rows x0.3",
    "load processor mtp 1",
    "load processor lookup 4",
    "load accelerator mtp 64",
    "load accelerator wrong 8",
    "load processor several 4",
    "objective accelerator slo:20ms 64",
    "collapses processor mtp 8",
    "drifts processor several 8",
    "prices accelerator mtp 64 rows twice as fast",
)


@pytest.mark.parametrize("name", [SOME[0], *[pytest.param(name, marks=pytest.mark.slow) for name in SOME[1:]]])
def test_a_cell_is_no_slower_than_frozen(name: str) -> None:
    assert cells()[name]().regret <= frozen()[name].regret + SLACK


def test_every_cell_is_frozen() -> None:
    assert set(cells()) == set(frozen())
