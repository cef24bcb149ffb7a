"""Keys and values in int8: the rounding, bit by bit; what a cache takes of the memory, and what int8 costs."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from cases import Piece, World

from wager.kernels.arrays import Array


@pytest.fixture(autouse=True)
def _int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "kv_dtype", "q8")


def values_of(world: World, rows: Array) -> Array:
    return rows[:, -world.kv_heads * world.d :].reshape(len(rows), world.kv_heads, world.d)


def rounded(x: Array) -> Array:
    """One head's vector f32 [d], number by number."""
    largest = max(abs(float(v)) for v in x)
    if not all(math.isfinite(v) for v in x):
        return np.full_like(x, np.nan)
    if largest < np.float32(1e-30):
        return np.zeros_like(x)
    factor, scale = np.float32(127) / np.float32(largest), np.float32(largest) / np.float32(127)
    return np.array([np.float32(round(float(np.float32(v * factor)))) * scale for v in x], np.float32)


def hard_rows(world: World) -> Array:
    """Rows whose values are rounded in every way: halves, the extremes, zeros, tiny, huge and not finite."""
    rows = world.rows(12, seed=1)
    values = values_of(world, rows)
    values[0] = 0
    values[1] = 1e-31
    values[2] = np.float32(1e-30) * np.arange(world.d, dtype=np.float32) / world.d
    values[3, :, :] = np.arange(world.d, dtype=np.float32) - world.d / 2 + 0.5
    values[3, :, 0] = -127
    values[4] *= np.float32(1e30)
    values[5] = -3.0
    values[6, :, 1:] = 0
    values[7, 0, 3] = np.nan
    values[8, 1, 0] = -np.inf
    values[9] *= np.float32(1e-28)
    return rows


def test_values_are_rounded_to_int8_times_the_largest(kernels):
    world = World(kernels)
    rows = hard_rows(world)
    world.step(Piece([3], 0, rows))
    for place, row in enumerate(values_of(world, rows)):
        got = world.cache.read(3 * 16 + place)[0, 1]
        want = np.stack([rounded(head) for head in row])
        assert got.dtype == np.float32
        assert np.array_equal(got, want, equal_nan=True), f"row {place}"
    assert np.isnan(world.cache.read(3 * 16 + 7)[0, 1, 0]).all()
    assert np.isfinite(world.cache.read(3 * 16 + 7)[0, 1, 1]).all(), "the other head has a scale of its own"


def test_memory_is_that_of_int8_and_scales(kernels):
    wide, shape = World(kernels), {"layers": 1, "num_blocks": 64, "kv_heads": 2, "head_dim": 32}
    plain = kernels.cache(**shape)
    assert plain.nbytes == 64 * 16 * 2 * 2 * 32 * 2
    assert wide.cache.nbytes == 64 * 16 * 2 * 2 * (32 + 4)


def resident() -> int:
    """Bytes of the process that are in no file."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kv_dtype", ["bf16", "q8"])
def test_a_first_request_takes_little_of_a_large_cache(kernels, kv_dtype):
    """Not a huge page for each of its heads."""
    layers, heads = 30, 3
    cache = kernels.cache(layers=layers, num_blocks=8192, kv_heads=heads, head_dim=64, kv_dtype=kv_dtype)
    before = resident()
    cache.move(np.array([0]), np.array([16]))  # writes to a block of every layer and head
    assert resident() - before < layers * heads * 2 * (64 << 10), "of 2 MB each before"
