"""Keys and values that a row does not attend to never change it, whatever they hold."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from cases import Int8World, LatentWorld, Piece, World, decode

from wager.kernels.arrays import Array

NOT_FINITE = (math.nan, math.inf, -math.inf)
PARTS = [(kind, part) for kind in (World, Int8World) for part in ("keys", "values")]
PARTS += [(LatentWorld, part) for part in ("latent", "rotated")]
every_part = pytest.mark.parametrize(("kind", "part"), PARTS)


def place(world: World, part: str) -> tuple[int, int, int]:
    """Where a row's keys, values or latents are: first, last, and the size of a head."""
    if isinstance(world, LatentWorld):
        end = world.queries + world.rank
        return (world.queries, end, world.rank) if part == "latent" else (end, world.width, world.rope)
    first = (world.heads + (part == "values") * world.kv_heads) * world.d
    return first, first + world.kv_heads * world.d, world.d


def spoiled(world: World, rows: Array, part: str) -> Array:
    """The rows with values that are not finite in what is cached: in one dimension of each kv head, or in all."""
    bad, (first, last, d) = rows.copy(), place(world, part)
    for i, row in enumerate(bad):
        row[first + i % d : last : 1 if i % 2 else d] = NOT_FINITE[i % 3]
    return bad


@every_part
def test_rejected_guesses_do_not_change_later_rows(kernels, kind, part):
    clean, world, table = kind(kernels), kind(kernels), [9, 4, 7]
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
