"""What requests themselves say about speculation, around the engine's policy: which drafter and depth, and a grammar.

The policy sees the sequences of requests that choose for themselves as it sees prompts: rows that it can do nothing
about. Grammars change what it admits. While no request says anything its own methods are called, without a detour.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from wager.draft.base import Drafter
from wager.economics.policy.base import Policy, WrappedPolicy, longest_that_fits, truncate_to
from wager.engine.grammar_drafts import GrammarDrafts
from wager.engine.sequence import EngineSequence
from wager.errors import RequestError
from wager.types import Draft, DraftDecision, Plan, Request, RequestSpeculation, Span, Verdict

_METHODS = ("begin", "plan", "admit", "learn", "observe", "end")


class RequestPolicy(WrappedPolicy):
    """Decides as `policy`, except for requests that say how they speculate or have a grammar. `sequences` are the
    engine's."""

    def __init__(self, policy: Policy, sequences: Mapping[str, EngineSequence]) -> None:
        self._sequences = sequences
        self._decisions: dict[str, DraftDecision] = {}  # of sequences whose requests choose
        self._constrained: set[str] = set()
        self._grammar_drafts = GrammarDrafts()
        self._spans: Sequence[Span] = ()
        self._left_out: frozenset[str] = frozenset()
        super().__init__(policy)
        self._bind()

    def replace(self, policy: Policy) -> None:
        """Decide as another policy from now on."""
        self.policy = policy
        self._bind()

    @staticmethod
    def check(request: Request, drafters: Mapping[str, Drafter]) -> None:
        """RequestError if the engine has no such drafter."""
        choice = request.speculation
        if choice is None or choice.depth == 0 or (choice.drafter or next(iter(drafters), "")) in drafters:
            return
        raise RequestError(
            f"The request wants {f'drafter {choice.drafter!r}' if choice.drafter else 'a drafter'}; this engine has "
            f"{', '.join(drafters) or 'none'}.",
            "Name one that it was loaded with (the option drafter), or none at all (depth 0).",
            field="speculation",
        )

    def add(self, sequence: EngineSequence, drafters: Mapping[str, Drafter]) -> bool:
        """A sequence is about to begin. Whether other methods are to be called from now on."""
        quiet = not self._says_something
        if sequence.request.speculation is not None:
            self._decisions[sequence.id] = _decision(sequence.request.speculation, drafters)
        if sequence.constrained:
            self._constrained.add(sequence.id)
        self._bind()
        return quiet and self._says_something

    def remove(self, seq_id: str) -> bool:
        """A sequence has ended, and the policy knows. Whether other methods are to be called from now on."""
        busy = self._says_something
        self._decisions.pop(seq_id, None)
        self._constrained.discard(seq_id)
        self._bind()
        return busy and not self._says_something

    @property
    def _says_something(self) -> bool:
        return bool(self._decisions or self._constrained)

    def _bind(self) -> None:
        """The policy's own methods in place of this one's, while no request says anything."""
        for name in _METHODS:
            if self._says_something:
                self.__dict__.pop(name, None)
            else:
                self.__dict__[name] = getattr(self.policy, name)

    # ---- the interface of a policy ----------------------------------------------------------------------------------

    def begin(self, sequence: str, *, weight: float) -> None:
        if sequence not in self._decisions:
            self.policy.begin(sequence, weight=weight)

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        self._spans = spans
        if not self._decisions:
            return self.policy.plan(spans, budget)
        depths: dict[str, int] = {}
        seen: list[Span] = []
        for span in spans:
            decision = self._decisions.get(span.seq_id)
            if decision is None or not span.needs_logits:
                seen.append(span)
                continue
            seen.append(replace(span, needs_logits=False, max_draft_tokens=0))
            if depth := min(decision.depth, span.max_draft_tokens):
                depths[span.seq_id] = depth
        longest = longest_that_fits(depths.values(), budget)
        chosen = {
            seq_id: replace(self._decisions[seq_id], depth=min(depth, longest))
            for seq_id, depth in depths.items()
            if longest
        }
        rows = sum([decision.depth for decision in chosen.values()])
        return {**self.policy.plan(seen, budget - rows), **chosen}

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        if self._decisions:
            own = {seq_id: draft for seq_id, draft in drafts.items() if seq_id in self._decisions}
            chosen = truncate_to(own, budget)
            rows = sum([len(draft) for draft in chosen.values()])
            others = {seq_id: draft for seq_id, draft in drafts.items() if seq_id not in own}
            admitted: Mapping[str, Draft] = {**self.policy.admit(others, budget - rows), **chosen}
        else:
            admitted = self.policy.admit(drafts, budget)
        if not self._constrained:
            return admitted
        return self._grammar_drafts.complete(self._spans, admitted, budget, self._sequences)

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        others = [verdict for verdict in verdicts if verdict.seq_id not in self._decisions]
        self.policy.learn(self._grammar_drafts.verdicts(others) if self._constrained else others)

    @property
    def inactive_drafters(self) -> frozenset[str]:
        """None that a request names is inactive, nor the first one where it names none."""
        if not self._decisions:
            return self.policy.inactive_drafters
        named = {decision.drafter for decision in self._decisions.values() if decision.depth}
        return frozenset() if "" in named else self.policy.inactive_drafters - named

    def leave_out(self, drafters: frozenset[str]) -> None:
        self._left_out = drafters
        self.policy.leave_out(drafters)

    def explain(self) -> str:
        lines, count = [self.policy.explain()], len(self._decisions)
        if self._left_out:
            lines.append(f"Failed, and not asked until a pause is over: {', '.join(sorted(self._left_out))}.")
        if count:
            lines.append(f"Of {count} sequences the requests say how they speculate.")
        return "\n".join(lines)


def _decision(choice: RequestSpeculation, drafters: Mapping[str, Drafter]) -> DraftDecision:
    drafter = drafters.get(choice.drafter or next(iter(drafters), ""))
    if drafter is None:
        return DraftDecision(0)
    depth = drafter.default_depth if choice.depth is None else choice.depth
    return DraftDecision(min(depth, drafter.max_depth), choice.drafter)
