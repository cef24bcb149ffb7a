"""The engine: the step, and what a caller needs around it (add, abort, generate).

The step is one sentence: schedule, plan, draft, admit, forward, accept, commit. It branches on no kind of drafter and
holds no clock; `trace` wraps its stages from outside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from wager.economics.policy.base import Policy
from wager.engine.detokenizer import Detokenizer, TokenDecoder
from wager.engine.outputs import OutputCollector
from wager.engine.proposer import Proposer
from wager.engine.runner import Runner
from wager.engine.scheduler import Scheduler
from wager.engine.sequence import Ruling, sequence_id
from wager.engine.sequence import Sequence as Running
from wager.errors import RequestError
from wager.kernels.base import BLOCK_SIZE
from wager.kernels.noise import fresh_seed
from wager.trace import Trace
from wager.types import (
    Completion,
    Draft,
    DraftDecision,
    DraftRequest,
    OutputDelta,
    Plan,
    Request,
    Span,
    StepRecord,
    Verdict,
)


class Engine:
    """Continuous batching with speculation over one target.

    `decoder` makes an incremental detokenizer per sequence (None: events carry no text, stop strings are refused);
    `eos` are the ids that end a text.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        policy: Policy,
        proposer: Proposer,
        decoder: Callable[[], TokenDecoder] | None = None,
        eos: Collection[int] = (),
        trace: Trace | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.policy = policy
        self.proposer = proposer
        self._decoder = decoder
        self._eos = frozenset(eos)
        self._open: dict[str, int] = {}  # choices of each request that still run
        self._final_outputs: list[OutputDelta] = []
        self._trace = trace or Trace()
        self._schedule = self._trace.timed("schedule", scheduler.next)
        self._draft = self._trace.timed("draft", self._drafts)
        self._forward = self._trace.timed("forward", runner.forward)
        self._accept = self._trace.timed("accept", runner.accept)
        self._commit = self._trace.timed("commit", self._commit_all)
        self._plan = self._trace.timed("policy", lambda spans, budget: self.policy.plan(spans, budget))
        self._admit = self._trace.timed("policy", lambda drafts, budget: self.policy.admit(drafts, budget))
        self._learn = self._trace.timed("policy", self._learn_all)

    # ---- the step -------------------------------------------------------------------------------------------------

    def step(self) -> list[OutputDelta]:
        """One pass for whoever can run; the news it brought."""
        farewells, self._final_outputs = self._final_outputs, []
        spans = self._schedule()
        if not spans:
            return farewells
        budget = self.scheduler.left(spans)
        drafts = self._admit(self._draft(spans, self._plan(spans, budget)), budget)
        output = self._forward(spans, drafts, self._tables(spans))
        rulings = self._accept(spans, drafts, output, self.scheduler.sequences)
        self.proposer.observe(output)
        events = self._commit(spans, rulings)
        self._learn(rulings)
        self._tell(events)
        self._record(spans, drafts, events)
        return farewells + events

    def _tables(self, spans: Sequence[Span]) -> Mapping[str, Sequence[int]]:
        return {span.seq_id: self.scheduler.block_pool.block_table(span.seq_id) for span in spans}

    def _drafts(self, spans: Sequence[Span], plan: Plan) -> dict[str, Draft]:
        asks = [self._ask(seq_id, decision) for seq_id, decision in plan.items() if decision.depth]
        drafters = {seq_id: decision.drafter for seq_id, decision in plan.items() if decision.drafter}
        return self.proposer.propose(asks, {span.seq_id: span.max_draft_tokens for span in spans}, drafters)

    def _ask(self, seq_id: str, decision: DraftDecision) -> DraftRequest:
        s, law = self.scheduler.sequences[seq_id], self.runner.rule != "match"
        return DraftRequest(s.id, len(s.tokens), decision.depth, s.params, s.seed, s.choice, law, decision.min_survival)

    def _learn_all(self, rulings: Mapping[str, Ruling]) -> None:
        self.policy.learn([Verdict(name, ruling.accepted, ruling.tokens) for name, ruling in rulings.items()])

    def _commit_all(self, spans: Sequence[Span], rulings: Mapping[str, Ruling]) -> list[OutputDelta]:
        table = self.scheduler.block_pool
        tainted = [page for name, ruling in rulings.items() if ruling.error for page in table.block_table(name)]
        events = self.scheduler.commit(spans, rulings, self._move)
        if tainted:  # what is not a number must not be attached again, nor read through a mask
            table.reset_prefix_cache()
            for page in tainted:
                if not table.is_held(page):  # held by another, it carries that one's own true values
                    self.runner.target.cache.clear(page)
        return events

    def _move(self, sequence: str, first: int, accepted: tuple[int, ...]) -> None:
        """Bring keys and values of an accepted path, whose first guess is at `first`, to their positions' slots."""
        moves = [(first + node, first + depth) for depth, node in enumerate(accepted) if node != depth]
        if moves:
            pages = self.scheduler.block_pool.block_table(sequence)
            slots = [[pages[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in pair] for pair in moves]
            source, target = torch.tensor(slots, dtype=torch.int32).T.contiguous()
            self.runner.target.cache.move(source, target)

    def _tell(self, events: Iterable[OutputDelta]) -> None:
        """The drafter learns what is now true; a request whose last choice ended is forgotten."""
        for event in events:
            sequence = sequence_id(event.request_id, event.index)
            if event.finish_reason is None:
                self.proposer.accept(sequence, event.token_ids)
                continue
            self.proposer.end(sequence)
            self.policy.end(sequence)
            self._open[event.request_id] -= 1
            if not self._open[event.request_id]:
                del self._open[event.request_id]

    def _record(self, spans: Sequence[Span], drafts: Mapping[str, Draft], events: Sequence[OutputDelta]) -> None:
        guesses = sum(len(draft) for draft in drafts.values())
        self.policy.observe(
            StepRecord(
                rows=sum(len(span.tokens) for span in spans) + guesses,
                sequences=len(spans),
                drafted=guesses,
                accepted=sum(1 for event in events for origin in event.drafted_by if origin),
                emitted=sum(len(event.token_ids) for event in events),
                seconds=self._trace.take(),
                context_lens=tuple(span.num_computed_tokens for span in spans),
            )
        )

    # ---- around the step ------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Something waits, runs or has yet to be told."""
        return self.scheduler.busy or bool(self._final_outputs)

    def add(self, request: Request) -> None:
        """Accept a request, or refuse it with a typed error; an accepted one always ends with an event."""
        self._check(request)
        seed = fresh_seed() if request.params.seed is None else request.params.seed
        choices = [self._sequence(request, choice, seed) for choice in range(request.params.n)]
        for sequence in choices:  # all are alike, so only the first can be refused
            self.scheduler.add(sequence)
        self._open[request.id] = len(choices)
        for sequence in choices:
            self.proposer.begin(sequence.id, request.prompt, request.params)
            self.policy.begin(sequence.id, weight=request.weight)

    def _sequence(self, request: Request, choice: int, seed: int) -> Running:
        text = Detokenizer(self._decoder(), request.params.stop) if self._decoder else None
        return Running(request, choice, seed=seed, text=text, eos=self._eos, drafter=self.proposer.name)

    def _check(self, request: Request) -> None:
        vocab = self.runner.target.vocab
        if request.id in self._open:
            raise RequestError(f"Request id {request.id!r} is in use.", "Give every request an id of its own.")
        if "#" in request.id:
            raise RequestError(f"Request id {request.id!r} contains '#', which numbers choices.", "Leave it out.")
        for token in (*request.prompt, *request.params.logit_bias, *request.params.stop_token_ids):
            if type(token) is not int or not 0 <= token < vocab:
                raise RequestError(
                    f"Request {request.id!r} names token {token!r}; the vocabulary has ids 0 to {vocab - 1}.",
                    "Encode the prompt with the target's own tokenizer.",
                )
        if request.params.stop and self._decoder is None:
            raise RequestError("Stop strings need a tokenizer; this engine has none.", "Use stop_token_ids instead.")

    def abort(self, request: str) -> bool:
        """End all choices of a request now; their last events come with the next step. False if it is not running."""
        if request not in self._open:
            return False
        choices = [s for s in (*self.scheduler.running, *self.scheduler.waiting) if s.request.id == request]
        events = [self.scheduler.end(sequence, "abort") for sequence in choices]
        self._tell(events)
        self._final_outputs += events
        return True

    def preempt_all(self) -> None:
        """Take every running sequence's pages; they are computed again. The texts do not change: `prove` shows it."""
        for sequence in list(reversed(self.scheduler.running)):
            self.scheduler.preempt(sequence)

    def check(self) -> None:
        """Integrity of the page accounting; raises CacheIntegrityError."""
        self.scheduler.check()

    def generate(
        self,
        requests: Iterable[Request],
        *,
        concurrency: int | None = None,
        on_event: Callable[[OutputDelta], None] | None = None,
    ) -> list[Completion]:
        """Run requests, at most `concurrency` at a time, and return their completions in the order given.

        If one is refused, or anything else goes wrong, those that were begun are aborted before the error goes on.
        """
        todo, collector = deque(requests), OutputCollector()
        try:
            while todo or self.busy:
                while todo and (concurrency is None or len(self._open) < concurrency):
                    collector.expect(todo[0])
                    self.add(todo.popleft())
                for event in self.step():
                    collector.take(event)
                    if on_event:
                        on_event(event)
        except BaseException:
            for request in collector.expected:
                self.abort(request)
            raise
        self.check()
        return collector.completions()
