"""Trees of the heads whose one pass gives the logits of every depth: Medusa, DFlash and DSpark.

Where the logits of a depth do not depend on the guesses before them, the candidates of each depth are the same behind
every node, and the tree that is expected to be accepted most is found best-first, with no further product (DDTree).
Where they do (DSpark's Markov head) the tree grows level by level: the logits behind all nodes that are expanded, of
all sequences, are those of the slot and what the Markov head adds for each node's token, in one product.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wager.draft.guessed_tree import BRANCHES, MOST_NODES, GuessedTree, TreeShape, with_rate
from wager.draft.guessing import GuessedRow, GuessSampler
from wager.draft.heads.block import BlockDrafter, BlockSequence, SlotHead
from wager.draft.heads.parallel import ParallelDrafter, ParallelHead
from wager.draft.tree_templates import LearnsRanks, RankRates, sequoia
from wager.draft.trees import Candidate, best_first
from wager.kernels.base import TargetOutput
from wager.kernels.cpu import Kernels
from wager.tenants import PerTenant
from wager.types import Draft, DraftRequest
from wager.verify.distribution import History


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
