"""Calls the engine's drafters, checks their drafts, and goes on without a drafter that fails.

Drafts cannot change the text, so an invalid draft costs speed at most: nodes with unknown tokens, wrong parents or
beyond the sequence's room are cut off. Every drafter gets every token, so that one that did not draft for a while is up
to date; one that rests, because the policy has no use for it or because it failed, gets them when it wakes.

A drafter that raises in a call about one sequence is left out for that sequence. One that raises otherwise, or for one
sequence after the other, has all of its sequences ended and pauses (drafter_pauses.py). When requests failed together,
each of them is asked for alone after the pause, so that the one that is to blame is found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from wager.draft.base import Drafter, DrafterStoppedError, RemembersRequests
from wager.engine.draft_checks import DraftChecks
from wager.engine.drafter_pauses import DrafterPauses
from wager.engine.native import draft_calls
from wager.engine.pass_readers import PassReaders
from wager.kernels.base import TargetOutput
from wager.tenants import NO_TENANT
from wager.types import RULES, Draft, DraftRequest, Plan, SamplingParams, Span, VerifyRule


class DraftableSequence(Protocol):
    """What a draft request needs of a sequence."""

    @property
    def id(self) -> str: ...

    @property
    def tokens(self) -> Sequence[int]: ...

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
        self.unsettled = False
        """Whether `let_rest` is to be called since a pause began or is over."""
        self._rule = RULES[rule]
        self._checks = DraftChecks(vocab=vocab, rule=rule)
        self._native = draft_calls()
        self._begun: set[str] = set()
        self._known: dict[str, dict[str, int]] = {}
        """Of drafters that rest: how many tokens of each sequence they have, 0 where it must begin anew."""
        self._left_out: dict[str, set[str]] = {name: set() for name in self.drafters}
        """The sequences that a drafter failed for: it is told nothing of them."""
        self._suspects: dict[str, set[str]] = {name: set() for name in self.drafters}
        """The sequences that drafts were requested for when a drafter failed: each is asked for alone, once."""
        self.readers = PassReaders(drafters, drop=self._pause)

    @property
    def failed(self) -> Mapping[str, str]:
        """Why drafters failed, of those that pause now."""
        return self.pauses.failed

    @property
    def name(self) -> str:
        """The names of the drafters that do not pause, separated by commas; `none` without any."""
        return ",".join(name for name in self.drafters if name not in self.failed) or "none"

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        self._begun.add(seq_id)
        for name, drafter in self.drafters.items():
            begin = partial(drafter.begin, seq_id, tokens, params, tenant=tenant)
            if name in self.failed:
                self._known[name][seq_id] = 0
            elif self._tell(name, seq_id, begin) and name in self._known:
                self._known[name][seq_id] = len(tokens)

    def let_rest(
        self,
        names: frozenset[str],
        sequences: Mapping[str, DraftableSequence],
        tap: Callable[[Collection[int]], None],
    ) -> None:
        """The drafters of these names rest from now on, beside those that pause, and no others: they get no tokens and
        are shown no states until they wake. `tap` is called with the layers that drafters read if they change."""
        before, unsettled, self.unsettled = self.readers.taps, self.unsettled, False
        resting = names | self.failed.keys()
        for name in self._known.keys() - resting:
            self._catch_up(name, self._known.pop(name), sequences)
        for name in (names & self.drafters.keys()) - self._known.keys():
            known = {seq_id: len(sequence.tokens) for seq_id, sequence in sequences.items()}
            self._known[name] = {seq_id: known[seq_id] for seq_id in known.keys() - self._left_out[name]}
        self.readers.rest(names, pausing=self.failed.keys())
        if unsettled or self.readers.taps != before:
            tap(self.readers.taps)

    def _catch_up(self, name: str, known: Mapping[str, int], sequences: Mapping[str, DraftableSequence]) -> None:
        """What it does not know of its sequences, to a drafter that wakes."""
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
            self._tell(name, seq_id, partial(bring_up, seq_id, count))

    def propose(
        self, spans: Sequence[Span], plan: Plan, sequences: Mapping[str, DraftableSequence]
    ) -> Mapping[str, Draft]:
        """The drafts of a plan by sequence: valid, not empty, none larger than its span has room for."""
        if not plan:
            return {}
        first = next((name for name in self.drafters if name not in self.failed), "")
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
        drafter that rests, or for sequences for which it is left out."""
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
                self._tell(name, seq_id, partial(drafter.accept, seq_id, tokens))

    def observe(self, output: TargetOutput, known: Mapping[str, Sequence[int]], ended: Collection[str]) -> None:
        """What a pass gave: its output, the tokens that became known by sequence, and the sequences that ended."""
        if len(self._known) < len(self.drafters):
            for name, drafter in self.drafters.items():
                if name not in self._known:
                    self._observe(name, drafter, output, known)
        for seq_id in ended:
            self.end(seq_id)
        if self.pauses.step():
            self.unsettled = True

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
        self._begun.discard(seq_id)
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

    # ---- drafters that fail ---------------------------------------------------------------------------------------

    def _tell(self, name: str, seq_id: str, call: Callable[[], None]) -> bool:
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
        served, known = self._begun - self._left_out[name], self._known.get(name)
        for seq_id in served:
            if known is None or known.get(seq_id, 0):
                with suppress(Exception):
                    self.drafters[name].end(seq_id)
        self._known[name] = dict.fromkeys(served, 0)
        self._suspects[name].clear()
        self.readers.rest(self.readers.resting, pausing=self.failed.keys())
        self.unsettled = True
