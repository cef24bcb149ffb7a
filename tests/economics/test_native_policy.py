"""What the policy computes in C++ beside the same in Python: judging drafts, planning, and the filter of prices."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.kalman import KalmanFilter
from wager.economics.acceptance import AcceptanceModel
from wager.economics.latency import LatencyCache, StaticLatency
from wager.economics.options import THROUGHPUT
from wager.economics.policy.admission import keep_nodes, select
from wager.economics.policy.base import DrafterCapabilities
from wager.economics.policy.goodput import GoodputEstimator
from wager.economics.policy.judging import native_judge
from wager.economics.policy.objective import ObjectiveWeights
from wager.economics.policy.own_seconds import OwnSeconds
from wager.economics.policy.planning import Planner
from wager.economics.policy.sequence_state import DrafterProfile, PolicyStep, SequencePlan, SequencePolicyState
from wager.economics.policy.step_load import StepLoads
from wager.economics.surface import covariance, latency_filter
from wager.types import Draft, Span

NATIVE = native_judge()


# ---- judging --------------------------------------------------------------------------------------------------------


@st.composite
def scored_drafts(draw: st.DrawFn) -> dict[str, Draft]:
    """Trees with scores, some of them equal."""
    drafts = {}
    for number in range(draw(st.integers(1, 6))):
        size = draw(st.integers(1, 8))
        parents = tuple(draw(st.integers(-1, node - 1)) for node in range(size))
        scores: list[float] = []
        for parent in parents:
            above = scores[parent] if parent >= 0 else 1.0
            scores.append(above * draw(st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0.0, 1.0))))
        drafts[f"r{number}"] = Draft(f"r{number}", tuple(range(10, 10 + size)), parents, tuple(scores), "d")
    return drafts


def trained(rounds: int) -> AcceptanceModel:
    model = AcceptanceModel()
    for number in range(rounds):
        model.learn_scores(Draft.chain("r", [1, 2], drafter="d", scores=[0.8, 0.3]), [0, 1], [0] * (number % 3 > 0))
    return model


@settings(max_examples=200, deadline=None)
@given(
    scored_drafts(),
    st.integers(-1, 50),
    st.floats(0.0, 0.5),
    st.integers(0, 60),
    st.integers(0, 3),
    st.one_of(st.none(), st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=6, max_size=6)),
)
def test_drafts_are_judged_as_in_python(
    drafts: dict[str, Draft], limit: int, price: float, rounds: int, first: int, weights: list[float] | None
) -> None:
    model = trained(rounds)
    mine = None if weights is None else weights[: len(drafts)]
    seconds = np.cumsum(np.full(80, price)).tolist()
    gains: list[float] = []
    starts = []
    for number, draft in enumerate(drafts.values()):
        starts.append(len(gains))
        weight = 1.0 if mine is None else mine[number]
        gains += [weight * each for each in model.survival(draft, model.start_sequence())]
    expected = select(gains, seconds[first:], goodput=1.0, limit=limit)
    kept = {}
    for start, (name, draft) in zip(starts, drafts.items(), strict=True):
        nodes = sorted(node - start for node in expected.taken if start <= node < start + len(draft))
        if nodes:
            kept[name] = keep_nodes(draft, nodes)
    judged = NATIVE.judge(drafts, [model.bins.odds], mine, seconds, first, 1.0, limit)
    assert judged == (kept, len(expected.taken), expected.gain, expected.cut, expected.benefit)
    each_its_own = [model.bins.odds] * len(drafts)
    assert NATIVE.judge(drafts, each_its_own, mine, seconds, first, 1.0, limit) == judged


def test_what_is_not_judged_natively_is_left_to_python() -> None:
    odds, seconds = trained(0).bins.odds, [0.0] * 10
    scored = Draft.chain("r", [1, 2], drafter="d", scores=[0.5, 0.2])

    def judge(draft: object, *, corrections: object = odds, seconds: object = seconds) -> object:
        return NATIVE.judge({"r": draft}, [corrections], None, seconds, 0, 1.0, 5)

    assert judge(scored) is not None
    for declined in (
        judge(Draft.chain("r", [1, 2], drafter="d")),
        judge(Draft("r", (1, 2), (-1, 0), (0.5, 0.2), "d", np.ones((2, 3)))),
        judge(Draft("r", (1, 2), (-1, 5), (0.5, 0.2), "d")),
        judge(Draft("r", (1, 2), (-1, 0), (0.5,), "d")),
        judge("no draft"),
        judge(scored, seconds=[0.0, 0.0]),
        judge(scored, seconds="abcdef"),
        judge(scored, corrections=[1.0]),
    ):
        assert declined is None


# ---- the filter -----------------------------------------------------------------------------------------------------


def test_prices_are_filtered_as_in_python() -> None:
    draw = np.random.default_rng(4)
    change = covariance([0.3, 0.5, 0.15, 0.15, 0.15, 0.01], related=slice(2, 5), places=[0.0, 0.3, 0.9])
    python = KalmanFilter(change, noise_sd=0.08, uncertainty=2.0)
    native = latency_filter(change, noise_sd=0.08, uncertainty=2.0)
    assert not isinstance(native, KalmanFilter)
    for number in range(400):
        slopes = (draw.random(6) * (draw.random(6) < 0.6)).tolist()
        error = float(draw.normal(0.0, 0.1)) + 0.8 * (150 < number < 170)  # the machine changes for a while
        python.update(slopes, error)
        native.update(slopes, error)
        assert native.values() == pytest.approx(python.values(), rel=1e-9, abs=1e-12)
        assert native.deviation(slopes) == pytest.approx(python.deviation(slopes), rel=1e-9, abs=1e-12)
    copy, before = deepcopy(native), native.values()
    copy.update([1.0] * 6, 0.3)
    assert native.values() == before != copy.values()
    with pytest.raises(ValueError, match="one float for each unknown"):
        native.update([1.0], 0.1)


# ---- planning -------------------------------------------------------------------------------------------------------


class Steps(StaticLatency):
    """Rows are cheap up to a count, then dear; drafting shares some of its work."""

    def __init__(self, cheap: int, price: float, drafting: float) -> None:
        self.cheap, self.price, self.drafting = cheap, price, drafting

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        return 5e-3 * (1 + 0.004 * rows + self.price * max(0, rows - self.cheap)) + 1e-9 * context_sum

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        return self.drafting * depth * (1 + 0.2 * requests) * (2 if drafter == "b" else 1)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=16),
    drafters=st.integers(1, 4),
    latency=st.builds(Steps, st.integers(2, 40), st.sampled_from([0.001, 0.01, 0.1]), st.sampled_from([1e-7, 2e-4])),
    scored=st.booleans(),
    stops=st.booleans(),
    weighted=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_small_batches_are_planned_as_by_arrays(
    sizes: list[int], drafters: int, latency: Steps, scored: bool, stops: bool, weighted: bool, seed: int
) -> None:
    def planner(*, native: bool) -> tuple[Planner, PolicyStep, ObjectiveWeights]:
        draw = np.random.default_rng(seed)
        profiles = []
        for name in "abcd"[:drafters]:
            model = AcceptanceModel()
            model.has_scores = scored
            for _ in range(40):
                model.learn_round(model.start_sequence(), accepted=int(draw.integers(0, 4)), tested=4)
                model.learn_shift([0.6, 0.4, 0.3], np.cumprod(draw.random(3) ** 0.4).tolist())
            profiles.append(DrafterProfile(name, DrafterCapabilities(7, stops_early=stops, catch_up_s=1e-5), model))
        cache, weights, goodput = LatencyCache(latency), ObjectiveWeights(THROUGHPUT), GoodputEstimator()
        made = Planner(profiles, cache, goodput=goodput, own=OwnSeconds())
        if not native:
            made._choose_natively = made._choose
        states = {}
        for number in range(len(sizes)):
            acceptance = [profile.acceptance.start_sequence() for profile in profiles]
            for each in acceptance:
                each.set(float(draw.normal(0.3, 0.8)), 0.2)
            weight = weights.start_sequence(float(draw.choice([0.5, 1.0, 2.0])) if weighted else 1.0)
            state = SequencePolicyState(
                f"r{number}", weight, acceptance, SequencePlan(), [0] * drafters, [-1] * drafters
            )
            state.unjudged = bool(draw.random() < 0.2)
            states[state.seq_id] = state
        spans = [Span(f"r{number}", 100 + number, (0,), True, room) for number, room in enumerate(sizes)]
        step = PolicyStep(1, spans, states=states)
        step.spans, step.ids = spans, list(states)
        goodput.record(len(sizes), expected=1.4, plain=1.0)
        step.load = StepLoads(cache, weights, goodput=goodput).load(step, new=len(sizes))
        return made, step, weights

    arrays, step, weights = planner(native=False)
    native, same_step, same_weights = planner(native=True)
    costs = arrays._row_costs(step)
    assert native._row_costs(same_step) == costs
    one, other = arrays._choose(step, weights), native._choose_natively(same_step, same_weights)
    assert other.drafters == one.drafters
    assert other.depths == one.depths
    assert other.min_survival == pytest.approx(one.min_survival)
    for survival, same in zip(one.survival, other.survival, strict=True):
        assert same == pytest.approx(survival)
    arrays.plan(step, weights)
    native.plan(same_step, same_weights)
    assert [each.depth for each in native.standing.values()] == [each.depth for each in arrays.standing.values()]
    assert (native.deepest, native._uniform) == (arrays.deepest, arrays._uniform)


def test_marginal_seconds_of_drafting_are_the_same_in_lists() -> None:
    cache = LatencyCache(Steps(8, 0.1, 1e-4))
    for sequences in (1, 2, 3, 7, 16):
        listed = cache.listed_draft_seconds("a", sequences, 5)
        assert np.array(listed) == pytest.approx(cache.marginal_draft_seconds("a", sequences, 5))
