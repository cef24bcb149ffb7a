"""Block accounting under random use, against a copy of what every cell of the cache would hold."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from wager.errors import CacheIntegrityError
from wager.kernels.base import BLOCK_SIZE
from wager.kv.blocks import BlockPool

TOTAL = 12


class BlocksMachine(RuleBasedStateMachine):
    """Random use of a small table, with a copy of what every cell of the cache would hold.

    Sequences draw tokens from a tiny alphabet, so that prefixes are often equal. `cells[block][offset]` is written as
    the engine would write it: at positions that are reserved and not attached. Reading a sequence back must always give
    its own tokens; that is the one property paging exists for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = BlockPool(TOTAL, prefix_cache=self.prefix_cache)
        self.cells = [[-1] * BLOCK_SIZE for _ in range(TOTAL)]
        self.tokens: dict[str, list[int]] = {}  # computed tokens, from position 0
        self.committed: dict[str, int] = {}
        self.serial = 0

    prefix_cache = True

    def _fresh(self) -> str:
        self.serial += 1
        return f"s{self.serial}"

    def _write(self, name: str, start: int, tokens: list[int]) -> None:
        blocks = self.table.block_table(name)
        for position, token in enumerate(tokens, start):
            self.cells[blocks[position // BLOCK_SIZE]][position % BLOCK_SIZE] = token

    def _pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.tokens)))

    @rule(data=st.data(), blocks=st.lists(st.integers(0, 1), max_size=5), tail=st.integers(1, BLOCK_SIZE))
    def start(self, data: st.DataObject, blocks: list[int], tail: int) -> None:
        name = self._fresh()
        prompt = [block for block in blocks for _ in range(BLOCK_SIZE)] + [2] * tail
        hit = self.table.match_prefix(name, prompt)
        assert hit % BLOCK_SIZE == 0 and hit <= len(prompt) - 1
        if not self.table.reserve(name, len(prompt)):
            self.table.release(name)
            return
        self._write(name, hit, prompt[hit:])
        self.tokens[name], self.committed[name] = prompt, hit

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), count=st.integers(1, 20), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, count: int, token: int) -> None:
        name = self._pick(data)
        length = len(self.tokens[name])
        held = list(self.table.block_table(name))
        if not self.table.reserve(name, length + count):
            assert list(self.table.block_table(name)) == held
            assert -(-(length + count) // BLOCK_SIZE) - len(held) > self.table.num_free_blocks
            return
        self._write(name, length, [token] * count)
        self.tokens[name] += [token] * count

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name = self._pick(data)
        length = data.draw(st.integers(0, len(self.tokens[name])))
        self.table.commit(name, self.tokens[name], length=length)
        self.committed[name] = max(self.committed[name], length // BLOCK_SIZE * BLOCK_SIZE)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        name = self._pick(data)
        length = data.draw(st.integers(0, len(self.tokens[name])))
        if length < self.committed[name] and length % BLOCK_SIZE:
            with pytest.raises(CacheIntegrityError):
                self.table.trim(name, length)
            return
        self.table.trim(name, length)
        assert len(self.table.block_table(name)) == -(-length // BLOCK_SIZE)
        del self.tokens[name][length:]
        self.committed[name] = min(self.committed[name], length)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source, name = self._pick(data), self._fresh()
        length = data.draw(st.integers(0, len(self.tokens[source])))
        if length // BLOCK_SIZE > self.committed[source] // BLOCK_SIZE:
            with pytest.raises(CacheIntegrityError):
                self.table.fork(source, name, length)
            return
        self.table.fork(source, name, length)
        shared = length // BLOCK_SIZE * BLOCK_SIZE
        self.table.commit(name, self.tokens[source], length=shared)
        assert list(self.table.block_table(name)) == list(self.table.block_table(source))[: shared // BLOCK_SIZE]
        self.tokens[name], self.committed[name] = self.tokens[source][:shared], shared

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = self._pick(data)
        self.table.release(name)
        del self.tokens[name], self.committed[name]

    @rule()
    def forget(self) -> None:
        self.table.reset_prefix_cache()

    @invariant()
    def sound(self) -> None:
        self.table.check({name: len(tokens) for name, tokens in self.tokens.items()})
        held = {block for name in self.tokens for block in self.table.block_table(name)}
        assert self.table.num_free_blocks == TOTAL - len(held)

    @invariant()
    def reads_back(self) -> None:
        for name, tokens in self.tokens.items():
            blocks = self.table.block_table(name)
            assert [self.cells[blocks[i // BLOCK_SIZE]][i % BLOCK_SIZE] for i in range(len(tokens))] == tokens


class UncachedBlocksMachine(BlocksMachine):
    prefix_cache = False


_SETTINGS = settings(max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
TestBlocks = BlocksMachine.TestCase
TestBlocks.settings = _SETTINGS
TestUncachedBlocks = UncachedBlocksMachine.TestCase
TestUncachedBlocks.settings = _SETTINGS
