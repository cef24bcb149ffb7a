"""A policy of one's own: two guesses more after a draft that was accepted whole, one less after any other.

    python examples/custom_policy.py [MODEL]

That is the heuristic of transformers' assisted generation. It asks for no prices, so it loses where rows are dear;
wager's own policy weighs both (docs/policy.md). No policy can change the text.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

import wager
from wager.economics.policy.base import Policy, longest_that_fits, truncate_to
from wager.types import Draft, DraftDecision, Plan, Span, Verdict

MODEL = sys.argv[1] if len(sys.argv) > 1 else "SmolLM2-135M-Instruct"
PROMPT = "one two three one two three one two three one two"


class MoreIfAllAccepted(Policy):
    def __init__(self, *, first: int = 4) -> None:
        self.first = first
        self.depths: dict[str, int] = {}
        self.admitted: Mapping[str, Draft] = {}

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        wanted = {
            span.seq_id: min(self.depths.setdefault(span.seq_id, self.first), span.max_draft_tokens)
            for span in spans
            if span.needs_logits  # not a prompt that is still being computed
        }
        longest = longest_that_fits(wanted.values(), budget)
        return {seq_id: DraftDecision(min(depth, longest)) for seq_id, depth in wanted.items()}

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        self.admitted = truncate_to(drafts, budget)
        return self.admitted

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            if guesses := len(self.admitted.get(verdict.seq_id, ())):
                change = 2 if len(verdict.accepted) == guesses else -1
                self.depths[verdict.seq_id] = max(1, self.depths[verdict.seq_id] + change)

    def end(self, sequence: str) -> None:
        self.depths.pop(sequence, None)

    def explain(self) -> str:
        return f"Depths by sequence: {self.depths}."


def main() -> None:
    with wager.LLM(MODEL, drafter="ngram") as llm:
        llm.engine.policy = MoreIfAllAccepted()
        answer = llm.generate(PROMPT, wager.SamplingParams(max_tokens=48))
        print(f"{answer.stats.accepted} of {answer.stats.drafted} guesses accepted in {answer.stats.rounds} passes")


if __name__ == "__main__":
    main()
