"""Drafters that misbehave, for proofs: one returns what is no draft, one raises. The text must not change.

With an oracle both guess the target's tokens at first, so that guesses are accepted right before the garbage.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from wager.draft.history import HistoryDrafter, TargetOracle
from wager.kernels.base import TargetOutput
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams

_GUESSES = 3  # what an otherwise sound draft guesses at most

_CALLS = ("begin", "propose", "observe", "accept", "end", "answer")
"""Where a RaisingDrafter fails; `answer`: propose returns what is not even a draft."""

_LATEST = 8  # calls of that kind after which it has failed


class _InformedDrafter(HistoryDrafter):
    """Guesses the target's next tokens, or without an oracle the last known one again and again."""

    def __init__(self, vocab: int, *, oracle: TargetOracle | None = None) -> None:
        super().__init__(oracle=oracle)
        self._vocab = vocab

    def _guesses(self, request: DraftRequest) -> list[int]:
        count = min(request.depth, _GUESSES)
        return (self._next_tokens(request) or [self.known[request.seq_id][-1]] * count)[:count]

    def _sound(self, request: DraftRequest) -> Draft:
        guesses = self._guesses(request)
        return Draft.chain(request.seq_id, guesses, drafter=self.name, scores=[0.9] * len(guesses))


class GarbageDrafter(_InformedDrafter):
    """Sound guesses with something wrong behind or about them, a kind of wrong for every request: ids that the
    vocabulary does not have, parents that are none, scores that are no probabilities, drafts far too long, of other
    sequences, of none, several of one, and a distribution of the wrong shape."""

    name = "garbage"
    makes_trees = True

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """More drafts, or fewer, than there are requests; some name sequences that do not exist or did not ask."""
        drafts: list[Draft] = []
        for request in requests:
            drafts += self._random(request).choice(_KINDS)(self, request)
        strangers = [Draft.chain(name, [0, 1], drafter=self.name) for name in ("", "nobody#9", *self.known)]
        asked = {request.seq_id for request in requests}
        return drafts + [draft for draft in strangers if draft.seq_id not in asked]

    # ---- kinds of garbage: the drafts of one request ----------------------------------------------------------------

    def _wrong_ids(self, request: DraftRequest) -> list[Draft]:
        rng, guesses = self._random(request), self._guesses(request)
        wrong = [self._vocab, -1, self._vocab + 12345, -(2**31), 2**31, 2**40, -(2**70), 2**70]
        return [Draft.chain(request.seq_id, [*guesses, rng.choice(wrong), *guesses], drafter=self.name)]

    def _wrong_parents(self, request: DraftRequest) -> list[Draft]:
        rng, guesses = self._random(request), self._guesses(request)
        count = len(guesses)
        parents = list(range(-1, count - 1))
        if count:
            parents[rng.randrange(count)] = rng.choice([count, count - 1, -2, 10**6, -(2**31), 2**40])
        return [Draft(request.seq_id, tuple(guesses), tuple(parents), (), self.name)]

    def _parents_missing(self, request: DraftRequest) -> list[Draft]:
        return [replace(self._sound(request), parents=(-1,))]

    def _parents_left_over(self, request: DraftRequest) -> list[Draft]:
        return [replace(self._sound(request), parents=tuple(range(-1, 20)))]

    def _no_probabilities(self, request: DraftRequest) -> list[Draft]:
        rng, sound = self._random(request), self._sound(request)
        wrong = [float("nan"), float("inf"), -float("inf"), 1.5, -0.5, 1e308]
        return [replace(sound, scores=tuple(rng.choice(wrong) for _ in sound.tokens))]

    def _scores_missing(self, request: DraftRequest) -> list[Draft]:
        return [replace(self._sound(request), scores=(1.0,))]

    def _far_too_long(self, request: DraftRequest) -> list[Draft]:
        count = 50 * request.depth + 1000
        guesses = self._guesses(request)
        guesses += [self.known[request.seq_id][-1]] * (count - len(guesses))
        return [Draft.chain(request.seq_id, guesses, drafter=self.name)]

    def _equal_siblings(self, request: DraftRequest) -> list[Draft]:
        depth = request.depth
        token = (self._guesses(request) or [0])[0]
        return [Draft(request.seq_id, (token,) * depth, (-1,) * depth, (1.0,) * depth, self.name)]

    def _other_sequence(self, request: DraftRequest) -> list[Draft]:
        return [replace(self._sound(request), seq_id=name) for name in self.known if name != request.seq_id]

    def _several(self, request: DraftRequest) -> list[Draft]:
        wrong = Draft.chain(request.seq_id, [0] * request.depth, drafter=self.name)
        return [wrong, self._sound(request), wrong, Draft(request.seq_id), self._sound(request)]

    def _none(self, request: DraftRequest) -> list[Draft]:
        return []

    def _wrong_drafter(self, request: DraftRequest) -> list[Draft]:
        return [replace(self._sound(request), drafter="someone else")]

    def _wrong_probs(self, request: DraftRequest) -> list[Draft]:
        rng = self._random(request)
        shape = rng.choice([(0, 0), (1, 1), (request.depth, self._vocab - 1), (request.depth + 7, self._vocab)])
        return [replace(self._sound(request), draft_probs=np.full(shape, float("nan")))]


_KINDS: Sequence[Callable[[GarbageDrafter, DraftRequest], list[Draft]]] = (
    GarbageDrafter._wrong_ids,
    GarbageDrafter._wrong_parents,
    GarbageDrafter._parents_missing,
    GarbageDrafter._parents_left_over,
    GarbageDrafter._no_probabilities,
    GarbageDrafter._scores_missing,
    GarbageDrafter._far_too_long,
    GarbageDrafter._equal_siblings,
    GarbageDrafter._other_sequence,
    GarbageDrafter._several,
    GarbageDrafter._none,
    GarbageDrafter._wrong_drafter,
    GarbageDrafter._wrong_probs,
)


class RaisingDrafter(_InformedDrafter):
    """Guesses soundly, and after a few calls raises from one of its methods, or answers with what is no draft. Which
    and when is drawn from the id of the first sequence that it is told of."""

    name = "failing"

    def __init__(self, vocab: int, *, oracle: TargetOracle | None = None) -> None:
        super().__init__(vocab, oracle=oracle)
        self._fails_in, self._left = "", 0

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        if not self._fails_in:
            rng = random.Random(seq_id)
            self._fails_in, self._left = rng.choice(_CALLS), rng.randrange(_LATEST)
            if self._fails_in in ("begin", "end"):
                self._left %= 2  # of these there is one a sequence
        self._count("begin")
        super().begin(seq_id, tokens, params, tenant=tenant)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = [self._sound(request) for request in requests]
        self._count("propose")
        if self._fails_in == "answer":
            self._left -= 1
            if self._left < 0:
                return [*drafts[:1], None]  # type: ignore[list-item]
        return drafts

    def observe(self, output: TargetOutput) -> None:
        self._count("observe")

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        self._count("accept")
        super().accept(seq_id, tokens)

    def end(self, seq_id: str) -> None:
        self._count("end")
        super().end(seq_id)

    def _count(self, call: str) -> None:
        if call == self._fails_in:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError(f"fails in {call}, as it is made to")
