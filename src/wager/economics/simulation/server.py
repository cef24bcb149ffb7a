"""A server without a model: requests arrive, are batched, drafted for and verified, at the seconds of a latency model.

A discrete-event simulation, one event per step: the policies are those of the engine and see the same spans and drafts;
the clock advances by the latency model's seconds of a step of that shape.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from wager.economics.latency_model import LatencyModel
from wager.economics.policy.base import Policy
from wager.economics.simulation.traces import RequestTrace, TraceSource
from wager.economics.simulation.workload import Workload
from wager.types import Draft, DraftDecision, Plan, Span, StepRecord, Verdict

_WRONG = -1
"""A draft token that does not match the answer."""

_PACED_TOKENS = 16
"""Requests of fewer tokens have no speed of their own."""


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


@dataclass(slots=True)
class SimulationResult:
    """The result of a simulation. Seconds are of the simulated clock; `rounds` are summed over requests; `drafted`,
    `admitted` and `accepted` count draft tokens."""

    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    steps: int = 0
    drafted: int = 0
    admitted: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0
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
        """Seconds per token after the first, of every request with at least sixteen."""
        return [
            (request.last_token - request.first_token) / (request.tokens - 1)
            for request in self.finished
            if request.tokens >= _PACED_TOKENS
        ]


class _RunningRequest:
    """A request in the batch: `done` of its answer's tokens are known, and the keys of `cached` tokens stored."""

    __slots__ = ("cached", "done", "seq_id", "times", "trace")

    def __init__(self, trace: RequestTrace, times: RequestTimes, *, done: int = 0) -> None:
        self.seq_id = f"r{times.number}"
        self.trace, self.times, self.done = trace, times, done
        self.cached = trace.prompt_tokens + done - 1 if done else 0

    def draft(self, drafter: str, decision: DraftDecision) -> _Drafting:
        """The drafter's draft under the decision. Draft tokens are positions of the answer, or _WRONG."""
        trace, at = self.trace.drafts[drafter], self.done
        size = min(decision.depth, int(trace.num_drafted[at]))
        if decision.min_survival and trace.scores is not None:
            unlikely = np.flatnonzero(trace.scores[at, :size] < decision.min_survival)
            size = int(unlikely[0]) + 1 if len(unlikely) else size
        passes = max(1, size) if decision.min_survival else decision.depth
        matching = min(size, int(trace.num_matching[at]))
        tokens = (*range(at, at + matching), *((_WRONG,) * (size - matching)))
        scores = () if trace.scores is None else tuple(trace.scores[at, :size].tolist())
        return _Drafting(Draft.chain(self.seq_id, tokens, drafter=drafter, scores=scores), passes)

    def verify(self, draft: Draft | None) -> Verdict:
        """Tokens are numbered by their position in the answer, so a draft token matches if it is its own position."""
        at, run = self.done, 0
        if draft is not None:
            while run < len(draft.tokens) and draft.tokens[run] == at + run:
                run += 1
        return Verdict(self.seq_id, tuple(range(run)), tuple(range(at, at + run + 1)))

    def commit(self, tokens: int) -> None:
        """That many tokens more of the answer are known."""
        self.done += tokens
        self.cached = self.trace.prompt_tokens + self.done - 1


@dataclass(frozen=True, slots=True)
class _Drafting:
    """A draft, and the passes of the drafter that it took."""

    draft: Draft
    passes: int


class SimulatedServer:
    """Requests of `traces`, arriving by `workload`, served under `policy`. `latency` gives the seconds of steps;
    the policy may assume another latency model."""

    def __init__(self, traces: TraceSource, latency: LatencyModel, *, policy: Policy, workload: Workload) -> None:
        self._traces, self._latency, self._policy, self._workload = traces, latency, policy, workload
        self._max_depths = dict(traces.max_depths())
        self._max_depth = max(self._max_depths.values(), default=0)
        self._rng = np.random.default_rng((workload.seed, 17))
        self._running: list[_RunningRequest] = []
        self._waiting: deque[_RunningRequest] = deque()
        self._started = 0
        self._next_arrival = 0.0
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
        if self._workload.requests is None:
            return self.result.rounds >= self._workload.rounds
        return len(self.result.finished) >= self._workload.requests

    # ---- arrivals ----------------------------------------------------------------------------------------------

    def _add_arrivals(self) -> None:
        workload, now = self._workload, self.result.seconds
        limit = workload.requests or sys.maxsize
        if workload.concurrency is not None:
            while len(self._running) + len(self._waiting) < workload.concurrency and self._started < limit:
                self._start(now, midway=workload.requests is None and self._started < workload.concurrency)
        else:
            while self._next_arrival <= now and self._started < limit:
                self._start(self._next_arrival, midway=False)
                self._next_arrival += float(self._rng.exponential(1 / (workload.rate or 1.0)))
        while self._waiting and len(self._running) < workload.max_batch:
            self._running.append(self._waiting.popleft())

    def _start(self, now: float, *, midway: bool) -> None:
        """The next request arrives; `midway`: at a random point of its answer."""
        trace = self._traces.request(self._started)
        done = int(self._rng.integers(trace.output_tokens)) if midway else 0
        self._waiting.append(_RunningRequest(trace, RequestTimes(self._started, now), done=done))
        self._started += 1

    # ---- one step ----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        spans = self._spans()
        requests = {request.seq_id: request for request in self._running}
        budget = self._max_depth * len(spans)  # as many as there can be: the rows of a step are not bounded
        plan = self._policy.plan(spans, budget)
        drafted = self._draft(plan, requests)
        drafts = {seq_id: drafting.draft for seq_id, drafting in drafted.items() if len(drafting.draft)}
        drafting = self._draft_seconds(drafted.values())
        admitted = self._policy.admit(drafts, budget)
        verdicts = [requests[span.seq_id].verify(admitted.get(span.seq_id)) for span in spans if span.needs_logits]
        record = self._record(spans, admitted, verdicts, drafting=drafting)
        self.result.seconds += sum(record.seconds.values())
        self._policy.learn(verdicts)
        self._count(record, drafts, verdicts)
        self._commit(spans, requests, verdicts)
        self._policy.observe(record)

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

    def _draft(self, plan: Plan, requests: Mapping[str, _RunningRequest]) -> dict[str, _Drafting]:
        first = next(iter(self._max_depths), "")
        return {
            seq_id: requests[seq_id].draft(decision.drafter or first, decision) for seq_id, decision in plan.items()
        }

    def _draft_seconds(self, drafted: Collection[_Drafting]) -> float:
        """Seconds of drafting: for each drafter a pass per depth, for the requests drafted that deep."""
        passes: dict[str, list[int]] = {}
        for drafting in drafted:
            passes.setdefault(drafting.draft.drafter, []).append(drafting.passes)
        return sum(self._seconds_of_passes(name, depths) for name, depths in passes.items())

    def _seconds_of_passes(self, drafter: str, depths: Sequence[int]) -> float:
        seconds_at, total = self._latency.draft_seconds, 0.0
        for depth in range(1, max(depths) + 1):
            requests = sum([size >= depth for size in depths])
            before = seconds_at(drafter, requests, depth - 1) if depth > 1 else 0.0
            total += seconds_at(drafter, requests, depth) - before
        return total

    def _record(
        self, spans: Sequence[Span], admitted: Mapping[str, Draft], verdicts: Sequence[Verdict], *, drafting: float
    ) -> StepRecord:
        """What the step did and took, as the engine reports it."""
        guesses = sum(len(draft) for draft in admitted.values())
        rows = guesses + sum(len(span.tokens) for span in spans)
        context_lens = tuple(span.num_computed_tokens for span in spans)
        return StepRecord(
            rows=rows,
            sequences=len(spans),
            drafted=guesses,
            accepted=sum(len(verdict.accepted) for verdict in verdicts),
            emitted=sum(len(verdict.tokens) for verdict in verdicts),
            seconds={"draft": drafting, "forward": self._latency.seconds(rows, len(spans), sum(context_lens))},
            context_lens=context_lens,
        )

    def _count(self, record: StepRecord, drafts: Mapping[str, Draft], verdicts: Sequence[Verdict]) -> None:
        result = self.result
        result.steps += 1
        result.rounds += len(verdicts)
        result.draft_seconds += record.seconds["draft"]
        result.drafted += sum(len(draft) for draft in drafts.values())
        result.admitted += record.drafted
        result.accepted += record.accepted
        result.tokens += record.emitted

    def _commit(
        self, spans: Sequence[Span], requests: Mapping[str, _RunningRequest], verdicts: Sequence[Verdict]
    ) -> None:
        for span in spans:
            requests[span.seq_id].cached += len(span.tokens)
        ended = set()
        for verdict in verdicts:
            request = requests[verdict.seq_id]
            request.times.add_round(self.result.seconds, len(verdict.tokens))
            request.commit(len(verdict.tokens))
            if request.done >= request.trace.output_tokens:
                ended.add(request.seq_id)
                self.result.finished.append(request.times)
                self._policy.end(request.seq_id)
        if ended:
            self._running = [request for request in self._running if request.seq_id not in ended]
