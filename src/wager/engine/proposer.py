"""Calls the engine's drafters, checks their drafts, and goes on without a drafter that fails.

Drafts cannot change the text, so an invalid draft costs speed at most: nodes with unknown tokens, wrong parents or
beyond the sequence's room are cut off, and a drafter that raises is switched off with a warning. Every drafter gets
every token, so that one that did not draft for a while is up to date.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from wager.draft.base import ComputedRows, Drafter, RemembersRequests, RowReader, StateReader
from wager.engine.native import draft_calls
from wager.kernels.base import TargetOutput
from wager.types import RULES, Draft, DraftRequest, Outcome, Plan, SamplingParams, Span, VerifyRule

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
        self.vocab = vocab
        self._rule = RULES[rule]
        self._native = draft_calls()
        self._readers = {
            drafter.name: drafter
            for drafter in drafters
            if isinstance(drafter, StateReader) and drafter.taps is not None
        }
        self._row_readers = {
            drafter.name: drafter for drafter in drafters if isinstance(drafter, RowReader) and drafter.reads_rows
        }
        self.reads_passes = bool(self._readers or self._row_readers)
        """Whether some drafter reads the target's states, or its rows."""

    @property
    def name(self) -> str:
        """The names of the drafters that are not switched off, separated by commas; `none` without any."""
        return ",".join(self.drafters) or "none"

    @property
    def taps(self) -> frozenset[int]:
        """The layers that drafters read; see StateReader."""
        return frozenset(
            layer for name, reader in self._readers.items() if name in self.drafters for layer in reader.taps or ()
        )

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams) -> None:
        self._call_all(lambda drafter: drafter.begin(seq_id, tokens, params))

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

    def show(
        self,
        output: TargetOutput,
        spans: Sequence[Span],
        drafts: Mapping[str, Draft],
        outcomes: Mapping[str, Outcome],
    ) -> None:
        """A pass's states and rows to the drafters that read them."""
        computed = computed_rows(spans, outcomes) if self._readers else []
        tokens = row_tokens(spans, drafts) if self._row_readers else []
        for name in list(self.drafters):
            try:
                if name in self._readers:
                    self._readers[name].read(output, computed)
                if name in self._row_readers:
                    self._row_readers[name].read_rows(output, tokens)
            except Exception as error:
                self._switch_off(name, error)

    def observe(self, output: TargetOutput, known: Mapping[str, Sequence[int]], ended: Iterable[str]) -> None:
        """What a pass gave: its output, the tokens that became known by sequence, and the sequences that ended."""

        if not self.drafters:
            return
        for name, drafter in list(self.drafters.items()):
            try:
                drafter.observe(output)
                for seq_id, tokens in known.items():
                    drafter.accept(seq_id, tokens)
                for seq_id in ended:
                    drafter.end(seq_id)
            except Exception as error:
                self._switch_off(name, error)

    def forget(self) -> None:
        """Drafters forget earlier requests. No sequence is running."""
        self._call_all(lambda drafter: drafter.forget() if isinstance(drafter, RemembersRequests) else None)

    def end(self, seq_id: str) -> None:
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
        for name, drafter in list(self.drafters.items()):
            try:
                call(drafter)
            except Exception as error:
                self._switch_off(name, error)

    def _switch_off(self, name: str, error: Exception) -> None:
        log.warning("Drafter %r failed and is switched off: %s: %s", name, type(error).__name__, error)
        del self.drafters[name]

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


def computed_rows(spans: Sequence[Span], outcomes: Mapping[str, Outcome]) -> list[ComputedRows]:
    """Which rows of a pass are known tokens now: those of its spans, each followed by its accepted guesses."""
    computed, first, logits_row = [], 0, 0
    for span in spans:
        outcome = outcomes.get(span.seq_id)
        count, accepted = len(span.tokens), () if outcome is None else outcome.verdict.accepted
        rows = (*range(first, first + count), *(first + count + node for node in accepted))
        last = -1 if outcome is None else logits_row + (1 + accepted[-1] if accepted else 0)
        computed.append(ComputedRows(span.seq_id, span.num_computed_tokens, rows, last))
        drafted = 0 if outcome is None else outcome.drafted
        first += count + drafted
        logits_row += 0 if outcome is None else 1 + drafted
    return computed


def row_tokens(spans: Sequence[Span], drafts: Mapping[str, Draft]) -> list[int]:
    """The token that each row of logits follows: the last known one of a span, and its guesses."""
    tokens: list[int] = []
    for span in spans:
        if span.needs_logits:
            draft = drafts.get(span.seq_id)
            tokens += (span.tokens[-1], *(draft.tokens if draft else ()))
    return tokens


def _has_valid_scores(draft: Draft) -> bool:
    """Whether every guess has a score, and each is a probability."""
    scores = draft.scores
    if len(scores) != len(draft.tokens):
        return False
    total = sum(scores)  # NaN if one is, of which neither the least nor the greatest need tell
    return not scores or (min(scores) >= 0.0 and max(scores) <= 1.0 and total == total)
