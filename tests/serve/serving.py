"""Servers for tests, and what they ask of them: of a small random model in a thread of its own, on a free port;
and `wager serve` processes, with real signals, their logs and their memory."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

import wager
from wager.async_llm import AsyncLLM
from wager.serve.app import Server
from wager.serve.limits import ServeOptions
from wager.serve.run import bind, serving

NAME = "tiny"
CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "one two three one two three"}]
LONG: Any = {"messages": MESSAGES, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
SHORT: Any = {**LONG, "max_tokens": 8}
OPTIONS: dict[str, Any] = dict(max_context=512, max_sequences=8, max_rows=64, threads=1, drafter="ngram", depth=3)


def eventually(condition: Callable[[], bool], what: str, *, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def metrics_of(text: str) -> Mapping[str, float]:
    """Samples by name, with the labels but the model's, of which there may be none."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [f"{name}={value}" for name, value in sample.labels.items() if name not in ("model_name", "le")]
            if "le" not in sample.labels:
                found[",".join([sample.name, *sorted(labels)])] = sample.value
    return found


def chunks_of(text: str) -> list[Any]:
    """The chunks of a streamed answer."""
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream that names them."""
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        if event.startswith(":"):  # it waited
            continue
        kind, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


def tool(name: str, *, strict: bool = False, **arguments: Any) -> Any:
    """A tool; `arguments` are the schemas of its arguments, all of which a call must have."""
    parameters = {"type": "object", "properties": arguments, "required": [*arguments], "additionalProperties": False}
    function = {"name": name, "parameters": parameters} | ({"strict": True} if strict else {})
    return {"type": "function", "function": function}


class HttpServer:
    """A server at `url`."""

    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, **options: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=60, verify=False, **options)  # reading certificates takes 30 ms

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    def get(self, path: str) -> httpx2.Response:
        with self.client() as client:
            return client.get(path)

    def metrics(self) -> Mapping[str, float]:
        """Samples by name, with the labels but the model's, of which there may be none."""
        with self.client() as client:
            return metrics_of(client.get("/metrics").text)

    def chat(self, **body: Any) -> Any:
        return self.post(CHAT, body).json()

    def streamed(self, body: Any, path: str = CHAT) -> list[Any]:
        """The chunks of the answer."""
        return chunks_of(self.post(path, {**body, "stream": True}).text)

    def text(self, body: Any) -> str:
        response = self.post(CHAT, body)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])

    def live(self) -> Mapping[str, Any]:
        with self.client() as client:
            found: dict[str, Any] = client.get("/live").json()
        return found

    def is_idle(self) -> bool:
        """Whether no request is open and every block is free."""
        live = self.live()
        return live["open"] == live["running"] == live["waiting"] == 0 and live["cache_usage"] == 0

    def connect(self, data: bytes = b"") -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        made.sendall(data)
        return made


@dataclass
class Running(HttpServer):
    """A server in a thread."""

    url: str
    server: Server

    @property
    def llm(self) -> AsyncLLM:
        return self.server.llm


@contextmanager
def running(engine: dict[str, Any] | None = None, **options: Any) -> Iterator[Running]:
    """A server that listens, until the block is left."""
    llm = AsyncLLM("random:llama:tiny", **{**OPTIONS, **(engine or {})})
    chosen = ServeOptions(**{"model_names": (NAME,), "port": 0, "drain_timeout": 5.0, **options})
    server, listener, ready = Server(llm, chosen), bind(chosen), threading.Event()
    found: list[str] = []
    uvicorn = serving(server, ready=lambda url: (found.append(url), ready.set()))
    thread = threading.Thread(target=uvicorn.run, args=([listener],), daemon=True)
    thread.start()
    assert ready.wait(30), "the server did not start"
    try:
        yield Running(found[0], server)
    finally:
        uvicorn.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"


# ---- processes -------------------------------------------------------------------------------------------------------


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
                if not server.url and (found := re.search(r"\bserving .+ at (http://[^\s\"]+)", line)):
                    server.url = found[1]
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
