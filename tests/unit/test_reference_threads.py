"""The oracle's bits do not change with the threads that a BLAS library may use, nor with its arrays' alignment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import wager
from wager.kernels.arrays import Array
from wager.kernels.reference_rows import matrix_vector, rms_norm, softmax

LOGITS = """
import hashlib
from wager.kernels.reference import ReferenceKernels
from wager.models.random_models import make
from wager.models.transformer import Decoder
from wager.types import Span
from wager.verify.pack import pack
weights, _ = make("random:llama:tiny")
decoder = Decoder(weights, ReferenceKernels(), num_blocks=2, max_rows=24, max_sequences=1, max_blocks=2)
output = decoder.forward(pack([Span("s", 0, tuple(range(24)), needs_logits=True)], {}, {"s": [0, 1]}))
print(hashlib.sha256(output.logits.tobytes()).hexdigest())
"""


def test_threads_of_a_blas_library_do_not_change_a_bit() -> None:
    source = str(Path(wager.__file__).parent.parent)
    names = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
    digests = set()
    for threads in ("1", "4"):
        environment = {**os.environ, "PYTHONPATH": source, **dict.fromkeys(names, threads)}
        run = subprocess.run(
            [sys.executable, "-c", LOGITS], env=environment, capture_output=True, text=True, check=True
        )
        digests.add(run.stdout)
    assert len(digests) == 1 and digests.pop()


def placed(array: Array, offset: int) -> Array:
    """The same values in an array that begins `offset` elements after a cache line."""
    raw = np.empty(array.size + 64, array.dtype)
    start = -raw.__array_interface__["data"][0] % 64 // array.itemsize + offset
    copy = raw[start : start + array.size].reshape(array.shape)
    copy[:] = array
    return copy


@pytest.mark.parametrize("k", [1, 7, 16, 576, 1537])
def test_alignment_does_not_change_a_bit(k: int) -> None:
    noise = np.random.default_rng(k)
    matrix, x = noise.standard_normal((33, k), np.float32), noise.standard_normal(k, np.float32)
    want = [matrix_vector(matrix, x), rms_norm(x, x, 1e-5), softmax(x)]
    for offset in range(16):
        moved = placed(x, offset)
        got = [matrix_vector(placed(matrix, 15 - offset), moved), rms_norm(moved, moved, 1e-5), softmax(moved)]
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True)), f"offset {offset}"
