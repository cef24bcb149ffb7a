"""Policies side by side: one simulation per policy and workload on the same requests and step times; regret, frontier.

Regret is against the best fixed depth in hindsight, plain decoding among them: in throughput for closed-loop workloads,
in tokens per second of one user for open-loop ones (where throughput is the arrival rate).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from wager.economics.latency import LatencyModel
from wager.economics.options import THROUGHPUT, Objective, parse_policy
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import DrafterCapabilities, Policy
from wager.economics.policy.heuristics import FixedDepth, Threshold
from wager.errors import UsageError
from wager.planner.plan import Footprint
from wager.simulation.latency import RooflineLatency
from wager.simulation.server import SimulatedServer, SimulationResult, Workload
from wager.simulation.traces import TraceSource
from wager.types import DraftDecision

_FIXED_DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 28)
_PER_PASS = 1.5
"""A drafter whose second draft token costs more than half of the first is taken to make a pass for each."""


@dataclass(frozen=True, slots=True)
class ReplaySetting:
    """What is replayed: requests, step times, the objective of adaptive policies, and how many devices throughput is
    divided by. `believed` are the prices that policies start from (None: the machine's)."""

    traces: TraceSource
    latency: LatencyModel
    objective: Objective = THROUGHPUT
    devices: int = 1
    believed: LatencyModel | None = None

    def drafters(self) -> dict[str, DrafterCapabilities]:
        """What each drafter can do; one that makes a pass for each draft token can stop early."""
        seconds = self.latency.draft_seconds
        return {
            name: DrafterCapabilities(depth, stops_early=seconds(name, 8, 2) > _PER_PASS * seconds(name, 8, 1))
            for name, depth in self.traces.max_depths().items()
        }


@dataclass(frozen=True, slots=True)
class ReplayPoint:
    """One policy under one workload. Rates are tokens a second; `tau` is the mean acceptance length, bonus token
    included; `drafted` and `admitted` are draft tokens a round, `drafting` is the share of time spent on drafting;
    `pace_p50` and `pace_p90` are seconds per token over requests, `first_token_p50` and `first_token_p90` those from
    arrival to the first token (None: no request finished); `within_slo` is the share of requests within an SLO;
    `memory` counts bytes on a device in the fullest step, in which `peak_requests` ran; `regret` is against the best
    fixed depth, as a share; `frontier`: no other point is better in both tokens a second per user and per device."""

    policy: str
    workload: str
    concurrency: int | None
    rate: float | None
    throughput: float
    per_user: float
    per_device: float
    tau: float
    drafted: float
    admitted: float
    drafting: float
    pace_p50: float
    pace_p90: float
    first_token_p50: float | None = None
    first_token_p90: float | None = None
    within_slo: float | None = None
    peak_requests: int = 0
    memory: Footprint | None = None
    best_fixed: str = ""
    regret: float = 0.0
    frontier: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "memory": None if self.memory is None else self.memory.as_dict()}


def build_policy(name: str, setting: ReplaySetting) -> Policy:
    """A policy by name (parse_policy), with a latency model of its own: what it learns does not change the setting's.

    UsageError for a policy that is not known, an unknown drafter, or a depth that it cannot draft.
    """
    drafters = setting.drafters()
    spec = parse_policy(name, replay=True)
    drafter = spec.drafter or next(iter(drafters), "")
    if drafter not in drafters:
        raise UsageError(f"Policy {name!r} names an unknown drafter.", f"Known are: {', '.join(drafters)}.")
    max_depth = drafters[drafter].max_depth
    if spec.kind == "none":
        return FixedDepth(0)
    if spec.kind == "fixed":
        depth = spec.depth or 0
        if depth > max_depth:
            raise UsageError(
                f"Policy {name!r} is too deep: {drafter} drafts at most {max_depth} tokens.", "Give a smaller depth."
            )
        return FixedDepth(depth, drafter=drafter)
    if spec.kind == "threshold":
        return Threshold(max_depth, drafter=drafter, threshold=spec.threshold)
    latency = deepcopy(setting.believed or setting.latency)
    return Adaptive(latency, drafters=drafters, objective=setting.objective)


def fixed_policies(setting: ReplaySetting) -> list[str]:
    """Plain decoding and fixed depths of every drafter, with small steps where depths are small."""
    return ["none"] + [
        f"fixed:{name}:{depth}"
        for name, max_depth in setting.traces.max_depths().items()
        for depth in [depth for depth in _FIXED_DEPTHS if depth < max_depth] + [max_depth] * (max_depth > 0)
    ]


def compare(
    setting: ReplaySetting,
    names: Sequence[str],
    workloads: Sequence[Workload],
    *,
    on_point: Callable[[int], None] = lambda _done: None,
) -> list[ReplayPoint]:
    """Every policy under every workload, with regret against the best of `fixed_policies` among `names`; `on_point`
    gets the number of points so far."""
    for name in names:
        build_policy(name, setting)  # a misspelt name is reported before the work
    points: list[ReplayPoint] = []
    for workload in workloads:
        simulated: dict[str, ReplayPoint] = {}
        for name in sorted(names, key=lambda name: not _is_fixed(name)):
            best = max((p for p in simulated.values() if _is_fixed(p.policy)), key=_rate, default=None)
            before = _decision(best.policy if best and not _is_fixed(name) else name, setting)
            simulated[name] = simulate(setting, name, workload, drafted_before=before)
            on_point(len(points) + len(simulated))
        points += _with_regret([simulated[name] for name in names])
    return _with_frontier(points)


def simulate(
    setting: ReplaySetting, name: str, workload: Workload, *, drafted_before: DraftDecision | None = None
) -> ReplayPoint:
    """One simulation; `drafted_before` (see SimulatedServer) is by default what the policy drafts, at most."""
    server = SimulatedServer(
        setting.traces,
        setting.latency,
        policy=build_policy(name, setting),
        workload=workload,
        drafted_before=drafted_before or _decision(name, setting),
    )
    return _point(name, setting, workload, server.run())


def _is_fixed(name: str) -> bool:
    return name == "none" or name.startswith("fixed")


def _decision(name: str, setting: ReplaySetting) -> DraftDecision:
    """What a policy drafts for a sequence with room; the most if it is not fixed."""
    spec, depths = parse_policy(name, replay=True), setting.traces.max_depths()
    drafter = spec.drafter or next(iter(depths), "")
    if spec.kind == "none":
        return DraftDecision(0)
    return DraftDecision(depths.get(drafter, 0) if spec.depth is None else spec.depth, drafter)


def _point(name: str, setting: ReplaySetting, workload: Workload, result: SimulationResult) -> ReplayPoint:
    users, slo = workload.concurrency, setting.objective.seconds_per_token
    paces = result.seconds_per_token() or [result.seconds * (users or 1) / max(1, result.tokens)]
    waits = [request.first_token - request.arrived for request in result.finished]
    rounds = max(1, result.rounds)
    return ReplayPoint(
        policy=name,
        workload=workload.label,
        concurrency=users,
        rate=workload.rate,
        throughput=result.throughput,
        per_user=result.throughput / users if users else 1 / float(np.mean(paces)),
        per_device=result.throughput / setting.devices,
        tau=result.tau,
        drafted=result.drafted / rounds,
        admitted=result.admitted / rounds,
        drafting=result.draft_seconds / result.seconds,
        pace_p50=float(np.quantile(paces, 0.5)),
        pace_p90=float(np.quantile(paces, 0.9)),
        first_token_p50=float(np.quantile(waits, 0.5)) if waits else None,
        first_token_p90=float(np.quantile(waits, 0.9)) if waits else None,
        within_slo=float(np.mean([pace <= slo for pace in paces])) if slo else None,
        peak_requests=result.peak_requests,
        memory=_memory(name, setting, result),
    )


def _memory(name: str, setting: ReplaySetting, result: SimulationResult) -> Footprint | None:
    """Memory of the step with most cached positions, with the drafters that the policy uses; None where the latency
    model knows no bytes."""
    if not isinstance(setting.latency, RooflineLatency) or not result.peak_requests:
        return None
    spec = parse_policy(name, replay=True)
    drafters = [] if spec.kind == "none" else list(setting.traces.max_depths())
    if spec.kind in ("fixed", "threshold"):
        drafters = [spec.drafter or drafters[0]]
    mean = result.peak_context / result.peak_requests
    return setting.latency.footprint(drafters, requests=result.peak_requests, context=mean)


def _with_regret(points: Sequence[ReplayPoint]) -> list[ReplayPoint]:
    """Points of one workload with what they lose against the best fixed depth among them (negative: what they gain)."""
    fixed = [point for point in points if _is_fixed(point.policy)]
    if not fixed:
        return list(points)
    best = max(fixed, key=_rate)
    return [replace(point, best_fixed=best.policy, regret=1 - _rate(point) / _rate(best)) for point in points]


def _rate(point: ReplayPoint) -> float:
    """By which policies are compared: the server's throughput in a closed loop, else a user's tokens a second."""
    return point.throughput if point.concurrency else point.per_user


def _with_frontier(points: Sequence[ReplayPoint]) -> list[ReplayPoint]:
    """Marks points for which no other is at least as good in both tokens a second per user and per device."""
    return [
        replace(
            point,
            frontier=not any(
                other.per_user >= point.per_user
                and other.per_device >= point.per_device
                and (other.per_user, other.per_device) != (point.per_user, point.per_device)
                for other in points
            ),
        )
        for point in points
    ]
