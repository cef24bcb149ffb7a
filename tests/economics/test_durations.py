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


def test_a_time_has_a_unit_and_one_meaning_everywhere() -> None:
    for text, seconds in TIMES.items():
        assert is_time(text)
        assert parse_seconds("overhead", text) == pytest.approx(seconds, rel=1e-12)
        assert parse_objective(f"slo:{text}").seconds_per_token == pytest.approx(seconds, rel=1e-12)


def test_what_is_no_time_or_out_of_range_is_named() -> None:
    for text in ("", "5", "ms", "-5us", "5 m", "5h", "1,5ms", "five ms", "5us us", "\u0665us", "nan s", "1_0us"):
        assert not is_time(text)
        with pytest.raises(UsageError, match=r"overhead = .* is not a time"):
            parse_seconds("overhead", text)
        with pytest.raises(UsageError, match="objective = "):
            parse_objective(f"slo:{text}")
    for text in ("1e400s", "1000001s", f"{'9' * 400}us"):
        with pytest.raises(UsageError, match=r"overhead = .* is out of range") as caught:
            parse_seconds("overhead", text)
        assert len(caught.value.message) < 100
        with pytest.raises(UsageError, match="out of range"):
            parse_objective(f"slo:{text}")
