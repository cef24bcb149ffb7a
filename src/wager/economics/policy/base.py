"""Policies: how many guesses each sequence may make, and which of them are worth verifying.

A policy sees spans and drafts and returns plans and drafts, and is told what came of them; it knows neither tensors
nor the engine. Here are the interface and the two policies that know no prices; `adaptive` has the one that does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from wager.errors import UsageError
from wager.types import Draft, DraftDecision, Plan, Span, StepRecord, Verdict, VerifyRule


class Policy(Protocol):
    """What the engine tells a policy in every step, in this order: plan, admit, learn, observe; `begin` before a
    sequence's first step, `end` after its last."""

    def begin(self, sequence: str, *, weight: float) -> None:
        """A sequence was accepted; `weight` is what its tokens count beside those of others."""

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        """Drafter and depth per sequence, before any guess is made. The step has `budget` rows for guesses, all
        sequences together; a plan may ask for more (what is drafted is not yet verified), except for guesses that are
        draws under a distribution-exact rule: those are verified as planned, so they must fit."""

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        """The guesses that are worth verifying at this step's price, at most `budget` rows of them together. Called in
        every step, also without drafts."""

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        """What became of the step: a verdict for each live sequence, drafted for or not. `tokens` are all that
        verification emitted, before any stop was applied; `accepted` indexes the admitted draft."""

    def observe(self, record: StepRecord) -> None:
        """What the step cost and brought."""

    def end(self, sequence: str) -> None:
        """The sequence finished or was aborted (not: preempted). Unknown sequences are ignored."""

    def explain(self) -> str:
        """Why the last step was what it was, in words."""


@dataclass(frozen=True, slots=True)
class DrafterCapabilities:
    """A drafter at hand: the deepest it may be asked for; whether it heeds `Plan.floors`; and the seconds it needs per
    token that became known while it was not asked (0 for one that keeps no cache)."""

    max_depth: int
    stops_early: bool = False
    catch_up_s: float = 0.0


def longest_that_fits(lengths: Collection[int], budget: int) -> int:
    """The greatest length at which all that are longer can be cut off so that they take `budget` rows together."""
    longest = max(lengths, default=0)
    while sum([min(each, longest) for each in lengths]) > budget:
        longest -= 1
    return longest


def truncate_to(drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
    """The drafts within `budget` rows together: the longest are truncated."""
    most = longest_that_fits([len(draft) for draft in drafts.values()], budget)
    return {seq_id: draft.truncate(most) for seq_id, draft in drafts.items() if most}


class FixedDepth:
    """The same depth for every sequence and step, as far as its span has room. `drafter` names who guesses ("": the
    engine's only one)."""

    def __init__(self, depth: int, *, drafter: str = "") -> None:
        self.depth = depth
        self.drafter = drafter

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        depths = [min(self.depth, span.max_draft_tokens) if span.needs_logits else 0 for span in spans]
        most = longest_that_fits(depths, budget)
        return {
            span.seq_id: DraftDecision(min(depth, most), self.drafter)
            for span, depth in zip(spans, depths, strict=True)
            if min(depth, most) > 0
        }

    def begin(self, sequence: str, *, weight: float) -> None:
        del sequence, weight  # all are asked alike

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        return truncate_to(drafts, budget)

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        del verdicts  # a fixed depth learns nothing

    def observe(self, record: StepRecord) -> None:
        del record

    def end(self, sequence: str) -> None:
        del sequence

    def explain(self) -> str:
        if not self.depth:
            return "Speculation is off: every step decodes one token for each sequence."
        return f"The depth is fixed: {self.depth} for every sequence with room, whatever it costs and brings."


_PACE = 0.05
_STEP = 0.01
_HALF_LIFE = 0.1


class Threshold(FixedDepth):
    """Threshold decoding: a guess is kept while its draft's cumulative likelihood is at least a threshold.

    The likelihood is the drafter's own (Draft.scores); a draft without scores is judged by running survival per depth.
    The threshold adapts to acceptance as in AdaEDL (arXiv 2410.18351): it rises by small steps while fewer than
    `target` of the verified guesses are accepted, and falls while more are. It knows no load and no prices. Under
    another rule than `match` drafts that are draws are not cut, since a cut would depend on the draw.
    """

    def __init__(
        self,
        depth: int,
        *,
        drafter: str = "",
        threshold: float = 0.4,
        target: float | None = 0.8,
        rule: VerifyRule = "match",
    ) -> None:
        super().__init__(depth, drafter=drafter)
        for name, value in (("threshold", threshold), ("target", target)):
            if value is not None and not 0 < value < 1:
                raise UsageError(f"{name} = {value} is out of range.", f"{name} must be between 0 and 1.")
        self.threshold = threshold
        self._target = target
        self._exact = rule != "match"
        self._rate = target or 0.0
        self._survival = [0.8 ** (depth + 1) for depth in range(depth)]
        self._admitted: Mapping[str, Draft] = {}

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        cut = {
            name: draft if self._draws(draft) else draft.truncate(self._size(draft)) for name, draft in drafts.items()
        }
        self._admitted = truncate_to({name: draft for name, draft in cut.items() if len(draft)}, budget)
        return self._admitted

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        verified = accepted = 0
        for verdict in verdicts:
            draft = self._admitted.get(verdict.seq_id)
            if draft is None:
                continue
            right = len(verdict.accepted)
            verified += len(draft)
            accepted += right
            for depth in range(min(len(draft), self.depth)):
                self._survival[depth] += _PACE * ((depth < right) - self._survival[depth])
        if verified and self._target is not None:
            self._rate += _HALF_LIFE * (accepted / verified - self._rate)
            towards = _STEP if self._rate < self._target else -_STEP
            self.threshold = min(0.98, max(0.02, self.threshold + towards))

    def explain(self) -> str:
        return (
            f"Guesses are kept while the likelihood of all so far is at least {self.threshold:.2f}, at most "
            f"{self.depth} of them; lately {self._rate:.0%} of those verified were accepted."
        )

    def _draws(self, draft: Draft) -> bool:
        return self._exact and draft.draft_probs is not None

    def _size(self, draft: Draft) -> int:
        """How long a beginning of the draft is likely enough; of a tree too, whose parents precede their children."""
        likely = draft.scores if len(draft.scores) == len(draft) else [self._survival[d - 1] for d in draft.depths]
        return next((node for node, score in enumerate(likely) if score < self.threshold), len(draft))
