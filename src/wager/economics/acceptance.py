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
from collections.abc import Container, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from wager.errors import UsageError
from wager.kernels import _native
from wager.types import Draft

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


# ---- rates as log-odds ----

HIGHEST_RATE = 0.999
"""Bound of a rate, so that its log-odds stay moderate; 1 less it is the lowest."""

MAX_ODDS = HIGHEST_RATE / (1 - HIGHEST_RATE)
MAX_LOG_ODDS = math.log(MAX_ODDS)

_AGED = 0.92  # weight an observation keeps when it ages: half of it after some 250 steps
_PRIOR_TRIALS, _CHAINED_PRIOR_TRIALS = 5.0, 12.0  # trials that a prior counts for; where it follows the cell before


class LogOddsTable:
    """Log-odds by cell (depth or confidence bin), and their exponentials; a trial has those of its cell plus an offset.
    `prior` are log-odds before any trial. `chained`: a cell's prior moves as the cell before it moved from its own."""

    def __init__(self, prior: Sequence[float], *, chained: bool) -> None:
        self.log_odds, self.odds = list(prior), [math.exp(log_odds) for log_odds in prior]
        self.trials, self._accepted, self._offsets = ([0.0] * len(prior) for _ in range(3))
        self._prior, self._chained = list(prior), chained
        self._new_trials, self._known_trials = 0, 0.0

    def add(self, cell: int, *, accepted: float, offset: float, odds: float, weight: float = 1.0) -> float:
        """Count a trial with its offset (`odds` is exp(offset)) and return the acceptance rate expected of it.
        `accepted` is what came of it, 0 or 1, or a probability."""
        self.trials[cell] += weight
        self._accepted[cell] += weight * accepted
        self._offsets[cell] += weight * offset
        self._new_trials += 1
        expected = self.odds[cell] * odds
        return expected / (1.0 + expected)

    def start_from(self, log_odds: Sequence[float]) -> None:
        """Estimates of an earlier process become the prior. ValueError if they are not those of a table like this."""
        if len(log_odds) != len(self._prior) or not all(abs(each) <= MAX_LOG_ODDS for each in log_odds):
            raise ValueError("other cells, or no log-odds")
        self._prior = list(log_odds)
        self.log_odds[:], self.odds[:] = log_odds, [math.exp(each) for each in log_odds]

    def age(self) -> None:
        """Discount older trials; the current estimates become the prior."""
        self._prior = list(self.log_odds)
        for counts in (self.trials, self._accepted, self._offsets):
            counts[:] = [_AGED * count for count in counts]

    def refresh(self) -> None:
        """Estimate the cells anew, if more than a sixteenth of the trials are new."""
        if 16 * self._new_trials <= self._known_trials:
            return
        self._known_trials, self._new_trials = sum(self.trials), 0
        moved = 0.0  # of the cell above, from its prior
        for cell, prior in enumerate(self._prior):
            prior_trials = _CHAINED_PRIOR_TRIALS if self._chained and cell else _PRIOR_TRIALS
            log_odds, trials = prior + moved, self.trials[cell]
            if trials:
                offset = self._offsets[cell] / trials  # the prior trials are taken to have the same
                accepted = self._accepted[cell] + prior_trials / (1 + math.exp(-log_odds - offset))
                log_odds = log_odds_of(accepted / (trials + prior_trials)) - offset
            self.log_odds[cell], self.odds[cell] = log_odds, math.exp(log_odds)
            moved = log_odds - prior if self._chained else 0.0


def log_odds_of(probability: float) -> float:
    probability = min(HIGHEST_RATE, max(1 - HIGHEST_RATE, probability))
    return math.log(probability / (1.0 - probability))


# ---- one drafter's acceptance ----

LARGE_BATCH = 16  # sequences from which a batch is large: a sample of its drafts is looked at, its steps are not kept
_MAX_DEPTH = 16  # deeper tokens share the estimate of this depth
BIN_BORDERS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.98)  # of conditional confidence
_SPREAD = 0.4  # variance of log-odds between sequences, before any was observed
_PRIOR_SEQUENCES = 4.0  # sequences that this counts for
_ENDED = 0.97  # weight that sequences that ended keep at each further end
_DRIFT = 0.0025  # variance of the change of a sequence's log-odds per round, as a share of that between sequences
_TRIAL_WEIGHT = 0.5  # of a trial in a sequence's offset: trials of one round are correlated
_CONFIDENCE_SHIFTS = 64  # drafts remembered for how much confidence moved their survival


token_judge = _native.TokenJudge(BIN_BORDERS, HIGHEST_RATE)
"""Survival of the nodes of drafts, and which of them are worth their rows (csrc/judging.h)."""


class SequenceAcceptance:
    """How much easier one sequence is for a drafter than others: mean and variance of its offset in log-odds, followed
    by a Kalman filter; `odds` is exp(mean)."""

    __slots__ = ("mean", "odds", "variance")

    def __init__(self, mean: float, variance: float) -> None:
        self.mean, self.odds, self.variance = mean, math.exp(mean), variance

    def update(self, surprise: float, information: float, *, spread: float) -> None:
        """A round: the sums over its trials of (accepted - expected) and of the variance of what was expected."""
        predicted = min(spread, self.variance + _DRIFT * spread)
        self.variance = predicted / (1.0 + predicted * _TRIAL_WEIGHT * information)
        self.set(self.mean + self.variance * _TRIAL_WEIGHT * surprise, self.variance)

    def set(self, mean: float, variance: float) -> None:
        self.mean, self.variance = min(MAX_LOG_ODDS, max(-MAX_LOG_ODDS, mean)), variance
        self.odds = math.exp(self.mean)


class AcceptanceModel:
    """The acceptance estimates of one drafter. `prior` is its survival by depth before anything was observed."""

    def __init__(self, prior: Sequence[float] = MTP_SURVIVAL) -> None:
        rates = conditional(prior)
        by_depth = [log_odds_of(rates[min(depth, len(rates) - 1)]) for depth in range(_MAX_DEPTH)]
        self.depths = LogOddsTable(by_depth, chained=True)
        self.bins = LogOddsTable([0.0] * (len(BIN_BORDERS) + 1), chained=False)
        self.has_scores = False  # whether its last draft carried confidence
        self._mean, self._spread = 0.0, _SPREAD  # of the offsets of sequences
        self._ended = 0.0, 0.0, 0.0  # of sequences that ended: number, sum of offsets, and of their squares
        self._shifts, self._num_shifts = np.ones((_CONFIDENCE_SHIFTS, _MAX_DEPTH)), 0

    def estimates(self) -> dict[str, list[float]]:
        """What `start_from` of another process goes on from."""
        return {"depths": list(self.depths.log_odds), "bins": list(self.bins.log_odds)}

    def start_from(self, estimates: Mapping[str, Sequence[float]]) -> None:
        """Take earlier estimates for the prior. KeyError, TypeError or ValueError if they are none."""
        self.depths.start_from(estimates["depths"])
        self.bins.start_from(estimates["bins"])

    def start_sequence(self) -> SequenceAcceptance:
        """A new sequence is taken to be an average one."""
        return SequenceAcceptance(self._mean, self._spread)

    def end_sequence(self, sequence: SequenceAcceptance) -> None:
        """It goes on counting for how much sequences differ."""
        number, total, squares = (_ENDED * each for each in self._ended)
        self._ended = number + 1.0, total + sequence.mean, squares + sequence.mean**2 + sequence.variance

    def compare_sequences(self, sequences: Sequence[SequenceAcceptance]) -> None:
        """Estimate anew how much sequences differ (a step of expectation-maximisation), and what each of them is
        therefore taken for: what was observed of it counts the less, the less they differ."""
        number, total, squares = self._ended
        number += len(sequences) + _PRIOR_SEQUENCES
        centre = (total + sum([each.mean for each in sequences])) / number
        squares += sum([each.mean**2 + each.variance for each in sequences]) + _PRIOR_SEQUENCES * _SPREAD
        spread = squares / number - centre**2  # squares around the centre; the prior's are around 0
        for each in sequences:
            variance = 1 / (1 / spread + max(1 / each.variance - 1 / self._spread, 0.0))
            evidence = each.mean / each.variance - self._mean / self._spread
            each.set(variance * (centre / spread + evidence), variance)
        self._mean, self._spread = centre, spread

    @property
    def confidence_shifts(self) -> Floats:
        """Samples of how scores moved the odds of survival, [samples, depth]."""
        return self._shifts[: max(4, self._num_shifts)]

    def score_of(self, survival: float) -> float:
        """About the score that the drafter itself gives a first token with this survival."""
        odds = survival / max(1e-9, 1.0 - survival) / self.bins.odds[bisect(BIN_BORDERS, survival)]
        return odds / (1.0 + odds)

    def survival(self, draft: Draft, sequence: SequenceAcceptance) -> list[float]:
        """Survival of every node: by its confidence if it has one, by its depth if not."""
        self.has_scores = len(draft.scores) == len(draft.tokens)
        return token_judge.survival(draft.scores, draft.parents, self.bins.odds, self.depths.odds, sequence.odds)

    def learn_round(self, sequence: SequenceAcceptance, *, accepted: int, tested: int, known: int = 0) -> None:
        """Depths 1 to `tested` were tested and the first `accepted` accepted; `known` were learned before."""
        offset, odds, add = sequence.mean, sequence.odds, self.depths.add
        surprise, information = float(accepted - known), 0.0
        for depth in range(known, tested):
            rate = add(min(depth, _MAX_DEPTH - 1), accepted=depth < accepted, offset=offset, odds=odds)
            surprise -= rate
            information += rate * (1.0 - rate)
        sequence.update(surprise, information, spread=self._spread)
        self.depths.refresh()

    def learn_tree(self, sequence: SequenceAcceptance, survival: Sequence[float]) -> None:
        """A draft that is no chain: its n-th likeliest node takes the place of a chain's token at depth n. `survival`
        is that of its nodes, by their confidence; which of them were accepted is learned by `learn_scores`."""
        above, surprise, information, add = 1.0, 0.0, 0.0, self.depths.add
        for index, reached in enumerate(sorted(survival, reverse=True)):
            if above <= 0:
                break
            rate, cell = reached / above, min(index, _MAX_DEPTH - 1)
            expected = add(cell, accepted=rate, offset=sequence.mean, odds=sequence.odds, weight=above)
            surprise += above * (rate - expected)
            information += above * expected * (1.0 - expected)
            above = reached
        sequence.update(surprise, information, spread=self._spread)
        self.depths.refresh()

    def learn_scores(self, draft: Draft, tested: Sequence[int], accepted: Container[int]) -> None:
        """Nodes of a draft with scores that were tested, and which of them were accepted."""
        scores, parents, add = draft.scores, draft.parents, self.bins.add
        for node in tested:
            parent = parents[node]
            confidence = _conditional_confidence(scores[node], scores[parent] if parent >= 0 else 1.0)
            cell, odds = bisect(BIN_BORDERS, confidence), confidence / (1.0 - confidence)
            add(cell, accepted=node in accepted, offset=log_odds_of(confidence), odds=odds)
        self.bins.refresh()

    def learn_shift(self, forecast: Sequence[float], survival: Sequence[float]) -> None:
        """How the survival of a draft's tokens (0 for one that was not drafted) differs from its forecast, by depth;
        depths that were not requested repeat the last one."""
        shifts: list[float] = []
        for after, before in zip(survival[:_MAX_DEPTH], forecast, strict=False):
            odds = max(1e-6, after) / max(1e-6, 1.0 - after)
            odds_before = max(1e-6, before) / max(1e-6, 1.0 - before)
            shifts.append(min(MAX_ODDS, max(1 / MAX_ODDS, odds / odds_before)))
        self._shifts[self._num_shifts % _CONFIDENCE_SHIFTS] = shifts + shifts[-1:] * (_MAX_DEPTH - len(shifts))
        self._num_shifts += 1

    def age(self) -> None:
        """To be called every SLOW_INTERVAL steps."""
        self.depths.age()
        self.bins.age()


def _conditional_confidence(score: float, score_above: float) -> float:
    """The drafter's confidence that a token is accepted if the one above it is."""
    return min(HIGHEST_RATE, score / score_above) if score_above > 0 else 0.0
