"""Requests that say themselves how they speculate; the policy decides for all others.

The policy sees the sequences of such requests as it sees prompts: rows that it can do nothing about. What they draft is
verified as it was asked for, as far as there is room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from wager.draft.base import Drafter
from wager.economics.policy.base import Policy, longest_that_fits, truncate_to
from wager.errors import RequestError
from wager.types import Draft, DraftDecision, Plan, Request, Span, SpeculationChoice, StepRecord, Verdict


class ChosenSpeculation(Policy):
    """`policy`, except for sequences that were added with `choose`."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._decisions: dict[str, DraftDecision] = {}

    def __bool__(self) -> bool:
        """Whether there is such a sequence."""
        return bool(self._decisions)

    @staticmethod
    def check(request: Request, drafters: Mapping[str, Drafter]) -> None:
        """RequestError if the engine has no such drafter."""
        choice = request.speculation
        if choice is None or choice.depth == 0 or (choice.drafter or next(iter(drafters), "")) in drafters:
            return
        raise RequestError(
            f"Request {request.id!r} wants drafter {choice.drafter or 'any'!r}; this engine has "
            f"{', '.join(drafters) or 'none'}.",
            "Name one of these, or turn speculation off for the request (depth 0).",
        )

    def choose(self, seq_id: str, choice: SpeculationChoice, drafters: Mapping[str, Drafter]) -> None:
        """A sequence was added whose request says how it speculates."""
        drafter = drafters.get(choice.drafter or next(iter(drafters), ""))
        depth = choice.depth
        if drafter is not None:
            depth = min(drafter.default_depth if depth is None else depth, drafter.max_depth)
        self._decisions[seq_id] = DraftDecision(depth or 0, choice.drafter)

    def begin(self, sequence: str, *, weight: float) -> None:
        if sequence not in self._decisions:
            self.policy.begin(sequence, weight=weight)

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        depths: dict[str, int] = {}
        others: list[Span] = []
        for span in spans:
            decision = self._decisions.get(span.seq_id)
            others.append(
                replace(span, needs_logits=False, max_draft_tokens=0) if decision and span.needs_logits else span
            )
            if decision and span.needs_logits and min(decision.depth, span.max_draft_tokens):
                depths[span.seq_id] = min(decision.depth, span.max_draft_tokens)
        longest = longest_that_fits(depths.values(), budget)
        chosen = {
            seq_id: replace(self._decisions[seq_id], depth=min(depth, longest))
            for seq_id, depth in depths.items()
            if longest
        }
        rows = sum([decision.depth for decision in chosen.values()])
        return {**self.policy.plan(others, budget - rows), **chosen}

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        chosen = {seq_id: draft for seq_id, draft in drafts.items() if seq_id in self._decisions}
        others = {seq_id: draft for seq_id, draft in drafts.items() if seq_id not in self._decisions}
        chosen = dict(truncate_to(chosen, budget))
        rows = sum([len(draft) for draft in chosen.values()])
        return {**self.policy.admit(others, budget - rows), **chosen}

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        self.policy.learn([verdict for verdict in verdicts if verdict.seq_id not in self._decisions])

    def observe(self, record: StepRecord) -> None:
        self.policy.observe(record)

    def end(self, sequence: str) -> None:
        self.policy.end(sequence)
        self._decisions.pop(sequence, None)

    def explain(self) -> str:
        count = len(self._decisions)
        return (
            f"{self.policy.explain()} {count} sequences speculate as their requests say."
            if count
            else self.policy.explain()
        )
