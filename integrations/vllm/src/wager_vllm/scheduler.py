"""vLLM's schedulers with wager's policy over vLLM's own drafters (EAGLE-3, MTP, a draft model, DFlash): how many tokens
are drafted for the batch, and how many of them each request verifies, down to none.

vLLM drafts at the end of a step what the next one verifies, for all requests to one depth, which must be known when the
step is scheduled: so a step is planned while the one before it is still to be taken, or, with asynchronous scheduling,
two before it. What the drafter guessed is known to the synchronous scheduler alone. Which of its own classes vLLM would
have used is what `Scheduler` extends.

Where the policy fails, one line says so, and vLLM goes on with the depth that it was started with.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from wager.economics.latency import LatencyModel
from wager.economics.policy.base import DrafterCapabilities
from wager.economics.surface import DraftCurve, LatencySurface, StepPoint, covariance, locate
from wager.trace import Clock
from wager.types import NO_TENANT, Draft, Span, StepRecord
from wager_vllm import compat
from wager_vllm.compat import Deployment, log
from wager_vllm.decisions import Decisions, PlannedStep, TakenStep
from wager_vllm.metrics import FiguresFile
from wager_vllm.options import Options, read_options
from wager_vllm.prices import StepPrices

T = TypeVar("T")

# ---- seconds --------------------------------------------------------------------------------------------------------

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_ROWS = tuple(1 << power for power in range(12))
_TOKEN = 0.1  # of a plain step: what a draft token takes, before anything shows it
_LEARNED = 1.5  # uncertainty of prices that steps have corrected, in another run
_TOKEN_SD, _RELATED_SIZES = 0.4, 3.0  # see economics/surface.py: of its logarithm, and doublings of the batch


class BatchSurface(LatencySurface):
    """`surface` with vLLM's own `drafter`, that drafts for all requests of a step at its end, in a pass for each token
    (`parallel`: one pass for all), however few of the tokens are verified. Only the seconds of both together are known,
    so one filter follows both: steps that verify alike and draft differently tell them apart. `batch`: requests of the
    step that is planned."""

    def __init__(self, surface: LatencySurface, drafter: str, *, parallel: bool) -> None:
        self.batch, self._drafter, self._parallel = 1, drafter, parallel
        curve = surface.drafters.get(drafter)
        self._guessed = [
            curve.seconds(size, 1) if curve else _TOKEN * surface.seconds(size, size, 0) for size in _SIZES
        ]
        places = [math.log2(size) / _RELATED_SIZES for size in _SIZES]
        tokens = covariance([_TOKEN_SD] * len(_SIZES), related=slice(0, len(_SIZES)), places=places)
        values = surface.as_dict()
        costs = {name: values[name] for name in ("per_request", "per_context", "per_pair", "uncertainty")}
        super().__init__(_ROWS, surface.seconds_by_rows(_ROWS, 0, 0), **costs, others=tokens)
        self._correct()

    def _correct(self) -> None:
        offs = self._times.values()[-len(_SIZES) :]
        self._tokens = [guess * math.exp(off) for guess, off in zip(self._guessed, offs, strict=True)]

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        """For any number of requests what it takes for all."""
        return sum(self._token_slopes(self.batch, depth)) if requests and depth else 0.0

    def draft_seconds_by_depth(self, drafter: str, requests: int, depth: int) -> list[float]:
        return LatencyModel.draft_seconds_by_depth(self, drafter, requests, depth)

    def _token_slopes(self, requests: int, depth: float) -> list[float]:
        right, share = locate(_SIZES, requests)
        slopes, passes = [0.0] * len(_SIZES), min(1.0, depth) if self._parallel else depth
        for size, weight in ((right - 1, 1 - share), (right, share)) if right else ((0, 1.0),):
            slopes[size] = weight * passes * self.scale * self._tokens[size]
        return slopes

    def _slopes_of_both(self, rows: int, requests: int, context_sum: int, depth: float) -> list[float]:
        scale, *others = self._times.slopes(rows, requests, context_sum)
        tokens = self._token_slopes(requests, depth)
        return [scale + sum(tokens), *others, *tokens]

    def observe(self, record: StepRecord) -> None:
        """Not what the policy shows, which knows nothing of what is drafted for the next step."""

    def observe_draft(self, drafter: str, requests: int, depth: int, *, seconds: float) -> None:
        """Nor this."""

    def observe_both(self, point: StepPoint, *, depth: int) -> None:
        """Correct from a step that decoded alone, and at whose end `depth` tokens were drafted."""
        slopes = self._slopes_of_both(point.rows, point.requests, point.context_sum, depth)
        expected = slopes[0]
        self._times.update([slope / expected for slope in slopes], math.log(point.seconds / expected))
        self._correct()

    def difference_deviations(
        self, rows: int, others: Sequence[int], *, requests: int, context_sum: int
    ) -> list[float]:
        one, *several = [
            self._slopes_of_both(count, requests, context_sum, max(0.0, count / requests - 1))
            for count in (rows, *others)
        ]
        return [self._times.deviation([b - a for a, b in zip(one, other, strict=True)]) for other in several]

    def as_dict(self) -> dict[str, Any]:
        per_token = [self.scale * token for token in self._tokens]
        self.drafters = {self._drafter: DraftCurve(_SIZES, [0.0] * len(_SIZES), per_token)}
        return {**super().as_dict(), "uncertainty": min(self.uncertainty, _LEARNED)}


@dataclass(slots=True)
class ScheduledStep:
    """A step that vLLM was given. `planned` verifies its draft tokens (None: it has none), `following` those that are
    drafted at its end, to `depth`; `verified`: draft tokens of each request."""

    output: Any
    begun: float
    rows: int
    context_lens: tuple[int, ...]
    verified: Mapping[str, int]
    planned: PlannedStep | None
    following: PlannedStep
    depth: int


_SCHEDULER: Any = object  # one of vLLM's comes between


class AdaptiveDepth(_SCHEDULER):  # type: ignore[misc]
    """Put before one of vLLM's schedulers (`compat.scheduler_base`), whose methods it calls. `asynchronous`: steps are
    scheduled before the one before them has ended, so that draft tokens are counted, not known. `agreed`: the depth of
    all engines whose workers wait for one another in every pass (data parallelism of experts), None without any; they
    vote for it every few steps, and that of the greatest batch is taken, since the others wait for it anyway."""

    asynchronous: ClassVar[bool]
    dynamic_sd_lookup: list[int] | None  # vLLM's: depth by requests in a step
    clock: Clock = time.perf_counter

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if self.dynamic_sd_lookup is None:  # vLLM is not to fill new requests up to one depth
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        self._decisions: Decisions | None = None  # None: vLLM decides
        self._steps: deque[ScheduledStep] = deque()
        self._plans: dict[str, PlannedStep] = {}  # by request, the step that verifies its next draft tokens
        self._latest: ScheduledStep | None = None  # the last one that was taken
        self._batch = 0  # requests of a step, when prices were last asked for
        self._ended = 0.0  # when the last one was taken
        self._busy = False  # whether requests were left then
        self.agreed: int | None = None
        self.vote = 0

    def start(self, deployment: Deployment, options: Options) -> None:
        """Decide from now on."""
        self._depth, self._drafter = min(deployment.depth, options.max_depth), deployment.method
        self.agreed = deployment.depth if deployment.in_step else None
        # what is measured here holds for steps with this drafter; it is learned from the steps themselves
        own = replace(deployment, leads=True, execution=f"{deployment.execution}, {deployment.method}")
        learned = options.model_copy(update={"measure": "never"})
        self._prices = StepPrices(own, learned, changed=self._use, clock=self.clock)
        self._prices.surface = self._seconds
        self._figures = FiguresFile(own, clock=self.clock)
        self._decisions = Decisions(
            self._seconds,
            {self._drafter: DrafterCapabilities(self._depth)},
            max_rows=deployment.max_rows,
            objective=options.aim,
            clock=self.clock,
        )
        log.info(
            "wager decides over %s, at most %d tokens; prices from %s.", self._drafter, self._depth, self._prices.source
        )

    def _use(self, surface: LatencySurface) -> None:
        self._seconds = BatchSurface(surface, self._drafter, parallel=self._drafter == "dflash")

    def _attempt(self, decide: Callable[..., T], *given: Any) -> T | None:
        """None where vLLM decides, now that this has failed or before."""
        if self._decisions is None:
            return None
        try:
            return decide(self._decisions, *given)
        except Exception as error:
            self._decisions = None
            reason = f"{type(error).__name__}: {error}"
            log.error("wager failed, and vLLM goes on with %d draft tokens: %s", self._depth, reason, exc_info=True)
            self._figures.stopped(reason)
            return None

    # ---- called by vLLM ---------------------------------------------------------------------------------------------

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        if self.agreed is not None:
            scheduler_output.num_spec_tokens_to_schedule = self.agreed
        following = self._attempt(self._plan, scheduler_output)
        super()._update_after_schedule(scheduler_output)
        if self.asynchronous and following is not None:
            self._attempt(self._reserve, following, scheduler_output)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        self._attempt(self._choose, draft_token_ids)
        super().update_draft_token_ids(draft_token_ids)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self._attempt(self._learn, scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._busy = bool(self.running)
        return outputs

    # ---- a step -----------------------------------------------------------------------------------------------------

    def _plan(self, decisions: Decisions, output: Any) -> PlannedStep | None:
        """Plan the step that verifies what this one drafts, and tell vLLM how deep that is."""
        for request in output.finished_req_ids:
            decisions.end(request)
            self._plans.pop(request, None)
        counts = output.num_scheduled_tokens
        if not counts:
            return None
        requests = {name: self.requests[name] for name in counts}
        spans = [span for name, request in requests.items() if (span := self._span(request, counts[name]))]
        for span in spans:
            if span.seq_id not in decisions:
                decisions.begin(span.seq_id, tenant=requests[span.seq_id].cache_salt or NO_TENANT)
        self._seconds.batch = len(counts)
        if 8 * abs(len(counts) - self._batch) > self._batch:  # drafting for a few more or fewer takes about as long
            self._batch = len(counts)
            decisions.forget_prices()
        plan = decisions.plan(spans)
        deepest = max([decision.depth for decision in plan.values()], default=0)
        if self.agreed is None:
            output.num_spec_tokens_to_schedule = min(output.num_spec_tokens_to_schedule, deepest)
        following, depth = decisions.planned, output.num_spec_tokens_to_schedule
        if following.step.measured_depth is None:  # what is done to learn is not voted for
            wanted = [each.depth for name, each in plan.items() if name not in following.step.explored]
            self.vote = compat.vote(len(spans), max(wanted, default=0))
        following.shorten(depth)
        found = [self._plans[name] for name in counts if name in self._plans]
        step = ScheduledStep(
            output=output,
            begun=self.clock(),
            rows=output.total_num_scheduled_tokens,
            context_lens=tuple([request.num_computed_tokens for request in requests.values()]),
            verified={name: len(tokens) for name, tokens in output.scheduled_spec_decode_tokens.items()},
            planned=max(set(found), key=found.count, default=None),
            following=following,
            depth=depth,
        )
        self._steps.append(step)
        self._plans.update(dict.fromkeys(counts, following))
        return following

    def _span(self, request: Any, scheduled: int) -> Span | None:
        """The request as it is in the next step; None if its prompt is not computed by then, or it has ended: each step
        on the way gives it a token at least."""
        computed = request.num_computed_tokens + scheduled
        known = request.num_output_tokens + len(self._steps) + 1
        if computed < request.num_tokens + request.num_output_placeholders or known >= request.max_tokens:
            return None
        room = min(request.max_tokens - known, self.max_model_len - computed - 1) - 1
        return Span(request.request_id, computed, (0,), True, max(0, min(room, self._depth)))

    def _choose(self, decisions: Decisions, drafts: Any) -> None:
        """Leave of each request's draft tokens those that are worth their rows."""
        if self._latest is None:
            return
        following, found = self._latest.following, {}
        by_request = dict(zip(drafts.req_ids, drafts.draft_token_ids, strict=True))
        for name, tokens in by_request.items():
            decision, request = following.plan.get(name), self.requests.get(name)
            if decision is not None and tokens and request is not None and not request.is_finished():
                found[name] = Draft.chain(name, tokens[: decision.depth], drafter=decision.drafter)
        admitted = decisions.admit(found, seconds=following.draft_seconds, planned=following)
        for name, tokens in by_request.items():
            request = self.requests.get(name)
            left = max(0, request.max_tokens - request.num_output_tokens - 1) if request is not None else 0
            del tokens[min(len(admitted.get(name, ())), left) :]

    def _reserve(self, decisions: Decisions, following: PlannedStep, output: Any) -> None:
        """The same before anything is drafted: room for the tokens, as many as may be worth their rows."""
        drafts = {
            name: Draft.chain(name, [-1] * decision.depth, drafter=decision.drafter)
            for name, decision in following.plan.items()
        }
        admitted = decisions.admit(drafts, seconds=0.0, planned=following)
        for name in output.num_scheduled_tokens:
            request = self.requests[name]
            if not request.is_prefill_chunk:
                request.spec_token_ids = request.spec_token_ids[: len(admitted.get(name, ()))]

    def _learn(self, decisions: Decisions, output: Any, taken: Any) -> None:
        """What the step gave, and what it took since the one before it had ended."""
        while self._steps and self._steps[0].output is not output:
            self._steps.popleft()  # was never taken
        if not self._steps:
            return
        step, now = self._steps.popleft(), self.clock()
        seconds = now - (self._ended if self._busy else step.begun)
        self._ended, self._latest = now, step
        requests = self._seconds.batch = len(step.context_lens)
        drafting = min(seconds, self._seconds.draft_seconds(self._drafter, requests, step.depth))
        step.following.draft_seconds = drafting
        if seconds > drafting and step.rows == requests + sum(step.verified.values()):  # no prompt was computed
            shape = step.rows, requests, sum(step.context_lens)
            self._seconds.observe_both(StepPoint(*shape, seconds), depth=step.depth)
            self._prices.observe(StepPoint(*shape, seconds - drafting))
        if step.planned is not None:
            at, sampled = taken.req_id_to_index, taken.sampled_token_ids
            emitted = {name: sampled[at[name]] for name in output.num_scheduled_tokens} if sampled else {}
            record = TakenStep(step.rows, step.context_lens, seconds - drafting, step.verified, emitted)
            decisions.learn(record, planned=step.planned)
        self._figures.update(decisions, self._prices, failed=())


def Scheduler(*, vllm_config: Any, **named: Any) -> Any:
    """The scheduler that vLLM would have used, with wager's decisions where there is something to decide."""
    base = compat.scheduler_base(vllm_config)
    if not compat.usable():
        return base(vllm_config=vllm_config, **named)
    if not compat.drafts_by_batch(vllm_config):
        log.warning(
            "wager_vllm.Scheduler decides over EAGLE, MTP, draft models and DFlash; without one of these in "
            "--speculative-config it does nothing."
        )
        return base(vllm_config=vllm_config, **named)
    options, deployment = read_options(), compat.deployment(vllm_config)
    if compat.needs_table(vllm_config):
        log.warning(
            "vLLM does not know that depths vary: add to --speculative-config "
            '"num_speculative_tokens_per_batch_size": [[1, %d, %d]].',
            deployment.max_requests,
            deployment.depth,
        )
    if deployment.in_step:
        compat.install_vote()
    kind = type("Scheduler", (AdaptiveDepth, base), {"asynchronous": vllm_config.scheduler_config.async_scheduling})
    made = kind(vllm_config=vllm_config, **named)
    made.start(deployment, options)
    return made
