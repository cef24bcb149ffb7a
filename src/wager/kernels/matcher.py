"""Follows guesses natively for a whole batch, along greedy and sampled tokens; verify/accept.py has the rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from wager.kernels import _native
from wager.kernels.arrays import Array
from wager.kernels.cpu import Kernels
from wager.types import GREEDY_TEMPERATURE, Draft, Outcome, Span, Verdict


class TokenMatcher(Protocol):
    """The rule `match` for sequences whose attribute `greedy` says that their tokens are the greedy ones, or whose
    `temperature` (not None) that they are sampled with nothing changed but their `filters` (top_k, top_p and min_p, or
    None)."""

    def match(
        self,
        spans: Sequence[Span],
        drafts: Mapping[str, Draft],
        greedy: list[int],
        logits: Array,
        sequences: Mapping[str, Any],
        /,
    ) -> tuple[dict[str, Outcome | None], bool] | None:
        """The outcome of each span that needs logits, by sequence and in order, and whether all were found. `greedy`
        are the greedy tokens of all rows of `logits`, -1 where they are not finite. None in place of an outcome that is
        not found this way: of another sequence, or one with a row that has no token or that RowSampler leaves to the
        definition. None if something is not as it should be."""


def token_matcher(kernels: object) -> TokenMatcher:
    """One that samples with `kernels` if these are native; otherwise all of its sequences are greedy ones."""
    matcher = _native.TokenMatcher(Verdict, Outcome)
    if isinstance(kernels, Kernels):
        matcher.sample_with(kernels.pool, kernels.isa, GREEDY_TEMPERATURE)
    return matcher
