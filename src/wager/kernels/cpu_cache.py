"""The native caches: memory of the C++ side as kernels.base.KVCache.

Slots and blocks are checked here, because the C++ functions take them unchecked.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from wager.errors import CacheIntegrityError, ModelError
from wager.kernels import _native
from wager.kernels.arrays import BFLOAT16, Array, address, empty
from wager.kernels.base import BLOCK_SIZE, MAX_HEAD_DIM, KVCache
from wager.types import KVDtype


class CpuCache:
    """Keys [layer][kv_head][block][d/2][16][2] and values [layer][kv_head][block][8][d][2], bf16: both products of
    attention then read sixteen keys, or sixteen dimensions, at once, in pairs along their sum. As q8 each block is 16
    float32 scales and then int8 in the same order."""

    def __init__(
        self, pool: Any, *, layers: int, num_blocks: int, kv_heads: int, head_dim: int, kv_dtype: KVDtype = "bf16"
    ) -> None:
        _require_size("head_dim", head_dim)
        block = BLOCK_SIZE * (head_dim + 4 if kv_dtype == "q8" else 2 * head_dim)
        nbytes = layers * num_blocks * kv_heads * block
        self.num_blocks = num_blocks
        self.kv_dtype: KVDtype = kv_dtype
        self.shape = (layers, kv_heads, head_dim)
        self.keys: Any = _native.Buffer(nbytes, huge_pages=False)
        self.values: Any = _native.Buffer(nbytes, huge_pages=False)
        q8 = kv_dtype == "q8"
        self.view = _native.CacheView(self.keys, self.values, layers, num_blocks, kv_heads, head_dim, q8)
        self._pool = pool

    @property
    def nbytes(self) -> int:
        return sum(int(buffer.nbytes) for buffer in self._buffers())

    @property
    def resident_bytes(self) -> int:
        """Bytes that the system has given: those of pages that were written. The others are reserved only."""
        return sum(_resident(int(buffer.address), int(buffer.nbytes)) for buffer in self._buffers())

    def _buffers(self) -> list[Any]:
        return [self.keys] if self.values is None else [self.keys, self.values]

    def of_layer(self, layer: int) -> tuple[CpuCache, int]:
        """The cache that has a layer, and which of its layers that is."""
        return self, layer

    def move(self, source: Array, target: Array) -> None:
        if len(source) != len(target):
            raise CacheIntegrityError(f"{len(source)} slots cannot move to {len(target)} slots.")
        source, target = np.ascontiguousarray(source, np.int32), np.ascontiguousarray(target, np.int32)
        for slots in (source, target):
            if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < self.num_blocks * BLOCK_SIZE:
                raise CacheIntegrityError(f"A slot to move lies outside the cache of {self.num_blocks} blocks.")
        self.view.move(self._pool, address(source), address(target), len(source))

    def read(self, slot: int) -> Array:
        layers, kv_heads, head_dim = self.shape
        kinds = 1 if self.values is None else 2
        if not 0 <= slot < self.num_blocks * BLOCK_SIZE:
            raise CacheIntegrityError(f"Slot {slot} lies outside the cache of {self.num_blocks} blocks.")
        out = empty(layers, kinds, kv_heads, head_dim)
        self.view.read(slot, address(out))
        return out if self.kv_dtype == "q8" else out.astype(BFLOAT16)

    def clear(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise CacheIntegrityError(f"Block {block} lies outside the cache of {self.num_blocks} blocks.")
        self.view.clear(block)


class CpuLatents(CpuCache):
    """Latents [layer][block][(rank + rope) / 2][16][2], bf16, in the layout of keys: attention transposes a block into
    values when it reads it, so that memory holds and streams each position once."""

    def __init__(self, pool: Any, *, layers: int, num_blocks: int, rank: int, rope: int) -> None:
        _require_size("The latent's rank of", rank)
        _require_size("The latent's rotated part of", rope)
        self.num_blocks = num_blocks
        self.shape = (layers, 1, rank + rope)
        self.rank = rank
        self.kv_dtype = "bf16"
        nbytes = 2 * layers * num_blocks * BLOCK_SIZE * (rank + rope)
        self.keys, self.values = _native.Buffer(nbytes, huge_pages=False), None
        self.view = _native.CacheView.latent(self.keys, layers, num_blocks, rank, rope)
        self._pool = pool


class JoinedCache:
    """Caches of layers whose heads have other sizes, block by block alike: layer i of the model is layer `places[i][1]`
    of `parts[places[i][0]]`."""

    def __init__(self, parts: Sequence[KVCache], places: Sequence[tuple[int, int]]) -> None:
        self.parts, self._places = parts, places
        self.num_blocks = parts[0].num_blocks

    @property
    def nbytes(self) -> int:
        return sum(int(getattr(part, "nbytes", 0)) for part in self.parts)

    @property
    def resident_bytes(self) -> int:
        return sum(int(getattr(part, "resident_bytes", 0)) for part in self.parts)

    def of_layer(self, layer: int) -> tuple[Any, int]:
        part, index = self._places[layer]
        return self.parts[part], index

    def move(self, source: Array, target: Array) -> None:
        for part in self.parts:
            part.move(source, target)

    def read(self, slot: int) -> Array:
        """Keys and values of one slot, layers of one size of heads after those of another, in one row."""
        return np.concatenate([part.read(slot).ravel() for part in self.parts])

    def clear(self, block: int) -> None:
        for part in self.parts:
            part.clear(block)


def _require_size(what: str, size: int) -> None:
    if size % 16 or not 16 <= size <= MAX_HEAD_DIM:
        raise ModelError(f"{what} {size} is not a multiple of 16 up to {MAX_HEAD_DIM}, which the kernels need.")


def _resident(start: int, nbytes: int) -> int:
    """Bytes of the pages from `start` on that are in memory; all where the system does not say."""
    try:
        import ctypes
    except ImportError:  # a Python that was built without libffi
        return nbytes
    mincore = getattr(ctypes.CDLL(None), "mincore", None)
    pages = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
    if mincore is None or mincore(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), ctypes.c_void_p(address(pages))):
        return nbytes
    return min(nbytes, int((pages & 1).sum()) * mmap.PAGESIZE)
