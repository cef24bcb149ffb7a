"""Seconds on the simulated clock: of steps and drafts, by the cost model of `wager plan` or as published for two
drafters, and of the policy's own decisions; and the prices that a policy believes in their place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from wager.economics.latency import LatencyModel
from wager.economics.policy.base import Policy
from wager.economics.surface import DraftPoint, LatencySurface, StepPoint, fit_draft_curve, fit_surface
from wager.errors import UsageError
from wager.planner.cost import CostModel
from wager.planner.drafting import FREE, DraftCost
from wager.planner.plan import Deployment, Footprint
from wager.types import StepRecord

_T = TypeVar("_T")


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


# ---- as published ----------------------------------------------------------------------------------------------------

_PEAK, _BANDWIDTH = 2.25e15, 8e12  # FLOP/s in bf16, byte/s
_EXPERTS, _ACTIVE_EXPERTS, _LAYERS = 256, 8, 40
_EXPERT_ELEMENTS = 3_145_728  # weights of one expert in one layer
_ACTIVE_ELEMENTS = 2.92e9  # weights that multiply a row, from the published compute-bound points
_DENSE_SECONDS = 438e-6  # everything dense, read once a step: the published 1394 tok/s at one request
_STATE_BYTES = 33.42e6  # recurrent state of a sequence, read every step
_KV_BYTES = 20_480  # keys and values of one position
_MTP_DENSE, _MTP_ACTIVE = 535_822_336, 564_133_888
_BLOCK_SIZE, _BLOCK_ELEMENTS = 16, 982_515_712

_PUBLISHED_SHAPES = ("mtp", "block:16", "free")


def distinct_with_replacement(count: int, active: int, tokens: float) -> float:
    """Expected distinct experts of `count` when each of `tokens` picks `active` that may coincide, as the source
    counts them: E (1 - (1 - 1/E)^(k t)). The cost model's own count is planner.routing.distinct_experts."""
    missed: float = (1 - 1 / count) ** (active * tokens)
    return count * (1 - missed)


class PublishedLatency(LatencyModel):
    """Behind published measurements of two drafters: Qwen3.6-35B-A3B in bf16 on a B200. The larger of bytes / bandwidth
    and FLOPs / peak, one maximum over the pass as in the source.

    Source: as in economics/acceptance.py, whose table of tokens per second from 1 to 2048 requests this fits within
    4 %, with all of its best depths (tests/economics/test_simulation.py).

    `shapes` are those of the drafters by name: `mtp` (one pass per depth), `block:16` (one pass over a block, the same
    at every depth) or `free`.
    """

    def __init__(self, shapes: Mapping[str, str] | None = None) -> None:
        self.shapes = dict(shapes or {"mtp": "mtp", "dflash": "block:16"})
        unknown = [shape for shape in self.shapes.values() if shape not in _PUBLISHED_SHAPES]
        if unknown:
            hint = f"Published are {', '.join(_PUBLISHED_SHAPES)}; another --hardware prices any shape."
            raise UsageError(f"The seconds of the drafter shape {unknown[0]!r} are not published.", hint)

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        if rows <= 0:
            return 0.0
        experts = (distinct_with_replacement(_EXPERTS, _ACTIVE_EXPERTS, rows) + 1) * _LAYERS * _EXPERT_ELEMENTS * 2
        caches = requests * _STATE_BYTES + context_sum * _KV_BYTES
        return max(_DENSE_SECONDS + (experts + caches) / _BANDWIDTH, 2 * _ACTIVE_ELEMENTS * rows / _PEAK)

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        shape = self.shapes[drafter]
        if requests <= 0 or depth <= 0 or shape == "free":
            return 0.0
        if shape == "mtp":
            experts = 1 + distinct_with_replacement(_EXPERTS, _ACTIVE_EXPERTS, requests)
            elements = _MTP_DENSE + experts * _EXPERT_ELEMENTS
            return depth * max(2 * _MTP_ACTIVE * requests / _PEAK, 2 * elements / _BANDWIDTH)
        return max(2 * _BLOCK_ELEMENTS * requests * _BLOCK_SIZE / _PEAK, 2 * _BLOCK_ELEMENTS / _BANDWIDTH)


# ---- what a policy believes -----------------------------------------------------------------------------------------

_TILTED_ROWS = 64


@dataclass(frozen=True, slots=True)
class PriceFactors:
    """What prices are multiplied by: the `fixed` part of a step (what one row takes), what `rows` add to it, and
    `drafting`; `tilt`: the factor of rows grows to 1 + tilt at 64 rows."""

    fixed: float = 1.0
    rows: float = 1.0
    drafting: float = 1.0
    tilt: float = 0.0

    def applied(self, prices: LatencySurface) -> LatencySurface:
        values = prices.as_dict()
        first = values["seconds"][0]
        values["seconds"] = [
            self.fixed * first + self.rows * (1 + self.tilt * min(1, count / _TILTED_ROWS)) * (seconds - first)
            for count, seconds in zip(values["rows"], values["seconds"], strict=True)
        ]
        values["per_request"] *= self.rows
        values["per_context"] *= self.fixed
        for curve in values["drafters"].values():
            for part in ("fixed", "each"):
                curve[part] = [self.drafting * seconds for seconds in curve[part]]
        return LatencySurface.from_dict(values)


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


# ---- the policy's own decisions --------------------------------------------------------------------------------------


class PolicyClock:
    """Seconds that a policy takes: those that this thread computes, since the wall clock's depend on what else the
    machine does. With `seconds` every step is taken to need that long instead (reproducible runs)."""

    def __init__(self, seconds: float | None = None) -> None:
        self._fixed, self._taken = seconds, 0.0

    def take(self) -> float:
        """Seconds since the last call, or the fixed ones of a step."""
        taken, self._taken = self._taken, 0.0
        return taken if self._fixed is None else self._fixed

    def count(self, call: Callable[[], _T], *, sign: float = 1.0) -> _T:
        """The result of a call, whose seconds are added; with a `sign` of -1 it is a part that does not count."""
        if self._fixed is not None:
            return call()
        begin = time.thread_time()
        result = call()
        self._taken += sign * (time.thread_time() - begin)
        return result


class TimedPolicy:
    """Has the methods of the policy; every call is timed by the clock."""

    def __init__(self, policy: Policy, clock: PolicyClock) -> None:
        self._policy = policy
        self._clock = clock

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._policy, name)
        return lambda *given, **named: self._clock.count(lambda: method(*given, **named))


class UncountedLatency(LatencyModel):
    """A latency model that a policy asks: its seconds are not the policy's, since an engine asks measured step times,
    which take a microsecond where the cost model takes thirty. (Timing a call takes about that microsecond, and stays
    counted.)"""

    def __init__(self, latency: LatencyModel, clock: PolicyClock) -> None:
        self._latency, self._clock = latency, clock

    @property
    def learns(self) -> bool:
        return self._latency.learns

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        return self._clock.count(lambda: self._latency.seconds(rows, requests, context_sum), sign=-1.0)

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        return self._clock.count(lambda: self._latency.draft_seconds(drafter, requests, depth), sign=-1.0)

    def difference_deviations(
        self, rows: int, others: Sequence[int], *, requests: int, context_sum: int
    ) -> list[float]:
        return self._latency.difference_deviations(rows, others, requests=requests, context_sum=context_sum)

    def observe(self, record: StepRecord) -> None:
        self._latency.observe(record)

    def observe_draft(self, drafter: str, requests: int, depth: int, *, seconds: float) -> None:
        self._latency.observe_draft(drafter, requests, depth, seconds=seconds)
