"""Latent attention against the oracle, and row invariance: a row's bits depend on its own path alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from cases import LatentWorld, Piece, decode
from test_attention import blocks

from closeness import assert_close
from wager.errors import ModelError
from wager.kernels.arrays import zeros
from wager.kernels.base import BLOCK_SIZE

SHAPES: Sequence[dict[str, int]] = [
    {},
    {"heads": 1, "rank": 16, "rope": 16, "nope": 2},
    {"heads": 32, "rank": 128, "rope": 32, "nope": 18},
    {"heads": 3, "rank": 512, "rope": 64, "nope": 128},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_oracle(kernels, oracle, shape):
    ours, theirs = LatentWorld(kernels, **shape), LatentWorld(oracle, **shape)
    rows, table = ours.rows(90, seed=1), blocks(6, seed=1)
    tree = Piece(table, 70, ours.rows(12, seed=2), parents=[-1, 0, 0, 1, 1, 2, 3, 3, 5, 6, 8, 2])
    for piece in (Piece(table, 0, rows[:70]), tree):
        got, want = ours.step(piece)[0], theirs.step(piece)[0]
        assert_close(got.astype(np.float32), want.astype(np.float32), rtol=2**-7, atol=0.03)
    slot = table[4] * BLOCK_SIZE + 3
    assert ours.cache.read(slot).shape == (1, 1, 1, ours.rank + ours.rope)
    assert_close(
        ours.cache.read(slot).astype(np.float32), theirs.cache.read(slot).astype(np.float32), rtol=2**-7, atol=0.01
    )


def test_chunks_do_not_change_a_row(kernels):
    table, rows = blocks(40, seed=3), LatentWorld(kernels).rows(600, seed=4)  # more than two segments of 256 keys
    alone = decode(LatentWorld(kernels), rows, table)
    for chunk in (256, 100, 64, 17, 7, 2):
        assert np.array_equal(decode(LatentWorld(kernels), rows, table, chunk=chunk), alone), f"chunks of {chunk}"


@pytest.mark.parametrize("heads", [5, 30])
def test_other_sequences_and_block_tables_do_not_change_a_row(kernels, heads):
    lengths = [70, 33, 1, 64, 16]
    world = LatentWorld(kernels, heads=heads)
    paths = [world.rows(n, seed=n) for n in lengths]
    alone = [decode(LatentWorld(kernels, heads=heads), rows, blocks(20, seed=i)) for i, rows in enumerate(paths)]
    free = random.Random(5).sample(range(64), 64)
    tables = [[free.pop() for _ in range(-(-n // 16))] for n in lengths]
    done, outs, rng = [0] * len(lengths), [[] for _ in lengths], random.Random(6)
    while any(at < n for at, n in zip(done, lengths, strict=True)):
        live = [i for i in range(len(lengths)) if done[i] < lengths[i]]
        rng.shuffle(live)
        sizes = [min(rng.choice([1, 1, 2, 5, 13, 40]), lengths[i] - done[i]) for i in live]
        chunks = zip(live, sizes, strict=True)
        pieces = [Piece(tables[i], done[i], paths[i][done[i] : done[i] + size]) for i, size in chunks]
        for i, size, out in zip(live, sizes, world.step(*pieces), strict=True):
            outs[i].append(out)
            done[i] += size
    for got, want in zip(outs, alone, strict=True):
        assert np.array_equal(np.concatenate(got), want)


def test_a_scattered_tree_path_is_plain_decode(kernels):
    rng = random.Random(7)
    for known, nodes in ((1, 9), (37, 40), (251, 60)):
        world = LatentWorld(kernels)
        table, prefix, guesses = blocks(24, seed=known), world.rows(known, seed=8), world.rows(nodes, seed=9)
        parents = [-1, *(rng.randrange(-1, i) for i in range(1, nodes))]
        if known > 1:
            world.step(Piece(table, 0, prefix[:-1]))
        span = np.concatenate([prefix[-1:], guesses])
        out = world.step(Piece(table, known - 1, span, parents=[-1, *(p + 1 for p in parents)]))[0]
        for node in rng.sample(range(nodes), 3):
            path, at = [], node
            while at >= 0:
                path.append(at)
                at = parents[at]
            rows = np.concatenate([prefix, guesses[path[::-1]]])
            alone = decode(LatentWorld(kernels), rows, blocks(24, seed=99), chunk=50)
            assert np.array_equal(out[1 + node], alone[-1]), f"node {node} after {known} known tokens"


def test_threads_do_not_change_a_row(kernels, one_thread):
    if kernels.isa.name != one_thread.isa.name:
        pytest.skip("another instruction set")
    rows, table = LatentWorld(kernels).rows(560, seed=12), blocks(35, seed=13)
    for chunk in (200, 7):  # few rows: segments are shared out among the threads
        ours, theirs = (decode(LatentWorld(k), rows, table, chunk=chunk) for k in (kernels, one_thread))
        assert np.array_equal(ours, theirs)


def test_slots_move_and_blocks_clear(kernels):
    world = LatentWorld(kernels, layers=2)
    world.step(Piece([5, 6], 0, world.rows(20, seed=19)))
    held = world.cache.read(5 * BLOCK_SIZE + 3)
    world.cache.move(np.array([5 * BLOCK_SIZE + 3], np.int32), np.array([7 * BLOCK_SIZE], np.int32))
    assert np.array_equal(world.cache.read(7 * BLOCK_SIZE), held)
    assert held[1].any()
    world.cache.clear(5)
    assert all(world.cache.read(5 * BLOCK_SIZE + i).any() == 0 for i in range(16))
    assert world.cache.read(6 * BLOCK_SIZE).any()
    assert world.cache.nbytes == 2 * 64 * BLOCK_SIZE * (world.rank + world.rope) * 2


def test_odd_sizes_are_refused(kernels):
    with pytest.raises(ModelError, match="rank of 40"):
        kernels.latent_cache(layers=1, num_blocks=1, rank=40, rope=16)
    world = LatentWorld(kernels)
    with pytest.raises(ModelError, match="no room for 5 heads of 60"):
        world.tape.per_head(world.q, kernels.pack_heads(zeros(5, 60, 4)), world.out)
