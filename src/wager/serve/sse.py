"""An answer as server-sent events: a chunk for each step's tokens, and [DONE]."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from wager.errors import WagerError
from wager.serve.answers import Answer
from wager.serve.chunks import ChunkWriter, StreamPlan, event
from wager.serve.errors import ApiError, error_body

log = logging.getLogger("wager.serve")

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

_LAST_EVENT_S = 5.0
"""Seconds in which the client must take the last event."""


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
            async with asyncio.timeout(self._plan.timeout):
                last = await self._write_answer(write)
        except TimeoutError:
            message = f"The answer was not complete in {self._plan.timeout:g} s."
            last = self._failed(ApiError(504, message, "Ask for less."))
        except WagerError as error:
            last = self._failed(error)
        except Exception:
            log.exception("An answer could not be written.")
            last = self._failed(ApiError(500, "The server failed at this answer.", "Its log says why."))
        with suppress(TimeoutError):  # a client that reads nothing keeps its place no longer
            async with asyncio.timeout(_LAST_EVENT_S):
                await write(last + b"data: [DONE]\n\n", more=False)

    def _failed(self, error: WagerError) -> bytes:
        """The event of an error, which the log gets too."""
        self._answer.error = error
        return event(error_body(error))

    async def _write_answer(self, write: Callable[[bytes], Any]) -> bytes:
        """The events of the last deltas are returned: they go with the last event of the stream."""
        writer, data = ChunkWriter(self._plan), b""
        while deltas := await self._answer.next_deltas():
            data = writer.events(deltas)
            if self._answer.ended:
                break
            if data:
                await write(data)
                data = b""
        return data + writer.last(self._answer.completions())


async def until_gone(receive: Receive) -> None:
    """Until the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
