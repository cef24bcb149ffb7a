"""The Responses API and Anthropic's Messages: every answer and event is one of the official clients' own models, with
the text of a chat; what is kept is kept for one key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from serve.serving import CHAT, MESSAGES, NAME, Running, events_of, eventually, running
from wager.async_llm import ChoiceDelta
from wager.constrain.tools import ToolFormat
from wager.models.random_models import byte_tokenizer
from wager.models.tokenizer import IncrementalDecoder
from wager.prompts import TextPart
from wager.serve.formats import usage
from wager.serve.messages import TokenCountBody, as_chat
from wager.serve.parsing import BodyParser, ParsingContext
from wager.serve.responses import ResponseForm, ResponseStore
from wager.types import Completion, OutputDelta, Stats, TokenLogprob

RESPONSES, ANTHROPIC = "/v1/responses", "/v1/messages"
KEYS = ("key-of-the-first-one", "key-of-the-second-one")
TEXT = MESSAGES[0]["content"]
PLACE: Any = {
    "type": "object",
    "properties": {"at": {"enum": ["Oslo", "Rome"]}},
    "required": ["at"],
    "additionalProperties": False,
}
FUNCTION: Any = {"type": "function", "name": "weather", "description": "Of a place", "parameters": PLACE}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running({"max_context": 1024}, model_names=(NAME, "other")) as started:
        yield started


adapter = cache(TypeAdapter)  # making the one of a union of all events takes 70 ms


def strictly(model: Any, value: Any) -> Any:
    """Validated without conversions."""
    return adapter(model).validate_json(json.dumps(value), strict=True)


def official_response(value: dict[str, Any]) -> None:
    found = strictly(Response, value)
    assert set(value) - {"warnings", "receipts"} <= set(Response.model_fields) and found.output is not None


BODIES: list[dict[str, Any]] = [
    {"input": TEXT, "max_output_tokens": 12, "temperature": 0, "receipts": True},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}], "top_logprobs": 2},
    {
        "input": TEXT,
        "instructions": "Be short.",
        "tools": [FUNCTION],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "metadata": {"a": "b"},
    },
    {"input": TEXT, "tools": [FUNCTION], "text": {"format": {"type": "json_schema", "name": "a", "schema": PLACE}}},
]


@pytest.mark.parametrize("body", BODIES)
def test_responses_whole_and_streamed(server: Running, body: dict[str, Any]) -> None:
    body = {"max_output_tokens": 80, "seed": 3, **body}
    whole = server.post(RESPONSES, body).json()
    official_response(whole)
    events = events_of(server.post(RESPONSES, {**body, "stream": True}).text)
    for event in events:
        strictly(ResponseStreamEvent, event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:3]] == [
        *("response.created", "response.in_progress", "response.output_item.added")
    ]
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    official_response(last)

    def told(response: dict[str, Any]) -> Any:
        texts = [part["text"] for item in response["output"] for part in item.get("content", ())]
        return texts, [(item.get("name"), item.get("arguments")) for item in response["output"]], response["status"]

    assert told(last) == told(whole) and last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    deltas = "".join(event["delta"] for event in events if event["type"].endswith(".delta"))
    assert deltas == "".join([*told(whole)[0], *(arguments or "" for _, arguments in told(whole)[1])])


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_only_the_last_item_of_an_answer_that_was_cut_is_incomplete(server: Running, size: int) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    text = f"Yes.\n{call}{call[:40]}"
    form, stats = ResponseForm("resp_1", {}, ToolFormat.of(None), False, None), Stats(1, 1, 0)
    streamed, whole = (form.writer(server.llm.tokenizer, ()) for _ in range(2))
    for at in range(0, len(text), size):
        ends = "length" if at + size >= len(text) else None
        streamed.events([ChoiceDelta(0, OutputDelta("", 0, text=text[at : at + size], finish_reason=ends))])
    completion = Completion("", 0, (), text, "length", stats)
    counted = usage([completion], prompts=1, prediction=None)
    for found in (whole.whole(completion, counted, {}), streamed.last(completion, counted, {})[1]):
        assert [each["status"] for each in found["output"]] == ["completed", "completed", "incomplete"]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("calls", [ToolFormat.of(None), None])
def test_every_text_has_the_logprobs_of_its_own_tokens(server: Running, calls: ToolFormat | None, size: int) -> None:
    call = '\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    text, tokenizer = f"I look 🔍.{call}It is 🌧.", server.llm.tokenizer
    tokens = [*tokenizer.encode_parts([TextPart(text)]), min(tokenizer.eos_ids)]
    logprobs = tuple(TokenLogprob(token, -at / 64, ()) for at, token in enumerate(tokens))
    form, stats = ResponseForm("resp_1", {}, calls, True, None), Stats(1, len(tokens), 0)
    streamed, whole = (form.writer(tokenizer, ()) for _ in range(2))
    decoder, written = IncrementalDecoder(tokenizer), b""
    for at in range(0, len(tokens), size):
        piece, ends = "".join(map(decoder.push, tokens[at : at + size])), at + size >= len(tokens)
        delta = OutputDelta("", 0, (), piece, (), logprobs[at : at + size], "stop" if ends else None)
        written += streamed.events([ChoiceDelta(0, delta)])
    completion = Completion("", 0, tuple(tokens), text, "stop", stats, (), logprobs)
    counted = usage([completion], prompts=1, prediction=None)
    found = whole.whole(completion, counted, {}), streamed.last(completion, counted, {})[1]
    parts = [[part for item in each["output"] for part in item.get("content", ())] for each in found]
    assert parts[0] == parts[1] and len(parts[0]) == (2 if calls else 1)
    for number, part in enumerate(parts[0]):
        own = b"".join(bytes(item["bytes"]) for item in part["logprobs"]).decode()
        assert own.removesuffix(tokenizer.token_bytes(tokens[-1]).decode()).strip() == part["text"]
        deltas = [event for event in events_of(written.decode()) if event["type"] == "response.output_text.delta"]
        told = [item["logprob"] for each in deltas if each["output_index"] == 2 * number for item in each["logprobs"]]
        assert told == [item["logprob"] for item in part["logprobs"]]
    assert parts[0][-1]["logprobs"][-1]["logprob"] == logprobs[-1].logprob


def test_the_text_is_a_chats(server: Running) -> None:
    same = {"temperature": 0.9, "seed": 11}
    chat = server.post(CHAT, {"messages": MESSAGES, "max_tokens": 20, **same}).json()["choices"][0]["message"][
        "content"
    ]
    response = server.post(RESPONSES, {"input": TEXT, "max_output_tokens": 20, **same}).json()
    assert "".join(part["text"] for part in response["output"][0]["content"]) == chat
    greedy = {"temperature": 0, "max_tokens": 20}
    message = server.post(ANTHROPIC, {"messages": MESSAGES, **greedy}).json()
    chat = server.post(CHAT, {"messages": MESSAGES, **greedy}).json()["choices"][0]["message"]["content"]
    assert message["content"][0]["text"] == chat


def test_a_response_is_continued_read_and_deleted() -> None:
    with (
        running({"max_context": 1024}, api_keys=KEYS) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0], max_retries=0) as first,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[1], max_retries=0) as second,
    ):
        options: Any = {"model": NAME, "max_output_tokens": 10, "temperature": 0}
        one = first.responses.create(input=TEXT, instructions="Be kind.", **options)
        both = [*MESSAGES, {"role": "assistant", "content": one.output_text}, {"role": "user", "content": "more"}]
        two = first.responses.create(input="more", previous_response_id=one.id, **options)
        alone = first.responses.create(input=both, store=False, **options)
        assert alone.output_text == two.output_text and two.previous_response_id == one.id
        assert first.responses.retrieve(one.id).output_text == one.output_text
        streamed = list(first.responses.create(input=TEXT, stream=True, **options))[-1].response  # type: ignore[union-attr]
        assert first.responses.retrieve(streamed.id).output_text == streamed.output_text
        first.responses.delete(one.id)
        for client, name in ((second, two.id), (first, one.id), (first, alone.id)):
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(name)
            with pytest.raises(openai.NotFoundError) as refused:
                client.responses.create(input="more", previous_response_id=name, **options)
            assert refused.value.param == "previous_response_id"
            with pytest.raises(openai.NotFoundError):
                client.responses.delete(name)


def test_what_is_kept_is_bounded_for_each_tenant() -> None:
    now = [0.0]
    store = ResponseStore(most_bytes=1000, seconds=10, clock=lambda: now[0])
    store.put("a", "0", b"{}", b"[]")
    for number in range(5):
        store.put("b", str(number), b"x" * 300, b"[]")
    assert [store.get("b", str(number)) is not None for number in range(5)] == [False, False, True, True, True]
    assert store.get("a", "0") and not store.get("a", "4")
    store.put("a", "9", b"x" * 2000, b"[]")
    assert store.get("a", "9") is None and store.get("a", "0")
    now[0] = 10.0
    assert store.get("a", "0") is None and not store._kept


def test_a_conversation_that_is_too_long_is_cut_if_that_is_wanted(server: Running) -> None:
    turns = [{"role": role, "content": f"{number} " * 40} for number in range(8) for role in ("user", "assistant")]
    body = {"input": [*turns, *MESSAGES], "instructions": "Be kind.", "max_output_tokens": 4, "temperature": 0}
    refused = server.post(RESPONSES, body).json()["error"]
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "input")
    found = server.post(RESPONSES, {**body, "truncation": "auto"})
    assert found.status_code == 200 and "oldest" in found.headers["x-wager-warning"]
    assert 700 < found.json()["usage"]["input_tokens"] < 1024
    tool = {"type": "function", "name": "weather", "parameters": PLACE, "extra": 1}
    found = server.post(RESPONSES, {**body, "truncation": "auto", "tools": [tool], "extra": 1})
    assert found.headers["x-wager-warning"].count("extra") == 2, "each field is named once, however often it was cut"


def test_no_result_stays_whose_call_was_cut_off() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "rain"}
    for turn in ([call, output, *MESSAGES], [call, *MESSAGES, output]):  # a user may write before the result comes
        body, left = {"input": [*MESSAGES, *(turn * 4)], "truncation": "auto"}, set()
        for context in range(150, 600, 20):
            parser = BodyParser(ParsingContext(["x"], byte_tokenizer(512, where="toy"), context, 64, 512, 1.0))
            [prompt] = parser.response(json.dumps(body).encode(), "x", {}).prompts
            text = parser.model.tokenizer.decode(prompt)
            left.add((text.count('"name": "f"'), text.count("rain")))
        assert len(left) > 2 and all(calls == results for calls, results in left), left


def test_what_responses_refuse_is_named(server: Running) -> None:
    for fields, param in (
        ({"input": [{"type": "message", "role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": []}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "wizard"}}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"background": True}, "background"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"model": "another"}, "model"),
    ):
        error = server.post(RESPONSES, {"input": TEXT, **fields}).json()["error"]
        assert error["param"] == param and error["message"], error
    many = dict.fromkeys(map(str, range(17)), "x")
    assert (
        server.post(RESPONSES, {"input": TEXT, "metadata": many}).json()["error"]["code"]
        == "object_above_max_properties"
    )
    found = server.post(RESPONSES, {"input": TEXT, "max_output_tokens": 3, "tools": [{"type": "web_search"}]})
    assert "web_search" in found.headers["x-wager-warning"]


ALTERNATING = (
    "{% for each in messages %}"
    "{% if not loop.first and each.role in ('system', messages[loop.index0 - 1].role) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ each.role }}>{{ each.content }}{% endfor %}"
)


def test_messages_of_agents_are_joined_for_templates_that_refuse_them() -> None:
    """Codex sends two messages of the user, Claude Code one of the system behind the user's."""
    told = [("developer", "Be kind."), ("developer", "Be short."), ("user", "I am here."), ("user", TEXT)]
    with running({"max_context": 1024}) as server:
        server.llm.tokenizer.chat_template = ALTERNATING
        items = [{"type": "message", "role": role, "content": text} for role, text in told]
        found = server.post(RESPONSES, {"input": items, "max_output_tokens": 4, "temperature": 0})
        assert found.status_code == 200 and "joined" in found.headers["x-wager-warning"], found.text
        turns = [{"role": "user", "content": TEXT}, {"role": "system", "content": "Be kind."}]
        late = server.post(ANTHROPIC, {"messages": turns, "max_tokens": 4})
        assert late.status_code == 200 and "joined" in late.headers["x-wager-warning"], late.text
        tokens = server.post("/tokenize", {"messages": turns}).json()["tokens"]
        prompt = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
        assert prompt == f"<system>Be kind.<user>{TEXT}"


# ---- Anthropic's -----------------------------------------------------------------------------------------------------


MESSAGE_BODIES: list[dict[str, Any]] = [
    {"messages": MESSAGES, "temperature": 0, "receipts": True},
    {"messages": MESSAGES, "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]},
    {
        "messages": MESSAGES,
        "tools": [{"name": "weather", "input_schema": PLACE}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    },
    {"messages": MESSAGES, "temperature": 0, "stop_sequences": ["a", "e", " ", "3"]},
    {
        "messages": [
            *MESSAGES,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Well.", "signature": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"at": "Oslo"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}]},
        ],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{"name": "weather", "input_schema": PLACE, "cache_control": {"type": "ephemeral"}}],
    },
]


@pytest.mark.parametrize("body", MESSAGE_BODIES)
def test_messages_whole_and_streamed(server: Running, body: dict[str, Any]) -> None:
    body = {"max_tokens": 100, "temperature": 0, **body}
    whole = server.post(ANTHROPIC, body).json()
    events = events_of(server.post(ANTHROPIC, {**body, "stream": True}).text)
    assert whole["type"] == "message" and whole["role"] == "assistant"
    assert [events[0]["type"], events[-2]["type"], events[-1]["type"]] == [
        *("message_start", "message_delta", "message_stop")
    ]
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]]["json" if "partial_json" in delta else "text"] += delta.get("text") or delta.get(
                "partial_json", ""
            )
    texts = [block["text"] if block["type"] == "text" else json.loads(block["json"]) for block in blocks]
    assert texts == [block["text"] if block["type"] == "text" else block["input"] for block in whole["content"]]
    reasons = {name: whole[name] for name in ("stop_reason", "stop_sequence", "stop_details", "container")}
    assert events[-2]["delta"] == reasons
    if "stop_sequences" in body:
        assert reasons["stop_reason"] == "stop_sequence" and reasons["stop_sequence"] in body["stop_sequences"]
    if "tool_choice" in body:
        assert reasons["stop_reason"] == "tool_use"
    counted = {name: body[name] for name in ("messages", "system", "tools", "tool_choice", "thinking") if name in body}
    usage = whole["usage"]
    tokens = server.post(f"{ANTHROPIC}/count_tokens", counted).json()["input_tokens"]
    assert tokens == usage["input_tokens"] + usage["cache_read_input_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("body", MESSAGE_BODIES)
def test_messages_are_as_anthropics_library_has_them(server: Running, body: dict[str, Any]) -> None:
    """Importing it takes seconds."""
    models = pytest.importorskip("anthropic.types")
    body = {"max_tokens": 100, "temperature": 0, **body}
    strictly(models.Message, server.post(ANTHROPIC, body).json())
    for event in events_of(server.post(ANTHROPIC, {**body, "stream": True}).text):
        if event["type"] != "ping":
            strictly(models.RawMessageStreamEvent, event)


def test_obfuscated_events_have_sizes_that_tell_little(server: Running) -> None:
    """In both of OpenAI's APIs, with the text of a stream without it."""
    padded = {"stream": True, "temperature": 0, "stream_options": {"include_obfuscation": True}}
    for path, body in (
        (CHAT, {"messages": MESSAGES, "max_tokens": 24}),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 24}),
        (RESPONSES, {"input": TEXT, "max_output_tokens": 24}),
    ):
        plain, told = (
            [line.removeprefix("data: ") for line in server.post(path, each).text.splitlines() if "data: {" in line]
            for each in ({**body, "stream": True, "temperature": 0}, {**body, **padded})
        )
        chunks = [chunk for chunk in told if '"obfuscation"' in chunk]
        values = [json.loads(chunk) for chunk in chunks]
        assert len(values) > 3 and {len(chunk.encode()) % 128 for chunk in chunks} == {0}
        assert len({value["obfuscation"] for value in values}) == len(values)
        assert _texts(plain) == _texts(told) != "" and not any("obfuscation" in chunk for chunk in plain)
        assert all("delta" in value or value["choices"] for value in values)
        for value in values if path != "/v1/completions" else ():  # of which there are no models for chunks
            strictly(ResponseStreamEvent if path == RESPONSES else ChatCompletionChunk, value)


def _texts(chunks: list[str]) -> str:
    events = [json.loads(chunk) for chunk in chunks]
    deltas = [event.get("delta", "") for event in events if "choices" not in event]
    choices = [choice for event in events for choice in event.get("choices", ())]
    return "".join(deltas) + "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices
    )


def test_a_refused_format_is_named_as_the_api_does(server: Running) -> None:
    wizard = {"type": "json_schema", "name": "a", "schema": {"type": "wizard"}}
    for form in ({"type": "json_schema"}, {"type": "poem"}, wizard):
        refused = server.post(RESPONSES, {"input": TEXT, "text": {"format": form}})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "text.format"), error
        assert "response_format" not in error["message"], error


def test_a_last_message_of_the_assistant_is_continued(server: Running) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "one two"}]
    found = server.post(ANTHROPIC, {"messages": begun, "max_tokens": 8, "temperature": 0}).json()
    chat = {"messages": begun, "max_tokens": 8, "temperature": 0, "continue_final_message": True}
    same = server.post(CHAT, {**chat, "add_generation_prompt": False}).json()
    assert found["content"][0]["text"] == same["choices"][0]["message"]["content"]
    asked = found["usage"]["input_tokens"] + found["usage"]["cache_read_input_tokens"]
    plain = server.post("/tokenize", {"messages": MESSAGES}).json()["count"]
    assert asked == same["usage"]["prompt_tokens"] == plain + len("one two")
    for nothing in ("", [], [{"type": "thinking", "thinking": "Well.", "signature": "x"}]):
        begun = [*MESSAGES, {"role": "assistant", "content": nothing}]
        assert server.post(f"{ANTHROPIC}/count_tokens", {"messages": begun}).json() == {"input_tokens": plain}


def test_how_to_answer_is_not_dropped_in_silence(server: Running) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4}
    refused = server.post(ANTHROPIC, {**body, "tool_choice": {"type": "any"}})
    assert refused.status_code == 400 and "tool_choice needs tools" in refused.json()["error"]["message"]
    told = server.post(ANTHROPIC, {**body, "output_config": {"effort": "high"}}).headers["x-wager-warning"]
    assert "reasoning_effort" in told
    asked = {"messages": MESSAGES, "output_config": {"effort": "low"}, "thinking": {"type": "disabled"}}
    chat = as_chat(TokenCountBody.model_validate(asked), [])
    assert chat.reasoning_effort is None, "which could begin thoughts"
    assert chat.chat_template_kwargs == {"reasoning_effort": "low"}
    misspelt = {"output_config": {"fromat": {}}, "tools": [{"name": "f", "input_shema": {}, "cache_control": {}}]}
    told = server.post(ANTHROPIC, {**body, **misspelt}).headers["x-wager-warning"]
    assert "fromat" in told and "input_shema" in told and "cache_control" not in told
    asked = {"input": TEXT, "max_output_tokens": 4, "text": {"verbosity": "low"}}
    assert "verbosity" in server.post(RESPONSES, asked).headers["x-wager-warning"]
    with running(strict_fields=True) as strict:
        assert strict.post(RESPONSES, asked).json()["error"]["param"] == "text.verbosity"


def test_errors_of_messages_have_their_own_form() -> None:
    with running(api_keys=KEYS[:1]) as server:
        for headers, body, status, kind in (
            ({}, {}, 401, "authentication_error"),
            ({"x-api-key": KEYS[0]}, {"messages": MESSAGES}, 400, "invalid_request_error"),
            ({"x-api-key": KEYS[0]}, {"messages": MESSAGES, "max_tokens": 4, "model": "x"}, 404, "not_found_error"),
        ):
            found = server.post(ANTHROPIC, body, headers=headers)
            value = found.json()
            assert (found.status_code, value["type"], value["error"]["type"]) == (status, "error", kind)
            assert value["request_id"] == found.headers["x-request-id"] == found.headers["request-id"]
            assert ("'max_tokens' is missing" in value["error"]["message"]) == (status == 400)
        headers = {"x-api-key": KEYS[0], "anthropic-version": "2023-06-01"}
        lost = server.post("/messages", {}, headers=headers).json()
        assert lost["error"]["type"] == "not_found_error" and "Is /v1/messages meant?" in lost["error"]["message"]
        body = {"messages": MESSAGES, "max_tokens": 4}
        for other in ({}, {"authorization": "Bearer none"}):  # its earlier clients send both, if both are set
            assert server.post(ANTHROPIC, body, headers={"x-api-key": KEYS[0], **other}).status_code == 200
        many = server.post(ANTHROPIC, body, headers=[("x-api-key", key) for key in ("none", KEYS[0])])
        assert many.status_code == 401, "a head has room for thousands, each of which is compared with all keys"


def test_what_belongs_to_the_other_api_is_told_so(server: Running) -> None:
    assert "/v1/chat/completions" in server.post(RESPONSES, {"messages": MESSAGES}).json()["error"]["message"]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PLACE}}]
    refused = server.post(ANTHROPIC, {"messages": MESSAGES, "max_tokens": 4, "tools": tools})
    assert refused.status_code == 400 and "input_schema" in refused.json()["error"]["message"]


def test_a_result_that_no_call_asked_for_is_refused(server: Running) -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_9", "content": "rain"}
    output = {"type": "function_call_output", "call_id": "call_9", "output": "rain"}
    call = {"type": "function_call", "call_id": "call_9", "name": "weather", "arguments": "{}"}
    asked = {"role": "user", "content": TEXT}
    for path, body, param, named in (
        (ANTHROPIC, {"messages": [*MESSAGES, {"role": "user", "content": [result]}], "max_tokens": 4}, None, "toolu_9"),
        (RESPONSES, {"input": [asked, output]}, "input", "call_9"),
        (RESPONSES, {"input": [asked, output, call]}, "input", "call_9"),
        (RESPONSES, {"input": [asked, call, {**output, "call_id": None}]}, "input", "has no call_id"),
        (
            ANTHROPIC,
            {"messages": [*MESSAGES, {"role": "user", "content": [{**result, "tool_use_id": None}]}], "max_tokens": 4},
            None,
            "has no tool_use_id",
        ),
    ):
        refused = server.post(path, body)
        error = refused.json()["error"]
        assert (refused.status_code, error.get("param")) == (400, param) and named in error["message"]
    assert server.post(RESPONSES, {"input": [asked, call, output], "max_output_tokens": 4}).status_code == 200


def test_a_stream_that_cannot_go_on_ends_with_an_error_of_its_api() -> None:
    with running({"max_context": 8192}, request_timeout=0.002) as server:
        long = {"stream": True, "temperature": 0}
        response = events_of(server.post(RESPONSES, {**long, "input": TEXT, "max_output_tokens": 8000}).text)
        assert [event["type"] for event in response[:2]] == ["response.created", "response.in_progress"]
        last = response[-1]["response"]
        assert (response[-1]["type"], last["status"], last["error"]["code"]) == (
            *("response.failed", "failed", "server_error"),
        )
        for event in response:
            strictly(ResponseStreamEvent, event)
        message = events_of(server.post(ANTHROPIC, {**long, "messages": MESSAGES, "max_tokens": 8000}).text)
        assert message[-1]["error"]["type"] == "timeout_error"
        eventually(server.is_idle, "a request that was over runs on")


def test_every_name_of_the_model_is_served(server: Running) -> None:
    with server.client() as client:
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == [NAME, "other"]
        assert client.get("/v1/models/other").json()["max_model_len"] == 1024
        refused = client.get("/v1/models/third").json()["error"]["message"]
        assert f"'{NAME}', 'other'" in refused
    assert server.post(CHAT, {"model": "other", "messages": MESSAGES, "max_tokens": 2}).json()["model"] == "other"
