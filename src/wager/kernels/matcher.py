"""Follows greedy guesses natively for a whole batch; verify/accept.py has the rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wager.kernels import _native
from wager.types import Draft, Outcome, Span, Verdict


class GreedyMatcher:
    """The rule `match` for sequences whose attribute `greedy` says that their tokens are the greedy ones."""

    def __init__(self) -> None:
        self._native = _native.GreedyMatcher(Verdict, Outcome)

    def match(
        self,
        spans: Sequence[Span],
        drafts: Mapping[str, Draft],
        greedy: list[int],
        sequences: Mapping[str, Any],
    ) -> dict[str, Outcome | None] | None:
        """The outcome of each span that needs logits, by sequence and in order. `greedy` are the greedy tokens of all
        rows of logits, -1 where they are not finite. None in place of an outcome that is not found this way: of a
        sequence that is not greedy, or that has such a row. None if something is not as it should be."""
        outcomes: dict[str, Outcome | None] | None = self._native.match(spans, drafts, greedy, sequences)
        return outcomes
