"""Servers for tests of the load client: one that writes scripted bytes, and OpenAI's API as a Starlette app.

`python load_servers.py PORT FIRST GAP AT_ONCE` runs the latter: answers after FIRST seconds, a chunk every GAP seconds.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MODELS = b'{"object": "list", "data": [{"id": "scripted", "owned_by": "tests"}]}'


def response(body: bytes, *, status: str = "200 OK", kind: str = "application/json", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


def part(data: bytes) -> bytes:
    """A chunk of HTTP's chunked encoding."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(text: str | None = None, *, finish: str | None = None, usage: Any = None, **more: Any) -> bytes:
    """One event of a chat's stream."""
    delta = {} if text is None else {"content": text}
    choices = [] if text is None and finish is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    chunk = {"object": "chat.completion.chunk", "created": 4_000_000_000, "choices": choices, "usage": usage, **more}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def usage(prompt: int, tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


DONE = b"data: [DONE]\n\n"
WHOLE = (STREAM, part(event("a")), part(event("b", finish="stop")), part(event(usage=usage(5, 2))), part(DONE) + LAST)
"""Pieces of a good answer of two tokens."""

Step = bytes | float | str
"""Bytes to write, seconds to wait, or `close` or `reset` for the connection."""
Script = Callable[[int, dict[str, Any]], Sequence[Step]]
"""What is answered to the POST of that number and body."""


@dataclass
class ScriptedServer:
    """Writes what its script says, one socket write a step; keeps what it was asked, and when it wrote."""

    script: Script
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    written: list[list[float]] = field(default_factory=list)
    connections: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                length = [line.partition(":")[2] for line in head.split("\r\n") if line.startswith("Content-Length")]
                if not head.startswith("POST"):
                    writer.write(response(MODELS))
                    continue
                body = json.loads(await reader.readexactly(int(length[0])))
                self.bodies.append(body)
                times: list[float] = []
                self.written.append(times)
                for step in self.script(len(self.bodies) - 1, body):
                    if isinstance(step, float):
                        await asyncio.sleep(step)
                    elif step == "close":
                        writer.close()
                        return
                    elif step == "reset":
                        linger = bytes([1, 0, 0, 0, 0, 0, 0, 0])
                        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                        writer.transport.abort()
                        return
                    else:
                        assert isinstance(step, bytes)
                        times.append(time.perf_counter())
                        writer.write(step)
                        await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@contextmanager
def scripted(script: Script | Sequence[Step]) -> Iterator[ScriptedServer]:
    """A scripted server in a thread of its own."""
    steps = script
    server = ScriptedServer(steps if callable(steps) else lambda _number, _body: steps)
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.port = listener.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        listener.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    try:
        assert ready.wait(10)
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


@dataclass
class Application:
    """OpenAI's API: answers of `tokens` tokens after `first` seconds, one every `gap` seconds, `at_once` in a chunk."""

    tokens: int = 5
    first: float = 0.0
    gap: float = 0.0
    at_once: int = 1
    knows: Sequence[str] = ("include_usage",)
    key: str | None = None
    most: int | None = None
    running: int = 0
    together: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def starlette(self) -> Starlette:
        paths: dict[str, tuple[str, Callable[[Request], Coroutine[Any, Any, Response]]]] = {
            "/v1/models": ("GET", self.models),
            "/v1/chat/completions": ("POST", self.complete),
            "/v1/completions": ("POST", self.complete),
        }
        return Starlette(routes=[Route(path, call, methods=[method]) for path, (method, call) in paths.items()])

    async def models(self, request: Request) -> Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "Incorrect API key provided."}}, 401)
        return JSONResponse({"object": "list", "data": [{"id": "toy", "owned_by": "tests"}]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        options = body.get("stream_options", {})
        if unknown := [name for name in options if name not in self.knows]:
            return JSONResponse({"error": {"message": f"unknown field: {unknown[0]}"}}, 400)
        if self.most is not None and self.running >= self.most:
            return JSONResponse({"error": {"message": "the queue is full"}}, 429, headers={"Retry-After": "1"})
        self.bodies.append(body)
        self.running += 1
        self.together = max(self.together, self.running)
        return StreamingResponse(self.stream(body, options), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any], options: dict[str, Any]) -> AsyncIterator[bytes]:
        chat = "messages" in body
        tokens = min(self.tokens, body["max_tokens"])
        try:
            await asyncio.sleep(self.first)
            for at in range(0, tokens, self.at_once):
                if at:
                    await asyncio.sleep(self.gap)
                many = min(self.at_once, tokens - at)
                count = usage(7, at + many) if "continuous_usage_stats" in options else None
                data = event("x" * many, usage=count)
                yield (
                    data
                    if chat
                    else data.replace(b'"delta": {"content": ', b'"text": ').replace(b'"}, "fin', b'", "fin')
                )
            yield event("", finish="length")
            if options.get("include_usage"):
                yield event(usage=usage(7, tokens))
            yield DONE
        finally:
            self.running -= 1


@contextmanager
def serving(application: Application, **tls: str) -> Iterator[str]:
    """The application under uvicorn in a thread; yields the host and port."""
    config = uvicorn.Config(application.starlette(), port=0, log_level="error", lifespan="off", **tls)  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.005)
        assert server.started
        yield "127.0.0.1:%d" % server.servers[0].sockets[0].getsockname()[1]  # noqa: UP031
    finally:
        server.should_exit = True
        thread.join(20)


if __name__ == "__main__":
    port, first, gap, at_once = sys.argv[1:]
    toy = Application(tokens=1000, first=float(first), gap=float(gap), at_once=int(at_once))
    uvicorn.run(toy.starlette(), port=int(port), log_level="error")
