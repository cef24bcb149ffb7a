"""What the policy computes in C++ beside the same in Python: judging drafts, planning, and the filter of prices."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.judging import select, survival
from oracle.kalman import KalmanFilter
from oracle.planning import DrafterForecast, PlannedBatch, forecast, most_profitable
from wager.economics.acceptance import AcceptanceModel, token_judge
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
        model.learn_scores(Draft.chain("r", [1, 2], drafter="d", scores=[0.8, 0.3]), [0, 1], [0] * (number % 3 > 0))
    return model


@settings(max_examples=60, deadline=None)
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
        sequences.append(model.start_sequence())
        sequences[-1].set(0.3 * number - 0.5, 0.2)
        each = survival(model, draft, sequences[-1])
        assert model.survival(draft, sequences[-1]) == pytest.approx(each)
        gains += [(1.0 if mine is None else mine[number]) * value for value in each]
    chosen = select(gains, seconds[first:], goodput=1.0, limit=limit)
    sizes = map(len, drafts.values())
    kept = [
        [node - start for node in sorted(chosen.taken) if start <= node < start + size]
        for start, size in zip(starts, sizes, strict=True)
    ]
    expected = (None if len(chosen.taken) == len(gains) else kept, len(chosen.taken))
    scores, parents = ([getattr(each, name) for each in drafts.values()] for name in ("scores", "parents"))
    for tables in (1, len(drafts)):  # one for all, or for each its own
        odds, depths = [model.bins.odds] * tables, [model.depths.odds] * tables
        offsets = [sequence.odds for sequence in sequences]
        judged = token_judge.judge(scores, parents, odds, depths, offsets, mine, seconds, first, 1.0, limit)
        assert judged[:2] == expected
        assert judged[2] == pytest.approx(chosen.gain) and judged[4] == pytest.approx(chosen.benefit, abs=1e-12)
        assert judged[3] == (None if chosen.cut is None else pytest.approx(chosen.cut))


@pytest.mark.parametrize(
    ("parents", "odds", "seconds", "error"),
    [
        ((-1, 5), None, [0.0] * 9, "precede"),
        (("a", "b"), None, [0.0] * 9, "int"),
        ((-1, 0), [1.0], [0.0] * 9, "odds"),
        ((-1, 0), None, [0.0, 0.0], "too few rows"),
    ],
)
def test_what_cannot_be_judged_is_an_error(
    parents: tuple[int, ...], odds: list[float] | None, seconds: list[float], error: str
) -> None:
    model = trained(0)
    with pytest.raises(ValueError, match=error):
        token_judge.judge(
            [(0.5, 0.2)], [parents], [odds or model.bins.odds], [model.depths.odds], None, None, seconds, 0, 1.0, 5
        )


# ---- the filter -----------------------------------------------------------------------------------------------------


def test_prices_are_filtered_as_in_python() -> None:
    draw = np.random.default_rng(4)
    change = covariance([0.3, 0.5, 0.15, 0.15, 0.15, 0.01], related=slice(2, 5), places=[0.0, 0.3, 0.9])
    python = KalmanFilter(change, noise_sd=0.08, uncertainty=2.0)
    native = latency_filter(change, noise_sd=0.08, uncertainty=2.0)
    assert not isinstance(native, KalmanFilter)
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


@settings(max_examples=60, deadline=None)
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
        several_drafters=0.93,
        max_min_survival=0.95,
    )
    forecasts = []
    for _ in range(drafters):
        model = AcceptanceModel()
        model.has_scores = scored
        for _ in range(40):
            model.learn_round(model.start_sequence(), accepted=int(draw.integers(0, 4)), tested=4)
            model.learn_shift([0.6, 0.4, 0.3], np.cumprod(draw.random(3) ** 0.4).tolist())
        sequences = [model.start_sequence() for _ in sizes]
        for each in sequences:
            each.set(float(draw.normal(0.3, 0.8)), 0.2)
        shares = 1 + draw.random() * 0.9 ** np.arange(count)  # of later sequences less
        seconds = drafting * np.outer(shares, 1 + draw.random(depth))
        catch_up, unjudged = 1e-5 * draw.random(count), draw.random(count) < 0.2
        expected = np.where(np.arange(depth) < np.array(sizes)[:, None], forecast(model, sequences, depth), 0.0)
        forecasts.append(DrafterForecast(model, expected, seconds, catch_up, unjudged, stops))
        survival_of = np.empty((count, depth))
        native.add(
            log_odds=model.depths.log_odds,
            means=[each.mean for each in sequences],
            variances=[each.variance for each in sequences],
            seconds=seconds,
            catch_up=catch_up.tolist(),
            unjudged=unjudged.tolist(),
            shifts=model.confidence_shifts,
            has_scores=scored,
            stops_early=stops,
            survival=survival_of,
        )
        assert survival_of == pytest.approx(expected)
    costs = [goodput * extra[count] / count, 0.02]
    plan = most_profitable(forecasts, batch, extra, row_costs=costs)
    drafter_of, depths, min_survival = native.choose(costs)
    assert drafter_of == plan.drafters.tolist()
    assert depths == plan.depths.tolist()
    assert min_survival == pytest.approx(plan.min_survival)
