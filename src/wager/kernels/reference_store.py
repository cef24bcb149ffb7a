"""Weights and caches of the reference kernels: float32 matrices and plain arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wager.kernels.arrays import Array, DType
from wager.kernels.base import BLOCK_SIZE
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


SMALLEST_SCALED = np.float32(1e-30)
"""Keys and values whose largest element is smaller are zero in int8."""

ReferenceExpert = tuple[tuple[ReferenceWeight, ReferenceWeight], ReferenceWeight]
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

    def move(self, source: Array, target: Array) -> None:
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            self.keys[:, new] = self.keys[:, old]
            self.values[:, new] = self.values[:, old]

    def read(self, slot: int) -> Array:
        return np.stack([self.keys[:, slot], self.values[:, slot]], axis=1)

    def clear(self, block: int) -> None:
        self.keys[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = 0
        self.values[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = 0


class ReferenceInt8Cache(ReferenceCache):
    """Keys and values rounded to int8 times a scale (kernels.base.Kernels.cache), kept as float32 products of both."""

    def __init__(self, *, layers: int, num_blocks: int, kv_heads: int, head_dim: int) -> None:
        dtype = np.dtype(np.float32)
        super().__init__(layers=layers, num_blocks=num_blocks, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)

    def write(self, layer: int, slot: int, keys: Array, values: Array) -> None:
        super().write(layer, slot, round_to_int8(keys), round_to_int8(values))


def round_to_int8(x: Array) -> Array:
    """f32 [heads, d]: each head as whole numbers of -127 to 127 times the scale of its largest element."""
    largest, steps = np.abs(x).max(axis=-1, keepdims=True), np.float32(127)
    usable = np.isfinite(largest) & (largest >= SMALLEST_SCALED)
    divisor = np.where(usable, largest, np.float32(1))
    whole = np.rint(np.where(usable, x, np.float32(0)) * (steps / divisor))
    scale = np.where(usable, largest / steps, np.where(np.isfinite(largest), np.float32(0), np.float32(np.nan)))
    rounded: Array = whole * scale
    return rounded


class ReferenceLatents:
    """One vector per position, [layers, slots, 1, rank + rope]: the key, and in its first `rank` the value."""

    def __init__(self, *, layers: int, num_blocks: int, rank: int, rope: int, dtype: DType) -> None:
        self.num_blocks = num_blocks
        self.keys: Array = np.zeros((layers, num_blocks * BLOCK_SIZE, 1, rank + rope), dtype)
        self.values: Array = self.keys[..., :rank]

    def move(self, source: Array, target: Array) -> None:
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            self.keys[:, new] = self.keys[:, old]

    def read(self, slot: int) -> Array:
        return self.keys[:, None, slot].copy()

    def clear(self, block: int) -> None:
        self.keys[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = 0
