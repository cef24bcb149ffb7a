"""The scheduler's decisions over a scripted engine: vLLM's order of calls, a drafter that is right as often as is
written, and a clock that counts the seconds of a step's rows and of drafting."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from wager.economics.policy.adaptive import Adaptive
from wager_vllm import compat
from wager_vllm.compat import Deployment
from wager_vllm.options import Options
from wager_vllm.scheduler import AdaptiveDepth

DEPTH = 5


class Request:
    """What the scheduler reads of vLLM's requests; `rate`: of its draft tokens that are right."""

    def __init__(self, name: str, rate: float, max_tokens: int) -> None:
        self.request_id, self.rate, self.max_tokens, self.cache_salt = name, rate, max_tokens, None
        self.num_prompt_tokens, self.num_computed_tokens, self.num_output_tokens = 8, 0, 0
        self.num_output_placeholders, self.is_prefill_chunk = 0, True
        self.spec_token_ids: list[int] = []

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    def is_finished(self) -> bool:
        return self.num_output_tokens >= self.max_tokens


class Engine:
    """vLLM's schedulers in small: as in v1/core/sched/scheduler.py and async_scheduler.py of 0.32, without blocks. What
    it drafts to without wager is `depth`."""

    asynchronous = False
    depth = DEPTH

    def __init__(self) -> None:
        self.num_spec_tokens, self.max_model_len, self.max_num_running_reqs = DEPTH, 1 << 20, 64
        self.dynamic_sd_lookup = None
        self.requests: dict[str, Request] = {}
        self.finished: set[str] = set()

    @property
    def running(self) -> list[Request]:
        return [request for request in self.requests.values() if not request.is_finished()]

    def schedule(self) -> Any:
        counts, drafts = {}, {}
        for request in self.running:
            new = request.num_tokens + len(request.spec_token_ids) + request.num_output_placeholders
            counts[request.request_id] = count = new - request.num_computed_tokens
            spec = count + request.num_computed_tokens - request.num_tokens - request.num_output_placeholders
            if spec > 0:
                drafts[request.request_id] = request.spec_token_ids[:spec]
            request.spec_token_ids = []
        output = SimpleNamespace(
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens=drafts,
            finished_req_ids=self.finished,
            num_spec_tokens_to_schedule=self.depth,
        )
        self.finished = set()
        self._update_after_schedule(output)
        return output

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        for name, count in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[name]
            request.num_computed_tokens += count
            expected = request.num_tokens + request.num_output_placeholders
            request.is_prefill_chunk = request.num_computed_tokens < expected
            if self.asynchronous and not request.is_prefill_chunk:
                drafted = len(scheduler_output.scheduled_spec_decode_tokens.get(name, ()))
                request.num_output_placeholders += 1 + drafted
                request.spec_token_ids = [-1] * scheduler_output.num_spec_tokens_to_schedule

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        for name, tokens in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests[name]
            if not request.is_finished() and not request.is_prefill_chunk:
                request.spec_token_ids = tokens

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> None:
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests[name]
            if request.is_finished():
                continue
            tokens = model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[name]]
            rejected = len(scheduler_output.scheduled_spec_decode_tokens.get(name, ())) + 1 - len(tokens)
            request.num_computed_tokens -= rejected
            if self.asynchronous:
                request.num_output_placeholders -= rejected + len(tokens)
            del tokens[request.max_tokens - request.num_output_tokens :]
            request.num_output_tokens += len(tokens)
            if request.is_finished():
                self.finished.add(name)


class AsynchronousEngine(Engine):
    asynchronous = True


class Scheduler(AdaptiveDepth, Engine):
    asynchronous = False


class AsynchronousScheduler(AdaptiveDepth, AsynchronousEngine):
    asynchronous = True


DEPLOYMENT = Deployment(
    version="0.32",
    device="toy",
    model="toy",
    tokenizer="toy",
    fingerprint="0",
    served_as="toy",
    dtype="float32",
    execution="eager",
    vocab=2,
    max_context=1 << 20,
    max_requests=64,
    max_rows=512,
    layout={"tensor": 1, "pipeline": 1, "data": 1},
    engine=0,
    depth=DEPTH,
    method="eagle3",
    leads=False,
)


def of_cpu(rows: int, depth: int, batch: int) -> float:
    """Weights are read once; from 8 rows on products take longer than that. A pass of the drafter for each depth."""
    return 0.02 + 0.0008 * rows + 0.0024 * max(0, rows - 8) + depth * (0.0024 + 0.0002 * batch)


class Run:
    """Steps of an engine, with a request for each of `rates`. A step takes `seconds(rows, depth, batch)`. What can be
    guessed is a matter of the text, so that runs of any depth are comparable."""

    def __init__(self, engine: Any, *rates: float, seconds: Callable[[int, int, int], float] = of_cpu) -> None:
        self.engine, self.seconds, self.now = engine, seconds, 0.0
        self.sampled: dict[str, int] = {}
        self.drafts: dict[str, list[int]] = {}
        self.depths: list[int] = []
        self.verified: list[dict[str, int]] = []
        self.add(*rates)
        if isinstance(engine, AdaptiveDepth):
            engine.clock = lambda: self.now
            engine.start(DEPLOYMENT, Options())

    def add(self, *rates: float, max_tokens: int = 100_000) -> None:
        for rate in rates:
            name = f"r{len(self.engine.requests)}"
            self.engine.requests[name] = Request(name, rate, max_tokens)

    def take(self, steps: int) -> float:
        """Tokens a second."""
        before = self.tokens, self.now
        pending: list[tuple[Any, Any]] = []
        for _ in range(steps):
            output = self.engine.schedule()
            pending.append((output, self._pass(output)))
            if not self.engine.asynchronous or len(pending) == 2:
                self._end(*pending.pop(0))
        for each in pending:
            self._end(*each)
        return (self.tokens - before[0]) / (self.now - before[1])

    @property
    def tokens(self) -> int:
        return sum([request.num_output_tokens for request in self.engine.requests.values()])

    def _pass(self, output: Any) -> Any:
        """The worker's: it verifies what it drafted in the step before, and drafts. 1 is a right token, 0 a wrong."""
        sampled, names = [], list(output.num_scheduled_tokens)
        for name in names:
            count = len(output.scheduled_spec_decode_tokens.get(name, ()))
            drafted = self.drafts.get(name, [])[:count]
            assert len(drafted) == count, "more is to be verified than was drafted"
            right = next((at for at, token in enumerate(drafted) if not token), count)
            sampled.append([1] * (right + 1))
            first = self.sampled[name] = self.sampled.get(name, 0) + right + 1
            places = range(first, first + output.num_spec_tokens_to_schedule)
            rate = self.engine.requests[name].rate
            self.drafts[name] = [int(random.Random(f"{name} {place}").random() < rate) for place in places]
        return SimpleNamespace(sampled_token_ids=sampled, req_id_to_index={name: at for at, name in enumerate(names)})

    def _end(self, output: Any, taken: Any) -> None:
        counts, depth = output.num_scheduled_tokens, output.num_spec_tokens_to_schedule
        self.now += self.seconds(output.total_num_scheduled_tokens, depth, len(counts))
        self.depths.append(depth)
        self.verified.append({name: len(tokens) for name, tokens in output.scheduled_spec_decode_tokens.items()})
        self.engine.update_from_output(output, taken)
        if not self.engine.asynchronous:
            tokens = [self.drafts[name][:] for name in counts]
            self.engine.update_draft_token_ids(SimpleNamespace(req_ids=list(counts), draft_token_ids=tokens))


def scaled(slow: float, draft: float) -> Callable[[int, int, int], float]:
    """Seconds of steps that take `slow` times as long as one would guess, and drafting in them `draft` times."""

    def seconds(rows: int, depth: int, requests: int) -> float:
        plain = of_cpu(rows, 0, requests)
        return slow * (plain + draft * (of_cpu(rows, depth, requests) - plain))

    return seconds


both = pytest.mark.parametrize("scheduler", [AsynchronousScheduler, Scheduler])


@pytest.fixture(autouse=True)
def no_stored_prices(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path))
    yield


def best_fixed(batch: int, steps: int, seconds: Callable[[int, int, int], float]) -> float:
    """Tokens a second of the best depth."""
    speeds = []
    for depth in range(DEPTH + 1):
        engine = Engine()
        engine.depth = depth
        run = Run(engine, *[0.7] * batch, seconds=seconds)
        run.take(100)
        speeds.append(run.take(steps))
    return max(speeds)


@pytest.mark.slow
@both
@pytest.mark.parametrize(
    ("batch", "slow", "draft"), [(4, 1.0, 1.0), (24, 1.0, 3.0), (1, 10.0, 1.0), (1, 0.2, 0.2), (24, 0.2, 1.0)]
)
def test_from_nothing_as_good_as_the_best_fixed_depth(
    scheduler: type[AdaptiveDepth], batch: int, slow: float, draft: float
) -> None:
    seconds = scaled(slow, draft)
    run = Run(scheduler(), *[0.7] * batch, seconds=seconds)
    run.take(100)
    speed, best = run.take(300), best_fixed(batch, 300, seconds)
    assert speed > 0.95 * best


@both
@pytest.mark.parametrize(("batch", "slow", "draft"), [(1, 10.0, 1.0), (4, 1.0, 1.0), (16, 0.2, 3.0)])
def test_a_cold_start_is_soon_as_good_as_a_warm_one(
    scheduler: type[AdaptiveDepth], batch: int, slow: float, draft: float
) -> None:
    """From the hundredth step on, whatever steps and drafting take, as after a thousand."""
    run = Run(scheduler(), *[0.7] * batch, seconds=scaled(slow, draft))
    run.take(100)
    cold = run.take(300)
    run.take(600)
    assert cold > 0.97 * run.take(600)


@both
def test_depth_follows_the_batch_down_to_off(scheduler: type[AdaptiveDepth]) -> None:
    run = Run(scheduler(), 0.7)
    run.take(100)
    alone = median(run.depths[-8:])  # now and then a step measures another
    run.add(*[0.7] * 31, max_tokens=120)
    run.take(90)
    assert max(run.depths[-8:]) == 0
    run.take(200)
    assert alone >= 2 <= median(run.depths[-8:])


@both
def test_a_request_that_comes_or_ends_is_no_new_plan_for_a_large_batch(
    scheduler: type[AdaptiveDepth], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 128 requests of which one came or ended in most steps, the policy took twice its time: it planned in each."""
    plans, choose = [], Adaptive._choose
    monkeypatch.setattr(Adaptive, "_choose", lambda *given: plans.append(given) or choose(*given))
    run = Run(scheduler(), *[0.5] * 32)
    run.take(100)
    plans.clear()
    for step in range(64):
        run.add(*[0.5] * (step % 3), max_tokens=3 + step % 7)
        run.take(1)
    assert 0 < len(plans) < 16


@both
def test_each_request_verifies_what_is_worth_its_rows(scheduler: type[AdaptiveDepth]) -> None:
    run = Run(scheduler(), 0.9, 0.9, 0.02, 0.02)
    run.take(200)
    easy = sum([step.get("r0", 0) + step.get("r1", 0) for step in run.verified[-50:]])
    hard = sum([step.get("r2", 0) + step.get("r3", 0) for step in run.verified[-50:]])
    assert easy > 100 > 4 * hard


def test_nothing_is_verified_that_follows_the_last_token() -> None:
    run = Run(Scheduler())
    run.add(1.0, max_tokens=80)
    request = run.engine.requests["r0"]
    run.take(12)
    while not request.is_finished():
        left = request.max_tokens - request.num_output_tokens
        run.take(1)
        assert run.verified[-1].get("r0", 0) < left
    assert max(step.get("r0", 0) for step in run.verified) == DEPTH


@both
def test_vllm_goes_on_where_the_policy_fails(
    scheduler: type[AdaptiveDepth], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(scheduler(), 0.7, 0.7)
    run.take(30)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(Adaptive, "observe", fail)
    run.take(30)
    assert set(run.depths[-20:]) == {DEPTH}
    assert len([record for record in caplog.records if "ZeroDivisionError: on purpose" in record.getMessage()]) == 1


@both
def test_engines_that_step_together_draft_to_one_depth(scheduler: type[AdaptiveDepth]) -> None:
    """The greatest batch decides, also where another engine would draft, or its policy has failed."""
    runs = [Run(scheduler(), 0.7), Run(scheduler(), *[0.7] * 24)]
    for _ in range(12):
        agreed = compat.elected(max(run.engine.vote for run in runs))
        for run in runs:
            run.engine.agreed = agreed
            run.take(16)
    assert set(runs[0].depths[-16:]) == set(runs[1].depths[-16:]) == {0}
    assert compat.elected(runs[0].engine.vote) >= 2
    runs[0].engine._decisions = None
    runs[0].take(16)
    assert set(runs[0].depths[-16:]) == {0}


def test_prices_are_kept_for_the_next_start(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(Scheduler(), 0.7, 0.7, 0.7, 0.7)
    run.take(600)
    again = Run(Scheduler(), 0.7, 0.7, 0.7, 0.7)
    learned, kept = run.engine._seconds, again.engine._seconds
    for surface in (learned, kept):
        surface.batch = 4
    for rows in (4, 8):
        assert kept.seconds(rows, 4, 0) == pytest.approx(learned.seconds(rows, 4, 0), rel=0.1)
    assert kept.draft_seconds("eagle3", 4, 1) == pytest.approx(0.0024 + 0.0008, rel=0.1)
    run = Run(Scheduler(), 0.7, 0.7, 0.7, 0.7, seconds=lambda *shape: 3 * of_cpu(*shape))
    run.take(60)
    assert "wrong or stale" in caplog.text
