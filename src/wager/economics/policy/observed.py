"""What was observed in the latest steps: tokens and seconds, and of each drafter how much was asked for, drafted,
verified and accepted. For `explain`, which says what was observed beside what was forecast."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wager.economics.acceptance import LARGE_BATCH
from wager.economics.policy.sequence_state import PolicyStep
from wager.types import StepRecord

_STEPS = 64  # that are remembered: a second or less on most machines


@dataclass(slots=True)
class DraftCounts:
    """Of one drafter: drafts that were asked for, and draft tokens that were drafted, verified and accepted."""

    requested: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0

    def add(self, other: DraftCounts) -> None:
        self.requested += other.requested
        self.drafted += other.drafted
        self.verified += other.verified
        self.accepted += other.accepted


@dataclass(frozen=True, slots=True)
class ObservedSpeed:
    """`tokens` in `seconds` over `steps` steps, in which plain decoding would have taken `plain_seconds` for
    `plain_tokens`; `plain_steps` of the steps were plain, and took `measured_plain` seconds on average."""

    steps: int
    tokens: int
    seconds: float
    plain_tokens: int
    plain_seconds: float
    plain_steps: int
    measured_plain: float

    @property
    def ratio(self) -> float:
        """Tokens a second over those that plain decoding would have yielded."""
        return self.tokens / self.seconds * self.plain_seconds / self.plain_tokens


@dataclass(frozen=True, slots=True)
class CountedStep:
    """What is kept of a step of a large batch: whether drafts were asked for (`plan`), and what became of them."""

    plan: bool
    counts: dict[str, DraftCounts]
    record: StepRecord | None


class ObservedSteps:
    """Remembers the latest steps."""

    def __init__(self) -> None:
        self._observed: deque[PolicyStep | CountedStep] = deque(maxlen=_STEPS)
        self._steps = 0

    def add(self, taken: Sequence[PolicyStep]) -> None:
        """Steps were taken. What became of their drafts is counted when it is asked for; in a large batch, whose steps
        are not kept, in some steps, at once."""
        if max([len(step.all_spans) for step in taken], default=0) <= LARGE_BATCH:
            self._observed.extend(taken)
            return
        for step in taken:
            self._steps += 1
            interval = min(_STEPS // 2, max(1, len(step.plan) // LARGE_BATCH))
            counts = {} if not step.plan or self._steps % interval else _count(step)
            self._observed.append(CountedStep(bool(step.plan), counts, step.record))

    def drafts(self, drafter: str) -> DraftCounts:
        """Of the latest steps together, as far as they were counted."""
        total = DraftCounts()
        for step in self._observed:
            counts = step.counts if isinstance(step, CountedStep) else _count(step) if step.plan else {}
            if drafter in counts:
                total.add(counts[drafter])
        return total

    def speed(self, plain_seconds: Callable[[int, int], float]) -> ObservedSpeed | None:
        """Of the latest steps that computed no prompts; None if there was none. `plain_seconds` are those believed of
        a plain step, by sequences and cached positions."""
        decoded = [
            (record, sum(record.seconds.values()), not step.plan)
            for step in self._observed
            if (record := step.record) and record.rows == record.sequences + record.drafted
        ]
        records = [record for record, seconds, _ in decoded if seconds > 0]
        if not records:
            return None
        plain_steps = [seconds for _, seconds, plain in decoded if plain]
        return ObservedSpeed(
            steps=len(records),
            tokens=sum([record.emitted for record in records]),
            seconds=sum([seconds for _, seconds, _ in decoded]),
            plain_tokens=sum([record.sequences for record in records]),
            plain_seconds=sum([plain_seconds(record.sequences, sum(record.context_lens)) for record in records]),
            plain_steps=len(plain_steps),
            measured_plain=sum(plain_steps) / len(plain_steps) if plain_steps else 0.0,
        )


def _count(step: PolicyStep) -> dict[str, DraftCounts]:
    if len(step.drafter_index) == 1:  # then sums suffice
        return {
            next(iter(step.drafter_index)): DraftCounts(
                requested=len(step.plan),
                drafted=sum([len(draft.tokens) for draft in step.drafted.values()]),
                verified=sum([len(draft.tokens) for draft in step.admitted.values()]),
                accepted=sum([len(verdict.accepted) for verdict in step.verdicts]),
            )
        }
    counts: dict[str, DraftCounts] = {}
    for seq_id, decision in step.plan.items():
        count = counts.setdefault(decision.drafter, DraftCounts())
        draft, kept = step.drafted.get(seq_id), step.admitted.get(seq_id)
        count.requested += 1
        count.drafted += len(draft.tokens) if draft else 0
        count.verified += len(kept.tokens) if kept else 0
    for verdict in step.verdicts:
        if verdict.accepted:
            counts[step.plan[verdict.seq_id].drafter].accepted += len(verdict.accepted)
    return counts
