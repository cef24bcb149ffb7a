"""Weights and caches of the reference kernels: float32 matrices and plain arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wager.errors import CacheIntegrityError
from wager.kernels.arrays import Array, DType
from wager.kernels.base import BLOCK_SIZE
from wager.kernels.inputs import Inputs
from wager.kernels.reference_quantised import ReferenceQuantised
from wager.kernels.reference_rows import matrix_vector


@dataclass(frozen=True)
class ReferenceWeight:
    """A matrix [N, K] in float32, already rounded to the activation type, and its bias [N] in float32."""

    matrix: Array
    bias: Array | None

    def product(self, x: Array) -> Array:
        """W x + b of one row x f32 [K] -> f32 [N]."""
        y = matrix_vector(self.matrix, x)
        return y if self.bias is None else y + self.bias

    def row(self, index: int) -> Array:
        """float32 [K]."""
        found: Array = self.matrix[index]
        return found


SMALLEST_SCALED = np.float32(1e-30)
"""Keys and values whose largest element is smaller are zero in int8."""

ReferenceMatrix = ReferenceWeight | ReferenceQuantised

ReferenceExpert = tuple[tuple[ReferenceMatrix, ReferenceMatrix], ReferenceMatrix]
"""Gate and up, then down."""


class ReferenceCache:
    """Keys and values as two arrays [layers, slots, kv_heads, head_dim] of the activation type."""

    def __init__(self, *, layers: int, num_blocks: int, kv_heads: int, head_dim: int, dtype: DType) -> None:
        self.num_blocks = num_blocks
        shape = (layers, num_blocks * BLOCK_SIZE, kv_heads, head_dim)
        self.keys: Array = np.zeros(shape, dtype)
        self.values: Array = np.zeros(shape, dtype)

    def write(self, layer: int, slot: int, keys: Array, values: Array) -> None:
        """Keys and values of one row, f32 [kv_heads, head_dim]."""
        self.keys[layer, slot], self.values[layer, slot] = keys, values

    def rows(self, layer: int, slots: Array) -> tuple[Array, Array]:
        """Keys and values of these slots in float32, [n, kv_heads, head_dim] each."""
        return self.keys[layer][slots].astype(np.float32), self.values[layer][slots].astype(np.float32)

    def move(self, source: Array, target: Array) -> None:
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            self.keys[:, new] = self.keys[:, old]
            self.values[:, new] = self.values[:, old]

    def read(self, slot: int) -> Array:
        return np.stack([self.keys[:, slot], self.values[:, slot]], axis=1)

    def clear(self, block: int) -> None:
        self.keys[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = 0
        self.values[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = 0


class ReferenceInt8Cache:
    """Keys and values as int8 [layers, slots, kv_heads, head_dim] and float32 scales [layers, slots, kv_heads, 1]; see
    kernels.base.Kernels.cache for the rounding."""

    def __init__(self, *, layers: int, num_blocks: int, kv_heads: int, head_dim: int) -> None:
        self.num_blocks = num_blocks
        slots = (layers, num_blocks * BLOCK_SIZE, kv_heads)
        self.keys, self.values = np.zeros((*slots, head_dim), np.int8), np.zeros((*slots, head_dim), np.int8)
        self.key_scales, self.value_scales = np.zeros((*slots, 1), np.float32), np.zeros((*slots, 1), np.float32)

    def write(self, layer: int, slot: int, keys: Array, values: Array) -> None:
        """Keys and values of one row, f32 [kv_heads, head_dim]."""
        self.keys[layer, slot], self.key_scales[layer, slot] = round_to_int8(keys)
        self.values[layer, slot], self.value_scales[layer, slot] = round_to_int8(values)

    def rows(self, layer: int, slots: Array) -> tuple[Array, Array]:
        """Keys and values of these slots in float32, [n, kv_heads, head_dim] each."""
        keys: Array = self.keys[layer][slots] * self.key_scales[layer][slots]
        values: Array = self.values[layer][slots] * self.value_scales[layer][slots]
        return keys, values

    def move(self, source: Array, target: Array) -> None:
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            for stored in (self.keys, self.values, self.key_scales, self.value_scales):
                stored[:, new] = stored[:, old]

    def read(self, slot: int) -> Array:
        keys = self.keys[:, slot] * self.key_scales[:, slot]
        return np.stack([keys, self.values[:, slot] * self.value_scales[:, slot]], axis=1)

    def clear(self, block: int) -> None:
        for stored in (self.keys, self.values, self.key_scales, self.value_scales):
            stored[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = 0


def round_to_int8(x: Array) -> tuple[Array, Array]:
    """f32 [heads, d] as whole numbers of -127 to 127, int8, and the scale of each head, f32 [heads, 1]."""
    largest, most = np.abs(x).max(axis=-1, keepdims=True), np.float32(127)
    finite = np.isfinite(largest)
    usable = finite & (largest >= SMALLEST_SCALED)
    whole = np.rint(np.where(usable, x, np.float32(0)) * (most / np.where(usable, largest, np.float32(1))))
    scale = np.where(usable, largest / most, np.where(finite, np.float32(0), np.float32(np.nan)))
    return whole.astype(np.int8), scale


HeadCache = ReferenceCache | ReferenceInt8Cache
"""Keys and values of every kv head."""


class ReferenceLatents:
    """One vector per position, [layers, slots, 1, rank + rope]: the key, and in its first `rank` the value."""

    def __init__(self, *, layers: int, num_blocks: int, rank: int, rope: int, dtype: DType) -> None:
        self.num_blocks = num_blocks
        self.keys: Array = np.zeros((layers, num_blocks * BLOCK_SIZE, 1, rank + rope), dtype)
        self.values: Array = self.keys[..., :rank]

    def rows(self, layer: int, slots: Array) -> tuple[Array, Array]:
        """Keys and values of these slots in float32, [n, 1, rank + rope] and [n, 1, rank]."""
        return self.keys[layer][slots].astype(np.float32), self.values[layer][slots].astype(np.float32)

    def move(self, source: Array, target: Array) -> None:
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            self.keys[:, new] = self.keys[:, old]

    def read(self, slot: int) -> Array:
        return self.keys[:, None, slot].copy()

    def clear(self, block: int) -> None:
        self.keys[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = 0


class ReferenceTap:
    """A place where rows of `x` are copied out, if it has somewhere to."""

    def __init__(self, x: Array) -> None:
        self._x = x
        self._out: Array | None = None

    def copy_to(self, out: Array | None) -> None:
        self._out = out

    def copy(self, row: int) -> None:
        if self._out is not None:
            self._out[row] = self._x[row]


def check_slots(inputs: Inputs, rows: int, sequences: int) -> None:
    """CacheIntegrityError unless each row's slot is the one that the block table of its sequence has for it."""
    starts, computed = inputs.query_start_loc, inputs.num_computed_tokens
    if starts[sequences] != rows:
        raise CacheIntegrityError(f"query_start_loc ends at {starts[sequences]}, and the step has {rows} rows.")
    seq_ids, slots = inputs.seq_ids[:rows], inputs.slot_mapping[:rows]
    places = computed[seq_ids] + np.arange(rows) - starts[seq_ids]
    expected = inputs.block_tables[seq_ids, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
    for row in np.flatnonzero(slots != expected)[:1]:
        raise CacheIntegrityError(
            f"slot_mapping is {slots[row]} at index {row}, not {expected[row]} as in the block table of sequence "
            f"{seq_ids[row]}."
        )
