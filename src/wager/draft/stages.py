"""A drafter for the drafter: guesses what a draft model will draw, so that one of its passes gives several tokens.

Staged drafting (Spector and Re 2023, arXiv 2308.04623): every stage is a drafter and its verification, and equality
with the token that a stage draws itself accepts a guess, so the draft is the same with an inner drafter and without.
The inner drafter is any drafter, which may have one of its own. It is told what the draft model guessed as if it were
known, and begins again where the text went on differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wager.draft.base import Drafter, LogitsRows, remembers_requests
from wager.draft.guarded import GuardedDrafter
from wager.draft.model_rounds import ChainRound
from wager.kernels.base import TargetOutput
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams


@dataclass(slots=True)
class _ToldSequence:
    """What the inner drafter was told of a sequence: the prompt, and all tokens until now."""

    params: SamplingParams
    tenant: str
    prompt_tokens: int
    tokens: list[int]


class InnerDrafter:
    """`drafter` guesses for a draft model of `vocab` logits. One that raises: see GuardedDrafter."""

    def __init__(self, drafter: Drafter, *, vocab: int) -> None:
        self._guarded = GuardedDrafter(drafter, vocab=vocab)
        self._told: dict[str, _ToldSequence] = {}

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        """A sequence starts; the inner drafter learns of it when it is to guess."""
        self._told[seq_id] = _ToldSequence(params, tenant, len(tokens), [])

    def end(self, seq_id: str) -> None:
        self._told.pop(seq_id, None)
        self._guarded.end(seq_id)

    def forget(self) -> None:
        """See RemembersRequests."""
        self._guarded.forget()

    @property
    def remembers_requests(self) -> bool:
        """See RemembersRequests."""
        return remembers_requests(self._guarded.drafter)

    @property
    def reads_rows(self) -> bool:
        """See RowReader."""
        return self._guarded.reads_rows

    def read_rows(self, output: TargetOutput, rows: Sequence[LogitsRows]) -> None:
        """The verified model's rows: what it finds likely a draft model mostly does, too."""
        self._guarded.read_rows(output, rows)

    def guess(self, rounds: Sequence[ChainRound]) -> dict[str, Draft]:
        """Its guesses of what follows each round's tokens, valid trees of known tokens; none where it has none."""
        requests: list[DraftRequest] = []
        for r in rounds:
            tokens, room = r.continuation
            if room > 0:
                self._tell(r.request.seq_id, tokens)
                requests.append(_inner_request(r.request, len(tokens), room))
        return self._guarded.propose(requests)

    def _tell(self, seq_id: str, tokens: list[int]) -> None:
        """Bring the drafter's sequence to `tokens`; it begins again where it was told others."""
        told, drafter = self._told[seq_id], self._guarded
        known = len(told.tokens) if drafter.has(seq_id) else 0
        if not known or told.tokens != tokens[:known]:
            drafter.end(seq_id)
            drafter.begin(seq_id, tokens[: told.prompt_tokens], told.params, tenant=told.tenant)
            known = told.prompt_tokens
        if len(tokens) > known:
            drafter.accept(seq_id, tokens[known:])
        told.tokens = tokens


class TellsInner:
    """What a drafter with an `_inner` one tells that."""

    _inner: InnerDrafter | None

    @property
    def remembers_requests(self) -> bool:
        """See RemembersRequests."""
        return self._inner is not None and self._inner.remembers_requests

    def forget(self) -> None:
        """See RemembersRequests."""
        if self._inner is not None:
            self._inner.forget()

    @property
    def reads_rows(self) -> bool:
        """See RowReader."""
        return self._inner is not None and self._inner.reads_rows

    def read_rows(self, output: TargetOutput, rows: Sequence[LogitsRows]) -> None:
        """See RowReader."""
        if self._inner is not None:
            self._inner.read_rows(output, rows)


def _inner_request(request: DraftRequest, position: int, depth: int) -> DraftRequest:
    return DraftRequest(request.seq_id, position, depth, request.params, request.seed, request.choice)
