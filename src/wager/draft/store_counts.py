"""Counts what followed each context in the texts of a store, and chooses what the store keeps.

Probabilities are interpolated with those after the context without its first token (Witten and Bell), so that one that
was seen once is not certain: p(w | c) = (count(c w) + a T(c) p(w | c')) / (count(c) + a T(c)), where T(c) is the number
of different tokens that followed c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wager.errors import UsageError

MOST_CONTINUATIONS = 4
"""Continuations that are kept of one context."""

_SMOOTHING = 4.0  # a; probabilities are then about as often right on held-out answers as they say
_LEAST = 0.04  # probability of a continuation that is kept beside the likeliest
_SIMILAR = 0.05  # difference of probabilities that is not worth a slot of its own
_SECOND = 0.1  # usefulness of a continuation beside the likeliest: only trees verify both

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ContinuationTable:
    """`contexts` [n, longest] int64, the last token last, -1 before shorter ones; `tokens` [n] that followed them, with
    their `probabilities` [n] in 255ths, uint8. `counted` is the number of tokens in the texts."""

    contexts: Ints
    tokens: Ints
    probabilities: NDArray[np.uint8]
    counted: int


@dataclass(frozen=True, slots=True)
class _Level:
    """What followed the contexts of one length. Of each context: `last`, a position that it stands before, `seen`, how
    often, and what the lookup finds once useless contexts are left out: `best` and `best_p`. Of each pair of a context
    and a follower: its context `of`, `token` and probability `p`. `context_at` and `pair_at` of every position, -1
    where the text is shorter."""

    last: Ints
    seen: Ints
    best: Ints
    best_p: Floats
    of: Ints
    token: Ints
    p: Floats
    context_at: Ints
    pair_at: Ints


def count_continuations(
    answers: Sequence[tuple[Sequence[int], Sequence[int]]], *, vocab: int, longest: int, most: int | None = None
) -> ContinuationTable:
    """The continuations worth keeping, at most `most` of them (None: any number), of contexts of 1 to `longest` tokens.

    `answers` are prompts and answers in token ids; see build_store for them and the errors.
    """
    before, followers = _positions(answers, vocab=vocab, longest=longest)
    level = _no_context(followers)
    kept: list[tuple[Ints, Ints, Floats, Floats]] = []
    for size in range(1, longest + 1):
        lower, level = level, _longer(level, before[:, longest - size], followers, vocab=vocab)
        pairs, usefulness, changed = _useful(level, lower)
        contexts = np.where(np.arange(longest) >= longest - size, before[level.last[level.of[pairs]]], -1)
        kept.append((contexts, level.token[pairs], level.p[pairs], usefulness))
        level = changed
    contexts, tokens, p, usefulness = (np.concatenate(parts) for parts in zip(*kept, strict=True))
    if most is not None and len(tokens) > most:
        chosen = np.sort(np.argsort(-usefulness, kind="stable")[: max(1, most)])
        contexts, tokens, p = contexts[chosen], tokens[chosen], p[chosen]
    probabilities = np.clip(np.rint(p * 255), 1, 255).astype(np.uint8)
    return ContinuationTable(contexts, tokens, probabilities, len(followers))


def _positions(
    answers: Sequence[tuple[Sequence[int], Sequence[int]]], *, vocab: int, longest: int
) -> tuple[Ints, Ints]:
    """Of every token of every answer the `longest` tokens before it, -1 before the text's beginning, and itself."""
    texts, firsts, at = [np.empty(0, np.int64)], [], 0
    gap = np.full(longest, -1)
    for number, (prompt, answer) in enumerate(answers):
        text = np.array([*prompt[-longest:], *answer], np.int64)
        if len(text) and (text.min() < 0 or text.max() >= vocab):
            raise UsageError(
                f"Answer {number} has a token id outside 0 to {vocab - 1}.", "Give the ids of the target's tokenizer."
            )
        texts += [gap, text]
        firsts.append(np.arange(at + longest + len(text) - len(answer), at + longest + len(text)))
        at += longest + len(text)
    positions = np.concatenate(firsts) if firsts else np.empty(0, np.int64)
    if not len(positions):
        raise UsageError("There are no answers to build a store from.", "Generate some first.")
    flat = np.concatenate(texts)
    return flat[positions[:, None] + np.arange(-longest, 0)], flat[positions]


def _no_context(followers: Ints) -> _Level:
    """The level of the empty context."""
    token, pair_at, counts = np.unique(followers, return_inverse=True, return_counts=True)
    p, zeros, nothing = counts / len(followers), np.zeros(len(followers), np.int64), np.zeros(1, np.int64)
    return _Level(
        nothing, nothing + len(followers), nothing - 1, np.zeros(1), zeros[: len(token)], token, p, zeros, pair_at
    )


def _longer(lower: _Level, first: Ints, followers: Ints, *, vocab: int) -> _Level:
    """The level of contexts with one more token, `first`, before those of `lower`."""
    there = np.flatnonzero((first >= 0) & (lower.context_at >= 0))
    _, last, at = np.unique(lower.context_at[there] * vocab + first[there], return_index=True, return_inverse=True)
    keys, example, pair, counts = np.unique(
        at * vocab + followers[there], return_index=True, return_inverse=True, return_counts=True
    )
    of, token = keys // vocab, keys % vocab
    seen, different = np.bincount(at), np.bincount(of)
    pull = _SMOOTHING * different[of]
    p = (counts + pull * lower.p[lower.pair_at[there[example]]]) / (seen[of] + pull)
    context_at, pair_at = np.full(len(first), -1), np.full(len(first), -1)
    context_at[there], pair_at[there] = at, pair
    order = np.lexsort((-p, of))
    likeliest = order[np.searchsorted(of[order], np.arange(len(seen)))]
    return _Level(there[last], seen, token[likeliest], p[likeliest], of, token, p, context_at, pair_at)


def _useful(level: _Level, lower: _Level) -> tuple[Ints, Floats, _Level]:
    """The pairs worth keeping, how useful each is, and the level with what the lookup then finds."""
    below = lower.context_at[level.last]
    same = level.best == lower.best[below]
    gain = np.where(same, np.abs(level.best_p - lower.best_p[below]), level.best_p)
    keep = ~same | (gain > _SIMILAR)
    order = np.lexsort((level.token, -level.p, level.of))
    starts = np.searchsorted(level.of[order], np.arange(len(level.seen)))
    rank = np.arange(len(order)) - starts[level.of[order]]
    first = rank == 0
    wanted = keep[level.of[order]] & (first | ((rank < MOST_CONTINUATIONS) & (level.p[order] >= _LEAST)))
    pairs = order[wanted]
    of = level.of[pairs]
    usefulness = level.seen[of] * np.where(first[wanted], gain[of], _SECOND * level.p[pairs])
    best = np.where(keep, level.best, lower.best[below])
    best_p = np.where(keep, level.best_p, lower.best_p[below])
    changed = _Level(
        level.last, level.seen, best, best_p, level.of, level.token, level.p, level.context_at, level.pair_at
    )
    return pairs, usefulness, changed
