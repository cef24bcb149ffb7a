"""Trees of a head that guesses one token after the other: EAGLE-2's expansion and re-ranking by path probability.

A level is one pass for all sequences and nodes. The entries of guesses lie behind those of known tokens: of every node
that is expanded, and of those between it and the root, each fed with what the head gave for its parent. They are
computed again in every level, since a pass lets a row see what is cached before its sequence's rows, and their own
ancestors among these. Which nodes a tree has is decided in guessed_tree.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from wager.draft.guessed_tree import MOST_NODES, FedNodes, GuessedTree, TreeShape
from wager.draft.heads.autoregressive import HeadDrafter, HeadRound, HeadSequence, StateHead, stacked_rows
from wager.draft.tree_templates import LearnsRanks, RankRates
from wager.kernels.arrays import INT32, Array
from wager.kernels.base import BLOCK_SIZE, TargetOutput
from wager.kernels.cpu import Kernels
from wager.tenants import PerTenant
from wager.types import Draft, DraftRequest, PackedBatch, Span


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
        return [self.given[self.tree.parent(node)] for node in fed.nodes]

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


class HeadTreeDrafter(LearnsRanks, HeadDrafter):
    """Drafts trees with `head`, of as many nodes as guesses are requested; nothing follows where its logits are not
    finite. See HeadDrafter."""

    makes_trees = True
    max_depth = MOST_NODES

    def __init__(
        self,
        head: StateHead,
        *,
        kernels: Kernels | None = None,
        prefix_cache: bool = True,
        depth: int | None = None,
        name: str = "head-tree",
    ) -> None:
        super().__init__(head, kernels=kernels, prefix_cache=prefix_cache, depth=depth, name=name)
        self.rank_rates = PerTenant(RankRates)

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
        states = self._take([(each.round, len(each.tokens)) for each in known])
        batch = _packed([*known, *grown], self.block_pool.block_tables)
        output = self._head.forward(batch, states, stacked_rows(inputs, self._head.hidden))
        self._commit([each.round for each in known])
        self._grow([*known, *grown], output)

    def _grow(self, served: Sequence[_Served], output: TargetOutput) -> None:
        first = 0
        for each in served:
            rows, tree = range(first, first + len(each.wanted)), each.round.tree
            first += len(each.wanted)
            if not rows or output.last_hidden is None:
                continue
            for node, row in zip(tree.frontier, rows, strict=True):
                each.round.given[node] = output.last_hidden[row].copy()
            tree.grow(self._sampler, output, rows)


def _known(r: HeadTreeRound, span: Span) -> _Served:
    rows = len(span.tokens)
    wanted = [rows - 1] if span.needs_logits else []
    return _Served(r, span.num_computed_tokens, span.tokens, range(-1, rows - 1), wanted)


def _packed(served: Sequence[_Served], block_tables: Mapping[str, Sequence[int]]) -> PackedBatch:
    """The rows of a pass. Several rows of a sequence may be the first of their path (parent -1), which spans with
    drafts behind them (verify/pack.py) cannot say. Row j of a sequence is cached at place `start` + j."""
    tokens: list[int] = []
    positions: list[int] = []
    parents: list[int] = []
    slots: list[int] = []
    indices: list[int] = []
    starts = [0]
    for each in served:
        first, table = len(tokens), block_tables[each.round.request.seq_id]
        tokens += each.tokens
        for row, parent in enumerate(each.parents):
            positions.append(each.start if parent < 0 else positions[first + parent] + 1)
            parents.append(parent if parent < 0 else first + parent)
            place = each.start + row
            slots.append(table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE)
        indices += [first + row for row in each.wanted]
        starts.append(len(tokens))
    blocks = [block_tables[each.round.request.seq_id] for each in served]
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
