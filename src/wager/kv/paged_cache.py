"""The blocks of a KV cache and the memory behind them: moves of accepted paths, and blocks that became invalid.

Which sequence holds which block is accounted in C++ (csrc/block_pool.h); the memory belongs to the kernels
(kernels.base.KVCache).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from wager.kernels._native import BlockPool
from wager.kernels.base import BLOCK_SIZE, KVCache


class PagedKVCache:
    """The blocks of `pool` in the memory of `tensors`."""

    def __init__(self, pool: BlockPool, tensors: KVCache) -> None:
        self.pool = pool
        self.tensors = tensors

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Move keys and values of slots, as of an accepted path of a tree to the slots of its positions."""
        if source:
            self.tensors.move(np.array(source, np.int32), np.array(target, np.int32))

    def compact_path(self, seq_id: str, first_position: int, accepted: Sequence[int]) -> None:
        """Move keys and values of an accepted path of a tree to the slots of their positions.

        The draft's node i was cached at `first_position` + i; the node accepted at depth d (from 0) belongs at
        `first_position` + d. For a chain both agree and nothing is moved.
        """
        moves = [(first_position + node, first_position + d) for d, node in enumerate(accepted) if node != d]
        if moves:
            table = self.pool.block_table(seq_id)
            self.move(_slots(table, [node for node, _ in moves]), _slots(table, [place for _, place in moves]))

    def fork(self, source: str, target: str, *, committed: int, computed: int) -> int:
        """Let a new sequence begin with the source's first `computed` positions, of which its blocks below `committed`
        are committed: full blocks are shared, the positions behind them copied. Returns how many it has; fewer where
        blocks run out."""
        self.pool.fork(source, target, committed)
        shared = len(self.pool.block_table(target)) * BLOCK_SIZE
        if computed <= shared:
            return computed
        if not self.pool.reserve(target, computed):
            return shared
        positions = range(shared, computed)
        tables = self.pool.block_table(source), self.pool.block_table(target)
        self.move(_slots(tables[0], positions), _slots(tables[1], positions))
        return computed

    def discard(self, blocks: Iterable[int]) -> None:
        """Blocks of ended sequences hold values that are not finite: they must not be attached again, nor be read by
        a later pass, not even through a mask (0 x NaN is NaN). A block that another sequence holds too has that
        sequence's own valid values and stays."""
        self.pool.reset_prefix_cache()
        for block in blocks:
            if not self.pool.is_held(block):
                self.tensors.clear(block)


def _slots(table: Sequence[int], positions: Iterable[int]) -> list[int]:
    return [table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in positions]
