"""A drafter that runs a head on the target's states, one guess after the other: EAGLE-3 and its like.

The head has a cache and a block pool of its own. Its entry i has the state of position i and the embedding of the
token after it. A round computes the entries whose states came since the last one, all from the target's own states,
and draws the first guess from the same pass; then each guess is fed with what the head gave for the entry before: k
guesses, k passes, batched over sequences. Entries of guesses are provisional; none is kept, right or wrong.

Guesses are drawn, and their confidence is computed, as those of a draft model (draft/model.py).

States of a prefix that the target found in its cache never come. Its entries are then in the head's own prefix cache,
or the head begins behind the prefix: it sees less context, and its positions are counted from there, which rotary
embedding does not notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Protocol

import numpy as np

from wager.draft.base import ComputedRows
from wager.draft.guessing import Guess, GuessedRow, GuessSampler
from wager.draft.heads.pending_states import PendingStates, StateFormat
from wager.kernels.arrays import FLOAT32, Array, DType
from wager.kernels.base import BatchBuffers, KVCache, TargetOutput
from wager.kernels.cpu import Kernels
from wager.kv.blocks import BlockPool
from wager.types import NO_TENANT, Draft, DraftRequest, PackedBatch, SamplingParams, Span
from wager.verify.distribution import History
from wager.verify.pack import pack


class StateHead(Protocol):
    """A head that gives one guess for each entry; see models/head_eagle.py."""

    vocab: int
    max_rows: int
    max_sequences: int
    max_logits_rows: int
    max_context: int
    hidden: int
    taps: tuple[int, ...]
    state_width: int
    state_dtype: DType
    buffers: BatchBuffers | None

    @property
    def cache(self) -> KVCache: ...

    def forward(self, batch: PackedBatch, states: Array, fed: Array) -> TargetOutput:
        """One pass: the first rows have the target's states, the others what the head gave before."""


@dataclass(slots=True)
class HeadSequence:
    """One sequence in the head's cache, which holds the final entries of the positions `origin` to `origin` +
    `num_entries` - 1, at the places from 0 on."""

    tokens: list[int]
    history: History | None
    ahead: int = 1
    states: PendingStates = field(default_factory=PendingStates)
    origin: int = 0
    num_entries: int = 0
    keys: list[int] = field(default_factory=list)
    tenant: str = NO_TENANT

    def append(self, tokens: Sequence[int]) -> None:
        """Tokens that became known. An entry embeds the token `ahead` places behind it and is cached under that, the
        first one under all up to it: it depends on them."""
        before, first = len(self.tokens), self.ahead + 1
        self.tokens += tokens
        if not self.keys and len(self.tokens) >= first:
            self.keys, before = [reduce(lambda key, token: key << 32 | token, self.tokens[:first])], first
        self.keys += self.tokens[before:] if self.keys else []


class HeadRound:
    """One draft request in progress; `fed` is what the head gave for the latest entry."""

    def __init__(self, request: DraftRequest, state: HeadSequence, depth: int) -> None:
        self.request, self.state, self.depth = request, state, depth
        self.tokens: list[int] = []
        self.survival: list[float] = []
        self.probs: list[Array] = []
        self.fed: Array = np.empty(0, FLOAT32)

    @property
    def done(self) -> bool:
        unlikely = bool(self.survival) and self.survival[-1] < self.request.min_survival
        return unlikely or len(self.tokens) >= self.depth

    def num_pending(self) -> int:
        """Entries of known tokens that are not computed yet."""
        return len(self.state.tokens) - 1 - self.state.origin - self.state.num_entries

    def known_span(self, room: int) -> Span:
        """The next entries of known tokens, at most `room` of them."""
        state, pending = self.state, self.num_pending()
        rows, start = min(pending, room), state.num_entries
        first = state.origin + start + 1
        state.num_entries += rows
        return Span(self.request.seq_id, start, tuple(state.tokens[first : first + rows]), rows == pending)

    def guess_span(self) -> Span:
        """The entry of the last guess."""
        place = self.state.num_entries + len(self.tokens) - 1
        return Span(self.request.seq_id, place, (self.tokens[-1],), True)

    def row(self, index: int) -> GuessedRow:
        return GuessedRow(index, self.request, tuple(self.tokens), self.state.history)

    def take(self, guess: Guess, fed: Array) -> None:
        """The guess of a pass, and what is fed with it."""
        if guess.token < 0:  # not finite: this chain ends here, the others go on
            self.depth = len(self.tokens)
            return
        self.tokens.append(guess.token)
        self.survival.append((self.survival[-1] if self.survival else 1.0) * guess.probability)
        self.fed = fed
        if guess.probs is not None:
            self.probs.append(guess.probs)

    def draft(self, drafter: str) -> Draft:
        probs = np.stack(self.probs) if self.probs else None
        parents = tuple(range(-1, len(self.tokens) - 1))
        return Draft(self.request.seq_id, tuple(self.tokens), parents, tuple(self.survival), drafter, probs)


class HeadDrafter:
    """Drafts chains with `head`. `kernels` sample natively where given. A sequence is declined while its states are
    missing, when the cache has no blocks for it, or when the context is too long."""

    max_depth = 8
    samples = True
    makes_trees = False

    def __init__(
        self,
        head: StateHead,
        *,
        kernels: Kernels | None = None,
        prefix_cache: bool = True,
        depth: int | None = None,
        name: str = "head",
    ) -> None:
        self.name, self.taps = name, head.taps
        self.default_depth = min(depth or 4, self.max_depth)
        self.block_pool = BlockPool(head.cache.num_blocks, prefix_cache=prefix_cache)
        self._head = head
        self._format = StateFormat(head.taps, head.state_width, head.state_dtype)
        self._sampler = GuessSampler(head.vocab, vocab=head.vocab, kernels=kernels)
        self._states: dict[str, HeadSequence] = {}
        self._kept = 0  # rows of states of all sequences

    # ---- the interface of a drafter ----------------------------------------------------------------------------------

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        """Remember the prompt; its entries are computed when the first draft is requested."""
        self.end(seq_id)
        state = self._states[seq_id] = self._sequence(History.of(tokens, params))
        state.tenant = tenant
        state.append(tokens)

    def _sequence(self, history: History | None) -> HeadSequence:
        return HeadSequence([], history)

    def read(self, output: TargetOutput, computed: Sequence[ComputedRows]) -> None:
        """Keep the states of positions that are new."""
        for rows in computed:
            state = self._states.get(rows.seq_id)
            if state is None:
                continue
            before, known = state.states.count, state.origin + state.num_entries
            skipped = max(0, min(max(known, state.states.end) - rows.start, len(rows.rows)))
            if skipped < len(rows.rows):
                new = self._format.rows(output, rows.rows[skipped:])
                state.states.add(rows.start + skipped, new)
                self._kept += state.states.count - before
                if self._kept > self._format.most_rows:
                    self._forget(state, self._kept - self._format.most_rows)

    def observe(self, output: TargetOutput) -> None:
        """Ignored: states come by `read`."""

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        state = self._states[seq_id]
        state.append(tokens)
        if state.history is not None:
            state.history.append(tokens)

    def end(self, seq_id: str) -> None:
        state = self._states.pop(seq_id, None)
        if state is not None:
            self._kept -= state.states.count
            self.block_pool.release(seq_id)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One chain per request; it ends where the head's logits are not finite."""
        rounds = [started for request in requests if (started := self._start(request)) is not None]
        waiting = list(rounds)
        while waiting:
            waiting.sort(key=lambda r: r.num_pending())  # a prompt that takes several passes does not delay the others
            self._pass(waiting)
            waiting = [r for r in waiting if not r.done]
        for r in rounds:
            self.block_pool.trim(r.request.seq_id, r.state.num_entries)
        drafts = {r.request.seq_id: r.draft(self.name) for r in rounds}
        return [drafts.get(request.seq_id) or Draft(request.seq_id, drafter=self.name) for request in requests]

    # ---- one round --------------------------------------------------------------------------------------------------

    def _start(self, request: DraftRequest) -> HeadRound | None:
        """Reserve blocks for everything that the request may write; None declines it."""
        state = self._states[request.seq_id]
        entries = len(state.tokens) - 1
        if not state.states.count or state.states.end < entries:  # without a new state there is nothing to guess from
            return None
        self._join(request.seq_id, state)
        return self._begin_round(request, state, entries - state.origin)

    def _begin_round(self, request: DraftRequest, state: HeadSequence, known: int) -> HeadRound | None:
        """Behind `known` entries."""
        depth = min(request.depth, self._head.max_context - known + 1)
        if depth < 1 or not self.block_pool.reserve(request.seq_id, known + depth - 1):
            return None
        return HeadRound(request, state, depth)

    def _join(self, seq_id: str, state: HeadSequence) -> None:
        """Let the entries in the cache and the states that wait meet: by what the prefix cache has, or by beginning
        where the states do."""
        before = state.states.count
        if not self.block_pool.block_table(seq_id) and not state.origin:
            state.num_entries = self.block_pool.match_prefix(seq_id, state.keys, tenant=state.tenant)
        state.states.drop(state.origin + state.num_entries)
        if state.states.first > state.origin + state.num_entries:
            self.block_pool.release(seq_id)
            state.origin, state.num_entries = state.states.first, 0
        self._kept += state.states.count - before

    def _pass(self, waiting: Sequence[HeadRound]) -> None:
        """One pass of the head for as many rounds as it has room for: those with states to compute are its first."""
        room, known, fed = self._head.max_rows, [], []
        for r in waiting[: self._head.max_sequences]:
            if room < 1:
                break
            if pending := r.num_pending():
                known.append((r, r.known_span(room)))
                room -= min(pending, room)
            else:
                fed.append((r, r.guess_span()))
                room -= 1
        states = self._take([(r, len(span.tokens)) for r, span in known])
        spans = [span for _, span in (*known, *fed)]
        batch = pack(spans, {}, self.block_pool.block_tables, into=self._head.buffers)
        output = self._head.forward(batch, states, stacked_rows([r.fed for r, _ in fed], self._head.hidden))
        self._commit([r for r, _ in known])
        self._draw([r for r, span in (*known, *fed) if span.needs_logits], output)

    def _draw(self, served: Sequence[HeadRound], output: TargetOutput) -> None:
        guesses = self._sampler.guesses(output, [r.row(index) for index, r in enumerate(served)])
        given: Sequence[Array] = () if output.last_hidden is None else list(output.last_hidden)
        for r, guess, fed in zip(served, guesses, given, strict=True):
            r.take(guess, fed.copy())

    def _take(self, known: Sequence[tuple[HeadRound, int]]) -> Array:
        """The next states of each round, so many, as rows."""
        parts = [r.state.states.take(rows) for r, rows in known]
        self._kept -= sum(map(len, parts))
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty((0, self._format.width), self._format.dtype)

    def _commit(self, rounds: Sequence[HeadRound]) -> None:
        """Let others find the known entries that were computed."""
        for r in rounds:
            if not r.state.origin:
                self.block_pool.commit(r.request.seq_id, r.state.keys, length=r.state.num_entries)

    def _forget(self, state: HeadSequence, rows: int) -> None:
        """Drop a sequence's oldest states, so that it begins later."""
        before = state.states.count
        state.states.drop(state.states.first + rows)
        self._kept += state.states.count - before


def stacked_rows(rows: Sequence[Array], width: int) -> Array:
    """f32 [rows, width]."""
    return np.stack(rows) if rows else np.empty((0, width), FLOAT32)
