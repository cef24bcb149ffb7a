"""One pass of the real model against its lower bound: the time it takes to read the weights from memory.

Passes of 1 to 64 rows and a plain read of as many bytes as the weights have take turns, so that each round gives the
share of the measured bandwidth that decoding reaches, and what more rows cost. Medians over rounds. On a machine that
others use too, put `chrt -f 50` (root) before it: then nothing else runs meanwhile.

usage: python dev/bench_step.py [MODEL] [--context 300] [--rounds 15]
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from statistics import median

from wager.kernels import _native
from wager.kernels.base import BLOCK_SIZE
from wager.kernels.cpu import select
from wager.models import hub
from wager.models.transformer import Decoder
from wager.models.weights import open_weights
from wager.types import Draft, Span
from wager.verify.pack import pack

ROWS = (1, 2, 4, 8, 12, 16, 32, 64)
PASSES = 4


def seconds(task: Callable[[], object], times: int = 1) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        task()
    return (time.perf_counter() - begin) / times


def pass_of(decoder: Decoder, rows: int, context: int) -> Callable[[], object]:
    """A verification pass: the last known token and rows - 1 guesses behind `context` cached tokens."""
    blocks = list(range(-(-(context + rows) // BLOCK_SIZE)))
    draft = Draft.chain("s", [50 + i for i in range(rows - 1)], drafter="bench")
    batch = pack([Span("s", context, (7,), True, rows)], {"s": draft}, {"s": blocks})
    return lambda: decoder.forward(batch)


def prefill(decoder: Decoder, tokens: int) -> Callable[[], object]:
    """A prompt in chunks of the decoder's rows."""
    blocks = list(range(-(-tokens // BLOCK_SIZE)))
    ids = tuple(100 + i % 1000 for i in range(tokens))
    starts = range(0, tokens, decoder.max_rows)
    chunks = [Span("s", at, ids[at : at + decoder.max_rows], at + decoder.max_rows >= tokens) for at in starts]
    batches = [pack([chunk], {}, {"s": blocks}) for chunk in chunks]
    return lambda: [decoder.forward(batch) for batch in batches]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model", nargs="?", default="SmolLM2-135M-Instruct")
    options.add_argument("--context", type=int, default=300)
    options.add_argument("--rounds", type=int, default=15)
    chosen = options.parse_args()
    weights, kernels = open_weights(hub.resolve(chosen.model)), select()
    decoder = Decoder(weights, kernels, num_blocks=256, max_rows=512, max_sequences=16, max_blocks=256)
    size = 2 * weights.spec.active
    buffer = _native.Buffer(size)
    ctypes.memset(buffer.address, 1, buffer.nbytes)  # memory never written is mapped to one page of zeros
    tasks = {rows: pass_of(decoder, rows, chosen.context) for rows in ROWS}
    prompt = prefill(decoder, 1000)
    floor: list[float] = []
    taken: dict[int, list[float]] = {rows: [] for rows in ROWS}
    first: list[float] = []
    for _ in range(chosen.rounds):
        floor.append(seconds(lambda: _native.sweep(kernels.pool, kernels.isa, buffer)))
        for rows, task in tasks.items():
            taken[rows].append(seconds(task, PASSES))
        first.append(seconds(prompt))
    least = median(floor)
    print(f"{kernels.name}; {size / 1e6:.0f} MB of weights at {size / least / 1e9:.1f} GB/s: {least * 1e3:.2f} ms")
    share = median(f / t for f, t in zip(floor, taken[1], strict=True))
    print(f"one row: {share:.0%} of what reading the weights allows (median of the rounds' own ratios)")
    for rows, times in taken.items():
        ratio = median(t / one for t, one in zip(times, taken[1], strict=True))
        print(f"{rows:4} rows: {median(times) * 1e3:6.2f} ms, {ratio:.2f} of one row")
    print(f"1000-token prompt: {median(first) * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
