"""Prompt lookup: the guesses are the tokens that followed an earlier occurrence of the last tokens.

Needs no pass of any model and constant time per token, however long the context. Known tokens are indexed only when a
draft is requested, so that a drafter that is not used takes hardly any time.

One table holds the acceptance rates: the probability that the next token is right after a match of m tokens. A
guess at depth d, if all before it were right, *is* a guess after a match of m + d - 1 tokens, so the same table gives
the survival of every depth, and with it the draft's length: short matches make short drafts, long ones drafts of
the requested depth. Each sequence starts from the same prior and learns its own table from every token that becomes
known, whether or not anything was drafted; so drafting stops for a sequence that never repeats itself, and can start
again.
"""

from __future__ import annotations

from collections.abc import Sequence

from wager.draft.base import Drafter
from wager.draft.registry import DrafterParts
from wager.drafter_spec import DrafterSpec
from wager.errors import UsageError
from wager.kernels import _native
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams

PRIOR = (0.27, 0.53, 0.65, 0.70, 0.74, 0.77, 0.80, 0.92)
"""Probability that the next token is right after a match of 1, 2, ... 8 or more tokens (SmolLM2-135M, greedy)."""

PRIOR_WEIGHT = 10.0
"""How many observations the prior counts for."""

MIN_SURVIVAL = 0.06
"""Guesses of lower survival are not made: about the marginal cost of a row, in tokens, where rows are cheapest (a CPU,
up to 8 rows)."""


class NgramDrafter(Drafter):
    """Copies what followed the most recent occurrence of the longest known ending, of at most `longest` tokens.

    When the copy reaches the end of the known text it continues from its own beginning, as a text that repeats
    does. Without a match the request is declined. Raises UsageError if `longest` is not between 1 and 8.
    """

    name = "ngram"
    default_depth = 7  # 8 rows in all: the widest pass that costs about as much as a single row
    max_depth = 15

    def __init__(self, longest: int = 3) -> None:
        if not 1 <= longest <= len(PRIOR):
            raise UsageError(f"ngram:{longest} is out of range.", f"Look up 1 to {len(PRIOR)} tokens.")
        # in C++ (csrc/ngrams.h): in Python a token of a long text takes 15 us, as its dict has left the caches
        self._table = _native.NgramTable(Draft, self.name, longest, PRIOR, PRIOR_WEIGHT, MIN_SURVIVAL)

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        """Keep the prompt for the index; it does not update the table, since the target did not generate it."""
        self._table.begin(seq_id, tokens)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One chain per request, or an empty draft where nothing matches."""
        return self._table.propose(requests)

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        """Keep what became known for the index."""
        self._table.accept(seq_id, tokens)

    def end(self, seq_id: str) -> None:
        self._table.end(seq_id)


def build(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    return NgramDrafter(int(spec.argument)) if spec.argument else NgramDrafter()
