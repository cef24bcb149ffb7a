"""Expected speed-up by draft depth, and the depth where it is largest. Formulas over given seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wager.economics.acceptance import tokens_per_round


@dataclass(frozen=True, slots=True)
class DepthOutcome:
    """A round of one depth: expected tokens per request (bonus token included), seconds of the step, of drafting and of
    the round (their sum, or less where drafting runs beside the step), and how much faster tokens come than with depth
    0; `hit_rate` is the share of rounds whose draft was ready then."""

    depth: int
    tokens: float
    step_s: float
    draft_s: float
    speedup: float
    round_s: float
    hit_rate: float | None = None


def round_seconds(step: float, draft: float, *, hit_rate: float | None = None) -> float:
    """Seconds of a round: step + draft, one after the other (`hit_rate` None).

    With a hit rate h drafting is asynchronous: while a step verifies, the next draft is made for the outcomes that are
    likely, and h is the share of rounds whose outcome was among them. Then the next step starts as soon as both are
    done; else the draft is made after verification: h max(step, draft) + (1 - h) (step + draft). The denominator of
    speculative speculative decoding (SSD, arXiv 2603.03251); h = 1 is the bound of PEARL (arXiv 2408.11850).
    """
    if hit_rate is None:
        return step + draft
    return hit_rate * max(step, draft) + (1 - hit_rate) * (step + draft)


def depth_outcomes(
    steps: Sequence[float],
    drafts: Sequence[float],
    survival: Sequence[float],
    *,
    hit_rate: float | Sequence[float] | None = None,
) -> list[DepthOutcome]:
    """Every depth from 0 to len(steps) - 1. `steps[g]` are seconds of a step with g draft tokens per request,
    `drafts[g]` seconds of drafting them. Speed-up is tokens x steps[0] / round; at depth 0 it is 1. `hit_rate`,
    one or one for each depth: see round_seconds."""
    outcomes = []
    for depth, (step, draft) in enumerate(zip(steps, drafts, strict=True)):
        rate = hit_rate[depth] if isinstance(hit_rate, Sequence) else hit_rate
        tokens, seconds = tokens_per_round(survival, depth), round_seconds(step, draft, hit_rate=rate)
        outcomes.append(DepthOutcome(depth, tokens, step, draft, tokens * steps[0] / seconds, seconds, rate))
    return outcomes


def best_outcome(outcomes: Sequence[DepthOutcome]) -> DepthOutcome:
    """The first depth of the largest speed-up; depth 0 where no draft pays."""
    return max(outcomes, key=lambda outcome: outcome.speedup)  # max keeps the first of equals


def tokens_at_constant_rate(acceptance: float, depth: int) -> float:
    """Expected tokens of a round where every draft token is accepted at one rate: (1 - a^(depth+1)) / (1 - a)."""
    return depth + 1.0 if acceptance == 1 else (1 - acceptance ** (depth + 1)) / (1 - acceptance)


def break_even_acceptance(steps: Sequence[float], drafts: Sequence[float], depth: int) -> float | None:
    """The constant acceptance rate at which that depth is as fast as depth 0; None if even a rate of 1 is slower."""
    needed = (steps[depth] + drafts[depth]) / steps[0]
    if needed > depth + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if tokens_at_constant_rate(middle, depth) >= needed else (middle, high)
    return high
