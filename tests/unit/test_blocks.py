"""Edges of block accounting; test_step_state.py has it under random use."""

from __future__ import annotations

import pytest

from wager.errors import CacheIntegrityError, UsageError
from wager.kernels.base import BLOCK_SIZE
from wager.kv.paged_cache import BlockPool


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


def test_every_entry_depends_on_the_tokens_that_lead() -> None:
    pool, tokens = BlockPool(8, prefix_cache=True, lead=2), [1] * (2 * BLOCK_SIZE)
    pool.match_prefix("a", [7, 8, *tokens])
    assert pool.reserve("a", len(tokens))
    pool.commit("a", [7, 8, *tokens], length=len(tokens))
    assert pool.match_prefix("same", [7, 8, *tokens, 1]) == 2 * BLOCK_SIZE
    assert pool.match_prefix("other", [7, 9, *tokens, 1]) == 0
