"""What a cache takes of the memory: what is used of it, and not a huge page for each of its heads."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from wager.kernels.base import BLOCK_SIZE


def resident() -> int:
    """Bytes of the process that are in no file."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kv_dtype", ["bf16", "q8"])
def test_a_first_request_takes_little_of_a_large_cache(kernels, kv_dtype):
    layers, heads = 30, 3
    cache = kernels.cache(layers=layers, num_blocks=8192, kv_heads=heads, head_dim=64, kv_dtype=kv_dtype)
    before = resident()
    cache.move(np.array([0]), np.array([BLOCK_SIZE]))  # writes to a block of every layer and head
    assert resident() - before < layers * heads * 2 * (64 << 10), "of 2 MB each before"
