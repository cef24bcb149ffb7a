"""Which drafters pause because they failed, for how long, and what the log says of it.

Pauses are counted in steps: what a drafter that always fails costs is paid in steps, so its share of them is bounded on
any machine, and an idle engine does not wait. A pause is twice the last one if the drafter failed soon after that.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass

from wager.draft.base import DrafterStoppedError

log = logging.getLogger("wager")

FIRST_PAUSE = 16
LONGEST_PAUSE = 4096
STRIKES = 3
"""Sequences that a drafter may fail for, one after the other, until it pauses for all of them."""

_SOON = 8
"""A failure is soon within so many times the steps of the last pause."""


@dataclass(slots=True)
class _Record:
    """Of one drafter: its failures so far, the sequences that it failed for since it served one to its end, and the
    steps of its last pause, which is over in step number `until`."""

    failures: int = 0
    strikes: int = 0
    pause: int = 0
    until: int = 0


class DrafterPauses:
    """`failed` are the drafters that pause now, with the reason."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        self._records: defaultdict[str, _Record] = defaultdict(_Record)
        self._now = 0

    def failures(self, name: str) -> int:
        """How often this drafter has failed until now."""
        return self._records[name].failures if name in self._records else 0

    def strike(self, name: str, error: Exception) -> bool:
        """It failed for one sequence, which it is not told of any more. Whether it is to pause for all of them."""
        record = self._records[name]
        record.strikes += 1
        if record.strikes < STRIKES:
            self._note(name, error, "is left out for one sequence")
        return record.strikes >= STRIKES

    def served(self, name: str) -> None:
        """It has served a sequence to its end."""
        if name in self._records:
            self._records[name].strikes = 0

    def begin(self, name: str, error: Exception) -> None:
        """It failed, and pauses from now on."""
        record = self._records[name]
        soon = record.pause and self._now - record.until < _SOON * record.pause
        record.pause = min(LONGEST_PAUSE, 2 * record.pause) if soon else FIRST_PAUSE
        record.until = self._now + record.pause
        self.failed[name] = _reason(error)
        self._note(name, error, f"pauses for {record.pause} steps")

    def step(self) -> bool:
        """A step was taken; whether a pause is over."""
        self._now += 1
        if not self.failed:
            return False
        over = [name for name in self.failed if self._records[name].until <= self._now]
        for name in over:
            del self.failed[name]
        return bool(over)

    def _note(self, name: str, error: Exception, what: str) -> None:
        """Count a failure; the 1st, 2nd, 4th, 8th and so on are logged."""
        record = self._records[name]
        record.failures += 1
        if record.failures.bit_count() == 1:
            count = f" (failure {record.failures})" if record.failures > 1 else ""
            log.warning("Drafter %r failed and %s: %s%s", name, what, _reason(error), count)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, DrafterStoppedError) else f"{type(error).__name__}: {error}"
