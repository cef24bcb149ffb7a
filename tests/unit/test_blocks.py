"""Block accounting: under random use against the plain pool, and its edges; what is kept of each tenant is kept
apart."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from oracle.block_pool import PlainBlockPool
from wager.errors import CacheIntegrityError, UsageError
from wager.kernels._native import BlockPool
from wager.kernels.base import BLOCK_SIZE
from wager.tenants import PerTenant
from wager.types import NO_TENANT

TOTAL = 12


class BlocksMachine(RuleBasedStateMachine):
    """Sequences draw tokens from a tiny alphabet, so that prefixes are often equal."""

    prefix_cache = True
    lead = 0

    def __init__(self) -> None:
        super().__init__()
        self.table = BlockPool(TOTAL, prefix_cache=self.prefix_cache, lead=self.lead)
        self.plain = PlainBlockPool(TOTAL, prefix_cache=self.prefix_cache, lead=self.lead)
        self.tokens: dict[str, list[int]] = {}  # computed tokens, from position 0
        self.committed: dict[str, int] = {}
        self.leads: dict[str, list[int]] = {}

    def both(self, method: str, *given: Any, **options: Any) -> Any:
        native, plain = (getattr(pool, method)(*given, **options) for pool in (self.table, self.plain))
        assert native == plain
        return native

    def pick(self, data: st.DataObject) -> tuple[str, int]:
        """A sequence, and one of its lengths."""
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        return name, data.draw(st.integers(0, len(self.tokens[name])))

    @rule(
        lead=st.integers(0, 1),
        blocks=st.lists(st.integers(0, 1), max_size=5),
        tail=st.integers(1, BLOCK_SIZE),
        tenant=st.sampled_from(["", "", "anna"]),
    )
    def start(self, lead: int, blocks: list[int], tail: int, tenant: str) -> None:
        name = f"s{len(self.leads)}"
        self.leads[name] = [lead] * self.lead
        prompt = [block for block in blocks for _ in range(BLOCK_SIZE)] + [2] * tail
        hit = self.both("match_prefix", name, [*self.leads[name], *prompt], tenant=tenant)
        assert hit % BLOCK_SIZE == 0 and hit <= len(prompt) - 1, "the last token is left to compute"
        if self.both("reserve", name, len(prompt)):
            self.tokens[name], self.committed[name] = prompt, hit
        else:
            self.both("release", name)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), count=st.integers(1, 20), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, count: int, token: int) -> None:
        name, _ = self.pick(data)
        if self.both("reserve", name, len(self.tokens[name]) + count):
            self.tokens[name] += [token] * count

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name, length = self.pick(data)
        self.both("commit", name, [*self.leads[name], *self.tokens[name]], length=length)
        self.committed[name] = max(self.committed[name], length // BLOCK_SIZE * BLOCK_SIZE)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        name, length = self.pick(data)
        if length < self.committed[name] and length % BLOCK_SIZE:
            with pytest.raises(CacheIntegrityError):
                self.table.trim(name, length)
            return
        self.both("trim", name, length)
        del self.tokens[name][length:]
        self.committed[name] = min(self.committed[name], length)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        (source, length), name = self.pick(data), f"s{len(self.leads)}"
        shared = length // BLOCK_SIZE * BLOCK_SIZE
        if shared > self.committed[source]:
            with pytest.raises(CacheIntegrityError):
                self.table.fork(source, name, length)
            return
        self.both("fork", source, name, length)
        self.leads[name] = self.leads[source]
        self.both("commit", name, [*self.leads[name], *self.tokens[source]], length=shared)
        assert self.table.block_table(name) == self.table.block_table(source)[: shared // BLOCK_SIZE]
        self.tokens[name], self.committed[name] = self.tokens[source][:shared], shared

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name, _ = self.pick(data)
        self.both("release", name)
        del self.tokens[name], self.committed[name]

    @rule()
    def forget(self) -> None:
        self.both("reset_prefix_cache")

    @invariant()
    def sound(self) -> None:
        self.table.check({name: len(tokens) for name, tokens in self.tokens.items()})
        assert self.table.num_free_blocks == self.plain.num_free_blocks
        held = {block for name in self.tokens for block in self.both("block_table", name)}
        assert self.table.num_free_blocks == TOTAL - len(held)


class Uncached(BlocksMachine):
    prefix_cache = False


class Led(BlocksMachine):
    """With tokens before the first entry, which all entries depend on."""

    lead = 2


@pytest.mark.parametrize(("machine", "examples"), [(BlocksMachine, 8), (BlocksMachine, 30), (Uncached, 30), (Led, 30)])
def test_random_use(machine: type[BlocksMachine], examples: int) -> None:
    sizes: dict[str, int] = {"max_examples": examples, "stateful_step_count": 30}
    chosen = settings(**sizes, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(machine, settings=chosen)


# ---- edges ----------------------------------------------------------------------------------------------------------


def cached(pool: BlockPool, name: str, tokens: list[int]) -> None:
    pool.match_prefix(name, tokens)
    assert pool.reserve(name, len(tokens))
    pool.commit(name, tokens)


def test_eviction_takes_the_least_recently_released_and_children_before_parents() -> None:
    pool = BlockPool(4, prefix_cache=True)
    old, new = [1] * (2 * BLOCK_SIZE), [2] * (2 * BLOCK_SIZE)
    for name, tokens in (("old", old), ("new", new)):
        cached(pool, name, tokens)
    for name in ("old", "new"):
        pool.release(name)
    assert pool.reserve("x", BLOCK_SIZE)
    assert pool.match_prefix("y", [*old, 0]) == BLOCK_SIZE  # its second block is gone, its first is not
    assert pool.match_prefix("z", [*new, 0]) == 2 * BLOCK_SIZE
    pool.check()


def test_a_block_that_is_not_committed_is_never_shared_and_one_that_is_never_reopened() -> None:
    pool = BlockPool(6, prefix_cache=True)
    assert pool.reserve("a", 2 * BLOCK_SIZE)
    pool.commit("a", [1] * (2 * BLOCK_SIZE - 1))
    with pytest.raises(CacheIntegrityError, match="1 committed blocks; 2"):
        pool.fork("a", "b", 2 * BLOCK_SIZE)
    with pytest.raises(CacheIntegrityError, match="16 are committed"):
        pool.trim("a", BLOCK_SIZE - 3)
    pool.trim("nobody", 3)
    pool.release("nobody")


def test_misuse_is_named() -> None:
    pool = BlockPool(4, prefix_cache=True)
    assert pool.reserve("a", BLOCK_SIZE)
    for call, words in (
        (lambda: pool.match_prefix("a", [1, 2]), "'a' already holds blocks"),
        (lambda: pool.fork("b", "a", 1), "'a' already holds blocks"),
        (lambda: pool.commit("a", [0] * (2 * BLOCK_SIZE)), "commits 2 blocks but holds 1"),
        (lambda: pool.check({}), "'a'"),
        (lambda: pool.check({"a": BLOCK_SIZE, "b": 1}), "'b'"),
        (lambda: pool.check({"a": BLOCK_SIZE + 1}), "too few blocks"),
    ):
        with pytest.raises(CacheIntegrityError, match=words):
            call()
    pool.check({"a": BLOCK_SIZE})
    with pytest.raises(UsageError, match="0 blocks"):
        BlockPool(0, prefix_cache=True)


# ---- tenants ---------------------------------------------------------------------------------------------------------

TOKENS = list(range(3 * BLOCK_SIZE + 1))


def test_each_tenant_has_its_own_value_and_the_unused_ones_are_dropped_oldest_first() -> None:
    made: list[list[str]] = []
    kept: PerTenant[list[str]] = PerTenant(lambda: made.append([]) or made[-1], most=2)  # type: ignore[func-returns-value]
    kept.enter("s", "anna")
    kept.of("s").append("anna's")
    kept.enter("t", "ben")
    assert kept.of("t") == [] and kept.get("anna") == ["anna's"] and set(kept.present) == {"anna", "ben"}
    kept.enter("u", "carl")  # in use are all three
    assert len(kept) == 3
    kept.leave("t")
    assert len(kept) == 2 and kept.get("anna") == ["anna's"]
    kept.leave("s")
    kept.leave("s")
    kept.get("dora")
    assert len(kept) == 2 and kept.of("u") == [] and kept.get("anna") == []
    kept.enter("u", "ben")  # a sequence that begins again counts once
    assert list(kept.present) == ["ben"] and kept.tenant("u") == "ben" and kept.tenant("other") == NO_TENANT
    kept.leave("u")
    assert not kept.present
    kept.clear()
    for seq_id, tenant in (("s", "anna"), ("t", "ben")):
        kept.enter(seq_id, tenant)
    kept.of("s").append("used last")
    for seq_id in "st":
        kept.leave(seq_id)
    kept.get("carl")
    assert kept.get("anna") == ["used last"]
    for seq_id, tenant in (("s", "anna"), ("t", "ben")):
        kept.enter(seq_id, tenant)
    kept.get("dora").append("new")
    assert kept.get("dora") == ["new"], "though both places are in use"


def committed(pool: BlockPool, name: str, tenant: str) -> int:
    """How many tokens a sequence found computed, after which it computes and commits the rest."""
    found = pool.match_prefix(name, TOKENS, tenant=tenant)
    assert pool.reserve(name, len(TOKENS))
    pool.commit(name, TOKENS)
    pool.check({name: len(TOKENS)})
    pool.release(name)
    return found


def test_cached_prefixes_are_found_by_their_tenant_alone() -> None:
    pool = BlockPool(16, prefix_cache=True)
    for found in (0, 48):
        for tenant in ("anna", "ben", NO_TENANT):
            assert committed(pool, f"{tenant} {found}", tenant) == found
    pool.check({})


def test_tenants_that_left_take_no_memory_and_the_others_keep_their_blocks() -> None:
    pool = BlockPool(16, prefix_cache=True)
    assert [committed(pool, name, name) for name in ("anna", "ben")] == [0, 0]
    statm = Path("/proc/self/statm")
    before = int(statm.read_text().split()[1]) if statm.exists() else 0
    for number in range(150_000):
        pool.match_prefix("s", TOKENS, tenant=f"{number:064}")
        pool.release("s")
    grown = int(statm.read_text().split()[1]) - before if statm.exists() else 0
    assert grown * resource.getpagesize() < 8 << 20
    assert [committed(pool, name, name) for name in ("anna", "ben", "carl")] == [48, 48, 0]


def test_a_fork_stays_with_its_tenant() -> None:
    pool = BlockPool(16, prefix_cache=True)
    pool.match_prefix("a", TOKENS, tenant="anna")
    pool.reserve("a", len(TOKENS))
    pool.commit("a", TOKENS, length=0)
    pool.fork("a", "a#1", 0)
    pool.reserve("a#1", len(TOKENS))
    pool.commit("a#1", TOKENS)
    pool.release("a")
    pool.release("a#1")
    assert pool.match_prefix("b", TOKENS, tenant="ben") == 0
    assert pool.match_prefix("c", TOKENS, tenant="anna") == 3 * BLOCK_SIZE
