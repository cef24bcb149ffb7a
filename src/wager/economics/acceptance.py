"""How likely draft tokens are to be accepted, learned online: by drafter, depth, sequence and the drafter's confidence.

Before drafting, the log-odds that a token is accepted if the one above it was are those of its depth plus an offset of
the sequence. After drafting, they are the drafter's own confidence (Draft.scores) corrected by what confidences of that
size were observed to mean. Both start from priors and older observations are discounted. A depth that was not reached
is unobserved, not rejected: its estimate moves with that of the depth above.

S_k is the probability that the draft token at depth k is reached and accepted. Two published curves serve as the
model's prior, as synthetic drafters in simulation and as test fixtures. Source: F. Finn, "Adaptive speculative
decoding: picking draft lengths at runtime" (June 2026): Qwen3.6-35B-A3B in bf16 on a B200, temperature 0.6, SPEED-Bench
qualitative, over half a million rounds per drafter.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wager.errors import UsageError
from wager.kernels import _native

Floats = NDArray[np.float64]

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
MEASURED_ON = "Qwen3.6-35B-A3B"
"""The target of these curves."""


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


def constant_rate(tokens: float, depth: int) -> float:
    """The acceptance rate at which rounds of that depth have so many tokens, if it is the same at every depth."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_round(survival(middle, depth)) < tokens else (low, middle)
    return high


# ---- one drafter's acceptance ----

HIGHEST_RATE = 0.999
"""Bound of a rate, so that its log-odds stay moderate; 1 less it is the lowest."""

_AGED = 0.92  # weight an observation keeps when it ages: half of it after some 250 steps
_PRIOR_TRIALS, _CHAINED_PRIOR_TRIALS = 5.0, 12.0  # trials that a prior counts for; where it follows the cell before
LARGE_BATCH = 16  # sequences from which a batch is large: a sample of its drafts is looked at, its steps are not kept
_MAX_DEPTH = 16  # deeper tokens share the estimate of this depth
BIN_BORDERS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.98)  # of conditional confidence
_SPREAD = 0.4  # variance of log-odds between sequences, before any was observed
_PRIOR_SEQUENCES = 4.0  # sequences that this counts for
_ENDED = 0.97  # weight that sequences that ended keep at each further end
_DRIFT = 0.0025  # variance of the change of a sequence's log-odds per round, as a share of that between sequences
_TRIAL_WEIGHT = 0.5  # of a trial in a sequence's offset: trials of one round are correlated
_CONFIDENCE_SHIFTS = 64  # drafts remembered for how much confidence moved their survival


def log_odds_of(probability: float) -> float:
    probability = min(HIGHEST_RATE, max(1 - HIGHEST_RATE, probability))
    return math.log(probability / (1.0 - probability))


class AcceptanceModel(_native.AcceptanceModel):
    """The acceptance estimates of one drafter (csrc/acceptance.h). `prior` is its survival by depth before anything was
    observed.

    `depths` and `bins` (of the drafter's confidence in a token, given the one above it) are tables of log-odds. Each
    sequence has an offset: how much easier it is than others, followed by a Kalman filter. How much sequences differ is
    estimated anew at every plan (`compare_sequences`, a step of expectation-maximisation), and what was observed of one
    counts the less, the less they differ. `shifts` are samples of how scores moved the odds of survival, by depth.
    """

    def __init__(self, prior: Sequence[float] = MTP_SURVIVAL) -> None:
        rates = conditional(prior)
        super().__init__(
            prior=[log_odds_of(rates[min(depth, len(rates) - 1)]) for depth in range(_MAX_DEPTH)],
            borders=BIN_BORDERS,
            highest=HIGHEST_RATE,
            aged=_AGED,
            prior_trials=_PRIOR_TRIALS,
            chained_prior_trials=_CHAINED_PRIOR_TRIALS,
            spread=_SPREAD,
            prior_sequences=_PRIOR_SEQUENCES,
            ended=_ENDED,
            drift=_DRIFT,
            trial_weight=_TRIAL_WEIGHT,
            samples=_CONFIDENCE_SHIFTS,
        )

    def estimates(self) -> dict[str, list[float]]:
        """What `start_from` of another process goes on from."""
        return {"depths": self.depths.log_odds, "bins": self.bins.log_odds}

    def score_of(self, survival: float) -> float:
        """About the score that the drafter itself gives a first token with this survival."""
        odds = survival / max(1e-9, 1.0 - survival) / self.bins.odds[bisect(BIN_BORDERS, survival)]
        return odds / (1.0 + odds)
