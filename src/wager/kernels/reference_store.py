"""Weights and caches of the reference kernels: float32 matrices and plain tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wager.kernels.base import BLOCK_SIZE


@dataclass(frozen=True)
class ReferenceWeight:
    """A matrix [N, K] in float32, already rounded to the activation type, and its bias [N] in float32."""

    matrix: Tensor
    bias: Tensor | None

    def product(self, x: Tensor) -> Tensor:
        """W x + b of one row x f32 [K] -> f32 [N]."""
        y = torch.mv(self.matrix, x)
        return y if self.bias is None else y + self.bias


ReferenceExpert = tuple[tuple[ReferenceWeight, ReferenceWeight], ReferenceWeight]
"""Gate and up, then down."""


class ReferenceCache:
    """Keys and values as two tensors [layers, slots, kv_heads, head_dim] of the activation type."""

    def __init__(self, *, layers: int, num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.num_blocks = num_blocks
        shape = (layers, num_blocks * BLOCK_SIZE, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype)
        self.values = torch.zeros(shape, dtype=dtype)

    def move(self, source: Tensor, target: Tensor) -> None:
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            self.keys[:, new] = self.keys[:, old]
            self.values[:, new] = self.values[:, old]

    def read(self, slot: int) -> Tensor:
        return torch.stack([self.keys[:, slot], self.values[:, slot]], dim=1)

    def clear(self, block: int) -> None:
        self.keys[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = 0
        self.values[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = 0


class ReferenceLatents:
    """One vector per position, [layers, slots, 1, rank + rope]: the key, and in its first `rank` the value."""

    def __init__(self, *, layers: int, num_blocks: int, rank: int, rope: int, dtype: torch.dtype) -> None:
        self.num_blocks = num_blocks
        self.keys = torch.zeros(layers, num_blocks * BLOCK_SIZE, 1, rank + rope, dtype=dtype)
        self.values = self.keys[..., :rank]

    def move(self, source: Tensor, target: Tensor) -> None:
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            self.keys[:, new] = self.keys[:, old]

    def read(self, slot: int) -> Tensor:
        return self.keys[:, slot].unsqueeze(1).clone()

    def clear(self, block: int) -> None:
        self.keys[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = 0
