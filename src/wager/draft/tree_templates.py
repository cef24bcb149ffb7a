"""Trees of a fixed shape: which children of which node are guessed, by their rank, whatever the tokens turn out to be.

A template does not look at the tokens that it is filled with, so it is the tree to draw siblings in under a rule that
keeps the distribution (verification by `rejection` and `traversal`). `sequoia` finds the best one for measured
acceptance by rank (Sequoia, arXiv 2402.12374); `of_paths` is a shape written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

from wager.errors import UsageError
from wager.tenants import PerTenant
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams


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
