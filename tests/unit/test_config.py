"""The configuration: options sorted into groups, parsed at once, refused by name before anything is loaded."""

from __future__ import annotations

import array
import enum
import math
from collections import deque
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch

from wager.config import (
    OPTIONS,
    CapacityConfig,
    EngineConfig,
    ModelConfig,
    SpeculationConfig,
)
from wager.errors import RequestError, UsageError
from wager.types import Request, SamplingParams, as_integer, as_token_ids


def test_options_are_sorted_into_groups() -> None:
    config = EngineConfig.from_options(
        model="m", drafter="ngram:4", depth=3, memory="2GiB", max_rows=64, temperature=0.5, stop=["END"]
    )
    assert config.model == ModelConfig(model="m")
    assert config.speculation == SpeculationConfig(drafter="ngram:4", depth=3)
    assert config.capacity == CapacityConfig(memory=2 << 30, max_rows=64)
    assert config.sampling == SamplingParams(temperature=0.5, stop=("END",))
    assert EngineConfig.from_options() == EngineConfig()
    assert EngineConfig.from_options(**config.as_options()) == config
    assert list(config.as_options()) == list(OPTIONS)
    with pytest.raises(FrozenInstanceError):
        config.model.model = "other"  # type: ignore[misc]


def test_changes_are_checked_anew() -> None:
    config = EngineConfig.from_options(drafter="recycle")
    assert config.with_options(depth=0).speculation.parsed_policy.kind == "fixed"
    with pytest.raises(UsageError, match="makes trees"):
        config.with_options(verify="block")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dept": 3}, "'dept' is not known.*'depth'"),
    ({"zzz": 3}, "'zzz' is not known.*model, dtype"),
    ({"model": ""}, "model = ''"),
    ({"dtype": "bfloat"}, "dtype = 'bfloat'.*'bfloat16'"),
    ({"threads": 0}, "threads = 0 .*at least 1"),
    ({"threads": "2"}, "threads = '2' is not"),
    ({"depth": -1}, "depth = -1 .*at least 0"),
    ({"max_sequences": 600}, "max_sequences = 600 is more than max_rows = 512"),
    ({"max_context": 1}, "max_context = 1 .*at least 2"),
    ({"memory": 0}, "memory = 0"),
    ({"memory": "plenty"}, "'plenty' is not an amount"),
    ({"prefix_cache": 1}, "prefix_cache = 1"),
    ({"drafter": "ngrm"}, "'ngrm'.*'ngram'"),
    ({"drafter": "model"}, "needs an argument"),
    ({"drafter": "ngram:9"}, "ngram:9"),
    ({"policy": "adaptiv"}, "'adaptive'"),
    ({"policy": "threshold:1"}, "threshold:1.*threshold:0.4"),
    ({"policy": "fixed:3"}, "fixed:3"),
    ({"objective": "speed"}, "'speed'"),
    ({"objective": "slo:20"}, "slo:20"),
    ({"objective": "latency", "policy": "fixed"}, "objective = 'latency' has no effect under policy 'fixed'"),
    ({"drafter": "ngram,recycle", "depth": 3}, "uses one drafter, but there are 2"),
    ({"drafter": "ngram,recycle", "policy": "threshold"}, "uses one drafter"),
    ({"drafter": "ngram,recycle", "verify": "block"}, "'recycle' makes trees"),
    ({"verify": "mach"}, "'match'"),
    ({"top_p": 2}, "top_p = 2"),
]


def test_impossible_options_are_refused_by_name() -> None:
    for options, named in REFUSED:
        with pytest.raises(UsageError, match=f"(?s){named}"):
            EngineConfig.from_options(**options)


# ---- sampling parameters and token ids -------------------------------------------------------------------------------

INTEGERS = ("max_tokens", "top_k", "seed", "logprobs", "n")
NO_INTEGERS = [1.0, 2.5, True, "1", math.nan, math.inf, np.float64(2), [1]]
NO_NUMBERS = [True, False, "1", None, math.nan, math.inf, -math.inf, 1 + 0j, 10**400]

LIMITS: list[tuple[str, Any, Any, list[Any]]] = [
    ("max_tokens", 1, 2**63 - 1, [0, -1, 2**63, None]),
    ("temperature", 0, 100, [-1e-9, 100.1, 1e308]),
    ("top_k", 0, 2**63 - 1, [-1, None]),
    ("top_p", 5e-324, 1, [0, 0.0, -0.1, 1.0000001]),
    ("min_p", 0, 1, [-0.1, 1.1]),
    ("repetition_penalty", 1e-3, 1e3, [0, 9e-4, 1001, 1e-300, 1e300]),
    ("presence_penalty", -2, 2, [-2.1, 2.1]),
    ("frequency_penalty", -2, 2, [-2.1, 2.1]),
    ("seed", 0, 2**64 - 1, [-1, 2**64]),
    ("logprobs", 0, 20, [-1, 21]),
    ("n", 1, 64, [0, 65, None]),
]


def refusal(**values: Any) -> str:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**values)
    return str(caught.value)


@pytest.mark.parametrize(("name", "low", "high", "outside"), LIMITS, ids=[limit[0] for limit in LIMITS])
def test_numbers_their_types_and_their_ranges(name: str, low: Any, high: Any, outside: list[Any]) -> None:
    for value in (low, high):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in outside:
        assert f"{name} = {value!r}" in refusal(**{name: value})
    noun, others = ("an integer", NO_INTEGERS) if name in INTEGERS else ("a number", NO_NUMBERS)
    for value in others:
        message = refusal(**{name: value})
        assert f"{name} = {value!r} {'' if isinstance(value, str) else f'({type(value).__name__}) '}is not" in message
        least = 0 if name == "top_p" else low  # what is above 0 is refused with other words
        assert f"{name} must be {noun}{', at least' if high >= 2**63 - 1 else ' between'} {least}" in message


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        (
            "stop",
            ["", b"END", None, 5, ("END", ""), ("END", 5), ("END", b"x"), {"END"}, {"END": 1}],
            "stop must be a text that is not empty, or several",
        ),
        ("ignore_eos", [1, 0, "yes", None], "ignore_eos must be True or False"),
        ("prediction", [5, None, (5, 6.0)], "prediction must be a text or a sequence of token ids"),
        ("logit_bias", [None, [(7, 1.0)], "7", 7], "logit_bias must be a mapping"),
        ("logit_bias", [{"7": 1.0}, {7.0: 1.0}, {True: 1.0}, {None: 1.0}], "must be keyed by integer token ids"),
        (
            "logit_bias",
            [{3: -100, 7: bias} for bias in (100.1, -101, 1e308, math.inf, math.nan, True, "1", None)],
            "logit_bias[7] must be a number between -100 and 100",
        ),
    ],
)
def test_other_parameters_are_refused_by_name(name: str, values: list[Any], words: str) -> None:
    for value in values:
        assert words in refusal(**{name: value})
    assert "stop = '' is not possible" in refusal(stop=("END", ""))


# ---- token ids -------------------------------------------------------------------------------------------------------


Token = enum.IntEnum("Token", {"ONE": 1, "FIVE": 5})
FIVES: list[Any] = [
    *(np.array([1, 5, 3], dtype=kind) for kind in "bhilBHIL"),
    *(torch.tensor([1, 5, 3], dtype=kind) for kind in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)),
    [np.int64(1), np.uint8(5), 3],
    (torch.tensor(1), Token.FIVE, 3),
    array.array("q", [1, 5, 3]),
    deque([1, 5, 3]),
    list(np.array([1, 5, 3])),
]
WRONG: list[tuple[Any, str]] = [
    (5, r"5 \(int\) is not a sequence"),
    (torch.tensor(5), r"\(Tensor\) is not a sequence"),
    ("15", r"'15' \(str\)"),
    ({1, 5}, r"\(set\)"),
    (iter([1, 5]), r"\(list_iterator\)"),
    ((1, 2.5), r"token 2.5 \(float\) at index 1"),
    (np.array([True, False]), r"token True \(bool\) at index 0"),
    ([1, np.bool_(True)], r"\(bool\) at index 1"),
    ([1, "5"], r"token '5' \(str\) at index 1"),
    (np.array([[1, 5], [2, 3]]), r"token \[1, 5\] \(list\) at index 0"),
]


def test_any_integers_are_token_ids() -> None:
    for values in FIVES:
        ids = as_token_ids(values)
        assert ids == (1, 5, 3) and {type(token) for token in ids} == {int}
        assert Request("r", values).prompt == (1, 5, 3)
        assert SamplingParams(stop_token_ids=values).stop_token_ids == (1, 5, 3)
    assert as_token_ids(range(3)) == (0, 1, 2)


def test_what_is_none_is_named() -> None:
    for values, named in WRONG:
        with pytest.raises(TypeError, match=named):
            as_token_ids(values)
        with pytest.raises(RequestError, match=f"Request 'r' has no valid prompt: .*{named}"):
            Request("r", values)
        with pytest.raises(UsageError, match=f"(?s)stop_token_ids is not possible: .*{named}.*a tuple of integers"):
            SamplingParams(stop_token_ids=values)


def test_a_bias_is_keyed_by_any_integer() -> None:
    for key in (np.int32(7), np.uint64(7), torch.tensor(7)):
        biases = SamplingParams(logit_bias={key: 2.0}).logit_bias
        assert biases == {7: 2.0} and [type(token) for token in biases] == [int]
    for wrong in (np.float32(7), np.bool_(True), torch.tensor(7.0)):
        with pytest.raises(UsageError, match=r"logit_bias has the key .* \((float32|bool|Tensor)\)"):
            SamplingParams(logit_bias={wrong: 2.0})
    with pytest.raises(TypeError, match="ndarray"):
        as_integer(np.array([7]))


def test_lists_that_change_later_change_nothing() -> None:
    stops, ids = ["a", "b"], [1, 2]
    params, request = SamplingParams(stop=stops, stop_token_ids=ids), Request("r", ids)  # type: ignore[arg-type]
    stops.append("")
    ids.append(99)
    assert (params.stop, params.stop_token_ids, request.prompt) == (("a", "b"), (1, 2), (1, 2))
