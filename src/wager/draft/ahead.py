"""Drafts while the target verifies: a drafter with threads of its own makes the next draft before it is requested.

Speculative speculative decoding (arXiv 2603.03251). After a draft was handed over, a thread drafts for its likeliest
outcomes (branches.py). If verification says one of them, the next draft is there at once (a hit); else (a miss) it is
made after all, while the target waits, or left out where that pays better. All calls of the drafter are made on that
thread, in order. An error of the drafter, or a stall, is raised by `propose`, and the thread is ended; after an error,
and when all sequences were ended, the next one gets a new thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from wager.draft.ahead_figures import AheadFigures, DraftedBatch
from wager.draft.base import Drafter, DrafterStoppedError, remembers_requests
from wager.draft.branches import (
    BranchingDrafter,
    FollowedSequence,
    ForksSequences,
    FoundDraft,
    PreparedBranch,
    RequestedDraft,
)
from wager.draft.miss_choice import MissChoice
from wager.draft.ordered_calls import OrderedCalls, PendingCall, StalledError
from wager.draft.outcomes import child_of
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams

if TYPE_CHECKING:
    from wager.kernels.base import TargetOutput

_CALLS_KEPT = 64  # of the drafter, for whoever learns from them

PATIENCE_S = 60.0
"""Seconds without a pass of the drafter after which it counts as stalled."""


@dataclass(slots=True)
class _KnownSequence:
    """What the engine's thread keeps of a sequence: tokens that the drafter was not told, and the last draft."""

    followed: FollowedSequence
    fresh: list[int]
    handed: FoundDraft | None = None


class _Preparation:
    """Drafts that are being made for likely outcomes. `abandoned`: they are not needed any more."""

    def __init__(
        self, drafter: BranchingDrafter, requests: Sequence[RequestedDraft], drafts: Sequence[FoundDraft]
    ) -> None:
        self.drafter, self.requests, self.drafts = drafter, requests, drafts
        self.abandoned, self.seconds, self.branches = False, 0.0, 0

    def make(self) -> None:
        begin = time.perf_counter()
        self.drafter.settle(self.requests)
        self.branches = self.drafter.prepare(self.requests, self.drafts)
        self.seconds = time.perf_counter() - begin


class _PassControl:
    """After each pass of the drafter: its thread is at work, and whether the drafts are still needed."""

    def __init__(self, sign: Callable[[], None]) -> None:
        self._sign = sign
        self._current: _Preparation | None = None

    def make(self, preparation: _Preparation) -> None:
        self._current = preparation
        try:
            preparation.make()
        finally:
            self._current = None

    def __call__(self) -> bool:
        self._sign()
        return self._current is None or not self._current.abandoned


class AheadDrafter:
    """`inner` drafts on a thread of its own, ahead of its requests; nothing else may call it. It must not read the
    target's states. `rows`: outcomes that are drafted for at a time (None: as many as cost little more than one).
    `redrafts`: whether what was missed is drafted while the target waits (None: where it pays).
    """

    def __init__(
        self, inner: Drafter, *, rows: int | None = None, patience_s: float = PATIENCE_S, redrafts: bool | None = None
    ) -> None:
        self.name = inner.name
        self.default_depth, self.max_depth = inner.default_depth, inner.max_depth
        self.samples, self.makes_trees = inner.samples, inner.makes_trees
        self._drafter = BranchingDrafter(inner) if rows is None else BranchingDrafter(inner, rows=rows)
        self._patience_s = patience_s
        self._choice = MissChoice(redrafts)
        self._sequences: dict[str, _KnownSequence] = {}
        self._preparing: tuple[_Preparation, PendingCall[None]] | None = None
        self._numbers = 0
        self._figures = AheadFigures()
        self._drafted: deque[DraftedBatch] = deque(maxlen=_CALLS_KEPT)
        self._open()

    def _open(self) -> None:
        """A thread, for a drafter without sequences."""
        inner = self._drafter.inner
        self._calls = OrderedCalls(f"wager-draft-{inner.name}", patience_s=self._patience_s)
        self._control = _PassControl(self._calls.sign())
        self._ended = self._failed = False
        if isinstance(inner, ForksSequences):
            inner.on_pass = self._control

    @property
    def figures(self) -> AheadFigures:
        return replace(self._figures, branches=self._drafter.num_branches)

    # what the policy learns from (see economics/drafts_ahead.py)

    @property
    def hits(self) -> int:
        return self._figures.hits

    @property
    def misses(self) -> int:
        return self._figures.misses

    @property
    def least_drafted(self) -> int:
        """Sequences, continuations among them, that it drafts for at a time at least."""
        return self._drafter.rows

    def take_drafted(self) -> Sequence[DraftedBatch]:
        """The latest calls of the drafter since this was asked last."""
        taken = list(self._drafted)
        self._drafted.clear()
        return taken

    # ---- the interface of a drafter ----------------------------------------------------------------------------------

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        self.end(seq_id)
        if self._failed and not self._sequences:
            self._open()
            self._give(self._drafter.end_all)
        self._numbers += 1
        followed = FollowedSequence(params, tenant, len(tokens), list(tokens), str(self._numbers))
        self._sequences[seq_id] = _KnownSequence(followed, [])
        self._give(partial(self._drafter.begin, followed))

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        """Remembered until the next draft is requested."""
        self._sequences[seq_id].fresh += tokens
        self._choice.became_known(len(tokens))

    def observe(self, output: TargetOutput) -> None:
        """Ignored: the target's output is not used."""

    def end(self, seq_id: str) -> None:
        known = self._sequences.pop(seq_id, None)
        if known is not None:
            self._give(partial(self._drafter.end, known.followed))

    @property
    def remembers_requests(self) -> bool:
        """See RemembersRequests."""
        return remembers_requests(self._drafter.inner)

    def forget(self) -> None:
        self._give(self._drafter.forget)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Drafts that are ready, and for what was missed new ones; then the drafter goes on with the next. Raises
        DrafterStoppedError where a call failed, whichever it was, or the thread has ended."""
        begin = time.perf_counter()
        if self._ended:
            raise DrafterStoppedError("its thread has ended")
        self._choice.asked(begin)
        try:
            drafts = self._propose(requests)
        except BaseException as error:
            self.close()
            self._failed = not isinstance(error, StalledError)  # one that hangs may still be at work
            if not isinstance(error, Exception):
                raise
            raise DrafterStoppedError(f"{type(error).__name__}: {error}") from error
        waited = time.perf_counter() - begin
        self._figures = replace(self._figures, waited_s=self._figures.waited_s + waited)
        return [self._cut(request, each.draft) for request, each in zip(requests, drafts, strict=True)]

    def close(self) -> None:
        """End the thread. May be repeated; no draft can be requested any more."""
        self._ended, self._failed = True, False
        if self._preparing is not None:
            self._preparing[0].abandoned = True
            self._preparing = None
        self._calls.close()

    # ---- one call of propose -----------------------------------------------------------------------------------------

    def _give(self, call: Callable[[], None]) -> None:
        if not self._ended:
            self._calls.give(call)

    def _propose(self, requests: Sequence[DraftRequest]) -> list[FoundDraft]:
        known = [self._sequences[request.seq_id] for request in requests]
        self._await_preparation(known)
        asked = [self._look(request, each) for request, each in zip(requests, known, strict=True)]
        drafts = {each.sequence: each.found for each in asked if each.found is not None and len(each.found.draft)}
        missed = [each for each in asked if each.sequence not in drafts]
        if missed:
            asked = self._draft_missed(asked, missed, drafts)
        handed = [drafts.get(each.sequence) or _nothing(each.sequence) for each in asked]
        for each, draft in zip(known, handed, strict=True):
            each.handed, each.fresh, each.followed.outcomes = draft, [], None
        preparation = _Preparation(self._drafter, asked, handed)
        self._preparing = preparation, self._calls.give(partial(self._control.make, preparation))
        return handed

    def _await_preparation(self, known: Sequence[_KnownSequence]) -> None:
        """Wait for the drafts that are being made, or end them if none of them can be what is requested."""
        if self._preparing is None:
            return
        (preparation, pending), self._preparing = self._preparing, None
        if not any(each.followed.may_find(each.fresh) for each in known):
            preparation.abandoned = True
        self._calls.wait(pending)
        self._figures = replace(self._figures, drafted_s=self._figures.drafted_s + preparation.seconds)
        if not preparation.abandoned:
            depth = max(each.request.depth for each in preparation.requests) + 1
            self._drafted.append(DraftedBatch(preparation.branches, depth, preparation.seconds))

    def _look(self, request: DraftRequest, known: _KnownSequence) -> RequestedDraft:
        """Learn from what became known, and look whether it was drafted for."""
        if known.handed is not None:
            rates = self._drafter.rates.get(known.followed.tenant)
            rates.learn(known.handed.draft, known.handed.others, known.fresh)
            if len(known.handed.draft):
                self._choice.gained(_accepted(known.handed.draft, known.fresh))
        found = known.followed.find(known.fresh)
        if known.handed is not None:
            hit = found is not None and len(found.draft) > 0
            figures = self._figures
            self._figures = replace(figures, hits=figures.hits + hit, misses=figures.misses + (not hit))
        return RequestedDraft(known.followed, request, tuple(known.fresh), found)

    def _draft_missed(
        self,
        asked: list[RequestedDraft],
        missed: Sequence[RequestedDraft],
        drafts: dict[FollowedSequence, FoundDraft],
    ) -> list[RequestedDraft]:
        """Add drafts for what was missed to `drafts`, if that pays; what is left to be told of what was asked."""
        if not self._choice.drafts(len(missed)):
            self._figures = replace(self._figures, left_out=self._figures.left_out + len(missed))
            return asked
        begin = time.perf_counter()
        drafts |= self._calls.wait(self._calls.give(partial(self._drafter.draft, asked, missed)))
        seconds = time.perf_counter() - begin
        self._choice.drafted(seconds)
        depth = max(each.request.depth for each in missed)
        self._drafted.append(DraftedBatch(len(missed), depth, seconds))
        self._figures = replace(self._figures, drafted_s=self._figures.drafted_s + seconds)
        return [replace(each, fresh=(), found=None) for each in asked]

    def _cut(self, request: DraftRequest, draft: Draft) -> Draft:
        """A draft of a continuation as one of the request: not larger, nor going on after an unlikely guess."""
        size = min(request.depth, len(draft.tokens))
        if draft.is_chain:
            unlikely = (at + 1 for at, score in enumerate(draft.scores[:size]) if score < request.min_survival)
            size = next(unlikely, size)
        return replace(draft.truncate(size), seq_id=request.seq_id, drafter=self.name)


def _nothing(sequence: FollowedSequence) -> FoundDraft:
    draft = Draft(sequence.main)
    return FoundDraft(PreparedBranch(sequence.main, (), draft), draft, ())


def _accepted(draft: Draft, tokens: Sequence[int]) -> int:
    """How many of the tokens the draft had guessed."""
    node, count = -1, 0
    for token in tokens:
        child = child_of(draft, node, token)
        if child is None:
            break
        node, count = child, count + 1
    return count
