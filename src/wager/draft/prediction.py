"""The user's predicted output (`SamplingParams.prediction`): the guesses are its next tokens.

A pointer into the prediction follows the output token by token. Where they differ, the pointer is set anew: to the
place after the longest ending of the output that is found near it, forward places first, or else after a long ending
found anywhere; until there is one, nothing is guessed. So edits in the middle, insertions and deletions cost a few
tokens each. Drafts are long while output and prediction agree, and half as long after each difference.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from wager.draft.base import Drafter
from wager.draft.ngram import MIN_SURVIVAL, PRIOR_WEIGHT
from wager.draft.registry import DrafterParts
from wager.drafter_spec import DrafterSpec
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams

PRIOR = (0.40, 0.65, 0.78, 0.86, 0.90, 0.93, 0.95, 0.98)
"""Probability that the prediction's next token is right after 1, 2, ... 8 or more tokens that agreed."""

LONGEST, _AT_START = 32, 16
"""Tokens of the longest draft, and of the first one."""

_NEAR = 48  # tokens from the old place at which an ending of one token is enough
_FAR_ENDING = 4  # tokens of an ending that is enough anywhere
_CANDIDATES = 64  # places at which endings are compared
_TRUSTED = 4  # tokens that the beginning counts for: answers mostly begin as predicted


class PredictionDrafter(Drafter):
    """Follows the prediction of each request; declines where there is none, or the pointer is lost."""

    name = "prediction"
    default_depth = 16
    max_depth = LONGEST

    def __init__(self) -> None:
        self._predictions: dict[str, Alignment] = {}

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        """Keep the request's prediction, if it has one."""
        if params.prediction:
            self._predictions[seq_id] = Alignment([int(token) for token in params.prediction])

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One chain per request, or an empty draft."""
        return [self._draft(request) for request in requests]

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        """Keep what became known; it is compared when a draft is requested."""
        alignment = self._predictions.get(seq_id)
        if alignment is not None:
            alignment.unread += tokens

    def end(self, seq_id: str) -> None:
        self._predictions.pop(seq_id, None)

    def _draft(self, request: DraftRequest) -> Draft:
        alignment = self._predictions.get(request.seq_id)
        if alignment is None:
            return Draft(request.seq_id, drafter=self.name)
        alignment.catch_up()
        scores = alignment.survival(request.depth)
        tokens = alignment.tokens[alignment.next : alignment.next + len(scores)]
        return Draft.chain(request.seq_id, tokens, drafter=self.name, scores=scores)


class Alignment:
    """A prediction's `tokens` and the pointer: `next` is the place that the output's next token is expected at, if
    `agreed`, the number of tokens before it that agree with the output's last ones, is not 0."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.unread: list[int] = []
        self.next, self.agreed = 0, _TRUSTED
        self._window = _AT_START
        self._places: dict[int, list[int]] = {}
        for place, token in enumerate(tokens):
            self._places.setdefault(token, []).append(place)
        self._ending: list[int] = []  # the output's last tokens
        self._rates, self._tried = list(PRIOR), [PRIOR_WEIGHT] * len(PRIOR)

    def catch_up(self) -> None:
        """Follow the tokens that became known."""
        for token in self.unread:
            self._follow(token)
        self.unread.clear()

    def survival(self, depth: int) -> list[float]:
        """Survival of the guesses to make, at most `depth`."""
        survival: list[float] = []
        if not self.agreed:
            return survival
        reached = 1.0
        for ahead in range(min(depth, self._window, len(self.tokens) - self.next)):
            reached *= self._rates[min(self.agreed + ahead, len(PRIOR)) - 1]
            if reached < MIN_SURVIVAL:
                break
            survival.append(reached)
        return survival

    def _follow(self, token: int) -> None:
        self._ending = [*self._ending[1 - len(PRIOR) :], token]
        if self.agreed and self.next < len(self.tokens):
            right = self.tokens[self.next] == token
            row = min(self.agreed, len(PRIOR)) - 1
            self._tried[row] += 1
            self._rates[row] += (right - self._rates[row]) / self._tried[row]
            if right:
                self.next, self.agreed = self.next + 1, self.agreed + 1
                self._window = min(LONGEST, self._window + 1)
                return
            self._window = max(1, self._window // 2)
        self._realign(token)

    def _realign(self, token: int) -> None:
        """Set the pointer after the best place that ends as the output does, or lose it."""
        places = self._places.get(token, [])
        middle = bisect_left(places, self.next)
        found = places[max(0, middle - _CANDIDATES // 2) : middle + _CANDIDATES]
        rated = [(self._agreement(place), place + 1) for place in found]
        near = [pair for pair in rated if abs(pair[1] - self.next) <= _NEAR]
        far = [pair for pair in rated if pair[0] >= _FAR_ENDING]
        self.agreed = 0
        if near or far:  # the longest ending; of equals forward places first, then the nearest
            here = self.next
            self.agreed, self.next = max(near or far, key=lambda pair: (pair[0], pair[1] > here, -abs(pair[1] - here)))

    def _agreement(self, place: int) -> int:
        """How many tokens up to `place` are the output's last ones."""
        count = 0
        for back, token in enumerate(reversed(self._ending)):
            if back > place or self.tokens[place - back] != token:
                break
            count += 1
        return count


def build(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    return PredictionDrafter()
