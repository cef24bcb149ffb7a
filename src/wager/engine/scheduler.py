"""Who runs in a step, with how many rows, and what becomes of the result: the only writer of sequences and pages.

A step serves running sequences first (oldest first), then prompt chunks, then new arrivals, within `max_rows`. When
pages run out, guesses go first, then the youngest sequence is preempted: its pages are given back and its tokens,
which are kept, are computed again later. Knows no tensors, drafters or distributions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from wager.engine.sequence import Ruling, Sequence
from wager.errors import RequestError
from wager.kernels.base import BLOCK_SIZE
from wager.kv.blocks import BlockPool
from wager.types import FinishReason, OutputDelta, Span

_LEAST, _FADING = 16, 0.75
"""One row in so many is kept for guesses beside prompts; and what is left, a step later, of the rows they took."""

Move = Callable[[str, int, tuple[int, ...]], None]
"""(sequence, position of the first guess, accepted nodes): bring an accepted tree path to its own positions."""


class Scheduler:
    """Continuous batching over a page table.

    `guesses` bounds the rows of guesses a span may have; `clock` gives seconds for the sequences' bills.
    """

    def __init__(
        self,
        block_pool: BlockPool,
        *,
        max_rows: int,
        max_sequences: int,
        max_context: int,
        max_draft_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self.block_pool = block_pool
        self.max_rows = max_rows
        self.max_sequences = min(max_sequences, max_rows)
        self.max_context = max_context
        self.max_draft_tokens = max_draft_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._clock = clock
        self._guessed = 0  # rows that guesses lately took
        self._sequences: dict[str, Sequence] = {}

    # ---- arrivals and departures -------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; refused if it could never fit, even alone."""
        need = min(sequence.prompt_tokens + sequence.params.max_tokens, self.max_context)
        if sequence.prompt_tokens >= self.max_context:
            raise RequestError(
                f"Request {sequence.request.id!r} has {sequence.prompt_tokens} prompt tokens; the context holds "
                f"{self.max_context}, at least one of them for the answer.",
                "Shorten the prompt, or raise --max-context if the model allows it.",
            )
        if -(-need // BLOCK_SIZE) > self.block_pool.num_blocks:
            raise RequestError(
                f"Request {sequence.request.id!r} may grow to {need} tokens; "
                f"the cache holds {self.block_pool.num_blocks * BLOCK_SIZE}.",
                "Lower max_tokens, shorten the prompt, or give the cache more memory (--memory).",
            )
        self._sequences[sequence.id] = sequence
        self.waiting.append(sequence)

    @property
    def sequences(self) -> Mapping[str, Sequence]:
        """Everyone who waits or runs, by sequence id."""
        return self._sequences

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def check(self) -> None:
        """Integrity: every page accounted for, every running sequence covered by its pages."""
        self.block_pool.check({sequence.id: sequence.num_computed_tokens for sequence in self.running})

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence and give its pages back."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.block_pool.release(sequence.id)
        del self._sequences[sequence.id]

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's pages; it keeps its tokens and comes first among those that wait."""
        self.running.remove(sequence)
        self.block_pool.release(sequence.id)
        sequence.num_computed_tokens = 0
        sequence.counters.preemptions += 1
        self.waiting.appendleft(sequence)

    # ---- before the pass ----------------------------------------------------------------------------------------

    def next(self) -> list[Span]:
        """Spans of the next step, their pages reserved (room for guesses included). Rooms together may be more than the
        rows that `left` says are left."""
        spans: dict[str, Span] = {}
        decoding = [s for s in self.running if s.num_pending_tokens == 1]
        prompts = [s for s in self.running if s.num_pending_tokens > 1]
        room = min(self.max_draft_tokens, max(0, self.max_rows // max(1, len(decoding)) - 1))
        settled = True
        for sequence in decoding:
            left = self.max_rows - len(spans)  # so far all have one row
            if left and sequence in self.running:
                settled &= self._schedule(sequence, left, room, spans)
        kept = self._reserved_for_drafts(len(decoding), room)
        for sequence in prompts:
            left = self.left(spans.values()) - kept
            if left > 0 and sequence in self.running:
                settled &= self._schedule(sequence, left, room, spans)
        while settled and self.waiting and len(self.running) < self.max_sequences:
            left = self.left(spans.values()) - kept
            if left <= 0 or not self._admit(self.waiting[0]):
                break
            self._schedule(self.running[-1], left, room, spans)
        return list(spans.values())

    def left(self, spans: Iterable[Span]) -> int:
        """Rows of the budget that guesses may have beside these spans' known tokens."""
        return self.max_rows - sum([len(span.tokens) for span in spans])

    def _reserved_for_drafts(self, decoding: int, room: int) -> int:
        """Rows that prompts leave to guesses: twice what guesses lately took, so that they can grow, and half the
        budget at most."""
        least = max(decoding, self.max_rows // _LEAST)
        return min(room * decoding, max(least, 2 * self._guessed), self.max_rows // 2)

    def _schedule(self, sequence: Sequence, left: int, room: int, spans: dict[str, Span]) -> bool:
        """Reserve and add the span of one running sequence within `left` rows; False if pages were short."""
        rows = min(sequence.num_pending_tokens, left)
        live = rows == sequence.num_pending_tokens
        room = min(room, self._useful_drafts(sequence)) if live else 0
        end = sequence.num_computed_tokens + rows
        settled = self.block_pool.reserve(sequence.id, end + room)
        if not settled:
            room = 0
            if not self._reserve_or_preempt(sequence, end, spans):
                return False
        tokens = tuple(sequence.tokens[sequence.num_computed_tokens : end])
        spans[sequence.id] = Span(sequence.id, sequence.num_computed_tokens, tokens, live, room)
        return settled

    def _useful_drafts(self, sequence: Sequence) -> int:
        """Guesses that can still be of use: the bonus token follows the last one."""
        left = min(sequence.params.max_tokens - sequence.output_tokens, self.max_context - len(sequence.tokens))
        return max(0, left - 1)

    def _reserve_or_preempt(self, sequence: Sequence, length: int, spans: dict[str, Span]) -> bool:
        """Pages for `length` positions, taken from the youngest sequences if need be; False if it fell itself."""
        while not self.block_pool.reserve(sequence.id, length):
            youngest = self.running[-1]
            self.preempt(youngest)
            spans.pop(youngest.id, None)
            if youngest is sequence:
                return False
        return True

    def _admit(self, sequence: Sequence) -> bool:
        """Move the first waiting sequence to the running ones, if pages for all its known tokens can be had."""
        leader = self._sequences.get(sequence.request.id)
        shares = sequence.choice > 0 and leader is not None and leader in self.running
        if shares and leader is not None and leader.num_computed_tokens < leader.prompt_tokens:
            return False  # the first choice computes the prompt for all
        if -(-(len(sequence.tokens) + 1) // BLOCK_SIZE) > self.block_pool.num_free_blocks:
            return False
        self.waiting.popleft()
        self.running.append(sequence)
        if shares and leader is not None and sequence.num_computed_tokens == 0:
            self.block_pool.fork(leader.id, sequence.id, sequence.prompt_tokens - 1)
            sequence.num_computed_tokens = (sequence.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        else:
            sequence.num_computed_tokens = self.block_pool.match_prefix(sequence.id, sequence.tokens)
        if sequence.counters.admitted_at < 0:
            sequence.counters.admitted_at = self._clock()
            sequence.counters.cached_tokens = sequence.num_computed_tokens
        return True

    # ---- after the pass -----------------------------------------------------------------------------------------

    def commit(self, spans: Seq[Span], rulings: Mapping[str, Ruling], move: Move) -> list[OutputDelta]:
        """Write the step's result: append, move accepted paths, register full pages, trim, finish."""
        now = self._clock()
        events = []
        self._guessed = max(sum([ruling.drafted for ruling in rulings.values()]), int(_FADING * self._guessed))
        for span in spans:
            sequence = self._sequences[span.seq_id]
            sequence.num_computed_tokens = span.num_computed_tokens + len(span.tokens)
            ruling = rulings.get(span.seq_id)
            if ruling is None:
                self._register_blocks(sequence)
            else:
                events.append(self._apply(sequence, ruling, now, move))
        return events

    def _apply(self, sequence: Sequence, ruling: Ruling, now: float, move: Move) -> OutputDelta:
        first_guess = len(sequence.tokens)
        text = ""
        finish: FinishReason | None = None
        for token in ruling.tokens:
            piece, finish = sequence.append(token, max_context=self.max_context)
            text += piece
            if finish:
                break
        count = len(sequence.tokens) - first_guess
        kept = ruling.accepted[:count]
        move(sequence.id, first_guess, kept)
        sequence.num_computed_tokens += len(kept)
        self._register_blocks(sequence)
        if count:
            self._count(sequence, ruling, len(kept), now)
        news = OutputDelta(
            sequence.request.id,
            sequence.choice,
            ruling.tokens[:count],
            text,
            ruling.origins[:count],
            ruling.logprobs[:count],
        )
        if finish:
            return self.end(sequence, finish, news=news)
        return self.end(sequence, "error", error=ruling.error, news=news) if ruling.error else news

    @staticmethod
    def _count(sequence: Sequence, ruling: Ruling, accepted: int, now: float) -> None:
        bill = sequence.counters
        bill.first_token_at = now if bill.first_token_at < 0 else bill.first_token_at
        bill.last_token_at = now
        bill.rounds += 1
        bill.drafted += ruling.drafted
        bill.accepted += accepted

    def _register_blocks(self, sequence: Sequence) -> None:
        """Register pages that are now full and true, and give back those that only guesses needed."""
        self.block_pool.commit(sequence.id, sequence.tokens, length=sequence.num_computed_tokens)
        self.block_pool.trim(sequence.id, sequence.num_computed_tokens)

    def end(
        self, sequence: Sequence, finish: FinishReason, *, error: str = "", news: OutputDelta | None = None
    ) -> OutputDelta:
        """Finish a sequence; its last event, which carries `news` of the step if there is any."""
        self.finish(sequence)
        news = news or OutputDelta(sequence.request.id, sequence.choice)
        return replace(news, finish_reason=finish, error=error, stats=sequence.stats())
