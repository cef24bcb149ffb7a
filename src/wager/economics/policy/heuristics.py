"""Policies that ask for no prices: a fixed depth, and a threshold of likelihood."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from wager.economics.options import DEFAULT_THRESHOLD
from wager.economics.policy.base import SMOOTHING, Policy, longest_that_fits, truncate_to
from wager.errors import UsageError
from wager.types import RULES, Draft, DraftDecision, Plan, Span, Verdict, VerifyRule


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


_TARGET = 0.8  # acceptance rate at which the threshold stays where it is
_STEP, _LOWEST = 0.01, 0.02  # change of the threshold in a step with drafts, and how near it comes to 0 and to 1


class Threshold(FixedDepth):
    """A draft token is verified while the likelihood of the draft up to it is at least a threshold.

    The likelihood is the drafter's own (Draft.scores); drafts without scores are verified as they are. Drafting ends
    there too: the threshold is passed on as min_survival, so that a drafter that makes a pass for each token stops
    after the first unlikely one.
    The threshold adapts as in AdaEDL (arXiv 2410.18351): it rises while fewer than 80 % of the verified tokens are
    accepted and falls while more are, and in steps whose drafts were all too unlikely, which show nothing. Under
    another rule than `match`, drafts sampled from draft_probs are not truncated, since the length would depend on the
    tokens drawn; to stop after an unlikely one is safe, as it is kept.
    """

    def __init__(
        self, depth: int, *, drafter: str = "", threshold: float = DEFAULT_THRESHOLD, rule: VerifyRule = "match"
    ) -> None:
        super().__init__(depth, drafter=drafter)
        if not 0 < threshold < 1:
            raise UsageError(f"threshold = {threshold} is out of range.", "threshold must be between 0 and 1.")
        self.threshold = threshold
        self._exact = RULES[rule].needs_draft_probs
        self._acceptance_rate, self._verified = _TARGET, 0
        self._admitted: Mapping[str, Draft] = {}
        self._drafted = False  # whether the step has drafts

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        planned = super().plan(spans, budget)
        # one decision for each depth: a batch may have a thousand sequences
        made = {
            depth: DraftDecision(depth, self.drafter, self.threshold)
            for depth in {decision.depth for decision in planned.values()}
        }
        return {seq_id: made[decision.depth] for seq_id, decision in planned.items()}

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        self._drafted = bool(drafts)
        likely = self._likely_length
        kept = {seq_id: draft.truncate(size) for seq_id, draft in drafts.items() if (size := likely(draft))}
        self._admitted = truncate_to(kept, budget)
        return self._admitted

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        verified = total = 0
        for verdict in verdicts:
            verified += len(self._admitted.get(verdict.seq_id, ()))
            total += len(verdict.accepted)
        if verified:
            smoothing = 2 * SMOOTHING if self._verified else 1.0
            self._verified += verified
            self._acceptance_rate += smoothing * (total / verified - self._acceptance_rate)
        if self._drafted:
            step = _STEP if verified and self._acceptance_rate < _TARGET else -_STEP
            self.threshold = min(1 - _LOWEST, max(_LOWEST, self.threshold + step))

    def explain(self) -> str:
        lately = f"lately {self._acceptance_rate:.0%} of those verified were accepted (running mean of steps)"
        return (
            f"Tokens are drafted and verified while the likelihood of the draft is at least {self.threshold:.2f}, "
            f"at most {self.depth} of them; {lately if self._verified else 'none was verified yet'}."
        )

    def _likely_length(self, draft: Draft) -> int:
        """Nodes before the first unlikely one (of a tree too, whose parents precede their children)."""
        if not draft.scores or (self._exact and draft.draft_probs is not None):
            return len(draft)
        threshold = self.threshold
        for node, value in enumerate(draft.scores):
            if value < threshold:
                return node
        return len(draft)
