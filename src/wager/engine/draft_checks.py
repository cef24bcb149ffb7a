"""Checks drafts before they are verified: nodes with unknown tokens, wrong parents or beyond a sequence's room are cut
off, and what lacks the draft_probs that the rule needs is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from wager.draft.base import Drafter
from wager.engine.native import draft_calls
from wager.types import RULES, Draft, DraftRequest, VerifyRule


class DraftChecks:
    """For a target of `vocab` logits, and a rule."""

    def __init__(self, *, vocab: int, rule: VerifyRule) -> None:
        self._vocab, self._rule = vocab, RULES[rule]
        self._native = draft_calls()

    def collect(
        self,
        drafts: Sequence[Draft],
        requests: Sequence[DraftRequest],
        limits: Mapping[str, int],
        *,
        drafter: Drafter,
        valid: dict[str, Draft],
    ) -> None:
        """Add the valid parts of a drafter's drafts that are not empty to `valid`, as long as no draft is so wrong that
        an error is raised; none has more than `limits[seq_id]` tokens."""
        if self._native is not None:
            chains = self._native.valid_chains(requests, drafts, limits, drafter.name, self._vocab)
            if chains is not None:
                valid |= chains
                return
        requested = {request.seq_id: request for request in requests}
        for draft in drafts:
            if draft.seq_id in requested:
                checked = self._valid_part(draft, requested[draft.seq_id], limits[draft.seq_id], drafter)
                if len(checked):
                    valid[draft.seq_id] = checked
                else:
                    valid.pop(draft.seq_id, None)

    def _valid_part(self, draft: Draft, request: DraftRequest, limit: int, drafter: Drafter) -> Draft:
        """The longest prefix of a draft that is a tree of known tokens within the limit; nothing of a draft that lacks
        the draft_probs it needs."""
        if self._is_valid_chain(draft, request, limit, drafter):
            return draft
        sound = self._has_needed_probs(draft, request, drafter)
        size = min(limit, len(draft.tokens), len(draft.parents)) if sound else 0
        for node in range(size):
            lowest = -1 if self._rule.verifies_trees else node - 1
            if not (0 <= draft.tokens[node] < self._vocab and lowest <= draft.parents[node] < node):
                size = node
                break
        return replace(
            draft,
            tokens=tuple(draft.tokens[:size]),
            parents=tuple(draft.parents[:size]),
            scores=tuple(draft.scores[:size]) if _has_valid_scores(draft) else (),
            drafter=drafter.name,
            draft_probs=None if draft.draft_probs is None else draft.draft_probs[:size],
        )

    def _is_valid_chain(self, draft: Draft, request: DraftRequest, limit: int, drafter: Drafter) -> bool:
        """Whether it is a chain with nothing to cut off, as nearly all drafts are; checked quickly."""
        tokens = draft.tokens
        return (
            len(tokens) <= limit
            and draft.drafter == drafter.name
            and draft.is_chain
            and (not tokens or (min(tokens) >= 0 and max(tokens) < self._vocab))
            and (not draft.scores or _has_valid_scores(draft))
            and self._has_needed_probs(draft, request, drafter)
        )

    def _has_needed_probs(self, draft: Draft, request: DraftRequest, drafter: Drafter) -> bool:
        """Whether sampled guesses have the distribution they were drawn from where it was requested: without it no
        distribution-exact rule is exact."""
        if draft.draft_probs is not None:
            return draft.draft_probs.shape == (len(draft.tokens), self._vocab)
        sampled = drafter.samples and not request.params.greedy
        return not (request.needs_draft_probs and sampled)


def _has_valid_scores(draft: Draft) -> bool:
    """Whether every guess has a score, and each is a probability."""
    scores = draft.scores
    if len(scores) != len(draft.tokens):
        return False
    total = sum(scores)  # NaN if one is, of which neither the least nor the greatest need tell
    return not scores or (min(scores) >= 0.0 and max(scores) <= 1.0 and total == total)
