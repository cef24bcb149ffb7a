"""Drafters that run a head on the target's states, one guess after the other: EAGLE-3 and its like.

The head has a cache and a block pool of its own. Its entry i has the state of position i and the embedding of the
token after it. A round computes the entries whose states came since the last one, all from the target's own states,
and draws the first guess from the same pass; then each guess is fed with what the head gave for the entry before: k
guesses, k passes, batched over sequences. Entries of guesses are provisional; none is kept, right or wrong. A whole
round of EAGLE-3 chains is one call of C++ (csrc/head_rounds.h) unless a request needs rows of logits, for processors or
a rule: in Python it took as long as a pass of the head.

States of a prefix that the target found in its cache never come. Its entries are then in the head's own prefix cache,
or the head begins behind the prefix: it sees less context, and its positions are counted from there, which rotary
embedding does not notice. Of many states at once it computes the last ones (MOST_STATES, MOST_BEHIND).

**Trees**: a level is one pass for all sequences and nodes. The entries of guesses lie behind those of known tokens:
of every node that is expanded, and of those between it and the root, each fed with what the head gave for its parent.
They are computed again in every level, since a pass lets a row see what is cached before its sequence's rows, and
their own ancestors among these.

**Several modules of multi-token prediction** take turns. Module m's entry of a position has what module m - 1 gave
there (the first: the target's state) beside the token m + 1 places behind it, and guesses the token after that. So
module m makes guess m of a round, from its entry of the last position that has a state; its last m entries embed
guesses and are provisional. Known ones are computed once, when their token and the entry of the module before are
there. Guesses beyond the number of modules are made by the last one again, which is fed with what it gave itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from wager.draft.base import ComputedRows, Drafter
from wager.draft.guessing import Guess
from wager.draft.heads.sampling import HeadChain, HeadSampler, drawing_temperature
from wager.draft.registry import DrafterParts
from wager.draft.trees import FedNodes, GuessedTree, RankLearner, TreeShape
from wager.drafter_spec import DrafterSpec
from wager.kernels import _native
from wager.kernels._native import BlockPool
from wager.kernels.arrays import FLOAT32, INT32, Array, empty
from wager.kernels.base import BLOCK_SIZE, TargetOutput
from wager.kernels.cpu import Kernels
from wager.models.head_eagle import EagleHead
from wager.models.head_files import HeadOutput
from wager.models.head_mtp import MtpHead
from wager.types import NO_TENANT, Draft, DraftRequest, PackedBatch, SamplingParams, Span
from wager.verify.distribution import History
from wager.verify.pack import pack

MOST_STATES = 1024
"""States at once of which entries are computed, the last ones: beside SmolLM2-135M 256 of them take as long as a step
of the target. With the last 128 alone its head has 0.91 of its tokens a round on Spec-Bench, 0.76 on the summaries."""

MOST_BEHIND = 192
"""As many of a head that guesses where a drafter that costs nothing knows little. That one finds what repeats the
prompt, so both have as many tokens a round, and the states of a long prompt take up to 3 % of an answer's time."""


class HeadSequence(_native.HeadSequence):
    """One sequence in the head's cache, and its states that wait: see csrc/head_rounds.h. `temperature`: as of
    drawing_temperature."""

    history: History | None


class HeadRound(HeadChain):
    """One draft request in progress; `fed` is what the head gave for the latest entry."""

    fed: Array

    def __init__(self, request: DraftRequest, state: HeadSequence, depth: int) -> None:
        super().__init__(request, state.history, depth, temperature=state.temperature)
        self.state = state

    def num_pending(self) -> int:
        """Entries of known tokens that are not computed yet."""
        return self.state.num_known - self.state.num_entries

    def known_span(self, room: int) -> Span:
        """The next entries of known tokens, at most `room` of them."""
        state, pending = self.state, self.num_pending()
        rows, start = min(pending, room), state.num_entries
        first = state.origin + start + 1
        state.num_entries += rows
        return Span(self.request.seq_id, start, tuple(state.tokens_between(first, first + rows)), rows == pending)

    def guess_span(self) -> Span:
        """The entry of the last guess."""
        place = self.state.num_entries + len(self.tokens) - 1
        return Span(self.request.seq_id, place, (self.tokens[-1],), True)

    def take(self, guess: Guess, fed: Array) -> None:
        """The guess of a pass, and what is fed with it: a view that is valid until the next pass."""
        self.add(guess)
        if not self.done:
            self.fed = fed.copy()


class HeadDrafter(Drafter):
    """Drafts chains with `head`. `kernels` sample natively where given. A sequence is declined while its states are
    missing, when the cache has no blocks for it, or when the context is too long."""

    max_depth = 8
    samples = True
    _sequence_type: type[HeadSequence] = HeadSequence

    def __init__(
        self,
        head: EagleHead | MtpHead,
        *,
        kernels: Kernels | None = None,
        prefix_cache: bool = True,
        depth: int | None = None,
        name: str = "head",
        lead: int = 1,
        most_states: int = MOST_STATES,
    ) -> None:
        self.name, self.taps = name, head.taps
        self.default_depth = min(depth or 4, self.max_depth)
        self.block_pool = BlockPool(head.cache.num_blocks, prefix_cache=prefix_cache, lead=lead)
        self._head = head
        self._sampler = HeadSampler(head.vocab, vocab=head.vocab, kernels=kernels)
        self._states: dict[str, HeadSequence] = {}
        self._most_states = most_states
        self._most_together = max(1, _MOST_STATE_BYTES // (head.state_width * FLOAT32.itemsize))
        self._most_kept = 0  # states that wait are no more

    # ---- the interface of a drafter ----------------------------------------------------------------------------------

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        """Remember the prompt; its entries are computed when the first draft is requested."""
        self.end(seq_id)
        width, temperature = self._head.state_width, drawing_temperature(params)
        most = self._most_states
        state = self._sequence_type(tokens, width=width, most=most, tenant=tenant, temperature=temperature)
        state.history = History.of(tokens, params)
        self._states[seq_id] = state

    def read(self, output: TargetOutput, computed: Sequence[ComputedRows]) -> None:
        """Keep the states of positions that are new, as many of all sequences together as there is memory for: one that
        loses its oldest begins later."""
        taps = [output.taps[tap] for tap in self._head.taps]
        for rows in computed:
            state = self._states.get(rows.seq_id)
            if state is None:
                continue
            self._most_kept += state.read(taps, rows.start, rows.rows)
            if self._most_kept > self._most_together:
                kept = sum(each.num_states for each in self._states.values())
                state.keep(state.num_states - max(0, kept - self._most_together))
                self._most_kept = min(kept, self._most_together)

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        state = self._states[seq_id]
        state.accept(tokens)
        if state.history is not None:
            state.history.append(tokens)

    def end(self, seq_id: str) -> None:
        if self._states.pop(seq_id, None) is not None:
            self.block_pool.release(seq_id)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One chain per request; it ends where the head's logits are not finite."""
        rounds = [started for request in requests if (started := self._start(request)) is not None]
        waiting = list(rounds)
        while waiting:
            if len(waiting) > 1:  # a prompt that takes several passes does not delay the others
                waiting.sort(key=lambda r: r.num_pending())
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
        return self._begin_round(request, state, state.num_known) if self._join(request.seq_id, state) else None

    def _join(self, seq_id: str, state: HeadSequence) -> bool:
        """Let the entries in the cache and the states that wait meet. False without a new state: there is nothing to
        guess from."""
        return state.join(self.block_pool, seq_id)

    def _begin_round(self, request: DraftRequest, state: HeadSequence, known: int) -> HeadRound | None:
        """Behind `known` entries."""
        depth = min(request.depth, self._head.max_context - known + 1)
        if depth < 1 or not self.block_pool.reserve(request.seq_id, known + depth - 1):
            return None
        return HeadRound(request, state, depth)

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
        states = next_states([(r.state, len(span.tokens)) for r, span in known], width=self._head.state_width)
        both = [*known, *fed]
        batch = pack([span for _, span in both], {}, self.block_pool, into=self._head.buffers)
        served = [r for r, span in both if span.needs_logits]
        self._sampler.set_keys(self._head.guesses, [(r, len(r.tokens)) for r in served])
        output = self._head.forward(batch, states, stacked_rows([r.fed for r, _ in fed]))
        self._commit([r for r, _ in known])
        self._draw(served, output)

    def _draw(self, served: Sequence[HeadRound], output: HeadOutput) -> None:
        if output.fed is not None:
            for r, guess, fed in zip(served, self._sampler.drawn(output, served), output.fed, strict=True):
                r.take(guess, fed)

    def _commit(self, rounds: Sequence[HeadRound]) -> None:
        """Let others find the known entries that were computed."""
        for r in rounds:
            r.state.commit(self.block_pool, r.request.seq_id, r.state.num_entries)


def next_states(known: Sequence[tuple[HeadSequence, int]], *, width: int) -> Array:
    """The given number of next states of each sequence, as rows."""
    found, first = np.empty((sum(rows for _, rows in known), width), FLOAT32), 0
    for state, rows in known:
        state.take(found[first : first + rows])
        first += rows
    return found


_MOST_STATE_BYTES = 64 << 20
"""Bytes of states that are kept for all sequences together."""

_NO_ROWS: Array = np.empty((0, 0), FLOAT32)


def stacked_rows(rows: Sequence[Array]) -> Array:
    """[rows, width]."""
    if len(rows) == 1:
        return rows[0][None]
    return np.stack(rows) if rows else _NO_ROWS


class HeadChainDrafter(HeadDrafter):
    """HeadDrafter, of which a round is one native call where every guess is drawn in the head's pass."""

    def __init__(self, head: EagleHead | MtpHead, **options: Any) -> None:
        """`options` are HeadDrafter's."""
        super().__init__(head, **options)
        self._rounds = head.rounds(self.name, self.block_pool)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = None if self._rounds is None else self._rounds.propose(requests, self._states)
        return super().propose(requests) if drafts is None else drafts


class HeadTreeRound(HeadRound):
    """One tree in progress. `given` has what the head gave for a node (-1: the last known token) that was expanded."""

    def __init__(self, request: DraftRequest, state: HeadSequence, tree: GuessedTree) -> None:
        super().__init__(request, state, request.depth)
        self.tree = tree
        self.given: dict[int, Array] = {}

    @property
    def done(self) -> bool:
        return self.tree.done

    def fits(self, room: int, logits_room: int) -> bool:
        """Whether a pass with that room for rows, and for those with logits, has all of its next level."""
        return len(self.tree.frontier) <= logits_room and len(self.tree.paths()) <= room

    def inputs(self, fed: FedNodes) -> list[Array]:
        """What is fed with each node."""
        return [self.given[self.tree.parents[node]] for node in fed.nodes]

    def draft(self, drafter: str) -> Draft:
        return self.tree.draft(drafter)


@dataclass(frozen=True, slots=True)
class _Served:
    """A round in a pass, and its rows: known entries, or nodes."""

    round: HeadTreeRound
    start: int
    tokens: Sequence[int]
    parents: Sequence[int]
    wanted: Sequence[int]  # those with logits


class HeadTreeDrafter(RankLearner, HeadDrafter):
    """Drafts trees with `head`, of as many nodes as guesses are requested; nothing follows where its logits are not
    finite. See HeadDrafter."""

    def _begin_round(self, request: DraftRequest, state: HeadSequence, known: int) -> HeadTreeRound | None:
        """Blocks for a tree's rows behind `known` entries, or for those of a narrower one if they are too few."""
        shape = TreeShape.reserved(
            request,
            room=self._head.max_context - known,
            logits_rows=self._head.max_logits_rows,
            rates=self.rank_rates.of(request.seq_id).rates,
            reserve=lambda rows: self.block_pool.reserve(request.seq_id, known + rows),
        )
        return HeadTreeRound(request, state, GuessedTree(request, state.history, shape)) if shape else None

    def _pass(self, waiting: Sequence[HeadRound]) -> None:
        """One pass of the head for as many rounds as it has room for: those with states to compute are its first."""
        room, logits_room = self._head.max_rows, self._head.max_logits_rows
        known: list[_Served] = []
        grown: list[_Served] = []
        inputs: list[Array] = []
        for r in cast(Sequence[HeadTreeRound], waiting[: self._head.max_sequences]):
            if min(room, logits_room) < 1:
                break
            if r.num_pending():
                served = _known(r, r.known_span(room))
                known.append(served)
            else:
                if grown and not r.fits(room, logits_room):
                    break
                fed = r.tree.fed(room, logits_room)
                if not fed.wanted:
                    continue
                inputs += r.inputs(fed)
                served = _Served(r, r.state.num_entries, fed.tokens, fed.parents, fed.wanted)
                grown.append(served)
            room, logits_room = room - len(served.tokens), logits_room - len(served.wanted)
        if not known and not grown:
            return
        states = next_states([(each.round.state, len(each.tokens)) for each in known], width=self._head.state_width)
        batch = _packed([*known, *grown], self.block_pool)
        output = self._head.forward(batch, states, stacked_rows(inputs))
        self._commit([each.round for each in known])
        self._grow([*known, *grown], output)

    def _grow(self, served: Sequence[_Served], output: HeadOutput) -> None:
        first, whole = 0, output.by_target()
        for each in served:
            rows, tree = range(first, first + len(each.wanted)), each.round.tree
            first += len(each.wanted)
            if not rows or output.fed is None:
                continue
            for node, row in zip(tree.frontier, rows, strict=True):
                each.round.given[node] = output.fed[row].copy()
            tree.grow(self._sampler, whole, rows)


def _known(r: HeadTreeRound, span: Span) -> _Served:
    rows = len(span.tokens)
    wanted = [rows - 1] if span.needs_logits else []
    return _Served(r, span.num_computed_tokens, span.tokens, range(-1, rows - 1), wanted)


def _packed(served: Sequence[_Served], pool: BlockPool) -> PackedBatch:
    """The rows of a pass. Several rows of a sequence may be the first of their path (parent -1), which spans with
    drafts behind them (verify/pack.py) cannot say. Row j of a sequence is cached at place `start` + j."""
    tokens: list[int] = []
    positions: list[int] = []
    parents: list[int] = []
    slots: list[int] = []
    indices: list[int] = []
    starts = [0]
    blocks = [pool.block_table(each.round.request.seq_id) for each in served]
    for each, table in zip(served, blocks, strict=True):
        first = len(tokens)
        tokens += each.tokens
        for row, parent in enumerate(each.parents):
            positions.append(each.start if parent < 0 else positions[first + parent] + 1)
            parents.append(parent if parent < 0 else first + parent)
            place = each.start + row
            slots.append(table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE)
        indices += [first + row for row in each.wanted]
        starts.append(len(tokens))
    tables = np.zeros((len(served), max(map(len, blocks))), INT32)
    for index, table in enumerate(blocks):
        tables[index, : len(table)] = table
    return PackedBatch(
        tokens=np.array(tokens, INT32),
        positions=np.array(positions, INT32),
        parents=np.array(parents, INT32),
        slot_mapping=np.array(slots, INT32),
        seq_ids=np.repeat(np.arange(len(served), dtype=INT32), np.diff(starts)),
        query_start_loc=np.array(starts, INT32),
        num_computed_tokens=np.array([each.start for each in served], INT32),
        block_tables=tables,
        logits_indices=np.array(indices, INT32),
    )


class GivenStates:
    """What a module gave until the next one has its entries: rows of the positions `first` to `end` - 1 of a
    sequence."""

    def __init__(self) -> None:
        self.first = 0
        self._rows: Array = empty(0, 0)

    @property
    def end(self) -> int:
        return self.first + len(self._rows)

    def add(self, start: int, rows: Array) -> None:
        """Rows of the positions from `start` on. Known positions are left out; rows behind a gap begin anew."""
        if start > self.end or not len(self._rows):
            self.first, self._rows = start, np.array(rows, FLOAT32)
        elif start + len(rows) > self.end:
            self._rows = np.concatenate([self._rows, rows[self.end - start :]])

    def drop(self, below: int) -> None:
        """Forget the positions below."""
        rows = max(0, min(below - self.first, len(self._rows)))
        self.first, self._rows = self.first + rows, self._rows[rows:]

    def cut(self, end: int) -> None:
        """Forget the positions from `end` on."""
        self._rows = self._rows[: max(0, end - self.first)]

    def rows(self, start: int, end: int) -> Array:
        """The rows of those positions."""
        return self._rows[start - self.first : end - self.first]


class ModulesSequence(HeadSequence):
    """`num_entries` are those of the first module. `given[m]` is what module m gave at positions of which module m + 1
    has no final entry, `entries[m]` how many final entries that one has."""

    given: list[GivenStates]
    entries: list[int]

    def begin_anew(self, further: int) -> None:
        """All modules, `further` ones behind the first, have the entries that the first one has."""
        self.entries = [self.num_entries] * further
        self.given = [GivenStates() for _ in range(further)]


class ModulesRound(HeadRound):
    """One draft request in progress. All modules take part even where fewer guesses are wanted, so that none falls
    behind; `computed` are the entries of the module whose turn it is."""

    state: ModulesSequence

    def __init__(self, request: DraftRequest, state: ModulesSequence, depth: int, modules: int, *, width: int) -> None:
        super().__init__(request, state, max(depth, modules))
        self._wanted, self._modules, self._computed, self._width = depth, modules, state.num_entries, width
        self._known = state.num_known  # places of positions that have a state

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
        text = state.tokens_between(first, first + rows)
        text += self.tokens[max(0, first - state.num_tokens) :][: rows - len(text)]
        return Span(seq_id, start, tuple(text), start + rows == self._known)

    def inputs(self, span: Span) -> Array:
        """What the rows of a span are fed with."""
        if self.repeats:
            return self.fed[None]
        if self.module == 0:
            return next_states([(self.state, len(span.tokens))], width=self._width)
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

    _head: MtpHead
    _sequence_type = ModulesSequence
    _states: dict[str, ModulesSequence]  # type: ignore[assignment]

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        try:
            return super().propose(requests)
        finally:
            for r in self._rounds:
                r.finish()
            self._rounds.clear()

    def __init__(self, head: MtpHead, **options: Any) -> None:
        """`options` are HeadDrafter's."""
        super().__init__(head, lead=head.modules, **options)
        self._rounds: list[ModulesRound] = []

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        super().begin(seq_id, tokens, params, tenant=tenant)
        self._states[seq_id].begin_anew(self._head.modules - 1)

    def _begin_round(self, request: DraftRequest, state: HeadSequence, known: int) -> ModulesRound | None:
        depth = min(request.depth, self._head.max_context - known + 1)
        if depth < 1 or not self.block_pool.reserve(request.seq_id, known + depth - 1):
            return None
        modules, width = self._head.modules, self._head.state_width
        made = ModulesRound(request, self._states[request.seq_id], depth, modules, width=width)
        if made.num_pending() < 1:
            return None
        self._rounds.append(made)
        return made

    def _join(self, seq_id: str, state: HeadSequence) -> bool:
        before = state.origin, state.num_entries
        joined = super()._join(seq_id, state)
        if (state.origin, state.num_entries) != before:
            self._states[seq_id].begin_anew(self._head.modules - 1)
        return joined

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
        batch = pack([span for _, span in spans], {}, self.block_pool, into=self._head.buffers)
        none = np.empty((0, self._head.hidden), FLOAT32)
        given = np.concatenate(inputs)
        states, fed = (none, given) if module else (given, none)
        served = [r for r, span in spans if span.needs_logits]
        self._sampler.set_keys(self._head.guesses, [(r, len(r.tokens)) for r in served])
        output = self._head.forward(batch, states, fed, module)
        first = 0
        for r, span in spans:
            if output.given is not None:
                r.computed(span, output.given[first : first + len(span.tokens)])
            first += len(span.tokens)
            r.state.commit(self.block_pool, r.request.seq_id, r.state.entries[-1])
        self._draw(served, output)


def build(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    head = parts.loaded_head(spec)
    kind: type[HeadDrafter] = HeadTreeDrafter if spec.trees else HeadChainDrafter
    if spec.name == "mtp" and head.modules > 1:
        kind = ModulesDrafter
    return kind(
        head,
        kernels=parts.kernels,
        prefix_cache=parts.prefix_cache,
        depth=parts.depth,
        name=spec.label,
        most_states=MOST_BEHIND if parts.behind else MOST_STATES,
    )
