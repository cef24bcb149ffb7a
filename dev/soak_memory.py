"""The memory of `wager serve` through hostile requests and full contexts, and what it consists of; and how long a
neighbour's stream and /health waited meanwhile. Exit code 1 if an answer to a hostile request had a status of 500 or
more, but 503.

    python dev/soak_memory.py [--model MODEL] [--drafter NAME] [--hostile 5000] [--full 12]

Hostile requests are those of tests/serve/api_bodies.py, no two parts the same; then requests fill the context. After
every part the server's own metrics say what its memory consists of: what is its own (anonymous), how much of the
reserved cache was ever written and so is resident, and what the drafters keep. `other` is the rest: Python, libraries,
weights that are not mapped from a file, memory that malloc keeps. Once the cache is resident nothing may grow.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import httpx2

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from serve.api_bodies import hostile_calls, send
from serve.serving import RealServer, eventually, server_process

MEBIBYTE = 2**20
PARTS = 5


def show(server: RealServer, what: str) -> None:
    found = server.metrics()
    anonymous = found["wager:process_resident_bytes,kind=anonymous"]
    cache, reserved = (found[f"wager:kv_cache_bytes,kind={kind}"] for kind in ("resident", "reserved"))
    texts = sum(value for name, value in found.items() if name.startswith("wager:drafter_texts_bytes"))
    print(
        f"{what:32} anonymous {anonymous / MEBIBYTE:7.1f} MiB = cache {cache / MEBIBYTE:6.1f} of "
        f"{reserved / MEBIBYTE:.1f} + drafters' texts {texts / MEBIBYTE:5.2f} + other "
        f"{(anonymous - cache - texts) / MEBIBYTE:6.1f}; mapped files "
        f"{found['wager:process_resident_bytes,kind=file'] / MEBIBYTE:.1f}",
        flush=True,
    )


def watch(url: str, pipe: Connection) -> None:
    """A neighbour with a stream, and one that asks for /health: the longest waits of both since the last question."""
    waits: dict[str, list[float]] = {"stream": [], "/health": []}

    def stream() -> None:
        body = {"prompt": "Once upon a time", "stream": True, "ignore_eos": True, "temperature": 0, "max_tokens": 1500}
        while True:
            with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
                before = None
                for _ in answer.iter_bytes():
                    now = time.perf_counter()
                    if before is not None:
                        waits["stream"].append(now - before)
                    before = now

    def health() -> None:
        with httpx2.Client(base_url=url, timeout=120) as http:
            while True:
                begin = time.perf_counter()
                http.get("/health")
                waits["/health"].append(time.perf_counter() - begin)
                time.sleep(0.002)

    for ask in (stream, health):
        threading.Thread(target=ask, daemon=True).start()
    while pipe.recv():
        lines = []
        for name in waits:
            found, waits[name] = sorted(waits[name]), []
            last = ", ".join(f"{1e3 * wait:.0f}" for wait in found[-5:])
            lines.append(f"{name}: {len(found)} waits, the longest {last} ms")
        pipe.send(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:llama:tiny")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--max-context", type=int, default=2048)
    parser.add_argument("--hostile", type=int, default=5000, help="hostile requests, in five parts")
    parser.add_argument("--full", type=int, default=12, help="requests that fill the context, one after the other")
    options = parser.parse_args()
    given = ["--model", options.model, "--drafter", options.drafter, "--max-context", str(options.max_context)]
    with server_process(*given, "--served-name", "tiny") as server, server.client() as http:
        show(server, "ready")
        ours, theirs = multiprocessing.Pipe()  # a process of its own: the hostile client would keep its threads waiting
        neighbour = multiprocessing.Process(target=watch, args=(server.url, theirs), daemon=True)
        neighbour.start()
        statuses: Counter[int] = Counter()
        for part in range(1, PARTS + 1 if options.hostile else 0):
            for call in hostile_calls(options.hostile // PARTS, part):
                with suppress(httpx2.TimeoutException):  # an answer as long as the context: the client goes
                    answer = send(http, call)
                    statuses[answer.status_code] += 1
                    if answer.status_code >= 500:
                        print(f"    {answer.status_code} to {call}: {answer.text}", flush=True)
            show(server, f"{part * options.hostile // PARTS} hostile requests")
            print(f"    statuses: {dict(sorted(statuses.items()))}", flush=True)
            ours.send("longest")
            for line in ours.recv():
                print(f"    {line}", flush=True)
        neighbour.terminate()
        eventually(server.is_idle, "something runs after the last answer", seconds=600)
        for number in range(1, options.full + 1):
            prompt = " ".join(str((number * 7919 + at * 31) % 997) for at in range(options.max_context // 6))
            body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
            answer = http.post("/v1/completions", json=body, timeout=600)
            tokens = answer.json().get("usage", {}).get("prompt_tokens", answer.text[:200])
            show(server, f"context {number} ({tokens} tokens)")
    return int(any(status >= 500 and status != 503 for status in statuses))


if __name__ == "__main__":
    sys.exit(main())
