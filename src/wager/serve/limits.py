"""Reading request bodies: at most so many bytes, within so many seconds, and only JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from wager.serve.errors import ApiError
from wager.serve.options import ServeOptions

_QUICK_BYTES = 20_000

_LONGEST_TOKENS = 64
"""Characters of a token, taken together: a text of more than these for each token of the context is not encoded."""

R = TypeVar("R")


async def work_by_size(function: Callable[[bytes], R], body: bytes) -> R:
    """What a function makes of a body; of a long one in a thread, since it would delay every stream."""
    return await asyncio.to_thread(function, body) if len(body) > _QUICK_BYTES else function(body)


def check_characters(count: int, context: int, name: str) -> None:
    """ApiError for a text that is too long to be worth encoding."""
    most = _LONGEST_TOKENS * context
    if count > most:
        raise ApiError(
            400, f"The {name} has {count} characters; for a context of {context} tokens at most {most} are encoded.",
            "Shorten the text.", param=name, code="context_length_exceeded",
        )  # fmt: skip


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
