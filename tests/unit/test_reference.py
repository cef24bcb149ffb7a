"""The oracle against textbook formulas, and row-invariance: a row does not depend on the others of its batch."""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence

import numpy as np
import pytest
from packing import batch, chain

from closeness import assert_close
from oracle.kernels import ReferenceCache, ReferenceKernels, ReferenceTape, softmax
from wager.errors import CacheIntegrityError
from wager.kernels.arrays import BFLOAT16, FLOAT32, INT32, Array, DType, zeros
from wager.kernels.base import BLOCK_SIZE
from wager.types import PackedBatch

HEADS, KV_HEADS, DIM, HIDDEN, WIDTH, VOCAB, BLOCKS = 4, 2, 16, 40, 56, 97, 24
DTYPES = ("float32", "bfloat16")


class TinyModel:
    """Two layers recorded on a tape by hand, with every op in it; small odd sizes so that alignment can go wrong."""

    def __init__(self, dtype: str, *, window: int | None = None, norms: bool = True) -> None:
        kernels = ReferenceKernels(dtype)
        noise = np.random.default_rng(7)

        def draw(*shape: int, scale: float = 0.3) -> Array:
            return noise.standard_normal(shape, np.float32) * np.float32(scale)

        def room(*shape: int, dtype: DType = FLOAT32) -> Array:
            return np.full((64, *shape), np.nan, dtype)

        self.cache: ReferenceCache = kernels.cache(layers=2, num_blocks=BLOCKS, kv_heads=KV_HEADS, head_dim=DIM)
        self.tape: ReferenceTape = kernels.tape(
            max_rows=64, max_sequences=8, max_blocks=BLOCKS, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM
        )
        angles = np.outer(np.arange(BLOCKS * BLOCK_SIZE), 100.0 ** (-np.arange(DIM // 2) / (DIM // 2)))
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
        x, act, picked = room(HIDDEN), room(HIDDEN, dtype=kernels.act), room(HIDDEN)
        qkv = room((HEADS + 2 * KV_HEADS) * DIM)
        q, mixed = room(HEADS * DIM, dtype=kernels.act), room(HEADS * DIM, dtype=kernels.act)
        wide = room(WIDTH, dtype=kernels.act)
        self.logits, self.best = room(VOCAB), zeros(64, dtype=INT32)
        tape = self.tape
        tape.embed(kernels.pack(draw(VOCAB, HIDDEN, scale=1)), x)
        for layer in range(2):
            tape.rms_norm(x, 1 + draw(HIDDEN), 1e-5, act)
            tape.linear(act, kernels.pack(draw(qkv.shape[1], HIDDEN), draw(qkv.shape[1])), qkv)
            scales = (1 + draw(DIM), 1 + draw(DIM), 1e-6) if norms else None
            tape.rotary(qkv, table, scales, self.cache, layer, q)
            tape.attention(q, self.cache, layer, window=window, out=mixed)
            tape.linear(mixed, kernels.pack(draw(HIDDEN, HEADS * DIM)), x, add=True)
            tape.rms_norm(x, 1 + draw(HIDDEN), 1e-5, act)
            tape.gated(act, kernels.pack_gated(draw(WIDTH, HIDDEN), draw(WIDTH, HIDDEN)), wide)
            tape.linear(wide, kernels.pack(draw(HIDDEN, WIDTH)), x, add=True)
        tape.select(x, picked)
        tape.rms_norm(picked, 1 + draw(HIDDEN), 1e-5, act, of="logits")
        tape.linear(act, kernels.pack(draw(VOCAB, HIDDEN)), self.logits, of="logits")
        tape.argmax(self.logits, self.best)

    def forward(self, packed: PackedBatch) -> Array:
        self.tape.inputs.fill(packed)
        self.tape.run(rows=packed.rows, sequences=packed.num_sequences, logits_rows=len(packed.logits_indices))
        return self.logits[: len(packed.logits_indices)].copy()


TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, VOCAB, 45)]


def one_by_one(model: TinyModel, tokens: Sequence[int], blocks: Sequence[int]) -> Array:
    return np.concatenate([model.forward(batch([chain(i, [t], blocks)], [0])) for i, t in enumerate(tokens)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("cuts", [(0,), (0, 1), (0, 16), (0, 13, 17, 40)])
def test_chunked_prefill_is_bit_equal_to_decoding(dtype: str, window: int | None, cuts: tuple[int, ...]) -> None:
    expected = one_by_one(TinyModel(dtype, window=window), TOKENS, [5, 2, 11])
    model = TinyModel(dtype, window=window)
    blocks, parts = [1, 9, 4], []
    for start, end in zip(cuts, (*cuts[1:], len(TOKENS)), strict=True):
        parts.append(model.forward(batch([chain(start, TOKENS[start:end], blocks)], range(end - start))))
    assert np.array_equal(np.concatenate(parts), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_their_neighbours(dtype: str) -> None:
    rng = np.random.default_rng(11)
    sequences = [[int(t) for t in rng.integers(0, VOCAB, n)] for n in (3, 17, 1, 29, 8)]
    places = [[3 * i, 3 * i + 1] for i in range(5)]
    alone = [one_by_one(TinyModel(dtype), tokens, [7, 3])[-1] for tokens in sequences]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [3, 1]):
        model = TinyModel(dtype)
        for i in order:
            if len(sequences[i]) > 1:
                model.forward(batch([chain(0, sequences[i][:-1], places[i])], [0]))
        spans = [chain(len(sequences[i]) - 1, sequences[i][-1:], places[i]) for i in order]
        together = model.forward(batch(spans, range(len(order))))
        for row, i in enumerate(order):
            assert np.array_equal(together[row], alone[i])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 5])
def test_tree_is_bit_equal_to_its_chains_and_survives_the_move(dtype: str, window: int | None) -> None:
    prompt, blocks = TOKENS[:14], [6, 1, 8]
    guesses, parents = [10, 11, 12, 13, 14, 15], [0, 0, 1, 2, 4, 4]  # row 0 is the last known token
    model = TinyModel(dtype, window=window)
    model.forward(batch([chain(0, prompt[:-1], blocks)], [0]))
    rows = (13, [prompt[-1], *guesses], [-1, *parents], blocks)
    tree = model.forward(batch([rows], range(7)))
    for leaf in (3, 5, 6):
        nodes, node = [], leaf
        while node > 0:
            nodes.append(node)
            node = parents[node - 1]
        nodes.reverse()
        path = [guesses[n - 1] for n in nodes]
        expected = one_by_one(TinyModel(dtype, window=window), prompt + path, [0, 1, 2])[-len(path) :]
        assert np.array_equal(tree[nodes], expected)
    accepted = [2, 4, 6]
    slots = [blocks[(13 + i) // BLOCK_SIZE] * BLOCK_SIZE + (13 + i) % BLOCK_SIZE for i in range(7)]
    model.cache.move(np.array([slots[n] for n in accepted]), np.array(slots[1:4]))
    after = model.forward(batch([chain(17, [50], blocks)], [0]))
    path = prompt + [guesses[n - 1] for n in accepted]
    expected = one_by_one(TinyModel(dtype, window=window), [*path, 50], [0, 1, 2])
    assert np.array_equal(after[0], expected[-1])


def test_attention_matches_the_formula() -> None:
    kernels = ReferenceKernels("float32")
    cache = kernels.cache(layers=1, num_blocks=BLOCKS, kv_heads=KV_HEADS, head_dim=DIM)
    tape = kernels.tape(max_rows=64, max_sequences=1, max_blocks=BLOCKS, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM)
    qkv = np.random.default_rng(1).standard_normal((40, (HEADS + 2 * KV_HEADS) * DIM), np.float32)
    still = zeros(BLOCKS * BLOCK_SIZE, DIM)
    still[:, : DIM // 2] = 1
    q, out = zeros(64, HEADS * DIM), zeros(64, HEADS * DIM)
    tape.rotary(qkv, still, None, cache, 0, q)
    tape.attention(q, cache, 0, window=12, out=out)
    tape.inputs.fill(batch([chain(0, [0] * 40, [4, 2, 3])], [0]))
    tape.run(rows=40, sequences=1, logits_rows=0)
    heads, keys, values = np.split(qkv.reshape(40, -1, DIM).astype(np.float64), [HEADS, HEADS + KV_HEADS], axis=1)
    for head in range(HEADS):
        scores = heads[:, head] @ keys[:, head // 2].T / math.sqrt(DIM)
        hidden = np.triu(np.ones((40, 40), bool), 1) | np.tril(np.ones((40, 40), bool), -12)
        expected = softmax(np.where(hidden, -np.inf, scores)) @ values[:, head // 2]
        assert_close(out[:40].reshape(40, HEADS, DIM)[:, head], expected, atol=1e-5, rtol=0)


def test_rotation_turns_pairs_half_a_head_apart() -> None:
    kernels = ReferenceKernels("float32")
    cache = kernels.cache(layers=1, num_blocks=1, kv_heads=1, head_dim=4)
    tape = kernels.tape(max_rows=1, max_sequences=1, max_blocks=BLOCKS, heads=1, kv_heads=1, head_dim=4)
    angles = np.array([[0.3, 0.5]], np.float32)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    qkv = np.arange(1, 13, dtype=np.float32)[None]
    q = zeros(1, 4)
    tape.rotary(qkv, table, None, cache, 0, q)
    tape.inputs.fill(batch([chain(0, [0], [0])], [0]))
    tape.run(rows=1, sequences=1, logits_rows=0)
    turned = [complex(1, 3) * cmath.exp(0.3j), complex(2, 4) * cmath.exp(0.5j)]
    expected = np.array([turned[0].real, turned[1].real, turned[0].imag, turned[1].imag])
    assert_close(q[0], expected, rtol=1.3e-6, atol=1e-5)
    assert cache.read(0)[0, 1, 0].tolist() == [9, 10, 11, 12]


def test_bfloat16_rounds_what_it_stores() -> None:
    kernels = ReferenceKernels("bfloat16")
    value = 1 + 2**-9
    weight = kernels.pack(np.array([[value]], np.float32))
    assert weight.matrix.item() == 1
    assert ReferenceKernels("float32").pack(np.array([[value]], np.float32)).matrix.item() == value
    assert kernels.cache(layers=1, num_blocks=1, kv_heads=1, head_dim=2).keys.dtype == BFLOAT16


def test_argmax_takes_the_lowest_id_and_reports_numbers_that_are_none() -> None:
    kernels = ReferenceKernels("float32")
    tape = kernels.tape(max_rows=4, max_sequences=1, max_blocks=1, heads=1, kv_heads=1, head_dim=2)
    logits = np.array([[0.0, 5, 5, 1], [0, np.nan, 1, 0], [np.inf, 0, 0, 0], [-4, -3, -2, -2]], np.float32)
    best = zeros(4, dtype=INT32)
    tape.argmax(logits, best)
    tape.run(rows=0, sequences=0, logits_rows=4)
    assert best.tolist() == [1, -1, -1, 2]


def test_clear_zeroes_one_block_and_no_other() -> None:
    cache = ReferenceKernels("float32").cache(layers=2, num_blocks=3, kv_heads=1, head_dim=2)
    cache.keys[:] = float("nan")
    cache.values[:] = 1
    cache.clear(1)
    assert not cache.read(BLOCK_SIZE).any()
    assert (cache.read(2 * BLOCK_SIZE)[:, 1] == 1).all()
    assert np.isnan(cache.read(BLOCK_SIZE - 1)[:, 0]).all()


def test_a_path_that_contradicts_its_position_is_refused() -> None:
    model = TinyModel("float32")
    packed = batch([chain(0, TOKENS[:3], [0])], [0])
    packed.positions[2] = 5
    with pytest.raises(CacheIntegrityError, match="position 5"):
        model.forward(packed)
