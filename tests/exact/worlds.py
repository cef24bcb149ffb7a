"""Small worlds in which every outcome of a round is enumerated: distributions, drafts, coins, emitted tokens.

A world has the target's distribution p and the drafter's q for every context. Rules run unchanged: `explore` calls them
with `Coins` that enumerate both outcomes of each coin, weighted by their probability, instead of drawing one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from wager.types import Draft, Verdict
from wager.verify.distribution import without_replacement

NOTHING = -1e4
"""The logit of an id of probability 0: finite, as a model's logits are, and its exponential is exactly zero."""

Context = tuple[int, ...]
Weighted = tuple[float, Draft]
Rule = Callable[..., Verdict]


@dataclass
class World:
    """p and q for every context, drawn at random once; `kind` restricts them, see KINDS."""

    vocab: int
    seed: int
    kind: str = "random"
    cache: dict[tuple[str, Context], np.ndarray] = field(default_factory=dict)

    def p(self, context: Context) -> np.ndarray:
        return self._probs("p", context)

    def q(self, context: Context) -> np.ndarray:
        if self.kind == "same":
            return self.p(context)
        return self._probs("q", context)

    def _probs(self, name: str, context: Context) -> np.ndarray:
        key = (name, context)
        if key not in self.cache:
            rng = np.random.default_rng([self.seed, ord(name), self.vocab, len(context), *context])
            probs = rng.random(self.vocab) ** 2 + 0.02
            if self.kind in (f"zeros_{name}", "zeros"):
                probs[rng.choice(self.vocab, self.vocab - 2, replace=False)] = 0
            if self.kind == f"point_{name}":
                probs = np.eye(self.vocab)[rng.integers(self.vocab)]
            self.cache[key] = probs / probs.sum()
        return self.cache[key]

    def rows(self, draft: Draft) -> np.ndarray:
        """[1 + nodes, V]: p at the root and at every node, each with its own path as context."""
        contexts = [tuple(draft.tokens[node] for node in draft.path(leaf)) for leaf in range(len(draft))]
        return np.array([self.p(()), *(self.p(context) for context in contexts)])

    def truth(self, length: int, context: Context = ()) -> np.ndarray:
        """The target's distribution of the next `length` tokens, [V] * length."""
        probs = self.p(context)
        if length == 1:
            return probs
        return np.stack([probs[x] * self.truth(length - 1, (*context, x)) for x in range(self.vocab)])


KINDS = ("random", "zeros_p", "zeros_q", "zeros", "same", "point_p", "point_q")


class Exploring:
    """`Coins` that follow a script of outcomes and record how many there were at each coin."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.taken, self.options, self.mass = script, 0, [], 1.0

    def _take(self, weights: list[float]) -> int:
        possible = [i for i, weight in enumerate(weights) if weight != 0]
        self.options.append(len(possible))
        pick = possible[self.script[self.taken] if self.taken < len(self.script) else 0]
        self.taken += 1
        self.mass *= weights[pick]
        return pick

    def flip(self, probability: float) -> bool:
        return self._take([1 - probability, probability]) == 1

    def draw(self, weights: np.ndarray) -> int:
        return self._take((weights / weights.sum()).tolist())


def explore(run: Callable[[Exploring], Verdict]) -> Iterator[tuple[float, Verdict]]:
    """Every outcome of `run(coins)` with its mass, depth first."""
    script: list[int] = []
    while True:
        coins = Exploring(script)
        verdict = run(coins)
        yield coins.mass, verdict
        script = [*script, *[0] * (len(coins.options) - len(script))]
        while script and script[-1] + 1 >= coins.options[len(script) - 1]:
            script.pop()
        if not script:
            return
        script[-1] += 1


# --- drafts: every outcome with its probability -------------------------------------------------------------


def chains(world: World, depth: int) -> Iterator[Weighted]:
    """Guesses drawn from q one after the other."""
    for tokens in itertools.product(range(world.vocab), repeat=depth):
        draft_probs = [world.q(tokens[:i]) for i in range(depth)]
        mass = float(np.prod([q[x] for q, x in zip(draft_probs, tokens, strict=True)]))
        if mass > 0:
            yield mass, _draft(tokens, range(-1, depth - 1), draft_probs)


def fixed_chain(world: World, depth: int) -> Iterator[Weighted]:
    """The chain a deterministic drafter makes: the likeliest of q each time, without draft_probs."""
    tokens: Context = ()
    for _ in range(depth):
        tokens = (*tokens, int(world.q(tokens).argmax()))
    yield 1.0, _draft(tokens, range(-1, depth - 1), None)


def fixed_tree(world: World, widths: tuple[int, ...]) -> Iterator[Weighted]:
    """The likeliest children of q at each node, without draft_probs."""
    yield 1.0, _draft(*_grow(world, widths, lambda q, width: np.argsort(-q, kind="stable")[:width].tolist()), None)


Siblings = Callable[[np.ndarray, int], Iterator[tuple[float, tuple[int, ...], np.ndarray]]]


def independent(q: np.ndarray, width: int) -> Iterator[tuple[float, tuple[int, ...], np.ndarray]]:
    """Siblings drawn from q independently (SpecInfer): duplicates happen."""
    for tokens in itertools.product(range(len(q)), repeat=width):
        mass = float(np.prod(q[list(tokens)]))
        if mass > 0:
            yield mass, tokens, np.tile(q, (width, 1))


def distinct(q: np.ndarray, width: int) -> Iterator[tuple[float, tuple[int, ...], np.ndarray]]:
    """Siblings drawn from q without replacement (Sequoia); fewer than `width` where q runs out."""
    width = min(width, int((q > 0).sum()))
    for tokens in itertools.permutations(range(len(q)), width):
        if all(q[x] > 0 for x in tokens):
            draft_probs = without_replacement(q, tokens)
            yield float(np.prod(draft_probs[range(width), tokens])), tokens, draft_probs


def continued(q: np.ndarray, width: int) -> Iterator[tuple[float, tuple[int, ...], np.ndarray]]:
    """As `distinct`, but an exhausted q goes on with a uniform distribution over untried ids."""
    for mass, tokens, draft_probs in distinct(q, width):
        rest = [x for x in range(len(q)) if x not in tokens]
        if len(tokens) < width and rest:
            probs = np.zeros(len(q))
            probs[rest] = 1 / len(rest)
            for x in rest:
                yield mass / len(rest), (*tokens, x), np.vstack((draft_probs, probs))
        else:
            yield mass, tokens, draft_probs


def mixed(q: np.ndarray, width: int) -> Iterator[tuple[float, tuple[int, ...], np.ndarray]]:
    """A deterministic guess first (its q a point mass), then independent draws from q."""
    guess = int(q.argmin())
    for mass, tokens, draft_probs in independent(q, width - 1):
        yield mass, (guess, *tokens), np.vstack((np.eye(len(q))[guess], draft_probs))


def trees(world: World, widths: tuple[int, ...], siblings: Siblings) -> Iterator[Weighted]:
    """Trees with `widths[d]` children at each node of depth d; nodes level by level, siblings side by side."""
    partial = [(1.0, ((), (), ()))]  # mass, (tokens, parents, draft_probs)
    for width in widths:
        grown = []
        for mass, tree in partial:
            grown += _grow_level(world, mass, tree, width, siblings)
        partial = grown
    for mass, (tokens, parents, draft_probs) in partial:
        yield mass, _draft(tokens, parents, draft_probs)


def _grow_level(world: World, mass: float, tree: tuple, width: int, siblings: Siblings) -> list:
    tokens, parents, _ = tree
    depths = Draft("", tokens, parents).depths
    deepest = max(depths, default=0)
    outcomes = [(mass, tree)]
    for leaf in [i for i, depth in enumerate(depths) if depth == deepest] or [-1]:
        context = tuple(tokens[node] for node in Draft("", tokens, parents).path(leaf))
        outcomes = [
            (m * dm, (t + x, ps + (leaf,) * len(x), ls + tuple(rows)))
            for m, (t, ps, ls) in outcomes
            for dm, x, rows in siblings(world.q(context), width)
        ]
    return outcomes


def _grow(world: World, widths: tuple[int, ...], pick: Callable[[np.ndarray, int], list[int]]) -> tuple:
    tokens: Context = ()
    parents: Context = ()
    level = [(-1, ())]
    for width in widths:
        grown = []
        for node, context in level:
            for token in pick(world.q(context), width):
                grown.append((len(tokens), (*context, token)))
                tokens, parents = (*tokens, token), (*parents, node)
        level = grown
    return tokens, parents


def _draft(tokens: Context, parents, draft_probs) -> Draft:
    probs = None if draft_probs is None else np.array(draft_probs)
    return Draft("s", tuple(tokens), tuple(parents), draft_probs=probs)


# --- what is emitted ----------------------------------------------------------------------------------------


def emitted(world: World, rule: Rule, drafts: Iterator[Weighted], rows=None) -> tuple[dict[Context, float], float]:
    """{emitted tokens: mass} of one round, and the mean number of accepted guesses."""
    out: dict[Context, float] = {}
    accepted = 0.0
    for mass, draft in drafts:
        p = (rows or world.rows)(draft)
        for weight, verdict in explore(lambda coins, draft=draft, p=p: rule(draft, p, coins=coins)):
            out[verdict.tokens] = out.get(verdict.tokens, 0.0) + mass * weight
            accepted += mass * weight * len(verdict.accepted)
    return out, accepted


def deviation(world: World, out: dict[Context, float], length: int) -> float:
    """TV between the target's distribution of `length` tokens and the emitted prefixes, completed with p."""
    probs = np.zeros((world.vocab,) * length)
    for prefix, mass in out.items():
        rest = length - len(prefix)
        probs[prefix] += mass * (world.truth(rest, prefix) if rest else 1.0)
    return 0.5 * float(np.abs(probs - world.truth(length)).sum())


# --- closed forms of `match` (Gumbel coupling of p and q) ---------------------------------------------------


def agreement(p: np.ndarray, q: np.ndarray) -> float:
    """P(argmax log p + g == argmax log q + g) = sum_x 1 / sum_y max(p_y / p_x, q_y / q_x)."""
    both = [x for x in range(len(p)) if p[x] > 0 and q[x] > 0]
    return float(sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in both))


def joint(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """[V, V]: P(target's token = x, drafter's guess = y) when both use the same noise field."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(q > 0, p / q, np.where(p > 0, np.inf, 0.0))
    probs = np.zeros((len(p), len(p)))
    for x, y in itertools.permutations(range(len(p)), 2):
        if p[x] > 0 and q[y] > 0 and ratio[y] < ratio[x]:
            probs[x, y] = p[x] * q[y] * _integral(p, q, ratio, ratio[y], ratio[x])
    for x in range(len(p)):
        if p[x] > 0 and q[x] > 0:
            probs[x, x] = 1 / np.maximum(p / p[x], q / q[x]).sum()
    return probs


def _integral(p: np.ndarray, q: np.ndarray, ratio: np.ndarray, low: float, high: float) -> float:
    """Integral of dl / D(l)^2 with D(l) = sum_z max(p_z, l q_z), piecewise linear between the ratios."""

    def d(at: float) -> float:
        return float(np.maximum(p, at * q).sum())

    ends = [low, *sorted({r for r in ratio.tolist() if low < r < high}), high]
    total = 0.0
    for u, v in itertools.pairwise(ends):
        total += 1 / d(u) if np.isinf(v) else (v - u) / (d(u) * d(v))  # D grows like l where q sums to one
    return total
