"""Policies: fixed, threshold and adaptive; the latter's exploration, drafters, objectives, exactness and own time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest

from wager.economics.acceptance import MTP_SURVIVAL
from wager.economics.latency import LatencyModel
from wager.economics.options import Objective, PolicySpec, parse_objective, parse_policy
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import LONGEST_INTERVAL, UPDATE_INTERVAL, DrafterCapabilities, Policy
from wager.economics.policy.heuristics import FixedDepth, Threshold
from wager.economics.policy.state import PolicySeconds
from wager.economics.surface import LatencySurface
from wager.errors import UsageError
from wager.simulation.comparison import ReplaySetting, simulate
from wager.simulation.server import Workload
from wager.simulation.traces import SyntheticDrafter, SyntheticTraces
from wager.types import Draft, DraftDecision, DraftPrices, Plan, Span, StepRecord, Verdict

WRONG, DEPTH = -1, 7
BUDGET = 10_000
"""Rows for draft tokens: more than any test drafts."""

ROWS = [1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256]
SECONDS = [5.2e-3, 5.6e-3, 6.2e-3, 6.9e-3, 9.9e-3, 11.3e-3, 15e-3, 19e-3, 36e-3, 70e-3, 140e-3]


class Machine(LatencyModel):
    """Step seconds that rise in steps of rows, and drafters of fixed seconds per pass."""

    def __init__(self, passes: Mapping[str, float] | None = None) -> None:
        self._passes = dict(passes or {})

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        return float(np.interp(rows, ROWS, SECONDS)) + 1e-8 * context_sum

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        return self._passes.get(drafter, 0.0) * depth * (1 + 0.05 * requests)


AcceptanceRate = Callable[[str, int], float]
"""(sequence, position) -> probability that the next draft token there is right."""


class SimulatedSequences:
    """Sequences served under a policy, drafted for at given acceptance rates; counts. Tokens are their positions."""

    def __init__(
        self,
        policy: Policy,
        surface: LatencyModel,
        rates: Mapping[str, AcceptanceRate],
        sequences: Sequence[str],
        *,
        seed: int = 0,
        own: Mapping[str, float] | None = None,
    ) -> None:
        """`own`: seconds that an adaptive policy itself takes, by kind of step."""
        self.policy, self.surface, self.rates, self.own = policy, surface, dict(rates), own
        self.at = dict.fromkeys(sequences, 100)
        self.draw = np.random.default_rng(seed)
        self.seconds = self.drafting = self.tokens = 0.0
        self.drafted: dict[str, int] = dict.fromkeys(rates, 0)
        self.emitted = dict.fromkeys(sequences, 0)

    def step(self) -> Plan:
        spans = [Span(name, at, (0,), True, DEPTH) for name, at in self.at.items()]
        plan = self.policy.plan(spans, BUDGET)
        drafts = {name: self.draft(name, each) for name, each in plan.items()}
        kept = self.policy.admit(drafts, BUDGET)
        rows = len(spans) + sum(map(len, kept.values()))
        seconds = {"forward": self.surface.seconds(rows, len(spans), sum(self.at.values())), "draft": 0.0}
        for drafter in self.rates:
            depths = [each.depth for each in plan.values() if each.drafter in (drafter, "")]
            self.drafted[drafter] += len(depths)
            if depths:
                seconds["draft"] += self.surface.draft_seconds(drafter, len(depths), max(depths))
        verdicts = [self.verdict(name, kept.get(name)) for name in self.at]
        self.policy.learn(verdicts)
        contexts = tuple(self.at.values())
        for verdict in verdicts:
            self.at[verdict.seq_id] += len(verdict.tokens)
            self.emitted[verdict.seq_id] += len(verdict.tokens)
        emitted = sum(len(verdict.tokens) for verdict in verdicts)
        seconds["policy"] = self.own.get(self.policy.step.kind, 0.0) if self.own else 0.0  # type: ignore[attr-defined]
        self.policy.observe(StepRecord(rows, len(spans), rows - len(spans), 0, emitted, seconds, contexts))
        self.seconds += sum(seconds.values())
        self.drafting += seconds["draft"]
        self.tokens += emitted
        return plan

    def run(self, steps: int) -> SimulatedSequences:
        for _ in range(steps):
            self.step()
        return self

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def draft(self, name: str, decision: DraftDecision) -> Draft:
        drafter, depth = decision.drafter or next(iter(self.rates)), decision.depth
        rate = self.rates[drafter](name, self.at[name])
        right = self.draw.random(depth) < rate
        run = depth if right.all() else int(right.argmin())
        tokens = (*range(self.at[name], self.at[name] + run), *((WRONG,) * (depth - run)))
        return Draft.chain(name, tokens, drafter=drafter)

    def verdict(self, name: str, draft: Draft | None) -> Verdict:
        at, run = self.at[name], 0
        while draft is not None and run < len(draft) and draft.tokens[run] == at + run:
            run += 1
        return Verdict(name, tuple(range(run)), tuple(range(at, at + run + 1)))


def names(count: int) -> list[str]:
    return [f"r{i}" for i in range(count)]


def always(rate: float) -> AcceptanceRate:
    return lambda _sequence, _position: rate


def adaptive(
    surface: LatencyModel, *drafters: str, weights: Mapping[str, float] | None = None, **options: object
) -> Adaptive:
    capabilities = {name: DrafterCapabilities(DEPTH) for name in drafters or ("d",)}
    policy = Adaptive(surface, drafters=capabilities, **options)  # type: ignore[arg-type]
    for sequence, weight in (weights or {}).items():
        policy.begin(sequence, weight=weight)
    return policy


# ---- the named ones -------------------------------------------------------------------------------------------------


def test_fixed_depth_asks_for_the_same_everywhere_within_room() -> None:
    spans = [Span("a", 9, (1,), True, 5), Span("b", 9, (1,), True, 2), Span("c", 0, (1, 2), False, 0)]
    assert FixedDepth(4).plan(spans, BUDGET) == {"a": DraftDecision(4), "b": DraftDecision(2)}
    assert FixedDepth(4, drafter="x").plan(spans, BUDGET) == {"a": DraftDecision(4, "x"), "b": DraftDecision(2, "x")}
    assert FixedDepth(0).plan(spans, BUDGET) == {}


def test_threshold_keeps_what_is_likely_enough() -> None:
    policy = Threshold(4, threshold=0.5)
    drafts = {
        "a": Draft.chain("a", range(4), drafter="d", scores=[0.9, 0.6, 0.4, 0.3]),
        "b": Draft.chain("b", range(4), drafter="d", scores=[0.3, 0.2, 0.1, 0.1]),
        "c": Draft("c", (1, 2, 3), (-1, -1, 0), (0.8, 0.4, 0.7), "d"),
    }
    assert {name: len(draft) for name, draft in policy.admit(drafts, BUDGET).items()} == {"a": 2, "c": 1}


def test_threshold_adapts_to_acceptance() -> None:
    def settled(rate: float) -> float:
        policy = Threshold(4, threshold=0.4)
        for _ in range(60):
            scores = [rate**depth for depth in range(1, 5)]
            kept = policy.admit({"a": Draft.chain("a", range(4), drafter="d", scores=scores)}, BUDGET)
            run = len(kept.get("a", ())) if rate > 0.9 else 0
            policy.learn([Verdict("a", tuple(range(run)), tuple(range(run + 1)))])
        return policy.threshold

    assert settled(0.95) < 0.1
    assert settled(0.8) > 0.6


def test_a_threshold_that_nothing_reaches_falls_until_something_is_verified() -> None:
    policy, draw, verified = Threshold(4, threshold=0.95), np.random.default_rng(2), list[int]()
    for _ in range(400):
        scores = [0.85, 0.7, 0.6, 0.5]
        kept = policy.admit({"a": Draft.chain("a", range(4), drafter="d", scores=scores)}, BUDGET)
        verified.append(len(kept.get("a", ())))
        run = int(np.cumprod(draw.random(verified[-1]) < 0.85).sum())
        policy.learn([Verdict("a", tuple(range(run)), tuple(range(run + 1)))])
    assert verified[0] == 0 and np.mean(verified[-200:]) > 0.5
    before = policy.threshold
    policy.admit({}, BUDGET)
    policy.learn([Verdict("a", (), (5,))])
    assert policy.threshold == before, "a step without drafts shows nothing"


def test_drafts_without_scores_are_no_matter_of_a_threshold() -> None:
    policy, draft = Threshold(4, threshold=0.9), Draft.chain("a", range(4), drafter="d")
    assert policy.admit({"a": draft}, BUDGET) == {"a": draft}
    assert [len(each) for each in policy.admit({"a": draft}, 3).values()] == [3]


def test_threshold_says_what_was_accepted_only_once_something_was_verified() -> None:
    policy = Threshold(4, threshold=0.3)
    assert "none was verified yet" in policy.explain()
    policy.admit({"a": Draft.chain("a", range(4), drafter="d", scores=[0.9] * 4)}, BUDGET)
    policy.learn([Verdict("a", (0,), (0, 9))])
    assert "lately 25% of those verified were accepted" in policy.explain()


def test_a_threshold_out_of_range_is_named() -> None:
    for value in (0.0, 1.0, -0.2, 3.0):
        with pytest.raises(UsageError, match="threshold"):
            Threshold(4, threshold=value)


# ---- exploration ----------------------------------------------------------------------------------------------------


def test_a_drafter_that_does_not_pay_is_not_used_and_exploration_keeps_to_its_budget() -> None:
    surface = Machine({"d": 2e-3})
    simulation = SimulatedSequences(adaptive(surface), surface, {"d": always(0.2)}, names(8)).run(200)
    drafting, seconds = simulation.drafting, simulation.seconds
    simulation.run(2000)
    assert 0 < simulation.drafting - drafting < 0.006 * (simulation.seconds - seconds)


@pytest.mark.parametrize(("share", "least"), [(0.0, 1.04), (0.08, 0.99)])
def test_drafts_that_gain_less_than_the_policy_takes_for_them_are_not_made(share: float, least: float) -> None:
    """`share` of a plain step; drafts gain 5 %."""
    surface = Machine({"d": 1e-5})
    plain, rates = surface.seconds(6, 6, 4000), {"d": always(0.3)}
    own = dict.fromkeys(("judged", "unjudged"), share * plain)
    simulation = SimulatedSequences(adaptive(surface), surface, rates, names(6), own=own).run(300)
    tokens, seconds = simulation.tokens, simulation.seconds
    simulation.run(500)
    assert (simulation.tokens - tokens) / (simulation.seconds - seconds) > least * 6 / plain


@pytest.mark.slow
def test_each_depth_is_measured_more_seldom_the_longer_its_rows_are_known() -> None:
    """Else the budget is spent on what was measured before: 0.6 % where drafters are good and bad in turns."""
    policy, rates = adaptive(LatencySurface(ROWS, SECONDS, uncertainty=3.0)), {"d": always(0.7)}
    simulation, measured = (
        SimulatedSequences(policy, Machine({"d": 1e-5}), rates, names(4)),
        defaultdict[int, list[int]](list),
    )
    for now in range(1500):
        simulation.step()
        if policy.step.measured_depth:
            measured[policy.step.measured_depth].append(now)
    intervals = [[after - before for before, after in pairwise(steps)] for steps in measured.values()]
    assert max(map(len, intervals)) > 6
    for found in intervals:
        assert all(each > min(LONGEST_INTERVAL, 8 << number) - UPDATE_INTERVAL for number, each in enumerate(found)), (
            found
        )


@pytest.mark.parametrize(
    ("live", "own", "most"), [(1, {}, 270), (4, {}, 270), (4, {"planned": 3e-4, "plain": 1e-5}, 120)]
)
def test_a_drafter_that_is_always_wrong_is_hardly_asked_and_used_again_once_it_is_right(
    live: int, own: dict[str, float], most: int
) -> None:
    """Hardly a step measures what rows cost meanwhile: a guess would not pay if they were free. Nor is anything decided
    where no draft is due, but that nothing drafts."""
    policy, rates = adaptive(LatencySurface(ROWS, SECONDS, uncertainty=3.0)), {"d": always(0.0)}
    simulation = SimulatedSequences(policy, Machine({"d": 1e-5}), rates, names(live), own=own).run(1000)
    drafted, measured, decided = simulation.drafted["d"], 0, 0
    for _ in range(1920):
        simulation.step()
        measured += policy.step.measured_depth is not None
        decided += policy.step is policy._planned
    assert 20 <= simulation.drafted["d"] - drafted <= 260 * live  # in every eighth step at most
    assert measured <= 12
    assert decided <= most
    simulation.rates["d"] = always(0.9)
    drafted = simulation.run(150).drafted["d"]
    assert simulation.run(100).drafted["d"] - drafted > 90 * live


def test_where_drafts_do_not_pay_guesses_that_are_right_as_often_as_forecast_are_no_reason_to_plan() -> None:
    policy, surface = adaptive(Machine({"d": 1e-5})), Machine({"d": 1e-5})
    own = {"planned": 0.06 * surface.seconds(8, 8, 4000)}
    simulation = SimulatedSequences(policy, surface, {"d": always(0.3)}, names(8), own=own).run(1000)
    planned = 0
    for _ in range(1000):
        simulation.step()
        planned += policy.step.kind == "planned"
    assert planned < 45, "at most every twelfth step could be planned"


def test_a_head_is_tried_however_long_decisions_wait() -> None:
    """A trial must not end before the decision that would ask it."""
    surface = Machine({"d": 1e-5})
    policy = Adaptive(surface, drafters={"d": DrafterCapabilities(DEPTH, warm_up=16)})
    own = {"planned": 0.1 * surface.seconds(4, 4, 4000)}
    simulation = SimulatedSequences(policy, surface, {"d": always(0.0)}, names(4), own=own).run(2000)
    assert policy.inactive_drafters
    simulation.rates["d"] = always(0.9)
    drafted = simulation.run(2000).drafted["d"]
    assert simulation.run(100).drafted["d"] - drafted > 300


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "fewer"), [("planned", False), ("judged", True)])
def test_looks_pay_for_what_the_policy_does_for_them_not_for_its_plans(kind: str, fewer: bool) -> None:
    def drafted(share: float) -> int:
        policy = adaptive(Machine({"d": 1e-5}))
        simulation = SimulatedSequences(policy, Machine({"d": 1e-5}), {"d": always(0.0)}, names(24))
        observe = policy.observe

        def observe_timed(record: StepRecord) -> None:
            taken = sum(record.seconds.values()) * (share if policy.step.kind == kind else 1e-3)
            observe(record._replace(seconds={**record.seconds, "policy": taken}))

        policy.observe = observe_timed  # type: ignore[method-assign]
        return simulation.run(2000).drafted["d"]

    assert (drafted(0.5) < 0.8 * drafted(1e-3)) == fewer


@pytest.mark.slow
@pytest.mark.parametrize("live", [1, 8])
@pytest.mark.parametrize("better", [[], ["good"]], ids=["alone", "beside a good one"])
def test_trials_are_paid_for_with_what_they_took_not_with_what_was_believed(live: int, better: list[str]) -> None:
    believed, true = Machine({"slow": 2e-6, "good": 2e-5}), Machine({"slow": 2e-2, "good": 2e-5})
    calls: list[float] = []

    def charged(drafter: str, requests: int, depth: int) -> float:
        taken = Machine.draft_seconds(true, drafter, requests, depth)
        calls.extend([taken] if drafter == "slow" else [])
        return taken

    true.draft_seconds = charged  # type: ignore[method-assign]
    rates = {"slow": always(0.0), **{name: always(0.9) for name in better}}
    simulation = SimulatedSequences(adaptive(believed, *rates), true, rates, names(live)).run(400)
    before, seconds = sum(calls), simulation.seconds
    simulation.run(12_000)
    assert 0 < sum(calls) - before < 0.006 * (simulation.seconds - seconds)


# ---- several drafters -----------------------------------------------------------------------------------------------


def test_each_sequence_gets_the_drafter_that_suits_it() -> None:
    surface = Machine()
    rates: dict[str, AcceptanceRate] = {
        "one": lambda sequence, _: 0.95 if sequence < "r4" else 0.1,
        "two": lambda sequence, _: 0.1 if sequence < "r4" else 0.95,
    }
    simulation = SimulatedSequences(adaptive(surface, "one", "two"), surface, rates, names(8)).run(400)
    drafters: dict[str, list[str]] = {name: [] for name in names(8)}
    for _ in range(100):
        for name, decision in simulation.step().items():
            drafters[name].append(decision.drafter)
    wins = [max(set(used), key=used.count) for used in drafters.values() if used]
    assert wins == ["one"] * 4 + ["two"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("warm_up", [1, 16])
@pytest.mark.parametrize("own", [0.001, 0.05])  # share of a step for the policy: of the latter it decides every 16th
def test_a_drafter_that_wakes_to_be_tried_beside_one_that_is_used_drafts(own: float, warm_up: int) -> None:
    """It once woke without the seconds for a draft, was inactive again before a decision, or lost its draft to the
    drafter that the sequence uses, which was explored there too."""
    surface, rates = Machine({"used": 1e-5, "tried": 1e-4}), {"used": always(0.6), "tried": always(0.0)}
    drafters = {"used": DrafterCapabilities(DEPTH), "tried": DrafterCapabilities(DEPTH, warm_up=warm_up)}
    policy = Adaptive(surface, drafters=drafters)
    simulation, observe = SimulatedSequences(policy, surface, rates, names(4)), policy.observe

    def observe_timed(record: StepRecord) -> None:
        taken = own * sum(record.seconds.values())
        observe(record._replace(seconds={**record.seconds, "policy": taken}))

    policy.observe = observe_timed  # type: ignore[method-assign]
    drafted, woke, inactive = simulation.run(1000).drafted["tried"], 0, True
    for _ in range(3000):
        simulation.step()
        woke, inactive = woke + (inactive and not policy.inactive_drafters), bool(policy.inactive_drafters)
        planned = policy.step.repeated_plan
        for name in policy.step.explored & planned.keys():
            assert policy.step.plan[name].drafter != planned[name].drafter
    assert woke > 10
    assert simulation.drafted["tried"] - drafted >= woke - 1


@pytest.mark.parametrize("steps", [67, 64, 65, 66])
def test_a_request_that_follows_another_is_planned_by_its_own_weight_and_prompt(steps: int) -> None:
    """What plain decoding yields is computed anew every few steps: not only then where the batch is another."""
    policy = adaptive(Machine(), weights={"a": 1.0, "b": 0.125})

    def step(span: Span) -> None:
        policy.plan([span], BUDGET)
        policy.admit({}, BUDGET)
        policy.learn([])
        policy.observe(StepRecord(len(span.tokens), 1, 0, 0, 1, {"forward": 5e-3}, (span.num_computed_tokens,)))

    for number in range(steps):
        step(Span("a", 100 + number, (0,), True, DEPTH))
    policy.end("a")
    step(Span("b", 10, tuple(range(500)), True, DEPTH))
    assert policy.step.plain.shape == (500, 1, 10)
    assert policy.step.plain.weight == 0.125


def test_the_seconds_of_catching_up_count_before_a_drafter_is_used_again() -> None:
    surface = Machine({"d": 1e-4})

    def drafted(catch_up: float) -> int:
        policy = Adaptive(surface, drafters={"d": DrafterCapabilities(DEPTH, catch_up_s=catch_up)})
        spans = [Span("r0", 4000, (0,), True, DEPTH)]
        return policy.plan(spans, BUDGET).get("r0", DraftDecision(0)).depth

    assert drafted(0.0) > 0
    assert drafted(1e-3) == 0, "four seconds of processing the prompt are not regained"


def test_what_catching_up_takes_does_not_pass_for_the_price_of_a_guess() -> None:
    """The first draft of a sequence computes its prompt too, here after some steps that did not decode."""
    surface = LatencySurface([1, 2, 4, 8], [5e-3, 5.1e-3, 5.2e-3, 5.4e-3])  # nothing is known of drafting
    policy = Adaptive(surface, drafters={"d": DrafterCapabilities(6, catch_up_s=2e-5)})
    asked, prompt = 0, 600
    for number in range(200):
        decodes = number >= 6
        spans = [Span("r", prompt + number, (0,), True, 6) if decodes else Span("r", 100 * number, (0,) * 100, False)]
        plan = policy.plan(spans, BUDGET)
        drafts = {name: Draft.chain(name, range(each.depth), drafter="d") for name, each in plan.items()}
        size = sum(map(len, policy.admit(drafts, BUDGET).values()))
        drafting = (0.0 if not plan else 2e-5 * prompt if not asked else 1e-4) + 1e-4 * sum(map(len, drafts.values()))
        asked += bool(plan)
        policy.learn([Verdict("r", tuple(range(size)), tuple(range(size + 1)))] if decodes else [])
        rows = size + len(spans[0].tokens)
        seconds = {"forward": surface.seconds(rows, 1, prompt), "draft": drafting}
        policy.observe(StepRecord(rows, 1, size, size, decodes * (size + 1), seconds, (spans[0].num_computed_tokens,)))
    assert asked > 180


def test_drafts_that_nothing_was_computed_for_say_nothing_of_the_price_of_a_guess() -> None:
    """Of four drafts three are empty and made in no time. Two guesses of the fourth take 1 ms and 0.5 ms each."""
    surface = LatencySurface([1, 2, 4, 8], [5e-3, 5.1e-3, 5.2e-3, 5.4e-3])  # nothing is known of drafting
    policy = Adaptive(surface, drafters={"d": DrafterCapabilities(2, weighs_prices=True)}, exploration_share=0.0)
    draw, asked = np.random.default_rng(0), 0
    prices = DraftPrices()
    for number in range(600):
        spans = [Span("r", 100 + number, (0,), True, 2)]
        plan = policy.plan(spans, BUDGET)
        computes = bool(plan) and draw.random() < 0.25
        found = {"r": Draft("r", (0, 0), (-1, 0), (0.9, 0.8), "d", computed=2)} if computes else {}
        size = sum(map(len, policy.admit(found, BUDGET).values()))
        asked += bool(plan)
        prices = plan["r"].prices if plan else prices
        policy.learn([Verdict("r", tuple(range(size)), (0,) * (size + 1))])
        seconds = {"forward": surface.seconds(1 + size, 1, 100), "draft": 2e-3 if computes else 2e-5}
        policy.observe(StepRecord(1 + size, 1, size, size, size + 1, seconds, (100 + number,)))
    assert asked > 550
    assert surface.draft_seconds("d", 1, 2) == pytest.approx(2e-3, rel=0.1)
    assert 2e-3 / 5e-3 < prices.call + 2 * prices.guess < 2 * 2e-3 / 5e-3, "of tokens, 1 to 2 of which a step brings"


# ---- objectives -----------------------------------------------------------------------------------------------------


def mixed(surface: Machine, **options: object) -> SimulatedSequences:
    rates: dict[str, AcceptanceRate] = {"d": lambda sequence, _: 0.93 if int(sequence[1:]) < 6 else 0.62}
    return SimulatedSequences(adaptive(surface, **options), surface, rates, names(12)).run(700)  # type: ignore[arg-type]


@pytest.mark.slow
def test_weights_move_rows_to_the_sequences_they_favour() -> None:
    even, favoured = (mixed(Machine(), weights={f"r{i}": weight for i in range(6, 12)}) for weight in (1.0, 4.0))
    assert favoured.emitted["r8"] / favoured.seconds > 1.1 * even.emitted["r8"] / even.seconds
    assert favoured.rate < even.rate


@pytest.mark.slow
def test_an_slo_that_nobody_can_meet_costs_no_throughput_where_requests_come_and_end() -> None:
    def rate(objective: Objective) -> float:
        rates = []
        for seed in range(3):
            traces = SyntheticTraces({"mtp": SyntheticDrafter(MTP_SURVIVAL)}, output_tokens=64, seed=seed)
            load = Workload(concurrency=8, rounds=2000, seed=seed)
            rates.append(simulate(ReplaySetting(traces, Machine(), objective=objective), "adaptive", load).throughput)
        return sum(rates)

    assert rate(Objective("slo", 1e-4)) > 0.97 * rate(Objective())


@pytest.mark.slow
def test_latency_favours_slow_sequences_and_an_slo_those_that_can_reach_it() -> None:
    surface = Machine()
    fast, fair = (mixed(surface, objective=Objective(goal)) for goal in ("throughput", "latency"))

    def pace(simulation: SimulatedSequences, name: str) -> float:
        return simulation.seconds / simulation.emitted[name]

    assert fair.rate <= 1.005 * fast.rate
    assert pace(fair, "r8") < 0.99 * pace(fast, "r8")
    target = 0.92 * pace(fast, "r8")
    kept = mixed(surface, objective=Objective("slo", target))
    assert np.mean([pace(kept, f"r{i}") for i in range(6, 12)]) < 1.03 * target
    assert max(pace(kept, f"r{i}") for i in range(6)) < target
    hopeless = mixed(surface, objective=Objective("slo", 1e-5))
    assert hopeless.rate > 0.97 * fast.rate


def test_objectives_and_policies_are_parsed() -> None:
    objectives = {"throughput": Objective(), "latency": Objective("latency"), "slo:20ms": Objective("slo", 20e-3)}
    assert {text: parse_objective(text) for text in objectives} == objectives
    engines = {
        "adaptive": PolicySpec("adaptive"),
        "fixed": PolicySpec("fixed"),
        "threshold:0.3": PolicySpec("threshold", threshold=0.3),
    }
    assert {text: parse_policy(text) for text in engines} == engines
    replays = {
        "none": PolicySpec("none"),
        "fixed:mtp:3": PolicySpec("fixed", "mtp", 3),
        "threshold:mtp:0.3": PolicySpec("threshold", "mtp", threshold=0.3),
        "threshold:0.8:0.3": PolicySpec("threshold", "0.8", threshold=0.3),
    }
    assert {text: parse_policy(text, replay=True) for text in replays} == replays


def test_what_cannot_be_parsed_is_named() -> None:
    for text in ("", "speed", "slo", "slo:", "slo:0ms", "slo:20", "slo:-1ms", "slo:soon", "slo:1 m"):
        with pytest.raises(UsageError, match=f"objective = {text!r}"):
            parse_objective(text)
    for text in ("", "none", "fixed:3", "adaptive:3", "threshold:mtp:0.3", "threshold:high", "threshold:nan"):
        with pytest.raises(UsageError, match=f"policy = {text!r}"):
            parse_policy(text)
    for text in ("fixed", "fixed:mtp", "none:1", "threshold:1.5", "threshold:mtp", "adaptve"):
        with pytest.raises(UsageError, match=f"policy = {text!r}"):
            parse_policy(text, replay=True)
    for kind, seconds in (("speed", 0.0), ("slo", 0.0), ("slo", -1.0), ("latency", 1.0)):
        with pytest.raises(UsageError, match="objective"):
            Objective(kind, seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -5.0, 0.0])
def test_seconds_of_a_broken_clock_are_not_learned_from(seconds: float) -> None:
    """Of all stages, of one, and of drafting: what is believed stays, and so do the decisions."""
    believed = LatencySurface(ROWS, SECONDS)
    policy, plans = adaptive(believed), []
    simulation = SimulatedSequences(policy, Machine({"d": 1e-5}), {"d": always(0.8)}, names(2)).run(150)
    before = [believed.seconds(rows, 2, 1000) for rows in ROWS]
    for _ in range(100):
        spans = [Span(name, 500, (0,), True, DEPTH) for name in simulation.at]
        plan = policy.plan(spans, BUDGET)
        plans += [sum(each.depth for each in plan.values())] if policy.step.measured_depth is None else []
        drafts = {name: Draft.chain(name, range(each.depth), drafter="d") for name, each in plan.items()}
        rows = 2 + sum(map(len, policy.admit(drafts, BUDGET).values()))
        policy.learn([Verdict(name, tuple(range(4)), tuple(range(5))) for name in simulation.at])
        policy.observe(StepRecord(rows, 2, rows - 2, 8, 10, {"forward": seconds, "draft": seconds}, (500, 500)))
    assert [believed.seconds(rows, 2, 1000) for rows in ROWS] == pytest.approx(before, rel=0.01)  # some came later
    assert 0 < believed.draft_seconds("d", 2, 3) < 1e-3 and min(plans[8:]) > 0
    assert "nan" not in policy.explain() and "inf" not in policy.explain()


# ---- exact rules ----------------------------------------------------------------------------------------------------


def drawn(name: str, tokens: Sequence[int], scores: Sequence[float]) -> Draft:
    parents = tuple(range(-1, len(tokens) - 1))
    return Draft(name, tuple(tokens), parents, tuple(scores), "d", np.full((len(tokens), 50), 0.02))


def test_draws_are_verified_as_planned_whatever_they_are() -> None:
    """Same history, other draws: what is admitted, and what is planned next before any verdict, does not depend on
    them, under either exact rule. Under `match` it does."""

    def sizes(rule: str, seed: int) -> list[dict[str, int]]:
        policy = adaptive(Machine(), rule=rule)
        draw = np.random.default_rng(seed)
        spans = [Span(name, 100, (0,), True, DEPTH) for name in names(4)]
        seen = []
        for step in range(40):
            plan = policy.plan(spans, BUDGET)
            drafts = {
                name: drawn(
                    name, draw.integers(0, 50, each.depth).tolist(), np.sort(draw.random(each.depth))[::-1].tolist()
                )
                for name, each in plan.items()
            }
            seen.append({name: len(draft) for name, draft in policy.admit(drafts, BUDGET).items()})
            # the same accepted counts and emitted tokens in both runs
            policy.learn([Verdict(name, (0,) * (step % 2) if name in drafts else (), (7, 8)) for name in names(4)])
            policy.observe(StepRecord(8, 4, 4, 0, 8, {"forward": 6e-3}, (100,) * 4))
        return seen

    for rule in ("rejection", "block"):
        assert sizes(rule, 1) == sizes(rule, 2) == sizes(rule, 3)
        assert any(sizes(rule, 1))
    assert sizes("match", 1) != sizes("match", 2)


def test_deterministic_drafts_may_be_cut_under_an_exact_rule() -> None:
    policy = adaptive(Machine(), rule="rejection")
    spans = [Span(name, 100, (0,), True, DEPTH) for name in names(16)]
    plan = policy.plan(spans, BUDGET)
    drafts = {name: Draft.chain(name, range(DEPTH), drafter="d", scores=[0.02] * DEPTH) for name in plan}
    assert sum(len(draft) for draft in policy.admit(drafts, BUDGET).values()) < 16 * DEPTH


# ---- the step's edges -----------------------------------------------------------------------------------------------


def test_prompt_chunks_spans_without_room_and_steps_without_spans() -> None:
    policy = adaptive(Machine())
    assert policy.plan([], BUDGET) == {}
    assert policy.admit({}, BUDGET) == {}
    policy.learn([])
    spans = [Span("a", 0, (1,) * 64, False, 0), Span("b", 50, (1,), True, 0), Span("c", 9, (1, 2, 3), True, 3)]
    for _ in range(5):
        plan = policy.plan(spans, BUDGET)
        assert set(plan) <= {"c"}
        assert plan.get("c", DraftDecision(0)).depth <= 3
        assert policy.admit({}, BUDGET) == {}
        policy.learn([Verdict("b", (), (5,)), Verdict("c", (), (6,))])
        policy.observe(StepRecord(68, 3, 0, 0, 2, {"forward": 0.05}, (0, 50, 9)))
    policy.end("a")
    policy.end("never seen")


def test_a_missing_verdict_is_no_observation() -> None:
    policy = adaptive(Machine())
    spans = [Span("a", 50, (1,), True, DEPTH), Span("b", 50, (1,), True, DEPTH)]
    plan = policy.plan(spans, BUDGET)
    policy.admit({name: Draft.chain(name, range(each.depth), drafter="d") for name, each in plan.items()}, BUDGET)
    policy.learn([Verdict("a", (), (99,))])
    policy.end("a")  # its draft is learned from all the same
    policy.end("b")
    policy.plan([Span("c", 50, (1,), True, DEPTH)], BUDGET)  # plans from what was learned
    assert policy.acceptance["d"].depths.trials[0] == 1


# ---- what the policy itself takes -----------------------------------------------------------------------------------


def test_drafts_are_verified_as_they_are_only_if_they_fit_the_budget() -> None:
    """Where rows cost nothing hardly any draft is judged."""
    flat = LatencySurface([1, 512], [5e-3, 5.001e-3])
    policy = adaptive(flat)
    SimulatedSequences(policy, flat, {"d": always(0.7)}, names(32)).run(200)
    for _ in range(70):
        spans = [Span(f"x{i}", 50, (0,), True, 4) for i in range(32)]
        plan = policy.plan(spans, 40)
        drafts = {name: Draft.chain(name, range(each.depth), drafter="d") for name, each in plan.items()}
        assert sum(map(len, policy.admit(drafts, 40).values())) <= 40
        policy.observe(StepRecord(32, 32, 0, 0, 32, {"forward": 5e-3}, (50,) * 32))


def test_what_the_policy_takes_keeps_to_its_budget() -> None:
    own = PolicySeconds()
    assert own.interval(own.judging) == 0
    for _ in range(400):
        own.observe(600e-6, step_seconds=10e-3, kind="unjudged")  # 6 %
        own.observe(4e-3, step_seconds=10e-3, kind="planned")
        own.observe(2.6e-3, step_seconds=10e-3, kind="judged")
    assert own.update_interval == 4 * UPDATE_INTERVAL
    assert own.interval(own.planning) == pytest.approx(4e-3 / (0.005 * 10e-3)), "planning takes 0.5 % of the time"
    assert own.judging == pytest.approx(2e-3)
    for _ in range(400):
        own.observe(10e-6, step_seconds=10e-3, kind="unjudged")
    assert own.update_interval == UPDATE_INTERVAL


def test_one_pause_of_the_machine_does_not_end_planning() -> None:
    own = PolicySeconds()
    for _ in range(40):
        own.observe(4e-4, step_seconds=6e-3, kind="planned")
    usual = own.interval(own.planning)
    own.observe(1.0, step_seconds=1.0056, kind="planned")
    assert own.interval(own.planning) < 3 * usual


def test_what_large_batches_took_the_policy_bars_no_drafts_for_small_ones_nor_for_ever() -> None:
    own = PolicySeconds()
    for _ in range(40):
        own.observe(5e-3, step_seconds=70e-3, kind="judged", drafting=128)
    assert own.drafting(128) == pytest.approx(5e-3) and own.drafting(1) == 0
    for _ in range(80):
        own.forget_drafting(128)
    assert own.drafting(128) < 1e-4


def test_what_a_row_must_bring_is_in_tokens_of_a_sequence_whatever_requests_weigh() -> None:
    said = []
    for weight in (1.0, 1e6):
        policy = adaptive(Machine(), weights=dict.fromkeys(names(4), weight))
        SimulatedSequences(policy, Machine(), {"d": always(0.6)}, names(4)).run(100)
        figures = policy.figures()
        assert figures is not None
        said.append(figures.row_cost)
    assert said[0] == pytest.approx(said[1])


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
