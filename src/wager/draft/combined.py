"""Drafters made of others: one that guesses for a draft model (A+B), one tree of the guesses of several (A//B), and one
that is asked only at places where another one's guesses are worth little (A..B).

**A+B**, staged drafting (Spector and Re 2023, arXiv 2308.04623): every stage is a drafter and its verification, and
equality with the token that a stage draws itself accepts a guess, so the draft is the same with an inner drafter and
without; one pass of the draft model gives several tokens. The inner drafter is told what the draft model guessed as
if it were known, and begins again where the text went on differently.

**A//B**: under `match` equal paths share their nodes, and of all nodes those are kept that are likeliest to be
accepted: by the score that its drafter gives a node, times how much oftener, lately, that drafter was right than it
thought. Under a rule that keeps the distribution nothing may depend on what was drawn: every drafter gets a fixed
share of the guesses, and its tree hangs from the root beside the others, with the q that each node was drawn from.

**A..B**: A guesses at every place. B, which takes time, guesses too where that brought more lately than it costs
(DraftRequest.prices), at places where A was as sure as here. Then the draft is the one tree of both; what B guesses, A
continues if it can. Under a rule that keeps the distribution the draft is B's alone where B is asked, and A's where
not; what A draws itself has no say in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from wager.draft.base import WARM_UP, ComputedRows, Drafter, LogitsRows, valid_part
from wager.draft.guessing import draws
from wager.drafter_spec import BACKED_SIGN, MERGED_SIGN
from wager.economics.acceptance import BIN_BORDERS
from wager.economics.policy.exploration import EXPLORATION_SHARE
from wager.kernels import _native
from wager.kernels.base import TargetOutput
from wager.tenants import PerTenant
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams

log = logging.getLogger("wager")

T = TypeVar("T")

_LONGEST_PAUSE = 256


class GuardedDrafter:
    """`drafter`, whose drafts are cut where they are no trees of ids below `vocab`. No call raises."""

    def __init__(self, drafter: Drafter, *, vocab: int) -> None:
        self.drafter = drafter
        self.observes = type(drafter).observe is not Drafter.observe
        self._vocab = vocab
        self._begun: set[str] = set()
        self._failures = self._pause = self._left = 0  # the last pause, and what is left of it, in sequences

    # ---- the interface of a drafter ----------------------------------------------------------------------------------

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        if self._left:
            self._left -= 1
            return
        self._begun.add(seq_id)
        self._call(partial(self.drafter.begin, seq_id, tokens, params, tenant=tenant))

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        if seq_id in self._begun:
            try:
                self.drafter.accept(seq_id, tokens)
            except Exception as error:
                self._fail(error)

    def end(self, seq_id: str) -> None:
        if seq_id in self._begun:
            self._begun.discard(seq_id)
            if self._call(self.drafter.end, seq_id):
                self._pause = 0

    def observe(self, output: TargetOutput) -> None:
        if not self._left:
            self._call(self.drafter.observe, output)

    def forget(self) -> None:
        self._call(self.drafter.forget)

    def read(self, output: TargetOutput, computed: Sequence[ComputedRows]) -> None:
        if not self._left:
            try:
                self.drafter.read(output, computed)
            except Exception as error:
                self._fail(error)

    def read_rows(self, output: TargetOutput, rows: Sequence[LogitsRows]) -> None:
        if not self._left:
            self._call(self.drafter.read_rows, output, rows)

    def propose(self, requests: Sequence[DraftRequest]) -> dict[str, Draft]:
        """The valid part of each draft, by sequence, none larger than was requested."""
        asked = [request for request in requests if request.seq_id in self._begun]
        if not asked:
            return {}
        try:
            drafts, limits = self.drafter.propose(asked), {request.seq_id: request.depth for request in asked}
            valid = _native.valid_drafts(drafts, asked, limits, self.drafter.name, self._vocab, False, False)
            if valid is not None:  # as nearly always
                return valid
            return {
                draft.seq_id: valid_part(draft, limit=limits[draft.seq_id], vocab=self._vocab)
                for draft in drafts
                if draft.seq_id in limits
            }
        except Exception as error:
            self._fail(error)
            return {}

    def _call(self, call: Callable[..., None], *args: object) -> bool:
        """Whether it succeeded; else the drafter has failed."""
        try:
            call(*args)
        except Exception as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: Exception) -> None:
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


@dataclass(slots=True)
class _ToldSequence:
    """What the inner drafter was told of a sequence: the prompt, and all tokens until now."""

    params: SamplingParams
    tenant: str
    prompt_tokens: int
    tokens: list[int]


class InnerDrafter(GuardedDrafter):
    """A drafter that guesses for a draft model of `vocab` logits."""

    def __init__(self, drafter: Drafter, *, vocab: int) -> None:
        super().__init__(drafter, vocab=vocab)
        self._told: dict[str, _ToldSequence] = {}

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        """A sequence starts; the inner drafter learns of it when it is to guess."""
        self._told[seq_id] = _ToldSequence(params, tenant, len(tokens), [])

    def end(self, seq_id: str) -> None:
        self._told.pop(seq_id, None)
        super().end(seq_id)

    def guess(self, wanted: Sequence[tuple[DraftRequest, list[int], int]]) -> dict[str, Draft]:
        """Its guesses of what follows the tokens of each request, at most the given number: valid trees of known
        tokens; none where it has none. What the draft model draws with noise of its own is guessed greedily."""
        requests: list[DraftRequest] = []
        for request, tokens, depth in wanted:
            if depth > 0:
                self._tell(request.seq_id, tokens)
                params = replace(request.params, temperature=0.0) if draws(request) else request.params
                inner = DraftRequest(request.seq_id, len(tokens), depth, params, request.seed, request.choice)
                requests.append(inner)
        return self.propose(requests)

    def _tell(self, seq_id: str, tokens: list[int]) -> None:
        """Bring the drafter's sequence to `tokens`; it begins again where it was told others."""
        told = self._told[seq_id]
        known = len(told.tokens) if seq_id in self._begun else 0
        if not known or told.tokens != tokens[:known]:
            super().end(seq_id)
            super().begin(seq_id, tokens[: told.prompt_tokens], told.params, tenant=told.tenant)
            known = told.prompt_tokens
        if len(tokens) > known:
            self.accept(seq_id, tokens[known:])
        told.tokens = tokens


class JoinedDrafter(Drafter, Generic[T]):
    """What drafters that ask `drafters` have in common; one of these that raises: see GuardedDrafter. `make` makes what
    is learned of a tenant's texts; `vocab` as in DrafterParts."""

    sign: str
    makes_trees = True

    def __init__(self, drafters: Sequence[Drafter], *, vocab: int, make: Callable[[], T]) -> None:
        self.name = self.sign.join(drafter.name for drafter in drafters)
        self.default_depth = max(drafter.default_depth for drafter in drafters)
        self.max_depth = max(drafter.max_depth for drafter in drafters)
        self.samples = any(drafter.samples for drafter in drafters)
        self.remembers_requests = any(drafter.remembers_requests for drafter in drafters)
        self.reads_rows = any(drafter.reads_rows for drafter in drafters)
        found = [drafter.taps for drafter in drafters if drafter.taps is not None]
        self.taps = sorted({tap for taps in found for tap in taps}) if found else None
        self._vocab = vocab
        self._members = [GuardedDrafter(drafter, vocab=vocab) for drafter in drafters]
        self._merger = _native.DraftMerger(Draft, self.name)
        self._readers = [member for member in self._members if member.drafter.taps is not None]
        self._row_readers = [member for member in self._members if member.drafter.reads_rows]
        self._observers = [member for member in self._members if member.observes]
        self._learned = PerTenant(make)

    def read(self, output: TargetOutput, computed: Sequence[ComputedRows]) -> None:
        for member in self._readers:
            member.read(output, computed)

    def read_rows(self, output: TargetOutput, rows: Sequence[LogitsRows]) -> None:
        for member in self._row_readers:
            member.read_rows(output, rows)

    def forget(self) -> None:
        self._learned.clear()
        for member in self._members:
            member.forget()

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        self._learned.enter(seq_id, tenant)
        for member in self._members:
            member.begin(seq_id, tokens, params, tenant=tenant)

    def observe(self, output: TargetOutput) -> None:
        for member in self._observers:
            member.observe(output)

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        for member in self._members:
            member.accept(seq_id, tokens)

    def end(self, seq_id: str) -> None:
        self._learned.leave(seq_id)
        for member in self._members:
            member.end(seq_id)

    def _beside(self, request: DraftRequest, drafts: Sequence[Draft]) -> Draft:
        """The drafts one after the other, each from the root, deterministic ones with point masses."""
        tokens: list[int] = []
        parents: list[int] = []
        probs: list[np.ndarray] = []
        for draft in drafts:
            first = len(tokens)
            tokens += draft.tokens
            parents += [parent + first if parent >= 0 else -1 for parent in draft.parents]
            masses = np.zeros((len(draft), self._vocab))
            masses[range(len(draft)), draft.tokens] = 1.0
            probs.append(masses if draft.draft_probs is None else draft.draft_probs)
        q = np.concatenate(probs) if self.samples and probs else None
        return Draft(request.seq_id, tuple(tokens), tuple(parents), (), self.name, q)


class MergedDrafter(JoinedDrafter[list[_native.Reliability]]):
    """The trees of `drafters` as one; how often each is right is learned."""

    sign = MERGED_SIGN

    def __init__(self, drafters: Sequence[Drafter], *, vocab: int) -> None:
        super().__init__(drafters, vocab=vocab, make=lambda: [_native.Reliability() for _ in drafters])
        self._last: dict[str, list[tuple[int, Draft]]] = {}  # of each sequence the drafts that are not refuted yet

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        for index, draft in self._last.pop(seq_id, ()):
            self._learned.of(seq_id)[index].learn(draft, tokens)
        super().accept(seq_id, tokens)

    def end(self, seq_id: str) -> None:
        self._last.pop(seq_id, None)
        super().end(seq_id)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One tree per request, of at most `depth` nodes."""
        drafts: dict[str, list[tuple[int, Draft]]] = {request.seq_id: [] for request in requests}
        for index, member in enumerate(self._members):
            asked = [self._share(request, index) for request in requests]
            for seq_id, draft in member.propose([request for request in asked if request.depth > 0]).items():
                if len(draft):
                    drafts[seq_id].append((index, draft))
        self._last |= drafts
        return [self._merge(request, drafts[request.seq_id]) for request in requests]

    def _share(self, request: DraftRequest, index: int) -> DraftRequest:
        """What one drafter is asked for: everything, or its share, the first ones' the larger."""
        if not draws(request):
            return request
        count = len(self._members)
        share = request.depth // count + (index < request.depth % count)
        return request._replace(depth=share)

    def _merge(self, request: DraftRequest, drafts: Sequence[tuple[int, Draft]]) -> Draft:
        if draws(request):
            return self._beside(request, [draft for index, draft in drafts if self._has_needed_probs(index, draft)])
        reliability = self._learned.of(request.seq_id)
        judged = [(draft, reliability[index].factor) for index, draft in drafts]
        return self._merger.merge(request.seq_id, judged, request.depth)

    def _has_needed_probs(self, index: int, draft: Draft) -> bool:
        return draft.draft_probs is not None or not self._members[index].drafter.samples


class BackedDrafter(JoinedDrafter[_native.BackedDrafts]):
    """The guesses of `first`, and where they are worth little those of `second` too. A second drafter that reads the
    target's states, which takes time in every step, reads none while that is not worth it.

    Where it is asked and what is learned of that is decided in C++ (csrc/merging.h), of each tenant apart: after a pass
    of the target every function of Python must be read from memory again."""

    sign = BACKED_SIGN
    weighs_prices = True

    def __init__(self, first: Drafter, second: Drafter, *, vocab: int) -> None:
        super().__init__(
            [first, second],
            vocab=vocab,
            make=lambda: _native.BackedDrafts(Draft, self.name, [*BIN_BORDERS], EXPLORATION_SHARE),
        )
        self._calls = 0
        self._all_taps = self.taps
        self._keeps = second.taps is not None
        self._reads = True  # whether the second drafter is shown states, if it reads any
        self._joint: dict[str, _native.BackedDrafts] = {}  # of each sequence whose last draft is of both

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        super().begin(seq_id, tokens, params, tenant=tenant)
        self._read_if(asked=False)

    def _read_if(self, *, asked: bool) -> None:
        """The second drafter's layers are read while it is `asked`, or will be soon for a tenant."""
        soon = self._calls + WARM_UP
        self._reads = asked or any(soon >= each.until for each in self._learned.values())
        self.taps = self._all_taps if self._reads else self._members[0].drafter.taps

    def read(self, output: TargetOutput, computed: Sequence[ComputedRows]) -> None:
        """The second drafter's layers come with the pass after the one in which it was first asked."""
        first, second = self._members
        if first in self._readers:
            first.read(output, computed)
        if self._reads and self._keeps and output.taps.keys() >= set(second.drafter.taps or ()):
            second.read(output, computed)

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        if (backed := self._joint.pop(seq_id, None)) is not None:
            backed.accept(seq_id, tokens)
        super().accept(seq_id, tokens)

    def end(self, seq_id: str) -> None:
        self._joint.pop(seq_id, None)
        if (backed := self._learned.leave(seq_id)) is not None:
            backed.end(seq_id)
        super().end(seq_id)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, of at most `depth` nodes."""
        first, second = self._members
        own = first.propose(requests)
        asked = self._asked(requests, own)
        found = second.propose(asked) if asked else {}
        return [self._joined(request, own.get(request.seq_id), found.get(request.seq_id)) for request in requests]

    def _asked(self, requests: Sequence[DraftRequest], own: Mapping[str, Draft]) -> list[DraftRequest]:
        """What the second drafter is asked for. It ends where its next guess would not be worth its price."""
        self._calls = now = self._calls + 1
        samples, count, due = self._members[0].drafter.samples, len(requests), False
        asked: list[DraftRequest] = []
        for request in requests:
            backed = self._learned.of(request.seq_id)
            if now < backed.until:
                continue
            due = True
            draft = None if samples and draws(request) else own.get(request.seq_id)
            if (its := backed.ask(request, draft, now, count, self._keeps)) is not None:
                asked.append(its)
        self._read_if(asked=due)
        return asked

    def _joined(self, request: DraftRequest, mine: Draft | None, other: Draft | None) -> Draft:
        """The draft of a request: the first drafter's alone, or with what the second one guesses."""
        seq_id, drawn = request.seq_id, draws(request)
        mine = mine or Draft(seq_id)
        if not other:
            return self._merger.rename(self._beside(request, [mine]) if drawn else mine)
        first, backed = self._members[0], self._learned.of(seq_id)
        self._joint[seq_id] = backed
        if drawn:
            return backed.join(request, mine, other, None, replace(self._beside(request, [other]), computed=len(other)))
        behind = backed.behind(request, other) if first.drafter.continues else None
        more = first.propose([behind]).get(seq_id) if behind is not None else None
        return backed.join(request, mine, other, more or None, None)
