"""Faulty drafters: the text must not change under any of them."""

from __future__ import annotations

from wager.draft.history import HistoryDrafter
from wager.types import Draft, DraftRequest


class OutsideVocabularyDrafter(HistoryDrafter):
    """Guesses token ids outside the vocabulary: too large, and negative."""

    name = "outside"

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self._vocab = vocab

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

    def __init__(self, calls: int = 3) -> None:
        super().__init__()
        self._calls = calls

    def _draft(self, request: DraftRequest) -> Draft:
        self._calls -= 1
        if self._calls < 0:
            raise RuntimeError("the drafter failed")
        known = self.known[request.seq_id]
        return Draft.chain(request.seq_id, known[-request.depth :], drafter=self.name)
