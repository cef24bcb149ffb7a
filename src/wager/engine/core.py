"""The engine: the step, and what a caller needs around it (add, abort, generate).

The step is one sentence: schedule, plan, draft, admit, forward, accept, commit. It branches on no kind of drafter and
holds no clock; `trace` wraps its stages from outside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from wager.economics.policy import Policy
from wager.engine.collect import Collector
from wager.engine.drafting import Drafting, level
from wager.engine.runner import Runner
from wager.engine.scheduler import Scheduler
from wager.engine.sequence import Ruling, sequence_id
from wager.engine.sequence import Sequence as Running
from wager.engine.text import Decoder, TextStream
from wager.errors import RequestError
from wager.kernels.base import PAGE
from wager.kernels.noise import fresh_seed
from wager.trace import Trace
from wager.types import Ask, Completion, Draft, Event, Plan, Request, Span, StepRecord, Verdict


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
        drafting: Drafting,
        decoder: Callable[[], Decoder] | None = None,
        eos: Collection[int] = (),
        trace: Trace | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.policy = policy
        self.drafting = drafting
        self._decoder = decoder
        self._eos = frozenset(eos)
        self._open: dict[str, int] = {}  # choices of each request that still run
        self._farewells: list[Event] = []
        self._trace = trace or Trace()
        self._schedule = self._trace.timed("schedule", scheduler.next)
        self._draft = self._trace.timed("draft", self._drafts)
        self._forward = self._trace.timed("forward", runner.forward)
        self._accept = self._trace.timed("accept", runner.rule_on)
        self._commit = self._trace.timed("commit", self._commit_all)
        self._plan = self._trace.timed("policy", lambda spans: self.policy.plan(spans))
        self._admit = self._trace.timed("policy", lambda drafts: self.policy.admit(drafts))
        self._learn = self._trace.timed("policy", self._learn_all)

    # ---- the step -------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """One pass for whoever can run; the news it brought."""
        farewells, self._farewells = self._farewells, []
        spans = self._schedule()
        if not spans:
            return farewells
        drafts = self._fit(spans, self._admit(self._draft(spans, self._plan(spans))))
        output = self._forward(spans, drafts, self._tables(spans))
        rulings = self._accept(spans, drafts, output, self.scheduler.sequences)
        self.drafting.observe(output)
        events = self._commit(spans, rulings)
        self._learn(rulings)
        self._tell(events)
        self._record(spans, drafts, events)
        return farewells + events

    def _tables(self, spans: Sequence[Span]) -> Mapping[str, Sequence[int]]:
        return {span.sequence: self.scheduler.table.pages(span.sequence) for span in spans}

    def _drafts(self, spans: Sequence[Span], plan: Plan) -> dict[str, Draft]:
        depths = plan.depths
        if self.runner.rule != "match":  # what is drawn is verified, so it has to fit before it is drawn
            most = level(depths.values(), self.scheduler.left(spans))
            depths = {sequence: min(depth, most) for sequence, depth in depths.items()}
        asks = [self._ask(sequence, depth, plan) for sequence, depth in depths.items() if depth]
        return self.drafting.propose(asks, {span.sequence: span.room for span in spans}, plan.drafters)

    def _fit(self, spans: Sequence[Span], drafts: Mapping[str, Draft]) -> Mapping[str, Draft]:
        """What the rows that are left have room for: the longest are cut."""
        most = level([len(draft) for draft in drafts.values()], self.scheduler.left(spans))
        return {sequence: draft.cut(most) for sequence, draft in drafts.items() if most}

    def _ask(self, sequence: str, depth: int, plan: Plan) -> Ask:
        s = self.scheduler.sequences[sequence]
        law, floor = self.runner.rule != "match", plan.floors.get(sequence, 0.0)
        return Ask(s.id, len(s.tokens), depth, s.params, s.seed, s.choice, law, floor)

    def _learn_all(self, rulings: Mapping[str, Ruling]) -> None:
        self.policy.learn([Verdict(name, ruling.accepted, ruling.tokens) for name, ruling in rulings.items()])

    def _commit_all(self, spans: Sequence[Span], rulings: Mapping[str, Ruling]) -> list[Event]:
        table = self.scheduler.table
        tainted = [page for name, ruling in rulings.items() if ruling.error for page in table.pages(name)]
        events = self.scheduler.commit(spans, rulings, self._move)
        if tainted:  # what is not a number must not be attached again, nor read through a mask
            table.forget()
            for page in tainted:
                if not table.held(page):  # held by another, it carries that one's own true values
                    self.runner.target.cache.clear(page)
        return events

    def _move(self, sequence: str, first: int, accepted: tuple[int, ...]) -> None:
        """Bring keys and values of an accepted path, whose first guess is at `first`, to their positions' slots."""
        moves = [(first + node, first + depth) for depth, node in enumerate(accepted) if node != depth]
        if moves:
            pages = self.scheduler.table.pages(sequence)
            slots = [[pages[at // PAGE] * PAGE + at % PAGE for at in pair] for pair in moves]
            source, target = torch.tensor(slots, dtype=torch.int32).T.contiguous()
            self.runner.target.cache.move(source, target)

    def _tell(self, events: Iterable[Event]) -> None:
        """The drafter learns what is now true; a request whose last choice ended is forgotten."""
        for event in events:
            sequence = sequence_id(event.request, event.choice)
            if event.finish is None:
                self.drafting.accept(sequence, event.tokens)
                continue
            self.drafting.end(sequence)
            self.policy.end(sequence)
            self._open[event.request] -= 1
            if not self._open[event.request]:
                del self._open[event.request]

    def _record(self, spans: Sequence[Span], drafts: Mapping[str, Draft], events: Sequence[Event]) -> None:
        guesses = sum(len(draft) for draft in drafts.values())
        self.policy.observe(
            StepRecord(
                rows=sum(len(span.tokens) for span in spans) + guesses,
                sequences=len(spans),
                guesses=guesses,
                accepted=sum(1 for event in events for origin in event.origins if origin),
                emitted=sum(len(event.tokens) for event in events),
                seconds=self._trace.take(),
                contexts=tuple(span.start for span in spans),
            )
        )

    # ---- around the step ------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Something waits, runs or has yet to be told."""
        return self.scheduler.busy or bool(self._farewells)

    def add(self, request: Request) -> None:
        """Accept a request, or refuse it with a typed error; an accepted one always ends with an event."""
        self._check(request)
        seed = fresh_seed() if request.params.seed is None else request.params.seed
        choices = [self._sequence(request, choice, seed) for choice in range(request.params.n)]
        for sequence in choices:  # all are alike, so only the first can be refused
            self.scheduler.add(sequence)
        self._open[request.id] = len(choices)
        for sequence in choices:
            self.drafting.begin(sequence.id, request.prompt, request.params)
            self.policy.begin(sequence.id, weight=request.weight)

    def _sequence(self, request: Request, choice: int, seed: int) -> Running:
        text = TextStream(self._decoder(), request.params.stop) if self._decoder else None
        return Running(request, choice, seed=seed, text=text, eos=self._eos, drafter=self.drafting.name)

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
        self._farewells += events
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
        on_event: Callable[[Event], None] | None = None,
    ) -> list[Completion]:
        """Run requests, at most `concurrency` at a time, and return their completions in the order given.

        If one is refused, or anything else goes wrong, those that were begun are aborted before the error goes on.
        """
        todo, collector = deque(requests), Collector()
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
