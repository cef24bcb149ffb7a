"""Drafters of known acceptance and always wrong ones, and oracles that know what the target will emit.

`wager prove` tries PROOF_DRAFTERS, which are given the plain texts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from wager.draft.base import Drafter
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
    """Computes the toy target's tokens from its distribution, with the same processors and the same noise; each once,
    as long as what is known goes on as it said."""

    def __init__(self, distribution: ToyDistribution) -> None:
        self._distribution = distribution
        self._texts: dict[str, tuple[object, list[int]]] = {}  # by sequence, and what the tokens depend on

    def next_tokens(self, request: DraftRequest, known: Sequence[int], prompt_tokens: int) -> list[int]:
        given, end = (request.params, request.seed, request.choice, prompt_tokens), len(known)
        before, text = self._texts.get(request.seq_id, (None, []))
        if before != given or text[:end] != known:
            text = list(known)
            self._texts[request.seq_id] = given, text
        history = History.of(known[:prompt_tokens], request.params)
        if history is not None:
            history.append(text[prompt_tokens:])
        while len(text) < end + request.depth:
            distribution = process(self._distribution(text), request.params, history)
            text.append(distribution.choose(request.seed, len(text), request.choice))
            if history is not None:
                history.append(text[-1:])
        return text[end : end + request.depth]


class HistoryDrafter(Drafter):
    """A drafter that keeps the known tokens of every sequence; subclasses implement `_draft`; the default declines.

    `oracle` gives the tokens that the target will emit, for proofs and tests (None: there is no oracle).
    """

    name = "history"
    default_depth = 4
    max_depth = 8

    def __init__(self, *, oracle: TargetOracle | None = None) -> None:
        self.known: dict[str, list[int]] = {}
        self.prompt_tokens: dict[str, int] = {}
        self._oracle = oracle

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        self.known[seq_id] = list(tokens)
        self.prompt_tokens[seq_id] = len(tokens)

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


PROOF_DRAFTERS: Mapping[str, Callable[[int, TargetOracle | None], HistoryDrafter]] = {
    "adversary": lambda vocab, oracle: AdversaryDrafter(vocab, oracle=oracle),
    "random-tree": lambda vocab, oracle: RandomTreeDrafter(vocab, oracle=oracle),
}
"""The drafters that are made for proofs, by name: of the target's number of logits and an oracle."""
