"""OpenAI's Predicted Outputs: how much of the prediction the answer has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wager.draft.prediction import Alignment
from wager.types import Completion


@dataclass(frozen=True, slots=True)
class PredictionUse:
    """`accepted`: tokens of the prediction that appeared in the answer, where the prediction was expected to go on;
    `rejected`: those that did not. Sums over the choices."""

    accepted: int
    rejected: int


def prediction_use(prediction: Sequence[int], completions: Sequence[Completion]) -> PredictionUse:
    """Follow each choice through the prediction, as the drafter of that name does. It depends on the texts alone, not
    on what was drafted."""
    accepted = sum(len(_places(prediction, completion)) for completion in completions)
    return PredictionUse(accepted, len(prediction) * len(completions) - accepted)


def _places(prediction: Sequence[int], completion: Completion) -> set[int]:
    """The places of the prediction whose tokens appeared."""
    alignment, found = Alignment(list(prediction)), set[int]()
    for token in completion.token_ids:
        place = alignment.next
        if alignment.agreed and place < len(prediction) and alignment.tokens[place] == token:
            found.add(place)
        alignment.unread.append(token)
        alignment.catch_up()
    return found
