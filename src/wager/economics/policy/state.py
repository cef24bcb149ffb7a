"""What the adaptive policy keeps of each sequence, and of the step that is being decided.

Survival is the probability that a draft token is reached and accepted. What only some steps need is made when it is
asked for: a step may have a thousand sequences.
"""

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

    @property
    def speculation_gain(self) -> float:
        """Seconds of plain decoding that speculation lately saves in the time of a plain step."""
        return (self.goodput * self.seconds / self.weight - 1) * self.seconds


class DraftCounts(NamedTuple):
    """Of one drafter: drafts that were asked for, and draft tokens that were drafted, verified and accepted."""

    requested: int
    drafted: int
    verified: int
    accepted: int


_NO_PLAIN_STEP = PlainStep()
_NO_PLAN: dict[str, DraftDecision] = {}
_NO_DRAFTS: Mapping[str, Draft] = {}
_NO_STATES: Mapping[str, PlannedSequence] = {}


class RemainingDraft(NamedTuple):
    """A draft whose first `compared` tokens were right; the rest is compared with tokens of later steps."""

    drafter: str
    tokens: Sequence[int]
    compared: int


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
    remaining: RemainingDraft | None = None  # what is left to compare of its last draft

    def catch_up_seconds(self, drafter: str, capabilities: DrafterCapabilities) -> float:
        """What a drafter with a cache of its own takes to process the tokens of the sequence that it missed."""
        missed = self.known - self.last_position.get(drafter, 0) - capabilities.max_depth
        return max(0, missed) * capabilities.catch_up_s


class PolicyStep:
    """A step as the policy decides it. Most steps repeat a plan and set little; an object that is made after a pass of
    the target takes longer the more it holds."""

    spans: Sequence[Span] = ()  # of the sequences that decode; none where planning was skipped
    ids: Sequence[str] = ()  # of these sequences
    skipped: bool = False  # planning was skipped: no sequence drafts, as in the last plan
    measures_plain: bool = False  # it is taken without drafts to measure that
    measures_rows: bool = False  # another depth than planned is drafted and verified to measure what rows cost
    catches_up: bool = False  # a drafter has to catch up, so its seconds are not comparable
    planned: bool = False  # every sequence was planned anew
    judged: bool = False  # admission compared the tokens; otherwise the drafts are verified as they are
    plan: dict[str, DraftDecision] = _NO_PLAN  # as the step decided it, not changed later
    repeated_plan: dict[str, DraftDecision] = _NO_PLAN  # the same without what is done only to learn
    explored: frozenset[str] = frozenset()  # sequences of the plan that draft for exploration only
    explored_catch_up: float = 0.0  # seconds that their drafters were expected to take to catch up
    drafted: Mapping[str, Draft] = _NO_DRAFTS
    admitted: Mapping[str, Draft] = _NO_DRAFTS
    verdicts: Sequence[Verdict] = ()
    record: StepRecord | None = None  # what it took
    counts: Mapping[str, DraftCounts] | None = None  # of its drafts, where these are not kept

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

    @property
    def decoding(self) -> int:
        """Sequences that decode."""
        return len(self.ids)

    @property
    def kind(self) -> StepKind:
        """What the policy's own seconds are counted as."""
        if self.planned:
            return "planned"
        return "judged" if self.judged else "unjudged" if self.drafted else "plain"

    @property
    def measures(self) -> bool:
        """Whether it is taken to measure seconds."""
        return self.measures_plain or self.measures_rows

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
