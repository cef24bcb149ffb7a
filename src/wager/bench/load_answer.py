"""One request of a load test: what its answer consisted of, and when each piece arrived.

A chunk is an event with text of the answer (reasoning and tool calls are text too). It may hold several tokens: a step
that accepts guesses emits all of them at once.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wager.bench.load_events import EventReader
from wager.bench.load_http import ExchangeError

FAILURES: Mapping[str, str] = {
    "refused": "answered with status 429: the server is full",
    "status": "answered with another status than 200",
    "connect": "no connection",
    "timeout": "no whole answer within --timeout",
    "broken": "the stream ended before the answer did, or was not HTTP",
    "malformed": "the stream held what is no event of OpenAI's API",
    "error": "the server reported an error within the stream",
    "empty": "the stream ended without text and without a reason",
}
"""Kinds of requests that failed."""

OK = "ok"

_TAG = re.compile(r"<[^<>]*>")
_TEXTS = ("reasoning_content", "reasoning", "refusal")
_MOST_OF_AN_ERROR = 1 << 16


@dataclass(slots=True)
class TimedAnswer:
    """What was measured of one request. Times are seconds by the client's clock; `scheduled` is when the request was
    due, `sent` when it was written (None: it never was), `ended` when the last of it had come.

    `arrivals` has the time of each chunk, `counted` the tokens that the server had reported by then (0: none). Counts
    of the server are None where it reports none. `outcome` is OK or one of FAILURES, with a message.
    """

    number: int
    prompt_id: str | int
    family: str
    scheduled: float
    sent: float | None = None
    ended: float = 0.0
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    counted: array[int] = field(default_factory=lambda: array("q"))
    pieces: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    outcome: str = OK
    message: str = ""
    retry_after: float | None = None

    @property
    def ok(self) -> bool:
        return self.outcome == OK

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def tokens(self) -> int:
        """Those that the server reports; without a report one for each chunk, which is the least it can be."""
        return len(self.arrivals) if self.completion_tokens is None else self.completion_tokens

    @property
    def first_tokens(self) -> float:
        """Tokens of the first chunk: as reported with it, else one."""
        return max(1, self.counted[0]) if self.counted else 0

    @property
    def ttft(self) -> float | None:
        """Seconds from the scheduled arrival to the first chunk."""
        return self.arrivals[0] - self.scheduled if self.arrivals else None

    @property
    def e2e(self) -> float:
        """Seconds from the scheduled arrival to the end."""
        return self.ended - self.scheduled

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first chunk: the time between the first and the last chunk, over them."""
        later = self.tokens - self.first_tokens
        return (self.arrivals[-1] - self.arrivals[0]) / later if len(self.arrivals) > 1 and later > 0 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one chunk and the next: ITL by chunk."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def reported(self) -> bool:
        """Whether the server said with every chunk how many tokens there were so far."""
        return bool(self.counted) and all(self.counted)

    @property
    def chunk_tokens(self) -> list[float]:
        """Tokens of each chunk: as reported; else each chunk after the first has the same share of those after the
        first token, which is exact where every chunk is one token."""
        if not self.arrivals:
            return []
        if self.reported:
            return [float(n - before) for n, before in zip(self.counted, [0, *self.counted], strict=False)]
        later = len(self.arrivals) - 1
        share = max(0.0, self.tokens - self.first_tokens) / later if later else 0.0
        return [max(float(self.first_tokens), self.tokens if not later else 0.0), *[share] * later]

    def fail(self, kind: str, message: str) -> None:
        self.outcome, self.message = kind, message[:500]


class AnswerReader:
    """Fills an TimedAnswer from the bytes of its response."""

    def __init__(self, answer: TimedAnswer) -> None:
        self._answer = answer
        self._events = EventReader()
        self._status, self._other = 0, b""
        self._done = False
        self._usage_seen = 0

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if status != 200:
            seconds = headers.get("retry-after", "")
            self._answer.retry_after = float(seconds) if seconds.isascii() and seconds.isdigit() else None
        elif kind != "text/event-stream":
            raise ExchangeError("malformed", f"the answer is {kind or 'of no type'} and not text/event-stream")

    def body(self, data: bytes, now: float) -> bool:
        """Whether the last event has come. Raises ExchangeError for what is no event of the API."""
        if self._status != 200:
            self._other = (self._other + data)[:_MOST_OF_AN_ERROR]
            return False
        try:
            events = self._events.feed(data)
        except ValueError as error:
            raise ExchangeError("malformed", str(error)) from error
        for event in events:
            self._take(event, now)
        return self._done

    def finish(self, ended: float) -> None:
        """The response has ended. Raises ExchangeError if the answer has not."""
        if self._status != 200:
            kind = "refused" if self._status == 429 else "status"
            raise ExchangeError(kind, f"status {self._status}: {_reason(self._other)}")
        for event in self._events.finish():
            self._take(event, ended)
        answer = self._answer
        if not self._done and answer.finish_reason is None:
            kind = "broken" if answer.pieces else "empty"
            raise ExchangeError(kind, "the stream ended without a finish_reason and without [DONE]")
        if answer.finish_reason is None and not answer.pieces:
            raise ExchangeError("empty", "the stream held no text and no finish_reason")

    def _take(self, event: str, now: float) -> None:
        if self._done:
            return
        answer = self._answer
        answer.ended = now
        if event == "[DONE]":
            self._done = True
            return
        chunk = _object(event)
        if chunk.get("error"):
            raise ExchangeError("error", _said(chunk["error"]))
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._count(usage)
        choices = chunk.get("choices")
        text = ""
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                text += _text(choice)
                reason = choice.get("finish_reason")
                if isinstance(reason, str):
                    answer.finish_reason = reason
        if text:
            answer.pieces.append(text)
            answer.arrivals.append(now)
            answer.counted.append(self._usage_seen)

    def _count(self, usage: Mapping[str, Any]) -> None:
        answer = self._answer
        answer.prompt_tokens = _whole(usage.get("prompt_tokens"), answer.prompt_tokens)
        answer.completion_tokens = _whole(usage.get("completion_tokens"), answer.completion_tokens)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            answer.cached_tokens = _whole(details.get("cached_tokens"), answer.cached_tokens)
        self._usage_seen = answer.completion_tokens or 0


class BodyReader:
    """A response as a whole: of GET, and of a request that is no stream."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.data = b""

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, headers

    def body(self, data: bytes, now: float) -> bool:
        self.data += data
        if len(self.data) > 1 << 24:
            raise ExchangeError("malformed", "the answer is longer than 16 MiB")
        return False

    @property
    def reason(self) -> str:
        """What the server says is wrong."""
        return _reason(self.data)


def _object(event: str) -> dict[str, Any]:
    try:
        chunk = json.loads(event)
    except (ValueError, RecursionError):
        chunk = None
    if not isinstance(chunk, dict):
        raise ExchangeError("malformed", f"an event is no JSON object: {event[:100]!r}")
    return chunk


def _text(choice: Mapping[str, Any]) -> str:
    """The text of a choice of a chunk, of chat or of completions."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        text = choice.get("text")
        return text if isinstance(text, str) else ""
    content = delta.get("content")
    if isinstance(content, str) and content:
        return content  # as in nearly every chunk
    text = "".join(value for name in _TEXTS if isinstance(value := delta.get(name), str))
    calls = delta.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            text += "".join(value for name in ("name", "arguments") if isinstance(value := function.get(name), str))
    return text


def _whole(value: object, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise


def _reason(body: bytes) -> str:
    """The message of an error's body in one line: OpenAI's form, or the beginning of its text, without tags."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and value.get("error"):
        return _said(value["error"])
    if isinstance(value, dict) and isinstance(value.get("detail"), str):
        return str(value["detail"])
    return " ".join(_TAG.sub(" ", body[:1000].decode("utf-8", "replace")).split())[:200] or "(no text)"


def _said(error: object) -> str:
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)
