"""Speed of the native kernels on this machine: memory, linear layers, tape overhead, attention, sampling.

Measurements are interleaved and repeated, and the minimum and median are shown, because others may share the machine.
On a busy machine --realtime gives the true cost (root; keep it short: nothing else runs meanwhile).
Usage: PYTHONPATH=src python dev/bench_kernels.py [--isa avx512] [--threads 2] [--rounds 15] [--only NAME ...]
--only formats compares formats (--formats bf16 q8_0 iq2_xxs ...); --small with weights that stay in the second-level
cache, and --processor by the time of this thread's processor (--threads 1), which others on the machine change little.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

import numpy as np

from wager.kernels import _native
from wager.kernels.arrays import BFLOAT16, Array, address, zeros
from wager.kernels.blocks import BLOCK_FORMATS, Matrix, QuantisedMatrix
from wager.kernels.cpu import Kernels, SampleRequest, physical_cores
from wager.types import KVDtype

HIDDEN, FFN, QKV, VOCAB, LAYERS = 576, 1536, 960, 49152, 30
HEADS, KV_HEADS, D = 9, 3, 64
ROWS = (1, 2, 4, 8, 12, 16, 32, 64, 128, 512)
REALTIME = PROCESSOR = SMALL = False
RANDOM = np.random.default_rng(0)
WEIGHTS = LAYERS * (QKV * HIDDEN + HIDDEN * HIDDEN + 3 * FFN * HIDDEN) + VOCAB * HIDDEN


def noise(*shape: int) -> Array:
    made: Array = RANDOM.standard_normal(shape, np.float32)
    return made


def times(tasks: Sequence[Callable[[], object]], rounds: int) -> list[tuple[float, float]]:
    """(minimum, median) seconds of each task, taken in turns."""
    taken: list[list[float]] = [[] for _ in tasks]
    clock = time.thread_time if PROCESSOR else time.perf_counter
    for task in tasks:
        task()
    with scheduled():
        for _ in range(rounds):
            for task, log in zip(tasks, taken, strict=True):
                start = clock()
                task()
                log.append(clock() - start)
    return [(min(log), statistics.median(log)) for log in taken]


@contextlib.contextmanager
def scheduled() -> Iterator[None]:
    """With --realtime ahead of all other processes, until the end."""
    for policy in (os.SCHED_FIFO, os.SCHED_OTHER):
        for thread in os.listdir("/proc/self/task") if REALTIME else ():
            os.sched_setscheduler(int(thread), policy, os.sched_param(1 if policy == os.SCHED_FIFO else 0))
        if policy == os.SCHED_FIFO:
            yield


class Linears:
    """Every matrix of SmolLM2-135M in order, over random weights, as one tape."""

    def __init__(self, kernels: Kernels, max_rows: int) -> None:
        self.tape = kernels.tape(max_rows=max_rows, max_sequences=1, max_blocks=64)
        self.out = zeros(max_rows, VOCAB)
        hidden, mixed, act = (noise(max_rows, n).astype(BFLOAT16) for n in (HIDDEN, HIDDEN, FFN))
        qkv, residual = zeros(max_rows, QKV), zeros(max_rows, HIDDEN)
        for _ in range(LAYERS):
            self.tape.linear(hidden, kernels.pack(noise(QKV, HIDDEN) * 0.02), qkv)
            self.tape.linear(mixed, kernels.pack(noise(HIDDEN, HIDDEN) * 0.02), residual, add=True)
            gate, up = noise(FFN, HIDDEN) * 0.02, noise(FFN, HIDDEN) * 0.02
            self.tape.gated(hidden, kernels.pack_gated(gate, up), act)
            self.tape.linear(act, kernels.pack(noise(HIDDEN, FFN) * 0.02), residual, add=True)
        self.tape.linear(hidden, kernels.pack(noise(VOCAB, HIDDEN) * 0.02), self.out)
        rows = np.arange(max_rows, dtype=np.int32)
        self.tape.inputs.positions[:] = rows
        self.tape.inputs.slot_mapping[:] = rows
        self.tape.inputs.parents[:] = rows - 1
        self.tape.inputs.block_tables[0] = np.arange(64, dtype=np.int32)

    def run(self, rows: int) -> None:
        self.tape.inputs.query_start_loc[1] = rows
        self.tape.run(rows=rows, sequences=1, logits_rows=0)


class TorchLinears:
    """The same matrices through torch's bfloat16 F.linear."""

    def __init__(self, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        shapes = [(QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN)] * LAYERS + [(VOCAB, HIDDEN)]
        self.weights = [torch.randn(n, k).bfloat16() for n, k in shapes]
        self.inputs = {k: torch.randn(max(ROWS), k).bfloat16() for k in (HIDDEN, FFN)}
        self.mode, self.linear = torch.inference_mode, torch.nn.functional.linear

    def run(self, rows: int) -> None:
        with self.mode():
            for weight in self.weights:
                self.linear(self.inputs[weight.shape[1]][:rows], weight)


def memory(kernels: Kernels, rounds: int) -> None:
    buffer = _native.Buffer(WEIGHTS * 2)
    touch(kernels, buffer)
    low, mid = times([lambda: _native.sweep(kernels.pool, kernels.isa, buffer)], rounds)[0]
    speed, usual = WEIGHTS * 2 / low / 1e9, WEIGHTS * 2 / mid / 1e9
    print(f"memory: {WEIGHTS * 2 / 1e6:.0f} MB read in {low * 1e3:.2f} ms = {speed:.1f} GB/s (median {usual:.1f})")


def touch(kernels: Kernels, buffer: _native.Buffer) -> None:
    k = 1 << 12
    panels = buffer.nbytes // (2 * k) // 32
    ones = np.ones(k, BFLOAT16)
    rows = np.full(panels * 32, address(ones), np.uint64)
    _native.pack(kernels.pool, "bf16", address(rows), panels, k, buffer, 0)


def linears(kernels: Kernels, rounds: int, *, against_torch: bool) -> None:
    """Ours, the row counts in turns; then torch's, apart: its idle threads spin for a while and would slow ours."""
    ours = Linears(kernels, max(ROWS))
    taken = times([lambda n=rows: ours.run(n) for rows in ROWS], rounds)  # type: ignore[misc]
    for rows, (low, mid) in zip(ROWS, taken, strict=True):
        line = f"linear pass, {rows:4d} rows: {low * 1e3:8.2f} ms (median {mid * 1e3:8.2f}) {mid / taken[0][1]:6.2f}x "
        print(line + f"{2 * WEIGHTS * rows / mid / 1e9:7.1f} GFLOP/s")
    if not against_torch:
        return
    theirs = TorchLinears(kernels.threads)
    taken = times([lambda n=rows: theirs.run(n) for rows in ROWS], rounds)  # type: ignore[misc]
    for rows, (low, mid) in zip(ROWS, taken, strict=True):
        print(f"torch F.linear, {rows:4d} rows: {low * 1e3:8.2f} ms (median {mid * 1e3:8.2f})")


class Quantised:
    """Twelve matrices in a format, as in a model of 1B; or a small one twelve times."""

    def __init__(self, kernels: Kernels, name: str, max_rows: int) -> None:
        n, k = (256, 1024) if SMALL else (5632, 2048)
        self.tape = kernels.tape(max_rows=max_rows, max_sequences=1, max_blocks=max_rows // 16)
        self.tape.inputs.positions[:] = self.tape.inputs.slot_mapping[:] = np.arange(max_rows)
        self.tape.inputs.parents[:] = np.arange(-1, max_rows - 1)
        self.tape.inputs.block_tables[0] = np.arange(max_rows // 16)
        x, out = noise(max_rows, k).astype(BFLOAT16), zeros(max_rows, n)
        packed = [kernels.pack(self.weights(name, n, k)) for _ in range(1 if SMALL else 12)]
        for matrix in packed * (12 // len(packed)):
            self.tape.linear(x, matrix, out)
        self.nbytes, self.products = 12 * packed[0].buffer.nbytes, 12 * n * k

    def weights(self, name: str, n: int, k: int) -> Matrix:
        if name == "bf16":
            return noise(n, k) * 0.02
        known = BLOCK_FORMATS[name]
        data = RANDOM.integers(0, 256, (n, known.row_bytes(k)), np.uint8)
        for at in known.fields:
            blocks = data.reshape(n, -1, known.bytes)
            blocks[..., at : at + 2] = np.frombuffer(np.float16(1e-3).tobytes(), np.uint8)
        if name in ("e4m3", "e4m3_128"):
            data.fill(0x38)  # a code is 1, a scale 4.4e-5
        return QuantisedMatrix(known, data, k)

    def run(self, rows: int) -> None:
        self.tape.inputs.query_start_loc[1] = rows
        self.tape.run(rows=rows, sequences=1, logits_rows=0)


def formats(kernels: Kernels, rounds: int, names: Sequence[str]) -> None:
    """Matrices of 138 million weights in each format, or a small one, the formats in turns."""
    each = {name: Quantised(kernels, name, 32) for name in names}
    for rows in (1, 4, 8, 16, 32):
        taken = times([functools.partial(item.run, rows) for item in each.values()], rounds)
        for (name, item), (low, mid) in zip(each.items(), taken, strict=True):
            line = f"{name:8s} {item.nbytes / 1e6:6.1f} MB, {rows:2d} rows: {low * 1e3:7.2f} ms"
            speeds = f"{item.nbytes / low / 1e9:5.1f} GB/s, {item.products * rows / low / 1e9:5.1f} GMAC/s"
            print(f"{line} (median {mid * 1e3:7.2f}) {mid / taken[0][1]:5.2f} of {names[0]}, {speeds}")


def overhead(kernels: Kernels, rounds: int) -> None:
    """240 ops on 16 numbers each: the overhead of a tape."""
    tape = kernels.tape(max_rows=1, max_sequences=1, max_blocks=1)
    x, weight, out = np.ones((1, 16), np.float32), np.ones(16, np.float32), zeros(1, 16, dtype=BFLOAT16)
    for _ in range(240):
        tape.rms_norm(x, weight, 1e-5, out)
    tape.inputs.parents[0], tape.inputs.query_start_loc[1] = -1, 1
    low, mid = times([lambda: tape.run(rows=1, sequences=1, logits_rows=0)], rounds * 20)[0]
    print(f"tape of 240 empty ops: {low * 1e6:.1f} us (median {mid * 1e6:.1f})")


class Attention:
    """Attention alone of a model like SmolLM2-135M, each layer over a cache of its own."""

    def __init__(self, kernels: Kernels, kv_dtype: KVDtype, *, sequences: int, rows: int, context: int) -> None:
        blocks, total = (context + rows) // 16 + 1, sequences * rows
        sizes = {"max_rows": total, "max_sequences": sequences, "max_blocks": blocks}
        self.tape = kernels.tape(**sizes)
        shape = {"layers": LAYERS, "num_blocks": blocks * sequences, "kv_heads": KV_HEADS, "head_dim": D}
        cache = kernels.cache(**shape, kv_dtype=kv_dtype)
        q = noise(total, HEADS * D).astype(BFLOAT16)
        out = zeros(*q.shape, dtype=BFLOAT16)
        for layer in range(LAYERS):
            self.tape.attention(q, cache, layer, window=None, out=out)
        inputs, row = self.tape.inputs, np.arange(total, dtype=np.int32)
        tables = np.random.default_rng(0).permutation(blocks * sequences).reshape(sequences, blocks)
        inputs.seq_ids[:] = row // rows
        inputs.positions[:] = context + row % rows
        inputs.parents[:] = np.where(row % rows, row - 1, -1)
        inputs.slot_mapping[:] = tables[inputs.seq_ids, inputs.positions // 16] * 16 + inputs.positions % 16
        inputs.num_computed_tokens[:], inputs.block_tables[:] = context, tables
        inputs.query_start_loc[:] = np.arange(sequences + 1) * rows
        self.shape = {"rows": total, "sequences": sequences, "logits_rows": 0}
        self.macs = 2 * sequences * sum(context + i + 1 for i in range(rows)) * HEADS * D * LAYERS
        self.bytes = cache.nbytes

    def run(self) -> None:
        self.tape.run(**self.shape)


def attention(kernels: Kernels, rounds: int) -> None:
    """Both types of cache in turns; between runs a large buffer is read, so that the cache comes from memory."""
    buffer = _native.Buffer(WEIGHTS)
    touch(kernels, buffer)
    shapes = [(1, rows, 300) for rows in (1, 4, 8, 16)] + [
        (1, rows, context) for context in (1000, 4000) for rows in (1, 8)
    ]
    for sequences, rows, context in [*shapes, (1, 1, 32_000), (32, 1, 300), (1, 256, 0), (1, 256, 3700)]:
        kinds = [
            Attention(kernels, kind, sequences=sequences, rows=rows, context=context) for kind in get_args(KVDtype)
        ]
        flush = functools.partial(_native.sweep, kernels.pool, kernels.isa, buffer)
        taken = times([task for kind in kinds for task in (flush, kind.run)], rounds)[1::2]
        for kv_dtype, kind, (low, mid) in zip(get_args(KVDtype), kinds, taken, strict=True):
            line = f"attention x {LAYERS}, {sequences} x {rows} rows after {context}, {kv_dtype}: {low * 1e3:.3f} ms"
            print(
                f"{line} (median {mid * 1e3:.3f}) {kind.macs / low / 1e9:.0f} GMAC/s {kind.bytes / low / 1e9:.1f} GB/s"
            )


def sampling(kernels: Kernels, rounds: int) -> None:
    logits = noise(8, VOCAB) * 3
    for n in (1, 8):
        requests = [SampleRequest(row, 1.0, seed=row, position=row) for row in range(n)]
        low, mid = times([functools.partial(kernels.sample, logits, requests)], rounds * 4)[0]
        print(f"sample, {n} rows of {VOCAB}: {low * 1e3:.3f} ms (median {mid * 1e3:.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", choices=("avx512", "avx2", "portable"))
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--torch", action="store_true", help="also time torch's bfloat16 F.linear")
    parser.add_argument("--realtime", action="store_true", help="ahead of every other process while measuring")
    parser.add_argument("--processor", action="store_true", help="by processor time; with --threads 1")
    parser.add_argument("--small", action="store_true", help="of --only formats: weights stay in the cache")
    parser.add_argument("--only", nargs="*", default=["memory", "linears", "overhead", "attention", "sampling"])
    parser.add_argument("--formats", nargs="*", default=list(BLOCK_FORMATS), help="of --only formats")
    args = parser.parse_args()
    global REALTIME, PROCESSOR, SMALL
    REALTIME, PROCESSOR, SMALL = args.realtime, args.processor, args.small
    kernels = Kernels(isa=args.isa, threads=args.threads)
    print(f"{kernels.name}, {args.threads} threads")
    if "memory" in args.only:
        memory(kernels, args.rounds)
    if "linears" in args.only:
        linears(kernels, args.rounds, against_torch=args.torch)
    if "formats" in args.only:
        formats(kernels, args.rounds, args.formats)
    if "overhead" in args.only:
        overhead(kernels, args.rounds)
    if "attention" in args.only:
        attention(kernels, args.rounds)
    if "sampling" in args.only:
        sampling(kernels, args.rounds)


if __name__ == "__main__":
    main()
