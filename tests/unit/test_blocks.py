"""Block accounting: the edges one by one."""

from __future__ import annotations

import pytest

from wager.errors import CacheIntegrityError, UsageError
from wager.kernels.base import BLOCK_SIZE
from wager.kv.paged_cache import BlockPool


def _cached(pool: BlockPool, name: str, tokens: list[int]) -> None:
    pool.match_prefix(name, tokens)
    assert pool.reserve(name, len(tokens))
    pool.commit(name, tokens)


def test_a_released_prefix_is_attached_again_and_the_last_token_is_left_to_compute() -> None:
    pool = BlockPool(8, prefix_cache=True)
    tokens = list(range(3 * BLOCK_SIZE))
    _cached(pool, "a", tokens)
    blocks = list(pool.block_table("a"))
    pool.release("a")
    assert pool.num_free_blocks == 8
    assert pool.match_prefix("b", tokens) == 2 * BLOCK_SIZE
    assert list(pool.block_table("b")) == blocks[:2]
    assert pool.match_prefix("c", [*tokens, 7]) == 3 * BLOCK_SIZE
    assert pool.match_prefix("d", [99, *tokens]) == 0


def test_without_prefix_cache_nothing_is_attached() -> None:
    pool = BlockPool(8, prefix_cache=False)
    _cached(pool, "a", list(range(2 * BLOCK_SIZE)))
    assert pool.match_prefix("b", list(range(2 * BLOCK_SIZE + 1))) == 0


def test_the_same_block_after_another_prefix_is_another_block() -> None:
    pool = BlockPool(8, prefix_cache=True)
    _cached(pool, "a", [1] * BLOCK_SIZE + [5] * BLOCK_SIZE)
    _cached(pool, "b", [2] * BLOCK_SIZE + [6] * BLOCK_SIZE)
    assert pool.match_prefix("c", [2] * BLOCK_SIZE + [5] * BLOCK_SIZE + [0]) == BLOCK_SIZE
    assert pool.block_table("c")[0] == pool.block_table("b")[0]


def test_a_copy_computed_at_the_same_time_is_given_back() -> None:
    pool = BlockPool(4, prefix_cache=True)
    tokens = [3] * BLOCK_SIZE
    for name in ("a", "b"):
        assert pool.match_prefix(name, [*tokens, 1]) == 0
        assert pool.reserve(name, BLOCK_SIZE + 1)
    assert pool.num_free_blocks == 0
    pool.commit("a", tokens)
    pool.commit("b", tokens)
    assert pool.block_table("a")[0] == pool.block_table("b")[0]
    assert pool.num_free_blocks == 1
    pool.release("a")
    pool.check({"b": BLOCK_SIZE + 1})
    assert pool.num_free_blocks == 2


def test_eviction_takes_the_least_recently_released_and_children_before_parents() -> None:
    pool = BlockPool(4, prefix_cache=True)
    old, new = [1] * (2 * BLOCK_SIZE), [2] * (2 * BLOCK_SIZE)
    _cached(pool, "old", old)
    _cached(pool, "new", new)
    pool.release("old")
    pool.release("new")
    assert pool.reserve("x", BLOCK_SIZE)
    assert pool.match_prefix("y", [*old, 0]) == BLOCK_SIZE  # its second block is gone, its first is not
    assert pool.match_prefix("z", [*new, 0]) == 2 * BLOCK_SIZE
    pool.check()


def test_reserve_is_all_or_nothing() -> None:
    pool = BlockPool(3, prefix_cache=True)
    assert pool.reserve("a", BLOCK_SIZE + 1)
    assert not pool.reserve("b", BLOCK_SIZE + 1)
    assert list(pool.block_table("b")) == [] and pool.num_free_blocks == 1
    assert pool.reserve("b", BLOCK_SIZE)
    assert pool.reserve("a", BLOCK_SIZE)  # never shrinks
    assert len(pool.block_table("a")) == 2
    assert pool.num_blocks == 3


def test_a_block_that_is_not_committed_is_never_shared() -> None:
    pool = BlockPool(6, prefix_cache=True)
    assert pool.reserve("a", 2 * BLOCK_SIZE)
    pool.commit("a", [1] * (2 * BLOCK_SIZE - 1))
    pool.fork("a", "b", BLOCK_SIZE + 5)
    assert len(pool.block_table("b")) == 1
    with pytest.raises(CacheIntegrityError, match="1 committed blocks; 2"):
        pool.fork("a", "c", 2 * BLOCK_SIZE)
    pool.release("a")
    assert pool.match_prefix("d", [1] * (3 * BLOCK_SIZE)) == BLOCK_SIZE


def test_trim_refuses_to_reopen_a_committed_block_but_gives_whole_ones_back() -> None:
    pool = BlockPool(6, prefix_cache=True)
    tokens = [1] * (2 * BLOCK_SIZE)
    _cached(pool, "a", tokens)
    pool.fork("a", "b", 2 * BLOCK_SIZE)
    with pytest.raises(CacheIntegrityError, match="32 are committed"):
        pool.trim("a", BLOCK_SIZE + 3)
    pool.trim("a", BLOCK_SIZE)
    pool.check({"a": BLOCK_SIZE, "b": 2 * BLOCK_SIZE})
    assert len(pool.block_table("b")) == 2
    pool.trim("nobody", 3)


def test_forget_empties_the_cache_of_evictable_blocks_only() -> None:
    pool = BlockPool(6, prefix_cache=True)
    _cached(pool, "a", [1] * BLOCK_SIZE)
    _cached(pool, "b", [2] * BLOCK_SIZE)
    pool.release("a")
    pool.reset_prefix_cache()
    assert pool.match_prefix("c", [1] * BLOCK_SIZE + [0]) == 0
    assert pool.match_prefix("d", [2] * BLOCK_SIZE + [0]) == BLOCK_SIZE


def test_misuse_is_named() -> None:
    pool = BlockPool(4, prefix_cache=True)
    assert pool.reserve("a", 1)
    with pytest.raises(CacheIntegrityError, match="'a' already holds blocks"):
        pool.match_prefix("a", [1, 2])
    with pytest.raises(CacheIntegrityError, match="'a' already holds blocks"):
        pool.fork("b", "a", 1)
    with pytest.raises(CacheIntegrityError, match="commits 2 blocks but holds 1"):
        pool.commit("a", [0] * (2 * BLOCK_SIZE))
    with pytest.raises(UsageError, match="0 blocks"):
        BlockPool(0, prefix_cache=True)
    pool.release("nobody")


def test_check_compares_with_the_sequences_that_should_exist() -> None:
    pool = BlockPool(6, prefix_cache=True)
    assert pool.reserve("a", BLOCK_SIZE)
    with pytest.raises(CacheIntegrityError, match="'a'"):
        pool.check({})
    with pytest.raises(CacheIntegrityError, match="'b'"):
        pool.check({"a": BLOCK_SIZE, "b": 1})
    with pytest.raises(CacheIntegrityError, match="too few blocks"):
        pool.check({"a": BLOCK_SIZE + 1})
    pool.check({"a": BLOCK_SIZE})
