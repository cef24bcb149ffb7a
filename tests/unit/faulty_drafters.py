"""Drafters that do what none should: they fail, or something is wrong about their drafts. And one that declines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from wager.testing import HistoryDrafter, TargetOracle
from wager.testing.drafters import VocabularyDrafter
from wager.types import Draft, DraftRequest


class OutsideVocabularyDrafter(VocabularyDrafter):
    """Guesses token ids outside the vocabulary: too large, and negative."""

    name = "outside"

    def _draft(self, request: DraftRequest) -> Draft:
        ids = (self._vocab, -1, self._vocab + 12345, -(2**31))
        return Draft.chain(request.seq_id, [ids[d % len(ids)] for d in range(request.depth)], drafter=self.name)


class OverlongDrafter(HistoryDrafter):
    """Guesses far more tokens than were requested."""

    name = "overlong"

    def _draft(self, request: DraftRequest) -> Draft:
        known, count = self.known[request.seq_id], 4 * request.depth + 3
        guesses = (known * (2 + count // len(known)))[:count]
        return Draft.chain(request.seq_id, guesses, drafter=self.name)


class DecliningDrafter(HistoryDrafter):
    """Declines every request."""

    name = "declining"


class DuplicateSiblingsDrafter(HistoryDrafter):
    """Guesses the same token in every child of the root."""

    name = "duplicates"
    makes_trees = True

    def _draft(self, request: DraftRequest) -> Draft:
        token, depth = self.known[request.seq_id][-1], request.depth
        return Draft(request.seq_id, (token,) * depth, (-1,) * depth, (1.0,) * depth, self.name)


class FailingDrafter(HistoryDrafter):
    """Answers `calls` requests, then raises from every call of `propose`."""

    name = "failing"

    def __init__(self, calls: int = 3, *, oracle: TargetOracle | None = None) -> None:
        super().__init__(oracle=oracle)
        self._calls = calls

    def _draft(self, request: DraftRequest) -> Draft:
        self._calls -= 1
        if self._calls < 0:
            raise RuntimeError("the drafter failed")
        guesses = self._next_tokens(request) or self.known[request.seq_id][-request.depth :]
        return Draft.chain(request.seq_id, guesses, drafter=self.name)


class GarbageDrafter(VocabularyDrafter):
    """Sound guesses with something wrong behind or about them, a kind of wrong for every request: ids that the
    vocabulary does not have, parents that are none, scores that are no probabilities, drafts far too long, of other
    sequences, of none, several of one, and a distribution of the wrong shape."""

    name = "garbage"
    makes_trees = True

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """More drafts, or fewer, than there are requests; some name sequences that do not exist or did not ask."""
        drafts = [draft for request in requests for draft in self._garbage(request)]
        strangers = [Draft.chain(name, [0, 1], drafter=self.name) for name in ("", "nobody#9", *self.known)]
        asked = {request.seq_id for request in requests}
        return drafts + [draft for draft in strangers if draft.seq_id not in asked]

    def _garbage(self, request: DraftRequest) -> list[Draft]:
        rng, name, depth = self._random(request), request.seq_id, request.depth
        last = self.known[name][-1]
        count = min(depth, 3)
        guesses = (self._next_tokens(request) or [last] * count)[:count]
        sound = Draft.chain(name, guesses, drafter=self.name, scores=[0.9] * len(guesses))
        wrong_id = rng.choice([self._vocab, -1, self._vocab + 12345, -(2**31), 2**31, 2**40, -(2**70), 2**70])
        parents = list(sound.parents)
        if parents:
            parents[rng.randrange(len(parents))] = rng.choice([count, count - 1, -2, 10**6, -(2**31), 2**40])
        no_probability = rng.choice([float("nan"), float("inf"), -float("inf"), 1.5, -0.5, 1e308])
        shape = rng.choice([(0, 0), (1, 1), (depth, self._vocab - 1), (depth + 7, self._vocab)])
        other = Draft.chain(name, [0] * depth, drafter=self.name)
        kinds = [
            [Draft.chain(name, [*guesses, wrong_id, *guesses], drafter=self.name)],
            [Draft(name, tuple(guesses), tuple(parents), (), self.name)],
            [replace(sound, parents=(-1,))],
            [replace(sound, parents=tuple(range(-1, 20)))],
            [replace(sound, scores=(no_probability,) * len(sound))],
            [replace(sound, scores=(1.0,))],
            [Draft.chain(name, [*guesses, *[last] * (50 * depth + 1000)], drafter=self.name)],
            [Draft(name, (last,) * depth, (-1,) * depth, (1.0,) * depth, self.name)],
            [replace(sound, seq_id=stranger) for stranger in self.known if stranger != name],
            [other, sound, other, Draft(name), sound],
            [],
            [replace(sound, drafter="someone else")],
            [replace(sound, draft_probs=np.full(shape, float("nan")))],
        ]
        return rng.choice(kinds)
