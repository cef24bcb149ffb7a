"""A drafter that runs a smaller model of the same vocabulary: chains, one token after the other, or trees, one level
after the other.

It has a cache and a block pool of its own. A round computes every known token that it has not seen yet and draws the
first guesses from the same pass, then feeds guesses to draw the next ones, batched over sequences.
Keys and values of guesses are provisional: those of guesses that turn out right are kept, moved to the slots of their
positions where they lay in a tree, and the others are overwritten. A sequence for which no draft was requested for a
while has more tokens to compute the next time.

A model with recurrent layers keeps two states of each sequence, one behind its known tokens and one behind guesses,
which begins with the other; if all guesses that it was fed turn out right, the two change places, and else the
accepted ones are computed again with the tokens behind them. It guesses chains, and has no prefix cache.

The confidence of a guess in a chain is its probability under q before processing (in a tree see guessing.py); survival
is the product along the path, and drafting ends after the first guesses whose survival is below the request's
`min_survival`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from wager.draft.base import Drafter, LogitsRows
from wager.draft.combined import InnerDrafter
from wager.draft.guessing import Guess, GuessedChain, GuessedRow, GuessSampler, child_of
from wager.draft.registry import DrafterParts
from wager.draft.trees import LEVELS, GuessedTree, RankRates, TreeShape
from wager.drafter_spec import DrafterSpec
from wager.errors import UsageError
from wager.kernels._native import BlockPool
from wager.kernels.base import BLOCK_SIZE, Target, TargetOutput
from wager.kernels.cpu import Kernels
from wager.kv.paged_cache import PagedKVCache
from wager.tenants import PerTenant
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams, Span
from wager.verify.distribution import History
from wager.verify.pack import pack


@dataclass(slots=True)
class FedTree:
    """Guesses whose keys and values are in the cache, provisionally: node i at the slot of position `start` + i."""

    start: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def append(self, token: int) -> None:
        """One more node of a chain."""
        self.parents.append(len(self.tokens) - 1)
        self.tokens.append(token)


@dataclass(slots=True)
class DraftedSequence:
    """One sequence in the drafter's cache, whose first `num_computed_tokens` have final keys and values. `fed` are
    guesses that have provisional ones, and `reached` the last of them that turned out right (-1: the root; None:
    another token came, so none of the others can). `unknown` is the place of the first token that the model has no row
    for: nothing can be computed from there on."""

    tokens: list[int]
    history: History | None
    prompt_tokens: int = 0
    num_computed_tokens: int = 0
    fed: FedTree = field(default_factory=lambda: FedTree(0))
    reached: int | None = None
    alternatives: list[list[int]] = field(default_factory=list)  # by guess of the last draft, if it is a chain
    unknown: int | None = None
    slots: tuple[int, int] | None = None  # of recurrent states: behind the known tokens, and behind guesses

    def states_of(self, span: Span) -> tuple[int, int]:
        """The slots of states that a span's pass writes to and begins with (-1: zeros)."""
        known, guessed = self.slots or (-1, -1)
        behind = span.num_computed_tokens - len(self.tokens)  # guesses before it
        if behind < 0:
            return known, known if span.num_computed_tokens else -1
        return guessed, guessed if behind else known

    def follow(self, tokens: Sequence[int]) -> None:
        """Tokens are about to become known, with recurrent states behind the fed guesses."""
        fed, count = self.fed, len(self.fed.tokens)
        fresh = self.reached == -1 and fed.start == len(self.tokens)
        if self.slots and fresh and 0 < count < len(tokens) and list(tokens[:count]) == fed.tokens:
            self.slots = (self.slots[1], self.slots[0])
            self.num_computed_tokens = fed.start + count
        self.reached = None

    def extend(self, tokens: Sequence[int], vocab: int) -> None:
        """Tokens became known; ids from `vocab` on are unknown to the model."""
        if self.unknown is None and max(tokens, default=-1) >= vocab:
            self.unknown = len(self.tokens) + next(at for at, token in enumerate(tokens) if token >= vocab)
        self.tokens += tokens

    def computed_with(self, tokens: Sequence[int]) -> int:
        """For how many tokens, known ones and `tokens` behind them, keys and values are in place: those of fed guesses
        where they lie in the slots of their positions."""
        known, node = len(self.tokens), self.reached
        if node is None or (node < 0 and self.num_computed_tokens < known):
            return self.num_computed_tokens
        computed = self.num_computed_tokens
        for position, token in enumerate(tokens, known):
            node = child_of(self.fed.parents, self.fed.tokens, node, token)
            if node is None or self.fed.start + node != position:
                break
            computed = position + 1
        return computed


class DraftRound:
    """One draft request in progress: the rows that it wants of a pass, and what it makes of their logits. Guesses come
    one after the other; see TreeRound."""

    def __init__(self, request: DraftRequest, state: DraftedSequence, depth: int) -> None:
        self.request, self.state = request, state
        state.fed, state.reached, state.alternatives = FedTree(len(state.tokens)), -1, []
        self.chain = GuessedChain(request, state.history, depth)
        self._guessed: Draft | None = None
        self.right_guesses: list[int] = []
        """The nodes guessed for the last pass that were right, from the root down."""
        self._first = 0

    def num_pending(self) -> int:
        """Known tokens that were not computed yet."""
        return len(self.state.tokens) - self.state.num_computed_tokens

    def known_span(self, room: int) -> Span:
        """Known tokens that are not computed yet, at most `room` of them."""
        state, rows = self.state, min(self.num_pending(), room)
        start, state.num_computed_tokens = state.num_computed_tokens, state.num_computed_tokens + rows
        tokens = tuple(state.tokens[start : start + rows])
        return Span(self.request.seq_id, start, tokens, start + rows == len(state.tokens))

    @property
    def done(self) -> bool:
        """Whether it wants no further pass."""
        return self.chain.done

    @property
    def wanted_of_inner(self) -> tuple[DraftRequest, list[int], int]:
        """What a drafter of its own may guess: tokens as far as they are guessed, and how many guesses behind them may
        be right without a further pass."""
        guesses = self.chain.tokens
        return self.request, [*self.state.tokens, *guesses], self.chain.depth - len(guesses) - 1

    @property
    def least_rows(self) -> int:
        """With less room in a pass, for rows and for those with logits, it waits for the next one."""
        return 1

    def rows(self, room: int, logits_room: int, guessed: Draft | None) -> tuple[Span, Draft | None, list[int]]:
        """The rows of the next pass, at most `room`, and those of them whose logits it wants, at most `logits_room`: 0
        is that of the span's last token, 1 + i that of node i behind it. `guessed` is what a drafter of its own guesses
        of the next tokens."""
        if self.num_pending():
            span = self.known_span(room)
        else:
            fed, last = self.state.fed, self.chain.tokens[-1]
            span = Span(self.request.seq_id, fed.start + len(fed.tokens), (last,), True)
            fed.append(last)
        self._guessed, self.right_guesses = None, []
        if not span.needs_logits:
            return span, None, []
        size = 0 if guessed is None else min(len(guessed), room - len(span.tokens), logits_room - 1)
        if guessed is not None and size > 0:
            self._guessed = guessed.truncate(size)
        return span, self._guessed, list(range(1 + max(0, size)))

    def wanted(self, first: int, sampler: GuessSampler, output: TargetOutput) -> list[GuessedRow]:
        """After a pass whose rows of logits begin at `first`: the rows of which it wants a token each."""
        self._first = first
        return [self.chain.row(first)]

    def take(self, guess: Guess) -> GuessedRow | None:
        """The token of the row that it wanted; the row that it wants next of the same pass, if any."""
        self.chain.add(guess)
        if guess.token < 0 or self._guessed is None or self.done:
            return None
        reached = self.right_guesses[-1] if self.right_guesses else -1
        node = child_of(self._guessed.parents, self._guessed.tokens, reached, guess.token)
        if node is None:
            return None
        self.right_guesses.append(node)
        self.state.fed.append(guess.token)
        return self.chain.row(self._first + 1 + node)

    def draft(self, drafter: str) -> Draft:
        """What was drafted."""
        return self.chain.draft(drafter)


class TreeRound(DraftRound):
    """A tree of the shape, see GuessedTree."""

    def __init__(self, request: DraftRequest, state: DraftedSequence, shape: TreeShape) -> None:
        super().__init__(request, state, 0)  # no chain, for which a drafter of its own could guess
        self._tree, self._nodes = GuessedTree(request, state.history, shape), shape.nodes

    @property
    def done(self) -> bool:
        return self._tree.done

    @property
    def least_rows(self) -> int:
        return 1 + self._nodes if self._tree.level else 1

    def rows(self, room: int, logits_room: int, guessed: Draft | None) -> tuple[Span, Draft | None, list[int]]:
        if self.num_pending():
            span = self.known_span(room)
            return span, None, [0] if span.needs_logits else []
        state, fed = self.state, self._tree.fed(room - 1, logits_room)
        state.fed = FedTree(len(state.tokens), list(fed.tokens), list(fed.parents))
        span = Span(self.request.seq_id, len(state.tokens) - 1, (state.tokens[-1],), True)
        return span, Draft(self.request.seq_id, fed.tokens, fed.parents), [1 + place for place in fed.wanted]

    def wanted(self, first: int, sampler: GuessSampler, output: TargetOutput) -> list[GuessedRow]:
        """It needs several candidates of a row, so it takes them here."""
        self._tree.grow(sampler, output, range(first, first + len(self._tree.frontier)))
        return []

    def draft(self, drafter: str) -> Draft:
        return self._tree.draft(drafter)


class DraftModel(Drafter):
    """Drafts with `target`, a model that is not the one to be verified.

    `vocab` is the verified model's number of logits; ids beyond it are never guessed, and rows of draft_probs have
    that width (None: the draft model's own). `max_context` bounds positions (None: the cache alone does). `kernels`
    sample natively where given. `trees`: it drafts trees of as many nodes as guesses are requested. `inner` guesses
    what it will draw, so that one pass gives several guesses of a chain. `max_logits_rows` bounds the rows with
    logits of one pass (None: its rows). `sampler` draws for a model with another vocabulary. A sequence is declined
    when the cache has no blocks for it or the context is too long, and as soon as it holds an id that the draft model
    has no row for, since everything behind it depends on it.
    """

    default_depth = 4
    max_depth = 8
    samples = True

    def __init__(
        self,
        target: Target,
        *,
        vocab: int | None = None,
        max_context: int | None = None,
        kernels: Kernels | None = None,
        prefix_cache: bool = True,
        name: str = "model",
        trees: bool = False,
        inner: InnerDrafter | None = None,
        max_logits_rows: int | None = None,
        sampler: GuessSampler | None = None,
    ) -> None:
        self.name = name
        self.makes_trees = trees
        slots = getattr(target, "num_states", 0) + getattr(target, "num_snapshots", 0)
        self._recurrent = slots > 0
        self._free_slots = list(range(slots))
        prefix_cache = prefix_cache and not self._recurrent
        self.block_pool = BlockPool(target.cache.num_blocks, prefix_cache=prefix_cache)
        self.rank_rates = PerTenant(RankRates)
        self.on_pass: Callable[[], bool] = lambda: True
        """Called after each pass; False ends the drafts as they are."""
        self.num_alternatives = 0
        self._cache = PagedKVCache(self.block_pool, target.cache)
        self._target = target
        self._max_context = max_context
        self._max_logits_rows = target.max_rows if max_logits_rows is None else max_logits_rows
        self._inner = inner
        if inner is not None:
            self.remembers_requests, self.reads_rows = inner.drafter.remembers_requests, inner.drafter.reads_rows
        verified = target.vocab if vocab is None else vocab
        self._sampler = sampler or GuessSampler(target.vocab, vocab=verified, kernels=kernels)
        self._states: dict[str, DraftedSequence] = {}

    # ---- several continuations of one sequence (see draft/ahead.py) -----------------------------------------------

    def fork(self, seq_id: str, new_id: str, tokens: Sequence[int], params: SamplingParams) -> None:
        """A new sequence that knows what another one knows, with `tokens` behind it. Keys and values of known tokens,
        and of guesses where they lie in their places, are shared or copied."""
        source, own = self._states[seq_id], self._sampler.known_ids(tokens)
        history = source.history and source.history.copy()
        if history is not None:
            history.append(tokens)
        state = DraftedSequence(list(source.tokens), history, source.prompt_tokens, unknown=source.unknown)
        state.extend(own, self._target.vocab)
        self._states[new_id] = state
        tenant = self.rank_rates.tenant(seq_id)
        self.rank_rates.enter(new_id, tenant)
        if self._inner is not None:
            self._inner.begin(new_id, source.tokens[: source.prompt_tokens], params, tenant=tenant)
        if self.block_pool.block_table(seq_id):
            known = source.num_computed_tokens
            self.block_pool.commit(seq_id, source.tokens, length=known)
            computed = min(source.computed_with(own), len(state.tokens) - 1)
            state.num_computed_tokens = self._cache.fork(
                seq_id, new_id, committed=min(known, computed), computed=computed
            )

    def alternatives(self, seq_id: str) -> Sequence[Sequence[int]]:
        """For each guess of the last draft of a sequence, if it is a chain, the `num_alternatives` tokens that are
        likeliest after it under the same noise: what the target says instead where it is wrong, most likely."""
        return [self._sampler.verified_ids(tokens) for tokens in self._states[seq_id].alternatives]

    # ---- the interface of a drafter ----------------------------------------------------------------------------------

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        """Remember the prompt; it is computed when the first draft is requested."""
        self.end(seq_id)
        self.rank_rates.enter(seq_id, tenant)
        self._states[seq_id] = state = DraftedSequence([], History.of(tokens, params), len(tokens))
        state.extend(self._sampler.known_ids(tokens), self._target.vocab)
        if self._inner is not None:
            self._inner.begin(seq_id, tokens, params, tenant=tenant)

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        """Compare the tokens that became known with the guesses: right guesses keep their keys and values."""
        state, own = self._states[seq_id], self._sampler.known_ids(tokens)
        self.rank_rates.of(seq_id).compare(seq_id, own)
        if self._recurrent:
            state.follow(own)
        else:
            for position, token in enumerate(own, len(state.tokens)):
                self._compare(seq_id, state, token, position)
        state.extend(own, self._target.vocab)
        if state.history is not None:
            state.history.append(tokens)
        # the last token's logits are still needed
        state.num_computed_tokens = min(state.num_computed_tokens, len(state.tokens) - 1)
        if state.num_computed_tokens:
            self.block_pool.commit(seq_id, state.tokens, length=state.num_computed_tokens)
        if state.reached is None or state.reached not in state.fed.parents:
            self.block_pool.trim(seq_id, state.num_computed_tokens)
        if state.unknown is not None:
            self._release(seq_id, state)
            state.num_computed_tokens, state.reached, state.alternatives = 0, None, []

    def rewind(self, seq_id: str, length: int) -> None:
        """Only the first `length` known tokens, of the model's own, remain. For a request without penalties."""
        state = self._states[seq_id]
        del state.tokens[length:]
        state.reached = None
        if state.unknown is not None and state.unknown >= length:
            state.unknown = None
        kept = max(0, min(state.num_computed_tokens, length - 1))  # the last token's logits are still needed
        kept -= kept % BLOCK_SIZE  # the block may be shared by now
        kept = 0 if self._recurrent else kept
        state.num_computed_tokens = kept
        self.block_pool.trim(seq_id, kept)

    def end(self, seq_id: str) -> None:
        if (state := self._states.pop(seq_id, None)) is not None:
            self._release(seq_id, state)
            if (rates := self.rank_rates.leave(seq_id)) is not None:
                rates.end(seq_id)
            if self._inner is not None:
                self._inner.end(seq_id)

    def _release(self, seq_id: str, state: DraftedSequence) -> None:
        """Give back the blocks and slots of a sequence."""
        self.block_pool.release(seq_id)
        self._free_slots += state.slots or ()
        state.slots = None

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One chain or tree per request; it ends where the draft model's logits are not finite."""
        rounds = [started for request in requests if (started := self._start(request)) is not None]
        waiting = list(rounds)
        while waiting:
            waiting.sort(key=DraftRound.num_pending)  # a prompt that takes several passes does not delay the others
            self._pass(waiting)
            waiting = [r for r in waiting if not r.done]
            if not self.on_pass():
                break
        drafts = {r.request.seq_id: self._finish(r) for r in rounds}
        return [drafts.get(request.seq_id) or Draft(request.seq_id, drafter=self.name) for request in requests]

    def _finish(self, r: DraftRound) -> Draft:
        draft = r.draft(self.name)
        if self.makes_trees:  # chains have no ranks, and nobody reads what was learned of them
            self.rank_rates.of(draft.seq_id).drafted(draft)
        return replace(draft, tokens=tuple(self._sampler.verified_ids(draft.tokens)))

    # ---- what an inner drafter is told of requests and rows ---------------------------------------------------------

    def forget(self) -> None:
        self.rank_rates.clear()
        if self._inner is not None:
            self._inner.forget()

    def read_rows(self, output: TargetOutput, rows: Sequence[LogitsRows]) -> None:
        if self._inner is not None:
            self._inner.read_rows(output, rows)

    # ---- one round --------------------------------------------------------------------------------------------------

    def _start(self, request: DraftRequest) -> DraftRound | None:
        """Reserve blocks for everything that the request may write; None declines it."""
        state = self._states[request.seq_id]
        if state.unknown is not None or not state.tokens:  # a prompt may have no spelling in another vocabulary
            return None
        depth, known = request.depth, len(state.tokens)
        room = depth * LEVELS if self._max_context is None else self._max_context - known
        if min(depth, room + 1) < 1:
            return None
        if not self.block_pool.block_table(request.seq_id):
            tenant = self.rank_rates.tenant(request.seq_id)
            state.num_computed_tokens = self.block_pool.match_prefix(request.seq_id, state.tokens, tenant=tenant)
        if self._recurrent:
            if state.slots is None:
                if len(self._free_slots) < 2:
                    return None
                state.slots = (self._free_slots.pop(), self._free_slots.pop())
            if state.num_computed_tokens >= known:  # the states are behind the token whose logits are needed
                state.num_computed_tokens = 0
        state.num_computed_tokens = min(state.num_computed_tokens, known - 1)
        if self.makes_trees:
            return self._start_tree(request, state, room)
        depth = min(depth, room + 1)  # the last guess is never fed
        reserved = self.block_pool.reserve(request.seq_id, known + depth - 1)
        return DraftRound(request, state, depth) if reserved else None

    def _start_tree(self, request: DraftRequest, state: DraftedSequence, room: int) -> TreeRound | None:
        """Blocks for a tree's rows behind the known tokens, or for those of a narrower one if they are too few."""
        shape = TreeShape.reserved(
            request,
            room=room,
            logits_rows=self._max_logits_rows,
            rates=self.rank_rates.of(request.seq_id).rates,
            reserve=lambda rows: self.block_pool.reserve(request.seq_id, len(state.tokens) + rows),
        )
        return TreeRound(request, state, shape) if shape else None

    def _pass(self, waiting: Sequence[DraftRound]) -> None:
        """One pass of the model for as many rounds as it has room for."""
        guessed = {} if self._inner is None else self._inner.guess([r.wanted_of_inner for r in waiting])
        spans: list[Span] = []
        behind: dict[str, Draft] = {}
        served: list[tuple[DraftRound, list[int]]] = []  # with the rows whose logits it wants
        room, logits_room = self._target.max_rows, self._max_logits_rows
        for r in waiting[: self._target.max_sequences]:
            if min(room, logits_room) < 1 or (served and min(room, logits_room) < r.least_rows):
                break
            span, draft, rows = r.rows(room, logits_room, guessed.get(r.request.seq_id))
            spans.append(span)
            served.append((r, rows))
            if draft is not None:
                behind[span.seq_id] = draft
            room -= len(span.tokens) + (len(draft) if draft else 0)
            logits_room -= len(rows)
        output = self._forward(spans, behind, [rows for _, rows in served])
        self._draw([(r, len(rows)) for r, rows in served], output)
        for r, _ in served:
            if r.right_guesses:
                first = len(r.state.tokens) + len(r.state.fed.tokens) - len(r.right_guesses)
                self._cache.compact_path(r.request.seq_id, first, r.right_guesses)

    def _forward(
        self, spans: Sequence[Span], behind: Mapping[str, Draft], wanted: Sequence[Sequence[int]]
    ) -> TargetOutput:
        """`wanted` has, for each span, the rows whose logits are computed: 0 is the last known token's, 1 + i that of
        node i behind it."""
        batch = pack(spans, behind, self.block_pool)
        starts = batch.query_start_loc.tolist()
        indices = [
            start + len(span.tokens) - 1 + row
            for start, span, rows in zip(starts, spans, wanted, strict=False)
            for row in rows
        ]
        batch = replace(batch, logits_indices=np.array(indices, np.int32))
        if self._recurrent:
            none = (0, *[-1] * 4)  # neither replays nor snapshots
            uses = [(*self._states[span.seq_id].states_of(span), len(span.tokens), *none) for span in spans]
            batch = replace(batch, state_uses=np.array(uses, np.int32), replays=np.zeros(0, np.int32))
        return self._target.forward(batch)

    def _draw(self, served: Sequence[tuple[DraftRound, int]], output: TargetOutput) -> None:
        """Draw from the rows of each round, in their order; what was guessed right is followed within the pass."""
        walking: list[tuple[DraftRound, GuessedRow]] = []
        first = 0
        for r, rows in served:
            if rows:
                walking += [(r, row) for row in r.wanted(first, self._sampler, output)]
            first += rows
        while walking:
            guesses = self._sampler.guesses(output, [row for _, row in walking])
            following: list[tuple[DraftRound, GuessedRow]] = []
            for (r, row), guess in zip(walking, guesses, strict=True):
                if self.num_alternatives and guess.token >= 0:
                    others = self._sampler.alternatives(output, row, guess.token, self.num_alternatives)
                    r.state.alternatives.append(others)
                if (below := r.take(guess)) is not None:
                    following.append((r, below))
            walking = following

    def _compare(self, seq_id: str, state: DraftedSequence, token: int, position: int) -> None:
        """A token became known at `position`: the fed guess that it is, if it is one, is final now."""
        node = None if state.reached is None else child_of(state.fed.parents, state.fed.tokens, state.reached, token)
        state.reached = node
        if node is not None:
            self._cache.compact_path(seq_id, position, [state.fed.start + node - position])
            state.num_computed_tokens = position + 1


def build(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    known = min(parts.vocab, parts.model.vocab) if parts.model else parts.vocab  # ids that it can be fed
    inner = InnerDrafter(parts.inner, vocab=known) if parts.inner is not None else None
    return draft_model(spec, parts, trees=spec.trees, inner=inner)


def draft_model(spec: DrafterSpec, parts: DrafterParts, **options: Any) -> DraftModel:
    """A DraftModel with further `options`; UsageError without a loaded model."""
    if parts.model is None:
        raise UsageError(f"Drafter {str(spec)!r} was given no loaded model.", "Load the model and pass it as a part.")
    return DraftModel(
        parts.model,
        vocab=parts.vocab,
        max_context=parts.max_context,
        kernels=parts.kernels,
        prefix_cache=parts.prefix_cache,
        name=spec.label,
        max_logits_rows=parts.max_logits_rows,
        **options,
    )
