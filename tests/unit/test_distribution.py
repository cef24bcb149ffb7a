"""The processed distribution against a slow definition in plain Python; histories, draws, damage."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wager.errors import NumericsError, UsageError
from wager.kernels import noise
from wager.types import SamplingParams
from wager.verify.accept import NoiseCoins
from wager.verify.distribution import History, ProcessedDistribution, process, token_logprob

HOT = SamplingParams(temperature=1.0)


def penalised(logits, params: SamplingParams, prompt, output) -> list[float]:
    """Penalties and bias as the APIs document them, one token at a time."""
    z = [float(x) for x in logits]
    for token in range(len(z)):
        if token in prompt or token in output:
            z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
        z[token] -= params.frequency_penalty * output.count(token)
        z[token] -= params.presence_penalty * (token in output)
        z[token] += params.logit_bias.get(token, 0.0)
    return z


def survivors(scores: list[float], params: SamplingParams) -> tuple[list[int], bool]:
    """Ids left by top-k, top-p, min-p, and whether the nucleus ends so near its limit that rounding decides."""
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if params.top_k:
        ranked = ranked[: params.top_k]
    weights = [math.exp(scores[i] - scores[ranked[0]]) for i in ranked]
    total, count, close = math.fsum(weights), len(ranked), False
    if params.top_p < 1:
        masses = [math.fsum(weights[: n + 1]) / total for n in range(len(ranked))]
        count = next((n + 1 for n, mass in enumerate(masses) if mass >= params.top_p), count)
        close = any(abs(mass - params.top_p) < 1e-9 for mass in masses)
    ranked = [i for i, weight in zip(ranked[:count], weights, strict=False) if weight >= params.min_p * weights[0]]
    return sorted(ranked), close


tenths = st.integers(-60, 60).map(lambda n: n / 10)


@st.composite
def cases(draw):
    vocab = draw(st.integers(2, 24))
    token = st.integers(0, vocab - 1)
    logits = draw(st.lists(tenths, min_size=vocab, max_size=vocab))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 1.7])),
        top_k=draw(st.integers(0, vocab + 2)),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.61, 0.2, 1e-6])),
        min_p=draw(st.sampled_from([0.0, 0.013, 0.37, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.4, -0.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25])),
        logit_bias=draw(st.dictionaries(token, tenths, max_size=3)),
    )
    words = st.lists(token, max_size=12)
    return np.array(logits, np.float32), params, draw(words), draw(words), draw(words)


@settings(max_examples=50, deadline=None)
@given(cases())
def test_shape_is_the_definition(case):
    logits, params, prompt, output, path = case
    history = History(prompt, output).extended(path[:3]).extended(path[3:])
    shaped = process(logits, params, history)
    z = penalised(logits, params, prompt, output + path)
    ids = np.arange(len(z)) if shaped.ids is None else shaped.ids
    if params.greedy:
        assert shaped.greedy
        best = max(range(len(z)), key=lambda i: (z[i], -i))
        assert shaped.choose(1, 2) == best
        assert shaped.probabilities(len(z)).tolist() == np.eye(len(z))[best].tolist()
        return
    scores = [x / params.temperature for x in z]
    expected, close = survivors(scores, params)
    if not close:
        assert ids.tolist() == expected
    assert shaped.scores == pytest.approx([scores[i] for i in ids], rel=1e-12, abs=1e-12)
    weights = np.zeros(len(z))
    weights[ids] = np.exp(shaped.scores - shaped.scores.max())
    assert shaped.probabilities(len(z)) == pytest.approx(weights / weights.sum(), rel=1e-12)


@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 0.999, 1 - 1e-12])
@pytest.mark.parametrize("top_k", [0, 40])
def test_the_nucleus_of_a_large_vocabulary(spread, top_p, top_k):
    """Flat and peaked rows take different ways to the nucleus; all end at the smallest leading set that reaches it."""
    z = np.random.default_rng(4).normal(0, spread, 20000).astype(np.float32)
    shaped = process(z, SamplingParams(temperature=0.8, top_p=top_p, top_k=top_k))
    order = np.lexsort((np.arange(len(z)), -z.astype(np.float64)))[: top_k or None]
    weights = np.exp((z[order].astype(np.float64) - z.max()) / 0.8)
    masses = weights.cumsum() / weights.sum()
    count = len(shaped.scores)
    assert shaped.ids.tolist() == sorted(order[:count].tolist())
    assert masses[count - 1] >= top_p - 1e-9
    assert count == 1 or masses[count - 2] < top_p + 1e-9


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ten_thousand_biases_are_made_arrays_once_and_choose_the_same_tokens(temperature):
    rng = np.random.default_rng(3)
    logits = (3 * rng.standard_normal((8, 20_000))).astype(np.float32)
    added = dict(zip(rng.permutation(20_000)[:10_000].tolist(), rng.uniform(-3, 3, 10_000).tolist(), strict=True))
    params = SamplingParams(temperature=temperature, seed=1, logit_bias=added)
    arrays = params.biases.arrays
    for position, row in enumerate(logits):
        z = [float(x) for x in row]
        for token, addend in added.items():
            z[token] += addend
        plain = ProcessedDistribution(None, np.array(z) / (temperature or 1.0), greedy=params.greedy)
        found = process(row, params)
        assert found.scores.tolist() == plain.scores.tolist()
        assert found.choose(1, position) == plain.choose(1, position)
    few = process(logits[0, :500], params)  # as of a draft model that has fewer rows than the target
    assert few.scores.tolist() == process(logits[0], params).scores[:500].tolist()
    assert params.biases.arrays is arrays and params.logit_bias == added
    assert replace(params, logit_bias={1: 2.0}).biases.arrays[0].tolist() == [1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=200), st.lists(st.integers(0, 300), max_size=200), st.integers(0, 5))
def test_history_counts(prompt, output, pieces):
    """Appended bit by bit and extended, a history counts as one made at once; views leave the base alone."""
    history = History(prompt)
    for i in range(pieces):
        history.extended([1, 2, 299]).counts()
        history.append(output[i * 20 : (i + 1) * 20])
    known, path = output[: pieces * 20], output[pieces * 20 :]
    view, copy = history.extended(path), history.copy()
    copy.append(path)
    for got, words in ((history, known), (view, known + path), (copy, known + path)):
        ids, counts = got.counts()
        assert len(set(ids.tolist())) == len(ids)
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {
            token: words.count(token) for token in {*prompt, *words}
        }
    if path:
        for misuse in (view.copy, lambda: view.append([3])):
            with pytest.raises(UsageError, match="view"):
                misuse()


def test_tokens_that_would_end_an_output_too_early_are_left_out_of_views_and_copies_too():
    history = History.of([1], SamplingParams(max_tokens=9, min_tokens=2), stop_ids=[7])
    copy = history.copy()
    copy.append([3, 4])
    assert copy.excluded == () and history.excluded == history.extended([3]).excluded == (7,)
    assert history.extended([3, 4]).excluded == ()


@pytest.mark.parametrize("params", [SamplingParams(), HOT, SamplingParams(temperature=1.0, top_k=2, top_p=0.5)])
@pytest.mark.parametrize(("bad", "what"), [(math.nan, "1 NaN"), (math.inf, "1 infinite"), (-math.inf, "1 infinite")])
def test_logits_that_are_no_numbers_fail_loudly(params, bad, what):
    """As the kernels' argmax and sample do: a logit of -inf is damage like any other, never a ban."""
    z = np.array([0, bad, 2, 1], np.float32)
    with pytest.raises(NumericsError, match=what):
        process(z, params)
    with pytest.raises(NumericsError, match=what):
        token_logprob(z, 0)
    assert noise.argmax_gumbel(z, params.temperature, 1, 2) == -1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [0.0, 1.01e-4, 1e-3, 100.0])
@pytest.mark.parametrize("repetition", [1e-3, 1e3])
@pytest.mark.parametrize("bias", [-100.0, 100.0])
def test_no_parameter_that_is_allowed_overflows(temperature, repetition, bias):
    """The widest float32 row under the strongest processors: still a distribution, whichever truncation comes after."""
    strongest = SamplingParams(
        temperature=temperature,
        repetition_penalty=repetition,
        frequency_penalty=-2.0,
        presence_penalty=2.0,
        logit_bias={3: bias},
    )
    row, history = np.array([-3.4e38, -1.0, 0.0, 2.0, 3.4e38], np.float32), History(range(5), [1, 4, 4])
    for cut in ({}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}):
        probs = process(row, replace(strongest, **cut), history).probabilities(5)
        assert np.isfinite(probs).all() and probs.sum() == pytest.approx(1)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}])
def test_what_overflows_at_the_temperature_fails_loudly(cut):
    """Finite before it, infinite after: only a row outside float32 can do that, and no law of NaN may come of it."""
    with pytest.raises(NumericsError, match="1 infinite"):
        process(np.array([1e307, 0.0, 1.0]), SamplingParams(temperature=1e-3, **cut))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize(
    "weights", [[0.0, 0.0, 0.0], [0.5, math.nan, 0.5], [0.5, math.inf, 0.0], [1e308, 1e308, 1e308], [5e-324, 0.0]]
)
def test_a_distribution_without_a_total_is_not_drawn_from(weights):
    with pytest.raises(NumericsError, match="position 7"):
        NoiseCoins(3, 7).draw(np.array(weights))


def test_choose_is_argmax_of_score_plus_field():
    z = np.random.default_rng(0).normal(0, 2, 97).astype(np.float32)
    whole, cut = process(z, HOT), process(z, SamplingParams(temperature=1.0, top_k=20))
    for position in range(40):
        values = z.astype(np.float64) + noise.gumbel(5, position, vocab=97, choice=3)
        assert whole.choose(5, position, 3) == noise.argmax_gumbel(z, 1.0, 5, position, 3) == values.argmax()
        assert cut.choose(5, position, 3) == max(cut.ids.tolist(), key=lambda i, v=values: v[i])
        private = z.astype(np.float64) + noise.gumbel(5, position, vocab=97, domain=noise.DRAFT, depth=2)
        assert whole.choose(5, position, private=2) == private.argmax()


def test_ties_go_to_the_lowest_id_whatever_the_noise_cannot_decide():
    assert ProcessedDistribution(np.array([3, 8, 9]), np.array([1.0, 2.0, 2.0]), greedy=True).choose(1, 2) == 8
    assert ProcessedDistribution(None, np.zeros(5), greedy=True).top(3, 1, 2) == [0, 1, 2]


def test_top_ranks_by_score_and_noise():
    z = np.random.default_rng(7).normal(0, 2, 60).astype(np.float32)
    for params in (SamplingParams(), HOT, SamplingParams(temperature=0.7, top_k=9)):
        shaped = process(z, params)
        for position in range(10):
            tokens = shaped.top(4, 3, position)
            assert shaped.top(1, 3, position) == tokens[:1] == [shaped.choose(3, position)]
            ids = np.arange(60) if shaped.ids is None else shaped.ids
            values = shaped.scores if shaped.greedy else shaped.scores + noise.gumbel(3, position, ids)
            assert tokens == ids[np.argsort(-values)][:4].tolist()
            assert shaped.top(0, 3, position) == []
    assert process(z, SamplingParams(temperature=1.0, top_k=1)).top(3, 1, 2) == [int(z.argmax())]
    assert len(process(z[:3], HOT).top(8, 1, 2)) == 3


def test_token_logprob_is_the_raw_softmax():
    z = np.array([1.0, 3.0, 3.0, -2.0], np.float32)
    expected = z.astype(np.float64) - math.log(sum(math.exp(x) for x in z))
    got = token_logprob(z, 0, 3)
    assert (got.token_id, got.logprob) == (0, pytest.approx(expected[0], rel=1e-12))
    assert got.top_logprobs == tuple((token, pytest.approx(expected[token], rel=1e-12)) for token in (1, 2, 0))
    assert token_logprob(z, 3).top_logprobs == () and len(token_logprob(z, 3, 20).top_logprobs) == 4
