"""What goes wrong: vanished clients, a full queue, slow and long requests, wrong keys, a failing engine, the end."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

import wager
from serve.serving import CHAT, LONG, SHORT, Running, eventually, running
from wager.serve.limits import ServeOptions, read_api_keys
from wager.serve.run import bind


def slow_down(server: Running, seconds: float) -> None:
    """Every pass of the target takes so much longer."""
    forward = server.llm.engine.runner.target.forward

    def slow(batch: Any) -> Any:
        time.sleep(seconds)
        return forward(batch)

    server.llm.engine.runner.target.forward = slow  # type: ignore[method-assign]


def raw(server: Running, data: bytes) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    made = socket.create_connection((host, int(port)), timeout=30)
    made.sendall(data)
    return made


def http_request(body: Any, path: str = CHAT) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_vanish_free_their_blocks_and_the_others_are_answered(stream: bool) -> None:
    with running() as server:
        scheduler = server.llm.engine.scheduler
        free = scheduler.block_pool.num_free_blocks
        [plain] = [server.post(CHAT, SHORT).json()["choices"]]
        for _ in range(30):
            with raw(server, http_request({**LONG, "stream": stream})) as connection:
                if stream:
                    assert connection.recv(100)
        assert server.post(CHAT, SHORT).json()["choices"] == plain
        eventually(lambda: not scheduler.busy and server.server.admission.open == 0, "requests of vanished clients run")
        assert scheduler.block_pool.num_free_blocks == free
        server.llm.engine.check()


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


def test_a_request_that_takes_too_long_ends_by_name() -> None:
    with running(request_timeout=0.05) as server:
        slow_down(server, 0.02)
        whole = server.post(CHAT, LONG)
        assert whole.status_code == 504 and "0.05 s" in whole.json()["error"]["message"]
        lines = [line for line in server.post(CHAT, {**LONG, "stream": True}).text.splitlines() if line]
        assert "0.05 s" in lines[-2] and lines[-1] == "data: [DONE]"
        eventually(lambda: not server.llm.engine.scheduler.busy, "a request goes on after its time")


def test_bodies_and_heads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wager.serve.connections.HEAD_TIMEOUT_S", 0.5)
    with running(max_body=2000, body_timeout=0.5) as server:
        assert server.post(CHAT, {"messages": [{"role": "user", "content": "x" * 3000}]}).status_code == 413
        with raw(
            server, b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        ) as slow:
            slow.sendall(b"800\r\n" + b"x" * 2048 + b"\r\n")
            assert b" 413 " in slow.recv(4096)
        with raw(server, http_request(SHORT)[:-5]) as slow:
            assert b" 408 " in slow.recv(4096)
        with raw(server, b"GET /health HTTP/1.1\r\nhost:") as slow:
            assert b" 408 " in slow.recv(4096)
        with raw(server, b"GET /health HTTP/1.1\r\n" + b"a: " + b"x" * 100_000) as long:
            assert b" 431 " in long.recv(4096)
        with raw(server, b"nonsense\r\n\r\n") as wrong:
            assert b" 400 " in wrong.recv(4096)
        assert server.post(CHAT, SHORT).status_code == 200


def test_keys_are_needed_but_not_for_health(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# keys\n\nfirst-key-0123456789\n second-key-0123456789 \n")
    with running(api_keys=read_api_keys(path)) as server:
        assert server.post(CHAT, SHORT).status_code == 401
        for wrong in ("Bearer first-key-012345678", "Basic first-key-0123456789", "first-key-0123456789", "Bearer"):
            refused = server.post(CHAT, SHORT, headers={"authorization": wrong})
            assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
        for key in ("first-key-0123456789", "second-key-0123456789"):
            assert server.post(CHAT, SHORT, headers={"authorization": f"Bearer {key}"}).status_code == 200
        with server.client() as http:
            assert http.get("/health").status_code == 200
            assert http.get("/v1/models").status_code == 401
    path.write_text("short\n")
    with pytest.raises(wager.UsageError, match="Line 1"):
        read_api_keys(path)
    path.write_text("#\n")
    with pytest.raises(wager.UsageError, match="no API key"):
        read_api_keys(path)


def test_other_origins_may_call_only_if_they_were_named() -> None:
    asked = {"origin": "https://example.org", "access-control-request-method": "POST"}
    with running() as server, server.client() as http:
        assert "access-control-allow-origin" not in http.get("/health", headers=asked).headers
    with running(cors=("https://example.org",)) as server, server.client() as http:
        found = http.options(CHAT, headers=asked).headers["access-control-allow-origin"]
        assert found == "https://example.org"
        other = http.get("/health", headers={"origin": "https://example.com"})
        assert "access-control-allow-origin" not in other.headers


def test_request_ids_come_back() -> None:
    with running() as server:
        given = server.post(CHAT, SHORT, headers={"x-request-id": "my-id.1"})
        assert given.headers["x-request-id"] == "my-id.1" and given.json()["id"] == "chatcmpl-my-id.1"
        strange = server.post(CHAT, SHORT, headers={"x-request-id": "a b"}).headers["x-request-id"]
        assert len(strange) == 32


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
            assert http.post(CHAT, json=SHORT).status_code == 503


def test_an_orderly_end_answers_what_runs_and_takes_nothing_new() -> None:
    answers: list[httpx2.Response] = []
    with running(drain_timeout=20.0) as server:
        thread = threading.Thread(target=lambda: answers.append(server.post(CHAT, LONG)))
        thread.start()
        eventually(lambda: server.llm.engine.scheduler.busy, "nothing runs")
        url = server.url
    thread.join(30)
    assert answers[0].json()["usage"]["completion_tokens"] == 400
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{url}/health")


def test_what_does_not_end_in_time_is_ended_by_name() -> None:
    lines: list[str] = []

    def read(url: str) -> None:
        with httpx2.stream("POST", url + CHAT, json={**LONG, "stream": True, "n": 8}, timeout=60) as answer:
            lines.extend(line for line in answer.iter_lines() if line)

    with running({"max_rows": 8}, drain_timeout=1.0) as server:
        slow_down(server, 0.05)
        thread = threading.Thread(target=read, args=(server.url,))
        thread.start()
        eventually(lambda: bool(lines), "nothing runs")
    thread.join(30)
    assert not thread.is_alive() and lines[-1] == "data: [DONE]"
    assert "".join(lines).count('"finish_reason":"abort"') == 8


def test_an_address_in_use_is_named() -> None:
    with bind(ServeOptions("m", port=0)) as taken:
        taken.listen()
        with pytest.raises(wager.UsageError, match="in use"):
            bind(ServeOptions("m", port=taken.getsockname()[1]))
    with pytest.raises(wager.UsageError, match=r"no-such-host\.invalid"):
        bind(ServeOptions("m", host="no-such-host.invalid"))


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("example.org", False)],
)
def test_what_others_can_reach(host: str, loopback: bool) -> None:
    assert ServeOptions("m", host=host).is_loopback == loopback
