"""Token ids as users give them: every integer type is one, nothing else is."""

from __future__ import annotations

import array
import enum
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from wager.errors import RequestError, UsageError
from wager.types import Request, SamplingParams, as_integer, as_token_ids

Token = enum.IntEnum("Token", {"ONE": 1, "FIVE": 5})
INTEGER_TYPES = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
FIVES: list[Any] = [
    *(np.array([1, 5, 3], dtype=kind) for kind in INTEGER_TYPES),
    *(torch.tensor([1, 5, 3], dtype=kind) for kind in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)),
    [np.int64(1), np.uint8(5), 3],
    (torch.tensor(1), Token.FIVE, 3),
    array.array("q", [1, 5, 3]),
    deque([1, 5, 3]),
    list(np.array([1, 5, 3])),
]
WRONG: list[tuple[Any, str]] = [
    (5, r"5 \(int\) is not a sequence"),
    (np.int64(5), r"\(int64\) is not a sequence"),
    (torch.tensor(5), r"\(Tensor\) is not a sequence"),
    (None, r"None \(NoneType\)"),
    ("15", r"'15' \(str\)"),
    (b"15", r"\(bytes\)"),
    (memoryview(b"15"), r"\(memoryview\)"),
    ({1, 5}, r"\(set\)"),
    ({1: 5}, r"\(dict\)"),
    (iter([1, 5]), r"\(list_iterator\)"),
    ((1, 2.5), r"token 2.5 \(float\) at index 1"),
    (np.array([1.0, 2.0]), r"token 1.0 \(float\) at index 0"),
    (np.array([True, False]), r"token True \(bool\) at index 0"),
    ([1, np.bool_(True)], r"\(bool\) at index 1"),
    ([1, True], r"token True \(bool\) at index 1"),
    ([1, "5"], r"token '5' \(str\) at index 1"),
    ([1, [5]], r"token \[5\] \(list\) at index 1"),
    (np.array([[1, 5], [2, 3]]), r"token \[1, 5\] \(list\) at index 0"),
    ([1, None], r"token None \(NoneType\) at index 1"),
]


@pytest.mark.parametrize("values", FIVES, ids=lambda values: type(values).__name__)
def test_any_integers_are_token_ids(values: Any) -> None:
    ids = as_token_ids(values)
    assert ids == (1, 5, 3)
    assert [type(token) for token in ids] == [int, int, int]
    assert Request("r", values).prompt == (1, 5, 3)
    assert SamplingParams(stop_token_ids=values).stop_token_ids == (1, 5, 3)
    assert as_token_ids(range(3)) == (0, 1, 2)


@pytest.mark.parametrize(("values", "named"), WRONG, ids=[named for _, named in WRONG])
def test_what_is_none_is_named(values: Any, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        as_token_ids(values)
    with pytest.raises(RequestError, match=f"Request 'r' has no valid prompt: .*{named}"):
        Request("r", values)
    with pytest.raises(UsageError, match=f"stop_token_ids is not possible: .*{named}"):
        SamplingParams(stop_token_ids=values)


@pytest.mark.parametrize("key", [np.int32(7), np.uint64(7), torch.tensor(7)])
def test_a_bias_is_keyed_by_any_integer(key: Any) -> None:
    biases = SamplingParams(logit_bias={key: 2.0}).logit_bias
    assert biases == {7: 2.0} and [type(token) for token in biases] == [int]
    for wrong in (np.float32(7), np.bool_(True), torch.tensor(7.0)):
        with pytest.raises(UsageError, match=r"logit_bias has the key .* \((float32|bool|Tensor)\)"):
            SamplingParams(logit_bias={wrong: 2.0})
    with pytest.raises(TypeError, match="ndarray"):
        as_integer(np.array([7]))


def test_a_list_that_changes_later_does_not_change_its_request() -> None:
    prompt = [1, 2, 3]
    request = Request("r", prompt)  # type: ignore[arg-type]
    prompt.append(99)
    assert request.prompt == (1, 2, 3)
