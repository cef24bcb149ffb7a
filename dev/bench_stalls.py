"""How long one request keeps all others waiting: gaps of a running stream, and times of /health, while hostile bodies
arrive one after the other. Without any first, as the measure of the machine.

    PYTHONPATH=src python dev/bench_stalls.py [--model MODEL] [--only WORD]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from serve.serving import server_process

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = (4 << 20) - 2000
TEXT = 510_000
EMPTY = {"type": "text", "text": ""}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def tool(number: int, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}", "parameters": {"properties": properties}}}


def hostile_bodies() -> dict[str, tuple[str, Any]]:
    """Paths and bodies by what they are."""
    draw = random.Random(0)
    words = " ".join("".join(draw.choices("abcdefghij", k=draw.randint(2, 9))) for _ in range(TEXT // 6))
    letters = "".join(chr(draw.randint(0x4E00, 0x9000)) for _ in range(TEXT))
    many = {f"p{number}": {"type": "string"} for number in range(500)}
    wide = {f"p{number}": {"type": "string"} for number in range(2000)}
    fits = {"max_tokens": 1, "temperature": 0}
    return {
        "text of words": (CHAT, {"messages": [user(words)]}),
        "text of digits": (COMPLETIONS, {"prompt": "1" * TEXT}),
        "text of Chinese": (COMPLETIONS, {"prompt": letters}),
        "control tokens": (CHAT, {"messages": [user("<|im_start|>" * (TEXT // 12))]}),
        "text, 4 MiB": (CHAT, {"messages": [user("a" * BODY)]}),
        "/tokenize": ("/tokenize", {"prompt": "1" * TEXT, "return_token_strs": True}),
        "/detokenize": ("/detokenize", {"tokens": [28] * (BODY // 4)}),
        "70,000 messages": (CHAT, {"messages": [user("a")] * 70_000}),
        "8,000 messages": (CHAT, {"messages": [user("a")] * 8_000}),
        "parts of a content": (CHAT, {"messages": [{"role": "user", "content": [EMPTY] * 120_000}], **fits}),
        "64 prompts of ids": (COMPLETIONS, {"prompt": [[28] * 2000] * 64, **fits}),
        "one prompt of ids": (COMPLETIONS, {"prompt": [28] * (BODY // 4)}),
        "64 prompts of text": (COMPLETIONS, {"prompt": ["1" * 8000] * 64, **fits}),
        "a prompt that fits, n = 64": (COMPLETIONS, {"prompt": [28] * 4000, "n": 64, **fits}),
        "the same with its guesses": (
            COMPLETIONS,
            {"prompt": [*range(40, 4040)], "n": 64, "stream": True, "speculation_stats": True, **fits},
        ),
        "deep guesses, n = 31": (
            COMPLETIONS,
            {"prompt": "one two three", "n": 31, "max_tokens": 60, "ignore_eos": True, "speculation": {"depth": 15}},
        ),
        "logprobs": (CHAT, {"messages": [user("a")], "n": 16, "max_tokens": 24, "logprobs": True, "top_logprobs": 20}),
        "prediction": (CHAT, {"messages": [user("a")], "prediction": {"type": "content", "content": words}}),
        "logit_bias": (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(49152)}, **fits}),
        "logit_bias, 300,000 keys": (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(300_000)}}),
        "stop_token_ids": (COMPLETIONS, {"prompt": "a", "stop_token_ids": [28] * (BODY // 4), **fits}),
        "stop strings": (COMPLETIONS, {"prompt": "a", "stop": ["a" * 250_000] * 16, "max_tokens": 40}),
        "tools": (CHAT, {"messages": [user("a")], "tools": [tool(i, **many) for i in range(120)]}),
        "a tool of 3.9 MB": (CHAT, {"messages": [user("a")], "tools": [tool(0, a={"description": "a" * 3_900_000})]}),
        "schema": (CHAT, schema({"type": "object", "properties": wide, "required": [*wide]})),
        "schema, optional": (CHAT, schema({"type": "object", "properties": many})),
        "schema, 3.9 MB": (CHAT, schema({"type": "object", "description": "a" * 3_900_000})),
        "lists in a list": (COMPLETIONS, b'{"prompt":[' + b"[]," * (BODY // 3) + b"[]]}"),
        "objects in a list": (COMPLETIONS, b'{"prompt":[' + b"{}," * (BODY // 3) + b"{}]}"),
        "350,000 keys": (COMPLETIONS, b"{" + b",".join(b'"%d":1' % i for i in range(350_000)) + b"}"),
        "deep lists": (COMPLETIONS, b"[" * BODY),
        "deep objects": (COMPLETIONS, b'{"a":' * (BODY // 5)),
        "not UTF-8": (COMPLETIONS, b"\xff" * BODY),
    }


def schema(value: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}
    return {"messages": [user("a")], "response_format": form, "max_tokens": 2}


def packed(path: str, body: Any) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


def answer(connection: socket.socket) -> bytes:
    """All that comes until the answer is whole."""
    got = b""
    while part := connection.recv(1 << 16):
        got += part
        head, ended, rest = got.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        if ended and (len(rest) >= int(length[1]) if length else got.endswith(b"0\r\n\r\n")):
            break
    return got


class Watcher:
    """Records the moments at which something happens, until it is stopped."""

    def __init__(self, port: int, follow: Callable[[Watcher, socket.socket], None]) -> None:
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=120)
        self.spans: list[tuple[float, float]] = []
        """Beginning and end of each wait."""
        self.ended = False
        self._thread = threading.Thread(target=follow, args=(self, self.connection), daemon=True)
        self._thread.start()

    def waits(self, begin: float) -> list[float]:
        return [end - max(start, begin) for start, end in list(self.spans) if end > begin]

    def stop(self) -> None:
        self.ended = True
        self._thread.join(10)
        self.connection.close()


def follow_health(watcher: Watcher, connection: socket.socket) -> None:
    while not watcher.ended:
        begin = time.perf_counter()
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        answer(connection)
        watcher.spans.append((begin, time.perf_counter()))
        time.sleep(0.002)


def follow_stream(watcher: Watcher, connection: socket.socket) -> None:
    while not watcher.ended:
        options = {"stream": True, "ignore_eos": True, "temperature": 0, "max_tokens": 1500}
        connection.sendall(packed(COMPLETIONS, {"prompt": "Once upon a time", **options}))
        before, begun = time.perf_counter(), False
        while not watcher.ended and (part := connection.recv(1 << 16)):
            now = time.perf_counter()
            if begun:
                watcher.spans.append((before, now))
            before, begun = now, True
            if b"[DONE]" in part:
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--only", default="", help="bodies whose name has this text")
    options = parser.parse_args()
    bodies = {name: packed(*body) for name, body in hostile_bodies().items() if options.only in name}
    with server_process("--model", options.model, "--max-context", str(options.context)) as server:
        port = int(server.url.rpartition(":")[2])
        health, stream = Watcher(port, follow_health), Watcher(port, follow_stream)
        time.sleep(3)
        print(f"{'ms':28} {'status':>6} {'took':>7} {'stream p50':>10} {'max':>7} {'health p50':>10} {'max':>7}")
        for name, body in {"nothing": b"", **bodies}.items():
            begin = time.perf_counter()
            status = "-"
            if body:
                with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
                    connection.sendall(body)
                    status = answer(connection)[9:12].decode()
            took = time.perf_counter() - begin
            time.sleep(0.5 if body else 3)
            gaps, answers = ([1e3 * wait for wait in each.waits(begin)] or [0.0] for each in (stream, health))
            print(
                f"{name:28} {status:>6} {1e3 * took:7.0f} {statistics.median(gaps):10.1f} {max(gaps):7.0f}"
                f" {statistics.median(answers):10.1f} {max(answers):7.0f}",
                flush=True,
            )
        stream.stop()
        health.stop()


if __name__ == "__main__":
    main()
