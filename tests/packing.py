"""Packs batches by hand, so that the tests of kernels and models do not depend on the engine's packer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from wager.kernels._native import BlockPool
from wager.kernels.base import BLOCK_SIZE
from wager.types import PackedBatch

Rows = tuple[int, Sequence[int], Sequence[int], Sequence[int]]
"""A sequence's rows: position of the first, tokens, parents within the rows, blocks."""


def chain(base: int, tokens: Sequence[int], blocks: Sequence[int]) -> Rows:
    return base, tokens, range(-1, len(tokens) - 1), blocks


def pool_of(tables: Mapping[str, Sequence[int]]) -> BlockPool:
    """A pool in which sequences have these blocks."""
    wanted = [block for table in tables.values() for block in table]
    pool = BlockPool(max(wanted, default=0) + 1, prefix_cache=False)
    for block in range(pool.num_blocks):
        assert pool.reserve(f"block {block}", 1) and pool.block_table(f"block {block}") == [block]
    for block in reversed(wanted):  # the last one that is released is the first to be taken
        pool.release(f"block {block}")
    for name, table in tables.items():
        assert pool.reserve(name, len(table) * BLOCK_SIZE) and pool.block_table(name) == list(table)
    return pool


def num_known(parents: Sequence[int]) -> int:
    """How many rows of a span can be known ones: a chain, of which only the last is the parent of others."""
    for known in range(len(parents), 0, -1):
        chain = all(parents[row] == row - 1 for row in range(1, known))
        if chain and all(parent >= known - 1 for parent in parents[known:]):
            return known
    return 1


def batch(spans: Sequence[Rows], logits_indices: Sequence[int], *, first_state: int = 0) -> PackedBatch:
    """Rows of several sequences; cache slots follow the order of the rows. Their recurrent states are in slots from
    `first_state` on."""
    rows: dict[str, list[int]] = {name: [] for name in ("tokens", "positions", "parents", "slot_mapping", "seq_ids")}
    starts = []
    tables = np.zeros((len(spans), max(len(span[3]) for span in spans)), dtype=np.int32)
    for sequence, (base, tokens, parents, blocks) in enumerate(spans):
        first = len(rows["tokens"])
        starts.append(first)
        tables[sequence, : len(blocks)] = blocks
        depths: list[int] = []
        for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            rows["tokens"].append(token)
            rows["positions"].append(base + depths[-1])
            rows["parents"].append(-1 if parent < 0 else first + parent)
            rows["slot_mapping"].append(blocks[(base + i) // BLOCK_SIZE] * BLOCK_SIZE + (base + i) % BLOCK_SIZE)
            rows["seq_ids"].append(sequence)
    arrays = {name: np.array(values, dtype=np.int32) for name, values in rows.items()}
    uses = []
    for slot, (base, _, parents, _) in enumerate(spans, first_state):
        uses.append([slot, slot if base else -1, num_known(parents), 0, *[-1] * 4])
    return PackedBatch(
        **arrays,
        state_uses=np.array(uses, dtype=np.int32),
        replays=np.zeros(0, dtype=np.int32),
        query_start_loc=np.array([*starts, len(rows["tokens"])], dtype=np.int32),
        num_computed_tokens=np.array([span[0] for span in spans], dtype=np.int32),
        block_tables=tables,
        logits_indices=np.array(logits_indices, dtype=np.int32),
    )
