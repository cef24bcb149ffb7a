"""A server of a small random model in a thread of its own, on a free port, for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from wager.async_llm import AsyncLLM
from wager.serve.app import Server
from wager.serve.options import ServeOptions
from wager.serve.run import bind, serving

NAME = "tiny"
OPTIONS: dict[str, Any] = dict(max_context=512, max_sequences=8, max_rows=64, threads=1, drafter="ngram", depth=3)


@dataclass(frozen=True)
class Running:
    url: str
    server: Server

    @property
    def llm(self) -> AsyncLLM:
        return self.server.llm

    def client(self, **options: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=60, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)


@contextmanager
def running(engine: dict[str, Any] | None = None, **options: Any) -> Iterator[Running]:
    """A server that listens, until the block is left."""
    llm = AsyncLLM("random:llama:tiny", **{**OPTIONS, **(engine or {})})
    chosen = ServeOptions(**{"model_name": NAME, "port": 0, "drain_timeout": 5.0, **options})
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
