"""The cost model as a StepSurface: what a policy may ask before anything was measured, and in simulation.

Every request of a step is taken to have the mean context and the mean number of rows. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wager.economics.costmodel.draft_cost import DraftCost
from wager.economics.costmodel.roofline import CostModel, SequenceLoad
from wager.economics.latency.draft_curve import DraftCurve
from wager.economics.latency.surface import LatencySurface, StepPoint
from wager.economics.latency_model import StaticLatency
from wager.errors import UsageError

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class PaperSurface(StaticLatency):
    """Seconds straight from the cost model, about 30 microseconds a question. `context` is what drafters that price
    their own cache are asked with."""

    def __init__(
        self, cost: CostModel, *, drafters: Mapping[str, DraftCost] | None = None, context: float = 4096
    ) -> None:
        self.cost, self.drafters, self.context = cost, dict(drafters or {}), context

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        """See StepSurface."""
        if rows <= 0 or requests <= 0:
            return 0.0
        return self.cost.seconds([SequenceLoad(context_sum / requests, rows / requests, requests)])

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        """See StepSurface; a drafter that was not given is a UsageError."""
        if drafter not in self.drafters:
            raise UsageError(f"Drafter {drafter!r} has no price.", f"Priced are: {', '.join(self.drafters) or 'none'}.")
        return self.drafters[drafter].seconds(requests, depth, context=self.context) if requests > 0 else 0.0


def tabulate(
    cost: CostModel,
    *,
    drafters: Mapping[str, DraftCost] | None = None,
    contexts: Sequence[int] = (128, 1024, 4096),
    rows: Sequence[int] = _ROWS,
) -> LatencySurface:
    """A MeasuredSurface fitted to what the cost model says: where an engine starts that was never calibrated.

    The cost of a row is a curve of the rows of a step alone, so that experts hit by one sequence's run and by a batch
    count the same, and contexts enter linearly: a summary, which steps then correct.
    """
    shapes = {(n, q) for n in rows for q in (1, max(1, n // 4), n)}
    points = [
        StepPoint(n, q, q * context, cost.seconds([SequenceLoad(context, n / q, q)]))
        for n, q in sorted(shapes)
        for context in contexts
    ]
    mean = sum(contexts) / len(contexts)
    priced = {name: _curve(each, context=mean) for name, each in (drafters or {}).items()}
    return LatencySurface.fit(points, drafters=priced)


def _curve(drafter: DraftCost, *, context: float) -> DraftCurve:
    """Two depths tell what a call costs and what each guess adds."""
    deep = min(8, drafter.most or 8)
    first = [drafter.seconds(q, 1, context=context) for q in _REQUESTS]
    last = [drafter.seconds(q, deep, context=context) for q in _REQUESTS]
    each = [max(0.0, (b - a) / (deep - 1)) if deep > 1 else 0.0 for a, b in zip(first, last, strict=True)]
    return DraftCurve(_REQUESTS, [max(0.0, a - e) for a, e in zip(first, each, strict=True)], each)
