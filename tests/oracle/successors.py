"""The table of recycled tokens (csrc/successors.h), in Python."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from oracle.coupling import coupled_guesses
from wager.draft.guessing import Candidate, draws
from wager.draft.recycling import MIN_SAMPLED_SURVIVAL, MIN_SURVIVAL, PRIOR, PRIOR_WEIGHT, SAMPLED_WEIGHT
from wager.draft.trees import best_first
from wager.types import DraftRequest

RANKS = len(PRIOR)
_MOST_TRIED = 10_000.0  # rows that the learned probabilities remember


class PythonSuccessors:
    """SuccessorTable in Python."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._ids: dict[int, list[int]] = {}
        self._logits: dict[int, NDArray[np.float64]] = {}  # of these
        self._rates, self._tried = list(PRIOR), PRIOR_WEIGHT

    def update(self, tokens: Sequence[int], logits: NDArray[np.float32], /) -> None:
        if logits.shape != (len(tokens), self._vocab):
            raise ValueError("one row of logits of the vocabulary for each token")
        for token, row in zip(tokens, logits, strict=True):
            order = [int(index) for index in np.argsort(-row, kind="stable") if not np.isnan(row[index])]
            known = self._ids.get(token, [])
            if known and order:
                self._learn(known, order[0])
            if 0 <= token < self._vocab:
                self._ids[token] = order[:RANKS]
                self._logits[token] = row[self._ids[token]].astype(np.float64)

    def draft(
        self, last: int, most: int, request: DraftRequest | None = None
    ) -> tuple[Sequence[int], Sequence[int], Sequence[float]]:
        if request is not None and not draws(request) and not request.params.greedy:

            def sampled(path: tuple[int, ...]) -> list[Candidate]:
                return self._sampled((last, *path)[-1], request, len(path))

            tree = best_first(sampled, most, min_survival=MIN_SAMPLED_SURVIVAL)
            return tree.tokens, tree.parents, tree.scores
        tokens: list[int] = []
        parents: list[int] = []
        survival: list[float] = []
        candidates: list[tuple[float, int, int, float, int]] = []  # -survival, parent, rank, the parent's, its token

        def push(context: int, parent: int, rank: int, reached: float) -> None:
            if rank < len(self._ids.get(context, ())):
                heapq.heappush(candidates, (-reached * self._rates[rank], parent, rank, reached, context))

        push(last, -1, 0, 1.0)
        while candidates and len(tokens) < most:
            negative, parent, rank, reached, context = heapq.heappop(candidates)
            if -negative < MIN_SURVIVAL:
                break
            tokens.append(self._ids[context][rank])
            parents.append(parent)
            survival.append(-negative)
            push(context, parent, rank + 1, reached)
            push(tokens[-1], len(tokens) - 1, 0, -negative)
        return tokens, parents, survival

    def _sampled(self, context: int, request: DraftRequest, ahead: int) -> list[Candidate]:
        if not self._ids.get(context):
            return []
        logits = self._logits[context] / request.params.temperature
        shares = SAMPLED_WEIGHT * np.exp(logits - logits[0]) / np.exp(logits - logits[0]).sum()
        likely = coupled_guesses(dict(zip(self._ids[context], shares.tolist(), strict=True)), request, ahead)
        return sorted(itertools.starmap(Candidate, likely.items()), key=lambda each: -each.probability)

    def _learn(self, known: Sequence[int], first: int) -> None:
        self._tried = min(self._tried + 1, _MOST_TRIED)
        for rank in range(RANKS):
            hit = rank < len(known) and known[rank] == first
            self._rates[rank] += (hit - self._rates[rank]) / self._tried
