"""Whether a drafter's guesses go on being right as they were, in Python: the reference of csrc/collapse.h; and that,
by way of what the policy asks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from wager.economics.policy.learning import (
    _ENOUGH,
    _KNOWN,
    _LONG_RUN,
    _NEARLY_NEVER,
    _OTHER_TEXTS,
    _SHARE,
    COLLAPSE_RULES,
)
from wager.economics.policy.state import PolicyStep
from wager.kernels import _native
from wager.types import Draft, DraftDecision, Verdict


@dataclass(slots=True)
class DrafterRecord:
    """What is known of one drafter: the `rate` of right first guesses in the long run, of `seen` drafts, and as it was
    (`usual`) before there was `evidence` of a collapse, or in one against it, with the `shares` of sequences; `right`
    of `tried` guesses since it began, `lately` the same when it last was enough."""

    rate: float = 0.0
    usual: float = 0.0
    seen: int = 0
    collapsed: bool = False
    evidence: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)
    right: int = 0
    tried: int = 0
    lately: str = ""

    def see(self, seq_id: str, *, right: bool) -> bool:
        """One draft; whether the drafter has now collapsed, or recovered."""
        if not self.evidence and not self.collapsed:
            self.usual = min(0.98, max(0.01, self.rate))
        if not self.collapsed:
            self.seen += 1
            self.rate += (right - self.rate) / min(self.seen, _LONG_RUN)
        if self.seen < _KNOWN or (right and not self.evidence and not self.collapsed):
            return False
        sound = self.usual * _OTHER_TEXTS
        never = sound * _NEARLY_NEVER
        ratio = math.log(never / sound if right else (1 - never) / (1 - sound))
        if self.collapsed:
            ratio = -ratio
        elif not right:  # no sequence counts for more than its share
            ratio = min(ratio, _SHARE * _ENOUGH - self.shares.get(seq_id, 0.0))
            self.shares[seq_id] = self.shares.get(seq_id, 0.0) + ratio
        self.evidence += ratio
        self.right, self.tried = self.right + right, self.tried + 1
        if changed := self.evidence >= _ENOUGH:
            self.collapsed, self.lately = not self.collapsed, f"{self.right} of {self.tried}"
        if changed or self.evidence <= 0:
            self.evidence, self.right, self.tried = 0.0, 0, 0
            self.shares.clear()
        return changed


class NativeRecord:
    """The native one, of steps with one draft. What is known of the drafter is as of its last collapse or recovery."""

    collapsed, usual, lately = False, 0.0, ""

    def __init__(self) -> None:
        self._records = _native.DrafterRecords(COLLAPSE_RULES, most_seen=1)

    def see(self, seq_id: str, *, right: bool) -> bool:
        """As above."""
        step = PolicyStep()
        step.plan = {seq_id: DraftDecision(1, "d")}
        step.drafted = {seq_id: Draft.chain(seq_id, [1], drafter="d")}
        step.verdicts = [Verdict(seq_id, (), (1 if right else 2,))]
        changes = self._records.add([step])
        for _, self.collapsed, self.usual, self.lately in changes:
            pass
        return bool(changes)
