"""How likely a guess is to be right: survival by drafter, sequence and depth, learned online.

Two questions, two tables a drafter. *Before* drafting only drafter, sequence and depth are known: what is the chance
that a guess is made there and is right? *After* drafting the drafter's own confidence is known too (Draft.scores): what
is a confidence worth at that depth? Priors are published curves and the belief that a confidence means what it says;
both give way to counts. Depths that were not tried are unobserved: they continue the depth above along the prior's
shape. Knows no prices and no policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from wager.economics.envelopes import MTP_SURVIVAL, conditional
from wager.economics.ledger import Ledger, Noted
from wager.economics.ratings import Bools, Floats, Ints, Ratings, Table, logit, sigmoid
from wager.types import Draft

DEEPEST = 16
"""Depths beyond this one count as this one."""

PRIOR_WEIGHT = 5.0
"""How many trials the prior counts for, at depth 1 and in each band of confidence."""

_ALIKE = 0.5
"""What a trial counts for when a sequence is rated: those of one round are correlated."""

_HOPE = 0.5
"""How many standard deviations better than its mean a sequence is taken to be before drafting."""

BANDS = np.array([0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.98])
"""Borders between bands of confidence that one more guess is right."""

_CENTRES = np.array([0.01, *((BANDS[1:] + BANDS[:-1]) / 2), 0.99])
_LINES = [tuple(range(-1, size - 1)) for size in range(64)]
_POINTS = np.array([-np.sqrt(3.0), 0.0, np.sqrt(3.0)])[:, None, None]  # Gauss-Hermite, three points
_SHARES = np.array([1 / 6, 2 / 3, 1 / 6])[:, None, None]
_SHIFTS = np.array([-np.inf, -5.0, -3.5, -2.5, -1.5, -0.75, 0.0, 0.75, 1.5, 2.5, 3.5])
_TIMES = np.exp(_SHIFTS)
_BETWEEN = np.array([-7.0, *((_SHIFTS[2:] + _SHIFTS[1:-1]) / 2)])


@dataclass(frozen=True, slots=True)
class Judged:
    """Guesses of several drafts of one drafter, a row each, padded to the widest: arrays [drafts, nodes].

    `survival` is the chance that a node is reached and right (0 in the padding), `chance` that it is right if reached,
    `cells` where that chance stands in the table.
    """

    survival: Floats
    chance: Floats
    cells: Ints
    made: Bools
    scored: bool
    chains: bool


def is_chain(draft: Draft) -> bool:
    """Draft.is_chain, for the hot path."""
    parents = draft.parents
    return parents == _LINES[len(parents)] if len(parents) < len(_LINES) else draft.is_chain


class Skill:
    """What is known of one drafter. Slots are rows of its rating arrays; the caller hands them out."""

    def __init__(self, survival: Sequence[float]) -> None:
        curve = logit(np.array(_extended(conditional(survival))))
        self.offers = Table(curve[:1], np.diff(curve), weight=PRIOR_WEIGHT)
        self.guesses = Table(logit(_CENTRES), np.zeros(DEEPEST - 1), weight=PRIOR_WEIGHT)
        self.before = Ratings(variance=0.4, drift=0.002)
        self.after = Ratings(variance=0.15, drift=0.001)
        self._offered, self._guessed = Ledger(), Ledger()
        self.scored = False  # its drafts carry scores
        self._spread = np.zeros((DEEPEST, len(_SHIFTS)))
        self._spread[:, int(np.searchsorted(_SHIFTS, 0.0))] = PRIOR_WEIGHT
        self._shares = self._spread / self._spread.sum(1, keepdims=True)

    def expect(self, slots: Ints, depth: int) -> tuple[Floats, Floats]:
        """Before drafting: survival and conditional chance of depths 1 .. depth, each [slots, depth].

        Survival is averaged over what a sequence may yet turn out to be, and leans to the better side of it: a door
        closed by mistake teaches nothing more, one left open closes itself.
        """
        hard = self.offers.odds[_depths(depth), 0]
        mean, deviation = self.before.mean[slots, None], np.sqrt(self.before.variance[slots, None])
        paths = np.cumprod(sigmoid(hard + mean + deviation * (_POINTS + _HOPE)), axis=2)
        return (paths * _SHARES).sum(0), sigmoid(hard + mean)

    def judge(self, slots: Ints, drafts: Sequence[Draft]) -> Judged:
        """After drafting: what each guess is worth, by its score if all drafts carry scores, by its depth if not."""
        sizes = [len(draft.tokens) for draft in drafts]
        width = max(sizes, default=0)
        scored = all(len(draft.scores) == size for draft, size in zip(drafts, sizes, strict=True))
        chains = all(map(is_chain, drafts))
        self.scored = scored
        made = np.arange(width) < np.array(sizes, dtype=np.intp)[:, None]
        depths = np.broadcast_to(_depths(width), made.shape) if chains else _tree_depths(drafts, width)
        if scored:
            confidence = _confidence(drafts, made) if chains else _tree_confidence(drafts, width)
            cells = depths * len(_CENTRES) + np.searchsorted(BANDS, confidence)
            odds, ratings = self.guesses.odds, self.after
        else:
            cells, odds, ratings = depths, self.offers.odds, self.before
        chance = made / (1.0 + np.exp(-odds.ravel()[cells] - ratings.mean[slots, None]))
        survival = _chain_survival(chance) if chains else _tree_survival(drafts, chance, shared=not scored)
        return Judged(survival, chance, cells, made, scored, chains)

    def learn_offers(
        self, slots: Ints, *, run: Sequence[int], seen: Sequence[int], chance: Floats, first: int = 0
    ) -> None:
        """Rounds by sequence: of depths 1, 2, ... those from `first` + 1 to `seen` were tried, and right up to `run`.

        `chance` [rounds, depth] is what was expected of each. Learned with the next `digest` that is due.
        """
        self._offered.add(Noted(slots, chance, _depths(chance.shape[1]), run, seen, first))

    def learn_guesses(self, slots: Ints, judged: Judged, *, run: Sequence[int], seen: Sequence[int]) -> None:
        """What became of judged chains: of each the first `seen` guesses were put to the test and `run` were right."""
        if judged.scored:
            self._guessed.add(Noted(slots, judged.chance, judged.cells, run, seen))

    def learn_nodes(self, slots: Ints, judged: Judged, *, trial: Bools, right: Bools) -> None:
        """The same for trees, by draft and node."""
        if judged.scored:
            self._guessed.add(Noted(slots, judged.chance, judged.cells, trial=trial, right=right))

    def digest(self, *, everything: bool = False) -> None:
        """Learn from the rounds that wait, if it is time or `everything` must be known."""
        for ledger, table, ratings in (
            (self._offered, self.offers, self.before),
            (self._guessed, self.guesses, self.after),
        ):
            if ledger.due or (everything and not ledger.empty):
                rounds = ledger.take()
                trial = rounds.trial
                rating = np.broadcast_to(ratings.mean[rounds.slots, None], trial.shape)[trial]
                table.learn(rounds.cells[trial], rounds.right[trial].astype(np.float64), rating)
                ratings.learn(rounds.slots, *_surprise(rounds.chance, trial, rounds.right))

    def learn_spread(self, expected: Floats, judged: Floats, *, asked: Bools) -> None:
        """How survival after drafting scatters about survival before it, in log-odds, [rounds, depth], where `asked`;
        0 stands for a guess that was not made."""
        shift = np.log(_odds(judged) / _odds(expected))
        bins = np.searchsorted(_BETWEEN, shift.ravel()).reshape(shift.shape)
        width = min(shift.shape[1], DEEPEST)
        cells = (np.arange(width) * len(_SHIFTS) + bins[:, :width])[asked[:, :width]]
        self._spread += np.bincount(cells, minlength=self._spread.size).reshape(self._spread.shape)
        total = self._spread.sum(1, keepdims=True)
        self._spread *= np.minimum(1.0, 2000.0 / total)
        self._shares = self._spread / total

    def option(self, survival: Floats, *, hurdle: Floats, floor: Floats) -> tuple[Floats, Floats, Floats]:
        """Guesses asked for now and admitted later only if they then clear `hurdle` (survival units, [n, 1]).

        Returns the expected survival of what will be admitted, the chance that it will be, and the chance that it
        will be above `floor`, each [n, depth].
        """
        shares = self._shares[_depths(survival.shape[1])]  # [depth, shifts]
        later = _odds(survival)[:, :, None] * _TIMES
        later /= 1 + later
        mean = (later * shares).sum(2)
        later *= (survival / np.maximum(mean, 1e-9))[:, :, None]
        np.minimum(later, 1.0, out=later)
        kept = shares * (later > hurdle[:, :, None])
        return (later * kept).sum(2), kept.sum(2), (shares * (later > floor[:, :, None])).sum(2)


class Follower(Protocol):
    """Keeps an array by slot."""

    def fit(self, slots: int) -> None:
        """Make room for slots 0 .. slots - 1."""

    def open(self, slot: int, sequence: str) -> None:
        """A sequence starts in a slot."""

    def close(self, slot: int) -> None:
        """Its sequence ended."""


class Acceptance:
    """What is known of every drafter and every live sequence.

    `priors` gives a drafter's survival by depth before anything was seen; without one the published curve of a
    multi-token-prediction head serves.
    """

    def __init__(self, priors: Mapping[str, Sequence[float]] | None = None) -> None:
        self._priors = dict(priors or {})
        self._skills: dict[str, Skill] = {}
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._followers: list[Follower] = []

    def follow(self, follower: Follower) -> None:
        """Tell `follower` of every slot that is opened or closed from now on."""
        self._followers.append(follower)

    def skill(self, drafter: str) -> Skill:
        """The drafter's record, opened when it is first asked for."""
        if drafter not in self._skills:
            skill = self._skills[drafter] = Skill(self._priors.get(drafter, MTP_SURVIVAL))
            for ratings in (skill.before, skill.after):
                ratings.fit(self.slots)
        return self._skills[drafter]

    @property
    def slots(self) -> int:
        """How many slots were ever in use together."""
        return len(self._slots) + len(self._free)

    def slot(self, sequence: str) -> int:
        """The sequence's row in every drafter's ratings; a new sequence is given one."""
        slot = self._slots.get(sequence)
        if slot is None:
            slot = self._free.pop() if self._free else self.slots
            self._slots[sequence] = slot
            for follower in (*self._ratings(), *self._followers):
                follower.fit(slot + 1)
                follower.open(slot, sequence)
        return slot

    def end(self, sequence: str) -> None:
        """Forget a sequence; unknown ones are ignored."""
        slot = self._slots.pop(sequence, None)
        if slot is not None:
            for skill in self._skills.values():
                skill.digest(everything=True)  # before the slot belongs to someone else
            self._free.append(slot)
            for follower in (*self._ratings(), *self._followers):
                follower.close(slot)

    def _ratings(self) -> Iterator[Ratings]:
        for skill in self._skills.values():
            yield skill.before
            yield skill.after


def _odds(chance: Floats) -> Floats:
    """Odds, finite and above zero."""
    clipped = np.clip(chance, 1e-6, 1 - 1e-6)
    odds: Floats = clipped / (1 - clipped)
    return odds


def _extended(chances: Sequence[float]) -> list[float]:
    """A curve continued at its last value down to DEEPEST, or cut there."""
    return [chances[min(depth, len(chances) - 1)] for depth in range(DEEPEST)]


_COUNT = np.minimum(np.arange(4096), DEEPEST - 1)


def _depths(count: int) -> Ints:
    """0, 1, ... with everything beyond the deepest counted as the deepest."""
    return _COUNT[:count]


def _surprise(chance: Floats, trial: Bools, right: Bools) -> tuple[Floats, Floats]:
    """Per row: summed right - expected, and summed variance of what was expected, over the trials. The trials of a
    round are alike (an easy stretch is easy for all of them) and so count for less than one each."""
    surprise = np.where(trial, right - chance, 0.0).sum(1)
    return _ALIKE * surprise, _ALIKE * np.where(trial, chance * (1 - chance), 0.0).sum(1)


def _confidence(drafts: Sequence[Draft], made: Bools) -> Floats:
    """Scores are survival; what is wanted is the chance given the node above. [drafts, nodes], chains only."""
    survival = np.zeros(made.shape)
    survival[made] = np.array([score for draft in drafts for score in draft.scores])
    above = np.ones_like(survival)
    above[:, 1:] = np.maximum(survival[:, :-1], 1e-9)
    quotient: Floats = survival / above
    return quotient


def _tree_depths(drafts: Sequence[Draft], width: int) -> Ints:
    depths = np.zeros((len(drafts), width), dtype=np.intp)
    for row, draft in enumerate(drafts):
        depths[row, : len(draft)] = np.minimum(np.array(draft.depths, dtype=np.intp) - 1, DEEPEST - 1)
    return depths


def _tree_confidence(drafts: Sequence[Draft], width: int) -> Floats:
    confidence = np.zeros((len(drafts), width))
    for row, draft in enumerate(drafts):
        for node, (score, parent) in enumerate(zip(draft.scores, draft.parents, strict=True)):
            confidence[row, node] = score / max(draft.scores[parent] if parent >= 0 else 1.0, 1e-9)
    return confidence


def _chain_survival(chance: Floats) -> Floats:
    survival: Floats = chance.cumprod(axis=1)
    return survival


def _tree_survival(drafts: Sequence[Draft], chance: Floats, *, shared: bool) -> Floats:
    """Survival along each node's path; `shared`: siblings divide their chance, since at most one of them is right."""
    survival = np.zeros_like(chance)
    for row, draft in enumerate(drafts):
        siblings = Counter(draft.parents) if shared else Counter()
        for node, parent in enumerate(draft.parents):
            above = survival[row, parent] if parent >= 0 else 1.0
            survival[row, node] = above * chance[row, node] / max(1, siblings[parent])
    return survival
