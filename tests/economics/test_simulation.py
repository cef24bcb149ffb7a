"""The simulated server: what it charges and counts, arrivals by their times, memory by the cost model; published
latencies, synthetic and recorded requests; policies side by side, and against the best fixed depth.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from economics.published import PublishedLatency
from wager.arch import find_model
from wager.economics.acceptance import CURVES, MTP_SURVIVAL, survival
from wager.economics.latency import LatencyModel
from wager.economics.policy.heuristics import FixedDepth
from wager.planner.cost import Cluster, CostModel
from wager.planner.devices import find_device
from wager.planner.drafting import FREE, mtp_cost
from wager.planner.plan import Deployment
from wager.simulation import comparison
from wager.simulation.comparison import ReplaySetting, build_policy
from wager.simulation.latency import RooflineLatency
from wager.simulation.server import SimulatedServer, Workload
from wager.simulation.traces import (
    DraftTrace,
    RecordedTraces,
    RequestTrace,
    SyntheticDrafter,
    SyntheticTraces,
)
from wager.types import Draft, DraftDecision, Plan, Span, StepRecord


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
    result = SimulatedServer(traces, Prices(), policy=Recorded(0), workload=load).run()
    first, second = records[:2]
    # 4 + 2 prompt rows and 3 draft tokens, nothing cached; one request drafts in 3 passes
    assert (first.rows, first.sequences, first.drafted, first.accepted, first.emitted) == (9, 2, 3, 1, 2)
    assert first.seconds == {"draft": 3 * (7 + 1), "forward": 900 + 20 + 0}
    # the first: 1 row, 3 drafted, 5 cached; the second: 2 prompt rows, 1 drafted, 2 cached; passes for 2, 1, 1 of them
    assert (second.rows, second.context_lens) == (1 + 3 + 2 + 1, (5, 2))
    assert second.seconds == {"draft": (7 + 2) + 2 * (7 + 1), "forward": 700 + 20 + 7}
    assert result.seconds == sum(sum(record.seconds.values()) for record in records)
    assert result.tokens == 12


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


# ---- arrivals -------------------------------------------------------------------------------------------------------


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
    setting = ReplaySetting(traces, machine)
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


LATENCY = PublishedLatency()


# economics reference, section 15: tokens a second by concurrency 1, 2, 4, ... 2048, and the best fixed depths
PLAIN = [1394, 2076, 2789, 3488, 4292, 5561, 8157, 14096, 25788, 45169, 72388, 103604]


BEST = {
    "mtp": [1618, 2263, 2925, 3680, 6197, 11701, 22073, 41889, 78841, 140324, 196811, 235818],
    "dflash": [1658, 2222, 2868, 4044, 7891, 15241, 28301, 50046, 80753, 102539, 112607, 114318],
}


DEPTHS = {"mtp": [1, 1, 1, 2, 8, 8, 8, 8, 8, 7, 4, 3], "dflash": [3, 2, 2, 15, 15, 15, 15, 15, 14, 8, 5, 4]}


# ---- the published latencies ----------------------------------------------------------------------------------------


def rates(latency: LatencyModel, drafter: str, users: int) -> list[float]:
    """Tokens a second at every depth; answers of 1024 tokens are on average half done."""
    curve = CURVES[drafter]
    return [
        users
        * (1 + sum(curve[:depth]))
        / (latency.seconds(users * (depth + 1), users, 512 * users) + latency.draft_seconds(drafter, users, depth))
        for depth in range(len(curve) + 1)
    ]


@pytest.mark.parametrize("drafter", ["mtp", "dflash"])
def test_the_published_rates_and_best_depths(drafter: str) -> None:
    for row, plain in enumerate(PLAIN):
        found = rates(LATENCY, drafter, 2**row)
        best = max(range(1, len(found)), key=found.__getitem__)
        assert (best, found[best], found[0]) == (
            DEPTHS[drafter][row],
            pytest.approx(BEST[drafter][row], rel=0.04),
            pytest.approx(plain, rel=0.01),
        )


def test_how_near_the_cost_model_comes_to_the_published_rates() -> None:
    """The published step times take one maximum over a pass, so they are lower where its parts wait for different
    things; docs/policy.md states these bounds."""
    cost = CostModel(find_model("Qwen3.6-35B-A3B"), Cluster(find_device("B200")))
    latency = RooflineLatency(cost, drafters={"mtp": mtp_cost(cost, cost.cluster)}, context=512)
    for row, published in enumerate(PLAIN):
        plain, *drafting = rates(latency, "mtp", 2**row)
        assert plain == pytest.approx(published, rel=0.01 if 2**row <= 256 else 0.13)
        low, high = (0.97, 1.03) if 2**row <= 32 else (0.65, 0.83) if 2**row >= 256 else (0.65, 1.03)
        assert low < max(drafting) / BEST["mtp"][row] < high


# ---- synthetic requests ---------------------------------------------------------------------------------------------


MTP = SyntheticTraces({"mtp": SyntheticDrafter(CURVES["mtp"])}, output_tokens=256)


def test_confidence_separates_right_from_wrong_about_as_well_as_published_heads() -> None:
    said, right = [], []
    for number in range(200):
        guesses = MTP.request(number).drafts["mtp"]
        assert guesses.scores is not None
        said.append(guesses.scores[:, 0])
        right.append(guesses.num_matching > 0)
    score, outcome = np.concatenate(said), np.concatenate(right)
    rank = score.argsort().argsort() + 1
    positive = outcome.sum()
    auc = (rank[outcome].sum() - positive * (positive + 1) / 2) / (positive * (~outcome).sum())
    assert 0.86 < auc < 0.93


def test_a_request_is_always_the_same_and_drafters_may_have_no_confidence() -> None:
    curves = {"mtp": SyntheticDrafter(MTP_SURVIVAL, score_sd=None)}
    one, two, other = (
        SyntheticTraces(curves, output_tokens=64, seed=seed).request(5).drafts["mtp"] for seed in (3, 3, 4)
    )
    assert one.scores is None
    assert one.num_matching.tolist() == two.num_matching.tolist() != other.num_matching.tolist()


# ---- recorded requests ----------------------------------------------------------------------------------------------


def test_a_trace_is_replayed_token_by_token(tmp_path: Path) -> None:
    lookup = {"right": [2, 1, 0, 0, 1, 0], "scores": [[0.9, 0.8], [0.7], [], [0.4], [0.9], []]}
    row = json.dumps({"id": 1, "prompt_tokens": 3, "tokens": 6, "drafters": {"lookup": lookup}})
    (tmp_path / "t.jsonl").write_text(f"{row}\n{row}\n\n")
    recorded = RecordedTraces.read(tmp_path / "t.jsonl")
    assert (len(recorded), recorded.max_depths()) == (2, {"lookup": 2})
    latency, load = PublishedLatency({"lookup": "free"}), Workload(concurrency=1, requests=2)
    before = DraftDecision(2, "")
    result = SimulatedServer(recorded, latency, policy=FixedDepth(2), workload=load, drafted_before=before).run()
    # from 0: two right and one more; from 3: none right; from 4: one right and the end
    assert (result.tokens, result.rounds, result.drafted, result.accepted) == (12, 6, 8, 6)


# ---- side by side ---------------------------------------------------------------------------------------------------


def test_regret_and_frontier() -> None:
    setting = ReplaySetting(MTP, LATENCY, devices=2)
    loads = [Workload(concurrency=users, rounds=600) for users in (1, 8)]
    points = comparison.compare(setting, ["none", "fixed:2", "threshold:0.5"], loads)
    assert [point.concurrency for point in points] == [1, 1, 1, 8, 8, 8]
    for point in points:
        best = max(p.throughput for p in points if p.concurrency == point.concurrency and p.policy != "threshold:0.5")
        assert point.regret == pytest.approx(1 - point.throughput / best)
        assert point.per_user == pytest.approx(point.throughput / (point.concurrency or 0))
        assert point.per_device == point.throughput / 2
        beaten = [p for p in points if p.per_user > point.per_user and p.per_device > point.per_device]
        assert point.frontier == (not beaten)


def test_where_requests_come_on_their_own_regret_is_in_a_users_speed() -> None:
    setting = ReplaySetting(MTP, LATENCY)
    points = comparison.compare(setting, ["none", "fixed:mtp:1"], [Workload(rate=0.2, requests=6)])
    slow, fast = sorted(points, key=lambda point: point.per_user)
    assert (slow.policy, fast.regret) == ("none", 0.0)
    assert slow.regret == pytest.approx(1 - slow.per_user / fast.per_user)


# ---- mixtures of experts, whose drafters read fewer experts per sequence the more sequences draft ------------------


WARM_UP, STEPS = 40, 60


BEST_DEPTHS = {
    ("Qwen3-30B-A3B", 0.6, 128): 4,
    ("Qwen3-30B-A3B", 0.7, 256): 5,
    ("DeepSeek-V3", 0.6, 128): 1,
    ("DeepSeek-V3", 0.7, 256): 0,
}
"""The best fixed depth of each cell, as the command finds it."""


def rate_of(setting: ReplaySetting, name: str, users: int) -> float:
    """Tokens a second after the first steps, in which acceptance is learned."""
    load = Workload(concurrency=users)
    server = SimulatedServer(setting.traces, setting.latency, policy=build_policy(name, setting), workload=load)
    before = 0, 0.0
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            before = server.result.tokens, server.result.seconds
        server._add_arrivals()
        server._step()
    return (server.result.tokens - before[0]) / (server.result.seconds - before[1])


def regret(model: str, rate: float, users: int, drafter: SyntheticDrafter) -> float:
    """What adaptive loses against the best fixed depth, as a share."""
    cluster = Cluster(find_device("H200"), ep=16 if model == "DeepSeek-V3" else 1)
    cost = CostModel(find_model(model), cluster)
    latency = RooflineLatency(cost, drafters={"d": mtp_cost(cost, cost.cluster)}, context=513)
    setting = ReplaySetting(SyntheticTraces({"d": drafter}), latency)
    depth = BEST_DEPTHS[model, rate, users]
    best = rate_of(setting, f"fixed:d:{depth}" if depth else "none", users)
    return 1 - rate_of(setting, "adaptive", users) / best


@pytest.mark.slow
@pytest.mark.parametrize(("model", "rate", "users"), BEST_DEPTHS)
def test_it_loses_nothing_against_the_best_fixed_depth(model: str, rate: float, users: int) -> None:
    """Nor does it draft too deep where every token is accepted at the same rate and has no score, so that one depth is
    best for all."""
    drafter = SyntheticDrafter(survival(rate, 8))
    if model.startswith("Qwen3"):
        drafter = SyntheticDrafter(survival(rate, 8), request_sd=0.0, round_sd=0.0, token_sd=0.0, score_sd=None)
    assert regret(model, rate, users, drafter) < 0.005
