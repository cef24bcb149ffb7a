"""Several drafters whose guesses become one tree, such as what the text repeats and what a model expects.

Under `match` equal paths share their nodes, and of all nodes those are kept that are likeliest to be accepted: by the
score that its drafter gives a node, times how much oftener, lately, that drafter was right than it thought. Under a
rule that keeps the distribution nothing may depend on what was drawn: every drafter gets a fixed share of the guesses,
and its tree hangs from the root beside the others, with the q that each node was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from wager.draft.base import ComputedRows, Drafter, LogitsRows, StateReader, remembers_requests
from wager.draft.guarded import GuardedDrafter
from wager.draft.trees import TokenTree, merge
from wager.kernels.base import TargetOutput
from wager.tenants import PerTenant
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams

_UNKNOWN = 0.5
"""Probability of a guess of a drafter without scores, until something was learned of it."""

_PRIOR = 10.0
"""Guesses for which the assumption counts that a drafter is right as often as it thinks."""


@dataclass(slots=True)
class _Reliability:
    """How often a drafter was right where it guessed, and how often it should have been by its scores."""

    right: float = _PRIOR
    expected: float = _PRIOR

    @property
    def factor(self) -> float:
        return self.right / self.expected


class MergedDrafter:
    """The trees of `drafters` as one. One that raises: see GuardedDrafter; `vocab` as in DraftParts."""

    makes_trees = True

    def __init__(self, drafters: Sequence[Drafter], *, vocab: int) -> None:
        self.name = "//".join(drafter.name for drafter in drafters)
        self.default_depth = max(drafter.default_depth for drafter in drafters)
        self.max_depth = max(drafter.max_depth for drafter in drafters)
        self.samples = any(drafter.samples for drafter in drafters)
        self._vocab = vocab
        self._members = [GuardedDrafter(drafter, vocab=vocab) for drafter in drafters]
        self._reliability = PerTenant(lambda: [_Reliability() for _ in drafters])
        self._last: dict[str, list[tuple[int, Draft]]] = {}  # of each sequence the drafts that are not refuted yet

    @property
    def taps(self) -> Sequence[int] | None:
        """Those of all its drafters; see StateReader."""
        found = [reader.taps for reader in self._readers() if reader.taps is not None]
        return sorted({tap for taps in found for tap in taps}) if found else None

    def read(self, output: TargetOutput, computed: Sequence[ComputedRows]) -> None:
        for member in self._members:
            member.read(output, computed)

    @property
    def reads_rows(self) -> bool:
        """Whether one of its drafters does; see RowReader."""
        return any(member.reads_rows for member in self._members)

    def read_rows(self, output: TargetOutput, rows: Sequence[LogitsRows]) -> None:
        for member in self._members:
            member.read_rows(output, rows)

    def _readers(self) -> list[StateReader]:
        drafters: list[object] = [member.drafter for member in self._members]
        return [drafter for drafter in drafters if isinstance(drafter, StateReader)]

    @property
    def remembers_requests(self) -> bool:
        """Whether one of its drafters does."""
        return any(remembers_requests(member.drafter) for member in self._members)

    def forget(self) -> None:
        """See RemembersRequests."""
        for member in self._members:
            member.forget()

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        self._reliability.enter(seq_id, tenant)
        for member in self._members:
            member.begin(seq_id, tokens, params, tenant=tenant)

    def observe(self, output: TargetOutput) -> None:
        for member in self._members:
            member.observe(output)

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        for index, draft in self._last.pop(seq_id, ()):
            self._learn(self._reliability.of(seq_id)[index], draft, tokens)
        for member in self._members:
            member.accept(seq_id, tokens)

    def end(self, seq_id: str) -> None:
        self._last.pop(seq_id, None)
        self._reliability.leave(seq_id)
        for member in self._members:
            member.end(seq_id)

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
        if not _draws(request):
            return request
        count = len(self._members)
        share = request.depth // count + (index < request.depth % count)
        return replace(request, depth=share)

    def _merge(self, request: DraftRequest, drafts: Sequence[tuple[int, Draft]]) -> Draft:
        if _draws(request):
            return self._beside(request, [draft for index, draft in drafts if self._has_needed_probs(index, draft)])
        reliability = self._reliability.of(request.seq_id)
        trees = [_scored(draft, reliability[index].factor) for index, draft in drafts]
        return merge(trees, request.depth).draft(request.seq_id, self.name)

    def _has_needed_probs(self, index: int, draft: Draft) -> bool:
        return draft.draft_probs is not None or not self._members[index].drafter.samples

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

    @staticmethod
    def _learn(reliability: _Reliability, draft: Draft, tokens: Sequence[int]) -> None:
        """Compare a drafter's guesses with the tokens that became known, as far as its path was right."""
        node = -1
        rates = _rates(draft)
        for token in tokens:
            children = [child for child, parent in enumerate(draft.parents) if parent == node]
            if not children:
                return
            reliability.expected += min(1.0, sum(rates[child] for child in children))
            right = next((child for child in children if draft.tokens[child] == token), None)
            if right is None:
                return
            reliability.right += 1
            node = right


def _scored(draft: Draft, factor: float) -> TokenTree:
    """With scores as they were lately borne out: `factor` times as often as the drafter thought."""
    scores: list[float] = []
    for rate, parent in zip(_rates(draft), draft.parents, strict=True):
        scores.append((scores[parent] if parent >= 0 else 1.0) * min(1.0, rate * factor))
    return TokenTree(draft.tokens, draft.parents, tuple(scores))


def _draws(request: DraftRequest) -> bool:
    """Whether guesses are drawn from a q that the rule needs."""
    return request.needs_draft_probs and not request.params.greedy


def _rates(draft: Draft) -> list[float]:
    """Of each node the probability that it is right if its parent is, by the drafter's own scores."""
    scores, parents = draft.scores, draft.parents
    if not scores:
        siblings = [parents.count(parent) for parent in parents]
        return [_UNKNOWN / count for count in siblings]
    above = [scores[parent] if parent >= 0 else 1.0 for parent in parents]
    return [min(1.0, score / over) if over > 0 else 0.0 for score, over in zip(scores, above, strict=True)]
