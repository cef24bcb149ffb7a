"""A target with a closed-form law that trusts nothing but its own cache.

`ToyTarget` stores (token, position) at the slots a batch names and reads every context back through page tables,
parents and positions before it computes a logit. A wrong slot, table, parent or position, a stale page or a K/V move
that was forgotten therefore changes the text, exactly as it would with a real model, only visibly and fast.
Knows no engine: it implements `kernels.base.Target`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wager.errors import CacheIntegrityError
from wager.kernels.base import BLOCK_SIZE, KVCache, TargetOutput
from wager.types import PackedBatch

_Words = NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MISSING = -1  # what a cell holds before it is written, and what precedes the first token


def _mix(words: _Words) -> _Words:
    """The splitmix64 finaliser: a bijection of 64-bit words that spreads every bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _word(values: NDArray[np.integer]) -> _Words:
    return values.astype(np.int64).view(np.uint64)


def cell(tokens: NDArray[np.integer], stored: NDArray[np.integer], places: NDArray[np.integer]) -> _Words:
    """What a token contributes to the digest of its path: a sum over cells, so that paths are cheap to extend.

    `stored` is the position it was computed for, `places` where its path has it; they agree unless somebody erred.
    """
    astray = _word(stored - places) * np.uint64(0xA24BAED4963EE407)
    return _mix(_word(tokens) * np.uint64(0xD1342543DE82EF95) + _word(places) * _GOLDEN + astray + np.uint64(1))


@dataclass(frozen=True)
class ToyDistribution:
    """Logits as a closed form of the context, built from integer hashes and exact float operations only.

    z[v] = sharpness * (u(last `order` tokens, v) + memory * u(whole path with positions, v) + drift * u(salted, v)),
    u uniform in [0, 1). `memory` 0 gives a law of order `order`, fit for enumeration; above 0 any mistake anywhere in
    the path moves every logit. `drift` above 0 with another `salt` gives a drafter that resembles the target.
    `eos_bias` is added to the logit of `eos`.
    """

    vocab: int = 64
    order: int = 2
    sharpness: float = 8.0
    memory: float = 0.25
    drift: float = 0.0
    salt: int = 0
    eos: int | None = None
    eos_bias: float = 0.0

    def __call__(self, context: Sequence[int]) -> NDArray[np.float32]:
        """Logits [vocab] after `context` (its first token at position 0)."""
        tokens = np.asarray(context, np.int64)
        places = np.arange(len(tokens))
        digest = cell(tokens, places, places).sum(keepdims=True, dtype=np.uint64)
        tail = np.full(self.order, _MISSING, np.int64)
        count = min(self.order, len(tokens))
        tail[:count] = tokens[::-1][:count]
        logits: NDArray[np.float32] = self.logits(tail[None], digest)[0]
        return logits

    def logits(self, tails: NDArray[np.int64], digests: _Words) -> NDArray[np.float32]:
        """Logits [H, vocab] from the last tokens [H, order], newest first, and the path digests [H]."""
        ids = np.arange(1, self.vocab + 1, dtype=np.uint64) * _GOLDEN
        near = np.zeros(len(tails), np.uint64)
        for column in range(self.order):
            near = _mix(near + _word(tails[:, column]) + _GOLDEN)
        z = self._uniform(near, ids)
        if self.memory:
            z += self.memory * self._uniform(_mix(digests), ids)
        if self.drift:
            z += self.drift * self._uniform(_mix(near ^ np.uint64(self.salt + 1)), ids)
        z *= self.sharpness
        if self.eos is not None:
            z[:, self.eos] += self.eos_bias
        return z.astype(np.float32)

    @staticmethod
    def _uniform(seeds: _Words, ids: _Words) -> NDArray[np.float64]:
        return (_mix(seeds[:, None] + ids) >> np.uint64(11)).astype(np.float64) * (1.0 / 2**53)


class ToyCache:
    """A cache whose keys are tokens and whose values are positions; implements `kernels.base.Cache`."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.tokens = np.full(num_blocks * BLOCK_SIZE, _MISSING, np.int64)
        self.positions = np.full(num_blocks * BLOCK_SIZE, _MISSING, np.int64)

    def move(self, source: Tensor, target: Tensor) -> None:
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            self.tokens[new] = self.tokens[old]
            self.positions[new] = self.positions[old]

    def read(self, slot: int) -> Tensor:
        """Token and position of one slot, [1, 2, 1, 1]."""
        return torch.tensor([float(self.tokens[slot]), float(self.positions[slot])]).reshape(1, 2, 1, 1)

    def clear(self, block: int) -> None:
        self.tokens[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = _MISSING
        self.positions[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = _MISSING


class ToyTarget:
    """A target of any vocabulary whose law is `law`; see the module's first lines.

    Its output buffers are reused by every pass, as a real target's are. `passes` and `rows` count what it was asked.
    Raises CacheIntegrityError for a batch no target could run (too wide, two rows in one slot, a parent after its
    child).
    """

    def __init__(
        self, law: ToyDistribution | None = None, *, num_blocks: int = 256, max_rows: int = 256, max_sequences: int = 64
    ) -> None:
        self.law = law or ToyDistribution()
        self.vocab = self.law.vocab
        self.max_rows = max_rows
        self.max_sequences = max_sequences
        self.cells = ToyCache(num_blocks)
        self.cache: KVCache = self.cells
        self.passes = 0
        self.rows = 0
        self._logits = np.zeros((max_rows, self.vocab), np.float32)
        self._best = np.zeros(max_rows, np.int32)

    def forward(self, batch: PackedBatch) -> TargetOutput:
        """One pass: write the rows' cells, read every path back, logits float32 [H, vocab]."""
        self._refuse(batch)
        self.passes += 1
        self.rows += batch.rows
        self.cells.tokens[batch.slot_mapping] = batch.tokens
        self.cells.positions[batch.slot_mapping] = batch.positions
        digests = self._digests(batch)[batch.logits_indices]
        heads = len(batch.logits_indices)
        self._logits[:heads] = self.law.logits(self._tails(batch), digests)
        finite = np.isfinite(self._logits[:heads]).all(axis=1)
        self._best[:heads] = np.where(finite, self._logits[:heads].argmax(axis=1), -1)
        return TargetOutput(torch.from_numpy(self._logits[:heads]), torch.from_numpy(self._best[:heads]))

    def _refuse(self, batch: PackedBatch) -> None:
        wide = batch.rows > self.max_rows or len(batch.query_start_loc) > self.max_sequences
        if wide or len(np.unique(batch.slot_mapping)) < batch.rows or (batch.parents >= np.arange(batch.rows)).any():
            raise CacheIntegrityError(
                f"A batch of {batch.rows} rows and {len(batch.query_start_loc)} sequences cannot be run.",
                "It is too wide, writes one slot twice, or names a parent after its child.",
            )

    def _digests(self, batch: PackedBatch) -> _Words:
        """Digest [R] of the path that ends in each row, from what the cache holds."""
        parents = batch.parents.astype(np.int64)
        places = (
            batch.num_computed_tokens[batch.seq_ids]
            + _path_sums(np.ones(batch.rows, np.uint64), parents).astype(np.int64)
            - 1
        )
        fresh = cell(self.cells.tokens[batch.slot_mapping], self.cells.positions[batch.slot_mapping], places)
        return _path_sums(fresh, parents) + self._bases(batch)[batch.seq_ids]

    def _bases(self, batch: PackedBatch) -> _Words:
        """Digest [C] of what lies below each sequence's first row, read through its page table."""
        sums = np.zeros(len(batch.num_computed_tokens), np.uint64)
        owners = np.repeat(np.arange(len(batch.num_computed_tokens)), batch.num_computed_tokens)
        places = np.arange(len(owners)) - np.repeat(
            np.cumsum(batch.num_computed_tokens) - batch.num_computed_tokens, batch.num_computed_tokens
        )
        slots = batch.block_tables[owners, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
        np.add.at(sums, owners, cell(self.cells.tokens[slots], self.cells.positions[slots], places))
        return sums

    def _tails(self, batch: PackedBatch) -> NDArray[np.int64]:
        """The last `order` tokens [H, order] of each head's path, newest first, read back from the cache."""
        rows = batch.logits_indices.astype(np.int64)
        owners = batch.seq_ids[rows]
        below = batch.num_computed_tokens[owners].astype(np.int64) - 1
        tails = np.full((len(rows), self.law.order), _MISSING, np.int64)
        for column in range(self.law.order):
            fresh = rows >= 0
            page = batch.block_tables[owners, np.maximum(below, 0) // BLOCK_SIZE]
            slots = np.where(fresh, batch.slot_mapping[rows], page * BLOCK_SIZE + below % BLOCK_SIZE)
            tails[:, column] = np.where(fresh | (below >= 0), self.cells.tokens[slots], _MISSING)
            below = np.where(fresh, below, below - 1)
            rows = np.where(fresh, batch.parents[rows], -1)
        return tails


def _path_sums(words: _Words, parents: NDArray[np.int64]) -> _Words:
    """Sum of `words` [R] over each row and its ancestors; every round of the loop doubles how far up a row has seen."""
    above = parents
    while (above >= 0).any():
        linked = above >= 0
        words = words + np.where(linked, words[above], np.uint64(0))
        above = np.where(linked, above[above], -1)
    return words
