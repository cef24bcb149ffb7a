"""The policy that verifies draft tokens while the drafter finds them likely enough, whatever a row costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from wager.economics.policy.base import truncate_to
from wager.economics.policy.fixed import FixedDepth
from wager.economics.policy_spec import DEFAULT_THRESHOLD
from wager.errors import UsageError
from wager.types import RULES, Draft, Verdict, VerifyRule

_TARGET = 0.8  # acceptance rate at which the threshold stays where it is
_STEP, _LOWEST, _HIGHEST = 0.01, 0.02, 0.98  # change of the threshold in a step with drafts, and its bounds
_RATE_SMOOTHING, _SURVIVAL_SMOOTHING = 0.1, 0.05  # weight of a new step in the running means


class Threshold(FixedDepth):
    """A draft token is kept while the likelihood of the draft up to it is at least a threshold.

    The likelihood is the drafter's own (Draft.scores), or the running survival of the depth for drafts without scores.
    The threshold adapts as in AdaEDL (arXiv 2410.18351): it rises while fewer than 80 % of the verified tokens are
    accepted and falls while more are. Under another rule than `match`, drafts sampled from draft_probs are not
    truncated, since the length would depend on the tokens drawn.
    """

    def __init__(
        self, depth: int, *, drafter: str = "", threshold: float = DEFAULT_THRESHOLD, rule: VerifyRule = "match"
    ) -> None:
        super().__init__(depth, drafter=drafter)
        if not 0 < threshold < 1:
            raise UsageError(f"threshold = {threshold} is out of range.", "threshold must be between 0 and 1.")
        self.threshold = threshold
        self._exact = RULES[rule].needs_draft_probs
        self._acceptance_rate = _TARGET
        self._survival = [0.8 ** (node + 1) for node in range(depth)]
        self._admitted: Mapping[str, Draft] = {}

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        kept = {seq_id: draft.truncate(self._likely_length(draft)) for seq_id, draft in drafts.items()}
        self._admitted = truncate_to({seq_id: draft for seq_id, draft in kept.items() if len(draft)}, budget)
        return self._admitted

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        verified = total = 0
        for verdict in verdicts:
            size, accepted = len(self._admitted.get(verdict.seq_id, ())), len(verdict.accepted)
            verified, total = verified + size, total + accepted
            for node in range(min(size, self.depth)):
                self._survival[node] += _SURVIVAL_SMOOTHING * ((node < accepted) - self._survival[node])
        if verified:
            self._acceptance_rate += _RATE_SMOOTHING * (total / verified - self._acceptance_rate)
            step = _STEP if self._acceptance_rate < _TARGET else -_STEP
            self.threshold = min(_HIGHEST, max(_LOWEST, self.threshold + step))

    def explain(self) -> str:
        return (
            f"Draft tokens are verified while the likelihood of the draft is at least {self.threshold:.2f}, at most "
            f"{self.depth} of them; lately {self._acceptance_rate:.0%} of those verified were accepted."
        )

    def _likely_length(self, draft: Draft) -> int:
        """Nodes before the first unlikely one (of a tree too, whose parents precede their children)."""
        if self._exact and draft.draft_probs is not None:
            return len(draft)
        scored = len(draft.scores) == len(draft)
        likelihoods = draft.scores if scored else [self._survival[depth - 1] for depth in draft.depths]
        return next((node for node, value in enumerate(likelihoods) if value < self.threshold), len(draft))
