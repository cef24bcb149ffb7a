"""The bill before you pay: for batch, context and acceptance, every depth's outcome, what binds, and where off wins.

Brings cost, drafter and expectation together and returns plain values that a table, a page or JSON can show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from wager.economics.costmodel.draft_cost import DraftCost
from wager.economics.costmodel.memory import Footprint, footprint
from wager.economics.costmodel.roofline import CostModel, SequenceLoad, StepCost
from wager.economics.costmodel.speedup import DepthOutcome, best, break_even, outcomes, survival
from wager.errors import UsageError


@dataclass(frozen=True, slots=True)
class AcceptanceRates:
    """How often guesses are right: one rate, or one per depth given that the guess before was accepted."""

    label: str
    rates: float | tuple[float, ...]

    def alive(self, depth: int) -> tuple[float, ...]:
        """S_1..S_depth."""
        return survival(self.rates, depth)

    @property
    def most(self) -> int | None:
        """The deepest guess anything is known about; None if all are."""
        return len(self.rates) if isinstance(self.rates, tuple) else None


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """One line of the bill. `found` holds every depth's outcome from 0 on, `chosen` the one that is billed; `plain` and
    `step` are the steps without guesses and at that depth; `prices` say d log seconds / d log rows of plain decoding,
    by part and for the whole "step"; `break_even` is the acceptance at which the first guess pays for itself."""

    batch: int
    context: int
    acceptance: str
    found: tuple[DepthOutcome, ...]
    chosen: DepthOutcome
    plain: StepCost
    step: StepCost
    prices: dict[str, float]
    break_even: float | None
    memory: Footprint

    @property
    def price(self) -> float:
        """Seconds per expected token, all requests of the batch together."""
        return (self.chosen.step_s + self.chosen.draft_s) / (self.batch * self.chosen.tokens)

    @property
    def tokens_per_second(self) -> float:
        """Of one request."""
        return self.chosen.tokens / (self.chosen.step_s + self.chosen.draft_s)

    @property
    def paying(self) -> list[int]:
        """Depths that beat plain decoding."""
        return [outcome.depth for outcome in self.found if outcome.speedup > 1]

    @property
    def losing(self) -> list[int]:
        """Depths that plain decoding beats."""
        return [outcome.depth for outcome in self.found[1:] if outcome.speedup < 1]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON. `bound` says of each part of the step what it waits for."""
        parts = {
            name: {**asdict(part), "share": part.seconds / self.step.seconds, "marginal": self.prices.get(name, 0.0)}
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
            "price": self.price,
            "bound": {name: part.bound for name, part in self.step.parts.items()},
            "binding": self.step.binding,
            "plain_s": self.plain.seconds,
            "tokens_per_s_user": self.tokens_per_second,
            "tokens_per_s": self.batch * self.tokens_per_second,
            "marginal": self.prices["step"],
            "break_even": self.break_even,
            "paying_depths": self.paying,
            "losing_depths": self.losing,
            "parts": parts,
            "memory": {**asdict(self.memory), "total": self.memory.total, "fits": self.memory.fits},
            "depths": [asdict(outcome) for outcome in self.found],
        }


@dataclass(frozen=True, slots=True)
class PlanQuery:
    """What is asked of every point. `depth` fixes it (None: the best up to `most`)."""

    cost: CostModel
    drafter: DraftCost
    most: int = 16
    depth: int | None = None

    def __post_init__(self) -> None:
        if self.most < 0:
            raise UsageError(f"A largest depth of {self.most} is out of range.", "It is zero or more.")
        if self.depth is not None and not 0 <= self.depth <= self._limit(None):
            raise UsageError(
                f"Depth {self.depth} is out of range.", f"{self.drafter.name} can draft 0 to {self._limit(None)} deep."
            )

    def _limit(self, acceptance: AcceptanceRates | None) -> int:
        known = acceptance.most if acceptance else None
        asked = self.most if self.depth is None else max(self.most, self.depth)
        return min(limit for limit in (asked, self.drafter.most, known) if limit is not None)

    def outcomes(self, acceptance: AcceptanceRates, *, batch: float, context: float) -> list[DepthOutcome]:
        """Every depth from 0 to the deepest that is allowed and known about."""
        depths = range(self._limit(acceptance) + 1)
        steps = [self.cost.seconds([SequenceLoad(context, depth + 1, batch)]) for depth in depths]
        drafts = [self.drafter.seconds(batch, depth, context=context) for depth in depths]
        return outcomes(steps, drafts, acceptance.alive(len(depths) - 1))

    def point(self, acceptance: AcceptanceRates, *, batch: int, context: int) -> PlanPoint:
        """The bill of one point. UsageError for a batch below 1, or a context the model was not made for."""
        if batch < 1:
            raise UsageError(f"batch = {batch} is out of range.", "A batch is 1 request or more.")
        if not 0 <= context <= self.cost.model.context:
            raise UsageError(
                f"context = {context} is out of range.",
                f"{self.cost.model.name} was made for 0 to {self.cost.model.context} positions.",
            )
        found = self.outcomes(acceptance, batch=batch, context=context)
        if self.depth is not None and self.depth >= len(found):
            raise UsageError(
                f"Depth {self.depth} is deeper than acceptance {acceptance.label} is known for ({len(found) - 1})."
            )
        chosen = best(found) if self.depth is None else found[self.depth]
        plain = [SequenceLoad(context, 1, batch)]
        steps, drafts = [o.step_s for o in found], [o.draft_s for o in found]
        return PlanPoint(
            batch=batch,
            context=context,
            acceptance=acceptance.label,
            found=tuple(found),
            chosen=chosen,
            plain=self.cost.step(plain),
            step=self.cost.step([SequenceLoad(context, chosen.depth + 1, batch)]),
            prices=dict(self.cost.price(plain)),
            break_even=break_even(steps, drafts, 1) if len(found) > 1 else None,
            memory=footprint(self.cost, self.drafter, batch=batch, context=context),
        )

    def gutter(self, acceptance: AcceptanceRates, *, batches: Sequence[int], context: float) -> list[tuple[int, int]]:
        """Runs of batch sizes, first and last, at which no depth beats plain decoding.

        Looks at every size up to 64 and at steps of a tenth beyond, between the smallest and the largest of `batches`.
        """
        runs: list[tuple[int, int]] = []
        inside = False
        for batch in _ladder(min(batches), max(batches)):
            off = best(self.outcomes(acceptance, batch=batch, context=context)).depth == 0
            if off:
                runs = [*runs[:-1], (runs[-1][0], batch)] if inside else [*runs, (batch, batch)]
            inside = off
        return runs


def _ladder(first: int, last: int) -> list[int]:
    steps = [first]
    while steps[-1] < last:
        steps.append(min(last, max(steps[-1] + 1, steps[-1] * 11 // 10)) if steps[-1] >= 64 else steps[-1] + 1)
    return steps
