"""A tree of guesses that grows level by level from a model's rows of logits, for one draft request.

Under `match` it is the tree that is expected to be accepted most: the best nodes of a level are expanded, and of all
nodes the best are kept (trees.GrowingTree). Where q is requested siblings are drawn from it without replacement, in the
shape of a template: a shape that depended on what was drawn would not keep the target's distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wager.draft.guessing import GuessedRow, GuessSampler
from wager.draft.tree_templates import TreeTemplate, sequoia
from wager.draft.trees import Candidate, GrowingTree, TokenTree
from wager.kernels.base import TargetOutput
from wager.types import Draft, DraftRequest
from wager.verify.distribution import History

WIDTH = 4
"""Nodes of a level that are expanded at most: rows that cost about as much as one where weights are quantised."""

LEVELS = 8
"""Levels of a tree at most, where each takes a pass."""

BRANCHES = 8
"""Candidates of a node at most."""

MOST_NODES = 15
"""Nodes of a tree that a policy requests at most."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """What a tree may become: see GuessedTree."""

    nodes: int
    levels: int
    width: int = WIDTH
    template: TreeTemplate | None = None

    @classmethod
    def reserved(
        cls,
        request: DraftRequest,
        *,
        room: int,
        logits_rows: int,
        rates: Sequence[float],
        reserve: Callable[[int], bool],
    ) -> TreeShape | None:
        """The widest shape whose rows fit the `room` behind the known tokens and are granted by `reserve`, which is
        called with their number; None if not even a chain's are. A pass has at most `logits_rows` rows with logits;
        `rates` are those of ranks, for a template."""
        nodes, levels = request.depth, min(LEVELS, request.depth, room + 1)  # the last level is never fed
        if levels < 1:
            return None
        if request.needs_draft_probs and not request.params.greedy:
            template = sequoia(rates, min(nodes, logits_rows, room + 1), levels)
            return cls(nodes, levels, template=template) if reserve(len(template) - 1) else None
        for width in range(min(WIDTH, nodes, logits_rows), 0, -1):
            rows = width * (levels - 1)
            if rows <= room and reserve(rows):
                return cls(nodes, levels, width)
        return None


@dataclass(frozen=True, slots=True)
class FedNodes:
    """Nodes as rows of a pass, each behind its parent: `parents` are places among them (-1: the root), `wanted` the
    places of the frontier's nodes (-1: the row before them)."""

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    wanted: tuple[int, ...]


class GuessedTree:
    """Grows in `shape`: at most `nodes` guesses in at most `levels` levels, of each of which at most `width` nodes are
    expanded, or those that have children in the `template`.

    Each round, the logits behind the nodes of `frontier` (-1: the root, at first) are computed, and `grow` takes the
    next level from them, until the frontier is empty.
    """

    def __init__(self, request: DraftRequest, history: History | None, shape: TreeShape) -> None:
        self.frontier = [-1]
        self.level = 0
        self._request, self._history, self._template = request, history, shape.template
        self._tree = GrowingTree(shape.nodes, min_survival=0.0 if shape.template else request.min_survival)
        self._branches, self._levels, self._width = min(shape.nodes, BRANCHES), shape.levels, shape.width
        self._places = {-1: -1}  # of nodes in the template
        self._probs: list[NDArray[np.float64]] = []

    @property
    def done(self) -> bool:
        return not self.frontier

    def parent(self, node: int) -> int:
        return self._tree.parents[node]

    def token(self, node: int) -> int:
        return self._tree.tokens[node]

    def paths(self) -> set[int]:
        """The nodes of the frontier and those between them and the root."""
        return {each for node in self.frontier for each in self._tree.path(node)}

    def fed(self, room: int, logits_room: int) -> FedNodes:
        """The nodes of the next pass, at most `room`; what the frontier has beyond that, or beyond `logits_room`, is
        given up."""
        tree = self._tree
        kept: set[int] = set()
        frontier: list[int] = []
        for node in self.frontier[:logits_room]:
            path = kept | set(tree.path(node))
            if len(path) <= room:
                kept = path
                frontier.append(node)
        self.frontier = frontier
        nodes = tuple(sorted(kept))
        place = {-1: -1, **{node: index for index, node in enumerate(nodes)}}
        return FedNodes(
            nodes,
            tuple(tree.tokens[node] for node in nodes),
            tuple(place[tree.parents[node]] for node in nodes),
            tuple(place[node] for node in frontier),
        )

    def grow(
        self,
        sampler: GuessSampler,
        output: TargetOutput,
        rows: Sequence[int],
        *,
        rates: Sequence[float | None] | None = None,
    ) -> None:
        """The next level: `rows` are the rows of logits behind the nodes of the frontier, `rates` the probability that
        the best candidate behind each is right, where the model says more than its logits do."""
        tree = self._tree
        found: list[tuple[int, Sequence[Candidate]]] = []
        for branch, (node, row) in enumerate(zip(self.frontier, rows, strict=True)):
            path = tuple(tree.tokens[each] for each in tree.path(node))
            guessed = GuessedRow(row, self._request, path, self._history, branch=branch)
            if self._template is None:
                candidates = sampler.candidates(output, guessed, self._branches)
                rate = None if rates is None else rates[branch]
                found.append((node, candidates if rate is None else with_rate(candidates, rate)))
            else:
                self._draw_siblings(guessed, node, self._template.children(self._places[node]), sampler, output)
        self.level += 1
        if self._template is None:
            tree.extend(found)
            self.frontier = tree.frontier(self._width) if self.level < self._levels else []
        else:
            self.frontier = [node for node in self._new_nodes() if self._expands(node)]

    def _draw_siblings(
        self, row: GuessedRow, node: int, places: Sequence[int], sampler: GuessSampler, output: TargetOutput
    ) -> None:
        tree = self._tree
        siblings, probs = sampler.siblings(output, row, len(places))
        for place, sibling in zip(places, siblings, strict=False):
            self._places[len(tree.tokens)] = place
            tree.tokens.append(sibling.token)
            tree.parents.append(node)
            tree.values.append(tree.value(node) * sibling.probability)
        self._probs += list(probs)

    def _new_nodes(self) -> list[int]:
        """Nodes of the level that was just drawn."""
        depths = self._template.depths if self._template else ()
        return [node for node in range(len(self._tree.tokens)) if depths[self._places[node]] == self.level]

    def _expands(self, node: int) -> bool:
        """Whether the template has children there; not below a node that is too unlikely, which is itself kept."""
        has_children = self._template is not None and bool(self._template.children(self._places[node]))
        return has_children and self._tree.value(node) >= self._request.min_survival

    def draft(self, drafter: str) -> Draft:
        """What was guessed."""
        tree = self._tree
        best = tree.best()
        if self._template is not None:
            best = TokenTree(tuple(tree.tokens), tuple(tree.parents), tuple(tree.values))
        probs = np.stack(self._probs) if self._probs else None
        return Draft(self._request.seq_id, best.tokens, best.parents, best.scores, drafter, probs)


def with_rate(candidates: Sequence[Candidate], rate: float) -> list[Candidate]:
    """The same candidates where the best one is right with probability `rate`: the others share what is left as before,
    and stay as much less likely than the best as they were, at least."""
    if not candidates:
        return []
    best = candidates[0].probability
    scale = rate / best if best > 0 else 0.0
    if best < 1:
        scale = min(scale, (1 - rate) / (1 - best))
    first = Candidate(candidates[0].token, rate)
    return [first, *(Candidate(each.token, each.probability * scale) for each in candidates[1:])]
