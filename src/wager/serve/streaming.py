"""Answers as they grow: the streams of one HTTP request, and its server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from itertools import groupby
from json.encoder import encode_basestring
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from wager.async_llm import AsyncOutputStream, ChoiceDelta
from wager.engine.outputs import GuessedText
from wager.errors import WagerError
from wager.models.tokenizer import IncrementalDecoder, Tokenizer
from wager.serve.errors import ApiError, error_body, failed_answer
from wager.serve.formats import AnswerFormat, encoded, obfuscated
from wager.serve.metrics import RequestRecord
from wager.types import Completion, Draft, OutputDelta, Request

# ---- who guessed what ------------------------------------------------------------------------------------------------


class GuessReport:
    """Describes the deltas of an answer, in order. Rejected guesses are shown of the drafters `shown` (None: of all):
    those of others may be another request's text."""

    def __init__(
        self, tokenizer: Tokenizer, requests: Sequence[Request], *, shown: Collection[str] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        prompts = [request.prompt for request in requests for _ in range(request.params.n)]
        self._texts = [GuessedText(IncrementalDecoder(tokenizer, after=prompt)) for prompt in prompts]

    def of(self, item: ChoiceDelta) -> dict[str, Any]:
        """`parts` of the text with the drafter of each ("": the model itself), the number of rejected guesses, and
        those of them that are shown."""
        delta = item.delta
        made = item.round
        parts = self._texts[item.choice].split(delta.text, delta.token_ids, delta.drafted_by)
        discarded = made.discarded if made else ()
        rejected = [made.draft.tokens[node] for node in discarded if self._shows(made.draft, node)] if made else []
        return {
            "token_ids": delta.token_ids,
            "drafted_by": delta.drafted_by,
            "parts": [{"text": part.text, "drafter": part.drafter} for part in parts],
            "rejected": [self._tokenizer.decode([token], special=True) for token in rejected],
            "rejected_tokens": len(discarded),
            "drafter": made.draft.drafter if made else "",
        }

    def _shows(self, draft: Draft, node: int) -> bool:
        return self._shown is None or draft.drafter_of(node) in self._shown


_DRAFTING = ("rounds", "drafted", "accepted", "mean_acceptance_length", "drafter")
_COSTS = ("prefill_s", "decode_s", "preemptions", "seed")


def draft_report(answer: AsyncOutputStream, completions: Sequence[Completion]) -> dict[str, Any]:
    """What drafting brought to an answer: a row for each choice, and the seconds by stage of its steps."""
    return {
        "choices": [{name: getattr(each.stats, name) for name in (*_DRAFTING, *_COSTS)} for each in completions],
        "stage_seconds": answer.stage_seconds,
    }


def log_report(
    answer: AsyncOutputStream, records: Sequence[RequestRecord], error: WagerError | None = None
) -> dict[str, Any]:
    """How an answer ended, for the log: nothing of its text. Sums over the choices that have ended, by the names that
    the answer's own report has; `error` came behind the head of a stream, whose status was sent before."""
    stats = [each for record in records for each in record.stats]
    reasons = answer.finish_reasons
    if len(reasons) < sum(request.params.n for request in answer.requests):
        reasons.append("abort")
    fields: dict[str, Any] = {"completion_tokens": answer.num_tokens}
    if stats:
        rounds, tokens = sum(each.rounds for each in stats), sum(each.completion_tokens for each in stats)
        fields |= {
            "cached_tokens": sum(record.cached_tokens for record in records),
            **{name: sum(getattr(each, name) for each in stats) for name in ("rounds", "drafted", "accepted")},
            "mean_acceptance_length": round(tokens / rounds, 3) if rounds else 0.0,
            "drafter": ",".join(dict.fromkeys(each.drafter for each in stats)),
            "queue_s": round(min(record.queue_s for record in records), 6),
            "prefill_s": round(max(each.prefill_s for each in stats), 6),
            "decode_s": round(max(each.decode_s for each in stats), 6),
            **{f"{stage}_s": round(seconds, 6) for stage, seconds in (answer.stage_seconds or {}).items()},
        }
    return {**fields, **({"error": error.status} if error else {"finish_reason": ",".join(dict.fromkeys(reasons))})}


# ---- events ----------------------------------------------------------------------------------------------------------


_TEXT = "\u2402"  # stands where the text goes; no object has it elsewhere


class AnswerWriter(Protocol):
    """Writes the events of one answer; `end` comes behind the last one. `failed` is the event of an error."""

    end: bytes

    def events(self, items: Sequence[ChoiceDelta], /) -> bytes: ...

    def failed(self, error: WagerError, /) -> bytes: ...


class ChunkWriter:
    """Writes the events of one answer, in order. `usage` and `details` make objects of the completed choices; `guesses`
    describes what was guessed in each delta. None: not wanted. With `prompt_tokens` every chunk has the usage so far.
    `padded`: chunks with deltas are `obfuscated`."""

    end = b"data: [DONE]\n\n"

    def __init__(
        self,
        form: AnswerFormat,
        *,
        usage: Callable[[Sequence[Completion]], dict[str, Any]] | None = None,
        prompt_tokens: int | None = None,
        details: Callable[[Sequence[Completion]], dict[str, Any]] | None = None,
        guesses: GuessReport | None = None,
        padded: bool = False,
    ) -> None:
        self._format = form
        self._usage = usage
        self._prompt_tokens = prompt_tokens
        self._details = details
        self._guesses = guesses
        self._base = {**form.chunk_head, **({"usage": None} if usage else {})}
        self._padded = padded
        self._constant = form.plain and guesses is None and prompt_tokens is None and not padded
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # of opened choices: what is before and behind a text
        self._tokens = 0

    def events(self, items: Sequence[ChoiceDelta]) -> bytes:
        """The events of some deltas: texts of one choice that follow each other are one event; deltas that add nothing
        to be seen have none."""
        parts: list[bytes] = []
        for (index, plain), run in groupby(items, key=self._kind):
            frame = self._frames.get(index)
            if frame is None:
                frame = self._frames[index] = self._open(index, parts)
            if not plain:
                for item in run:
                    self._add(item, parts)
            elif text := "".join([item.delta.text for item in run]):
                parts += (frame[0], encode_basestring(text).encode("utf-8", "replace"), frame[1])
        return b"".join(parts)

    def failed(self, error: WagerError) -> bytes:
        return event(error_body(error))

    def last(self, completions: Sequence[Completion], further: Mapping[str, Any]) -> bytes:
        """The events behind the last delta: one for each of these that there is."""
        made = {
            "warnings": further.get("warnings"),
            "usage": self._usage and self._usage(completions),
            "speculation": self._details and self._details(completions),
            "receipts": further.get("receipts"),
        }
        head = {**self._format.chunk_head, "choices": []}
        return b"".join(event({**head, name: value}) for name, value in made.items() if value)

    def _kind(self, item: ChoiceDelta) -> tuple[int, bool]:
        """Its choice, and whether its text is all there is to say."""
        return item.choice, self._constant and item.delta.finish_reason is None

    def _open(self, index: int, parts: list[bytes]) -> tuple[bytes, bytes]:
        first = self._format.first(index)
        if first is not None:
            parts.append(event(self._base | {"choices": [first]}))
        choice = self._format.part(index, OutputDelta("", index, text=_TEXT)) if self._constant else {}
        before, _, behind = event(self._base | {"choices": [choice]}).partition(
            json.dumps(_TEXT, ensure_ascii=False).encode()
        )
        return before, behind

    def _add(self, item: ChoiceDelta, parts: list[bytes]) -> None:
        delta = item.delta
        self._tokens += len(delta.token_ids)
        if self._prompt_tokens is not None:
            self._base["usage"] = {
                "prompt_tokens": self._prompt_tokens,
                "completion_tokens": self._tokens,
                "total_tokens": self._prompt_tokens + self._tokens,
            }
        if not (delta.text or delta.finish_reason or delta.logprobs or self._guesses):
            return
        choice = self._format.part(item.choice, delta)
        if self._guesses is not None:
            choice["speculation"] = self._guesses.of(item)
        chunk = self._base | {"choices": [choice]}
        parts.append(event(obfuscated(chunk) if self._padded else chunk))
        if delta.finish_reason == "error" and (error := failed_answer(delta)):
            parts.append(event(error_body(error)))


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + encoded(value) + b"\n\n"


# ---- the response ----------------------------------------------------------------------------------------------------


log = logging.getLogger("wager.serve")

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

SILENCE_S = 15.0
"""Seconds after which an answer that has not begun sends a comment, and again: proxies end what says nothing."""

_LAST_EVENT_S = 5.0
"""Seconds in which the client must take the last event."""


class EventStream(Response):
    """Sends an answer that has been started, and closes `resources` at the end, however it comes: the client may go,
    it may be late, the engine may fail. `until` is a time of the event loop, `late` the error behind it. `last` makes
    the events behind the last delta of complete choices; `headers` are further ones."""

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: AsyncOutputStream,
        writer: AnswerWriter,
        *,
        last: Callable[[Sequence[Completion]], Awaitable[bytes]],
        until: float,
        late: WagerError,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(status_code=200, headers={**_HEADERS, **headers})
        del self.headers["content-length"]
        self.resources = AsyncExitStack()
        self.error: WagerError | None = None
        self._answer = answer
        self._writer = writer
        self._last = last
        self._until, self._late = until, late

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.resources:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            sending = asyncio.create_task(self._send(send))
            gone = asyncio.create_task(until_gone(receive))
            try:
                await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            finally:
                sending.cancel()
                gone.cancel()
                for task in (gone, sending):
                    with suppress(asyncio.CancelledError):
                        await task

    async def _send(self, send: Send) -> None:
        async def write(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        last = b""
        try:
            async with asyncio.timeout_at(self._until):
                last = await self._write_answer(write)
        except TimeoutError:
            last = self._failed(self._late)
        except WagerError as error:
            last = self._failed(error)
        except Exception:
            log.exception("An answer could not be written.")
            last = self._failed(ApiError(500, "The server failed at this answer.", "Its log says why."))
        with suppress(TimeoutError):  # a client that reads nothing keeps its place no longer
            async with asyncio.timeout(_LAST_EVENT_S):
                await write(last + self._writer.end, more=False)

    def _failed(self, error: WagerError) -> bytes:
        """The event of an error, which the log gets too."""
        self.error = error
        return self._writer.failed(error)

    async def _write_answer(self, write: Callable[[bytes], Any]) -> bytes:
        """The events of the last deltas are returned: they go with the last event of the stream."""
        data, deltas = b"", await self._first_deltas(write)
        while deltas:
            data = self._writer.events(deltas)
            if self._answer.ended:
                break
            if data:
                await write(data)
                data = b""
            deltas = await self._answer.next_deltas()
        completions = self._answer.completions()
        self.error = next((failed_answer(each) for each in completions if each.finish_reason == "error"), None)
        return data + await self._last(completions)

    async def _first_deltas(self, write: Callable[[bytes], Any]) -> list[ChoiceDelta]:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SILENCE_S):
                    return await self._answer.next_deltas()
            await write(b":\n\n")


async def until_gone(receive: Receive) -> None:
    """Until the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
