"""The policy that drafts to the same depth for every sequence in every step, and verifies all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wager.economics.policy.base import Policy, longest_that_fits, truncate_to
from wager.types import Draft, DraftDecision, Plan, Span


class FixedDepth(Policy):
    """The same depth everywhere, as far as spans and the row budget allow; 0 is plain decoding. `drafter` names the
    drafter ("": the first available one)."""

    def __init__(self, depth: int, *, drafter: str = "") -> None:
        self.depth, self.drafter = depth, drafter
        self._decisions = [DraftDecision(size, drafter) for size in range(depth + 1)]

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        if not self.depth:
            return {}
        depths = {span.seq_id: min(self.depth, span.max_draft_tokens) for span in spans if span.needs_logits}
        longest = longest_that_fits(depths.values(), budget)
        return {seq_id: self._decisions[min(depth, longest)] for seq_id, depth in depths.items() if depth and longest}

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        return truncate_to(drafts, budget)

    def explain(self) -> str:
        if not self.depth:
            return "Speculation is off: every step decodes one token for each sequence."
        return f"The depth is fixed: {self.depth} for every sequence with room, whatever it costs and gains."
