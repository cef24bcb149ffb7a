"""Prompt lookup: guess that what followed the same tokens before follows them again.

Costs no pass of any model and a constant time per token, however long the context. Knows token ids only.

One table says how far a match can be trusted: the chance that the next token is right after a match of m tokens. A
guess at depth d, if all above it was right, *is* a guess after a match of m + d - 1 tokens, so the same table gives the
survival of every depth, and with it the draft's length: short matches make short drafts, long ones fill the ask. Each
sequence starts from the same prior and learns its own table from every token that becomes known, whether or not
anything was drafted, so that a sequence that never repeats itself stops speculating and can start again.
"""

from __future__ import annotations

from collections.abc import Sequence

from wager.errors import UsageError
from wager.kernels.base import Output
from wager.types import Ask, Draft, SamplingParams

PRIOR = (0.27, 0.53, 0.65, 0.70, 0.74, 0.77, 0.80, 0.92)
"""Chance that the next token is right after a match of 1, 2, ... 8 or more tokens: SmolLM2-135M, greedy answers."""

PRIOR_WEIGHT = 10.0
"""How many observations the prior counts for."""

WORTH_A_ROW = 0.06
"""Guesses that survive less often are not made: about what a row costs where rows are cheapest (a CPU, up to 8)."""


class NgramDrafter:
    """Copies what followed the most recent occurrence of the longest known ending, of at most `longest` tokens.

    When the copy reaches the end of the known text it goes on from its own beginning: a text that repeats is periodic.
    Misses are declined, never padded. Raises UsageError if `longest` is not between 1 and 8.
    """

    name = "ngram"
    default_depth = 7  # 8 rows in all: the widest pass that costs about as much as a single row
    deepest = 15
    needs_law = False
    branches = False

    def __init__(self, longest: int = 3) -> None:
        if not 1 <= longest <= len(PRIOR):
            raise UsageError(f"ngram:{longest} is out of range.", f"Look up 1 to {len(PRIOR)} tokens.")
        self._longest = longest
        self._indexes: dict[str, _Index] = {}

    def begin(self, sequence: str, tokens: Sequence[int], params: SamplingParams) -> None:
        """Index the prompt; it teaches nothing about how often the *model* repeats what was said."""
        self._indexes[sequence] = index = _Index(self._longest)
        for token in tokens:
            index.append(token)
        index.match()

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """One chain per ask, or an empty draft where nothing is known."""
        return [self._draft(ask) for ask in asks]

    def observe(self, output: Output) -> None:
        """Nothing: tokens are all it looks at."""

    def accept(self, sequence: str, tokens: Sequence[int]) -> None:
        """Learn from each token whether the match before it would have been right, then index it."""
        index = self._indexes[sequence]
        for token in tokens:
            index.learn(token)
            index.append(token)
            index.match()

    def end(self, sequence: str) -> None:
        self._indexes.pop(sequence, None)

    def _draft(self, ask: Ask) -> Draft:
        index = self._indexes[ask.sequence]
        scores = index.survival(ask.depth)
        return Draft.chain(ask.sequence, index.copy(len(scores)), drafter=self.name, scores=scores)


class _Index:
    """The tokens of one sequence, where each n-gram was last followed by what, and how well that predicts."""

    __slots__ = ("_after", "_longest", "_right", "_tried", "hit", "length", "tokens")

    def __init__(self, longest: int) -> None:
        self.tokens: list[int] = []
        self.hit = 0  # where the present match goes on
        self.length = 0  # how many tokens match; 0: none
        self._longest = longest
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> position of the token after its last occurrence
        self._right = [PRIOR_WEIGHT * chance for chance in PRIOR]
        self._tried = [PRIOR_WEIGHT] * len(PRIOR)

    def append(self, token: int) -> None:
        """Index the n-grams before `token`, so that an ending never finds itself, and add it."""
        tokens, end = self.tokens, len(self.tokens)
        for n in range(1, min(self._longest, end) + 1):
            self._after[tuple(tokens[end - n :])] = end
        tokens.append(token)

    def match(self) -> None:
        """Find the most recent occurrence of the longest known ending."""
        tokens, end = self.tokens, len(self.tokens)
        self.length = 0
        for n in range(min(self._longest, end), 0, -1):
            hit = self._after.get(tuple(tokens[end - n :]))
            if hit is not None:
                self.hit, self.length = hit, n
                break
        if self.length == self._longest:  # it may be longer than what is indexed
            most = min(self.hit, len(PRIOR))
            while self.length < most and tokens[self.hit - self.length - 1] == tokens[end - self.length - 1]:
                self.length += 1

    def learn(self, token: int) -> None:
        """Count whether the present match predicts `token`."""
        if self.length:
            self._tried[self.length - 1] += 1
            self._right[self.length - 1] += self.tokens[self.hit] == token

    def survival(self, depth: int) -> list[float]:
        """Chance that depths 1, 2, ... are reached and right, at most `depth` of them, while they are worth a row."""
        survival, chances = 1.0, []
        for longer in range(depth if self.length else 0):
            row = min(self.length + longer, len(PRIOR)) - 1
            survival *= self._right[row] / self._tried[row]
            if survival < WORTH_A_ROW:
                break
            chances.append(survival)
        return chances

    def copy(self, count: int) -> list[int]:
        """`count` tokens from where the match goes on, periodically."""
        period = len(self.tokens) - self.hit
        return [self.tokens[self.hit + i % period] for i in range(count)]
