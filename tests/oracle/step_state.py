"""Which sequences run in a step, and what a pass means for them, in plain Python: what csrc/step_state.h does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from oracle.block_pool import BLOCK_SIZE, PlainBlockPool
from oracle.prompt_rows import PlainPromptRows, rows_kept_for_guesses
from wager.types import StepRecord

SHORT_ROWS, MOST_OVERTAKEN = 64, 64

Row = tuple[str, int, tuple[int, ...], bool, int]
"""Id, position of the first row, tokens, whether logits are needed, and room for guesses."""


@dataclass(eq=False)
class PlainSequence:
    """See SequenceState."""

    id: str
    request_id: str
    choice: int
    tokens: list[int]
    max_length: int
    stop_ids: Sequence[int]
    tenant: str
    streamed: bool = False
    computed: int = 0
    overtaken: int = 0
    admitted: bool = False
    stats: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("cached_tokens", "rounds", "drafted", "accepted", "preemptions"), 0)
    )

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed


class PlainStepState:
    """See StepState."""

    def __init__(
        self,
        pool: PlainBlockPool,
        *,
        max_rows: int,
        max_sequences: int,
        max_context: int,
        max_drafts: int,
        max_prefill_rows: int | None,
    ) -> None:
        self.pool, self.max_rows, self.max_sequences, self.max_context = pool, max_rows, max_sequences, max_context
        self.max_drafts, self.recent_drafted = max_drafts, 0
        self.prompt_rows = PlainPromptRows(most=max_prefill_rows)
        self.sequences: dict[str, PlainSequence] = {}
        self.running: list[PlainSequence] = []
        self.waiting: list[PlainSequence] = []
        self._rows: dict[str, Row] = {}

    def add(self, sequence: PlainSequence) -> None:
        self.sequences[sequence.id] = sequence
        self.waiting.append(sequence)

    def remove(self, sequence: PlainSequence) -> None:
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.pool.release(sequence.id)
        del self.sequences[sequence.id]

    def preempt_all(self) -> None:
        while self.running:
            self._preempt(self.running[-1])

    # ---- before the pass ------------------------------------------------------------------------------------------

    @property
    def streamed(self) -> bool:
        return any(each.streamed for each in self.sequences.values())

    def next(self, last: StepRecord | tuple[()]) -> list[Row]:
        if last:
            self.prompt_rows.observe(last)
        decoding = sum(each.pending == 1 for each in self.running)
        drafts = min(self.max_drafts, max(0, self.max_rows // max(1, decoding) - 1))
        kept = rows_kept_for_guesses(self.max_rows, decoding=decoding, drafts=drafts, recent=self.recent_drafted)
        limit = self.prompt_rows.limit(decoding=decoding, streamed=self.streamed)
        return self._scheduled(drafts, kept, self.max_rows if limit is None else min(limit, self.max_rows))

    def verified(self, drafted: int) -> None:
        """How many guesses a step verified."""
        self.recent_drafted = max(drafted, int(0.75 * self.recent_drafted))

    def _scheduled(self, drafts: int, kept: int, most: int) -> list[Row]:
        self._rows = {}
        enough = True
        for sequence in [each for each in self.running if each.pending == 1]:
            left = self.max_rows - self._count()
            if left > 0 and sequence in self.running:
                enough &= self._schedule(sequence, left, drafts)
        free_rows = self.max_rows - self._count() - kept
        end, short_rows = self._count() + min(free_rows, most), min(SHORT_ROWS, free_rows)
        begun = [each for each in self.running if each.pending > 1]
        for sequence in [*begun, *self.waiting]:
            if short_rows <= 0 or not enough:
                break
            pending = sequence.pending
            if pending <= short_rows and (sequence in self.running or self._overtake(sequence)):
                enough &= self._schedule(sequence, pending, drafts)
                short_rows -= pending
        for sequence in begun:
            left = end - self._count()
            if left > 0 and sequence.id not in self._rows and sequence in self.running:
                enough &= self._schedule(sequence, left, drafts)
        while enough and self.waiting and len(self.running) < self.max_sequences:
            left = end - self._count()
            if left <= 0 or not self._start(self.waiting[0]):
                break
            self._schedule(self.running[-1], left, drafts)
        return list(self._rows.values())

    def _count(self) -> int:
        return sum(len(row[2]) for row in self._rows.values())

    def _schedule(self, sequence: PlainSequence, left: int, drafts: int) -> bool:
        start, known = sequence.computed, len(sequence.tokens)
        end = min(known, start + left)
        longest = min(sequence.max_length, self.max_context)
        drafts = max(0, min(drafts, longest - known - 1)) if end == known else 0
        enough = self.pool.reserve(sequence.id, end + drafts)
        if not enough:
            drafts = 0
            while not self.pool.reserve(sequence.id, end):
                preempted = max(reversed(self.running), key=self._load)
                self._preempt(preempted)
                if preempted is sequence:
                    return False
        self._rows[sequence.id] = (sequence.id, start, tuple(sequence.tokens[start:end]), end == known, drafts)
        return enough

    def _load(self, sequence: PlainSequence) -> tuple[int, int]:
        """How many sequences its tenant runs, and its request."""
        of_tenant = [each for each in self.running if each.tenant == sequence.tenant]
        return len(of_tenant), len([each for each in of_tenant if each.request_id == sequence.request_id])

    def _preempt(self, sequence: PlainSequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.id)
        self._rows.pop(sequence.id, None)
        sequence.computed = 0
        sequence.stats["preemptions"] += 1
        self.waiting.insert(0, sequence)

    def _overtake(self, sequence: PlainSequence) -> bool:
        first = self.waiting[0]
        turn = sequence is first or first.overtaken < MOST_OVERTAKEN
        if len(self.running) >= self.max_sequences or not turn or not self._start(sequence):
            return False
        first.overtaken += sequence is not first
        return True

    def _start(self, sequence: PlainSequence) -> bool:
        first = self.sequences.get(sequence.request_id)
        forks = sequence.choice > 0 and first is not None and first in self.running
        if forks and first is not None and first.computed < first.prompt_tokens:
            return False
        promised = sum(self._missing_blocks(each) for each in self.running if each.pending > 1)
        if self._missing_blocks(sequence) + promised > self.pool.num_free_blocks:
            return False
        self.waiting.remove(sequence)
        self.running.append(sequence)
        if forks and first is not None:
            self.pool.fork(first.id, sequence.id, sequence.prompt_tokens - 1)
            sequence.computed = (sequence.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        else:
            sequence.computed = self.pool.match_prefix(sequence.id, sequence.tokens, tenant=sequence.tenant)
        if not sequence.admitted:
            sequence.admitted, sequence.stats["cached_tokens"] = True, sequence.computed
        return True

    def _missing_blocks(self, sequence: PlainSequence) -> int:
        return max(0, len(sequence.tokens) // BLOCK_SIZE + 1 - len(self.pool.block_table(sequence.id)))

    # ---- after the pass -------------------------------------------------------------------------------------------

    def commit(
        self, sequence: PlainSequence, rows: int, drafted: int, tokens: Sequence[int], accepted: Sequence[int]
    ) -> tuple[int, str | None, list[tuple[int, int]]]:
        """The number of tokens kept, why the sequence ends, and the slots that accepted nodes move between."""
        count, finish, known = 0, None, len(sequence.tokens)
        for token in tokens:
            sequence.tokens.append(token)
            count += 1
            if token in sequence.stop_ids:
                finish = "stop"
            elif len(sequence.tokens) >= min(sequence.max_length, self.max_context):
                finish = "length"
            if finish:
                break
        accepted, table = accepted[:count], self.pool.block_table(sequence.id)
        places = [(known + node, known + depth) for depth, node in enumerate(accepted) if node != depth]
        sequence.computed += rows + len(accepted)
        self.pool.commit(sequence.id, sequence.tokens, length=sequence.computed)
        self.pool.trim(sequence.id, sequence.computed)
        if count:
            for name, number in (("rounds", 1), ("drafted", drafted), ("accepted", len(accepted))):
                sequence.stats[name] += number
        return count, finish, [(slot(table, source), slot(table, target)) for source, target in places]


def slot(table: Sequence[int], position: int) -> int:
    return table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
