"""Drafters that run a head whose one pass gives the logits of all guesses of a round: Medusa, DFlash and DSpark.

Medusa's heads all read the state of one position, what entered the target's last norm at the newest position that was
verified; nothing is cached. DFlash and DSpark run over a block of slots behind the keys and values of known
positions, made from the target's states as they come. Those of guesses never enter it; what a cached prefix of the
target leaves out is missing, and positions stay what they are.

Guesses are drawn one after the other with the target's noise at each position: from logits that do not know the
guesses before them, or, where the head has a Markov head, after adding what the guess before says. A confidence head
gives the survival of guesses, else it is their probability under q.

**Trees**: where the logits of a depth do not depend on the guesses before them, the candidates of each depth are the
same behind every node, and the best tree is found best-first, with no further product (DDTree). Where they do, the
tree grows level by level: the logits behind all nodes that are expanded, of all sequences, are those of the slot and
what the Markov head adds for each node's token, in one product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from wager.draft.base import ComputedRows, Drafter
from wager.draft.guessing import Candidate, Guess, GuessedRow, GuessSampler
from wager.draft.heads.pending_states import PendingStates, StateFormat
from wager.draft.registry import DrafterParts
from wager.draft.trees import (
    BRANCHES,
    MOST_NODES,
    GuessedTree,
    LearnsRanks,
    RankRates,
    TreeShape,
    best_first,
    sequoia,
    with_rate,
)
from wager.drafter_spec import DrafterSpec
from wager.kernels.arrays import Array, DType
from wager.kernels.base import TargetOutput
from wager.kernels.cpu import Kernels
from wager.models.head_block import BlockContext
from wager.tenants import PerTenant
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams
from wager.verify.distribution import History


@dataclass(slots=True)
class ChainGuesses:
    """At most `depth` guesses, drawn one after the other; `place` is where its logits are in the pass."""

    request: DraftRequest
    history: History | None
    place: int
    depth: int
    tokens: list[int] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    probs: list[Array] = field(default_factory=list)

    @property
    def done(self) -> bool:
        unlikely = bool(self.survival) and self.survival[-1] < self.request.min_survival
        return unlikely or len(self.tokens) >= self.depth

    def add(self, guess: Guess, *, rate: float | None = None) -> None:
        """The next guess, which is accepted with probability `rate` if those before it are (None: its own). Without a
        token (logits that are not finite) the chain ends."""
        if guess.token < 0:
            self.depth = len(self.tokens)
            return
        self.tokens.append(guess.token)
        before = self.survival[-1] if self.survival else 1.0
        self.survival.append(before * (guess.probability if rate is None else rate))
        if guess.probs is not None:
            self.probs.append(guess.probs)

    def draft(self, drafter: str) -> Draft:
        probs = np.stack(self.probs) if self.probs else None
        parents = tuple(range(-1, len(self.tokens) - 1))
        return Draft(self.request.seq_id, tuple(self.tokens), parents, tuple(self.survival), drafter, probs)


def draft_some(
    requests: Sequence[DraftRequest],
    ready: Sequence[DraftRequest],
    make: Callable[[Sequence[DraftRequest]], Iterable[Draft]],
    *,
    together: int,
    drafter: str,
) -> list[Draft]:
    """One draft per request: `make` makes those that are ready, so many at a time, and the others are declined."""
    parts = [ready[first : first + together] for first in range(0, len(ready), together)]
    drafts = {draft.seq_id: draft for part in parts for draft in make(part)}
    return [drafts.get(request.seq_id) or Draft(request.seq_id, drafter=drafter) for request in requests]


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


class MarginalTrees:
    """Trees from rows of logits, one for each depth. `rank_rates`: what was measured of the drafter's ranks."""

    def __init__(self, sampler: GuessSampler, rank_rates: PerTenant[RankRates], drafter: str) -> None:
        self._sampler, self._rank_rates, self._drafter = sampler, rank_rates, drafter

    def started(self, request: DraftRequest, history: History | None, levels: int, *, rows: int) -> GuessedTree:
        """A tree of the request, in the shape of a template where q is requested; `rows`: nodes of a level at most."""
        nodes, template = request.depth, None
        if draws(request):
            template = sequoia(self._rank_rates.of(request.seq_id).rates, min(nodes, rows), levels)
        return GuessedTree(request, history, TreeShape(nodes, min(levels, nodes), template=template))

    def draft(
        self,
        request: DraftRequest,
        history: History | None,
        output: TargetOutput,
        rows: Sequence[int],
        *,
        rates: Sequence[float | None],
    ) -> Draft:
        """The tree of a block whose guess at depth d + 1 has the logits of row rows[d], whatever is guessed before it,
        and is right with probability rates[d] (None: as its logits say) if what is before it is."""
        if draws(request):
            tree = self.started(request, history, len(rows), rows=request.depth)
            while not tree.done:
                tree.grow(self._sampler, output, [rows[tree.level]] * len(tree.frontier))
            return tree.draft(self._drafter)
        known: dict[int, list[Candidate]] = {}

        def candidates(path: tuple[int, ...]) -> list[Candidate]:
            depth = len(path)
            if depth not in known or history is not None:  # penalties depend on the path
                row = GuessedRow(rows[depth], request, path, history)
                found = self._sampler.candidates(output, row, min(request.depth, BRANCHES))
                rate = rates[depth]
                known[depth] = found if rate is None else with_rate(found, rate)
            return known[depth]

        best = best_first(candidates, request.depth, max_depth=len(rows), min_survival=request.min_survival)
        return best.draft(request.seq_id, self._drafter)


class ParallelTreeDrafter(LearnsRanks, ParallelDrafter):
    """Drafts trees with heads that all read one state, of as many nodes as guesses are requested."""

    makes_trees = True

    def __init__(self, head: ParallelHead, *, kernels: Kernels | None = None, name: str = "heads-tree") -> None:
        super().__init__(head, kernels=kernels, name=name)
        self.max_depth = MOST_NODES
        self.rank_rates = PerTenant(RankRates)

    def _drafts(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        depth = min(self._head.max_depth, max(request.depth for request in requests))
        output = self._head.forward(np.stack([self._states[request.seq_id].state for request in requests]), depth)
        trees = MarginalTrees(self._sampler, self.rank_rates, self.name)
        drafts = []
        for index, request in enumerate(requests):
            rows = range(index * depth, (index + 1) * depth)
            history = self._states[request.seq_id].history
            drafts.append(trees.draft(request, history, output, rows, rates=[None] * depth))
        return drafts


class BlockTreeDrafter(LearnsRanks, BlockDrafter):
    """Drafts trees with a block head, of as many nodes as guesses are requested."""

    makes_trees = True

    def __init__(self, head: SlotHead, *, kernels: Kernels | None = None, name: str = "block-tree") -> None:
        super().__init__(head, kernels=kernels, name=name)
        self.max_depth = MOST_NODES
        self.rank_rates = PerTenant(RankRates)

    def _drafts(self, requests: Sequence[DraftRequest], states: Sequence[BlockSequence]) -> list[Draft]:
        trees = MarginalTrees(self._sampler, self.rank_rates, self.name)
        if self._head.conditions:
            return self._conditioned(trees, requests, states)
        blocks = enumerate(zip(requests, states, strict=True))
        return [self._marginal(trees, request, state, block) for block, (request, state) in blocks]

    def _marginal(self, trees: MarginalTrees, request: DraftRequest, state: BlockSequence, block: int) -> Draft:
        head, depth = self._head, min(self._head.max_depth, request.depth)
        rows = [head.guess_row(block, step) for step in range(depth)]
        output = head.logits(rows, [state.last] * depth)
        rates = [head.confidence(row, state.last) for row in rows]
        return trees.draft(request, state.history, output, range(depth), rates=rates)

    def _conditioned(
        self, trees: MarginalTrees, requests: Sequence[DraftRequest], states: Sequence[BlockSequence]
    ) -> list[Draft]:
        head = self._head
        found = [
            (block, state.last, trees.started(request, state.history, head.max_depth, rows=head.max_logits_rows))
            for block, (request, state) in enumerate(zip(requests, states, strict=True))
        ]
        waiting = found
        while waiting:
            room = head.max_logits_rows
            some: list[tuple[int, int, GuessedTree]] = []
            for each in waiting:
                if some and len(each[2].frontier) > room:
                    break
                some.append(each)
                room -= len(each[2].frontier)
            self._grow(some)
            waiting = [*waiting[len(some) :], *some]
            waiting = [each for each in waiting if not each[2].done]
        return [tree.draft(self.name) for _, _, tree in found]

    def _grow(self, trees: Sequence[tuple[int, int, GuessedTree]]) -> None:
        """The next level of these trees: the block of each, the last known token and the tree."""
        rows: list[int] = []
        before: list[int] = []
        for block, last, tree in trees:
            rows += [self._head.guess_row(block, tree.level)] * len(tree.frontier)
            before += [last if node < 0 else tree.token(node) for node in tree.frontier]
        output = self._head.logits(rows, before)
        first = 0
        for _, _, tree in trees:
            count = len(tree.frontier)
            rates = [self._head.confidence(rows[i], before[i]) for i in range(first, first + count)]
            tree.grow(self._sampler, output, range(first, first + count), rates=rates)
            first += count


def draws(request: DraftRequest) -> bool:
    """Whether guesses are drawn from a q that the rule needs."""
    return request.needs_draft_probs and not request.params.greedy


def build(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    head = parts.loaded_head(spec)
    if spec.name == "medusa":
        parallel = ParallelTreeDrafter if spec.trees else ParallelDrafter
        return parallel(head, kernels=parts.kernels, name=spec.label)
    block = BlockTreeDrafter if spec.trees else BlockDrafter
    return block(head, kernels=parts.kernels, name=spec.label)
