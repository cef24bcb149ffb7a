"""Choices that end with an error while they run: the status tells a request's own mistake from a fault, whatever the
words of either are."""

from __future__ import annotations

import json
from typing import Any

import pytest

import wager
from serve.serving import CHAT, MESSAGES, Running, running
from wager.constrain import compiler
from wager.constrain.compiler import GrammarMatcher
from wager.engine import runner

BODY: Any = {"messages": MESSAGES, "max_tokens": 60, "temperature": 1, "seed": 1}
PATTERN = {"type": "string", "pattern": "^[ab]*a[ab]{9}(c[ab]*a[ab]{9}){5}$"}
TOO_COSTLY: Any = {**BODY, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PATTERN}}}


def failures(server: Running, body: Any) -> tuple[int, list[dict[str, Any]]]:
    """The status of a request, and the errors of it and of the same one streamed, whose answer has begun."""
    whole = server.post(CHAT, body)
    streamed = server.post(CHAT, {**body, "stream": True})
    assert streamed.status_code == 200
    *_, last, done = [line for line in streamed.text.splitlines() if line]
    assert done == "data: [DONE]"
    return whole.status_code, [whole.json()["error"], json.loads(last.removeprefix("data: "))["error"]]


@pytest.mark.parametrize("words", ["The grammar cannot go on.", "No token is left."])
def test_a_grammar_that_cannot_be_fulfilled_is_the_requests_mistake(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_LEXER_STATES", 60)
    monkeypatch.setattr(GrammarMatcher, "_failure", lambda self: wager.GrammarError(words, "Let it\nend."))
    with running() as server:
        status, errors = failures(server, TOO_COSTLY)
    assert status == 400
    for error in errors:
        assert (error["type"], error["message"]) == ("invalid_request_error", f"{words} Let it end.")


@pytest.mark.parametrize("words", [runner.NOT_FINITE, "What the grammar read at position {} is no number."])
def test_a_fault_of_the_engine_is_none_of_the_request(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "NOT_FINITE", words)
    with running() as server:
        target = server.llm.engine.runner.target
        forward = target.forward

        def invalid(batch: Any) -> Any:
            output = forward(batch)
            output.logits[:] = float("nan")
            return output

        monkeypatch.setattr(target, "forward", invalid)
        status, errors = failures(server, BODY)
    assert status == 500
    for error in errors:
        assert error["type"] == "server_error" and error["message"].startswith(words.split("{")[0])
