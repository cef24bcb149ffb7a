"""A drafter that works for another one: if it raises, the other goes on without it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from wager.draft.base import Drafter
from wager.types import Draft, DraftRequest

log = logging.getLogger("wager")

Result = TypeVar("Result")


class GuardedDrafter:
    """`drafter`, whose drafts are cut where they are no trees of ids below `vocab`; None once it has failed."""

    def __init__(self, drafter: Drafter, *, vocab: int) -> None:
        self.drafter: Drafter | None = drafter
        self._vocab = vocab

    def call(self, call: Callable[[Drafter], Result], *, otherwise: Result) -> Result:
        """What the call returns; `otherwise` if the drafter fails, or has failed before."""
        if self.drafter is None:
            return otherwise
        try:
            return call(self.drafter)
        except Exception as error:
            name = self.drafter.name
            log.warning("Drafter %r, which works for another one, failed: %s: %s", name, type(error).__name__, error)
            self.drafter = None
            return otherwise

    def propose(self, requests: Sequence[DraftRequest]) -> dict[str, Draft]:
        """The valid part of each draft, by sequence, none larger than was requested."""
        asked = {request.seq_id: request for request in requests}

        def propose(drafter: Drafter) -> dict[str, Draft]:
            drafts = drafter.propose(requests) if requests else []
            return {
                draft.seq_id: self._valid_part(draft, asked[draft.seq_id].depth)
                for draft in drafts
                if draft.seq_id in asked
            }

        return self.call(propose, otherwise={})

    def _valid_part(self, draft: Draft, limit: int) -> Draft:
        size = min(limit, len(draft.tokens), len(draft.parents))
        for node in range(size):
            if not (0 <= draft.tokens[node] < self._vocab and -1 <= draft.parents[node] < node):
                size = node
                break
        tokens, parents, scores = tuple(draft.tokens[:size]), tuple(draft.parents[:size]), tuple(draft.scores[:size])
        has_scores = len(scores) == size and all(0.0 <= score <= 1.0 for score in scores)
        probs = draft.draft_probs
        if probs is not None and probs.shape != (len(draft.tokens), self._vocab):
            return Draft(draft.seq_id, drafter=draft.drafter)
        kept = None if probs is None else probs[:size]
        return Draft(draft.seq_id, tokens, parents, scores if has_scores else (), draft.drafter, kept)
