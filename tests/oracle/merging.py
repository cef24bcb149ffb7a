"""Trees of several drafters as one, and how often a drafter was right: csrc/merging.h in Python."""

from __future__ import annotations

from collections.abc import Sequence

from wager.draft.trees import TokenTree, best_nodes, children
from wager.types import Draft

_UNKNOWN = 0.5


def rates(draft: Draft) -> list[float]:
    """The probability of each node to be right if its parent is, by the drafter's own scores."""
    scores, parents = draft.scores, draft.parents
    if not scores:
        return [_UNKNOWN / parents.count(parent) for parent in parents]
    above = [scores[parent] if parent >= 0 else 1.0 for parent in parents]
    return [min(1.0, score / over) if over > 0 else 0.0 for score, over in zip(scores, above, strict=True)]


def judged(draft: Draft, factor: float) -> TokenTree:
    """With scores as they were lately borne out: `factor` times as often as the drafter thought."""
    scores: list[float] = []
    for rate, parent in zip(rates(draft), draft.parents, strict=True):
        scores.append((scores[parent] if parent >= 0 else 1.0) * min(1.0, rate * factor))
    return TokenTree(draft.tokens, draft.parents, tuple(scores))


def continued(tree: TokenTree, more: TokenTree) -> TokenTree:
    """With `more` behind its last node."""
    count, above = len(tree.tokens), tree.scores[-1]
    return TokenTree(
        tree.tokens + more.tokens,
        tree.parents + tuple(count + parent for parent in more.parents),  # -1 is the last node
        tree.scores + tuple(above * score for score in more.scores),
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
    return best_nodes(tokens, parents, values, nodes)


def worth(draft: Draft, row: float) -> int:
    """How many guesses are worth the price of a row; all where nothing says how likely they are."""
    return sum(score > row for score in draft.scores) if draft.scores else len(draft.tokens)


def bear_out(draft: Draft, tokens: Sequence[int]) -> tuple[float, int]:
    """Guesses that should have been right, and that were, as far as a draft's path was right."""
    expected, right, node, shares = 0.0, 0, -1, rates(draft)
    for token in tokens:
        guesses = children(draft.parents, node)
        if not guesses:
            break
        expected += min(1.0, sum(shares[guess] for guess in guesses))
        found = next((guess for guess in guesses if draft.tokens[guess] == token), None)
        if found is None:
            break
        right, node = right + 1, found
    return expected, right
