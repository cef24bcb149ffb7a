"""What the adaptive policy keeps of each sequence, and of the step that is being decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from wager.economics.acceptance import Floats, SequenceAcceptance
from wager.economics.policy.base import DrafterCapabilities
from wager.types import Draft, DraftDecision, Span, StepRecord, Verdict

StepKind = Literal["planned", "plain", "unjudged", "judged"]


class PlainStep(NamedTuple):
    """A step without drafts. `shape`: its rows, its sequences and the cached positions of all of them; `weight`: that
    of one token of each sequence that decodes, together; `goodput`: the weighted tokens that a second must yield."""

    shape: tuple[int, int, int] = 0, 0, 0
    weight: float = 0.0
    seconds: float = 0.0
    goodput: float = 0.0


_NO_PLAIN_STEP = PlainStep()
_NO_PLAN: dict[str, DraftDecision] = {}
_NO_DRAFTS: Mapping[str, Draft] = {}
_NO_STATES: Mapping[str, PlannedSequence] = {}


@dataclass(slots=True, eq=False)
class PlannedSequence:
    """A sequence that decodes. `tokens`, `slo_factor` and `late_steps` decide what its tokens count (see
    ObjectiveWeights): its recent tokens per step, the factor of the SLO, and for how many steps it was late at the
    greatest factor."""

    seq_id: str
    request_weight: float
    tokens: float
    acceptance: dict[str, SequenceAcceptance]  # by drafter
    forecasts: Mapping[str, Floats]  # by drafter, of survival as of the last plan, [sequences, depth]
    row: int  # its row of these
    slo_factor: float = 1.0
    late_steps: int = 0
    last_position: dict[str, int] = field(default_factory=dict)  # by drafter: known tokens when it last was to draft
    last_step: dict[str, int] = field(default_factory=dict)  # by drafter: the step in which that was
    known: int = 0  # tokens, when it was last a candidate
    room: int = 0  # for draft tokens, then
    known_before: bool = False  # whether it was a candidate before the last plan
    unjudged: bool = False  # its last draft was verified whatever its scores
    remaining: tuple[str, Sequence[int], int] | None = None  # drafter and tokens of a draft whose first n were right

    def catch_up_seconds(self, drafter: str, capabilities: DrafterCapabilities) -> float:
        """What a drafter with a cache of its own takes to process the tokens of the sequence that it missed."""
        missed = self.known - self.last_position.get(drafter, 0) - capabilities.max_depth
        return max(0, missed) * capabilities.catch_up_s


class PolicyStep:
    """A step as the policy decides it. Most steps repeat a plan and set little; an object that is made after a pass of
    the target takes longer the more it holds."""

    spans: Sequence[Span] = ()  # of the sequences that decode; none where planning was skipped
    ids: Sequence[str] = ()  # of the sequences that decode
    skipped: bool = False  # planning was skipped: no sequence drafts, as in the last plan
    measured_depth: int | None = None  # the depth to which all draft, and all is verified, to measure what that takes
    catches_up: bool = False  # a drafter has to catch up, so its seconds are not comparable
    kind: StepKind = "plain"  # what the policy's own seconds are counted as
    plan: dict[str, DraftDecision] = _NO_PLAN  # as the step decided it, not changed later
    repeated_plan: dict[str, DraftDecision] = _NO_PLAN  # the same without what is done only to learn
    explored: frozenset[str] = frozenset()  # sequences of the plan that draft for exploration only
    explored_catch_up: float = 0.0  # seconds that their drafters were expected to take to catch up
    drafted: Mapping[str, Draft] = _NO_DRAFTS
    admitted: Mapping[str, Draft] = _NO_DRAFTS
    verdicts: Sequence[Verdict] = ()
    record: StepRecord | None = None  # what it took
    counts: Mapping[str, tuple[int, ...]] | None = None  # by drafter (`explain`), where its drafts are not kept

    def __init__(
        self, number: int = 0, states: Mapping[str, PlannedSequence] = _NO_STATES, *, plain: PlainStep = _NO_PLAIN_STEP
    ) -> None:
        """`states` are those of all sequences by now, by id; `plain` is that of the last step with sequences to plan,
        where planning is skipped."""
        self.number, self.states, self.plain = number, states, plain

    def repeat(self, number: int, spans: Sequence[Span]) -> PolicyStep:
        """A later step of the same sequences with the same plan."""
        step = PolicyStep(number, self.states, plain=self.plain)
        step.ids = self.ids
        if self.repeated_plan:
            step.plan, step.spans = self.repeated_plan, spans
        else:
            step.skipped = True
        return step

    @cached_property
    def candidates(self) -> list[PlannedSequence]:
        """Sequences with room for draft tokens, with what is known of them in this step."""
        found = []
        for span in self.spans:
            state = self.states[span.seq_id]
            state.known, state.room = span.num_computed_tokens + 1, span.max_draft_tokens
            if state.room > 0:
                found.append(state)
        return found

    def passes(self) -> dict[str, list[int]]:
        """By drafter, the passes that each of its sequences took; where it can stop early and has not drafted yet, as
        many as were asked for."""
        passes: dict[str, list[int]] = {}
        drafted = self.drafted
        decisions = list(self.plan.values())
        if drafted and decisions.count(decisions[0]) == len(decisions) and decisions[0].min_survival:
            sizes = [len(draft.tokens) for draft in drafted.values()]
            return {decisions[0].drafter: sizes + [1] * (len(decisions) - len(sizes))}
        for seq_id, decision in self.plan.items():
            depth = decision.depth
            if decision.min_survival and drafted:
                draft = drafted.get(seq_id)
                depth = 1 if draft is None else len(draft.tokens)
            passes.setdefault(decision.drafter, []).append(depth)
        return passes
