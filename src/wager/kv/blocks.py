"""The blocks of the KV cache: which sequence holds which, which are free, which can be shared. Integers only.

A block holds the keys and values of BLOCK_SIZE tokens. Only a block that is *full and committed* (all of its tokens are
known, their keys and values computed) is ever shared, and it is never written again; so there is no copy-on-write.
Shareable blocks form a trie for each tenant: a block is registered under (block before it, its tokens), an exact key
on which no two prompts collide, and the first one of a prompt under its tenant's root.

Invariant of the trie: while a block is registered, so is the block before it. It holds because a sequence holds all
blocks of its prefix, and because blocks that no sequence holds are evicted least recently released first, children
first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from wager.errors import CacheIntegrityError, UsageError
from wager.kernels.base import BLOCK_SIZE
from wager.types import NO_TENANT

_ROOT = -1  # the block before the first one of NO_TENANT; other tenants have the numbers below

_Key = tuple[int, tuple[int, ...]]


class BlockLists(NamedTuple):
    """What a pool knows, as it is at any time. `committed`: of each table the first blocks, full and committed."""

    tables: dict[str, list[int]]  # by sequence
    committed: dict[str, int]
    free: list[int]
    ref_counts: list[int]  # of all blocks, as are the keys
    keys: list[_Key | None]
    prefix_index: dict[_Key, int] | None  # None without a prefix cache


class BlockPool:
    """Accounts for `num_blocks` blocks. Each is free, or evictable (registered, held by no sequence), or held.

    With `prefix_cache`, committed blocks are registered and can be attached by later sequences with the same prefix.
    A sequence that computed a block that was registered already gives its own copy back and holds the registered one:
    their contents are equal bit for bit, because every row is computed in one fixed order of operations.
    Costs are proportional to the blocks touched; `commit` costs one comparison until a block fills.
    """

    def __init__(self, num_blocks: int, *, prefix_cache: bool) -> None:
        if num_blocks < 1:
            raise UsageError(f"A cache of {num_blocks} blocks holds nothing.", "Give it at least one block.")
        self._num_blocks = num_blocks
        self._prefix_cache = prefix_cache
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * num_blocks
        self._keys: list[_Key | None] = [None] * num_blocks
        self._prefix_index: dict[_Key, int] = {}
        self._tables: dict[str, list[int]] = {}
        self._committed: dict[str, int] = {}  # of each table the first blocks, which are full and committed
        self._tenants: dict[str, str] = {}  # of sequences whose prefix was matched
        self._roots = {NO_TENANT: _ROOT}  # of tenants

    @property
    def num_blocks(self) -> int:
        """All blocks, free or not."""
        return self._num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be reserved now, evictable ones included."""
        return len(self._free) + len(self._evictable)

    @property
    def block_tables(self) -> Mapping[str, Sequence[int]]:
        """The block table of every sequence that holds one, as it is at any time."""
        return self._tables

    def lists(self) -> BlockLists:
        """For native code, which writes them as `reserve`, `commit` and `trim` do."""
        index = self._prefix_index if self._prefix_cache else None
        return BlockLists(self._tables, self._committed, self._free, self._ref_counts, self._keys, index)

    def block_table(self, seq_id: str) -> Sequence[int]:
        """Blocks of a sequence in the order of its positions, empty if it holds none; valid until its next change."""
        return self._tables.get(seq_id, ())

    def is_held(self, block: int) -> bool:
        """Whether any sequence holds the block."""
        return self._ref_counts[block] > 0

    def match_prefix(self, seq_id: str, tokens: Sequence[int], *, tenant: str = NO_TENANT) -> int:
        """Attach the tenant's registered blocks that hold a prefix of `tokens`; return how many tokens they hold. What
        the sequence computes until its release is shared with that tenant.

        At least the last token is left to compute, since its logits are needed. Raises CacheIntegrityError if the
        sequence holds blocks already.
        """
        if self.block_table(seq_id):
            raise CacheIntegrityError(f"Sequence {seq_id!r} already holds blocks.", "Match before reserving.")
        blocks: list[int] = []
        self._tables[seq_id] = blocks
        self._tenants[seq_id] = tenant
        before = self._root(seq_id)
        for start in range(0, len(tokens) - BLOCK_SIZE, BLOCK_SIZE):
            block = self._prefix_index.get((before, tuple(tokens[start : start + BLOCK_SIZE])))
            if block is None:
                break
            self._reference(block)
            blocks.append(block)
            before = block
        self._committed[seq_id] = len(blocks)
        return len(blocks) * BLOCK_SIZE

    def reserve(self, seq_id: str, length: int) -> bool:
        """Make the sequence's blocks cover `length` positions: all or nothing, False if there are too few blocks."""
        blocks = self._tables.get(seq_id)
        if blocks is not None and length <= len(blocks) * BLOCK_SIZE:
            return True
        missing = blocks_for(length) - (len(blocks) if blocks else 0)
        if missing > self.num_free_blocks:
            return False
        if blocks is None:
            blocks = self._tables[seq_id] = []
            self._committed[seq_id] = 0
        for _ in range(missing):
            block = self._free.pop() if self._free else self._evict()
            self._ref_counts[block] = 1
            blocks.append(block)
        return True

    def trim(self, seq_id: str, length: int) -> None:
        """Give back the blocks beyond `length` positions.

        Raises CacheIntegrityError if `length` lies inside a committed block: it may be shared, so it stays as it is.
        """
        blocks = self._tables.get(seq_id)
        if blocks is None:
            return
        committed = self._committed[seq_id]
        if length < committed * BLOCK_SIZE and length % BLOCK_SIZE:
            raise CacheIntegrityError(
                f"Sequence {seq_id!r} cannot be cut to {length} positions: {committed * BLOCK_SIZE} are committed.",
                "Cut at a block boundary, or release the sequence and start it again.",
            )
        keep = blocks_for(length)
        while len(blocks) > keep:
            self._dereference(blocks.pop())
        if keep < committed:
            self._committed[seq_id] = keep

    def commit(self, seq_id: str, tokens: Sequence[int], *, length: int | None = None) -> None:
        """Declare the first `length` of `tokens` (None: all) known and computed; full blocks become shareable.

        `tokens` starts at the sequence's first position. Raises CacheIntegrityError if the blocks do not reach so far.
        """
        full, committed = (len(tokens) if length is None else length) // BLOCK_SIZE, self._committed[seq_id]
        if full <= committed:
            return
        blocks = self._tables[seq_id]
        if full > len(blocks):
            raise CacheIntegrityError(
                f"Sequence {seq_id!r} commits {full} blocks but holds {len(blocks)}.", "Reserve them first."
            )
        if self._prefix_cache:
            for index in range(committed, full):
                self._register(seq_id, index, tuple(tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]))
        self._committed[seq_id] = full

    def fork(self, source: str, target: str, length: int) -> None:
        """Let a new sequence share the source's full blocks below `length` positions; the rest it computes itself.

        Raises CacheIntegrityError if `target` holds blocks already or those blocks are not committed.
        """
        count = length // BLOCK_SIZE
        committed = self._committed.get(source, 0)
        if self.block_table(target):
            raise CacheIntegrityError(f"Sequence {target!r} already holds blocks.", "Fork into a new sequence.")
        if count > committed:
            raise CacheIntegrityError(
                f"Sequence {source!r} has {committed} committed blocks; {count} were to be shared.", "Commit first."
            )
        shared = list(self.block_table(source)[:count])
        for block in shared:
            self._reference(block)
        self._tables[target], self._committed[target] = shared, count
        self._tenants[target] = self._tenants.get(source, NO_TENANT)

    def release(self, seq_id: str) -> None:
        """Free a sequence's blocks; registered ones stay attachable until evicted. Unknown sequences are ignored."""
        blocks = self._tables.pop(seq_id, None)
        if blocks is not None:
            del self._committed[seq_id]
            self._tenants.pop(seq_id, None)
            for block in reversed(blocks):  # the last blocks are evicted first
                self._dereference(block)

    def reset_prefix_cache(self) -> None:
        """Free every evictable block, so that nothing computed before can be attached any more."""
        while self._evictable:
            self._free.append(self._evict())

    def check(self, lengths: Mapping[str, int] | None = None) -> None:
        """Raise CacheIntegrityError on any contradiction; O(blocks), meant for idle moments and tests.

        `lengths` gives the cached positions of every sequence that should exist: a missing block, an unknown sequence
        or one that was never released is a contradiction too.
        """
        held = Counter(chain.from_iterable(self._tables.values()))
        states = Counter(chain(self._free, self._evictable, held))
        for block in range(self._num_blocks):
            self._check_block(block, states[block], held[block])
        _require(
            len(self._prefix_index) == sum(key is not None for key in self._keys), "The trie names unknown blocks."
        )
        self._check_prefix_order()
        for name, blocks in self._tables.items():
            self._check_table(name, blocks, held)
        if lengths is not None:
            stray = set(lengths) ^ set(self._tables)
            _require(not stray, f"Sequences {sorted(stray)} are held but not running, or running but not held.")
            for name, length in lengths.items():
                short = len(self._tables[name]) < blocks_for(length)
                _require(not short, f"Sequence {name!r} caches {length} positions but has too few blocks.")

    def _check_block(self, block: int, states: int, held: int) -> None:
        _require(states == 1, f"Block {block} is in {states} states instead of one.")
        _require(
            self._ref_counts[block] == held,
            f"Block {block} counts {self._ref_counts[block]} references but has {held}.",
        )
        key = self._keys[block]
        _require(
            key is None or self._prefix_index.get(key) == block,
            f"Block {block} is not what the trie has under its key.",
        )
        _require(block not in self._evictable or key is not None, f"Block {block} is evictable but not registered.")
        _require(key is None or held > 0 or block in self._evictable, f"Block {block} is free but registered.")

    def _check_prefix_order(self) -> None:
        order = {block: rank for rank, block in enumerate(self._evictable)}
        for (before, _), block in self._prefix_index.items():
            if before <= _ROOT:
                continue
            _require(self._keys[before] is not None, f"Block {block} is registered but the block before it is not.")
            early = block in order and before in order and order[before] < order[block]
            _require(not early, f"Block {before} would be evicted before block {block}, which follows it.")
            _require(
                block in order or before not in order, f"Block {block} is held but block {before} before it is not."
            )

    def _check_table(self, name: str, blocks: Sequence[int], held: Counter[int]) -> None:
        _require(len(set(blocks)) == len(blocks), f"Sequence {name!r} holds a block twice.")
        _require(self._committed[name] <= len(blocks), f"Sequence {name!r} committed blocks it does not hold.")
        before = self._root(name)
        for index, block in enumerate(blocks):
            key = self._keys[block]
            if index >= self._committed[name]:
                _require(held[block] == 1, f"Block {block} of {name!r} is shared but not committed.")
                _require(key is None, f"Block {block} of {name!r} is registered but not committed.")
            elif self._prefix_cache:
                _require(key is not None and key[0] == before, f"Block {block} of {name!r} is registered out of order.")
            before = block

    def _root(self, seq_id: str) -> int:
        """What is before the first block of a sequence."""
        return self._roots.setdefault(self._tenants.get(seq_id, NO_TENANT), _ROOT - len(self._roots))

    def _register(self, seq_id: str, index: int, tokens: tuple[int, ...]) -> None:
        blocks = self._tables[seq_id]
        key = (blocks[index - 1] if index else self._root(seq_id), tokens)
        own = blocks[index]
        block = self._prefix_index.setdefault(key, own)
        if block == own:
            self._keys[own] = key
        else:
            self._reference(block)
            self._dereference(own)
            blocks[index] = block

    def _reference(self, block: int) -> None:
        self._ref_counts[block] += 1
        self._evictable.pop(block, None)

    def _dereference(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block]:
            return
        if self._keys[block] is None:
            self._free.append(block)
        else:
            self._evictable[block] = None

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        key = self._keys[block]
        if key is not None:
            del self._prefix_index[key]
        self._keys[block] = None
        return block


def blocks_for(length: int) -> int:
    """How many blocks cover `length` positions."""
    return -(-length // BLOCK_SIZE)


def _require(condition: bool, message: str) -> None:  # noqa: FBT001
    if not condition:
        raise CacheIntegrityError(
            message, "This is a defect in wager: please report it, with the command that led here."
        )
