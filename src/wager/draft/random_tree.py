"""A drafter of random trees: exercises trees in packing, attention, verification and the cache."""

from __future__ import annotations

import random
from collections.abc import Sequence

from wager.draft.history import HistoryDrafter, TargetOracle
from wager.types import Draft, DraftRequest

_LOOKBACK = 256
"""Known tokens that are searched for an earlier occurrence of the token before a guess."""


class RandomTreeDrafter(HistoryDrafter):
    """Trees of random shape, at most `request.depth` nodes, siblings distinct.

    Some guesses are plausible: what followed an earlier occurrence of the token before and, with an oracle, often the
    right one, so that accepted paths are scattered among rejected rows.
    """

    name = "random-tree"
    makes_trees = True

    def __init__(self, vocab: int, *, oracle: TargetOracle | None = None) -> None:
        super().__init__(oracle=oracle)
        self._vocab = vocab

    def _draft(self, request: DraftRequest) -> Draft:
        rng, known, right = self._random(request), self.known[request.seq_id], self._next_tokens(request)
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        right_nodes = {-1}  # nodes whose whole path is right
        for _ in range(rng.randint(0, request.depth)):
            parent = rng.randint(-1, len(tokens) - 1) if rng.random() < 0.6 else len(tokens) - 1
            depth = 1 if parent < 0 else depths[parent] + 1
            certain = right[depth - 1] if parent in right_nodes and depth <= len(right) else None
            token = self._guess(rng, known, tokens[parent] if parent >= 0 else known[-1], right=certain)
            if any(t == token and p == parent for t, p in zip(tokens, parents, strict=True)):
                continue
            if certain == token:
                right_nodes.add(len(tokens))
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
        scores = tuple(0.5**depth for depth in depths)
        return Draft(request.seq_id, tuple(tokens), tuple(parents), scores, self.name)

    def _guess(self, rng: random.Random, known: Sequence[int], before: int, *, right: int | None) -> int:
        if right is not None and rng.random() < 0.7:
            return right
        earlier = range(max(0, len(known) - _LOOKBACK), len(known) - 1)
        followers = [known[i + 1] for i in earlier if known[i] == before]
        if followers and rng.random() < 0.7:
            return rng.choice(followers)
        return rng.randrange(self._vocab)
