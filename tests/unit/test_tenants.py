"""What is kept of one tenant's requests is kept apart: values, blocks, policies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from wager.economics.policy.heuristics import FixedDepth
from wager.engine.policies import TenantPolicies
from wager.kernels.base import BLOCK_SIZE
from wager.kv.paged_cache import BlockPool
from wager.tenants import PerTenant
from wager.types import NO_TENANT

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


class Noted(FixedDepth):
    """Notes which sequences it knows, and that it is never told of a step that it did not plan."""

    def __init__(self) -> None:
        super().__init__(1)
        self.known: dict[str, float] = {}
        self.planned = False
        self.left_out: frozenset[str] = frozenset()

    def begin(self, sequence: str, *, weight: float) -> None:
        assert sequence not in self.known
        self.known[sequence] = weight

    def end(self, sequence: str) -> None:
        del self.known[sequence]

    def leave_out(self, drafters: frozenset[str]) -> None:
        self.left_out = drafters

    def plan(self, *args: Any) -> Any:
        self.planned = True
        return {}

    def observe(self, record: Any) -> None:
        assert self.planned
        self.planned = False


def test_a_tenant_alone_has_its_own_policy_and_several_have_one_together() -> None:
    sequences: dict[str, Any] = {}
    policy = TenantPolicies(Noted, sequences)

    def begin(name: str, tenant: str, weight: float = 1.0) -> None:
        sequences[name] = SimpleNamespace(tenant=tenant)
        policy.begin(name, weight=weight)

    def step(*ended: str) -> Noted:
        policy.plan([], 0)
        for name in ended:
            policy.end(name)
        policy.observe(None)
        return policy.policy  # type: ignore[no-any-return]

    begin("a", "anna", 2.0)
    annas = step()
    assert annas.known == {"a": 2.0}
    begin("b", "ben")
    policy.leave_out(frozenset({"d"}))
    both = step()
    assert both.left_out == annas.left_out == {"d"}
    assert both is not annas and both.known == {"a": 2.0, "b": 1.0} and not annas.known
    assert step("b") is both
    assert step() is annas and annas.known == {"a": 2.0} and not both.known
    step("a")
    begin("c", "ben")
    bens = step()
    assert bens not in (annas, both) and bens.known == {"c": 1.0}
    begin("d", "carl")
    policy.end("d")  # aborted before a step knew of it
    policy.end("d")
    policy.end("never began")
    assert step("c") is bens
    begin("e", "anna")
    assert step() is annas
