"""Seconds on the simulated clock: of steps and drafts, by the cost model of `wager plan`; and the prices that a policy
believes in their place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from wager.economics.latency import LatencyModel
from wager.economics.surface import DraftPoint, LatencySurface, StepPoint, fit_draft_curve, fit_surface
from wager.planner.cost import CostModel
from wager.planner.drafting import FREE, DraftCost
from wager.planner.plan import Deployment, Footprint


class RooflineLatency(LatencyModel):
    """Seconds of the cost model, about 30 microseconds a call; or those that were measured, about one.

    Every request of a step is taken to have the mean context and the mean number of rows; `context` is that of
    drafters that read a cache of their own.
    """

    def __init__(self, cost: CostModel, *, drafters: Mapping[str, DraftCost], context: float) -> None:
        self.cost, self.drafters, self.context = cost, drafters, context
        self._drafting: dict[tuple[str, int, int], float] = {}  # what was computed: neither drafters nor context change

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        if rows <= 0 or requests <= 0:
            return 0.0
        if self.cost.measured is not None:
            return self.cost.measured.seconds(rows, requests, context_sum)
        return self.cost.seconds(context_sum / requests, rows / requests, batch=requests)

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        if requests <= 0:
            return 0.0
        key = drafter, requests, depth
        if key not in self._drafting:
            self._drafting[key] = self.drafters[drafter].seconds(requests, depth, context=self.context)
        return self._drafting[key]

    def footprint(self, drafters: Collection[str], *, requests: int, context: float) -> Footprint:
        """Bytes on a device that the weights, those drafters and the caches of `requests` sequences take."""
        without = Deployment(self.cost, FREE).footprint(batch=requests, context=context)
        total = without
        for name in drafters:
            one = Deployment(self.cost, self.drafters[name]).footprint(batch=requests, context=context)
            total = replace(total, drafter=total.drafter + one.drafter, cache=total.cache + one.cache - without.cache)
        return total


# ---- what a policy believes -----------------------------------------------------------------------------------------


def calibrated(latency: LatencyModel, depths: Mapping[str, int], *, users: int, context: float) -> LatencySurface:
    """What a calibration would measure of a machine, for drafters of these depths, up to that number of users with
    about `context` cached positions each."""
    batches = [1 << power for power in range(users.bit_length() + 1)]
    widths = [1 << power for power in range(max(depths.values(), default=0).bit_length() + 1)]
    shapes = [
        (count * width, count, round(count * context * share))
        for count in batches
        for width in widths
        for share in (0.5, 1.5)
    ]
    drafters = {}
    for name, depth in depths.items():
        calls = [(count, each) for count in batches for each in sorted({1, depth})]
        points = [DraftPoint(*call, latency.draft_seconds(name, *call)) for call in calls]
        if all(point.seconds > 0 for point in points):
            drafters[name] = fit_draft_curve(points)
    return fit_surface([StepPoint(*shape, latency.seconds(*shape)) for shape in shapes], drafters=drafters)
