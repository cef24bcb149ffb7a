"""Step time against rows for a random model, beside the bytes of the distinct experts that it reads (the expert tax).

    python dev/bench_experts.py random:qwen3-moe:300m [--threads 2] [--context 64] [--isa avx512]

Rows are the next tokens of one sequence each, so that attention stays small. `experts` is the number of distinct ones
expected under uniform routing, E (1 - (1 - k/E)^rows); `MB` what a pass then reads of matrices.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from wager.kernels.cpu import Kernels
from wager.models.random_models import make
from wager.models.transformer import Decoder
from wager.types import PackedBatch

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--isa")
    parser.add_argument("--seconds", type=float, default=0.4, help="per number of rows")
    arguments = parser.parse_args()
    weights, _ = make(arguments.model)
    spec, max_blocks = weights.spec, arguments.context // 16 + 1
    kernels = Kernels(isa=arguments.isa, threads=arguments.threads)
    most = ROWS[-1]
    decoder = Decoder(
        weights, kernels, num_blocks=most * max_blocks, max_rows=most, max_sequences=most, max_blocks=max_blocks
    )
    print(f"{arguments.model} {kernels.name} threads {arguments.threads} context {arguments.context}")
    first = 0.0
    for rows in ROWS:
        # Different tokens choose different experts; the same again would find them in the processor's cache.
        steps = [batch(rows, arguments.context, spec.vocab, max_blocks, seed=seed) for seed in range(16)]
        times: list[float] = []
        end = time.perf_counter() + arguments.seconds
        while time.perf_counter() < end or len(times) < 5:
            step = steps[len(times) % len(steps)]
            begun = time.perf_counter()
            decoder.forward(step)
            times.append(time.perf_counter() - begun)
        median, hit = float(np.median(times)), 0.0
        elements = spec.elements()
        share = 0.0
        if experts := spec.experts:
            share = 1 - (1 - experts.active / experts.count) ** rows
            hit = experts.count * share
        steady = elements["projections"] + elements["ffn"] + elements["shared"] + elements["head"]
        read = 2 * (steady + elements["experts"] * share)
        first = first or median
        print(
            f"rows {rows:3d}  {median * 1e3:8.3f} ms  least {min(times) * 1e3:8.3f}  x{median / first:5.2f}  "
            f"experts {hit:6.1f}  {read / 1e6:7.1f} MB  {read / median / 1e9:5.1f} GB/s"
        )


if __name__ == "__main__":
    main()
