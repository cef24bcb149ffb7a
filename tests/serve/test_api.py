"""The API as OpenAI's client and clients of vLLM use it: whole and streamed answers, every sampling field."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import openai
import pytest

import wager
from serve.serving import CHAT, MESSAGES, NAME, OPTIONS, SHORT, Running, running, tool
from wager.serve.formats import encoded, encoded_in_parts, usage
from wager.types import SamplingParams

VOCABULARY = 512


SAMPLED: Any = dict(temperature=0.8, seed=3)


def expected(prompt: Any, **params: Any) -> list[wager.Completion]:
    with wager.LLM("random:llama:tiny", **{**OPTIONS, "drafter": "none", "depth": None}) as llm:
        ask: Any = llm.chat if isinstance(prompt, list) else llm.generate
        return ask([prompt], SamplingParams(**params))  # type: ignore[no-any-return]


def test_a_chat_is_that_of_the_library_whole_and_streamed(client: openai.OpenAI) -> None:
    [plain] = expected(MESSAGES, max_tokens=24, ignore_eos=True, **SAMPLED)
    options: Any = dict(
        model=NAME, messages=MESSAGES, max_completion_tokens=24, **SAMPLED, extra_body={"ignore_eos": True}
    )
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content == plain.text
    assert (whole.choices[0].finish_reason, whole.object, whole.model) == ("length", "chat.completion", NAME)
    assert whole.usage is not None
    assert (whole.usage.completion_tokens, whole.usage.prompt_tokens) == (24, plain.stats.prompt_tokens)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == plain.text
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 24
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert [model.id for model in client.models.list()] == [NAME] == [client.models.retrieve(NAME).id]


def test_a_completion_takes_texts_ids_and_several_of_them(client: openai.OpenAI) -> None:
    options: Any = dict(model=NAME, max_tokens=8, **SAMPLED, extra_body={"ignore_eos": True})
    alone = [client.completions.create(prompt=prompt, **options).choices[0].text for prompt in ("abc", "xyz")]
    together = client.completions.create(prompt=["abc", "xyz"], n=2, **options)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert [together.choices[0].text, together.choices[2].text] == alone
    assert together.usage is not None
    assert (together.usage.prompt_tokens, together.usage.completion_tokens) == (6, 32)
    ids = client.completions.create(prompt=list(b"abc"), **options).choices[0].text
    streamed: dict[int, str] = {}
    for chunk in client.completions.create(prompt=["abc", "xyz"], n=2, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert [streamed[index] for index in range(4)] == [choice.text for choice in together.choices]
    assert len(ids) > 0


def test_every_sampling_field_reaches_the_engine(client: openai.OpenAI) -> None:
    fields: Any = dict(temperature=0.9, seed=11, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.25)
    ours: Any = dict(top_k=40, min_p=0.01, repetition_penalty=1.1, stop_token_ids=[7], ignore_eos=True)
    bias = {50: 3.5, 51: -100.0}
    [plain] = expected(MESSAGES, max_tokens=20, **fields, **ours, logit_bias=bias)
    biases = {str(token): value for token, value in bias.items()}
    asked: Any = dict(model=NAME, messages=MESSAGES, max_tokens=20, **fields, logit_bias=biases, extra_body=ours)
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].message.content == plain.text
    stopping: Any = dict(max_tokens=20, temperature=0.9, seed=11, stop=[plain.text[3:5]])
    [cut] = expected(MESSAGES, **stopping)
    stopped = client.chat.completions.create(model=NAME, messages=MESSAGES, **stopping)
    assert stopped.choices[0].message.content == cut.text


def test_the_client_raises_what_it_raises_with_openai(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="other") as wrong_model:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert (wrong_model.value.code, wrong_model.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x" * 5000}])
    assert too_long.value.code == "context_length_exceeded" and too_long.value.request_id


def test_logprobs_of_a_chat_hold_the_bytes_of_its_text(client: openai.OpenAI) -> None:
    [plain] = expected(MESSAGES, max_tokens=6, logprobs=3, ignore_eos=True)
    options: Any = dict(max_tokens=6, temperature=0, logprobs=True, top_logprobs=3, extra_body={"ignore_eos": True})
    chat = client.chat.completions.create(model=NAME, messages=MESSAGES, **options)
    content = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert [item.logprob for item in content] == pytest.approx([item.logprob for item in plain.logprobs])
    assert all(len(item.top_logprobs) == 3 and item.bytes is not None for item in content)
    assert b"".join(bytes(item.bytes or []) for item in content).decode("utf-8", "replace") == plain.text


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


def test_statistics_of_speculation_when_asked(server: Running) -> None:
    body = {"messages": MESSAGES, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "speculation_stats": True}
    found = server.post("/v1/chat/completions", body).json()["speculation"]
    [choice] = found["choices"]
    assert choice["rounds"] and choice["mean_acceptance_length"] == 40 / choice["rounds"]
    assert choice["accepted"] <= choice["drafted"]
    assert found["stage_seconds"]["forward"] > 0
    events = server.streamed(body)
    told = [each["speculation"] for event in events for each in event["choices"] if "speculation" in each]
    names = [name for item in told for name in item["drafted_by"]]
    assert len(names) == 40 and sum(name != "" for name in names) == events[-1]["speculation"]["choices"][0]["accepted"]
    text = "".join(each["delta"].get("content", "") for event in events for each in event["choices"])
    assert "".join(part["text"] for item in told for part in item["parts"]) == text
    assert any(item["rejected"] for item in told)


def test_usage_in_every_chunk_counts_up(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": MESSAGES, "max_tokens": 30, "ignore_eos": True, "stream_options": options}
    used = [event["usage"] for event in server.streamed(body)]
    counts = [usage["completion_tokens"] for usage in used if usage]
    assert counts == sorted(counts) and counts[-1] == 30
    assert len({usage["prompt_tokens"] for usage in used if usage}) == 1


def test_a_prediction_is_guessed_from_and_counted() -> None:
    """The answer itself, with an edit in its middle, as its own prediction: most of it is accepted."""
    ascii_only = {str(token): -100 for token in range(127, VOCABULARY)}
    asked: Any = dict(model=NAME, messages=MESSAGES, max_tokens=60, temperature=0, logit_bias=ascii_only)
    options = {**asked, "extra_body": {"ignore_eos": True}}
    with (
        running({"drafter": "prediction"}) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        plain = client.chat.completions.create(**options)
        text = plain.choices[0].message.content or ""
        assert plain.usage is not None and plain.usage.completion_tokens_details is None
        edited = text[: len(text) // 2] + "EDIT" + text[len(text) // 2 + 4 :]
        told = client.chat.completions.create(**options, prediction={"type": "content", "content": edited})
        options["extra_body"] = {"ignore_eos": True, "speculation": "off"}
        off = client.chat.completions.create(**options, prediction={"type": "content", "content": edited})
        same = client.chat.completions.create(**options, prediction={"type": "content", "content": text}).usage
    assert off.usage == told.usage  # of the texts alone, not of what was drafted
    assert same is not None and same.completion_tokens_details is not None
    assert same.completion_tokens_details.accepted_prediction_tokens == same.completion_tokens == 60
    assert same.completion_tokens_details.rejected_prediction_tokens == 0
    assert told.choices[0].message.content == text
    assert told.usage is not None and told.usage.completion_tokens_details is not None
    details = told.usage.completion_tokens_details
    tokens = len(server.llm.tokenizer.encode(edited, special=False))
    assert details.accepted_prediction_tokens is not None and details.rejected_prediction_tokens is not None
    assert 30 < details.accepted_prediction_tokens < 60
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == tokens


def test_the_prompts_of_a_request_begin_together() -> None:
    """Not one after each step."""
    with running({"max_sequences": 16, "drafter": "none", "depth": None}) as server:
        target, passes = server.llm.engine.runner.target, []
        forward = target.forward

        def counted(batch: Any) -> Any:
            passes.append(batch)
            time.sleep(0.02)
            return forward(batch)

        target.forward = counted  # type: ignore[method-assign]
        body = {"prompt": [f"text {number}" for number in range(16)], "max_tokens": 4, "ignore_eos": True}
        assert len(server.post("/v1/completions", body).json()["choices"]) == 16
    assert len(passes) < 12


def test_a_long_answer_is_written_in_parts_as_it_would_be_at_once() -> None:
    entry = {"token": "é", "logprob": float("-inf"), "bytes": [195, 169]}
    content = [{**entry, "top_logprobs": [entry] * 20}] * 200
    choice = {"index": 0, "message": {"content": None, "none": {}, "empty": []}, "logprobs": {"content": content}}
    answer = {"id": "x", "choices": [choice, choice], "usage": {"prompt_tokens": 1}}
    assert encoded_in_parts(answer) == encoded(answer)


def test_large_answers_are_not_written_in_the_event_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stream would wait for it."""
    threads: list[bool] = []

    def noting(call: Any) -> Any:
        def noted(*given: Any, **named: Any) -> Any:
            try:
                asyncio.get_running_loop()
                threads.append(False)
            except RuntimeError:
                threads.append(True)
            return call(*given, **named)

        return noted

    monkeypatch.setattr("wager.serve.generation.encoded", noting(encoded))
    monkeypatch.setattr("wager.serve.generation.encoded_in_parts", noting(encoded))
    body = {**SHORT, "max_tokens": 150, "n": 2, "seed": 1, "logprobs": True, "top_logprobs": 20}
    large = server.post(CHAT, body).json()["choices"]
    small = server.post(CHAT, {**body, "n": 1, "max_tokens": 40}).json()["choices"]
    assert threads == [True, False]
    contents = [choice["logprobs"]["content"] for choice in (*large, *small)]
    assert contents[0][:40] == contents[2] and [*map(len, contents)] == [150, 150, 40]
    monkeypatch.setattr("wager.serve.parsing.usage", noting(usage))  # which goes along a prediction
    for tokens in (150, 40):
        server.streamed({**body, "n": 1, "max_tokens": tokens, "stream_options": {"include_usage": True}})
    assert threads[2:] == [True, False]


def test_user_text_never_becomes_a_control_token(server: Running) -> None:
    """A message or a prompt that spells a control token is encoded letter by letter."""
    tokenizer = server.llm.tokenizer
    control = [tokenizer.token(token) for token in range(VOCABULARY) if tokenizer.is_control(token)]
    assert control
    spelled = "\n".join(control)
    tokens = server.post("/tokenize", {"messages": [{"role": "user", "content": spelled}]}).json()["tokens"]
    plain = server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()["tokens"]
    special = [token for token in tokens if tokenizer.is_special(token)]
    assert special == [token for token in plain if tokenizer.is_special(token)]
    assert not any(map(tokenizer.is_special, server.post("/tokenize", {"prompt": spelled}).json()["tokens"]))


TOOLS: Any = [tool("weather", strict=True, at={"enum": ["Oslo", "Rome"]})]


def test_token_paths_take_the_fields_of_vllm(server: Running) -> None:
    plain = server.post("/tokenize", {"prompt": "hello there"}).json()
    told = server.post("/tokenize", {"prompt": "hello there", "return_token_strs": True}).json()
    assert server.post("/detokenize", {"tokens": plain["tokens"]}).json() == {"prompt": "hello there"}
    assert told["tokens"] == plain["tokens"] and len(told["token_strs"]) == plain["count"]
    bare = server.post("/tokenize", {"prompt": "hello there", "add_special_tokens": False}).json()["tokens"]
    assert plain["tokens"][-len(bare) :] == bare
    info = server.get("/tokenizer_info").json()
    assert info["eos_token"] and info["chat_template"] == server.llm.tokenizer.chat_template
    ends = {"prompt": info["eos_token"], "add_special_tokens": False}
    assert server.post("/tokenize", ends).json()["tokens"] == list(server.llm.tokenizer.eos_ids[:1])
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
        assert server.post("/tokenize", body).json()["error"]["param"] == param
    assert json.loads(server.post("/detokenize", {"tokens": []}).text) == {"prompt": ""}
