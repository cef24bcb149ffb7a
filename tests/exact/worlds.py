"""Small worlds in which every outcome of a round is enumerated: distributions, drafts, coins, emitted tokens.

A world has the target's distribution p and the drafter's q for every context. Rules run unchanged: `explore` calls them
with `Coins` that enumerate both outcomes of each coin, weighted by their probability, instead of drawing one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from wager.types import Draft, Verdict
from wager.verify.distribution import without_replacement

EXACT = 1e-12

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
        return self._probs("p" if self.kind == "same" else "q", context)

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
        return np.array([self.p(()), *(self.p(tokens_to(draft, node)) for node in range(len(draft)))])

    def truth(self, length: int, context: Context = ()) -> np.ndarray:
        """The target's distribution of the next `length` tokens, [V] * length."""
        probs = self.p(context)
        if length == 1:
            return probs
        return np.stack([probs[x] * self.truth(length - 1, (*context, x)) for x in range(self.vocab)])


KINDS = ("random", "zeros_p", "zeros_q", "zeros", "same", "point_p", "point_q")


def tokens_to(draft: Draft, node: int) -> Context:
    return tuple(draft.tokens[step] for step in draft.path(node))


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


Siblings = Callable[[np.ndarray, int], Iterator[tuple[float, Context, np.ndarray | None]]]
"""The draws of so many children of a node from q: probability, tokens, and the distribution each was drawn from."""


def independent(q: np.ndarray, width: int) -> Iterator[tuple[float, Context, np.ndarray]]:
    """Siblings drawn from q independently (SpecInfer): duplicates happen."""
    for tokens in itertools.product(range(len(q)), repeat=width):
        mass = float(np.prod(q[list(tokens)]))
        if mass > 0:
            yield mass, tokens, np.tile(q, (width, 1))


def distinct(q: np.ndarray, width: int) -> Iterator[tuple[float, Context, np.ndarray]]:
    """Siblings drawn from q without replacement (Sequoia); fewer than `width` where q runs out."""
    width = min(width, int((q > 0).sum()))
    for tokens in itertools.permutations(range(len(q)), width):
        if all(q[x] > 0 for x in tokens):
            draft_probs = without_replacement(q, tokens)
            yield float(np.prod(draft_probs[range(width), tokens])), tokens, draft_probs


def continued(q: np.ndarray, width: int) -> Iterator[tuple[float, Context, np.ndarray]]:
    """As `distinct`, but an exhausted q goes on with a uniform distribution over untried ids."""
    for mass, tokens, draft_probs in distinct(q, width):
        rest = [x for x in range(len(q)) if x not in tokens]
        if len(tokens) == width or not rest:
            yield mass, tokens, draft_probs
            continue
        probs = np.zeros(len(q))
        probs[rest] = 1 / len(rest)
        for x in rest:
            yield mass / len(rest), (*tokens, x), np.vstack((draft_probs, probs))


def mixed(q: np.ndarray, width: int) -> Iterator[tuple[float, Context, np.ndarray]]:
    """A deterministic guess first (its q a point mass), then independent draws from q."""
    guess = int(q.argmin())
    for mass, tokens, draft_probs in independent(q, width - 1):
        yield mass, (guess, *tokens), np.vstack((np.eye(len(q))[guess], draft_probs))


def fixed(q: np.ndarray, width: int) -> Iterator[tuple[float, Context, None]]:
    """What a deterministic drafter guesses: the likeliest of q, without draft_probs."""
    yield 1.0, tuple(np.argsort(-q, kind="stable")[:width].tolist()), None


def trees(world: World, widths: tuple[int, ...], siblings: Siblings) -> Iterator[Weighted]:
    """Trees with `widths[d]` children at each node of depth d; nodes level by level, siblings side by side."""
    partial: list[Weighted] = [(1.0, Draft("s"))]
    for depth, width in enumerate(widths):
        grown_partial: list[Weighted] = []
        for mass, draft in partial:
            leaves = [node for node, at in enumerate(draft.depths) if at == depth] if depth else [-1]
            grown_partial += grown(world, mass, draft, leaves, width, siblings)
        partial = grown_partial
    yield from partial


def chains(world: World, depth: int) -> Iterator[Weighted]:
    """Guesses drawn from q one after the other."""
    return trees(world, (1,) * depth, independent)


def grown(
    world: World, mass: float, draft: Draft, nodes: Sequence[int], width: int, siblings: Siblings
) -> list[Weighted]:
    """A draft with children of these nodes."""
    outcomes = [(mass, draft)]
    for node in nodes:
        draws = list(siblings(world.q(tokens_to(draft, node)), width))
        outcomes = [
            (mass * share, Draft("s", known.tokens + tokens, known.parents + (node,) * len(tokens), draft_probs=both))
            for mass, known in outcomes
            for share, tokens, probs in draws
            for both in [probs if known.draft_probs is None else np.vstack((known.draft_probs, probs))]
        ]
    return outcomes


# --- what is emitted ----------------------------------------------------------------------------------------


def emitted(world: World, rule: Rule, drafts: Iterable[Weighted], rows=None) -> tuple[dict[Context, float], float]:
    """{emitted tokens: mass} of one round, and the mean number of accepted guesses."""
    out: dict[Context, float] = {}
    accepted = 0.0
    for mass, draft in drafts:
        p = (rows or world.rows)(draft)
        for weight, verdict in explore(lambda coins, draft=draft, p=p: rule(draft, p, coins=coins)):
            out[verdict.tokens] = out.get(verdict.tokens, 0.0) + mass * weight
            accepted += mass * weight * len(verdict.accepted)
    assert abs(sum(out.values()) - 1) < EXACT
    return out, accepted


def deviation(world: World, out: dict[Context, float], length: int) -> float:
    """TV between the target's distribution of `length` tokens and the emitted prefixes, completed with p."""
    probs = np.zeros((world.vocab,) * length)
    for prefix, mass in out.items():
        rest = length - len(prefix)
        probs[prefix] += mass * (world.truth(rest, prefix) if rest else 1.0)
    return 0.5 * float(np.abs(probs - world.truth(length)).sum())
