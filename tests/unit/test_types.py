"""Sampling parameters: what is refused, in which words, and what is left alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from wager.errors import UsageError
from wager.types import SamplingParams

INTEGERS = ("max_tokens", "top_k", "seed", "logprobs", "n")
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def refusal(**values: Any) -> str:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**values)
    return str(caught.value)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1.0, 2.5, True, "1", math.nan, math.inf, np.float64(2), [1]])
def test_an_integer_is_really_one(name: str, value: Any) -> None:
    message = refusal(**{name: value})
    assert f"{name} = {value!r} ({type(value).__name__})" in message
    assert f"{name} must be an integer between" in message


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, False, "1", None, math.nan, math.inf, -math.inf, 1 + 0j, 10**400])
def test_a_number_is_a_finite_one(name: str, value: Any) -> None:
    message = refusal(**{name: value})
    assert f"{name} = {value!r}" in message
    assert f"{name} must be a number between" in message


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "n"])
def test_none_is_not_an_integer(name: str) -> None:
    assert f"{name} = None" in refusal(**{name: None})


LIMITS: list[tuple[str, Any, Any, list[Any]]] = [
    ("max_tokens", 1, 2**63 - 1, [0, -1, 2**63]),
    ("temperature", 0, 100, [-1e-9, 100.1, 1e308]),
    ("top_k", 0, 2**63 - 1, [-1]),
    ("top_p", 5e-324, 1, [0, 0.0, -0.1, 1.0000001]),
    ("min_p", 0, 1, [-0.1, 1.1]),
    ("repetition_penalty", 1e-3, 1e3, [0, 9e-4, 1001, 1e-300, 1e300]),
    ("presence_penalty", -2, 2, [-2.1, 2.1]),
    ("frequency_penalty", -2, 2, [-2.1, 2.1]),
    ("seed", 0, 2**64 - 1, [-1, 2**64]),
    ("logprobs", 0, 20, [-1, 21]),
    ("n", 1, 64, [0, 65]),
]


@pytest.mark.parametrize(("name", "low", "high", "outside"), LIMITS, ids=[limit[0] for limit in LIMITS])
def test_ranges_and_their_ends(name: str, low: Any, high: Any, outside: list[Any]) -> None:
    for value in (low, high):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in outside:
        assert f"{name} = {value!r}" in refusal(**{name: value})


def test_every_number_has_its_limits_tested() -> None:
    assert sorted(limit[0] for limit in LIMITS) == sorted(INTEGERS + NUMBERS)


def test_one_string_is_not_three_stops() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    for value in ("", b"END", None, 5, ("END", ""), ("END", 5), ("END", b"x"), {"END"}, {"END": 1}):
        assert "stop must be a tuple of strings that are not empty" in refusal(stop=value)


def test_stop_token_ids_are_integers() -> None:
    for value in (5, "5", None, (5, 6.0), (True,), ("5",), {5}):
        assert "stop_token_ids must be a tuple of integers" in refusal(stop_token_ids=value)


def test_lists_become_tuples_that_their_owner_no_longer_changes() -> None:
    stops, ids = ["a", "b"], [1, 2]
    params = SamplingParams(stop=stops, stop_token_ids=ids)  # type: ignore[arg-type]
    stops.append("")
    ids.append(2.5)  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (1, 2))


@pytest.mark.parametrize("bias", [{"7": 1.0}, {7.0: 1.0}, {True: 1.0}, {None: 1.0}])
def test_a_bias_is_keyed_by_integers(bias: Any) -> None:
    assert "logit_bias must be keyed by integer token ids" in refusal(logit_bias=bias)


@pytest.mark.parametrize("addend", [100.1, -101, 1e308, math.inf, -math.inf, math.nan, True, "1", None])
def test_a_bias_is_a_number_within_a_hundred(addend: Any) -> None:
    message = refusal(logit_bias={3: -100, 7: addend})
    assert f"logit_bias[7] = {addend!r}" in message
    assert "between -100 and 100" in message


@pytest.mark.parametrize("bias", [None, [(7, 1.0)], "7", 7])
def test_a_bias_is_a_mapping(bias: Any) -> None:
    assert "logit_bias must be a mapping" in refusal(logit_bias=bias)


@pytest.mark.parametrize("value", [1, 0, "yes", None])
def test_ignore_eos_is_said_plainly(value: Any) -> None:
    assert f"ignore_eos = {value!r}" in refusal(ignore_eos=value)


def test_what_is_right_is_left_alone() -> None:
    params = SamplingParams(
        max_tokens=5,
        temperature=1,
        top_k=3,
        top_p=1,
        seed=2**64 - 1,
        stop=("END",),
        stop_token_ids=(5,),
        logit_bias={7: -100, 8: 100.0, 9: 1},
        ignore_eos=True,
        logprobs=0,
        n=2,
    )
    assert params.temperature == 1 and params.logit_bias == {7: -100, 8: 100.0, 9: 1} and params.logprobs == 0
    assert replace(params, seed=None, logprobs=None).seed is None
    assert not params.plain and SamplingParams(temperature=1).plain and SamplingParams(top_k=3).plain
