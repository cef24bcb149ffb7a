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
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import Protocol

from wager.draft.base import (
    ComputedRows,
    Drafter,
    DrafterStoppedError,
    LogitsRows,
    RemembersRequests,
    RowReader,
    StateReader,
)
from wager.kernels.base import TargetOutput
from wager.types import NO_TENANT, RULES, Draft, DraftRequest, Outcome, Plan, SamplingParams, Span, VerifyRule

log = logging.getLogger("wager")

FIRST_PAUSE = 16
LONGEST_PAUSE = 4096
STRIKES = 3
"""Sequences that a drafter may fail for, one after the other, until it pauses for all of them."""

_INTEGER_TYPES = frozenset({int})

_SOON = 8
"""A failure is soon within so many times the steps of the last pause."""


class DraftableSequence(Protocol):
    """What a draft request needs of a sequence."""

    @property
    def id(self) -> str: ...

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def params(self) -> SamplingParams: ...

    @property
    def tenant(self) -> str: ...

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
        self.pauses = DrafterPauses()
        self.changed = False
        """Whether `set_inactive` is to be called since a pause began or is over."""
        self._rule = RULES[rule]
        self._checks = DraftChecks(vocab=vocab, rule=rule)
        self._sequences: set[str] = set()
        self._known: dict[str, dict[str, int]] = {}
        """How many tokens of each sequence an inactive drafter has, 0 where the sequence must begin anew."""
        self._left_out: dict[str, set[str]] = {name: set() for name in self.drafters}
        """The sequences that a drafter failed for: it gets no calls about them."""
        self._suspects: dict[str, set[str]] = {name: set() for name in self.drafters}
        """The sequences that drafts were requested for when a drafter failed: each is asked for alone, once."""
        self.readers = OutputReaders(drafters, drop=self._pause)

    @property
    def failed(self) -> Mapping[str, str]:
        """Why drafters failed, of those that pause now."""
        return self.pauses.failed

    @property
    def name(self) -> str:
        """The names of the drafters that do not pause, separated by commas; `none` without any."""
        return ",".join(name for name in self.drafters if name not in self.failed) or "none"

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        self._sequences.add(seq_id)
        for name, drafter in self.drafters.items():
            begin = partial(drafter.begin, seq_id, tokens, params, tenant=tenant)
            if name in self.failed:
                self._known[name][seq_id] = 0
            elif self._call(name, seq_id, begin) and name in self._known:
                self._known[name][seq_id] = len(tokens)

    def set_inactive(
        self,
        names: frozenset[str],
        sequences: Mapping[str, DraftableSequence],
        tap: Callable[[Collection[int]], None],
    ) -> None:
        """The drafters of these names are inactive from now on, beside those that pause, and no others: they get no
        tokens and are shown no states until they are active again. `tap` is called with the layers that drafters read
        if they change."""
        before, changed, self.changed = self.readers.taps, self.changed, False
        inactive = names | self.failed.keys()
        for name in self._known.keys() - inactive:
            self._catch_up(name, self._known.pop(name), sequences)
        for name in (names & self.drafters.keys()) - self._known.keys():
            known = {seq_id: len(sequence.tokens) for seq_id, sequence in sequences.items()}
            self._known[name] = {seq_id: known[seq_id] for seq_id in known.keys() - self._left_out[name]}
        self.readers.set_inactive(names, paused=self.failed.keys())
        if changed or self.readers.taps != before:
            tap(self.readers.taps)

    def _catch_up(self, name: str, known: Mapping[str, int], sequences: Mapping[str, DraftableSequence]) -> None:
        """Give a drafter that is active again the tokens that it does not know."""
        drafter = self.drafters[name]

        def bring_up(seq_id: str, count: int) -> None:
            sequence = sequences[seq_id]
            if not count:
                count = sequence.prompt_tokens
                drafter.begin(seq_id, sequence.tokens[:count], sequence.params, tenant=sequence.tenant)
            drafter.accept(seq_id, sequence.tokens[count:])

        for seq_id, count in known.items():
            if name in self.failed:
                return
            self._call(name, seq_id, partial(bring_up, seq_id, count))

    def propose(
        self, spans: Sequence[Span], plan: Plan, sequences: Mapping[str, DraftableSequence]
    ) -> Mapping[str, Draft]:
        """The drafts of a plan by sequence: valid, not empty, none larger than its span has room for."""
        if not plan:
            return {}
        first = next((name for name in self.drafters if name not in self.failed), "")
        limits, requests = self._requests(spans, plan, sequences, first)
        if len(requests) == 1:
            name, drafter_requests = requests.popitem()
            return self.draft(drafter_requests, limits, drafter=name)
        drafts: dict[str, Draft] = {}
        for name, drafter_requests in requests.items():
            drafts |= self.draft(drafter_requests, limits, drafter=name)
        return drafts

    def draft(self, requests: Sequence[DraftRequest], limits: Mapping[str, int], *, drafter: str) -> dict[str, Draft]:
        """One drafter's valid, non-empty drafts by sequence, none of more than `limits[seq_id]` tokens; none from a
        drafter that is inactive, or for sequences for which it is left out."""
        source = self.drafters.get(drafter)
        if source is None or drafter in self._known:
            return {}
        if left_out := self._left_out[drafter]:
            requests = [request for request in requests if request.seq_id not in left_out]
        suspects = self._suspects[drafter]
        alone = [[request] for request in requests if request.seq_id in suspects]
        others = [request for request in requests if request.seq_id not in suspects] if alone else requests
        drafts: dict[str, Draft] = {}
        for asked in (*alone, others):
            if asked and drafter not in self.failed:
                suspects.difference_update([request.seq_id for request in asked])
                drafts |= self._ask(source, asked, limits)
        return drafts

    def _ask(self, source: Drafter, requests: Sequence[DraftRequest], limits: Mapping[str, int]) -> dict[str, Draft]:
        """The valid drafts of a call; none if the drafter fails."""
        name = source.name
        valid: dict[str, Draft] = {}
        try:
            self._checks.collect(source.propose(requests), requests, limits, drafter=source, valid=valid)
        except DrafterStoppedError as error:
            self._pause(name, error)
        except Exception as error:
            if len(requests) == 1:
                self._leave_out(name, requests[0].seq_id, error)
            else:
                self._pause(name, error)
                self._suspects[name].update(request.seq_id for request in requests)
        return valid

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        """Tokens that became known."""
        for name, drafter in self.drafters.items():
            if name not in self._known and seq_id not in self._left_out[name]:
                self._call(name, seq_id, partial(drafter.accept, seq_id, tokens))

    def observe(self, output: TargetOutput, known: Mapping[str, Sequence[int]], ended: Collection[str]) -> None:
        """What a pass gave: its output, the tokens that became known by sequence, and the sequences that ended."""
        if len(self._known) < len(self.drafters):
            for name, drafter in self.drafters.items():
                if name not in self._known:
                    self._observe(name, drafter, output, known)
        for seq_id in ended:
            self.end(seq_id)
        if self.pauses.step():
            self.changed = True

    def _observe(self, name: str, drafter: Drafter, output: TargetOutput, known: Mapping[str, Sequence[int]]) -> None:
        left_out = self._left_out[name]
        try:
            drafter.observe(output)
        except Exception as error:
            self._pause(name, error)
            return
        for seq_id, tokens in known.items():
            if seq_id in left_out:
                continue
            try:
                drafter.accept(seq_id, tokens)
            except Exception as error:
                self._leave_out(name, seq_id, error)
                if name in self._known:
                    return

    def forget(self) -> None:
        """Drafters forget earlier requests. No sequence is running."""
        for name, drafter in self.drafters.items():
            try:
                if isinstance(drafter, RemembersRequests):
                    drafter.forget()
            except Exception as error:
                self._pause(name, error)

    def end(self, seq_id: str) -> None:
        self._sequences.discard(seq_id)
        for name, drafter in self.drafters.items():
            known, left_out = self._known.get(name), self._left_out[name]
            has_it = seq_id not in left_out and (known is None or known.pop(seq_id, 0) > 0)
            left_out.discard(seq_id)
            self._suspects[name].discard(seq_id)
            if has_it:
                try:
                    drafter.end(seq_id)
                except Exception as error:
                    self._strike(name, error)
                else:
                    self.pauses.served(name)

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
                    sequence.num_tokens,
                    decision.depth,
                    sequence.params,
                    sequence.seed,
                    sequence.choice,
                    self._rule.needs_draft_probs,
                    decision.min_survival,
                )
                requests.setdefault(decision.drafter or first, []).append(request)
        return limits, requests

    # ---- drafters that fail ---------------------------------------------------------------------------------------

    def _call(self, name: str, seq_id: str, call: Callable[[], None]) -> bool:
        """Make a call about one sequence; whether it succeeded."""
        try:
            call()
        except Exception as error:
            self._leave_out(name, seq_id, error)
            return False
        return True

    def _leave_out(self, name: str, seq_id: str, error: Exception) -> None:
        """The drafter failed for this sequence."""
        with suppress(Exception):
            self.drafters[name].end(seq_id)
        self._left_out[name].add(seq_id)
        self._strike(name, error)

    def _strike(self, name: str, error: Exception) -> None:
        if self.pauses.strike(name, error):
            self._pause(name, error)

    def _pause(self, name: str, error: Exception) -> None:
        """The drafter failed: its sequences begin anew when the pause is over."""
        if name in self.failed:
            return
        self.pauses.begin(name, error)
        served, known = self._sequences - self._left_out[name], self._known.get(name)
        for seq_id in served:
            if known is None or known.get(seq_id, 0):
                with suppress(Exception):
                    self.drafters[name].end(seq_id)
        self._known[name] = dict.fromkeys(served, 0)
        self._suspects[name].clear()
        self.readers.set_inactive(self.readers.inactive, paused=self.failed.keys())
        self.changed = True


# ---- drafts that are checked ------------------------------------------------------------


class DraftChecks:
    """For a target of `vocab` logits, and a rule."""

    def __init__(self, *, vocab: int, rule: VerifyRule) -> None:
        self._vocab, self._rule = vocab, RULES[rule]

    def collect(
        self,
        drafts: Sequence[Draft],
        requests: Sequence[DraftRequest],
        limits: Mapping[str, int],
        *,
        drafter: Drafter,
        valid: dict[str, Draft],
    ) -> None:
        """Add the valid parts of a drafter's drafts that are not empty to `valid`, as long as no draft is so wrong that
        an error is raised; none has more than `limits[seq_id]` tokens."""
        requested = {request.seq_id: request for request in requests}
        for draft in drafts:
            if draft.seq_id in requested:
                checked = self._valid_part(draft, requested[draft.seq_id], limits[draft.seq_id], drafter)
                if len(checked):
                    valid[draft.seq_id] = checked
                else:
                    valid.pop(draft.seq_id, None)

    def _valid_part(self, draft: Draft, request: DraftRequest, limit: int, drafter: Drafter) -> Draft:
        """The longest prefix of a draft that is a tree of known tokens within the limit; nothing of a draft that lacks
        the draft_probs it needs."""
        if self._is_valid_chain(draft, request, limit, drafter):
            return draft
        sound = self._has_needed_probs(draft, request, drafter)
        tokens, parents = _integers(draft.tokens), _integers(draft.parents)
        size = min(limit, len(tokens), len(parents)) if sound else 0
        for node in range(size):
            lowest = -1 if self._rule.verifies_trees else node - 1
            if not (0 <= tokens[node] < self._vocab and lowest <= parents[node] < node):
                size = node
                break
        return replace(
            draft,
            tokens=tokens[:size],
            parents=parents[:size],
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
            and _INTEGER_TYPES.issuperset(map(type, tokens))
            and _INTEGER_TYPES.issuperset(map(type, draft.parents))
            and (not tokens or (min(tokens) >= 0 and max(tokens) < self._vocab))
            and (not draft.scores or _has_valid_scores(draft))
            and self._has_needed_probs(draft, request, drafter)
        )

    def _has_needed_probs(self, draft: Draft, request: DraftRequest, drafter: Drafter) -> bool:
        """Whether sampled guesses have the distribution they were drawn from where it was requested: without it no
        distribution-exact rule is exact."""
        if draft.draft_probs is not None:
            return draft.draft_probs.shape == (len(draft.tokens), self._vocab)
        sampled = drafter.samples and not request.params.greedy
        return not (request.needs_draft_probs and sampled)


def _integers(values: Iterable[object]) -> tuple[int, ...]:
    """As Python's own, up to the first that is no integer."""
    integers: list[int] = []
    with suppress(TypeError):
        integers.extend(map(index, values))  # type: ignore[arg-type]
    return tuple(integers)


def _has_valid_scores(draft: Draft) -> bool:
    """Whether every guess has a score, and each is a probability."""
    scores = draft.scores
    if len(scores) != len(draft.tokens):
        return False
    total = sum(scores)  # NaN if one is, of which neither the least nor the greatest need tell
    return not scores or (min(scores) >= 0.0 and max(scores) <= 1.0 and total == total)


# ---- drafters that pause ------------------------------------------------------------


@dataclass(slots=True)
class _Record:
    """Of one drafter: its failures so far, the sequences that it failed for since it served one to its end, and the
    steps of its last pause, which is over in step number `until`."""

    failures: int = 0
    strikes: int = 0
    pause: int = 0
    until: int = 0


class DrafterPauses:
    """`failed` are the drafters that pause now, with the reason."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        self._records: defaultdict[str, _Record] = defaultdict(_Record)
        self._now = 0

    def failures(self, name: str) -> int:
        """How often this drafter has failed until now."""
        return self._records[name].failures if name in self._records else 0

    def strike(self, name: str, error: Exception) -> bool:
        """It failed for one sequence, which it gets no more calls about. Whether it is to pause for all of them."""
        record = self._records[name]
        record.strikes += 1
        if record.strikes < STRIKES:
            self._note(name, error, "is left out for one sequence")
        return record.strikes >= STRIKES

    def served(self, name: str) -> None:
        """It has served a sequence to its end."""
        if name in self._records:
            self._records[name].strikes = 0

    def begin(self, name: str, error: Exception) -> None:
        """It failed, and pauses from now on."""
        record = self._records[name]
        soon = record.pause and self._now - record.until < _SOON * record.pause
        record.pause = min(LONGEST_PAUSE, 2 * record.pause) if soon else FIRST_PAUSE
        record.until = self._now + record.pause
        self.failed[name] = _reason(error)
        self._note(name, error, f"pauses for {record.pause} steps")

    def step(self) -> bool:
        """A step was taken; whether a pause is over."""
        self._now += 1
        if not self.failed:
            return False
        over = [name for name in self.failed if self._records[name].until <= self._now]
        for name in over:
            del self.failed[name]
        return bool(over)

    def _note(self, name: str, error: Exception, what: str) -> None:
        """Count a failure; the 1st, 2nd, 4th, 8th and so on are logged."""
        record = self._records[name]
        record.failures += 1
        if record.failures.bit_count() == 1:
            count = f" (failure {record.failures})" if record.failures > 1 else ""
            log.warning("Drafter %r failed and %s: %s%s", name, what, _reason(error), count)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, DrafterStoppedError) else f"{type(error).__name__}: {error}"


# ---- drafters that read the target's outputs ------------------------------------------------------------


class OutputReaders:
    """Those of `drafters` that read the target's states, or its rows of logits. `drop` is called with the name and the
    error of one that fails.

    `taps` are the layers whose residual stream passes must give: those that an active drafter reads. `reads_passes`:
    whether something is to be shown; `reads_states`: whether some drafter reads states, active or not. Rows of logits
    are shown to inactive drafters too: what they learn from them is of other texts as well. A paused drafter is shown
    nothing.
    """

    def __init__(self, drafters: Sequence[Drafter], *, drop: Callable[[str, Exception], None]) -> None:
        self.inactive: frozenset[str] = frozenset()
        self._paused: frozenset[str] = frozenset()
        self._states: dict[str, StateReader] = {}
        self._rows: dict[str, RowReader] = {}
        for drafter in drafters:
            if isinstance(drafter, StateReader) and drafter.taps is not None:
                self._states[drafter.name] = drafter
            if isinstance(drafter, RowReader) and drafter.reads_rows:
                self._rows[drafter.name] = drafter
        self._drop, self.reads_states = drop, bool(self._states)
        self._choose()

    def set_inactive(self, names: frozenset[str], *, paused: Collection[str] = ()) -> None:
        """These are inactive or paused from now on, and no others."""
        self.inactive, self._paused = names, frozenset(paused)
        self._choose()

    def _choose(self) -> None:
        active = {name: each for name, each in self._states.items() if name not in self.inactive | self._paused}
        self._active = list(active.items())
        self._shown_rows = [(name, each) for name, each in self._rows.items() if name not in self._paused]
        self.reads_passes = bool(self._active or self._shown_rows)
        self.taps = frozenset(layer for reader in active.values() for layer in reader.taps or ())

    def show(
        self,
        output: TargetOutput,
        spans: Sequence[Span],
        drafts: Mapping[str, Draft],
        outcomes: Mapping[str, Outcome],
    ) -> None:
        """A pass's states and rows to the drafters that read them."""
        computed = computed_rows(spans, outcomes) if self._active else []
        for name, reader in self._active:
            try:
                reader.read(output, computed)
            except Exception as error:
                self._drop(name, error)
        shown_rows = [each for each in self._shown_rows if each[0] not in self._paused]
        rows = logits_rows(spans, drafts) if shown_rows else []
        for name, row_reader in shown_rows:
            try:
                row_reader.read_rows(output, rows)
            except Exception as error:
                self._drop(name, error)


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
