"""The texts of the lookup drafters in Python: the reference of csrc/lookup.h.

draft/lookup.py says what they do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from heapq import heappop, heappush
from itertools import count
from math import inf
from operator import add
from typing import NamedTuple

from oracle.corpus import PythonCorpus
from oracle.coupling import coupled_guesses
from oracle.suffix_tree import Followers, SuffixCounts
from wager.draft.guessing import draws
from wager.draft.lookup import (
    LEARNED,
    MOST_CERTAIN,
    OTHER_WEIGHTS,
    PRIOR_WEIGHT,
    SAMPLED_WEIGHTS,
    LookupSources,
    prior_rates,
)
from wager.draft.ngram import MIN_SURVIVAL
from wager.draft.store_file import _SMOOTHING, LONGEST
from wager.types import Draft, DraftRequest

CONTINUATIONS = 4  # of one source in a tree of guesses
MATCHES = 8  # longer matches count as this long
PROBABILITY_CELLS = 16
INTERPOLATED = 5  # tokens of the contexts in earlier texts after which probabilities are interpolated
SHARED_CELL = 4 * MATCHES
STORE_CELL = SHARED_CELL + PROBABILITY_CELLS
LONG_CELL = STORE_CELL + PROBABILITY_CELLS
LEARNED_CELL = LONG_CELL + 4 * (MATCHES - INTERPOLATED)
LEARNED_LONG_CELL = LEARNED_CELL + PROBABILITY_CELLS
AGREEING = LEARNED_LONG_CELL + 4 * (MATCHES - INTERPOLATED) - LEARNED_CELL  # from a cell to the one where others agree
SHORTEST = 2  # run in what was learned
ONCE, ALWAYS, MOSTLY, LESS = range(4)  # how often something followed, and how often this


class PythonLookupTable:
    """The same in Python."""

    def __init__(self, name: str, sources: LookupSources, *, trees: bool = False) -> None:
        self._name, self._trees = name, trees
        self._sources = sources if sources.longest else sources._replace(shared_tokens=0)
        self._texts: dict[str, _Text] = {}
        self._shared = SharedTexts(self._sources)

    def read(self, corpus: PythonCorpus) -> None:
        self._shared.corpus = corpus

    def begin(self, seq_id: str, tokens: Sequence[int], prediction: Sequence[int], /) -> None:
        self._texts[seq_id] = _Text(self._sources, self._shared, list(tokens), list(prediction))

    def accept(self, seq_id: str, tokens: Sequence[int], /) -> None:
        self._texts[seq_id].unindexed += tokens

    def end(self, seq_id: str, /) -> None:
        text = self._texts.pop(seq_id, None)
        if text is not None and self._sources.shared_tokens:
            self._shared.end(text.generated())

    def propose(self, requests: Sequence[DraftRequest], /) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        text = self._texts[request.seq_id]
        self._shared.absorb()
        text.catch_up()
        if self._trees:
            tokens, parents, scores = text.draft_tree(request)
            return Draft(request.seq_id, tuple(tokens), tuple(parents), tuple(scores), self._name)
        chain, survival = text.draft(request)
        return Draft.chain(request.seq_id, chain, drafter=self._name, scores=survival)


class SharedTexts:
    """What ended requests generated: the latest texts, of at most `shared_tokens` tokens together."""

    def __init__(self, sources: LookupSources) -> None:
        self.counts = SuffixCounts(sources.longest)
        self.corpus = PythonCorpus([])  # of older texts
        self.wrong = [Mean(1.0 - rate, LEARNED.prior_weight) for rate in prior_rates()]
        self.gain = Mean(LEARNED.first_gain, LEARNED.gain_weight)
        self._most = sources.shared_tokens
        self._texts: deque[list[int]] = deque()
        self._waiting: deque[list[int]] = deque()

    def end(self, text: list[int]) -> None:
        """A text ended; it waits until a draft is requested."""
        if text:
            self._waiting.append(text[-self._most :])
        while sum(map(len, self._waiting)) > self._most:
            self._waiting.popleft()

    def absorb(self) -> None:
        """Add one of the texts that wait, and take out the oldest ones where there are too many tokens."""
        if self._waiting:
            self._texts.append(self._waiting.popleft())
            while sum(map(len, self._texts)) > self._most:
                self.counts.remove(self._texts.popleft())
            self.counts.add(self._texts[-1])

    def interpolated(self, text: Sequence[int]) -> list[tuple[int, float]]:
        """What followed in the tree, the likeliest first."""
        return interpolated(self.counts.latest_of, text)


class Mean:
    """See LookupMean of csrc/shared_texts.h."""

    def __init__(self, value: float, observed: float) -> None:
        self.value, self._observed = value, observed

    def observe(self, value: float, amount: float = 1.0, remembered: float = inf) -> None:
        self._observed = min(self._observed + amount, remembered)
        self.value += (value - amount * self.value) / self._observed


def interpolated(
    followers: Callable[[Sequence[int]], Iterable[tuple[int, float]]], text: Sequence[int]
) -> list[tuple[int, float]]:
    """What followed the last 1 to INTERPOLATED tokens, the likeliest first; the probability after m tokens is
    interpolated with that after m - 1, as in a store."""
    lower: dict[int, float] = {}
    for size in range(1, min(INTERPOLATED, len(text)) + 1):
        counts: dict[int, float] = {}
        for token, times in followers(text[-size:]):
            counts[token] = counts.get(token, 0.0) + times
        if not counts:
            break
        pull = _SMOOTHING * len(counts)
        total = reduce(add, counts.values()) + pull
        for token, probability in lower.items():
            counts[token] = counts.get(token, 0.0) + pull * probability
        lower = {token: count / total for token, count in counts.items()}
    return sorted(lower.items(), key=lambda item: -item[1])


class LookupGuess(NamedTuple):
    """What a source guesses next; its acceptance rate is that of the cell. `others`: other continuations, and how
    frequent each is beside this one. `weight`: of these, see OTHER_WEIGHTS."""

    token: int
    cell: int
    weight: float
    others: tuple[tuple[int, float], ...] = ()


class _Text:
    """One sequence: its tokens, its tree, and how often each source predicts them."""

    def __init__(self, sources: LookupSources, shared: SharedTexts, prompt: list[int], prediction: list[int]) -> None:
        self.unindexed: list[int] = []  # known tokens that are not in the tree yet
        self._sources, self._shared, self._prompt, self._prediction = sources, shared, prompt, prediction
        self._counts = SuffixCounts(sources.longest)
        self._tokens: list[int] = []
        self._wrong = [
            Mean(mean.value, PRIOR_WEIGHT if cell < LEARNED_CELL else LEARNED.prior_weight)
            for cell, mean in enumerate(shared.wrong)
        ]
        self._gain = Mean(shared.gain.value, LEARNED.gain_weight)
        self._looks = False  # what was learned is looked up at the end of the text
        self._generated = 0

    def catch_up(self) -> None:
        """Index the prompt if that was not done; then learn from each new token, and index it."""
        if self._prompt:
            self._counts.add(self._prediction)  # a text of its own
            for token in self._prompt:
                self._append(token)
            self._generated, self._prompt = len(self._tokens), []
            self._look()
        for token in self.unindexed:
            self._learn(self._guesses(self._tokens, looks=self._looks), token)
            self._append(token)
            self._look()
        self.unindexed.clear()

    def _learn(self, guesses: Sequence[LookupGuess], token: int) -> None:
        """Learn how often the sources are wrong, and what the tenant's learned texts add."""
        others = [guess for guess in guesses if guess.cell < LEARNED_CELL]
        gain = 0.0
        for guess in guesses[len(others) :]:
            gain = self._worth(guesses, token) - self._worth(others, token)
            said, wrong = self._wrong_of(others).get(guess.token, 1.0), float(guess.token != token)
            agree = [(guess.cell + AGREEING, said)] if any(other.token == guess.token for other in others) else []
            for cell, amount in [(guess.cell, 1.0), *agree]:
                self._wrong[cell].observe(wrong, amount)
                self._shared.wrong[cell].observe(wrong, amount, LEARNED.remembered)
        if self._looks:
            self._gain.observe(gain, remembered=2 * LEARNED.gain_weight)
            self._shared.gain.observe(gain, remembered=LEARNED.remembered)
        for guess in others:
            self._wrong[guess.cell].observe(float(guess.token != token))

    def _worth(self, guesses: Sequence[LookupGuess], token: int) -> float:
        likeliest, probability = max(self._named(guesses).items(), key=lambda item: item[1], default=(-1, 0.0))
        return probability * ((likeliest == token) - probability / 2)

    def _is_useful(self) -> bool:
        learns = self._sources.shared_tokens and not self._shared.corpus.is_empty
        return bool(learns) and self._gain.value >= LEARNED.least_gain

    def _look(self) -> None:
        learns = self._sources.shared_tokens and not self._shared.corpus.is_empty
        self._looks = self._is_useful() or (bool(learns) and len(self._tokens) % LEARNED.rest == 0)

    def _looks_at(self, text: Sequence[int]) -> bool:
        return self._looks if len(text) == len(self._tokens) else self._is_useful()

    def draft(self, request: DraftRequest) -> tuple[list[int], list[float]]:
        """The guesses of a chain and their survival."""
        tokens: list[int] = []
        survival: list[float] = []
        text, reached = [*self._tokens, *request.after], 1.0
        while len(tokens) < request.depth:
            if draws(request) or request.params.greedy:
                named = self._named(self._guesses(text, looks=self._looks_at(text)))
            else:
                named = self._coupled(text, request, len(tokens))
            token, probability = max(named.items(), key=lambda item: item[1], default=(-1, 0.0))
            reached *= probability
            if reached < MIN_SURVIVAL:
                break
            tokens.append(token)
            survival.append(reached)
            text.append(token)
        return tokens, survival

    def draft_tree(self, request: DraftRequest) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and survival of the likeliest nodes of a tree, each after its parent."""
        tokens: list[int] = []
        parents: list[int] = []
        survival: list[float] = []
        open_nodes: list[tuple[float, int, int, list[int]]] = []  # -survival, number, parent, the text with the token
        numbers = count()

        def expand(text: list[int], parent: int, reached: float) -> None:
            if draws(request) or request.params.greedy:
                likely = self._continuations(self._guesses(text, looks=self._looks_at(text)))
            else:
                likely = self._coupled(text, request, len(text) - len(self._tokens) - len(request.after))
            for token, probability in likely.items():
                if reached * probability >= MIN_SURVIVAL:
                    heappush(open_nodes, (-reached * probability, next(numbers), parent, [*text, token]))

        expand([*self._tokens, *request.after], -1, 1.0)
        while open_nodes and len(tokens) < request.depth:
            negative, _, parent, text = heappop(open_nodes)
            tokens.append(text[-1])
            parents.append(parent)
            survival.append(-negative)
            expand(text, len(tokens) - 1, -negative)
        return tokens, parents, survival

    def _continuations(self, guesses: Sequence[LookupGuess]) -> dict[int, float]:
        """The tokens that the sources name, and their other continuations: as much less likely as they were less
        frequent, and the less likely the surer the source is of what it names, see OTHER_WEIGHTS."""
        likely = self._named(guesses)
        for guess, named in [(guess, likely[guess.token]) for guess in guesses]:
            others = [(token, share) for token, share in guess.others if token != guess.token]
            every = reduce(add, (share for _, share in others), 1.0)
            most = guess.weight * named * (1.0 - named) / every
            for token, share in others:
                likely.setdefault(token, min(named, most) * share)
        return likely

    def _coupled(self, text: Sequence[int], request: DraftRequest, ahead: int) -> dict[int, float]:
        """Every token that a source has seen after an ending of the text, and its probability under the noise."""
        masses: dict[int, float] = {}
        own, shared, stored, learned = SAMPLED_WEIGHTS
        trees = [(own, self._counts)] if self._sources.longest else []
        if self._sources.shared_tokens:
            trees.append((shared, self._shared.counts))
        for weight, counts in trees:
            for followers in counts.latest(text):
                for token, often in followers:
                    masses[token] = masses.get(token, 0.0) + weight * often / len(followers)
        for guess in self._of_learned(text) if self._looks_at(text) else []:
            mass = learned * (1.0 - self._wrong[guess.cell].value)
            for token, share in [(guess.token, 1.0), *guess.others]:
                masses[token] = masses.get(token, 0.0) + mass * share
        if self._sources.store is not None:
            for size in range(1, min(len(text), LONGEST) + 1):
                for token, probability in self._sources.store.of_context(text[-size:])[:CONTINUATIONS]:
                    masses[token] = masses.get(token, 0.0) + stored * probability / 255
        return coupled_guesses(masses, request, ahead)

    def _named(self, guesses: Sequence[LookupGuess]) -> dict[int, float]:
        """The tokens that the sources name, with their probabilities. They compete by their odds."""
        odds = {token: 1.0 / min(chance, 1.0) - 1.0 for token, chance in self._wrong_of(guesses).items()}
        total = reduce(add, odds.values(), 1.0)
        return {token: each / total for token, each in odds.items()}

    def _wrong_of(self, guesses: Sequence[LookupGuess]) -> dict[int, float]:
        """The probability that each token is wrong. Sources that agree are wrong together as if independently; of what
        was learned, it is known how much less often others are wrong where it agrees with them."""
        wrong: dict[int, float] = {}
        for guess in guesses:
            if guess.cell >= LEARNED_CELL and guess.token in wrong:
                wrong[guess.token] *= self._wrong[guess.cell + AGREEING].value
            else:
                rate = max(self._wrong[guess.cell].value, 1.0 - MOST_CERTAIN)
                wrong[guess.token] = wrong.get(guess.token, 1.0) * rate
        return wrong

    def generated(self) -> list[int]:
        """The tokens that were generated, with the last ones of the prompt before them; nothing if no draft was ever
        requested."""
        before = min(self._generated, self._sources.longest)
        text = [*self._tokens[self._generated - before :], *self.unindexed]
        return text if not self._prompt and len(text) > before else []

    def _append(self, token: int) -> None:
        if self._sources.longest:
            self._counts.append(self._tokens[-self._sources.longest :], token)
        self._tokens.append(token)

    def _guesses(self, text: Sequence[int], *, looks: bool) -> list[LookupGuess]:
        """What each source guesses after `text`, in their order, without those that know nothing."""
        own, shared, stored, _ = OTHER_WEIGHTS
        guesses = []
        if self._sources.longest:
            guesses += _guess_of(self._counts.followers(text[-self._sources.longest :]), 0, own)
        if self._sources.shared_tokens:
            found = self._shared.counts.followers(text[-self._sources.longest :])
            if found.length > INTERPOLATED:
                guesses += _guess_of(found, LONG_CELL - 4 * INTERPOLATED, shared)
            elif likely := self._shared.interpolated(text):
                guesses.append(_by_probability(likely, SHARED_CELL, shared))
        if self._sources.store is not None:
            _, continuations = self._sources.store.continuations(text[-5:])
            if continuations:
                likely = [(token, probability / 256) for token, probability in continuations]
                guesses.append(_by_probability(likely, STORE_CELL, stored))
        return [*guesses, *self._of_learned(text)] if looks else guesses

    def _of_learned(self, text: Sequence[int]) -> list[LookupGuess]:
        corpus, weight = self._shared.corpus, OTHER_WEIGHTS[-1]
        length, found = corpus.find(text, SHORTEST)
        if length > INTERPOLATED:
            followers = Followers(length, sum(times for _, times in found), tuple(found), tuple(found))
            [guess] = _guess_of(followers, LEARNED_LONG_CELL - 4 * INTERPOLATED, weight)
            return [guess._replace(others=guess.others[1:])]
        if not length:
            return []
        return [_by_probability(interpolated(corpus.followers, text), LEARNED_CELL, weight)]


def _by_probability(likely: Sequence[tuple[int, float]], first_cell: int, weight: float) -> LookupGuess:
    """Of tokens with their probabilities, the likeliest first."""
    (token, probability), *others = likely[:CONTINUATIONS]
    cell = first_cell + min(int(probability * PROBABILITY_CELLS), PROBABILITY_CELLS - 1)
    return LookupGuess(token, cell, weight, tuple((other, each / probability) for other, each in others))


def _guess_of(found: Followers, first_cell: int, weight: float) -> list[LookupGuess]:
    length, seen, followers, latest = found
    if not length:
        return []
    token, often = followers[0]
    others = tuple((other, times / often) for other, times in latest[:CONTINUATIONS])
    kind = ONCE if seen == 1 else ALWAYS if often == seen else MOSTLY if 2 * often > seen else LESS
    return [LookupGuess(token, first_cell + 4 * (min(length, MATCHES) - 1) + kind, weight, others)]
