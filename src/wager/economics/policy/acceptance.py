"""How likely a guess is to be right, learned online: by drafter, depth, sequence and confidence.

Two questions. *Before* drafting, what is the chance that a drafter makes a guess at this depth for this sequence, and
that it is right? A table by depth says it for an average sequence, and a rating how the sequence differs. *After*
drafting, what is the drafter's own confidence (Draft.scores) worth? A table by confidence says how far off it is. Both
start from priors (a published curve; a confidence means what it says) and forget slowly. Depths that were not tried are
unobserved: they continue the depth above. Knows no prices and no policy.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Container, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from wager.economics.survival import MTP_SURVIVAL, conditional
from wager.types import Draft

Floats = NDArray[np.float64]

DEEPEST = 16
"""Depths beyond this one count as this one."""

BANDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.98)
"""Borders between bands of confidence that one more guess is right."""

_LEAST, _MOST = 0.001, 0.999
"""No chance is believed to be outside of this."""

_PRIOR_WEIGHT, _ABOVE_WEIGHT = 5.0, 12.0
"""How many trials a prior counts for, and how many the depth above."""

FADING = 32
"""Tables age once in so many steps."""

_FADE = 0.92
"""What is left of a trial then: half of it after some 250 steps."""

_UNLIKE, _DRIFT = 0.4, 0.001
"""How much sequences are expected to differ, and how much a text changes in a round: variances of log-odds."""

_SAMPLES = 64
"""How many drafts are remembered for how they came out."""

_ALIKE = 0.5
"""What a trial counts for when a sequence is rated: those of one round are correlated."""

_HOPE = 0.25
"""How many standard deviations better than its mean a sequence is taken to be before drafting."""

_POINTS = np.array([-math.sqrt(3.0), 0.0, math.sqrt(3.0)])[:, None, None]  # Gauss-Hermite, three points
_SHARES = np.array([1 / 6, 2 / 3, 1 / 6])[:, None, None]


def logit(chance: float) -> float:
    """Log-odds, kept finite."""
    chance = min(_MOST, max(_LEAST, chance))
    return math.log(chance / (1.0 - chance))


class Table:
    """Log-odds by cell, where log-odds(right) = cell + offset and every trial says its offset.

    `prior` are the cells' log-odds before any trial. `chained`: cells are depths, and the prior of each continues what
    was found above it. `times` holds exp(cell), so that odds are a product.
    """

    def __init__(self, prior: Sequence[float], *, chained: bool) -> None:
        self.tried = [0.0] * len(prior)
        self.odds, self.times = list(prior), [math.exp(odds) for odds in prior]
        self._prior, self._chained = list(prior), chained
        self._right, self._offset = [0.0] * len(prior), [0.0] * len(prior)
        self._news, self._known = 0, 0.0

    def learn(self, cell: int, right: bool, *, offset: float, times: float) -> float:
        """One trial of a cell, with its offset (`times` is exp(offset)); counts with the next `refresh`. Returns the
        chance that it was given."""
        self.tried[cell] += 1
        self._right[cell] += right
        self._offset[cell] += offset
        self._news += 1
        odds = self.times[cell] * times
        return odds / (1.0 + odds)

    def age(self) -> None:
        """Time passes: trials fade, and what they taught so far becomes the prior."""
        self._prior = list(self.odds)
        for counts in (self.tried, self._right, self._offset):
            counts[:] = [_FADE * count for count in counts]

    def refresh(self) -> None:
        """Work out the cells anew if there is enough news."""
        if 16 * self._news <= self._known:
            return
        self._known, self._news = sum(self.tried), 0
        step = 0.0  # how far the cell above has moved from its prior
        for cell, prior in enumerate(self._prior):
            weight = _ABOVE_WEIGHT if self._chained and cell else _PRIOR_WEIGHT
            odds = prior + step
            tried = self.tried[cell]
            if tried:
                offset = self._offset[cell] / tried  # the prior is taken to be of such trials too
                right = (self._right[cell] + weight / (1 + math.exp(-odds - offset))) / (tried + weight)
                odds = logit(right) - offset
            self.odds[cell], self.times[cell] = odds, math.exp(odds)
            step = odds - prior if self._chained else 0.0


class Rating:
    """How much easier for a drafter one sequence is than others: mean and variance, in log-odds; `times` is exp(mean).

    Updated by Kalman steps, as players are in chess.
    """

    __slots__ = ("mean", "times", "variance")

    def __init__(self, mean: float, variance: float) -> None:
        self.mean, self.times, self.variance = mean, math.exp(mean), variance

    def learn(self, surprise: float, information: float, *, most: float) -> None:
        """A round: summed (right - expected), and summed variance of what was expected, of its trials."""
        self.variance = min(most, 1.0 / (1.0 / (self.variance + _DRIFT) + _ALIKE * information))
        self.mean = min(6.0, max(-6.0, self.mean + self.variance * _ALIKE * surprise))
        self.times = math.exp(self.mean)


class Skill:
    """What is known of one drafter. `survival` by depth is what is believed before anything was seen."""

    def __init__(self, survival: Sequence[float]) -> None:
        rates = conditional(survival)
        self.depths = Table([logit(rates[min(depth, len(rates) - 1)]) for depth in range(DEEPEST)], chained=True)
        self.bands = Table([0.0] * (len(BANDS) + 1), chained=False)
        self.scored = False  # its drafts carry confidence
        self._average, self._unlike = 0.0, _UNLIKE  # where sequences were seen to end up, and how far apart
        self._shifts, self._samples = np.ones((_SAMPLES, DEEPEST)), 0

    # ---- sequences --------------------------------------------------------------------------------------------------

    def open(self) -> Rating:
        """A new sequence is taken to be an average one."""
        return Rating(self._average, self._unlike)

    def close(self, rating: Rating) -> None:
        """A sequence ended: what it was tells how much sequences differ (one step of expectation-maximisation)."""
        if rating.variance < 0.7 * self._unlike:
            away = rating.mean - self._average
            self._average += 0.03 * away
            self._unlike = min(4.0, max(0.05, self._unlike + 0.03 * (away**2 + rating.variance - self._unlike)))

    # ---- before drafting --------------------------------------------------------------------------------------------

    def expect(self, ratings: Sequence[Rating], depth: int) -> Floats:
        """Survival of depths 1 .. depth, [ratings, depth].

        Averaged over what a sequence may yet turn out to be, and leaning to the better side of it: a door closed by
        mistake teaches nothing more, one left open closes itself.
        """
        hard = np.array([self.depths.odds[min(each, DEEPEST - 1)] for each in range(depth)])
        mean = np.array([rating.mean for rating in ratings])[:, None]
        deviation = np.sqrt(np.array([rating.variance for rating in ratings]))[:, None]
        paths = np.cumprod(1.0 / (1.0 + np.exp(-(hard + mean + deviation * (_POINTS + _HOPE)))), axis=2)
        expected: Floats = (paths * _SHARES).sum(0)
        return expected

    def option(self, survival: Floats, *, hurdle: Floats, floor: Floats) -> tuple[Floats, Floats, Floats]:
        """Guesses asked for now and verified only if they then clear `hurdle` (in survival, [n, 1]); after one below
        `floor` no further ones are made.

        Survival is taken to scatter as it lately did. Returns the expected survival of what will be verified, the
        chance that it will be, and the chance that it will be made, each [n, depth].
        """
        depth = np.minimum(np.arange(survival.shape[1]), DEEPEST - 1)
        times = self._shifts[: max(4, self._samples), depth]
        later = (survival / np.maximum(1 - survival, 1e-6))[:, None] * times  # [n, samples, depth]
        later /= 1 + later
        later *= (survival / np.maximum(later.mean(1), 1e-9))[
            :, None
        ]  # drafting tells guesses apart, it makes none better
        np.minimum(later, 1.0, out=later)
        made = np.ones(later.shape, dtype=bool)
        made[:, :, 1:] = later[:, :, :-1] > floor[:, None]
        verified = made & (later > hurdle[:, None])
        return (later * verified).mean(1), verified.mean(1), made.mean(1)

    def learn_shift(self, expected: Sequence[float], judged: Sequence[float]) -> None:
        """How the odds of survival after drafting differed from those expected before, by depth; a guess that was not
        made has survival 0, and depths that were not asked for go on as the last one."""
        pairs = zip(judged[:DEEPEST], expected, strict=False)
        times = [min(1e3, max(1e-3, _odds(after) / _odds(before))) for after, before in pairs]
        self._shifts[self._samples % len(self._shifts)] = times + times[-1:] * (DEEPEST - len(times))
        self._samples += 1

    def learn_round(self, rating: Rating, *, right: int, tried: int, first: int = 0) -> None:
        """Of depths 1, 2, ... the first `tried` were put to the test and the first `right` were right; those up to
        `first` were learned from before."""
        table, offset, times = self.depths, rating.mean, rating.times
        surprise, information = float(right - first), 0.0
        for depth in range(first, tried):
            chance = table.learn(min(depth, DEEPEST - 1), depth < right, offset=offset, times=times)
            surprise -= chance
            information += chance * (1.0 - chance)
        rating.learn(surprise, information, most=self._unlike)
        table.refresh()

    # ---- after drafting ---------------------------------------------------------------------------------------------

    def judge(self, draft: Draft, rating: Rating) -> list[float]:
        """Survival of every guess: by its confidence if it has one, by its depth if not."""
        survival: list[float] = []
        self.scored = scored = len(draft.scores) == len(draft.tokens)
        if not scored:
            return self._by_depth(draft, rating)
        scores, times = draft.scores, self.bands.times
        for score, parent in zip(scores, draft.parents, strict=True):
            above, alive = (scores[parent], survival[parent]) if parent >= 0 else (1.0, 1.0)
            felt = _felt(score, above)
            odds = felt * times[bisect(BANDS, felt)]
            survival.append(alive * odds / (odds + 1.0 - felt))
        return survival

    def _by_depth(self, draft: Draft, rating: Rating) -> list[float]:
        """Siblings share the chance of their depth, since at most one of them is right."""
        survival: list[float] = []
        siblings = Counter(draft.parents)
        for depth, parent in zip(draft.depths, draft.parents, strict=True):
            odds = self.depths.times[min(depth, DEEPEST) - 1] * rating.times
            above = survival[parent] if parent >= 0 else 1.0
            survival.append(above * odds / (1 + odds) / siblings[parent])
        return survival

    def learn_guesses(self, draft: Draft, nodes: Sequence[int], right: Container[int]) -> None:
        """Guesses with confidence that were put to the test, and which of them were right."""
        scores, parents, bands = draft.scores, draft.parents, self.bands
        for node in nodes:
            parent = parents[node]
            felt = _felt(scores[node], scores[parent] if parent >= 0 else 1.0)
            bands.learn(bisect(BANDS, felt), node in right, offset=logit(felt), times=felt / (1.0 - felt))
        bands.refresh()

    def age(self) -> None:
        """Time passes: call it every `FADING` steps."""
        self.depths.age()
        self.bands.age()

    def raw(self, survival: float) -> float:
        """About the score of a first guess that is worth `survival`."""
        odds = survival / max(1e-9, 1.0 - survival) / self.bands.times[bisect(BANDS, survival)]
        return odds / (1.0 + odds)


class Acceptance:
    """What is known of every drafter. `priors` gives survival by depth before anything was seen; without one the
    published curve of a multi-token-prediction head serves."""

    def __init__(self, priors: Mapping[str, Sequence[float]] | None = None) -> None:
        self._priors = dict(priors or {})
        self._skills: dict[str, Skill] = {}

    def skill(self, drafter: str) -> Skill:
        """The drafter's record, opened when it is first asked for."""
        if drafter not in self._skills:
            self._skills[drafter] = Skill(self._priors.get(drafter, MTP_SURVIVAL))
        return self._skills[drafter]


def _felt(score: float, above: float) -> float:
    """Confidence that a guess is right if the one above it is."""
    return min(_MOST, score / above) if above > 0 else 0.0


def _odds(chance: float) -> float:
    """Odds, finite and above zero."""
    return max(1e-6, chance) / max(1e-6, 1.0 - chance)
