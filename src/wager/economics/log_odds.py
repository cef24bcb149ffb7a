"""Rates as log-odds, learned by cell: of depths, or of confidences of about the same size."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
