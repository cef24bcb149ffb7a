"""Keys and values that a row does not attend to never change it, whatever they hold; inconsistent paths are refused."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from cases import Int8World, LatentWorld, Piece, World, decode

from wager.errors import CacheIntegrityError
from wager.kernels.arrays import Array

HEADS = [(6, 2, 32), (9, 3, 64), (4, 4, 16), (8, 1, 128), (14, 2, 80), (32, 1, 48)]
SHAPES = [{"heads": heads, "kv_heads": kv_heads, "d": d} for heads, kv_heads, d in HEADS]
LATENTS = [(5, 48, 16), (1, 16, 16), (32, 128, 32), (3, 512, 64)]
LATENT_SHAPES = [{"heads": heads, "rank": rank, "rope": rope} for heads, rank, rope in LATENTS]
NOT_FINITE = (math.nan, math.inf, -math.inf)
PARTS = [(kind, part) for kind in (World, Int8World) for part in ("keys", "values", "both")] + [
    (LatentWorld, part) for part in ("latent", "rotated", "all")
]
CASES = [(*case, shape) for case in PARTS for shape in (LATENT_SHAPES if case[0] is LatentWorld else SHAPES)]
every_part = pytest.mark.parametrize(("kind", "part"), PARTS)


def spans(world: World, part: str) -> list[tuple[int, int, int]]:
    """Where a row's keys, values or latents are: first, last, and the size of a head."""
    if isinstance(world, LatentWorld):
        latent = (world.queries, world.queries + world.rank, world.rank)
        rotated = (world.queries + world.rank, world.width, world.rope)
        return {"latent": [latent], "rotated": [rotated], "all": [latent, rotated]}[part]
    queries, kept = world.heads * world.d, world.kv_heads * world.d
    keys, values = (queries, queries + kept, world.d), (queries + kept, queries + 2 * kept, world.d)
    return {"keys": [keys], "values": [values], "both": [keys, values]}[part]


def spoiled(world: World, rows: Array, part: str) -> Array:
    """The rows with values that are not finite in what is cached: in one dimension of each kv head, or in all."""
    bad = rows.copy()
    for i, row in enumerate(bad):
        for first, last, d in spans(world, part):
            row[first + i % d : last : 1 if i % 2 else d] = NOT_FINITE[i % 3]
    return bad


@pytest.mark.parametrize(("kind", "part", "shape"), CASES)
def test_rejected_guesses_do_not_change_later_rows(kernels, kind, part, shape):
    clean, world, table = kind(kernels, **shape), kind(kernels, **shape), [9, 4, 7]
    rows = clean.rows(40, seed=1)
    world.step(Piece(table, 0, rows[:5]))
    guesses = spoiled(world, clean.rows(35, seed=2), part)
    first = world.step(Piece(table, 5, np.concatenate([rows[5:6], guesses[:34]])))[0][:1]
    want = decode(clean, rows, table)
    assert np.isfinite(want).all()
    assert np.array_equal(first, want[5:6]), "the known row beside its guesses"
    assert not np.isfinite(world.cache.read(table[0] * 16 + 7)).all()
    assert np.array_equal(decode(world, rows[:20], table, start=6), want[6:20]), "one row at a time"
    assert np.array_equal(decode(world, rows, table, start=20, chunk=7), want[20:]), "chunks"


@every_part
@pytest.mark.parametrize("window", [None, 20, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 70))])
def test_spoiled_branches_of_a_tree_do_not_change_the_others(kernels, kind, part, window):
    rng = random.Random(3)
    for known, nodes in ((1, 20), (40, 40), (62, 30), (251, 30)):
        clean, world = (kind(kernels, window=window) for _ in range(2))
        table = rng.sample(range(64), 24)
        prefix, guesses = clean.rows(known, seed=4), clean.rows(nodes, seed=5)
        parents = [-1, *(rng.randrange(-1, i) for i in range(1, nodes))]
        spoiled_at = {i for i in range(nodes) if rng.random() < 0.3}
        bad = np.stack(
            [spoiled(world, row[None], part)[0] if i in spoiled_at else row for i, row in enumerate(guesses)]
        )
        outs = []
        for run, nodes_of in ((clean, guesses), (world, bad)):
            if known > 1:
                run.step(Piece(table, 0, prefix[:-1]))
            span = np.concatenate([prefix[-1:], nodes_of])
            outs.append(run.step(Piece(table, known - 1, span, parents=[-1, *(p + 1 for p in parents)]))[0])
        for i in range(nodes):
            if i in spoiled_at or parents[i] in spoiled_at:
                spoiled_at.add(i)  # it sees a spoiled ancestor
        clean_rows = [0, *(1 + i for i in range(nodes) if i not in spoiled_at)]
        assert 3 < len(clean_rows) <= nodes
        assert np.isfinite(outs[0]).all()
        assert np.array_equal(outs[1][clean_rows], outs[0][clean_rows]), f"{known} known"


@every_part
@pytest.mark.parametrize("window", [5, 33, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 16, 270))])
def test_keys_before_the_window_do_not_change_a_row(kernels, kind, part, window):
    clean, table = kind(kernels, window=window), random.Random(6).sample(range(64), 23)
    rows = clean.rows(360, seed=7)
    want = decode(clean, rows, table, chunk=60)
    num_spoiled = 37
    bad = np.concatenate([spoiled(clean, rows[:num_spoiled], part), rows[num_spoiled:]])
    for chunk in (50, 3):
        world = kind(kernels, window=window)
        world.step(Piece(table, 0, bad[:num_spoiled]))
        got = decode(world, bad, table, start=num_spoiled, chunk=chunk)
        past = num_spoiled + window - 1  # the first row that sees none of the spoiled ones
        assert np.array_equal(got[past - num_spoiled :], want[past:]), f"chunks of {chunk}"


@every_part
def test_values_that_are_not_finite_spread_to_rows_that_attend_to_them(kernels, kind, part):
    world = kind(kernels)
    rows = world.rows(8, seed=8)
    rows[3] = spoiled(world, rows[3:4], part)[0]
    out = world.step(Piece([1], 0, rows))[0].reshape(8, world.heads, -1)
    assert np.isfinite(out[:3]).all()
    assert not np.isfinite(out[3:]).all(axis=2).any()


def tree(world: World) -> tuple[Piece, Piece]:
    """A chain of 20 rows from position 3 and, as the second sequence, a tree of 40: rows 20 to 59, from position 5."""
    world.step(Piece([1, 2], 0, world.rows(3, seed=9)), Piece([3, 4, 5], 0, world.rows(5, seed=10)))
    chain = Piece([1, 2], 3, world.rows(20, seed=11))
    return chain, Piece([3, 4, 5], 5, world.rows(40, seed=12), parents=[-1, *((i - 1) // 2 for i in range(1, 40))])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ([("positions", 0, 4)], "positions is 4 at index 0, not the base"),
        ([("positions", 0, 0)], "positions is 0 at index 0, not the base"),
        ([("positions", 59, 3)], "positions is 3 at index 59, not one past its parent"),
        ([("positions", 58, 300), ("positions", 59, 5)], "positions is 300 at index 58, not one past its parent"),
        ([("positions", 10, 14)], "positions is 14 at index 10, not one past its parent"),
        ([("parents", 10, 7)], "positions is 13 at index 10, not one past its parent"),
        ([("parents", 10, -1)], "positions is 13 at index 10, not the base"),
        ([("parents", 21, 1)], "parents is 1 at index 21, a row of another sequence"),
        ([("seq_ids", 40, 0)], "parents is 29 at index 40, a row of another sequence"),
        ([("query_start_loc", 1, 21)], "query_start_loc is 21 at index 1, past a row"),
        ([("query_start_loc", 1, 19)], "query_start_loc is 19 at index 1, not a row of its sequence"),
        ([("num_computed_tokens", 1, 4)], "positions is 5 at index 20, not the base"),
    ],
)
def test_inconsistent_paths_are_named_and_not_followed(kernels, changes, complaint):
    world = World(kernels)
    pieces = tree(world)
    want = world.step(*pieces)
    for name, index, value in changes:
        getattr(world.tape.inputs, name)[index] = value
    with pytest.raises(CacheIntegrityError, match=complaint):
        world.tape.run(rows=60, sequences=2, logits_rows=0)
    assert all(np.array_equal(got, out) for got, out in zip(world.step(*pieces), want, strict=True))
