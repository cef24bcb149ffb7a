"""From a configuration to a policy: who decides how far to guess, with which prices and to what end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from wager.config import EngineConfig
from wager.draft.base import Drafter
from wager.economics.latency.surface import LatencySurface
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import DrafterCapabilities, FixedDepth, Policy, Threshold
from wager.economics.policy.objective import parse_objective
from wager.economics.policy.spec import parse_policy
from wager.errors import UsageError

_CATCHING_UP = 8
"""A drafter with a cache of its own computes about this many missed tokens in the time of one guess."""

_LIKELY = 0.25
"""Share of the target's step that a guess is taken to cost where it was never timed."""


def build(
    config: EngineConfig, drafters: Sequence[Drafter], surface: Callable[[], LatencySurface]
) -> tuple[Policy, int]:
    """The policy, and the most guesses it may ever ask for of one sequence. `surface` is called if prices are wanted.

    Raises UsageError for a policy, threshold or objective that is none.
    """
    spec = parse_policy(config.policy or ("adaptive" if config.depth is None else "fixed"))
    objective = parse_objective(config.objective)
    if not drafters or config.depth == 0:
        return FixedDepth(0), 0
    if spec.kind != "adaptive" and objective.kind != "throughput":
        raise UsageError(
            f"objective = {config.objective!r} says nothing to policy {spec.kind!r}, which knows no prices.",
            "Leave it out, or use --policy adaptive.",
        )
    first = drafters[0]
    if spec.kind == "adaptive":
        most = {each.name: each.max_depth if config.depth is None else config.depth for each in drafters}
        prices = surface()
        offers = {each.name: _offer(each, most[each.name], prices) for each in drafters}
        return Adaptive(prices, drafters=offers, objective=objective, rule=config.verify), max(most.values())
    if len(drafters) > 1:
        raise UsageError(
            f"Policy {spec.kind!r} asks one drafter, but there are {len(drafters)}: {config.drafter}.",
            "Name one drafter, or use --policy adaptive.",
        )
    depth = first.default_depth if config.depth is None else config.depth
    if spec.kind == "threshold":
        return Threshold(depth, threshold=spec.threshold, rule=config.verify), depth
    return FixedDepth(depth), depth


def _offer(drafter: Drafter, depth: int, prices: LatencySurface) -> DrafterCapabilities:
    once = prices.draft_seconds(drafter.name, 1, 1) or _LIKELY * prices.seconds(1, 1, 0)
    return DrafterCapabilities(
        depth, stops_early=drafter.samples, catch_up_s=once / _CATCHING_UP if drafter.samples else 0.0
    )
