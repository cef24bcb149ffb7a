"""What clients of OpenAI's and vLLM's APIs rely on: errors by name, tools, dumped messages, logprobs, token paths."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

import openai
import pytest

from serve.serving import CHAT, MESSAGES, NAME, Running, called_both_ways, running, tool
from wager.serve.formats import encoded

COMPLETIONS = "/v1/completions"
SHORT: Any = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Descriptions of tools are long in bytes."""
    with running({"max_context": 1024}) as started:
        yield started


TOOLS: Any = [
    tool("weather", strict=True, at={"enum": ["Oslo", "Rome"]}),
    tool("time", strict=True, at={"type": ["integer", "null"]}),
]


def refusal(server: Running, path: str, body: Any) -> Mapping[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    error: Mapping[str, Any] = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and (error["code"] is None or isinstance(error["code"], str))
    return error


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages", "context_length_exceeded"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", None),
        ({"stop_token_ids": [999999]}, "stop_token_ids", None),
        ({"speculation": {"drafter": "eagle3"}}, "speculation", None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wizard"}}}},
            "response_format",
            None,
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "wizard"}}}]}, "tools", None),
        ({"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]}, "tools", None),
        ({"tools": [{"type": "function", "function": {"name": "f"}, "nmae": 1}]}, "tools", None),
        ({"prediction": {"type": "content", "content": "x" * 5000}}, "prediction", None),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"functions": []}, "functions", "unsupported_parameter"),
    ],
)
def test_a_refusal_names_the_field_and_its_code_is_a_word(
    server: Running, fields: Any, param: str, code: str | None
) -> None:
    error = refusal(server, CHAT, {**SHORT, "ignore_eos": False, **fields})
    assert (error["param"], error["code"]) == (param, code), error


@pytest.mark.parametrize("fields", [{"echo": True}, {"suffix": "x"}, {"best_of": 2}, {"prompt": [999999]}])
def test_a_completion_that_is_refused_names_the_field(server: Running, fields: Any) -> None:
    assert refusal(server, COMPLETIONS, {"prompt": "abc", "max_tokens": 2, **fields})["param"] == next(iter(fields))


def test_a_part_that_is_no_text_is_named_with_its_place(server: Running) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}]
    error = refusal(server, CHAT, {**SHORT, "messages": [*MESSAGES, {"role": "user", "content": parts}]})
    assert "'messages.1.content.1.type'" in error["message"] and "text" in error["message"]


def test_the_client_raises_what_it_raises_with_openai(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as wrong_model:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert (wrong_model.value.code, wrong_model.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x" * 5000}])
    assert too_long.value.code == "context_length_exceeded" and too_long.value.request_id
    with running(api_keys=("first-key-0123456789",)) as server:
        stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="another", max_retries=0)
        with stranger, pytest.raises(openai.AuthenticationError) as unknown:
            stranger.models.list()
    assert unknown.value.code == "invalid_api_key"


def test_what_a_method_may_be_is_said(server: Running) -> None:
    with server.client() as http:
        refused = http.get(CHAT)
    assert refused.status_code == 405 and refused.headers["allow"] == "POST"


def test_a_failure_that_nobody_foresaw_is_json(caplog: pytest.LogCaptureFixture) -> None:
    with running() as server:
        server.server.llm.tokenizer.chat_parts = None  # type: ignore[assignment, method-assign]
        answer = server.post(CHAT, SHORT, headers={"x-request-id": "broken-1"})
        assert answer.status_code == 500 and "TypeError" in answer.json()["error"]["message"]
        assert answer.headers["x-request-id"] == "broken-1"
        with server.client() as http:
            assert 'path="/v1/chat/completions",status="500"' in http.get("/metrics").text


def test_a_page_reads_why_it_was_refused() -> None:
    origin = {"origin": "https://example.org"}
    with running(cors=("https://example.org",), api_keys=("first-key-0123456789",)) as server:
        refused = server.post(CHAT, SHORT, headers=origin)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://example.org"
    assert "x-request-id" in refused.headers["access-control-expose-headers"]


# ---- tools and messages --------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "time"}}, "none"])
def test_the_clients_own_assembly_of_a_stream_is_the_whole_answer(
    client: openai.OpenAI, choice: Any, parallel: bool
) -> None:
    options: Any = dict(
        model=NAME,
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice=choice,
        seed=4,
        max_tokens=80,
        parallel_tool_calls=parallel,
    )
    _, calls = called_both_ways(client, **options)
    if choice == "none":
        assert not calls
    elif choice != "auto":
        assert calls


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


# ---- logprobs, statistics ------------------------------------------------------------------------


def test_logprobs_of_a_completion_hold_the_token_itself_and_its_place(client: openai.OpenAI) -> None:
    options: Any = dict(model=NAME, prompt="abc", max_tokens=40, seed=6, extra_body={"ignore_eos": True})
    choice = client.completions.create(logprobs=2, **options).choices[0]
    lists = choice.logprobs
    assert lists is not None and lists.tokens and lists.token_logprobs and lists.top_logprobs and lists.text_offset
    for token, logprob, top in zip(lists.tokens, lists.token_logprobs, lists.top_logprobs, strict=True):
        assert top[token] == logprob and len(top) <= 3
    places = dict(zip(lists.text_offset, lists.tokens, strict=True))  # the last token of each place
    assert sum(not token.startswith("bytes:") for token in places.values()) > 3
    for place, token in places.items():
        assert token.startswith("bytes:") or choice.text[place:].startswith(token)
    streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(logprobs=2, stream=True, **options)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for item in streamed if item for value in getattr(item, name)] == getattr(lists, name)
    alone = client.completions.create(logprobs=0, **options).choices[0].logprobs
    assert alone is not None and alone.top_logprobs == [
        {token: logprob} for token, logprob in zip(lists.tokens, lists.token_logprobs, strict=True)
    ]


def test_seconds_by_stage_count_a_step_once_however_many_choices_it_serves(server: Running) -> None:
    body = {**SHORT, "max_tokens": 60, "n": 6, "speculation_stats": True}
    found = server.post(CHAT, body).json()["speculation"]
    longest = max(choice["prefill_s"] + choice["decode_s"] for choice in found["choices"])
    assert 0 < sum(found["stage_seconds"].values()) <= 1.5 * longest


def test_large_answers_are_not_written_in_the_event_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stream would wait for it."""
    threads: list[bool] = []

    def write(value: Any) -> bytes:
        try:
            asyncio.get_running_loop()
            threads.append(False)
        except RuntimeError:
            threads.append(True)
        return encoded(value)

    monkeypatch.setattr("wager.serve.generation.encoded", write)
    monkeypatch.setattr("wager.serve.generation.encoded_in_parts", write)
    body = {**SHORT, "max_tokens": 150, "n": 2, "seed": 1, "logprobs": True, "top_logprobs": 20}
    large = server.post(CHAT, body).json()["choices"]
    small = server.post(CHAT, {**body, "n": 1, "max_tokens": 40}).json()["choices"]
    assert threads == [True, False]
    contents = [choice["logprobs"]["content"] for choice in (*large, *small)]
    assert contents[0][:40] == contents[2] and [*map(len, contents)] == [150, 150, 40]


# ---- /tokenize -----------------------------------------------------------------------------------


def test_token_paths_take_the_fields_of_vllms(server: Running) -> None:
    plain = server.post("/tokenize", {"prompt": "hello there"}).json()
    told = server.post("/tokenize", {"prompt": "hello there", "return_token_strs": True}).json()
    assert told["tokens"] == plain["tokens"] and len(told["token_strs"]) == plain["count"]
    bare = server.post("/tokenize", {"prompt": "hello there", "add_special_tokens": False}).json()["tokens"]
    assert plain["tokens"][-len(bare) :] == bare
    whole = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    before = server.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}).json()["tokens"]
    assert len(before) < len(whole) and whole[: len(before)] == before
    with_tools = server.post("/tokenize", {"messages": MESSAGES, "tools": TOOLS}).json()["count"]
    asked = server.post(CHAT, {**SHORT, "ignore_eos": False, "tools": TOOLS}).json()["usage"]["prompt_tokens"]
    assert with_tools == asked > len(whole)
    for body, param in (
        ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "a", "tools": TOOLS}, "tools"),
        ({"messages": []}, "messages"),
        ({}, "prompt"),
        ({"prompt": "a", "chat_template": "x"}, "chat_template"),
    ):
        assert refusal(server, "/tokenize", body)["param"] == param
    assert json.loads(server.post("/detokenize", {"tokens": []}).text) == {"prompt": ""}


# ---- clients that do not read --------------------------------------------------------------------


def test_a_client_that_reads_nothing_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays connected; its answer fills the buffers between, and its time is over."""
    monkeypatch.setattr("wager.serve.streaming._LAST_EVENT_S", 0.2)
    body = {
        "messages": MESSAGES,
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
        "n": 8,
        "logprobs": True,
        "top_logprobs": 20,
    }
    content = json.dumps(body).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    with running(request_timeout=3.0) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.sendall(head.encode() + content)
            end = time.monotonic() + 30
            while not server.server.admission.open:
                assert time.monotonic() < end
                time.sleep(0.01)
            while server.server.admission.open:
                assert time.monotonic() < end, "a client that reads nothing keeps its place"
                time.sleep(0.05)
            assert server.post(CHAT, SHORT).status_code == 200
