"""Drafters of known acceptance, always wrong ones and faulty ones, and oracles that know what the target will emit.

`wager prove` tries PROOF_DRAFTERS, which are given the plain texts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from wager.kernels.base import TargetOutput
from wager.testing.toy import ToyDistribution
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams
from wager.verify.distribution import History, process


class TargetOracle(Protocol):
    """The tokens that the target will emit, known in advance."""

    def next_tokens(self, request: DraftRequest, known: Sequence[int], prompt_tokens: int) -> list[int]:
        """The target's next tokens, at most `request.depth`, after `known`, of which the first `prompt_tokens` are the
        prompt."""


class ReferenceOracle:
    """Reads the target's tokens from `texts` produced before: sequence id -> all its tokens, the prompt's included."""

    def __init__(self, texts: Mapping[str, Sequence[int]]) -> None:
        self.texts = texts

    def next_tokens(self, request: DraftRequest, known: Sequence[int], prompt_tokens: int) -> list[int]:
        return list(self.texts[request.seq_id][request.position : request.position + request.depth])


class ToyOracle:
    """Computes the toy target's tokens from its distribution, with the same processors and the same noise."""

    def __init__(self, distribution: ToyDistribution) -> None:
        self._distribution = distribution

    def next_tokens(self, request: DraftRequest, known: Sequence[int], prompt_tokens: int) -> list[int]:
        history = History.of(known[:prompt_tokens], request.params)
        if history is not None:
            history.append(known[prompt_tokens:])
        path: list[int] = []
        for depth in range(request.depth):
            logits = self._distribution([*known, *path])
            distribution = process(logits, request.params, history and history.extended(path))
            path.append(distribution.choose(request.seed, request.position + depth, request.choice))
        return path


class HistoryDrafter:
    """A drafter that keeps the known tokens of every sequence; subclasses implement `_draft`; the default declines.

    `oracle` gives the tokens that the target will emit, for proofs and tests (None: there is no oracle).
    """

    name = "history"
    default_depth = 4
    max_depth = 8
    samples = False
    makes_trees = False
    continues = False
    weighs_prices = False

    def __init__(self, *, oracle: TargetOracle | None = None) -> None:
        self.known: dict[str, list[int]] = {}
        self.prompt_tokens: dict[str, int] = {}
        self._oracle = oracle

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        self.known[seq_id] = list(tokens)
        self.prompt_tokens[seq_id] = len(tokens)

    def observe(self, output: TargetOutput) -> None:
        """Ignored: the target's output is not used."""

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        self.known[seq_id].extend(tokens)

    def end(self, seq_id: str) -> None:
        self.known.pop(seq_id, None)
        self.prompt_tokens.pop(seq_id, None)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        return Draft(request.seq_id, drafter=self.name)

    def _random(self, request: DraftRequest) -> random.Random:
        """The same random numbers whenever a draft at the same position is requested."""
        return random.Random(f"{request.seq_id}/{request.position}")

    def _next_tokens(self, request: DraftRequest) -> list[int]:
        """The target's next tokens by the oracle; none without an oracle."""
        if self._oracle is None:
            return []
        name = request.seq_id
        return self._oracle.next_tokens(request, self.known[name], self.prompt_tokens[name])


class VocabularyDrafter(HistoryDrafter):
    """One that also knows the number of the target's logits."""

    def __init__(self, vocab: int, *, oracle: TargetOracle | None = None) -> None:
        super().__init__(oracle=oracle)
        self._vocab = vocab


class OracleDrafter(HistoryDrafter):
    """Always right: every guess is the token the target will emit. `depth` is how many it makes by default."""

    name = "oracle"

    def __init__(self, oracle: TargetOracle, *, depth: int = HistoryDrafter.default_depth) -> None:
        super().__init__(oracle=oracle)
        self.default_depth, self.max_depth = depth, max(depth, self.max_depth)

    def _draft(self, request: DraftRequest) -> Draft:
        guesses = self._next_tokens(request)
        return Draft.chain(request.seq_id, guesses, drafter=self.name, scores=[1.0] * len(guesses))


class SetAcceptanceDrafter(VocabularyDrafter):
    """Right with probability `rates[d - 1]` at depth d, if all guesses above were right; the last rate holds below."""

    name = "set"

    def __init__(self, vocab: int, rates: Sequence[float], *, oracle: TargetOracle) -> None:
        super().__init__(vocab, oracle=oracle)
        self._rates = tuple(rates)

    def _draft(self, request: DraftRequest) -> Draft:
        rng = self._random(request)
        guesses, scores, survival = self._next_tokens(request), [], 1.0
        for depth, token in enumerate(guesses):
            rate = self._rates[min(depth, len(self._rates) - 1)]
            survival *= rate
            scores.append(survival)
            if rng.random() >= rate:
                guesses[depth] = (token + 1 + rng.randrange(self._vocab - 1)) % self._vocab
        return Draft.chain(request.seq_id, guesses, drafter=self.name, scores=scores)


class AdversaryDrafter(VocabularyDrafter):
    """Guesses ids from the end of the vocabulary, random ids and repetitions of the last token, always with score 1.

    With an oracle no guess equals the target's token at its position. Without one a few may happen to be right.
    """

    name = "adversary"

    def _draft(self, request: DraftRequest) -> Draft:
        rng, right = self._random(request), self._next_tokens(request)
        last = self.known[request.seq_id][-1]
        guesses = []
        for depth in range(request.depth):
            guess = rng.choice((self._vocab - 1 - depth % self._vocab, rng.randrange(self._vocab), last))
            if depth < len(right) and guess == right[depth]:
                guess = (guess + 1) % self._vocab
            guesses.append(guess)
        return Draft.chain(request.seq_id, guesses, drafter=self.name, scores=[1.0] * len(guesses))


_LOOKBACK = 256
"""Known tokens that are searched for an earlier occurrence of the token before a guess."""


class RandomTreeDrafter(VocabularyDrafter):
    """Trees of random shape, at most `request.depth` nodes, siblings distinct.

    Some guesses are plausible: what followed an earlier occurrence of the token before and, with an oracle, often the
    right one, so that accepted paths are scattered among rejected rows.
    """

    name = "random-tree"
    makes_trees = True

    def _draft(self, request: DraftRequest) -> Draft:
        rng, known, right = self._random(request), self.known[request.seq_id], self._next_tokens(request)
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        right_nodes = {-1}  # nodes whose whole path is right
        for _ in range(rng.randint(0, request.depth)):
            parent = rng.randint(-1, len(tokens) - 1) if rng.random() < 0.6 else len(tokens) - 1
            depth = 1 if parent < 0 else depths[parent] + 1
            certain = right[depth - 1] if parent in right_nodes and depth <= len(right) else None
            token = self._guess(rng, known, tokens[parent] if parent >= 0 else known[-1], right=certain)
            if any(t == token and p == parent for t, p in zip(tokens, parents, strict=True)):
                continue
            if certain == token:
                right_nodes.add(len(tokens))
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
        scores = tuple(0.5**depth for depth in depths)
        return Draft(request.seq_id, tuple(tokens), tuple(parents), scores, self.name)

    def _guess(self, rng: random.Random, known: Sequence[int], before: int, *, right: int | None) -> int:
        if right is not None and rng.random() < 0.7:
            return right
        earlier = range(max(0, len(known) - _LOOKBACK), len(known) - 1)
        followers = [known[i + 1] for i in earlier if known[i] == before]
        if followers and rng.random() < 0.7:
            return rng.choice(followers)
        return rng.randrange(self._vocab)


class OutsideVocabularyDrafter(VocabularyDrafter):
    """Guesses token ids outside the vocabulary: too large, and negative."""

    name = "outside"

    def _draft(self, request: DraftRequest) -> Draft:
        ids = (self._vocab, -1, self._vocab + 12345, -(2**31))
        return Draft.chain(request.seq_id, [ids[d % len(ids)] for d in range(request.depth)], drafter=self.name)


class OverlongDrafter(HistoryDrafter):
    """Guesses far more tokens than were requested."""

    name = "overlong"

    def _draft(self, request: DraftRequest) -> Draft:
        known, count = self.known[request.seq_id], 4 * request.depth + 3
        guesses = (known * (2 + count // len(known)))[:count]
        return Draft.chain(request.seq_id, guesses, drafter=self.name)


class DecliningDrafter(HistoryDrafter):
    """Declines every request."""

    name = "declining"


class DuplicateSiblingsDrafter(HistoryDrafter):
    """Guesses the same token in every child of the root."""

    name = "duplicates"
    makes_trees = True

    def _draft(self, request: DraftRequest) -> Draft:
        token, depth = self.known[request.seq_id][-1], request.depth
        return Draft(request.seq_id, (token,) * depth, (-1,) * depth, (1.0,) * depth, self.name)


class FailingDrafter(HistoryDrafter):
    """Answers `calls` requests, then raises from every call of `propose`."""

    name = "failing"

    def __init__(self, calls: int = 3, *, oracle: TargetOracle | None = None) -> None:
        super().__init__(oracle=oracle)
        self._calls = calls

    def _draft(self, request: DraftRequest) -> Draft:
        self._calls -= 1
        if self._calls < 0:
            raise RuntimeError("the drafter failed")
        guesses = self._next_tokens(request) or self.known[request.seq_id][-request.depth :]
        return Draft.chain(request.seq_id, guesses, drafter=self.name)


class GarbageDrafter(VocabularyDrafter):
    """Sound guesses with something wrong behind or about them, a kind of wrong for every request: ids that the
    vocabulary does not have, parents that are none, scores that are no probabilities, drafts far too long, of other
    sequences, of none, several of one, and a distribution of the wrong shape."""

    name = "garbage"
    makes_trees = True

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """More drafts, or fewer, than there are requests; some name sequences that do not exist or did not ask."""
        drafts = [draft for request in requests for draft in self._garbage(request)]
        strangers = [Draft.chain(name, [0, 1], drafter=self.name) for name in ("", "nobody#9", *self.known)]
        asked = {request.seq_id for request in requests}
        return drafts + [draft for draft in strangers if draft.seq_id not in asked]

    def _garbage(self, request: DraftRequest) -> list[Draft]:
        rng, name, depth = self._random(request), request.seq_id, request.depth
        last = self.known[name][-1]
        count = min(depth, 3)
        guesses = (self._next_tokens(request) or [last] * count)[:count]
        sound = Draft.chain(name, guesses, drafter=self.name, scores=[0.9] * len(guesses))
        wrong_id = rng.choice([self._vocab, -1, self._vocab + 12345, -(2**31), 2**31, 2**40, -(2**70), 2**70])
        parents = list(sound.parents)
        if parents:
            parents[rng.randrange(len(parents))] = rng.choice([count, count - 1, -2, 10**6, -(2**31), 2**40])
        no_probability = rng.choice([float("nan"), float("inf"), -float("inf"), 1.5, -0.5, 1e308])
        shape = rng.choice([(0, 0), (1, 1), (depth, self._vocab - 1), (depth + 7, self._vocab)])
        other = Draft.chain(name, [0] * depth, drafter=self.name)
        kinds = [
            [Draft.chain(name, [*guesses, wrong_id, *guesses], drafter=self.name)],
            [Draft(name, tuple(guesses), tuple(parents), (), self.name)],
            [replace(sound, parents=(-1,))],
            [replace(sound, parents=tuple(range(-1, 20)))],
            [replace(sound, scores=(no_probability,) * len(sound))],
            [replace(sound, scores=(1.0,))],
            [Draft.chain(name, [*guesses, *[last] * (50 * depth + 1000)], drafter=self.name)],
            [Draft(name, (last,) * depth, (-1,) * depth, (1.0,) * depth, self.name)],
            [replace(sound, seq_id=stranger) for stranger in self.known if stranger != name],
            [other, sound, other, Draft(name), sound],
            [],
            [replace(sound, drafter="someone else")],
            [replace(sound, draft_probs=np.full(shape, float("nan")))],
        ]
        return rng.choice(kinds)


PROOF_DRAFTERS: Mapping[str, Callable[[int, TargetOracle | None], HistoryDrafter]] = {
    "adversary": lambda vocab, oracle: AdversaryDrafter(vocab, oracle=oracle),
    "random-tree": lambda vocab, oracle: RandomTreeDrafter(vocab, oracle=oracle),
    "garbage": lambda vocab, oracle: GarbageDrafter(vocab, oracle=oracle),
    "failing": lambda vocab, oracle: FailingDrafter(calls=8, oracle=oracle),
}
"""The drafters that are made for proofs, by name: of the target's number of logits and an oracle."""
