"""Page accounting under random use, against a copy of what every cell of the cache would hold."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from wager.errors import CacheIntegrityError
from wager.kernels.base import PAGE
from wager.kv import PageTable

TOTAL = 12


class PagesMachine(RuleBasedStateMachine):
    """Random use of a small table, with a copy of what every cell of the cache would hold.

    Sequences draw tokens from a tiny alphabet, so that prefixes are often equal. `cells[page][offset]` is written as an
    engine would write it: at positions that are reserved and not attached. Reading a sequence back must always give its
    own tokens; that is the one property paging exists for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(TOTAL, prefix_cache=self.prefix_cache)
        self.cells = [[-1] * PAGE for _ in range(TOTAL)]
        self.tokens: dict[str, list[int]] = {}  # computed tokens, from position 0
        self.committed: dict[str, int] = {}
        self.serial = 0

    prefix_cache = True

    def _fresh(self) -> str:
        self.serial += 1
        return f"s{self.serial}"

    def _write(self, name: str, start: int, tokens: list[int]) -> None:
        pages = self.table.pages(name)
        for position, token in enumerate(tokens, start):
            self.cells[pages[position // PAGE]][position % PAGE] = token

    def _pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.tokens)))

    @rule(data=st.data(), blocks=st.lists(st.integers(0, 1), max_size=5), tail=st.integers(1, PAGE))
    def start(self, data: st.DataObject, blocks: list[int], tail: int) -> None:
        name = self._fresh()
        prompt = [block for block in blocks for _ in range(PAGE)] + [2] * tail
        hit = self.table.match_prefix(name, prompt)
        assert hit % PAGE == 0 and hit <= len(prompt) - 1
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
        held = list(self.table.pages(name))
        if not self.table.reserve(name, length + count):
            assert list(self.table.pages(name)) == held
            assert -(-(length + count) // PAGE) - len(held) > self.table.free
            return
        self._write(name, length, [token] * count)
        self.tokens[name] += [token] * count

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name = self._pick(data)
        length = data.draw(st.integers(0, len(self.tokens[name])))
        self.table.commit(name, self.tokens[name], length=length)
        self.committed[name] = max(self.committed[name], length // PAGE * PAGE)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        name = self._pick(data)
        length = data.draw(st.integers(0, len(self.tokens[name])))
        if length < self.committed[name] and length % PAGE:
            with pytest.raises(CacheIntegrityError):
                self.table.trim(name, length)
            return
        self.table.trim(name, length)
        assert len(self.table.pages(name)) == -(-length // PAGE)
        del self.tokens[name][length:]
        self.committed[name] = min(self.committed[name], length)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source, name = self._pick(data), self._fresh()
        length = data.draw(st.integers(0, len(self.tokens[source])))
        if length // PAGE > self.committed[source] // PAGE:
            with pytest.raises(CacheIntegrityError):
                self.table.fork(source, name, length)
            return
        self.table.fork(source, name, length)
        shared = length // PAGE * PAGE
        self.table.commit(name, self.tokens[source], length=shared)
        assert list(self.table.pages(name)) == list(self.table.pages(source))[: shared // PAGE]
        self.tokens[name], self.committed[name] = self.tokens[source][:shared], shared

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = self._pick(data)
        self.table.release(name)
        del self.tokens[name], self.committed[name]

    @rule()
    def forget(self) -> None:
        self.table.forget()

    @invariant()
    def sound(self) -> None:
        self.table.check({name: len(tokens) for name, tokens in self.tokens.items()})
        held = {page for name in self.tokens for page in self.table.pages(name)}
        assert self.table.free == TOTAL - len(held)

    @invariant()
    def reads_back(self) -> None:
        for name, tokens in self.tokens.items():
            pages = self.table.pages(name)
            assert [self.cells[pages[i // PAGE]][i % PAGE] for i in range(len(tokens))] == tokens


class UncachedPagesMachine(PagesMachine):
    prefix_cache = False


_SETTINGS = settings(max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
TestPages = PagesMachine.TestCase
TestPages.settings = _SETTINGS
TestUncachedPages = UncachedPagesMachine.TestCase
TestUncachedPages.settings = _SETTINGS
