"""What drafters draft in an engine, kept for tests, which may hand on something else; and whether a text stays."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from decoder_engines import answers, engine_on

from wager.draft.base import Drafter
from wager.models.transformer import Decoder
from wager.types import Draft, DraftRequest, Request

Made = TypeVar("Made", bound=Drafter)


def keep_drafts(drafter: Drafter) -> list[Draft]:
    """All that it drafts from now on."""
    made: list[Draft] = []
    propose = drafter.propose

    def kept(asked: Sequence[DraftRequest]) -> list[Draft]:
        made.extend(propose(asked))
        return made[-len(asked) :]

    drafter.propose = kept  # type: ignore[method-assign]
    return made


class Recorded:
    """Keeps what a drafter drafted, and hands on something else, so that drafts are accepted in part: the right tokens
    of `texts`, now and then a wrong one below `vocab`, or (None) as many right ones as the position says."""

    def __init__(self, drafter: Drafter, *, vocab: int | None = None) -> None:
        self.made: dict[tuple[str, int], Draft] = {}
        self.texts: dict[str, list[int]] = {}
        self._name, self._propose, self._vocab, self._rng = drafter.name, drafter.propose, vocab, random.Random(4)
        drafter.propose = self.propose  # type: ignore[method-assign]

    @property
    def drafts(self) -> dict[tuple[str, int], Draft]:
        """Those that are not empty."""
        return {key: draft for key, draft in self.made.items() if len(draft)}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        handed = []
        for request, draft in zip(requests, self._propose(requests), strict=True):
            assert draft.seq_id == request.seq_id and len(draft) <= request.depth
            self.made[request.seq_id, request.position] = draft
            right = self.texts[request.seq_id][request.position : request.position + len(draft)]
            handed.append(Draft.chain(request.seq_id, self._handed(right, request), drafter=self._name))
        return handed

    def _handed(self, right: list[int], request: DraftRequest) -> list[int]:
        if self._vocab is None:
            return right[: request.position % 4]
        return [token if self._rng.random() < 0.7 else (token + 1) % self._vocab for token in right]


def check_text(decoder: Decoder, asked: Sequence[Request], made: Callable[[], Made], *, depth: int) -> list[Made]:
    """The text of plain decoding comes with drafters that are `made`, also preempted, in chunks, and in a small cache,
    and a second time with prefixes in it; the drafters."""
    plain, drafters = answers(engine_on(decoder), asked), []
    for preempt_every, max_rows, blocks in ((0, 48, 48), (4, 13, 48), (0, 48, 9)):
        drafter = made()
        engine = engine_on(decoder, drafter, depth=depth, max_rows=max_rows, num_blocks=blocks)
        for _ in range(2):
            assert answers(engine, asked, preempt_every=preempt_every) == plain
        assert drafter.name in engine.proposer.drafters
        drafters.append(drafter)
    return drafters
