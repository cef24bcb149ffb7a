"""A served engine at saturation: what HTTP costs, whether every stream is whole and right, and its memory.

    python dev/soak_server.py --prompts FILE [--streams 64] [--seconds 600] [--turns 4] [--tokens 128] [--drafter NAME]

First the engine without HTTP and `wager serve` take turns at the same requests: the ratio of their tokens a second,
turn by turn. Then as many users as --streams ask the server without a pause for --seconds. Half of the requests are
sampled with seeds; every text is compared with that of the engine without HTTP. The client runs on the same machine and
its processor time is stated: what it takes is lacking on the server's side of the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from statistics import median
from typing import Any

from bench_servers import ROOT, RunningServer

import wager
from wager.bench.load import LoadRun, OpenAIServer, ServerAnswer, run_load
from wager.prompts import Prompt, encode_chat, read_prompts
from wager.types import Request, SamplingParams

MODEL = "SmolLM2-135M-Instruct"
LONGEST = 600
"""Characters of a prompt."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests by number: each of `texts` in turn, the odd ones sampled with a seed."""

    texts: Sequence[str]
    tokens: int

    def place(self, number: int) -> int:
        return number % len(self.texts)

    def messages(self, number: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.texts[self.place(number)]}]

    def params(self, number: int) -> SamplingParams:
        place = self.place(number)
        return SamplingParams(
            max_tokens=self.tokens, temperature=0.8 if place % 2 else 0.0, seed=place, ignore_eos=True
        )


@dataclass(frozen=True, slots=True)
class LoadServer(OpenAIServer):
    """Is sent the requests of a load, whatever the prompts."""

    load: Load | None = None

    def body(self, prompt: Prompt, number: int) -> bytes:
        assert self.load is not None
        params = self.load.params(number)
        fields = {name: getattr(params, name) for name in ("max_tokens", "temperature", "seed", "ignore_eos")}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({**fields, **stream, "messages": self.load.messages(number)}).encode()


def engine_turn(load: Load, streams: int, requests: int, drafter: str) -> tuple[float, list[str]]:
    """Tokens a second of the engine without HTTP, and the texts of all prompts."""
    with wager.LLM(MODEL, drafter=drafter) as llm:

        def made(number: int, name: str) -> Request:
            messages: Any = load.messages(number)
            return Request(f"{name}{number}", encode_chat(llm.tokenizer, messages), load.params(number))

        llm.engine.generate([made(number, "warm") for number in range(len(load.texts))], concurrency=streams)
        llm.engine.forget_requests()
        asked = [made(number, "") for number in range(requests)]
        begun = time.perf_counter()
        completions = llm.engine.generate(asked, concurrency=streams)
        seconds = time.perf_counter() - begun
    texts = [completion.text for completion in completions[: len(load.texts)]]
    return sum(len(completion.token_ids) for completion in completions) / seconds, texts


def serve(load: Load, server: RunningServer, streams: int, numbers: Iterable[int], memory: list[int]) -> LoadRun:
    """The requests of these numbers; the server's memory is noted every five seconds."""
    at, ended = OpenAIServer.parse(server.url), threading.Event()
    asked = LoadServer(at.scheme, at.host, at.port, at.base, load=load)
    prompts = [Prompt(place, "", ({"role": "user", "content": text},)) for place, text in enumerate(load.texts)]

    def watch() -> None:
        while not ended.wait(5):
            memory.append(resident(server.process.pid))

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        return run_load(asked, prompts, numbers=numbers, users=streams)
    finally:
        ended.set()
        watching.join()


def numbers_for(seconds: float) -> Iterator[int]:
    """Numbers of requests, until the time is over."""
    end = time.monotonic() + seconds
    return takewhile(lambda _number: time.monotonic() < end, count())


def resident(pid: int) -> int:
    """Bytes of a process that are its own: pages of mapped files come and go."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def rate(run: LoadRun) -> float:
    return sum(answer.tokens for answer in run.answers) / run.seconds


def faults(
    answers: Sequence[ServerAnswer], load: Load, texts: Sequence[str]
) -> tuple[list[ServerAnswer], list[ServerAnswer]]:
    """Answers that failed, and those with another text."""
    lost = [answer for answer in answers if not answer.ok]
    wrong = [answer for answer in answers if answer.ok and answer.text != texts[load.place(answer.number)]]
    return lost, wrong


def main() -> None:
    options = parse_options()
    chosen = [prompt.text[:LONGEST] for prompt in read_prompts(options.prompts)][: options.texts]
    load, requests = Load(chosen, options.tokens), 2 * len(chosen)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "wager.cli", "serve", "--port", "{port}", "--drafter", options.drafter]
        server = RunningServer.start("wager", command, Path(folder))
        try:
            server.wait_until_ready()
            soak(options, load, requests, server)
        finally:
            server.end()


def soak(options: argparse.Namespace, load: Load, requests: int, server: RunningServer) -> None:
    memory: list[int] = []
    serve(load, server, options.streams, range(len(load.texts)), memory)  # its caches, as the engine's
    ratios: list[float] = []
    answers: list[ServerAnswer] = []
    texts: list[str] = []
    for turn in range(options.turns):
        alone, texts = apart(load, options.streams, requests, options.drafter)
        served = serve(load, server, options.streams, range(requests), memory)
        answers += served.answers
        ratios.append(rate(served) / alone)
        print(
            f"turn {turn}: engine {alone:.0f} tokens/s, served {rate(served):.0f}, ratio {ratios[-1]:.3f}; "
            f"client {served.cpu_s / served.seconds:.1%} of a core",
            flush=True,
        )
    if ratios:
        print(f"served / engine: median {median(ratios):.3f} of {len(ratios)} turns", flush=True)
    memory.clear()
    last = serve(load, server, options.streams, numbers_for(options.seconds), memory)
    lost, wrong = faults(answers + last.answers, load, texts)
    print(
        f"{options.seconds:g} s with {options.streams} streams: {len(last.answers)} answers, "
        f"{sum(answer.tokens for answer in last.answers)} tokens, {rate(last):.0f} a second"
    )
    print(f"of all {len(answers) + len(last.answers)} streams: lost {len(lost)}, other texts {len(wrong)}")
    size = [value / 2**20 for value in memory]
    if len(size) >= 4:
        quarter = len(size) // 4
        print(
            f"memory, MiB: {size[0]:.1f} at first, {median(size[quarter : 2 * quarter]):.1f} in the second quarter, "
            f"{median(size[-quarter:]):.1f} in the last"
        )
    for answer in [*lost, *wrong][:5]:
        print(f"request {answer.number}: {answer.outcome} {answer.message} {answer.text[:80]!r}")
    if lost or wrong:
        raise SystemExit(1)


def apart(load: Load, streams: int, requests: int, drafter: str) -> tuple[float, list[str]]:
    """engine_turn in a process of its own, which then gives its memory back."""
    code = (
        "import json, sys; from soak_server import Load, engine_turn; given = json.load(sys.stdin); "
        "print(json.dumps(engine_turn(Load(given['texts'], given['tokens']), *given['rest'])))"
    )
    given = json.dumps({"texts": list(load.texts), "tokens": load.tokens, "rest": [streams, requests, drafter]})
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'dev'}"}
    done = subprocess.run(
        [sys.executable, "-c", code], input=given, env=environment, capture_output=True, text=True, check=True
    )
    speed, texts = json.loads(done.stdout)
    return speed, texts


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=96, help="prompts of the file that are used")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--drafter", default="auto")
    return parser.parse_args()


if __name__ == "__main__":
    main()
