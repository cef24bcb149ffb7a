"""The simulated server: published latencies, synthetic and recorded requests, workloads, regret, uneven depths."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wager.arch import find_model
from wager.economics.acceptance import CURVES, DFLASH_SURVIVAL, MTP_SURVIVAL
from wager.economics.latency import LatencyModel
from wager.economics.policy.base import Policy
from wager.economics.policy.heuristics import FixedDepth
from wager.errors import UsageError
from wager.planner.cost import CostModel
from wager.planner.devices import find_device
from wager.planner.drafting import mtp_cost
from wager.simulation import comparison as replay
from wager.simulation.comparison import ReplaySetting
from wager.simulation.latency import PublishedLatency, RooflineLatency
from wager.simulation.server import SimulatedServer, SimulationResult, Workload
from wager.simulation.traces import RecordedTraces, SyntheticDrafter, SyntheticTraces, TraceSource
from wager.types import DraftDecision

LATENCY = PublishedLatency()


# economics reference, section 15: tokens a second by concurrency 1, 2, 4, ... 2048, and the best fixed depths
PLAIN = [1394, 2076, 2789, 3488, 4292, 5561, 8157, 14096, 25788, 45169, 72388, 103604]


BEST = {
    "mtp": [1618, 2263, 2925, 3680, 6197, 11701, 22073, 41889, 78841, 140324, 196811, 235818],
    "dflash": [1658, 2222, 2868, 4044, 7891, 15241, 28301, 50046, 80753, 102539, 112607, 114318],
}


DEPTHS = {"mtp": [1, 1, 1, 2, 8, 8, 8, 8, 8, 7, 4, 3], "dflash": [3, 2, 2, 15, 15, 15, 15, 15, 14, 8, 5, 4]}


def serve(
    traces: TraceSource, policy: Policy, workload: Workload, *, latency: LatencyModel = LATENCY
) -> SimulationResult:
    before = DraftDecision(policy.depth, policy.drafter) if isinstance(policy, FixedDepth) else DraftDecision(0)
    return SimulatedServer(traces, latency, policy=policy, workload=workload, drafted_before=before).run()


# ---- the published latencies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["mtp", "dflash"])
@pytest.mark.parametrize("row", range(12))
def test_the_published_rates_and_best_depths(drafter: str, row: int) -> None:
    users = 2**row
    context = 512 * users  # answers of 1024 tokens, on average half done
    curve = CURVES[drafter]

    def rate(depth: int) -> float:
        seconds = LATENCY.seconds(users * (depth + 1), users, context) + LATENCY.draft_seconds(drafter, users, depth)
        return users * (1 + sum(curve[:depth])) / seconds

    best = max(range(1, len(curve) + 1), key=rate)
    assert best == DEPTHS[drafter][row]
    assert rate(best) == pytest.approx(BEST[drafter][row], rel=0.04)
    assert rate(0) == pytest.approx(PLAIN[row], rel=0.01)


@pytest.mark.parametrize("row", range(12))
def test_how_near_the_cost_model_comes_to_the_published_rates(row: int) -> None:
    """The published step times take one maximum over a pass, so they are lower where its parts wait for different
    things; docs/policy.md states these bounds."""
    users = 2**row
    cost = CostModel(find_model("Qwen3.6-35B-A3B"), find_device("B200"))
    latency = RooflineLatency(cost, drafters={"mtp": mtp_cost(cost.model, cost.cluster)}, context=512)

    def rate(depth: int) -> float:
        seconds = latency.seconds(users * (depth + 1), users, 512 * users) + latency.draft_seconds("mtp", users, depth)
        return users * (1 + sum(MTP_SURVIVAL[:depth])) / seconds

    assert rate(0) == pytest.approx(PLAIN[row], rel=0.01 if users <= 256 else 0.13)
    best = max(map(rate, range(1, 9)))
    if users <= 32:
        assert best == pytest.approx(BEST["mtp"][row], rel=0.03)
    elif users >= 256:
        assert 0.65 < best / BEST["mtp"][row] < 0.83


def test_only_drafters_with_a_published_price_are_priced() -> None:
    assert PublishedLatency({"lookup": "free"}).draft_seconds("lookup", 4, 3) == 0
    assert PublishedLatency({"x": "mtp"}).draft_seconds("x", 4, 3) == LATENCY.draft_seconds("mtp", 4, 3) > 0
    with pytest.raises(UsageError, match="x"):
        LATENCY.draft_seconds("x", 4, 3)
    with pytest.raises(UsageError, match="block:4"):
        PublishedLatency({"x": "block:4"})


# ---- synthetic requests ---------------------------------------------------------------------------------------------


def synthetic(name: str, *, output: int = 256, drafter: SyntheticDrafter | None = None) -> SyntheticTraces:
    return SyntheticTraces({name: drafter or SyntheticDrafter(CURVES[name])}, output_tokens=output)


@pytest.mark.parametrize("name", ["mtp", "dflash"])
def test_drafts_survive_by_the_curve(name: str) -> None:
    runs = np.concatenate(
        [synthetic(name, output=300).request(number).drafts[name].num_matching for number in range(80)]
    )
    survival = [float((runs > depth).mean()) for depth in range(len(CURVES[name]))]
    assert survival == pytest.approx(CURVES[name], abs=0.035)


def test_confidence_separates_right_from_wrong_about_as_well_as_published_heads() -> None:
    said, right = [], []
    for number in range(200):
        guesses = synthetic("mtp").request(number).drafts["mtp"]
        assert guesses.scores is not None
        said.append(guesses.scores[:, 0])
        right.append(guesses.num_matching > 0)
    score, outcome = np.concatenate(said), np.concatenate(right)
    rank = score.argsort().argsort() + 1
    positive = outcome.sum()
    auc = (rank[outcome].sum() - positive * (positive + 1) / 2) / (positive * (~outcome).sum())
    assert 0.86 < auc < 0.93


def test_a_request_is_always_the_same_and_drafters_may_have_no_confidence() -> None:
    curves = {"mtp": SyntheticDrafter(MTP_SURVIVAL, score_sd=None), "dflash": SyntheticDrafter(DFLASH_SURVIVAL)}
    one, two = (SyntheticTraces(curves, output_tokens=64, prompt_tokens=9, seed=3).request(5) for _ in range(2))
    assert (one.prompt_tokens, one.output_tokens) == (two.prompt_tokens, two.output_tokens)
    assert one.drafts["mtp"].scores is None
    assert one.drafts["dflash"].num_matching.tolist() == two.drafts["dflash"].num_matching.tolist()
    other = SyntheticTraces(curves, output_tokens=64, prompt_tokens=9, seed=4).request(5)
    assert other.drafts["dflash"].num_matching.tolist() != one.drafts["dflash"].num_matching.tolist()


# ---- the server -----------------------------------------------------------------------------------------------------


def test_plain_decoding_takes_the_seconds_of_the_surface() -> None:
    result = serve(synthetic("mtp"), FixedDepth(0), Workload(concurrency=4, requests=8))
    assert (result.tokens, result.rounds, result.tau) == (8 * 256, 8 * 256, 1.0)
    decode = sum(LATENCY.seconds(4, 4, 4 * (1 + at)) for at in range(255))
    assert result.seconds == pytest.approx(2 * (decode + LATENCY.seconds(4, 4, 0)), rel=0.01)


def test_fixed_depth_gets_the_expected_tokens_of_the_curve() -> None:
    alike = SyntheticDrafter(MTP_SURVIVAL, request_sd=0, round_sd=0, token_sd=0)
    result = serve(synthetic("mtp", drafter=alike), FixedDepth(4), Workload(concurrency=8, rounds=12_000))
    assert result.tau == pytest.approx(1 + sum(MTP_SURVIVAL[:4]), rel=0.02)
    assert result.admitted == result.drafted
    assert result.accepted == result.tokens - result.rounds


def test_prompts_are_computed_in_chunks_before_the_first_token() -> None:
    slow = SyntheticTraces({"mtp": SyntheticDrafter(MTP_SURVIVAL)}, prompt_tokens=1200, output_tokens=4)
    result = serve(slow, FixedDepth(0), Workload(concurrency=1, requests=1, prefill_chunk=500))
    assert result.steps == 3 + 3, "three chunks, the last of which brings a token, then three more"
    chunks = LATENCY.seconds(500, 1, 0) + LATENCY.seconds(500, 1, 500) + LATENCY.seconds(200, 1, 1000)
    assert result.finished[0].first_token == pytest.approx(chunks)


def test_requests_that_arrive_on_their_own_wait_only_when_they_must() -> None:
    quiet = serve(synthetic("mtp"), FixedDepth(0), Workload(rate=0.5, requests=20))
    assert quiet.throughput == pytest.approx(0.5 * 256, rel=0.5)
    alone = 1 / LATENCY.seconds(1, 1, 128)
    assert 1 / np.mean(quiet.seconds_per_token()) == pytest.approx(alone, rel=0.15)
    busy = serve(synthetic("mtp"), FixedDepth(0), Workload(rate=1e4, requests=60, max_batch=4))
    arrived = [each.first_token - each.arrived for each in busy.finished]
    assert max(arrived) > 0.5 * busy.seconds, "with four places the last ones wait"


# ---- regret and uneven depths ---------------------------------------------------------------------------------------


def gain(setting: ReplaySetting, users: int, fixed: list[str], *, rounds: int) -> float:
    """Gain of adaptive over the best fixed depth, as a share."""
    points = replay.compare(setting, [*fixed, "adaptive"], [Workload(concurrency=users, rounds=rounds)])
    return -next(point.regret for point in points if point.policy == "adaptive")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("users", "rounds", "depths", "ahead"),
    [
        (1, 4000, [1, 2], 0.08),
        (8, 8000, [1, 2, 3], 0.07),
        (16, 8000, [6, 8], 0.01),
        (64, 10_000, [7, 8], -0.01),
        (512, 24_000, [7, 8], -0.01),
    ],
)
def test_of_the_published_head_the_best_fixed_depth_is_reached_or_beaten(
    users: int, rounds: int, depths: list[int], ahead: float
) -> None:
    setting = ReplaySetting(synthetic("mtp", output=1024), LATENCY)
    adaptive = gain(setting, users, ["none", *(f"fixed:mtp:{depth}" for depth in depths)], rounds=rounds)
    assert adaptive > ahead


@pytest.mark.slow
@pytest.mark.parametrize(
    ("users", "rounds", "depths", "ahead"),
    [
        (1, 4000, [2, 3], 0.2),
        (2, 5000, [2, 3], 0.2),
        (8, 8000, [3, 15], 0.2),
        (32, 8000, [15], -0.01),
        (256, 15_000, [12, 15], -0.01),
    ],
)
def test_of_the_published_block_drafter_uneven_depths_are_ten_to_thirty_per_cent_ahead_where_rows_are_expensive(
    users: int, rounds: int, depths: list[int], ahead: float
) -> None:
    setting = ReplaySetting(synthetic("dflash", output=1024), LATENCY)
    adaptive = gain(setting, users, ["none", *(f"fixed:dflash:{depth}" for depth in depths)], rounds=rounds)
    assert adaptive > ahead


@pytest.mark.slow
def test_without_confidence_nothing_is_lost() -> None:
    setting = ReplaySetting(synthetic("mtp", drafter=SyntheticDrafter(MTP_SURVIVAL, score_sd=None)), LATENCY)
    adaptive = gain(setting, 32, ["none", "fixed:mtp:7", "fixed:mtp:8"], rounds=12_000)
    assert adaptive > -0.01


@pytest.mark.slow
@pytest.mark.parametrize(("users", "rounds", "better"), [(32, 9000, "dflash"), (1024, 60_000, "mtp")])
def test_of_two_drafters_the_right_one_is_chosen(users: int, rounds: int, better: str) -> None:
    both = SyntheticTraces({name: SyntheticDrafter(CURVES[name]) for name in ("dflash", "mtp")}, output_tokens=256)
    load = Workload(concurrency=users, rounds=rounds)
    rates = {
        name: replay.simulate(ReplaySetting(each, LATENCY), "adaptive", load).throughput
        for name, each in (("both", both), ("mtp", synthetic("mtp")), ("dflash", synthetic("dflash")))
    }
    worse = "mtp" if better == "dflash" else "dflash"
    assert rates[better] > 1.1 * rates[worse]
    assert rates["both"] > 0.95 * rates[better], "the few steps of finding out included"


# ---- recorded requests ----------------------------------------------------------------------------------------------


def trace(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return path


def answer(tokens: int = 6, **changes: object) -> dict[str, object]:
    lookup = {"right": [2, 1, 0, 0, 1, 0], "scores": [[0.9, 0.8], [0.7], [], [0.4], [0.9], []]}
    return {"id": 1, "prompt_tokens": 3, "tokens": tokens, "drafters": {"lookup": {**lookup, **changes}}}


def test_a_trace_is_replayed_token_by_token(tmp_path: Path) -> None:
    recorded = RecordedTraces.read(trace(tmp_path / "t.jsonl", [answer(), answer()]))
    assert (len(recorded), recorded.max_depths()) == (2, {"lookup": 2})
    result = serve(
        recorded, FixedDepth(2), Workload(concurrency=1, requests=2), latency=PublishedLatency({"lookup": "free"})
    )
    # from 0: two right and one more; from 3: none right; from 4: one right and the end
    assert (result.tokens, result.rounds, result.drafted, result.accepted) == (12, 6, 8, 6)


# ---- side by side ---------------------------------------------------------------------------------------------------


def test_regret_and_frontier() -> None:
    setting = ReplaySetting(synthetic("mtp"), LATENCY, devices=2)
    loads = [Workload(concurrency=users, rounds=600) for users in (1, 8)]
    points = replay.compare(setting, ["none", "fixed:2", "threshold:0.5"], loads)
    assert [point.concurrency for point in points] == [1, 1, 1, 8, 8, 8]
    for point in points:
        best = max(p.throughput for p in points if p.concurrency == point.concurrency and p.policy != "threshold:0.5")
        assert point.regret == pytest.approx(1 - point.throughput / best)
        assert point.per_user == pytest.approx(point.throughput / (point.concurrency or 0))
        assert point.per_device == point.throughput / 2
        beaten = [p for p in points if p.per_user > point.per_user and p.per_device > point.per_device]
        assert point.frontier == (not beaten)
    assert replace(points[0], policy="x").as_dict()["policy"] == "x"


def test_where_requests_come_on_their_own_regret_is_in_a_users_speed() -> None:
    setting = ReplaySetting(synthetic("mtp"), LATENCY)
    points = replay.compare(setting, ["none", "fixed:mtp:1"], [Workload(rate=0.2, requests=6)])
    slow, fast = sorted(points, key=lambda point: point.per_user)
    assert (slow.policy, fast.regret) == ("none", 0.0)
    assert slow.regret == pytest.approx(1 - slow.per_user / fast.per_user)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("adaptve", "adaptive"),
        ("fixed", "fixed[:DRAFTER]:K"),
        ("fixed:x", "fixed[:DRAFTER]:K"),
        ("threshold:high", "threshold:0.4"),
        ("fixed:eagle:3", "mtp"),
        ("none:3", "none"),
    ],
)
def test_a_policy_that_is_not_known_is_named(name: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        replay.build_policy(name, ReplaySetting(synthetic("mtp"), LATENCY))
    assert hint in str(caught.value)


def test_every_drafter_has_its_fixed_depths() -> None:
    both: TraceSource = SyntheticTraces(
        {"mtp": SyntheticDrafter(MTP_SURVIVAL[:3]), "dflash": SyntheticDrafter(DFLASH_SURVIVAL[:2])}
    )
    assert replay.fixed_policies(ReplaySetting(both, LATENCY)) == [
        "none",
        "fixed:mtp:1",
        "fixed:mtp:2",
        "fixed:mtp:3",
        "fixed:dflash:1",
        "fixed:dflash:2",
    ]
    drafters = ReplaySetting(both, LATENCY).drafters()
    assert (drafters["mtp"].stops_early, drafters["dflash"].stops_early) == (True, False)
