"""The indexes of n-grams (csrc/ngrams.h), in Python."""

from __future__ import annotations

from collections.abc import Sequence

from wager.draft.ngram import MIN_SURVIVAL, PRIOR, PRIOR_WEIGHT, NgramDrafter
from wager.types import Draft, DraftRequest


class PythonNgramTable:
    """NgramTable in Python."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._indexes: dict[str, _Index] = {}

    def begin(self, seq_id: str, tokens: Sequence[int], /) -> None:
        self._indexes[seq_id] = _Index(self._longest, tokens)

    def accept(self, seq_id: str, tokens: Sequence[int], /) -> None:
        self._indexes[seq_id].unindexed += tokens

    def end(self, seq_id: str, /) -> None:
        self._indexes.pop(seq_id, None)

    def propose(self, requests: Sequence[DraftRequest], /) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        index = self._indexes[request.seq_id]
        index.catch_up()
        scores = index.survival(request.depth)
        return Draft.chain(request.seq_id, index.copy(len(scores)), drafter=NgramDrafter.name, scores=scores)


class _Index:
    """The tokens of one sequence, the position after each n-gram's last occurrence, and how often those predict."""

    __slots__ = (
        "_after",
        "_endings",
        "_longest",
        "_prompt",
        "_rates",
        "_tried",
        "hit",
        "length",
        "tokens",
        "unindexed",
    )

    def __init__(self, longest: int, prompt: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.unindexed: list[int] = []  # known tokens that are not in the index yet
        self._prompt = prompt
        self.hit = 0  # where the current match continues
        self.length = 0  # how many tokens match; 0: none
        self._longest = longest
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> position of the token after its last occurrence
        self._endings: list[tuple[int, ...]] = []  # the n-grams that the known text ends with, the shortest first
        self._rates, self._tried = list(PRIOR), [PRIOR_WEIGHT] * len(PRIOR)

    def catch_up(self) -> None:
        """Index the prompt if that was not done; then learn from each new token whether the match before
        it predicted it, and index it."""
        if self._prompt:
            for token in self._prompt:
                self.append(token)
            self._prompt = ()
            self.match()
        for token in self.unindexed:
            self.learn(token)
            self.append(token)
            self.match()
        self.unindexed.clear()

    def append(self, token: int) -> None:
        """Index the n-grams that end before `token` (so that an ending never matches itself), and add it."""
        tokens, end = self.tokens, len(self.tokens)
        for ending in self._endings:
            self._after[ending] = end
        tokens.append(token)
        end += 1
        self._endings = [tuple(tokens[end - n :]) for n in range(1, min(self._longest, end) + 1)]

    def match(self) -> None:
        """Find the most recent occurrence of the longest known ending."""
        self.length = 0
        for ending in reversed(self._endings):
            hit = self._after.get(ending)
            if hit is not None:
                self.hit, self.length = hit, len(ending)
                break
        if self.length == self._longest:  # it may be longer than what is indexed
            tokens, end = self.tokens, len(self.tokens)
            most = min(self.hit, len(PRIOR))
            while self.length < most and tokens[self.hit - self.length - 1] == tokens[end - self.length - 1]:
                self.length += 1

    def learn(self, token: int) -> None:
        """Count whether the current match predicts `token`."""
        if self.length:
            row = self.length - 1
            self._tried[row] += 1
            self._rates[row] += ((self.tokens[self.hit] == token) - self._rates[row]) / self._tried[row]

    def survival(self, depth: int) -> list[float]:
        """Survival of depths 1, 2, ..., at most `depth` of them and while it is at least MIN_SURVIVAL."""
        if not self.length:
            return []
        reached, survival = 1.0, []
        rates = self._rates[self.length - 1 :]
        for rate in rates + rates[-1:] * (depth - len(rates)) if depth > len(rates) else rates[:depth]:
            reached *= rate
            if reached < MIN_SURVIVAL:
                break
            survival.append(reached)
        return survival

    def copy(self, count: int) -> list[int]:
        """`count` tokens from where the match continues, periodically."""
        period = len(self.tokens) - self.hit
        return [self.tokens[self.hit + i % period] for i in range(count)]
