"""Times as people write them, the same in every option."""

from __future__ import annotations

import pytest

from wager.economics.options import is_time, parse_objective, parse_seconds
from wager.errors import UsageError

TIMES = {
    "50us": 50e-6,
    "50 us": 50e-6,
    "2ms": 2e-3,
    "0.1s": 0.1,
    "1.5 MS": 1.5e-3,
    "7\u00b5s": 7e-6,
    "7\u03bcs": 7e-6,
    "300ns": 3e-7,
    "1e3us": 1e-3,
    "2e-3s": 2e-3,
    "1e+1ms": 0.01,
}


@pytest.mark.parametrize("text", TIMES)
def test_a_time_has_a_unit_and_one_meaning_everywhere(text: str) -> None:
    assert is_time(text)
    assert parse_seconds("overhead", text) == pytest.approx(TIMES[text], rel=1e-12)
    assert parse_objective(f"slo:{text}").seconds_per_token == pytest.approx(TIMES[text], rel=1e-12)


@pytest.mark.parametrize(
    "text", ["", "5", "ms", "-5us", "5 m", "5h", "1,5ms", "five ms", "5us us", "\u0665us", "nan s", "1_0us"]
)
def test_what_is_no_time_is_named(text: str) -> None:
    assert not is_time(text)
    with pytest.raises(UsageError, match=r"overhead = .* is not a time"):
        parse_seconds("overhead", text)
    with pytest.raises(UsageError, match="objective = "):
        parse_objective(f"slo:{text}")


@pytest.mark.parametrize("text", ["1e400s", "1000001s", f"{'9' * 400}us"])
def test_an_absurd_time_is_out_of_range(text: str) -> None:
    with pytest.raises(UsageError, match=r"overhead = .* is out of range") as caught:
        parse_seconds("overhead", text)
    assert len(caught.value.message) < 100
    with pytest.raises(UsageError, match="out of range"):
        parse_objective(f"slo:{text}")
