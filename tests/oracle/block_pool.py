"""The accounting of blocks in plain Python: what csrc/block_pool.h does, without its checks of misuse."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_SIZE = 16

_Key = tuple[int, tuple[int, ...]]


class PlainBlockPool:
    """See csrc/block_pool.h."""

    def __init__(self, num_blocks: int, *, prefix_cache: bool, lead: int = 0) -> None:
        self._prefix_cache, self._lead = prefix_cache, lead
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * num_blocks
        self._keys: dict[int, _Key] = {}
        self._index: dict[_Key, int] = {}
        self._tables: dict[str, list[int]] = {}
        self._committed: dict[str, int] = {}
        self._tenants: dict[str, str] = {}
        self._roots = {"": -1}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + len(self._evictable)

    def block_table(self, seq_id: str) -> list[int]:
        return list(self._tables.get(seq_id, ()))

    def match_prefix(self, seq_id: str, tokens: Sequence[int], *, tenant: str = "") -> int:
        self._tables[seq_id], self._tenants[seq_id] = [], tenant
        for index in range((len(tokens) - self._lead - 1) // BLOCK_SIZE):
            block = self._index.get(self._key(seq_id, index, tokens))
            if block is None:
                break
            self._reference(block)
            self._tables[seq_id].append(block)
        self._committed[seq_id] = len(self._tables[seq_id])
        return self._committed[seq_id] * BLOCK_SIZE

    def reserve(self, seq_id: str, length: int) -> bool:
        missing = -(-length // BLOCK_SIZE) - len(self._tables.get(seq_id, ()))
        if missing > self.num_free_blocks:
            return False
        self._committed.setdefault(seq_id, 0)
        table = self._tables.setdefault(seq_id, [])
        for _ in range(missing):
            block = self._free.pop() if self._free else self._evict()
            self._ref_counts[block] = 1
            table.append(block)
        return True

    def trim(self, seq_id: str, length: int) -> None:
        keep = -(-length // BLOCK_SIZE)
        while len(self._tables[seq_id]) > keep:
            self._dereference(self._tables[seq_id].pop())
        self._committed[seq_id] = min(self._committed[seq_id], keep)

    def commit(self, seq_id: str, tokens: Sequence[int], *, length: int) -> None:
        table = self._tables[seq_id]
        for index in range(self._committed[seq_id], length // BLOCK_SIZE):
            if self._prefix_cache:
                key, own = self._key(seq_id, index, tokens), table[index]
                table[index] = self._index.setdefault(key, own)
                if table[index] == own:
                    self._keys[own] = key
                else:
                    self._reference(table[index])
                    self._dereference(own)
            self._committed[seq_id] = index + 1

    def fork(self, source: str, target: str, length: int) -> None:
        shared = self._tables[source][: length // BLOCK_SIZE]
        for block in shared:
            self._reference(block)
        self._tables[target], self._committed[target] = shared, len(shared)
        self._tenants[target] = self._tenants.get(source, "")

    def release(self, seq_id: str) -> None:
        for block in reversed(self._tables.pop(seq_id, [])):
            self._dereference(block)
        self._committed.pop(seq_id, None)
        self._tenants.pop(seq_id, None)

    def reset_prefix_cache(self) -> None:
        while self._evictable:
            self._free.append(self._evict())

    def _key(self, seq_id: str, index: int, tokens: Sequence[int]) -> _Key:
        tenant = self._tenants.get(seq_id, "")
        root = self._roots.setdefault(tenant, -1 - len(self._roots))
        start = self._lead + index * BLOCK_SIZE if index else 0
        before = self._tables[seq_id][index - 1] if index else root
        return before, tuple(tokens[start : self._lead + (index + 1) * BLOCK_SIZE])

    def _reference(self, block: int) -> None:
        self._ref_counts[block] += 1
        self._evictable.pop(block, None)

    def _dereference(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if not self._ref_counts[block]:
            if block in self._keys:
                self._evictable[block] = None
            else:
                self._free.append(block)

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        del self._index[self._keys.pop(block)]
        return block
