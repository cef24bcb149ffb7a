"""The cost model as a LatencyModel, for `replay`: by datasheet, or as this machine was calibrated."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from wager.economics.latency import StaticLatency
from wager.errors import UsageError
from wager.planner.calibrated import CalibratedCostModel
from wager.planner.draft_cost import DraftCost, FreeDraftCost
from wager.planner.memory import Footprint, footprint
from wager.planner.roofline import CostModel, SequenceLoad


class RooflineLatency(StaticLatency):
    """Seconds of the cost model, about 30 microseconds a call; or those that were measured, about one.

    Every request of a step is taken to have the mean context and the mean number of rows; `context` is that of
    drafters that read a cache of their own.
    """

    def __init__(
        self, cost: CostModel, *, drafters: Mapping[str, DraftCost] | None = None, context: float = 4096
    ) -> None:
        self.cost, self.drafters, self.context = cost, dict(drafters or {}), context
        self._drafting: dict[tuple[str, int, int], float] = {}  # what was computed: neither drafters nor context change

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        """See LatencyModel."""
        if rows <= 0 or requests <= 0:
            return 0.0
        if isinstance(self.cost, CalibratedCostModel):
            return self.cost.measured.seconds(rows, requests, context_sum)
        return self.cost.seconds([SequenceLoad(context_sum / requests, rows / requests, requests)])

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        """See LatencyModel; UsageError for a drafter that was not given."""
        if drafter not in self.drafters:
            known = ", ".join(self.drafters) or "none"
            raise UsageError(f"The cost of drafter {drafter!r} is not known.", f"Known are: {known}.")
        if requests <= 0:
            return 0.0
        key = drafter, requests, depth
        if key not in self._drafting:
            self._drafting[key] = self.drafters[drafter].seconds(requests, depth, context=self.context)
        return self._drafting[key]

    def footprint(self, drafters: Collection[str], *, requests: int, context: float) -> Footprint:
        """Bytes on a device that the weights, those drafters and the caches of `requests` sequences take."""
        without = footprint(self.cost, FreeDraftCost(), batch=requests, context=context)
        total = without
        for name in drafters:
            one = footprint(self.cost, self.drafters[name], batch=requests, context=context)
            total = replace(total, drafter=total.drafter + one.drafter, cache=total.cache + one.cache - without.cache)
        return total
