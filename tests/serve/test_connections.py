"""Connections: clients that vanish, do not read, do not send, send several requests at once, or what is no HTTP."""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from serve.serving import (
    LONG,
    SHORT,
    Running,
    deaf,
    eventually,
    http_request,
    read_all,
    read_answer,
    running,
    served,
)

BATCH = 50


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running({"depth": None}, max_waiting=400) as started:
        yield started


def vanish(server: Running, rng: random.Random) -> None:
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


def test_clients_that_vanish_leave_nothing_behind(server: Running) -> None:
    rng, plain = random.Random(3), server.text(LONG)
    for _ in range(2):
        vanish(server, rng)
    eventually(server.is_idle, "requests of vanished clients run")
    begin = server.metrics()
    vanish(server, rng)
    assert server.text(SHORT) == plain[: len(server.text(SHORT))]
    eventually(server.is_idle, "requests of vanished clients run")
    found = server.metrics()
    assert found["wager:num_requests_open"] == found["wager:num_requests_running"] == 0
    assert found["wager:kv_cache_usage_perc"] == 0
    aborted = "wager:request_success_total,finished_reason=abort"
    assert found[aborted] > begin[aborted] and server.server.metrics._records == {}
    assert server.text(LONG) == plain


@pytest.mark.slow
def test_a_client_that_pipelines_and_vanishes_is_noticed() -> None:
    """Of several requests on a connection the first one runs; uvicorn tells only the last that the client has gone."""
    with served("--max-context", "8192", "--drafter", "none") as server:
        body = {**LONG, "max_tokens": 8000, "n": 8}  # some seconds
        connection = server.connect(http_request(body))
        eventually(lambda: server.live()["running"] == 8, "nothing runs")
        connection.sendall(http_request(body))
        time.sleep(0.05)
        connection.close()
        begin = time.monotonic()
        eventually(server.is_idle, "the request of a vanished client runs")
        assert server.metrics()["wager:generation_tokens_total"] < 8 * 8000, time.monotonic() - begin


def test_requests_sent_at_once_are_answered_in_order(server: Running) -> None:
    bodies = [{**SHORT, "max_tokens": count} for count in (9, 3, 5)]
    last = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    with server.connect(b"".join([*map(http_request, bodies), last])) as connection:
        answers = read_all(connection)
    counts = [int(part.split(b",")[0].split(b"}")[0]) for part in answers.split(b'"completion_tokens":')[1:]]
    assert counts == [9, 3, 5] and answers.endswith(b'{"status":"ok"}')


@pytest.mark.parametrize("size", [1, 100, 100_000])
def test_an_offer_to_go_on_in_another_protocol_is_not_taken(server: Running, size: int) -> None:
    """Java's clients offer h2c with each request."""
    offer = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
    whole, body = http_request(SHORT, more=offer), json.dumps(SHORT).encode()
    head = whole[: -len(body)].replace(f"content-length: {len(body)}".encode(), b"transfer-encoding: chunked")
    chunked = head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    data = whole + chunked + f"GET /health HTTP/1.1\r\nhost: x\r\n{offer}\r\n".encode() + http_request(SHORT)
    with server.connect() as connection:
        for at in range(0, len(data), size):
            connection.sendall(data[at : at + size])
        answers = [read_answer(connection) for _ in range(4)]
    assert [answer.split(b" ")[1] for answer in answers] == [b"200"] * 4
    assert [b'"completion_tokens":8' in answer for answer in answers] == [True, True, False, True]


@pytest.mark.parametrize("bad", [b"nonsense\r\n\r\n", b"GET /health HTTP/1.1\r\na: " + b"x" * 300_000])
def test_what_is_wrong_behind_a_request_does_not_spoil_its_answer(server: Running, bad: bytes) -> None:
    with server.connect(http_request({**LONG, "stream": True, "n": 8})) as connection:
        assert connection.recv(10)
        connection.sendall(bad)
        answer = read_all(connection)
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and b"HTTP/1.1 4" not in answer


HEADS = (
    b"GET /nothing HTTP/1.1\r\nhost: [\r\n\r\n",
    b"GET /nothing?\xff HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /%ff%00%0a HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET //evil.example/%2e%2e HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /health/ HTTP/1.1\r\nhost: evil.example\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
    b"CONNECT a:80 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"BREW / HTTP/1.1\r\nhost: x\r\n\r\n",
    b"PROPFIND /health HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.0\r\n\r\n",
    b"GET /nothing HTTP/9.9\r\n\r\n",
    b"GET / /nothing HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /nothing HTTP/1.1\r\nx-request-id: a\x00b\r\n\r\n",
    b"GET /nothing HTTP/1.1\r\nx-request-id: \xff\r\n\r\n",
    b"GET /nothing HTTP/1.1\r\nauthorization: Bearer \xff\xfe\r\n\r\n",
    b"GET /nothing HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\ncontent-length: 1_0\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: y\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 0\r\n\r\n",
    b"GET /nothing HTTP/1.1\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
    b"GET /" + b"x" * 60_000 + b" HTTP/1.1\r\n\r\n",
)


def test_hostile_heads_are_answered_below_500_in_json(server: Running) -> None:
    for head in HEADS:
        with server.connect(head) as connection:
            answer = read_answer(connection)
            if answer.startswith(b"HTTP/1.1 100 "):
                answer = read_answer(connection)
        first, _, body = answer.partition(b"\r\n\r\n")
        status = int(first.split()[1])
        assert status in (200, 400, 404, 405), answer
        assert status == 200 or json.loads(body)["error"]["message"]
        assert b"evil.example" not in first
    with server.connect(http_request({**SHORT, "max_tokens": 2})) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


# ---- clients that do not read ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_clients_that_do_not_read_neither_stall_the_others_nor_grow_the_memory() -> None:
    """What was computed for them waits; the connection is closed after STALL_S, which is tested below."""
    with served("--drafter", "ngram") as server, deaf(server.url) as first:
        plain = server.text(LONG)
        eventually(lambda: server.live()["running"] == 0, "an answer that nobody reads is not computed")
        resident = server.resident()
        others = [deaf(server.url) for _ in range(6)]
        try:
            begin = time.monotonic()
            assert server.text(LONG) == plain
            assert time.monotonic() - begin < 20
            eventually(lambda: server.live()["running"] == 0, "answers that nobody reads are not computed")
            assert server.live()["cache_usage"] == 0
            assert server.resident() - resident < 6 * (18 << 20), "more than three times the answers, of 6 MiB each"
        finally:
            for each in (first, *others):
                each.close()
        eventually(server.is_idle, "places of clients that have gone are kept")


@pytest.mark.slow
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


@pytest.mark.slow
def test_who_does_not_send_the_rest_of_a_refused_body_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wager.serve.connections.HEAD_TIMEOUT_S", 0.5)
    unsent = http_request(b" " * 100).replace(b"content-length: ", b"content-length: 9")
    with running(max_body=1000) as server, server.connect(unsent) as connection:
        assert b" 413 " in connection.recv(4096)
        connection.sendall(b" ")  # which ends uvicorn's own wait
        assert read_all(connection) == b""
