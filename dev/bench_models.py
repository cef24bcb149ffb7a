"""Decoding with larger models: a step against what reading its weights takes at the bandwidth measured beside it.

    python dev/bench_models.py [MODEL ...] [--dtype q4] [--threads 1,2] [--sequences 1,4,8] [--tokens 24]

Each model with each number of threads: plain decoding of that many sequences at once (prompts of 8 tokens, ids from a
seed), the median step after the first four. The floor is the bytes of the weights that a step reads over the bandwidth
of one thread or two, measured beside; of a mixture of experts all experts are counted, so that its share may exceed 1.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence

from bench_kernels import touch

import wager
from wager.kernels import _native
from wager.kernels.cpu import Kernels
from wager.loading.load import LoadedEngine
from wager.loading.load import load as load_engine
from wager.types import Request, SamplingParams, StepRecord

MODELS = ("random:llama:1b", "random:llama:8b", "random:qwen3-moe:1b")


_READ = 512 << 20  # bytes: more than the caches hold


def read_speed(kernels: Kernels) -> float:
    """Bytes a second that all threads read together, the best of ten passes."""
    buffer = _native.Buffer(_READ)
    touch(kernels, buffer)
    best = float("inf")
    for _ in range(10):
        begun = time.perf_counter()
        _native.sweep(kernels.pool, kernels.isa, buffer)
        best = min(best, time.perf_counter() - begun)
    return _READ / best


def step_seconds(engine: LoadedEngine, sequences: int, tokens: int) -> float:
    """The median plain step of so many sequences."""
    ids = random.Random(sequences)
    steps: list[StepRecord] = []
    engine.on_step = steps.append
    engine.generate(
        [
            Request(f"{sequences}-{each}", [ids.randrange(256) for _ in range(8)], SamplingParams(tokens, seed=each))
            for each in range(sequences)
        ]
    )
    engine.on_step = None
    plain = [record.seconds["forward"] for record in steps if record.rows == record.sequences == sequences]
    return statistics.median(plain[4:])


def report(model: str, dtype: str, threads: int, sequences: Sequence[int], tokens: int) -> None:
    config = wager.EngineConfig.from_options(
        model=model, dtype=dtype, threads=threads, drafter="none", max_context=256, prefix_cache=False
    )
    engine = load_engine(config)
    weights = engine.runner.target.weight_bytes
    kernels = engine.runner.target.kernels
    assert isinstance(kernels, Kernels)
    bandwidth = read_speed(kernels)
    floor = weights / bandwidth
    times = [step_seconds(engine, count, tokens) for count in sequences]
    shown = "  ".join(f"{1e3 * seconds:9.2f} ({seconds / times[0]:.2f})" for seconds in times)
    print(
        f"{model:22} {threads:7}  {weights / 1e6:7.0f}  {bandwidth / 1e9:6.1f}  {1e3 * floor:8.2f}  {shown}  "
        f"{floor / times[0]:6.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--dtype", default="q4")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--sequences", default="1,4,8")
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    sequences = [int(count) for count in args.sequences.split(",")]
    heads = "  ".join(f"{count:3} seq, ms (x)  " for count in sequences)
    print(f"{'model':22} threads  MB       GB/s   floor ms  {heads} of floor")
    for model in args.models:
        for threads in map(int, args.threads.split(",")):
            report(model, args.dtype, threads, sequences, args.tokens)


if __name__ == "__main__":
    main()
