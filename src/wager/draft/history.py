"""What several drafters share: they keep the known tokens of every sequence and draft each request by itself.

Also oracles for proofs and tests, which give the tokens that the target will emit.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

from wager.kernels.base import TargetOutput
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams


class TargetOracle(Protocol):
    """The tokens that the target will emit, known in advance."""

    def next_tokens(self, request: DraftRequest, known: Sequence[int], prompt_tokens: int) -> list[int]:
        """The target's next tokens, at most `request.depth`, after `known`, of which the first `prompt_tokens` are the
        prompt."""


class ReferenceOracle:
    """Reads the target's tokens from `texts` produced before: sequence id -> all its tokens, the prompt's included."""

    def __init__(self, texts: Mapping[str, Sequence[int]]) -> None:
        self.texts = texts

    def next_tokens(self, request: DraftRequest, known: Sequence[int], prompt_tokens: int) -> list[int]:
        return list(self.texts[request.seq_id][request.position : request.position + request.depth])


class HistoryDrafter:
    """A drafter that keeps the known tokens of every sequence; subclasses implement `_draft`; the default declines.

    `oracle` gives the tokens that the target will emit, for proofs and tests (None: there is no oracle).
    """

    name = "history"
    default_depth = 4
    max_depth = 8
    samples = False
    makes_trees = False

    def __init__(self, *, oracle: TargetOracle | None = None) -> None:
        self.known: dict[str, list[int]] = {}
        self.prompt_tokens: dict[str, int] = {}
        self._oracle = oracle

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        self.known[seq_id] = list(tokens)
        self.prompt_tokens[seq_id] = len(tokens)

    def observe(self, output: TargetOutput) -> None:
        """Ignored: the target's output is not used."""

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        self.known[seq_id].extend(tokens)

    def end(self, seq_id: str) -> None:
        self.known.pop(seq_id, None)
        self.prompt_tokens.pop(seq_id, None)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        return Draft(request.seq_id, drafter=self.name)

    def _random(self, request: DraftRequest) -> random.Random:
        """The same random numbers whenever a draft at the same position is requested."""
        return random.Random(f"{request.seq_id}/{request.position}")

    def _next_tokens(self, request: DraftRequest) -> list[int]:
        """The target's next tokens by the oracle; none without an oracle."""
        if self._oracle is None:
            return []
        name = request.seq_id
        return self._oracle.next_tokens(request, self.known[name], self.prompt_tokens[name])
