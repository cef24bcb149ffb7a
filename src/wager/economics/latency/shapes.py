"""Which steps a calibration times: a grid to fit, and random shapes to test the fit with.

A shape gives each sequence's cached positions and draft tokens. Sequences continue texts whose keys and values
are cached: the first text is the longest, the next are shorter, so that few long and many short ones fit in one cache.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

CONTEXT_STEP = 16
"""Contexts are multiples of this many positions (the cache's block size), so that whole blocks are reused."""

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
REQUESTS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (32, 256, 1024, 4096)
MAX_DEPTH = 16
"""Most draft tokens of a sequence, but for the first column of the grid: one short sequence with all rows."""

_TRIES = 20


@dataclass(frozen=True, slots=True)
class StepShape:
    """One kind of step: for each sequence the positions cached before it, and its number of draft tokens."""

    contexts: tuple[int, ...]
    depths: tuple[int, ...]

    @property
    def rows(self) -> int:
        """All rows of the pass: a known token of each sequence, and the draft tokens."""
        return len(self.depths) + sum(self.depths)


@dataclass(frozen=True, slots=True)
class ShapeLimits:
    """What an engine has room for: rows of a pass, sequences in it, positions of one sequence, and positions of all
    texts together."""

    rows: int
    sequences: int
    context: int
    tokens: int

    def text_lengths(self) -> list[int]:
        """Lengths of the sequences' texts, the longest first: text i has `longest / (i + 1)`, for the largest `longest`
        that fits. So n sequences can have `longest / n` each, for every n. Fewer texts than sequences where there is
        no room.
        """
        low, high = 0, self.tokens // CONTEXT_STEP + 1  # in blocks
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if sum(self._lengths(middle)) <= self.tokens else (low, middle)
        return self._lengths(low)

    def _lengths(self, blocks: int) -> list[int]:
        longest = self.context // CONTEXT_STEP
        return [CONTEXT_STEP * min(longest, blocks // (i + 1)) for i in range(min(self.sequences, blocks))]


def uniform_shape(rows: int, requests: int, context: int) -> StepShape:
    """`rows` spread evenly over `requests` sequences of one context."""
    share, more = divmod(rows, requests)
    return StepShape((context,) * requests, tuple(share - 1 + (i < more) for i in range(requests)))


def grid_shapes(limits: ShapeLimits) -> list[StepShape]:
    """The shapes to fit: rows x requests x context, within the limits."""
    texts = limits.text_lengths()
    shapes = []
    for requests in (n for n in REQUESTS if n <= len(texts)):
        longest = texts[requests - 1]
        contexts = [*(c for c in CONTEXTS if c < 0.7 * longest), longest]
        for context in contexts:
            single_short = requests == 1 and context == contexts[0]
            most = limits.rows if single_short else min(limits.rows, requests * (MAX_DEPTH + 1))
            shapes += [uniform_shape(rows, requests, context) for rows in ROWS if requests <= rows <= most]
    return shapes


def quick_shapes(limits: ShapeLimits) -> list[StepShape]:
    """A dozen shapes, the most informative first, for when there is no time for a grid: one sequence, all
    sequences, a few long ones; the cost of many sequences does not follow from that of few."""
    texts = limits.text_lengths()
    most, few = len(texts), min(4, len(texts))
    sizes = [(rows, 1, CONTEXT_STEP) for rows in (1, 16, 8, 4, 32, 12, 24)]
    sizes += [(rows, most, CONTEXT_STEP) for rows in (most, 2 * most, most + most // 2)]
    sizes += [(rows, few, texts[few - 1]) for rows in (4, 16)]
    shapes = [uniform_shape(*size) for size in sizes if size[1] <= size[0] <= limits.rows]
    return list(dict.fromkeys(shapes))


def random_shapes(limits: ShapeLimits, count: int, *, seed: int) -> list[StepShape]:
    """Random shapes, none of them in the grid, as an engine meets them: any number of sequences (few as often as many),
    contexts equal or not, draft tokens for none, the same number for all, or for each its own. Fewer than `count` where
    the limits leave no others."""
    rng = random.Random(seed)
    texts, fitted = limits.text_lengths(), set(grid_shapes(limits))
    shapes: list[StepShape] = []
    for _ in range(_TRIES * count):
        requests = round(math.exp(rng.uniform(0, math.log(len(texts) + 0.49))))
        shape = StepShape(_contexts(rng, texts[:requests]), _depths(rng, requests))
        if shape.rows <= min(limits.rows, ROWS[-1]) and shape not in fitted:
            shapes.append(shape)
    return shapes[:count]


def _contexts(rng: random.Random, texts: Sequence[int]) -> tuple[int, ...]:
    if rng.random() < 0.5:
        return (_length(rng, texts[-1]),) * len(texts)
    return tuple(_length(rng, text) for text in texts)


def _length(rng: random.Random, most: int) -> int:
    """Short as often as long (log-uniform)."""
    return CONTEXT_STEP * round(math.exp(rng.uniform(0, math.log(most / CONTEXT_STEP))))


def _depths(rng: random.Random, requests: int) -> tuple[int, ...]:
    kind, deepest = rng.random(), rng.randint(1, MAX_DEPTH)
    if kind < 0.2:
        return (0,) * requests
    if kind < 0.5:
        return (deepest,) * requests
    return tuple(rng.choice((0, rng.randint(0, deepest))) for _ in range(requests))
