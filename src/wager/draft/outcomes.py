"""Which outcomes of a draft are likely: how far it is accepted, and what the target says there.

A round that accepts a whole draft ends in a token that the drafter would draw next; one that ends before it most often
ends in the token that came second for the drafter. Under `match` both draw with the same noise, which makes that far
likelier than chance (speculative speculative decoding, arXiv 2603.03251). Rates are learned from the rounds, older ones
counting less; where each guess is accepted at one rate a, outcomes of j accepted guesses fall off as a^j.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wager.types import Draft

NUM_OTHERS = 2
"""Tokens that a guess may turn out to be instead."""

_DECAY = 0.98  # of what is known, with every round: about the last 50 count
_GUESS_RATE, _OTHER_RATES = 0.7, (0.6, 0.15)
"""Rates until rounds have shown them: of a guess, and of each of its alternatives where it is wrong."""

_PRIOR = 4.0  # rounds that these count for


@dataclass(frozen=True, slots=True)
class LikelyOutcome:
    """Tokens that may become known: a path of the draft, and the token behind it unless the drafter is to draw that one
    itself (`is_open`). `probability` is an estimate."""

    tokens: tuple[int, ...]
    is_open: bool
    probability: float


class OutcomeRates:
    """How often guesses were right by depth, and their alternatives where they were not."""

    def __init__(self) -> None:
        self._tried: list[float] = []
        self._right: list[float] = []
        self._wrong, self._others = 0.0, [0.0] * NUM_OTHERS

    def learn(self, draft: Draft, others: Sequence[Sequence[int]], tokens: Sequence[int]) -> None:
        """`tokens` became known behind the sequence that the draft was made for."""
        self._tried, self._right = [_DECAY * n for n in self._tried], [_DECAY * n for n in self._right]
        self._wrong, self._others = _DECAY * self._wrong, [_DECAY * n for n in self._others]
        node = -1
        for depth, token in enumerate(tokens):
            child = child_of(draft, node, token)
            if child is None and node not in draft.parents:
                return  # nothing was guessed there
            if depth == len(self._tried):
                self._tried.append(0.0)
                self._right.append(0.0)
            self._tried[depth] += 1
            if child is None:
                self._learn_others(others[depth] if depth < len(others) else (), token)
                return
            self._right[depth] += 1
            node = child

    def _learn_others(self, others: Sequence[int], token: int) -> None:
        if others:
            self._wrong += 1
            for rank, other in enumerate(others[:NUM_OTHERS]):
                self._others[rank] += other == token

    def guess_rate(self, depth: int) -> float:
        """That a guess at `depth` (from 0) is right if all before it are."""
        tried, right = (n[depth] if depth < len(n) else 0.0 for n in (self._tried, self._right))
        return (right + _PRIOR * _GUESS_RATE) / (tried + _PRIOR)

    def other_rate(self, rank: int) -> float:
        """That a wrong guess should have been its alternative of that rank."""
        return (self._others[rank] + _PRIOR * _OTHER_RATES[rank]) / (self._wrong + _PRIOR)

    def likely(self, draft: Draft, others: Sequence[Sequence[int]]) -> list[LikelyOutcome]:
        """The outcomes of a draft, likeliest first; `others` are those of each guess of a chain."""
        if not draft.is_chain:
            return self._of_tree(draft)
        outcomes, reached = [], 1.0
        for depth in range(len(draft)):
            rate = self.guess_rate(depth)
            for rank, other in enumerate(others[depth][:NUM_OTHERS] if depth < len(others) else ()):
                chance = reached * (1 - rate) * self.other_rate(rank)
                outcomes.append(LikelyOutcome((*draft.tokens[:depth], other), False, chance))
            reached *= rate
        outcomes.append(LikelyOutcome(draft.tokens, True, reached * self.guess_rate(len(draft))))
        return sorted(outcomes, key=lambda outcome: -outcome.probability)

    def _of_tree(self, draft: Draft) -> list[LikelyOutcome]:
        """A tree holds the alternatives itself: a round that ends within it says none of them."""
        leaves = sorted(set(range(len(draft))) - set(draft.parents))
        scores = draft.scores or (0.0,) * len(draft)
        outcomes = [
            LikelyOutcome(tuple(draft.tokens[node] for node in draft.path(leaf)), True, scores[leaf]) for leaf in leaves
        ]
        return sorted(outcomes, key=lambda outcome: -outcome.probability)


def child_of(draft: Draft, node: int, token: int) -> int | None:
    """The child of a node (-1: the root) with that token."""
    for child in range(node + 1, len(draft.tokens)):
        if draft.parents[child] == node and draft.tokens[child] == token:
            return child
    return None


def below(draft: Draft, node: int) -> Draft:
    """What a draft guesses behind one of its nodes, as a draft of its own; scores are given that the node is right."""
    if node < 0:
        return draft
    kept: list[int] = []
    place = {node: -1}
    for each in range(node + 1, len(draft.tokens)):
        if draft.parents[each] in place:
            place[each] = len(kept)
            kept.append(each)
    reached = draft.scores[node] if draft.scores else 0.0
    scores = tuple(min(1.0, draft.scores[each] / reached) for each in kept) if reached > 0 else ()
    parents = tuple(place[draft.parents[each]] for each in kept)
    return Draft(draft.seq_id, tuple(draft.tokens[each] for each in kept), parents, scores, draft.drafter)
