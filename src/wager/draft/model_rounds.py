"""A draft request in progress on a draft model: which rows the next pass computes for it, and what they add.

`ChainRound` draws one token after the other: k guesses, k passes, or fewer where a drafter of its own guesses what it
will draw (stages.py). `TreeRound` draws the tree that is expected to be accepted most, one pass for each level: the
nodes to be expanded, and what lies between them and the root, are the rows of a pass, behind the last known token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from wager.draft.drafted_sequence import DraftedSequence, FedTree
from wager.draft.guessed_tree import GuessedTree, TreeShape
from wager.draft.guessing import Guess, GuessedRow, GuessSampler
from wager.kernels.base import TargetOutput
from wager.types import Draft, DraftRequest, Span


class DraftRound(ABC):
    """One draft request in progress: the rows that it wants of a pass, and what it makes of their logits."""

    def __init__(self, request: DraftRequest, state: DraftedSequence, depth: int) -> None:
        self.request = request
        self.state = state
        self.depth = depth
        state.fed, state.reached = FedTree(len(state.tokens)), -1

    def num_pending(self) -> int:
        """Known tokens that were not computed yet."""
        return len(self.state.tokens) - self.state.num_computed_tokens

    def known_span(self, room: int) -> Span:
        """Known tokens that are not computed yet, at most `room` of them."""
        state, rows = self.state, min(self.num_pending(), room)
        start, state.num_computed_tokens = state.num_computed_tokens, state.num_computed_tokens + rows
        tokens = tuple(state.tokens[start : start + rows])
        return Span(self.request.seq_id, start, tokens, start + rows == len(state.tokens))

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether it wants no further pass."""

    @property
    def least_rows(self) -> int:
        """With less room in a pass, for rows and for those with logits, it waits for the next one."""
        return 1

    @abstractmethod
    def rows(self, room: int, logits_room: int, guessed: Draft | None) -> tuple[Span, Draft | None, list[int]]:
        """The rows of the next pass, at most `room`, and those of them whose logits it wants, at most `logits_room`: 0
        is that of the span's last token, 1 + i that of node i behind it. `guessed` is what a drafter of its own guesses
        of the next tokens."""

    @abstractmethod
    def wanted(self, first: int, sampler: GuessSampler, output: TargetOutput) -> list[GuessedRow]:
        """After a pass whose rows of logits begin at `first`: the rows of which it wants a token each."""

    def take(self, guess: Guess) -> GuessedRow | None:
        """The token of the row that it wanted; the row that it wants next of the same pass, if any."""
        return None

    @abstractmethod
    def draft(self, drafter: str) -> Draft:
        """What was drafted."""


class ChainRound(DraftRound):
    """Guesses one after the other."""

    def __init__(self, request: DraftRequest, state: DraftedSequence, depth: int) -> None:
        super().__init__(request, state, depth)
        self.guesses: list[int] = []
        self.others: list[tuple[int, ...]] = []
        """Of each guess, the tokens that come next after it."""
        self._probs: list[NDArray[np.float64]] = []
        self._survival: list[float] = []
        self._guessed: Draft | None = None
        self._node = -1  # of what was guessed, the last token that turned out right
        self.right_guesses: list[int] = []
        """Of what was guessed for the last pass, the nodes that were right, from the root down."""
        self._first = 0

    @property
    def done(self) -> bool:
        unlikely = bool(self._survival) and self._survival[-1] < self.request.min_survival
        return unlikely or len(self.guesses) >= self.depth

    @property
    def continuation(self) -> tuple[list[int], int]:
        """Tokens as far as they are guessed, and how many guesses may follow that take no further pass."""
        return [*self.state.tokens, *self.guesses], self.depth - len(self.guesses) - 1

    def rows(self, room: int, logits_room: int, guessed: Draft | None) -> tuple[Span, Draft | None, list[int]]:
        if self.num_pending():
            span = self.known_span(room)
        else:
            position = len(self.state.tokens) + len(self.state.fed.tokens)
            self.state.fed.append(self.guesses[-1])
            span = Span(self.request.seq_id, position, (self.guesses[-1],), True)
        size = 0
        if guessed is not None and span.needs_logits:
            size = min(len(guessed), room - len(span.tokens), logits_room - 1)
        self._guessed = guessed.truncate(size) if guessed is not None and size > 0 else None
        self._node, self.right_guesses = -1, []
        behind = len(self._guessed) if self._guessed is not None else 0
        return span, self._guessed, list(range(1 + behind)) if span.needs_logits else []

    def wanted(self, first: int, sampler: GuessSampler, output: TargetOutput) -> list[GuessedRow]:
        self._first = first
        return [self._row(first)]

    def _row(self, row: int) -> GuessedRow:
        return GuessedRow(row, self.request, tuple(self.guesses), self.state.history)

    def take(self, guess: Guess) -> GuessedRow | None:
        token, probability, probs, others = guess
        if token < 0:  # not finite: this chain ends here, the others go on
            self.depth = len(self.guesses)
            return None
        self.guesses.append(token)
        self.others.append(others)
        self._survival.append((self._survival[-1] if self._survival else 1.0) * probability)
        if probs is not None:
            self._probs.append(probs)
        node = None if self._guessed is None or self.done else self._child(self._guessed, token)
        if node is None:
            return None
        self._node = node
        self.right_guesses.append(node)
        self.state.fed.append(token)
        return self._row(self._first + 1 + node)

    def _child(self, guessed: Draft, token: int) -> int | None:
        edges = zip(guessed.parents, guessed.tokens, strict=True)
        return next((child for child, edge in enumerate(edges) if edge == (self._node, token)), None)

    def draft(self, drafter: str) -> Draft:
        draft = Draft.chain(self.request.seq_id, self.guesses, drafter=drafter, scores=self._survival)
        if not self._probs:
            return draft
        return Draft(draft.seq_id, draft.tokens, draft.parents, draft.scores, drafter, np.stack(self._probs))


class TreeRound(DraftRound):
    """A tree of the shape, see GuessedTree."""

    def __init__(self, request: DraftRequest, state: DraftedSequence, shape: TreeShape) -> None:
        super().__init__(request, state, shape.nodes)
        self._tree = GuessedTree(request, state.history, shape)

    @property
    def done(self) -> bool:
        return self._tree.done

    @property
    def least_rows(self) -> int:
        return 1 + self.depth if self._tree.level else 1

    def rows(self, room: int, logits_room: int, guessed: Draft | None) -> tuple[Span, Draft | None, list[int]]:
        if self.num_pending():
            span = self.known_span(room)
            return span, None, [0] if span.needs_logits else []
        state, fed = self.state, self._tree.fed(room - 1, logits_room)
        state.fed = FedTree(len(state.tokens), list(fed.tokens), list(fed.parents))
        span = Span(self.request.seq_id, len(state.tokens) - 1, (state.tokens[-1],), True)
        return span, Draft(self.request.seq_id, fed.tokens, fed.parents), [1 + place for place in fed.wanted]

    def wanted(self, first: int, sampler: GuessSampler, output: TargetOutput) -> list[GuessedRow]:
        """It needs several candidates of a row, so it takes them here."""
        self._tree.grow(sampler, output, range(first, first + len(self._tree.frontier)))
        return []

    def draft(self, drafter: str) -> Draft:
        return self._tree.draft(drafter)
