"""Attention against the oracle, and row invariance: a row's bits depend on its own path alone."""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cases import CappedWorld, Int8World, LatentWorld, Piece, SinkWorld, World, angles, decode, rand, randn

from closeness import assert_close
from wager.errors import CacheIntegrityError, ModelError
from wager.kernels.arrays import Array, zeros
from wager.kernels.base import BLOCK_SIZE

SHAPES = [(6, 2, 32), (9, 3, 64), (4, 4, 16), (8, 1, 128), (14, 2, 80), (32, 1, 48)]
LATENTS = [(5, 48, 16, 24), (1, 16, 16, 2), (32, 128, 32, 18), (3, 512, 64, 128)]
TREE = [-1, 0, 0, 1, 1, 2, 3, 3, 5, 6, 8, 2]


@pytest.fixture(params=[World, Int8World, CappedWorld, LatentWorld, SinkWorld])
def kind(request: pytest.FixtureRequest) -> type[World]:
    """Keys and values of heads in a cache of either type, latents, or heads with sinks."""
    return request.param


def blocks(n: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(64), n)


def near(got, want, atol=0.02):
    """Probabilities and outputs are rounded to bf16 (2^-9 relative); values are about 1.5 wide."""
    assert_close(got.astype(np.float32), want.astype(np.float32), rtol=2**-7, atol=atol)


# ---- the oracle's numbers ----


@pytest.mark.usefixtures("kv_dtype")
@pytest.mark.parametrize("heads", ["qk", "kv", "q"])
def test_rows_of_some_heads(kernels, oracle, heads):
    """Values that are the keys before norm and rotation, normed; keys and values without queries; and queries that
    read what another layer wrote."""
    found = []
    for each in (kernels, oracle):
        world = World(each, norms=(rand(32) + 0.5, np.linspace(0.5, 1.5, 32, dtype=np.float32), 1e-6))
        q_norm, k_norm = np.linspace(0.7, 1.2, 32, dtype=np.float32), world.norms[1]
        width = sum(world.heads if each == "q" else world.kv_heads for each in heads) * world.d
        rows, q, out = zeros(world.max_rows, width), np.zeros_like(world.q), np.zeros_like(world.q)
        norms = (q_norm, k_norm if "k" in heads else None, 1e-6)
        table = angles(world.max_blocks * BLOCK_SIZE, world.d)
        world.tape.rotary(rows, table, norms, world.cache, 0, q, rows=heads, norm_values=True)
        world.tape.attention(q, world.cache, 0, window=None, out=out)
        rows[:40] = randn(40, width, seed=5) * 1.5
        world.step(Piece([3, 1, 2], 0, world.rows(40, seed=4)))
        found.append((q[:40], out[:40], world.cache.read(3 * 16 + 5)[0]))
    for ours, exact in zip(*found, strict=True):
        near(ours, exact)


def test_queries_of_rows_with_logits_are_those_of_all_rows(kernels):
    """They go to their rows, and the others stay as they were."""
    world = World(kernels)
    q_norm, width = np.linspace(0.7, 1.2, world.d, dtype=np.float32), world.heads * world.d
    rows, some = randn(world.max_rows, width, seed=5), zeros(world.max_rows, width)
    whole, q = np.zeros_like(world.q), np.zeros_like(world.q)
    table, norms = angles(world.max_blocks * BLOCK_SIZE, world.d), (q_norm, None, 1e-6)
    world.tape.rotary(rows, table, norms, world.cache, 0, whole, rows="q")
    world.tape.rotary(some, table, norms, world.cache, 0, q, rows="q", of="logits")
    factors, products, few = (
        randn(world.max_rows, width, seed=6),
        zeros(world.max_rows, width),
        zeros(world.max_rows, width),
    )
    world.tape.multiply(rows, factors, products, gelu=True)
    world.tape.multiply(some, factors, few, gelu=True, of="logits")
    chosen = [39, 0, 17]
    some[:3] = rows[chosen]
    world.step(Piece([3, 1, 2], 7, world.rows(40, seed=4)), logits_indices=chosen)
    assert np.array_equal(q[chosen], whole[chosen]) and np.array_equal(few[:3], products[chosen])
    assert not q[[row for row in range(40) if row not in chosen]].any() and not few[3:].any()
    with pytest.raises(ModelError, match="for all rows"):
        world.tape.rotary(world.qkv, table, None, world.cache, 0, q, of="logits")


def test_layers_of_two_shapes_have_one_tape(threaded):
    """Each gives the bits that it gives on a tape of its own, whatever the other's heads."""
    kernels, shapes = threaded(3), [(6, 2, 32), (8, 1, 128), (4, 4, 16)]
    worlds = [World(kernels, heads=heads, kv_heads=kv_heads, d=d) for heads, kv_heads, d in shapes]
    both, outs = worlds[0].tape, [worlds[0].out]
    for world in worlds[1:]:
        table, out = angles(world.max_blocks * BLOCK_SIZE, world.d), np.zeros_like(world.q)
        both.rotary(world.qkv, table, None, world.cache, 0, world.q)
        both.attention(world.q, world.cache, 0, window=None, out=out)
        outs.append(out)
    for count, base in ((70, 0), (1, 70), (12, 71)):
        parents = TREE if count == 12 else ()
        pieces = [Piece(blocks(6, seed=1), base, world.rows(count, seed=base), parents) for world in worlds]
        for world, piece in zip(worlds[1:], pieces[1:], strict=True):
            world.step(piece)
        found = worlds[0].step(pieces[0])  # the other worlds' rows are still in their buffers
        for world, out in zip(worlds, outs, strict=True):
            assert np.array_equal(out[:count], world.out[:count]) and out[:count].any()
        assert np.array_equal(found[0], outs[0][:count])


@pytest.mark.usefixtures("kv_dtype")
@pytest.mark.parametrize(("heads", "kv_heads", "d"), SHAPES)
@pytest.mark.parametrize("normed", [False, True])
def test_heads_match_the_oracle(kernels, oracle, heads, kv_heads, d, normed):
    norms = (rand(d) + 0.5, rand(d) + 0.5, 1e-6) if normed else None
    shape = {"heads": heads, "kv_heads": kv_heads, "d": d, "norms": norms}
    ours, theirs = World(kernels, **shape), World(oracle, **shape)
    rows, table = ours.rows(90, seed=d), blocks(6, seed=1)
    for piece in (Piece(table, 0, rows[:70]), Piece(table, 70, ours.rows(12, seed=2), parents=TREE)):
        near(ours.step(piece)[0], theirs.step(piece)[0])
    for place in range(82):
        slot = table[place // 16] * 16 + place % 16
        got_keys, got_values = ours.cache.read(slot)[0]
        want_keys, want_values = theirs.cache.read(slot)[0]
        assert np.array_equal(got_values, want_values)
        if normed:  # the norms sum in another order: at most the last place of bf16 differs, or int8 by one
            step = np.abs(want_keys).max() / 127 if ours.kv_dtype == "q8" else 0
            near(got_keys, want_keys, atol=1e-6 + 1.01 * step)
        else:
            assert np.array_equal(got_keys, want_keys)


@pytest.mark.usefixtures("kv_dtype")
@pytest.mark.parametrize(("d", "rotated"), [(32, 24), (48, 16), (32, 0)])
def test_a_part_of_a_head_is_rotated(kernels, oracle, d, rotated):
    norms = (rand(d) + 0.5, rand(d) + 0.5, 1e-6)
    ours, theirs = (World(k, d=d, norms=norms, rotated=rotated) for k in (kernels, oracle))
    near(
        ours.step(Piece(blocks(5, seed=1), 0, ours.rows(70, 1)))[0],
        theirs.step(Piece(blocks(5, seed=1), 0, ours.rows(70, 1)))[0],
    )
    near(ours.q[:70], theirs.q[:70])
    with pytest.raises(ModelError, match="48 of them"):
        World(kernels, d=32, rotated=48)


@pytest.mark.parametrize("kv_dtype", ["bf16", "q8"])
@pytest.mark.parametrize("window", [None, 90])
def test_scores_are_capped(kernels, oracle, kv_dtype, window, monkeypatch):
    monkeypatch.setattr(World, "kv_dtype", kv_dtype)
    ours, theirs, free = (
        CappedWorld(kernels, window=window),
        CappedWorld(oracle, window=window),
        World(kernels, window=window),
    )
    rows, table = ours.rows(300, seed=3) * 2, blocks(24, seed=1)
    for piece in (Piece(table, 0, rows[:250]), Piece(table, 250, rows[:12], parents=TREE)):
        found = ours.step(piece)[0]
        near(found, theirs.step(piece)[0])
        assert np.abs(found.astype(np.float32) - free.step(piece)[0].astype(np.float32)).max() > 0.5


@pytest.mark.parametrize(("heads", "rank", "rope", "nope"), LATENTS)
def test_latents_match_the_oracle(kernels, oracle, heads, rank, rope, nope):
    ours, theirs = (LatentWorld(k, heads=heads, rank=rank, rope=rope, nope=nope) for k in (kernels, oracle))
    rows, table = ours.rows(90, seed=1), blocks(6, seed=1)
    for piece in (Piece(table, 0, rows[:70]), Piece(table, 70, ours.rows(12, seed=2), parents=TREE)):
        near(ours.step(piece)[0], theirs.step(piece)[0], atol=0.03)
    slot = table[4] * BLOCK_SIZE + 3
    assert ours.cache.read(slot).shape == (1, 1, 1, rank + rope)
    near(ours.cache.read(slot), theirs.cache.read(slot), atol=0.01)


def long_rows(world: World) -> Array:
    """Sharp scores over several segments of 256 keys: their maxima differ, so a wrong combination would show."""
    return world.rows(640, seed=21) * (1 if isinstance(world, LatentWorld) else 2)


def ramp(world: World, *, slope: float) -> Array:
    """The reference of the softmax rises many times along the path, or never again after the first keys."""
    rows = world.rows(330, seed=26)
    queries, keys = world.heads * world.d, (world.heads + world.kv_heads) * world.d
    rising = np.linspace(-6.0, 6.0, 330, dtype=np.float32)[:, None]
    rows[:, :queries], rows[:, queries:keys] = 3.0, slope * rising
    rows[:, :keys] += 0.3 * randn(330, keys, seed=28)
    return rows


PATHS = {"long": long_rows, "rising": partial(ramp, slope=1.0), "falling": partial(ramp, slope=-1.0)}


@pytest.mark.parametrize(
    ("kind", "path", "window"),
    [
        *((World, path, None) for path in ("rising", "falling", "long")),
        *((World, "long", window) for window in (1, 5, 64, 270)),
        *((kind, "long", None) for kind in (Int8World, LatentWorld, SinkWorld)),
        (SinkWorld, "rising", 20),
    ],
)
def test_paths_match_the_oracle_in_any_chunks(kernels, oracle, kind, path, window):
    rows, table = PATHS[path](kind(kernels)), blocks(40, seed=22)
    alone = decode(kind(kernels, window=window), rows, table)
    for chunk in (256, 200, 31, 7, 2):
        assert np.array_equal(decode(kind(kernels, window=window), rows, table, chunk=chunk), alone)
    near(alone, decode(kind(oracle, window=window), rows, table, chunk=200), atol=0.04)


# ---- a row's bits ----


@pytest.mark.usefixtures("kv_dtype")
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_chosen_from_a_step_have_the_bits_of_all(threaded, threads):
    """Any of them in any order: gaps, one row twice, a tree's, none; few of them share out segments, many do not."""
    world, rng = World(threaded(threads)), random.Random(31)
    tables = [blocks(24, seed=32)[:20], list(set(range(64)) - set(blocks(24, seed=32)[:20]))[:12]]
    world.step(Piece(tables[0], 0, world.rows(200, seed=33)), Piece(tables[1], 0, world.rows(30, seed=34)))
    tree = [-1, *(rng.randrange(-1, i) for i in range(1, 50))]
    chain, scattered = world.rows(100, seed=35), world.rows(50, seed=36)
    pieces = Piece(tables[0], 200, chain), Piece(tables[1], 30, scattered, parents=tree)
    for chosen in ([], [99], [149, 3, 3, 0], range(150), range(90, 120), sorted(rng.sample(range(150), 60))):
        world.chosen.fill(7)
        every = np.concatenate(world.step(*pieces, logits_indices=chosen))
        assert np.array_equal(world.chosen[: len(chosen)], every[list(chosen)])
        assert (world.chosen[len(chosen) :] == 7).all()


@pytest.mark.parametrize("heads", [6, 30])
def test_other_sequences_and_block_tables_do_not_change_a_row(kernels, kind, heads):
    lengths = [300, 33, 1, 64, 16, 97]
    world = kind(kernels, heads=heads)
    paths = [world.rows(n, seed=n) for n in lengths]
    alone = [decode(kind(kernels, heads=heads), rows, blocks(20, seed=i)) for i, rows in enumerate(paths)]
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


@pytest.mark.parametrize("window", [None, 20, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 64, 100))])
def test_a_scattered_tree_path_is_plain_decode(kernels, kind, window):
    rng = random.Random(7)
    for known, nodes in ((1, 9), (37, 40), (62, 30), (251, 60)):
        world = kind(kernels, window=window)
        table, prefix, guesses = blocks(24, seed=known), world.rows(known, seed=8), world.rows(nodes, seed=9)
        parents = [-1, *(rng.randrange(-1, i) for i in range(1, nodes))]
        if known > 1:
            world.step(Piece(table, 0, prefix[:-1]))
        # The span is the last known token and the guesses; a guess's parent -1 is that token, row 0 of the span.
        span = np.concatenate([prefix[-1:], guesses])
        out = world.step(Piece(table, known - 1, span, parents=[-1, *(p + 1 for p in parents)]))[0]
        for node in rng.sample(range(nodes), min(nodes, 3)):
            path, at = [], node
            while at >= 0:
                path.append(at)
                at = parents[at]
            rows = np.concatenate([prefix, guesses[path[::-1]]])
            alone = decode(kind(kernels, window=window), rows, blocks(24, seed=99), chunk=50)
            assert np.array_equal(out[1 + node], alone[-1]), f"node {node} after {known} known tokens"


@pytest.mark.parametrize("window", [None, 300])
def test_any_number_of_threads_shares_a_long_path(threaded, kind, window):
    """Few rows: the segments of a kv head are cut between up to five threads, whose results are combined in order."""
    rows, other = kind(threaded(1)).rows(760, seed=23), kind(threaded(1)).rows(40, seed=24)
    table, second = list(range(48)), list(range(50, 53))
    outs = []
    for threads in (1, 2, 3, 5):
        world = kind(threaded(threads), window=window)
        outs.append([decode(world, rows[:740], table, chunk=230)])
        world.step(Piece(second, 0, other[:38]))
        pieces = (Piece(table, 740, rows[740:741]), Piece(second, 38, other[38:]))
        alone, together = world.step(pieces[0]), world.step(*pieces)
        assert np.array_equal(alone[0], together[0])
        outs[-1] += [*together, *world.step(Piece(table, 741, rows[741:753], parents=TREE))]
    for got in outs[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(got, outs[0], strict=True))


@pytest.mark.parametrize("base", [0, 5, 300])
def test_rows_see_the_whole_of_their_span(kernels, oracle, threaded, base):
    """And no row of another one, on any number of threads, and whichever tile of rows they are in."""
    table, other = list(range(22)), list(range(30, 34))
    outs = []
    for each in (oracle, kernels, threaded(1), threaded(3)):
        own = World(each, whole_spans=True, max_rows=320, max_blocks=24)
        rows = own.rows(base + 19, seed=base)
        piece, beside = Piece(table, base, rows[base:]), Piece(other, 3, own.rows(7, seed=4))
        if base:
            own.step(Piece(table, 0, rows[:base]))
        own.step(Piece(other, 0, own.rows(3, seed=5)))
        alone, together = own.step(piece), own.step(beside, piece)
        assert np.array_equal(alone[0], together[1])
        outs.append(together)
    for ours, exact in zip(outs[1], outs[0], strict=True):
        near(ours, exact)
    assert all(np.array_equal(a, b) for out in outs[2:] for a, b in zip(out, outs[1], strict=True))


# ---- the cache ----


@pytest.mark.parametrize("layers", [1, 3])
def test_an_accepted_tree_path_is_moved_together(kernels, kind, layers):
    world = kind(kernels, layers=layers)
    table, prefix, guesses = blocks(6, seed=14), world.rows(30, seed=15), world.rows(5, seed=16)
    world.step(Piece(table, 0, prefix[:-1]))
    parents = [-1, 0, 0, 2, 3, 3]  # of the span: the last known token, then guesses 0..4; accepted: 1, 2, 4
    world.step(Piece(table, 29, np.concatenate([prefix[-1:], guesses]), parents=parents))
    slots = [table[p // 16] * 16 + p % 16 for p in range(60)]
    accepted = [1, 2, 4]
    before = [world.cache.read(slots[30 + node]) for node in accepted]
    source = np.array([slots[30 + node] for node in accepted], np.int32)
    world.cache.move(source, np.array(slots[30:33], np.int32))
    for slot, value in zip(slots[30:33], before, strict=True):
        assert np.array_equal(world.cache.read(slot), value) and value.any()
    last = world.rows(1, seed=17)
    path = np.concatenate([prefix, guesses[accepted], last])
    assert np.array_equal(world.step(Piece(table, 33, last))[0], decode(kind(kernels), path, blocks(6, seed=18))[-1:])


def test_int8_rounds_hard_values_as_the_oracle(kernels, oracle):
    """Halves, the extremes, zeros, tiny, huge and not finite; heads have scales of their own."""
    ours, theirs = Int8World(kernels), Int8World(oracle)
    rows, kept = ours.rows(10, seed=1), ours.kv_heads * ours.d
    values = rows[:, -kept:].reshape(10, ours.kv_heads, ours.d)
    values[0], values[1], values[2] = 0, 1e-31, -3.0
    values[3, :, :] = np.arange(ours.d, dtype=np.float32) - ours.d / 2 + 0.5
    values[3, :, 0] = -127
    values[4] *= np.float32(1e30)
    values[5] *= np.float32(1e-28)
    values[6, :, 1:] = 0
    values[7, 0, 3], values[8, 1, 0] = np.nan, -np.inf
    for world in (ours, theirs):
        world.step(Piece([3], 0, rows))
    for place in range(10):
        got, want = (world.cache.read(3 * BLOCK_SIZE + place)[0, 1] for world in (ours, theirs))
        assert got.dtype == np.float32 and np.array_equal(got, want, equal_nan=True), f"row {place}"
    assert np.isnan(ours.cache.read(3 * BLOCK_SIZE + 7)[0, 1]).any(axis=1).tolist() == [True, False]


def resident() -> int:
    """Bytes of the process that are in no file."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("kv_dtype", "width"), [("bf16", 2 * 64), ("q8", 64 + 4)])
def test_a_first_request_takes_little_of_a_large_cache(kernels, kv_dtype, width):
    """Not a huge page for each of its heads."""
    layers, heads = 30, 3
    cache = kernels.cache(layers=layers, num_blocks=8192, kv_heads=heads, head_dim=64, kv_dtype=kv_dtype)
    assert cache.nbytes == layers * 8192 * BLOCK_SIZE * 2 * heads * width
    before = resident()
    cache.move(np.array([0]), np.array([16]))  # writes to a block of every layer and head
    assert resident() - before < layers * heads * 2 * (64 << 10), "of 2 MB each before"


def test_cleared_blocks_are_zero(kernels, kind):
    world = kind(kernels)
    world.step(Piece([5, 6], 0, world.rows(20, seed=19)))
    world.cache.clear(5)
    assert all(world.cache.read(5 * 16 + i).any() == 0 for i in range(16))
    assert world.cache.read(6 * 16).any()


def test_what_does_not_fit_is_refused(kernels):
    with pytest.raises(ModelError, match="head_dim 40"):
        kernels.cache(layers=1, num_blocks=1, kv_heads=1, head_dim=40)
    with pytest.raises(ModelError, match="rank of 40"):
        kernels.latent_cache(layers=1, num_blocks=1, rank=40, rope=16)
    world = LatentWorld(kernels)
    with pytest.raises(ModelError, match="no room for 5 heads of 60"):
        world.tape.per_head(world.q, kernels.pack_heads(zeros(5, 60, 4)), world.out)
    with pytest.raises(CacheIntegrityError, match="outside the cache"):
        world.cache.move(np.array([0]), np.array([64 * 16]))
