"""A server without a model: requests arrive, are batched, drafted for and verified, at the seconds of a latency model.

A discrete-event simulation, one event per step: the policies are those of the engine and see the same spans and drafts;
the clock advances by the latency model's seconds of a step of that shape, and by what the policy itself takes.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from wager.economics.latency import LatencyModel
from wager.economics.policy.base import Policy
from wager.simulation.ahead import SimulatedAheadDrafter
from wager.simulation.policy_time import PolicyClock, TimedPolicy
from wager.simulation.requests import RequestTimes, SimulatedDraft, SimulatedRequest
from wager.simulation.traces import TraceSource
from wager.simulation.workload import Workload
from wager.types import DRAFT_STAGE, POLICY_STAGE, Draft, DraftDecision, Plan, Span, StepRecord, Verdict

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
    policy_seconds: float = 0.0
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

    Every step is charged what `clock` says of the policy's own decisions (None: nothing). The drafters in `ahead` draft
    while the target verifies.
    `drafted_before` is how the requests that run at first were decoded until then: the slow ones are more often met.
    """

    def __init__(
        self,
        traces: TraceSource,
        latency: LatencyModel,
        *,
        policy: Policy,
        workload: Workload,
        clock: PolicyClock | None = None,
        ahead: Mapping[str, SimulatedAheadDrafter] | None = None,
        drafted_before: DraftDecision = _PLAIN,
    ) -> None:
        self._traces, self._latency, self._workload = traces, latency, workload
        self._clock = clock or PolicyClock(0.0)
        self._ahead = dict(ahead or {})
        self._policy = TimedPolicy(policy, self._clock)
        self._max_depths = dict(traces.max_depths())
        self._max_depth = max(self._max_depths.values(), default=0)
        self._rng = np.random.default_rng((workload.seed, 17))
        self._running: list[SimulatedRequest] = []
        self._waiting: deque[SimulatedRequest] = deque()
        self._started = 0
        self._limit = workload.num_requests or sys.maxsize
        self._arrivals: Iterator[float] = iter(()) if workload.closed else workload.arrival_times(self._rng)
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
        record = self._record(spans, admitted, verdicts, drafting=self._draft_seconds(drafted, requests))
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

    def _draft_seconds(self, drafted: Mapping[str, SimulatedDraft], requests: Mapping[str, SimulatedRequest]) -> float:
        """Seconds of drafting, drafter by drafter; of one that drafts ahead, what the step waits for it."""
        by_name: dict[str, list[tuple[SimulatedRequest, SimulatedDraft]]] = {}
        for seq_id, draft in drafted.items():
            by_name.setdefault(draft.draft.drafter, []).append((requests[seq_id], draft))
        total = 0.0
        for name, each in by_name.items():
            price = partial(self._seconds_of_passes, name)
            ahead = self._ahead.get(name)
            total += ahead.waited(each, price) if ahead else price([draft.passes for _, draft in each])
        return total

    def _seconds_of_passes(self, drafter: str, passes: Collection[int]) -> float:
        """`passes` are those of each request. Between two depths at which some stop, all others go on."""
        seconds_at, total, before = self._latency.draft_seconds, 0.0, 0
        depths = Counter(passes)
        going_on = sum(depths.values())
        for depth in sorted(depths):
            if depth > before:
                already = seconds_at(drafter, going_on, before) if before else 0.0
                total += seconds_at(drafter, going_on, depth) - already
                before = depth
            going_on -= depths[depth]
        return total

    def _record(
        self, spans: Sequence[Span], admitted: Mapping[str, Draft], verdicts: Sequence[Verdict], *, drafting: float
    ) -> StepRecord:
        """What the step did and took, as the engine reports it; the next drafts are made beside its pass."""
        guesses = sum([len(draft.tokens) for draft in admitted.values()])
        rows = guesses + sum([len(span.tokens) for span in spans])
        context_lens = tuple([span.num_computed_tokens for span in spans])
        forward = self._latency.seconds(rows, len(spans), sum(context_lens))
        for drafter in self._ahead.values():
            drafter.step_took(forward)
        return StepRecord(
            rows=rows,
            sequences=len(spans),
            drafted=guesses,
            accepted=sum([len(verdict.accepted) for verdict in verdicts]),
            emitted=sum([len(verdict.tokens) for verdict in verdicts]),
            seconds={
                POLICY_STAGE: self._clock.take(),
                DRAFT_STAGE: drafting,
                "forward": forward,
            },
            context_lens=context_lens,
        )

    def _count(self, record: StepRecord, drafts: Mapping[str, Draft], verdicts: Sequence[Verdict]) -> None:
        result = self.result
        result.seconds += sum(record.seconds.values())
        result.steps += 1
        result.rounds += len(verdicts)
        result.draft_seconds += record.seconds[DRAFT_STAGE]
        result.policy_seconds += record.seconds[POLICY_STAGE]
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
