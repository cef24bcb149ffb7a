"""Lookup drafters: the guesses are what followed the last tokens elsewhere. They need no pass of any model.

There are four sources: the text itself (prompt, output and what the user predicts the output to be), the outputs of
the tenant's requests that ended, a static store, and what was learned on disk (corpus/). The first two are suffix trees
(csrc/suffix_tree.h), which know what followed every run of tokens, and how often; the third is a file (store_file.py).
At every place of a draft each source names a token, and the likeliest one is guessed.

How sure a source is, is an acceptance rate that is learned: for the text's tree by the length of the match and by how
often something followed it and how often this, for a store by the probability that it states. Ended requests and what
was learned are read as a store is: after the last five tokens, with a probability that is interpolated with those after
fewer. Where a longer run is known, it counts, as one in the text itself. Each sequence starts from the same prior (but
for what was learned) and learns from every token that becomes known, whether or not anything was drafted, so drafting
stops for a sequence that is never predicted, and can start again. Sources that agree make each other surer, as if they
were wrong independently, and those that do not less sure. The probabilities along a draft, multiplied, are its
survival.

What was learned may be of any kind, and millions of tokens of another kind say much that is wrong. So a sequence starts
with the rates that the tenant's earlier ones found of it; how much surer it makes a guess that others make as well, is
learned too; and where it adds too little to what others guess, it is looked up rarely (LearnedRules).

Where a request samples, guesses follow its noise instead (coupling.py): every source gives a mass to all that it has
seen after every ending of the text (SAMPLED_WEIGHTS), and the masses are added. Under rules that need q they do not.

Known tokens are indexed only when a draft is requested, so a drafter that is not used takes hardly any time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from wager.draft.base import Drafter
from wager.draft.corpus.kept import KeptPerTenant
from wager.draft.coupling import COUPLING
from wager.draft.ngram import MIN_SURVIVAL
from wager.draft.registry import DrafterParts
from wager.draft.store_file import StoreFile
from wager.drafter_spec import DrafterSpec
from wager.errors import UsageError
from wager.kernels import _native
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams

if TYPE_CHECKING:
    from wager.draft.corpus.learning import LearnedTexts

MOST_LONGEST = 24
"""The longest match that a tree can look up."""

DEFAULT_LONGEST = 5
SHARED_TOKENS = 1 << 15
"""Tokens of ended requests that are kept: with matches of 5 tokens in at most 9 MB."""

PRIOR_WEIGHT = 20.0
"""How many observations a prior counts for."""

MOST_CERTAIN = 0.995
"""The greatest acceptance rate that one source is believed to have."""

OTHER_WEIGHTS = (2.2, 0.9, 2.2, 0.9)
"""For the text itself, earlier answers, a store and what was learned: the probability that a continuation is right, as
a multiple of its share of those that the source knows and of p (1 - p), where p is the probability of the token that
the source names. Fitted to which continuations were right in 64 answers (SmolLM2-135M, temperature 0 and 0.8)."""

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
whether something followed it once, always the same, mostly this, or less. The text itself (SmolLM2-135M, greedy)."""

LONG_PRIOR = (
    (0.51, 0.70, 0.52, 0.17),
    (0.52, 0.78, 0.45, 0.20),
    (0.50, 0.93, 0.68, 0.18),
)
"""As above, for matches of 6 to 8 or more tokens in 25,000 tokens of answers to other prompts."""

STORE_PRIOR = (0.04, 0.10, 0.15, 0.18, 0.23, 0.30, 0.36, 0.42, 0.46, 0.54, 0.61, 0.66, 0.69, 0.76, 0.85, 0.93)
"""By the probability that the store states, or that is interpolated for earlier answers, in sixteenths."""

SAMPLED_WEIGHTS = (0.5, 0.13, 1.0, 1.0)
"""For the text itself, earlier answers and a store: the mass of a token that followed an ending of the text once, and
nothing else did, or in a store with the probability 1. One that followed k times, of d different ones (at most the 32
that came last), has k / d times as much. For what was learned: that of the token which it names, if it were always
right; its other continuations have as much less as they are less frequent."""


class LearnedRules(NamedTuple):
    """How much is believed of what was learned on disk. Fitted to 160 answers to prompts beside a million and ten
    million tokens of others, and to requests that are asked again (SmolLM2-135M, greedy)."""

    prior_weight: float = 5.0
    """How many observations a prior of its rates counts for, at a tenant's first sequence and at each one."""

    remembered: float = 1000.0
    """How many observations of a tenant's earlier sequences count, of each rate and of the gain."""

    first_gain: float = 0.02
    """What it is believed to add to each token's guesses before anything was observed: the worth, in tokens, of the
    likeliest guess with it less that without it. A guess of probability p is worth p - p^2 / 2 if it is right, else
    -p^2 / 2: it costs a row, whose price may be anything from 0 to 1 token."""

    least_gain: float = 0.003
    """Where it adds less it is looked up at one of `rest` places alone. (Texts of another kind add 0.0005, those of the
    same repository 0.014, and requests that were asked before 0.12.)"""

    gain_weight: float = 100.0
    """How many observations the tenant's gain counts for at each sequence, which remembers twice as many."""

    rest: int = 16


LEARNED = LearnedRules()


class LookupSources(NamedTuple):
    """Where a drafter looks: in trees of matches of `longest` tokens (0: in none), of the text itself and of
    `shared_tokens` tokens of requests that ended (0: of none), in a store, and in what was `learned`."""

    longest: int = 0
    shared_tokens: int = 0
    store: StoreFile | None = None
    learned: LearnedTexts | None = None


def prior_rates() -> list[float]:
    """The prior of every cell: of the text's own tree, of earlier answers, of the store, of long matches in earlier
    answers; of what was learned, and of how much less often it is wrong where others agree (csrc/lookup.h)."""
    own, long = ([rate for row in table for rate in row] for table in (OWN_PRIOR, LONG_PRIOR))
    learned = [*STORE_PRIOR, *long]
    return [*own, *STORE_PRIOR, *STORE_PRIOR, *long, *learned, *learned]


class LookupDrafter(Drafter):
    """Guesses from the `sources`: chains, or with `trees` the likeliest nodes of a tree, in which several continuations
    of each source compete. UsageError if `longest` is not between 0 and MOST_LONGEST."""

    default_depth = 7
    max_depth = 15
    continues = True

    def __init__(self, name: str, sources: LookupSources, *, trees: bool = False) -> None:
        if not 0 <= sources.longest <= MOST_LONGEST:
            raise UsageError(f"{name}:{sources.longest} is out of range.", f"Look up 1 to {MOST_LONGEST} tokens.")
        self.name = name
        self.makes_trees = trees
        self.remembers_requests = sources.shared_tokens > 0
        self._learned = sources.learned
        self._tables = KeptPerTenant(
            lambda: lookup_table(name, sources, trees=trees),
            sources.learned,
            name,
            save=lambda table: json.dumps(table.found()).encode(),
            restore=lambda table, state: table.start_from(json.loads(state)),
            warning="What was kept of how right a tenant's learned texts were cannot be read: it begins anew.",
        )
        self._running: dict[str, _native.LookupTable] = {}  # of sequences, the tables of their tenants

    def forget(self) -> None:
        """Forget what earlier requests generated."""
        self._tables.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the texts and trees of all tenants, without a store."""
        return sum([table.nbytes for table in self._tables.values()])

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        """Keep the prompt and the predicted output for the index; no rate is learned from them, since the target did
        not generate them."""
        self._tables.enter(seq_id, tenant)
        self._running[seq_id] = table = self._tables.of(seq_id)
        if self._learned is not None:
            table.read(self._learned.corpus(tenant))
        table.begin(seq_id, tokens, tuple(map(int, params.prediction)))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, empty where nothing is known."""
        if len(requests) == 1:
            return self._running[requests[0].seq_id].propose(requests)
        drafts: list[Draft] = []
        for table, asked in groupby(requests, key=lambda request: self._running[request.seq_id]):
            drafts += table.propose(list(asked))
        return drafts

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        """Keep what became known for the index."""
        self._running[seq_id].accept(seq_id, tokens)

    def end(self, seq_id: str) -> None:
        """What the sequence generated is kept for others of its tenant."""
        if (table := self._running.pop(seq_id, None)) is not None:
            table.end(seq_id)
        self._tables.leave(seq_id)


def lookup_table(name: str, sources: LookupSources, *, trees: bool = False) -> _native.LookupTable:
    """In C++ (csrc/lookup.h); in Python a draft takes a hundred times as long."""
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
        learned=LEARNED,
        weights=SAMPLED_WEIGHTS,
        coupling=COUPLING,
        slots=None if store is None else store.slots,
        homes=0 if store is None else store.header.homes,
        trees=trees,
    )


def build(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    """`suffix`, or `store` with an open one."""
    if spec.name == "store" and parts.store is None:
        raise UsageError(f"Drafter {str(spec)!r} was given no open store.", "Open it and pass it as a part.")
    longest = int(spec.argument) if spec.argument and spec.name == "suffix" else DEFAULT_LONGEST
    sources = LookupSources(longest, SHARED_TOKENS, parts.store, parts.learned)
    return LookupDrafter(spec.label, sources, trees=spec.trees)
