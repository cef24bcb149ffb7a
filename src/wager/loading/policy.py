"""Builds the policy of a configuration, which decides how many tokens are guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from wager.config import SpeculationConfig
from wager.draft.ahead import AheadDrafter
from wager.draft.base import Drafter, StateReader
from wager.economics.drafts_ahead import DraftsAheadLatency
from wager.economics.latency import LatencyModel
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import DrafterCapabilities, Policy
from wager.economics.policy.heuristics import FixedDepth, Threshold

_CATCH_UP_TOKENS = 8
"""Missed tokens that a drafter with a cache of its own computes in about the time of one guess."""

_WARM_UP = 16
"""Steps for which a drafter that rested is shown the target's states before it drafts again: then its guesses are
nearly as often right as with the whole context (docs/policy.md)."""

_DRAFT_SHARE = 0.25
"""Assumed cost of a guess until it was timed, as a share of the target's one-row step."""


@dataclass(frozen=True, slots=True)
class BuiltPolicy:
    """What makes a policy, once for each tenant, and its maximum number of guesses per sequence and step."""

    make: Callable[[], Policy]
    max_depth: int


def build(
    speculation: SpeculationConfig, drafters: Sequence[Drafter], measure: Callable[[], LatencyModel]
) -> BuiltPolicy:
    """The policies over `drafters`, which share a latency model. `measure` returns that model; it is called only for
    policies that need one.

    Raises UsageError for options that the policy would ignore.
    """
    spec, depth = speculation.parsed_policy, speculation.depth
    if not drafters or depth == 0:
        return BuiltPolicy(partial(FixedDepth, 0), 0)
    speculation.check_policy(len(drafters))
    if spec.kind == "adaptive":
        depths = {drafter.name: drafter.max_depth if depth is None else depth for drafter in drafters}
        latency: LatencyModel = measure()
        ahead = {drafter.name: drafter for drafter in drafters if isinstance(drafter, AheadDrafter)}
        if ahead:
            latency = DraftsAheadLatency(latency, ahead)
        capabilities = {drafter.name: _capabilities(drafter, depths[drafter.name], latency) for drafter in drafters}
        make = partial(
            Adaptive, latency, drafters=capabilities, objective=speculation.parsed_objective, rule=speculation.verify
        )
        return BuiltPolicy(make, max(depths.values()))
    depth = drafters[0].default_depth if depth is None else depth
    if spec.kind == "threshold":
        make_threshold = partial(Threshold, depth, threshold=spec.threshold, rule=speculation.verify)
        return BuiltPolicy(make_threshold, depth)
    return BuiltPolicy(partial(FixedDepth, depth), depth)


def _capabilities(drafter: Drafter, depth: int, latency: LatencyModel) -> DrafterCapabilities:
    guess_s = latency.draft_seconds(drafter.name, 1, 1) or _DRAFT_SHARE * latency.seconds(1, 1, 0)
    catch_up_s = guess_s / _CATCH_UP_TOKENS if drafter.samples else 0.0
    reads_states = isinstance(drafter, StateReader) and drafter.taps is not None
    warm_up = _WARM_UP if reads_states else 0
    return DrafterCapabilities(depth, stops_early=drafter.samples, catch_up_s=catch_up_s, warm_up=warm_up)
