"""An answer as server-sent events: a chunk for each step's tokens, and [DONE]."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from wager.errors import WagerError
from wager.serve.answers import Answer, ChoiceDelta
from wager.serve.errors import ApiError, error_body
from wager.serve.formats import AnswerFormat, encoded
from wager.serve.guesses import GuessReport
from wager.types import Completion

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """How an answer is streamed. `usage` and `details` make objects of the completed choices; `guesses` describes what
    was guessed in each delta. Without `details` or `guesses` there are none. With `prompt_tokens` every chunk has the
    usage so far. `timeout`: seconds after which the answer
    ends with an error."""

    format: AnswerFormat
    choices: int
    include_usage: bool
    usage: Callable[[Sequence[Completion]], dict[str, Any]]
    timeout: float
    prompt_tokens: int | None = None
    details: Callable[[Sequence[Completion]], dict[str, Any]] | None = None
    guesses: GuessReport | None = None


class EventStream(Response):
    """Sends an answer that has been started, and closes `resources` at the end, however it comes: the client may go,
    the time may run out, the engine may fail."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, plan: StreamPlan, resources: AsyncExitStack) -> None:
        super().__init__(status_code=200, headers=_HEADERS)
        del self.headers["content-length"]
        self._answer, self._plan, self._resources = answer, plan, resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            sending = asyncio.create_task(self._send(send))
            gone = asyncio.create_task(until_gone(receive))
            try:
                await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (sending, gone):
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task

    async def _send(self, send: Send) -> None:
        async def write(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async with asyncio.timeout(self._plan.timeout):
                await self._write_answer(write)
        except TimeoutError:
            message = f"The answer was not complete in {self._plan.timeout:g} s."
            await write(_event(error_body(ApiError(504, message, "Ask for less."))))
        except WagerError as error:
            await write(_event(error_body(error)))
        await write(b"data: [DONE]\n\n", more=False)

    async def _write_answer(self, write: Callable[[bytes], Any]) -> None:
        plan, form = self._plan, self._plan.format
        base = form.envelope(stream=True) | ({"usage": None} if plan.include_usage else {})
        opened: set[int] = set()
        tokens = 0
        while deltas := await self._answer.next_deltas():
            parts: list[bytes] = []
            for item in deltas:
                if item.index not in opened:
                    opened.add(item.index)
                    first = form.first(item.index)
                    if first is not None:
                        parts.append(_event(base | {"choices": [first]}))
                tokens += len(item.delta.token_ids)
                if plan.prompt_tokens is not None:
                    total = plan.prompt_tokens + tokens
                    base["usage"] = {
                        "prompt_tokens": plan.prompt_tokens,
                        "completion_tokens": tokens,
                        "total_tokens": total,
                    }
                if item.delta.text or item.delta.finish_reason or item.delta.logprobs or plan.guesses:
                    parts.append(self._chunk(base, item))
            if parts:
                await write(b"".join(parts))
        completions = self._answer.completions()
        if plan.include_usage:
            await write(_event(form.envelope(stream=True) | {"choices": [], "usage": plan.usage(completions)}))
        if plan.details is not None:
            found = {"choices": [], "speculation": plan.details(completions)}
            await write(_event(form.envelope(stream=True) | found))

    def _chunk(self, base: dict[str, Any], item: ChoiceDelta) -> bytes:
        choice = self._plan.format.part(item.index, item.delta)
        if self._plan.guesses is not None:
            choice["speculation"] = self._plan.guesses.of(item)
        event = _event(base | {"choices": [choice]})
        if item.delta.finish_reason == "error":
            event += _event(error_body(ApiError(500, item.delta.error)))
        return event


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + encoded(value) + b"\n\n"


async def until_gone(receive: Receive) -> None:
    """Until the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
