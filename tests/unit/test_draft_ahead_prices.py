"""Drafting beside verification: what a step waits for drafts, against enumerated and simulated rounds; what a policy
makes of it where it believes wrong prices and hit rates."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest

from wager.draft.ahead import AheadFigures, DraftsAheadLatency
from wager.economics.latency import LatencyModel
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import Policy
from wager.economics.policy.heuristics import FixedDepth
from wager.economics.surface import DraftCurve, LatencySurface
from wager.simulation.comparison import ReplaySetting
from wager.simulation.server import SimulatedDraft, SimulatedServer, SimulationResult, Workload
from wager.simulation.traces import SyntheticDrafter, SyntheticTraces
from wager.types import StepRecord

EVEN = {"request_sd": 0.0, "round_sd": 0.0, "token_sd": 0.0, "score_sd": None}


# --- a latency model that knows ---------------------------------------------------------------------------------


class Prices(LatencyModel):
    """A step takes 10 ms and 0.2 more for each row; a guess `guess` ms."""

    def __init__(self, guess: float = 2.0) -> None:
        self.guess = guess

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        return (10 + 0.2 * rows) * 1e-3 if rows else 0.0

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        return self.guess * depth * 1e-3 if requests else 0.0


@pytest.mark.parametrize("hit", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("requests", [1, 2, 5])
@pytest.mark.parametrize("guess", [2.0, 4.0])
def test_what_a_step_waits_is_that_of_all_its_outcomes(hit: float, requests: int, guess: float) -> None:
    """Every pattern of hits and misses, with its probability; drafting again takes the same for any number."""
    depth, prices = 4, Prices(guess)
    longer = max(0.0, prices.draft_seconds("d", 1, depth + 1) - prices.seconds(requests * (depth + 1), requests, 0))
    expected = 0.0
    for pattern in itertools.product((True, False), repeat=requests):
        chance = hit ** sum(pattern) * (1 - hit) ** (requests - sum(pattern))
        expected += chance * (any(pattern) * longer + (not all(pattern)) * prices.draft_seconds("d", 1, depth))
    found = ahead_of(prices, hit).draft_seconds("d", requests, depth)
    assert found == pytest.approx(expected)
    assert ahead_of(prices, hit).draft_seconds_by_depth("d", requests, depth)[-2:] == [
        ahead_of(prices, hit).draft_seconds("d", requests, depth - 1),
        found,
    ]


def ahead_of(prices: LatencyModel, hit: float) -> DraftsAheadLatency:
    figures = AheadFigures()
    figures.rate.share = hit
    return DraftsAheadLatency(prices, {"d": figures})


def test_drafts_that_are_ready_cost_what_they_take_longer_than_the_step() -> None:
    figures = AheadFigures()
    latency = DraftsAheadLatency(Prices(), {"d": figures})
    for _ in range(2000):
        figures.requested(ready=True)
    assert latency.learns and figures.rate.share > 0.99 and figures.hit_rate == 1
    step = Prices().seconds(4, 1, 0)
    assert latency.draft_seconds("d", 1, 3) == pytest.approx(0.006 * (1 - figures.rate.share), abs=1e-6)
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
        figures.calls.append((1, 4, 0.012))
        latency.observe_draft("d", 1, 3, seconds=1e-5)
    assert surface.draft_seconds("d", 1, 4) == pytest.approx(0.012, rel=0.1)
    assert not figures.calls


# --- simulated rounds -------------------------------------------------------------------------------------------


class AheadServer(SimulatedServer):
    """A server whose drafter drafts while the target verifies. Its drafts are ready with probability `hit_rate`, but
    for a request's first one."""

    def __init__(self, *args: Any, figures: AheadFigures, hit_rate: float, **more: Any) -> None:
        super().__init__(*args, **more)
        self._figures, self._hit_rate, self._coins = figures, hit_rate, random.Random(0)
        self._drafted_for: set[str] = set()
        self._last_step = 0.0

    def _draft_seconds(self, drafted: Iterable[SimulatedDraft]) -> float:
        price = partial(self._drafting.ragged_draft_seconds, "d")
        drafts, missed = list(drafted), list[int]()
        for each in drafts:
            known = each.draft.seq_id in self._drafted_for
            ready = known and self._coins.random() < self._hit_rate
            if known:
                self._figures.requested(ready=ready)
            if not ready:
                missed.append(each.passes)
        self._drafted_for = {each.draft.seq_id for each in drafts}
        waited = price(missed) if missed else 0.0
        if len(missed) < len(drafts):
            waited += max(0.0, price([each.passes + 1 for each in drafts]) - self._last_step)
        return waited

    def _record(self, *args: Any, **more: Any) -> StepRecord:
        record = super()._record(*args, **more)
        self._last_step = record.seconds["forward"]
        return record


def served(policy: Policy, prices: Prices, load: Workload, *, hit: float, figures: AheadFigures) -> SimulationResult:
    return AheadServer(traces(), prices, policy=policy, workload=load, figures=figures, hit_rate=hit).run()


def traces(curve: tuple[float, ...] = (0.8, 0.64, 0.51, 0.41, 0.33, 0.26)) -> SyntheticTraces:
    return SyntheticTraces({"d": SyntheticDrafter(curve, **EVEN)}, output_tokens=256)


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
    best = max(
        served(FixedDepth(depth, drafter="d"), prices, load, hit=hit, figures=AheadFigures()).throughput
        for depth in (0, 1, 2, 4, 6)
    )
    figures = AheadFigures()
    figures.rate.share = prior
    drafters = ReplaySetting(traces(), prices).drafters()
    policy = Adaptive(DraftsAheadLatency(wrong, {"d": figures}), drafters=drafters)
    assert served(policy, prices, load, hit=hit, figures=figures).throughput > 0.93 * best
