"""`wager bench --url`: what is measured of a server, whatever it answers, and what is refused."""

from __future__ import annotations

import json
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from in_process import Call, refused
from wager.bench.load import LoadRun, OpenAIServer, ServerAnswer, distinct, run_load, summary
from wager.errors import UsageError
from wager.prompts import Prompt

PROMPTS = [Prompt(n, "qa" if n % 2 else "rag", f"Question {n}") for n in range(4)]


def response(body: bytes, *, status: str = "200 OK", kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


MODELS = response(b'{"object": "list", "data": [{"id": "scripted", "owned_by": "tests"}]}')
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


def part(data: bytes) -> bytes:
    """A chunk of HTTP's chunked encoding."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(text: str | None = None, *, finish: str | None = None, usage: Any = None, **more: Any) -> bytes:
    """One event of a chat's stream."""
    delta = {} if text is None else {"content": text}
    choices = [] if text is None and finish is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices, "usage": usage, **more}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
USAGE = event(usage={"prompt_tokens": 5, "completion_tokens": 2})
EVENTS = (event("a"), event("b", finish="stop"), USAGE, DONE)
WHOLE = (STREAM, *map(part, EVENTS), LAST)
"""Pieces of a good answer of two tokens."""

Step = bytes | float
"""Bytes to write, or seconds to wait."""
Script = Callable[[int, dict[str, Any]], Sequence[Step]]
"""What is answered to the POST of that number and body."""


class ScriptedServer(socketserver.ThreadingTCPServer):
    """Writes what its script says; keeps what it was asked."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, script: Script, pages: dict[str, Callable[[], bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script, self.pages, self.lock = script, pages, threading.Lock()
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.running = self.together = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(socketserver.StreamRequestHandler):
    server: ScriptedServer

    def handle(self) -> None:
        head = b"".join(iter(self.rfile.readline, b"\r\n")).decode()
        self.server.heads.append(head)
        method, path, _ = head.split(" ", 2)
        if method == "GET":
            self.wfile.write(self.server.pages.get(path, lambda: response(b"", status="404 No"))())
            return
        [length] = [line.partition(":")[2] for line in head.split("\r\n") if line.startswith("Content-Length")]
        body = json.loads(self.rfile.read(int(length)))
        with self.server.lock:
            number = len(self.server.bodies)
            self.server.bodies.append(body)
            self.server.running += 1
            self.server.together = max(self.server.together, self.server.running)
        steps = self.server.script(number, body)
        for step in steps:
            if isinstance(step, float):
                time.sleep(step)
            else:
                if b"[DONE]" in step:  # what its user waits for
                    with self.server.lock:
                        self.server.running -= 1
                self.wfile.write(step)


@contextmanager
def scripted(script: Script | Sequence[Step], **pages: Callable[[], bytes]) -> Iterator[ScriptedServer]:
    """A scripted server in threads of its own; `pages` are answers to GET by the last part of the path."""
    known = {"/v1/models": lambda: MODELS, **{f"/{name}": page for name, page in pages.items()}}
    with ScriptedServer(script if callable(script) else lambda _number, _body: script, known) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)


def ask(server: ScriptedServer, count: int = 1, *, users: int = 1, timeout: float = 20.0) -> LoadRun:
    asked = OpenAIServer.parse(server.url).with_fields(model="m", max_tokens=9)
    return run_load(asked, PROMPTS, numbers=range(count), users=users, timeout=timeout)


def answer_to(steps: Sequence[Step]) -> ServerAnswer:
    with scripted(steps) as server:
        [answer] = ask(server).answers
    return answer


def test_an_answer_is_timed_from_when_its_user_was_ready_to_its_last_event() -> None:
    first, second, *rest = map(part, EVENTS)
    answer = answer_to([STREAM, 0.05, first, 0.1, second, *rest, LAST])
    assert (answer.outcome, answer.text, answer.finish_reason) == ("ok", "ab", "stop")
    assert (answer.prompt_tokens, answer.tokens) == (5, 2)
    assert answer.ttft is not None and 0.05 <= answer.ttft < answer.e2e
    [gap] = answer.gaps
    assert gap >= 0.09 and answer.tpot == pytest.approx(gap)


@pytest.mark.parametrize(("size", "end"), [(7, b"\r\n"), (1, b"\n")])
def test_the_bytes_may_be_cut_anywhere(size: int, end: bytes) -> None:
    """With chunks of HTTP's own, and without."""
    whole = b": a comment" + end + b"".join(EVENTS).replace(b"\n", end)
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    for answer in (
        answer_to([STREAM, *map(part, pieces), LAST]),
        answer_to([STREAM.replace(b"Transfer-Encoding: chunked\r\n", b""), *pieces[:50], 0.01, *pieces[50:]]),
    ):
        assert (answer.outcome, answer.text, answer.tokens, len(answer.arrivals)) == ("ok", "ab", 2, 2)


def test_reasoning_and_calls_are_text_and_tokens_without_a_report_are_chunks() -> None:
    thought = b'data: {"choices": [{"delta": {"reasoning_content": "hm", "reasoning": "hm"}}]}\n\n'
    call = b'data: {"choices": [{"delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}]}\n\n'
    answer = answer_to([STREAM, part(thought), part(call), part(event(finish="tool_calls")), part(DONE), LAST])
    assert (answer.outcome, answer.text, answer.tokens, answer.completion_tokens) == ("ok", "hmf{}", 2, None)


A = part(event("a"))
END = part(DONE)
FULL = response(b'{"error": {"message": "it is full"}}', status="429 Too Many")
BUSY = response(b"<p>busy\n <b>now</b>", status="503 Busy", kind="text/html")
FAULTS: dict[str, tuple[Sequence[Step], str, str]] = {
    "full": ([FULL], "refused", "status 429: it is full"),
    "unavailable": ([BUSY], "status", "status 503: busy now"),
    "no stream": ([response(b'{"choices": [{"message": {"content": "a"}}]}')], "malformed", "application/json"),
    "not HTTP": ([b"SSH-2.0-x\r\n"], "broken", "SSH"),
    "bad chunk size": ([STREAM, A, b"zz\r\nxx\r\n"], "broken", ""),
    "closed in the stream": ([STREAM, A, A[:30]], "broken", ""),
    "ended without the end": ([STREAM, A, LAST], "broken", "finish_reason"),
    "only the end": ([STREAM, END, LAST], "empty", "no text"),
    "no JSON": ([STREAM, A, part(b"data: {not json\n\n"), END, LAST], "malformed", "{not json"),
    "counts of no tokens": (
        [STREAM, A, part(b'data: {"usage": {"completion_tokens": [2]}}\n\n'), END, LAST],
        "malformed",
        "[2]",
    ),
    "endless counts": (
        [STREAM, A, part(b'data: {"usage": {"prompt_tokens": Infinity}}\n\n'), END, LAST],
        "malformed",
        "Infinity",
    ),
    "an error within": (
        [STREAM, A, part(b'data: {"error": {"message": "out of blocks"}}\n\n')],
        "error",
        "out of blocks",
    ),
    "silence": ([STREAM, A, 0.5], "timeout", "within 0.3 s"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_counted_and_named(fault: str) -> None:
    """And the next request is served as if nothing had happened."""
    steps, kind, words = FAULTS[fault]
    with scripted(lambda number, _body: steps if number == 0 else WHOLE) as server:
        run = ask(server, 2, timeout=0.3 if kind == "timeout" else 20.0)
    first, second = run.answers
    assert (first.outcome, second.outcome, second.text) == (kind, "ok", "ab")
    assert words in first.message
    figures = summary([run])
    assert figures["failed"] == {kind: 1} and figures["failures"][0]["message"] == first.message
    assert figures["e2e_s"]["count"] == 1 + (kind == "timeout"), "one that timed out counts with what it waited"


def test_a_closed_loop_keeps_its_users_busy_and_no_more() -> None:
    with scripted((0.05, *WHOLE)) as server:
        run = ask(server, 9, users=3)
        assert (server.together, len(run.answers)) == (3, 9)
        assert sorted(body["prompt"] for body in server.bodies) == sorted(distinct(PROMPTS, n).text for n in range(9))
    assert len({distinct(PROMPTS, number).text for number in range(40)}) == 40, "no prompt is sent twice"


def test_percentiles_are_values_that_occurred() -> None:
    answers = [ServerAnswer(n, PROMPTS[0], 0.0, ended=float(n), arrivals=[n / 2, float(n)]) for n in (1, 2, 3, 10)]
    figures = summary([LoadRun(answers, seconds=10.0, cpu_s=9.0)])
    spread = {"mean": 4.0, "p50": 2.0, "p90": 10.0, "p99": 10.0, "max": 10.0, "count": 4}
    assert figures["e2e_s"] == spread
    assert (figures["output_tok_s"], figures["tokens_from"], figures["tokens_per_chunk"]) == (0.8, "chunks", 1.0)
    assert figures["client"]["late"], "it used most of a processor"
    assert summary([LoadRun()])["ttft_s"] == {**dict.fromkeys(spread), "count": 0}


# ---- logs ------------------------------------------------------------------------------------------------------------


def log_file(tmp_path: Path, *rows: dict[str, Any]) -> str:
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_a_log_is_replayed_at_its_times_whatever_is_outstanding(wager: Call, tmp_path: Path) -> None:
    rows = [{"timestamp": 100 + 4 * n, "category": "ab"[n % 2], "prompt": f"Question {n}"} for n in (2, 0, 1, 3)]
    all_there = threading.Barrier(4)

    def script(number: int, body: dict[str, Any]) -> Sequence[Step]:
        if number:
            all_there.wait(60)
        return [BUSY] if "3" in body["messages"][0]["content"] else WHOLE

    with scripted(script) as server:
        options = ("--replay", log_file(tmp_path, *rows), "--speed", "40")
        done = wager("bench", "--url", server.url, *options, "--json", "-")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert [row["id"] for row in result["rows"]] == [2, 3, 1, 4], "by time"
    sent = [row["sent_s"] for row in result["rows"]]
    assert all(each >= 0.1 * place for place, each in enumerate(sent)), sent
    figures = result["summary"]
    assert figures["failed"] == {"status": 1} and figures["duration_s"] >= 0.3
    assert {name: each["requests"] for name, each in figures["per_category"].items()} == {"a": 2, "b": 2}
    assert result["card"]["settings"]["replay"].endswith("log.jsonl")


def test_prompts_of_a_file_are_sent_at_the_times_of_a_log(wager: Call, tmp_path: Path) -> None:
    times = tmp_path / "times.txt"
    times.write_text("0.02\n0\n0.01\n")
    prompts = log_file(tmp_path, {"prompt": "one"}, {"prompt": "two"})
    with scripted(WHOLE) as server:
        line = ("bench", prompts, "--url", server.url, "--replay", str(times), "--json", "-")
        assert wager(*line, "--raw").code == 0
        assert sorted(body["prompt"] for body in server.bodies[1:]) == ["(3) one", "one", "two"]
        refused(wager("bench", *line[2:]), f"{times}, line 1", "Times without prompts need a FILE of prompts")


def test_requests_are_sent_as_the_log_has_them(wager: Call, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"model": "other", "messages": [{"role": "user", "content": "a"}], "temperature": 0.7, "seed": 5}
    rows = [
        {"custom_id": "r", "url": "/v1/chat/completions", "body": {**body, "max_tokens": 3, "tools": tools}},
        {"prompt": [7, 8, 9], "max_tokens": 12, "ignore_eos": True},
        {"id": "c", "conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]},
    ]
    with scripted(WHOLE) as server:
        line = ("bench", log_file(tmp_path, *rows), "--url", server.url, "--json", "-")
        done = wager(*line, "--system", "Be brief.", "--temperature", "0.2", "--body", '{"tools": null}')
        assert done.code == 0, done.err
        assert sorted(head.split()[1] for head in server.heads if head.startswith("POST"))[-1] == "/v1/completions"
    _, first, second, third = server.bodies
    system = {"role": "system", "content": "Be brief."}
    assert first.pop("messages") == [system, {"role": "user", "content": "a"}]
    common = {"model": "scripted", "temperature": 0.2, "stream": True, "stream_options": {"include_usage": True}}
    assert first == {**common, "max_tokens": 3, "seed": 5}, "options of the command line count for all requests"
    assert second.pop("prompt") == [7, 8, 9] and second == {**common, "max_tokens": 12, "ignore_eos": True, "seed": 1}
    assert third["messages"] == [system, {"role": "user", "content": "u"}] and third["max_tokens"] == 128
    settings = json.loads(done.out)["card"]["settings"]
    assert (settings["max_tokens"], settings["temperature"]) == (None, 0.2), "None: the requests differ"


# ---- the command -----------------------------------------------------------------------------------------------------


def test_a_server_is_measured(wager: Call, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with scripted(WHOLE) as server:
        done = wager("bench", "--url", server.url, "--concurrency", "2", "--limit", "6", "--json", str(path))
    assert done.code == 0, done.err
    assert "TTFT" in done.out and "6 of 6 requests answered" in done.out
    result = json.loads(path.read_text())
    card, figures = result["card"], result["summary"]
    assert (card["kind"], card["model"], card["url"], card["prompts"]) == ("load", "scripted", f"{server.url}/v1", 6)
    assert card["settings"]["concurrency"] == 2 and card["settings"]["max_tokens"] == 128
    assert (figures["ok"], figures["tokens"], figures["chunks"], figures["acceptance"]) == (6, 12, 12, None)
    assert [row["number"] for row in result["rows"]] == list(range(6))
    assert {row["text"] for row in result["rows"]} == {"ab"}
    assert sum(each["tokens"] for each in figures["per_category"].values()) == 12


def test_acceptance_by_category_is_what_wagers_answers_say(wager: Call) -> None:
    models = response(b'{"data": [{"id": "m", "owned_by": "wager"}]}')
    found = {"choices": [{"rounds": 2, "drafted": 6, "accepted": 3}], "stage_seconds": {}}
    script = (STREAM, A, part(event("b", finish="stop")), part(event(speculation=found)), part(USAGE), END, LAST)
    with scripted(script) as server:
        server.pages["/v1/models"] = lambda: models
        done = wager("bench", "--url", server.url, "--limit", "6", "--acceptance", "--json", "-")
        assert all(body["speculation_stats"] for body in server.bodies)
    assert done.code == 0, done.err
    figures = json.loads(done.out)["summary"]
    counts = {"rounds": 12, "drafted": 36, "accepted": 18}
    assert figures["acceptance"] == {"from": "answers", **counts, "accepted_share": 0.5, "mean_acceptance_length": 1.0}
    assert figures["per_category"]["qa"]["acceptance"]["rounds"] == 2


def test_acceptance_by_category_is_what_the_counters_of_other_servers_rose_by(wager: Call) -> None:
    drafts: list[int] = []

    def metrics() -> bytes:
        lines = [f'vllm:spec_decode_num_drafts_total{{a="b"}} {sum(drafts)}.0']
        lines += [f"vllm:spec_decode_num_{name}_total {n * sum(drafts)}.0" for name, n in counters.items()]
        return response("\n".join([*lines, ""]).encode(), kind="text/plain")

    def script(_number: int, body: dict[str, Any]) -> Sequence[Step]:
        drafts.append(10 if "Translate" in body["messages"][-1]["content"] else 1)
        return WHOLE

    counters = {"draft_tokens": 4, "accepted_tokens": 2}
    with scripted(script, metrics=metrics) as server:
        done = wager("bench", "--url", server.url, "--limit", "6", "--concurrency", "3", "--acceptance", "--json", "-")
    assert done.code == 0, done.err
    figures = json.loads(done.out)["summary"]
    own = {name: each["acceptance"] for name, each in figures["per_category"].items()}
    assert own["translation"]["rounds"] == 10 and own["qa"]["rounds"] == 1
    assert own["qa"]["mean_acceptance_length"] == 3.0 and own["qa"]["accepted_share"] == 0.5
    assert figures["acceptance"]["rounds"] == 15 and figures["acceptance"]["from"] == "metrics"


def test_a_server_that_refuses_stream_options_is_asked_without(wager: Call) -> None:
    unknown = [response(b'{"error": {"message": "unknown field: stream_options"}}', status="400 Bad")]
    with scripted(lambda _number, body: unknown if "stream_options" in body else WHOLE) as server:
        done = wager("bench", "--url", server.url, "--limit", "1", "--json", "-")
    assert done.code == 0 and json.loads(done.out)["summary"]["ok"] == 1


def test_the_key_is_sent_and_never_shown(wager: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    path.write_text("s3cret-key\n")
    monkeypatch.delenv("WAGER_API_KEY", raising=False)
    with scripted(WHOLE) as server:
        common = ("bench", "--url", server.url, "--limit", "1", "--json", "-")
        calls = [wager(*common, "--api-key-file", str(path))]
        monkeypatch.setenv("WAGER_API_KEY", "s3cret-key")
        calls.append(wager(*common))
        assert all("Authorization: Bearer s3cret-key" in head for head in server.heads)
    assert all(done.code == 0 and "s3cret" not in done.out + done.err for done in calls)
    path.write_text("two words")
    refused(wager(*common, "--api-key-file", str(path)), str(path), "key")
    monkeypatch.setenv("WAGER_API_KEY", "a\r\nX-Evil: b")
    refused(wager(*common), "WAGER_API_KEY")


@pytest.mark.parametrize("first", [True, False])
def test_a_run_of_failures_alone_fails(wager: Call, first: bool) -> None:
    """At the first short request, which says what to check, or later."""
    with scripted(lambda number, _body: [BUSY] if number or first else WHOLE) as server:
        done = wager("bench", "--url", server.url, "--limit", "2", "--json", "-")
    assert done.code == 1 and "status 503: busy now" in done.err, done.err
    assert ("hint: Check --model" in done.err and not done.out) if first else json.loads(done.out)["summary"]["ok"] == 0


def test_a_server_without_models_is_named(wager: Call) -> None:
    with scripted(WHOLE) as server:
        server.pages["/v1/models"] = lambda: response(b"<html>")
        refused(wager("bench", "--url", server.url), "/v1/models names no model", "--model", code=1)
        del server.pages["/v1/models"]
        refused(wager("bench", "--url", server.url), "/v1/models answered with status 404", "--url", code=1)


def test_fields_are_added_and_removed(wager: Call) -> None:
    fields = '{"max_tokens": null, "max_completion_tokens": 3, "stream_options": null}'
    options = ("--top-k", "5", "--raw", "--temperature", "1", "--seed", "7", "--requests", "2", "--limit", "1")
    with scripted(WHOLE) as server:
        done = wager("bench", "--url", server.url, "--body", fields, *options)
    assert done.code == 0, done.err
    last = server.bodies[-1]
    assert last.pop("prompt").startswith("(2) ")
    expected = {"model": "scripted", "temperature": 1.0, "seed": 8, "top_k": 5, "stream": True}
    assert last == {**expected, "max_completion_tokens": 3}


def test_a_signal_ends_it_in_order() -> None:
    asked = threading.Event()

    def silent(_number: int, _body: dict[str, Any]) -> list[Step]:
        asked.set()
        return [STREAM, 600.0, LAST]

    with scripted(silent) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "wager.cli", "bench", "--url", server.url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert asked.wait(300)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (143, "")
    assert "Traceback" not in err


URL = ("--url", "http://127.0.0.1:9")
REPLAYED = Path(__file__).parents[1] / "fuzz" / "corpus" / "prompts" / "logs.jsonl"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--requests", "5"), ("--requests", "--url")),
        ((*URL, "--drafter", "ngram"), ("--drafter", "--url")),
        ((*URL, "--timeout", "0"), ("--timeout",)),
        ((*URL, "--speed", "2"), ("--speed", "--replay")),
        ((*URL, "--replay", str(REPLAYED), "--concurrency", "2"), ("--concurrency", "--replay")),
        ((*URL, "--replay", str(REPLAYED), "--requests", "99"), ("has 5 requests", "99")),
        ((*URL, "--body", "[1]"), ("--body", "object")),
        ((*URL, "--body", '{"stream": false}'), ("--body", "stream")),
        ((*URL, "--api-key-file", "/nowhere/key"), ("/nowhere/key",)),
        (URL, ("127.0.0.1:9", "running")),
    ],
)
def test_mistakes_are_named(wager: Call, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(wager("bench", *arguments), *words, code=1 if arguments == URL else 2)


def test_urls() -> None:
    assert OpenAIServer.parse("http://[::1]:8000/").url == "http://[::1]:8000/v1"
    assert OpenAIServer.parse("https://a-b.org/api/v2/chat/completions").url == "https://a-b.org:443/api/v2"
    for url in ("localhost:8000", "ftp://x", "http://", "http://u:p@h", "http://h:0", "http://h:70000", "http://h/\n"):
        with pytest.raises(UsageError, match="is not the URL of a server"):
            OpenAIServer.parse(url)
