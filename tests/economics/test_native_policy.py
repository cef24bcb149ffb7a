"""What the policy computes in C++ beside the same in Python: acceptance, judging, planning, the filter of prices."""

from __future__ import annotations

import math
from copy import deepcopy

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oracle import acceptance as python
from oracle.collapse import DrafterRecord, NativeRecord
from oracle.judging import keep_nodes, select
from oracle.kalman import KalmanFilter
from oracle.planning import DrafterForecast, PlannedBatch, forecast, most_profitable
from oracle.step_times import DraftTimes, StepTimes
from wager.economics.acceptance import AcceptanceModel
from wager.economics.policy.base import draft_selector
from wager.economics.policy.learning import CollapseWatch
from wager.economics.surface import covariance, latency_filter
from wager.kernels import _native
from wager.types import Draft

# ---- judging --------------------------------------------------------------------------------------------------------


@st.composite
def drawn_drafts(draw: st.DrawFn) -> dict[str, Draft]:
    """Trees, some with equal scores and some without scores."""
    drafts = {}
    for number in range(draw(st.integers(1, 6))):
        size = draw(st.integers(1, 8))
        parents = tuple(draw(st.integers(-1, node - 1)) for node in range(size))
        scores: list[float] = []
        for parent in parents:
            above = scores[parent] if parent >= 0 else 1.0
            scores.append(above * draw(st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0.0, 1.0))))
        scored = tuple(scores) if draw(st.booleans()) else ()
        drafts[f"r{number}"] = Draft(f"r{number}", tuple(range(10, 10 + size)), parents, scored, "d")
    return drafts


def trained(rounds: int) -> AcceptanceModel:
    model = AcceptanceModel()
    for number in range(rounds):
        draft = Draft.chain("r", [1, 2], drafter="d", scores=[0.8, 0.3])
        model.learn_draft(model.start_sequence(), draft, [1, 0] if number % 3 else [0], depth=2)
    return model


@settings(max_examples=30, deadline=None)
@given(
    drawn_drafts(),
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
    starts, sequences = [], []
    for number, draft in enumerate(drafts.values()):
        starts.append(len(gains))
        sequences.append(_native.SequenceAcceptance(0.3 * number - 0.5, 0.2))
        each = model.survival(draft, sequences[-1])
        gains += [(1.0 if mine is None else mine[number]) * value for value in each]
    chosen = select(gains, seconds[first:], goodput=1.0, limit=limit)
    expected = {}
    for start, (seq_id, draft) in zip(starts, drafts.items(), strict=True):
        if nodes := [node - start for node in sorted(chosen.taken) if start <= node < start + len(draft)]:
            expected[seq_id] = keep_nodes(draft, nodes)
    for models in (1, len(drafts)):  # one for all, or for each its own
        judged = draft_selector.select(drafts, [model] * models, sequences, mine, seconds, first, 1.0, limit)
        assert judged[:2] == (expected, len(chosen.taken))
        assert (judged[0] is drafts) == (len(chosen.taken) == len(gains))
        assert judged[2] == pytest.approx(chosen.gain) and judged[4] == pytest.approx(chosen.benefit, abs=1e-12)
        assert judged[3] == (None if chosen.cut is None else pytest.approx(chosen.cut))


@pytest.mark.parametrize(
    ("parents", "scores", "seconds", "error"),
    [
        ((-1, 5), (0.5, 0.2), [0.0] * 9, "precede"),
        (("a", "b"), (0.5, 0.2), [0.0] * 9, "int"),
        ((-1, 0), (0.5,), [0.0] * 9, "a score for each"),
        ((-1, 0), (0.5, 0.2), [0.0, 0.0], "too few rows"),
    ],
)
def test_what_cannot_be_judged_is_an_error(
    parents: tuple[int, ...], scores: tuple[float, ...], seconds: list[float], error: str
) -> None:
    draft = Draft("r", (1, 2), parents, scores, "d")
    with pytest.raises(ValueError, match=error):
        draft_selector.select({"r": draft}, [AcceptanceModel()], None, None, seconds, 0, 1.0, 5)


# ---- acceptance -----------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.none(), drawn_drafts()),
            st.lists(st.integers(9, 14), min_size=1, max_size=6),
            st.integers(1, 9),
            st.booleans(),
            st.booleans(),
            st.sampled_from(["", "drawn", "forecast"]),
        ),
        max_size=40,
    )
)
def test_acceptance_is_learned_as_in_python(rounds: list[tuple]) -> None:  # type: ignore[type-arg]
    """Bit by bit: what a policy decides by does not depend on the language that it is learned in."""
    native, twin = AcceptanceModel(), python.AcceptanceModel()
    pairs = [(native.start_sequence(), twin.start_sequence()) for _ in range(6)]
    forecast = [0.7, 0.5, 0.3, 0.2]

    def same() -> None:
        for name in ("log_odds", "odds", "trials"):
            assert getattr(native.depths, name) == getattr(twin.depths, name)
            assert getattr(native.bins, name) == getattr(twin.bins, name)
        assert [(one.mean, one.variance) for one, _ in pairs] == [(two.mean, two.variance) for _, two in pairs]
        assert np.reshape(native.shifts(), (-1, 16)).tolist() == twin.confidence_shifts.tolist()

    for drafts, emitted, depth, stops, ages, mode in rounds:
        for number, draft in enumerate([None] if drafts is None else drafts.values()):
            accepted = min(len(draft), len(emitted)) if mode == "drawn" and draft is not None else None
            given = {"accepted": accepted, "depth": depth, "stops_early": stops}
            given["forecast"] = forecast if mode == "forecast" else None
            learned = [
                model.learn_draft(pairs[number][side], draft, emitted, **given)  # type: ignore[arg-type]
                for side, model in enumerate((native, twin))
            ]
            assert learned[0] == learned[1]
            if draft is not None:
                assert _native.compare(draft, emitted) == python.compare(draft, emitted)
                survival = [
                    model.survival(draft, pairs[number][side])  # type: ignore[arg-type]
                    for side, model in enumerate((native, twin))
                ]
                assert survival[0] == survival[1]
        same()
        if ages:
            native.age()
            twin.age()
            native.end_sequence(pairs[0][0])
            twin.end_sequence(pairs[0][1])
            native.compare_sequences([one for one, _ in pairs])
            twin.compare_sequences([two for _, two in pairs])
            same()
    copy = deepcopy(native)
    copy.learn_round(copy.start_sequence(), accepted=0, tested=1)
    same()


@pytest.mark.parametrize(("scores", "emitted"), [((0.97, 0.95), (3,)), ((0.05, 0.004), (1, 2, 3))])
def test_any_estimates_are_gone_on_from(scores: tuple[float, ...], emitted: tuple[int, ...]) -> None:
    """Also of a drafter that is sure and always wrong, or always right and unsure."""
    model, draft = AcceptanceModel(), Draft.chain("r", (1, 2), drafter="d", scores=scores)
    sequence = model.start_sequence()
    for number in range(6000):
        model.learn_draft(sequence, draft, emitted, depth=2)
        if number % 20 == 0:
            model.age()
    other = AcceptanceModel()
    other.start_from(*model.estimates().values())
    assert other.estimates() == model.estimates()
    for damaged in ([math.nan] * 16, [1e9] * 16, [0.0] * 15):
        with pytest.raises(ValueError, match="other cells"):
            other.start_from(damaged, other.bins.log_odds)
        with pytest.raises(ValueError, match="other cells"):
            other.start_from(other.depths.log_odds, damaged)
    assert other.estimates() == model.estimates(), "all or nothing"


# ---- the filter -----------------------------------------------------------------------------------------------------


def test_prices_are_filtered_as_in_python() -> None:
    draw = np.random.default_rng(4)
    change = covariance([0.3, 0.5, 0.15, 0.15, 0.15, 0.01], related=slice(2, 5), places=[0.0, 0.3, 0.9])
    python = KalmanFilter(change, noise_sd=0.08, uncertainty=2.0)
    knots = {"rows": [1, 2, 3], "seconds": [1.0, 2.0, 3.0], "per_request": 1e9, "per_context": 0.0, "per_pair": 0.0}
    native = _native.StepTimes(latency_filter(change, noise_sd=0.08, uncertainty=2.0), **knots)  # which bounds nothing
    for number in range(400):
        slopes = (draw.random(6) * (draw.random(6) < 0.6)).tolist()
        error = float(draw.normal(0.0, 0.1)) + 0.8 * (3 < number < 9 or 150 < number < 200)  # the machine changes
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


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=24),
    drafters=st.integers(1, 4),
    cheap=st.integers(2, 40),
    price=st.sampled_from([0.001, 0.01, 0.1]),
    drafting=st.sampled_from([1e-7, 2e-4]),
    scored=st.booleans(),
    stops=st.booleans(),
    weighted=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_sequences_are_planned_as_with_arrays(
    sizes: list[int],
    drafters: int,
    cheap: int,
    price: float,
    drafting: float,
    scored: bool,
    stops: bool,
    weighted: bool,
    seed: int,
) -> None:
    """Rows are cheap up to a count, then dear; drafting shares some of its work."""
    draw, count, goodput = np.random.default_rng(seed), len(sizes), 240.0
    weights = draw.choice([0.5, 1.0, 2.0], count) if weighted else np.ones(count)
    batch = PlannedBatch(goodput, np.array(sizes), weights)
    depth = min(7, max(sizes))
    rows = np.arange(count * depth + 2)
    extra = 5e-3 * (0.004 * rows + price * np.maximum(0, rows + count - cheap) - price * max(0, count - cheap))
    native = _native.DraftPlanner(
        rooms=sizes,
        weights=weights.tolist(),
        extra=extra.tolist(),
        goodput=goodput,
        max_min_survival=0.95,
    )
    forecasts = []
    for _ in range(drafters):
        model = AcceptanceModel()
        for _ in range(40):
            scores = np.cumprod(draw.random(3) ** 0.4).tolist()
            draft, right = Draft.chain("r", [0, 1, 2], drafter="d", scores=scores), int(draw.integers(0, 4))
            past = [0.6, 0.4, 0.3]
            model.learn_draft(model.start_sequence(), draft, [*range(right), -1], depth=3, forecast=past)
        model.has_scores = scored
        sequences = [_native.SequenceAcceptance(float(draw.normal(0.3, 0.8)), 0.2) for _ in sizes]
        shares = 1 + draw.random() * 0.9 ** np.arange(count)  # of later sequences less
        seconds = drafting * np.outer(shares, 1 + draw.random(depth))
        catch_up, unjudged = 1e-5 * draw.random(count), draw.random(count) < 0.2
        expected = np.where(np.arange(depth) < np.array(sizes)[:, None], forecast(model, sequences, depth), 0.0)
        forecasts.append(DrafterForecast(model, expected, seconds, catch_up, unjudged, stops))
        survival = native.add(
            model=model,
            sequences=sequences,
            offset=None,
            seconds=seconds.tolist(),
            catch_up=catch_up.tolist(),
            unjudged=unjudged.tolist(),
            stops_early=stops,
        )
        assert np.array(survival) == pytest.approx(expected)
    costs = [goodput * extra[count] / count, 0.02]
    plan = most_profitable(forecasts, batch, extra, row_costs=costs)
    drafter_of, depths, min_survival = native.choose(costs, overhead=0.0)
    assert drafter_of == plan.drafters.tolist()
    assert depths == plan.depths.tolist()
    assert min_survival == pytest.approx(plan.min_survival)


def test_a_third_drafter_whose_call_costs_more_than_it_brings_is_left_out_where_two_are_good() -> None:
    """It is a hair better for one of sixteen sequences, of which each other suits half."""
    count = 16
    planner = _native.DraftPlanner(
        rooms=[4] * count,
        weights=[1.0] * count,
        extra=[1e-5 * rows for rows in range(4 * count + 2)],
        goodput=100.0,
        max_min_survival=0.95,
    )
    suited = [range(8), range(8, count), range(1)]
    for those, odds, call in zip(suited, (2.0, 2.0, 2.3), (1e-4, 1e-4, 2e-3), strict=True):
        planner.add(
            model=AcceptanceModel(),
            sequences=[_native.SequenceAcceptance(odds if row in those else -3.0, 0.2) for row in range(count)],
            offset=None,
            seconds=[[call * depth for depth in range(1, 5)]] + [[1e-6] * 4] * (count - 1),
            catch_up=[0.0] * count,
            unjudged=[False] * count,
            stops_early=False,
        )
    drafters, depths, _ = planner.choose([0.01], overhead=0.0)
    assert drafters == [0] * 8 + [1] * 8
    assert depths == [4] * count


# ---- seconds --------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6, unique=True).map(sorted),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 8), st.integers(0, 5000), st.floats(0.3, 3.0)), max_size=40),
    st.integers(0, 99),
)
@example([1, 8], [(8, 8, 0, 0.3)] * 25, 0)  # requests that would cost less than nothing
def test_what_steps_take_is_learned_as_in_python(
    rows: list[int], steps: list[tuple[int, int, int, float]], seed: int
) -> None:
    draw = np.random.default_rng(seed)
    seconds = np.cumsum(1e-3 * draw.random(len(rows)) + 1e-5).tolist()
    costs = dict(zip(("per_request", "per_context", "per_pair"), (1e-4, 1e-7, 1e-9) * draw.random(3), strict=True))
    change = covariance([0.3, 0.5, *[0.15] * len(rows), 0.01])
    given = {"rows": rows, "seconds": seconds, **costs}
    native = _native.StepTimes(latency_filter(change, noise_sd=0.08), **given)
    python = StepTimes(KalmanFilter(change, noise_sd=0.08), **given)
    for count, requests, context, off in steps:
        shape = count, requests, context
        assert native.seconds(*shape) == pytest.approx(python.seconds(*shape), rel=1e-6)
        assert native.slopes(*shape) == pytest.approx(python.slopes(*shape), rel=1e-6)
        several = [1, 2, 3, 50, 70]
        assert native.seconds_by_rows(several, requests, context) == [
            native.seconds(each, requests, context) for each in several
        ]
        found = native.deviations(count, several, requests, context)
        assert found == pytest.approx(python.deviations(count, several, requests, context), rel=1e-6, abs=1e-12)
        taken = off * python.seconds(*shape)
        native.observe(*shape, taken)
        python.observe(*shape, taken)
    copy, before = deepcopy(native), native.values()
    copy.observe(1, 1, 0, 1.0)
    assert native.values() == before != copy.values()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6, unique=True).map(sorted),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 8), st.floats(0.1, 9.0)), max_size=40),
    st.booleans(),
)
def test_what_drafting_takes_is_learned_as_in_python(
    requests: list[int], calls: list[tuple[int, int, float]], falls: bool
) -> None:
    per_call, per_token = [1e-4 * count for count in requests], [2e-5 + 1e-6 * count for count in requests]
    if falls:
        per_call.reverse()
    change = covariance([0.2, 0.2, *[0.1] * len(requests)])
    given = {"requests": requests, "per_call": per_call, "per_token": per_token}
    native = _native.DraftTimes(latency_filter(change, noise_sd=0.3), **given)
    python = DraftTimes(KalmanFilter(change, noise_sd=0.3), **given)
    for count, depth, off in calls:
        expected = python.seconds_by_depth(count, [1, depth])
        assert native.seconds_by_depth(count, range(1, depth + 1))[:: max(1, depth - 1)] == pytest.approx(
            expected if depth > 1 else expected[:1], rel=1e-6
        )
        taken = off * expected[1]
        assert native.observe(count, depth, taken) and python.observe(count, depth, taken)
    assert native.per_call == pytest.approx(python.per_call, rel=1e-6)
    assert native.per_token == pytest.approx(python.per_token, rel=1e-6)
    assert not _native.DraftTimes(
        latency_filter(change, noise_sd=0.3),
        **{**given, "per_call": [0.0] * len(requests), "per_token": [0.0] * len(requests)},
    ).observe(1, 1, 1.0)


def test_times_of_knots_that_do_not_fit_are_refused() -> None:
    few, costs = (
        latency_filter(covariance([0.1] * 4), noise_sd=0.1),
        {"per_request": 0, "per_context": 0, "per_pair": 0},
    )
    with pytest.raises(ValueError, match="too few unknowns"):
        _native.StepTimes(few, rows=[1, 2], seconds=[1.0, 2.0], **costs)
    for rows, seconds in (([2, 1], [1.0, 2.0]), ([1], [1.0, 2.0]), ([], [])):
        with pytest.raises(ValueError, match="ascending knots"):
            _native.StepTimes(few, rows=rows, seconds=seconds, **costs)
        with pytest.raises(ValueError, match="ascending knots"):
            _native.DraftTimes(few, requests=rows, per_call=seconds, per_token=seconds)
    with pytest.raises(ValueError, match="other unknowns"):
        _native.DraftTimes(few, requests=[1], per_call=[1.0], per_token=[1.0])
    others = _native.StepTimes(latency_filter(covariance([0.1] * 40), noise_sd=0.1), rows=[1], seconds=[1.0], **costs)
    assert others.deviations(1, [2], 1, 0) == [0.0]
    others.observe(1, 1, 0, 2.0)
    assert others.values()[0] > 0 and others.values()[4:] == [0.0] * 36  # a step says nothing of what else is followed
    times = _native.StepTimes(few, rows=[1], seconds=[1.0], **costs)
    with pytest.raises(ValueError, match="one float for each unknown"):
        times.update([1.0], 0.0)
    with pytest.raises(TypeError):
        times.seconds_by_rows(1, 1, 0)  # type: ignore[arg-type]


# ---- collapse -------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, 80), st.integers(1, 30)), max_size=12), st.integers(0, 99)
)
def test_a_collapse_is_found_as_in_python(times: list[tuple[float, int, int]], seed: int) -> None:
    draw, native, python = np.random.default_rng(seed), NativeRecord(), DrafterRecord()
    for number, (rate, drafts, length) in enumerate([(0.8, 80, 20), *times]):
        for index in range(drafts):
            sequence, right = f"{number} {index // length}", bool(draw.random() < rate)
            changed = python.see(sequence, right=right)
            assert native.see(sequence, right=right) == changed and native.collapsed == python.collapsed
            if changed:
                assert (native.usual, native.lately) == (python.usual, python.lately)


def test_the_watch_refuses_what_is_no_step() -> None:
    with pytest.raises(AttributeError):
        CollapseWatch().add([object()])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="steps must be a list"):
        CollapseWatch().add(7)  # type: ignore[arg-type]
