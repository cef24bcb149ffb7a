"""The engine: the step, and what a caller needs around it (add, abort, generate).

The step has no branch on the kind of drafter, on the acceptance rule, or on prefill and decoding: a prompt chunk, one
token, and a token with guesses are spans with different numbers of rows. It does not time itself: `trace` wraps
all of its stages, so that the stages' seconds of a run add up to the run's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from wager.constrain.compiler import GrammarCompiler, with_compiled_grammar
from wager.economics.policy.base import Policy, WrappedPolicy
from wager.engine.limits import check_request
from wager.engine.outputs import OutputCollector, TokenDecoder
from wager.engine.proposer import Proposer
from wager.engine.runner import Runner
from wager.engine.scheduler import CommittedStep, Scheduler
from wager.engine.sequence import Detokenizer, EngineSequence, sequence_id
from wager.engine.wrapped_policies import RequestPolicy
from wager.errors import RequestError, UsageError
from wager.kernels.base import TargetOutput
from wager.kernels.noise import fresh_seed
from wager.trace import Trace
from wager.types import (
    DRAFT_STAGE,
    FORWARD_STAGE,
    POLICY_STAGE,
    Completion,
    OutputDelta,
    Request,
    Span,
    StepRecord,
)

R = TypeVar("R")


class Engine:
    """Continuous batching with speculation over one target.

    `decoder` makes an incremental token decoder for what follows a prompt (None: outputs carry no text, stop strings
    are refused); `eos` are the token ids that end a text; `grammars` compiles grammars (None: they are refused). One
    thread at a time may call it, and nothing may step it from within a step or a callback; UsageError otherwise.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        policy: Policy,
        proposer: Proposer,
        decoder: Callable[[Sequence[int]], TokenDecoder] | None = None,
        eos: Collection[int] = (),
        grammars: GrammarCompiler | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self._requested = RequestPolicy(policy, scheduler.sequences, most_rows=scheduler.rows_beside_others)
        self._policy: Policy = self._requested
        self._requested.rebound.append(self._time_policy)
        self._proposer = proposer
        self._decoder = decoder
        self._eos = frozenset(eos)
        self.grammars = grammars
        """Compiles what `add` would compile: any thread may do that before, so that no step waits for it."""
        self._outputs: list[OutputDelta] = []  # that no step has returned yet
        self._guard = CallGuard()
        self.on_step: Callable[[StepRecord], object] | None = None
        """Called after every step, for measurements; it may add and abort requests."""
        self.on_deltas: Callable[[list[OutputDelta]], object] | None = None
        """Called with what every step returns."""
        self._trace = trace or Trace()
        self._time_stages(self._trace)

    @property
    def policy(self) -> Policy:
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        around: Policy | None = policy  # what watches a policy is put around the one that was there
        while around is not None and around is not self._requested:
            around = getattr(around, "policy", None)
        if around is None:
            self._requested.policy = policy
        self._policy = self._requested if around is None else policy
        if isinstance(self._policy, WrappedPolicy) and self._time_policy not in self._policy.rebound:
            self._policy.rebound.append(self._time_policy)
        self._policy.leave_out(frozenset(self._proposer.failed))
        self._time_stages(self._trace)

    @property
    def proposer(self) -> Proposer:
        return self._proposer

    @proposer.setter
    def proposer(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self._policy.leave_out(frozenset(proposer.failed))
        self._time_stages(self._trace)

    def _time_stages(self, trace: Trace) -> None:
        scheduler, runner, proposer = self.scheduler, self.runner, self._proposer
        sequences, pool = scheduler.sequences, scheduler.block_pool
        self._schedule = trace.timed("schedule", scheduler.next)
        self._propose = trace.timed(DRAFT_STAGE, proposer.propose, sequences)
        self._forward = trace.timed(FORWARD_STAGE, runner.pack_and_forward, pool)
        self._accept = trace.timed("accept", runner.accept, sequences)
        self._commit = trace.timed("commit", scheduler.commit)
        self._set_inactive = trace.timed("observe", proposer.set_inactive, sequences, runner.tap)
        self._show = trace.timed("observe", proposer.show)
        self._observe_drafters = trace.timed("observe", proposer.observe)
        self._end = trace.timed(POLICY_STAGE, self._end_sequences)
        self._time_policy()

    def _time_policy(self) -> None:
        trace, policy = self._trace, self._policy
        self._plan = trace.timed(POLICY_STAGE, policy.plan)
        self._admit = trace.timed(POLICY_STAGE, policy.admit)
        self._learn = trace.timed(POLICY_STAGE, policy.learn)
        self._report = trace.timed(POLICY_STAGE, policy.observe)

    # ---- the step -------------------------------------------------------------------------------------------------

    def step(self) -> list[OutputDelta]:
        """One pass of the target for all sequences that can run; what it added to their outputs."""
        deltas = self._guard.call("step", self._step)
        if self.on_deltas is not None:
            self.on_deltas(deltas)
        return deltas

    def _step(self) -> list[OutputDelta]:
        if spans := self._schedule():
            self._advance(spans)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _advance(self, spans: Sequence[Span]) -> None:
        budget = self.scheduler.max_rows
        for span in spans:
            budget -= len(span.tokens)
        plan = self._plan(spans, budget)
        proposer = self._proposer
        if proposer.changed or (proposer.reads_states and proposer.inactive is not self._policy.inactive_drafters):
            self._set_inactive(self._policy.inactive_drafters)
        drafts = self._propose(spans, plan)
        drafts = self._admit(drafts, budget)
        try:
            output = self._forward(spans, drafts)
            outcomes = self._accept(spans, drafts, output)
            if proposer.reads_passes:
                self._show(output, spans, drafts, outcomes)
            committed = self._commit(spans, outcomes)
        except BaseException:  # a pass changes recurrent states in place: it must not be made again from these
            self.scheduler.preempt_all()
            raise
        self._outputs += committed.deltas  # first: if something raises now, the next step returns them
        self._observe(output, committed)

    def _observe(self, output: TargetOutput, committed: CommittedStep) -> None:
        """Drafters, policy and scheduler learn from the step. The last two observe its seconds after all stages have
        ended; what that takes counts for the next step."""
        _, known, ended, verdicts, record = committed
        self._observe_drafters(output, known, ended)
        try:
            self._learn(verdicts)
        finally:
            if ended or self._proposer.changed:
                self._end(ended)
        self._trace.take_into(record.seconds)
        self._report(record)
        self.scheduler.last_step = record
        if self.on_step is not None:
            self._guard.call("on_step", self.on_step, record)

    def _end_sequences(self, ended: Sequence[str]) -> None:
        with ExitStack() as every:  # the policy is told of all, though it may raise
            for seq_id in reversed(ended):
                every.callback(self._policy.end, seq_id)
            if self._proposer.changed:
                self._policy.leave_out(frozenset(self._proposer.failed))

    # ---- around the step ------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a sequence waits or runs, or an output is still to be returned."""
        return self.scheduler.busy or bool(self._outputs)

    @property
    def open_requests(self) -> list[str]:
        """Ids of the requests that wait or run. One whose last choice has ended may be used again."""
        return list(self.scheduler.requests)

    def add(self, request: Request) -> None:
        """Accept a request, or refuse it with a typed error; an accepted one always ends with a last output."""
        self._guard.call("add", self._add, request)

    def _add(self, request: Request) -> None:
        if request.id in self.scheduler.requests:
            raise RequestError(f"Request id {request.id!r} is in use.", "Give every request its own id.")
        drafters, drafter = self.proposer.drafters, self.proposer.name
        check_request(request, vocab=self.runner.target.vocab, has_tokenizer=self._decoder is not None)
        self._requested.check(request, drafters)
        if (own := request.speculation) is not None:
            drafter = "none" if own.depth == 0 else own.named(drafters)
        request = with_compiled_grammar(request, self.grammars)
        seed = fresh_seed() if request.params.seed is None else request.params.seed
        choices = []
        for choice in request.choices:
            decoder = self._decoder(request.prompt) if self._decoder else None
            params = request.params
            text = Detokenizer(decoder, params.stop, min_tokens=params.min_tokens) if decoder else None
            choices.append(EngineSequence(request, choice, seed=seed, text=text, eos=self._eos, drafter=drafter))
        for sequence in choices:  # all have one length, so only the first can be refused
            self.scheduler.add(sequence)
        try:
            for sequence in choices:
                self.proposer.begin(sequence.id, request.prompt, request.params, tenant=request.tenant)
                self._requested.add(sequence, drafters)
                self._policy.begin(sequence.id, weight=request.weight)
        except BaseException:  # of a policy of one's own: who added the request waits for no output
            self._end_choices(self.scheduler.abort(request.id))
            raise

    def abort(self, request_id: str) -> bool:
        """End all choices of a request now; their last outputs come with what a step returns next. False if it is not
        running."""
        return self._guard.call("abort", self._abort, request_id)

    def _abort(self, request_id: str) -> bool:
        deltas = self.scheduler.abort(request_id)
        self._outputs += deltas  # they come even if a policy of one's own raises now
        self._end_choices(deltas)
        return bool(deltas)

    def _end_choices(self, deltas: Sequence[OutputDelta]) -> None:
        """What follows the last outputs of a request's choices."""
        ended = [sequence_id(delta.request_id, delta.index) for delta in deltas]
        for seq_id in ended:
            self.proposer.end(seq_id)
        self._end_sequences(ended)

    def preempt_all(self) -> None:
        """Preempt every running sequence; its tokens are computed again. Texts do not change (see `wager prove`)."""
        self._guard.call("preempt_all", self.scheduler.preempt_all)

    def forget_requests(self) -> None:
        """Drafters forget earlier requests, so that one that is measured again is not guessed from its own answer.
        UsageError while requests run."""
        self._guard.call("forget_requests", self._forget_requests)

    def _forget_requests(self) -> None:
        if self.scheduler.busy:
            raise UsageError("Drafters cannot forget requests that run.", "Wait until the last one has ended.")
        self.proposer.forget()

    def check(self) -> None:
        """Integrity of the block accounting; raises CacheIntegrityError."""
        self.scheduler.check()

    def generate(
        self,
        requests: Iterable[Request],
        *,
        concurrency: int | None = None,
        on_output: Callable[[OutputDelta], None] | None = None,
    ) -> list[Completion]:
        """Run requests, at most `concurrency` at a time, and return their completions in the order given.

        `on_output` receives every delta as it comes, and may add and abort requests. If one is refused, or anything
        else fails, the requests added so far are aborted before the error is raised.
        """
        if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
            raise UsageError(
                f"concurrency = {concurrency!r} is not possible.",
                "Give an integer from 1 on, or None to run all requests together.",
            )
        return self._guard.call("generate", self._generate, deque(requests), concurrency, on_output)

    def _generate(
        self, waiting: deque[Request], concurrency: int | None, on_output: Callable[[OutputDelta], None] | None
    ) -> list[Completion]:
        collector, added = OutputCollector(), set[str]()
        try:
            while waiting or self.busy:
                while waiting and (concurrency is None or len(self.scheduler.requests) < concurrency):
                    collector.expect(waiting[0])
                    self.add(waiting[0])
                    added.add(waiting.popleft().id)
                for delta in self.step():
                    collector.add(delta)
                    if on_output:
                        self._guard.call("on_output", on_output, delta)
        except BaseException:
            for request_id in added:
                with suppress(Exception):  # of a policy of one's own
                    self.abort(request_id)
            self._outputs = [each for each in self._outputs if each.request_id not in added]
            raise
        self.check()
        return collector.completions()


# ---- which call an engine is in -------------------------------------------------------------


_ALLOWED_WITHIN = {"step": ("generate",), "generate": (), "on_output": ("generate",), "on_step": ("step",)}
_BETWEEN_STEPS = ("generate", "on_output", "on_step")


class CallGuard:
    """The call that an engine is in, and its thread, if it is in one."""

    def __init__(self) -> None:
        self._inside: tuple[str, int] | None = None

    def call(self, name: str, function: Callable[..., R], *given: Any) -> R:
        """`function(*given)` as a call of the engine of that name, or a callback. UsageError if it is not possible now.

        From one look at what it is in to the change of that nothing is called, so that neither another thread nor a
        signal comes between."""
        now, allowed = (name, threading.get_ident()), _ALLOWED_WITHIN.get(name, _BETWEEN_STEPS)
        before = self._inside
        if before is not None and (before[1] != now[1] or before[0] not in allowed):
            raise _refusal(name, *before)
        try:
            self._inside = now
            return function(*given)
        finally:
            self._inside = before


def _refusal(name: str, within: str, owner: int) -> UsageError:
    if owner == threading.get_ident():
        return UsageError(
            f"Engine.{name} was called within {within} of the same engine.",
            "Callbacks on_step and on_output may add and abort requests; steps must wait for their return.",
        )
    names = {each.ident: each.name for each in threading.enumerate()}
    return UsageError(
        f"Thread {threading.current_thread().name!r} called Engine.{name} while thread "
        f"{names.get(owner, owner)!r} was using the engine.",
        "One thread at a time may use an engine; a wager.LLM serves several.",
    )
