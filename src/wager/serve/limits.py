"""Reading request bodies: at most so many bytes, of one and of all together, within so many seconds, and only JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request

from wager.serve.errors import ApiError
from wager.serve.options import ServeOptions


class BodyLimits:
    """Reads bodies within the limits of `options`. `held`: bytes of those that are read or parsed."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self.held = 0

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """The body; its bytes count until the block is left. ApiError 413 if it is too long, 408 if it is too slow, 415
        if it says that it is not JSON, 503 if all bodies together are too many bytes."""
        kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(415, f"The body is {kind[:80]!r}.", "Send application/json.")
        length = request.headers.get("content-length", "")
        self._check(int(length) if length.isdigit() else 0)
        raw = bytearray()
        try:
            await self._receive(request, raw)
            yield bytes(raw)
        finally:
            self.held -= len(raw)

    async def _receive(self, request: Request, raw: bytearray) -> None:
        seconds = self._options.body_timeout
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    self._check(len(part), before=len(raw))
                    self.held += len(part)
                    raw += part
        except TimeoutError:
            raise ApiError(408, f"The body did not arrive within {seconds:g} seconds.", "Send it at once.") from None
        except ClientDisconnect:
            raise ApiError(400, "The connection ended within the body.") from None

    def _check(self, more: int, *, before: int = 0) -> None:
        """ApiError unless a body of which `before` bytes have come may have `more`."""
        options = self._options
        if before + more > options.max_body:
            raise ApiError(413, f"The body is longer than {options.max_body} bytes.", "Send a shorter prompt.")
        if self.held + more > max(options.max_bodies, options.max_body):
            raise ApiError(
                503, f"Bodies of {self.held} bytes are being read already.", "Try again in 1 s.", retry_after=1
            )
