"""The oracle's bits do not change with the number of threads that a BLAS library may use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import wager

PRODUCTS = """
import hashlib
import numpy as np
from oracle.kernels import ReferenceKernels
kernels, digest = ReferenceKernels(), hashlib.sha256()
for n, k in ((333, 1537), (1001, 1003)):  # OpenBLAS divides these sums otherwise with two threads than with one
    noise = np.random.default_rng(n).standard_normal((n + 1, k), np.float32)
    tape = kernels.tape(max_rows=1, max_sequences=1, max_blocks=1, heads=1, kv_heads=1, head_dim=16)
    out = np.zeros((1, n), np.float32)
    tape.linear(noise[n:], kernels.pack(noise[:n]), out)
    tape.inputs.parents[0], tape.inputs.query_start_loc[1] = -1, 1
    tape.run(rows=1, sequences=1, logits_rows=0)
    assert out.all()
    digest.update(out.tobytes())
print(digest.hexdigest())
"""


def test_threads_of_a_blas_library_do_not_change_a_bit() -> None:
    path = os.pathsep.join([str(Path(wager.__file__).parent.parent), str(Path(__file__).parents[1])])
    names = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
    digests = set()
    for threads in ("1", "2", "4"):
        environment = {**os.environ, "PYTHONPATH": path, **dict.fromkeys(names, threads)}
        run = subprocess.run(
            [sys.executable, "-c", PRODUCTS], env=environment, capture_output=True, text=True, check=True
        )
        digests.add(run.stdout)
    assert len(digests) == 1 and digests.pop()
