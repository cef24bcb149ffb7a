"""Policies side by side on one target: the same requests, a step of each engine in turns.

    python dev/bench_together.py MODEL PROMPTS [--concurrency 1,4,32] [--requests N] [--rotations 6] [--tokens 128]

Engines: off, n-grams at depths 1, 3 and 7, the adaptive policy, and the adaptive policy with a drafter that is always
wrong. A machine that changes its speed affects all alike, since their steps alternate; a part of the cache that is
faster to read is used by each in turn, since parts rotate. Tokens over seconds, prompts included; ids asserted equal.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import wager
from wager.cli.measuring import to_requests
from wager.engine.core import Engine
from wager.kernels.base import BLOCK_SIZE
from wager.loading.load import LoadedEngine
from wager.loading.load import load as load_engine
from wager.prompts import read_prompts, spread
from wager.terminal.flags import Framing
from wager.testing import AdversaryDrafter
from wager.types import Request, SamplingParams

ENGINES = {
    "off": {"drafter": "none"},
    "1": {"drafter": "ngram", "depth": 1},
    "3": {"drafter": "ngram", "depth": 3},
    "7": {"drafter": "ngram", "depth": 7},
    "adaptive": {"drafter": "ngram"},
    "wrong": {},
}
LONGEST = 1500
"""Characters of a prompt; the cache has to hold six batches."""

_PART = 24_576
"""Positions of the cache for each engine."""


class Run:
    """One engine serving requests, `concurrency` at a time; `seconds` are those of its own steps."""

    def __init__(self, engine: LoadedEngine, requests: Sequence[Request], concurrency: int) -> None:
        self.engine, self.todo, self.concurrency = engine, deque(requests), concurrency
        self.seconds, self.running = 0.0, 0
        self.texts: dict[str, list[int]] = defaultdict(list)

    @property
    def busy(self) -> bool:
        return bool(self.todo or self.engine.busy)

    def step(self) -> None:
        begun = time.perf_counter()
        while self.todo and self.running < self.concurrency:
            Engine._add(self.engine, self.todo.popleft())  # not the loaded engine's own, which resets the prefix cache
            self.running += 1
        events = self.engine.step()
        self.seconds += time.perf_counter() - begun
        for event in events:
            self.texts[event.request_id] += event.token_ids
            self.running -= event.finish_reason is not None


def load(model: str, dtype: str) -> dict[str, LoadedEngine]:
    """All engines on one target, every part of whose cache was written once, so that its memory is mapped."""
    base = {"model": model, "dtype": dtype, "prefix_cache": False, "max_context": 2048}
    base["cache_tokens"] = _PART * len(ENGINES)
    engines: dict[str, LoadedEngine] = {}
    for name, options in ENGINES.items():
        first = engines["off"].target if engines else None
        wrong = AdversaryDrafter(engines["off"].spec.vocab) if name == "wrong" else None
        config = wager.EngineConfig.from_options(**base, **options)
        engines[name] = load_engine(config, target=first, drafter=wrong)
    cache = engines["off"].runner.target.cache
    for block in range(cache.num_blocks):
        cache.clear(block)
    return engines


def divide(engines: Mapping[str, LoadedEngine], turn: int) -> None:
    """A part of the cache for each engine, another one in every round: it holds the others itself."""
    count = len(engines)
    for index, engine in enumerate(engines.values()):
        pool = engine.scheduler.cache.pool
        if turn:
            pool.reserve(f"part {(index + turn - 1) % count}", _PART)
        else:
            for name in (f"part {part}" for part in range(count)):
                pool.reserve(name, _PART)
            pool.reserve("rest", pool.num_free_blocks * BLOCK_SIZE)
        assert not pool.num_free_blocks
        pool.release(f"part {(index + turn) % count}")


def measure(
    engines: Mapping[str, LoadedEngine], batches: Sequence[Sequence[Request]], concurrency: int
) -> list[dict[str, Run]]:
    """Runs by engine for every batch of requests, the first of which warms up."""
    rng, done = random.Random(concurrency), []
    for turn, requests in enumerate(batches):
        divide(engines, turn)
        runs = {name: Run(engine, requests, concurrency) for name, engine in engines.items()}
        while busy := [run for run in runs.values() if run.busy]:
            rng.shuffle(busy)
            for run in busy:
                run.step()
        assert all(run.texts == runs["off"].texts for run in runs.values()), "speculation changed a text"
        done.append(runs)
    return done[1:]


def report(concurrency: int, turns: Sequence[Mapping[str, Run]]) -> None:
    tokens = sum(len(text) for runs in turns for text in runs["off"].texts.values())
    seconds = {name: sum(runs[name].seconds for runs in turns) for name in ENGINES}
    fixed = [name for name in ENGINES if name not in ("adaptive", "wrong")]
    best = min(fixed, key=seconds.__getitem__)
    rates = "  ".join(f"{tokens / seconds[name]:8.1f}" for name in ENGINES)
    apart = [runs[best].seconds / runs["adaptive"].seconds for runs in turns]
    print(
        f"{concurrency:8}  {rates}  {seconds[best] / seconds['adaptive']:7.3f} (of {best}; "
        f"{min(apart):.2f} to {max(apart):.2f})  {seconds['off'] / seconds['wrong']:9.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--concurrency", default="1,2,4,8,16,32")
    parser.add_argument("--requests", type=int, help="a rotation  [default: 4 and twice the concurrency]")
    parser.add_argument("--rotations", type=int, default=len(ENGINES))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto", help="as of wager run  [default: auto]")
    args = parser.parse_args()
    prompts = spread([each for each in read_prompts(args.prompts) if len(each.text) < LONGEST], 240)
    random.Random(1).shuffle(prompts)
    print("requests  " + "  ".join(f"{name:>8}" for name in ENGINES) + "  adaptive / best fixed  wrong / off")
    for concurrency in map(int, args.concurrency.split(",")):
        engines = load(args.model, args.dtype)
        requests = to_requests(
            prompts,
            engines["off"].tokenizer,
            framing=Framing(raw=False, system=None),
            params=SamplingParams(args.tokens, seed=0),
        )
        count = args.requests or 4 + 2 * concurrency
        every = [[requests[(turn * count + i) % len(requests)] for i in range(count)] for turn in range(args.rotations)]
        warm = requests[-max(2, concurrency // 4) :]
        report(concurrency, measure(engines, [warm, *every], concurrency))


if __name__ == "__main__":
    main()
