"""The acceptance rules: from a draft and the target's rows to the tokens that are emitted. Pure functions. Most of what
`match` decides is decided in C++ (csrc/match_bindings.cpp; engine/runner.py says what is left to the one here).

`match` compares guesses with the target's own tokens; `rejection`, `block` and `traversal` compare the target's
distribution p with the distribution q a guess was drawn from, using random numbers from a `Coins`. Rows: index 0
belongs to the root (the last known token), 1 + i to node i. `match` and `rejection` read only the rows on the accepted
path, so a sequence that computes its rows on demand saves the others.

What a row of `Draft.draft_probs` means: draft_probs[i] is the distribution node i was drawn from *given that its
earlier siblings were drawn first*. Independent siblings repeat one row; siblings drawn without replacement hold the row
without the earlier ones, renormalised (`distribution.without_replacement`); no draft_probs at all means deterministic
guesses, each a point mass. Siblings are tried in node order, which must be the order in which they were drawn; the
rules never renormalise q themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wager.errors import NumericsError, UsageError
from wager.kernels import noise
from wager.types import Draft, Verdict

Row = NDArray[np.float64]
Rows = Sequence[Row] | NDArray[np.float64]

_TINY = float(np.finfo(np.float64).tiny)
"""Above the smallest normal number, a coin below 1 times a total rounds to less than the total."""


class Coins(Protocol):
    """A source of random numbers: the noise field in production, an enumeration of every outcome in tests."""

    def flip(self, probability: float) -> bool:
        """True with the given probability (0 is never, 1 is always)."""

    def draw(self, weights: Row) -> int:
        """An index with probability proportional to its weight, [V]; never one of weight 0."""


class NoiseCoins:
    """Random numbers of one round, computed from (seed, position of the first guess, choice) and a running index.

    A round starts at least one token later than the round before it, so no number is used twice.
    """

    def __init__(self, seed: int, position: int, choice: int = 0) -> None:
        self._key = (seed, position, choice)
        self._flips = 0
        self._draws = 0

    def flip(self, probability: float) -> bool:
        seed, position, choice = self._key
        coin = noise.uniform(seed, position, choice=choice, domain=noise.ACCEPT, index=self._flips)
        self._flips += 1
        return coin < probability

    def draw(self, weights: Row) -> int:
        """See `Coins.draw`. Raises NumericsError if the sum of the weights is zero or not finite."""
        seed, position, choice = self._key
        coin = noise.uniform(seed, position, choice=choice, domain=noise.RESIDUAL, index=self._draws)
        self._draws += 1
        mass = weights.cumsum()
        total = float(mass[-1])
        if not _TINY < total < np.inf:
            cause = f"The distribution at position {position} sums to {total}, so no token can be drawn from it."
            raise NumericsError(cause, "The model's weights are damaged, or the drafter's probabilities are.")
        return int(np.searchsorted(mass, coin * total, side="right"))


def match(draft: Draft, targets: Sequence[int]) -> Verdict:
    """Follow the guesses that are the target's own tokens; the first that has no equal guess ends the round.

    `targets[0]` is the target's token after the root, `targets[1 + i]` after node i. Drafter-invariant speculative
    decoding (Daliri, Musco, Suresh 2024, arXiv 2408.07978): the text does not depend on the draft.
    """
    nodes: dict[tuple[int, int], int] = {}
    for node, edge in enumerate(zip(draft.parents, draft.tokens, strict=True)):
        nodes.setdefault(edge, node)
    current = -1
    accepted: list[int] = []
    tokens: list[int] = []
    while True:
        token = int(targets[1 + current])
        tokens.append(token)
        child = nodes.get((current, token))
        if child is None:
            return Verdict(draft.seq_id, tuple(accepted), tuple(tokens))
        accepted.append(child)
        current = child


def rejection(draft: Draft, p: Rows, *, coins: Coins) -> Verdict:
    """Recursive rejection on a chain or tree: the emitted tokens follow p exactly.

    On a chain of sampled guesses this is the token rule (Leviathan et al. 2211.17192, Chen et al. 2302.01318); on trees
    SpecInfer's (2305.09781), Sequoia's (2402.12374) or that of deterministic candidates, as draft_probs say. At a node:
    try child x with min(1, p(x) / q(x)), else replace p by norm([p - q]+); when none is left, draw the token from p.
    `p` float64 [1 + nodes, V]. A guess of probability 0 under its own q (or outside the vocabulary) counts as not
    proposed.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(draft.parents):
        children.setdefault(parent, []).append(node)
    current = -1
    accepted: list[int] = []
    while True:
        residual = p[1 + current]
        for node in children.get(current, ()):
            ratio = _ratio(residual, draft, node)
            if ratio is None:
                continue
            if coins.flip(min(1.0, ratio)):
                current = node
                accepted.append(node)
                break
            residual = _normalised(_positive_part(residual, draft, node), otherwise=residual)
        else:
            return _verdict(draft, accepted, coins.draw(residual))


def block(draft: Draft, p: Rows, *, coins: Coins) -> Verdict:
    """Block verification of a chain (Sun et al. 2024, arXiv 2403.10444): the longest prefix that passes is kept.

    pi_i = min(1, pi_{i-1} p_i(x_i) / q_i(x_i)); prefix i passes with h_i = R_i / (R_i + 1 - pi_i), where R_i =
    sum [pi_i p_{i+1} - q_{i+1}]+ and h_k = pi_k; the next token follows norm([pi p - q]+), or p after the whole chain.
    Never accepts less than `rejection`, equal to it for deterministic guesses. `p` float64 [1 + nodes, V].
    Needs guesses whose private noise is fresh in every round: a later guess influences whether an earlier one is kept.
    A guess of probability 0 under its own q (or outside the vocabulary) ends the chain before it.
    Raises UsageError for a draft that is not a chain.
    """
    if not draft.is_chain:
        raise UsageError("The block rule verifies chains, and this draft is a tree.", "Use verify = 'rejection'.")
    return traversal(draft, p, coins=coins)


def traversal(draft: Draft, p: Rows, *, coins: Coins) -> Verdict:
    """Traversal verification of a tree, from its leaves to its root (Weng et al. 2025, arXiv 2505.12398).

    As in `block`, pi_c = min(1, pi_u p_u(c) / q_u(c)) for child c of u, and pi of the root is 1. Leaves are visited
    depth-first, and one is accepted, with its path, with its pi. If c is not, R = sum [pi_u p_u - q_u]+, p_u becomes
    norm([pi_u p_u - q_u]+) and pi_u becomes R / (R + 1 - pi_u); without a child left u is a leaf itself. The next token
    follows the p of the node that is accepted. On a chain this is `block`, and like it it needs fresh private noise,
    here for every node. `p` float64 [1 + nodes, V]. A guess of probability 0 under its own q (or outside the
    vocabulary) counts as not proposed, nor do those after it.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(draft.parents):
        children.setdefault(parent, []).append(node)

    def visit(node: int, reach: float, path: list[int]) -> Verdict | None:
        """The verdict if the node, or one below it, is accepted; `reach` is its pi."""
        residual = p[1 + node]
        for child in children.get(node, ()):
            ratio = _ratio(residual, draft, child)
            if ratio is None:
                continue
            verdict = visit(child, min(1.0, reach * ratio), [*path, child])
            if verdict is not None:
                return verdict
            excess = _positive_part(reach * residual, draft, child)
            weight = float(excess.sum())
            shortfall = weight + 1.0 - reach
            reach = weight / shortfall if shortfall > 0 else float(shortfall == 0)  # NaN never passes
            residual = _normalised(excess, otherwise=residual)
        if node < 0 or coins.flip(min(1.0, reach)):
            return _verdict(draft, path, coins.draw(residual))
        return None

    verdict = visit(-1, 1.0, [])
    return verdict if verdict is not None else _verdict(draft, [], coins.draw(p[0]))


def _verdict(draft: Draft, accepted: list[int], last: int) -> Verdict:
    tokens = (*(draft.tokens[node] for node in accepted), last)
    return Verdict(draft.seq_id, tuple(accepted), tokens)


def _ratio(p: Row, draft: Draft, node: int) -> float | None:
    """p(x) / q(x) of a guess; None if its probability under q is 0."""
    token = draft.tokens[node]
    if not 0 <= token < len(p):
        return None
    if draft.draft_probs is None:
        return float(p[token])
    q = float(draft.draft_probs[node, token])
    return float(p[token]) / q if q > 0 else None


def _positive_part(p: Row, draft: Draft, node: int) -> Row:
    """[p - q]+ with the q of `node`."""
    if draft.draft_probs is not None:
        over: Row = np.maximum(p - draft.draft_probs[node], 0.0)
        return over
    left = p.copy()
    if 0 <= draft.tokens[node] < len(p):
        left[draft.tokens[node]] = max(0.0, left[draft.tokens[node]] - 1.0)
    return left


def _normalised(weights: Row, *, otherwise: Row) -> Row:
    """weights / sum; where the sum is 0, rejection had probability 0 and `otherwise` stays."""
    total = float(weights.sum())
    return weights / total if total > 0 else otherwise
