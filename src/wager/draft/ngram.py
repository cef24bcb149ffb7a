"""Prompt lookup: guess that what followed the same tokens before follows them again.

Costs no pass of any model and a constant time per token, however long the context; what became known is looked at when
a guess is asked for, so that a drafter that is left alone costs nothing. Knows token ids only.

One table says how far a match can be trusted: the chance that the next token is right after a match of m tokens. A
guess at depth d, if all above it was right, *is* a guess after a match of m + d - 1 tokens, so the same table gives the
survival of every depth, and with it the draft's length: short matches make short drafts, long ones fill the ask. Each
sequence starts from the same prior and learns its own table from every token that becomes known, whether or not
anything was drafted, so that a sequence that never repeats itself stops speculating and can start again.
"""

from __future__ import annotations

from collections.abc import Sequence

from wager.errors import UsageError
from wager.kernels.base import TargetOutput
from wager.types import Draft, DraftRequest, SamplingParams

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
    max_depth = 15
    samples = False
    makes_trees = False

    def __init__(self, longest: int = 3) -> None:
        if not 1 <= longest <= len(PRIOR):
            raise UsageError(f"ngram:{longest} is out of range.", f"Look up 1 to {len(PRIOR)} tokens.")
        self._longest = longest
        self._indexes: dict[str, _Index] = {}

    def begin(self, sequence: str, tokens: Sequence[int], params: SamplingParams) -> None:
        """Take the prompt; it teaches nothing about how often the *model* repeats what was said."""
        self._indexes[sequence] = _Index(self._longest, tokens)

    def propose(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        """One chain per ask, or an empty draft where nothing is known."""
        return [self._draft(ask) for ask in asks]

    def observe(self, output: TargetOutput) -> None:
        """Nothing: tokens are all it looks at."""

    def accept(self, sequence: str, tokens: Sequence[int]) -> None:
        """Take what became known."""
        self._indexes[sequence].news += tokens

    def end(self, sequence: str) -> None:
        self._indexes.pop(sequence, None)

    def _draft(self, ask: DraftRequest) -> Draft:
        index = self._indexes[ask.seq_id]
        index.catch_up()
        scores = index.survival(ask.depth)
        return Draft.chain(ask.seq_id, index.copy(len(scores)), drafter=self.name, scores=scores)


class _Index:
    """The tokens of one sequence, where each n-gram was last followed by what, and how well that predicts."""

    __slots__ = ("_after", "_chances", "_endings", "_longest", "_prompt", "_tried", "hit", "length", "news", "tokens")

    def __init__(self, longest: int, prompt: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.news: list[int] = []  # tokens that are known and were not looked at
        self._prompt = prompt
        self.hit = 0  # where the present match goes on
        self.length = 0  # how many tokens match; 0: none
        self._longest = longest
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> position of the token after its last occurrence
        self._endings: list[tuple[int, ...]] = []  # the n-grams that the known text ends with, the shortest first
        self._chances, self._tried = list(PRIOR), [PRIOR_WEIGHT] * len(PRIOR)

    def catch_up(self) -> None:
        """Index the prompt if that was not done, then learn from each new token whether the match before it would have
        been right, and index it."""
        if self._prompt:
            for token in self._prompt:
                self.append(token)
            self._prompt = ()
            self.match()
        for token in self.news:
            self.learn(token)
            self.append(token)
            self.match()
        self.news.clear()

    def append(self, token: int) -> None:
        """Index the n-grams before `token`, so that an ending never finds itself, and add it."""
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
        """Count whether the present match predicts `token`."""
        if self.length:
            row = self.length - 1
            self._tried[row] += 1
            self._chances[row] += ((self.tokens[self.hit] == token) - self._chances[row]) / self._tried[row]

    def survival(self, depth: int) -> list[float]:
        """Chance that depths 1, 2, ... are reached and right, at most `depth` of them, while they are worth a row."""
        if not self.length:
            return []
        survival, chances = 1.0, []
        rows = self._chances[self.length - 1 :]
        for chance in rows + rows[-1:] * (depth - len(rows)) if depth > len(rows) else rows[:depth]:
            survival *= chance
            if survival < WORTH_A_ROW:
                break
            chances.append(survival)
        return chances

    def copy(self, count: int) -> list[int]:
        """`count` tokens from where the match goes on, periodically."""
        period = len(self.tokens) - self.hit
        return [self.tokens[self.hit + i % period] for i in range(count)]
