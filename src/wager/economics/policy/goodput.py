"""Goodput: the weighted tokens that a second of this machine yields, and what a row costs in weighted tokens."""

from __future__ import annotations

from collections.abc import Sequence

from wager.economics.policy.base import SMOOTHING, UPDATE_INTERVAL

ADJACENT_ROWS = 4  # on either side of a step's rows, over which the cost of one more is averaged


class GoodputEstimator:
    """Goodput and cost of a row in the latest steps, by batch size in powers of two.

    Maximising tokens - goodput * seconds in every step maximises tokens / seconds in the long run if the goodput is the
    one that this yields (Dinkelbach's method). It is kept as a ratio to plain decoding of the batch at hand, 1 at first
    and never less. Expected tokens and seconds enter, not observed ones, so the luck of a step does not move it.
    """

    def __init__(self) -> None:
        self._expected, self._plain = [0.0] * 32, [0.0] * 32  # weighted tokens: as planned, and by plain decoding
        self._row_cost: dict[int, float] = {}

    def ratio(self, decoding: int) -> float:
        """Goodput of batches of about `decoding` sequences, as a multiple of plain decoding's; at least 1."""
        size = decoding.bit_length()
        return max(1.0, self._expected[size] / self._plain[size]) if self._plain[size] else 1.0

    def row_cost(self, decoding: int) -> float | None:
        """Weighted tokens that one more row must bring; None before a step of that size was recorded."""
        return self._row_cost.get(decoding.bit_length())

    def record(self, decoding: int, *, expected: float, plain: float, steps: int = UPDATE_INTERVAL) -> None:
        """A step of `decoding` sequences, for those of the last `steps`: the weighted tokens expected of it, and those
        that plain decoding would yield in its seconds."""
        size, kept = decoding.bit_length(), (1 - SMOOTHING) ** (steps / UPDATE_INTERVAL)
        weight = (1 - kept) / SMOOTHING
        self._expected[size] = weight * expected + kept * self._expected[size]
        self._plain[size] = weight * plain + kept * self._plain[size]

    def record_row_cost(
        self,
        decoding: int,
        *,
        extra: Sequence[float],
        rows: int,
        cut: float | None,
        goodput: float,
        steps: int = UPDATE_INTERVAL,
    ) -> None:
        """A step verified `rows` draft tokens, n of which add extra[n] seconds, with the `cut` of its Selection; it
        stands for the last `steps`. Where seconds jump, the rows below cost less than those above, and one more costs
        what the cut gains; where they flatten, one more costs what those above do."""
        above = goodput * (extra[rows + ADJACENT_ROWS] - extra[rows]) / ADJACENT_ROWS
        if rows:
            first = max(0, rows - ADJACENT_ROWS)
            below = goodput * (extra[rows] - extra[first]) / (rows - first)
        else:
            below = goodput * min([extra[count] / count for count in range(1, ADJACENT_ROWS + 1)])
        cost = min(below, above)
        if cut is not None:
            cost = max(cost, min(cut, above))
        size = decoding.bit_length()
        before = self._row_cost.get(size, cost)
        self._row_cost[size] = before + (1 - (1 - SMOOTHING) ** steps) * (cost - before)
