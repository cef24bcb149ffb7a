"""Trees of several drafters as one, how often a drafter was right, and where a second one is asked: csrc/merging.h in
Python."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

from wager.draft.trees import TokenTree, best_nodes, children
from wager.types import Draft, DraftPrices

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


def right_and_worth(draft: Draft, tokens: Sequence[int], row: float) -> int:
    """How many of those are on the path of `tokens`."""
    node, path = -1, list[int]()
    for token in tokens:
        found = [guess for guess in children(draft.parents, node) if draft.tokens[guess] == token]
        if not found or (draft.scores and draft.scores[found[0]] <= row):
            break
        node = found[0]
        path.append(node)
    return len(path)


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


class Reliability:
    def __init__(self) -> None:
        self.expected = self.right = 10.0

    @property
    def factor(self) -> float:
        return self.right / self.expected

    def learn(self, draft: Draft, tokens: Sequence[int]) -> None:
        expected, right = bear_out(draft, tokens)
        self.expected += expected
        self.right += right


class BackedDrafts:
    """For one sequence, and without names."""

    def __init__(self, borders: Sequence[float], share: float) -> None:
        self._borders, self._share, self.until = borders, share, 0
        self._first = Reliability()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._second, self._credit = Reliability(), 10.0
        self._gains = [[0.45 * (1 - least), 20.0, 0] for least in (0.0, *self._borders)]  # mean, places, left out

    def ask(self, own: Draft | None, prices: DraftPrices, now: int, sequences: int) -> float | None:
        roots = [score for score, parent in zip(own.scores, own.parents, strict=False) if parent < 0] if own else []
        gain = self._gains[bisect(self._borders, max(roots))] if roots else self._gains[0]
        pays = gain[0] > prices.call or gain[2] >= 64
        gain[2] = 0 if pays else gain[2] + 1
        if pays:
            self._place = gain, prices
        if prices.keeping:
            self._credit -= prices.keeping
            if self._credit < 0:
                self.until = now + round(10.0 / (self._share * sequences))
                self._begin_anew()
        return min(0.95, (prices.row + prices.guess) / 0.6 / self._second.factor) if pays else None

    def join(self, first: Draft, second: Draft, nodes: int, behind: Draft | None) -> TokenTree:
        chain = judged(second, self._second.factor)
        if behind is not None:
            chain = continued(chain, judged(behind, self._first.factor))
        tree = merge([judged(first, self._first.factor), chain], nodes)
        self._asked = first, second, Draft("", *tree)
        return tree

    def accept(self, tokens: Sequence[int]) -> None:
        (gain, prices), (first, second, made) = self._place, self._asked
        row, alone = prices.row, Draft("", *judged(first, self._first.factor))
        cost = row * (worth(made, row) - worth(alone, row)) + prices.guess * len(second)
        brought = right_and_worth(made, tokens, row) - right_and_worth(alone, tokens, row) - cost
        self._first.learn(first, tokens)
        self._second.learn(second, tokens)
        gain[1] = min(400.0, gain[1] + 1)
        gain[0] += (brought - gain[0]) / gain[1]
        self._credit = min(60.0, self._credit + (brought - prices.call))
