"""Grammars on the guesses of a step: what a grammar forbids is not verified, and what it forces is guessed.

This happens after the policy has admitted guesses: forced tokens are always right, so their rows would have to be
computed anyway, and no policy need decide about them. A grammar forces bytes; its guess is the way these are usually
written in tokens, and verification decides, as for every guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from wager.engine.sequence import EngineSequence
from wager.errors import GrammarError
from wager.types import Draft, GrammarState, Span, Verdict

NAME = "grammar"
"""The drafter of forced tokens."""


@dataclass(frozen=True, slots=True)
class DraftOfSeveral(Draft):
    """A draft whose nodes come from several drafters, `drafters` by node."""

    drafters: tuple[str, ...] = ()

    def drafter_of(self, node: int) -> str:
        return self.drafters[node]


class GrammarDrafts:
    """Completes the drafts of sequences with a grammar; keeps what the policy had admitted until it learns."""

    def __init__(self) -> None:
        self._admitted: dict[str, list[int]] = {}  # by sequence, of each verified node the admitted one, -1: none

    def complete(
        self,
        spans: Sequence[Span],
        drafts: Mapping[str, Draft],
        budget: int,
        sequences: Mapping[str, EngineSequence],
    ) -> Mapping[str, Draft]:
        """The drafts to verify, at most `budget` rows together. Guesses sampled from draft_probs stay as they are: the
        rules that need these must not choose among them by their tokens."""
        self._admitted.clear()
        completed = dict(drafts)
        room = budget - sum([len(draft) for draft in drafts.values()])
        for span in spans:
            sequence = sequences[span.seq_id]
            grammar = sequence.grammar if sequence.constrained and span.needs_logits else None
            draft = drafts.get(span.seq_id) or Draft(span.seq_id)
            if grammar is None or draft.draft_probs is not None or not span.max_draft_tokens or _is_off(sequence):
                continue
            growing = _ConstrainedDraft(draft, grammar, min(span.max_draft_tokens, len(draft) + room))
            growing.grow(-1, -1, ())
            room += len(draft) - len(growing.admitted)
            self._admitted[span.seq_id] = growing.admitted
            if growing.admitted:
                completed[span.seq_id] = growing.draft()
            else:
                completed.pop(span.seq_id, None)
        return completed

    def verdicts(self, verdicts: Iterable[Verdict]) -> list[Verdict]:
        """The verdicts as verdicts on what was admitted."""
        return [self._verdict(verdict) for verdict in verdicts]

    def _verdict(self, verdict: Verdict) -> Verdict:
        admitted = self._admitted.get(verdict.seq_id)
        if admitted is None:
            return verdict
        accepted = [admitted[node] for node in verdict.accepted]
        if -1 in accepted:  # an admitted node never follows one that was not
            accepted = accepted[: accepted.index(-1)]
        return Verdict(verdict.seq_id, tuple(accepted), verdict.tokens)


def _is_off(sequence: EngineSequence) -> bool:
    """Whether the request turns speculation off."""
    choice = sequence.request.speculation
    return choice is not None and choice.depth == 0


class _ConstrainedDraft:
    """A draft that is built node by node, of at most `limit` nodes. `admitted` has the node of `source` that each of
    its nodes is, -1 for one that only the grammar guessed."""

    def __init__(self, source: Draft, grammar: GrammarState, limit: int) -> None:
        self._source, self._grammar, self._limit = source, grammar, limit
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(source.parents):
            self._children.setdefault(parent, []).append(node)
        self.admitted: list[int] = []
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._drafters: list[str] = []
        self._scores: list[float] = []

    def grow(self, node: int, place: int, path: tuple[int, ...]) -> None:
        """Add what follows a node of the source, which is `place` in this draft, `path` the tokens up to it. Where the
        grammar forces tokens these are the only guesses; else those that it allows."""
        for token in self._grammar.forced(path):
            if len(self._tokens) >= self._limit:
                return
            node = self._child(node, token)
            place = self._add(token, node, place, NAME)
            path = (*path, token)
        following = self._children.get(node, ()) if node >= -1 else ()
        try:
            allowed = self._grammar.allowed(path) if following else None
        except GrammarError:  # which ends the sequence if it comes here
            return
        for child in following:
            token = self._source.tokens[child]
            if len(self._tokens) < self._limit and (allowed is None or token in allowed):
                self.grow(child, self._add(token, child, place, self._source.drafter), (*path, token))

    def draft(self) -> Draft:
        source, whole = self._source, len(self.admitted) == len(self._source.tokens)
        if whole and NAME not in self._drafters and self.admitted == list(range(len(self.admitted))):
            return source
        scores = tuple(self._scores) if source.scores or not source.tokens else ()
        name = source.drafter or NAME
        tokens, parents = tuple(self._tokens), tuple(self._parents)
        return DraftOfSeveral(source.seq_id, tokens, parents, scores, name, None, tuple(self._drafters))

    def _child(self, node: int, token: int) -> int:
        """The source's child with a token; -2 if it has none, or `node` is not the source's itself."""
        following = self._children.get(node, ()) if node >= -1 else ()
        return next((child for child in following if self._source.tokens[child] == token), -2)

    def _add(self, token: int, node: int, place: int, drafter: str) -> int:
        forced, scores = drafter == NAME, self._source.scores
        above = self._scores[place] if place >= 0 else 1.0
        self._tokens.append(token)
        self._parents.append(place)
        self._drafters.append(drafter)
        self._scores.append(above if forced or not scores else min(above, scores[node]))
        self.admitted.append(max(node, -1))
        return len(self._tokens) - 1
