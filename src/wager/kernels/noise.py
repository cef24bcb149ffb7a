"""The noise field: one fixed Gumbel number per (seed, position, choice, token id), computed and never drawn.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") in numpy. The bit layout below is part
of the output contract: a change to it raises ARITHMETIC_VERSION (kernels/cpu.py), because every sampled text changes
with it.

    key     = (seed low 32 bits, seed high 32 bits)
    counter = (token id // 2, position, choice, domain)      a scalar draw has its index in place of token id // 2
    words   = w0..w3; an even id uses (w0, w1), an odd id (w2, w3); a scalar draw uses (w0, w1)
    k       = (low | high << 32) >> 12                       52 bits
    u       = (k + 1/2) / 2^52                               exact in double, strictly inside (0, 1)
    g       = -log(-log(1 - u))                              -3.6 .. 36.8; 1 - u is exact

Private draws of a drafter (domain DRAFT) carry `depth`, the guess's distance from the last known token, as
choice + depth * 2^8: a position drafted again in a later round then gets fresh noise. Rules that judge a path as a
unit (block) need that; the shared field must not do it. `Kernels.sample` computes the same numbers natively.
"""

from __future__ import annotations

import secrets
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from wager.elementary import log
from wager.errors import UsageError
from wager.types import GREEDY_TEMPERATURE

FIELD, ACCEPT, RESIDUAL, DRAFT = 0, 1, 2, 3
"""Domains: the token field, acceptance draws, residual draws, a drafter's private draws. They share no number."""

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_BATCH = 4096  # counters computed together: what fits a core's second-level cache

_M = np.array([[_MULTIPLIERS[0]], [_MULTIPLIERS[1]]], np.uint64)
_SHIFT, _MASK = np.uint64(32), np.uint64(_LOW)


def fresh_seed() -> int:
    """64 bits from the operating system, for a request without a seed."""
    return secrets.randbits(64)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of one counter, in plain integers: the definition, and the fastest way to a single number."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        even, odd = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (odd >> 32) ^ c1 ^ k0, odd & _LOW, (even >> 32) ^ c3 ^ k1, even & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


@lru_cache(maxsize=256)
def _round_keys(seed: int) -> NDArray[np.uint64]:
    """[rounds, 2, 1]: the key of each round, seed low half first."""
    halves = (seed & _LOW, seed >> 32)
    keys = [[[(half + r * step) & _LOW] for half, step in zip(halves, _WEYL, strict=True)] for r in range(_ROUNDS)]
    return np.array(keys, np.uint64)


def philox_words(blocks: NDArray[np.uint64], counter: tuple[int, int, int], seed: int) -> NDArray[np.uint64]:
    """Philox4x32-10 of counters (blocks[i], *counter) -> [4, n], one 32-bit word per entry."""
    keys = _round_keys(seed)
    x = np.empty((2, len(blocks)), np.uint64)  # c0, c2
    y = np.empty_like(x)  # c1, c3
    x[0], x[1], y[0], y[1] = blocks, counter[1], counter[0], counter[2]
    high = np.empty_like(x)
    for key in keys:
        np.multiply(x, _M, out=x)
        np.right_shift(x, _SHIFT, out=high)
        np.bitwise_and(x, _MASK, out=x)
        np.bitwise_xor(y, key, out=y)
        np.bitwise_xor(y, high[::-1], out=y)
        x, y = y, x[::-1]
    return np.stack((x[0], y[0], x[1], y[1]))


def _counter(position: int, choice: int, domain: int, depth: int) -> tuple[int, int, int]:
    return position & _LOW, (choice + (depth << 8)) & _LOW, domain


def _to_gumbel(low: NDArray[np.uint64], high: NDArray[np.uint64]) -> NDArray[np.float64]:
    k = ((high << _SHIFT) | low) >> np.uint64(12)
    u = (k.astype(np.float64) + 0.5) * 2.0**-52
    return -log(-log(1.0 - u))


def gumbel(
    seed: int,
    position: int,
    ids: NDArray[np.integer] | None = None,
    *,
    choice: int = 0,
    vocab: int | None = None,
    domain: int = FIELD,
    depth: int = 0,
) -> NDArray[np.float64]:
    """Standard Gumbel noise of token `ids` at absolute `position`, float64 [len(ids)].

    Without `ids`: all of range(vocab); UsageError without either. `depth` is for private draws alone (see above).
    """
    counter = _counter(position, choice, domain, depth)
    if ids is None:
        if vocab is None:
            raise UsageError("gumbel got neither ids nor vocab.", "Name the ids, or how many there are.")
        return _all_ids(seed, counter, vocab)
    ids = np.asarray(ids, np.int64)
    words = philox_words((ids >> 1).astype(np.uint64), counter, seed)
    odd = (ids & 1).astype(bool)
    return _to_gumbel(np.where(odd, words[2], words[0]), np.where(odd, words[3], words[1]))


def _all_ids(seed: int, counter: tuple[int, int, int], vocab: int) -> NDArray[np.float64]:
    row = np.empty(2 * ((vocab + 1) // 2))
    for start in range(0, len(row) // 2, _BATCH):
        stop = min(start + _BATCH, len(row) // 2)
        words = philox_words(np.arange(start, stop, dtype=np.uint64), counter, seed)
        row[2 * start : 2 * stop] = _to_gumbel(words[0::2].T.ravel(), words[1::2].T.ravel())
    return row[:vocab]


def uniform(seed: int, position: int, *, choice: int = 0, domain: int = ACCEPT, index: int = 0) -> float:
    """One number strictly inside (0, 1): the `index`-th scalar draw of a domain at a position."""
    low, high, _, _ = philox((index & _LOW, *_counter(position, choice, domain, 0)), (seed & _LOW, seed >> 32))
    return float((((high << 32) | low) >> 12) + 0.5) * 2.0**-52


def argmax_gumbel(logits: NDArray[np.float32], temperature: float, seed: int, position: int, choice: int = 0) -> int:
    """argmax(z / T + g) over the full vocabulary in float64, ties to the lowest id; greedy at T <= 1e-4.

    The oracle of `Kernels.sample`. `logits` float32 [V]; returns -1 if any of them is not finite.
    """
    if not np.isfinite(logits).all():
        return -1
    if temperature <= GREEDY_TEMPERATURE:
        return int(logits.argmax())
    scores = logits.astype(np.float64)
    scores /= temperature
    scores += gumbel(seed, position, choice=choice, vocab=len(logits))
    return int(scores.argmax())
