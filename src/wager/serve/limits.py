"""Reading request bodies: at most so many bytes, within so many seconds, and only JSON."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from wager.serve.errors import ApiError
from wager.serve.options import ServeOptions


async def read_body(request: Request, options: ServeOptions) -> bytes:
    """The body. ApiError 413 if it is too long, 408 if it is too slow, 415 if it says that it is not JSON."""
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"The body is {kind[:80]!r}.", "Send application/json.")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > options.max_body:
        raise _too_long(options)
    try:
        async with asyncio.timeout(options.body_timeout):
            return await _read(request, options)
    except TimeoutError:
        raise ApiError(
            408, f"The body did not arrive within {options.body_timeout:g} seconds.", "Send it at once."
        ) from None
    except ClientDisconnect:
        raise ApiError(400, "The connection ended within the body.") from None


async def _read(request: Request, options: ServeOptions) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > options.max_body:
            raise _too_long(options)
        parts.append(part)
    return b"".join(parts)


def _too_long(options: ServeOptions) -> ApiError:
    return ApiError(413, f"The body is longer than {options.max_body} bytes.", "Send a shorter prompt.")
