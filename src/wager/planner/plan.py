"""What `wager plan` computes for a deployment: at a batch, context and acceptance every depth's outcome, what the step
waits for, whether it fits in memory, and the batch sizes at which plain decoding is fastest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise
from statistics import fmean
from typing import Any

from wager.economics.acceptance import constant_rate, tokens_per_round
from wager.economics.options import DEEPEST
from wager.errors import UsageError
from wager.planner.acceptance import AcceptanceRates
from wager.planner.cost import CostModel, StepCost
from wager.planner.drafting import DraftCost

WIDEST = 64
"""Children of a node of a tree, at most."""

SIBLING_RATE = 0.15
"""What trees of 3 and 7 guesses of a small model showed (docs/drafters.md): 1.60 and 1.70 tokens a round where chains
have 1.54 and 1.56."""

LARGEST_BATCH = 1 << 20
"""Far beyond any server; a larger figure is a slip of the keyboard."""

DEFAULT_MAX_DEPTH = 16
DEFAULT_OUTPUT = 512
"""Tokens of an answer."""

SPARE_SHARE = 0.1
"""Share of a device's memory that the plan leaves to activations and the runtime."""


# ---- rounds by depth ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DepthOutcome:
    """A round of one depth: expected tokens per request (bonus token included), seconds of the step and of drafting,
    and how much faster tokens come than with depth 0. In a tree `depth` is the number of nodes, and `levels` the number
    of levels."""

    depth: int
    tokens: float
    step_s: float
    draft_s: float
    speedup: float
    levels: int | None = None

    @property
    def round_s(self) -> float:
        """Seconds of the round: the draft is made, then verified."""
        return self.step_s + self.draft_s


def depth_outcomes(steps: Sequence[float], drafts: Sequence[float], survival: Sequence[float]) -> list[DepthOutcome]:
    """Every depth from 0 to len(steps) - 1. `steps[g]` are seconds of a step with g draft tokens per request,
    `drafts[g]` seconds of drafting them. Speed-up is tokens x steps[0] / round; at depth 0 it is 1."""
    outcomes = []
    for depth, (step, draft) in enumerate(zip(steps, drafts, strict=True)):
        tokens = tokens_per_round(survival, depth)
        outcomes.append(DepthOutcome(depth, tokens, step, draft, tokens * steps[0] / (step + draft)))
    return outcomes


def best_outcome(outcomes: Sequence[DepthOutcome]) -> DepthOutcome:
    """The first depth of the largest speed-up; depth 0 where no draft pays."""
    return max(outcomes, key=lambda outcome: outcome.speedup)  # max keeps the first of equals


def break_even_acceptance(steps: Sequence[float], drafts: Sequence[float], depth: int) -> float | None:
    """The constant acceptance rate at which that depth is as fast as depth 0; None if even a rate of 1 is slower."""
    needed = (steps[depth] + drafts[depth]) / steps[0]
    if needed > depth + 1:
        return None
    return constant_rate(needed, depth)


# ---- trees ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TreeDrafts:
    """Trees whose nodes have up to `width` children, a drafter's likeliest tokens there. The first child is right as
    often as the token of a chain; each further one at the rate `sibling` where those before it are wrong."""

    width: int
    sibling: float

    def survival(self, rates: Sequence[float], count: int) -> list[float]:
        """Survival of the `count` likeliest nodes (or of all), the likeliest first, none before its parent and its
        elder siblings. `rates` are the acceptance rates of a first child, one for each level. No other tree with as
        many nodes and levels yields more tokens (Sequoia, arXiv 2402.12374)."""
        found: list[float] = []
        frontier = [(-rates[0], 1, 1, 1.0)]  # survival, level, rank among its siblings, survival of its parent
        while frontier and len(found) < count:
            negative, level, rank, parent = heappop(frontier)
            found.append(-negative)
            if rank < self.width:
                rate = (1 - rates[level - 1]) * (1 - self.sibling) ** (rank - 1) * self.sibling
                heappush(frontier, (-parent * rate, level, rank + 1, parent))
            if level < len(rates):
                heappush(frontier, (negative * rates[level], level + 1, 1, -negative))
        return found


# ---- memory ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on one device. `memory` is what it has, None where that is unknown."""

    weights: float
    drafter: float
    cache: float
    memory: float | None

    @property
    def total(self) -> float:
        return self.weights + self.drafter + self.cache

    @property
    def fits(self) -> bool | None:
        """Whether it fits beside the spare share; None if the memory is unknown."""
        return None if self.memory is None else self.total <= self.memory * (1 - SPARE_SHARE)

    @property
    def largest_batch(self) -> int | None:
        """Sequences that fit beside the weights, in the footprint of one; None: any number."""
        if self.memory is None:
            return None
        left = self.memory * (1 - SPARE_SHARE) - self.weights - self.drafter
        if self.cache > 0:
            return max(0, int(left // self.cache))
        return None if left >= 0 else 0

    def as_dict(self) -> dict[str, float | bool | None]:
        """Plain values for JSON."""
        return {**asdict(self), "total": self.total, "fits": self.fits}


# ---- a point of the plan --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """The answer at one batch, context and acceptance. `outcomes` holds every depth's from 0 on, `chosen` the best one
    or the requested one; `plain_step` and `step` are the steps without draft tokens and at the chosen depth;
    `marginal_costs` are d log seconds / d log rows of plain decoding, by part and for the "step"; `break_even` is the
    acceptance from which one draft token pays (None: never, or no depth was tried). `at_max_depth`: the best depth is
    the deepest that was tried, and deeper ones are possible. `groups` batches like this one are decoded side by side
    under expert parallelism, each of `share` x batch requests. `prefill` are the seconds in which a prompt of that
    context is computed alone, by the target and by the drafter, and `output` the tokens of an answer."""

    batch: int
    context: int
    acceptance: str
    outcomes: tuple[DepthOutcome, ...]
    chosen: DepthOutcome
    plain_step: StepCost
    step: StepCost
    marginal_costs: dict[str, float]
    break_even: float | None
    memory: Footprint
    at_max_depth: bool = False
    groups: int = 1
    share: float = 1.0
    prefill: tuple[float, float] = (0.0, 0.0)
    output: int = DEFAULT_OUTPUT

    @property
    def group_batch(self) -> float:
        """Requests of one group."""
        return self.batch * self.share

    @property
    def request_seconds(self) -> tuple[float, float]:
        """Seconds of a group's devices that a request takes, prompt and answer, without draft tokens and with those of
        the chosen depth."""
        steps = self.output / self.group_batch
        with_drafts = steps * self.chosen.round_s / self.chosen.tokens
        draft = self.prefill[1] if self.chosen.depth else 0.0
        return self.prefill[0] + steps * self.plain_step.seconds, self.prefill[0] + draft + with_drafts

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of one request."""
        return self.chosen.tokens / self.chosen.round_s

    @property
    def losing_depths(self) -> list[int]:
        """Depths that are slower than plain decoding."""
        return [outcome.depth for outcome in self.outcomes[1:] if outcome.speedup < 1]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON (docs/economics.md lists the keys). `bound` is what each part waits for."""
        plain, speculative = self.request_seconds
        parts = {
            name: {
                **asdict(part),
                "intensity": part.intensity,
                "share": part.seconds / self.step.seconds,
                "marginal": self.marginal_costs.get(name, 0.0),
            }
            for name, part in self.step.parts.items()
        }
        return {
            "batch": self.batch,
            "context": self.context,
            "acceptance": self.acceptance,
            "depth": self.chosen.depth,
            "speedup": self.chosen.speedup,
            "tokens_per_round": self.chosen.tokens,
            "step_s": self.chosen.step_s,
            "draft_s": self.chosen.draft_s,
            "round_s": self.chosen.round_s,
            "at_max_depth": self.at_max_depth,
            "price": self.chosen.round_s / (self.group_batch * self.chosen.tokens),
            "bound": {name: part.bound for name, part in self.step.parts.items()},
            "binding": self.step.binding,
            "plain_s": self.plain_step.seconds,
            "tokens_per_s_user": self.tokens_per_second,
            "tokens_per_s": self.group_batch * self.tokens_per_second,
            "tokens_per_s_all": self.groups * self.group_batch * self.tokens_per_second,
            "group_batch": self.group_batch,
            "prefill": {
                "seconds": self.prefill[0],
                "draft_s": self.prefill[1],
                "output": self.output,
                "share": self.prefill[0] / plain,
                "request_speedup": plain / speculative,
            },
            "marginal": self.marginal_costs["step"],
            "break_even": self.break_even,
            "paying_depths": [outcome.depth for outcome in self.outcomes if outcome.speedup > 1],
            "losing_depths": self.losing_depths,
            "parts": parts,
            "memory": self.memory.as_dict(),
            "depths": [{**asdict(outcome), "round_s": outcome.round_s} for outcome in self.outcomes],
        }


@dataclass(frozen=True, slots=True)
class Deployment:
    """A target on its devices with a drafter, and how deep it drafts. `depth` fixes the depth (None: the best one up to
    `max_depth`). With a `tree` a depth is a number of its nodes. One group decodes the `share` of a batch: 1, or less
    where batches are those of all groups together. `output` are the tokens of an answer. UsageError for a figure that
    is out of range."""

    cost: CostModel
    drafter: DraftCost
    max_depth: int = DEFAULT_MAX_DEPTH
    depth: int | None = None
    tree: TreeDrafts | None = None
    share: float = 1.0
    output: int = DEFAULT_OUTPUT

    def __post_init__(self) -> None:
        if not 0 <= self.max_depth <= DEEPEST:
            raise UsageError(f"A largest depth of {self.max_depth} is out of range.", f"It is 0 to {DEEPEST}.")
        if self.depth is not None and not 0 <= self.depth <= min(DEEPEST, self._limit(None)):
            raise UsageError(
                f"Depth {self.depth} is out of range.",
                f"{self.drafter.name} can draft 0 to {min(self._limit(None), DEEPEST)} deep.",
            )

    def _limit(self, acceptance: AcceptanceRates | None) -> int:
        requested = self.max_depth if self.depth is None else max(self.max_depth, self.depth)
        return min(requested, *self._known_limits(acceptance))

    def _known_limits(self, acceptance: AcceptanceRates | None) -> list[int]:
        """Depths beyond which the drafter cannot draft, or nothing is known."""
        if self.tree is None:
            limits = [self.drafter.max_depth, acceptance.max_depth if acceptance else None]
        else:  # both limit levels instead, and only rounds that were measured limit nodes
            limits = [len(acceptance.rounds) or None if acceptance else None]
        return [DEEPEST, *(limit for limit in limits if limit is not None)]

    def outcomes(self, acceptance: AcceptanceRates, *, batch: float, context: float) -> list[DepthOutcome]:
        """Every depth from 0 to the deepest that the drafter can make and whose acceptance is known."""
        batch, depths = batch * self.share, range(self._limit(acceptance) + 1)
        steps = [
            fmean(self.cost.seconds(context, rows, batch=batch) for rows in acceptance.rows(depth, batch=batch))
            for depth in depths
        ]
        if self.tree is not None and len(depths) > 1:
            return self._tree_outcomes(self.tree, acceptance, steps, batch=batch, context=context)
        drafts = [self.drafter.seconds(batch, depth, context=context) for depth in depths]
        return depth_outcomes(steps, drafts, acceptance.added_tokens(len(depths) - 1))

    def _tree_outcomes(
        self, tree: TreeDrafts, acceptance: AcceptanceRates, steps: Sequence[float], *, batch: float, context: float
    ) -> list[DepthOutcome]:
        """Every number of nodes, each with the levels that make it fastest; steps[g] are seconds of one with g nodes.
        Where rounds were measured, their tokens count whatever the levels."""
        known = [limit for limit in (self.drafter.max_depth, acceptance.max_depth) if limit is not None]
        reached = (1.0, *acceptance.survival(min([len(steps) - 1, *known])))
        rates = [after / before if before else 0.0 for before, after in pairwise(reached)]
        best: dict[int, DepthOutcome] = {}
        for levels in batch_sizes((1, len(rates))):  # sizes of the same spacing
            nodes = tree.survival(rates[:levels], len(steps) - 1)
            drafting = self.drafter.seconds(batch, levels, context=context, width=tree.width)
            added = acceptance.added_tokens(len(steps) - 1) if acceptance.rounds else nodes
            drafts = [0.0, *(drafting for _ in nodes)]
            for found in depth_outcomes(steps[: len(drafts)], drafts, added):
                before = best.get(found.depth)
                possible = not 0 < found.depth < levels
                if possible and (before is None or found.speedup > before.speedup):
                    best[found.depth] = replace(found, levels=levels if found.depth else 0)
        return [best[depth] for depth in sorted(best)]

    def choose(self, outcomes: Sequence[DepthOutcome]) -> DepthOutcome:
        """The outcome of the fixed depth, or the best one."""
        return best_outcome(outcomes) if self.depth is None else outcomes[self.depth]

    def point(self, acceptance: AcceptanceRates, *, batch: int, context: int) -> PlanPoint:
        """The answer at one point. UsageError for a batch below 1, or a context the model was not made for."""
        self._check(batch, context)
        outcomes = self.outcomes(acceptance, batch=batch, context=context)
        if self.depth is not None and self.depth >= len(outcomes):
            raise UsageError(
                f"Depth {self.depth} is deeper than acceptance {acceptance.label} is known for ({len(outcomes) - 1})."
            )
        chosen = self.choose(outcomes)
        here = batch * self.share
        rows = fmean(acceptance.rows(chosen.depth, batch=here))
        deeper = self.max_depth < min(self._known_limits(acceptance))
        steps, drafts = [outcome.step_s for outcome in outcomes], [outcome.draft_s for outcome in outcomes]
        return PlanPoint(
            batch=batch,
            context=context,
            acceptance=acceptance.label,
            outcomes=tuple(outcomes),
            chosen=chosen,
            plain_step=self.cost.step(context, 1, batch=here),
            step=self.cost.step(context, rows, batch=here),
            marginal_costs=self.cost.marginal_cost(context, batch=here),
            break_even=break_even_acceptance(steps, drafts, 1) if len(outcomes) > 1 else None,
            memory=self.footprint(batch=here, context=context),
            at_max_depth=self.depth is None and chosen.depth == self.max_depth > 0 and deeper,
            groups=self.cost.cluster.groups,
            share=self.share,
            prefill=(self.cost.prefill(context).seconds, self.drafter.prefill_seconds(context)),
            output=self.output,
        )

    def _check(self, batch: int, context: int) -> None:
        if not 1 <= batch <= LARGEST_BATCH:
            raise UsageError(
                f"batch = {batch} is out of range.", f"A batch is 1 request or more, {LARGEST_BATCH:,} at most."
            )
        if not 0 <= context <= self.cost.model.context:
            raise UsageError(
                f"context = {context} is out of range.",
                f"{self.cost.model.name} was made for 0 to {self.cost.model.context} positions.",
            )
        limit = self.drafter.max_context
        if limit is not None and context > limit:
            raise UsageError(
                f"context = {context} is more than the {limit} positions that the drafter {self.drafter.name} was made "
                "for: it cannot draft there.",
                "Plan a shorter context, or another drafter.",
            )

    # ---- memory -----------------------------------------------------------------------------------------------------

    def footprint(self, *, batch: float, context: float) -> Footprint:
        """Bytes that `batch` sequences of `context` positions take (per device; under expert parallelism, of each
        rank). Of a fraction of a sequence some rank keeps a whole one."""
        cost, drafter = self.cost, self.drafter
        cache = cost.cache_bytes(context) + drafter.kv_bytes(context)
        return Footprint(cost.weight_bytes(), drafter.device_bytes, math.ceil(batch - 1e-9) * cache, cost.device.memory)

    def largest_batch(self, context: float) -> int | None:
        """Largest batch of that context that fits; 0 if not even the weights do, None if the memory of the devices is
        unknown."""
        here = self.footprint(batch=1, context=context)
        return None if here.memory is None else round((here.largest_batch or 0) / self.share)

    # ---- where plain decoding is fastest ----------------------------------------------------------------------------

    def losing_batches(
        self, acceptance: AcceptanceRates, *, batches: Sequence[int], context: float
    ) -> list[tuple[int, int]]:
        """First and last of each range of batch_sizes at which no depth is faster than plain decoding."""
        ranges: list[tuple[int, int]] = []
        inside = False
        for batch in batch_sizes(batches):
            losing = best_outcome(self.outcomes(acceptance, batch=batch, context=context)).depth == 0
            if losing:
                first = ranges.pop()[0] if inside else batch
                ranges.append((first, batch))
            inside = losing
        return ranges


def batch_sizes(batches: Sequence[int]) -> list[int]:
    """`batches`, and between the smallest and the largest of them every size up to 64 and steps of a tenth beyond."""
    sizes = [min(batches)]
    while sizes[-1] < max(batches):
        sizes.append(min(max(batches), max(sizes[-1] + 1, sizes[-1] * 11 // 10)) if sizes[-1] >= 64 else sizes[-1] + 1)
    return sorted({*batches, *sizes})
