"""A chain of guesses that a head is making for one draft request, where one pass gives the logits of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from wager.draft.guessing import Guess
from wager.kernels.arrays import Array
from wager.types import Draft, DraftRequest
from wager.verify.distribution import History


@dataclass(slots=True)
class ChainGuesses:
    """At most `depth` guesses, drawn one after the other; `place` is where its logits are in the pass."""

    request: DraftRequest
    history: History | None
    place: int
    depth: int
    tokens: list[int] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    probs: list[Array] = field(default_factory=list)

    @property
    def done(self) -> bool:
        unlikely = bool(self.survival) and self.survival[-1] < self.request.min_survival
        return unlikely or len(self.tokens) >= self.depth

    def add(self, guess: Guess, *, rate: float | None = None) -> None:
        """The next guess, which is accepted with probability `rate` if those before it are (None: its own). Without a
        token (logits that are not finite) the chain ends."""
        if guess.token < 0:
            self.depth = len(self.tokens)
            return
        self.tokens.append(guess.token)
        before = self.survival[-1] if self.survival else 1.0
        self.survival.append(before * (guess.probability if rate is None else rate))
        if guess.probs is not None:
            self.probs.append(guess.probs)

    def draft(self, drafter: str) -> Draft:
        probs = np.stack(self.probs) if self.probs else None
        parents = tuple(range(-1, len(self.tokens) - 1))
        return Draft(self.request.seq_id, tuple(self.tokens), parents, tuple(self.survival), drafter, probs)


def draft_some(
    requests: Sequence[DraftRequest],
    ready: Sequence[DraftRequest],
    make: Callable[[Sequence[DraftRequest]], Iterable[Draft]],
    *,
    together: int,
    drafter: str,
) -> list[Draft]:
    """One draft per request: `make` makes those that are ready, so many at a time, and the others are declined."""
    parts = [ready[first : first + together] for first in range(0, len(ready), together)]
    drafts = {draft.seq_id: draft for part in parts for draft in make(part)}
    return [drafts.get(request.seq_id) or Draft(request.seq_id, drafter=drafter) for request in requests]
