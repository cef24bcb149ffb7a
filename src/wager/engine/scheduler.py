"""Which sequences run in a step, with how many rows, and what is written after it: the only writer of sequences and
blocks.

A step serves decoding sequences first (oldest first), then prompts: short ones, those that were begun, those that wait.
When blocks run out, room for guesses is given up first; then a sequence is preempted: its blocks are freed, its tokens
are kept and computed again later. It is the youngest of the request that runs the most sequences, of the tenant that
runs the most, so that a request of many choices takes no blocks from a neighbour. Tokens, blocks, counts, the order of
sequences and how many rows prompts get are in a native StepState (csrc/step_state.h).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from wager.engine.limits import check_length
from wager.engine.sequence import EngineSequence, sequence_id
from wager.kernels._native import BlockPool, StepState
from wager.kv.paged_cache import PagedKVCache
from wager.types import FinishReason, Outcome, OutputDelta, Span, StepRecord, Verdict


class CommittedStep(NamedTuple):
    """What a step wrote. `deltas` are what it added to outputs; `known` the tokens of each sequence that goes on,
    `ended` the ids of the others; `verdicts` those that it was written by; `record` has no seconds yet."""

    deltas: list[OutputDelta]
    known: dict[str, Sequence[int]]
    ended: list[str]
    verdicts: list[Verdict]
    record: StepRecord


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
        self._clock = clock
        self.last_step: StepRecord | tuple[()] = ()
        """What the last step took, observed when the next one is scheduled."""
        self._sequences: dict[str, EngineSequence] = {}
        self._requests: dict[str, dict[int, EngineSequence]] = {}  # the same by request id and choice
        self._state = StepState(
            pool=cache.pool,
            max_rows=max_rows,
            max_sequences=self.max_sequences,
            max_context=max_context,
            max_drafts=max_draft_tokens,
            max_prefill_rows=max_prefill_rows,
            span=Span,
            delta=OutputDelta,
            committed=CommittedStep,
            record=StepRecord,
        )

    @property
    def max_draft_tokens(self) -> int:
        """Guesses of one span, at most; it may be set between steps."""
        return self._state.max_drafts

    @max_draft_tokens.setter
    def max_draft_tokens(self, most: int) -> None:
        self._state.max_drafts = most

    @property
    def block_pool(self) -> BlockPool:
        return self.cache.pool

    @property
    def sequences(self) -> Mapping[str, EngineSequence]:
        """All sequences that wait or run, by sequence id."""
        return self._sequences

    @property
    def requests(self) -> Collection[str]:
        """Ids of the requests that have a sequence which waits or runs."""
        return self._requests.keys()

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
        choices = self._requests.get(sequence.request_id) or {}
        self._sequences[sequence.id] = choices[sequence.choice] = sequence  # nothing is called: no signal comes between
        self._requests[sequence.request_id] = choices
        self._state.add(sequence.state)

    def abort(self, request_id: str) -> list[OutputDelta]:
        """End all choices of a request; their last outputs."""
        choices = [*self._requests.get(request_id, {}).values()]
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
        last, self.last_step = self.last_step, ()
        return self._state.next(last, self._clock())

    def rows_beside_others(self) -> int | None:
        """Rows that one request may add to a step in which others decode; None: any number."""
        return self._state.rows_beside_others

    # ---- after the pass -------------------------------------------------------------------------------------------

    def commit(self, spans: Sequence[Span], outcomes: Mapping[str, Outcome]) -> CommittedStep:
        """Write the step's result: append tokens, move accepted paths, register full blocks, trim, finish."""
        committed: CommittedStep
        committed, last, source, target, invalid_blocks = self._state.commit(
            spans, outcomes, self._sequences, self._clock()
        )
        if source:
            self.cache.move(source, target)
        for place, finish_reason in last:
            delta = committed.deltas[place]
            sequence = self._sequences[sequence_id(delta.request_id, delta.index)]
            committed.deltas[place] = self._end(sequence, finish_reason, delta)
        if invalid_blocks:
            self.cache.discard(invalid_blocks)
        return committed

    def _end(self, sequence: EngineSequence, finish_reason: FinishReason, delta: OutputDelta) -> OutputDelta:
        """Remove a sequence and free its blocks; its last output."""
        choices = self._requests[sequence.request_id]
        del self._sequences[sequence.id], choices[sequence.choice]  # no signal comes between, as in `add`
        if not choices:
            del self._requests[sequence.request_id]
        self._state.remove(sequence.state)
        stopped_by = sequence.text.stopped_by if sequence.text else ""
        return replace(delta, finish_reason=finish_reason, stats=sequence.stats(), stop_string=stopped_by)
