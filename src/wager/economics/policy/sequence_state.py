"""What the adaptive policy keeps of each drafter, of each sequence, and of the step that is being decided.

Drafters are referred to by their index in the policy's list. Survival is the probability that a draft token is reached
and accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from wager.economics.acceptance import AcceptanceModel, SequenceAcceptance
from wager.economics.policy.base import DrafterCapabilities, longest_that_fits
from wager.economics.policy.objective import SequenceWeight
from wager.types import Draft


class DrafterProfile(NamedTuple):
    name: str
    capabilities: DrafterCapabilities
    acceptance: AcceptanceModel


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """How a sequence drafts until it is planned anew: drafter (-1: none), depth and min_survival as in DraftDecision,
    and the survival by depth forecast for each drafter. `is_default`: it was not made for this sequence."""

    drafter: int = -1
    depth: int = 0
    min_survival: float = 0.0
    forecast: Sequence[Sequence[float]] = ()
    is_default: bool = True


class RemainingDraft(NamedTuple):
    """A draft whose first `compared` tokens were right; the rest is compared with tokens of later steps."""

    drafter: int
    tokens: Sequence[int]
    compared: int


@dataclass(slots=True, eq=False)
class SequencePolicyState:
    """A sequence that decodes. Each attribute is written by one class, named here."""

    seq_id: str
    weight: SequenceWeight  # ObjectiveWeights
    acceptance: list[SequenceAcceptance]  # by drafter; AcceptanceModel
    plan: SequencePlan  # Planner
    last_position: list[int]  # by drafter: known tokens at its last draft request (0: never); Adaptive
    last_step: list[int]  # by drafter: the step in which that was (-1: never); Adaptive
    known: int = 0  # tokens, in this step; Adaptive
    room: int = 0  # for draft tokens, in this step; Adaptive
    unjudged: bool = False  # its last draft was verified whatever its scores; Adaptive
    remaining: RemainingDraft | None = None  # what is left to compare of its last draft; DeferredLearning

    def catch_up_seconds(self, drafter: int, capabilities: DrafterCapabilities) -> float:
        """What a drafter with a cache of its own takes to process the tokens of the sequence that it missed."""
        missed = self.known - self.last_position[drafter] - capabilities.max_depth
        return max(0, missed) * capabilities.catch_up_s


@dataclass(slots=True, eq=False)
class StepDraft:
    """The draft requested for one sequence in a step (`exploration`: only to learn), and the result: the draft, the
    survival of its nodes (None: not judged), and the index of the first among those of the step."""

    state: SequencePolicyState
    drafter: int
    depth: int
    min_survival: float = 0.0
    exploration: bool = False
    draft: Draft | None = None
    survival: list[float] | None = None
    first: int = 0

    @property
    def passes(self) -> int:
        """Passes that the drafter took: it stops early only where `min_survival` is set."""
        return max(1, len(self.draft) if self.draft else 0) if self.min_survival else self.depth


@dataclass(slots=True)
class PolicyStep:
    """A step as Adaptive decides it."""

    rows: int = 0  # without drafts
    sequences: int = 0
    context_sum: int = 0  # cached positions of all sequences
    decoding: int = 0  # sequences that decode
    weight: float = 0.0  # of one token of each of them together
    plain_seconds: float = 0.0  # the step without drafts
    goodput: float = 0.0  # weighted tokens that a second must yield
    draft_seconds: float = 0.0  # that drafting is expected to take
    measures_plain: bool = False  # it is taken without drafts to measure that
    measures_rows: bool = False  # it verifies more than planned to measure what rows cost
    catches_up: bool = False  # a drafter has to catch up, so its seconds are not comparable
    candidates: list[SequencePolicyState] = field(default_factory=list)  # those with room for draft tokens
    drafts: dict[str, StepDraft] = field(default_factory=dict)
    admitted: Mapping[str, Draft] = field(default_factory=dict)

    @property
    def measures(self) -> bool:
        """Whether it is taken to measure seconds."""
        return self.measures_plain or self.measures_rows

    @property
    def speculation_gain(self) -> float:
        """Seconds of plain decoding that speculation lately saves in the time of a plain step."""
        return (self.goodput * self.plain_seconds / self.weight - 1) * self.plain_seconds

    def fit(self, budget: int) -> None:
        """Make the depths fit the row budget before drafting, for drafts that are verified as planned."""
        longest = longest_that_fits([step_draft.depth for step_draft in self.drafts.values()], budget)
        self.drafts = {seq_id: step_draft for seq_id, step_draft in self.drafts.items() if longest}
        for step_draft in self.drafts.values():
            step_draft.depth = min(step_draft.depth, longest)

    def passes(self) -> dict[int, list[int]]:
        """By drafter, the passes that each of its sequences took."""
        passes: dict[int, list[int]] = {}
        for draft in self.drafts.values():
            passes.setdefault(draft.drafter, []).append(draft.passes)
        return passes
