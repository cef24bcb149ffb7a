"""The API through the official client: whole and streamed answers, every sampling field, and what is refused."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest

import wager
from serve.serving import MESSAGES, NAME, OPTIONS, Running, running
from wager.serve.formats import encoded, encoded_in_parts
from wager.types import SamplingParams

VOCABULARY = 512
SAMPLED: Any = dict(temperature=0.8, seed=3)


def expected(prompt: Any, **params: Any) -> list[wager.Completion]:
    with wager.LLM("random:llama:tiny", **{**OPTIONS, "drafter": "none", "depth": None}) as llm:
        answer = (
            llm.chat(prompt, SamplingParams(**params))
            if isinstance(prompt, list)
            else llm.generate(prompt, SamplingParams(**params))
        )
        return answer if isinstance(answer, list) else [answer]


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
    answer = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        max_tokens=20,
        **fields,
        logit_bias={str(token): bias[token] for token in bias},
        extra_body=ours,
    )
    assert answer.choices[0].message.content == plain.text
    [cut] = expected(MESSAGES, max_tokens=20, temperature=0.9, seed=11, stop=[plain.text[3:5]])
    stopped = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=20, temperature=0.9, seed=11, stop=[plain.text[3:5]]
    )
    assert stopped.choices[0].message.content == cut.text


def test_logprobs_in_both_forms(client: openai.OpenAI) -> None:
    [plain] = expected(MESSAGES, max_tokens=6, logprobs=3, ignore_eos=True)
    chat = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        max_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ignore_eos": True},
    )
    content = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert [item.logprob for item in content] == pytest.approx([item.logprob for item in plain.logprobs])
    assert all(len(item.top_logprobs) == 3 and item.bytes is not None for item in content)
    assert b"".join(bytes(item.bytes or []) for item in content).decode("utf-8", "replace") == plain.text
    [other] = expected("abc", max_tokens=6, logprobs=2, ignore_eos=True)
    completion = client.completions.create(
        model=NAME, prompt="abc", max_tokens=6, temperature=0, logprobs=2, extra_body={"ignore_eos": True}
    )
    lists = completion.choices[0].logprobs
    assert lists is not None and lists.tokens is not None and lists.text_offset is not None
    assert lists.token_logprobs == pytest.approx([item.logprob for item in other.logprobs])
    assert len(lists.tokens) == 6 and lists.text_offset[0] == 0


def test_statistics_of_speculation_when_asked(server: Running) -> None:
    body = {"messages": MESSAGES, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "speculation_stats": True}
    found = server.post("/v1/chat/completions", body).json()["speculation"]
    [choice] = found["choices"]
    assert choice["rounds"] and choice["mean_acceptance_length"] == 40 / choice["rounds"]
    assert choice["accepted"] <= choice["drafted"]
    assert found["stage_seconds"]["forward"] > 0
    lines = server.post("/v1/chat/completions", {**body, "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    names = [
        name
        for event in events
        for each in event["choices"]
        if "speculation" in each
        for name in each["speculation"]["drafted_by"]
    ]
    assert len(names) == 40 and sum(name != "" for name in names) == events[-1]["speculation"]["choices"][0]["accepted"]
    assert lines[-2] == "data: [DONE]"
    told = [each["speculation"] for event in events for each in event["choices"] if "speculation" in each]
    text = "".join(each["delta"].get("content", "") for event in events for each in event["choices"])
    assert "".join(part["text"] for item in told for part in item["parts"]) == text
    assert any(item["rejected"] for item in told)


def test_usage_in_every_chunk_counts_up(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": MESSAGES, "max_tokens": 30, "ignore_eos": True, "stream": True, "stream_options": options}
    lines = server.post("/v1/chat/completions", body).text.splitlines()
    used = [json.loads(line[6:])["usage"] for line in lines if line.startswith("data: {")]
    counts = [usage["completion_tokens"] for usage in used if usage]
    assert (
        counts == sorted(counts) and counts[-1] == 30 and len({usage["prompt_tokens"] for usage in used if usage}) == 1
    )


def test_models_tokens_version_and_health(server: Running, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    tokens = server.post("/tokenize", {"prompt": "hello there"}).json()
    assert tokens["count"] == len(tokens["tokens"]) > 0
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "hello there"}
    assert server.post("/tokenize", {"messages": MESSAGES}).json()["count"] > 20
    with server.client() as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/version").json() == {"version": wager.__version__}


@pytest.mark.parametrize("more", [{"store": True, "metadata": {"a": "b"}, "user": "u"}, {"max_completion_tokens": 4}])
def test_what_has_no_effect_or_says_the_same_is_taken(server: Running, more: Any) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answers = [server.post("/v1/chat/completions", each).json() for each in (body, {**body, **more})]
    assert answers[0]["choices"] == answers[1]["choices"] and answers[1]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "messages", "messages"),
        ({"messages": []}, "messages", "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages", "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages", "content"),
        ({"messages": MESSAGES, "temprature": 1}, "temprature", "temprature"),
        ({"messages": MESSAGES, "temperature": "1"}, "temperature", "temperature"),
        ({"messages": MESSAGES, "temperature": 3}, "temperature", "temperature"),
        ({"messages": MESSAGES, "top_p": 0}, "top_p", "top_p"),
        ({"messages": MESSAGES, "n": 65}, "n", "n"),
        ({"messages": MESSAGES, "logit_bias": {"a": 1}}, "logit_bias", "logit_bias"),
        ({"messages": MESSAGES, "logit_bias": {"999999": 1}}, "logit_bias", "999999"),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"messages": MESSAGES, "seed": 2**70}, "seed", "64"),
        ({"messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ"),
        ({"messages": MESSAGES, "audio": {}}, "audio", "audio"),
        ({"messages": MESSAGES, "max_tokens": 0}, "max_tokens", "max_tokens"),
        ({"messages": MESSAGES, "speculation": {"depth": -1}}, "speculation", "depth"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages", "512"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused_by_name(
    server: Running, body: Any, param: str | None, words: str
) -> None:
    response = server.post("/v1/chat/completions", body)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param and words in error["message"] and error["type"] == "invalid_request_error"


def test_what_is_not_there(server: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with server.client() as http:
        assert http.get("/v1/nothing").status_code == 404
        assert http.get("/v1/chat/completions").status_code == 405
        for content in (b"", b"{", b"[1]", b"\xff\xfe", b'"x"', b"[" * 100_000):
            response = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
            assert response.status_code == 400 and "error" in response.json()
        response = http.post("/v1/completions", content=b"a=b", headers={"content-type": "text/plain"})
        assert response.status_code == 415


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


def test_a_prediction_is_guessed_from_and_counted() -> None:
    """The answer itself, with an edit in its middle, as its own prediction: most of it is accepted."""
    ascii_only = {str(token): -100 for token in range(127, VOCABULARY)}
    options: Any = dict(
        model=NAME,
        messages=MESSAGES,
        max_tokens=60,
        temperature=0,
        logit_bias=ascii_only,
        extra_body={"ignore_eos": True},
    )
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
