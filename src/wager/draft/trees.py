"""Trees of guesses of greatest expected acceptance, from probabilities.

The value of a node is the probability that its whole path is right: the product of the probabilities on it. The sum of
the values of a tree's nodes is the expected number of its guesses that are accepted, so the best tree of n nodes holds
the n nodes of greatest value; it is connected, since no node is worth more than its parent.

- `best_first` finds it where the candidates of every node can be had one by one: a suffix tree, or the marginals of a
  drafter that guesses a block in one pass (DDTree).
- `GrowingTree` finds it level by level, for drafters that make one batched pass per level: expansion and re-ranking by
  path probability (EAGLE-2, arXiv 2406.16858; OPT-Tree, 2406.17276).
- `sequoia` finds the best tree of a fixed shape for measured acceptance by rank (Sequoia, arXiv 2402.12374). A template
  does not look at the tokens that it is filled with, so it is the tree to draw siblings in under a rule that keeps the
  distribution: a shape that depended on what was drawn would not keep it.
- `GuessedTree` is a tree in progress, filled from a model's rows of logits in one of these ways.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wager.draft.guessing import Candidate, GuessedRow, GuessSampler, draws
from wager.kernels.base import TargetOutput
from wager.tenants import PerTenant
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams
from wager.verify.distribution import History

WIDTH = 4
"""Nodes of a level that are expanded at most: rows that cost about as much as one where weights are quantised."""

LEVELS = 8
"""Levels of a tree at most, where each takes a pass."""

BRANCHES = 8
"""Candidates of a node at most."""

MOST_NODES = 15
"""Nodes of a tree that a policy requests at most."""


class TokenTree(NamedTuple):
    """Tokens, parents (-1: the root; before their children) and the value of each node, as in types.Draft."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()


Candidates = Callable[[tuple[int, ...]], Sequence[Candidate]]


def best_first(
    candidates: Candidates, nodes: int, *, max_depth: int | None = None, min_survival: float = 0.0
) -> TokenTree:
    """The tree of at most `nodes` nodes of greatest expected acceptance.

    `candidates(path)` are the distinct tokens that may follow the tokens of a path from the root (), likeliest first;
    it is called once for each node of the tree at most. Between equal nodes the first one found wins. Nodes of a value
    below `min_survival`, or deeper than `max_depth`, are left out. Nodes come in the order of their values.
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    found = 0
    heap: list[tuple[float, int, int, int, float, tuple[int, ...], Sequence[Candidate]]] = []

    def push(parent: int, rank: int, above: float, path: tuple[int, ...], siblings: Sequence[Candidate]) -> None:
        """The candidate of that rank among those of `parent`, whose path and value are given."""
        nonlocal found
        if rank < len(siblings):
            value = above * siblings[rank].probability
            if value >= min_survival:
                heapq.heappush(heap, (-value, found, parent, rank, above, path, siblings))
                found += 1

    if nodes > 0 and max_depth != 0:
        push(-1, 0, 1.0, (), candidates(()))
    while heap and len(tokens) < nodes:
        value, _, parent, rank, above, path, siblings = heapq.heappop(heap)
        token, node = siblings[rank].token, len(tokens)
        tokens.append(token)
        parents.append(parent)
        scores.append(-value)
        if len(tokens) == nodes:
            break
        push(parent, rank + 1, above, path, siblings)
        below = (*path, token)
        if max_depth is None or len(below) < max_depth:
            push(node, 0, -value, below, candidates(below))
    return TokenTree(tuple(tokens), tuple(parents), tuple(scores))


class GrowingTree:
    """A tree that grows level by level, of which the `nodes` best nodes are kept.

    Each round, `expandable` names the nodes whose candidates can still improve the tree, and `extend` adds their
    candidates; when there are none, `best` is the best tree that any number of further levels would give, if
    no level was cut by its width.
    """

    def __init__(self, nodes: int, *, min_survival: float = 0.0) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.values: list[float] = []
        self._nodes, self._min_survival = nodes, min_survival
        self._level: range | tuple[int] = (-1,)

    def value(self, node: int) -> float:
        """Probability that the node's path is right; 1 for the root, -1."""
        return 1.0 if node < 0 else self.values[node]

    def expandable(self, width: int) -> list[int]:
        """At most `width` nodes of the last level, best first, with children that may be among the best nodes: those
        worth more than the last node kept so far."""
        if self._nodes < 1:
            return []
        least = self._min_survival
        if len(self.values) >= self._nodes:
            least = max(least, heapq.nlargest(self._nodes, self.values)[-1])
        full = len(self.values) >= self._nodes
        level = [node for node in self._level if self.value(node) > least or (self.value(node) == least and not full)]
        return sorted(level, key=self.value, reverse=True)[:width]

    def extend(self, candidates: Sequence[tuple[int, Sequence[Candidate]]]) -> None:
        """The next level: of each node that was expanded its distinct candidates. Only those that can be among the best
        are kept."""
        first = len(self.values)
        children = [
            (self.value(node) * each.probability, node, each.token) for node, group in candidates for each in group
        ]
        for value, node, token in heapq.nlargest(self._nodes, children, key=lambda child: child[0]):
            self.tokens.append(token)
            self.parents.append(node)
            self.values.append(value)
        self._level = range(first, len(self.values))

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root's child down to `node`."""
        steps = []
        while node >= 0:
            steps.append(node)
            node = self.parents[node]
        return tuple(reversed(steps))

    def best(self) -> TokenTree:
        """See `best_nodes`."""
        return best_nodes(self.tokens, self.parents, self.values, self._nodes, min_survival=self._min_survival)


def best_nodes(
    tokens: Sequence[int],
    parents: Sequence[int],
    values: Sequence[float],
    nodes: int,
    *,
    min_survival: float = 0.0,
) -> TokenTree:
    """The `nodes` best nodes, in the order of their values, none of which is greater than the parent's. Nodes
    of a value below `min_survival` are left out, but for the best one."""
    order = sorted(range(len(values)), key=lambda node: (-values[node], node))[:nodes]
    kept = [node for node in order if values[node] >= min_survival] or order[:1]
    place = {-1: -1, **{node: index for index, node in enumerate(kept)}}
    return TokenTree(
        tuple(tokens[node] for node in kept),
        tuple(place[parents[node]] for node in kept),
        tuple(values[node] for node in kept),
    )


TreeTemplate = tuple[int, ...]
"""The node before each node (-1: the root). Nodes come level by level; siblings side by side, in the order of
their ranks: the first is the best candidate behind its parent, ..."""


def children(parents: Sequence[int], node: int) -> list[int]:
    """The children of a tree's node (-1: the root), in their order."""
    return [child for child, parent in enumerate(parents) if parent == node]


@lru_cache(maxsize=64)
def sequoia(rates: tuple[float, ...], nodes: int, depth: int) -> TreeTemplate:
    """The template of at most `nodes` nodes and `depth` levels with the greatest expected acceptance.

    `rates[b]` is the measured probability that the child of rank b is the right one if its parent is right; the
    children of a node are those of ranks 0, 1, ... without gaps. A dynamic programme over nodes, levels and children
    (section 4.1 of the paper), O(nodes^2 * depth * ranks).
    """

    @cache
    def best(n: int, levels: int, rank: int) -> tuple[float, int]:
        """The greatest expected acceptance of n nodes as children from `rank` on and what is below them, and how many
        of the nodes the first of these children gets, itself included."""
        if n == 0 or levels == 0 or rank == len(rates):
            return 0.0, 0
        options = [
            (rates[rank] * (1.0 + best(size - 1, levels - 1, 0)[0]) + best(n - size, levels, rank + 1)[0], -size)
            for size in range(1, n + 1)
        ]
        gain, smallest = max(options)
        return (gain, -smallest) if gain > 0 else (0.0, 0)

    parents: list[int] = []
    level = [(-1, nodes)]  # nodes, and how many there are below each
    while level:
        below: list[tuple[int, int]] = []
        for node, left in level:
            rank = 0
            while size := best(left, depth, rank)[1]:
                below.append((len(parents), size - 1))
                parents.append(node)
                left, rank = left - size, rank + 1
        level, depth = below, depth - 1
    return tuple(parents)


class RankRates:
    """Acceptance by rank, measured: how often the child of rank b was the right one where its parent was right.

    Starts from a prior that counts for 20 trials, a mean of drafters with coupled noise.
    """

    PRIOR = (0.6, 0.12, 0.05, 0.03)

    def __init__(self) -> None:
        self._right = [20.0 * rate for rate in self.PRIOR]
        self._trials = [20.0] * len(self.PRIOR)
        self._last: dict[str, tuple[Draft, int]] = {}  # of each sequence the tree, and its last node known to be right

    def drafted(self, draft: Draft) -> None:
        """The next tokens of its sequence are compared with this tree."""
        self._last[draft.seq_id] = draft, -1

    def compare(self, seq_id: str, tokens: Sequence[int]) -> None:
        """Tokens that became known: learn which child each was, as far as the last tree has it."""
        for token in tokens:
            if seq_id not in self._last:
                return
            draft, parent = self._last.pop(seq_id)
            siblings = children(draft.parents, parent)
            rank = next((rank for rank, node in enumerate(siblings) if draft.tokens[node] == token), None)
            if siblings:
                self.learn(len(siblings), rank)
            if rank is not None:
                self._last[seq_id] = draft, siblings[rank]

    def end(self, seq_id: str) -> None:
        """The sequence ended."""
        self._last.pop(seq_id, None)

    def learn(self, children: int, right: int | None) -> None:
        """The child of rank `right` among a node's first `children` was the right one (None: none of them)."""
        for rank in range(min(children, len(self._trials))):
            self._trials[rank] += 1
            self._right[rank] += rank == right

    @property
    def rates(self) -> tuple[float, ...]:
        """Probability of each rank, rounded to 1/128, so that a template is computed anew only when they changed."""
        return tuple(round(128 * right / trials) / 128 for right, trials in zip(self._right, self._trials, strict=True))


class RankLearner:
    """Tells `rank_rates` of the trees of the drafter that it is mixed into, and what became of them."""

    makes_trees = True
    max_depth = MOST_NODES

    def __init__(self, *args: Any, **options: Any) -> None:
        """Arguments are those of the drafter."""
        super().__init__(*args, **options)
        self.max_depth = MOST_NODES
        self.rank_rates = PerTenant(RankRates)

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        """See Drafter."""
        super().begin(seq_id, tokens, params, tenant=tenant)  # type: ignore[misc]
        self.rank_rates.enter(seq_id, tenant)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """See the drafter."""
        drafts: list[Draft] = super().propose(requests)  # type: ignore[misc]
        for draft in drafts:
            self.rank_rates.of(draft.seq_id).drafted(draft)
        return drafts

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        """See Drafter."""
        self.rank_rates.of(seq_id).compare(seq_id, tokens)
        super().accept(seq_id, tokens)  # type: ignore[misc]

    def end(self, seq_id: str) -> None:
        """See Drafter."""
        if (rates := self.rank_rates.leave(seq_id)) is not None:
            rates.end(seq_id)
        super().end(seq_id)  # type: ignore[misc]

    def forget(self) -> None:
        """See Drafter."""
        self.rank_rates.clear()
        super().forget()  # type: ignore[misc]


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
        rates: tuple[float, ...],
        reserve: Callable[[int], bool],
    ) -> TreeShape | None:
        """The widest shape whose rows fit the `room` behind the known tokens and are granted by `reserve`, which is
        called with their number; None if not even a chain's are. A pass has at most `logits_rows` rows with logits;
        `rates` are those of ranks, for a template."""
        nodes, levels = request.depth, min(LEVELS, request.depth, room + 1)  # the last level is never fed
        if levels < 1:
            return None
        if draws(request):
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


class GuessedTree(GrowingTree):
    """Grows in `shape`: at most `nodes` guesses in at most `levels` levels, of each of which at most `width` nodes are
    expanded, or those that have children in the `template`.

    Each round, the logits behind the nodes of `frontier` (-1: the root, at first) are computed, and `grow` takes the
    next level from them, until the frontier is empty.
    """

    def __init__(self, request: DraftRequest, history: History | None, shape: TreeShape) -> None:
        super().__init__(shape.nodes, min_survival=0.0 if shape.template else request.min_survival)
        self.frontier = [-1]
        self.level = 0
        self._request, self._history, self._shape = request, history, shape
        self._places = {-1: -1}  # of nodes in the template
        self._probs: list[NDArray[np.float64]] = []

    @property
    def done(self) -> bool:
        return not self.frontier

    def paths(self) -> set[int]:
        """The nodes of the frontier and those between them and the root."""
        return {each for node in self.frontier for each in self.path(node)}

    def fed(self, room: int, logits_room: int) -> FedNodes:
        """The nodes of the next pass, at most `room`; what the frontier has beyond that, or beyond `logits_room`, is
        given up."""
        kept: set[int] = set()
        frontier: list[int] = []
        for node in self.frontier[:logits_room]:
            path = kept | set(self.path(node))
            if len(path) <= room:
                kept = path
                frontier.append(node)
        self.frontier = frontier
        nodes = tuple(sorted(kept))
        place = {-1: -1, **{node: index for index, node in enumerate(nodes)}}
        return FedNodes(
            nodes,
            tuple(self.tokens[node] for node in nodes),
            tuple(place[self.parents[node]] for node in nodes),
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
        shape, template, first = self._shape, self._shape.template, len(self.tokens)
        found: list[tuple[int, Sequence[Candidate]]] = []
        for branch, (node, row) in enumerate(zip(self.frontier, rows, strict=True)):
            path = tuple(self.tokens[each] for each in self.path(node))
            guessed = GuessedRow(row, self._request, path, self._history, branch=branch)
            if template is None:
                candidates = sampler.candidates(output, guessed, min(shape.nodes, BRANCHES))
                rate = None if rates is None else rates[branch]
                found.append((node, candidates if rate is None else with_rate(candidates, rate)))
            else:
                self._draw_siblings(guessed, node, children(template, self._places[node]), sampler, output)
        self.level += 1
        if template is None:
            self.extend(found)
            self.frontier = self.expandable(shape.width) if self.level < shape.levels else []
        else:  # nothing below a node that is too unlikely, which is itself kept
            self.frontier = [
                node
                for node in range(first, len(self.tokens))
                if children(template, self._places[node]) and self.values[node] >= self._request.min_survival
            ]

    def _draw_siblings(
        self, row: GuessedRow, node: int, places: Sequence[int], sampler: GuessSampler, output: TargetOutput
    ) -> None:
        siblings, probs = sampler.siblings(output, row, len(places))
        for place, sibling in zip(places, siblings, strict=False):
            self._places[len(self.tokens)] = place
            self.tokens.append(sibling.token)
            self.parents.append(node)
            self.values.append(self.value(node) * sibling.probability)
        self._probs += list(probs)

    def draft(self, drafter: str) -> Draft:
        """What was guessed."""
        if self._shape.template is None:
            tree = self.best()
        else:
            tree = TokenTree(tuple(self.tokens), tuple(self.parents), tuple(self.values))
        probs = np.stack(self._probs) if self._probs else None
        return Draft(self._request.seq_id, *tree, drafter, probs)


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
