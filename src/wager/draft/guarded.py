"""A drafter that works for another one: if it raises, the other goes on without it for a while.

All of its sequences are ended then. Those that begin after some others, twice as many after every failure until it has
served one to its end, are given to it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from wager.draft.base import ComputedRows, Drafter, LogitsRows, RemembersRequests, RowReader, StateReader
from wager.kernels.base import TargetOutput
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams

log = logging.getLogger("wager")

_LONGEST_PAUSE = 256


class GuardedDrafter:
    """`drafter`, whose drafts are cut where they are no trees of ids below `vocab`. No call raises."""

    def __init__(self, drafter: Drafter, *, vocab: int) -> None:
        self.drafter = drafter
        self._vocab = vocab
        self._begun: set[str] = set()
        self._failures = self._pause = self._left = 0  # the last pause, and what is left of it, in sequences

    def has(self, seq_id: str) -> bool:
        """Whether the drafter was given this sequence, and has not failed since."""
        return seq_id in self._begun

    # ---- the interface of a drafter ----------------------------------------------------------------------------------

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        if self._left:
            self._left -= 1
            return
        self._begun.add(seq_id)
        self._call(lambda: self.drafter.begin(seq_id, tokens, params, tenant=tenant))

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        if seq_id in self._begun:
            self._call(lambda: self.drafter.accept(seq_id, tokens))

    def end(self, seq_id: str) -> None:
        if seq_id in self._begun:
            self._begun.discard(seq_id)
            if self._call(lambda: self.drafter.end(seq_id)):
                self._pause = 0

    def observe(self, output: TargetOutput) -> None:
        if not self._left:
            self._call(lambda: self.drafter.observe(output))

    def forget(self) -> None:
        """See RemembersRequests."""
        drafter: object = self.drafter
        if isinstance(drafter, RemembersRequests):
            self._call(drafter.forget)

    def read(self, output: TargetOutput, computed: Sequence[ComputedRows]) -> None:
        """See StateReader."""
        drafter: object = self.drafter
        if isinstance(drafter, StateReader) and not self._left:
            self._call(lambda: drafter.read(output, computed))

    @property
    def reads_rows(self) -> bool:
        """See RowReader."""
        drafter: object = self.drafter
        return isinstance(drafter, RowReader) and drafter.reads_rows

    def read_rows(self, output: TargetOutput, rows: Sequence[LogitsRows]) -> None:
        """See RowReader."""
        drafter: object = self.drafter
        if isinstance(drafter, RowReader) and drafter.reads_rows and not self._left:
            self._call(lambda: drafter.read_rows(output, rows))

    def propose(self, requests: Sequence[DraftRequest]) -> dict[str, Draft]:
        """The valid part of each draft, by sequence, none larger than was requested."""
        asked = {request.seq_id: request for request in requests if request.seq_id in self._begun}
        valid: dict[str, Draft] = {}

        def propose() -> None:
            for draft in self.drafter.propose(list(asked.values())):
                if draft.seq_id in asked:
                    valid[draft.seq_id] = self._valid_part(draft, asked[draft.seq_id].depth)

        return valid if asked and self._call(propose) else {}

    def _call(self, call: Callable[[], None]) -> bool:
        """Whether it succeeded; else the drafter has failed."""
        try:
            call()
        except Exception as error:
            self._failures += 1
            self._pause = min(_LONGEST_PAUSE, max(1, 2 * self._pause))
            self._left = self._pause
            for seq_id in self._begun:
                with suppress(Exception):
                    self.drafter.end(seq_id)
            self._begun.clear()
            if self._failures.bit_count() == 1:
                name, kind = self.drafter.name, type(error).__name__
                log.warning("Drafter %r, which works for another one, failed: %s: %s", name, kind, error)
            return False
        return True

    def _valid_part(self, draft: Draft, limit: int) -> Draft:
        size = min(limit, len(draft.tokens), len(draft.parents))
        for node in range(size):
            if not (0 <= draft.tokens[node] < self._vocab and -1 <= draft.parents[node] < node):
                size = node
                break
        tokens, parents, scores = tuple(draft.tokens[:size]), tuple(draft.parents[:size]), tuple(draft.scores[:size])
        has_scores = len(scores) == size and all(0.0 <= score <= 1.0 for score in scores)
        probs = draft.draft_probs
        if probs is not None and probs.shape != (len(draft.tokens), self._vocab):
            return Draft(draft.seq_id, drafter=draft.drafter)
        kept = None if probs is None else probs[:size]
        return Draft(draft.seq_id, tokens, parents, scores if has_scores else (), draft.drafter, kept)
