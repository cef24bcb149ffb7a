"""Policies side by side: the same texts, loads and prices, one simulation each; regret and the frontier.

Regret is against the best fixed depth in hindsight, plain decoding among them: in throughput where users ask again as
soon as they are answered, in a user's speed where requests arrive on their own (their rate is then the throughput).
Knows no files and prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from wager.economics.latency_model import LatencyModel
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import DrafterCapabilities, FixedDepth, Policy, Threshold
from wager.economics.policy.objective import THROUGHPUT, Objective
from wager.economics.policy.spec import parse_policy
from wager.economics.simulation.server import Result, SimulatedServer, Workload
from wager.economics.simulation.workload import World
from wager.errors import UsageError

POLICIES = {
    "none": "plain decoding",
    "fixed:K": "K guesses for everyone",
    "threshold[:P]": "a guess is kept while its draft is likelier than P, which adapts to acceptance",
    "adaptive": "drafter, depth and admission by price, sequence by sequence",
}
"""The policies by name. fixed and threshold take a drafter in front of the number, as in fixed:mtp:4."""


@dataclass(frozen=True, slots=True)
class ReplaySetting:
    """What is replayed: a world, its prices, and over how many devices throughput is divided."""

    world: World
    surface: LatencyModel
    objective: Objective = THROUGHPUT
    devices: int = 1

    def offers(self) -> dict[str, DrafterCapabilities]:
        """The world's drafters; one that pays for every pass stops early when it is told to."""
        ask = self.surface.draft_seconds
        deepest = self.world.deepest()
        return {
            name: DrafterCapabilities(depth, stops_early=ask(name, 8, 2) > 1.5 * ask(name, 8, 1))
            for name, depth in deepest.items()
        }


@dataclass(frozen=True, slots=True)
class ReplayPoint:
    """One policy under one load. Rates are tokens a second; `tau` counts the bonus token, `drafted` and `admitted` are
    guesses a round, `drafting` the share of time spent on them; `pace_p50` and `pace_p90` are seconds per token over
    requests; `regret` is against the best fixed depth, as a share."""

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


def build(name: str, setting: ReplaySetting) -> Policy:
    """A policy by name, with prices of its own: what it learns of them does not change the world's.

    UsageError names the nearest known one.
    """
    offers = setting.offers()
    spec = parse_policy(name, replay=True)
    drafter = spec.drafter or next(iter(offers), "")
    if drafter not in offers:
        raise UsageError(f"Policy {name!r} names a drafter that is not there.", f"There are: {', '.join(offers)}.")
    deepest = offers[drafter].max_depth
    if spec.kind == "none":
        return FixedDepth(0)
    if spec.kind == "fixed":
        depth = spec.depth or 0
        if depth > deepest:
            raise UsageError(f"Policy {name!r} is too deep: {drafter} guesses at most {deepest}.", "Ask for no more.")
        return FixedDepth(depth, drafter=drafter)
    if spec.kind == "threshold":
        return Threshold(deepest, drafter=drafter, threshold=spec.threshold)
    return Adaptive(deepcopy(setting.surface), drafters=offers, objective=setting.objective)


def fixed(setting: ReplaySetting) -> list[str]:
    """Plain decoding and fixed depths of every drafter, fine where depths are small."""
    depths = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15)
    return ["none"] + [
        f"fixed:{name}:{depth}"
        for name, deepest in setting.world.deepest().items()
        for depth in depths
        if depth <= deepest
    ]


def compare(
    setting: ReplaySetting,
    names: Sequence[str],
    loads: Sequence[Workload],
    *,
    on_point: Callable[[ReplayPoint], None] | None = None,
) -> list[ReplayPoint]:
    """Every policy under every load, with regret against the best of `fixed` among `names`."""
    for name in names:
        build(name, setting)  # whatever is misspelt is said before the work
    points: list[ReplayPoint] = []
    for load in loads:
        here = []
        for name in names:
            here.append(measure(setting, name, load))
            if on_point:
                on_point(here[-1])
        points += _regret(here)
    return _frontier(points)


def measure(setting: ReplaySetting, name: str, load: Workload) -> ReplayPoint:
    """One simulation."""
    result = SimulatedServer(setting.world, setting.surface, build(name, setting), load).run()
    return point(name, load, result, devices=setting.devices)


def point(name: str, load: Workload, result: Result, *, devices: int) -> ReplayPoint:
    """A simulation's figures."""
    paces = result.paces() or [result.seconds * (load.concurrency or 1) / max(1, result.tokens)]
    per_user = result.throughput / load.concurrency if load.concurrency else 1 / float(np.mean(paces))
    rounds = max(1, result.rounds)
    return ReplayPoint(
        policy=name,
        concurrency=load.concurrency,
        rate=load.rate,
        throughput=result.throughput,
        per_user=per_user,
        per_device=result.throughput / devices,
        tau=result.tau,
        drafted=result.drafted / rounds,
        admitted=result.admitted / rounds,
        drafting=result.draft_seconds / result.seconds,
        pace_p50=float(np.quantile(paces, 0.5)),
        pace_p90=float(np.quantile(paces, 0.9)),
    )


def _regret(points: Sequence[ReplayPoint]) -> list[ReplayPoint]:
    """Points of one load with what they lose against the best fixed depth among them (negative: what they gain)."""
    rivals = [each for each in points if each.policy == "none" or each.policy.startswith("fixed")]
    if not rivals:
        return list(points)
    best = max(rivals, key=_merit)
    return [replace(each, best_fixed=best.policy, regret=1 - _merit(each) / _merit(best)) for each in points]


def _merit(point: ReplayPoint) -> float:
    return point.per_user if point.rate else point.throughput


def _frontier(points: Sequence[ReplayPoint]) -> list[ReplayPoint]:
    """Marks points that no other beats in both tokens a second per user and per device."""
    return [
        replace(
            each,
            frontier=not any(
                other.per_user >= each.per_user
                and other.per_device >= each.per_device
                and (other.per_user, other.per_device) != (each.per_user, each.per_device)
                for other in points
            ),
        )
        for each in points
    ]
