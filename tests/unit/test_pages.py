"""Page accounting: the edges one by one, and every kind of damage the check must find."""

from __future__ import annotations

import pytest

from wager.errors import CacheIntegrityError, UsageError
from wager.kernels.base import BLOCK_SIZE
from wager.kv import BlockPool


def _cached(table: BlockPool, name: str, tokens: list[int]) -> None:
    table.match_prefix(name, tokens)
    assert table.reserve(name, len(tokens))
    table.commit(name, tokens)


def test_a_released_prefix_is_attached_again_and_the_last_token_is_left_to_compute() -> None:
    table = BlockPool(8, prefix_cache=True)
    tokens = list(range(3 * BLOCK_SIZE))
    _cached(table, "a", tokens)
    pages = list(table.block_table("a"))
    table.release("a")
    assert table.num_free_blocks == 8
    assert table.match_prefix("b", tokens) == 2 * BLOCK_SIZE
    assert list(table.block_table("b")) == pages[:2]
    assert table.match_prefix("c", [*tokens, 7]) == 3 * BLOCK_SIZE
    assert table.match_prefix("d", [99, *tokens]) == 0


def test_without_prefix_cache_nothing_is_attached() -> None:
    table = BlockPool(8, prefix_cache=False)
    _cached(table, "a", list(range(2 * BLOCK_SIZE)))
    assert table.match_prefix("b", list(range(2 * BLOCK_SIZE + 1))) == 0


def test_the_same_page_after_another_prefix_is_another_page() -> None:
    table = BlockPool(8, prefix_cache=True)
    _cached(table, "a", [1] * BLOCK_SIZE + [5] * BLOCK_SIZE)
    _cached(table, "b", [2] * BLOCK_SIZE + [6] * BLOCK_SIZE)
    assert table.match_prefix("c", [2] * BLOCK_SIZE + [5] * BLOCK_SIZE + [0]) == BLOCK_SIZE
    assert table.block_table("c")[0] == table.block_table("b")[0]


def test_a_copy_computed_at_the_same_time_is_given_back() -> None:
    table = BlockPool(4, prefix_cache=True)
    tokens = [3] * BLOCK_SIZE
    for name in ("a", "b"):
        assert table.match_prefix(name, [*tokens, 1]) == 0
        assert table.reserve(name, BLOCK_SIZE + 1)
    assert table.num_free_blocks == 0
    table.commit("a", tokens)
    table.commit("b", tokens)
    assert table.block_table("a")[0] == table.block_table("b")[0]
    assert table.num_free_blocks == 1
    table.release("a")
    table.check({"b": BLOCK_SIZE + 1})
    assert table.num_free_blocks == 2


def test_eviction_takes_the_least_recently_released_and_children_before_parents() -> None:
    table = BlockPool(4, prefix_cache=True)
    old, new = [1] * (2 * BLOCK_SIZE), [2] * (2 * BLOCK_SIZE)
    _cached(table, "old", old)
    _cached(table, "new", new)
    table.release("old")
    table.release("new")
    assert table.reserve("x", BLOCK_SIZE)
    assert table.match_prefix("y", [*old, 0]) == BLOCK_SIZE  # its second page is gone, its first is not
    assert table.match_prefix("z", [*new, 0]) == 2 * BLOCK_SIZE
    table.check()


def test_reserve_is_all_or_nothing() -> None:
    table = BlockPool(3, prefix_cache=True)
    assert table.reserve("a", BLOCK_SIZE + 1)
    assert not table.reserve("b", BLOCK_SIZE + 1)
    assert list(table.block_table("b")) == [] and table.num_free_blocks == 1
    assert table.reserve("b", BLOCK_SIZE)
    assert table.reserve("a", BLOCK_SIZE)  # never shrinks
    assert len(table.block_table("a")) == 2
    assert table.num_blocks == 3


def test_a_page_that_is_not_committed_is_never_shared() -> None:
    table = BlockPool(6, prefix_cache=True)
    assert table.reserve("a", 2 * BLOCK_SIZE)
    table.commit("a", [1] * (2 * BLOCK_SIZE - 1))
    table.fork("a", "b", BLOCK_SIZE + 5)
    assert len(table.block_table("b")) == 1
    with pytest.raises(CacheIntegrityError, match="1 committed pages; 2"):
        table.fork("a", "c", 2 * BLOCK_SIZE)
    table.release("a")
    assert table.match_prefix("d", [1] * (3 * BLOCK_SIZE)) == BLOCK_SIZE


def test_trim_refuses_to_reopen_a_committed_page_but_gives_whole_ones_back() -> None:
    table = BlockPool(6, prefix_cache=True)
    tokens = [1] * (2 * BLOCK_SIZE)
    _cached(table, "a", tokens)
    table.fork("a", "b", 2 * BLOCK_SIZE)
    with pytest.raises(CacheIntegrityError, match="32 are committed"):
        table.trim("a", BLOCK_SIZE + 3)
    table.trim("a", BLOCK_SIZE)
    table.check({"a": BLOCK_SIZE, "b": 2 * BLOCK_SIZE})
    assert len(table.block_table("b")) == 2
    table.trim("nobody", 3)


def test_forget_empties_the_cache_of_idle_pages_only() -> None:
    table = BlockPool(6, prefix_cache=True)
    _cached(table, "a", [1] * BLOCK_SIZE)
    _cached(table, "b", [2] * BLOCK_SIZE)
    table.release("a")
    table.reset_prefix_cache()
    assert table.match_prefix("c", [1] * BLOCK_SIZE + [0]) == 0
    assert table.match_prefix("d", [2] * BLOCK_SIZE + [0]) == BLOCK_SIZE


def test_misuse_is_named() -> None:
    table = BlockPool(4, prefix_cache=True)
    assert table.reserve("a", 1)
    with pytest.raises(CacheIntegrityError, match="'a' already holds pages"):
        table.match_prefix("a", [1, 2])
    with pytest.raises(CacheIntegrityError, match="'a' already holds pages"):
        table.fork("b", "a", 1)
    with pytest.raises(CacheIntegrityError, match="commits 2 pages but holds 1"):
        table.commit("a", [0] * (2 * BLOCK_SIZE))
    with pytest.raises(UsageError, match="0 pages"):
        BlockPool(0, prefix_cache=True)
    table.release("nobody")


def _damaged(name: str) -> BlockPool:
    table = BlockPool(6, prefix_cache=True)
    _cached(table, "a", [1] * (2 * BLOCK_SIZE))
    _cached(table, "b", [2] * (2 * BLOCK_SIZE))
    table.release("b")
    holding = table._sequences["a"]
    page = holding.blocks[0]
    damages = {
        "freed though held": lambda: table._free.append(page),
        "lost": lambda: table._free.pop(),
        "miscounted": lambda: table._holders.__setitem__(page, 2),
        "shared while open": lambda: (table.fork("a", "c", BLOCK_SIZE), setattr(holding, "num_committed", 0)),
        "unregistered parent": lambda: (table._trie.pop(table._keys[page]), table._keys.__setitem__(page, None)),
        "wrong eviction order": lambda: table._idle.move_to_end(next(iter(table._idle))),
        "held twice": lambda: holding.blocks.append(page),
        "committed but not held": lambda: setattr(holding, "num_committed", 3),
        "stray key": lambda: table._trie.__setitem__((-1, (9,)), page),
    }
    table.check({"a": 2 * BLOCK_SIZE})
    damages[name]()
    return table


@pytest.mark.parametrize(
    "damage",
    [
        "freed though held",
        "lost",
        "miscounted",
        "shared while open",
        "unregistered parent",
        "wrong eviction order",
        "held twice",
        "committed but not held",
        "stray key",
    ],
)
def test_check_finds_every_kind_of_damage(damage: str) -> None:
    with pytest.raises(CacheIntegrityError, match="defect in wager"):
        _damaged(damage).check()


def test_check_compares_with_the_sequences_that_should_exist() -> None:
    table = BlockPool(6, prefix_cache=True)
    assert table.reserve("a", BLOCK_SIZE)
    with pytest.raises(CacheIntegrityError, match="'a'"):
        table.check({})
    with pytest.raises(CacheIntegrityError, match="'b'"):
        table.check({"a": BLOCK_SIZE, "b": 1})
    with pytest.raises(CacheIntegrityError, match="too few pages"):
        table.check({"a": BLOCK_SIZE + 1})
    table.check({"a": BLOCK_SIZE})
