"""Requests that ask for much: long bodies, many bodies, small caches, hostile schemas; others go on meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from serve.serving import CHAT, SHORT, RealServer, Running, eventually, running, served
from wager.errors import WagerError
from wager.models.random_models import byte_tokenizer
from wager.serve.body_process import QUICK_BYTES, BodyReader
from wager.serve.errors import ApiError
from wager.serve.limits import Turns
from wager.serve.parsing import BodyParser, ParsingContext

CONTEXT, TEXT = 8192, 500_000


COMPLETIONS = "/v1/completions"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


LONG_BODIES: dict[str, tuple[str, Any]] = {
    "text": (COMPLETIONS, {"prompt": "1" * TEXT}),
    "messages": (CHAT, {"messages": [user("a")] * 8_000}),
    "lists": (COMPLETIONS, b'{"prompt":[' + b"[]," * 1_300_000 + b"[]]}"),
}


MODEL = ParsingContext("tiny", byte_tokenizer(512, where="toy"), 512, 64, 512, 1.0)


@pytest.fixture(scope="module")
def reader() -> Iterator[BodyReader]:
    made = BodyReader(MODEL)
    yield made
    made.close()


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with served("--max-context", str(CONTEXT)) as started:
        started.post("/tokenize", {"prompt": "a" * 2 * QUICK_BYTES})  # the process runs
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG_BODIES)
def test_a_stream_goes_on_while_a_long_body_is_read(server: RealServer, name: str) -> None:
    """The longest pause between its chunks is a small part of the time that reading takes: beside 15 busy processes 1
    to 6 %, and 95 to 100 % where the event loop reads the body. How many chunks came in the second before tells nothing
    there: other programs change their rate sixfold."""
    path, body = LONG_BODIES[name]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    chunks, end = list[float](), threading.Event()

    def stream() -> None:
        asked = {"prompt": "a", "max_tokens": 7000, "ignore_eos": True, "stream": True, "temperature": 0}
        while not end.is_set():
            with server.client() as http, http.stream("POST", COMPLETIONS, json=asked) as answer:
                for line in answer.iter_lines():
                    chunks.extend([time.monotonic()] if line else ())
                    if end.is_set():
                        return

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        eventually(lambda: len(chunks) > 10, "no stream")
        with server.client() as http:
            asked = time.monotonic()
            answer = http.post(path, content=content, headers={"content-type": "application/json"})
            told = time.monotonic()
        assert answer.status_code == 400, answer.text[:300]
        times = [asked, *(each for each in chunks if asked < each < told), told]
        assert max(after - before for before, after in pairwise(times)) < (told - asked) / 3
    finally:
        end.set()
        thread.join()


@pytest.mark.slow
def test_what_cannot_fit_is_refused_before_it_is_rendered() -> None:
    """With the code of a prompt that is too long."""
    parser = BodyParser(ParsingContext("tiny", byte_tokenizer(512, where="toy"), 8192, 1024, 512, 1.0))
    for messages, words in (
        ([user("a")] * 70_000, "There are 70000 messages; the context holds 8192 tokens."),
        ([user("a" * 300_000)] * 4, "The text of 'messages' has 1200000 characters;"),
        ([user("a" * 20_000)], "maximum context length is 8192 tokens"),
    ):
        with pytest.raises(ApiError, match=words) as refused:
            parser.chat(json.dumps({"messages": messages}).encode(), "x")
        assert (refused.value.param, refused.value.code) == ("messages", "context_length_exceeded")


@pytest.mark.slow
def test_a_process_that_was_ended_is_started_again() -> None:
    body = {"prompt": "a" * 2 * QUICK_BYTES}
    with running({"max_context": CONTEXT}) as server:
        first = server.post("/tokenize", body)
        process = server.server.bodies._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert server.post("/tokenize", body).json() == first.json()

        second = server.server.bodies._process
        assert second is not None and second is not process
        os.kill(second.pid, signal.SIGSTOP)  # it is ended while it has a body
        threading.Timer(0.5, second.kill).start()
        refused = server.post("/tokenize", body)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1", refused.text
        assert server.post("/tokenize", body).json() == first.json()
        third = server.server.bodies._process
    assert third is not None and third.poll() is not None  # it ends with the server


def test_the_process_reads_what_the_server_would(reader: BodyReader) -> None:
    """Every kind of body, made long by blanks; errors too."""
    parser = BodyParser(MODEL)
    bodies: list[Any] = [
        {"prompt": "a b <|end|> é 日本"},
        {"prompt": ["one", "two"], "n": 3, "seed": 5, "stop": ["x"], "logit_bias": {"7": 1.5}, "stop_token_ids": [3]},
        {"prompt": [[1, 2], [3]], "logprobs": 3, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": "a", "speculation": {"depth": 2, "drafter": "x", "weight": 2.5}, "speculation_stats": True},
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string"}}}},
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"a": "b" * 70_000}}}},
        {"prompt": [600]},
        {"prompt": [-1]},
        {"prompt": []},
        {"prompt": [1] * 600},
        {"prompt": "a", "nonsense": 1},
        {"prompt": "a", "stop_token_ids": [1] * 2000},
        {"prompt": "a", "logit_bias": {"9999": 1}},
        {"prompt": "a", "model": "other"},
        {"prompt": "a", "max_tokens": 10**6},
        {"prompt": "\ud800"},
        {},
    ]

    def outcome(read: Any) -> Any:
        try:
            work = read()
        except WagerError as error:
            return type(error), error.message, error.hint, error.status, getattr(error, "param", None)
        return [*map(tuple, work.prompts)], [
            getattr(work, name) for name in type(work).__slots__ if name not in ("prompts", "head")
        ]

    async def beside(body: bytes) -> Any:
        return await reader.read("completion", body, "x")

    for body in bodies:
        raw = json.dumps(body).encode() + b" " * QUICK_BYTES
        here = outcome(lambda raw=raw: parser.completion(raw, "x"))
        assert outcome(lambda raw=raw: asyncio.run(beside(raw))) == here


def test_of_many_short_bodies_each_turn_of_the_loop_reads_one(reader: BodyReader) -> None:
    turns = [0]

    async def count() -> None:
        while True:
            await asyncio.sleep(0)
            turns[0] += 1

    async def read() -> int:
        await reader.read("completion", b'{"prompt": "a"}', "x")
        return turns[0]

    async def all_turns() -> list[int]:
        counting = asyncio.create_task(count())
        found = await asyncio.gather(*(read() for _ in range(20)))
        counting.cancel()
        return found

    found = asyncio.run(all_turns())
    assert len(set(found)) == 20, found


def test_one_of_each_tenant_has_its_turn() -> None:
    """Whoever comes last does not wait for all that another has asked, and who goes while waiting takes no turn."""
    turns, order = Turns(), list[str]()

    async def ask(tenant: str, number: int) -> None:
        async with turns.turn(tenant):
            order.append(f"{tenant}{number}")
            await asyncio.sleep(0)

    async def all_turns() -> None:
        asked = [asyncio.create_task(ask("anna", number)) for number in range(6)]
        await asyncio.sleep(0)
        asked += [asyncio.create_task(ask("ben", number)) for number in range(2)]
        await asyncio.sleep(0)
        asked[2].cancel()  # while it waits
        while "ben0" not in order:
            await asyncio.sleep(0)
        asked[3].cancel()  # perhaps as it is given its turn
        await asyncio.gather(*asked, return_exceptions=True)
        await ask("carl", 0)

    asyncio.run(asyncio.wait_for(all_turns(), 10))
    assert order.index("ben0") <= 3 and order[-1] == "carl0"
    assert {*order} - {"anna3"} == {"anna0", "anna1", "anna4", "anna5", "ben0", "ben1", "carl0"}


def test_a_body_does_not_wait_for_all_of_another_key(reader: BodyReader) -> None:
    """Short and long ones: of 20 that one key has sent before, at most three are read until it is."""

    async def places(blanks: int) -> int:
        done: list[str] = []

        async def read(tenant: str) -> None:
            await reader.read("completion", b'{"prompt": "a"}' + b" " * blanks, "x", tenant=tenant)
            done.append(tenant)

        tasks = [asyncio.create_task(read("anna")) for _ in range(20)]
        await asyncio.sleep(0)
        await asyncio.gather(*tasks, asyncio.create_task(read("ben")))
        return done.index("ben")

    assert max([asyncio.run(places(blanks)) for blanks in (0, QUICK_BYTES)]) <= 3


def test_a_check_of_an_answer_waits_its_turn(reader: BodyReader) -> None:
    """A pattern may take its five seconds for each choice of an answer; bodies of other keys go between them."""

    async def places() -> int:
        done: list[str] = []

        async def check() -> None:
            assert await reader.check({"const": 1}, "1", tenant="anna") == []
            done.append("anna")

        async def read() -> None:
            await reader.read("completion", b'{"prompt": "a"}' + b" " * QUICK_BYTES, "x", tenant="ben")
            done.append("ben")

        tasks = [asyncio.create_task(check()) for _ in range(20)]
        await asyncio.sleep(0)
        await asyncio.gather(*tasks, asyncio.create_task(read()))
        return done.index("ben")

    assert asyncio.run(places()) <= 3


def test_bodies_of_one_key_leave_room_for_those_of_others() -> None:
    keys = ("anna-0123456789abcdef", "ben-0123456789abcdef")
    more = [f"authorization: Bearer {key}\r\n" for key in keys]
    with running(max_body=10_000, max_bodies=25_000, api_keys=keys) as server:
        first = slow_body(server, 10_000, sent=9_000, more=more[0])
        eventually(lambda: server.server.limits.held >= 9_000, "nothing is read")
        with slow_body(server, 10_000, sent=9_000, more=more[0]) as second:
            assert b" 503 " in second.recv(4096)
        refused = server.post(CHAT, {"messages": [user("a" * 8_000)]}, headers={"authorization": f"Bearer {keys[1]}"})
        assert refused.status_code == 400  # it is read, and too long
        first.close()
        eventually(lambda: server.server.limits.held == 0, "bytes are counted that are gone")


@pytest.mark.slow
def test_bodies_are_bounded_together() -> None:
    with running(max_body=10_000, max_bodies=15_000) as server:
        first, second = (slow_body(server, 10_000, sent=9_000) for _ in range(2))
        eventually(lambda: server.server.limits.held >= 9_000, "nothing is read")
        with second:
            assert b" 503 " in second.recv(4096)
        refused = server.post(CHAT, {"messages": [user("a" * 8_000)]})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1"), refused.text
        assert server.post(CHAT, SHORT).status_code == 200  # there is room for it
        first.close()
        eventually(lambda: server.server.limits.held == 0, "bytes are counted that are gone")
        assert server.post(CHAT, {"messages": [user("a" * 8_000)]}).status_code == 400  # it is read, and too long


def slow_body(server: Running, length: int, *, sent: int, more: str = "") -> socket.socket:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{more}content-length: {length}\r\n\r\n"
    made = server.connect(head.encode() + b" " * sent)
    time.sleep(0.3)
    return made
