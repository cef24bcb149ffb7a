"""The API under fuzzing, from the schemas of its bodies: no 5xx, and every answer is as its model says.

`python dev/fuzz_server.py --minutes 10 --seed 7` searches for longer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings

from serve.answers import ANSWERS
from serve.api_bodies import HOSTILE, Call, calls, check, send
from serve.serving import CHAT, MESSAGES, SHORT, Running, eventually, running
from wager.serve.live import PAGE_PATHS

EXAMPLES = int(os.environ.get("WAGER_FUZZ_EXAMPLES", "150"))
"""150 take some seconds."""


TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running({"max_context": 640}) as started:
        yield started
        eventually(started.is_idle, "something runs after the last answer")


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx2.Client]:
    with server.client() as made:
        yield made


@pytest.mark.slow
@settings(
    max_examples=EXAMPLES,
    derandomize=EXAMPLES == 150,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(call=calls())
def test_every_answer_is_as_its_model_says(http: httpx2.Client, call: Call) -> None:
    check(call.path, send(http, call))


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_every_field_with_every_hostile_value(server: Running, http: httpx2.Client, path: str) -> None:
    """None fails, and none stops the engine: its greatest numbers did once."""
    model = ANSWERS[path].body
    assert model is not None
    body = {"max_tokens": 6, "n": 3, **({"messages": MESSAGES} if path == CHAT else {"prompt": "one two one two"})}
    for field in sorted(model.model_fields):
        for value in (*HOSTILE, 2**63 - 1, 2**62, 1e300, 1e-300, [0], {"0": 100}, ["a"], [[1], [2]]):
            check(path, send(http, Call(path, json.dumps({**body, field: value}).encode())))
            assert server.llm.failure is None, (field, value)


def test_every_path_has_a_model_of_its_answers(server: Running) -> None:
    """But for what is always refused, and the files of the page."""
    paths = {route.path.replace(":path", "") for route in server.server.app().routes}  # type: ignore[attr-defined]
    assert {*ANSWERS} == paths - {"/v1/embeddings", *PAGE_PATHS} | {"/"}


@pytest.mark.parametrize("path", sorted(path for path, each in ANSWERS.items() if not each.body))
def test_what_is_only_read(http: httpx2.Client, path: str) -> None:
    check(path, http.get(path.replace("{name}", "tiny")))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "logprobs": True, "top_logprobs": 2},
        {"stream": True, "n": 2, "logprobs": True},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"speculation_stats": True},
        {"speculation_stats": True, "stream": True},
        {"prediction": {"type": "content", "content": "x y z"}},
        *({"tools": TOOLS, "tool_choice": "required", "stream": each, "max_tokens": 60} for each in (True, False)),
    ],
)
def test_every_shape_of_an_answer_has_a_model(http: httpx2.Client, fields: Any) -> None:
    body = {"messages": MESSAGES, "max_tokens": 8, **fields}
    chat = http.post(CHAT, json=body)
    assert chat.status_code == 200, chat.text
    check(CHAT, chat)
    if not {"tools", "prediction", "top_logprobs"} & fields.keys():
        logprobs = 2 if fields.get("logprobs") else None
        text = {"prompt": "a", "max_tokens": 8, **fields, "logprobs": logprobs}
        check("/v1/completions", http.post("/v1/completions", json=text))


def test_numbers_at_the_ends_of_their_ranges(http: httpx2.Client) -> None:
    ends = {
        "temperature": (0, 2),
        "top_p": (1e-300, 1),
        "min_p": (0, 1),
        "repetition_penalty": (1e-3, 1000),
        "presence_penalty": (-2, 2),
        "frequency_penalty": (-2, 2),
        "top_k": (-1, 2**62),
        "n": (1, 64),
        "seed": (-(2**63), 2**64 - 1),
        "max_tokens": (1, 2**62),
    }
    for name, values in ends.items():
        for value in values:
            answer = http.post(CHAT, json={**SHORT, "n": 1, "max_tokens": 3, name: value})
            assert answer.status_code == 200, (name, value, answer.text)
