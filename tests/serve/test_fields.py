"""Fields of other engines, and those that are not known: accepted where they change no text, named where they are left
out; what prompts score; schemas that a grammar cannot enforce as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from serve.serving import CHAT, MESSAGES, SHORT, Running, running, tool
from wager.constrain.schemas import relaxed, violations
from wager.serve.bodies import ChatBody, parse

COMPLETIONS = "/v1/completions"
WARNING = "x-wager-warning"
SILENT: list[dict[str, Any]] = [
    {"use_beam_search": False, "skip_special_tokens": True, "priority": 3, "keep_alive": "5m", "cache_prompt": True},
    {"prompt_cache_retention": "24h", "verbosity": "medium", "best_of": None, "service_tier": "auto", "user": "x"},
    {"stream_options": {"include_usage": True}, "tool_choice": "auto", "top_k": -1},
    {"messages": [*MESSAGES, {"role": "assistant", "content": "a", "reasoning_content": "b"}, *MESSAGES]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}
        ]
    },
]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """With a context that holds tools and a call of one."""
    with running({"max_context": 1024}) as started:
        yield started


@pytest.mark.parametrize("token", [-1, 512, 2**70])
def test_a_token_that_is_none_is_refused_before_it_is_repeated(server: Running, token: int) -> None:
    refused = server.post("/v1/completions", {"prompt": [token], "echo": True, "max_tokens": 2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


def test_fields_that_ask_for_nothing_are_taken_without_a_word(server: Running) -> None:
    for fields in SILENT:
        found = server.post(CHAT, {**SHORT, **fields})
        assert found.status_code == 200 and WARNING not in found.headers, found.text


def test_fields_that_are_not_known_are_left_out_by_name(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    named = {"temprature": 1, "a\r\nb: c": 2, "verbosity": "low"}
    message = {**MESSAGES[0], "mood": "good"}
    found = server.post(CHAT, {**SHORT, **named, "messages": [message]})
    told = found.headers[WARNING]
    assert all(word in told for word in ("temprature (temperature?)", "a??b: c", "verbosity", "mood"))
    assert found.json()["choices"] == server.post(CHAT, SHORT).json()["choices"]
    server.post(CHAT, {**SHORT, "chat_template_kwargs": {"a\nb": 1}})
    said = [record.getMessage() for record in caplog.records]
    assert any("temprature" in each for each in said) and any("a?b" in each for each in said)
    assert all(map(str.isprintable, said)), "a caller's text begins no line of the log"
    for path, body in (
        (CHAT, {**SHORT, "reasoning_effort": "high"}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES, "output_config": {"effort": "high"}}),
    ):
        assert "reasoning_effort" in server.post(path, body).headers[WARNING]
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert "mood" in server.post(path, {**body, "mood": "good"}).headers[WARNING]
        assert WARNING not in server.post(path, body).headers
    tools = [{**tool("f"), "x-mine": 1}]
    assert "tools[0].x-mine" in server.post(CHAT, {**SHORT, "ignore_eos": False, "tools": tools}).headers[WARNING]
    left_out: list[str] = []
    parse(ChatBody, json.dumps({**SHORT, "messages": [message] * 1000}).encode(), left_out)
    assert left_out == ["mood"]


def test_other_names_of_a_field(server: Running) -> None:
    body = {name: value for name, value in SHORT.items() if name != "max_tokens"}
    for asked in ({"n_predict": 5}, {"n_predict": None, "max_tokens": 5}, {"n_predict": 5, "max_tokens": None}):
        assert server.post(CHAT, {**body, **asked}).json()["usage"]["completion_tokens"] == 5
    plain = {"messages": MESSAGES, "max_tokens": 40, "seed": 1}
    for guided in (
        {"guided_choice": ["red", "blue"]},
        {"structured_outputs": {"choice": ["red", "blue"]}},
        {"guided_regex": "red|blue"},
        {"guided_grammar": 'start: "red" | "blue"'},
        {"guided_grammar": 'root ::= "red" | blue\nblue ::= "blue"'},
    ):
        assert server.text({**plain, **guided}) in ("red", "blue")
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    for guided in (
        {"guided_json": schema},
        {"guided_json": json.dumps(schema)},
        {"structured_outputs": {"json": schema, "json_object": False}},
        {"response_format": {"type": "json_object", "schema": schema}},
    ):
        assert json.loads(server.text({**plain, **guided})) == {"a": 1}
    any_object = {"response_format": {"type": "json_object", "schema": {}}, "logit_bias": {str(ord("1")): 100}}
    assert server.text({**plain, **any_object}).startswith("{")


def test_functions_are_answered_as_they_were_first(server: Running) -> None:
    function = tool("f", at={"enum": ["x"]})["function"]
    body = {"messages": MESSAGES, "max_tokens": 120, "functions": [function], "function_call": {"name": "f"}}
    [choice] = server.post(CHAT, body).json()["choices"]
    assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"at": "x"}'}
    assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
    for result in ("1", None):
        history = [*MESSAGES, choice["message"], {"role": "function", "name": "f", "content": result}]
        assert server.post(CHAT, {**SHORT, "messages": history}).status_code == 200


def test_an_answer_is_no_shorter_than_min_tokens(server: Running) -> None:
    tokenizer = server.llm.tokenizer
    ending = dict.fromkeys(map(str, tokenizer.eos_ids), 100)  # nothing else is likely
    body = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0, "logit_bias": ending}
    assert server.post(CHAT, body).json()["usage"]["completion_tokens"] == 1
    for speculation in ("off", None):
        told = server.post(CHAT, {**body, "min_tokens": 7, "speculation": speculation}).json()
        assert (told["usage"]["completion_tokens"], told["choices"][0]["finish_reason"]) == (8, "stop")
    letters = [chr(code) for code in range(33, 49)]
    asked = {**SHORT, "max_tokens": 30, "stop": letters}
    free = server.text({**SHORT, "max_tokens": 30})
    found = server.text({**asked, "min_tokens": 30})
    assert found == free


# ---- what prompts score ----------------------------------------------------------------------------------------------


def test_a_prompt_scores_what_its_tokens_would_as_an_answer(server: Running) -> None:
    answer = {"prompt": "abc", "max_tokens": 30, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    [whole] = server.post(COMPLETIONS, answer).json()["choices"]
    ids = server.post("/tokenize", {"prompt": "abc"}).json()["tokens"]
    events = server.streamed({**answer, "speculation_stats": True}, COMPLETIONS)
    parts = [each["speculation"]["token_ids"] for event in events for each in event["choices"] if "speculation" in each]
    prompt = [*ids, *(token for part in parts for token in part)]
    asked = {"prompt": [prompt, ids], "max_tokens": 1, "echo": True, "logprobs": 2, "temperature": 0}
    for speculation in (None, "off"):
        scored, short = server.post(COMPLETIONS, {**asked, "speculation": speculation}).json()["choices"]
        lists = scored["logprobs"]
        assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
        assert lists["token_logprobs"][len(ids) : -1] == whole["logprobs"]["token_logprobs"]
        assert lists["top_logprobs"][len(ids) : -1] == whole["logprobs"]["top_logprobs"]
        assert len(lists["tokens"]) == len(prompt) + 1 and scored["text"].startswith(short["text"][:3])
    alone = server.post(COMPLETIONS, {**asked, "prompt": prompt, "max_tokens": 0, "prompt_logprobs": 0}).json()
    [choice] = alone["choices"]
    assert choice["logprobs"]["token_logprobs"] == lists["token_logprobs"][:-1]
    own = [entry[str(token)]["logprob"] for token, entry in zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)]
    assert np.allclose(own, lists["token_logprobs"][1:-1])
    assert alone["usage"]["completion_tokens"] == 0 and server.is_idle()


def test_echo_begins_an_answer_with_its_prompt(server: Running) -> None:
    body = {"prompt": ["abc", "de"], "max_tokens": 4, "temperature": 0, "n": 2, "ignore_eos": True}
    plain = [each["text"] for each in server.post(COMPLETIONS, body).json()["choices"]]
    whole = [each["text"] for each in server.post(COMPLETIONS, {**body, "echo": True}).json()["choices"]]
    assert whole == [f"{prompt}{text}" for prompt, text in zip(("abc", "abc", "de", "de"), plain, strict=True)]
    texts = [""] * 4
    for event in server.streamed({**body, "echo": True}, COMPLETIONS):
        for each in event["choices"]:
            texts[each["index"]] += each["text"]
    assert texts == whole
    alone = {**body, "echo": True, "max_tokens": 0}
    told = server.post(COMPLETIONS, alone).json()
    assert [each["text"] for each in told["choices"]] == ["abc", "abc", "de", "de"]
    assert told["usage"]["prompt_tokens"] == 5
    refused = server.post(COMPLETIONS, {**alone, "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")


def test_a_prompt_without_an_answer_may_fill_the_context(server: Running) -> None:
    body = {"prompt": [7] * 1024, "echo": True, "max_tokens": 0}
    assert server.post(COMPLETIONS, body).json()["usage"]["prompt_tokens"] == 1024
    [scored] = server.post(COMPLETIONS, {**body, "logprobs": 0}).json()["choices"]
    assert len(scored["logprobs"]["tokens"]) == 1024
    longer = server.post(COMPLETIONS, {**body, "prompt": [7] * 1025})
    assert longer.status_code == 400 and "context length is 1024 tokens." in longer.json()["error"]["message"]
    answered = server.post(COMPLETIONS, {**body, "max_tokens": 1})
    assert answered.status_code == 400 and "for the answer" in answered.json()["error"]["message"]


# ---- schemas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"not": {"const": 1}}, ("not",)),
        ({"type": "array", "uniqueItems": True}, ("uniqueItems",)),
        ({"type": "array", "uniqueItems": False}, ()),
        ({"if": {"type": "string"}, "then": {"minLength": 2}, "type": "string"}, ("if", "then")),
        ({"properties": {"a": {"propertyNames": {"pattern": "^a"}}}}, ()),
        ({"propertyNames": {"maxLength": 3}, "type": "object"}, ("propertyNames",)),
        ({"type": "string", "format": "binary"}, ()),
        ({"type": "string", "format": "iri"}, ("format 'iri'",)),
        ({"type": ["string", "null"], "format": "iri"}, ("format 'iri'",)),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ()),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, ("oneOf of alternatives that overlap",)),
        ({"type": "string", "pattern": "^(?=a).*"}, ("pattern with a look-around or a reference to a group",)),
        ({"type": "string", "pattern": r"\ba"}, ("pattern with a look-around or a reference to a group",)),
        ({"type": "string", "pattern": r"\\\ba"}, ("pattern with a look-around or a reference to a group",)),
        ({"type": "string", "pattern": r"^C:\\bin\\1$"}, ()),
        ({"const": {"not": 1}, "default": {"not": 1}}, ()),
    ],
)
def test_a_schema_without_what_a_grammar_cannot_enforce(server: Running, schema: Any, names: tuple[str, ...]) -> None:
    found = relaxed(schema)
    assert found.unenforced == names
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    answer = server.post(CHAT, {"messages": MESSAGES, "max_tokens": 12, "response_format": wanted})
    assert answer.status_code == 200, answer.text
    assert [name for name in names if name not in answer.headers.get(WARNING, "")] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": None},
        {"oneOf": [{}], "allOf": 5, "anyOf": []},
        {"properties": True},
        {"properties": [{}]},
        {"properties": {"a": {}}, "required": 5},
        {"properties": {"a": {}}, "required": [["a"]]},
    ],
)
def test_what_is_no_schema_is_refused(server: Running, schema: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    refused = server.post(CHAT, {**SHORT, "ignore_eos": False, "response_format": form})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")


def test_objects_have_the_properties_that_a_schema_names_and_no_others() -> None:
    person = {"type": "object", "properties": {"name": {"properties": {"first": {}}}}, "required": ["name"]}
    closed = relaxed(person).schema
    assert closed["additionalProperties"] is False
    assert closed["properties"]["name"]["additionalProperties"] is False
    for more in ({"additionalProperties": True}, {"allOf": []}, {"required": ["other"]}, {"patternProperties": {}}):
        assert relaxed({**person, **more}).schema.get("additionalProperties") is not False
    assert "additionalProperties" not in relaxed({"type": "object"}).schema
    described = {"description": "A thing", "properties": {"description": {"title": "What", "type": "string"}}}
    assert relaxed(described).schema == {
        "properties": {"description": {"type": "string"}},
        "additionalProperties": False,
    }


def test_an_answer_is_checked_against_the_whole_schema_at_its_end(server: Running) -> None:
    two = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    wanted = {"type": "json_schema", "json_schema": {"schema": two}}
    body = {"messages": MESSAGES, "max_tokens": 12, "response_format": wanted}
    found = server.post(CHAT, body)
    broken = "The answer breaks 'uniqueItems' at $."
    assert found.json()["warnings"] == [broken] and broken in found.headers[WARNING]
    assert server.streamed(body)[-1]["warnings"] == [broken]
    call = tool("f", at=two)
    asked = {"messages": MESSAGES, "max_tokens": 120, "tools": [call], "tool_choice": "required"}
    assert "'uniqueItems' at $.at" in server.post(CHAT, {**asked, "parallel_tool_calls": False}).json()["warnings"][0]
    for schema, text in (
        ({"$ref": "http://127.0.0.1:1/x"}, "1"),
        ({"$schema": ["x"]}, "1"),
        ({"multipleOf": 0.5}, "1e400"),
        ({}, "[" * 3000 + "]" * 3000),
    ):
        assert violations(schema, text)[0].startswith("The answer could not be checked")


def test_a_schema_and_tools_together(server: Running) -> None:
    wanted = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {"z": {"const": 1}}}}}
    body = {
        "messages": MESSAGES,
        "max_tokens": 120,
        "tools": [tool("f", at={"enum": ["x"]})],
        "response_format": wanted,
    }
    for seed in range(4):
        message = server.post(CHAT, {**body, "seed": seed}).json()["choices"][0]["message"]
        calls = message.get("tool_calls")
        assert calls or isinstance(json.loads(message["content"]), dict)
