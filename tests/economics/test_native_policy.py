"""What the policy computes in C++ beside the same in Python: judging drafts, and the filter of prices."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wager.economics.acceptance import AcceptanceModel
from wager.economics.latency.kalman import KalmanFilter, covariance, latency_filter
from wager.economics.policy.admission import keep_nodes, select
from wager.economics.policy.judging import native_judge
from wager.types import Draft

NATIVE = native_judge()
pytestmark = pytest.mark.skipif(NATIVE is None, reason="the native kernels are not built")


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
