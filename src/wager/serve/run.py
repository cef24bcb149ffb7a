"""Runs the server: a socket, uvicorn, and an orderly end on SIGTERM, SIGHUP or Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from types import FrameType

import uvicorn

from wager.errors import UsageError
from wager.serve.app import Server
from wager.serve.connections import BoundedConnection
from wager.serve.limits import ServeOptions

log = logging.getLogger("wager.serve")

_BACKLOG = 1024
_KEEP_ALIVE_S = 130
"""Seconds for which an idle connection is kept: longer than proxies do (Caddy 120, nginx 60), which would lose what
they send as the server closes it."""

_LAST_DELTAS_S = 5
"""Seconds, at most, in which requests that were ended after the drain timeout send their last deltas; a fifth of them
if their clients do not read."""


def bind(options: ServeOptions) -> socket.socket:
    """A socket that has the address but does not listen yet, so that nobody connects before the model is loaded.
    UsageError if the address is taken or not of this machine."""
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"The server cannot use {options.host}:{options.port}: {getattr(error, 'strerror', None) or error}.",
            "Give another --host or --port; --port 0 takes a free one.",
        ) from None
    return made


def serving(server: Server, *, ready: Callable[[str], None]) -> uvicorn.Server:
    """What answers requests when its `run` is given a socket, until SIGTERM or Ctrl-C: then no new ones are taken, and
    those that run may end within `drain_timeout`. `ready` is called with the server's URL once it listens."""
    config = uvicorn.Config(
        server.app(),
        http=BoundedConnection,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(server.options.drain_timeout) + _LAST_DELTAS_S,
    )
    return _DrainingServer(config, server, ready)


def configure_logging(*, json_lines: bool) -> None:
    """Log requests and warnings on stderr, a line each."""
    lines = logging.StreamHandler()
    lines.setFormatter(JsonLines() if json_lines else TextLines("%(asctime)s %(levelname)s %(message)s"))
    for name in ("wager", "wager.serve", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [lines]
        logger.setLevel(logging.INFO if name == "wager.serve" else logging.WARNING)
        logger.propagate = False


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, what the message says as values, and the fields of the
    record."""

    def format(self, record: logging.LogRecord) -> str:
        values = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "said", {}),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values, ensure_ascii=False)


class TextLines(logging.Formatter):
    """The message, and the fields of the record behind it."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in getattr(record, "fields", {}).items())
        return f"{super().format(record)} {fields}".rstrip()


class _DrainingServer(uvicorn.Server):
    """Tells the application that it drains, and ends without raising the signal again: an orderly end is a success."""

    def __init__(self, config: uvicorn.Config, server: Server, ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._server = server
        self._ready = ready
        self._ends: list[asyncio.TimerHandle] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            self._ready(_url(self._server.options, sockets[0]))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        admission = self._server.admission
        seconds = self._server.options.drain_timeout
        admission.draining = True
        log.info("draining: %d sequences run or wait, and have %g s to end", admission.open, seconds)
        self._end_answers(seconds)
        await super().shutdown(sockets)
        for end in self._ends:
            end.cancel()
        log.info("ended")

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGHUP too, unless it is ignored, as under nohup: a server whose terminal was closed ends in order."""
        before = signal.getsignal(signal.SIGHUP)
        ends = before is not signal.SIG_IGN and threading.current_thread() is threading.main_thread()
        with super().capture_signals():
            if ends:
                signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                if ends:
                    signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:  # the user cannot wait
            self._end_answers(0.0)
        self.should_exit = True

    def _end_answers(self, seconds: float) -> None:
        """End in `seconds` what still runs, and soon after it connections whose clients do not take the rest."""
        loop = asyncio.get_running_loop()
        self._ends += [
            loop.call_later(seconds, self._server.llm.abort_all),
            loop.call_later(seconds + _LAST_DELTAS_S / 5, self._close_connections),
        ]

    def _close_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _url(options: ServeOptions, listener: socket.socket) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"http://{host}:{listener.getsockname()[1]}"
