"""A drafter for the drafter: guesses what a draft model will draw, so that one of its passes gives several tokens.

Staged drafting (Spector and Re 2023, arXiv 2308.04623): every stage is a drafter and its verification, and equality
with the token that a stage draws itself accepts a guess, so the draft is the same with an inner drafter and without.
The inner drafter is any drafter, which may have one of its own. It is told what the draft model guessed as if it were
known, and begins again where the text went on differently.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from wager.draft.base import Drafter
from wager.draft.model_rounds import ChainRound
from wager.types import Draft, DraftRequest, SamplingParams

log = logging.getLogger("wager")


@dataclass(slots=True)
class _ToldSequence:
    """What the inner drafter was told of a sequence: the prompt, and all tokens until now."""

    params: SamplingParams
    prompt_tokens: int
    tokens: list[int]


class InnerDrafter:
    """`drafter` guesses for a draft model of `vocab` logits. One that raises is not asked again."""

    def __init__(self, drafter: Drafter, *, vocab: int) -> None:
        self.drafter: Drafter | None = drafter
        self._vocab = vocab
        self._told: dict[str, _ToldSequence] = {}

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams) -> None:
        """A sequence starts; the inner drafter learns of it when it is to guess."""
        self._told[seq_id] = _ToldSequence(params, len(tokens), [])

    def end(self, seq_id: str) -> None:
        told = self._told.pop(seq_id, None)
        if told is not None and told.tokens and self.drafter is not None:
            try:
                self.drafter.end(seq_id)
            except Exception as error:
                self._fail(error)

    def guess(self, rounds: Sequence[ChainRound]) -> dict[str, Draft]:
        """Its guesses of what follows each round's tokens, valid trees of known tokens; none where it has none."""
        if self.drafter is None:
            return {}
        requests: dict[str, DraftRequest] = {}
        try:
            for r in rounds:
                tokens, room = r.continuation
                if room > 0:
                    self._tell(self.drafter, r.request.seq_id, tokens)
                    requests[r.request.seq_id] = _inner_request(r.request, len(tokens), room)
            drafts = self.drafter.propose(list(requests.values())) if requests else []
            return {
                draft.seq_id: self._valid_part(draft, requests[draft.seq_id].depth)
                for draft in drafts
                if draft.seq_id in requests
            }
        except Exception as error:
            self._fail(error)
            return {}

    def _tell(self, drafter: Drafter, seq_id: str, tokens: Sequence[int]) -> None:
        told = self._told[seq_id]
        known = len(told.tokens)
        if not known or told.tokens != tokens[:known]:
            if known:
                drafter.end(seq_id)
            drafter.begin(seq_id, tokens[: told.prompt_tokens], told.params)
            known = told.prompt_tokens
        if len(tokens) > known:
            drafter.accept(seq_id, tokens[known:])
        told.tokens = list(tokens)

    def _valid_part(self, draft: Draft, limit: int) -> Draft:
        size = min(limit, len(draft.tokens), len(draft.parents))
        for node in range(size):
            if not (0 <= draft.tokens[node] < self._vocab and -1 <= draft.parents[node] < node):
                size = node
                break
        return Draft(draft.seq_id, tuple(draft.tokens[:size]), tuple(draft.parents[:size]))

    def _fail(self, error: Exception) -> None:
        name = self.drafter.name if self.drafter is not None else ""
        log.warning("Drafter %r of a draft model failed and is switched off: %s: %s", name, type(error).__name__, error)
        self.drafter = None


def _inner_request(request: DraftRequest, position: int, depth: int) -> DraftRequest:
    return DraftRequest(request.seq_id, position, depth, request.params, request.seed, request.choice)
