"""Calls the engine's drafters, checks their drafts, and goes on without a drafter that fails.

Drafts cannot change the text, so an invalid draft costs speed at most: nodes with unknown tokens, wrong parents or
beyond the sequence's room are cut off. Every drafter gets every token, so that one that did not draft for a while is up
to date; one that is inactive, because the policy has no use for it or because it failed, gets them when it is active
again.

A drafter that raises in a call about one sequence is left out for that sequence. One that raises otherwise, or for one
sequence after the other, has all of its sequences ended and pauses. When requests failed together, each of them is
asked for alone after the pause, so that the one that is to blame is found.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from wager.draft.base import (
    ComputedRows,
    Drafter,
    DrafterStoppedError,
    LogitsRows,
    valid_part,
)
from wager.kernels import _native
from wager.kernels.base import TargetOutput
from wager.tenants import HasTenant
from wager.types import NO_TENANT, RULES, Draft, DraftRequest, Outcome, Plan, SamplingParams, Span, VerifyRule

log = logging.getLogger("wager")

FIRST_PAUSE = 16
LONGEST_PAUSE = 4096
STRIKES = 3
"""Sequences that a drafter may fail for, one after the other, until it pauses for all of them."""

_SOON = 8
"""A failure is soon if it comes within this multiple of the last pause's steps."""


class KnownSequence(HasTenant, Protocol):
    """What drafting needs of a sequence: EngineSequence has it, and what the plugin for vLLM keeps of a request."""

    @property
    def id(self) -> str: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def seed(self) -> int: ...
    @property
    def choice(self) -> int: ...


@dataclass(slots=True, eq=False)
class _ServedDrafter:
    """A drafter, and what is kept of it."""

    drafter: Drafter
    active: bool = True
    known: dict[str, int] = field(default_factory=dict)
    """While it is inactive: how many tokens of each sequence it has, 0 where the sequence must begin anew."""
    left_out: set[str] = field(default_factory=set)
    """The sequences that it failed for: it gets no calls about them."""
    suspects: set[str] = field(default_factory=set)
    """The sequences that drafts were requested for when it failed: each is asked for alone, once."""
    strikes: int = 0
    """Sequences that it failed for since it served one to its end."""
    pause: int = 0
    """The steps of its last pause, which is over in step number `until`."""
    until: int = 0


class Proposer:
    """Any number of drafters with different names. Never raises because of one of them.

    `vocab` is the target's number of logits. `rule` decides whether drafts must have draft_probs, and whether they may
    be trees.
    """

    def __init__(self, *drafters: Drafter, vocab: int, rule: VerifyRule = "match") -> None:
        self.drafters = {drafter.name: drafter for drafter in drafters}
        self.failed: dict[str, str] = {}
        """Why drafters failed, of those that pause now."""
        self.failures: Counter[str] = Counter()
        """How often each drafter has failed."""
        self.changed = False
        """Whether `set_inactive` is to be called since a pause began or is over, or a drafter reads other layers."""
        self._vocab, self._rule = vocab, RULES[rule]
        self._served = {drafter.name: _ServedDrafter(drafter) for drafter in drafters}
        self._sequences: set[str] = set()
        self._steps = 0
        self.inactive: frozenset[str] = frozenset()
        """The drafters that `set_inactive` named."""
        self._states = [served for served in self._served.values() if served.drafter.taps is not None]
        self._rows = [served for served in self._served.values() if served.drafter.reads_rows]
        self.reads_states = bool(self._states)
        """Whether a drafter reads the target's states, active or not."""
        self._choose_readers()

    @property
    def _first(self) -> str:
        """The name of the first drafter that does not pause; "" without any."""
        return next((name for name in self.drafters if name not in self.failed), "")

    @property
    def name(self) -> str:
        """The names of the drafters that do not pause, separated by commas; `none` without any."""
        return ",".join(name for name in self.drafters if name not in self.failed) or "none"

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        self._sequences.add(seq_id)
        for name, served in self._served.items():
            if name in self.failed:
                served.known[seq_id] = 0
                continue
            try:
                served.drafter.begin(seq_id, tokens, params, tenant=tenant)
            except Exception as error:
                self._leave_out(served, seq_id, error)
            else:
                if not served.active:
                    served.known[seq_id] = len(tokens)

    def set_inactive(
        self,
        names: frozenset[str],
        sequences: Mapping[str, KnownSequence],
        tap: Callable[[Collection[int]], None],
    ) -> None:
        """The drafters of these names are inactive from now on, beside those that pause, and no others: they get no
        tokens and are shown no states until they are active again. `tap` is called with the layers that drafters read
        if they change."""
        before, changed = self.taps, self.changed
        self.inactive, self.changed = names, False
        for name, served in self._served.items():
            inactive = name in names or name in self.failed
            if served.active and inactive:
                known = {
                    seq_id: len(each.tokens) for seq_id, each in sequences.items() if seq_id not in served.left_out
                }
                served.active, served.known = False, known
            elif not served.active and not inactive:
                self._catch_up(served, sequences)
        self._choose_readers()
        if changed or self.taps != before:
            tap(self.taps)

    def _catch_up(self, served: _ServedDrafter, sequences: Mapping[str, KnownSequence]) -> None:
        """Give a drafter that is active again the tokens that it does not know."""
        drafter, known = served.drafter, served.known
        served.active, served.known = True, {}
        for seq_id, count in known.items():
            sequence = sequences[seq_id]
            try:
                if not count:
                    count = sequence.prompt_tokens
                    drafter.begin(seq_id, sequence.tokens[:count], sequence.params, tenant=sequence.tenant)
                drafter.accept(seq_id, sequence.tokens[count:])
            except Exception as error:
                self._leave_out(served, seq_id, error)
                if not served.active:
                    return

    def propose(self, spans: Iterable[Span], plan: Plan, sequences: Mapping[str, KnownSequence]) -> Mapping[str, Draft]:
        """The drafts of a plan by sequence: valid, not empty, none larger than its span has room for."""
        if not plan:
            return {}
        limits: dict[str, int] = {}
        requests: dict[str, list[DraftRequest]] = {}
        needs_draft_probs = self._rule.needs_draft_probs
        for seq_id, computed, tokens, _, limit in spans:
            decision = plan.get(seq_id)
            if decision is None or not decision.depth:
                continue
            sequence, limits[seq_id] = sequences[seq_id], limit
            depth, drafter, min_survival, prices = decision
            given = (
                sequence.params,
                sequence.seed,
                sequence.choice,
                needs_draft_probs,
                min_survival,
                (),
                prices,
                computed,
            )
            position = computed + len(tokens)
            request = tuple.__new__(DraftRequest, (seq_id, position, depth, *given))  # its own is a function of Python
            name = drafter or self._first
            if name in requests:
                requests[name].append(request)
            else:
                requests[name] = [request]
        drafts: dict[str, Draft] = {}
        for name, drafter_requests in requests.items():
            drafts |= self.draft(drafter_requests, limits, drafter=name)
        return drafts

    def draft(self, requests: Sequence[DraftRequest], limits: Mapping[str, int], *, drafter: str) -> dict[str, Draft]:
        """One drafter's valid, non-empty drafts by sequence, none of more than `limits[seq_id]` tokens; none from a
        drafter that is inactive, or for sequences for which it is left out."""
        served = self._served.get(drafter)
        if served is None or not served.active:
            return {}
        if served.left_out:
            requests = [request for request in requests if request.seq_id not in served.left_out]
        if not served.suspects:
            return self._ask(served, requests, limits) if requests else {}
        drafts: dict[str, Draft] = {}
        alone = [[request] for request in requests if request.seq_id in served.suspects]
        others = [request for request in requests if request.seq_id not in served.suspects]
        for asked in (*alone, others):
            if asked and served.active:
                served.suspects.difference_update([request.seq_id for request in asked])
                drafts |= self._ask(served, asked, limits)
        return drafts

    def _ask(
        self, served: _ServedDrafter, requests: Sequence[DraftRequest], limits: Mapping[str, int]
    ) -> dict[str, Draft]:
        """The valid drafts of a call, up to where the drafter fails."""
        drafter, valid = served.drafter, dict[str, Draft]()
        try:
            drafts = drafter.propose(requests)
            chains = not self._rule.verifies_trees
            checked = _native.valid_drafts(drafts, requests, limits, drafter.name, self._vocab, chains, True)
            if checked is not None:  # as nearly always
                return checked
            requested = {request.seq_id: request for request in requests}
            for draft in drafts:
                request = requested.get(draft.seq_id)
                if request is not None:
                    part = self._valid_part(draft, request, limits[draft.seq_id], drafter)
                    if part.tokens:
                        valid[draft.seq_id] = part
                    else:
                        valid.pop(draft.seq_id, None)
        except DrafterStoppedError as error:
            self._pause(served, error)
        except Exception as error:
            if len(requests) == 1:
                self._leave_out(served, requests[0].seq_id, error)
            else:
                self._pause(served, error)
                served.suspects.update([request.seq_id for request in requests])
        return valid

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        """Tokens that became known."""
        for served in self._served.values():
            if served.active:
                self._accept(served, {seq_id: tokens})

    def observe(self, output: TargetOutput, known: Mapping[str, Sequence[int]], ended: Collection[str]) -> None:
        """What a pass gave: its output, the tokens that became known by sequence, and the sequences that ended."""
        for served in self._served.values():
            if served.active:
                try:
                    served.drafter.observe(output)
                except Exception as error:
                    self._pause(served, error)
                else:
                    self._accept(served, known)
        for seq_id in ended:
            self.end(seq_id)
        self._steps += 1
        if self._states and self._read_layers != [served.drafter.taps for served in self._states]:
            self.changed = True
        if self.failed:
            for name in [name for name in self.failed if self._served[name].until <= self._steps]:
                del self.failed[name]
                self.changed = True

    def _accept(self, served: _ServedDrafter, known: Mapping[str, Sequence[int]]) -> None:
        for seq_id, tokens in known.items():
            if seq_id in served.left_out:
                continue
            try:
                served.drafter.accept(seq_id, tokens)
            except Exception as error:
                self._leave_out(served, seq_id, error)
                if not served.active:
                    return

    def forget(self) -> None:
        """Drafters forget earlier requests. No sequence is running."""
        for served in self._served.values():
            try:
                served.drafter.forget()
            except Exception as error:
                self._pause(served, error)

    def end(self, seq_id: str) -> None:
        self._sequences.discard(seq_id)
        for served in self._served.values():
            has_it = seq_id not in served.left_out and (served.active or served.known.pop(seq_id, 0) > 0)
            served.left_out.discard(seq_id)
            served.suspects.discard(seq_id)
            if has_it:
                try:
                    served.drafter.end(seq_id)
                except Exception as error:
                    self._strike(served, error)
                else:
                    served.strikes = 0

    # ---- drafters that read the target's outputs -------------------------------------------------------------------

    def _choose_readers(self) -> None:
        """Inactive drafters are shown no states, but rows of logits: what they learn from them is of other texts as
        well. Paused ones are shown nothing."""
        self._read_layers = [served.drafter.taps for served in self._states]
        self._shown_states = [each for each in self._states if each.active and each.drafter.taps is not None]
        self._shown_rows = [each for each in self._rows if each.drafter.name not in self.failed]
        self.reads_passes = bool(self._shown_states or self._shown_rows)
        """Whether passes are to be shown."""
        self.taps = frozenset(layer for served in self._shown_states for layer in served.drafter.taps or ())
        """The layers whose residual stream passes must give."""

    def show(
        self,
        output: TargetOutput,
        spans: Sequence[Span],
        drafts: Mapping[str, Draft],
        outcomes: Mapping[str, Outcome],
    ) -> None:
        """A pass's states and rows of logits to the drafters that read them."""
        computed = computed_rows(spans, outcomes) if self._shown_states else []
        for served in self._shown_states:
            try:
                served.drafter.read(output, computed)
            except Exception as error:
                self._pause(served, error)
        self.show_rows(output, logits_rows(spans, drafts) if self._shown_rows else [])

    def show_rows(self, output: TargetOutput, rows: Sequence[LogitsRows]) -> None:
        """Only the rows of logits."""
        for served in self._shown_rows:
            try:
                served.drafter.read_rows(output, rows)
            except Exception as error:
                self._pause(served, error)

    # ---- drafters that fail ---------------------------------------------------------------------------------------

    def _leave_out(self, served: _ServedDrafter, seq_id: str, error: Exception) -> None:
        """The drafter failed for this sequence."""
        with suppress(Exception):
            served.drafter.end(seq_id)
        served.left_out.add(seq_id)
        self._strike(served, error)

    def _strike(self, served: _ServedDrafter, error: Exception) -> None:
        served.strikes += 1
        if served.strikes < STRIKES:
            self._note(served, error, "is left out for one sequence")
        else:
            self._pause(served, error)

    def _pause(self, served: _ServedDrafter, error: Exception) -> None:
        """The drafter failed: its sequences begin anew when the pause is over."""
        drafter = served.drafter
        if drafter.name in self.failed:
            return
        soon = served.pause and self._steps - served.until < _SOON * served.pause
        served.pause = min(LONGEST_PAUSE, 2 * served.pause) if soon else FIRST_PAUSE
        served.until = self._steps + served.pause
        self.failed[drafter.name] = self._note(served, error, f"pauses for {served.pause} steps")
        begun = self._sequences - served.left_out
        for seq_id in begun:
            if served.active or served.known.get(seq_id, 0):
                with suppress(Exception):
                    drafter.end(seq_id)
        served.active, served.known = False, dict.fromkeys(begun, 0)
        served.suspects.clear()
        self._choose_readers()
        self.changed = True

    def _note(self, served: _ServedDrafter, error: Exception, what: str) -> str:
        """Count a failure; the 1st, 2nd, 4th, 8th and so on are logged. The reason in words."""
        name = served.drafter.name
        reason = str(error) if isinstance(error, DrafterStoppedError) else f"{type(error).__name__}: {error}"
        self.failures[name] += 1
        number = self.failures[name]
        if number.bit_count() == 1:
            count = f" (failure {number})" if number > 1 else ""
            log.warning("Drafter %r failed and %s: %s%s", name, what, reason, count)
        return reason

    # ---- drafts that are checked ----------------------------------------------------------------------------------

    def _valid_part(self, draft: Draft, request: DraftRequest, limit: int, drafter: Drafter) -> Draft:
        """What can be verified of a draft; nothing where sampled guesses lack the distribution they were drawn from and
        it was requested: without it no distribution-exact rule is exact."""
        if request.needs_draft_probs and draft.draft_probs is None and drafter.samples and not request.params.greedy:
            return Draft(draft.seq_id)
        checked = valid_part(draft, limit=limit, vocab=self._vocab, chains=not self._rule.verifies_trees)
        return checked if checked.drafter == drafter.name else replace(checked, drafter=drafter.name)


# ---- which rows of a pass are whose ----------------------------------------------------------------------


def computed_rows(spans: Sequence[Span], outcomes: Mapping[str, Outcome]) -> list[ComputedRows]:
    """Which rows of a pass are known tokens now: those of its spans, each followed by its accepted guesses."""
    computed, first, logits_row = [], 0, 0
    for span in spans:
        outcome = outcomes.get(span.seq_id)
        count, accepted = len(span.tokens), () if outcome is None else outcome.verdict.accepted
        rows: Sequence[int] = range(first, first + count)
        if accepted:
            rows = (*rows, *(first + count + node for node in accepted))
        last = -1 if outcome is None else logits_row + (1 + accepted[-1] if accepted else 0)
        computed.append(ComputedRows(span.seq_id, span.num_computed_tokens, rows, last))
        drafted = 0 if outcome is None else outcome.drafted
        first += count + drafted
        logits_row += 0 if outcome is None else 1 + drafted
    return computed


def logits_rows(spans: Sequence[Span], drafts: Mapping[str, Draft]) -> list[LogitsRows]:
    """The rows of logits by sequence: they follow the last known token of a span, and its guesses."""
    rows, first = [], 0
    for span in spans:
        if span.needs_logits:
            draft = drafts.get(span.seq_id)
            tokens = (span.tokens[-1], *(draft.tokens if draft else ()))
            rows.append(LogitsRows(span.seq_id, first, tokens))
            first += len(tokens)
    return rows
