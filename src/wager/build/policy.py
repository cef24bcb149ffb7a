"""From a configuration to a policy: who decides how far to guess, with which prices and to what end."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence

from wager.config import EngineConfig
from wager.draft.base import Drafter
from wager.economics.latency.surface import LatencySurface
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import DrafterCapabilities, FixedDepth, Policy, Threshold
from wager.economics.policy.objective import Objective
from wager.errors import UsageError

POLICIES = ("adaptive", "threshold", "fixed")

_CATCHING_UP = 8
"""A drafter with a cache of its own computes about this many missed tokens in the time of one guess."""

_LIKELY = 0.25
"""Share of the target's step that a guess is taken to cost where it was never timed."""

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def build(
    config: EngineConfig, drafters: Sequence[Drafter], surface: Callable[[], LatencySurface]
) -> tuple[Policy, int]:
    """The policy, and the most guesses it may ever ask for of one sequence. `surface` is called if prices are wanted.

    Raises UsageError for a policy, threshold or objective that is none.
    """
    name, threshold = _policy(config)
    objective = parse_objective(config.objective)
    if not drafters or config.depth == 0:
        return FixedDepth(0), 0
    if name != "adaptive" and objective != "throughput":
        raise UsageError(
            f"objective = {config.objective!r} says nothing to policy {name!r}, which knows no prices.",
            "Leave it out, or use --policy adaptive.",
        )
    first = drafters[0]
    if name == "adaptive":
        most = {each.name: each.max_depth if config.depth is None else config.depth for each in drafters}
        prices = surface()
        offers = {each.name: _offer(each, most[each.name], prices) for each in drafters}
        return Adaptive(prices, drafters=offers, objective=objective, rule=config.verify), max(most.values())
    if len(drafters) > 1:
        raise UsageError(
            f"Policy {name!r} asks one drafter, but there are {len(drafters)}: {config.drafter}.",
            "Name one drafter, or use --policy adaptive.",
        )
    depth = first.default_depth if config.depth is None else config.depth
    if name == "threshold":
        return Threshold(depth, threshold=threshold, rule=config.verify), depth
    return FixedDepth(depth), depth


def parse_objective(text: str) -> Objective:
    """`throughput`, `latency` or `slo:TIME`; raises UsageError for anything else."""
    found = re.fullmatch(r"slo:(\d+(?:\.\d+)?)(s|ms|us)", text)
    if found and float(found[1]) > 0:
        return "slo", float(found[1]) * _UNITS[found[2]]
    if text not in ("throughput", "latency"):
        raise UsageError(f"objective = {text!r} is not known.", "Use throughput, latency, or slo:20ms (per token).")
    return "latency" if text == "latency" else "throughput"


def _policy(config: EngineConfig) -> tuple[str, float]:
    """The policy's name and, of a threshold, where it starts."""
    if config.policy is None:
        return ("adaptive" if config.depth is None else "fixed"), 0.0
    name, _, argument = config.policy.partition(":")
    if name not in POLICIES or (argument and name != "threshold"):
        near = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known policies: {', '.join(POLICIES)}."
        raise UsageError(f"policy = {config.policy!r} is not known.", hint)
    try:
        threshold = float(argument or 0.4)
    except ValueError:
        threshold = -1.0
    if not 0 < threshold < 1:
        raise UsageError(f"threshold = {argument!r} is not between 0 and 1.", "Write threshold:0.4.")
    return name, threshold


def _offer(drafter: Drafter, depth: int, prices: LatencySurface) -> DrafterCapabilities:
    once = prices.draft_seconds(drafter.name, 1, 1) or _LIKELY * prices.seconds(1, 1, 0)
    return DrafterCapabilities(
        depth, stops_early=drafter.samples, catch_up_s=once / _CATCHING_UP if drafter.samples else 0.0
    )
