"""Metrics for Prometheus: those of vLLM under their names behind `wager:`, what drafting costs and brings, memory."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from wager.async_llm import AsyncLLM
from wager.economics.policy.base import PolicyFigures
from wager.engine.rounds import DraftCounter, DrafterCounts, count_at
from wager.engine.sequence import sequence_id
from wager.serve.limits import Admission
from wager.types import OutputDelta, Request, Stats, StepRecord

CONTENT_TYPE = CONTENT_TYPE_LATEST

_FRACTIONS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
_SECONDS = (*_FRACTIONS_S, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)
_GUESSES = (0, *_TOKENS)
_TOKENS_A_PASS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 12, 16, 32)
_SHARES = (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)

_MOST_POSITIONS = 8
"""Positions of drafts of which there are histograms by request: each is 13 series for every drafter."""


@dataclass(slots=True)
class RequestRecord:
    """A request of the engine: when it came, and when each of its choices last got a token (perf_counter; 0: not yet).
    `uncounted` is the request until it is counted, with its first delta. `stats` are those of the choices that have
    ended, `queue_s` the least that one of them waited for its first step. Choices share their prompt's tokens:
    `cached_tokens` are those of the first."""

    arrived: float
    last: dict[int, float]
    uncounted: Request | None
    queue_s: float = math.inf
    stats: list[Stats] = field(default_factory=list)
    cached_tokens: int = 0


class Metrics:
    """Everything that is counted. `request_opened`, `step` and `http` are called in the event loop."""

    def __init__(self, llm: AsyncLLM, admission: Admission, totals: StepTotals, *, model: str) -> None:
        self._llm = llm
        self._admission = admission
        self._totals = totals
        self._model = model
        self._records: dict[str, RequestRecord] = {}
        self._figures: PolicyFigures | None = None
        self._collapsed: Mapping[str, str] = {}
        self.registry = CollectorRegistry()
        self.drafts = DraftCounter.attach(llm.engine)
        self.requests_by_tau: list[int] = []
        """At index n the choices that got n tokens from a pass of the target, rounded down."""
        self._success = self._counter("request_success", "Choices that ended.", ("finished_reason",))
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Tokens of prompts found in the prefix cache.")
        self._looked_up = self._counter("prefix_cache_queries", "Tokens of prompts looked up in the prefix cache.")
        self._found = self._counter("prefix_cache_hits", "Those of them that it had.")
        self._preemptions = self._counter("num_preemptions", "Preemptions.")
        self._http = self._counter("http_requests", "Requests by path and status.", ("path", "status"))
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.")
        itl = "Between two steps that emitted for a choice."
        self._itl = WeightedHistogram("wager:inter_token_latency_seconds", itl, _SECONDS, model=model)
        self.registry.register(self._itl)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Decode seconds a token, by request."
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to the first step.")
        self._inference = self._histogram("request_inference_time_seconds", "From the first step to the last token.")
        self._prefill = self._histogram("request_prefill_time_seconds", "From the first step to the first token.")
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last.")
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of requests.", _TOKENS)
        self._generated = self._histogram("request_generation_tokens", "Generated tokens of choices.", _TOKENS)
        self._n = self._histogram("request_params_n", "Choices that requests ask for.", _TOKENS)
        self._most = self._histogram("request_params_max_tokens", "Tokens that requests allow a choice.", _TOKENS)
        self._rows = self._histogram(
            "iteration_tokens_total", "Rows of a step: prompt tokens, tokens and guesses.", _TOKENS
        )
        self._drafted = self._histogram("request_spec_decode_draft_tokens", "Guesses verified for choices.", _GUESSES)
        self._accepted = self._histogram(
            "request_spec_decode_accepted_tokens", "Guesses accepted for choices.", _GUESSES
        )
        self._tau = self._histogram(
            "request_spec_decode_mean_acceptance_length",
            "Tokens of choices from a pass of the target, the bonus token included.",
            _TOKENS_A_PASS,
        )
        self._acceptance = Histogram(
            "wager:request_spec_decode_acceptance_rate",
            "Of the drafts of a choice that were verified to a position, the share whose guess there was accepted.",
            ("model_name", "drafter", "position"),
            registry=self.registry,
            buckets=_SHARES,
        )
        self._texts: Mapping[str, int] = {}  # bytes of those that each drafter looks up
        self.registry.register(self)

    async def render(self) -> bytes:
        """The text that Prometheus reads. The policy is asked in the engine's thread, between two steps."""
        if self._llm.failure is None:
            await self._llm.between_steps(self._read_engine)
        return generate_latest(self.registry)

    # ---- what happens ------------------------------------------------------------------------------------------------

    def request_opened(self, request: Request) -> RequestRecord:
        """A request is about to be given to the engine; what becomes of it is written into its record."""
        last = dict.fromkeys(range(request.params.n), 0.0)
        self._records[request.id] = record = RequestRecord(time.perf_counter(), last, request)
        return record

    def request_refused(self, request_id: str) -> None:
        """The engine did not take it."""
        self._records.pop(request_id, None)

    def request_dropped(self, request_id: str) -> None:
        """Nobody waits for those of its choices that run. Unknown requests are ignored."""
        if record := self._records.pop(request_id, None):
            self._success.labels(self._model, "abort").inc(len(record.last))

    def step(self, deltas: Sequence[OutputDelta], record: StepRecord | None) -> None:
        """A step was taken."""
        now = time.perf_counter()
        if record is not None:
            self._rows.observe(record.rows)
        drafts = self.drafts.count(deltas, record)
        intervals: dict[float, int] = {}  # of many choices they are equal
        for delta in deltas:
            opened = self._records.get(delta.request_id)
            if opened is not None:
                self._delta(delta, opened, now, intervals)
                if delta.finish_reason is not None and delta.stats is not None:
                    self._speculated(delta.stats, drafts[sequence_id(delta.request_id, delta.index)])
        for seconds, count in intervals.items():
            self._itl.add(seconds, count)

    def http(self, path: str, status: int) -> None:
        """A request over HTTP was answered; `path` is one of the server's own."""
        self._http.labels(self._model, path, str(status)).inc()

    def _delta(self, delta: OutputDelta, record: RequestRecord, now: float, intervals: dict[float, int]) -> None:
        if record.uncounted is not None:
            self._count_request(record.uncounted)
            record.uncounted = None
        if delta.token_ids:
            last = record.last[delta.index]
            if last:
                intervals[now - last] = intervals.get(now - last, 0) + 1
            else:
                self._ttft.observe(now - record.arrived)
            record.last[delta.index] = now
        if delta.finish_reason is not None:
            self._success.labels(self._model, delta.finish_reason).inc()
            if delta.stats is not None:
                self._ended(delta.stats, record, now - record.arrived)
                if delta.index == 0:
                    record.cached_tokens = delta.stats.cached_tokens
                    self._cached_tokens.inc(delta.stats.cached_tokens)
            del record.last[delta.index]
            if not record.last:
                del self._records[delta.request_id]

    def _count_request(self, request: Request) -> None:
        self._prompt.observe(len(request.prompt))
        self._prompt_tokens.inc(len(request.prompt))
        self._n.observe(request.params.n)
        self._most.observe(request.params.max_tokens)

    def _ended(self, stats: Stats, record: RequestRecord, seconds: float) -> None:
        waited = max(0.0, seconds - stats.prefill_s - stats.decode_s)
        record.stats.append(stats)
        record.queue_s = min(record.queue_s, waited)
        self._e2e.observe(seconds)
        self._queue.observe(waited)
        self._inference.observe(stats.prefill_s + stats.decode_s)
        self._prefill.observe(stats.prefill_s)
        self._decode.observe(stats.decode_s)
        self._generated.observe(stats.completion_tokens)
        self._looked_up.inc(stats.prompt_tokens)
        self._found.inc(stats.cached_tokens)
        self._preemptions.inc(stats.preemptions)
        if stats.completion_tokens > 1:
            self._per_token.observe(stats.decode_s / (stats.completion_tokens - 1))

    def _speculated(self, stats: Stats, drafts: Mapping[str, DrafterCounts]) -> None:
        """What drafting brought to a choice."""
        self._drafted.observe(stats.drafted)
        self._accepted.observe(stats.accepted)
        if stats.rounds:
            self._tau.observe(stats.mean_acceptance_length)
            count_at(self.requests_by_tau, int(stats.mean_acceptance_length))
        for name, counts in drafts.items():
            positions = zip(counts.verified_by_position, counts.accepted_by_position, strict=False)
            for position, (verified, accepted) in enumerate(list(positions)[:_MOST_POSITIONS]):
                self._acceptance.labels(self._model, name, str(position)).observe(accepted / verified)

    # ---- the engine as it is -----------------------------------------------------------------------------------------

    def _read_engine(self) -> None:
        """What only the engine's thread may read, between two steps."""
        engine = self._llm.engine
        self._figures = engine.policy.figures()
        self._collapsed = dict(engine.policy.collapsed)
        drafters = engine.proposer.drafters.items()
        self._texts = {name: drafter.nbytes for name, drafter in drafters if hasattr(drafter, "nbytes")}

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        scheduler = self._llm.engine.scheduler
        pool = scheduler.block_pool
        yield self._gauge("num_requests_running", "Sequences that decode or compute prompts.", scheduler.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait.", scheduler.num_waiting)
        yield self._gauge("num_requests_open", "Sequences that were let in.", self._admission.open)
        used = 1 - pool.num_free_blocks / pool.num_blocks if pool.num_blocks else 0.0
        yield self._gauge("kv_cache_usage_perc", "Share of the cache's blocks in use, 1 is all.", used)
        totals = self._totals
        yield self._total("steps", "Steps of the engine.", {(): totals.steps})
        yield self._total("generation_tokens", "Generated tokens.", {(): totals.tokens})
        text = "Passes of the target that emitted tokens of a choice, counted for each choice."
        yield self._total("rounds", text, {(): totals.rounds})
        stages = {(stage,): seconds for stage, seconds in totals.stage_seconds.items()}
        yield self._total("step_stage_seconds", "Seconds of steps by stage.", stages, "stage")
        yield from self._speculation()
        yield from self._policy()
        yield from self._memory()

    def _speculation(self) -> Iterable[Metric]:
        counts = self.drafts.drafters
        drafted = {(name,): count for name, count in list(self.drafts.drafted.items())}
        yield self._total(
            "spec_decode_num_drafted_tokens", "Guesses drafted, before some are admitted.", drafted, "drafter"
        )
        for name, text, attribute in (
            ("spec_decode_num_drafts", "Drafts that were verified.", "drafts"),
            ("spec_decode_num_draft_tokens", "Guesses verified.", "verified_tokens"),
            ("spec_decode_num_accepted_tokens", "Guesses accepted.", "accepted_tokens"),
        ):
            yield self._total(name, text, {(each,): getattr(counts[each], attribute) for each in counts}, "drafter")
        for name, text, attribute in (
            ("spec_decode_num_draft_tokens_per_pos", "Drafts verified to a position.", "verified_by_position"),
            ("spec_decode_num_accepted_tokens_per_pos", "Guesses accepted by position.", "accepted_by_position"),
        ):
            positions = {
                (each, str(position)): count
                for each in counts
                for position, count in enumerate(getattr(counts[each], attribute))
            }
            yield self._total(name, text, positions, "drafter", "position")
        depths = {(str(depth),): count for depth, count in enumerate(list(self.drafts.planned))}
        yield self._total("spec_decode_planned_depth", "Draft decisions by the guesses they ask for.", depths, "depth")

    def _policy(self) -> Iterable[Metric]:
        proposer = self._llm.engine.proposer
        collapsed = {name: name in self._collapsed for name in proposer.drafters}
        failed = {name: name in proposer.failed for name in proposer.drafters}
        text = "1 for a drafter that is not used since its acceptance collapsed."
        yield self._gauges("drafter_collapsed", text, collapsed, "drafter")
        text = "1 for a drafter that raised an error and is not called until a pause is over."
        yield self._gauges("drafter_failed", text, failed, "drafter")
        failures = {(name,): float(proposer.failures[name]) for name in proposer.drafters}
        yield self._total("drafter_failures", "Errors that a drafter raised.", failures, "drafter")
        figures = self._figures
        if figures is None:
            return
        if figures.row_cost is not None:
            yield self._gauge("row_cost_tokens", "What one more row costs, in tokens given up.", figures.row_cost)
        text = "Tokens a second over plain decoding's, as planned."
        yield self._gauge("predicted_speedup", text, figures.predicted_speedup)
        if figures.observed_speedup is not None:
            yield self._gauge("observed_speedup", "The same in the latest steps.", figures.observed_speedup)
        yield self._gauge("plain_step_seconds", "A step without drafts, as estimated.", figures.plain_step_s)

    def _memory(self) -> Iterable[Metric]:
        plan = self._llm.engine.memory_plan
        cache = self._llm.engine.target.decoder.cache
        uses = ("weights", "workspace", "states", "drafter", "cache")
        planned = {use: getattr(plan, use) for use in uses}
        resident = getattr(cache, "resident_bytes", None)  # of native caches
        parts = {} if resident is None else {"reserved": plan.cache - plan.draft_cache, "resident": resident}
        text = "Bytes of the memory plan; the cache is reserved."
        yield self._gauges("memory_planned_bytes", text, planned, "use")
        text = "The target's cache: reserved, and resident once written."
        yield self._gauges("kv_cache_bytes", text, parts, "kind")
        yield self._gauges("drafter_texts_bytes", "Bytes of the texts that a drafter looks up.", self._texts, "drafter")
        yield self._gauges("process_resident_bytes", "Bytes of the process in memory.", resident_bytes(), "kind")

    # ---- making them -------------------------------------------------------------------------------------------------

    def _counter(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
        made = Counter(f"wager:{name}", help_text, ("model_name", *labels), registry=self.registry)
        return made if labels else made.labels(self._model)

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
        made = Histogram(f"wager:{name}", help_text, ("model_name",), registry=self.registry, buckets=buckets)
        return made.labels(self._model)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._filled(GaugeMetricFamily(f"wager:{name}", text, labels=("model_name",)), {(): value})

    def _gauges(self, name: str, text: str, values: Mapping[str, float], label: str) -> Metric:
        family = GaugeMetricFamily(f"wager:{name}", text, labels=("model_name", label))
        return self._filled(family, {(key,): value for key, value in values.items()})

    def _total(self, name: str, text: str, values: Mapping[Any, float], *labels: str) -> Metric:
        return self._filled(CounterMetricFamily(f"wager:{name}", text, labels=("model_name", *labels)), values)

    def _filled(self, family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[Any, float]) -> Metric:
        for labels, value in values.items():
            family.add_metric((self._model, *labels), value)
        return family


@dataclass(slots=True)
class StepTotals:
    """Steps, tokens that they emitted, for how many choices, their rows, and their seconds by stage."""

    steps: int = 0
    tokens: int = 0
    rounds: int = 0
    rows: int = 0
    stage_seconds: dict[str, float] = field(default_factory=dict)

    def add(self, record: StepRecord, deltas: Sequence[OutputDelta]) -> None:
        self.steps += 1
        self.tokens += record.emitted
        self.rounds += sum([bool(delta.token_ids) for delta in deltas])
        self.rows += record.rows
        for stage, seconds in record.seconds.items():
            self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + seconds


class WeightedHistogram:
    """Seconds by the `bounds` of their buckets, in ascending order; a value that equals a bound is below it."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], *, model: str) -> None:
        self._name = name
        self._text = text
        self._model = model
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, seconds: float, times: int) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += times
        self._sum += seconds * times

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        family = HistogramMetricFamily(self._name, self._text, labels=("model_name",))
        names = [*map(str, self._bounds), "+Inf"]
        family.add_metric((self._model,), list(zip(names, accumulate(self._counts), strict=True)), self._sum)
        yield family


def resident_bytes(status: Path = Path("/proc/self/status")) -> Mapping[str, int]:
    """Bytes in memory: `anonymous`, which are the process's own, and `file`, of mapped files, which the system can take
    back. Nothing where it does not say."""
    try:
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        anonymous, file, shared = (int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssFile", "RssShmem"))
    except (OSError, KeyError, ValueError):
        return {}
    return {"anonymous": anonymous, "file": file + shared}
