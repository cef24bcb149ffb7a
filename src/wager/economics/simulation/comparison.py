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

from wager.economics.latency_model import LatencyModel
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import DrafterCapabilities, Policy
from wager.economics.policy.fixed import FixedDepth
from wager.economics.policy.objective import THROUGHPUT, Objective
from wager.economics.policy.threshold import Threshold
from wager.economics.policy_spec import parse_policy
from wager.economics.simulation.server import SimulatedServer, SimulationResult
from wager.economics.simulation.traces import TraceSource
from wager.economics.simulation.workload import Workload
from wager.errors import UsageError

_FIXED_DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15)
_PER_PASS = 1.5
"""A drafter whose second draft token costs more than half of the first is taken to make a pass for each."""


@dataclass(frozen=True, slots=True)
class ReplaySetting:
    """What is replayed: requests, step times, the objective of adaptive policies, and how many devices throughput is
    divided by."""

    traces: TraceSource
    latency: LatencyModel
    objective: Objective = THROUGHPUT
    devices: int = 1

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
    included; `drafted` and `admitted` are draft tokens a round, `drafting` the share of time spent on drafting;
    `pace_p50` and `pace_p90` are seconds per token over requests; `regret` is against the best fixed depth, as a share;
    `frontier`: no other point is better in both tokens a second per user and per device."""

    policy: str
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
    best_fixed: str = ""
    regret: float = 0.0
    frontier: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


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
    return Adaptive(deepcopy(setting.latency), drafters=drafters, objective=setting.objective)


def fixed_policies(setting: ReplaySetting) -> list[str]:
    """Plain decoding and fixed depths of every drafter, with small steps where depths are small."""
    return ["none"] + [
        f"fixed:{name}:{depth}"
        for name, max_depth in setting.traces.max_depths().items()
        for depth in _FIXED_DEPTHS
        if depth <= max_depth
    ]


def compare(
    setting: ReplaySetting,
    names: Sequence[str],
    workloads: Sequence[Workload],
    *,
    on_point: Callable[[ReplayPoint], None] | None = None,
) -> list[ReplayPoint]:
    """Every policy under every workload, with regret against the best of `fixed_policies` among `names`."""
    for name in names:
        build_policy(name, setting)  # a misspelt name is reported before the work
    points: list[ReplayPoint] = []
    for workload in workloads:
        simulated = []
        for name in names:
            simulated.append(simulate(setting, name, workload))
            if on_point:
                on_point(simulated[-1])
        points += _with_regret(simulated)
    return _with_frontier(points)


def simulate(setting: ReplaySetting, name: str, workload: Workload) -> ReplayPoint:
    """One simulation."""
    policy = build_policy(name, setting)
    server = SimulatedServer(setting.traces, setting.latency, policy=policy, workload=workload)
    return _point(name, workload, server.run(), devices=setting.devices)


def _point(name: str, workload: Workload, result: SimulationResult, *, devices: int) -> ReplayPoint:
    users = workload.concurrency
    paces = result.seconds_per_token() or [result.seconds * (users or 1) / max(1, result.tokens)]
    rounds = max(1, result.rounds)
    return ReplayPoint(
        policy=name,
        concurrency=users,
        rate=workload.rate,
        throughput=result.throughput,
        per_user=result.throughput / users if users else 1 / float(np.mean(paces)),
        per_device=result.throughput / devices,
        tau=result.tau,
        drafted=result.drafted / rounds,
        admitted=result.admitted / rounds,
        drafting=result.draft_seconds / result.seconds,
        pace_p50=float(np.quantile(paces, 0.5)),
        pace_p90=float(np.quantile(paces, 0.9)),
    )


def _with_regret(points: Sequence[ReplayPoint]) -> list[ReplayPoint]:
    """Points of one workload with what they lose against the best fixed depth among them (negative: what they gain)."""
    fixed = [point for point in points if point.policy == "none" or point.policy.startswith("fixed")]
    if not fixed:
        return list(points)
    best = max(fixed, key=_compared_rate)
    best_rate = _compared_rate(best)
    return [replace(point, best_fixed=best.policy, regret=1 - _compared_rate(point) / best_rate) for point in points]


def _compared_rate(point: ReplayPoint) -> float:
    return point.per_user if point.rate else point.throughput


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
