"""A drafter that runs heads which all read the state of one position: Medusa.

One pass gives the distribution of every next token, each without knowing which the others are. Guesses are drawn from
them one after the other, with the target's noise at each position, so the guesses are a chain. Nothing is cached: a
round needs what entered the target's last norm at the newest position that was verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from wager.draft.base import ComputedRows
from wager.draft.guessing import GuessedRow, GuessSampler
from wager.draft.heads.chain_guesses import ChainGuesses, draft_some
from wager.kernels.arrays import Array
from wager.kernels.base import TargetOutput
from wager.kernels.cpu import Kernels
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams
from wager.verify.distribution import History


class ParallelHead(Protocol):
    """Heads of which each guesses another token from the same state; see models/head_medusa.py."""

    vocab: int
    max_sequences: int
    max_depth: int

    def forward(self, states: Array, depth: int) -> TargetOutput:
        """Logits of the first `depth` tokens behind each state, those of one state together."""


@dataclass(slots=True)
class _LastState:
    """A sequence, and the state of its position `position` (-2: none came yet)."""

    history: History | None
    position: int = -2
    state: Array = field(default_factory=lambda: np.empty(0, np.float32))


class ParallelDrafter:
    """Drafts chains with `head`. `kernels` sample natively where given. A sequence is declined until the state of its
    newest verified position has come."""

    samples = True
    makes_trees = False
    taps = ()

    def __init__(
        self, head: ParallelHead, *, kernels: Kernels | None = None, depth: int | None = None, name: str = "heads"
    ) -> None:
        self.name = name
        self.max_depth = head.max_depth
        self.default_depth = min(depth or 3, head.max_depth)
        self._head = head
        self._sampler = GuessSampler(head.vocab, vocab=head.vocab, kernels=kernels)
        self._states: dict[str, _LastState] = {}

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        self._states[seq_id] = _LastState(History.of(tokens, params))

    def read(self, output: TargetOutput, computed: Sequence[ComputedRows]) -> None:
        """Keep the state of each sequence's newest position."""
        for rows in computed:
            state = self._states.get(rows.seq_id)
            if state is not None and rows.logits_row >= 0 and output.last_hidden is not None:
                state.position = rows.start + len(rows.rows) - 1
                state.state = output.last_hidden[rows.logits_row].copy()

    def observe(self, output: TargetOutput) -> None:
        """Ignored: states come by `read`."""

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        history = self._states[seq_id].history
        if history is not None:
            history.append(tokens)

    def end(self, seq_id: str) -> None:
        self._states.pop(seq_id, None)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request; it ends where logits are not finite."""
        ready = [r for r in requests if r.depth > 0 and self._states[r.seq_id].position == r.position - 2]
        return draft_some(requests, ready, self._drafts, together=self._head.max_sequences, drafter=self.name)

    def _drafts(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        depth = min(self._head.max_depth, max(request.depth for request in requests))
        output = self._head.forward(np.stack([self._states[request.seq_id].state for request in requests]), depth)
        found = [
            ChainGuesses(request, self._states[request.seq_id].history, index * depth, min(depth, request.depth))
            for index, request in enumerate(requests)
        ]
        active = found
        for step in range(depth):
            active = [guesses for guesses in active if not guesses.done]
            rows = [GuessedRow(g.place + step, g.request, tuple(g.tokens), g.history) for g in active]
            for g, guess in zip(active, self._sampler.guesses(output, rows), strict=True):
                g.add(guess)
        return [guesses.draft(self.name) for guesses in found]
