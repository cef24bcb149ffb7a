"""One depth for the whole batch, at the best price: what an adaptive policy can do without telling sequences apart.

Kept to compare with. Knows prices and the drafter's average survival, not the confidence of a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from wager.economics.policy import FixedDepth
from wager.economics.surface import StepSurface
from wager.types import Plan, Span, Verdict

_WINDOW = 4000.0
_PRIOR, _PRIOR_WEIGHT = 0.75, 4.0
_EXPLORE = 50


class EvenDepth(FixedDepth):
    """argmax over depth 0 .. `depth` of expected tokens over seconds of the step, the same depth for all; every few
    hundred steps one more than that, so that deeper guesses stay measured."""

    def __init__(self, surface: StepSurface, *, drafter: str, depth: int) -> None:
        super().__init__(0, drafter=drafter)
        self._surface, self._deepest = surface, depth
        self._right = np.full(depth, _PRIOR * _PRIOR_WEIGHT)
        self._tried = np.full(depth, _PRIOR_WEIGHT)
        self._asked: Mapping[str, int] = {}
        self._steps = 0

    def plan(self, spans: Sequence[Span]) -> Plan:
        self._steps += 1
        live = [span for span in spans if span.live]
        survival = np.concatenate([[0.0], np.cumprod(self._right / self._tried)])
        rows, context = sum([len(span.tokens) for span in spans]), sum([span.start for span in spans])
        seconds = [
            self._surface.seconds(rows + depth * len(live), len(spans), context)
            + (self._surface.draft_seconds(self.drafter, len(live), depth) if depth else 0.0)
            for depth in range(self._deepest + 1)
        ]
        self.depth = int(((1 + np.cumsum(survival)) / np.array(seconds)).argmax())
        if self._steps % _EXPLORE == 0:
            self.depth = min(self.depth + 1, self._deepest)
        plan = super().plan(spans)
        self._asked = plan.depths
        return plan

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            asked, right = self._asked.get(verdict.sequence, 0), len(verdict.accepted)
            self._right[:right] += 1
            self._tried[: min(right + 1, asked)] += 1
        keep = np.minimum(1.0, _WINDOW / self._tried)
        self._right *= keep
        self._tried *= keep
