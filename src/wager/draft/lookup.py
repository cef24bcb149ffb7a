"""Lookup drafters: the guesses are what followed the last tokens elsewhere. They need no pass of any model.

There are three sources: the text itself (prompt, output and what the user predicts the output to be), the outputs of
the tenant's requests that ended, and a static store. The first two are suffix trees (csrc/suffix_tree.h), which know
what followed every run of tokens, and how often; the third is a file (store_file.py). At every place of a draft each
source names a token, and the likeliest one is guessed.

How sure a source is, is an acceptance rate that is learned: for a tree by the length of the match and by how often
something followed it and how often this, for a store by the probability that it states. Each sequence starts from the
same prior and learns from every token that becomes known, whether or not anything was drafted, so drafting stops for a
sequence that is never predicted, and can start again. Sources that agree make each other surer, and those that do not
less sure. The probabilities along a draft, multiplied, are its survival.

Known tokens are indexed only when a draft is requested, so a drafter that is not used takes hardly any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

from wager.draft.lookup_rates import (
    MIN_SURVIVAL,
    MOST_CERTAIN,
    MOST_LONGEST,
    PRIOR_WEIGHT,
    LookupSources,
    prior_rates,
)
from wager.errors import UsageError
from wager.kernels import _native
from wager.kernels.base import TargetOutput
from wager.tenants import PerTenant
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams


class LookupDrafter:
    """Guesses from the `sources`: chains, or with `trees` the likeliest nodes of a tree, in which several continuations
    of each source compete. UsageError if `longest` is not between 0 and MOST_LONGEST."""

    default_depth = 7
    max_depth = 15
    samples = False

    def __init__(self, name: str, sources: LookupSources, *, trees: bool = False) -> None:
        if not 0 <= sources.longest <= MOST_LONGEST:
            raise UsageError(f"{name}:{sources.longest} is out of range.", f"Look up 1 to {MOST_LONGEST} tokens.")
        self.name = name
        self.makes_trees = trees
        self.remembers_requests = sources.shared_tokens > 0
        self._tables = PerTenant(lambda: lookup_table(name, sources, trees=trees))

    def forget(self) -> None:
        """Forget what earlier requests generated; see RemembersRequests. No sequence is running."""
        self._tables.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the texts and trees of all tenants, without a store."""
        return sum([table.nbytes for table in self._tables.values()])

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        """Keep the prompt and the predicted output for the index; no rate is learned from them, since the target did
        not generate them."""
        self._tables.enter(seq_id, tenant)
        self._tables.of(seq_id).begin(seq_id, tokens, tuple(map(int, params.prediction)))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, empty where nothing is known."""
        by_table = groupby(requests, key=lambda request: self._tables.of(request.seq_id))
        return [draft for table, asked in by_table for draft in table.propose(list(asked))]

    def observe(self, output: TargetOutput) -> None:
        """Ignored: the target's output is not used."""

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        """Keep what became known for the index."""
        self._tables.of(seq_id).accept(seq_id, tokens)

    def end(self, seq_id: str) -> None:
        """What the sequence generated is kept for others of its tenant."""
        self._tables.of(seq_id).end(seq_id)
        self._tables.leave(seq_id)


class LookupTexts(Protocol):
    """The texts of all sequences."""

    @property
    def nbytes(self) -> int: ...

    def begin(self, seq_id: str, tokens: Sequence[int], prediction: Sequence[int], /) -> None: ...

    def accept(self, seq_id: str, tokens: Sequence[int], /) -> None: ...

    def end(self, seq_id: str, /) -> None: ...

    def propose(self, requests: Sequence[DraftRequest], /) -> list[Draft]: ...


def lookup_table(name: str, sources: LookupSources, *, trees: bool = False) -> LookupTexts:
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
        slots=None if store is None else store.slots,
        homes=0 if store is None else store.header.homes,
        trees=trees,
    )
