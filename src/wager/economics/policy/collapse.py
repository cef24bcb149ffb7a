"""Whether a drafter's guesses go on being accepted as they were: one whose acceptance collapses is reported, and is not
used until it recovers.

What acceptance is worth is decided elsewhere, for every sequence anew, since texts differ. A drafter that was good and
is so no more for any of them (a head beside another target, a store of other texts) would be tried again by each.
Of each draft it is seen whether a first guess was right, also of those that are made only to learn. The evidence is a
cumulative sum of log-likelihood ratios (Page 1954): nearly never right, against a quarter as often right as in the long
run, since other texts may be guessed as rarely as that by a drafter that is what it was; that of a collapse must come
from several sequences.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from wager.economics.policy.state import PolicyStep
from wager.types import Draft, Verdict

log = logging.getLogger("wager")

_LONG_RUN = 512  # drafts that the long run's rate is a mean of
_KNOWN = 48  # drafts after which there is a long run
_OTHER_TEXTS = 0.25  # of the long run's rate: that of texts which are hard to guess
_NEARLY_NEVER = 0.02  # of the rate of these
_ENOUGH = 10.0  # evidence: a false alarm in e^10 drafts of equal sequences
_SHARE = 4.9  # of that, what one sequence may count for: it takes three
_MOST_SEEN = 8  # drafts of one step that are looked at


@dataclass(slots=True)
class DrafterRecord:
    """Of one drafter: `rate` of right first guesses in the long run, of `seen` drafts, and as it was (`usual`) before
    there was `evidence` of a collapse, or in one against it, with the `shares` of sequences; `right` of `tried` guesses
    since it began, `lately` the same when it last was enough; `words` say how it collapsed."""

    rate: float = 0.0
    usual: float = 0.0
    seen: int = 0
    collapsed: bool = False
    evidence: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)
    right: int = 0
    tried: int = 0
    lately: str = ""
    words: str = ""

    def see(self, seq_id: str, *, right: bool) -> bool:
        """One draft; whether the drafter has now collapsed, or recovered."""
        if not self.evidence and not self.collapsed:
            self.usual = min(0.98, max(0.01, self.rate))
        if not self.collapsed:
            self.seen += 1
            self.rate += (right - self.rate) / min(self.seen, _LONG_RUN)
        if self.seen < _KNOWN:
            return False
        sound = self.usual * _OTHER_TEXTS
        never = sound * _NEARLY_NEVER
        ratio = math.log(never / sound if right else (1 - never) / (1 - sound))
        if self.collapsed:
            ratio = -ratio
        elif not right:  # no sequence counts for more than its share
            ratio = min(ratio, _SHARE - self.shares.get(seq_id, 0.0))
            self.shares[seq_id] = self.shares.get(seq_id, 0.0) + ratio
        self.evidence += ratio
        self.right, self.tried = self.right + right, self.tried + 1
        changed = self.evidence >= _ENOUGH
        if changed:
            self.collapsed, self.lately = not self.collapsed, f"{self.right} of {self.tried}"
        if changed or self.evidence <= 0:
            self.evidence, self.right, self.tried = 0.0, 0, 0
            self.shares.clear()
        return changed


class CollapseWatch:
    """Watches the drafters of a policy; those that have collapsed are `unused`. The first collapse of each is a
    warning, the next ones are noted."""

    def __init__(self) -> None:
        self.unused: set[str] = set()
        self._records: dict[str, DrafterRecord] = {}
        self._warned: set[str] = set()
        self._changes = 0

    @property
    def collapsed(self) -> dict[str, str]:
        """The drafters whose acceptance has collapsed, with a sentence about each."""
        return {name: record.words for name, record in self._records.items() if record.collapsed}

    def add(self, steps: Iterable[PolicyStep]) -> bool:
        """Steps were taken; whether a drafter has collapsed or recovered in them."""
        before = self._changes
        for step in steps:
            if not step.drafted:
                continue
            for verdict in step.verdicts[:_MOST_SEEN]:
                draft = step.drafted.get(verdict.seq_id)
                if draft is not None and draft.tokens and verdict.tokens:
                    self._see(step.plan[verdict.seq_id].drafter, verdict, draft)
        return self._changes > before

    def _see(self, name: str, verdict: Verdict, draft: Draft) -> None:
        record = self._records.setdefault(name, DrafterRecord())
        if not record.see(verdict.seq_id, right=is_right(draft, verdict.tokens) or bool(verdict.accepted)):
            return
        self._changes += 1
        if not record.collapsed:
            self.unused.discard(name)
            log.info("Drafter %r is right again, and used as far as that pays.", name)
        else:
            self.unused.add(name)
            record.words = (
                f"Drafter {name!r} has collapsed: its first guesses were right {record.usual:.0%} of the time, and "
                f"lately {record.lately}."
            )
            level = logging.INFO if name in self._warned else logging.WARNING
            log.log(level, "%s It is not used while that is so, except to see whether it changes.", record.words)
            self._warned.add(name)


def is_right(draft: Draft, emitted: Sequence[int]) -> bool:
    """Whether a first guess is the token that was emitted."""
    if draft.tokens[0] == emitted[0]:
        return True
    return any(token == emitted[0] for token, parent in zip(draft.tokens, draft.parents, strict=False) if parent < 0)
