"""Connections whose request heads are bounded in bytes and in time, which uvicorn leaves to a proxy."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 64 << 10
"""Bytes of the request line and headers together."""

HEAD_TIMEOUT_S = 10.0
"""Seconds in which they must arrive, from the connection or from the first byte of a further request."""


class BoundedConnection(HttpToolsProtocol):
    """Closes a connection with 431 if its head is too long, and with 408 if it is too slow."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MOST_HEAD_BYTES:
            self._refuse(431, "Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_head:  # a further request of the connection
            self._begin_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # a trailer: nothing reads them
            return
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def _begin_head(self) -> None:
        self._end_head()
        self._in_head, self._head_bytes = True, 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._refuse, 408, "Request Timeout")

    def _end_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()

    def _refuse(self, status: int, reason: str) -> None:
        self._end_head()
        if not self.transport.is_closing():
            self.transport.write(
                f"HTTP/1.1 {status} {reason}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode()
            )
            self.transport.close()
