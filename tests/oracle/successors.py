"""The table of recycled tokens (csrc/successors.h), in Python."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wager.draft.recycling import MIN_SURVIVAL, PRIOR, PRIOR_WEIGHT

RANKS = len(PRIOR)
_MOST_TRIED = 10_000.0  # rows that the learned probabilities remember


class PythonSuccessors:
    """SuccessorTable in Python."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._ids: dict[int, list[int]] = {}
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

    def draft(self, last: int, most: int, /) -> tuple[Sequence[int], Sequence[int], Sequence[float]]:
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

    def _learn(self, known: Sequence[int], first: int) -> None:
        self._tried = min(self._tried + 1, _MOST_TRIED)
        for rank in range(RANKS):
            hit = rank < len(known) and known[rank] == first
            self._rates[rank] += (hit - self._rates[rank]) / self._tried
