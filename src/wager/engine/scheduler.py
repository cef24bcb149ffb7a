"""Which sequences run in a step, with how many rows, and what is written after it: the only writer of sequences and
blocks.

A step serves decoding sequences first (oldest first), then prompts: short ones, those that were begun, those that wait.
When blocks run out, room for guesses is given up first; then a sequence is preempted: its blocks are freed, its tokens
are kept and computed again later. It is the youngest of the request that runs the most sequences, of the tenant that
runs the most, so that a request of many choices takes no blocks from a neighbour. Tokens, blocks, counts and the order
of sequences are in a native StepState (csrc/step_state.h); here is how many rows prompts get, and what ends a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from wager.engine.limits import check_length
from wager.engine.sequence import EngineSequence
from wager.kernels._native import BlockPool, SequenceState, StepState
from wager.kv.paged_cache import PagedKVCache
from wager.types import FinishReason, Outcome, OutputDelta, Span, StepRecord

_LEAST_SHARE = 16
"""While prompts are computed, at least one of this many rows is left to guesses."""

_FIRST_ROWS, _LEAST_ROWS = 64, 24
"""Rows of prompts in a step in which others decode: before it is known what one takes, and however long one takes. With
fewer, what a row takes could not be told from what a step takes anyway."""

_LONGEST_WAIT_S, _LONGEST_PROMPT_STEP_S = 0.02, 0.06
"""Seconds that prompts may add to a step in which others decode, and that a step of prompts alone may take, for which
whoever arrives meanwhile waits. A step of twice the rows computes a row little faster: even 0.02 s are eight times what
reading the weights takes."""

_NEW, _MOST_GROWTH = 0.5, 4.0
"""Weight of a new step in what a row of a prompt takes: it follows quickly, since rows of a long context take longer.
But a step in which the machine stood still counts as this many times the usual at most."""

_NEW_SLOWER = 0.05
"""Weight of a slower step in what a step without prompts takes. There are few such steps while prompts wait, so that
one in which the machine stood still would count for long, and allow more rows."""

_LEAST_ROW_S = 1e-9
"""Seconds of a row of a prompt where steps with prompts took no longer than those without."""

_as_span: Callable[[Iterable[object]], Span] = partial(tuple.__new__, Span)

_DECAY = 0.75
"""Share of the rows that guesses lately took that is still expected a step later."""


class Scheduler:
    """Continuous batching over a paged cache.

    `max_draft_tokens` bounds the guesses of one span, `max_prefill_rows` the rows of prompts in a step in which other
    sequences decode (None: as many as keep streamed ones waiting for 0.02 s); `clock` gives the times of the
    sequences' counters, in seconds.
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
        self._clock = clock
        self._recent_draft_rows = 0
        self.prompt_rows = PromptRows(most=max_prefill_rows)
        self.last_step: StepRecord | None = None
        """What the last step took, observed when the next one is scheduled."""
        self._sequences: dict[str, EngineSequence] = {}
        self._streamed = 0  # of these, whose tokens someone waits for
        self._state = StepState(
            pool=cache.pool, max_rows=max_rows, max_sequences=self.max_sequences, max_context=max_context
        )

    @property
    def block_pool(self) -> BlockPool:
        return self.cache.pool

    @property
    def sequences(self) -> Mapping[str, EngineSequence]:
        """All sequences that wait or run, by sequence id."""
        return self._sequences

    @property
    def num_running(self) -> int:
        return self._state.num_running

    @property
    def num_waiting(self) -> int:
        return self._state.num_waiting

    @property
    def busy(self) -> bool:
        return bool(self._sequences)

    # ---- arrivals and departures ----------------------------------------------------------------------------------

    def add(self, sequence: EngineSequence) -> None:
        """Queue a sequence; RequestError if it could never fit, even alone."""
        check_length(sequence.request, max_context=self.max_context, num_blocks=self.block_pool.num_blocks)
        self._sequences[sequence.id] = sequence
        self._streamed += sequence.request.streamed
        self._state.add(sequence.state)

    def abort(self, request_id: str) -> list[OutputDelta]:
        """End all choices of a request; their last outputs."""
        choices = [sequence for sequence in self._sequences.values() if sequence.request_id == request_id]
        return [self._end(sequence, "abort", OutputDelta(sequence.request_id, sequence.choice)) for sequence in choices]

    def preempt_all(self) -> None:
        """Free the blocks of all running sequences; they keep their tokens and are the first of those that wait."""
        self._state.preempt_all()

    def check(self) -> None:
        """Every block accounted for, every running sequence covered by its blocks; raises CacheIntegrityError."""
        running = self._state.running
        self.block_pool.check({seq_id: self._sequences[seq_id].state.num_computed_tokens for seq_id in running})

    # ---- before the pass ------------------------------------------------------------------------------------------

    def next(self) -> list[Span]:
        """Spans of the next step, with blocks reserved for their rows and guesses. The spans' `max_draft_tokens`
        together may be more than the step has rows for."""
        if self.last_step is not None:
            self.prompt_rows.observe(self.last_step)
            self.last_step = None
        decoding = self._state.num_decoding
        drafts = min(self.max_draft_tokens, max(0, self.max_rows // max(1, decoding) - 1))
        kept = rows_kept_for_guesses(self.max_rows, decoding=decoding, drafts=drafts, recent=self._recent_draft_rows)
        limit = self.prompt_rows.limit(decoding=decoding, streamed=self._streamed > 0)
        most = self.max_rows if limit is None else min(limit, self.max_rows)
        return list(map(_as_span, self._state.schedule(drafts, kept, most, self._clock())))

    def rows_beside_others(self) -> int | None:
        """Rows that one request may add to a step in which others decode; None: any number."""
        return self.prompt_rows.beside_others(streamed=self._streamed > 0)

    # ---- after the pass -------------------------------------------------------------------------------------------

    def commit(self, spans: Sequence[Span], outcomes: Mapping[str, Outcome]) -> list[OutputDelta]:
        """Write the step's result: append tokens, move accepted paths, register full blocks, trim, finish."""
        results: list[tuple[SequenceState, int, int, Sequence[int], Sequence[int]]] = []
        texts: dict[str, tuple[str, FinishReason | None]] = {}
        invalid_blocks: list[int] = []
        drafted = 0
        for span in spans:
            sequence, outcome = self._sequences[span.seq_id], outcomes.get(span.seq_id)
            if outcome is None:
                results.append((sequence.state, len(span.tokens), 0, (), ()))
                continue
            tokens: Sequence[int] = outcome.verdict.tokens
            if sequence.cut_by_text:
                count, finish_reason = self._state.cut(sequence.state, tokens)
                text, count, finish_reason = sequence.cut_text(tokens[:count], finish_reason)
                texts[span.seq_id], tokens = (text, finish_reason), tokens[:count]
            if outcome.error:
                invalid_blocks += self.block_pool.block_table(span.seq_id)
            drafted += outcome.drafted
            results.append((sequence.state, len(span.tokens), outcome.drafted, tokens, outcome.verdict.accepted))
        self._recent_draft_rows = max(drafted, int(_DECAY * self._recent_draft_rows))
        kept, source, target = self._state.commit(results, self._clock())
        if source:
            self.cache.move(source, target)
        deltas = []
        for span, (count, finish_reason) in zip(spans, kept, strict=True):
            outcome = outcomes.get(span.seq_id)
            if outcome is None:
                continue
            sequence, tokens = self._sequences[span.seq_id], outcome.verdict.tokens[:count]
            if span.seq_id in texts:
                text, finish_reason = texts[span.seq_id]
            else:
                text = sequence.text_of(tokens, finish_reason)
            delta = OutputDelta(
                sequence.request_id, sequence.choice, tokens, text, outcome.drafted_by[:count], outcome.logprobs[:count]
            )
            if outcome.error and not finish_reason:
                finish_reason = "error"
                delta = replace(delta, error=outcome.error, error_status=outcome.error_status)
            deltas.append(self._end(sequence, finish_reason, delta) if finish_reason else delta)
        if invalid_blocks:
            self.cache.discard(invalid_blocks)
        return deltas

    def _end(self, sequence: EngineSequence, finish_reason: FinishReason, delta: OutputDelta) -> OutputDelta:
        """Remove a sequence and free its blocks; its last output."""
        self._state.remove(sequence.state)
        del self._sequences[sequence.id]
        self._streamed -= sequence.request.streamed
        stopped_by = sequence.text.stopped_by if sequence.text else ""
        return replace(delta, finish_reason=finish_reason, stats=sequence.stats(), stop_string=stopped_by)


class PromptRows:
    """Bounds the rows of prompts in a step by the seconds that they add, as observed in the last steps: at most 0.02 s
    where others decode, or what the step takes without them if that is more. `most`: a fixed bound instead."""

    def __init__(self, *, most: int | None = None) -> None:
        self._most = most
        self._decode_s = 0.0  # of a step without prompts
        self._row_s = 0.0  # 0: not known

    def limit(self, *, decoding: int, streamed: bool) -> int | None:
        """Rows of prompts in a step in which `decoding` sequences decode, None: any number. `streamed`: whether someone
        waits for tokens of a sequence that runs or waits."""
        if self._most is not None:
            return self._most if decoding else None
        if not streamed:
            return None
        if not self._row_s:
            return _FIRST_ROWS if decoding else None
        longest = max(_LONGEST_WAIT_S, self._decode_s) if decoding else max(_LONGEST_PROMPT_STEP_S, self._decode_s)
        return self._rows_in(longest)

    def beside_others(self, *, streamed: bool) -> int | None:
        """Rows that add 0.02 s to a step, however long it takes; None: any number."""
        if self._most is not None or not streamed:
            return self._most
        return self._rows_in(_LONGEST_WAIT_S) if self._row_s else _FIRST_ROWS

    def _rows_in(self, seconds: float) -> int:
        return max(_LEAST_ROWS, int(seconds / max(self._row_s, _LEAST_ROW_S)))

    def observe(self, record: StepRecord) -> None:
        """What a step took."""
        seconds = sum(record.seconds.values())
        if record.decodes_only:
            self._decode_s = _mean(self._decode_s, seconds, _NEW if seconds < self._decode_s else _NEW_SLOWER)
            return
        prompts = record.rows - record.drafted - record.sequences  # but for the last row of each, which may decode
        if prompts > 0:
            self._row_s = _mean(self._row_s, max(0.0, seconds - self._decode_s) / prompts)


def _mean(known: float, seconds: float, weight: float = _NEW) -> float:
    return known + (min(seconds, _MOST_GROWTH * known) - known) * weight if known else seconds


def rows_kept_for_guesses(max_rows: int, *, decoding: int, drafts: int, recent: int) -> int:
    """Rows that prompts leave to the guesses of `decoding` sequences: twice what these lately took (`recent`), so that
    they can grow, and half of all rows at most. `drafts` is the most guesses of a sequence."""
    least = max(decoding, max_rows // _LEAST_SHARE)
    return min(drafts * decoding, max(least, 2 * recent), max_rows // 2)
