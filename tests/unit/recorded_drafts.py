"""What drafters draft in an engine, kept for tests, which may hand on something else."""

from __future__ import annotations

import random
from collections.abc import Sequence

from wager.draft.base import Drafter
from wager.types import Draft, DraftRequest


def keep_drafts(drafter: Drafter) -> list[Draft]:
    """All that it drafts from now on."""
    made: list[Draft] = []
    propose = drafter.propose

    def kept(asked: Sequence[DraftRequest]) -> list[Draft]:
        made.extend(propose(asked))
        return made[-len(asked) :]

    drafter.propose = kept  # type: ignore[method-assign]
    return made


class Recorded:
    """Keeps what a drafter drafted, and hands on something else, so that drafts are accepted in part: the right tokens
    of `texts`, now and then a wrong one below `vocab`."""

    def __init__(self, drafter: Drafter, *, vocab: int) -> None:
        self.made: dict[tuple[str, int], Draft] = {}
        self.asked: dict[tuple[str, int], DraftRequest] = {}
        self.texts: dict[str, list[int]] = {}
        self._name, self._propose, self._vocab, self._rng = drafter.name, drafter.propose, vocab, random.Random(4)
        drafter.propose = self.propose  # type: ignore[method-assign]

    @property
    def drafts(self) -> dict[tuple[str, int], Draft]:
        """Those that are not empty."""
        return {key: draft for key, draft in self.made.items() if len(draft)}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        handed = []
        for request, draft in zip(requests, self._propose(requests), strict=True):
            assert draft.seq_id == request.seq_id and len(draft) <= request.depth
            key = request.seq_id, request.position
            self.made[key], self.asked[key] = draft, request
            right = self.texts[request.seq_id][request.position : request.position + len(draft)]
            tokens = [token if self._rng.random() < 0.7 else (token + 1) % self._vocab for token in right]
            handed.append(Draft.chain(request.seq_id, tokens, drafter=self._name))
        return handed
