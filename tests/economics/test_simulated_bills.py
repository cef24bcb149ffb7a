"""What the simulated server charges and counts: steps by the latency model, the policy's own time, tokens by the curve,
arrivals by their times, memory by the cost model.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
import pytest

from wager.arch import find_model
from wager.economics.acceptance import CURVES, survival
from wager.economics.latency import LatencyModel
from wager.economics.policy.heuristics import FixedDepth
from wager.planner.cost import Cluster, CostModel
from wager.planner.devices import find_device
from wager.planner.drafting import FREE, mtp_cost
from wager.planner.plan import Deployment
from wager.simulation import comparison
from wager.simulation.comparison import ReplaySetting
from wager.simulation.latency import PolicyClock, RooflineLatency, UncountedLatency
from wager.simulation.server import DailyLoad, SimulatedServer, Workload
from wager.simulation.traces import DraftTrace, RecordedTraces, RequestTrace, SyntheticDrafter, SyntheticTraces
from wager.types import POLICY_STAGE, Draft, DraftDecision, Plan, Span, StepRecord


class Prices(LatencyModel):
    """Seconds that a test can add up by hand: 100 rows + 10 requests + cached positions; drafting 7 a pass and 1 a
    request and pass."""

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        return 100.0 * rows + 10.0 * requests + context_sum

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        return float((7 + requests) * depth)


def answers(*lengths: tuple[int, int], matching: Sequence[int]) -> RecordedTraces:
    """Recorded answers of (prompt, answer) tokens; at every position 3 tokens are drafted, the given ones match."""
    requests = []
    for prompt, output in lengths:
        right = np.minimum(np.resize(np.array(matching), output), np.arange(output, 0, -1)).astype(np.int16)
        draft = DraftTrace(np.full(output, 3, np.int16), right, None)
        requests.append(RequestTrace(prompt, output, {"d": draft}))
    return RecordedTraces(requests)


class Uneven(FixedDepth):
    """The first sequence drafts 3 deep, the others 1; all of it is verified."""

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        decoding = [span for span in spans if span.needs_logits and span.max_draft_tokens]
        return {
            span.seq_id: DraftDecision(min(span.max_draft_tokens, 1 if place else 3), "d")
            for place, span in enumerate(decoding)
        }

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        return drafts


# ---- the bill of a step ---------------------------------------------------------------------------------------------


def test_a_step_is_billed_as_the_latency_model_says() -> None:
    """Two requests of 4 prompt and 6 answer tokens, chunks of 6 rows, the first token of a draft matches.

    Step 1: prompts of 4 and 2 rows. The first may draft: 3 deep. Step 2: the other's last 2 prompt rows join; the
    first goes on from 4 + 3 rows cached but those of the last token.
    """
    records: list[StepRecord] = []

    class Recorded(Uneven):
        def observe(self, record: StepRecord) -> None:
            records.append(record)

    traces = answers((4, 6), (4, 6), matching=[1])
    load = Workload(concurrency=2, requests=2, prefill_chunk=6)
    result = SimulatedServer(traces, Prices(), policy=Recorded(0), workload=load, clock=PolicyClock(0.5)).run()
    first, second = records[:2]
    # 4 + 2 prompt rows and 3 draft tokens, nothing cached; one request drafts in 3 passes
    assert (first.rows, first.sequences, first.drafted, first.accepted, first.emitted) == (9, 2, 3, 1, 2)
    assert first.seconds == {POLICY_STAGE: 0.5, "draft": 3 * (7 + 1), "forward": 900 + 20 + 0}
    # the first: 1 row, 3 drafted, 5 cached; the second: 2 prompt rows, 1 drafted, 2 cached; passes for 2, 1, 1 of them
    assert (second.rows, second.context_lens) == (1 + 3 + 2 + 1, (5, 2))
    assert second.seconds == {POLICY_STAGE: 0.5, "draft": (7 + 2) + 2 * (7 + 1), "forward": 700 + 20 + 7}
    assert result.seconds == sum(sum(record.seconds.values()) for record in records)
    assert result.tokens == 12
    assert result.policy_seconds == 0.5 * len(records)


def test_a_drafter_that_stops_early_is_billed_its_passes() -> None:
    class Stops(Uneven):
        def plan(self, spans: Sequence[Span], budget: int) -> Plan:
            return {span.seq_id: DraftDecision(3, "d", min_survival=0.5) for span in spans if span.max_draft_tokens > 2}

    scores = np.array([[0.9, 0.4, 0.1]] * 4, np.float32)
    draft = DraftTrace(np.full(4, 3, np.int16), np.zeros(4, np.int16), scores)
    traces = RecordedTraces([RequestTrace(1, 4, {"d": draft})])
    load = Workload(concurrency=1, requests=1)
    result = SimulatedServer(traces, Prices(), policy=Stops(0), workload=load).run()
    assert result.drafted == 2, "the second token fell below and is the last"
    assert result.draft_seconds == 2 * (7 + 1)


# ---- the policy's own time ------------------------------------------------------------------------------------------


class Slow(FixedDepth):
    """Computes for 3 ms when it plans and 2 ms when it observes."""

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        compute(3e-3)
        return super().plan(spans, budget)

    def observe(self, record: StepRecord) -> None:
        compute(2e-3)


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_what_a_policy_computes_is_charged_to_the_clock() -> None:
    traces = answers((1, 10), matching=[0])
    load = Workload(concurrency=1, requests=1)
    free = SimulatedServer(traces, Prices(), policy=Slow(0), workload=load).run()
    charged = SimulatedServer(traces, Prices(), policy=Slow(0), workload=load, clock=PolicyClock()).run()
    assert free.policy_seconds == 0
    assert 10 * 3e-3 + 9 * 2e-3 <= charged.policy_seconds < 0.08, "the last observation belongs to no step"
    assert charged.seconds - free.seconds == pytest.approx(charged.policy_seconds, rel=1e-6)


def test_waiting_is_not_charged_and_neither_is_the_latency_model() -> None:
    clock = PolicyClock()
    clock.count(lambda: time.sleep(0.05))
    assert clock.take() < 0.02

    class SlowPrices(Prices):
        def seconds(self, rows: int, requests: int, context_sum: int) -> float:
            compute(0.02)
            return super().seconds(rows, requests, context_sum)

    asked = UncountedLatency(SlowPrices(), clock)
    assert clock.count(lambda: asked.seconds(2, 1, 5)) == Prices().seconds(2, 1, 5)
    assert 0 <= clock.take() < 0.01


# ---- synthetic texts keep their curve -------------------------------------------------------------------------------


KEPT = {**CURVES, "0.6": survival(0.6, 8), "0.9": survival(0.9, 8), "steep": (0.9, 0.5, 0.1, 0.02)}


@pytest.mark.parametrize("name", KEPT)
def test_over_rounds_every_depth_yields_the_tokens_of_the_curve(name: str) -> None:
    """Requests of tau_r tokens a round take 1 / tau_r rounds a token: over rounds the mean is the harmonic one."""
    source = SyntheticTraces({name: SyntheticDrafter(KEPT[name])}, output_tokens=256)
    drafts = [source.request(number).drafts[name] for number in range(800)]
    for depth in range(1, len(KEPT[name]) + 1):
        tau = 1 / np.mean([1 / (1 + np.minimum(draft.num_matching, depth).mean()) for draft in drafts])
        assert tau == pytest.approx(1 + sum(KEPT[name][:depth]), rel=0.008), depth


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "depth", "users"),
    [("mtp", 1, 4), ("mtp", 8, 512), ("dflash", 15, 16), ("dflash", 6, 64), ("0.6", 4, 16), ("steep", 3, 256)],
)
def test_a_server_at_a_fixed_depth_has_the_tau_of_the_curve(name: str, depth: int, users: int) -> None:
    traces = SyntheticTraces({name: SyntheticDrafter(KEPT[name])})
    load = Workload(concurrency=users, rounds=max(24_000, 40 * users))
    point = comparison.simulate(ReplaySetting(traces, Prices()), f"fixed:{depth}", load)
    assert point.tau == pytest.approx(1 + sum(KEPT[name][:depth]), rel=0.015)


# ---- arrivals -------------------------------------------------------------------------------------------------------


def test_a_day_has_its_requests_in_its_middle() -> None:
    day = DailyLoad(peak=30, low=2, seconds=100)
    assert [day.rate(at) for at in (0, 50, 25)] == pytest.approx([2, 30, 16])
    load = Workload(day=day, requests=10)
    times = np.array(list(islice(load.arrival_times(np.random.default_rng(0)), 8000)))
    assert (np.diff(times) > 0).all()
    whole = times[times < 400]  # four days, 16 requests a second on average
    assert len(whole) == pytest.approx(400 * 16, rel=0.05)
    counts = np.histogram(whole % 100, bins=4, range=(0, 100))[0] / 4
    # integral of the rate over the first quarter: 25 * 16 - 14 * 100 / (2 pi)
    assert counts[[0, 3]] == pytest.approx(25 * 16 - 14 * 100 / (2 * np.pi), rel=0.12)
    assert counts[[1, 2]] == pytest.approx(25 * 16 + 14 * 100 / (2 * np.pi), rel=0.12)


def test_recorded_arrivals_start_when_they_were_recorded() -> None:
    traces = answers((1, 2), matching=[0])
    load = Workload(arrivals=(0.0, 1000.0, 1000.0))
    result = SimulatedServer(traces, Prices(), policy=FixedDepth(0), workload=load).run()
    assert [times.arrived for times in result.finished] == [0.0, 1000.0, 1000.0]
    alone = (100 + 10) + (100 + 10 + 1)
    together = (200 + 20) + (200 + 20 + 2)
    assert result.finished[0].last_token == alone
    assert result.seconds == 1000 + together


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_memory_is_that_of_plan_in_the_fullest_step() -> None:
    cost = CostModel(find_model("Qwen3-8B"), Cluster(find_device("H100")))
    drafter = mtp_cost(cost, cost.cluster)
    machine = RooflineLatency(cost, drafters={"mtp": drafter, "free": FREE}, context=100)
    survives = SyntheticDrafter(CURVES["mtp"])
    traces = SyntheticTraces({"mtp": survives, "free": survives}, prompt_tokens=2000, output_tokens=4)
    setting = ReplaySetting(traces, Prices(), machine=machine)
    load = Workload(concurrency=3, requests=3, prefill_chunk=9000)
    plain, drafting = (comparison.simulate(setting, name, load).memory for name in ("none", "fixed:mtp:1"))
    assert plain is not None
    assert drafting is not None
    mean = 2000 + 3 - 1  # the last step of plain decoding: three answer tokens are known, and the last one's keys not
    assert plain == Deployment(cost, FREE).footprint(batch=3, context=mean)
    assert drafting.drafter == Deployment(cost, drafter).footprint(batch=3, context=2000).drafter
    both = comparison.simulate(setting, "adaptive", load).memory
    assert both is not None
    assert both.drafter == drafting.drafter, "the free one has no weights"
