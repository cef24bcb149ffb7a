"""OpenAI's Predicted Outputs: how many tokens of the prediction the answer used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wager.draft.prediction import Alignment
from wager.types import Completion


@dataclass(frozen=True, slots=True)
class PredictionUse:
    """`accepted`: tokens of the answer that were guessed, and that the prediction named at their place. `rejected`:
    tokens of the prediction that were not, for every choice."""

    accepted: int
    rejected: int


def prediction_use(prediction: Sequence[int], completions: Sequence[Completion]) -> PredictionUse:
    """Follow each choice through the prediction, as the drafter of that name does."""
    accepted = [_accepted(prediction, completion) for completion in completions]
    return PredictionUse(sum(accepted), sum(max(0, len(prediction) - each) for each in accepted))


def _accepted(prediction: Sequence[int], completion: Completion) -> int:
    alignment, count = Alignment(list(prediction)), 0
    for token, drafter in zip(completion.token_ids, completion.drafted_by, strict=False):
        named = alignment.agreed and alignment.next < len(prediction) and alignment.tokens[alignment.next] == token
        count += bool(named and drafter)
        alignment.unread.append(token)
        alignment.catch_up()
    return count
