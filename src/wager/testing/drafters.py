"""Drafters with known skill: always right, always wrong, right at a set rate, trees of any shape.

They speak the Drafter protocol and know no engine. Those that need the target's tokens ask a *seer*: `ToyOracle` computes
them from a ToyTarget's closed form, `ReferenceOracle` reads them from a text produced before, with any model. Without a
seer the adversary and the tree drafter work on any model, but then nothing is promised about what is accepted.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

from wager.kernels.base import TargetOutput
from wager.testing.toy import ToyDistribution
from wager.types import Draft, DraftRequest, SamplingParams
from wager.verify.distribution import History, shape


class Seer(Protocol):
    """Knows what the target will say."""

    def see(self, ask: DraftRequest, known: Sequence[int], prompt: int) -> list[int]:
        """The target's next tokens, at most `ask.depth`, after the `known` ones (the first `prompt` are the prompt)."""


class ToyOracle:
    """Computes the target's tokens from its law, with the same processors and the same noise."""

    def __init__(self, law: ToyDistribution) -> None:
        self._law = law

    def see(self, ask: DraftRequest, known: Sequence[int], prompt: int) -> list[int]:
        history = History(known[:prompt], known[prompt:])
        path: list[int] = []
        for depth in range(ask.depth):
            shaped = shape(self._law([*known, *path]), ask.params, None if ask.params.plain else history.extended(path))
            path.append(shaped.choose(ask.seed, ask.position + depth, ask.choice))
        return path


class ReferenceOracle:
    """Reads the target's tokens from texts produced before: sequence id -> all its tokens, prompt included."""

    def __init__(self, texts: Mapping[str, Sequence[int]]) -> None:
        self._texts = texts

    def see(self, ask: DraftRequest, known: Sequence[int], prompt: int) -> list[int]:
        return list(self._texts[ask.seq_id][ask.position : ask.position + ask.depth])


class _Remembering:
    """Keeps every sequence's known tokens; what the drafters below share."""

    name = "remembering"
    default_depth = 4
    max_depth = 8
    samples = False
    makes_trees = False

    def __init__(self) -> None:
        self.known: dict[str, list[int]] = {}
        self.prompts: dict[str, int] = {}

    def begin(self, sequence: str, tokens: Sequence[int], params: SamplingParams) -> None:
        self.known[sequence] = list(tokens)
        self.prompts[sequence] = len(tokens)

    def observe(self, output: TargetOutput) -> None:
        pass

    def accept(self, sequence: str, tokens: Sequence[int]) -> None:
        self.known[sequence].extend(tokens)

    def end(self, sequence: str) -> None:
        self.known.pop(sequence, None)
        self.prompts.pop(sequence, None)

    def propose(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: DraftRequest) -> Draft:
        return Draft(ask.seq_id, drafter=self.name)

    def _random(self, ask: DraftRequest) -> random.Random:
        return random.Random(f"{ask.seq_id}/{ask.position}")

    def _see(self, seer: Seer, ask: DraftRequest) -> list[int]:
        return seer.see(ask, self.known[ask.seq_id], self.prompts[ask.seq_id])


class OracleDrafter(_Remembering):
    """Always right: every guess is the token the target will say."""

    name = "oracle"

    def __init__(self, seer: Seer) -> None:
        super().__init__()
        self._seer = seer

    def _draft(self, ask: DraftRequest) -> Draft:
        guesses = self._see(self._seer, ask)
        return Draft.chain(ask.seq_id, guesses, drafter=self.name, scores=[1.0] * len(guesses))


class AdversaryDrafter(_Remembering):
    """Always wrong. With a seer that is a promise: no guess equals the target's token at its position.

    Without one (any model) it guesses the vocabulary's last ids, ids drawn at random and repetitions of the last
    token; a few may be right by chance. It always claims to be certain.
    """

    name = "adversary"

    def __init__(self, vocab: int, *, seer: Seer | None = None) -> None:
        super().__init__()
        self._vocab = vocab
        self._seer = seer

    def _draft(self, ask: DraftRequest) -> Draft:
        rng = self._random(ask)
        right = self._see(self._seer, ask) if self._seer else []
        guesses = []
        for depth in range(ask.depth):
            options = (self._vocab - 1 - depth % self._vocab, rng.randrange(self._vocab), self.known[ask.seq_id][-1])
            guess = rng.choice(options)
            if depth < len(right) and guess == right[depth]:
                guess = (guess + 1) % self._vocab
            guesses.append(guess)
        return Draft.chain(ask.seq_id, guesses, drafter=self.name, scores=[1.0] * len(guesses))


class SetAcceptanceDrafter(_Remembering):
    """Right with probability `rates[d - 1]` at depth d, given that it was right above (the last rate goes on)."""

    name = "set"

    def __init__(self, vocab: int, rates: Sequence[float], *, seer: Seer) -> None:
        super().__init__()
        self._vocab = vocab
        self._rates = tuple(rates)
        self._seer = seer

    def _draft(self, ask: DraftRequest) -> Draft:
        rng = self._random(ask)
        guesses, scores, survival = self._see(self._seer, ask), [], 1.0
        for depth, right in enumerate(guesses):
            rate = self._rates[min(depth, len(self._rates) - 1)]
            survival *= rate
            scores.append(survival)
            if rng.random() >= rate:
                guesses[depth] = (right + 1 + rng.randrange(self._vocab - 1)) % self._vocab
        return Draft.chain(ask.seq_id, guesses, drafter=self.name, scores=scores)


class RandomTreeDrafter(_Remembering):
    """Trees of random shape, at most `ask.depth` nodes, siblings distinct.

    Some guesses are plausible: what followed an earlier occurrence of the token before and, with a seer, often the
    right one, so that accepted paths lie scattered among rejected rows.
    """

    name = "random-tree"
    makes_trees = True

    def __init__(self, vocab: int, *, seer: Seer | None = None) -> None:
        super().__init__()
        self._vocab = vocab
        self._seer = seer

    def _draft(self, ask: DraftRequest) -> Draft:
        rng = self._random(ask)
        known = self.known[ask.seq_id]
        right = self._see(self._seer, ask) if self._seer else []
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        trunk = {-1}  # nodes whose whole path is right
        for _ in range(rng.randint(0, ask.depth)):
            parent = rng.randint(-1, len(tokens) - 1) if rng.random() < 0.6 else len(tokens) - 1
            depth = 1 if parent < 0 else depths[parent] + 1
            certain = right[depth - 1] if parent in trunk and depth <= len(right) else None
            token = self._guess(rng, known, tokens[parent] if parent >= 0 else known[-1], right=certain)
            if any(t == token and p == parent for t, p in zip(tokens, parents, strict=True)):
                continue
            if certain == token:
                trunk.add(len(tokens))
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
        scores = tuple(0.5**depth for depth in depths)
        return Draft(ask.seq_id, tuple(tokens), tuple(parents), scores, self.name)

    def _guess(self, rng: random.Random, known: Sequence[int], before: int, *, right: int | None) -> int:
        if right is not None and rng.random() < 0.7:
            return right
        followers = [known[i + 1] for i in range(max(0, len(known) - 256), len(known) - 1) if known[i] == before]
        if followers and rng.random() < 0.7:
            return rng.choice(followers)
        return rng.randrange(self._vocab)
