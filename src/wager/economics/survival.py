"""Survival by depth: from acceptance rates, and as published for two drafters.

S_k is the probability that the draft token at depth k is reached and accepted. The published curves serve as the
acceptance model's prior, as synthetic drafters in simulation and as test fixtures. Source: F. Finn, "Adaptive
speculative decoding: picking draft lengths at runtime" (June 2026): Qwen3.6-35B-A3B in bf16 on a B200, temperature 0.6,
SPEED-Bench qualitative, over half a million rounds per drafter.
"""

from __future__ import annotations

from collections.abc import Sequence

from wager.errors import UsageError

MTP_SURVIVAL = (0.779, 0.583, 0.444, 0.349, 0.279, 0.226, 0.185, 0.155)
"""S_1 to S_8 of a multi-token-prediction head."""

DFLASH_SURVIVAL = (
    0.772,
    0.565,
    0.420,
    0.323,
    0.256,
    0.208,
    0.170,
    0.141,
    0.120,
    0.103,
    0.089,
    0.078,
    0.068,
    0.059,
    0.051,
)
"""S_1 to S_15 of a block-diffusion drafter."""

CURVES = {"mtp": MTP_SURVIVAL, "dflash": DFLASH_SURVIVAL}


def conditional(survival: Sequence[float]) -> tuple[float, ...]:
    """Acceptance rate of each depth, given that the one above was accepted: S_k / S_(k-1)."""
    return tuple(reached / above for reached, above in zip(survival, (1.0, *survival[:-1]), strict=True))


def survival(acceptance: float | Sequence[float], depth: int) -> tuple[float, ...]:
    """S_1..S_depth from one acceptance rate for every depth, or from one rate per depth (given that the token before
    was accepted). Depths beyond the given rates survive with probability 0. UsageError for a rate outside 0 to 1."""
    rates = [acceptance] * depth if isinstance(acceptance, int | float) else list(acceptance)[:depth]
    if not all(0 <= rate <= 1 for rate in rates):
        raise UsageError(f"An acceptance of {acceptance!r} is out of range.", "Give a rate between 0 and 1.")
    curve, reached = [], 1.0
    for rate in rates:
        reached *= rate
        curve.append(reached)
    return (*curve, *(0.0,) * (depth - len(curve)))


def tokens_per_round(survival: Sequence[float], depth: int | None = None) -> float:
    """1 + S_1 + ... + S_depth: expected tokens of a round of that depth (None: the deepest), bonus token included."""
    return 1.0 + sum(survival[: len(survival) if depth is None else depth])
