"""Drafters of known acceptance and the oracle of the toy target, which computes the tokens that the target will emit.

`draft.history.ReferenceOracle` does the same for any model, from texts produced before.
"""

from __future__ import annotations

from collections.abc import Sequence

from wager.draft.history import HistoryDrafter, TargetOracle
from wager.testing.toy import ToyDistribution
from wager.types import Draft, DraftRequest
from wager.verify.distribution import History, process


class ToyOracle:
    """Computes the toy target's tokens from its distribution, with the same processors and the same noise."""

    def __init__(self, distribution: ToyDistribution) -> None:
        self._distribution = distribution

    def next_tokens(self, request: DraftRequest, known: Sequence[int], prompt_tokens: int) -> list[int]:
        history = History.of(known[:prompt_tokens], request.params)
        if history is not None:
            history.append(known[prompt_tokens:])
        path: list[int] = []
        for depth in range(request.depth):
            logits = self._distribution([*known, *path])
            distribution = process(logits, request.params, history and history.extended(path))
            path.append(distribution.choose(request.seed, request.position + depth, request.choice))
        return path


class OracleDrafter(HistoryDrafter):
    """Always right: every guess is the token the target will emit."""

    name = "oracle"

    def __init__(self, oracle: TargetOracle) -> None:
        super().__init__(oracle=oracle)

    def _draft(self, request: DraftRequest) -> Draft:
        guesses = self._next_tokens(request)
        return Draft.chain(request.seq_id, guesses, drafter=self.name, scores=[1.0] * len(guesses))


class SetAcceptanceDrafter(HistoryDrafter):
    """Right with probability `rates[d - 1]` at depth d, if all guesses above were right; the last rate holds below."""

    name = "set"

    def __init__(self, vocab: int, rates: Sequence[float], *, oracle: TargetOracle) -> None:
        super().__init__(oracle=oracle)
        self._vocab = vocab
        self._rates = tuple(rates)

    def _draft(self, request: DraftRequest) -> Draft:
        rng = self._random(request)
        guesses, scores, survival = self._next_tokens(request), [], 1.0
        for depth, token in enumerate(guesses):
            rate = self._rates[min(depth, len(self._rates) - 1)]
            survival *= rate
            scores.append(survival)
            if rng.random() >= rate:
                guesses[depth] = (token + 1 + rng.randrange(self._vocab - 1)) % self._vocab
        return Draft.chain(request.seq_id, guesses, drafter=self.name, scores=scores)
