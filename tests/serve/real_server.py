"""A `wager serve` process for tests: a real port, real signals, its log and its memory."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wager
from serve.serving import CHAT, LONG, HttpServer

TINY = ("--model", "random:llama:tiny", "--threads", "1")

_SOURCE = str(Path(wager.__file__).parents[1])


def http_request(body: Any, path: str = CHAT, *, more: str = "") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{more}"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other side closes; also if it resets the connection."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def read_answer(connection: socket.socket) -> bytes:
    """One answer: a head, and as much as it says that follows."""
    got = b""
    while b"\r\n\r\n" not in got:
        part = connection.recv(1)
        assert part, got
        got += part
    length = re.search(rb"content-length: (\d+)", got)
    end = len(got) + (int(length[1]) if length else 0)
    while len(got) < end and (part := connection.recv(end - len(got))):
        got += part
    return got


_EVERYTHING = {"speculation_stats": True, "logprobs": True, "top_logprobs": 20}

MUCH = {**LONG, **_EVERYTHING, "max_tokens": 450, "n": 8, "stream": True}
"""An answer of megabytes, more than the system's buffers take."""


def deaf(url: str, body: Any = MUCH) -> socket.socket:
    """A client that asks and reads nothing."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = url.removeprefix("http://").split(":")
    made.connect((host, int(port)))
    made.sendall(http_request(body))
    return made


@dataclass
class RealServer(HttpServer):
    """The process; `lines` are those of its log so far."""

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def resident(self) -> int:
        """Bytes of memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def server_process(*options: str) -> Iterator[RealServer]:
    """`wager serve` with these options on a free port, from its start to its orderly end when the block is left, unless
    it was killed before."""
    with subprocess.Popen(
        [sys.executable, "-m", "wager.cli", "serve", "--port", "0", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": _SOURCE},
    ) as process:
        server, ready = RealServer(process), threading.Event()

        def read() -> None:
            for line in process.stderr or ():
                server.lines.append(line)
                if not server.url and line.startswith("serving "):
                    server.url = line.split()[-1]
                    ready.set()
            ready.set()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            assert ready.wait(120) and server.url, f"the server did not start: {server.log}"
            yield server
            killed = (process.poll() or 0) < 0
            process.terminate()
            assert process.wait(60) == 0 or killed, server.log
        finally:
            process.kill()
            process.wait()
            reader.join(10)


@contextmanager
def served(*options: str, folder: Path | None = None, **config: Any) -> Iterator[RealServer]:
    """A server of a small random model; `config` are options that have no flag, written into `folder`. It must never
    write a traceback."""
    arguments = [*TINY, "--served-name", "tiny", *options]
    if config:
        assert folder is not None
        lines = [f"{name.replace('_', '-')} = {value}" for name, value in config.items()]
        (folder / "options.toml").write_text("\n".join(lines))
        arguments += ["--config", str(folder / "options.toml")]
    if "--max-context" not in options:
        arguments += ["--max-context", "512"]
    with server_process(*arguments) as server:
        yield server
    assert "Traceback" not in server.log, server.log
