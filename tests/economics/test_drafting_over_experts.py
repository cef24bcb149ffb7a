"""Mixtures of experts, whose drafters read fewer experts per sequence the more sequences draft: the adaptive policy
against the best fixed depth, on the cells of `wager replay --model MODEL --hardware H200 --curve RATE --concurrency
128,256 --drafter-shape mtp` (with `--ep 16` for DeepSeek-V3)."""

from __future__ import annotations

import pytest

from wager.planner import inputs as plan_inputs
from wager.planner.cost import Cluster, CostModel
from wager.planner.drafting import mtp_cost
from wager.simulation.comparison import ReplaySetting, build_policy
from wager.simulation.latency import RooflineLatency
from wager.simulation.server import SimulatedServer, Workload
from wager.simulation.traces import SyntheticDrafter, SyntheticTraces

WARM_UP, STEPS = 40, 60


BEST = {
    ("Qwen3-30B-A3B", 0.6, 128): 4,
    ("Qwen3-30B-A3B", 0.6, 256): 3,
    ("Qwen3-30B-A3B", 0.7, 128): 5,
    ("Qwen3-30B-A3B", 0.7, 256): 5,
    ("DeepSeek-V3", 0.6, 128): 1,
    ("DeepSeek-V3", 0.6, 256): 0,
    ("DeepSeek-V3", 0.7, 128): 1,
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
    cost = CostModel(
        plan_inputs.find_plan_model(model),
        Cluster(plan_inputs.find_hardware("H200"), ep=16 if model == "DeepSeek-V3" else 1),
    )
    latency = RooflineLatency(cost, drafters={"d": mtp_cost(cost, cost.cluster)}, context=513)
    setting = ReplaySetting(SyntheticTraces({"d": drafter}), latency)
    depth = BEST[model, rate, users]
    best = rate_of(setting, f"fixed:d:{depth}" if depth else "none", users)
    return 1 - rate_of(setting, "adaptive", users) / best


@pytest.mark.slow
@pytest.mark.parametrize(("model", "rate", "users"), BEST)
def test_it_loses_nothing_against_the_best_fixed_depth(model: str, rate: float, users: int) -> None:
    survival = tuple(rate**depth for depth in range(1, 9))
    assert regret(model, rate, users, SyntheticDrafter(survival)) < 0.005


@pytest.mark.parametrize(("rate", "users"), [(0.6, 128), (0.7, 256)])
def test_it_does_not_draft_too_deep_where_nothing_distinguishes_tokens(rate: float, users: int) -> None:
    """Every token is accepted at the same rate and has no score, so one depth is best for all."""
    survival = tuple(rate**depth for depth in range(1, 9))
    alike = SyntheticDrafter(survival, request_sd=0.0, round_sd=0.0, token_sd=0.0, score_sd=None)
    assert regret("Qwen3-30B-A3B", rate, users, alike) < 0.005
