"""Requests that ask for too much: of the cache, the context, the queue, the time, or of whoever reads their fields."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from serve.real_server import RealServer, served
from serve.serving import CHAT, LONG, MESSAGES, SHORT, eventually
from wager.serve.bodies import ChatBody, parse
from wager.serve.errors import ApiError

WORDS = [f"word{number}" for number in range(19)]


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with served("--drafter", "ngram") as started:
        yield started


def refusal(server: RealServer, body: Any, *words: str, path: str = CHAT, param: str | None = None) -> None:
    """A 400 whose message has the words and names the field, and soon."""
    begin = time.monotonic()
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text[:500]
    error = answer.json()["error"]
    assert all(word in error["message"] for word in words), error
    assert error["param"] == param and len(error["message"]) < 2500
    assert time.monotonic() - begin < 20


def test_a_cache_that_is_too_small_for_all_answers_all_of_them_as_alone(tmp_path: Path) -> None:
    """Sequences are preempted and computed again; what could never fit is refused with the reason."""
    bodies: list[Any] = [
        {
            "messages": [{"role": "user", "content": " ".join(WORDS[at:] + WORDS[:at])}],
            "max_tokens": 60 + 7 * at,
            "ignore_eos": True,
            "seed": at,
            "temperature": 0.9 * (at % 2),
            "n": 1 + at % 3,
        }
        for at in range(16)
    ]
    with served("--drafter", "ngram", folder=tmp_path, cache_tokens=512, max_sequences=16) as server:
        alone = [choices(server, body) for body in bodies]
        with ThreadPoolExecutor(16) as pool:
            crowd = list(pool.map(lambda body: choices(server, body), bodies))
        assert crowd == alone
        assert server.metrics()["wager:num_preemptions_total"] > 0
        eventually(server.is_idle, "blocks are kept")
    with served(folder=tmp_path, cache_tokens=128) as server:
        refusal(server, {**LONG, "max_tokens": 200}, "may grow to", "the cache holds 128", param="max_tokens")
        assert server.post(CHAT, SHORT).status_code == 200


def choices(server: RealServer, body: Any) -> list[str]:
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    return [choice["message"]["content"] for choice in answer.json()["choices"]]


def test_prompts_that_are_too_long(server: RealServer) -> None:
    for text, words in (("word " * 500, ("tokens", "512")), ("x" * 4_000_000, ("4000", "characters", "512"))):
        message = [{"role": "user", "content": text}]
        refusal(server, {"messages": message}, *words, param="messages")
        refusal(server, {"prompt": text}, *words, path="/v1/completions", param="prompt")
    refusal(server, {"prompt": "x" * 4_000_000}, "characters", path="/tokenize", param="prompt")
    refusal(server, {"prompt": [1] * 500_000}, "500000 prompt tokens", path="/v1/completions", param="prompt")
    refusal(server, {"prompt": [[1]] * 65}, "65 prompts", path="/v1/completions", param="prompt")
    for text in ("word " * 400, "x" * 4_000_000):
        predicted = {"type": "content", "content": text}
        refusal(server, {**SHORT, "prediction": predicted}, "prediction", param="prediction")


@pytest.mark.parametrize(
    ("fields", "words", "param"),
    [
        ({"n": 65}, ("64",), "n"),
        ({"stop": ["x"] * 17}, ("16",), "stop"),
        ({"stop": [""]}, ("empty",), "stop"),
        ({"logit_bias": {str(token): 1 for token in range(10_000)}}, ("token 512",), "logit_bias"),
        ({"logit_bias": {"1": 101}}, ("100",), "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, ("9" * 80,), "logit_bias"),
        ({f"k{number}": 1 for number in range(200_000)}, ("k0",), "k0"),
        ({"stop_token_ids": [None] * 500_000}, ("stop_token_ids",), "stop_token_ids"),
        ({"temperature": 10**400}, ("temperature",), "temperature"),
        ({"seed": 10**4000}, ("64 bits",), "seed"),
        ({"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(1000)]}, ("128",), "tools"),
        ({"speculation": {"weight": 1e300}}, ("weight",), "speculation"),
    ],
)
def test_fields_that_are_too_much(server: RealServer, fields: Any, words: tuple[str, ...], param: str | None) -> None:
    refusal(server, {**SHORT, **fields}, *words, param=param)


@pytest.mark.parametrize("place", ["body", "message", "bias"])
def test_a_body_of_hundreds_of_thousands_of_mistakes_is_refused_by_the_first(place: str) -> None:
    """An error for each would take more than ten times what reading the body does, and a gigabyte."""
    many = {f"{number:x}": None for number in range(300_000)}
    values = {"message": {"messages": [many]}, "bias": {**SHORT, "logit_bias": many}}.get(place, many)
    with pytest.raises(ApiError) as caught:
        parse(ChatBody, json.dumps(values).encode())
    found = caught.value.__context__
    assert isinstance(found, ValidationError) and found.error_count() < 10


def test_ten_thousand_biases_are_honoured(tmp_path: Path) -> None:
    """On a vocabulary that has as many: the token that is left is the answer, and steps stay quick."""
    with served("--model", "random:llama:tiny") as server:
        bias = {str(token): -100 for token in range(512) if token != 300}
        begin = time.monotonic()
        answer = server.post(
            "/v1/completions",
            {"prompt": "a", "max_tokens": 50, "logit_bias": bias, "temperature": 0, "ignore_eos": True},
        ).json()
        assert len(set(server.post("/tokenize", {"prompt": answer["choices"][0]["text"]}).json()["tokens"])) <= 4
        assert time.monotonic() - begin < 30


# ---- grammars --------------------------------------------------------------------------------------------------------

HOSTILE: dict[str, Any] = {
    "alternatives": {
        "allOf": [
            {
                "anyOf": [
                    {"properties": {f"k{i}_{j}": {"type": "integer"}}, "required": [f"k{i}_{j}"], "type": "object"}
                    for j in range(8)
                ]
            }
            for i in range(10)
        ]
    },
    "intersection": {
        "allOf": [{"type": "string", "pattern": f"^.*[a-{chr(98 + i)}].{{{20 + i}}}$"} for i in range(20)]
    },
    "repetitions": {"type": "string", "pattern": "^(a?){1000}a{1000}$"},
    "ambiguity": {"type": "string", "pattern": "^(.*a.{200})$"},
    "divisors": {"type": "integer", "multipleOf": 99991},
    "optional fields": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2000)}},
    "references": {
        "$defs": {f"a{n}": {"type": "array", "items": {"$ref": f"#/$defs/a{n + 1}"}, "minItems": 2} for n in range(300)}
        | {"a300": {"type": "null"}},
        "$ref": "#/$defs/a0",
    },
    "itself": {"$ref": "#"},
    "size": {"enum": ["x" * 60] * 1200},
}


def test_hostile_schemas_end_and_do_not_stall_other_streams(server: RealServer) -> None:
    """Each is answered or refused by name, and a stream beside them goes on."""
    gaps, end = [], threading.Event()

    def stream() -> None:
        body = {**LONG, "stream": True, "max_tokens": 480}
        while not end.is_set():
            last = time.monotonic()
            with server.client() as http, http.stream("POST", CHAT, json=body) as answer:
                for _ in answer.iter_lines():
                    gaps.append(time.monotonic() - last)
                    last = time.monotonic()

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        for name, schema in HOSTILE.items():
            form = {"type": "json_schema", "json_schema": {"schema": schema}}
            answer = server.post(CHAT, {"messages": MESSAGES, "max_tokens": 60, "seed": 1, "response_format": form})
            assert answer.status_code in (200, 400), (name, answer.text[:300])
            if answer.status_code == 400:
                assert len(answer.json()["error"]["message"]) < 1000, name
    finally:
        end.set()
        thread.join()
    assert max(gaps) < 5, sorted(gaps)[-5:]
    assert server.resident() < 1 << 30
