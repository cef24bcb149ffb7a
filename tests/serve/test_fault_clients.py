"""Clients that vanish, do not read, do not send, or send more than one request at a time, against a real process."""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from serve.real_server import RealServer, http_request, read_all, read_answer, served
from serve.serving import LONG, MESSAGES, SHORT, eventually, running

VANISHED = 500
BATCH = 50


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with served("--drafter", "ngram", "--max-waiting", "400") as started:
        yield started


def vanish(server: RealServer, rng: random.Random) -> None:
    """BATCH clients that go at random places, half of them with a reset."""
    connections: list[tuple[socket.socket, bytes, str]] = []
    for _ in range(BATCH):
        place = rng.choice(["head", "body", "sent", "whole", "first", "within", "pipelined"])
        data = http_request({**LONG, "stream": place != "whole", "n": rng.choice([1, 1, 2])})
        head = data.index(b"\r\n\r\n")
        if place == "head":
            data = data[: rng.randrange(1, head)]
        elif place == "body":
            data = data[: rng.randrange(head + 4, len(data) - 1)]
        elif place == "pipelined":
            data += data[: rng.randrange(1, len(data))]
        connections.append((server.connect(data), data, place))
    for connection, _, place in connections:
        if place in ("first", "within"):
            count = 1 if place == "first" else rng.randrange(2, 5000)
            got = 0
            while got < count and (part := connection.recv(min(4096, count - got))):
                got += len(part)
        if rng.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def test_500_clients_that_vanish_leave_nothing_behind(server: RealServer) -> None:
    rng, plain = random.Random(3), server.text(LONG)
    for _ in range(2):
        vanish(server, rng)
    eventually(server.is_idle, "requests of vanished clients run")
    begin, resident = server.metrics(), server.resident()
    for _ in range(VANISHED // BATCH):
        vanish(server, rng)
        assert server.text(SHORT) == plain[: len(server.text(SHORT))]
    eventually(server.is_idle, "requests of vanished clients run")
    found = server.metrics()
    assert found["wager:num_requests_open"] == found["wager:num_requests_running"] == 0
    assert found["wager:kv_cache_usage_perc"] == 0
    aborted = "wager:request_success_total,finished_reason=abort"
    assert found[aborted] > begin[aborted]
    assert server.text(LONG) == plain
    assert server.resident() < resident + (16 << 20)


def test_a_client_that_pipelines_and_vanishes_is_noticed() -> None:
    """Of several requests on a connection the first one runs; uvicorn tells only the last that the client has gone."""
    with served("--max-context", "2048", "--drafter", "none") as server:
        body = {**LONG, "max_tokens": 1900, "n": 8}
        connection = server.connect(http_request(body))
        eventually(lambda: server.live()["running"] == 8, "nothing runs")
        connection.sendall(http_request(body))
        time.sleep(0.05)
        connection.close()
        begin = time.monotonic()
        eventually(server.is_idle, "the request of a vanished client runs")
        assert server.metrics()["wager:generation_tokens_total"] < 8 * 1900, time.monotonic() - begin


def test_requests_sent_at_once_are_answered_in_order(server: RealServer) -> None:
    bodies = [{**SHORT, "max_tokens": count} for count in (9, 3, 5)]
    last = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    with server.connect(b"".join([*map(http_request, bodies), last])) as connection:
        answers = read_all(connection)
    counts = [int(part.split(b",")[0].split(b"}")[0]) for part in answers.split(b'"completion_tokens":')[1:]]
    assert counts == [9, 3, 5] and answers.endswith(b'{"status":"ok"}')


@pytest.mark.parametrize("bad", [b"nonsense\r\n\r\n", b"GET /health HTTP/1.1\r\na: " + b"x" * 300_000])
def test_what_is_wrong_behind_a_request_does_not_spoil_its_answer(server: RealServer, bad: bytes) -> None:
    with server.connect(http_request({**LONG, "stream": True, "n": 8})) as connection:
        assert connection.recv(10)
        connection.sendall(bad)
        answer = read_all(connection)
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and b"HTTP/1.1 4" not in answer


def test_half_a_request_is_408_and_what_is_no_http_400_in_json(server: RealServer) -> None:
    def refusal(data: bytes, status: int) -> None:
        with server.connect(data) as connection:
            head, _, body = read_answer(connection).partition(b"\r\n\r\n")
        assert f" {status} ".encode() in head.split(b"\r\n")[0] and json.loads(body)["error"]["message"]

    refusal(b"nonsense\r\n\r\n", 400)
    refusal(b"GET /health HTTP/1.1\r\na: " + b"x" * 300_000, 431)
    refusal(b"GET /health HTTP/1.1\r\na: " + b"x" * 70_000 + b"\r\n\r\n", 431)  # whole, and in one piece
    refusal(http_request(SHORT).replace(b"content-length: ", b"content-length: 9999"), 413)


# ---- clients that do not read ----------------------------------------------------------------------------------------

MUCH = {
    **LONG,
    "messages": MESSAGES,
    "max_tokens": 450,
    "stream": True,
    "n": 8,
    "speculation_stats": True,
    "logprobs": True,
    "top_logprobs": 20,
}
"""An answer of megabytes, more than the system's buffers take."""


def deaf(url: str, body: Any = MUCH) -> socket.socket:
    """A client that asks and reads nothing."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = url.removeprefix("http://").split(":")
    made.connect((host, int(port)))
    made.sendall(http_request(body))
    return made


def test_clients_that_do_not_read_neither_stall_the_others_nor_grow_the_memory(server: RealServer) -> None:
    """What was computed for them waits; the connection is closed after STALL_S, which is tested below."""
    plain = server.text(LONG)
    with deaf(server.url) as first:
        eventually(lambda: server.live()["running"] == 0, "an answer that nobody reads is not computed")
        resident = server.resident()
        others = [deaf(server.url) for _ in range(6)]
        try:
            begin = time.monotonic()
            assert server.text(LONG) == plain
            assert time.monotonic() - begin < 20
            eventually(lambda: server.live()["running"] == 0, "answers that nobody reads are not computed")
            assert server.live()["cache_usage"] == 0
            assert server.resident() - resident < 6 * (12 << 20)
        finally:
            for each in (first, *others):
                each.close()
    eventually(server.is_idle, "places of clients that have gone are kept")


def test_a_client_that_reads_nothing_is_closed_and_one_that_reads_slowly_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("wager.serve.connections.STALL_S", 1.0)
    with running() as server, deaf(server.url) as never, deaf(server.url) as slow:
        got, end = b"", time.monotonic() + 4
        while time.monotonic() < end:
            got += slow.recv(20_000)
            time.sleep(0.05)
        assert b"[DONE]" not in got
        slow.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        got += read_all(slow)
        assert b"data: [DONE]\n\n\r\n0\r\n\r\n" in got and got.endswith(b'{"status":"ok"}')
        never.settimeout(5)
        assert b"[DONE]" not in read_all(never)
        eventually(lambda: server.server.admission.open == 0, "places are kept")


def test_who_does_not_send_the_rest_of_a_refused_body_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wager.serve.connections.HEAD_TIMEOUT_S", 0.5)
    with running(max_body=1000) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(http_request(b" " * 100).replace(b"content-length: ", b"content-length: 9"))
            assert b" 413 " in connection.recv(4096)
            connection.sendall(b" ")  # which ends uvicorn's own wait
            begin = time.monotonic()
            assert read_all(connection) == b""
            assert time.monotonic() - begin < 9
