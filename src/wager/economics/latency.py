"""What the policies and the simulation need of a latency model: seconds of a step by its shape.

Provided by the calibrated surface (economics/surface.py) and by the roofline (simulation/latency.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Protocol

from wager.types import StepRecord

Table = list[list[float]]
"""Rows of equal length."""


class LatencyModel(Protocol):
    """Seconds of a step by its shape. `rows` are all rows of the pass, known tokens and draft tokens; `requests` the
    sequences in it; `context_sum` the cached positions of all of them together, before the step. The methods with a
    body are those of a model that does not learn."""

    @property
    def learns(self) -> bool:
        """Whether observed steps correct it."""
        return False

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        """The step without drafting: schedule, policy, forward, accept, commit, observe."""

    def seconds_by_rows(self, rows: Sequence[int], requests: int, context_sum: int) -> list[float]:
        """`seconds` of several counts of rows, ascending from 1; a model may have a quicker way."""
        return [self.seconds(count, requests, context_sum) for count in rows]

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        """Drafting for `requests` sequences, each to `depth`; 0 for none."""

    def draft_seconds_by_depth(self, drafter: str, requests: int, depth: int) -> list[float]:
        """`draft_seconds` to 0, 1, ... `depth`; a model may have a quicker way."""
        return [0.0, *[self.draft_seconds(drafter, requests, each) for each in range(1, depth + 1)]]

    def difference_deviations(
        self, rows: int, others: Sequence[int], *, requests: int, context_sum: int
    ) -> list[float]:
        """How uncertain the difference in seconds is between steps of `rows` and of each of several other counts: its
        standard deviation; 0 where nothing is learned."""
        return [0.0] * len(others)

    def observe(self, record: StepRecord) -> None:
        """A step was taken."""
        return

    def observe_draft(self, drafter: str, requests: int, depth: int, *, seconds: float) -> None:
        """Drafting for `requests` sequences to `depth` took that long."""
        return


_DEPTHS = 8  # to which seconds of drafting are asked for at least, all depths together
_CONTEXTS_PER_DOUBLING = 8  # context lengths within 1/8 of a doubling (9 %) share an entry


class LatencyCache:
    """Cached answers of `model`, until they are cleared: it learns, and contexts grow."""

    def __init__(self, model: LatencyModel) -> None:
        self.model = model
        self._plain: dict[tuple[int, int], float] = {}
        self._extra: dict[tuple[int, int, int], list[float]] = {}
        self._last_shape, self._last_curve = (0, 0, 0), list[float]()  # of the last answer, which most others repeat
        self._draft: dict[tuple[str, int], list[float]] = {}  # by depth
        self._marginal: dict[tuple[str, int, int], Table] = {}

    def clear(self) -> None:
        """The model is asked again."""
        self._plain, self._extra, self._draft, self._marginal = {}, {}, {}, {}
        self._last_shape, self._last_curve = (0, 0, 0), []

    def plain_seconds(self, sequences: int, context_sum: int) -> float:
        """A step that decodes one token for each of `sequences`, with `context_sum` cached positions together."""
        key = sequences, _context_key(context_sum)
        if key not in self._plain:
            self._plain[key] = self.model.seconds(sequences, sequences, context_sum)
        return self._plain[key]

    def extra_seconds(self, shape: tuple[int, int, int], *, count: int) -> list[float]:
        """What 0, 1, ... `count` rows or more add to a step of this shape (rows, sequences, context_sum); never
        falling."""
        if shape == self._last_shape and len(self._last_curve) > count:
            return self._last_curve
        rows, sequences, context_sum = shape
        key = rows, sequences, _context_key(context_sum)
        curve = self._extra.get(key)
        if curve is None or len(curve) <= count:
            knots = _knots(1 << max(3, count.bit_length()))
            seconds = self.model.seconds_by_rows([rows + knot for knot in knots], sequences, context_sum)
            none = seconds[0]
            curve = list(accumulate([each - none for each in seconds], max))
            if len(knots) <= knots[-1]:
                curve = _at_every(knots, curve)
            self._extra[key] = curve
        self._last_shape, self._last_curve = shape, curve
        return curve

    def draft_seconds(self, drafter: str, sequences: int, depth: int) -> float:
        """Drafting for `sequences`, each to `depth`."""
        return self._draft_curve(drafter, sequences, depth)[depth] if sequences and depth else 0.0

    def _draft_curve(self, drafter: str, sequences: int, depth: int) -> list[float]:
        """Drafting for `sequences`, each to 0, 1, ... `depth` or more."""
        curve = self._draft.get((drafter, sequences), [])
        if len(curve) <= depth:
            curve = self.model.draft_seconds_by_depth(drafter, sequences, max(depth, _DEPTHS))
            self._draft[drafter, sequences] = curve
        return curve

    def ragged_draft_seconds(self, drafter: str, depths: Sequence[int]) -> float:
        """Drafting to `depths`, one per sequence: each pass of the drafter is for the sequences that go that deep."""
        total, done, left = 0.0, 0, len(depths)
        if left and min(depths) == max(depths):
            return self.draft_seconds(drafter, left, depths[0])
        for depth, count in sorted(Counter(depths).items()):
            if depth > done:
                total += self.draft_seconds(drafter, left, depth) - self.draft_seconds(drafter, left, done)
                done = depth
            left -= count
        return total

    def marginal_draft_seconds(self, drafter: str, sequences: int, depth: int) -> Table:
        """What the j-th sequence that drafts at depth k adds, [sequences, depth], at j - 1 and k - 1."""
        key = drafter, sequences, depth
        if key in self._marginal:
            return self._marginal[key]
        knots = [0, *sorted({min(sequences, 1 << power) for power in range(sequences.bit_length() + 1)} - {0})]
        marginal: Table = []
        before = [0.0] * depth
        for last, count in pairwise(knots):
            curve = self._draft_curve(drafter, count, depth)
            passes = [curve[k + 1] - curve[k] for k in range(depth)]
            share = 1 / (count - last)  # between knots each adds as much
            marginal += [[share * (more - less) for more, less in zip(passes, before, strict=True)]] * (count - last)
            before = passes
        self._marginal[key] = marginal
        return marginal


def _context_key(context_sum: int) -> int:
    return int(_CONTEXTS_PER_DOUBLING * math.log2(context_sum + 64))


def _at_every(knots: Sequence[int], values: Sequence[float]) -> list[float]:
    """Values at every number up to the last knot, by lines between the knots, which ascend from 0."""
    every: list[float] = []
    for (first, last), (low, high) in zip(pairwise(knots), pairwise(values), strict=True):
        slope = (high - low) / (last - first)
        every += [low + slope * number for number in range(last - first)]
    return [*every, values[-1]]


@cache
def _knots(last: int) -> list[int]:
    """0, 1, 2, ..., from 16 on an eighth part more each time, and `last`."""
    knots = [0]
    while knots[-1] < last:
        knots.append(min(last, knots[-1] + max(1, knots[-1] // 8)))
    return knots
