"""What is kept of one tenant's requests is kept apart: values, blocks, policies."""

from __future__ import annotations

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
