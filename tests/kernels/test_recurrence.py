"""Recurrent layers: the bits of a row do not depend on how it came to be computed, and agree with the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from cases import randn

from closeness import assert_close
from oracle.kernels import ReferenceKernels
from packing import batch
from wager.arch.layers import DeltaNet
from wager.errors import CacheIntegrityError
from wager.kernels.arrays import BFLOAT16, Array, zeros
from wager.kernels.cpu import Kernels
from wager.kernels.tape import Gates, Heads

LAYERS = [DeltaNet(2, 4, 16, 32, 4), DeltaNet(2, 6, 32, 16, 3, tiled=True)]
MAX_ROWS = 24
NOWHERE = (-1, -1, -1, -1)
ROWS = randn(40, 400, seed=3)


@dataclass
class Piece:
    """Rows of a sequence in a pass: positions base to base + known of the text, then guesses; and what happens to its
    states, as in types.PackedBatch."""

    base: int
    known: int
    guesses: Sequence[Array] = ()
    parents: Sequence[int] = ()
    state: int = 0
    source: int | None = None
    replays: Sequence[int] = ()
    saves: Sequence[int] = NOWHERE


class Recurrence:
    """The ops of one recurrent layer over rows that are given."""

    def __init__(self, kernels: Any, layer: DeltaNet) -> None:
        shape, self.rows = layer.state, ROWS[:, : layer.state.width]
        self.states = kernels.states(shape, layers=2, slots=6, max_rows=MAX_ROWS)
        self.tape = kernels.tape(max_rows=MAX_ROWS, max_sequences=4, max_blocks=4, heads=1, kv_heads=1, head_dim=16)
        self.x, convolved = zeros(2 * MAX_ROWS, shape.width), zeros(2 * MAX_ROWS, shape.width)
        self.out = zeros(MAX_ROWS, layer.value_width)
        weight, keys = randn(shape.taps, shape.channels, seed=1), layer.key_heads * layer.key_dim
        gates = Gates(-np.exp(randn(shape.heads, seed=2) - 1), randn(shape.heads, seed=4))
        self.tape.convolve(self.x, weight, randn(shape.channels, seed=5), gates, self.states, 1, convolved)
        self.tape.recur(convolved, Heads(layer.key_heads, 0, keys, 2 * keys, layer.tiled), self.states, 1, self.out)

    def run(self, *pieces: Piece) -> list[Array]:
        """The outputs of each piece's rows."""
        spans, uses, rows, cuts = [], [], [], [0]
        for index, piece in enumerate(pieces):
            parents = [*range(-1, piece.known - 1), *(piece.known + parent for parent in piece.parents)]
            spans.append((piece.base, [0] * len(parents), parents, [4 * index + i for i in range(4)]))
            source = piece.source if piece.source is not None else piece.state if piece.base else -1
            uses.append((piece.state, source, piece.known, len(piece.replays), *piece.saves))
            rows += [*self.rows[piece.base : piece.base + piece.known], *piece.guesses]
            cuts.append(len(rows))
        replays = [row for piece in pieces for row in piece.replays]
        packed = replace(batch(spans, []), state_uses=np.array(uses, np.int32), replays=np.array(replays, np.int32))
        self.tape.inputs.fill(packed)
        self.x[MAX_ROWS : MAX_ROWS + len(rows)] = rows
        self.tape.run(rows=len(rows), sequences=len(pieces), logits_rows=0)
        return [self.out[first:end].copy() for first, end in zip(cuts, cuts[1:], strict=False)]

    def alone(self, count: int) -> Array:
        return np.concatenate([self.run(Piece(position, 1))[0] for position in range(count)])


@pytest.fixture(params=range(len(LAYERS)))
def layer(request: pytest.FixtureRequest) -> DeltaNet:
    return LAYERS[request.param]


def test_outputs_are_the_oracles(kernels: Kernels, oracle: ReferenceKernels, layer: DeltaNet) -> None:
    ours, exact = Recurrence(kernels, layer), Recurrence(oracle, layer)
    tree = Piece(20, 2, ROWS[30:33, : layer.state.width], [-1, 0, -1])
    for pieces in ([Piece(0, 20)], [tree, Piece(0, 1, state=1)]):
        for near, far in zip(ours.run(*pieces), exact.run(*pieces), strict=True):
            assert_close(near, far, atol=2e-5, rtol=2e-5)


def test_any_chunks_and_other_sequences_give_the_same_bits(kernels: Kernels, layer: DeltaNet) -> None:
    expected = Recurrence(kernels, layer).alone(24)
    one = Recurrence(kernels, layer)
    for cuts in ([0, 24], [0, 1, 3, 17, 24], [0, 2, 4, 24]):
        got = [one.run(Piece(a, b - a))[0] for a, b in zip(cuts, cuts[1:], strict=False)]
        assert np.array_equal(np.concatenate(got), expected)
    several = Recurrence(kernels, layer)
    several.run(*(Piece(0, 3 + i, state=i) for i in range(4)))
    for i, got in enumerate(several.run(*(Piece(3 + i, 2, state=i) for i in range(4)))):
        assert np.array_equal(got, expected[3 + i : 5 + i])


def test_guesses_are_as_if_known_and_change_nothing(kernels: Kernels, layer: DeltaNet) -> None:
    """A tree whose accepted path is not contiguous, replayed by the next pass, twice in a row."""
    width, one = layer.state.width, Recurrence(kernels, layer)
    expected = one.alone(24)
    text, wrong = ROWS[:, :width], ROWS[30:, :width]
    one.run(Piece(0, 9))
    guesses = [wrong[0], text[10], wrong[1], text[11], wrong[2], text[12]]
    [tree] = one.run(Piece(9, 1, guesses, [-1, -1, 1, 1, 0, 3]))
    assert np.array_equal(tree[[0, 2, 4, 6]], expected[9:13])
    # nodes 1 and 3 are accepted: rows 2 and 4 of the last pass
    before = Piece(0, 5, state=1)  # another sequence first, so that rows move
    _, chain = one.run(before, Piece(12, 1, [text[13], text[14], wrong[3]], [-1, 0, 1], replays=(2, 4)))
    assert np.array_equal(chain[:3], expected[12:15])
    [last] = one.run(Piece(15, 9, replays=(6, 7)))
    assert np.array_equal(last, expected[15:24])


def test_states_that_are_copied_are_those_behind_their_position(kernels: Kernels, layer: DeltaNet) -> None:
    """In the middle of a chunk, at a replayed guess, and two at once; several sequences read a copy."""
    width, one = layer.state.width, Recurrence(kernels, layer)
    expected = one.alone(24)
    one.run(Piece(0, 12, saves=(5, 11, 4, 5)))
    for copy, position in ((4, 5), (5, 11)):
        several = one.run(*(Piece(position, 6, state=i + 1, source=copy) for i in range(2)))
        assert all(np.array_equal(got, expected[position : position + 6]) for got in several)
    one.run(Piece(12, 1, ROWS[13:15, :width], [-1, 0]))
    one.run(Piece(15, 1, replays=(1, 2), saves=(14, -1, 3, -1)))
    assert np.array_equal(one.run(Piece(14, 3, state=2, source=3))[0], expected[14:17])


def test_threads_share_heads_and_change_no_bit(threaded: Callable[[int], Kernels], layer: DeltaNet) -> None:
    one, two = (Recurrence(threaded(threads), layer) for threads in (1, 2))
    for pieces in ([Piece(0, 20)], [Piece(20, 2, ROWS[30:33, : layer.state.width], [-1, 0, 0])]):
        assert np.array_equal(one.run(*pieces)[0], two.run(*pieces)[0])


@pytest.mark.parametrize(
    ("pieces", "named"),
    [
        ([Piece(0, 1), Piece(0, 1)], "written to twice"),
        ([Piece(0, 1), Piece(4, 1, state=1, source=0)], "written to in the same step"),
        ([Piece(0, 1, state=6)], "outside"),
        ([Piece(4, 1, source=-1)], "none where a text goes on"),
        ([Piece(4, 1, replays=(24,))], "replays"),
        ([Piece(4, 1, saves=(5, -1, 0, -1))], "saved state"),
        ([Piece(4, 2, ROWS[:1], [-2])], "a known row but the last"),
    ],
)
def test_slots_that_contradict_each_other_are_refused(pieces: list[Piece], named: str) -> None:
    one = Recurrence(Kernels(), LAYERS[0])
    pieces = [replace(piece, guesses=[row[: one.rows.shape[1]] for row in piece.guesses]) for piece in pieces]
    with pytest.raises(CacheIntegrityError, match=named):
        one.run(*pieces)


@pytest.mark.parametrize(("heads", "norm"), [(3, 32), (1, 96), (3, 96), (3, 0)])
def test_gates_of_outputs_are_the_oracles(kernels: Kernels, oracle: ReferenceKernels, heads: int, norm: int) -> None:
    x, gate, weight = randn(6, 96), randn(6, 96), randn(norm) if norm else None
    found = []
    for each in (kernels, oracle):
        tape = each.tape(max_rows=6, max_sequences=1, max_blocks=1, heads=1, kv_heads=1, head_dim=16)
        values, gates, product = zeros(6, 96), zeros(6, 96), zeros(6, 64)
        normed = zeros(6, 96, dtype=BFLOAT16)
        values[:], gates[:] = x, gate
        mixed = zeros(6, 96, dtype=BFLOAT16)
        mixed[:] = x
        tape.gated_norm(values, gates, weight, 1e-6, normed, heads=heads, gate_first=heads == 1)
        wide = zeros(6, 100, dtype=BFLOAT16)
        tape.add_silu(mixed, gates, wide[:, 4:])
        tape.sigmoid_gate(mixed, gates)
        tape.multiply(values[:, :64], gates[:, 32:], product)
        tape.inputs.fill(batch([(0, [0] * 6, range(-1, 5), [0])], []))
        tape.run(rows=6, sequences=1, logits_rows=0)
        found.append((normed.astype(np.float32), mixed.astype(np.float32), product, wide.astype(np.float32)))
    for ours, exact in zip(*found, strict=True):
        assert_close(ours, exact, atol=0.02, rtol=0.01)
