"""Beginnings and ends: vanished clients, a full queue, requests out of time, failures while they run, signals."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

import wager
from serve.serving import (
    CHAT,
    LONG,
    MESSAGES,
    SHORT,
    RealServer,
    Running,
    deaf,
    eventually,
    http_request,
    running,
    served,
)
from wager.constrain import compiler
from wager.constrain.compiler import GrammarMatcher
from wager.serve.limits import ServeOptions
from wager.serve.run import bind


def test_a_full_queue_answers_429_and_keeps_what_it_accepted() -> None:
    with running({"max_sequences": 1}, max_waiting=2) as server, ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: server.post(CHAT, {**LONG, "max_tokens": 100}), range(12)))
        codes = [answer.status_code for answer in answers]
        assert set(codes) == {200, 429} and codes.count(200) >= 3
        for answer in answers:
            if answer.status_code == 429:
                assert 1 <= int(answer.headers["retry-after"]) <= 60
                assert answer.json()["error"]["type"] == "rate_limit_error"
            else:
                assert answer.json()["usage"]["completion_tokens"] == 100
        assert server.post(CHAT, SHORT).status_code == 200


@contextmanager
def held_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No grammar is compiled before the event is set, which it is at the end."""
    go_on, compile = threading.Event(), compiler.GrammarCompiler._compile

    def slow(*given: Any, **named: Any) -> Any:
        assert go_on.wait(30)
        return compile(*given, **named)

    monkeypatch.setattr(compiler.GrammarCompiler, "_compile", slow)
    try:
        yield go_on
    finally:
        go_on.set()


JSON = {"messages": MESSAGES, "max_tokens": 8, "response_format": {"type": "json_object"}}


def test_requests_that_wait_for_a_grammar_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with running({"max_sequences": 1}, max_waiting=2) as server, ThreadPoolExecutor(3) as pool:
        with held_compiler(monkeypatch):
            waiting = [pool.submit(server.post, CHAT, JSON) for _ in range(3)]
            eventually(lambda: server.live()["open"] == 3, "three requests are counted")
            assert server.post(CHAT, SHORT).status_code == 429
        assert [each.result().status_code for each in waiting] == [200] * 3
        assert server.post(CHAT, SHORT).status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_a_stream_that_waits_says_so(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """By comments, which clients skip; then it is what it would have been."""
    body = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0, "stream": True}
    with running({"max_sequences": 1, "max_context": 8192}) as server, server.client() as http:
        plain = server.post(path, body).text
        monkeypatch.setattr("wager.serve.streaming.SILENCE_S", 0.01)
        with http.stream("POST", CHAT, json={**LONG, "max_tokens": 8000, "n": 8, "stream": True}) as first:
            lines = first.iter_lines()
            next(lines)
            with http.stream("POST", path, json=body) as answer:
                events = answer.iter_text()
                assert next(events).startswith(":\n\n")
                first.close()
                rest = "".join(events)
    told, same = ("".join(re.findall('"(?:content|text)":"(.*?)"', text)) for text in (rest, plain))
    assert told == same != ""


def test_the_wait_for_a_grammar_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(request_timeout=0.2) as server, ThreadPoolExecutor(3) as pool, held_compiler(monkeypatch):
        waiting = [pool.submit(server.post, CHAT, {**JSON, "stream": stream}) for stream in (True, True, False)]
        eventually(lambda: sum(each.done() for each in waiting) == 2, "two of them are refused")
        assert [each.result().status_code for each in waiting if each.done()] == [504] * 2
        assert server.live()["open"] == 1


def test_an_engine_that_fails_ends_every_answer_by_name() -> None:
    with running() as server:
        with httpx2.stream("POST", server.url + CHAT, json={**LONG, "stream": True}, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)

            def fail() -> Any:
                raise wager.CacheIntegrityError("Two blocks are one.")

            server.llm.engine.step = fail  # type: ignore[method-assign]
            rest = [line for line in lines if line]
        assert "Two blocks are one." in rest[-2] and rest[-1] == "data: [DONE]"
        with server.client() as http:
            health = http.get("/health")
            assert health.status_code == 503 and "Two blocks" in health.json()["error"]["message"]
            assert http.post(CHAT, json=SHORT).status_code == http.get("/live").status_code == 503


def test_an_address_in_use_is_named() -> None:
    with bind(ServeOptions(("m",), port=0)) as taken:
        taken.listen()
        with pytest.raises(wager.UsageError, match="in use"):
            bind(ServeOptions(("m",), port=taken.getsockname()[1]))
    with pytest.raises(wager.UsageError, match=r"no-such-host\.invalid"):
        bind(ServeOptions(("m",), host="no-such-host.invalid"))


# ---- choices that fail while they run --------------------------------------------------------------------------------


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


def test_the_time_of_a_request_begins_with_its_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its body waits to be read, or its prompt is scored before its answer."""
    with running(request_timeout=0.3) as server:
        read = server.server.bodies.read

        async def late(*given: Any, **more: Any) -> Any:
            await asyncio.sleep(0.4)
            return await read(*given, **more)

        monkeypatch.setattr(server.server.bodies, "read", late)
        status, errors = failures(server, {**BODY, "max_tokens": 6000, "ignore_eos": True})
    assert status == 504 and all("0.3 s" in error["message"] for error in errors)


def test_a_grammar_that_cannot_be_fulfilled_is_the_requests_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "No token is left."
    monkeypatch.setattr(compiler, "MAX_LEXER_STATES", 60)
    monkeypatch.setattr(GrammarMatcher, "_failure", lambda self: wager.GrammarError(words, "Let it\nend."))
    with running() as server:
        status, errors = failures(server, TOO_COSTLY)
        assert server.metrics()[f"wager:http_requests_total,path={CHAT},status=400"] == 2
    assert status == 400
    for error in errors:
        assert (error["type"], error["message"]) == ("invalid_request_error", f"{words} Let it end.")


# ---- the process -----------------------------------------------------------------------------------------------------


SAMPLED: Any = {"messages": MESSAGES, "max_tokens": 200, "temperature": 0.8, "seed": 11, "ignore_eos": True}


MINUTES: Any = {**LONG, "max_tokens": 8000, "stream": True, "n": 8}
"""Some ten seconds of answers, in a context of 8192."""


ROOMY = ("--max-context", "8192", "--drafter", "none")


def stream_in_background(server: RealServer, body: Any) -> tuple[threading.Thread, list[str]]:
    lines: list[str] = []

    def read() -> None:
        try:
            with httpx2.stream("POST", server.url + CHAT, json=body, timeout=60) as answer:
                lines.extend(line for line in answer.iter_lines() if line)
        except httpx2.TransportError as error:
            lines.append(f"lost: {type(error).__name__}")

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread, lines


@pytest.mark.slow
def test_killed_within_answers_it_starts_again_at_once_at_the_same_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lock, no socket, no half-written file is in the way; the answers are the same."""
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path))
    texts, port, files = [], "0", []
    for _ in range(3):
        with served(*ROOMY[:2], "--port", port) as server:
            texts.append((server.text(SAMPLED), server.text(LONG)))
            port = str(server.port)
            reading = [stream_in_background(server, MINUTES) for _ in range(4)]
            eventually(lambda: server.live()["running"] > 0, "nothing runs")
            server.process.send_signal(signal.SIGKILL)
            assert server.process.wait(10) == -signal.SIGKILL
            for thread, lines in reading:
                thread.join(10)
                assert lines[-1].startswith("lost") and not any("[DONE]" in line for line in lines)
        files.append(sorted(path.name for path in tmp_path.rglob("*") if path.is_file()))
    assert len(set(texts)) == 1
    assert files[1] == files[2] and not [name for name in files[2] if "tmp" in name or "part" in name]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(number: signal.Signals) -> None:
    """What runs is answered whole; half a request and new connections are not taken; it exits with 0."""
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("under nohup the server ignores it, as it is to")
    with served() as server, ThreadPoolExecutor(4) as pool:
        plain = server.text(LONG)
        half = server.connect(http_request(LONG)[:-5])
        answers = [pool.submit(server.post, CHAT, LONG) for _ in range(4)]
        eventually(lambda: server.live()["open"] == 4 or all(each.done() for each in answers), "nothing runs")
        server.process.send_signal(number)
        time.sleep(0.3)
        half.sendall(b"e}".rjust(5))
        with pytest.raises(httpx2.TransportError):
            server.post(CHAT, SHORT)
        assert [each.result().json()["choices"][0]["message"]["content"] for each in answers] == [plain] * 4
        assert b" 4" in (head := half.recv(200)) or b" 503 " in head
        assert server.process.wait(30) == 0


@pytest.mark.slow
def test_a_second_ctrl_c_ends_it_at_once_without_a_traceback() -> None:
    with served(*ROOMY) as server:
        _, lines = stream_in_background(server, MINUTES)
        eventually(lambda: server.live()["running"] == 8, "nothing runs")
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        begin = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) in (0, 130)
        assert time.monotonic() - begin < 15, lines[-1:]


@pytest.mark.slow
def test_clients_that_do_not_read_do_not_hold_up_the_end() -> None:
    with served(*ROOMY, "--drain-timeout", "1") as server:
        connections = [deaf(server.url, {**MINUTES, "speculation_stats": True}) for _ in range(3)]
        eventually(lambda: server.live()["running"] > 0, "nothing runs")
        time.sleep(1)
        server.process.terminate()
        assert server.process.wait(30) == 0
        for connection in connections:
            connection.close()


# ---- a drafter that raises while requests run: these go on, with the same text ---------------------------------------


def test_a_drafter_that_breaks_in_mid_flight(caplog: pytest.LogCaptureFixture) -> None:
    """The log names it, the metrics too; requests that come later are answered, also those that ask for it."""
    bodies = [{**SAMPLED, "max_tokens": 60, "seed": seed, "temperature": 0.8 * (seed % 2)} for seed in range(8)]
    with running({"depth": None, "drafter": "ngram,recycle"}) as server, ThreadPoolExecutor(8) as pool:
        plain = [server.text({**body, "speculation": "off"}) for body in bodies]
        drafter = server.llm.engine.proposer.drafters["ngram"]
        propose = drafter.propose

        def broken(requests: Any) -> Any:
            if drafts := propose(requests):
                raise RuntimeError("no more")
            return drafts

        drafter.propose = broken  # type: ignore[method-assign]
        assert list(pool.map(server.text, bodies)) == plain
        assert server.text({**bodies[0], "speculation": {"drafter": "ngram"}}) == plain[0]
        found = server.metrics()
    name = "wager:drafter_failures_total,drafter="
    assert found[f"{name}recycle"] == 0
    assert found[f"{name}ngram"] > 0 and "Drafter 'ngram' failed and " in caplog.text
