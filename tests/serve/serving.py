"""A server of a small random model in a thread of its own, on a free port, for tests, and what they ask of it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import openai
from openai.lib.streaming.chat import ChatCompletionStreamState
from prometheus_client.parser import text_string_to_metric_families

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


def tool(name: str, *, strict: bool = False, **arguments: Any) -> Any:
    """A tool; `arguments` are the schemas of its arguments, all of which a call must have."""
    parameters = {"type": "object", "properties": arguments, "required": [*arguments], "additionalProperties": False}
    function = {"name": name, "parameters": parameters} | ({"strict": True} if strict else {})
    return {"type": "function", "function": function}


def called_both_ways(client: openai.OpenAI, **options: Any) -> tuple[Any, list[tuple[str, str]]]:
    """The choice of a chat and its tool calls, which must be the same streamed, put together by the client itself."""
    whole = client.chat.completions.create(**options).choices[0]
    state = ChatCompletionStreamState()
    for chunk in client.chat.completions.create(**options, stream=True):
        state.handle_chunk(chunk)
    streamed = state.current_completion_snapshot.choices[0]
    calls = [
        [(call.function.name, call.function.arguments) for call in each.message.tool_calls or []]
        for each in (whole, streamed)
    ]
    assert calls[0] == calls[1] and whole.finish_reason == streamed.finish_reason
    assert (whole.message.content or "") == (streamed.message.content or "")
    return whole, calls[0]


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

    def metrics(self) -> Mapping[str, float]:
        """Samples by name, with the labels but the model's, of which there may be none."""
        with self.client() as client:
            return metrics_of(client.get("/metrics").text)

    def chat(self, **body: Any) -> Any:
        return self.post(CHAT, body).json()

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
    """A server in a thread; `stop` ends it as SIGTERM does."""

    url: str
    server: Server
    stop: Callable[[], None]

    @property
    def llm(self) -> AsyncLLM:
        return self.server.llm


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
        yield Running(found[0], server, lambda: setattr(uvicorn, "should_exit", True))
    finally:
        uvicorn.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"
