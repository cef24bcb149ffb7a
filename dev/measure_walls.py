"""Whether one API key can tell from the time of its answers that another one asked a text before.

    python dev/measure_walls.py [--trials 200] [--model M] [--tokens 16] [--seed 0] [-- OPTIONS OF wager serve]

In each trial Anna asks a new random text, or in half of them another one of as many words; then Ben asks the text, and
the times to his first token and to the end of his answer are noted. For each of both the area under the curve is
stated: how often a time of a text that Anna had asked is shorter than one of a text that she had not; 0.5 tells
nothing, 1 all, with the interval that 95 % of resampled trials have. `-- --share-between-keys` takes the walls away.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from bench_servers import RunningServer
from numpy.typing import NDArray

ANNA, BEN = "anna-0123456789abcdef", "ben-0123456789abcdef"
WORDS = ["red", "green", "blue", "one", "two", "three", "north", "south", "sun", "moon", "stone", "river", "tree"]


def ask(server: RunningServer, key: str, text: str, *, model: str, tokens: int) -> tuple[float, float]:
    """Seconds to the first token and to the end of the answer."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    started = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"authorization": f"Bearer {key}"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(answer.read().decode())
    first = None
    while line := answer.readline():
        if first is None and b'"content":"' in line and b'"content":""' not in line:
            first = time.perf_counter() - started
    connection.close()
    total = time.perf_counter() - started
    return first or total, total


def area(asked: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """How often one of `asked` is shorter than one of `others`; equal ones count half."""
    less, same = asked[:, None] < others[None, :], asked[:, None] == others[None, :]
    return float((less + 0.5 * same).mean())


def interval(asked: NDArray[np.float64], others: NDArray[np.float64]) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    found = [area(rng.choice(asked, len(asked)), rng.choice(others, len(others))) for _ in range(1000)]
    low, high = np.quantile(found, (0.025, 0.975))
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--words", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("options", nargs="*")
    options = parser.parse_args()
    rng, times = random.Random(options.seed), dict[bool, list[tuple[float, float]]]({True: [], False: []})
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text(f"{ANNA}\n{BEN}\n")
        learn = ["--learn", f"{folder}/learned", "--learn-prompts"]
        serve = [sys.executable, "-m", "wager.cli", "serve", "--port", "{port}", "--model", options.model]
        server = RunningServer.start(
            "wager", [*serve, "--api-key-file", str(keys), *learn, *options.options], keys.parent
        )
        try:
            server.wait_until_ready(BEN)
            for trial in range(-4, options.trials):
                text, other = (" ".join(rng.choices(WORDS, k=options.words)) for _ in range(2))
                asked = rng.random() < 0.5
                ask(server, ANNA, text if asked else other, model=options.model, tokens=options.tokens)
                found = ask(server, BEN, text, model=options.model, tokens=options.tokens)
                if trial >= 0:  # the first ones warm up
                    times[asked].append(found)
        finally:
            server.end()
    asked, others = (np.array(times[each]).T for each in (True, False))
    for name, of_asked, of_others in zip(("first token", "whole answer"), asked, others, strict=True):
        low, high = interval(of_asked, of_others)
        medians = f"medians {1000 * np.median(of_asked):.1f} and {1000 * np.median(of_others):.1f} ms"
        print(f"{name}: {area(of_asked, of_others):.3f} ({low:.3f} to {high:.3f}), {medians}")


if __name__ == "__main__":
    main()
