"""Counts drafts by drafter and length, and how many of their guesses were accepted, for metrics.

The counter is a policy around the engine's own. A step costs it a look at every draft and verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from wager.economics.policy.base import Policy, WrappedPolicy
from wager.engine.core import Engine
from wager.engine.grammar_drafts import DraftOfSeveral
from wager.types import Draft, Plan, Span, Verdict


@dataclass(slots=True)
class DrafterCounts:
    """Of one drafter since the start. `verified[n]`: drafts of which n guesses were verified; `levels[n]`: those that
    were n deep, which is the same for chains; `accepted[n]`: of them, drafts of which n guesses were accepted (index 0
    counts in all)."""

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
    def accepted_by_position(self) -> list[int]:
        """At index i the drafts of which more than i guesses were accepted."""
        return [sum(self.accepted[length:]) for length in range(1, len(self.accepted))]


class DraftCounter(WrappedPolicy):
    """Decides as `policy` does. `planned[n]`: draft decisions for n guesses."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.drafters: dict[str, DrafterCounts] = {}
        self.planned: list[int] = []
        self._admitted: Mapping[str, Draft] = {}

    @classmethod
    def attach(cls, engine: Engine) -> DraftCounter:
        """Count an engine's drafts from its next step on."""
        counter = cls(engine.policy)
        engine.policy = counter
        return counter

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        plan = self.policy.plan(spans, budget)
        for decision in plan.values():
            _count(self.planned, decision.depth)
        return plan

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        self._admitted = admitted = self.policy.admit(drafts, budget)
        return admitted

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        verdicts, admitted = list(verdicts), self._admitted
        if admitted:
            for verdict in verdicts:
                draft = admitted.get(verdict.seq_id)
                if draft is not None and draft.tokens:
                    self._count_draft(draft, verdict)
        self.policy.learn(verdicts)

    def _count_draft(self, draft: Draft, verdict: Verdict) -> None:
        names = draft.drafters if isinstance(draft, DraftOfSeveral) else (draft.drafter,)
        for name in dict.fromkeys(names):
            counts = self.drafters.get(name)
            if counts is None:
                counts = self.drafters[name] = DrafterCounts()
            several = len(names) > 1
            accepted = [node for node in verdict.accepted if draft.drafter_of(node) == name]
            _count(counts.verified, names.count(name) if several else len(draft.tokens))
            _count(counts.accepted, len(accepted))
            _count(counts.levels, _levels(draft, name, several=several))


def _levels(draft: Draft, name: str, *, several: bool) -> int:
    """The number of depths at which a drafter guessed."""
    if draft.is_chain and not several:
        return len(draft.tokens)
    return len({depth for node, depth in enumerate(draft.depths) if draft.drafter_of(node) == name})


def _count(counts: list[int], index: int) -> None:
    if index >= len(counts):
        counts.extend([0] * (index + 1 - len(counts)))
    counts[index] += 1
