"""Drafters that misbehave: a text must survive each of them unchanged."""

from __future__ import annotations

from wager.testing.drafters import _Remembering
from wager.types import Draft, DraftRequest


class OutsideVocabularyDrafter(_Remembering):
    """Guesses ids no vocabulary has: too large, and negative."""

    name = "outside"

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self._vocab = vocab

    def _draft(self, ask: DraftRequest) -> Draft:
        ids = (self._vocab, -1, self._vocab + 12345, -(2**31))
        return Draft.chain(ask.seq_id, [ids[d % len(ids)] for d in range(ask.depth)], drafter=self.name)


class OverlongDrafter(_Remembering):
    """Guesses far more than it was asked for."""

    name = "overlong"

    def _draft(self, ask: DraftRequest) -> Draft:
        known = self.known[ask.seq_id]
        return Draft.chain(
            ask.seq_id, (known * (2 + 4 * ask.depth // len(known)))[: 4 * ask.depth + 3], drafter=self.name
        )


class SilentDrafter(_Remembering):
    """Declines every ask."""

    name = "silent"


class TwinDrafter(_Remembering):
    """Guesses the same token in every child of the root."""

    name = "twins"
    makes_trees = True

    def _draft(self, ask: DraftRequest) -> Draft:
        token = self.known[ask.seq_id][-1]
        return Draft(ask.seq_id, (token,) * ask.depth, (-1,) * ask.depth, (1.0,) * ask.depth, self.name)


class DyingDrafter(_Remembering):
    """Works for a while, then raises from `propose` for ever."""

    name = "dying"

    def __init__(self, lives: int = 3) -> None:
        super().__init__()
        self._lives = lives

    def _draft(self, ask: DraftRequest) -> Draft:
        self._lives -= 1
        if self._lives < 0:
            raise RuntimeError("the drafter died")
        known = self.known[ask.seq_id]
        return Draft.chain(ask.seq_id, known[-ask.depth :], drafter=self.name)
