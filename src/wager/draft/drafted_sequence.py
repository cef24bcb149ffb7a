"""What a draft model keeps of a sequence: its tokens, and which of them, and of the guesses behind them, are cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from wager.verify.distribution import History


@dataclass(slots=True)
class FedTree:
    """Guesses whose keys and values are in the cache, provisionally: node i at the slot of position `start` + i."""

    start: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def append(self, token: int) -> None:
        """One more node of a chain."""
        self.parents.append(len(self.tokens) - 1)
        self.tokens.append(token)

    def child(self, node: int, token: int) -> int | None:
        """The child of a node (-1: the root) with that token."""
        edges = zip(self.parents, self.tokens, strict=True)
        return next((child for child, edge in enumerate(edges) if edge == (node, token)), None)


@dataclass(slots=True)
class DraftedSequence:
    """One sequence in the drafter's cache, whose first `num_computed_tokens` have final keys and values. `fed` are
    guesses that have provisional ones, and `reached` the last of them that turned out right (-1: the root; None:
    another token came, so none of the others can). `unknown` is the place of the first token that the model has no row
    for: nothing can be computed from there on."""

    tokens: list[int]
    history: History | None
    prompt_tokens: int = 0
    num_computed_tokens: int = 0
    fed: FedTree = field(default_factory=lambda: FedTree(0))
    reached: int | None = None
    others: Sequence[tuple[int, ...]] = ()  # of each guess of the last draft, if it was a chain, those next after it
    unknown: int | None = None

    def extend(self, tokens: Sequence[int], vocab: int) -> None:
        """Tokens became known; ids from `vocab` on are unknown to the model."""
        if self.unknown is None and max(tokens, default=-1) >= vocab:
            self.unknown = len(self.tokens) + next(at for at, token in enumerate(tokens) if token >= vocab)
        self.tokens += tokens

    def computed_with(self, tokens: Sequence[int]) -> int:
        """For how many tokens, known ones and `tokens` behind them, keys and values are in place: those of fed guesses
        where they lie in the slots of their positions."""
        known, node = len(self.tokens), self.reached
        if node is None or (node < 0 and self.num_computed_tokens < known):
            return self.num_computed_tokens
        computed = self.num_computed_tokens
        for position, token in enumerate(tokens, known):
            node = self.fed.child(node, token)
            if node is None or self.fed.start + node != position:
                break
            computed = position + 1
        return computed
