"""Schemas and tools: answers follow them, whatever is guessed, and calls are written as the chat template does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from serve.serving import CHAT, MESSAGES, NAME, Running, running, tool
from wager.constrain.tools import ToolFormat
from wager.models.random_models import byte_tokenizer
from wager.serve.formats import CallWriter
from wager.serve.parsing import BodyParser, ParsingContext

SCHEMA: Any = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_follows_its_schema_and_is_the_same_however_it_is_drafted(
    server: Running, temperature: float
) -> None:
    body = {"messages": MESSAGES, "temperature": temperature, "seed": 5, "response_format": FORMAT, "max_tokens": 100}
    texts, drafters = [], set[str]()
    for speculation in (None, "off", {"depth": 0}, {"depth": 2}, {"drafter": "ngram", "depth": 3}):
        asked = {**body, "speculation": speculation, "speculation_stats": True}
        found = server.post(CHAT, asked).json()
        texts.append(found["choices"][0]["message"]["content"])
        events = server.streamed(asked)
        told = [each["speculation"] for event in events for each in event["choices"] if "speculation" in each]
        drafters |= {name for each in told for name in each["drafted_by"]}
        if speculation in ("off", {"depth": 0}):
            assert found["speculation"]["choices"][0]["drafted"] == 0
    value = json.loads(texts[0])
    assert value["name"] in ("Ann", "Bob") and 0 <= value["age"] <= 99 and set(value) == {"name", "age"}
    assert set(texts) == {texts[0]} and "grammar" in drafters
    assert found["choices"][0]["finish_reason"] == "stop"


def test_any_object_and_completions_with_a_schema(server: Running, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=200, seed=1, response_format={"type": "json_object"}
    )
    assert (whole.choices[0].message.content or "").startswith("{")
    body = {"prompt": "abc", "response_format": FORMAT, "max_tokens": 100, "seed": 2}
    assert set(json.loads(server.post("/v1/completions", body).json()["choices"][0]["text"])) == {"name", "age"}


# ---- tools -----------------------------------------------------------------------------------------------------------


TOOLS: Any = [
    tool("weather", strict=True, at={"enum": ["Oslo", "Rome"]}),
    tool("time", strict=True, at={"type": ["integer", "null"]}),
]


ONE_FUNCTION = {"type": "function", "function": {"name": "time"}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Descriptions of tools are long in bytes."""
    with running({"max_context": 1024}) as started:
        yield started


@pytest.mark.parametrize(
    ("choice", "parallel"),
    [("auto", True), ("required", True), ("required", False), (ONE_FUNCTION, True), ("none", True)],
)
def test_the_clients_own_assembly_of_a_stream_is_the_whole_answer(
    client: openai.OpenAI, choice: Any, parallel: bool
) -> None:
    options: Any = dict(model=NAME, messages=MESSAGES, tools=TOOLS, seed=4, max_tokens=80)
    options |= dict(tool_choice=choice, parallel_tool_calls=parallel)
    whole, state = client.chat.completions.create(**options).choices[0], ChatCompletionStreamState()
    for chunk in client.chat.completions.create(**options, stream=True):
        state.handle_chunk(chunk)
    streamed = state.current_completion_snapshot.choices[0]
    calls, same = (
        [(call.function.name, call.function.arguments) for call in each.message.tool_calls or []]  # type: ignore[attr-defined]
        for each in (whole, streamed)
    )
    assert calls == same and whole.finish_reason == streamed.finish_reason
    assert (whole.message.content or "") == (streamed.message.content or "")
    if choice == "none":
        assert not calls
    elif choice != "auto":
        assert calls


ANY: Any = {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        *(
            (each, "{}")
            for each in (None, {}, ANY, {**ANY, "required": [], "$schema": "http://json-schema.org/draft-07/schema#"})
        ),
        ({**ANY, "properties": {"filter": ANY}, "required": ["filter"]}, '{"filter": {"'),
        ({**ANY, "additionalProperties": {}}, '{"'),
        ({**ANY, "anyOf": [{"required": ["a"], "properties": {"a": {"const": 1}}}]}, '{"a": 1'),
    ],
)
def test_a_function_without_parameters_is_called_without_arguments(
    server: Running, parameters: Any, arguments: str
) -> None:
    """But an object within them that has none is any object, as elsewhere: clients write it so to please a server."""
    tools = [{"type": "function", "function": {"name": "now", "parameters": parameters}}]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    body |= {"max_tokens": 100, "seed": 1, "logit_bias": {str(ord('"')): 100}}  # with which a name would begin
    [choice] = server.post(CHAT, body).json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["arguments"].startswith(arguments)


def test_without_permission_what_looks_like_a_call_is_text(server: Running) -> None:
    """tool_choice "none": the answer may spell a call, and is content all the same."""
    call = {"name": "weather", "arguments": {"at": "Oslo"}}
    form = {"type": "json_schema", "json_schema": {"schema": {"const": call}}}
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none", "response_format": form, "max_tokens": 100}
    [choice] = server.post(CHAT, body).json()["choices"]
    assert json.loads(choice["message"]["content"]) == call and "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_an_answer_goes_into_the_next_request_as_it_came(client: openai.OpenAI) -> None:
    options: Any = dict(model=NAME, tools=TOOLS, seed=4, max_tokens=60)
    message = client.chat.completions.create(messages=MESSAGES, tool_choice="required", **options).choices[0].message
    assert message.tool_calls
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    cut_off = message.model_copy(deep=True)
    cut_off.tool_calls[0].function.arguments = '{"at": "Os'  # type: ignore[index, union-attr]
    for answer in (message, message.model_dump(), cut_off):
        client.chat.completions.create(messages=[*MESSAGES, answer, *results], tool_choice="auto", **options)


# ---- forms of chat templates -----------------------------------------------------------------------------------------


_TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}A call: OPEN{"name": ..., "ARGUMENTS": ...}CLOSE<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
OPEN{"name": "{{ call.function.name }}", "ARGUMENTS": {{ call.function.arguments | tojson }}}CLOSE{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


FORMS = {
    "hermes": ("<tool_call>\n", "\n</tool_call>", "arguments"),
    "mistral": ("[TOOL_CALLS][", "]", "arguments"),
    "llama3": ("{# ipython #}", "", "parameters"),
}


def test_a_call_that_comes_in_one_piece_is_one_entry() -> None:
    """Clients read the first entry of a chunk alone."""
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    [entry] = CallWriter(ToolFormat.of(None)).push(text, last=True)["tool_calls"]
    assert entry["function"] == {"name": "f", "arguments": '{"a": 1}'}


FORM_TOOLS: Any = [tool("weather", at={"enum": ["Oslo", "Röm"]}), tool("open", at={"type": ["boolean", "null"]})]


@pytest.fixture(
    scope="module", params=["hermes", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "llama3"))]
)
def form(request: pytest.FixtureRequest) -> Iterator[tuple[Running, tuple[str, str, str]]]:
    opening, closing, arguments = FORMS[request.param]
    with running({"max_context": 1024}) as server:
        template = _TEMPLATE.replace("OPEN", opening).replace("CLOSE", closing).replace("ARGUMENTS", arguments)
        server.llm.tokenizer.chat_template = template
        yield server, FORMS[request.param]


def test_what_the_model_writes_is_the_templates_form(form: tuple[Running, tuple[str, str, str]]) -> None:
    server, (opening, closing, arguments) = form
    body = {"messages": MESSAGES, "tools": FORM_TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    body |= {"max_tokens": 150, "seed": 1, "logprobs": True}
    [choice] = server.post("/v1/chat/completions", body).json()["choices"]
    written = b"".join(bytes(item["bytes"]) for item in choice["logprobs"]["content"]).decode()
    [call] = choice["message"]["tool_calls"]
    name, given = call["function"]["name"], call["function"]["arguments"]
    shown = opening.replace("{# ipython #}", "")
    assert written == f'{shown}{{"name": "{name}", "{arguments}": {given}}}{closing}'


def test_earlier_calls_are_written_in_it(form: tuple[Running, tuple[str, str, str]]) -> None:
    server, (opening, closing, arguments) = form
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"at": "Röm"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    tokens = server.post("/tokenize", {"messages": messages, "tools": FORM_TOOLS}).json()["tokens"]
    prompt = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    shown = opening.replace("{# ipython #}", "")
    assert f'{shown}{{"name": "weather", "{arguments}": {{"at": "Röm"}}}}{closing}<|im_end|>' in prompt
    assert prompt.endswith("<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n")
    without = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert prompt.endswith(server.post("/detokenize", {"tokens": without}).json()["prompt"])


_MISTRAL = """{% for message in messages %}{% for call in message.tool_calls or [] %}
{% if call.id|length != 9 %}{{ raise_exception("9 characters") }}{% endif %}[TOOL_CALLS]{{ call.id }}
{% endfor %}{% if message.role == "tool" %}{{ message.tool_call_id }}{% endif %}{{ message.content }}{% endfor %}"""


def test_ids_of_calls_are_as_long_as_templates_of_mistral_want_them() -> None:
    tokenizer = byte_tokenizer(512, where="toy").with_chat_template(_MISTRAL)
    parser = BodyParser(ParsingContext(["x"], tokenizer, 512, 64, 512, 1.0))
    for ids in (["call_0123456789abcdef"], ["1", "2"], ["a-weather_today", "b-weather_today"], ["aB3456789"]):
        calls = [{"id": each, "type": "function", "function": {"name": "f", "arguments": "{}"}} for each in ids]
        results = [{"role": "tool", "tool_call_id": each, "content": "rain"} for each in ids]
        body = {"messages": [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": calls}, *results]}
        [prompt] = parser.chat(json.dumps(body).encode(), "x").prompts
        written = re.findall(r"\[TOOL_CALLS\](\w{9})\n|(\w{9})rain", parser.model.tokenizer.decode(prompt))
        found = ["".join(each) for each in written]
        assert found[: len(ids)] == found[len(ids) :] and len({*found}) == len(ids), found
    assert found[0] == ids[0]
