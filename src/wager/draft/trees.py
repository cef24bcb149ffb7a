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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from wager.draft.guessing import Candidate, GuessedRow, GuessSampler
from wager.errors import UsageError
from wager.kernels.base import TargetOutput
from wager.tenants import PerTenant
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams
from wager.verify.distribution import History


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Tokens, parents (-1: the root; before their children) and the value of each node, as in types.Draft."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()

    def draft(self, seq_id: str, drafter: str) -> Draft:
        return Draft(seq_id, self.tokens, self.parents, self.scores, drafter)


Candidates = Callable[[tuple[int, ...]], Sequence[Candidate]]


def best_first(
    candidates: Candidates, nodes: int, *, max_depth: int | None = None, min_survival: float = 0.0
) -> TokenTree:
    """The tree of at most `nodes` nodes of greatest expected acceptance.

    `candidates(path)` are the distinct tokens that may follow the tokens of a path from the root (), likeliest first;
    it is called once for each node of the tree at most. Of equal nodes the one found first is taken. Nodes of a value
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


def best_first_of_marginals(
    marginals: Sequence[Sequence[Candidate]], nodes: int, *, min_survival: float = 0.0
) -> TokenTree:
    """`best_first` for a block of guesses made in one pass: `marginals[d]` are the candidates of depth d + 1, likeliest
    first, whatever the tokens before them are."""
    return best_first(lambda path: marginals[len(path)], nodes, max_depth=len(marginals), min_survival=min_survival)


class GrowingTree:
    """A tree that grows level by level, of which the `nodes` best nodes are kept.

    Each round, `frontier` names the nodes whose candidates can still improve the tree, and `extend` adds their
    candidates; when the frontier is empty, `best` is the best tree that any number of further levels would give, if
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

    def frontier(self, width: int) -> list[int]:
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
        """The next level: of each node of the frontier its distinct candidates. Only those that can be among the best
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
        """The best nodes, in the order of their values. The nodes of a value below `min_survival` are left out, but for
        the best one."""
        order = sorted(range(len(self.values)), key=lambda node: (-self.values[node], node))[: self._nodes]
        kept = [node for node in order if self.values[node] >= self._min_survival] or order[:1]
        return keep(self.tokens, self.parents, self.values, kept)


def keep(tokens: Sequence[int], parents: Sequence[int], values: Sequence[float], kept: Sequence[int]) -> TokenTree:
    """The nodes `kept`, in that order; a node's parent must come before it."""
    place = {-1: -1, **{node: index for index, node in enumerate(kept)}}
    return TokenTree(
        tuple(tokens[node] for node in kept),
        tuple(place[parents[node]] for node in kept),
        tuple(values[node] for node in kept),
    )


def merge(trees: Sequence[TokenTree], nodes: int) -> TokenTree:
    """One tree of the guesses of several drafters: equal paths share their nodes, which take the greater value (and
    never a greater one than their parents); its `nodes` best nodes."""
    tokens: list[int] = []
    parents: list[int] = []
    values: list[float] = []
    known: dict[tuple[int, int], int] = {}
    for tree in trees:
        place = {-1: -1}
        for node, (token, parent, value) in enumerate(zip(tree.tokens, tree.parents, tree.scores, strict=True)):
            edge = (place[parent], token)
            if edge not in known:
                known[edge] = len(tokens)
                tokens.append(token)
                parents.append(edge[0])
                values.append(0.0)
            place[node] = known[edge]
            values[known[edge]] = max(values[known[edge]], value)
    for node in range(len(values) - 1, -1, -1):  # an ancestor is at least as likely as what follows it
        if parents[node] >= 0:
            values[parents[node]] = max(values[parents[node]], values[node])
    order = sorted(range(len(values)), key=lambda node: (-values[node], node))[:nodes]
    return keep(tokens, parents, values, order)


@dataclass(frozen=True)
class TreeTemplate:
    """`parents[i]` is the node before node i (-1: the root) and `ranks[i]` which of its candidates node i is, from 0
    for the best. Nodes come level by level; siblings side by side, in the order of their ranks."""

    parents: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node: 1 for a child of the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def expected(self, rates: Sequence[float]) -> float:
        """Expected number of accepted guesses where the child of rank b is right with probability rates[b] if its
        parent is."""
        values: list[float] = []
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            values.append((values[parent] if parent >= 0 else 1.0) * rates[rank])
        return sum(values)


def of_paths(paths: Iterable[Sequence[int]]) -> TreeTemplate:
    """The template of paths of ranks, such as (0,), (0, 0), (1,): the way in which Medusa's choices are written.

    Raises UsageError if the beginning of a path is missing.
    """
    ordered = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
    place: dict[tuple[int, ...], int] = {(): -1}
    for path in ordered:
        if not path or path[:-1] not in place:
            raise UsageError(f"The path {path} of a tree has no node before its last one.", "Name that path as well.")
        place[path] = len(place) - 1
    return TreeTemplate(tuple(place[path[:-1]] for path in ordered), tuple(path[-1] for path in ordered))


def sequoia(rates: Sequence[float], nodes: int, depth: int) -> TreeTemplate:
    """The template of at most `nodes` nodes and `depth` levels with the greatest expected acceptance.

    `rates[b]` is the measured probability that the child of rank b is the right one if its parent is right; the
    children of a node are those of ranks 0, 1, ... without gaps. A dynamic programme over nodes, levels and children
    (section 4.1 of the paper): for every node, its last child gets y of the nodes left, the children before it the
    rest; O(nodes^2 * depth * ranks).
    """
    plan = _programme(tuple(rates), nodes, depth)
    paths: list[tuple[int, ...]] = []
    todo: list[tuple[tuple[int, ...], int, int]] = [((), nodes, depth)]
    while todo:
        path, left, levels = todo.pop()
        for rank, size in enumerate(plan(left, levels)):
            paths.append((*path, rank))
            todo.append(((*path, rank), size - 1, levels - 1))
    return of_paths(paths)


@lru_cache(maxsize=64)
def _programme(rates: tuple[float, ...], nodes: int, depth: int) -> Callable[[int, int], tuple[int, ...]]:
    """plan(n, levels): how many nodes each child's subtree gets, itself included, where n nodes are left below a node.

    value[levels][n] is the greatest expected acceptance of n nodes below a node, by[levels][rank][n] that of the
    children from `rank` on.
    """
    value = [[0.0] * (nodes + 1)]
    sizes: list[list[list[int]]] = [[]]
    for level in range(1, depth + 1):
        below = value[level - 1]
        after = [0.0] * (nodes + 1)
        chosen: list[list[int]] = []
        for rank in range(len(rates) - 1, -1, -1):
            rate, best, size = rates[rank], [0.0] * (nodes + 1), [0] * (nodes + 1)
            for n in range(1, nodes + 1):
                options = [(rate * (1.0 + below[y - 1]) + after[n - y], -y) for y in range(1, n + 1)]
                gain, smallest = max(options)
                if gain > 0:
                    best[n], size[n] = gain, -smallest
            chosen.append(size)
            after = best
        value.append(after)
        sizes.append(chosen[::-1])

    @cache
    def plan(n: int, levels: int) -> tuple[int, ...]:
        given: list[int] = []
        for size in sizes[levels] if levels else []:
            if not size[n]:
                break
            given.append(size[n])
            n -= size[n]
        return tuple(given)

    return plan


class RankRates:
    """Acceptance by rank, measured: how often the child of rank b was the right one where its parent was right.

    Starts from a prior that counts for `weight` trials, a mean of drafters with coupled noise.
    """

    PRIOR = (0.6, 0.12, 0.05, 0.03)

    def __init__(self, *, weight: float = 20.0) -> None:
        self._right = [rate * weight for rate in self.PRIOR]
        self._trials = [weight] * len(self.PRIOR)
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
            children = [node for node, above in enumerate(draft.parents) if above == parent]
            rank = next((rank for rank, node in enumerate(children) if draft.tokens[node] == token), None)
            if children:
                self.learn(len(children), rank)
            if rank is not None:
                self._last[seq_id] = draft, children[rank]

    def end(self, seq_id: str) -> None:
        """The sequence ended."""
        self._last.pop(seq_id, None)

    def learn(self, children: int, right: int | None) -> None:
        """Of a node's first `children` children that of rank `right` was the right one (None: none of them)."""
        for rank in range(min(children, len(self._trials))):
            self._trials[rank] += 1
            self._right[rank] += rank == right

    @property
    def rates(self) -> tuple[float, ...]:
        """Probability of each rank, rounded to 1/128, so that a template is computed anew only when they changed."""
        return tuple(round(128 * right / trials) / 128 for right, trials in zip(self._right, self._trials, strict=True))


class LearnsRanks:
    """Tells `rank_rates` of the trees of the drafter that it is mixed into, and what became of them."""

    rank_rates: PerTenant[RankRates]

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
        self.rank_rates.of(seq_id).end(seq_id)
        self.rank_rates.leave(seq_id)
        super().end(seq_id)  # type: ignore[misc]


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
