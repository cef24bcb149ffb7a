"""KL, agreement and perplexity, against their definitions on small distributions."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from wager.bench.quality import compare_logits, fixed_text, windows


def table(seed: int, vocab: int = 7) -> np.ndarray:
    """Logits after each token."""
    return np.random.default_rng(seed).normal(size=(vocab, vocab)).astype(np.float32)


def probabilities(logits: np.ndarray) -> np.ndarray:
    values = np.exp(logits.astype(np.float64))
    return values / values.sum()


def test_a_model_is_compared_position_by_position() -> None:
    a, b = table(0), table(1)
    b[:3] = a[:3] + 100  # the same distributions, other logits
    tokens = np.random.default_rng(2).integers(0, 7, 60)
    text = list(windows(tokens.tolist(), size=25))
    assert [len(window) for window in text] == [25, 25, 10]
    found = compare_logits(lambda window: a[window], lambda window: b[window], text)
    p, q = ([probabilities(logits[token]) for token in tokens] for logits in (a, b))
    kls = [sum(x * math.log(x / y) for x, y in zip(*pair, strict=True)) for pair in zip(p, q, strict=True)]
    agree = sum(one.argmax() == other.argmax() for one, other in zip(p, q, strict=True))
    assert found.tokens == 60
    assert found.kl == pytest.approx(np.mean(kls)) and found.kl_99 == pytest.approx(np.quantile(kls, 0.99))
    assert found.top1 == agree / 60 and 0 < agree < 60
    pairs = [(now, then) for window in text for now, then in zip(window[:-1], window[1:], strict=True)]
    for logits, value in ((a, found.reference_perplexity), (b, found.perplexity)):
        logs = [math.log(probabilities(logits[now])[then]) for now, then in pairs]
        assert value == pytest.approx(math.exp(-np.mean(logs)))


def test_the_text_is_fixed() -> None:
    """Figures are stated for this text; another one needs new figures."""
    assert (
        hashlib.sha256(fixed_text().encode()).hexdigest()
        == "77cc20a2747318479f90d47bac97002d756ae5b8af0e6bf067611ffea0cd0ca5"
    )
