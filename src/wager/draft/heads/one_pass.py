"""Drafters that run a head whose one pass gives the logits of all guesses of a round: Medusa, DFlash and DSpark.

Medusa's heads all read the state of one position, what entered the target's last norm at the newest position that was
verified; nothing is cached. DFlash and DSpark run over a block of slots behind the keys and values of known
positions, made from the target's states as they come. States of guesses never enter it; what a cached prefix of the
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

import numpy as np

from wager.draft.base import ComputedRows, Drafter
from wager.draft.guessing import Candidate, GuessedChain, GuessedRow, GuessSampler, draws
from wager.draft.heads.pending_states import PendingStates, StateFormat
from wager.draft.registry import DrafterParts
from wager.draft.trees import (
    BRANCHES,
    GuessedTree,
    RankLearner,
    TreeShape,
    best_first,
    sequoia,
    with_rate,
)
from wager.drafter_spec import DrafterSpec
from wager.kernels.arrays import Array
from wager.kernels.base import TargetOutput
from wager.kernels.cpu import Kernels
from wager.models.head_block import BlockContext, BlockHead
from wager.models.head_medusa import MedusaHead
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams
from wager.verify.distribution import History


def draft_some(
    requests: Sequence[DraftRequest],
    ready: Sequence[DraftRequest],
    make: Callable[[Sequence[DraftRequest]], Iterable[Draft]],
    *,
    together: int,
    drafter: str,
) -> list[Draft]:
    """One draft per request: `make` makes those that are ready, `together` at a time, and the others are declined."""
    drafts = {
        draft.seq_id: draft
        for first in range(0, len(ready), together)
        for draft in make(ready[first : first + together])
    }
    return [drafts.get(request.seq_id) or Draft(request.seq_id, drafter=drafter) for request in requests]


@dataclass(slots=True)
class _LastState:
    """A sequence, and the state of its position `position` (-2: none came yet)."""

    history: History | None
    position: int = -2
    state: Array = field(default_factory=lambda: np.empty(0, np.float32))


class ParallelDrafter(Drafter):
    """Drafts chains with `head`. `kernels` sample natively where given. A sequence is declined until the state of its
    newest verified position has come."""

    samples = True
    taps = ()

    def __init__(self, head: MedusaHead, *, kernels: Kernels | None = None, name: str = "heads") -> None:
        self.name = name
        self.max_depth = head.max_depth
        self.default_depth = min(3, head.max_depth)
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

    def _forward(self, requests: Sequence[DraftRequest]) -> tuple[TargetOutput, int]:
        """One pass, and how many rows of logits it gives for each request."""
        depth = min(self._head.max_depth, max(request.depth for request in requests))
        return self._head.forward(np.stack([self._states[request.seq_id].state for request in requests]), depth), depth

    def _drafts(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        output, depth = self._forward(requests)
        chains = [
            GuessedChain(request, self._states[request.seq_id].history, min(depth, request.depth))
            for request in requests
        ]
        for step in range(depth):
            active = [(index, chain) for index, chain in enumerate(chains) if not chain.done]
            rows = [chain.row(index * depth + step) for index, chain in active]
            for (_, chain), guess in zip(active, self._sampler.guesses(output, rows), strict=True):
                chain.add(guess)
        return [chain.draft(self.name) for chain in chains]


@dataclass(slots=True)
class BlockSequence:
    """A sequence: how many tokens are known, the last of them, its context, and states that are not in it yet."""

    known: int
    last: int
    history: History | None
    context: BlockContext = field(default_factory=BlockContext)
    states: PendingStates = field(default_factory=PendingStates)


class BlockDrafter(Drafter):
    """Drafts chains with `head`. `kernels` sample natively where given. A sequence is declined while its newest state
    is missing, and where a block would not fit the context."""

    samples = True

    def __init__(self, head: BlockHead, *, kernels: Kernels | None = None, name: str = "block") -> None:
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
        """The drafts that the blocks of the last pass give."""
        head = self._head
        chains = [
            GuessedChain(request, state.history, min(request.depth, head.max_depth))
            for request, state in zip(requests, states, strict=True)
        ]
        while active := [(block, chain) for block, chain in enumerate(chains) if not chain.done]:
            rows = [head.guess_row(block, len(chain.tokens)) for block, chain in active]
            before = [chain.tokens[-1] if chain.tokens else states[block].last for block, chain in active]
            output = head.logits(rows, before)
            drawn = self._sampler.guesses(output, [chain.row(index) for index, (_, chain) in enumerate(active)])
            for row, token, (_, chain), guess in zip(rows, before, active, drawn, strict=True):
                chain.add(guess, rate=None if guess.token < 0 else head.confidence(row, token))
        return [chain.draft(self.name) for chain in chains]


class OnePassTrees(RankLearner):
    """Trees from the rows of logits of one pass."""

    name: str
    _sampler: GuessSampler

    def _started(self, request: DraftRequest, history: History | None, levels: int, *, rows: int) -> GuessedTree:
        """A tree of the request, in the shape of a template where q is requested; `rows`: nodes of a level at most."""
        nodes, template = request.depth, None
        if draws(request):
            template = sequoia(self.rank_rates.of(request.seq_id).rates, min(nodes, rows), levels)
        return GuessedTree(request, history, TreeShape(nodes, min(levels, nodes), template=template))

    def _marginal_tree(
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
            tree = self._started(request, history, len(rows), rows=request.depth)
            while not tree.done:
                tree.grow(self._sampler, output, [rows[tree.level]] * len(tree.frontier))
            return tree.draft(self.name)
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
        return Draft(request.seq_id, *best, self.name)


class ParallelTreeDrafter(OnePassTrees, ParallelDrafter):
    """Drafts trees with heads that all read one state, of as many nodes as guesses are requested."""

    def _drafts(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        output, depth = self._forward(requests)
        drafts = []
        for index, request in enumerate(requests):
            rows = range(index * depth, (index + 1) * depth)
            history = self._states[request.seq_id].history
            drafts.append(self._marginal_tree(request, history, output, rows, rates=[None] * depth))
        return drafts


class BlockTreeDrafter(OnePassTrees, BlockDrafter):
    """Drafts trees with a block head, of as many nodes as guesses are requested."""

    def _drafts(self, requests: Sequence[DraftRequest], states: Sequence[BlockSequence]) -> list[Draft]:
        if self._head.conditions:
            return self._conditioned(requests, states)
        drafts = []
        for block, (request, state) in enumerate(zip(requests, states, strict=True)):
            rows = [self._head.guess_row(block, step) for step in range(min(self._head.max_depth, request.depth))]
            output = self._head.logits(rows, [state.last] * len(rows))
            rates = [self._head.confidence(row, state.last) for row in rows]
            drafts.append(self._marginal_tree(request, state.history, output, range(len(rows)), rates=rates))
        return drafts

    def _conditioned(self, requests: Sequence[DraftRequest], states: Sequence[BlockSequence]) -> list[Draft]:
        head = self._head
        found = [
            (block, state.last, self._started(request, state.history, head.max_depth, rows=head.max_logits_rows))
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
            before += [last if node < 0 else tree.tokens[node] for node in tree.frontier]
        output = self._head.logits(rows, before)
        first = 0
        for _, _, tree in trees:
            count = len(tree.frontier)
            rates = [self._head.confidence(rows[i], before[i]) for i in range(first, first + count)]
            tree.grow(self._sampler, output, range(first, first + count), rates=rates)
            first += count


def build(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    head = parts.loaded_head(spec)
    if spec.name == "medusa":
        parallel = ParallelTreeDrafter if spec.trees else ParallelDrafter
        return parallel(head, kernels=parts.kernels, name=spec.label)
    block = BlockTreeDrafter if spec.trees else BlockDrafter
    return block(head, kernels=parts.kernels, name=spec.label)
