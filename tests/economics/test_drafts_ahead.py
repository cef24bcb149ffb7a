"""Drafting beside verification: what a round takes, against enumerated and simulated rounds; what a policy makes of it
where it believes wrong prices and hit rates; and the options of plan and replay."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from in_process import Call
from in_process import wager as command  # noqa: F401
from wager.arch import find_model
from wager.economics.acceptance import survival
from wager.economics.drafts_ahead import (
    ALTERNATIVE_RATES,
    AheadFigures,
    DraftsAheadLatency,
    expected_misses,
    hit_rate_of,
    waited_seconds,
)
from wager.economics.latency import LatencyModel
from wager.economics.policy.adaptive import Adaptive
from wager.economics.surface import DraftCurve, LatencySurface
from wager.planner.acceptance import AcceptanceRates
from wager.planner.cost import Cluster, CostModel
from wager.planner.devices import DEVICES
from wager.planner.drafting import constant_cost
from wager.planner.options import parse_hit_rate
from wager.planner.plan import Deployment, round_seconds
from wager.simulation.comparison import ReplaySetting, simulate
from wager.simulation.latency import PolicyClock
from wager.simulation.server import SimulatedAheadDrafter, SimulatedServer, Workload
from wager.simulation.traces import SyntheticDrafter, SyntheticTraces

EVEN = {"request_sd": 0.0, "round_sd": 0.0, "token_sd": 0.0, "score_sd": None}


# --- formulas -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hit", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("requests", [1, 2, 5])
@pytest.mark.parametrize(("prepared", "step"), [(3.0, 2.0), (1.0, 2.0)])
def test_what_a_step_waits_is_that_of_all_its_outcomes(hit: float, requests: int, prepared: float, step: float) -> None:
    """Every pattern of hits and misses, with its probability; drafting again takes the same for any number."""
    redrafted, expected, misses, any_miss = 0.7, 0.0, 0.0, 0.0
    for pattern in itertools.product((True, False), repeat=requests):
        chance = hit ** sum(pattern) * (1 - hit) ** (requests - sum(pattern))
        expected += chance * (any(pattern) * max(0.0, prepared - step) + (not all(pattern)) * redrafted)
        misses += chance * (requests - sum(pattern))
        any_miss += chance * (not all(pattern))
    found = waited_seconds(prepared=prepared, step=step, redrafted=redrafted, requests=requests, hit_rate=hit)
    assert found == pytest.approx(expected)
    if any_miss:
        assert expected_misses(requests, hit) == max(1, round(misses / any_miss))
    if requests == 1:  # with the step, that is the round of the formula, with drafts that take as long either way
        assert step + waited_seconds(
            prepared=prepared, step=step, redrafted=prepared, requests=1, hit_rate=hit
        ) == pytest.approx(round_seconds(step, prepared, hit_rate=hit))


@pytest.mark.parametrize("outcomes", [1, 3, 100])
@pytest.mark.parametrize("rates", [[0.8] * 4, [0.9, 0.5, 0.2], [0.3]])
def test_the_hit_rate_is_that_of_rounds_that_are_played(rates: Sequence[float], outcomes: int) -> None:
    """Rounds drawn guess by guess; drafted for are the outcomes that come most often."""
    rng, counts = random.Random(1), dict[tuple[int, int], int]()
    rounds = 200_000
    for _ in range(rounds):
        right = next((depth for depth, rate in enumerate(rates) if rng.random() >= rate), len(rates))
        draw = rng.random()
        if right == len(rates):
            rank = 0 if draw < rates[-1] else -1
        else:
            rank = 1 if draw < ALTERNATIVE_RATES[0] else 2 if draw < sum(ALTERNATIVE_RATES) else -1
        if rank >= 0:
            counts[right, rank] = counts.get((right, rank), 0) + 1
    best = sorted(counts.values(), reverse=True)[:outcomes]
    assert hit_rate_of(survival(list(rates), len(rates)), outcomes) == pytest.approx(sum(best) / rounds, abs=0.005)


# --- a latency model that knows ---------------------------------------------------------------------------------


class Prices(LatencyModel):
    """A step takes 10 ms and 0.2 more for each row; a guess `guess` ms."""

    def __init__(self, guess: float = 2.0) -> None:
        self.guess = guess

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        return (10 + 0.2 * rows) * 1e-3 if rows else 0.0

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        return self.guess * depth * 1e-3 if requests else 0.0


def test_drafts_that_are_ready_cost_what_they_take_longer_than_the_step() -> None:
    figures = AheadFigures()
    latency = DraftsAheadLatency(Prices(), {"d": figures})
    for _ in range(2000):
        figures.requested(ready=True)
    assert latency.learns and figures.rate.likely > 0.99 and figures.hit_rate == 1
    step = Prices().seconds(4, 1, 0)
    assert latency.draft_seconds("d", 1, 3) == pytest.approx(0.006 * (1 - figures.rate.likely), abs=1e-6)
    assert latency.draft_seconds("d", 1, 7) > 0.016 - Prices().seconds(8, 1, 0)  # eight guesses take longer than it
    assert latency.draft_seconds("e", 1, 3) == pytest.approx(0.006) and step == latency.seconds(4, 1, 0)
    for _ in range(2000):
        figures.requested(ready=False)
    assert latency.draft_seconds("d", 1, 3) == pytest.approx(0.006, rel=0.01)


def test_how_often_drafts_are_ready_is_learned_for_each_tenant_and_for_several() -> None:
    figures = AheadFigures()
    latency = DraftsAheadLatency(Prices(), {"d": figures})
    first = latency.draft_seconds("d", 1, 3)
    for whose, ready in (("anna", True), (None, False)):
        figures.whose = whose
        for _ in range(100):
            figures.requested(ready=ready)
    assert latency.draft_seconds("d", 1, 3) > first
    figures.whose = "ben"
    assert latency.draft_seconds("d", 1, 3) == first
    figures.whose = "anna"
    assert latency.draft_seconds("d", 1, 3) < first


def test_a_drafters_own_seconds_are_learned_not_those_that_the_step_saw() -> None:
    surface = LatencySurface([1, 8], [0.004, 0.005], drafters={"d": DraftCurve([1], [0.0], [0.001])})
    figures = AheadFigures()
    latency = DraftsAheadLatency(surface, {"d": figures})
    for _ in range(40):
        figures.drafted(1, 4, 0.012)
        figures.drafted(1, 4, 9.0, whole=False)
        latency.observe_draft("d", 1, 3, seconds=1e-5)
    assert surface.draft_seconds("d", 1, 4) == pytest.approx(0.012, rel=0.1)
    assert not figures.calls and figures.drafted_s == pytest.approx(40 * 9.012)


# --- simulated rounds -------------------------------------------------------------------------------------------


def traces(curve: tuple[float, ...] = (0.8, 0.64, 0.51, 0.41, 0.33, 0.26)) -> SyntheticTraces:
    return SyntheticTraces({"d": SyntheticDrafter(curve, **EVEN)}, output_tokens=256)


@pytest.mark.parametrize("hit", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("guess", [2.0, 4.0])
def test_a_simulated_server_takes_what_the_formula_says(hit: float, guess: float) -> None:
    depth, prices = 4, Prices(guess)
    setting = ReplaySetting(traces(), prices, hit_rate=hit)
    point = simulate(setting, f"fixed:{depth}", Workload(concurrency=1, rounds=4000))
    step = prices.seconds(depth + 1, 1, 0)
    prepared, redrafted = prices.draft_seconds("d", 1, depth + 1), prices.draft_seconds("d", 1, depth)
    expected = step + waited_seconds(prepared=prepared, step=step, redrafted=redrafted, requests=1, hit_rate=hit)
    # the first round of an answer has no draft ready, its last ones are shorter
    assert point.tau / point.throughput == pytest.approx(expected, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("users", [1, 4])
@pytest.mark.parametrize(("prior", "hit", "believed"), [(1.0, 0.0, 3.0), (0.0, 0.95, 0.3), (0.5, 0.7, 3.0)])
def test_wrong_prices_and_hit_rates_cost_little(prior: float, hit: float, believed: float, users: int) -> None:
    """A policy that believes another hit rate, on a machine whose steps it believes to take another time."""
    load, prices = Workload(concurrency=users, rounds=3000), Prices(3.0)
    rows = (1, 2, 4, 8, 16, 32, 64)
    wrong = LatencySurface(
        rows,
        [believed * prices.seconds(count, 1, 0) for count in rows],
        drafters={"d": DraftCurve([1, 64], [0.0, 0.0], [0.003, 0.003])},
        uncertainty=5.0,
    )
    setting = ReplaySetting(traces(), prices, hit_rate=hit)
    depths = [simulate(setting, name, load).throughput for name in ("none", "fixed:1", "fixed:2", "fixed:4", "fixed:6")]
    drafter, clock = SimulatedAheadDrafter(hit), PolicyClock(0.0)
    drafter.figures.rate.likely = prior
    policy = Adaptive(DraftsAheadLatency(wrong, {"d": drafter.figures}), drafters=setting.drafters())
    server = SimulatedServer(traces(), prices, policy=policy, workload=load, clock=clock, ahead={"d": drafter})
    assert server.run().throughput > 0.93 * max(depths)


# --- plan and replay ----------------------------------------------------------------------------------------------


def test_a_plan_says_how_often_drafts_are_ready() -> None:
    cost, rates = CostModel(find_model("Llama-3.1-8B"), Cluster(DEVICES["H100"])), AcceptanceRates("0.8", 0.8)
    query = Deployment(cost, constant_cost(5e-4), max_depth=6, draft_outcomes=3)
    for batch in (1, 4):
        outcomes = query.outcomes(rates, batch=batch, context=1000)
        assert outcomes[0].speedup == 1
        for outcome in outcomes[1:]:
            rate = hit_rate_of(rates.survival(outcome.depth), 3) ** batch
            assert outcome.hit_rate == pytest.approx(rate)
            assert outcome.round_s == pytest.approx(round_seconds(outcome.step_s, outcome.draft_s, hit_rate=rate))
    more = replace(query, draft_outcomes=100).outcomes(rates, batch=1, context=1000)
    assert more[4].speedup > query.outcomes(rates, batch=1, context=1000)[4].speedup


def test_the_options_of_plan_and_replay(command: Call) -> None:  # noqa: F811
    assert parse_hit_rate(None, draft_async=False) is None and parse_hit_rate(None, draft_async=True) == 1.0
    plan = ("plan", "--model", "Llama-3.1-70B", "--hardware", "H100", "--tp", "4", "--batch", "1")
    drafter = ("--drafter-shape", "model:Llama-3.1-8B", "--drafter-hardware", "H100")
    found = command(*plan, *drafter, "--acceptance", "0.8", "--draft-async", "--draft-outcomes", "4")
    assert found.code == 0 and "one of the 4 likeliest" in " ".join((found.out + found.err).split())
    for arguments, message in (
        (("--draft-outcomes", "4"), "--draft-outcomes has no effect without --draft-async"),
        (("--draft-async", "--draft-outcomes", "0"), "0 outcomes are out of range"),
        (("--draft-async", "--draft-outcomes", "4", "--draft-hit-rate", "0.5"), "both say how often"),
    ):
        refused = command(*plan, *drafter, *arguments)
        assert refused.code == 2 and message in " ".join(refused.err.split())
    replay = ("replay", "--model", "Llama-3.1-70B", "--hardware", "H100", "--tp", "4", "--curve", "0.8")
    drafter = ("--drafter-shape", "model:Llama-3.1-8B", "--drafter-hardware", "H100")
    load = ("--concurrency", "1", "--rounds", "300", "--policy", "none", "--policy-time", "0us")
    found = command(*replay, *drafter, *load, "--draft-async", "--draft-hit-rate", "0.8")
    assert found.code == 0 and "80% of the drafts are ready" in found.out
    for arguments, message in (
        (("--draft-hit-rate", "0.8"), "--draft-hit-rate has no effect without --draft-async"),
        (("--draft-async", "--draft-hit-rate", "1.8"), "A hit rate of 1.8 is out of range"),
        (("--drafter-link", "5GB/s", "--draft-async"), "--drafter-link has no effect without --drafter-hardware"),
    ):
        refused = command(*replay, *load, *arguments)
        assert refused.code == 2 and message in " ".join(refused.err.split())
