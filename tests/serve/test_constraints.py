"""Schemas, tools and speculation by request over HTTP: answers follow them, and are the same without speculation."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from serve.serving import CHAT, MESSAGES, NAME, Running, eventually, running, tool

SCHEMA: Any = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = tool("weather", place={"enum": ["Oslo", "Rome"]})
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_follows_its_schema_and_is_the_same_however_it_is_drafted(
    server: Running, temperature: float
) -> None:
    body = {"messages": MESSAGES, "temperature": temperature, "seed": 5, "response_format": FORMAT, "max_tokens": 100}
    texts = []
    for speculation in (None, "off", {"depth": 0}, {"depth": 2}, {"drafter": "ngram", "depth": 3}):
        found = server.post(CHAT, {**body, "speculation": speculation, "speculation_stats": True}).json()
        texts.append(found["choices"][0]["message"]["content"])
        [stats] = found["speculation"]["choices"]
        if speculation in ("off", {"depth": 0}):
            assert stats["drafted"] == 0
    value = json.loads(texts[0])
    assert value["name"] in ("Ann", "Bob") and 0 <= value["age"] <= 99 and set(value) == {"name", "age"}
    assert set(texts) == {texts[0]}
    assert found["choices"][0]["finish_reason"] == "stop"


def test_tokens_that_a_schema_forces_are_guessed(server: Running) -> None:
    body = {"messages": MESSAGES, "seed": 5, "response_format": FORMAT, "speculation_stats": True, "stream": True}
    lines = server.post(CHAT, body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    names = [
        name
        for event in events
        for each in event["choices"]
        if "speculation" in each
        for name in each["speculation"]["drafted_by"]
    ]
    assert "grammar" in names


def test_any_object_and_completions_with_a_schema(server: Running, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=200, seed=1, response_format={"type": "json_object"}
    )
    assert (whole.choices[0].message.content or "").startswith("{")
    body = {"prompt": "abc", "response_format": FORMAT, "max_tokens": 100, "seed": 2}
    assert set(json.loads(server.post("/v1/completions", body).json()["choices"][0]["text"])) == {"name", "age"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_demanded_tool_is_called_whole_and_streamed(client: openai.OpenAI, choice: Any) -> None:
    options: Any = dict(
        model=NAME,
        messages=MESSAGES,
        tools=[WEATHER],
        tool_choice=choice,
        seed=3,
        max_tokens=200,
        parallel_tool_calls=False,
    )
    whole = client.chat.completions.create(**options).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.tool_calls
    [call] = whole.message.tool_calls
    assert call.type == "function" and call.function.name == "weather" and call.id
    assert json.loads(call.function.arguments)["place"] in ("Oslo", "Rome")
    name, arguments, reasons = "", "", []
    for chunk in client.chat.completions.create(**options, stream=True):
        for part in chunk.choices:
            reasons.append(part.finish_reason)
            for piece in part.delta.tool_calls or []:
                assert piece.function is not None
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
    assert (name, arguments) == ("weather", call.function.arguments)
    assert reasons[-1] == "tool_calls"


def test_earlier_calls_and_their_results_are_part_of_the_conversation(client: openai.OpenAI) -> None:
    call: Any = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Oslo"}'}}
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    answer = client.chat.completions.create(model=NAME, messages=messages, tools=[WEATHER], max_tokens=8, temperature=0)
    without = client.chat.completions.create(model=NAME, messages=MESSAGES, tools=[WEATHER], max_tokens=8)
    assert answer.usage is not None and without.usage is not None
    assert answer.usage.prompt_tokens > without.usage.prompt_tokens


def test_a_drafter_that_the_server_has_not_is_refused_in_words_of_the_api(server: Running) -> None:
    error = server.post(CHAT, {"messages": MESSAGES, "speculation": {"drafter": "eagle3"}}).json()["error"]
    assert "'eagle3'" in error["message"] and "this engine has ngram" in error["message"]
    assert '"speculation": "off"' in error["message"] and "async-" not in error["message"]
    for wrong in ("on", True, 3, ["off"]):
        error = server.post(CHAT, {"messages": MESSAGES, "speculation": wrong}).json()["error"]
        assert error["param"] == "speculation", error
        assert 'it is "off", or an object of drafter, depth and weight' in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wizard"}}}},
            "response_format",
        ),
        ({"response_format": FORMAT, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": FORMAT, "tools": [WEATHER]}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"speculation": {"drafter": "eagle3"}}, "speculation"),
    ],
)
def test_what_cannot_be_constrained_is_refused(server: Running, fields: Any, param: str | None) -> None:
    answer = server.post(CHAT, {"messages": MESSAGES, "max_tokens": 5, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_the_tables_of_grammars_are_made_before_the_first_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making them holds the interpreter's lock for a while, once."""
    monkeypatch.setattr("wager.serve.app._FIRST_REQUESTS_S", 0.0)
    with running() as started:
        grammars = started.llm.engine.grammars
        eventually(lambda: "_built_vocabulary" in vars(grammars), "they are not made")
