"""What the policy itself takes: less work where it does not pay."""

from __future__ import annotations

import pytest

from wager.economics.acceptance import MTP_SURVIVAL
from wager.economics.latency import LatencyModel
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import DrafterCapabilities
from wager.economics.policy.heuristics import FixedDepth
from wager.economics.policy.prices import PolicySeconds
from wager.economics.surface import LatencySurface
from wager.simulation.server import SimulatedServer, Workload
from wager.simulation.traces import SyntheticDrafter, SyntheticTraces
from wager.types import Draft, Span, StepRecord, Verdict

BUDGET = 10_000


class Rows(LatencyModel):
    """A step of 5 ms, and `price` of it for each row beyond those of plain decoding."""

    def __init__(self, price: float) -> None:
        self.price = price

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        return 5e-3 * (1 + self.price * max(0, rows - requests))

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        return 1e-6 * depth


# ---- less work where it does not pay --------------------------------------------------------------------------------


def served(price: float, *, users: int = 32, steps: int = 300) -> tuple[Adaptive, int, SimulatedServer]:
    """The policy after that many steps, how many of them were judged, and the server."""
    policy = Adaptive(Rows(price), drafters={"d": DrafterCapabilities(4)})
    judged = 0
    observe = policy.observe

    def counted(record: StepRecord) -> None:
        nonlocal judged
        judged += policy._step.judged
        observe(record)

    policy.observe = counted  # type: ignore[method-assign]
    traces = SyntheticTraces({"d": SyntheticDrafter(MTP_SURVIVAL[:4])}, output_tokens=200)
    load = Workload(concurrency=users, rounds=users * steps)
    server = SimulatedServer(traces, Rows(price), policy=policy, workload=load)
    server.run()
    return policy, judged, server


@pytest.mark.slow
def test_where_rows_are_free_hardly_any_step_is_judged_and_where_they_are_not_every_one() -> None:
    _, free, server = served(1e-6)
    assert free < 30, "of 300 steps"
    best = SimulatedServer(
        SyntheticTraces({"d": SyntheticDrafter(MTP_SURVIVAL[:4])}, output_tokens=200),
        Rows(1e-6),
        policy=FixedDepth(4),
        workload=Workload(concurrency=32, rounds=32 * 300),
    ).run()
    assert server.result.throughput > 0.995 * best.throughput
    _, dear, _ = served(0.02)
    assert dear > 250


def test_drafts_are_verified_as_they_are_only_if_they_fit_the_budget() -> None:
    policy, _, _ = served(1e-6)
    for _ in range(70):
        spans = [Span(f"x{i}", 50, (0,), True, 4) for i in range(32)]
        plan = policy.plan(spans, 40)
        drafts = {name: Draft.chain(name, range(each.depth), drafter="d") for name, each in plan.items()}
        assert sum(map(len, policy.admit(drafts, 40).values())) <= 40
        policy.observe(StepRecord(32, 32, 0, 0, 32, {"forward": 5e-3}, (50,) * 32))


def test_what_the_policy_takes_keeps_to_its_budget() -> None:
    own = PolicySeconds()
    assert own.judging_interval == 0
    for _ in range(400):
        own.observe(600e-6, step_seconds=10e-3, kind="unjudged")  # 6 %
        own.observe(4e-3, step_seconds=10e-3, kind="planned")
        own.observe(2.6e-3, step_seconds=10e-3, kind="judged")
        own.observe(2.6e-3, step_seconds=10e-3, kind="judged")
    assert own.pace == 4
    assert own.planning_interval == pytest.approx(4e-3 / (0.005 * 10e-3)), "planning takes 0.5 % of the time"
    assert own.judging == pytest.approx(2e-3)
    assert own.judging_interval == pytest.approx(2e-3 / (0.0025 * 10e-3), rel=0.01), "0.25 %, where it gains nothing"
    for _ in range(400):
        own.observe(10e-6, step_seconds=10e-3, kind="unjudged")
    assert own.pace == 1


def test_steps_without_room_for_drafts_are_plain_and_ask_for_nothing() -> None:
    surface = LatencySurface([1, 2, 4, 8], [5e-3, 5.1e-3, 5.2e-3, 5.4e-3])
    policy = Adaptive(surface, drafters={"d": DrafterCapabilities(6)})
    for number in range(300):
        room = 6 if number < 100 else 0
        plan = policy.plan([Span("r", 50 + number, (0,), True, room)], BUDGET)
        assert all(decision.depth <= room for decision in plan.values()) and (room or not plan)
        drafts = {name: Draft.chain(name, range(each.depth), drafter="d") for name, each in plan.items()}
        rows = 1 + sum(map(len, policy.admit(drafts, BUDGET).values()))
        policy.learn([Verdict("r", (0,) * (rows > 1), (0,) * (1 + (rows > 1)))])
        policy.observe(StepRecord(rows, 1, rows - 1, 0, 1, {"forward": surface.seconds(rows, 1, 50)}, (50 + number,)))
