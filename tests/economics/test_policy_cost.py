"""What the policy itself takes: the same decisions by arrays as one by one, and less work where it does not pay."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wager.economics.acceptance import MTP_SURVIVAL, AcceptanceModel
from wager.economics.latency import LatencyCache, StaticLatency
from wager.economics.policy import judging
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.admission import select, select_prefixes
from wager.economics.policy.base import DrafterCapabilities
from wager.economics.policy.heuristics import FixedDepth
from wager.economics.policy.own_seconds import OwnSeconds
from wager.economics.policy.plan_choice import shared_seconds
from wager.economics.surface import LatencySurface
from wager.simulation.latency import PublishedLatency
from wager.simulation.server import SimulatedServer, Workload
from wager.simulation.traces import SyntheticDrafter, SyntheticTraces
from wager.types import Draft, Span, StepRecord, Verdict

BUDGET = 10_000


class Rows(StaticLatency):
    """A step of 5 ms, and `price` of it for each row beyond those of plain decoding."""

    def __init__(self, price: float) -> None:
        self.price = price

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        return 5e-3 * (1 + self.price * max(0, rows - requests))

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        return 1e-6 * depth


# ---- the same by arrays as one by one -------------------------------------------------------------------------------

chains = st.lists(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5), min_size=1, max_size=8)


@settings(max_examples=80, deadline=None)
@given(chains, st.integers(0, 40), st.floats(0.0, 0.6))
def test_prefixes_are_selected_as_tokens_are(rates: list[list[float]], limit: int, price: float) -> None:
    survival = [np.cumprod(chain).tolist() for chain in rates]
    gains = np.zeros((len(rates), max(map(len, rates))))
    for row, chain in enumerate(survival):
        gains[row, : len(chain)] = chain
    flat = [gain for chain in survival for gain in chain]
    seconds = [price * rows for rows in range(len(flat) + 1)]
    one, many = (
        select(flat, seconds, goodput=1.0, limit=limit),
        select_prefixes(gains, seconds, goodput=1.0, limit=limit),
    )
    assert many.count == len(one.taken) == int(many.lengths.sum())
    assert (many.gain, many.cut) == (pytest.approx(one.gain), one.cut if one.cut is None else pytest.approx(one.cut))
    assert (many.lengths <= [len(chain) for chain in survival]).all()
    everything = sum(flat) - seconds[-1]
    profit = many.gain - seconds[many.count]
    assert many.benefit == pytest.approx(profit - everything, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6), min_size=1, max_size=6), st.booleans())
def test_the_survival_of_chains_is_that_of_each(rates: list[list[float]], scored: bool) -> None:
    model = AcceptanceModel()
    for number in range(60):
        model.learn_scores(Draft.chain("r", [1, 2], drafter="d", scores=[0.8, 0.3]), [0, 1], [0] * (number % 3 > 0))
    sequences = [model.start_sequence() for _ in rates]
    for number, sequence in enumerate(sequences):
        model.learn_round(sequence, accepted=number % 3, tested=3)
    drafts = [
        Draft.chain("r", range(len(chain)), drafter="d", scores=np.cumprod(chain).tolist() if scored else ())
        for chain in rates
    ]
    sizes = np.array([len(draft) for draft in drafts])
    scores = np.array([score for draft in drafts for score in draft.scores]) if scored else None
    together = model.chain_survival(scores, sizes, sequences, int(sizes.max()))
    for draft, sequence, row in zip(drafts, sequences, together, strict=True):
        assert row[: len(draft)].tolist() == pytest.approx(model.survival(draft, sequence))
        assert not row[len(draft) :].any()


def admitted(users: int, *, one_by_one: bool, monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Draft]]:
    monkeypatch.setattr(judging, "LARGE_BATCH", BUDGET if one_by_one else 0)
    policy = Adaptive(Rows(0.1), drafters={"d": DrafterCapabilities(6)})
    draw, seen = np.random.default_rng(3), []
    for step in range(30):
        plan = policy.plan([Span(f"r{i}", 100 + step, (0,), True, 6) for i in range(users)], BUDGET)
        drafts = {
            name: Draft.chain(
                name, range(each.depth), drafter="d", scores=np.cumprod(draw.random(each.depth) ** 0.2).tolist()
            )
            for name, each in plan.items()
        }
        seen.append(policy.admit(drafts, BUDGET))
        policy.learn([Verdict(f"r{i}", (0, 1, 2), (0, 1, 2, 9)) for i in range(users)])
        policy.observe(StepRecord(users, users, 0, 0, users, {"forward": 5e-3}, (100,) * users))
    return seen


def test_a_policy_admits_the_same_by_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    by_arrays = admitted(6, one_by_one=False, monkeypatch=monkeypatch)
    assert by_arrays == admitted(6, one_by_one=True, monkeypatch=monkeypatch)
    sizes = [len(draft) for step in by_arrays for draft in step.values()]
    assert min(sizes) < max(sizes), "some drafts are cut"


def test_admission_forecast_by_groups_is_about_that_of_each_sequence() -> None:
    model, draw = AcceptanceModel(), np.random.default_rng(1)
    model.has_scores = True
    for _ in range(64):
        model.learn_shift([0.6, 0.4, 0.3], np.cumprod(draw.random(3) ** 0.4).tolist())
    log_odds = np.array([1.5, 1.0, 0.5]) + draw.normal(0.0, 0.6, (300, 1))  # sequences that differ
    survival = np.cumprod(1 / (1 + np.exp(-log_odds)), axis=1)
    limit, stop = np.full(300, 0.25), np.full(300, 0.2)
    one_by_one = model._admission(survival, limit, stop)
    grouped = model.forecast_admission(survival, min_admitted=limit, min_survival=stop, unjudged=np.zeros(300, bool))
    for each, groups in zip(one_by_one, grouped, strict=True):
        assert groups.sum() == pytest.approx(each.sum(), rel=0.01)
        assert np.abs(groups - each).mean() < 0.02


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


def test_judging_that_costs_more_than_it_gains_stops() -> None:
    own = OwnSeconds()
    for _ in range(200):
        own.observe(300e-6, step_seconds=10e-3, kind="judged")
        own.observe(100e-6, step_seconds=10e-3, kind="unjudged")
    assert own.of_judging == pytest.approx(200e-6)


def test_what_the_policy_takes_keeps_to_its_budget() -> None:
    own = OwnSeconds()
    for _ in range(400):
        own.observe(600e-6, step_seconds=10e-3, kind="unjudged")  # 6 %
        own.observe(4e-3, step_seconds=10e-3, kind="planned")
    assert own.pace == 4
    assert own.planning_interval == pytest.approx(4e-3 / (0.005 * 10e-3)), "planning takes 0.5 % of the time"
    for _ in range(400):
        own.observe(10e-6, step_seconds=10e-3, kind="unjudged")
    assert own.pace == 1


def test_steps_that_plan_slow_learning_down_too() -> None:
    own = OwnSeconds()
    for step in range(1000):  # 3 % in all, though a step that does not plan takes 0.1 %
        kind, seconds = ("unjudged", 10e-6) if step % 10 else ("planned", 2.9e-3)
        own.observe(seconds, step_seconds=10e-3, kind=kind)  # type: ignore[arg-type]
    assert own.pace == pytest.approx(4, rel=0.2)


def test_judging_that_gains_nothing_is_tried_as_seldom_as_it_takes() -> None:
    own = OwnSeconds()
    assert own.judging_interval == 0
    for _ in range(200):
        own.observe(4e-3, step_seconds=20e-3, kind="judged")
        own.observe(0.3e-3, step_seconds=20e-3, kind="unjudged")
    assert own.judging_interval == pytest.approx(3.7e-3 / (0.0025 * 20e-3), rel=0.01), "0.25 % of the time"


def test_on_a_clock_without_the_policy_nothing_is_slowed_down() -> None:
    policy, _, _ = served(0.02, steps=40)
    assert (policy._own.pace, policy._own.planning_interval, policy._own.of_judging) == (1, 0, 0)


def calls_per_step(users: int, *, steps: int = 40) -> float:
    """Python functions called by the policy in a step, after the first ones, on the published prices."""
    policy = Adaptive(PublishedLatency(), drafters={"mtp": DrafterCapabilities(8, stops_early=True)})
    traces = SyntheticTraces({"mtp": SyntheticDrafter(MTP_SURVIVAL)}, output_tokens=1024)
    server = SimulatedServer(traces, PublishedLatency(), policy=policy, workload=Workload(concurrency=users))
    calls, depth = 0, 0
    names = {id(getattr(Adaptive, name).__code__) for name in ("plan", "admit", "learn", "observe")}

    def count(frame: object, event: str, _: object) -> None:
        nonlocal calls, depth
        mine = id(frame.f_code) in names  # type: ignore[attr-defined]
        depth += (event == "call" and mine) - (event == "return" and mine)
        calls += event == "call" and depth > 0

    for number in range(30 + steps):
        if number == 30:
            sys.setprofile(count)
        server._add_arrivals()
        server._step()
    sys.setprofile(None)
    return calls / steps


def test_the_work_of_a_step_grows_more_slowly_than_the_batch() -> None:
    few, many = calls_per_step(32), calls_per_step(256)
    assert many < 4 * few, "eight times as many users"


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


def by_hand(seconds: np.ndarray, drafting: Sequence[float]) -> list[float]:
    """For whole numbers of sequences: their marginal seconds, less as many times the last one's."""
    return [
        float(seconds[: int(count), depth].sum() - count * seconds[-1, depth]) for depth, count in enumerate(drafting)
    ]


def test_the_shared_seconds_of_drafting_are_those_of_all_sequences_that_draft() -> None:
    class Experts(StaticLatency):
        """Drafting that reads an expert for each sequence, until all 20 of them were read."""

        def seconds(self, rows: int, requests: int, context_sum: int) -> float:
            return 1e-3

        def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
            return depth * (1e-4 + 1e-5 * 20 * (1 - 0.9**requests))

    marginal = LatencyCache(Experts()).marginal_draft_seconds("d", 32, 3)
    drafting = [32.0, 10.0, 0.0]
    assert shared_seconds(marginal, np.array(drafting)).tolist() == pytest.approx(by_hand(marginal, drafting))
    first_only = marginal[0] - marginal[-1]
    assert shared_seconds(marginal, np.array(drafting))[0] > 1.3 * first_only[0], "the first one alone says too little"
