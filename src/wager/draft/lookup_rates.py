"""Where lookup drafters look, and how often each source is right before a sequence has shown it: the priors of the
acceptance rates in draft/lookup.py, which explains them."""

from __future__ import annotations

from typing import NamedTuple

from wager.draft.store_file import StoreFile

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

CONTINUATIONS = 4
"""Continuations of one source in a tree of guesses."""

OTHER_WEIGHTS = (2.2, 0.9, 2.2)
"""Of the text itself, of earlier answers and of a store: what a continuation is right with, as a multiple of its share
of those that the source knows and of p (1 - p), where p is the probability of the token that the source names. Fitted
to which continuations were right in 64 answers (SmolLM2-135M, temperature 0 and 0.8)."""

MATCHES = 8  # longer matches count as this long
STORE_CELLS = 16

ONCE, ALWAYS, MOSTLY, LESS = range(4)  # how often something followed, and how often this

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


def prior_rates() -> list[float]:
    """The prior of every cell: of the text's own tree, of the shared one, of the store."""
    trees = [rate for table in (OWN_PRIOR, SHARED_PRIOR) for row in table for rate in row]
    return [*trees, *STORE_PRIOR]
