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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from wager.draft.base import ComputedRows, Drafter
from wager.draft.guessing import Candidate, Guess, GuessedRow, draws
from wager.draft.heads.autoregressive import HeadDrafter, HeadRound, HeadSequence, next_states, stacked_rows
from wager.draft.heads.sampling import HeadChain, HeadSampler, drawing_temperature
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
from wager.models.head_block import BlockHead
from wager.models.head_files import HeadOutput
from wager.models.head_medusa import MedusaHead
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams, Span
from wager.verify.distribution import History
from wager.verify.pack import pack


@dataclass(slots=True)
class _LastState:
    """A sequence, and the state of its position `position` (-2: none came yet)."""

    history: History | None
    temperature: float | None
    position: int = -2
    state: Array = field(default_factory=lambda: np.empty(0, np.float32))


class ParallelDrafter(Drafter):
    """Drafts chains with `head`; `kernels` sample where given. A sequence is declined until the state of its newest
    verified position has come."""

    samples = True
    taps = ()

    def __init__(self, head: MedusaHead, *, kernels: Kernels | None = None, name: str = "heads") -> None:
        self.name = name
        self.max_depth = head.max_depth
        self.default_depth = min(3, head.max_depth)
        self._head = head
        self._sampler = HeadSampler(head.vocab, vocab=head.vocab, kernels=kernels)
        self._states: dict[str, _LastState] = {}

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        self._states[seq_id] = _LastState(History.of(tokens, params), drawing_temperature(params))

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
        ready = [r for r in requests if r.depth > 0 and self._is_ready(r)]
        together = self._head.max_sequences
        parts = [self._drafts(ready[first : first + together]) for first in range(0, len(ready), together)]
        drafts = {draft.seq_id: draft for part in parts for draft in part}
        return [drafts.get(request.seq_id) or Draft(request.seq_id, drafter=self.name) for request in requests]

    def _is_ready(self, request: DraftRequest) -> bool:
        return self._states[request.seq_id].position == request.position - 2

    def _forward(self, requests: Sequence[DraftRequest]) -> tuple[HeadOutput, int]:
        """One pass, and how many rows of logits it gives for each request."""
        depth = min(self._head.max_depth, max(request.depth for request in requests))
        states = [self._states[request.seq_id].state for request in requests]
        return self._head.forward(stacked_rows(states), depth), depth

    def _drafts(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        chains = []
        for request in requests:
            state, most = self._states[request.seq_id], min(self._head.max_depth, request.depth)
            chains.append(HeadChain(request, state.history, most, temperature=state.temperature))
        depth = max(chain.depth for chain in chains)
        rows = [(chain, step) for chain in chains for step in range(depth)]
        self._sampler.set_keys(self._head.guesses, rows)
        output, _ = self._forward(requests)
        tokens, probabilities, whole = output.tokens.tolist(), output.probabilities.tolist(), None
        for row, (chain, _) in enumerate(rows):
            if chain.done:
                continue
            if chain.temperature is not None:
                chain.add(Guess(tokens[row], probabilities[row]))
            else:
                whole = whole or output.by_target()
                chain.add(*self._sampler.guesses(whole, [chain.row(row)]))
        return [chain.draft(self.name) for chain in chains]


class BlockDrafter(HeadDrafter):
    """Drafts chains with `head`: its cache has keys and values of positions whose states came. A sequence is declined
    while its newest state is missing, when the cache has no blocks for it, and where a block would not fit the
    context."""

    _head: Any

    def __init__(self, head: BlockHead, **options: Any) -> None:
        """`options` are HeadDrafter's."""
        super().__init__(cast(Any, head), **options)
        self.max_depth = self.default_depth = head.max_depth

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request; it ends where logits are not finite."""
        rounds = [started for request in requests if (started := self._start(request)) is not None]
        waiting: list[HeadRound] = rounds
        while waiting := [r for r in waiting if r.num_pending()]:
            self._extend(waiting)
        drafts: dict[str, Draft] = {}
        for first in range(0, len(rounds), self._head.blocks):
            some = rounds[first : first + self._head.blocks]
            last = [r.state.last_token for r in some]
            spans = [
                Span(r.request.seq_id, r.state.num_entries, (token, *self._head.masks), needs_logits=True)
                for r, token in zip(some, last, strict=True)
            ]
            self._head.run(pack(spans, {}, self.block_pool, into=self._head.buffers))
            drafts |= {draft.seq_id: draft for draft in self._drafts(some, last)}
        for r in rounds:
            self.block_pool.trim(r.request.seq_id, r.state.num_entries)
        return [drafts.get(request.seq_id) or Draft(request.seq_id, drafter=self.name) for request in requests]

    def _begin_round(self, request: DraftRequest, state: HeadSequence, known: int) -> HeadRound | None:
        rows = known + self._head.slots
        if request.depth < 1 or rows > self._head.max_context or not self.block_pool.reserve(request.seq_id, rows):
            return None
        return HeadRound(request, state, min(request.depth, self._head.max_depth))

    def _extend(self, waiting: Sequence[HeadRound]) -> None:
        """One pass over states that wait, as many as there is room for."""
        room, known = self._head.max_rows, []
        for r in waiting[: self._head.max_sequences]:
            if room < 1:
                break
            known.append((r, r.known_span(room)))
            room -= len(known[-1][1].tokens)
        states = next_states([(r.state, len(span.tokens)) for r, span in known], width=self._head.state_width)
        spans = [span for _, span in known]
        self._head.extend(pack(spans, {}, self.block_pool, into=self._head.context_buffers), states)
        self._commit([r for r, _ in known])

    def _drafts(self, rounds: Sequence[HeadRound], last: Sequence[int]) -> Iterable[Draft]:
        """The drafts that the blocks of the last pass give."""
        head = self._head
        if any(r.temperature is None for r in rounds):
            return self._drawn_apart(rounds, last)
        depth = max(r.depth for r in rounds)
        self._sampler.set_keys(head.guesses, [(r, 0) for r in rounds])
        tokens, rates = (found.tolist() for found in head.chains(last, depth))
        for block, r in enumerate(rounds):
            for token, rate in zip(tokens[block], rates[block], strict=True):
                if r.done:
                    break
                r.add(Guess(token, rate))
        return [r.draft(self.name) for r in rounds]

    def _drawn_apart(self, rounds: Sequence[HeadRound], last: Sequence[int]) -> Iterable[Draft]:
        """The same where some request has more than a temperature: each guess is drawn by the target's ids."""
        head = self._head
        while active := [(block, r) for block, r in enumerate(rounds) if not r.done]:
            rows = [head.guess_row(block, len(r.tokens)) for block, r in active]
            before = [r.tokens[-1] if r.tokens else last[block] for block, r in active]
            output, rates = head.logits(rows, before)
            drawn = self._sampler.guesses(output, [r.row(index) for index, (_, r) in enumerate(active)])
            for (_, r), guess, rate in zip(active, drawn, rates, strict=True):
                r.add(guess, rate=None if guess.token < 0 else rate)
        return [r.draft(self.name) for r in rounds]


class OnePassTrees(RankLearner):
    """Trees from the rows of logits of one pass."""

    name: str
    _sampler: HeadSampler

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
        whole, drafts = output.by_target(), []
        for index, request in enumerate(requests):
            rows = range(index * depth, (index + 1) * depth)
            history = self._states[request.seq_id].history
            drafts.append(self._marginal_tree(request, history, whole, rows, rates=[None] * depth))
        return drafts


class BlockTreeDrafter(OnePassTrees, BlockDrafter):
    """Drafts trees with a block head, of as many nodes as guesses are requested."""

    def _drafts(self, rounds: Sequence[HeadRound], last: Sequence[int]) -> Iterable[Draft]:
        if self._head.conditions:
            return self._conditioned(rounds, last)
        drafts = []
        for block, r in enumerate(rounds):
            rows = [self._head.guess_row(block, step) for step in range(r.depth)]
            output, rates = self._head.logits(rows, [last[block]] * len(rows))
            drafts.append(self._marginal_tree(r.request, r.history, output, range(len(rows)), rates=rates))
        return drafts

    def _conditioned(self, rounds: Sequence[HeadRound], last: Sequence[int]) -> Iterable[Draft]:
        head = self._head
        found = [
            (block, last[block], self._started(r.request, r.history, head.max_depth, rows=head.max_logits_rows))
            for block, r in enumerate(rounds)
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
        output, rates = self._head.logits(rows, before)
        first = 0
        for _, _, tree in trees:
            count = len(tree.frontier)
            tree.grow(self._sampler, output, range(first, first + count), rates=rates[first : first + count])
            first += count


def build(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    head = parts.loaded_head(spec)
    if spec.name == "medusa":
        parallel = ParallelTreeDrafter if spec.trees else ParallelDrafter
        return parallel(head, kernels=parts.kernels, name=spec.label)
    block = BlockTreeDrafter if spec.trees else BlockDrafter
    return block(head, kernels=parts.kernels, prefix_cache=parts.prefix_cache, name=spec.label)
