"""The expert tax, measured: seconds of a step against its rows, with the distinct experts that it reads, as JSON.

A step is a pass over the next tokens of as many sequences as it has rows. Models, row counts, a plain read of memory
and a product from the processor's cache are timed in shuffled rounds, so that all are of one machine at one time.
A run is appended to the file; plot_expert_tax.py draws them. On a shared machine, begin with `chrt -f 50`.

usage: python dev/measure_expert_tax.py docs/expert_tax.json [--threads 2] [--context 64] [--seconds 30]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from wager.kernels import _native
from wager.kernels.arrays import BFLOAT16, zeros
from wager.kernels.cpu import Kernels, machine
from wager.models.random_models import make
from wager.models.transformer import Decoder
from wager.types import PackedBatch

MODELS = ("random:qwen3-moe:300m", "random:deepseek:300m", "random:mixtral:300m", "random:llama:135m")
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
STEPS, SEEDS = 3, 32
"""Timed steps in a row, after one untimed step, since caches hold another model's data; and different steps."""
SWEPT = 512 << 20
SQUARE, TALL, TIMES = 512, 192, 10
"""Side of the matrix whose product is timed for the peak, rows that it meets, and products of a tape."""


def batch(rows: int, context: int, vocab: int, max_blocks: int, *, seed: int) -> PackedBatch:
    """One new token each for `rows` sequences; their earlier positions are whatever the cache holds."""
    tokens = np.random.default_rng(seed).integers(0, vocab, rows).astype(np.int32)
    every = np.arange(rows, dtype=np.int32)
    tables = every[:, None] * max_blocks + np.arange(max_blocks, dtype=np.int32)
    return PackedBatch(
        tokens=tokens,
        positions=np.full(rows, context, np.int32),
        parents=np.full(rows, -1, np.int32),
        slot_mapping=tables[:, context // 16] * 16 + context % 16,
        seq_ids=every,
        logits_indices=every,
        query_start_loc=np.arange(rows + 1, dtype=np.int32),
        num_computed_tokens=np.full(rows, context, np.int32),
        block_tables=tables.astype(np.int32),
    )


def distinct_experts(decoder: Decoder, rows: int) -> float:
    """Distinct experts of a layer in the last pass, the mean over layers; 0 without experts."""
    choices = decoder.expert_choices
    return fmean(len(np.unique(ids[:rows])) for ids in choices) if choices else 0.0


def seconds(task: Callable[[], object]) -> float:
    """Seconds of the second call: the first starts with the processor's caches full of other data."""
    task()
    begun = time.perf_counter()
    task()
    return time.perf_counter() - begun


def memory_read(kernels: Kernels) -> Callable[[], object]:
    """A plain read of memory by all threads."""
    block = _native.Buffer(SWEPT)
    ctypes.memset(block.address, 1, block.nbytes)  # memory that was never written is one mapped page of zeros
    return lambda: _native.sweep(kernels.pool, kernels.isa, block)


def cached_product(kernels: Kernels, rows: int) -> Callable[[], object]:
    """The product kernel on a matrix that stays in the processor's cache."""
    tape = kernels.tape(max_rows=rows, max_sequences=1, max_blocks=rows // 16)
    noise = np.random.default_rng(0).standard_normal((rows + SQUARE, SQUARE), np.float32)
    x, out = noise[:rows].astype(BFLOAT16), zeros(rows, SQUARE)
    weight = kernels.pack(noise[rows:])
    for _ in range(TIMES):
        tape.linear(x, weight, out)
    every = np.arange(rows, dtype=np.int32)
    for name, values in {"positions": every, "slot_mapping": every, "parents": every - 1}.items():
        getattr(tape.inputs, name)[:] = values
    return lambda: tape.run(rows=rows, sequences=1, logits_rows=0)


class TimedModel:
    """A model with a cache for the most rows, and some steps of each number of rows: different tokens choose different
    experts; the same again would find them in the processor's cache."""

    def __init__(self, name: str, kernels: Kernels, *, context: int) -> None:
        weights, _ = make(name)
        most, max_blocks = ROWS[-1], context // 16 + 1
        sizes = dict(num_blocks=most * max_blocks, max_rows=most, max_sequences=most, max_blocks=max_blocks)
        self.decoder = Decoder(weights, kernels, **sizes, keep_expert_choices=True)
        vocab = weights.spec.vocab
        self._steps = {
            rows: [batch(rows, context, vocab, max_blocks, seed=seed) for seed in range(SEEDS)] for rows in ROWS
        }
        self._next = dict.fromkeys(ROWS, 0)
        self.taken: dict[int, list[float]] = {rows: [] for rows in ROWS}
        self.experts: dict[int, list[float]] = {rows: [] for rows in ROWS}

    def time_steps(self, rows: int) -> None:
        for index in range(1 + STEPS):
            step = self._steps[rows][self._next[rows] % SEEDS]
            self._next[rows] += 1
            begun = time.perf_counter()
            self.decoder.forward(step)
            took = time.perf_counter() - begun
            if index:
                self.taken[rows].append(took)
                self.experts[rows].append(distinct_experts(self.decoder, rows))


def measure(threads: int, context: int, *, limit: float) -> dict[str, Any]:
    """One run: medians of rounds that end once `limit` seconds have passed."""
    kernels = Kernels(threads=threads)
    models = {name: TimedModel(name, kernels, context=context) for name in MODELS}
    sweep, multiply = memory_read(kernels), cached_product(kernels, TALL)
    swept, multiplied = list[float](), list[float]()
    tasks: list[Callable[[], object]] = [partial(each.time_steps, rows) for each in models.values() for rows in ROWS]
    tasks += [lambda: swept.append(seconds(sweep)), lambda: multiplied.append(seconds(multiply))]
    rng, end = random.Random(0), time.perf_counter() + limit
    while time.perf_counter() < end:
        for task in rng.sample(tasks, len(tasks)):
            task()
    return {
        "machine": machine(),
        "kernels": kernels.name,
        "threads": threads,
        "context": context,
        "rounds": len(swept),
        "bandwidth": round(SWEPT / median(swept), -7),
        "peak": round(2 * SQUARE**2 * TALL * TIMES / median(multiplied), -7),
        "rows": ROWS,
        "models": {
            name: {
                "seconds": [round(median(model.taken[rows]), 7) for rows in ROWS],
                "experts": [round(fmean(model.experts[rows]), 2) for rows in ROWS],
            }
            for name, model in models.items()
        },
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("runs", type=Path)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--context", type=int, default=64)
    options.add_argument("--seconds", type=float, default=30)
    args = options.parse_args()
    runs = json.loads(args.runs.read_text()) if args.runs.exists() else []
    runs.append(measure(args.threads, args.context, limit=args.seconds))
    args.runs.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")


if __name__ == "__main__":
    main()
