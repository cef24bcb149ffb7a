"""HTTP/1.1 connections for the load client: answers are handed on as their bytes arrive, with the time.

httptools parses; asyncio does sockets and TLS. Connections are kept for later requests. No redirects, no proxies, no
compression: each would come between the server that is measured and the clock.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast
from urllib.parse import SplitResult, urlsplit

import httptools

from wager.errors import UsageError
from wager.inputs import shown

GRACE_S = 0.25
"""How long a server may take to end the body of an answer after its last event, before the connection is given up."""

_KNOWN_ENDINGS = ("/chat/completions", "/completions", "/models")


class ExchangeError(Exception):
    """A request without a whole answer. `kind` is one of load_answer.FAILURES."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


class Receiver(Protocol):
    """What takes an answer. `now` is when the bytes were read, by the client's clock."""

    def head(self, status: int, headers: dict[str, str]) -> None: ...

    def body(self, data: bytes, now: float) -> bool:
        """Whether nothing more is expected."""
        ...


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server listens; `base` is the path of its API, such as /v1."""

    host: str
    port: int
    base: str
    tls: bool

    @classmethod
    def parse(cls, url: str) -> ServerAddress:
        """Of http://HOST[:PORT][/PATH]; /v1 where there is no path. UsageError names what is wrong."""
        hint = "Give it as http://127.0.0.1:8000 or https://host/v1."
        try:
            parts, port = _split(url)
        except ValueError as error:
            raise UsageError(f"--url {shown(url)} is not a URL: {error}.", hint) from error
        cause = ""
        if parts.scheme not in ("http", "https"):
            cause = "does not begin with http:// or https://"
        elif not parts.hostname:
            cause = "names no host"
        elif parts.username is not None or parts.query or parts.fragment:
            cause = "has a user, a query or a fragment"
        elif port == 0 or not url.isascii() or any(letter <= " " or letter == "\x7f" for letter in url):
            cause = "has a port or letters that no server has"
        if cause:
            raise UsageError(f"--url {shown(url)} {cause}.", hint)
        base = parts.path.rstrip("/")
        for ending in _KNOWN_ENDINGS:
            base = base.removesuffix(ending)
        tls = parts.scheme == "https"
        return cls(cast(str, parts.hostname), port or (443 if tls else 80), base or "/v1", tls)

    @property
    def url(self) -> str:
        """Of the API, without anything secret."""
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.base}"

    @property
    def authority(self) -> str:
        """Host and port, as in the header Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def request(self, path: str, body: bytes | None, *, key: str | None = None) -> bytes:
        """The bytes of a request: POST of a JSON body, or GET without one."""
        lines = [
            f"{'GET' if body is None else 'POST'} {self.base}{path} HTTP/1.1",
            f"Host: {self.authority}",
            "User-Agent: wager-bench",
            "Accept: text/event-stream, application/json",
        ]
        if key is not None:
            lines.append(f"Authorization: Bearer {key}")
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode("ascii") + (body or b"")


def _split(url: str) -> tuple[SplitResult, int | None]:
    parts = urlsplit(url)
    return parts, parts.port


class Connection(asyncio.Protocol):
    """One connection, which serves one request after the other."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._done: asyncio.Future[float] | None = None
        self._parser: Any = None
        self._headers: dict[str, str] = {}
        self._failure: ExchangeError | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._now = 0.0
        self._began = self._head_seen = self._complete = self._last_seen = False
        self.open = self._keep = False

    def send(self, request: bytes, receiver: Receiver) -> None:
        """Write a request, whose answer goes to `receiver`."""
        self._receiver, self._headers, self._failure = receiver, {}, None
        self._began = self._head_seen = self._complete = self._last_seen = False
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        cast(asyncio.Transport, self._transport).write(request)

    async def ended(self) -> float:
        """When the answer had ended. Raises ExchangeError; `answered` says whether a byte of it had come by then."""
        try:
            return await cast(asyncio.Future[float], self._done)
        finally:
            if self._grace:
                self._grace.cancel()
            self._receiver = self._grace = None

    @property
    def answered(self) -> bool:
        return self._began

    @property
    def reusable(self) -> bool:
        """Whether another request may follow."""
        return self.open and self._complete and self._keep

    def close(self) -> None:
        self.open = False
        if self._transport:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.open = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        self._began = True
        if self._receiver is None or self._complete:
            self.close()  # bytes that nobody asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._end(ExchangeError("broken", "the server changed to another protocol"))
        except httptools.HttpParserError as error:
            self._end(self._failure or ExchangeError("broken", f"the answer is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.open, self._now = False, self._clock()
        if not self._done or self._done.done():
            return
        until_close = not {"content-length", "transfer-encoding"} & self._headers.keys()
        if self._last_seen or (self._head_seen and until_close and exc is None):
            self._end(None)
        else:
            how = f"was cut: {exc}" if exc else "was closed by the server"
            where = "in the middle of the answer" if self._began else "before an answer"
            self._end(ExchangeError("broken", f"the connection {how} {where}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:  # not 100 Continue
            self._head_seen = True
            try:
                cast(Receiver, self._receiver).head(status, self._headers)
            except ExchangeError as error:
                self._failure = error
                raise

    def on_body(self, data: bytes) -> None:
        if self._last_seen or self._receiver is None:
            return
        try:
            self._last_seen = self._receiver.body(data, self._now)
        except ExchangeError as error:
            self._failure = error
            raise
        if self._last_seen:
            self._grace = asyncio.get_running_loop().call_later(GRACE_S, self._give_up_on_the_end)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            self._headers = {}
            return
        self._complete, self._keep = True, bool(self._parser.should_keep_alive())
        self._end(None)

    def _give_up_on_the_end(self) -> None:
        """All events have come, and the server does not end the body."""
        self._now = self._clock()
        self._end(None)

    def _end(self, failure: ExchangeError | None) -> None:
        if self._done is None or self._done.done():
            return
        if failure:
            self._done.set_exception(failure)
        else:
            self._done.set_result(self._now)


class Connections:
    """Connections to one server, opened as needed and used again."""

    def __init__(self, server: ServerAddress, clock: Callable[[], float]) -> None:
        self._server, self._clock = server, clock
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if server.tls else None
        self._address: str | None = None
        self.opened = 0

    async def exchange(
        self, request: bytes, receiver: Receiver, *, on_sent: Callable[[float], None] | None = None
    ) -> float:
        """Send a request; when its answer had ended. `on_sent` is called with the time at which it was written. A
        connection that the server closed while it was idle is replaced. Raises ExchangeError."""
        while True:
            connection = self._take_idle()
            used = connection is not None
            connection = connection or await self._open()
            try:
                if on_sent:
                    on_sent(self._clock())
                connection.send(request, receiver)
                ended = await connection.ended()
            except ExchangeError:
                connection.close()
                if used and not connection.answered:
                    continue
                raise
            except BaseException:  # cancelled: a time limit, or the end
                connection.close()
                raise
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()
            return ended

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        host = self._address or self._server.host
        try:
            transport, connection = await loop.create_connection(
                lambda: Connection(self._clock),
                host,
                self._server.port,
                ssl=self._tls,
                server_hostname=self._server.host if self._tls else None,
            )
        except (OSError, ssl.SSLError) as error:
            cause = error.strerror or str(error) or type(error).__name__
            raise ExchangeError("connect", f"no connection to {self._server.authority}: {cause}") from error
        self._address = transport.get_extra_info("peername")[0]  # names are looked up once
        self.opened += 1
        return connection
