"""Token recycling (arXiv 2408.08696): the guesses are the tokens that the target last found likeliest after each token.

A table holds, for every token, the ids of the 8 greatest logits that the target last gave after it: of every row that
was verified, rejected guesses included. From the last known token on it is a tree, of which the likeliest nodes are
drafted: the probability of a node is that of its rank, multiplied along the path. The probabilities of ranks are
learned from every row: at which rank the table had what the target now finds likeliest. Where a request samples, its
noise chooses among the 8 (coupling.py), whose masses are their shares of what the logits then say. All requests of a
tenant share a table, which is small: 64 bytes for each token id.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from wager.draft.base import Drafter, LogitsRows
from wager.draft.corpus.kept import KeptPerTenant
from wager.draft.coupling import COUPLING
from wager.draft.registry import DrafterParts
from wager.drafter_spec import DrafterSpec
from wager.kernels import _native
from wager.kernels.base import TargetOutput
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams

if TYPE_CHECKING:
    from wager.draft.corpus.learning import LearnedTexts

PRIOR = (0.37, 0.09, 0.045, 0.03, 0.02, 0.016, 0.015, 0.013)
"""Probability that what follows a token is what had each rank the last time (SmolLM2-135M, greedy)."""

PRIOR_WEIGHT = 50.0
"""How many rows the prior counts for."""

SAMPLED_WEIGHT = 0.5
"""Mass of all the ids of a token together."""

MIN_SURVIVAL, MIN_SAMPLED_SURVIVAL = 0.02, 0.005
"""Guesses of lower survival are not made, greedily and where a request samples."""


class RecyclingDrafter(Drafter):
    """Trees of recycled tokens. Reads the rows of every pass."""

    name = "recycle"
    default_depth = 7
    max_depth = 15
    makes_trees = True
    reads_rows = True
    remembers_requests = True

    def __init__(self, vocab: int, kept: LearnedTexts | None = None) -> None:
        """Tables are `kept` for later processes."""
        self._last: dict[str, int] = {}
        self._tables = KeptPerTenant(
            lambda: successor_table(vocab),
            kept,
            self.name,
            save=_native.Successors.state,
            restore=_native.Successors.restore,
            warning="The table of recycled tokens that was kept for a tenant is of another vocabulary.",
        )

    def forget(self) -> None:
        """Forget the rows of earlier requests."""
        self._tables.clear()

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        self._tables.enter(seq_id, tenant)
        self._last[seq_id] = tokens[-1]

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One tree per request; empty where the target has not been seen after the last token."""
        return [self._draft(request) for request in requests]

    def read_rows(self, output: TargetOutput, rows: Sequence[LogitsRows]) -> None:
        """Keep what the target found likeliest after each row, in the table of the row's tenant; of sequences that did
        not begin here, whose tenants are not known, nothing."""
        for table, group in groupby(rows, key=self._table_of):
            if table is None:
                continue
            first, *others = group
            tokens = [*first.tokens, *(token for each in others for token in each.tokens)]
            table.update(tokens, output.logits[first.first : first.first + len(tokens)])

    def _table_of(self, rows: LogitsRows) -> _native.Successors | None:
        return self._tables.of(rows.seq_id) if rows.seq_id in self._last else None

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        if tokens:
            self._last[seq_id] = tokens[-1]

    def end(self, seq_id: str) -> None:
        self._last.pop(seq_id, None)
        self._tables.leave(seq_id)

    def _draft(self, request: DraftRequest) -> Draft:
        table = self._tables.of(request.seq_id)
        tokens, parents, scores = table.draft(self._last[request.seq_id], request.depth, request)
        return Draft(request.seq_id, tuple(tokens), tuple(parents), tuple(scores), self.name)


def successor_table(vocab: int) -> _native.Successors:
    """In C++ (csrc/successors.h)."""
    return _native.Successors(
        vocab,
        rates=PRIOR,
        prior_weight=PRIOR_WEIGHT,
        min_survival=MIN_SURVIVAL,
        weight=SAMPLED_WEIGHT,
        min_sampled=MIN_SAMPLED_SURVIVAL,
        coupling=COUPLING,
    )


def build(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    return RecyclingDrafter(parts.vocab, parts.learned)
