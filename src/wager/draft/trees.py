"""Trees of guesses of greatest expected acceptance, from probabilities: pure functions that any drafter may use.

The value of a node is the probability that its whole path is right: the product of the probabilities on it. The sum of
the values of a tree's nodes is the expected number of its guesses that are accepted, so the best tree of n nodes holds
the n nodes of greatest value; it is connected, since no node is worth more than its parent.

`best_first` finds it where the candidates of every node can be had one by one: a suffix tree, or the marginals of a
drafter that guesses a block in one pass (DDTree). `GrowingTree` finds it level by level, for drafters that make one
batched pass per level: expansion and re-ranking by path probability (EAGLE-2, arXiv 2406.16858; OPT-Tree, 2406.17276).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wager.types import Draft


class Candidate(NamedTuple):
    """A token that may follow a node, and the probability that it is right if the node is."""

    token: int
    probability: float


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
