"""How likely draft tokens are to be accepted, learned online, in Python: the reference of csrc/acceptance.h."""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Container, Sequence
from functools import reduce
from operator import add

import numpy as np

from wager.economics.acceptance import (
    _AGED,
    _CHAINED_PRIOR_TRIALS,
    _CONFIDENCE_SHIFTS,
    _DRIFT,
    _ENDED,
    _MAX_DEPTH,
    _PRIOR_SEQUENCES,
    _PRIOR_TRIALS,
    _SPREAD,
    _TRIAL_WEIGHT,
    BIN_BORDERS,
    HIGHEST_RATE,
    MTP_SURVIVAL,
    Floats,
    conditional,
    log_odds_of,
)
from wager.types import Draft

MAX_ODDS = HIGHEST_RATE / (1 - HIGHEST_RATE)
MAX_LOG_ODDS = math.log(MAX_ODDS)


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

    def start_sequence(self) -> SequenceAcceptance:
        """A new sequence is taken to be an average one."""
        return SequenceAcceptance(self._mean, self._spread)

    def end_sequence(self, sequence: SequenceAcceptance) -> None:
        """It goes on counting for how much sequences differ."""
        number, total, squares = (_ENDED * each for each in self._ended)
        self._ended = number + 1.0, total + sequence.mean, squares + sequence.mean * sequence.mean + sequence.variance

    def compare_sequences(self, sequences: Sequence[SequenceAcceptance]) -> None:
        """Estimate anew how much sequences differ (a step of expectation-maximisation), and what each of them is
        therefore taken for: what was observed of it counts the less, the less they differ."""
        number, total, squares = self._ended
        number += len(sequences) + _PRIOR_SEQUENCES
        centre = (total + reduce(add, [each.mean for each in sequences], 0.0)) / number
        own = reduce(add, [each.mean * each.mean + each.variance for each in sequences], 0.0)
        squares += own + _PRIOR_SEQUENCES * _SPREAD
        spread = squares / number - centre * centre  # squares around the centre; the prior's are around 0
        for each in sequences:
            variance = 1 / (1 / spread + max(1 / each.variance - 1 / self._spread, 0.0))
            evidence = each.mean / each.variance - self._mean / self._spread
            each.set(variance * (centre / spread + evidence), variance)
        self._mean, self._spread = centre, spread

    @property
    def confidence_shifts(self) -> Floats:
        """Samples of how scores moved the odds of survival, [samples, depth]."""
        return self._shifts[: max(4, self._num_shifts)]

    def survival(self, draft: Draft, sequence: SequenceAcceptance) -> list[float]:
        """Survival of every node: by its confidence if it has one, by its depth if not."""
        self.has_scores = len(draft.scores) == len(draft.tokens)
        found: list[float] = []
        if not self.has_scores:
            siblings = Counter(draft.parents)  # they share the rate of their depth: at most one of them is accepted
            for depth, parent in zip(draft.depths, draft.parents, strict=True):
                odds = self.depths.odds[min(depth, _MAX_DEPTH) - 1] * sequence.odds
                above = found[parent] if parent >= 0 else 1.0
                found.append(above * odds / (1 + odds) / siblings[parent])
            return found
        scores, corrections = draft.scores, self.bins.odds
        for score, parent in zip(scores, draft.parents, strict=True):
            score_above, above = (scores[parent], found[parent]) if parent >= 0 else (1.0, 1.0)
            confidence = _conditional_confidence(score, score_above)
            odds = confidence * corrections[bisect(BIN_BORDERS, confidence)]
            found.append(above * odds / (odds + 1.0 - confidence))
        return found

    def learn_draft(
        self,
        sequence: SequenceAcceptance,
        draft: Draft | None,
        emitted: Sequence[int],
        *,
        accepted: int | None = None,
        depth: int,
        stops_early: bool = False,
        forecast: Sequence[float] | None = None,
    ) -> bool:
        """As of wager.kernels._native.AcceptanceModel."""
        drawn, right, more = accepted is not None, 0, False
        if draft is None:
            self.learn_round(sequence, accepted=0, tested=1)
        else:
            tested, path = compare(draft, emitted)
            right = accepted if accepted is not None else len(path)
            deepest = len(draft.tokens) if draft.is_chain else max(draft.depths)
            declined = right == deepest < depth and not stops_early and len(emitted) > right
            if draft.scores and not draft.is_chain and not drawn:
                self.learn_tree(sequence, self.survival(draft, sequence))
            else:
                self.learn_round(sequence, accepted=right, tested=min(right + 1, deepest + declined, len(emitted)))
            if draft.scores and not drawn:
                self.learn_scores(draft, tested, path)
            more = right == len(emitted) < deepest == len(draft) and not drawn
        if forecast is not None and not drawn and self.has_scores:
            survival = sorted(self.survival(draft, sequence) if draft else [], reverse=True)
            passes = max(1, len(survival)) if stops_early else depth
            self.learn_shift(forecast, survival + [0.0] * (passes - len(survival)))
        return more

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


def compare(draft: Draft, emitted: Sequence[int]) -> tuple[list[int], list[int]]:
    """Nodes that the emitted tokens can be compared with, and those of them that agree, from the root down."""
    tested: list[int] = []
    path: list[int] = []
    last, next_token = -1, {-1: emitted[0]} if emitted else {}  # after each node of the path
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        expected = next_token.get(parent)
        if expected is None:
            continue
        tested.append(node)
        if token == expected and parent == last:
            last = node
            path.append(node)
            if len(path) < len(emitted):
                next_token[node] = emitted[len(path)]
    return tested, path
