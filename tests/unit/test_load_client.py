"""The load client against real servers: times, tokens, both loops, and everything that a server can do wrong."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import time
from collections.abc import Sequence
from typing import Any

import pytest
from load_servers import (
    DONE,
    LAST,
    STREAM,
    WHOLE,
    Application,
    Script,
    ScriptedServer,
    Step,
    event,
    part,
    response,
    scripted,
    serving,
    usage,
)

from wager.bench import load_http
from wager.bench.load_answer import FAILURES, TimedAnswer
from wager.bench.load_client import LoadClient, LoadPlan, LoadRun, distinct
from wager.bench.load_http import Connections, ServerAddress
from wager.bench.load_target import USAGE, USAGE_BY_CHUNK, LoadTarget, RequestForm
from wager.bench.workload import Prompt
from wager.errors import RequestError, UsageError, WagerError

PROMPTS = [Prompt(f"p{n}", "qa", f"prompt {n}") for n in range(4)]
CLOSE = "Connection: close\r\n"


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def run_load(url: str, plan: LoadPlan, *, form: RequestForm | None = None) -> LoadRun:
    async def main() -> LoadRun:
        target = target_at(url, form)
        try:
            return await LoadClient(plan, target.connections, target.asks(PROMPTS)).run()
        finally:
            target.connections.close()

    return asyncio.run(main())


def target_at(url: str, form: RequestForm | None = None, key: str | None = None) -> LoadTarget:
    server = ServerAddress.parse(url)
    form = form or RequestForm("toy", 16, messages=messages, stream_options=USAGE)
    return LoadTarget(server, Connections(server, time.perf_counter), form, key)


def answer_to(script: Script | Sequence[Step], *, timeout: float = 20.0) -> tuple[TimedAnswer, ScriptedServer]:
    """The one answer of a scripted server."""
    with scripted(script) as server:
        run = run_load(server.url, LoadPlan(concurrency=1, requests=1, timeout=timeout))
    [answer] = run.answers
    return answer, server


def test_an_answer_is_timed_from_when_it_was_due_to_its_last_event() -> None:
    steps: list[Step] = [STREAM, part(event("", role=1)), 0.05]
    for text in "abc":
        steps += [part(event(text)), 0.03]
    answer, server = answer_to(
        [*steps, part(event("", finish="stop")), 0.02, part(event(usage=usage(9, 4)) + DONE) + LAST]
    )
    assert answer.ok and answer.text == "abc" and answer.finish_reason == "stop"
    assert (answer.prompt_tokens, answer.tokens, len(answer.arrivals)) == (9, 4, 3)
    _, _, *texts, _, last = server.written[0]
    for arrival, written in zip(answer.arrivals, texts, strict=True):
        assert 0 <= arrival - written < 0.2
    assert 0 <= answer.ended - last < 0.2
    assert answer.sent is not None and answer.scheduled <= answer.sent <= server.written[0][0]
    assert answer.ttft is not None and answer.ttft >= 0.05
    assert answer.e2e == answer.ended - answer.scheduled >= 0.05 + 3 * 0.03 + 0.02
    assert all(gap >= 0.02 for gap in answer.gaps)
    assert answer.tpot == pytest.approx((answer.arrivals[2] - answer.arrivals[0]) / 3)


def test_a_stall_of_the_server_is_one_long_gap() -> None:
    steps: list[Step] = [STREAM]
    for number in range(8):
        steps += [0.4 if number == 5 else 0.005, part(event("x"))]
    answer, _ = answer_to([*steps, part(DONE) + LAST])
    longest = max(answer.gaps)
    assert longest >= 0.4 and answer.gaps.index(longest) == 4
    assert len(answer.gaps) == 7


def test_times_do_not_follow_the_clocks_of_the_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither this machine's, when it is set, nor the server's, which says what it likes."""
    days = itertools.cycle((0.0, 4e9, -5.0))
    monkeypatch.setattr(time, "time", lambda: next(days))
    head = STREAM.replace(b"\r\n\r\n", b"\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\n\r\n")
    answer, _ = answer_to([head, part(event("a")), 0.05, part(event("b") + DONE) + LAST])
    assert answer.ok
    assert 0.05 <= answer.gaps[0] <= answer.e2e < 5


def test_events_in_one_packet_arrive_together_and_cut_ones_when_they_are_whole() -> None:
    together = part(event("a") + event("b"))
    third = event("c")
    answer, _ = answer_to([STREAM, together, 0.05, part(third[:20]), 0.05, part(third[20:]), part(DONE) + LAST])
    assert answer.text == "abc"
    assert answer.gaps[0] == 0.0
    assert answer.gaps[1] >= 0.1 * 0.9


def test_the_bytes_may_be_cut_anywhere() -> None:
    """In the head, in the sizes of HTTP's chunks, within a letter, within a line end; and lines may end otherwise."""
    events = (": hi\r\n\r\n" + event("é😀").decode() + "\n").replace("\n", "\r\n").encode()
    stream = (
        STREAM + part(events[:31]) + part(events[31:]) + part(event("b")) + part(event(usage=usage(1, 7))) + part(DONE)
    )
    rng = random.Random(1)
    for _ in range(5):
        places = sorted(rng.sample(range(len(stream)), 60))
        pieces = [stream[a:b] for a, b in zip([0, *places], [*places, None], strict=True)]
        answer, _ = answer_to([step for piece in [*pieces, LAST] for step in (piece, 0.0005)])
        assert (answer.outcome, answer.text, answer.tokens) == ("ok", "é😀b", 7)
    byte_by_byte, _ = answer_to([bytes([byte]) for byte in stream + LAST])
    assert (byte_by_byte.outcome, byte_by_byte.text) == ("ok", "é😀b")


@pytest.mark.parametrize("length", [True, False], ids=["of known length", "until the connection closes"])
def test_streams_without_chunked_encoding_are_read(length: bool) -> None:
    body = event("a") + event("b", finish="stop") + DONE
    size = f"Content-Length: {len(body)}\r\n" if length else ""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{size}{CLOSE}\r\n".encode()
    answer, _ = answer_to([head, body[:50], 0.01, body[50:], "close"])
    assert (answer.outcome, answer.text, answer.tokens) == ("ok", "ab", 2)


def test_an_answer_that_is_never_ended_after_its_last_event_is_whole() -> None:
    answer, _ = answer_to([STREAM, part(event("a")), part(DONE), 5.0])
    assert answer.ok and answer.e2e < load_http.GRACE_S
    answer, _ = answer_to([STREAM, part(event("a", finish="stop")) + LAST])
    assert answer.ok and answer.finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"delta": {"reasoning_content": "hm", "content": None}}, "hm"),
        ({"delta": {"reasoning": "hm"}}, "hm"),
        ({"delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}, "f{}"),
        ({"delta": {"tool_calls": [None, {}, {"function": 3}]}}, ""),
        ({"text": "abc"}, "abc"),
        ({"delta": {"role": "assistant", "content": ""}}, ""),
        ({"delta": 5, "text": 6}, ""),
    ],
)
def test_what_counts_as_text_of_a_chunk(fields: dict[str, Any], text: str) -> None:
    answer, _ = answer_to(
        [STREAM, part(event(choices=[fields, None, 3])), part(event("z", finish="stop")) + part(DONE) + LAST]
    )
    assert answer.ok and answer.text == text + "z"
    assert len(answer.arrivals) == 1 + bool(text)


def test_tokens_of_chunks_are_those_reported_else_equal_shares() -> None:
    """Five tokens in chunks of one, three and one."""
    pieces = [("a", 1), ("bcd", 4), ("e", 5)]
    known = [part(event(text, usage=usage(3, count))) for text, count in pieces]
    answer, _ = answer_to([STREAM, *known, part(DONE) + LAST])
    assert answer.reported and answer.chunk_tokens == [1, 3, 1]
    unknown = [part(event(text)) for text, _ in pieces]
    answer, _ = answer_to([STREAM, *unknown, part(event(usage=usage(3, 5)) + DONE) + LAST])
    assert not answer.reported and answer.chunk_tokens == [1, 2, 2]
    answer, _ = answer_to([STREAM, *unknown, part(DONE) + LAST])
    assert (answer.completion_tokens, answer.tokens, answer.chunk_tokens) == (None, 3, [1, 1, 1])
    first = part(event("abc", usage=usage(3, 3)))
    answer, _ = answer_to([STREAM, first, 0.03, part(event("d", usage=usage(3, 4)) + DONE) + LAST])
    assert answer.tpot == pytest.approx(answer.gaps[0]), "the two later tokens of the first chunk took no time of TPOT"


A = part(event("a"))
END = part(DONE) + LAST
OF_LENGTH = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 900\r\n\r\n"
FULL = response(b'{"error": {"message": "it is full"}}', status="429 Too Many", more="Retry-After: 0\r\n")
ERROR = part(b'data: {"error": {"message": "out of blocks"}}\n\n')
FAULTS: dict[str, tuple[Sequence[Step], str, str]] = {
    "full": ([FULL], "refused", "status 429: it is full"),
    "unavailable": (
        [response(b"<p>busy\n <b>now</b>", status="503 Busy", kind="text/html")],
        "status",
        "status 503: busy now",
    ),
    "no text": ([response(b"", status="500 Oops")], "status", "status 500: (no text)"),
    "another form": ([response(b'{"detail": "no such model"}', status="404 No")], "status", "no such model"),
    "moved": ([response(b"", status="301 Moved", more="Location: http://x/\r\n")], "status", "status 301"),
    "no stream": ([response(b'{"choices": [{"message": {"content": "a"}}]}')], "malformed", "application/json"),
    "not HTTP": ([b"SSH-2.0-x\r\n"], "broken", "not HTTP"),
    "bad chunk size": ([STREAM, A, b"zz\r\nxx\r\n"], "broken", "not HTTP"),
    "closed at once": (["close"], "broken", "before an answer"),
    "reset at once": (["reset"], "broken", "before an answer"),
    "closed in the head": ([STREAM[:40], "close"], "broken", "middle"),
    "closed in the stream": ([STREAM, A, A[:30], 0.05, "close"], "broken", "closed by the server"),
    "reset in the stream": ([STREAM, A, 0.05, "reset"], "broken", "middle"),
    "ended without the end": ([STREAM, A, LAST], "broken", "finish_reason"),
    "cut event": ([STREAM, A, part(event("b", finish="stop")[:-30]) + LAST], "broken", "finish_reason"),
    "closed before its length": ([OF_LENGTH, event("a"), 0.05, "close"], "broken", "middle"),
    "nothing": ([STREAM, LAST], "empty", "without"),
    "only the end": ([STREAM, END], "empty", "no text"),
    "no JSON": ([STREAM, A, part(b"data: {not json\n\n"), END], "malformed", "{not json"),
    "no object": ([STREAM, part(b"data: [1]\n\n"), END], "malformed", "[1]"),
    "an error within": ([STREAM, A, ERROR + END], "error", "out of blocks"),
    "silence": ([STREAM, A, 1.0], "timeout", "within 0.3 s"),
    "silence from the start": ([1.0], "timeout", "within 0.3 s"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_counted_and_named(fault: str) -> None:
    """And the next request is served as if nothing had happened."""
    steps, kind, words = FAULTS[fault]
    with scripted(lambda number, _body: steps if number == 0 else WHOLE) as server:
        run = run_load(server.url, LoadPlan(concurrency=1, requests=3, timeout=0.3 if kind == "timeout" else 20.0))
    first, *others = run.answers
    assert (first.outcome, kind in FAILURES) == (kind, True)
    assert words in first.message
    assert first.ended >= first.scheduled
    assert [answer.outcome for answer in others] == ["ok", "ok"]
    assert [answer.text for answer in others] == ["ab", "ab"]


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    run = run_load(f"http://127.0.0.1:{port}", LoadPlan(concurrency=2, requests=2))
    assert [answer.outcome for answer in run.answers] == ["connect", "connect"]
    assert f"127.0.0.1:{port}" in run.answers[0].message
    assert [answer.sent for answer in run.answers] == [None, None]


def test_connections_are_used_again_and_replaced_where_the_server_closed_them() -> None:
    with scripted(WHOLE) as server:
        run = run_load(server.url, LoadPlan(concurrency=2, requests=12))
        assert (run.connections, server.connections) == (2, 2)
    with scripted([*WHOLE, "close"]) as server:  # kept alive, it says, and closes
        run = run_load(server.url, LoadPlan(concurrency=2, requests=12))
        assert [answer.outcome for answer in run.answers] == ["ok"] * 12
        assert run.connections == server.connections >= 12
        assert len(server.bodies) == 12, "no request was answered twice"


def test_a_closed_loop_keeps_its_users_busy_and_no_more() -> None:
    application = Application(tokens=3, first=0.03, gap=0.01)
    with serving(application) as at:
        run = run_load(f"http://{at}", LoadPlan(concurrency=3, requests=12))
    assert application.together == 3
    assert [answer.number for answer in run.answers] == list(range(12))
    dues = sorted(answer.scheduled for answer in run.answers)
    ends = sorted(answer.ended for answer in run.answers)
    assert dues[:3] == [run.start] * 3
    for due, end in zip(dues[3:], ends, strict=False):
        assert 0 <= due - end < 0.2, "the next request is due when one ends"


def test_a_user_who_was_refused_waits_before_the_next_request() -> None:
    refused = response(b"{}", status="429 Full", more="Retry-After: 1\r\n")
    with scripted(lambda number, _body: [refused] if number == 0 else WHOLE) as server:
        run = run_load(server.url, LoadPlan(concurrency=1, requests=2))
    first, second = run.answers
    assert 1.0 <= second.scheduled - first.ended < 2.0


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """The times are those of the Poisson process of its seed, whatever the server does."""
    application = Application(tokens=1, first=0.5)
    plan = LoadPlan(concurrency=1000, rate=100.0, requests=30, seed=3)
    with serving(application) as at:
        run = run_load(f"http://{at}", plan)
    arrivals = list(itertools.islice(plan.arrivals(), 30))
    assert [answer.scheduled - run.start for answer in run.answers] == pytest.approx(arrivals)
    assert application.together > 15
    again = list(itertools.islice(LoadPlan(concurrency=1, rate=100.0, seed=3).arrivals(), 30))
    assert again == arrivals
    gaps = [b - a for a, b in itertools.pairwise(itertools.islice(plan.arrivals(), 4000))]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.01, rel=0.06)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.1), "exponential gaps"


def test_a_stall_is_felt_by_every_request_that_was_due_meanwhile() -> None:
    """Coordinated omission: with one connection nothing can be sent while the server stalls; what was due then has
    waited, though each request itself was answered at once."""
    with scripted(lambda number, _body: [0.6, *WHOLE] if number == 0 else WHOLE) as server:
        run = run_load(server.url, LoadPlan(concurrency=1, rate=50.0, requests=20, seed=1))
    during = [answer for answer in run.answers if answer.scheduled - run.start < 0.5]
    assert len(during) > 10
    for answer in during[1:]:
        stalled_for = run.start + 0.6 - answer.scheduled
        assert answer.sent is not None and answer.ttft is not None
        assert answer.ttft >= stalled_for
        assert answer.sent - answer.scheduled >= stalled_for, "it was sent late"
        assert answer.e2e - (answer.sent - answer.scheduled) < 0.5, "and answered at once"


def test_a_duration_ends_both_loops() -> None:
    for rate in (None, 200.0):
        with scripted([0.01, *WHOLE]) as server:
            run = run_load(server.url, LoadPlan(concurrency=2, rate=rate, duration=0.3))
        assert run.answers and all(answer.scheduled - run.start < 0.3 for answer in run.answers)
        assert run.answers[-1].scheduled - run.start > 0.1
        assert len(server.bodies) == len(run.answers)


def test_no_prompt_is_sent_twice_and_the_order_is_fixed() -> None:
    texts = [distinct(PROMPTS, number).text for number in range(40)]
    assert texts[:4] == ["prompt 0", "prompt 1", "prompt 2", "prompt 3"]
    assert len(set(texts)) == 40
    assert texts[6] == "(7) prompt 2", "what differs stands first, so that no prefix is cached"
    with scripted(WHOLE) as server:
        run_load(server.url, LoadPlan(concurrency=1, requests=6))
        run_load(server.url, LoadPlan(concurrency=1, requests=2, first=6))
    assert [body["messages"][0]["content"] for body in server.bodies] == texts[:8]


def test_the_form_of_requests() -> None:
    form = RequestForm("m", 5, temperature=0.5, seed=10, options={"top_p": 0.9, "max_tokens": None, "extra": 1})
    with scripted(WHOLE) as server:
        run_load(f"{server.url}/v1/", LoadPlan(concurrency=1, requests=2), form=form)
    assert server.bodies == [
        {
            "model": "m",
            "prompt": f"prompt {n}",
            "temperature": 0.5,
            "stream": True,
            "seed": 10 + n,
            "top_p": 0.9,
            "extra": 1,
        }
        for n in range(2)
    ]
    assert server.heads[0].startswith("POST /v1/completions HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("knows", "wanted", "found"),
    [
        (("include_usage", "continuous_usage_stats"), USAGE_BY_CHUNK, USAGE_BY_CHUNK),
        (("include_usage",), USAGE_BY_CHUNK, USAGE),
        (("include_usage",), USAGE, USAGE),
        ((), USAGE_BY_CHUNK, None),
        ((), USAGE, None),
    ],
)
def test_a_server_that_knows_no_usage_is_measured_all_the_same(knows: Any, wanted: Any, found: Any) -> None:
    application = Application(tokens=4, knows=knows, at_once=2)

    async def main(at: str) -> tuple[Any, LoadRun]:
        target = target_at(f"http://{at}", RequestForm("toy", 16, messages=messages, stream_options=wanted))
        await target.warm_up(3, 2)
        run = await LoadClient(LoadPlan(concurrency=1, requests=2), target.connections, target.asks(PROMPTS)).run()
        target.connections.close()
        return target.form.stream_options, run

    with serving(application) as at:
        options, run = asyncio.run(main(at))
    assert options == found
    assert len(application.bodies) == 1 + 3 + 2
    assert {body["max_tokens"] for body in application.bodies} == {16}
    assert [answer.tokens for answer in run.answers] == [2 if found is None else 4] * 2
    assert run.answers[0].reported is (found == USAGE_BY_CHUNK)


def test_the_model_is_asked_for_and_the_key_is_sent() -> None:
    async def ask(at: str, key: str | None) -> tuple[str, Any]:
        target = target_at(f"http://{at}", key=key)
        try:
            return await target.ask_model(), target.software
        finally:
            target.connections.close()

    with serving(Application(key="secret")) as at:
        assert asyncio.run(ask(at, "secret")) == ("toy", {"header": "uvicorn", "owned_by": "tests"})
        with pytest.raises(WagerError, match="Incorrect API key") as refused:
            asyncio.run(ask(at, None))
    assert "--api-key-file" in refused.value.hint


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"data": []}', b'{"data": [3]}', b"no", b'{"data": [{}]}'])
def test_a_server_without_models_is_named(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("load_servers.MODELS", body)
    with scripted(WHOLE) as server, pytest.raises(WagerError, match="names no model"):
        asyncio.run(target_at(server.url).ask_model())


def test_a_server_that_fails_the_warm_up_is_not_measured() -> None:
    broken = response(b'{"error": "no such model"}', status="404 Not Found")
    with scripted([broken]) as server, pytest.raises(RequestError, match="no such model") as refused:
        asyncio.run(target_at(server.url).warm_up(2, 2))
    assert "--model" in refused.value.hint
    with scripted(["close"]) as server, pytest.raises(RequestError, match="closed by the server"):
        asyncio.run(target_at(server.url).warm_up(2, 2))


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://localhost/", "http://localhost/v1"),
        ("https://host/api/v1/", "https://host/api/v1"),
        ("https://host:443/openai", "https://host/openai"),
        ("http://[::1]:80", "http://[::1]/v1"),
        ("http://[::1]:81/v1/chat/completions", "http://[::1]:81/v1"),
    ],
)
def test_urls(url: str, seen: str) -> None:
    assert ServerAddress.parse(url).url == seen


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:8000",
        "ftp://host",
        "http://",
        "http://user:pw@host",
        "http://host:99999",
        "http://host:x",
        "http://host:0",
        "http://h\u00f6st",
        "http://host/a b",
        "http://host/?q=1",
        "http://host/#x",
        "http://[::1",
        "http://a\r\nX: y",
    ],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--url"):
        ServerAddress.parse(url)
