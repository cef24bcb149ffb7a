"""Answers of random models: uncertain to a stated degree, and dependent on the context. That texts are varied is in
test_prove.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from oracle.kernels import softmax
from packing import batch, chain
from wager.kernels.arrays import Array
from wager.kernels.cpu import select
from wager.models.random_models import MODELS, RandomWeights, make, spec_of
from wager.models.transformer import Decoder
from wager.models.weights import Weights

SIZES = [f"random:{family}:{size}" for family, (_, sizes) in MODELS.items() for size in sizes]
TINY = [name for name in SIZES if name.endswith(":tiny")]
RUN = [*TINY, "random:llama:135m"]
MEAN_BITS, BITS, WITHIN = (4.5, 6.0), (3.0, 7.5), 0.8
"""What docs/random_models.md states: the mean entropy, and the range of at least this share of positions."""

TEXT = b"The quick brown fox jumps over the lazy dog, and then it went to town to buy some bread and an apple."
NOISE = np.random.default_rng(0).integers(0, 512, 100).tolist()


def logits_of(weights: Weights, *contexts: Sequence[int], dtype: str = "auto") -> list[Array]:
    """The logits after every id of each context, [ids, vocab]."""
    sizes = dict(num_blocks=8, max_rows=128, max_sequences=1, max_blocks=8)
    decoder = Decoder(weights, select(), **sizes, dtype=dtype)
    passes = [batch([chain(0, list(ids), range(8))], range(len(ids))) for ids in contexts]
    return [decoder.forward(packed).logits.copy().astype(np.float64) for packed in passes]


def entropies(logits: Array) -> Array:
    """Bits, by row."""
    shares = softmax(logits)
    return -(shares * np.log(shares)).sum(-1) / math.log(2)


@cache
def entropies_of_normal_logits(deviation: float, vocab: int, rows: int = 120) -> Array:
    """As `entropies`, of logits that are drawn; few rows would tell the share of positions to 5 % only."""
    rng = np.random.default_rng(0)
    drawn = (rng.standard_normal((20, vocab), np.float32) for _ in range(rows // 20))
    return np.concatenate([entropies(deviation * logits) for logits in drawn])


def distances(a: Array, b: Array) -> Array:
    """Total variation between the distributions of two rows' logits."""
    return np.abs(softmax(a) - softmax(b)).sum(-1) / 2


def check_entropies(bits: Array) -> None:
    assert MEAN_BITS[0] < bits.mean() < MEAN_BITS[1]
    assert ((bits > BITS[0]) & (bits < BITS[1])).astype(np.float64).mean() > WITHIN


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "q8", "q4"])
@pytest.mark.parametrize("model", RUN)
def test_the_next_token_is_uncertain_and_depends_on_the_context(model: str, dtype: str) -> None:
    weights, _ = make(model)
    text, noise, moved = logits_of(weights, TEXT, NOISE, [*NOISE[:60], *TEXT[-20:]], dtype=dtype)
    check_entropies(np.concatenate([entropies(text), entropies(noise)]))
    assert distances(text[1:], text[:-1]).mean() > 0.5
    assert distances(text[-5:], moved[-5:]).mean() > 0.25  # the same 16 to 20 tokens, behind others


@pytest.mark.parametrize("model", SIZES)
def test_the_scales_give_every_size_the_same_uncertainty(model: str) -> None:
    """Logits are products of the last norm's output with rows of the head, so their standard deviation is known
    without running the model."""
    spec = spec_of(model)
    weights = RandomWeights(spec, 0)
    norm = weights.read("norm.weight")
    assert np.array_equal(np.abs(norm), np.full_like(norm, weights.scale("norm.weight")))
    assert abs(np.sign(norm).mean()) < 4 / math.sqrt(spec.hidden)
    head = "embed.weight" if spec.tied else "head.weight"
    deviation = np.abs(norm).mean() * weights.scale(head) * math.sqrt(spec.hidden)
    check_entropies(entropies_of_normal_logits(round(deviation, 2), spec.vocab))
