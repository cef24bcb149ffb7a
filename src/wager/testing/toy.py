"""A target with a closed-form distribution whose logits depend on what its cache holds, an engine on it, and a manual
clock.

`ToyTarget` stores (token, position) at the slots a batch names and reads every context back through block tables,
parents and positions before it computes a logit. A wrong slot, block table, parent or position, a stale block or a
missing move of keys and values therefore changes the text, as it would with a real model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from wager.constrain.compiler import GrammarCompiler
from wager.draft.base import Drafter
from wager.economics.policy.base import Policy
from wager.economics.policy.heuristics import FixedDepth
from wager.engine.core import Engine
from wager.engine.proposer import Proposer
from wager.engine.runner import Runner
from wager.engine.scheduler import Scheduler
from wager.errors import CacheIntegrityError
from wager.kernels._native import BlockPool
from wager.kernels.arrays import Array
from wager.kernels.base import BLOCK_SIZE, KVCache, TargetOutput
from wager.kv.paged_cache import PagedKVCache
from wager.trace import Trace
from wager.types import PackedBatch, VerifyRule

_Words = NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MISSING = -1  # value of an unwritten slot, and of the positions before the first token


_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _mix(words: _Words) -> _Words:
    """The splitmix64 finaliser: a bijection of 64-bit words that spreads every bit."""
    words = words ^ (words >> _SHIFTS[0])
    words *= _FACTORS[0]
    words ^= words >> _SHIFTS[1]
    words *= _FACTORS[1]
    words ^= words >> _SHIFTS[2]
    return words


def _word(values: NDArray[np.integer]) -> _Words:
    return values.astype(np.int64).view(np.uint64)


def slot_digest(tokens: NDArray[np.integer], stored: NDArray[np.integer], positions: NDArray[np.integer]) -> _Words:
    """A token's contribution to the digest of its path; the digest is a sum, so that paths are cheap to extend.

    `stored` is the position it was computed for, `positions` the position in its path; they are equal unless the block
    tables or slots are wrong.
    """
    misplaced = _word(stored - positions) * np.uint64(0xA24BAED4963EE407)
    return _mix(_word(tokens) * np.uint64(0xD1342543DE82EF95) + _word(positions) * _GOLDEN + misplaced + np.uint64(1))


@dataclass(frozen=True)
class ToyDistribution:
    """Logits as a closed form of the context, from integer hashes and exact float operations only.

    z[v] = sharpness * (u(last `order` tokens, v) + memory * u(path with positions, v) + drift * u(salted, v)),
    u uniform in [0, 1). `memory` 0 gives a Markov chain of order `order`, which can be enumerated; above 0 any mistake
    anywhere in the path changes every logit. `drift` above 0 with another `salt` gives a draft model that
    resembles the target. `eos_bias` is added to the logit of `eos`.
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
        positions = np.arange(len(tokens))
        digest = slot_digest(tokens, positions, positions).sum(keepdims=True, dtype=np.uint64)
        tail = np.full(self.order, _MISSING, np.int64)
        count = min(self.order, len(tokens))
        tail[:count] = tokens[::-1][:count]
        logits: NDArray[np.float32] = self.logits(tail[None], digest)[0]
        return logits

    def logits(self, tails: NDArray[np.int64], digests: _Words) -> NDArray[np.float32]:
        """Logits [H, vocab] from the last tokens [H, order], newest first, and the path digests [H]; H: logits rows."""
        near = np.zeros(len(tails), np.uint64)
        for column in _word(tails.T):
            near = _mix(near + column + _GOLDEN)
        parts = [(1.0, near)]
        if self.memory:
            parts.append((self.memory, _mix(digests)))
        if self.drift:
            parts.append((self.drift, _mix(near ^ np.uint64(self.salt + 1))))
        seeds = np.array([seed for _, seed in parts])
        uniform = (_mix(seeds[:, :, None] + self._ids) >> np.uint64(11)).astype(np.float64)
        uniform *= 1.0 / 2**53
        z = uniform[0]
        for (weight, _), part in zip(parts[1:], uniform[1:], strict=True):
            z += weight * part
        z *= self.sharpness
        if self.eos is not None:
            z[:, self.eos] += self.eos_bias
        logits: NDArray[np.float32] = z.astype(np.float32)
        return logits

    @cached_property
    def _ids(self) -> _Words:
        return np.arange(1, self.vocab + 1, dtype=np.uint64) * _GOLDEN


class ToyCache:
    """A cache whose keys are tokens and whose values are positions; implements `kernels.base.KVCache`."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.tokens = np.full(num_blocks * BLOCK_SIZE, _MISSING, np.int64)
        self.positions = np.full(num_blocks * BLOCK_SIZE, _MISSING, np.int64)

    def move(self, source: Array, target: Array) -> None:
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            self.tokens[new] = self.tokens[old]
            self.positions[new] = self.positions[old]

    def read(self, slot: int) -> Array:
        """Token and position of one slot, [1, 2, 1, 1]."""
        return np.array([self.tokens[slot], self.positions[slot]], np.float32).reshape(1, 2, 1, 1)

    def clear(self, block: int) -> None:
        self.tokens[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = _MISSING
        self.positions[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = _MISSING


class ToyTarget:
    """A target whose logits follow `distribution`; implements `kernels.base.Target`.

    Its output buffers are reused by every pass, as a real target's are. `passes` and `rows` count the computed ones.
    Raises CacheIntegrityError for an invalid batch (too large, two rows in one slot, a parent after its
    child).
    """

    def __init__(
        self,
        distribution: ToyDistribution | None = None,
        *,
        num_blocks: int = 256,
        max_rows: int = 256,
        max_sequences: int = 64,
    ) -> None:
        self.distribution = distribution or ToyDistribution()
        self.vocab = self.distribution.vocab
        self.max_rows = max_rows
        self.max_sequences = max_sequences
        self._slots = ToyCache(num_blocks)
        self.cache: KVCache = self._slots
        self.passes = 0
        self.rows = 0
        self._logits = np.zeros((max_rows, self.vocab), np.float32)
        self._best = np.zeros(max_rows, np.int32)

    def forward(self, batch: PackedBatch) -> TargetOutput:
        """One pass: write the rows' slots, read every path back, logits float32 [logits rows, vocab]."""
        self._check(batch)
        self.passes += 1
        self.rows += batch.rows
        self._slots.tokens[batch.slot_mapping] = batch.tokens
        self._slots.positions[batch.slot_mapping] = batch.positions
        digests = self._digests(batch)[batch.logits_indices]
        count = len(batch.logits_indices)
        self._logits[:count] = self.distribution.logits(self._tails(batch), digests)
        finite = np.isfinite(self._logits[:count]).all(axis=1)
        self._best[:count] = np.where(finite, self._logits[:count].argmax(axis=1), -1)
        return TargetOutput(self._logits[:count], self._best[:count])

    def _check(self, batch: PackedBatch) -> None:
        large = batch.rows > self.max_rows or batch.num_sequences > self.max_sequences
        if large or len(np.unique(batch.slot_mapping)) < batch.rows or (batch.parents >= np.arange(batch.rows)).any():
            raise CacheIntegrityError(
                f"A batch of {batch.rows} rows and {batch.num_sequences} sequences cannot be run.",
                "It is too large, writes one slot twice, or has a parent after its child.",
            )

    def _digests(self, batch: PackedBatch) -> _Words:
        """Digest [R] of the path that ends in each row, read from the cache."""
        parents = batch.parents.astype(np.int64)
        positions = (
            batch.num_computed_tokens[batch.seq_ids]
            + _path_sums(np.ones(batch.rows, np.uint64), parents).astype(np.int64)
            - 1
        )
        fresh = slot_digest(
            self._slots.tokens[batch.slot_mapping], self._slots.positions[batch.slot_mapping], positions
        )
        return _path_sums(fresh, parents) + self._bases(batch)[batch.seq_ids]

    def _bases(self, batch: PackedBatch) -> _Words:
        """Digest [sequences] of the context before each sequence's first row, read through its block table."""
        sums = np.zeros(len(batch.num_computed_tokens), np.uint64)
        sequences = np.repeat(np.arange(len(batch.num_computed_tokens)), batch.num_computed_tokens)
        positions = np.arange(len(sequences)) - np.repeat(
            np.cumsum(batch.num_computed_tokens) - batch.num_computed_tokens, batch.num_computed_tokens
        )
        slots = batch.block_tables[sequences, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        np.add.at(sums, sequences, slot_digest(self._slots.tokens[slots], self._slots.positions[slots], positions))
        return sums

    def _tails(self, batch: PackedBatch) -> NDArray[np.int64]:
        """The last `order` tokens [H, order] of each logits row's path, newest first, read back from the cache."""
        rows = batch.logits_indices.astype(np.int64)
        sequences = batch.seq_ids[rows]
        below = batch.num_computed_tokens[sequences].astype(np.int64) - 1
        tails = np.full((len(rows), self.distribution.order), _MISSING, np.int64)
        for column in range(self.distribution.order):
            fresh = rows >= 0
            block = batch.block_tables[sequences, np.maximum(below, 0) // BLOCK_SIZE]
            slots = np.where(fresh, batch.slot_mapping[rows], block * BLOCK_SIZE + below % BLOCK_SIZE)
            tails[:, column] = np.where(fresh | (below >= 0), self._slots.tokens[slots], _MISSING)
            below = np.where(fresh, below, below - 1)
            rows = np.where(fresh, batch.parents[rows], -1)
        return tails


def _path_sums(words: _Words, parents: NDArray[np.int64]) -> _Words:
    """Sum of `words` [R] over each row and its ancestors; every iteration doubles the number of ancestors summed."""
    above = parents
    while (above >= 0).any():
        linked = above >= 0
        words = words + np.where(linked, words[above], np.uint64(0))
        above = np.where(linked, above[above], -1)
    return words


class FakeClock:
    """Stands in for `time.perf_counter`: call it for the seconds, `advance` it by hand."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


def toy_engine(
    distribution: ToyDistribution,
    *,
    drafter: Drafter | None = None,
    others: Sequence[Drafter] = (),
    policy: Policy | None = None,
    depth: int = 4,
    rule: VerifyRule = "match",
    num_blocks: int = 64,
    max_rows: int = 64,
    max_prefill_rows: int | None = None,
    max_sequences: int = 8,
    max_context: int = 512,
    prefix_cache: bool = True,
    grammars: GrammarCompiler | None = None,
    trace: Trace | None = None,
) -> Engine:
    """An engine on a ToyTarget. Few `num_blocks` make preemption common, few `max_rows` split prompts into chunks.

    `others` are drafters besides the first. Without a `policy` the first makes `depth` guesses; with one, `depth` is
    the maximum that the policy may plan.
    """
    trace = trace or Trace()
    target = ToyTarget(distribution, num_blocks=num_blocks, max_rows=max_rows, max_sequences=max_sequences)
    scheduler = Scheduler(
        PagedKVCache(BlockPool(num_blocks, prefix_cache=prefix_cache), target.cache),
        max_rows=max_rows,
        max_sequences=max_sequences,
        max_context=max_context,
        max_draft_tokens=depth if drafter else 0,
        clock=trace.clock,
        max_prefill_rows=max_prefill_rows,
    )
    return Engine(
        Runner(target, rule=rule),
        scheduler,
        policy=policy or FixedDepth(depth),
        proposer=Proposer(*([drafter] if drafter else []), *others, vocab=distribution.vocab, rule=rule),
        eos=() if distribution.eos is None else (distribution.eos,),
        grammars=grammars,
        trace=trace,
    )
