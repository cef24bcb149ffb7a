"""Load on any server with OpenAI's API: speed, and acceptance by category.

In a closed loop each user is a thread with a connection of its own and sends a request as soon as its last one is
answered. Replayed, each request is sent when it arrived in a log, whatever is outstanding. Rates and distributions of
arrivals, searches and plots are guidellm's and `vllm bench serve`'s work.

A chunk is an event with text of the answer; reasoning and tool calls are text too. It may hold several tokens: a step
that accepts guesses emits all of them at once. A percentile is a value that occurred (nearest rank).
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from wager.bench.scrape import Scrape
from wager.errors import RequestError, UsageError, WagerError
from wager.inputs import shown
from wager.prompts import Prompt, is_conversation

_PAUSE_S = 0.1
"""A user whose request failed waits so long before the next one."""
_BUSY_CLIENT = 0.5
"""From this share of a processor on the client is part of what it measured."""
_LATE_S = 0.01
"""A request that the client sends so long after its time came too late."""
_COUNTED = ("rounds", "drafted", "accepted")
"""What is counted of speculation: in an answer of wager's, and in /metrics."""


Exchange = tuple[http.client.HTTPResponse, socket.socket]
"""A response, and the socket it is read from, whose timeout can be set."""


class RequestFailure(Exception):
    """A request without a whole answer; docs/bench-load.md lists the kinds."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


@dataclass(frozen=True, slots=True)
class OpenAIServer:
    """Where a server listens, and what it is asked. `base` is the path of its API, such as /v1; the key is never shown.
    `fields` are those of every request that does not set them itself, None for one that is left out."""

    scheme: str
    host: str
    port: int
    base: str
    key: str | None = field(default=None, repr=False)
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, url: str, *, key: str | None = None) -> OpenAIServer:
        """A server from http://HOST[:PORT][/PATH]; /v1 where there is no path. UsageError for another text."""
        host = r"\[[\da-fA-F:.]+\]|[\w-]{1,63}(?:\.[\w-]{1,63})*\.?"  # longer parts of a name cannot be looked up
        place = rf"(https?)://({host})(?::(\d{{1,5}}))?(/[\w./~%-]*(?:(?<=/metrics)\?[\w./~%=&:+-]*)?)?"
        match = re.fullmatch(place, url, re.ASCII)
        if not match or not 0 < int(match[3] or 1) < 1 << 16:
            raise UsageError(
                f"{shown(url)} is not the URL of a server.",
                "Give it as http://127.0.0.1:8000 or https://host/v1.",
            )
        base = re.sub(r"(/chat)?/(completions|models)$", "", (match[4] or "").rstrip("/"))
        port = int(match[3] or (443 if match[1] == "https" else 80))
        return cls(match[1], match[2].strip("[]"), port, base or "/v1", key)

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL of the API."""
        return self.origin + self.base

    def with_fields(self, **fields: Any) -> OpenAIServer:
        return replace(self, fields={**self.fields, **fields})

    def body(self, prompt: Prompt, number: int) -> bytes:
        """The body of request `number`; sampled requests have a seed each."""
        fields, content = {**self.fields, **prompt.fields}, prompt.content
        fields["messages" if is_conversation(content) else "prompt"] = content
        if "seed" not in prompt.fields and fields.get("seed") is not None and fields.get("temperature"):
            fields["seed"] += number
        return json.dumps({key: value for key, value in fields.items() if value is not None}).encode()

    @contextmanager
    def request(self, path: str, body: bytes | None = None, *, timeout: float = 30.0) -> Iterator[Exchange]:
        """A GET of a path from the root, or with a body a POST, on a connection of its own."""
        kind = http.client.HTTPSConnection if self.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=timeout)
        headers = {"User-Agent": "wager-bench", "Accept": "text/event-stream, application/json", "Connection": "close"}
        headers |= {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        headers |= {} if body is None else {"Content-Type": "application/json"}
        failure = "connect"
        try:
            connection.connect()
            failure, sock = "broken", connection.sock
            connection.request("GET" if body is None else "POST", path, body, headers)
            yield connection.getresponse(), sock
        except TimeoutError as error:
            raise RequestFailure("timeout", f"no whole answer within {timeout:g} s") from error
        except (http.client.HTTPException, OSError) as error:
            raise RequestFailure(failure, f"{error or type(error).__name__}") from error
        finally:
            connection.close()


@dataclass(slots=True)
class ServerAnswer:
    """What was measured of one request. `start` is when its user was ready to send it or, replayed, when it was due,
    `sent` when it was sent, `arrivals` are the times of the chunks, `ended` when the last event came: seconds by one
    clock. Counts are None where the server reports none.

    `speculation` has rounds, drafted and accepted. `outcome` is "ok" or the kind of failure."""

    number: int
    prompt: Prompt
    start: float
    sent: float = 0.0
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    speculation: Counter[str] | None = None
    finish_reason: str | None = None
    outcome: str = "ok"
    message: str = ""

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"

    @property
    def tokens(self) -> int:
        """Tokens of the answer as the server reports them; else one for each chunk, the least there can be."""
        return len(self.arrivals) if self.completion_tokens is None else self.completion_tokens

    @property
    def ttft(self) -> float | None:
        """Seconds to the first chunk."""
        return self.arrivals[0] - self.start if self.arrivals else None

    @property
    def e2e(self) -> float:
        """Seconds to the end."""
        return self.ended - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first: the time between the first and the last chunk, over them."""
        later = self.tokens - 1
        return (self.arrivals[-1] - self.arrivals[0]) / later if len(self.arrivals) > 1 and later > 0 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one chunk and the next."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    def add(self, event: bytes, now: float) -> None:
        """Take an event. RequestFailure for what is no event of the API, and for an error."""
        text = ""
        try:
            chunk = json.loads(event)
            if chunk.get("error"):
                raise RequestFailure("error", _error_message(chunk["error"]))
            usage = chunk.get("usage") or {}
            self.prompt_tokens = int(usage.get("prompt_tokens") or 0) or self.prompt_tokens
            self.completion_tokens = int(usage.get("completion_tokens") or 0) or self.completion_tokens
            for choice in (chunk.get("speculation") or {}).get("choices", ()):
                self.speculation = Counter({name: int(choice[name]) for name in _COUNTED})
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or {"content": choice.get("text")}
                thought = delta.get("reasoning_content") or delta.get("reasoning")  # vLLM sends it under both names
                text += (delta.get("content") or "") + (thought or "")
                called = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
                text += "".join(call.get(name) or "" for call in called for name in ("name", "arguments"))
                self.finish_reason = str(choice.get("finish_reason") or "") or self.finish_reason
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise RequestFailure("malformed", f"an event is none of OpenAI's API: {event[:100]!r}") from error
        if text:
            self.text += text
            self.arrivals.append(now)


def _error_message(error: object) -> str:
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)


def _reason(body: bytes) -> str:
    """The message of an error's body in one line: OpenAI's form, or the beginning of its text, without tags."""
    try:
        value = json.loads(body)
        return _error_message(value.get("error") or value["detail"])
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return " ".join(re.sub(r"<[^<>]*>", " ", body[:1000].decode("utf-8", "replace")).split())[:200] or "(no text)"


def ask(server: OpenAIServer, prompt: Prompt, number: int, *, timeout: float, due: float | None = None) -> ServerAnswer:
    """Send a request and read its answer, failed or not. `due` is when it should have been sent; now, if None."""
    answer = ServerAnswer(number, prompt, time.perf_counter() if due is None else due)
    path = f"{server.base}{'/chat/completions' if is_conversation(prompt.content) else '/completions'}"
    body = server.body(prompt, number)
    answer.sent = time.perf_counter()
    try:
        with server.request(path, body, timeout=timeout) as exchange:
            _read(exchange, answer, deadline=answer.sent + timeout)
    except RequestFailure as failure:
        answer.ended, answer.outcome, answer.message = time.perf_counter(), failure.kind, failure.message[:500]
    return answer


def _read(exchange: Exchange, answer: ServerAnswer, *, deadline: float) -> None:
    response, sock = exchange
    if response.status != 200:
        kind = "refused" if response.status == 429 else "status"
        raise RequestFailure(kind, f"status {response.status}: {_reason(response.read(1 << 16))}")
    if (kind := response.headers.get_content_type()) != "text/event-stream":
        raise RequestFailure("malformed", f"the answer is {kind} and not text/event-stream")
    for event, now in _events(response, sock, deadline):
        answer.ended = now
        if event == b"[DONE]":
            break
        answer.add(event, now)
    else:
        if answer.finish_reason is None:
            raise RequestFailure("broken", "the stream ended without a finish_reason and without [DONE]")
    if answer.finish_reason is None and not answer.text:
        raise RequestFailure("empty", "the stream held no text and no finish_reason")


def _events(response: http.client.HTTPResponse, sock: socket.socket, deadline: float) -> Iterator[tuple[bytes, float]]:
    """The data of each event, and when it had arrived."""
    rest = b""
    while data := response.read1(1 << 16):
        now = time.perf_counter()
        *lines, rest = (rest + data).split(b"\n")
        yield from ((line[5:].strip(), now) for line in lines if line.startswith(b"data:"))
        if now >= deadline:
            raise TimeoutError
        sock.settimeout(deadline - now)


@dataclass(slots=True)
class LoadRun:
    """The answers in the order in which they ended, and the seconds from the first request to the last end. `cpu_s` is
    processor time of the client's process. `scrapes` are the server's /metrics before and after, None where it has
    none."""

    answers: list[ServerAnswer] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0
    scrapes: tuple[Scrape | None, Scrape | None] = (None, None)

    @property
    def counters(self) -> Counter[str]:
        """By how much those of /metrics rose; empty where there are none, or the server was started again."""
        before, after = self.scrapes
        with suppress(UsageError):
            return after.since(before).totals() if before and after else Counter()
        return Counter()


def distinct(prompts: Sequence[Prompt], number: int) -> Prompt:
    """The prompt of request `number`: in the order of the file. From the second pass on a number stands before it, so
    that no text is asked twice and neither cached prefixes nor remembered answers help."""
    prompt, again = prompts[number % len(prompts)], number // len(prompts)
    content = prompt.content
    if not again:
        return prompt
    if isinstance(content, str):
        return replace(prompt, content=f"({number + 1}) {content}")
    if not is_conversation(content):
        turned = again % len(content)
        return replace(prompt, content=(*content[turned:], *content[:turned]))
    first = next((place for place, each in enumerate(content) if each["role"] == "user"), 0)
    numbered = {**content[first], "content": f"({number + 1}) {content[first]['content']}"}
    return replace(prompt, content=(*content[:first], numbered, *content[first + 1 :]))


def run_load(
    server: OpenAIServer,
    prompts: Sequence[Prompt],
    *,
    numbers: Iterable[int],
    users: int = 1,
    arrivals: Sequence[float] | None = None,
    timeout: float = 600.0,
    on_answer: Callable[[int], None] = lambda _answered: None,
) -> LoadRun:
    """Send the requests of these numbers, which choose prompts and seeds, and wait for the answers. In a closed loop
    `users` send them; with `arrivals`, seconds from the start, one for each request and ascending, every request has a
    user of its own, who comes at that time. `on_answer` gets the number of answers so far. What an answer lacks is in
    the answer; nothing is raised for it."""
    run, lock = LoadRun(), threading.Lock()
    before, cpu, start = _scraped(server), time.process_time(), time.perf_counter()

    def use(left: Iterator[int], due: float | None) -> None:
        while True:
            with lock:
                number = next(left, None)
            if number is None:
                return
            answer = ask(server, distinct(prompts, number), number, timeout=timeout, due=due)
            with lock:
                run.answers.append(answer)
                on_answer(len(run.answers))
            if not answer.ok:
                time.sleep(_PAUSE_S)

    come: Iterable[tuple[Iterator[int], float | None]] = [(iter(numbers), None)] * users
    if arrivals is not None:
        come = ((iter((number,)), start + after) for number, after in zip(numbers, arrivals, strict=True))
    threads: list[threading.Thread] = []
    for left, due in come:
        time.sleep(max(0.0, (due or 0.0) - time.perf_counter()))
        threads.append(threading.Thread(target=use, args=(left, due), daemon=True))  # for which a signal does not wait
        try:
            threads[-1].start()
        except RuntimeError as error:  # of the system's limit
            outstanding = sum(thread.is_alive() for thread in threads)
            message = f"With {outstanding} requests outstanding the system starts no further thread."
            raise WagerError(message, "Replay with a lower --speed.") from error
    for thread in threads:
        while thread.is_alive():
            thread.join(0.5)
    run.cpu_s = time.process_time() - cpu
    run.scrapes = (before, _scraped(server))
    run.seconds = max((answer.ended for answer in run.answers), default=start) - start
    return run


def _scraped(server: OpenAIServer) -> Scrape | None:
    with suppress(WagerError):
        return read_metrics(server)
    return None


def read_metrics(server: OpenAIServer) -> Scrape:
    """What the server's /metrics say now. WagerError if there are none, UsageError if they are no metrics."""
    path = server.base if server.base.partition("?")[0].endswith("/metrics") else "/metrics"
    where, hint = server.origin + path, "Check the URL, the key, and that the server runs and offers metrics."
    try:
        with server.request(path) as (response, _):
            text = response.read().decode("utf-8", "replace")
    except RequestFailure as error:
        raise WagerError(f"{where}: {error.message}.", hint) from error
    if response.status != 200:
        raise WagerError(f"{where} answered with status {response.status}: {_reason(text.encode())}", hint)
    return Scrape.parse(text, where)


def ask_model(server: OpenAIServer) -> dict[str, Any]:
    """The `id` of the first of /v1/models, who it is `owned_by`, and the `header` that names the server. WagerError if
    the server does not answer, or names no model."""
    where = f"{server.url}/models"
    try:
        with server.request(f"{server.base}/models") as (response, _):
            body = response.read(1 << 24)
    except RequestFailure as error:
        raise WagerError(f"{where}: {error.message}.", _hint(error.kind)) from error
    if response.status != 200:
        message = f"status {response.status}: {_reason(body)}"
        raise WagerError(f"{where} answered with {message}", _hint("status", message))
    try:
        first = json.loads(body)["data"][0]
        return {"id": str(first["id"]), "owned_by": first.get("owned_by"), "header": response.headers.get("server")}
    except (AttributeError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise WagerError(f"{where} names no model.", "Name it with --model.") from error


def find_fields(server: OpenAIServer, like: Prompt, *, timeout: float) -> OpenAIServer:
    """The server as it can be asked, found by a short request in the form of `like`: one that refuses stream_options
    with status 400 or 422 is asked without. RequestError where it does not answer: the rest would be failures too."""
    text = "Tell me something about the number 1000."
    prompt = Prompt(0, "", ({"role": "user", "content": text},) if is_conversation(like.content) else text)
    short = {"max_tokens": 16} if server.fields.get("max_tokens") else {}
    answer = ask(server.with_fields(**short), prompt, 0, timeout=timeout)
    if answer.message.startswith(("status 400", "status 422")):
        server = server.with_fields(stream_options=None)
        answer = ask(server.with_fields(**short), prompt, 0, timeout=timeout)
    if answer.outcome not in ("ok", "refused"):
        message = f"{server.url} failed to answer a first short request: {answer.message.rstrip('.')}."
        raise RequestError(message, _hint(answer.outcome, answer.message))
    return server


def _hint(kind: str, message: str = "") -> str:
    if message.startswith(("status 401", "status 403")):
        return "Give the server's key with --api-key-file, or in the environment variable WAGER_API_KEY."
    if message.startswith("status 404"):
        return "Check --url, whose path is /v1 on most servers, and --model."
    if kind == "connect":
        return "Check --url, and that the server is running."
    return "Check --model, --max-tokens and --body."


def rows(runs: Sequence[LoadRun]) -> list[dict[str, Any]]:
    """One row for each request, failed ones too, by number."""
    answers = sorted((answer for run in runs for answer in run.answers), key=lambda answer: answer.number)
    begun = min((answer.start for answer in answers), default=0.0)
    same = ("number", "outcome", "message", "prompt_tokens", "tokens", "finish_reason", "text")
    return [
        {
            **{name: getattr(answer, name) for name in same},
            "id": answer.prompt.id,
            "category": answer.prompt.category,
            "chunks": len(answer.arrivals),
            "sent_s": answer.sent - begun,
            "ttft_s": answer.ttft,
            "itl_max_s": max(answer.gaps, default=None),
            "tpot_s": answer.tpot,
            "e2e_s": answer.e2e,
            **(answer.speculation or {}),
        }
        for answer in answers
    ]


def summary(runs: Sequence[LoadRun]) -> dict[str, Any]:
    """Every figure of runs that followed each other, by name; docs/bench-load.md says what each means. With several
    runs each had the prompts of one category, and /metrics tell the acceptance of each."""
    answers = [answer for run in runs for answer in run.answers]
    good = [answer for answer in answers if answer.ok]
    seconds = max(sum(run.seconds for run in runs), 1e-9)
    cpu_s = sum(run.cpu_s for run in runs)
    waits = [answer.sent - answer.start for answer in answers]
    categories: dict[str, Any] = {}
    for category in sorted({answer.prompt.category for answer in answers}):
        own = [run for run in runs if any(answer.prompt.category == category for answer in run.answers)]
        counted = [run for run in own if all(answer.prompt.category == category for answer in run.answers)]
        categories[category] = _figures(
            [answer for answer in answers if answer.prompt.category == category],
            sum((run.counters for run in counted), Counter()),
            max(sum(run.seconds for run in own), 1e-9),
        )
    failures = Counter((answer.outcome, answer.message) for answer in answers if not answer.ok)
    return {
        **_figures(answers, sum((run.counters for run in runs), Counter()), seconds),
        "failed": dict(Counter(answer.outcome for answer in answers if not answer.ok)),
        "failures": [{"kind": kind, "message": text, "count": n} for (kind, text), n in failures.most_common(20)],
        "duration_s": seconds,
        "tokens_from": "usage" if all(answer.completion_tokens is not None for answer in good) else "chunks",
        "finish_reasons": dict(Counter(answer.finish_reason or "none" for answer in good)),
        "per_category": categories,
        "client": {
            "cpu_s": cpu_s,
            "cpu_share": cpu_s / seconds,
            "late": cpu_s / seconds > _BUSY_CLIENT,
            "sent_late": sum(wait > _LATE_S for wait in waits),
            "sent_late_max_s": max(waits, default=0.0),
        },
    }


def _figures(answers: Sequence[ServerAnswer], counters: Counter[str], seconds: float) -> dict[str, Any]:
    """Times, counts, rates over `seconds` and acceptance of some answers. A request that timed out is in TTFT and end
    to end with the time that it waited, as the least it can be; other failures are counted, not timed."""
    good = [answer for answer in answers if answer.ok]
    timed = [*good, *(answer for answer in answers if answer.outcome == "timeout")]
    tokens, chunks = sum(answer.tokens for answer in good), sum(len(answer.arrivals) for answer in good)
    prompt_tokens = [answer.prompt_tokens for answer in good if answer.prompt_tokens is not None]
    return {
        "requests": len(answers),
        "ok": len(good),
        "tokens": tokens,
        "prompt_tokens": sum(prompt_tokens) if prompt_tokens else None,
        "chunks": chunks,
        "tokens_per_chunk": tokens / chunks if chunks else None,
        "request_s": len(good) / seconds,
        "output_tok_s": tokens / seconds,
        "ttft_s": _spread([answer.e2e if answer.ttft is None else answer.ttft for answer in timed]),
        "itl_s": _spread([gap for answer in timed for gap in answer.gaps]),
        "tpot_s": _spread([answer.tpot for answer in timed if answer.tpot is not None]),
        "e2e_s": _spread([answer.e2e for answer in timed]),
        "acceptance": _acceptance(good, counters),
    }


def _acceptance(answers: Sequence[ServerAnswer], counters: Counter[str]) -> dict[str, Any] | None:
    """From the answers' own fields, else from counters of /metrics, whose rounds are those with a draft; None if the
    server says neither."""
    own = [answer.speculation for answer in answers if answer.speculation is not None]
    found = sum(own, Counter()) if own else counters
    if not found["rounds"]:
        return None
    tokens = sum(a.tokens for a in answers if a.speculation) if own else found["rounds"] + found["accepted"]
    return {
        "from": "answers" if own else "metrics",
        **{name: found[name] for name in _COUNTED},
        "accepted_share": found["accepted"] / found["drafted"] if found["drafted"] else None,
        "mean_acceptance_length": tokens / found["rounds"],
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, percentiles, maximum and count; None for each of no values."""
    names = ("mean", "p50", "p90", "p99", "max")
    if not values:
        return {**dict.fromkeys(names), "count": 0}
    points = np.percentile(values, (50, 90, 99), method="inverted_cdf").tolist()
    return {**dict(zip(names, [float(np.mean(values)), *points, max(values)], strict=True)), "count": len(values)}
