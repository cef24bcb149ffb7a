"""Calls the engine's drafters, checks their drafts, and goes on without a drafter that fails.

Drafts cannot change the text, so an invalid draft costs speed at most: nodes with unknown tokens, wrong parents or
beyond the sequence's room are cut off, and a drafter that raises is switched off with a warning. Every drafter gets
every token, so that one that did not draft for a while is up to date; one that rests gets them when it wakes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from wager.draft.base import Drafter, RemembersRequests
from wager.engine.native import draft_calls
from wager.engine.pass_readers import PassReaders
from wager.kernels.base import TargetOutput
from wager.tenants import NO_TENANT
from wager.types import RULES, Draft, DraftRequest, Plan, SamplingParams, Span, VerifyRule

log = logging.getLogger("wager")


class DraftableSequence(Protocol):
    """What a draft request needs of a sequence."""

    @property
    def id(self) -> str: ...

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def params(self) -> SamplingParams: ...

    @property
    def seed(self) -> int: ...

    @property
    def choice(self) -> int: ...


class Proposer:
    """Any number of drafters with different names. Never raises because of one of them.

    `vocab` is the target's number of logits. `rule` decides whether drafts must have draft_probs, and whether they may
    be trees.
    """

    def __init__(self, *drafters: Drafter, vocab: int, rule: VerifyRule = "match") -> None:
        self.drafters = {drafter.name: drafter for drafter in drafters}
        self.failed: dict[str, str] = {}
        """Why drafters were switched off, by name."""
        self.vocab = vocab
        self._rule = RULES[rule]
        self._native = draft_calls()
        self._known: dict[str, dict[str, int]] = {}  # of drafters that rest: how many tokens of each sequence they have
        self.readers = PassReaders(drafters, drop=self._switch_off)

    @property
    def name(self) -> str:
        """The names of the drafters that are not switched off, separated by commas; `none` without any."""
        return ",".join(self.drafters) or "none"

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        for known in self._known.values():
            known[seq_id] = len(tokens)
        self._call_all(lambda drafter: drafter.begin(seq_id, tokens, params, tenant=tenant))

    def let_rest(
        self,
        names: frozenset[str],
        sequences: Mapping[str, DraftableSequence],
        tap: Callable[[Collection[int]], None],
    ) -> None:
        """The drafters of these names rest from now on, and no others: they get no tokens and are shown no states until
        they wake. `tap` is called with the layers that drafters read if they change."""
        before, resting = self.readers.taps, self.readers.resting
        for name in resting - names:
            self._catch_up(name, self._known.pop(name), sequences)
        for name in names - resting:
            self._known[name] = {seq_id: len(sequence.tokens) for seq_id, sequence in sequences.items()}
        self.readers.rest(names)
        if self.readers.taps != before:
            tap(self.readers.taps)

    def _catch_up(self, name: str, known: Mapping[str, int], sequences: Mapping[str, DraftableSequence]) -> None:
        """The tokens beyond those it knows, to a drafter that wakes."""

        def accept_all(drafter: Drafter) -> None:
            for seq_id, count in known.items():
                drafter.accept(seq_id, sequences[seq_id].tokens[count:])

        self._call(name, accept_all)

    def propose(
        self, spans: Sequence[Span], plan: Plan, sequences: Mapping[str, DraftableSequence]
    ) -> Mapping[str, Draft]:
        """The drafts of a plan by sequence: valid, not empty, none larger than its span has room for."""
        if not plan:
            return {}
        first = next(iter(self.drafters), "")
        made = self._native and self._native.requests(spans, plan, sequences, first, self._rule.needs_draft_probs)
        limits, requests = made or self._requests(spans, plan, sequences, first)
        if len(requests) == 1:
            name, drafter_requests = requests.popitem()
            return self.draft(drafter_requests, limits, drafter=name)
        drafts: dict[str, Draft] = {}
        for name, drafter_requests in requests.items():
            drafts |= self.draft(drafter_requests, limits, drafter=name)
        return drafts

    def draft(self, requests: Sequence[DraftRequest], limits: Mapping[str, int], *, drafter: str) -> dict[str, Draft]:
        """One drafter's valid, non-empty drafts by sequence, none of more than `limits[seq_id]` tokens; none from a
        drafter that was switched off."""
        source = self.drafters.get(drafter)
        if source is None:
            return {}
        valid: dict[str, Draft] | None = None
        try:
            drafts = source.propose(requests)
            if self._native is not None:
                valid = self._native.valid_chains(requests, drafts, limits, drafter, self.vocab)
            if valid is None:
                valid = {}
                self._check(drafts, requests, limits, source, valid)
        except Exception as error:
            self._switch_off(drafter, error)
        return valid or {}

    def _check(
        self,
        drafts: Iterable[Draft],
        requests: Iterable[DraftRequest],
        limits: Mapping[str, int],
        source: Drafter,
        valid: dict[str, Draft],
    ) -> None:
        """Add the valid parts of drafts that are not empty, as long as no draft is so wrong that an error is raised."""
        requested = {request.seq_id: request for request in requests}
        for draft in drafts:
            if draft.seq_id in requested:
                checked = self._valid_part(draft, requested[draft.seq_id], limits[draft.seq_id], source)
                if len(checked):
                    valid[draft.seq_id] = checked
                else:
                    valid.pop(draft.seq_id, None)

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        """Tokens that became known."""
        self._call_all(lambda drafter: drafter.accept(seq_id, tokens))

    def observe(self, output: TargetOutput, known: Mapping[str, Sequence[int]], ended: Collection[str]) -> None:
        """What a pass gave: its output, the tokens that became known by sequence, and the sequences that ended."""

        resting = self._known
        if len(resting) == len(self.drafters) and not ended:
            return
        for name, drafter in list(self.drafters.items()):
            try:
                if name not in resting:
                    drafter.observe(output)
                    for seq_id, tokens in known.items():
                        drafter.accept(seq_id, tokens)
                for seq_id in ended:
                    drafter.end(seq_id)
            except Exception as error:
                self._switch_off(name, error)
        for seq_id in ended:
            self._forget(seq_id)

    def _forget(self, seq_id: str) -> None:
        for each in self._known.values():
            each.pop(seq_id, None)

    def forget(self) -> None:
        """Drafters forget earlier requests. No sequence is running."""
        self._call_all(lambda drafter: drafter.forget() if isinstance(drafter, RemembersRequests) else None)

    def end(self, seq_id: str) -> None:
        self._forget(seq_id)
        self._call_all(lambda drafter: drafter.end(seq_id))

    def _requests(
        self, spans: Iterable[Span], plan: Plan, sequences: Mapping[str, DraftableSequence], first: str
    ) -> tuple[dict[str, int], dict[str, list[DraftRequest]]]:
        """The room for guesses of each span in the plan, and the draft requests by drafter; `first` drafts where no
        drafter is named."""
        limits = {span.seq_id: span.max_draft_tokens for span in spans if span.seq_id in plan}
        requests: dict[str, list[DraftRequest]] = {}
        for seq_id in limits:
            decision, sequence = plan[seq_id], sequences[seq_id]
            if decision.depth:
                request = DraftRequest(
                    sequence.id,
                    len(sequence.tokens),
                    decision.depth,
                    sequence.params,
                    sequence.seed,
                    sequence.choice,
                    self._rule.needs_draft_probs,
                    decision.min_survival,
                )
                requests.setdefault(decision.drafter or first, []).append(request)
        return limits, requests

    def _call_all(self, call: Callable[[Drafter], None]) -> None:
        for name in list(self.drafters):
            self._call(name, call)

    def _call(self, name: str, call: Callable[[Drafter], None]) -> None:
        try:
            call(self.drafters[name])
        except Exception as error:
            self._switch_off(name, error)

    def _switch_off(self, name: str, error: Exception) -> None:
        log.warning("Drafter %r failed and is switched off: %s: %s", name, type(error).__name__, error)
        self.failed[name] = f"{type(error).__name__}: {error}"
        del self.drafters[name]
        self._known.pop(name, None)
        self.readers.remove(name)

    # ---- checks of a draft ----------------------------------------------------------------------------------------

    def _valid_part(self, draft: Draft, request: DraftRequest, limit: int, drafter: Drafter) -> Draft:
        """The longest prefix of a draft that is a tree of known tokens within the limit; nothing of a draft that lacks
        the draft_probs it needs."""
        if self._is_valid_chain(draft, request, limit, drafter):
            return draft
        sound = self._has_needed_probs(draft, request, drafter)
        size = min(limit, len(draft.tokens), len(draft.parents)) if sound else 0
        for node in range(size):
            lowest = -1 if self._rule.verifies_trees else node - 1
            if not (0 <= draft.tokens[node] < self.vocab and lowest <= draft.parents[node] < node):
                size = node
                break
        return replace(
            draft,
            tokens=tuple(draft.tokens[:size]),
            parents=tuple(draft.parents[:size]),
            scores=tuple(draft.scores[:size]) if _has_valid_scores(draft) else (),
            drafter=drafter.name,
            draft_probs=None if draft.draft_probs is None else draft.draft_probs[:size],
        )

    def _is_valid_chain(self, draft: Draft, request: DraftRequest, limit: int, drafter: Drafter) -> bool:
        """Whether it is a chain with nothing to cut off, as nearly all drafts are; checked quickly."""
        tokens = draft.tokens
        return (
            len(tokens) <= limit
            and draft.drafter == drafter.name
            and draft.is_chain
            and (not tokens or (min(tokens) >= 0 and max(tokens) < self.vocab))
            and (not draft.scores or _has_valid_scores(draft))
            and self._has_needed_probs(draft, request, drafter)
        )

    def _has_needed_probs(self, draft: Draft, request: DraftRequest, drafter: Drafter) -> bool:
        """Whether sampled guesses have the distribution they were drawn from where it was requested: without it no
        distribution-exact rule is exact."""
        if draft.draft_probs is not None:
            return draft.draft_probs.shape == (len(draft.tokens), self.vocab)
        sampled = drafter.samples and not request.params.greedy
        return not (request.needs_draft_probs and sampled)


def _has_valid_scores(draft: Draft) -> bool:
    """Whether every guess has a score, and each is a probability."""
    scores = draft.scores
    if len(scores) != len(draft.tokens):
        return False
    total = sum(scores)  # NaN if one is, of which neither the least nor the greatest need tell
    return not scores or (min(scores) >= 0.0 and max(scores) <= 1.0 and total == total)
