"""Connections whose requests are bounded in bytes and in time, and whose clients may go or stop reading at any place;
uvicorn leaves these to a proxy."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from wager.serve.errors import ApiError, error_response

MOST_HEAD_BYTES = 64 << 10
"""Bytes of the request line and headers together."""

HEAD_TIMEOUT_S = 10.0
"""Seconds in which they must arrive, from the connection or from the first byte of a further request; and in which
what is left of a body must, once its request has been refused."""

MOST_REQUEST_BYTES = 64 << 20
"""Bytes of a request that are read, even if nobody wants them: framing, trailers, and what follows a refusal."""

STALL_S = 30.0
"""Seconds after which a connection is closed whose client has taken nothing of what is ready for it."""

_PIECE_BYTES = 16 << 10
"""Bytes that are parsed at once: a head is too long before it ends. A further one of a
connection may be longer by them."""

_MOST_PIPELINED = 8
"""Requests that may wait behind the one that is answered, before reading pauses."""


class BoundedConnection(HttpToolsProtocol):
    """Refuses a head that is too long (431) or too slow (408) and what is no HTTP (400): at once, or, behind an answer
    that is being sent, by closing the connection after it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = self._request_bytes = 0
        self._open: deque[RequestResponseCycle] = deque()  # requests that are not answered yet, oldest first
        self._refused = False  # nothing more is read
        self._resumes = False  # the next head is none of a request
        self._timers: dict[str, asyncio.TimerHandle] = {}

    # ---- called by the transport -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._stop(name)
        super().connection_lost(exc)
        for cycle in self._open:  # uvicorn tells only the latest
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._request_bytes += len(data)
        if self._request_bytes > MOST_REQUEST_BYTES:
            self.transport.abort()
        rest = memoryview(data)
        while rest and not (self._refused or self.transport.is_closing()):
            most = min(_PIECE_BYTES, MOST_HEAD_BYTES + 1 - self._head_bytes) if self._in_head else _PIECE_BYTES
            piece = bytes(rest[:most])
            rest = rest[most:]
            if self._in_head:
                self._head_bytes += len(piece)
            self._parse(piece)
            if self._in_head and self._head_bytes > MOST_HEAD_BYTES:
                self._refuse(431, f"The head of the request is longer than {MOST_HEAD_BYTES} bytes.")

    def _parse(self, piece: bytes) -> None:
        """Give the parser some bytes. Where a request offers to go on in another protocol, as all do of Java's clients,
        the parser ends it at its head. The offer is not taken: its body goes to a new parser."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserError:
            self.send_400_response("")
        except httptools.HttpParserUpgrade as offer:
            framing = (b"content-length", b"transfer-encoding")
            lines = [name + b": " + value for name, value in self.headers if name in framing]
            self.parser, self._resumes = httptools.HttpRequestParser(self), True
            self._parse(b"\r\n".join([b"POST / HTTP/1.1", *lines, b"", piece[offer.args[0] :]]))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("reader")

    # ---- called by the parser ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._resumes:
            return
        super().on_message_begin()
        self._request_bytes = 0
        if not self._in_head:  # a further request of the connection
            self._begin_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # a trailer: nothing reads them
            return
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._resumes:
            self._resumes = False
            return
        self._end_head()
        super().on_headers_complete()
        self._open.append(self.cycle)
        if len(self.pipeline) < _MOST_PIPELINED:  # uvicorn stops reading, and so would not notice that the client goes
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():  # the body follows
            return
        self._stop("rest")
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "The request is not HTTP/1.1.")

    # ---- the ends of requests ----------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        ended = self._open.popleft()
        if self._refused and not self._open:
            self.transport.close()
        super().on_response_complete()
        self._await_reader()  # closing would wait for a client that does not read
        if ended.more_body:
            self._start("rest", HEAD_TIMEOUT_S, self.transport.abort)

    def _refuse(self, status: int, message: str) -> None:
        """Read nothing more. What was accepted is answered; behind it there is no place for a refusal."""
        self._end_head()
        self._refused = True
        last = self._open[-1] if self._open else None
        if last is not None and last.more_body and not last.response_started:
            self._open.pop()  # what is wrong is its body
            if self.pipeline and self.pipeline[0][0] is last:
                self.pipeline.popleft()
            last.disconnected = True
            last.message_event.set()
        if self._open or self.transport.is_closing():
            return
        refusal = error_response(ApiError(status, message))
        lines = [f"HTTP/1.1 {status} ", *(f"{name}: {value}" for name, value in refusal.headers.items())]
        self.transport.write("\r\n".join([*lines, "connection: close\r\n\r\n"]).encode() + bytes(refusal.body))
        self.transport.close()
        self._await_reader()

    # ---- time --------------------------------------------------------------------------------------------------------

    def _begin_head(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        late = f"The head of the request did not arrive within {HEAD_TIMEOUT_S:g} seconds."
        self._start("head", HEAD_TIMEOUT_S, self._refuse, 408, late)

    def _end_head(self) -> None:
        self._in_head = False
        self._stop("head")

    def _await_reader(self) -> None:
        """Abort the connection if its client takes nothing for a while."""
        unread = self.transport.get_write_buffer_size()
        if not unread:  # what only the system keeps holds up nobody
            return
        unread += _kept_by_the_system(self.transport)

        def look() -> None:
            if self.transport.get_write_buffer_size() + _kept_by_the_system(self.transport) >= unread:
                self.transport.abort()
            else:
                self._await_reader()

        self._start("reader", STALL_S, look)

    def _start(self, name: str, seconds: float, call: Any, *args: Any) -> None:
        self._stop(name)
        self._timers[name] = self.loop.call_later(seconds, call, *args)

    def _stop(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()


def _kept_by_the_system(transport: asyncio.Transport) -> int:
    """Bytes that the other side has not taken yet, which may be megabytes; 0 where the system does not tell."""
    try:
        from fcntl import ioctl
        from termios import TIOCOUTQ

        count = ioctl(transport.get_extra_info("socket").fileno(), TIOCOUTQ, bytes(4))
    except (ImportError, OSError, ValueError):
        return 0
    return int.from_bytes(count, sys.byteorder)
