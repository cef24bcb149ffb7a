"""What a draft is expected to bring, and how deep it should be. Pure formulas; seconds come from whoever prices steps.

S_k is survival: the probability that guess k is reached and accepted. Tokens per round count the bonus token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wager.errors import UsageError


def survival(acceptance: float | Sequence[float], depth: int) -> tuple[float, ...]:
    """S_1..S_depth of one acceptance rate for every guess, or of one rate per depth (given that the guess before was
    accepted). Depths beyond the given rates survive with probability 0."""
    rates = [acceptance] * depth if isinstance(acceptance, int | float) else list(acceptance)[:depth]
    if not all(0 <= rate <= 1 for rate in rates):
        raise UsageError(f"An acceptance of {acceptance!r} is out of range.", "Acceptance lies between 0 and 1.")
    found, alive = [], 1.0
    for rate in rates:
        alive *= rate
        found.append(alive)
    return (*found, *(0.0,) * (depth - len(found)))


def tokens_per_round(alive: Sequence[float], depth: int | None = None) -> float:
    """1 + S_1 + ... + S_depth: the tokens a round of that depth brings."""
    return 1.0 + sum(alive[: len(alive) if depth is None else depth])


def constant_tokens(acceptance: float, depth: int) -> float:
    """(1 - a^(depth+1)) / (1 - a): the same for one acceptance rate."""
    return depth + 1.0 if acceptance == 1 else (1 - acceptance ** (depth + 1)) / (1 - acceptance)


@dataclass(frozen=True, slots=True)
class DepthOutcome:
    """A round of one depth: expected tokens a request, seconds of the step and of drafting, and how much faster tokens
    come than with depth 0."""

    depth: int
    tokens: float
    step_s: float
    draft_s: float
    speedup: float


def outcomes(steps: Sequence[float], drafts: Sequence[float], alive: Sequence[float]) -> list[DepthOutcome]:
    """Every depth from 0 to len(steps) - 1: steps[g] seconds of a step with g guesses a request, drafts[g] of drafting
    them. Speed-up is tokens x steps[0] / (steps + drafts); without a draft it is 1."""
    found = []
    for depth, (step, draft) in enumerate(zip(steps, drafts, strict=True)):
        tokens = tokens_per_round(alive, depth)
        found.append(DepthOutcome(depth, tokens, step, draft, tokens * steps[0] / (step + draft)))
    return found


def best(found: Sequence[DepthOutcome]) -> DepthOutcome:
    """The first depth of the largest speed-up; depth 0 where no draft pays."""
    return max(found, key=lambda outcome: outcome.speedup)  # max keeps the first of equals


def hurdle(tokens: float, seconds: float, extra: float) -> float:
    """The survival above which one more guess is worth `extra` seconds, in a round of `tokens` and `seconds`: the round
    gets faster exactly if S > tokens x extra / seconds."""
    return tokens * extra / seconds


def depth_by_hurdle(steps: Sequence[float], drafts: Sequence[float], alive: Sequence[float]) -> int:
    """Deepen while the next guess clears its hurdle. Finds the best depth where speed-up has a single peak; on a
    staircase it may stop before the next tread."""
    depth, tokens = 0, 1.0
    while depth + 1 < len(steps) and depth < len(alive):
        now = steps[depth] + drafts[depth]
        if alive[depth] <= hurdle(tokens, now, steps[depth + 1] + drafts[depth + 1] - now):
            break
        tokens += alive[depth]
        depth += 1
    return depth


def break_even(steps: Sequence[float], drafts: Sequence[float], depth: int) -> float | None:
    """The constant acceptance at which that depth is as fast as none; None if even certain guesses lose."""
    needed = (steps[depth] + drafts[depth]) / steps[0]
    if needed > depth + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if constant_tokens(middle, depth) >= needed else (middle, high)
    return high


def efficiency(steps: Sequence[float], depth: int) -> float:
    """Target efficiency: a plain step's time over that of a step with `depth` guesses a request (MoESD, 2505.19645).
    What a speed-up loses to the system rather than to acceptance."""
    return steps[0] / steps[depth]


def equivalent_acceptance(tokens: float, depth: int) -> float:
    """The constant acceptance that brings `tokens` a round at that depth."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if constant_tokens(middle, depth) >= tokens else (middle, high)
    return high
