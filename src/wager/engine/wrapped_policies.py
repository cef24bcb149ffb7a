"""Policies around the engine's own: what requests say about speculation, grammars on guesses, and tenants.

The policy sees the sequences of requests that choose for themselves as it sees prompts: rows that it can do nothing
about.

A grammar works after the policy has admitted guesses. What it forbids is not verified, and what it forces is guessed:
forced tokens are always right, so their rows would have to be computed anyway. A grammar forces bytes; its guess is the
way these are usually written in tokens, and verification decides, as for every guess.

What a policy learns of the acceptance of one tenant's texts decides nothing for another's. Tenants whose sequences run
at the same time share steps, and with them prices and rows: these are decided together, by one further policy that
learns from such steps alone. What a step takes is learned for all of them, in the latency model that they share: it is
a fact of the machine, not of a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wager.draft.base import Drafter
from wager.draft.corpus.kept import KeptPerTenant
from wager.economics.acceptance import AcceptanceModel
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import Policy, WrappedPolicy, longest_that_fits, truncate_to
from wager.engine.sequence import EngineSequence
from wager.errors import GrammarError, RequestError
from wager.tenants import HasTenant
from wager.types import (
    DRAFT_STAGE,
    GRAMMAR_DRAFTER,
    NO_TENANT,
    REQUESTED_STAGE,
    Draft,
    DraftDecision,
    GrammarState,
    Plan,
    Request,
    RequestSpeculation,
    Span,
    StepRecord,
    Verdict,
)

if TYPE_CHECKING:
    from wager.draft.corpus.learning import LearnedTexts


class RequestPolicy(WrappedPolicy):
    """Decides as `policy`, except for requests that say how they speculate or have a grammar. `sequences` are the
    engine's. Their guesses take as many rows of a step as they like while one request runs; beside others, whose tokens
    would come later, `most_rows` of them and of prompts (None: any number)."""

    def __init__(
        self,
        policy: Policy,
        sequences: Mapping[str, EngineSequence],
        *,
        most_rows: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._requests = _RequestDecisions(policy, sequences, most_rows, done=self.bind)
        self._left_out: frozenset[str] = frozenset()
        super().__init__(policy)

    @property
    def deciding(self) -> Policy:
        """`policy` where no request has a say."""
        requests = self._requests
        return requests if requests.decisions or requests.constrained or requests.drafts else self.policy

    def bind(self) -> None:
        self._requests.policy = self.policy
        super().bind()

    @staticmethod
    def check(request: Request, drafters: Mapping[str, Drafter]) -> None:
        """RequestError if the engine has no such drafter."""
        choice = request.speculation
        if choice is None or choice.depth == 0 or choice.named(drafters) in drafters:
            return
        raise RequestError(
            f"The request wants {f'drafter {choice.drafter!r}' if choice.drafter else 'a drafter'}; this engine has "
            f"{', '.join(drafters) or 'none'}.",
            "Name one that it was loaded with (the option drafter), or none at all (depth 0).",
            field="speculation",
        )

    def add(self, sequence: EngineSequence, drafters: Mapping[str, Drafter]) -> None:
        """A sequence is about to begin."""
        if sequence.request.speculation is not None:
            self._requests.decisions[sequence.id] = _decision(sequence.request.speculation, drafters)
        if sequence.constrained:
            self._requests.constrained.add(sequence.id)
        if self.deciding is self._requests:
            self.bind()

    # ---- the interface of a policy ----------------------------------------------------------------------------------

    def begin(self, sequence: str, *, weight: float) -> None:
        if sequence not in self._requests.decisions:
            self.policy.begin(sequence, weight=weight)

    def end(self, sequence: str) -> None:
        self.policy.end(sequence)
        if self.deciding is self._requests:
            self._requests.decisions.pop(sequence, None)
            self._requests.constrained.discard(sequence)
            self.bind()

    @property
    def inactive_drafters(self) -> frozenset[str]:
        return self.deciding.inactive_drafters

    def leave_out(self, drafters: frozenset[str]) -> None:
        self._left_out = drafters
        self.policy.leave_out(drafters)

    def explain(self) -> str:
        lines, count = [self.policy.explain()], len(self._requests.decisions)
        if self._left_out:
            lines.append(f"Failed, and not asked until a pause is over: {', '.join(sorted(self._left_out))}.")
        if count:
            lines.append(f"Sequences that draft as their requests say: {count}.")
        return "\n".join(lines)


class _RequestDecisions(Policy):
    """Decides about the steps in which a sequence of `decisions` (what its request says) or of `constrained` (it has a
    grammar) runs."""

    def __init__(
        self,
        policy: Policy,
        sequences: Mapping[str, EngineSequence],
        most_rows: Callable[[], int | None],
        *,
        done: Callable[[], object],
    ) -> None:
        self.decisions: dict[str, DraftDecision] = {}
        self.constrained: set[str] = set()
        self.drafts = False
        """Whether the step that is taken has drafts that requests asked for."""
        self._sequences, self._most_rows, self._done = sequences, most_rows, done
        self._room = 0  # rows of the step for guesses that the policy does not decide about
        self._admitted: dict[str, list[int]] = {}
        """By sequence with a grammar, of each verified node the one that the policy had admitted, -1: none."""
        self._spans: Sequence[Span] = ()
        self.policy = policy

    def observe(self, record: StepRecord) -> None:
        """What requests asked for took a part of the drafters' seconds, so these are no price of what was planned."""
        if self.drafts:
            seconds = {**record.seconds, DRAFT_STAGE: 0.0, REQUESTED_STAGE: record.seconds.get(DRAFT_STAGE, 0.0)}
            record = record._replace(seconds=seconds)
            self.drafts = False
            if not self.decisions:  # the last of them ended in this step
                self._done()
        self.policy.observe(record)

    def explain(self) -> str:
        return self.policy.explain()

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        self._spans, self._room, self.drafts = spans, self._room_for_guesses(spans, budget), False
        if not self.decisions:
            return self.policy.plan(spans, budget)
        depths: dict[str, int] = {}
        seen: list[Span] = []
        for span in spans:
            decision = self.decisions.get(span.seq_id)
            if decision is None or not span.needs_logits:
                seen.append(span)
                continue
            seen.append(span._replace(needs_logits=False, max_draft_tokens=0))
            if depth := min(decision.depth, span.max_draft_tokens):
                depths[span.seq_id] = depth
        longest = longest_that_fits(depths.values(), self._room)
        chosen = {
            seq_id: self.decisions[seq_id]._replace(depth=min(depth, longest))
            for seq_id, depth in depths.items()
            if longest
        }
        self.drafts = bool(chosen)
        rows = sum([decision.depth for decision in chosen.values()])
        return {**self.policy.plan(seen, budget - rows), **chosen}

    def _room_for_guesses(self, spans: Sequence[Span], budget: int) -> int:
        requests = {self._sequences[span.seq_id].request_id for span in spans}
        most = self._most_rows() if len(requests) > 1 else None
        return budget if most is None else max(0, min(budget, most - sum([len(span.tokens) - 1 for span in spans])))

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        if self.decisions:
            own = {seq_id: draft for seq_id, draft in drafts.items() if seq_id in self.decisions}
            chosen = truncate_to(own, budget)
            rows = sum([len(draft) for draft in chosen.values()])
            others = {seq_id: draft for seq_id, draft in drafts.items() if seq_id not in own}
            admitted: Mapping[str, Draft] = {**self.policy.admit(others, budget - rows), **chosen}
        else:
            admitted = self.policy.admit(drafts, budget)
        return self._completed(admitted, budget) if self.constrained else admitted

    def _completed(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        """The drafts with what grammars force and without what they forbid, at most `budget` rows together. Guesses
        sampled from draft_probs stay as they are: the rules that need these must not choose among them by their
        tokens."""
        self._admitted.clear()
        completed = dict(drafts)
        chosen = sum([len(draft) for seq_id, draft in drafts.items() if seq_id in self.decisions])
        room = min(budget - sum([len(draft) for draft in drafts.values()]), max(0, self._room - chosen))
        for span in self._spans:
            sequence, draft = self._sequences[span.seq_id], drafts.get(span.seq_id) or Draft(span.seq_id)
            grammar = sequence.grammar if sequence.constrained and span.needs_logits else None
            choice = sequence.request.speculation
            is_off = choice is not None and choice.depth == 0
            if grammar is None or draft.draft_probs is not None or not span.max_draft_tokens or is_off:
                continue
            growing = _ConstrainedDraft(draft, grammar, min(span.max_draft_tokens, len(draft) + room))
            growing.grow(-1, -1, ())
            room += len(draft) - len(growing.admitted)
            self._admitted[span.seq_id] = growing.admitted
            if growing.admitted:
                completed[span.seq_id] = growing.draft()
            else:
                completed.pop(span.seq_id, None)
        return completed

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        self.policy.learn([self._on_admitted(each) for each in verdicts if each.seq_id not in self.decisions])

    def _on_admitted(self, verdict: Verdict) -> Verdict:
        """The verdict as one on what was admitted."""
        admitted = self._admitted.get(verdict.seq_id) if verdict.seq_id in self.constrained else None
        if admitted is None:
            return verdict
        accepted = [admitted[node] for node in verdict.accepted]
        if -1 in accepted:  # an admitted node never follows one that was not
            accepted = accepted[: accepted.index(-1)]
        return Verdict(verdict.seq_id, tuple(accepted), verdict.tokens)

    @property
    def inactive_drafters(self) -> frozenset[str]:
        """None that a request names is inactive, nor the first one where it names none."""
        if not self.decisions:
            return self.policy.inactive_drafters
        named = {decision.drafter for decision in self.decisions.values() if decision.depth}
        return frozenset() if "" in named else self.policy.inactive_drafters - named


def _decision(choice: RequestSpeculation, drafters: Mapping[str, Drafter]) -> DraftDecision:
    drafter = drafters.get(choice.named(drafters))
    if drafter is None:
        return DraftDecision(0)
    depth = drafter.default_depth if choice.depth is None else choice.depth
    return DraftDecision(min(depth, drafter.max_depth), choice.drafter)


# ---- grammars on the guesses of a step -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftOfSeveral(Draft):
    """A draft whose nodes come from several drafters, `drafters` by node."""

    drafters: tuple[str, ...] = ()

    def drafter_of(self, node: int) -> str:
        return self.drafters[node]


class _ConstrainedDraft:
    """A draft that is built node by node, of at most `limit` nodes. `admitted` has the node of `source` that each of
    its nodes is, -1 for one that only the grammar guessed."""

    def __init__(self, source: Draft, grammar: GrammarState, limit: int) -> None:
        self._source, self._grammar, self._limit = source, grammar, limit
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(source.parents):
            self._children.setdefault(parent, []).append(node)
        self.admitted: list[int] = []
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._drafters: list[str] = []
        self._scores: list[float] = []

    def grow(self, node: int, place: int, path: tuple[int, ...]) -> None:
        """Add what follows a node of the source, which is `place` in this draft, `path` the tokens up to it. Where the
        grammar forces tokens these are the only guesses; else those that it allows."""
        for token in self._grammar.forced(path):
            if len(self._tokens) >= self._limit:
                return
            same = (child for child in self._children.get(node, ()) if self._source.tokens[child] == token)
            node = next(same, -2)  # which has no children: the source does not have this node
            place = self._add(token, node, place, GRAMMAR_DRAFTER)
            path = (*path, token)
        following = self._children.get(node, ())
        try:
            allowed = self._grammar.allowed(path) if following else None
        except GrammarError:  # which ends the sequence if it comes here
            return
        for child in following:
            token = self._source.tokens[child]
            if len(self._tokens) < self._limit and (allowed is None or token in allowed):
                self.grow(child, self._add(token, child, place, self._source.drafter), (*path, token))

    def draft(self) -> Draft:
        source = self._source
        if GRAMMAR_DRAFTER not in self._drafters and self.admitted == list(range(len(source.tokens))):
            return source
        scores = tuple(self._scores) if source.scores or not source.tokens else ()
        name = source.drafter or GRAMMAR_DRAFTER
        tokens, parents = tuple(self._tokens), tuple(self._parents)
        drafters = tuple(self._drafters)
        return DraftOfSeveral(source.seq_id, tokens, parents, scores, name, computed=source.computed, drafters=drafters)

    def _add(self, token: int, node: int, place: int, drafter: str) -> int:
        forced, scores = drafter == GRAMMAR_DRAFTER, self._source.scores
        above = self._scores[place] if place >= 0 else 1.0
        self._tokens.append(token)
        self._parents.append(place)
        self._drafters.append(drafter)
        self._scores.append(above if forced or not scores else min(above, scores[node]))
        self.admitted.append(max(node, -1))
        return len(self._tokens) - 1


# ---- a policy for each tenant ----------------------------------------------------------------------------


_ESTIMATES = "acceptance"
"""What the estimates of a tenant's policy are kept as."""


def _acceptance_models(policy: Policy) -> Mapping[str, AcceptanceModel]:
    """The acceptance models of a policy, by drafter; none of one that has none."""
    return policy.acceptance if isinstance(policy, Adaptive) else {}


def _kept_estimates(policy: Policy) -> bytes | None:
    models = _acceptance_models(policy)
    return json.dumps({name: model.estimates() for name, model in models.items()}).encode() if models else None


def _start_from_estimates(policy: Policy, state: bytes) -> bool:
    models = _acceptance_models(policy)
    for name, estimates in json.loads(state).items() if state else ():
        if name in models:
            models[name].start_from(estimates["depths"], estimates["bins"])
    return True


class TenantPolicies(WrappedPolicy):
    """Decides as the policy of the tenant whose sequences run, or as the one for several. `make` makes each of them,
    with the same latency model; `sequences` are the engine's. How often guesses are accepted, as far as a policy knows,
    is `kept` for those of later processes."""

    def __init__(
        self, make: Callable[[], Policy], sequences: Mapping[str, HasTenant], *, kept: LearnedTexts | None = None
    ) -> None:
        self._make, self._sequences = make, sequences
        self._policies = KeptPerTenant(
            make,
            kept,
            _ESTIMATES,
            save=_kept_estimates,
            restore=_start_from_estimates,
            warning="The estimates of acceptance that were kept for a tenant cannot be read: they begin anew.",
        )
        self._of_several: Policy | None = None
        self._weights: dict[str, float] = {}  # of the sequences that have begun and not ended
        self._waiting: list[str] = []  # those of them that the policy does not know yet
        self._left_out: frozenset[str] = frozenset()  # drafters
        self._ended = False  # whether one has ended since the policy was chosen
        super().__init__(self._policies.get(NO_TENANT))

    def begin(self, sequence: str, *, weight: float) -> None:
        self._policies.enter(sequence, self._sequences[sequence].tenant)
        self._weights[sequence] = weight
        self._waiting.append(sequence)

    def end(self, sequence: str) -> None:
        if self._weights.pop(sequence, None) is None:
            return
        self._policies.leave(sequence)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            self.policy.end(sequence)
        self._ended = True

    def leave_out(self, drafters: frozenset[str]) -> None:
        self._left_out = drafters
        self.policy.leave_out(drafters)

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        if self._waiting or self._ended:
            self._choose()
        return self.policy.plan(spans, budget)

    def _choose(self) -> None:
        """Between two steps: a policy is not changed while it observes one."""
        chosen = self._chosen()
        if chosen is not self.policy:
            known = self._weights.keys() - set(self._waiting)
            for sequence in self._weights:
                if sequence in known:
                    self.policy.end(sequence)
            self.policy, self._waiting = chosen, list(self._weights)
            chosen.leave_out(self._left_out)
        for sequence in self._waiting:
            chosen.begin(sequence, weight=self._weights[sequence])
        self._waiting, self._ended = [], False

    def _chosen(self) -> Policy:
        tenants = self._policies.present
        if not tenants:
            return self.policy
        if len(tenants) == 1:
            return self._policies.get(next(iter(tenants)))
        if self._of_several is None:
            self._of_several = self._make()
        return self._of_several
