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
from wager.planner.cost import Cluster, CostModel
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


def synthetic(name: str, *, output: int = 256, drafter: SyntheticDrafter | None = None) -> SyntheticTraces:
    return SyntheticTraces({name: drafter or SyntheticDrafter(CURVES[name])}, output_tokens=output)


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


def test_requests_that_arrive_on_their_own_wait_only_when_they_must() -> None:
    quiet = serve(synthetic("mtp"), FixedDepth(0), Workload(rate=0.5, requests=20))
    assert quiet.throughput == pytest.approx(0.5 * 256, rel=0.5)
    alone = 1 / LATENCY.seconds(1, 1, 128)
    assert 1 / np.mean(quiet.seconds_per_token()) == pytest.approx(alone, rel=0.15)
    busy = serve(synthetic("mtp"), FixedDepth(0), Workload(rate=1e4, requests=60, max_batch=4))
    arrived = [each.first_token - each.arrived for each in busy.finished]
    assert max(arrived) > 0.5 * busy.seconds, "with four places the last ones wait"


# ---- regret and uneven depths ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "users", "rounds", "depths", "ahead"),
    [
        ("mtp", 1, 4000, [1, 2], 0.08),
        ("mtp", 8, 8000, [1, 2, 3], 0.07),
        ("mtp", 16, 8000, [6, 8], 0.01),
        ("mtp", 512, 24_000, [7, 8], -0.01),
        ("mtp without scores", 32, 12_000, [7, 8], -0.01),
        ("dflash", 1, 4000, [2, 3], 0.2),
        ("dflash", 8, 8000, [3, 15], 0.2),
        ("dflash", 32, 8000, [15], -0.01),
        ("dflash", 256, 15_000, [12, 15], -0.01),
    ],
)
def test_the_best_fixed_depth_is_reached_or_beaten(
    name: str, users: int, rounds: int, depths: list[int], ahead: float
) -> None:
    """Uneven depths of a block are ten to thirty per cent ahead where rows are expensive."""
    drafter, _, without = name.partition(" without ")
    made = SyntheticDrafter(CURVES[drafter], score_sd=None) if without else SyntheticDrafter(CURVES[drafter])
    setting = ReplaySetting(synthetic(drafter, output=256 if without else 1024, drafter=made), LATENCY)
    fixed = ["none", *(f"fixed:{drafter}:{depth}" for depth in depths)]
    points = replay.compare(setting, [*fixed, "adaptive"], [Workload(concurrency=users, rounds=rounds)])
    assert -points[-1].regret > ahead


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
