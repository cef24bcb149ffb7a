"""What `wager plan` computes: for a batch, context and acceptance, every depth's outcome, what the step waits for, and
the batch sizes at which plain decoding is fastest. Plain values, for a table, a page or JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from wager.economics.acceptance import survival
from wager.economics.drafts_ahead import hit_rate_of
from wager.economics.options import DEEPEST
from wager.errors import UsageError
from wager.planner.draft_cost import DraftCost
from wager.planner.measured_rounds import MeasuredRound
from wager.planner.memory import Footprint, drafter_footprint, footprint
from wager.planner.roofline import CostModel, SequenceLoad, StepCost
from wager.planner.speedup import DepthOutcome, best_outcome, break_even_acceptance, depth_outcomes

LARGEST_BATCH = 1 << 20
"""Far beyond any server; a larger figure is a slip of the keyboard."""

DEFAULT_MAX_DEPTH = 16

MOST_OUTCOMES = 1024
"""Outcomes of a round that may be drafted for."""


@dataclass(frozen=True, slots=True)
class AcceptanceRates:
    """How often draft tokens are accepted: one rate, or one per depth given that the token before was accepted.

    `rounds` are the rounds of depths 1, 2, ... where they were measured (`wager acceptance`). They count for more than
    the rates: drafts may be shorter than requested, and survival at one depth is not that at another.
    """

    label: str
    rates: float | tuple[float, ...]
    rounds: tuple[MeasuredRound, ...] = ()

    def survival(self, depth: int) -> tuple[float, ...]:
        """S_1..S_depth."""
        return survival(self.rates, depth)

    def added_tokens(self, depth: int) -> tuple[float, ...]:
        """Tokens that a round of depth 1, 2, ... `depth` has more than one of a depth less: S_k, or as measured."""
        if not self.rounds:
            return self.survival(depth)
        tokens = [1.0, *(each.tokens for each in self.rounds[:depth])]
        return tuple(later - earlier for earlier, later in pairwise(tokens))

    def rows(self, depth: int, *, batch: float) -> tuple[float, ...]:
        """Rows per request in a step of that depth, the known token included: equally likely values."""
        return self.rounds[depth - 1].rows(batch) if self.rounds and depth else (depth + 1.0,)

    @property
    def max_depth(self) -> int | None:
        """The deepest draft token with a known rate; None if every depth has one."""
        return len(self.rates) if isinstance(self.rates, tuple) else None


class BatchRange(NamedTuple):
    """Batch sizes from `first` to `last`, both included."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """The answer at one batch, context and acceptance. `outcomes` holds every depth's from 0 on, `chosen` the best one
    or the requested one; `plain_step` and `step` are the steps without draft tokens and at the chosen depth;
    `marginal_costs` are d log seconds / d log rows of plain decoding, by part and for the "step"; `break_even` is the
    acceptance from which one draft token pays (None: never, or no depth was tried). `at_max_depth`: the best depth is
    the deepest that was tried, and deeper ones are possible. `groups` batches like this one are decoded side by side
    under expert parallelism. `drafter_memory` is that of a drafter's own device, None without one."""

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
    drafter_memory: Footprint | None = None
    at_max_depth: bool = False
    groups: int = 1

    @property
    def fits(self) -> bool | None:
        """Whether everything fits, on the target's devices and on the drafter's own; None if a memory is unknown."""
        known = [one.fits for one in (self.memory, self.drafter_memory) if one is not None]
        return False if False in known else None if None in known else True

    @property
    def seconds_per_token(self) -> float:
        """Seconds per expected token, all requests of the batch together."""
        return self.chosen.round_s / (self.batch * self.chosen.tokens)

    @property
    def tokens_per_second(self) -> float:
        """Of one request."""
        return self.chosen.tokens / self.chosen.round_s

    @property
    def paying_depths(self) -> list[int]:
        """Depths that are faster than plain decoding."""
        return [outcome.depth for outcome in self.outcomes if outcome.speedup > 1]

    @property
    def losing_depths(self) -> list[int]:
        """Depths that are slower than plain decoding."""
        return [outcome.depth for outcome in self.outcomes[1:] if outcome.speedup < 1]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON (docs/economics.md lists the keys). `bound` is what each part waits for."""
        parts = {
            name: {
                **asdict(part),
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
            "price": self.seconds_per_token,
            "bound": {name: part.bound for name, part in self.step.parts.items()},
            "binding": self.step.binding,
            "plain_s": self.plain_step.seconds,
            "tokens_per_s_user": self.tokens_per_second,
            "tokens_per_s": self.batch * self.tokens_per_second,
            "tokens_per_s_all": self.groups * self.batch * self.tokens_per_second,
            "marginal": self.marginal_costs["step"],
            "break_even": self.break_even,
            "paying_depths": self.paying_depths,
            "losing_depths": self.losing_depths,
            "parts": parts,
            "memory": self.memory.as_dict(),
            "drafter_memory": None if self.drafter_memory is None else self.drafter_memory.as_dict(),
            "depths": [asdict(outcome) for outcome in self.outcomes],
        }


@dataclass(frozen=True, slots=True)
class PlanQuery:
    """What is evaluated at every point: which target and drafter, and how deep. `depth` fixes the depth (None: the best
    one up to `max_depth`). With a `hit_rate`, or drafts for so many `draft_outcomes` of each sequence, drafting is
    asynchronous: see speedup.round_seconds."""

    cost: CostModel
    drafter: DraftCost
    max_depth: int = DEFAULT_MAX_DEPTH
    depth: int | None = None
    hit_rate: float | None = None
    draft_outcomes: int | None = None

    @property
    def asynchronous(self) -> bool:
        return self.hit_rate is not None or self.draft_outcomes is not None

    def __post_init__(self) -> None:
        if not 0 <= self.max_depth <= DEEPEST:
            raise UsageError(f"A largest depth of {self.max_depth} is out of range.", f"It is 0 to {DEEPEST}.")
        if self.hit_rate is not None and not 0 <= self.hit_rate <= 1:
            raise UsageError(f"A hit rate of {self.hit_rate} is out of range.", "It lies between 0 and 1.")
        if self.draft_outcomes is not None and not 1 <= self.draft_outcomes <= MOST_OUTCOMES:
            raise UsageError(
                f"{self.draft_outcomes} outcomes are out of range.", f"They are 1 to {MOST_OUTCOMES} of each sequence."
            )
        if self.depth is not None and not 0 <= self.depth <= min(DEEPEST, self._limit(None)):
            raise UsageError(
                f"Depth {self.depth} is out of range.",
                f"{self.drafter.name} can draft 0 to {min(self._limit(None), DEEPEST)} deep.",
            )

    def _limit(self, acceptance: AcceptanceRates | None) -> int:
        known = acceptance.max_depth if acceptance else None
        requested = self.max_depth if self.depth is None else max(self.max_depth, self.depth)
        return min(limit for limit in (requested, self.drafter.max_depth, known) if limit is not None)

    def outcomes(self, acceptance: AcceptanceRates, *, batch: float, context: float) -> list[DepthOutcome]:
        """Every depth from 0 to the deepest that the drafter can make and whose acceptance is known."""
        depths = range(self._limit(acceptance) + 1)
        steps = [
            fmean(
                self.cost.seconds([SequenceLoad(context, rows, batch)]) for rows in acceptance.rows(depth, batch=batch)
            )
            for depth in depths
        ]
        drafts = [self.drafter.seconds(batch, depth, context=context) for depth in depths]
        rate = self.hit_rate if self.draft_outcomes is None else self._hit_rates(acceptance, len(depths), batch=batch)
        return depth_outcomes(steps, drafts, acceptance.added_tokens(len(depths) - 1), hit_rate=rate)

    def _hit_rates(self, acceptance: AcceptanceRates, depths: int, *, batch: float) -> list[float]:
        """The share of rounds in which the outcome of every sequence of the batch was drafted for, by depth."""
        outcomes = self.draft_outcomes or 0
        rates = [hit_rate_of(acceptance.survival(depth), outcomes) for depth in range(1, depths)]
        return [1.0, *(rate**batch for rate in rates)]

    def point(self, acceptance: AcceptanceRates, *, batch: int, context: int) -> PlanPoint:
        """The answer at one point. UsageError for a batch below 1, or a context the model was not made for."""
        self._check(batch, context)
        outcomes = self.outcomes(acceptance, batch=batch, context=context)
        if self.depth is not None and self.depth >= len(outcomes):
            raise UsageError(
                f"Depth {self.depth} is deeper than acceptance {acceptance.label} is known for ({len(outcomes) - 1})."
            )
        if not all(0 < outcome.round_s < float("inf") for outcome in outcomes):
            raise UsageError(
                f"The times of {self.cost.model.name} on {self.cost.device.name} are not finite numbers above 0.",
                "Check the peaks and the bandwidth of the hardware.",
            )
        chosen = best_outcome(outcomes) if self.depth is None else outcomes[self.depth]
        plain = [SequenceLoad(context, 1, batch)]
        steps, drafts = [o.step_s for o in outcomes], [o.round_s - o.step_s for o in outcomes]
        return PlanPoint(
            batch=batch,
            context=context,
            acceptance=acceptance.label,
            outcomes=tuple(outcomes),
            chosen=chosen,
            plain_step=self.cost.step(plain),
            step=self.cost.step([SequenceLoad(context, fmean(acceptance.rows(chosen.depth, batch=batch)), batch)]),
            marginal_costs=dict(self.cost.marginal_cost(plain)),
            break_even=break_even_acceptance(steps, drafts, 1) if len(outcomes) > 1 else None,
            memory=footprint(self.cost, self.drafter, batch=batch, context=context),
            drafter_memory=drafter_footprint(self.drafter, batch=batch, context=context),
            at_max_depth=self._stopped_by_max_depth(chosen, acceptance),
            groups=self.cost.cluster.groups,
        )

    def _stopped_by_max_depth(self, chosen: DepthOutcome, acceptance: AcceptanceRates) -> bool:
        """Whether the best depth is `max_depth`, while drafter and acceptance know deeper ones."""
        others = [limit for limit in (self.drafter.max_depth, acceptance.max_depth) if limit is not None]
        return (
            self.depth is None and chosen.depth == self.max_depth > 0 and self.max_depth < min(others, default=DEEPEST)
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

    def losing_batches(
        self, acceptance: AcceptanceRates, *, batches: Sequence[int], context: float
    ) -> list[BatchRange]:
        """Ranges of batch sizes at which no depth is faster than plain decoding.

        Looks at `batches`, and between the smallest and the largest of them at every size up to 64 and at steps of a
        tenth beyond.
        """
        ranges: list[BatchRange] = []
        inside = False
        for batch in sorted({*batches, *_batch_sizes(min(batches), max(batches))}):
            losing = best_outcome(self.outcomes(acceptance, batch=batch, context=context)).depth == 0
            if losing:
                first = ranges.pop().first if inside else batch
                ranges.append(BatchRange(first, batch))
            inside = losing
        return ranges


def _batch_sizes(first: int, last: int) -> list[int]:
    """Every size up to 64, then steps of a tenth."""
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(last, max(sizes[-1] + 1, sizes[-1] * 11 // 10)) if sizes[-1] >= 64 else sizes[-1] + 1)
    return sizes
