"""A drafter that runs a block head: DFlash and DSpark.

One pass over a block of slots gives all guesses of a round; each is drawn from its slot's logits with the target's
noise at its position, where the head has a Markov head after adding what the guess before says. A head with a
confidence head gives the survival of its guesses, else it is their probability under q.

The context is the keys and values of known positions, made from the target's states as they come. Those of guesses
never enter it. What a cached prefix of the target leaves out is missing from the context; positions stay what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from wager.draft.base import ComputedRows
from wager.draft.guessing import GuessedRow, GuessSampler
from wager.draft.heads.chain_guesses import ChainGuesses, draft_some
from wager.draft.heads.pending_states import PendingStates, StateFormat
from wager.kernels.arrays import Array, DType
from wager.kernels.base import TargetOutput
from wager.kernels.cpu import Kernels
from wager.models.head_block import BlockContext
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams
from wager.verify.distribution import History


class SlotHead(Protocol):
    """A head whose one pass gives all guesses of a round; see models/head_block.py."""

    vocab: int
    taps: tuple[int, ...]
    state_width: int
    state_dtype: DType
    max_depth: int
    max_positions: int
    max_sequences: int
    max_logits_rows: int
    conditions: bool

    def extend(self, context: BlockContext, states: Array) -> None: ...

    def run(self, contexts: Sequence[BlockContext], anchors: Sequence[int]) -> None: ...

    def guess_row(self, block: int, step: int) -> int: ...

    def logits(self, rows: Sequence[int], before: Sequence[int]) -> TargetOutput: ...

    def confidence(self, row: int, before: int) -> float | None: ...


@dataclass(slots=True)
class BlockSequence:
    """A sequence: how many tokens are known, the last of them, its context, and states that are not in it yet."""

    known: int
    last: int
    history: History | None
    context: BlockContext = field(default_factory=BlockContext)
    states: PendingStates = field(default_factory=PendingStates)


class BlockDrafter:
    """Drafts chains with `head`. `kernels` sample natively where given. A sequence is declined while its newest state
    is missing, and where a block would not fit the context."""

    samples = True
    makes_trees = False

    def __init__(self, head: SlotHead, *, kernels: Kernels | None = None, name: str = "block") -> None:
        self.name, self.taps = name, head.taps
        self.max_depth = self.default_depth = head.max_depth
        self._head = head
        self._format = StateFormat(head.taps, head.state_width, head.state_dtype)
        self._sampler = GuessSampler(head.vocab, vocab=head.vocab, kernels=kernels)
        self._states: dict[str, BlockSequence] = {}

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        self._states[seq_id] = BlockSequence(len(tokens), tokens[-1], History.of(tokens, params))

    def read(self, output: TargetOutput, computed: Sequence[ComputedRows]) -> None:
        """Keep the states of positions that are new."""
        for rows in computed:
            state = self._states.get(rows.seq_id)
            if state is None:
                continue
            end = max(state.context.origin + state.context.count, state.states.end)
            skipped = max(0, min(end - rows.start, len(rows.rows)))
            if skipped < len(rows.rows):
                state.states.add(rows.start + skipped, self._format.rows(output, rows.rows[skipped:]))
                if state.states.count > self._format.most_rows:
                    state.states.drop(state.states.end - self._format.most_rows)

    def observe(self, output: TargetOutput) -> None:
        """Ignored: states come by `read`."""

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        state = self._states[seq_id]
        if tokens:
            state.known, state.last = state.known + len(tokens), tokens[-1]
        if state.history is not None:
            state.history.append(tokens)

    def end(self, seq_id: str) -> None:
        self._states.pop(seq_id, None)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request; it ends where logits are not finite."""
        ready = [request for request in requests if self._is_ready(request)]
        return draft_some(requests, ready, self._run, together=self._head.max_sequences, drafter=self.name)

    def _run(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One pass of the head."""
        states = [self._states[request.seq_id] for request in requests]
        self._head.run([state.context for state in states], [state.last for state in states])
        return self._drafts(requests, states)

    def _is_ready(self, request: DraftRequest) -> bool:
        """Brings the context up to date; whether it reaches to the last token."""
        state = self._states[request.seq_id]
        context, states = state.context, state.states
        if request.depth < 1 or state.known + self._head.max_depth > self._head.max_positions:
            return False
        if states.count:
            if states.first > context.origin + context.count:
                context = state.context = BlockContext(states.first)
            self._head.extend(context, states.take(states.count))
        return 0 < context.count == state.known - 1 - context.origin

    def _drafts(self, requests: Sequence[DraftRequest], states: Sequence[BlockSequence]) -> list[Draft]:
        """Of the blocks of the pass that was just run."""
        head = self._head
        found = [
            ChainGuesses(request, state.history, block, min(request.depth, head.max_depth))
            for block, (request, state) in enumerate(zip(requests, states, strict=True))
        ]
        active = found
        while active := [guesses for guesses in active if not guesses.done]:
            rows = [head.guess_row(guesses.place, len(guesses.tokens)) for guesses in active]
            before = [guesses.tokens[-1] if guesses.tokens else states[guesses.place].last for guesses in active]
            output = head.logits(rows, before)
            wanted = [
                GuessedRow(index, guesses.request, tuple(guesses.tokens), guesses.history)
                for index, guesses in enumerate(active)
            ]
            drawn = self._sampler.guesses(output, wanted)
            for row, token, guesses, guess in zip(rows, before, active, drawn, strict=True):
                guesses.add(guess, rate=None if guess.token < 0 else head.confidence(row, token))
        return [guesses.draft(self.name) for guesses in found]
