"""A step writes only to the slots that its block tables have for its rows, one thread at a time runs a tape, and a row
reads only the keys and values that it attends to."""

from __future__ import annotations

import math
import random
import re
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from cases import Int8World, LatentWorld, Piece, World, batch_of, chain_inputs, decode, randn, run_chain

from wager.errors import CacheIntegrityError, UsageError
from wager.kernels.arrays import BFLOAT16, Array, zeros
from wager.kernels.base import BLOCK_SIZE

CHAIN = range(-1, 19)
TREE = [-1, *((i - 1) // 2 for i in range(1, 20))]


def two(world: World, parents: Sequence[int]) -> tuple[Piece, Piece]:
    """20 rows of a sequence in blocks 5 and 6 from position 3, and 20 from position 30 in blocks 8, 9, 10 and 11."""
    world.step(Piece([5], 0, world.rows(3, seed=1)), Piece([8, 9], 0, world.rows(30, seed=2)))
    rows = world.rows(40, seed=3)
    return Piece([5, 6], 3, rows[:20], parents), Piece([8, 9, 10, 11], 30, rows[20:], parents)


def run_with(world: World, pieces: Sequence[Piece], name: str, index: int | tuple[int, int], value: int) -> None:
    world.tape.inputs.fill(batch_of(pieces, world.max_blocks))
    getattr(world.tape.inputs, name)[index] = value
    world.tape.run(rows=40, sequences=2, logits_rows=0)


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", [World, LatentWorld])
def test_right_slots_pass_and_wrong_ones_change_nothing(kernels, kind, parents):
    world = kind(kernels)
    pieces = two(world, parents)
    slots = batch_of(pieces, world.max_blocks).slot_mapping.tolist()
    want = world.step(*pieces)
    held = [world.cache.read(slot) for slot in range(12 * BLOCK_SIZE)]
    for row in (0, 1, 12, 13, 19, 20, 21, 22, 39):
        offset = slots[row] % BLOCK_SIZE
        others = [block * BLOCK_SIZE + offset for block in (0, 5, 6, 8, 9, 10, 11, 63)]
        nearby = [slots[row] - 1, slots[row] + 1, slots[row] // BLOCK_SIZE * BLOCK_SIZE + (offset + 5) % BLOCK_SIZE]
        for slot in {*others, *nearby} - {slots[row]}:
            with pytest.raises(CacheIntegrityError, match=f"slot_mapping is {slot} at index {row}, not {slots[row]}"):
                run_with(world, pieces, "slot_mapping", row, slot)
    for entry, block in ((0, 9), (1, 10), (1, 5)):  # a wrong block table is a wrong slot
        with pytest.raises(CacheIntegrityError, match="slot_mapping is"):
            run_with(world, pieces, "block_tables", (0, entry), block)
    for slot, value in enumerate(held):
        assert np.array_equal(world.cache.read(slot), value), "a step that was refused has written"
    assert all(np.array_equal(got, out) for got, out in zip(world.step(*pieces), want, strict=True))


def test_the_sequence_that_would_have_been_overwritten_is_named(kernels):
    world = World(kernels)
    pieces = two(world, CHAIN)
    theirs = 9 * BLOCK_SIZE + 4
    complaint = (
        f"slot_mapping is {theirs} at index 1, not {5 * BLOCK_SIZE + 4} (entry 0 of the block table of sequence 0 is "
        "block 5, offset 4); block 9 belongs to sequence 1"
    )
    with pytest.raises(CacheIntegrityError, match=re.escape(complaint)):
        run_with(world, pieces, "slot_mapping", 1, theirs)
    with pytest.raises(CacheIntegrityError, match=r"not 84 \(.*offset 4\)\.") as caught:
        run_with(world, pieces, "slot_mapping", 1, 40 * BLOCK_SIZE + 4)
    assert "belongs to" not in str(caught.value)


def test_two_sequences_that_share_a_prefix_pass(kernels):
    """Blocks 5 and 6 are read by both and written by none; each writes to a block of its own."""
    world, alone = World(kernels), World(kernels)
    prefix, rows = world.rows(2 * BLOCK_SIZE, seed=4), world.rows(6, seed=5)
    for one in (world, alone):
        one.step(Piece([5, 6], 0, prefix))
    pieces = (Piece([5, 6, 7], 32, rows[:4], [-1, 0, 0, 1]), Piece([5, 6, 8], 32, rows[4:]))
    together = world.step(*pieces)
    for piece, got in zip(pieces, together, strict=True):
        assert np.array_equal(alone.step(piece)[0], got)


def test_a_block_that_two_sequences_write_to_is_refused(kernels):
    world = World(kernels)
    world.step(Piece([5, 6], 0, world.rows(20, seed=6)))
    rows = world.rows(5, seed=7)
    pieces = (Piece([5, 6], 20, rows[:2]), Piece([5, 6], 22, rows[2:]))
    complaint = (
        f"slot_mapping is {6 * BLOCK_SIZE + 6} at index 2, in block 6, which sequence 0 writes to in the same step"
    )
    with pytest.raises(CacheIntegrityError, match=complaint):
        world.step(*pieces)
    world.step(pieces[0])  # one after the other they may
    world.step(pieces[1])
    with pytest.raises(CacheIntegrityError, match="in block 6, which sequence 0 writes to"):
        world.step(Piece([6, 6], 14, rows))


def test_rows_past_the_block_table_are_refused(kernels):
    world = World(kernels)
    end = world.max_blocks * BLOCK_SIZE
    table = [i % 64 for i in range(world.max_blocks + 1)]
    rows, parents = world.rows(3, seed=8), [-1, 0, 0]  # positions below the end, the last row's slot is not
    batch = batch_of([Piece(table, end - 2, rows, parents)], world.max_blocks + 1)
    for name in ("positions", "parents", "slot_mapping", "seq_ids"):
        getattr(world.tape.inputs, name)[:3] = getattr(batch, name)
    world.tape.inputs.query_start_loc[1], world.tape.inputs.num_computed_tokens[0] = 3, end - 2
    world.tape.inputs.block_tables[0] = table[:-1]
    with pytest.raises(CacheIntegrityError, match="at index 2, past the end of its sequence's block table"):
        world.tape.run(rows=3, sequences=1, logits_rows=0)


def test_a_tape_is_run_by_one_thread_at_a_time(kernels):
    """While one thread runs, another one's run and recording are refused; afterwards the tape works as before."""
    tape = kernels.tape(max_rows=256, max_sequences=1, max_blocks=16)
    chain_inputs(tape)
    x, weight = randn(256, 512, seed=0).astype(BFLOAT16), kernels.pack(randn(1024, 512, seed=1))
    out = zeros(256, 1024)
    for _ in range(10):
        tape.linear(x, weight, out)
    run_chain(tape, 256)
    want = out.copy()
    stop, failures = threading.Event(), []

    def run() -> None:
        while not stop.is_set():
            try:
                tape.run(rows=256, sequences=1, logits_rows=0)
            except UsageError as error:
                failures.append(error)

    others = [threading.Thread(target=run) for _ in range(2)]
    for thread in others:
        thread.start()
    refused = 0
    for _ in range(100_000):
        try:
            tape.select(out, out)
        except RuntimeError as error:
            assert "another thread is using the tape" in str(error)
            refused += 1
        if refused and failures:
            break
        stop.wait(0.001)
    stop.set()
    for thread in others:
        thread.join()
    assert refused
    assert "another thread is using the tape" in str(failures[0])
    out.fill(0)
    run_chain(tape, 256)
    assert np.array_equal(out, want)


@pytest.mark.parametrize(
    ("name", "index", "value", "complaint"),
    [
        ("positions", 0, 4, "positions is 4 at index 0, not the base"),
        ("positions", 0, -1, "positions is -1"),
        ("positions", 39, 3, "positions is 3 at index 39, not one past its parent"),
        ("positions", 10, 300, "positions is 300 at index 10, not one past its parent"),
        ("parents", 10, 7, "positions is 13 at index 10, not one past its parent"),
        ("parents", 10, -1, "positions is 13 at index 10, not the base"),
        ("parents", 21, 1, "parents is 1 at index 21, a row of another sequence"),
        ("parents", 1, 2, "parents is 2"),
        ("seq_ids", 25, 0, "at index 25, a row of another sequence"),
        ("seq_ids", 2, 3, "seq_ids is 3"),
        ("query_start_loc", 1, 21, "query_start_loc is 21 at index 1, past a row"),
        ("query_start_loc", 1, 19, "query_start_loc is 19 at index 1, not a row of its sequence"),
        ("query_start_loc", 2, 39, "query_start_loc .* ?39"),
        ("query_start_loc", 2, 41, "query_start_loc .* ?41"),
        ("num_computed_tokens", 1, 4, "positions is 30 at index 20, not the base"),
        ("slot_mapping", 1, 1024, "slot_mapping is 1024"),
        ("block_tables", (0, 0), 64, "block_tables is 64"),
    ],
)
def test_integers_that_cannot_be_are_named_and_leave_the_tape_free(kernels, name, index, value, complaint):
    world = World(kernels)
    pieces = two(world, CHAIN)
    want = world.step(*pieces)
    for _ in range(2):
        with pytest.raises(CacheIntegrityError, match=complaint):
            run_with(world, pieces, name, index, value)
    assert all(np.array_equal(got, out) for got, out in zip(world.step(*pieces), want, strict=True))


# ---- what a row does not attend to never changes it, whatever it holds -----------------------------------------------

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
