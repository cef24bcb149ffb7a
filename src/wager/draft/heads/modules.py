"""A drafter that runs several modules of multi-token prediction in turn.

Module m's entry of a position has what module m - 1 gave there (the first: the target's state) beside the token m + 1
places behind it, and guesses the token after that. So module m makes guess m of a round, from its entry of the last
position that has a state; its last m entries embed guesses and are provisional. Known ones are computed once, when
their token and the entry of the module before are there. Guesses beyond the number of modules are made by the last one
again, which is fed with what it gave itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from wager.draft.guessing import Guess
from wager.draft.heads.autoregressive import HeadDrafter, HeadRound, HeadSequence, StateHead
from wager.draft.heads.pending_states import PendingStates
from wager.kernels.arrays import FLOAT32, Array
from wager.kernels.base import TargetOutput
from wager.types import Draft, DraftRequest, PackedBatch, Span
from wager.verify.distribution import History
from wager.verify.pack import pack


class ModulesHead(StateHead, Protocol):
    """Modules that share a cache, in which each has a layer; see models/head_mtp.py."""

    modules: int

    def forward(self, batch: PackedBatch, states: Array, fed: Array, module: int = 0) -> TargetOutput:
        """One pass of a module: the first rows have the target's states, the others what a module gave before. Under
        tap 0 of the result is what all rows gave."""


@dataclass(slots=True)
class ModulesSequence(HeadSequence):
    """`num_entries` are those of the first module. `given[m]` is what module m gave at positions of which module m + 1
    has no final entry, `entries[m]` how many final entries that one has."""

    given: list[PendingStates] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)

    def begin_anew(self) -> None:
        """All modules have the entries that the first one has."""
        self.entries = [self.num_entries for _ in self.entries]
        self.given = [PendingStates() for _ in self.given]


class ModulesRound(HeadRound):
    """One draft request in progress. All modules take part even where fewer guesses are wanted, so that none falls
    behind; `computed` are the entries of the module whose turn it is."""

    state: ModulesSequence

    def __init__(self, request: DraftRequest, state: ModulesSequence, depth: int, modules: int) -> None:
        super().__init__(request, state, max(depth, modules))
        self._wanted, self._modules, self._computed = depth, modules, state.num_entries
        self._known = len(state.tokens) - 1 - state.origin  # places of positions that have a state

    @property
    def done(self) -> bool:
        return super().done and len(self.tokens) >= min(self._modules, self.depth)

    @property
    def module(self) -> int:
        return min(len(self.tokens), self._modules - 1)

    @property
    def repeats(self) -> bool:
        """Whether all modules had their turn."""
        return len(self.tokens) >= self._modules

    def num_pending(self) -> int:
        return 0 if self.repeats else self._known - self._computed

    def next_span(self, room: int) -> Span:
        """The next entries of the module whose turn it is, at most `room` of them."""
        seq_id, step, state = self.request.seq_id, len(self.tokens), self.state
        if self.repeats:
            return Span(seq_id, self._known + step - self._modules, (self.tokens[-1],), True)
        start, rows = self._computed, min(self.num_pending(), room)
        first = state.origin + start + 1 + step
        text = [*state.tokens[first:], *self.tokens[max(0, first - len(state.tokens)) :]]
        return Span(seq_id, start, tuple(text[:rows]), start + rows == self._known)

    def inputs(self, span: Span) -> Array:
        """What the rows of a span are fed with."""
        if self.repeats:
            return self.fed[None]
        if self.module == 0:
            return self.state.states.take(len(span.tokens))
        start = self.state.origin + span.num_computed_tokens
        return self.state.given[self.module - 1].rows(start, start + len(span.tokens))

    def computed(self, span: Span, given: Array) -> None:
        """The entries of a span are there: what the module gave for them."""
        if self.repeats:
            return
        state, module, start = self.state, self.module, span.num_computed_tokens
        self._computed = start + len(span.tokens)
        if module < self._modules - 1:
            state.given[module].add(state.origin + start, given.copy())
        if module == 0:
            state.num_entries = self._computed
        else:
            state.entries[module - 1] = max(0, min(self._computed, self._known - module))
            state.given[module - 1].drop(state.origin + state.entries[module - 1])

    def take(self, guess: Guess, fed: Array) -> None:
        super().take(guess, fed)
        if self.tokens and not self.repeats:
            self._computed = self.state.entries[len(self.tokens) - 1]

    def finish(self) -> None:
        """Forget what was given for guesses."""
        for module, given in enumerate(self.state.given):
            given.cut(self.state.origin + max(0, self._known - module))

    def draft(self, drafter: str) -> Draft:
        """The guesses that were wanted."""
        unlikely = (i for i, survival in enumerate(self.survival) if survival < self.request.min_survival)
        length = min(self._wanted, next(unlikely, self._wanted) + 1)
        self.tokens, self.survival, self.probs = self.tokens[:length], self.survival[:length], self.probs[:length]
        return super().draft(drafter)


class ModulesDrafter(HeadDrafter):
    """Drafts chains with the modules of `head` in turn; the rest is as for any head."""

    _head: ModulesHead
    _states: dict[str, ModulesSequence]  # type: ignore[assignment]

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        try:
            return super().propose(requests)
        finally:
            for r in self._rounds:
                r.finish()
            self._rounds.clear()

    def __init__(self, head: ModulesHead, **options: Any) -> None:
        """`options` are HeadDrafter's."""
        super().__init__(head, **options)
        self._rounds: list[ModulesRound] = []

    def _sequence(self, history: History | None) -> ModulesSequence:
        further = self._head.modules - 1
        given = [PendingStates() for _ in range(further)]
        return ModulesSequence([], history, ahead=further + 1, given=given, entries=[0] * further)

    def _begin_round(self, request: DraftRequest, state: HeadSequence, known: int) -> ModulesRound | None:
        depth = min(request.depth, self._head.max_context - known + 1)
        if depth < 1 or not self.block_pool.reserve(request.seq_id, known + depth - 1):
            return None
        made = ModulesRound(request, self._states[request.seq_id], depth, self._head.modules)
        if made.num_pending() < 1:
            return None
        self._rounds.append(made)
        return made

    def _join(self, seq_id: str, state: HeadSequence) -> None:
        before = state.origin, state.num_entries
        super()._join(seq_id, state)
        if (state.origin, state.num_entries) != before:
            self._states[seq_id].begin_anew()

    def _pass(self, waiting: Sequence[HeadRound]) -> None:
        """One pass of the module whose turn comes first, for as many rounds as it has room for."""
        rounds = [r for r in waiting if isinstance(r, ModulesRound)]
        module, room = min(r.module for r in rounds), self._head.max_rows
        spans: list[tuple[ModulesRound, Span]] = []
        for r in [r for r in rounds if r.module == module][: self._head.max_sequences]:
            if room < 1:
                break
            spans.append((r, r.next_span(room)))
            room -= len(spans[-1][1].tokens)
        inputs = [r.inputs(span) for r, span in spans]
        if module == 0:
            self._kept -= sum(len(part) for part in inputs)
        batch = pack([span for _, span in spans], {}, self.block_pool.block_tables, into=self._head.buffers)
        none = np.empty((0, self._head.hidden), FLOAT32)
        given = np.concatenate(inputs)
        states, fed = (none, given) if module else (given, none)
        output = self._head.forward(batch, states, fed, module)
        first = 0
        for r, span in spans:
            r.computed(span, output.taps[0][first : first + len(span.tokens)])
            first += len(span.tokens)
            if not r.state.origin:
                self.block_pool.commit(r.request.seq_id, r.state.keys, length=r.state.entries[-1])
        self._draw([r for r, span in spans if span.needs_logits], output)
