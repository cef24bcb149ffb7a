"""Embedding, norms, rotation, choice of rows and the largest logit, each against its formula."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cases import chain_inputs, rand, randn, run_chain

from closeness import assert_close
from wager.errors import ModelError
from wager.kernels.arrays import BFLOAT16, INT32, zeros
from wager.kernels.noise import gumbel
from wager.kernels.tape import NOISE_KEY, GuessedIds

SHAPE = {"max_rows": 64, "max_sequences": 1, "max_blocks": 4}


def chain_tape(kernels):
    tape = kernels.tape(**SHAPE)
    chain_inputs(tape)
    return tape


@pytest.mark.parametrize("n", [16, 1, 40, 100, 576, 577, 1536])
def test_rms_norm(kernels, n):
    """Rounded to bf16, added, and in columns of a wider buffer; of all rows, and of those with logits."""
    x, weight, before = randn(64, n) * 3, rand(n) + 0.5, randn(64, n)
    out, last = zeros(64, n, dtype=BFLOAT16), zeros(64, n, dtype=BFLOAT16)
    added, last_added, wide = before.copy(), before.copy(), randn(64, n + 19)
    wide[:, 3 : 3 + n] = x
    rest = wide.copy()
    tape = chain_tape(kernels)
    tape.rms_norm(x, weight, 1e-5, out)
    tape.rms_norm(x, weight, 1e-5, last, of="logits")
    tape.rms_norm(x, weight, 1e-5, added, add=True)
    tape.rms_norm(x, weight, 1e-5, last_added, add=True, of="logits")
    tape.rms_norm(wide[:, 3 : 3 + n], weight, 1e-5, wide[:, 3 : 3 + n])
    run_chain(tape, 37, 5)
    normed = x / np.sqrt(np.square(x, dtype=np.float64).mean(-1, keepdims=True) + 1e-5) * weight
    assert_close(wide[:37, 3 : 3 + n].astype(np.float64), normed[:37], rtol=1e-5, atol=1e-5)
    assert_close(out[:37].astype(np.float64), normed[:37], rtol=2**-8, atol=1e-6)
    assert np.array_equal(added[:37], before[:37] + wide[:37, 3 : 3 + n])
    assert np.array_equal(added[37:], before[37:]) and not out[37:].any()
    assert np.array_equal(last[:5], out[:5]) and not last[5:].any()
    assert np.array_equal(last_added[:5], added[:5]) and np.array_equal(last_added[5:], before[5:])
    rest[:37, 3 : 3 + n] = wide[:37, 3 : 3 + n]
    assert np.array_equal(wide, rest)
    rounded, whole, rows = out.copy(), added.copy(), x.copy()
    for row in (0, 7, 36):  # alone, in another place
        x[0], added[0] = rows[row], before[row]
        run_chain(tape, 1, 1)
        assert np.array_equal(added[0], whole[row]) and np.array_equal(out[0], rounded[row])


@pytest.mark.parametrize("groups", [1, 3, 7])
def test_rms_norm_of_groups_and_scaled(kernels, groups):
    """Each group of a row as a row of its own."""
    size = 40
    x, weight, before = randn(64, groups * size) * 3, rand(size) + 0.5, randn(64, groups * size)
    added, alone = before.copy(), zeros(64 * groups, size)
    tape = chain_tape(kernels)
    tape.rms_norm(x, weight, 1e-5, added, add=True, scale=0.75, groups=groups)
    run_chain(tape, 37)
    for first in range(0, 64 * groups, 64):
        part = chain_tape(kernels)
        part.rms_norm(x.reshape(-1, size)[first : first + 64], weight, 1e-5, alone[first : first + 64])
        run_chain(part, 64)
    normed = alone.reshape(64, -1)
    assert np.array_equal(added[:37], (before + normed)[:37] * np.float32(0.75))
    assert np.array_equal(added[37:], before[37:])
    with pytest.raises(ModelError, match="groups"):
        tape.rms_norm(zeros(64, 4 * size)[:, : 2 * size], weight, 1e-5, zeros(64, 2 * size), groups=2)


@pytest.mark.parametrize("n", [16, 33, 1000])
def test_narrow_rounds(kernels, n):
    x, out, last = randn(64, n), zeros(64, n, dtype=BFLOAT16), zeros(64, n, dtype=BFLOAT16)
    tape = chain_tape(kernels)
    tape.narrow(x, out)
    tape.narrow(x, last, of="logits")
    squares = zeros(64, n, dtype=BFLOAT16)
    tape.narrow(x, squares, squared_relu=True)
    run_chain(tape, 19, 3)
    assert np.array_equal(out[:19], x[:19].astype(BFLOAT16)) and not out[19:].any()
    assert np.array_equal(last[:3], out[:3]) and not last[3:].any()
    assert np.array_equal(squares[:19], (np.maximum(x[:19], np.float32(0)) ** 2).astype(BFLOAT16))


@pytest.mark.parametrize("n", [1, 16, 33, 5000])
def test_soft_cap(kernels, n):
    x = randn(64, n) * 40
    x[:2, 0] = 1e30, -1e30
    x[2, 0] = float("nan")
    before = x.copy()
    tape = chain_tape(kernels)
    tape.soft_cap(x, 30.0, of="logits")
    run_chain(tape, 19, 7)
    assert np.isnan(x[2, 0])
    x[2, 0] = before[2, 0] = 0
    assert_close(x[:7], 30 * np.tanh(before[:7].astype(np.float64) / 30), rtol=0, atol=1e-5)
    assert np.array_equal(x[7:], before[7:])


@pytest.mark.parametrize("n", [1, 5, 16, 17, 1000, 49152])
def test_argmax_takes_the_lowest_of_equals(kernels, n):
    logits, out = randn(8, n), np.full(8, -7, np.int32)
    top = [0, n - 1, n // 2, n // 3]
    for row, where in enumerate(top):
        logits[row, where:] = np.minimum(logits[row, where:], 4.0)
        logits[row, where] = 50.0
        logits[row, -1] = 50.0
    logits[4] = -1.5
    logits[5] = -rand(n) - 1e30
    logits[6, n // 2] = float("nan")
    logits[7, n - 1] = -float("inf")
    tape = chain_tape(kernels)
    tape.argmax(logits, out)
    run_chain(tape, 8, 8)
    assert out.tolist() == [*top, 0, int(logits[5].argmax()), -1, -1]
    logits[0, 0] = float("inf")
    out.fill(-7)
    run_chain(tape, 8, 1)
    assert out.tolist() == [-1] + [-7] * 7


@pytest.mark.parametrize("n", [1, 16, 33, 1000, 8192])
@pytest.mark.parametrize("mapped", [False, True])
def test_guesses_are_drawn_with_the_noise_of_their_ids(kernels, n, mapped):
    """The token and its probability by the definition, of rows that are columns of a wider buffer, and ahead."""
    rng = np.random.default_rng(n)
    wide = (rng.normal(size=(9, n + 5)) * [[0], [1], [3], [8], [80], [1], [1], [1], [1]]).astype(np.float32)
    logits = wide[:, 5:]
    logits[6, n // 2], logits[7, n - 1] = float("nan"), float("inf")
    ids = rng.permutation(3 * n)[:n].astype(np.int32) if mapped else np.arange(n, dtype=np.int32)
    keys, tokens, probabilities = zeros(9, dtype=NOISE_KEY), zeros(2, 9, dtype=INT32), zeros(2, 9)
    shape = {**SHAPE, "max_rows": 9}
    for temperature in (0.0, 0.3, 1.0, 1000.0):
        for row in range(9):
            keys[row] = (temperature, rng.integers(0, 2**64, dtype=np.uint64), rng.integers(5000), row % 3)
        tape = kernels.tape(**shape)
        chain_inputs(tape)
        known = GuessedIds(ids if mapped else None, count=n)
        for ahead in (0, 2):
            place = ahead // 2
            tape.guess(logits, known, keys, tokens[place], probabilities[place], ahead=ahead, of="rows")
        run_chain(tape, 8)
        for place, row in itertools.product(range(2), range(8)):
            _, seed, position, choice = keys[row].tolist()
            if not np.isfinite(logits[row]).all():
                assert (tokens[place, row], probabilities[place, row]) == (-1, 0)
                continue
            z = logits[row].astype(np.float64)
            if temperature:
                z = z / temperature + gumbel(seed, position + 2 * place, ids, choice=choice)
            best = int(z.argmax())
            exact = np.exp(logits[row].astype(np.float64) - np.logaddexp.reduce(logits[row].astype(np.float64)))
            assert tokens[place, row] == ids[best]
            assert probabilities[place, row] == pytest.approx(exact[best], rel=1e-5)
        assert not tokens[:, 8].any()
        before = tokens.copy(), probabilities.copy()
        run_chain(tape, 3)  # a row's bits do not depend on the others
        assert np.array_equal(before[0], tokens) and np.array_equal(before[1], probabilities)


def test_a_guess_is_the_token_of_the_next_embedding(kernels):
    table, logits = randn(40, 64), randn(8, 40)
    first, second, out = zeros(8, dtype=INT32), zeros(8, 64), zeros(8, 64)
    logits[3, 7] = float("nan")
    tape = kernels.tape(**{**SHAPE, "max_rows": 8})
    chain_inputs(tape)
    tape.embed(kernels.pack(table), second)
    tape.guess(logits, GuessedIds(None, count=40), zeros(8, dtype=NOISE_KEY), first, zeros(8), of="rows")
    mark = tape.mark
    tape.embed(kernels.pack(table), out, tokens=first)
    tape.inputs.tokens[:8] = np.arange(8)
    run_chain(tape, 5)
    rounded = table.astype(BFLOAT16).astype(np.float32)
    expected = [*logits[:3].argmax(1), -1, int(logits[4].argmax())]
    assert first.tolist() == [*expected, 0, 0, 0]
    assert np.array_equal(out[:5], rounded[np.maximum(expected, 0)]) and np.array_equal(second[:5], rounded[:5])
    tape.inputs.query_start_loc[1] = 6
    out.fill(7)
    tape.run(rows=6, sequences=1, logits_rows=0, last=mark)
    assert first[5] == logits[5].argmax() and (out == 7).all()
    tape.run(rows=6, sequences=1, logits_rows=0, first=mark)
    assert np.array_equal(out[5], rounded[first[5]])


@pytest.mark.slow
def test_numbers_too_small_to_be_normal_do_not_depend_on_the_caller(kernels):
    """Flush-to-zero set by another library (here torch) in the calling thread must not reach a row."""
    torch = pytest.importorskip("torch")
    out = zeros(64, 320)  # ten panels: the caller's thread has a share
    tape = chain_tape(kernels)
    packed = kernels.pack(zeros(320, 16), np.full(320, 1e-40, np.float32))
    tape.linear(zeros(64, 16, dtype=BFLOAT16), packed, out)
    torch.set_flush_denormal(True)
    try:
        run_chain(tape, 8)
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(out[:8], np.full((8, 320), 1e-40, np.float32))


@pytest.mark.parametrize("n", [16, 33, 576])
def test_copy_widens_and_keeps_to_its_columns(kernels, n):
    x, narrow, out = randn(64, n), randn(64, n).astype(BFLOAT16), zeros(64, 2 * n + 1)
    tape = chain_tape(kernels)
    tape.copy(x, out[:, :n])
    tape.copy(narrow, out[:, n : 2 * n])
    run_chain(tape, 19)
    assert np.array_equal(out[:19, :n], x[:19]) and np.array_equal(out[:19, n:-1], narrow[:19].astype(np.float32))
    assert not out[19:].any() and not out[:, -1].any()


def test_a_tap_has_room_for_every_row(kernels):
    tape = chain_tape(kernels)
    tap = tape.tap(zeros(64, 48))
    with pytest.raises(ModelError, match="room for 63 rows"):
        tap.copy_to(zeros(63, 48))
    with pytest.raises(ModelError, match=r"must be contiguous float32 rows of 48"):
        tap.copy_to(zeros(64, 47))
