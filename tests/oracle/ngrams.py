"""The indexes of n-grams (csrc/ngrams.h), in Python."""

from __future__ import annotations

from collections.abc import Sequence

from wager.draft.ngram import MIN_SURVIVAL, PRIOR, PRIOR_WEIGHT, NgramDrafter
from wager.types import Draft, DraftRequest


class PythonNgramTable:
    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._texts: dict[str, _Text] = {}

    def begin(self, seq_id: str, tokens: Sequence[int], /) -> None:
        text = self._texts[seq_id] = _Text(self._longest)
        for token in tokens:
            text.append(token)

    def accept(self, seq_id: str, tokens: Sequence[int], /) -> None:
        for token in tokens:
            self._texts[seq_id].learn(token)
            self._texts[seq_id].append(token)

    def end(self, seq_id: str, /) -> None:
        self._texts.pop(seq_id, None)

    def propose(self, requests: Sequence[DraftRequest], /) -> list[Draft]:
        return [self._texts[request.seq_id].draft(request) for request in requests]


class _Text:
    """The tokens of one sequence, the position after each n-gram's last occurrence, and how often those predict."""

    def __init__(self, longest: int) -> None:
        self._tokens: list[int] = []
        self._longest = longest
        self._after: dict[tuple[int, ...], int] = {}
        self._rates, self._tried = list(PRIOR), [PRIOR_WEIGHT] * len(PRIOR)

    def _endings(self) -> list[tuple[int, ...]]:
        return [tuple(self._tokens[-n:]) for n in range(min(self._longest, len(self._tokens)), 0, -1)]

    def append(self, token: int) -> None:
        for ending in self._endings():
            self._after[ending] = len(self._tokens)
        self._tokens.append(token)

    def _match(self) -> tuple[int, int]:
        """Where the most recent occurrence of the longest known ending goes on, and how many tokens match, 0 if none
        do; they may be more than are indexed."""
        ending = next((ending for ending in self._endings() if ending in self._after), ())
        hit, length = self._after.get(ending, 0), len(ending)
        if length == self._longest:
            while length < min(hit, len(PRIOR)) and self._tokens[hit - length - 1] == self._tokens[-length - 1]:
                length += 1
        return hit, length

    def learn(self, token: int) -> None:
        """Count whether the current match predicts `token`."""
        hit, length = self._match()
        if length:
            row, right = length - 1, self._tokens[hit] == token
            self._tried[row] += 1
            self._rates[row] += (right - self._rates[row]) / self._tried[row]

    def draft(self, request: DraftRequest) -> Draft:
        """The tokens from where the match continues, periodically, while their survival is at least MIN_SURVIVAL."""
        hit, length = self._match()
        tokens: list[int] = []
        scores: list[float] = []
        reached = 1.0
        while length and len(tokens) < request.depth:
            reached *= self._rates[min(length + len(tokens), len(PRIOR)) - 1]
            if reached < MIN_SURVIVAL:
                break
            tokens.append(self._tokens[hit + len(tokens) % (len(self._tokens) - hit)])
            scores.append(reached)
        return Draft.chain(request.seq_id, tokens, drafter=NgramDrafter.name, scores=scores)
