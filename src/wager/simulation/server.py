"""A server without a model: requests arrive, are batched, drafted for and verified, at the seconds of a latency model.

A discrete-event simulation, one event per step: the policies are those of the engine and see the same spans and drafts;
the clock advances by the latency model's seconds of a step of that shape.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from wager.economics.latency import LatencyCache, LatencyModel
from wager.economics.policy.base import SLOW_INTERVAL, Policy
from wager.errors import UsageError
from wager.simulation.traces import MAX_DRAFTED, RequestTrace, TraceSource
from wager.types import DRAFT_STAGE, FORWARD_STAGE, Draft, DraftDecision, Plan, Span, StepRecord, Verdict

# ---- how requests arrive --------------------------------------------------------------------------------------------

MAX_BATCH = 16_384
"""Most sequences of a step, and so the most users that all run at once."""

MAX_RATE, MIN_RATE = 1e6, 1e-6
"""Requests a second: beyond these a simulation would not end, or its seconds would not be numbers."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Closed loop: `concurrency` users, each sending a new request as soon as the last one is answered. Open loop:
    requests arrive at random, `rate` a second on average; or at the given `arrivals`, in ascending seconds.

    The simulation ends after `requests` finished requests; or, with None, after `rounds` rounds summed over requests,
    and then the first users' requests start at random points of their answers, as on a server that has been running.
    `max_batch` bounds the sequences of a step, `prefill_chunk` its prompt rows.
    """

    concurrency: int | None = None
    rate: float | None = None
    requests: int | None = None
    rounds: int = 20_000
    max_batch: int = MAX_BATCH
    prefill_chunk: int = 512
    seed: int = 0
    arrivals: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.rate is not None and not MIN_RATE <= self.rate <= MAX_RATE:
            hint = f"Give {MIN_RATE:g} to {MAX_RATE:g} requests a second."
            raise UsageError(f"rate = {self.rate:g} is out of range.", hint)
        if self.concurrency is not None and self.concurrency > MAX_BATCH:
            raise UsageError(f"concurrency = {self.concurrency} is out of range.", f"At most {MAX_BATCH} users.")

    @property
    def num_requests(self) -> int | None:
        """Requests after which the simulation ends: None if it ends after rounds."""
        return len(self.arrivals) if self.arrivals is not None and self.requests is None else self.requests

    @property
    def label(self) -> str:
        """In words, for a table."""
        if self.arrivals is not None:
            return f"{len(self.arrivals)} arrivals"
        return f"{self.rate:g} a second" if self.rate else f"{self.concurrency} user{'s' * (self.concurrency != 1)}"

    def arrival_times(self, rng: np.random.Generator) -> Iterator[float]:
        """Seconds at which requests arrive, ascending; of an open loop."""
        if self.arrivals is not None:
            yield from self.arrivals
        now = 0.0
        while self.rate:  # a Poisson process, from an arrival at 0
            yield now
            now += float(rng.exponential(1 / self.rate))


# ---- one request ----------------------------------------------------------------------------------------------------

_WRONG = -1
"""A draft token that does not match the answer."""

_CHAINS = tuple([tuple(range(-1, size - 1)) for size in range(MAX_DRAFTED + 1)])
"""The parents of a chain, by its length."""


@dataclass(slots=True)
class RequestTimes:
    """One request: its number, when it arrived and got its first and last token (-1: not yet), tokens and rounds."""

    number: int
    arrived: float
    first_token: float = -1.0
    last_token: float = -1.0
    tokens: int = 0
    rounds: int = 0

    def add_round(self, now: float, tokens: int) -> None:
        """A round at `now` emitted that many tokens."""
        self.first_token = now if self.first_token < 0 else self.first_token
        self.last_token = now
        self.tokens += tokens
        self.rounds += 1


class SimulatedRequest:
    """A request in the batch: `done` of its answer's tokens are known, and the keys of `cached` tokens stored."""

    __slots__ = ("cached", "done", "seq_id", "times", "trace")

    def __init__(self, trace: RequestTrace, times: RequestTimes, *, done: int = 0) -> None:
        self.seq_id = f"r{times.number}"
        self.trace, self.times, self.done = trace, times, done
        self.cached = trace.prompt_tokens + done - 1 if done else 0

    def draft(self, drafter: str, decision: DraftDecision) -> SimulatedDraft:
        """The drafter's draft under the decision. Draft tokens are positions of the answer, or _WRONG."""
        trace, at = self.trace.drafts[drafter], self.done
        size = min(decision.depth, int(trace.num_drafted[at]))
        scores: list[float] = [] if trace.scores is None else trace.scores[at, :size].tolist()
        passes = decision.depth
        if decision.min_survival:
            stop = next((node for node, score in enumerate(scores) if score < decision.min_survival), size - 1)
            size = min(size, stop + 1)
            passes = max(1, size)
        matching = min(size, int(trace.num_matching[at]))
        tokens = (*range(at, at + matching), *((_WRONG,) * (size - matching)))
        return SimulatedDraft(Draft(self.seq_id, tokens, _CHAINS[size], tuple(scores[:size]), drafter), passes)

    def verify(self, draft: Draft | None) -> Verdict:
        """Tokens are numbered by their position in the answer, so a draft token matches if it is its own position."""
        at, run = self.done, 0
        for token in draft.tokens if draft else ():
            if token != at + run:
                break
            run += 1
        return Verdict(self.seq_id, tuple(range(run)), tuple(range(at, at + run + 1)))

    def commit(self, tokens: int) -> None:
        """That many tokens more of the answer are known."""
        self.done += tokens
        self.cached = self.trace.prompt_tokens + self.done - 1


@dataclass(frozen=True, slots=True)
class SimulatedDraft:
    """A draft, and the passes of the drafter that it took."""

    draft: Draft
    passes: int


# ---- the server -----------------------------------------------------------------------------------------------------

_PACED_TOKENS = 16
"""Requests of fewer tokens have no speed of their own."""

_PLAIN = DraftDecision(0)


@dataclass(slots=True)
class SimulationResult:
    """The result of a simulation. Seconds are of the simulated clock; `rounds` are summed over requests; `drafted`,
    `admitted` and `accepted` count draft tokens; `peak_requests` ran in the step with most cached positions,
    `peak_context` of them together."""

    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    steps: int = 0
    drafted: int = 0
    admitted: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0
    peak_requests: int = 0
    peak_context: int = -1
    finished: list[RequestTimes] = field(default_factory=list)

    @property
    def throughput(self) -> float:
        """Tokens a second, all requests together."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tau(self) -> float:
        """Mean acceptance length: tokens per round and request, the bonus token included."""
        return self.tokens / self.rounds if self.rounds else 0.0

    def seconds_per_token(self) -> list[float]:
        """Seconds per token after the first, of every request with more than one round and at least sixteen tokens (or
        any number, if none has as many)."""
        requests = [request for request in self.finished if request.rounds > 1]
        paced = [request for request in requests if request.tokens >= _PACED_TOKENS] or requests
        return [(request.last_token - request.first_token) / (request.tokens - 1) for request in paced]


class SimulatedServer:
    """Requests of `traces`, arriving by `workload`, served under `policy`. `latency` gives the seconds of steps;
    the policy may assume another latency model.

    `drafted_before` is how the requests that run at first were decoded until then: the slow ones are more often met.
    """

    def __init__(
        self,
        traces: TraceSource,
        latency: LatencyModel,
        *,
        policy: Policy,
        workload: Workload,
        drafted_before: DraftDecision = _PLAIN,
    ) -> None:
        self._traces = traces
        self._latency = latency
        self._drafting = LatencyCache(latency)
        self._workload = workload
        self._policy = policy
        self._max_depths = dict(traces.max_depths())
        self._max_depth = max(self._max_depths.values(), default=0)
        self._rng = np.random.default_rng((workload.seed, 17))
        self._running: list[SimulatedRequest] = []
        self._waiting: deque[SimulatedRequest] = deque()
        self._started = 0
        self._limit = workload.num_requests or sys.maxsize
        self._arrivals: Iterator[float] = iter(()) if workload.concurrency else workload.arrival_times(self._rng)
        self._next_arrival = next(self._arrivals, math.inf)
        self._first_numbers: list[int] = []
        if workload.concurrency is not None and workload.num_requests is None:
            self._first_numbers = self._numbers_that_run(workload.concurrency, drafted_before)
        self.result = SimulationResult()

    def run(self) -> SimulationResult:
        """Serve until the workload's requests or rounds are done."""
        while not self._done():
            self._add_arrivals()
            if not self._running:
                self.result.seconds = self._next_arrival  # idle until the next request
                continue
            self._step()
        return self.result

    def _done(self) -> bool:
        if self._workload.num_requests is None:
            return self.result.rounds >= self._workload.rounds
        return len(self.result.finished) >= self._limit

    # ---- arrivals ----------------------------------------------------------------------------------------------

    def _add_arrivals(self) -> None:
        workload, now = self._workload, self.result.seconds
        if workload.concurrency is not None:
            while len(self._running) + len(self._waiting) < workload.concurrency and self._started < self._limit:
                self._start(now)
        else:
            while self._next_arrival <= now and self._started < self._limit:
                self._start(self._next_arrival)
                self._next_arrival = next(self._arrivals, math.inf)
        while self._waiting and len(self._running) < workload.max_batch:
            self._running.append(self._waiting.popleft())

    def _start(self, now: float) -> None:
        """The next request arrives; one of the first on a server that has been running is somewhere in its answer."""
        number, done = self._started, 0
        if number < len(self._first_numbers):
            trace = self._traces.request(self._first_numbers[number])
            done = int(self._rng.integers(trace.output_tokens))
        else:
            trace = self._traces.request(number)
        request = SimulatedRequest(trace, RequestTimes(number, now), done=done)
        self._policy.begin(request.seq_id, weight=1.0)
        self._waiting.append(request)
        self._started += 1

    def _numbers_that_run(self, count: int, before: DraftDecision) -> list[int]:
        """Numbers of the requests that run at first. A request that takes more rounds a token is met more often, so of
        the first `count` each is taken as often as it has rounds a token (systematic resampling)."""
        drafter = before.drafter or next(iter(self._max_depths), "")
        if not before.depth or not drafter:
            return list(range(count))
        requests = [self._traces.request(number).drafts[drafter] for number in range(count)]
        rounds = np.array([1 / request.tokens_per_round(before.depth) for request in requests])
        share = np.cumsum(rounds / rounds.sum())
        taken: list[int] = np.searchsorted(share, (np.arange(count) + self._rng.random()) / count).tolist()
        return [min(number, count - 1) for number in taken]

    # ---- one step ----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        spans = self._spans()
        requests = {request.seq_id: request for request in self._running}
        budget = self._max_depth * len(spans)  # as many as there can be: the rows of a step are not bounded
        plan = self._policy.plan(spans, budget)
        drafted = self._draft(plan, requests)
        drafts = {seq_id: drafting.draft for seq_id, drafting in drafted.items() if drafting.draft.tokens}
        admitted = self._policy.admit(drafts, budget)
        verdicts = [requests[span.seq_id].verify(admitted.get(span.seq_id)) for span in spans if span.needs_logits]
        self._policy.learn(verdicts)
        ended = self._commit(spans, requests, verdicts)
        record = self._record(spans, admitted, verdicts, drafting=self._draft_seconds(drafted.values()))
        self._count(record, drafts, verdicts)
        for verdict in verdicts:
            requests[verdict.seq_id].times.add_round(self.result.seconds, len(verdict.tokens))
        self.result.finished += [request.times for request in ended]
        self._policy.observe(record)  # its seconds count for the next step, as in the engine

    def _spans(self) -> list[Span]:
        """One row of each decoding request, and prompt chunks as far as the prefill budget goes."""
        spans, left = [], self._workload.prefill_chunk
        for request in self._running:
            known = request.trace.prompt_tokens + request.done
            pending = known - request.cached
            rows = 1 if pending == 1 else min(pending, left)
            if not rows:
                continue
            left -= rows if pending > 1 else 0
            needs_logits = rows == pending
            to_come = request.trace.output_tokens - request.done - 1
            max_draft_tokens = min(self._max_depth, to_come) if needs_logits else 0
            spans.append(Span(request.seq_id, request.cached, (0,) * rows, needs_logits, max_draft_tokens))
        return spans

    def _draft(self, plan: Plan, requests: Mapping[str, SimulatedRequest]) -> dict[str, SimulatedDraft]:
        first = next(iter(self._max_depths), "")
        return {
            seq_id: requests[seq_id].draft(decision.drafter or first, decision) for seq_id, decision in plan.items()
        }

    def _draft_seconds(self, drafted: Iterable[SimulatedDraft]) -> float:
        """Seconds of drafting by all drafters."""
        if self.result.steps % SLOW_INTERVAL == 0:  # the machine may change
            self._drafting.clear()
        passes: dict[str, list[int]] = {}
        for each in drafted:
            passes.setdefault(each.draft.drafter, []).append(each.passes)
        return sum([self._drafting.ragged_draft_seconds(name, depths) for name, depths in passes.items()])

    def _record(
        self, spans: Sequence[Span], admitted: Mapping[str, Draft], verdicts: Sequence[Verdict], *, drafting: float
    ) -> StepRecord:
        """What the step did and took, as the engine reports it."""
        guesses = sum([len(draft.tokens) for draft in admitted.values()])
        rows = guesses + sum([len(span.tokens) for span in spans])
        context_lens = tuple([span.num_computed_tokens for span in spans])
        return StepRecord(
            rows=rows,
            sequences=len(spans),
            drafted=guesses,
            accepted=sum([len(verdict.accepted) for verdict in verdicts]),
            emitted=sum([len(verdict.tokens) for verdict in verdicts]),
            seconds={
                DRAFT_STAGE: drafting,
                FORWARD_STAGE: self._latency.seconds(rows, len(spans), sum(context_lens)),
            },
            context_lens=context_lens,
        )

    def _count(self, record: StepRecord, drafts: Mapping[str, Draft], verdicts: Sequence[Verdict]) -> None:
        result = self.result
        result.seconds += sum(record.seconds.values())
        result.steps += 1
        result.rounds += len(verdicts)
        result.draft_seconds += record.seconds[DRAFT_STAGE]
        result.drafted += sum([len(draft.tokens) for draft in drafts.values()])
        result.admitted += record.drafted
        result.accepted += record.accepted
        result.tokens += record.emitted
        context = sum(record.context_lens)
        if context > result.peak_context:
            result.peak_requests, result.peak_context = record.sequences, context

    def _commit(
        self, spans: Sequence[Span], requests: Mapping[str, SimulatedRequest], verdicts: Sequence[Verdict]
    ) -> list[SimulatedRequest]:
        """Append the tokens; the requests that ended."""
        for span in spans:
            requests[span.seq_id].cached += len(span.tokens)
        ended = []
        for verdict in verdicts:
            request = requests[verdict.seq_id]
            request.commit(len(verdict.tokens))
            if request.done >= request.trace.output_tokens:
                ended.append(request)
                self._policy.end(request.seq_id)
        if ended:
            gone = {request.seq_id for request in ended}
            self._running = [request for request in self._running if request.seq_id not in gone]
        return ended
