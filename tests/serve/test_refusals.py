"""What is refused: each row of the table of statuses in docs/serve.md, each field that cannot be honoured by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pydantic import ValidationError

import wager
from serve.answers import ErrorAnswer
from serve.serving import CHAT, LONG, MESSAGES, SHORT, Running, eventually, http_request, read_answer, running
from wager.serve.bodies import ChatBody, parse
from wager.serve.errors import ApiError

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")


KEY = "a-key-of-sixteen-letters"

Response = tuple[int, Any, dict[str, str]]
"""Status, JSON and headers."""


def raw(server: Running, data: bytes) -> Response:
    with server.connect(data) as connection:
        head, _, body = read_answer(connection).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), httpx2.Response(200, content=body).json(), headers


def post(server: Running, body: Any, path: str = CHAT, **options: Any) -> Response:
    found = server.post(path, body, **options)
    return found.status_code, found.json(), dict(found.headers)


def fields(server: Running) -> list[Response]:
    twice = b'{"messages": [], "messages": [{"role": "user", "content": "x"}]}'
    deep = b'{"messages": ' + b"[" * 101 + b"]" * 101 + b"}"
    bodies = (b"{", twice, b'{"seed": NaN}', b'{"model": "\\ud800"}', deep)
    return [*(raw(server, http_request(body)) for body in bodies), raw(server, b"nonsense\r\n\r\n")]


def key(server: Running) -> list[Response]:
    said = {"": "is missing", "Bearer": "is missing", "Bearer x": "is not known", KEY: "does not begin with Bearer"}
    found = [post(server, SHORT, headers={"authorization": given}) for given in said]
    assert all(text in error["error"]["message"] for text, (_, error, _) in zip(said.values(), found, strict=True))
    return found


def figures(server: Running) -> list[Response]:
    """One of several keys asks for the figures of all."""
    asked = f"host: x\r\nauthorization: Bearer {KEY}\r\n\r\n"
    return [raw(server, f"GET {path} HTTP/1.1\r\n{asked}".encode()) for path in ("/metrics", "/live")]


def other_method(server: Running) -> list[Response]:
    found = raw(server, b"GET " + CHAT.encode() + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    assert found[2]["allow"] == "post" and "Send POST." in found[1]["error"]["message"]
    kept = post(server, {}, "/v1/responses/resp_0")
    assert "Send DELETE or GET or HEAD." in kept[1]["error"]["message"]
    return [found, kept]


def nowhere(server: Running) -> list[Response]:
    """Another model, and what base URLs lead to that have no /v1, or one too many."""
    told = {
        "/chat/completions": "Is /v1/chat/completions meant? Then add /v1 to the client's base URL.",
        "/v1/v1/chat/completions": "Then take a /v1 from",
        f"{CHAT}/": "Then take a slash from",
        "/v1/tokenize": "Is /tokenize meant? Then take a /v1 from",
    }
    found = [post(server, SHORT, path) for path in told]
    assert all(text in error["error"]["message"] for text, (_, error, _) in zip(told.values(), found, strict=True))
    slash = raw(server, b"GET /v1/models/ HTTP/1.1\r\nhost: x\r\n\r\n")
    assert "take a slash from" in slash[1]["error"]["message"]
    other = post(server, {**SHORT, "model": "other"})
    assert other[1]["error"]["code"] == "model_not_found"
    return [*found, slash, other, post(server, SHORT, "/api/chat")]


def late(server: Running) -> list[Response]:
    return [raw(server, b"GET /health HTTP/1.1\r\n"), raw(server, http_request(SHORT)[:-1])]


def too_long(server: Running) -> list[Response]:
    chunked = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    many = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    return [raw(server, http_request(b" " * ((4 << 20) + 1))), raw(server, chunked + many * 4 + b"1\r\n \r\n0\r\n\r\n")]


def full(server: Running) -> list[Response]:
    server.server.admission.open += server.server.admission._most
    try:
        found = post(server, SHORT)
    finally:
        server.server.admission.open -= server.server.admission._most
    assert 1 <= int(found[2]["retry-after"]) <= 60
    return [found]


def long_head(server: Running) -> list[Response]:
    head = b"GET /health HTTP/1.1\r\na: " + b"x" * 70_000
    return [raw(server, head), raw(server, head + b"\r\n\r\n")]


def failure(server: Running) -> list[Response]:
    """A defect in the server, and a step that fails."""
    llm = server.llm
    llm.request = lambda *prompt, **options: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    found = [post(server, SHORT)]
    assert found[0][2]["x-request-id"] and "ZeroDivisionError" in str(found[0][1])
    del llm.request  # type: ignore[method-assign]
    break_engine(server)
    return [*found, post(server, SHORT)]


def break_engine(server: Running) -> None:
    def fail() -> Any:
        raise wager.CacheIntegrityError("Two blocks are one.")

    server.llm.engine.step = fail  # type: ignore[method-assign]


def ending(server: Running) -> list[Response]:
    """It drains; then its engine fails."""
    server.server.admission.draining = True
    found = [post(server, SHORT), raw(server, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")]
    assert found[0][2]["retry-after"] == "30"
    server.server.admission.draining = False
    break_engine(server)
    assert post(server, SHORT)[0] == 500
    return [*found, post(server, SHORT)]


def timeout(server: Running) -> list[Response]:
    found = post(server, {**LONG, "n": 8})
    eventually(lambda: server.server.admission.open == 0, "it goes on")
    return [found]


CAUSES: dict[str, Callable[[Running], list[Response]]] = {
    "400": fields,
    "401": key,
    "403": figures,
    "404": nowhere,
    "405": other_method,
    "408": late,
    "413": too_long,
    "415": lambda server: [
        post(server, SHORT, headers={"content-type": "text/plain"}),
        post(server, SHORT, headers={"content-encoding": "gzip"}),
    ],
    "429": full,
    "431": long_head,
    "500": failure,
    "501": lambda server: [post(server, {"input": "x"}, "/v1/embeddings")],
    "503": ending,
    "504": timeout,
}


OPTIONS: dict[str, dict[str, Any]] = {
    "401": {"api_keys": (KEY,)},
    "403": {"api_keys": (KEY, KEY[::-1])},
    "408": {"body_timeout": 0.3},
    "504": {"request_timeout": 0.01},
}


def test_the_table_has_every_status_and_no_other() -> None:
    assert set(re.findall(r"^\| (\d{3}) \|", PAGE, re.MULTILINE)) == set(CAUSES)


@pytest.mark.parametrize("status", sorted(CAUSES))
def test_a_row_of_the_table(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if status == "408":
        monkeypatch.setattr("wager.serve.connections.HEAD_TIMEOUT_S", 0.3)
    with running(**OPTIONS.get(status, {})) as server:
        for found, body, _ in CAUSES[status](server):
            error = ErrorAnswer.model_validate(body).error
            assert found == int(status), error
            assert len(error.message) > 15 and "Traceback" not in error.message


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(strict_fields=True) as started:
        yield started


# ---- fields ----------------------------------------------------------------------------------------------------------

FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "any", "schema": {"type": "object"}}}
WIZARD: Any = {"type": "json_schema", "json_schema": {"schema": {"type": "wizard"}}}
LARGE: Any = {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70_000]}}}
UNCLOSED: Any = {"properties": {"a": {"pattern": "["}}}
PICTURE: Any = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}]
LONG_TEXT = "x" * 5000


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


TOO_LONG, UNKNOWN, UNSUPPORTED = "context_length_exceeded", "unknown_parameter", "unsupported_parameter"
TYPE, BELOW, ABOVE = "invalid_type", "integer_below_min_value", "integer_above_max_value"
CALL: Any = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLS: Any = {"role": "assistant", "content": None}
RESULT: Any = {"role": "tool", "tool_call_id": "c", "content": "rain"}

REFUSED: list[tuple[dict[str, Any], str, str | None, tuple[str, ...]]] = [
    ({"messages": None}, "messages", TYPE, ("'messages'", "it is null, and must be a list")),
    ({"messages": "Hello"}, "messages", TYPE, ('it is "Hello", and must be a list',)),
    ({"messages": ["Hello"]}, "messages", TYPE, ("'messages.0'", "must be an object")),
    ({"messages": []}, "messages", "empty_array", ("it is empty",)),
    ({"messages": [{"content": "x"}]}, "messages", "missing_required_parameter", ("'messages.0.role' is missing",)),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages", "invalid_value", ("role", "'user'", "wizard")),
    ({"messages": user(5)}, "messages", TYPE, ("it is 5, and must be a string or a list",)),
    ({"messages": user(None)}, "messages", None, ("A message of role 'user' has no content",)),
    ({"messages": [*MESSAGES, RESULT]}, "messages", None, ("for the call 'c'",)),
    (
        {"messages": [*MESSAGES, {**CALLS, "tool_calls": [CALL]}, {**RESULT, "tool_call_id": "d"}]},
        "messages",
        None,
        ("'d'",),
    ),
    ({"messages": [*MESSAGES, {"role": "tool", "content": "rain"}]}, "messages", None, ("no tool_call_id",)),
    ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]}, "messages", TYPE, ("must be null",)),
    (
        {"messages": [*MESSAGES, *user(PICTURE)]},
        "messages",
        None,
        ("'messages.1.content.1.type'", "'image_url' is no text"),
    ),
    ({"messages": user(LONG_TEXT)}, "messages", TOO_LONG, ("512",)),
    ({"messages": user("x" * 400_000)}, "messages", TOO_LONG, ("400000", "characters", "512")),
    ({"temprature": 1}, "temprature", UNKNOWN, ("temprature", "'temperature'?")),
    ({f"k{number}": 1 for number in range(20_000)}, "k0", UNKNOWN, ("k0",)),
    ({"functions": [{"name": "f"}], "tools": function()}, "functions", None, ("exclude",)),
    ({"chat_template": "{{ 1 }}"}, "chat_template", UNSUPPORTED, ()),
    ({"continue_final_message": True}, "continue_final_message", None, ("assistant",)),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", None, ("messages",)),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", None, ("exclude",)),
    ({"guided_regex": "(a"}, "guided_regex", None, ("regular expression",)),
    ({"structured_outputs": {}}, "structured_outputs", None, ()),
    ({"guided_json": "{"}, "guided_json", None, ("JSON",)),
    ({"min_tokens": 9}, "min_tokens", None, ("max_tokens",)),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", None, ("streamed",)),
    ({"temperature": 3}, "temperature", "decimal_above_max_value", ("it is 3, and must be at most 2",)),
    ({"temperature": 10**400}, "temperature", TYPE, ("401 characters",)),
    ({"n": 65}, "n", ABOVE, ("it is 65, and must be at most 64",)),
    ({"n": "two"}, "n", TYPE, ('it is "two", and must be an integer',)),
    ({"max_tokens": -1}, "max_tokens", BELOW, ("it is -1, and must be at least 1",)),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", None, ("differ",)),
    ({"seed": 10**4000}, "seed", None, ("64 bits",)),
    ({"stop": ["x"] * 17}, "stop", "array_above_max_length", ("17 items", "16")),
    ({"stop": [""]}, "stop", None, ("empty",)),
    ({"stop_token_ids": [None] * 50_000}, "stop_token_ids", TYPE, ()),
    ({"stream_options": {"include_obfuscation": 0}}, "stream_options", TYPE, ("it is 0, and must be true or false",)),
    ({"logit_bias": {"a": 1}}, "logit_bias", None, ("'a'",)),
    ({"logit_bias": {"1": 101}}, "logit_bias", None, ("100",)),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", None, ("9" * 80,)),
    ({"logit_bias": {str(token): 1 for token in range(10_000)}}, "logit_bias", None, ("token 512",)),
    ({"top_logprobs": 2}, "top_logprobs", None, ("logprobs",)),
    ({"speculation": "on"}, "speculation", None, ('it is "off", or an object of drafter, depth and weight',)),
    ({"speculation": {"depth": -1}}, "speculation", BELOW, ("depth",)),
    ({"speculation": {"weight": 1e300}}, "speculation", "decimal_above_max_value", ("weight",)),
    ({"speculation": {"drafter": "eagle3"}}, "speculation", None, ("'eagle3'", "has ngram", '"speculation": "off"')),
    ({"prediction": {"type": "content", "content": LONG_TEXT}}, "prediction", None, ()),
    ({"response_format": {"type": "json_schema"}}, "response_format", None, ()),
    ({"response_format": WIZARD}, "response_format", None, ()),
    ({"response_format": LARGE}, "response_format", None, ("at most 65536",)),
    ({"response_format": {**FORMAT, "schema": {}}}, "response_format", None, ()),
    ({"response_format": FORMAT, "ignore_eos": True}, "ignore_eos", None, ()),
    ({"guided_regex": "a", "tools": function()}, "guided_regex", None, ()),
    ({"tool_choice": "required"}, "tool_choice", None, ()),
    ({"tools": function(), "tool_choice": "maybe"}, "tool_choice", None, ()),
    ({"tools": function(), "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", None, ()),
    ({"tools": function(parameters={"type": "wizard"})}, "tools", None, ()),
    ({"tools": function(parameters=[])}, "tools", None, ("no JSON schema",)),
    ({"tools": function(parameters=UNCLOSED)}, "tools", None, ('the parameters of "f": its expression',)),
    ({"tools": function(paramters={})}, "tools", None, ("paramters",)),
    ({"tools": function() * 2}, "tools", None, ("twice",)),
    ({"tools": function() * 1000}, "tools", None, ("128",)),
]

REFUSED_COMPLETIONS: list[tuple[dict[str, Any], str, str | None, tuple[str, ...]]] = [
    ({"suffix": "b"}, "suffix", UNSUPPORTED, ("gap",)),
    ({"max_tokens": 0}, "max_tokens", None, ()),
    ({"echo": True, "logprobs": 1, "stream": True}, "echo", None, ("streamed",)),
    ({"best_of": 2}, "best_of", UNSUPPORTED, ()),
    ({"prompt": [1] * 50_000}, "prompt", TOO_LONG, ("The request has 50000 prompt tokens", "prompt is too long")),
    ({"prompt": [[1]] * 65}, "prompt", None, ("65 prompts",)),
]


def test_a_field_that_cannot_be_honoured_is_refused_by_name(server: Running) -> None:
    for path, required, rows in (
        (CHAT, {"messages": MESSAGES}, REFUSED),
        ("/v1/completions", {"prompt": "abc"}, REFUSED_COMPLETIONS),
    ):
        for fields_, param, code, words in rows:
            response = server.post(path, {**required, "max_tokens": 4, **fields_})
            error = response.json()["error"]
            assert (response.status_code, error["type"]) == (400, "invalid_request_error"), error
            assert (error["param"], error["code"]) == (param, code), error
            assert all(word in error["message"] for word in words) and len(error["message"]) < 2500, error


def test_a_body_of_another_path_is_told_where_it_belongs(server: Running) -> None:
    for path, body, told in (
        (CHAT, {"prompt": "x"}, "A prompt belongs to /v1/completions"),
        ("/v1/completions", {"messages": MESSAGES}, "Messages belong to /v1/chat/completions"),
    ):
        status, answer, _ = post(server, body, path)
        assert status == 400 and told in answer["error"]["message"]


def test_a_body_that_is_not_coded_may_say_so(server: Running) -> None:
    for coding in ("", "identity", "Identity"):
        assert post(server, SHORT, headers={"content-encoding": coding})[0] == 200, coding


@pytest.mark.parametrize("place", ["body", "message", "bias"])
def test_a_body_of_many_mistakes_is_refused_by_the_first(place: str) -> None:
    """An error for each would take more than ten times what reading the body does, and with 300,000 a gigabyte."""
    many = {f"{number:x}": None for number in range(20_000)}
    values = {"message": {"messages": [many]}, "bias": {**SHORT, "logit_bias": many}}.get(place, many)
    with pytest.raises(ApiError) as caught:
        parse(ChatBody, json.dumps(values).encode())
    found = caught.value.__context__
    assert isinstance(found, ValidationError) and found.error_count() < 10
