"""Which sequences run in a step, with how many rows, and what is written after it: the only writer of sequences and
blocks.

A step serves decoding sequences first (oldest first), then prompt chunks, then new arrivals, within `max_rows`. When
blocks run out, room for guesses is given up first; then the youngest sequence is preempted: its blocks are freed, its
tokens are kept and computed again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from wager.engine.limits import check_length
from wager.engine.native import plain_steps
from wager.engine.row_shares import PromptRows, rows_kept_for_guesses
from wager.engine.sequence import Sequence
from wager.kernels.base import BLOCK_SIZE
from wager.kv.blocks import BlockPool, blocks_for
from wager.kv.paged_cache import PagedKVCache
from wager.types import FinishReason, Outcome, OutputDelta, Span, StepRecord

_DECAY = 0.75
"""Share of the rows that guesses lately took that is still expected a step later."""

_SHORT_ROWS = 64
"""Rows of a step for prompts that fit in them whole: they do not wait for long ones that came earlier."""

_MOST_OVERTAKEN = 64
"""How often the first sequence that waits is overtaken before it is its turn."""


class Scheduler:
    """Continuous batching over a paged cache.

    `max_draft_tokens` bounds the guesses of one span, `max_prefill_rows` the rows of prompts in a step in which other
    sequences decode (None: as many as keep these waiting for 0.03 s); `clock` gives the times of the sequences'
    counters, in seconds.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        *,
        max_rows: int,
        max_sequences: int,
        max_context: int,
        max_draft_tokens: int,
        clock: Callable[[], float],
        max_prefill_rows: int | None = None,
    ) -> None:
        self.cache = cache
        self.max_rows = max_rows
        self.max_sequences = min(max_sequences, max_rows)
        self.max_context = max_context
        self.max_draft_tokens = max_draft_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._clock = clock
        self._recent_draft_rows = 0
        self._prompt_rows = PromptRows(most=max_prefill_rows)
        self._sequences: dict[str, Sequence] = {}
        self._plain_spans: list[Span] = []  # the last ones, where each has one row
        self._plain, self._committer = plain_steps(self._sequences, self.block_pool.lists(), max_context)

    @property
    def block_pool(self) -> BlockPool:
        return self.cache.pool

    @property
    def sequences(self) -> Mapping[str, Sequence]:
        """All sequences that wait or run, by sequence id."""
        return self._sequences

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    # ---- arrivals and departures ----------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; RequestError if it could never fit, even alone."""
        check_length(sequence.request, max_context=self.max_context, num_blocks=self.block_pool.num_blocks)
        self._sequences[sequence.id] = sequence
        self.waiting.append(sequence)

    def abort(self, request_id: str) -> list[OutputDelta]:
        """End all choices of a request; their last outputs."""
        choices = [s for s in (*self.running, *self.waiting) if s.request.id == request_id]
        return [self._end(sequence, "abort") for sequence in choices]

    def preempt(self, sequence: Sequence) -> None:
        """Free a running sequence's blocks; it keeps its tokens and becomes the first of those that wait."""
        self.running.remove(sequence)
        self.block_pool.release(sequence.id)
        sequence.num_computed_tokens = 0
        sequence.counters.preemptions += 1
        self.waiting.appendleft(sequence)

    def preempt_all(self) -> None:
        for sequence in list(reversed(self.running)):
            self.preempt(sequence)

    def check(self) -> None:
        """Every block accounted for, every running sequence covered by its blocks; raises CacheIntegrityError."""
        self.block_pool.check({sequence.id: sequence.num_computed_tokens for sequence in self.running})

    # ---- before the pass ------------------------------------------------------------------------------------------

    def next(self) -> list[Span]:
        """Spans of the next step, with blocks reserved for their rows and guesses. The spans' `max_draft_tokens`
        together may be more than `draft_budget`."""
        if self._plain is not None and (not self.waiting or len(self.running) >= self.max_sequences):
            plain: list[Span] | None = self._plain.next(self.running, self._draft_room(len(self.running)))
            if plain is not None:
                self._plain_spans = plain
                return plain
        spans: dict[str, Span] = {}
        decoding = [s for s in self.running if len(s.tokens) == s.num_computed_tokens + 1]
        drafts = self._draft_room(len(decoding))
        enough_blocks = True
        for sequence in decoding:
            rows_left = self.max_rows - len(spans)  # so far each span has one row
            if rows_left and (enough_blocks or sequence in self.running):  # not preempted meanwhile
                enough_blocks &= self._schedule(sequence, rows_left, drafts, spans)
        if self.waiting or len(decoding) < len(self.running):
            self._schedule_prompts(spans, len(decoding), drafts, enough_blocks=enough_blocks)
        return list(spans.values())

    def _draft_room(self, decoding: int) -> int:
        """Guesses for which each of so many sequences has rows."""
        return min(self.max_draft_tokens, max(0, self.max_rows // max(1, decoding) - 1))

    def _schedule_prompts(self, spans: dict[str, Span], decoding: int, drafts: int, *, enough_blocks: bool) -> None:
        """Add spans of prompts in the rows that `decoding` sequences leave: short ones (_SHORT_ROWS together), then
        those that were begun, then those that wait."""
        rows = self.draft_budget(spans.values()) - rows_kept_for_guesses(
            self.max_rows, decoding=decoding, drafts=drafts, recent=self._recent_draft_rows
        )
        most = self._prompt_rows.limit(decoding=decoding)
        end = len(spans) + (rows if most is None else min(rows, most))  # so far each span has one row
        short = min(_SHORT_ROWS, rows)
        begun = [s for s in self.running if s.num_pending_tokens > 1]
        for sequence in [*begun, *self.waiting]:
            if short <= 0 or not enough_blocks:
                break
            pending = sequence.num_pending_tokens
            if pending <= short and (sequence in begun or self._overtake(sequence)):
                enough_blocks &= self._schedule(sequence, pending, drafts, spans)
                short -= pending
        for sequence in begun:
            rows_left = end - _rows_of(spans.values())
            if rows_left > 0 and sequence.id not in spans and sequence in self.running:
                enough_blocks &= self._schedule(sequence, rows_left, drafts, spans)
        while enough_blocks and self.waiting and len(self.running) < self.max_sequences:
            rows_left = end - _rows_of(spans.values())
            if rows_left <= 0 or not self._start(self.waiting[0]):
                break
            self._schedule(self.running[-1], rows_left, drafts, spans)

    def _overtake(self, sequence: Sequence) -> bool:
        """Start a waiting sequence before those that came earlier; False where it has no place, or where the first one
        was overtaken so often that it is its turn."""
        first = self.waiting[0]
        if len(self.running) >= self.max_sequences or (sequence is not first and first.overtaken >= _MOST_OVERTAKEN):
            return False
        if not self._start(sequence):
            return False
        if sequence is not first:
            first.overtaken += 1
        return True

    def draft_budget(self, spans: Iterable[Span]) -> int:
        """Rows of the step that these spans' known tokens leave to guesses."""
        known = len(self._plain_spans) if spans is self._plain_spans else _rows_of(spans)
        return self.max_rows - known

    def _schedule(self, sequence: Sequence, rows_left: int, drafts: int, spans: dict[str, Span]) -> bool:
        """Reserve blocks for a running sequence's span within `rows_left` rows and add it. False if blocks were too
        few, even if only its guesses lacked them."""
        seq_id, start, known = sequence.id, sequence.num_computed_tokens, len(sequence.tokens)
        end = min(known, start + rows_left)
        if end < known:
            drafts = 0
        elif drafts:  # those that could still be emitted: the bonus token follows the last one
            drafts = max(0, min(drafts, sequence.max_length - known - 1, self.max_context - known - 1))
        enough_blocks = self.block_pool.reserve(seq_id, end + drafts)
        if not enough_blocks:
            drafts = 0
            if not self._reserve_or_preempt(sequence, end, spans):
                return False
        spans[seq_id] = Span(seq_id, start, tuple(sequence.tokens[start:end]), end == known, drafts)
        return enough_blocks

    def _reserve_or_preempt(self, sequence: Sequence, length: int, spans: dict[str, Span]) -> bool:
        """Reserve blocks for `length` positions, preempting the youngest sequences if need be; False if the sequence
        was preempted itself."""
        while not self.block_pool.reserve(sequence.id, length):
            youngest = self.running[-1]
            self.preempt(youngest)
            spans.pop(youngest.id, None)
            if youngest is sequence:
                return False
        return True

    def _start(self, sequence: Sequence) -> bool:
        """Move a waiting sequence to the running ones, if there are blocks for all of its known tokens and those that
        the prompts of running ones still need."""
        first_choice = self._sequences.get(sequence.request.id)
        forks = sequence.choice > 0 and first_choice is not None and first_choice in self.running
        if forks and first_choice is not None and first_choice.num_computed_tokens < first_choice.prompt_tokens:
            return False  # the first choice computes the prompt for all of them
        promised = sum([self._missing_blocks(s) for s in self.running if s.num_pending_tokens > 1])
        if blocks_for(len(sequence.tokens) + 1) + promised > self.block_pool.num_free_blocks:
            return False
        self.waiting.remove(sequence)
        self.running.append(sequence)
        if forks and first_choice is not None and sequence.num_computed_tokens == 0:
            self.block_pool.fork(first_choice.id, sequence.id, sequence.prompt_tokens - 1)
            sequence.num_computed_tokens = (sequence.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        else:
            sequence.num_computed_tokens = self.block_pool.match_prefix(
                sequence.id, sequence.tokens, tenant=sequence.request.tenant
            )
        if sequence.counters.admitted_at < 0:
            sequence.counters.admitted_at = self._clock()
            sequence.counters.cached_tokens = sequence.num_computed_tokens
        return True

    def _missing_blocks(self, sequence: Sequence) -> int:
        return max(0, blocks_for(len(sequence.tokens) + 1) - len(self.block_pool.block_table(sequence.id)))

    # ---- after the pass -------------------------------------------------------------------------------------------

    def commit(self, spans: Seq[Span], outcomes: Mapping[str, Outcome]) -> list[OutputDelta]:
        """Write the step's result: append tokens, move accepted paths, register full blocks, trim, finish."""
        now, drafted = self._clock(), 0
        deltas: list[Any] = []  # with None for the spans that are left
        left: Iterable[int] = range(len(spans))
        if self._committer is not None:
            deltas, left, unsettled, drafted = self._committer.commit(spans, outcomes, now)
            for sequence in unsettled:
                self._update_blocks(sequence)
        else:
            deltas = [None] * len(spans)
        if left:
            drafted += self._commit_left(spans, outcomes, now, left, deltas)
            deltas = [delta for delta in deltas if delta is not None]
        self._recent_draft_rows = max(drafted, int(_DECAY * self._recent_draft_rows))
        return deltas

    def _commit_left(
        self,
        spans: Seq[Span],
        outcomes: Mapping[str, Outcome],
        now: float,
        left: Iterable[int],
        deltas: list[OutputDelta | None],
    ) -> int:
        """Commit the spans with these indices, and set their deltas. How many guesses were verified in them."""
        drafted = 0
        invalid_blocks: list[int] = []
        for index in left:
            span = spans[index]
            sequence = self._sequences[span.seq_id]
            sequence.num_computed_tokens = span.num_computed_tokens + len(span.tokens)
            outcome = outcomes.get(span.seq_id)
            if outcome is None:
                self._update_blocks(sequence)
                continue
            drafted += outcome.drafted
            if outcome.error:
                invalid_blocks += self.block_pool.block_table(span.seq_id)
            deltas[index] = self._apply(sequence, outcome, now)
        if invalid_blocks:
            self.cache.discard(invalid_blocks)
        return drafted

    def _apply(self, sequence: Sequence, outcome: Outcome, now: float) -> OutputDelta:
        known, verdict = len(sequence.tokens), outcome.verdict
        text, finish_reason = sequence.extend(verdict.tokens, max_context=self.max_context)
        count = len(sequence.tokens) - known
        accepted = verdict.accepted[:count]
        if accepted:
            self.cache.compact_path(sequence.id, known, accepted)
            sequence.num_computed_tokens += len(accepted)
        self._update_blocks(sequence)
        if count:
            self._count(sequence, outcome, len(accepted), now)
        emitted = verdict.tokens[:count], text, outcome.drafted_by[:count], outcome.logprobs[:count]
        delta = OutputDelta(sequence.request.id, sequence.choice, *emitted)
        if outcome.error and not finish_reason:
            finish_reason = "error"
            delta = replace(delta, error=outcome.error, error_status=outcome.error_status)
        return self._end(sequence, finish_reason, delta) if finish_reason else delta

    @staticmethod
    def _count(sequence: Sequence, outcome: Outcome, accepted: int, now: float) -> None:
        counters = sequence.counters
        counters.first_token_at = now if counters.first_token_at < 0 else counters.first_token_at
        counters.last_token_at = now
        counters.rounds += 1
        counters.drafted += outcome.drafted
        counters.accepted += accepted

    def _update_blocks(self, sequence: Sequence) -> None:
        """Register blocks that are now full and valid, and free those that only guesses needed."""
        pool, length = self.block_pool, sequence.num_computed_tokens
        pool.commit(sequence.id, sequence.tokens, length=length)
        pool.trim(sequence.id, length)

    def _end(self, sequence: Sequence, finish_reason: FinishReason, delta: OutputDelta | None = None) -> OutputDelta:
        """Remove a sequence and free its blocks; its last output, which carries `delta` of the step if there is one."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.block_pool.release(sequence.id)
        del self._sequences[sequence.id]
        last = delta or OutputDelta(sequence.request.id, sequence.choice)
        return replace(last, finish_reason=finish_reason, stats=sequence.stats())

    def observe(self, record: StepRecord) -> None:
        """What a step took: it bounds the rows of prompts in later ones."""
        self._prompt_rows.observe(record)


def _rows_of(spans: Iterable[Span]) -> int:
    return sum([len(span.tokens) for span in spans])
