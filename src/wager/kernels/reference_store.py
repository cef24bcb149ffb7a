"""Weights and caches of the reference kernels: float32 matrices and plain arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wager.kernels.arrays import Array, DType
from wager.kernels.base import BLOCK_SIZE
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

    def move(self, source: Array, target: Array) -> None:
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            self.keys[:, new] = self.keys[:, old]
            self.values[:, new] = self.values[:, old]

    def read(self, slot: int) -> Array:
        return np.stack([self.keys[:, slot], self.values[:, slot]], axis=1)

    def clear(self, block: int) -> None:
        self.keys[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = 0
        self.values[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = 0


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
