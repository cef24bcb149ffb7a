"""A drafter that is always wrong: shows that guesses cost time and never change the text."""

from __future__ import annotations

from wager.draft.history import HistoryDrafter, TargetOracle
from wager.types import Draft, DraftRequest


class AdversaryDrafter(HistoryDrafter):
    """Guesses ids from the end of the vocabulary, random ids and repetitions of the last token, always with score 1.

    With an oracle no guess equals the target's token at its position. Without one a few may happen to be right.
    """

    name = "adversary"

    def __init__(self, vocab: int, *, oracle: TargetOracle | None = None) -> None:
        super().__init__(oracle=oracle)
        self._vocab = vocab

    def _draft(self, request: DraftRequest) -> Draft:
        rng, right = self._random(request), self._next_tokens(request)
        last = self.known[request.seq_id][-1]
        guesses = []
        for depth in range(request.depth):
            guess = rng.choice((self._vocab - 1 - depth % self._vocab, rng.randrange(self._vocab), last))
            if depth < len(right) and guess == right[depth]:
                guess = (guess + 1) % self._vocab
            guesses.append(guess)
        return Draft.chain(request.seq_id, guesses, drafter=self.name, scores=[1.0] * len(guesses))
