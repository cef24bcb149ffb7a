"""What an engine's rounds did: recorders that are policies around the engine's own.

A policy sees the spans, drafts, verdicts and seconds of every step. RoundRecorder keeps what was guessed, verified,
accepted and emitted for each sequence; DraftCounter counts drafts by drafter and length, for metrics. An engine without
them does nothing for them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from wager.economics.policy.base import Policy, WrappedPolicy
from wager.engine.core import Engine
from wager.engine.sequence import sequence_id
from wager.engine.wrapped_policies import DraftOfSeveral
from wager.types import (
    DRAFT_STAGE,
    FORWARD_STAGE,
    GRAMMAR_DRAFTER,
    Draft,
    OutputDelta,
    Plan,
    Request,
    Span,
    StepRecord,
    Verdict,
)


@dataclass(frozen=True, slots=True)
class RoundSeconds:
    """Wall seconds of the step: in the drafters, in the target's pass, and in all other stages. A step serves all
    running sequences, so each of their rounds has the same seconds."""

    draft: float
    forward: float
    rest: float

    @property
    def total(self) -> float:
        return self.draft + self.forward + self.rest


@dataclass(frozen=True, slots=True)
class Round:
    """One pass of the target that emitted tokens of one sequence.

    `draft` holds the guesses as they were drafted, with those that a grammar added; `verified` and `accepted` are
    indices of its nodes: those that the policy admitted, and those of them that were emitted, in order. `emitted` are
    the accepted guesses and then the target's own token, unless the text ended before it; `text` is the text that
    became complete. `rows` are those of the sequence: its known tokens that were not computed yet, and the verified
    guesses.
    """

    draft: Draft
    verified: tuple[int, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    text: str
    rows: int
    seconds: RoundSeconds

    @property
    def discarded(self) -> tuple[int, ...]:
        """Guesses that were verified and not emitted."""
        return tuple(node for node in self.verified if node not in self.accepted)

    @property
    def unverified(self) -> tuple[int, ...]:
        """Guesses that the policy did not admit."""
        return tuple(node for node in range(len(self.draft)) if node not in self.verified)

    @property
    def target_token(self) -> int | None:
        """The target's own token; None where the text ended with an accepted guess."""
        return self.emitted[-1] if len(self.emitted) > len(self.accepted) else None

    @property
    def corrected(self) -> bool:
        """Whether the target's own token stands where verified guesses were wrong; otherwise it is the bonus token
        after the last guess, or the token of a round without guesses."""
        last = self.accepted[-1] if self.accepted else -1
        wrong = any(self.draft.parents[node] == last for node in self.discarded)
        return wrong and self.target_token is not None


@dataclass(slots=True)
class _Pass:
    """A sequence's part of a step, filled in as the step goes on."""

    span: Span
    draft: Draft
    admitted: Draft
    verdict: Verdict | None = None
    seconds: RoundSeconds | None = None


class RoundRecorder(WrappedPolicy):
    """Decides as `policy` does, and keeps the passes of every sequence until `take` is called for their outputs.
    `requests`: ids of the requests whose sequences are recorded (None: all)."""

    def __init__(self, policy: Policy, requests: set[str] | None = None) -> None:
        super().__init__(policy)
        self.requests = requests
        self._step: dict[str, _Pass] = {}
        self._passes: dict[str, deque[_Pass]] = {}

    @classmethod
    def attach(cls, engine: Engine, requests: set[str] | None = None) -> RoundRecorder:
        """Record an engine from its next step on."""
        recorder = cls(engine.policy, requests)
        engine.policy = recorder
        return recorder

    def take(self, delta: OutputDelta) -> Round | None:
        """The round that a delta came from; deltas of a sequence are given in order. None for one without tokens."""
        passes = self._passes.get(sequence_id(delta.request_id, delta.index))
        done = passes.popleft() if passes else None
        if done is None or done.verdict is None or done.seconds is None or not delta.token_ids:
            return None
        nodes = _nodes_in(done.draft, done.admitted)
        return Round(
            draft=done.draft,
            verified=tuple(sorted(nodes)),
            accepted=tuple([nodes[node] for node in done.verdict.accepted[: len(delta.token_ids)]]),
            emitted=delta.token_ids,
            text=delta.text,
            rows=len(done.span.tokens) + len(done.admitted),
            seconds=done.seconds,
        )

    def forget(self, request: Request) -> None:
        """What was kept of a request, and that it is recorded."""
        for choice in request.choices:
            self._passes.pop(sequence_id(request.id, choice), None)
        if self.requests is not None:
            self.requests.discard(request.id)

    # ---- the interface of a policy ---------------------------------------------------------------------------------

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        self._step = {
            span.seq_id: _Pass(span, Draft(span.seq_id), Draft(span.seq_id))
            for span in (spans if self.requests is None or self.requests else ())
            if span.needs_logits and (self.requests is None or span.seq_id.partition("#")[0] in self.requests)
        }
        return self.policy.plan(spans, budget)

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        admitted = self.policy.admit(drafts, budget)
        for seq_id, done in self._step.items():
            draft, verified = drafts.get(seq_id), admitted.get(seq_id)
            if draft is not None or verified is not None:
                done.admitted = verified or Draft(seq_id)
                done.draft = _with_forced(draft or Draft(seq_id), done.admitted)
        return admitted

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        verdicts = list(verdicts)
        for verdict in verdicts if self._step else ():
            if verdict.seq_id in self._step:
                self._step[verdict.seq_id].verdict = verdict
        self.policy.learn(verdicts)

    def observe(self, record: StepRecord) -> None:
        draft, forward = record.seconds.get(DRAFT_STAGE, 0.0), record.seconds.get(FORWARD_STAGE, 0.0)
        seconds = RoundSeconds(draft, forward, sum(record.seconds.values()) - draft - forward)
        for seq_id, done in self._step.items():
            done.seconds = seconds
            self._passes.setdefault(seq_id, deque()).append(done)
        self._step = {}
        self.policy.observe(record)


def _with_forced(draft: Draft, admitted: Draft) -> Draft:
    """The draft with the nodes of `admitted` that a grammar added."""
    if not isinstance(admitted, DraftOfSeveral):
        return draft
    places = {(): -1, **{_tokens_to(draft, node): node for node in range(len(draft))}}
    tokens, parents = list(draft.tokens), list(draft.parents)
    drafters = [draft.drafter] * len(draft)
    for node in range(len(admitted)):
        path = _tokens_to(admitted, node)
        if path not in places:
            places[path] = len(tokens)
            tokens.append(path[-1])
            parents.append(places[path[:-1]])
            drafters.append(admitted.drafter_of(node))
    name = draft.drafter or admitted.drafter
    return DraftOfSeveral(draft.seq_id, tuple(tokens), tuple(parents), (), name, drafters=tuple(drafters))


def _nodes_in(draft: Draft, admitted: Draft) -> list[int]:
    """For each node of `admitted` the node of `draft` with the same tokens from the root on, each used once."""
    unused: dict[tuple[int, ...], deque[int]] = {}
    for node in range(len(draft)):
        unused.setdefault(_tokens_to(draft, node), deque()).append(node)
    return [unused[_tokens_to(admitted, node)].popleft() for node in range(len(admitted))]


def _tokens_to(draft: Draft, node: int) -> tuple[int, ...]:
    return tuple([draft.tokens[step] for step in draft.path(node)])


# ---- counts of drafts, for metrics -----------------------------------------------------------------------


@dataclass(slots=True)
class DrafterCounts:
    """Counts of one drafter since the start. `verified[n]`: drafts of which n guesses were verified; `levels[n]`: those
    that were n deep, which is the same for chains; `accepted[n]`: of them, drafts of which n guesses were accepted
    (index 0 counts in all)."""

    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)

    @property
    def drafts(self) -> int:
        return sum(self.verified)

    @property
    def verified_tokens(self) -> int:
        return sum(length * count for length, count in enumerate(self.verified))

    @property
    def accepted_tokens(self) -> int:
        return sum(length * count for length, count in enumerate(self.accepted))

    @property
    def verified_by_position(self) -> list[int]:
        """At index i the drafts that were more than i deep."""
        return [sum(self.levels[depth:]) for depth in range(1, len(self.levels))]

    @property
    def accepted_by_position(self) -> list[int]:
        """At index i the drafts of which more than i guesses were accepted; as long as `verified_by_position`."""
        return [sum(self.accepted[length:]) for length in range(1, max(len(self.accepted), len(self.levels)))]


class DraftCounter(WrappedPolicy):
    """Decides as `policy` does. `drafters` has the counts since the start, by drafter; `drafted` what each drafted, of
    which the policy admits some to be verified; `planned[n]`: decisions to draft n guesses."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.drafters: dict[str, DrafterCounts] = {}
        self.drafted: Counter[str] = Counter()
        self.planned: list[int] = []
        self._admitted: Mapping[str, Draft] = {}
        self._steps: deque[tuple[StepRecord, Mapping[str, Draft]]] = deque()
        self._sequences: dict[str, dict[str, DrafterCounts]] = {}

    @classmethod
    def attach(cls, engine: Engine) -> DraftCounter:
        """Count an engine's drafts from its next step on."""
        counter = cls(engine.policy)
        engine.policy = counter
        return counter

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        plan = self.policy.plan(spans, budget)
        for decision in plan.values():
            count_at(self.planned, decision.depth)
        return plan

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        for draft in drafts.values():
            self.drafted[draft.drafter] += len(draft.tokens)
        self._admitted = admitted = self.policy.admit(drafts, budget)
        for draft in admitted.values():
            if isinstance(draft, DraftOfSeveral):  # a grammar guesses what is to be verified
                self.drafted.update([name for name in draft.drafters if name == GRAMMAR_DRAFTER])
        return admitted

    def observe(self, record: StepRecord) -> None:
        self._steps.append((record, self._admitted))
        self._admitted = {}
        self.policy.observe(record)

    def count(self, deltas: Sequence[OutputDelta], record: StepRecord | None) -> dict[str, dict[str, DrafterCounts]]:
        """Count the drafts of a step by what it emitted, in any thread, but one alone: an accepted guess behind the end
        of a text is none. Steps come in their order. The counts of the sequences that have ended, by drafter."""
        drafts: Mapping[str, Draft] = {}
        while record is not None and self._steps:
            step, admitted = self._steps.popleft()
            if step is record:
                drafts = admitted
                break
        ended = {}
        for delta in deltas:
            seq_id = sequence_id(delta.request_id, delta.index)
            if delta.token_ids and (draft := drafts.get(seq_id)):
                self._count_draft(draft, delta.drafted_by)
            if delta.finish_reason is not None:
                ended[seq_id] = self._sequences.pop(seq_id, {})
        return ended

    def _count_draft(self, draft: Draft, drafted_by: Sequence[str]) -> None:
        names = draft.drafters if isinstance(draft, DraftOfSeveral) else (draft.drafter,)
        for name in dict.fromkeys(names):
            several = len(names) > 1
            verified = names.count(name) if several else len(draft.tokens)
            levels = _levels(draft, name, several=several)
            for counted in (self.drafters, self._sequences.setdefault(draft.seq_id, {})):
                counts = counted.setdefault(name, DrafterCounts())
                count_at(counts.verified, verified)
                count_at(counts.accepted, drafted_by.count(name))
                count_at(counts.levels, levels)


def _levels(draft: Draft, name: str, *, several: bool) -> int:
    """The number of depths at which a drafter guessed."""
    if draft.is_chain and not several:
        return len(draft.tokens)
    return len({depth for node, depth in enumerate(draft.depths) if draft.drafter_of(node) == name})


def count_at(counts: list[int], index: int) -> None:
    """Count one at an index, in a list that is as long as needed."""
    if index >= len(counts):
        counts.extend([0] * (index + 1 - len(counts)))
    counts[index] += 1
