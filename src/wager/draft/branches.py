"""Several continuations of each sequence on one drafter, so that drafts are ready for what verification may say.

While the target verifies a draft, its likeliest outcomes (outcomes.py) become sequences of their own on the drafter,
which share the keys and values of the text before them, and get their drafts together, in the same passes. When the
outcome is known, the continuation that it is goes on as the sequence and the others are dropped; keys and values of a
continuation are never written by another. Nothing here knows threads: see ahead.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from wager.draft.base import Drafter, RemembersRequests
from wager.draft.outcomes import NUM_OTHERS, LikelyOutcome, OutcomeRates, below, child_of
from wager.tenants import PerTenant
from wager.types import Draft, DraftRequest, SamplingParams

_ROWS = 4
"""Continuations for which drafts are prepared at a time: rows of a pass, which cost little more than one up to there. A
larger batch has one for each sequence."""

_LEAST_CHANCE = 0.05
"""A further outcome that is less likely is not drafted for: it would delay the others for nothing."""

_MORE_NODES = 2
"""Nodes that a tree is given beyond those requested: some are spent on the token that comes first."""


@runtime_checkable
class ForksSequences(Protocol):
    """A drafter that can begin a sequence from another one. `num_others`: how many alternatives of each guess it is to
    remember. `on_pass` is called after each of its passes; False ends the drafts as they are."""

    num_others: int
    on_pass: Callable[[], bool] | None

    def fork(self, seq_id: str, new_id: str, tokens: Sequence[int], params: SamplingParams) -> None:
        """A new sequence that knows what another one knows, with `tokens` behind it. The other one stays."""

    def others(self, seq_id: str) -> Sequence[Sequence[int]]:
        """For each guess of the last draft of a sequence, if it was a chain, the tokens that came next after it."""


@dataclass(frozen=True, slots=True)
class PreparedBranch:
    """The draft of a continuation, which is the drafter's sequence `inner_id`: known tokens, then `tokens`."""

    inner_id: str
    tokens: tuple[int, ...]
    draft: Draft
    others: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True)
class FoundDraft:
    """A draft that was prepared for what became known. `draft` may be empty: known tokens were computed, no more."""

    branch: PreparedBranch
    draft: Draft
    others: Sequence[Sequence[int]]


@dataclass(eq=False, slots=True)
class FollowedSequence:
    """One sequence. `known` are its tokens as far as the drafter was told, `main` is what the drafter calls it, and
    `branches` are its continuations, the first the sequence itself with the draft that is being verified. `outcomes`
    are those that drafts are made for (None: not chosen yet)."""

    params: SamplingParams
    tenant: str
    prompt_tokens: int
    known: list[int]
    main: str
    branches: list[PreparedBranch] = field(default_factory=list)
    outcomes: list[tuple[int, ...]] | None = None

    def find(self, fresh: Sequence[int]) -> FoundDraft | None:
        """The continuation with most guesses behind `fresh`, the tokens that became known; None if it has none."""
        found: FoundDraft | None = None
        for branch in self.branches:
            node = _walk(branch, fresh)
            if node is not None:
                draft = below(branch.draft, node)
                if found is None or len(draft) > len(found.draft):
                    others = branch.others[node + 1 :] if branch.draft.is_chain else ()
                    found = FoundDraft(branch, draft, others)
        return found

    def may_find(self, fresh: Sequence[int]) -> bool:
        """Whether `fresh` may be among the outcomes that drafts are made for."""
        return self.outcomes is None or any(_begins(outcome, fresh) for outcome in self.outcomes)


def _begins(tokens: Sequence[int], fresh: Sequence[int]) -> bool:
    return len(tokens) <= len(fresh) and all(a == b for a, b in zip(tokens, fresh, strict=False))


def _walk(branch: PreparedBranch, fresh: Sequence[int]) -> int | None:
    """The node of a branch's draft that `fresh` ends in (-1: its root), None if it is no path there."""
    if not _begins(branch.tokens, fresh):
        return None
    node: int | None = -1
    for token in fresh[len(branch.tokens) :]:
        node = None if node is None else child_of(branch.draft, node, token)
    return node


@dataclass(frozen=True, slots=True)
class RequestedDraft:
    """A draft request, its sequence, the tokens that became known since the drafter was told, and the continuation that
    they are, if one is."""

    sequence: FollowedSequence
    request: DraftRequest
    fresh: tuple[int, ...]
    found: FoundDraft | None = None


class BranchingDrafter:
    """`inner` drafts for sequences and their continuations, as many as `rows` together. One thread at a time."""

    def __init__(self, inner: Drafter, *, rows: int = _ROWS) -> None:
        self.inner = inner
        self.rates = PerTenant(OutcomeRates)
        self.num_branches = 0
        """Continuations that drafts were made for."""
        self.rows = rows
        self._forks = inner if isinstance(inner, ForksSequences) else None
        if self._forks is not None:
            self._forks.num_others = NUM_OTHERS
        self._branched: dict[FollowedSequence, None] = {}
        self._names: set[str] = set()  # what the drafter calls its sequences
        self._made = 0

    def begin(self, sequence: FollowedSequence) -> None:
        self._names.add(sequence.main)
        self.inner.begin(sequence.main, sequence.known, sequence.params, tenant=sequence.tenant)

    def end(self, sequence: FollowedSequence) -> None:
        self._drop(sequence)
        self._end(sequence.main)

    def end_all(self) -> None:
        """End all sequences and continuations, after a failure; what fails again is left."""
        for name in list(self._names):
            with suppress(Exception):
                self._end(name)
        self._names.clear()
        self._branched.clear()

    def _end(self, name: str) -> None:
        self.inner.end(name)
        self._names.discard(name)

    def forget(self) -> None:
        if isinstance(self.inner, RemembersRequests):
            self.inner.forget()

    def draft(
        self, requests: Sequence[RequestedDraft], missed: Sequence[RequestedDraft]
    ) -> dict[FollowedSequence, FoundDraft]:
        """Settle all `requests`, and draft for those that were `missed`."""
        self.settle(requests)
        asked = [_inner_request(each.request, each.sequence.main) for each in missed]
        drafts = {draft.seq_id: draft for draft in self.inner.propose(asked)}
        made = {}
        for each in missed:
            main = each.sequence.main
            draft = drafts.get(main, Draft(main))
            others = self._others(main)
            made[each.sequence] = FoundDraft(PreparedBranch(main, (), draft, others), draft, others)
        return made

    def settle(self, requests: Sequence[RequestedDraft]) -> None:
        """What was requested goes on as the continuation that was found; all other continuations are dropped."""
        for each in requests:
            sequence, fresh = each.sequence, each.fresh
            if each.found is not None and each.found.branch.inner_id != sequence.main:
                branch = each.found.branch
                sequence.main, fresh = branch.inner_id, fresh[len(branch.tokens) :]
            self._drop(sequence)
            if fresh:
                self.inner.accept(sequence.main, fresh)
            sequence.known += each.fresh
        for sequence in list(self._branched):
            self._drop(sequence)

    def prepare(self, requests: Sequence[RequestedDraft], drafts: Sequence[FoundDraft]) -> int:
        """Draft for the likeliest outcomes of `drafts`, which are being verified; how many there are."""
        asked: list[tuple[FollowedSequence, LikelyOutcome, DraftRequest]] = []
        for each, draft in zip(requests, drafts, strict=True):
            sequence = each.sequence
            sequence.branches = [PreparedBranch(sequence.main, (), draft.draft, draft.others)]
        chosen = self._likeliest(
            [
                self.rates.get(each.sequence.tenant).likely(draft.draft, draft.others)
                for each, draft in zip(requests, drafts, strict=True)
            ]
        )
        for each, outcomes in zip(requests, chosen, strict=True):
            each.sequence.outcomes = [outcome.tokens for outcome in outcomes]
            for outcome in outcomes:
                asked.append((each.sequence, outcome, self._fork(each, outcome)))
        made = {each.seq_id: each for each in self.inner.propose([request for _, _, request in asked])}
        self.num_branches += len(asked)
        for sequence, outcome, request in asked:
            name = request.seq_id
            prepared = PreparedBranch(name, outcome.tokens, made.get(name, Draft(name)), self._others(name))
            sequence.branches.append(prepared)
        return len(asked)

    def _likeliest(self, outcomes: Sequence[Sequence[LikelyOutcome]]) -> list[list[LikelyOutcome]]:
        """The likeliest outcome of each draft, and of the others the likeliest as far as the rows go."""
        others = [
            (-outcome.probability, index, rank)
            for index, each in enumerate(outcomes)
            for rank, outcome in enumerate(each[1:], 1)
            if outcome.probability >= _LEAST_CHANCE
        ]
        taken = [list(each[:1]) for each in outcomes]
        for _, index, rank in sorted(others)[: max(0, self.rows - len(outcomes))]:
            taken[index].append(outcomes[index][rank])
        return taken

    def _fork(self, each: RequestedDraft, outcome: LikelyOutcome) -> DraftRequest:
        """A continuation, and the request for its draft: if the drafter draws its first token itself, one more."""
        sequence, request = each.sequence, each.request
        rates = self.rates.get(sequence.tenant)
        self._made += 1
        name = f"{sequence.main.partition('/')[0]}/{self._made}"
        self._branched[sequence] = None
        self._names.add(name)
        if self._forks is not None:
            self._forks.fork(sequence.main, name, outcome.tokens, sequence.params)
        else:
            prompt = sequence.known[: sequence.prompt_tokens]
            self.inner.begin(name, prompt, sequence.params, tenant=sequence.tenant)
            self.inner.accept(name, [*sequence.known[sequence.prompt_tokens :], *outcome.tokens])
        more = (1 if not self.inner.makes_trees else 1 + _MORE_NODES) if outcome.is_open else 0
        return DraftRequest(
            name,
            request.position + len(outcome.tokens),
            request.depth + more,
            request.params,
            request.seed,
            request.choice,
            min_survival=request.min_survival * (rates.guess_rate(0) if outcome.is_open else 1.0),
        )

    def _others(self, name: str) -> Sequence[Sequence[int]]:
        return () if self._forks is None else self._forks.others(name)

    def _drop(self, sequence: FollowedSequence) -> None:
        """End its continuations."""
        for branch in sequence.branches:
            if branch.inner_id != sequence.main:
                self._end(branch.inner_id)
        sequence.branches, sequence.outcomes = [], None
        self._branched.pop(sequence, None)


def _inner_request(request: DraftRequest, name: str) -> DraftRequest:
    return DraftRequest(
        name,
        request.position,
        request.depth,
        request.params,
        request.seed,
        request.choice,
        min_survival=request.min_survival,
    )
