"""Which sequence holds which page of the cache, and which pages can be shared: integers only.

Knows no tensors, no model and no scheduler. Pages hold PAGE tokens. Only a page that is *full and committed* (every one
of its tokens is known and its keys and values are computed) is ever shared, and it is never written again; so there is
no copy-on-write. Shareable pages form a trie: a page is registered under (page before it, its tokens), an exact key
that no two prompts can collide on.

The trie has one invariant: while a page is registered, so is the page before it. It holds because a sequence holds
all pages of its prefix, and because pages nobody holds are evicted least recently released first, children first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from wager.errors import CacheIntegrityError, UsageError
from wager.kernels.base import BLOCK_SIZE

_ROOT = -1
"""The page before the first one."""

_Key = tuple[int, tuple[int, ...]]


@dataclass(slots=True)
class _BlockTable:
    """Pages of one sequence in path order; the first `full` of them are full and committed."""

    blocks: list[int] = field(default_factory=list)
    num_committed: int = 0


class BlockPool:
    """Accounts for `pages` pages. A page is free, or idle (registered, held by nobody), or held by sequences.

    With `prefix_cache`, committed pages are registered and can be attached by later sequences with the same prefix;
    a sequence that computed a page someone had registered already gives its own copy back and holds the registered
    one (their contents are equal bit for bit, because every row is computed by one fixed order of operations).
    All costs are per page touched; `commit` costs a comparison until a page fills.
    """

    def __init__(self, num_blocks: int, *, prefix_cache: bool) -> None:
        if num_blocks < 1:
            raise UsageError(f"A cache of {num_blocks} pages holds nothing.", "Give it at least one page.")
        self._total = num_blocks
        self._prefix_cache = prefix_cache
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * num_blocks
        self._keys: list[_Key | None] = [None] * num_blocks
        self._trie: dict[_Key, int] = {}
        self._sequences: dict[str, _BlockTable] = {}

    @property
    def num_blocks(self) -> int:
        """Pages in all."""
        return self._total

    @property
    def num_free_blocks(self) -> int:
        """Pages that can be had now, idle ones included."""
        return len(self._free) + len(self._idle)

    def block_table(self, sequence: str) -> Sequence[int]:
        """Pages of a sequence in path order (empty if it holds none). Valid until the next call on the sequence."""
        holding = self._sequences.get(sequence)
        return holding.blocks if holding else ()

    def is_held(self, page: int) -> bool:
        """Whether any sequence holds the page."""
        return self._holders[page] > 0

    def match_prefix(self, seq_id: str, tokens: Sequence[int]) -> int:
        """Attach the registered pages that hold a prefix of `tokens`; return how many tokens they hold.

        At least the last token is left to compute, since its logits are wanted. Raises CacheIntegrityError if the
        sequence holds pages already.
        """
        if self.block_table(seq_id):
            raise CacheIntegrityError(f"Sequence {seq_id!r} already holds pages.", "Match before reserving.")
        holding = self._sequences[seq_id] = _BlockTable()
        before = _ROOT
        for start in range(0, len(tokens) - BLOCK_SIZE, BLOCK_SIZE):
            page = self._trie.get((before, tuple(tokens[start : start + BLOCK_SIZE])))
            if page is None:
                break
            self._hold(page)
            holding.blocks.append(page)
            before = page
        holding.num_committed = len(holding.blocks)
        return holding.num_committed * BLOCK_SIZE

    def reserve(self, seq_id: str, length: int) -> bool:
        """Make the sequence's pages cover `length` positions: all or nothing, False if there are too few pages."""
        holding = self._sequences.get(seq_id)
        missing = blocks_for(length) - (len(holding.blocks) if holding else 0)
        if missing > self.num_free_blocks:
            return False
        if holding is None:
            holding = self._sequences[seq_id] = _BlockTable()
        for _ in range(missing):
            page = self._free.pop() if self._free else self._evict()
            self._holders[page] = 1
            holding.blocks.append(page)
        return True

    def trim(self, seq_id: str, length: int) -> None:
        """Give back the pages beyond `length` positions.

        Raises CacheIntegrityError if `length` lies inside a committed page: it may be shared, so it stays as it is.
        """
        holding = self._sequences.get(seq_id)
        if holding is None:
            return
        if length < holding.num_committed * BLOCK_SIZE and length % BLOCK_SIZE:
            raise CacheIntegrityError(
                f"Sequence {seq_id!r} cannot be cut to {length} positions: "
                f"{holding.num_committed * BLOCK_SIZE} are committed.",
                "Cut at a page boundary, or release the sequence and start it again.",
            )
        keep = blocks_for(length)
        while len(holding.blocks) > keep:
            self._drop(holding.blocks.pop())
        holding.num_committed = min(holding.num_committed, keep)

    def commit(self, seq_id: str, tokens: Sequence[int], *, length: int | None = None) -> None:
        """Declare the first `length` of `tokens` (None: all) known and computed; full pages become shareable.

        `tokens` starts at the sequence's first position. Raises CacheIntegrityError if the pages do not reach so far.
        """
        holding = self._sequences[seq_id]
        full = (len(tokens) if length is None else length) // BLOCK_SIZE
        if full <= holding.num_committed:
            return
        if full > len(holding.blocks):
            raise CacheIntegrityError(
                f"Sequence {seq_id!r} commits {full} pages but holds {len(holding.blocks)}.", "Reserve them first."
            )
        if self._prefix_cache:
            for index in range(holding.num_committed, full):
                self._register(holding, index, tuple(tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]))
        holding.num_committed = full

    def fork(self, source: str, target: str, length: int) -> None:
        """Let a new sequence share the source's full pages below `length` positions; the rest it computes itself.

        Raises CacheIntegrityError if `target` holds pages already or those pages are not committed.
        """
        count = length // BLOCK_SIZE
        holding = self._sequences.get(source) or _BlockTable()
        if self.block_table(target):
            raise CacheIntegrityError(f"Sequence {target!r} already holds pages.", "Fork into a new sequence.")
        if count > holding.num_committed:
            raise CacheIntegrityError(
                f"Sequence {source!r} has {holding.num_committed} committed pages; {count} were to be shared.",
                "Commit first.",
            )
        shared = holding.blocks[:count]
        for page in shared:
            self._hold(page)
        self._sequences[target] = _BlockTable(shared, count)

    def release(self, seq_id: str) -> None:
        """Give everything back; registered pages stay attachable until they are evicted. Unknown sequences: nothing."""
        holding = self._sequences.pop(seq_id, None)
        if holding is not None:
            for page in reversed(holding.blocks):  # the last pages are evicted first
                self._drop(page)

    def reset_prefix_cache(self) -> None:
        """Free every idle page, so that nothing computed before can be attached any more (after a failed pass)."""
        while self._idle:
            self._free.append(self._evict())

    def check(self, lengths: Mapping[str, int] | None = None) -> None:
        """Raise CacheIntegrityError on any contradiction; O(pages), meant for idle moments and tests.

        `lengths` gives the cached positions of every sequence that should exist: a missing page, an unknown sequence
        or a forgotten one is a contradiction too.
        """
        held = Counter(page for holding in self._sequences.values() for page in holding.blocks)
        states = Counter(chain(self._free, self._idle, held))
        for page in range(self._total):
            self._check_page(page, states[page], held[page])
        _require(len(self._trie) == sum(key is not None for key in self._keys), "The trie names unknown pages.")
        self._check_trie_order()
        for name, holding in self._sequences.items():
            self._check_holding(name, holding, held)
        if lengths is not None:
            stray = set(lengths) ^ set(self._sequences)
            _require(not stray, f"Sequences {sorted(stray)} are held but not running, or running but not held.")
            for name, length in lengths.items():
                short = len(self._sequences[name].blocks) < blocks_for(length)
                _require(not short, f"Sequence {name!r} caches {length} positions but has too few pages.")

    def _check_page(self, page: int, states: int, held: int) -> None:
        _require(states == 1, f"Page {page} is in {states} states instead of one.")
        _require(self._holders[page] == held, f"Page {page} counts {self._holders[page]} holders but has {held}.")
        key = self._keys[page]
        _require(key is None or self._trie.get(key) == page, f"Page {page} is not what the trie has under its key.")
        _require(page not in self._idle or key is not None, f"Page {page} is idle but not registered.")
        _require(key is None or held > 0 or page in self._idle, f"Page {page} is free but registered.")

    def _check_trie_order(self) -> None:
        order = {page: rank for rank, page in enumerate(self._idle)}
        for (before, _), page in self._trie.items():
            if before == _ROOT:
                continue
            _require(self._keys[before] is not None, f"Page {page} is registered but the page before it is not.")
            outlived = page in order and before in order and order[before] < order[page]
            _require(not outlived, f"Page {before} would be evicted before page {page}, which follows it.")
            _require(page in order or before not in order, f"Page {page} is held but page {before} before it is not.")

    def _check_holding(self, name: str, holding: _BlockTable, held: Counter[int]) -> None:
        _require(len(set(holding.blocks)) == len(holding.blocks), f"Sequence {name!r} holds a page twice.")
        _require(holding.num_committed <= len(holding.blocks), f"Sequence {name!r} committed pages it does not hold.")
        before = _ROOT
        for index, page in enumerate(holding.blocks):
            key = self._keys[page]
            if index >= holding.num_committed:
                _require(held[page] == 1, f"Page {page} of {name!r} is shared but not committed.")
                _require(key is None, f"Page {page} of {name!r} is registered but not committed.")
            elif self._prefix_cache:
                _require(key is not None and key[0] == before, f"Page {page} of {name!r} is registered out of order.")
            before = page

    def _register(self, holding: _BlockTable, index: int, tokens: tuple[int, ...]) -> None:
        key = (holding.blocks[index - 1] if index else _ROOT, tokens)
        own = holding.blocks[index]
        page = self._trie.setdefault(key, own)
        if page == own:
            self._keys[own] = key
        else:
            self._hold(page)
            self._drop(own)
            holding.blocks[index] = page

    def _hold(self, page: int) -> None:
        self._holders[page] += 1
        self._idle.pop(page, None)

    def _drop(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if self._keys[page] is None:
            self._free.append(page)
        else:
            self._idle[page] = None

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        key = self._keys[page]
        if key is not None:
            del self._trie[key]
        self._keys[page] = None
        return page


def blocks_for(length: int) -> int:
    return -(-length // BLOCK_SIZE)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise CacheIntegrityError(
            message, "This is a defect in wager: please report it, with the command that led here."
        )
