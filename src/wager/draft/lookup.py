"""Lookup drafters: the guesses are what followed the last tokens elsewhere. They need no pass of any model.

There are three sources: the text itself (prompt and output), the outputs of requests that ended, and a static store.
The first two are suffix trees (suffix_tree.py), which know what followed every run of tokens, and how often; the third
is a file (store_file.py). At every place of a draft each source names a token, and the likeliest one is guessed.

How sure a source is, is an acceptance rate that is learned: for a tree by the length of the match and by how often
something followed it and how often this, for a store by the probability that it states. Each sequence starts from the
same prior and learns from every token that becomes known, whether or not anything was drafted, so drafting stops for a
sequence that is never predicted, and can start again. Sources that agree make each other surer, and those that do not
less sure. The probabilities along a draft, multiplied, are its survival.

Known tokens are indexed only when a draft is requested, so a drafter that is not used takes hardly any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from wager.draft.store_file import StoreFile
from wager.draft.suffix_tree import SuffixCounts
from wager.errors import UsageError
from wager.kernels.base import TargetOutput
from wager.types import Draft, DraftRequest, SamplingParams

MOST_LONGEST = 24
"""The longest match that a tree can look up."""

DEFAULT_LONGEST = 5
SHARED_TOKENS = 1 << 15
"""Tokens of ended requests that are kept: with matches of 5 tokens in at most 9 MB."""

MIN_SURVIVAL = 0.06
"""Guesses of lower survival are not made, as in draft/ngram.py."""

PRIOR_WEIGHT = 20.0
"""How many observations a prior counts for."""

MOST_CERTAIN = 0.995
"""The greatest acceptance rate that one source is believed to have."""

_MATCHES = 8  # longer matches count as this long
_STORE_CELLS = 16

_ONCE, _ALWAYS, _MOSTLY, _LESS = range(4)  # how often something followed, and how often this

OWN_PRIOR = (
    (0.32, 0.64, 0.41, 0.16),
    (0.57, 0.77, 0.45, 0.26),
    (0.67, 0.82, 0.47, 0.26),
    (0.72, 0.83, 0.48, 0.32),
    (0.73, 0.90, 0.58, 0.30),
    (0.77, 0.93, 0.58, 0.32),
    (0.79, 0.93, 0.60, 0.40),
    (0.87, 0.99, 0.80, 0.44),
)
"""Probability that the most frequent follower is right, by the length of the match (1 to 8 or more tokens) and by
whether something followed it once, always the same, mostly this, or less. Of the text itself (SmolLM2-135M, greedy)."""

SHARED_PRIOR = (
    (0.12, 0.18, 0.23, 0.17),
    (0.21, 0.43, 0.48, 0.11),
    (0.36, 0.52, 0.27, 0.20),
    (0.30, 0.63, 0.33, 0.16),
    (0.42, 0.55, 0.52, 0.14),
    (0.51, 0.70, 0.52, 0.17),
    (0.52, 0.78, 0.45, 0.20),
    (0.50, 0.93, 0.68, 0.18),
)
"""The same, of 25,000 tokens of answers to other prompts."""

STORE_PRIOR = (0.04, 0.10, 0.15, 0.18, 0.23, 0.30, 0.36, 0.42, 0.46, 0.54, 0.61, 0.66, 0.69, 0.76, 0.85, 0.93)
"""By the probability that the store states, in sixteenths."""


class LookupSources(NamedTuple):
    """Where a drafter looks: in trees of matches of `longest` tokens (0: in none), of the text itself and of
    `shared_tokens` tokens of requests that ended (0: of none), and in a store."""

    longest: int = 0
    shared_tokens: int = 0
    store: StoreFile | None = None


class LookupDrafter:
    """Guesses from the `sources`; its drafts are chains. UsageError if `longest` is not between 0 and MOST_LONGEST."""

    default_depth = 7
    max_depth = 15
    samples = False
    makes_trees = False

    def __init__(self, name: str, sources: LookupSources) -> None:
        if not 0 <= sources.longest <= MOST_LONGEST:
            raise UsageError(f"{name}:{sources.longest} is out of range.", f"Look up 1 to {MOST_LONGEST} tokens.")
        self.name = name
        self._table = lookup_table(name, sources)

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams) -> None:
        """Keep the prompt for the index; no rate is learned from it, since the target did not generate it."""
        self._table.begin(seq_id, tokens)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One chain per request, or an empty draft where nothing is known."""
        return self._table.propose(requests)

    def observe(self, output: TargetOutput) -> None:
        """Ignored: the target's output is not used."""

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        """Keep what became known for the index."""
        self._table.accept(seq_id, tokens)

    def end(self, seq_id: str) -> None:
        """What the sequence generated is kept for others."""
        self._table.end(seq_id)


class LookupTexts(Protocol):
    """The texts of all sequences."""

    def begin(self, seq_id: str, tokens: Sequence[int], /) -> None: ...

    def accept(self, seq_id: str, tokens: Sequence[int], /) -> None: ...

    def end(self, seq_id: str, /) -> None: ...

    def propose(self, requests: Sequence[DraftRequest], /) -> list[Draft]: ...


def prior_rates() -> list[float]:
    """The prior of every cell: of the text's own tree, of the shared one, of the store."""
    trees = [rate for table in (OWN_PRIOR, SHARED_PRIOR) for row in table for rate in row]
    return [*trees, *STORE_PRIOR]


def lookup_table(name: str, sources: LookupSources) -> LookupTexts:
    """In C++ (csrc/lookup.h) where the native kernels are there; in Python a draft takes a hundred times as long."""
    try:
        from wager.kernels import _native
    except ImportError:
        return PythonLookupTable(name, sources)
    store = sources.store
    return _native.LookupTable(
        Draft,
        name,
        longest=sources.longest,
        shared_tokens=sources.shared_tokens,
        prior=prior_rates(),
        prior_weight=PRIOR_WEIGHT,
        min_survival=MIN_SURVIVAL,
        most_certain=MOST_CERTAIN,
        slots=None if store is None else store.slots,
        homes=0 if store is None else store.header.homes,
    )


class PythonLookupTable:
    """The same in Python."""

    def __init__(self, name: str, sources: LookupSources) -> None:
        self._name = name
        self._sources = sources if sources.longest else sources._replace(shared_tokens=0)
        self._texts: dict[str, _Text] = {}
        self._shared = SharedTexts(self._sources)

    def begin(self, seq_id: str, tokens: Sequence[int], /) -> None:
        self._texts[seq_id] = _Text(self._sources, self._shared, list(tokens))

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
        tokens, scores = text.draft(request.depth)
        return Draft.chain(request.seq_id, tokens, drafter=self._name, scores=scores)


class SharedTexts:
    """What ended requests generated: the latest texts, of at most `shared_tokens` tokens together."""

    def __init__(self, sources: LookupSources) -> None:
        self.counts = SuffixCounts(sources.longest)
        self._most = sources.shared_tokens
        self._texts: deque[list[int]] = deque()
        self._waiting: deque[list[int]] = deque()

    def end(self, text: list[int]) -> None:
        """A text ended; it waits until a draft is requested."""
        if text:
            self._waiting.append(text[-self._most :])
        _keep_latest(self._waiting, self._most)

    def absorb(self) -> None:
        """Add one of the texts that wait, and take out the oldest ones where there are too many tokens."""
        if self._waiting:
            self._texts.append(self._waiting.popleft())
            for text in _keep_latest(self._texts, self._most):
                self.counts.remove(text)
            self.counts.add(self._texts[-1])


def _keep_latest(texts: deque[list[int]], most: int) -> list[list[int]]:
    """Remove the oldest texts until there are at most `most` tokens; those that were removed."""
    removed = []
    while sum(map(len, texts)) > most:
        removed.append(texts.popleft())
    return removed


@dataclass(frozen=True, slots=True)
class LookupGuess:
    """What a source guesses next; its acceptance rate is that of the cell."""

    token: int
    cell: int


class _Text:
    """One sequence: its tokens, its tree, and how often each source predicts them."""

    def __init__(self, sources: LookupSources, shared: SharedTexts, prompt: list[int]) -> None:
        self.unindexed: list[int] = []  # known tokens that are not in the tree yet
        self._sources, self._shared, self._prompt = sources, shared, prompt
        self._counts = SuffixCounts(sources.longest)
        self._tokens: list[int] = []
        self._rates = prior_rates()
        self._tried = [PRIOR_WEIGHT] * len(self._rates)
        self._generated = 0

    def catch_up(self) -> None:
        """Index the prompt if that was not done; then learn from each new token, and index it."""
        if self._prompt:
            for token in self._prompt:
                self._append(token)
            self._generated, self._prompt = len(self._tokens), []
        for token in self.unindexed:
            for guess in self._guesses(self._tokens):
                self._tried[guess.cell] += 1
                self._rates[guess.cell] += ((guess.token == token) - self._rates[guess.cell]) / self._tried[guess.cell]
            self._append(token)
        self.unindexed.clear()

    def draft(self, depth: int) -> tuple[list[int], list[float]]:
        """At most `depth` guesses and their survival."""
        tokens: list[int] = []
        survival: list[float] = []
        text, reached = list(self._tokens), 1.0
        while len(tokens) < depth:
            token, probability = self._likeliest(self._guesses(text))
            reached *= probability
            if reached < MIN_SURVIVAL:
                break
            tokens.append(token)
            survival.append(reached)
            text.append(token)
        return tokens, survival

    def _likeliest(self, guesses: Sequence[LookupGuess]) -> tuple[int, float]:
        """The likeliest token and its probability. Sources that agree are wrong together as if independently; tokens
        compete by their odds."""
        wrong: dict[int, float] = {}
        for guess in guesses:
            rate = min(self._rates[guess.cell], MOST_CERTAIN)
            wrong[guess.token] = wrong.get(guess.token, 1.0) * (1.0 - rate)
        best, highest, total = -1, 0.0, 1.0
        for token, chance in wrong.items():
            odds = 1.0 / chance - 1.0
            total += odds
            if odds > highest:
                best, highest = token, odds
        return best, highest / total

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

    def _guesses(self, text: Sequence[int]) -> list[LookupGuess]:
        """What each source guesses after `text`, in their order, without those that know nothing."""
        guesses = []
        if self._sources.longest:
            guesses += _guess_of_tree(self._counts, text, self._sources.longest, first_cell=0)
        if self._sources.shared_tokens:
            cells = 4 * _MATCHES
            guesses += _guess_of_tree(self._shared.counts, text, self._sources.longest, first_cell=cells)
        if self._sources.store is not None:
            _, found = self._sources.store.continuations(text[-5:])
            if found:
                cell = 8 * _MATCHES + found[0].probability * _STORE_CELLS // 256
                guesses.append(LookupGuess(found[0].token, cell))
        return guesses


def _guess_of_tree(counts: SuffixCounts, text: Sequence[int], longest: int, *, first_cell: int) -> list[LookupGuess]:
    length, seen, followers = counts.followers(text[-longest:])
    if not length:
        return []
    token, count = followers[0]
    kind = _ONCE if seen == 1 else _ALWAYS if count == seen else _MOSTLY if 2 * count > seen else _LESS
    return [LookupGuess(token, first_cell + 4 * (min(length, _MATCHES) - 1) + kind)]
