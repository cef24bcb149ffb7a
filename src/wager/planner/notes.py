"""Remarks of `wager plan`: what a figure assumes, and what a reader would otherwise take for something else."""

from __future__ import annotations

from collections.abc import Sequence

from wager.planner.calibrated import CalibratedCostModel
from wager.planner.draft_chains import RemoteDraftCost, StagedDraftCost
from wager.planner.draft_cost import DraftCost, DraftHeadCost, DraftModelCost
from wager.planner.plan import PlanPoint, PlanQuery


def remarks(query: PlanQuery, points: Sequence[PlanPoint]) -> list[str]:
    """Those that apply, most important first."""
    return [
        *_memory(points),
        *_depth(query, points),
        *_routing(query),
        *_groups(query),
        *_key_value_heads(query),
        *_vocabulary(query),
        *_asynchronous(query),
        *_measurements(query),
    ]


def rank_word(query: PlanQuery) -> str:
    """Whose batch and tokens a figure is: of a rank or a group under expert parallelism, else of all devices."""
    cluster = query.cost.cluster
    return "" if cluster.groups == 1 else "rank" if cluster.tp == 1 else "group"


def _memory(points: Sequence[PlanPoint]) -> list[str]:
    lines = []
    if any(point.memory.fits is False for point in points):
        lines.append("Memory: rows marked ! do not fit on the device; their times are a lower bound.")
    if any(point.drafter_memory is not None and point.drafter_memory.fits is False for point in points):
        lines.append("Memory: rows marked ! do not fit on the drafter's own device.")
    return lines


def _depth(query: PlanQuery, points: Sequence[PlanPoint]) -> list[str]:
    if query.depth is None and query.max_depth == 0:
        return ["No draft depth was tried (--max-depth 0): the figures are those of plain decoding."]
    if any(point.at_max_depth for point in points):
        return [
            f"Depth {query.max_depth}+ is the deepest that was tried (--max-depth {query.max_depth}); a deeper one may "
            "be faster."
        ]
    return []


def _routing(query: PlanQuery) -> list[str]:
    routing, experts = query.cost.routing, query.cost.model.experts
    if experts is None or (routing.popularity is None and routing.locality == 1):
        return []
    words = []
    if routing.popularity is not None:
        times = max(routing.popularity) * experts.count / experts.active
        words.append(f"chosen by the given popularity (the most popular one {times:.1f} times as often as on average)")
    if routing.locality < 1:
        words.append(f"T tokens of one request choose as many distinct ones as T^{routing.locality:.3g} unrelated ones")
    return [f"Experts: {', and '.join(words)}."]


def _groups(query: PlanQuery) -> list[str]:
    cluster, word = query.cost.cluster, rank_word(query)
    if not word:
        return []
    whose = f"group of {cluster.tp} devices" if word == "group" else "rank"
    spread = (
        "the experts are balanced, so every rank reads the mean"
        if query.cost.balanced
        else ("a step waits for the rank with most experts to read")
    )
    return [
        f"Expert parallelism: batch and tok/s are those of one {whose}, memory that of one device; all "
        f"{cluster.groups} decode {cluster.groups} times as many (tokens_per_s_all in the JSON). Experts: {spread}."
    ]


def _key_value_heads(query: PlanQuery) -> list[str]:
    cost, tp = query.cost, query.cost.cluster.tp
    heads = {
        stream.shards
        for layer in cost.model.layers
        for stream in layer.attention.streams(1, 1, cost.model.precision)
        if stream.shards % tp
    }
    return [
        f"Tensor parallelism: {shards} key-value head{'s' if shards > 1 else ''} over {tp} devices: each keeps "
        f"{-(-shards // tp)} of them, so together they keep {-(-shards // tp) * tp / shards:.3g} times the cache."
        for shards in sorted(heads)
    ]


def _draft_models(drafter: DraftCost) -> list[DraftModelCost]:
    if isinstance(drafter, RemoteDraftCost):
        return _draft_models(drafter.drafter)
    if isinstance(drafter, StagedDraftCost):
        return [drafter.model]
    return [drafter] if isinstance(drafter, DraftModelCost) else []


def _vocabulary(query: PlanQuery) -> list[str]:
    target = query.cost.model
    return [
        f"Vocabulary: {small.cost.model.name} has {small.cost.model.vocab} tokens, {target.name} {target.vocab}. "
        "If the tokenizer is the same and only the padding differs, the pair is run as it is; else guesses must be "
        "translated (--drafter tli:PATH or slem:PATH), which is not priced here and lowers acceptance."
        for small in _draft_models(query.drafter)
        if small.cost.model.vocab != target.vocab
    ]


def _asynchronous(query: PlanQuery) -> list[str]:
    if not query.asynchronous:
        return []
    if query.hit_rate is not None:
        share = f"{query.hit_rate:.0%} of the rounds take"
    else:
        number = query.draft_outcomes
        share = f"rounds whose outcome was one of the {number} likeliest, for all sequences of a batch, take"
    lines = [
        f"Asynchronous drafting: {share} the longer of step and draft, the others "
        "their sum. Drafting for several outcomes is priced as one draft."
    ]
    drafter, remote = query.drafter, isinstance(query.drafter, RemoteDraftCost)
    inner = drafter.drafter if isinstance(drafter, RemoteDraftCost) else drafter
    if isinstance(inner, DraftHeadCost | DraftModelCost | StagedDraftCost) and not remote:
        lines.append(
            "The drafter has no device of its own (--drafter-hardware) and competes with the step it runs beside: the "
            "times are a lower bound."
        )
    if isinstance(inner, DraftHeadCost):
        lines.append(
            f"{inner.name} reads hidden states of the step that it runs beside, which are not known yet: it must guess "
            "from older ones."
        )
    return lines


def _measurements(query: PlanQuery) -> list[str]:
    cost = query.cost
    if not isinstance(cost, CalibratedCostModel):
        return []
    return [
        f"Steps of up to {cost.measured.rows[-1]} rows were measured, larger ones are extrapolated; "
        "their parts are the roofline's shares of them."
    ]
