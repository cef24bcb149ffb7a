"""Decoding with larger models: a step against what reading its weights takes at the bandwidth measured beside it.

    python dev/bench_models.py [MODEL ...] [--dtype q4] [--threads 1,2] [--sequences 1,4,8] [--tokens 40]

Each model with each number of threads: plain decoding of that many sequences at once (prompts of 8 tokens, ids from a
seed), the median step after the first four. Behind every step memory is read at full speed, and the floor of a step is
the bytes of the weights that it reads over the speed before and behind it: a machine's memory may be twice as fast a
second later. Of a mixture of experts all experts are counted, so that its share may exceed 1. --realtime as in
bench_kernels.py.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence

import bench_kernels
from bench_kernels import scheduled, touch

import wager
from wager.kernels import _native
from wager.loading.load import LoadedEngine
from wager.loading.load import load as load_engine
from wager.models.transformer import Decoder
from wager.types import Request, SamplingParams, StepRecord

MODELS = ("random:llama:1b", "random:llama:8b", "random:qwen3-moe:1b")


_READ = 256 << 20  # bytes: more than the caches hold


def steps_of(engine: LoadedEngine, sequences: int, tokens: int) -> tuple[float, float, float]:
    """The medians of plain steps of so many sequences: seconds, bytes a second that memory gave beside them, and the
    share of a step that its floor is."""
    ids = random.Random(sequences)
    target = engine.runner.target
    assert isinstance(target, Decoder)
    kernels, buffer = target.kernels, _native.Buffer(_READ)
    touch(kernels, buffer)
    steps: list[tuple[float, float]] = []
    speeds: list[float] = []

    def read() -> float:
        begun = time.perf_counter()
        _native.sweep(kernels.pool, kernels.isa, buffer)
        speeds.append(_READ / (time.perf_counter() - begun))
        return speeds[-1]

    def after(record: StepRecord) -> None:
        before, behind = speeds[-1], read()
        if record.rows == record.sequences == sequences:
            steps.append((record.seconds["forward"], (before + behind) / 2))

    read()
    engine.on_step = after
    with scheduled():
        engine.generate(
            [
                Request(
                    f"{sequences}-{each}", [ids.randrange(256) for _ in range(8)], SamplingParams(tokens, seed=each)
                )
                for each in range(sequences)
            ]
        )
    engine.on_step = None
    seconds, speed = zip(*steps[4:], strict=True)
    shares = [target.weight_bytes / one / taken for taken, one in zip(seconds, speed, strict=True)]
    return statistics.median(seconds), statistics.median(speed), statistics.median(shares)


def report(model: str, dtype: str, threads: int, sequences: Sequence[int], tokens: int) -> None:
    config = wager.EngineConfig.from_options(
        model=model, dtype=dtype, threads=threads, drafter="none", max_context=256, prefix_cache=False
    )
    engine = load_engine(config)
    found = [steps_of(engine, count, tokens) for count in sequences]
    shown = "  ".join(
        f"{1e3 * seconds:7.2f} {seconds / found[0][0]:5.2f} {speed / 1e9:5.1f} {share:5.2f}"
        for seconds, speed, share in found
    )
    print(f"{model:22} {threads:7}  {engine.runner.target.weight_bytes / 1e6:7.0f}  {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--dtype", default="q4")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--sequences", default="1,4,8")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--realtime", action="store_true", help="ahead of every other process while measuring")
    args = parser.parse_args()
    sequences = [int(count) for count in args.sequences.split(",")]
    bench_kernels.REALTIME = args.realtime
    heads = "  ".join(f"{count:3} seq: ms     x  GB/s floor" for count in sequences)
    print(f"{'model':22} threads       MB  {heads}")
    for model in args.models:
        for threads in map(int, args.threads.split(",")):
            report(model, args.dtype, threads, sequences, args.tokens)


if __name__ == "__main__":
    main()
