"""What the adaptive policy keeps of each drafter, of each sequence, and of the step that is being decided.

Drafters are referred to by their index in the policy's list. Survival is the probability that a draft token is reached
and accepted. What only some steps need is made when it is asked for: a step may have a thousand sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wager.economics.acceptance import LARGE_BATCH, AcceptanceModel, Floats, SequenceAcceptance
from wager.economics.policy.base import DrafterCapabilities, longest_that_fits
from wager.economics.policy.objective import SequenceWeight
from wager.economics.policy.prices import PlainStep, StepKind
from wager.types import Draft, DraftDecision, Span, StepRecord, Verdict

_NO_PLAIN_STEP = PlainStep()
_NO_PLAN: dict[str, DraftDecision] = {}
_NO_STATES: Mapping[str, PlannedSequence] = {}
_NO_DRAFTS: Mapping[str, Draft] = {}


class DrafterProfile(NamedTuple):
    name: str
    capabilities: DrafterCapabilities
    acceptance: AcceptanceModel


class SequencePlan(NamedTuple):
    """How a sequence drafts until it is planned anew: drafter (-1: none), depth and min_survival as in DraftDecision,
    and the survival forecast for each drafter, row `row` of [sequences, depth]."""

    drafter: int = -1
    depth: int = 0
    min_survival: float = 0.0
    forecasts: Sequence[Floats] = ()
    row: int = 0


class RemainingDraft(NamedTuple):
    """A draft whose first `compared` tokens were right; the rest is compared with tokens of later steps."""

    drafter: int
    tokens: Sequence[int]
    compared: int


@dataclass(slots=True, eq=False)
class PlannedSequence:
    """A sequence that decodes."""

    seq_id: str
    weight: SequenceWeight
    acceptance: list[SequenceAcceptance]  # by drafter
    plan: SequencePlan
    last_position: list[int]  # by drafter: known tokens when it last was to draft, as of the last plan
    last_step: list[int]  # by drafter: the step in which that was (-1: never)
    known: int = 0  # tokens, when it was last a candidate
    room: int = 0  # for draft tokens, then
    known_before: bool = False  # whether it was a candidate before the last plan
    unjudged: bool = False  # its last draft was verified whatever its scores
    remaining: RemainingDraft | None = None  # what is left to compare of its last draft

    def catch_up_seconds(self, drafter: int, capabilities: DrafterCapabilities) -> float:
        """What a drafter with a cache of its own takes to process the tokens of the sequence that it missed."""
        missed = self.known - self.last_position[drafter] - capabilities.max_depth
        return max(0, missed) * capabilities.catch_up_s


@dataclass(slots=True, eq=False)
class StepDraft:
    """The draft requested for one sequence in a step, and the draft made."""

    state: PlannedSequence
    drafter: int
    depth: int
    min_survival: float = 0.0
    draft: Draft | None = None

    @property
    def passes(self) -> int:
        """Passes that the drafter took: it stops early only where `min_survival` is set."""
        return max(1, len(self.draft) if self.draft else 0) if self.min_survival else self.depth


class PolicyStep:
    """A step as the policy decides it. Most steps repeat a plan and set little; an object that is made after a pass of
    the target takes longer the more it holds."""

    spans: Sequence[Span] = ()  # of the sequences that decode
    ids: Sequence[str] = ()  # of these sequences
    ended: Mapping[str, PlannedSequence] = _NO_STATES  # of the sequences that ended since
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
    _candidates: list[PlannedSequence] | None = None

    def __init__(
        self,
        number: int = 0,
        all_spans: Sequence[Span] = (),
        *,
        plain: PlainStep = _NO_PLAIN_STEP,
        states: Mapping[str, PlannedSequence] = _NO_STATES,
        drafter_index: Mapping[str, int] | None = None,
    ) -> None:
        """`plain` is that of the last step with sequences to plan, where planning is skipped; `states` are those of all
        sequences by now, by id, `drafter_index` the drafters' by name."""
        self.number, self.all_spans, self.plain, self.states = number, all_spans, plain, states
        self.drafter_index = drafter_index or {}

    def repeat(self, number: int, spans: Sequence[Span]) -> PolicyStep:
        """A later step of the same sequences with the same plan."""
        step = PolicyStep(number, spans, plain=self.plain, states=self.states, drafter_index=self.drafter_index)
        if self.repeated_plan:
            step.plan, step.spans, step.ids = self.repeated_plan, spans, self.ids
        else:
            step.skipped = True
        return step

    @property
    def sequences(self) -> int:
        return len(self.all_spans)

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
    def num_candidates(self) -> int:
        """Sequences with room for draft tokens."""
        return len([span for span in self.spans if span.max_draft_tokens])

    @property
    def candidates(self) -> list[PlannedSequence]:
        """Those with room for draft tokens, with what is known of them in this step."""
        if self._candidates is None:
            if not self.spans:  # they were released
                return [self.states.get(seq_id) or self.ended[seq_id] for seq_id in self.ids]
            self._candidates = []
            for span in self.spans:
                state = self.states.get(span.seq_id) or self.ended[span.seq_id]
                state.known, state.room = span.num_computed_tokens + 1, span.max_draft_tokens
                if state.room > 0:
                    self._candidates.append(state)
        return self._candidates

    def fit(self, budget: int) -> None:
        """Make the depths fit the row budget before drafting, for drafts that are verified as planned."""
        longest = longest_that_fits([decision.depth for decision in self.plan.values()], budget)
        self.plan = {
            seq_id: decision if decision.depth <= longest else decision._replace(depth=longest)
            for seq_id, decision in self.plan.items()
            if longest
        }

    @property
    def decoding_states(self) -> list[PlannedSequence]:
        """The sequences that decode, also those of a step whose planning was skipped."""
        ids = self.ids or [span.seq_id for span in self.all_spans if span.needs_logits]
        return [state for seq_id in ids if (state := self.states.get(seq_id) or self.ended.get(seq_id))]

    def release(self) -> None:
        """The step is over: of a large batch its spans and drafts are not kept, so that they can be freed with it."""
        if len(self.spans) > LARGE_BATCH:
            self.all_spans = self.spans = self.verdicts = ()
            self.drafted = self.admitted = {}
            self._candidates = None

    @property
    def measures(self) -> bool:
        """Whether it is taken to measure seconds."""
        return self.measures_plain or self.measures_rows

    def draft_of(self, state: PlannedSequence) -> StepDraft:
        """The draft requested for a sequence of the plan, and what came of it."""
        decision, draft = self.plan[state.seq_id], self.drafted.get(state.seq_id)
        return StepDraft(state, self.drafter_index[decision.drafter], decision.depth, decision.min_survival, draft)

    def passes(self) -> dict[int, list[int]]:
        """By drafter, the passes that each of its sequences took; where it can stop early and has not drafted yet, as
        many as were asked for."""
        passes: dict[int, list[int]] = {}
        drafted, index = self.drafted, self.drafter_index
        if not self.plan:
            return passes
        decisions = list(self.plan.values())
        if drafted and decisions.count(decisions[0]) == len(decisions) and decisions[0].min_survival:
            sizes = [len(draft.tokens) for draft in drafted.values()]
            return {index[decisions[0].drafter]: sizes + [1] * (len(decisions) - len(sizes))}
        for seq_id, decision in self.plan.items():
            depth = decision.depth
            if decision.min_survival and drafted:
                draft = drafted.get(seq_id)
                depth = 1 if draft is None else len(draft.tokens)
            passes.setdefault(index[decision.drafter], []).append(depth)
        return passes
