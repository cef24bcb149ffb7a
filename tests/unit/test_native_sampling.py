"""Through the engine, tokens that are sampled natively are those of the definition: with filters, penalties and biases,
alone and in a batch, with n-grams and trees of guesses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from decoder_engines import answers, decoder_on, engine_on, native
from tiny_models import spec

from wager.arch import Dense, Gqa
from wager.draft.base import Drafter
from wager.draft.ngram import NgramDrafter
from wager.engine.core import Engine
from wager.kernels.sampling import token_matcher
from wager.models.random_models import RandomWeights
from wager.testing.drafters import RandomTreeDrafter
from wager.types import Request, SamplingParams

TARGET = spec((Gqa(6, 2, 16),) * 2, (Dense(64),) * 2)
VARIED = [
    SamplingParams(max_tokens=30, temperature=0.9, top_p=0.8, seed=1),
    SamplingParams(max_tokens=30, temperature=1.3, top_k=7, seed=2),
    SamplingParams(max_tokens=30, temperature=0.9, top_k=20, top_p=0.9, min_p=0.1, n=2, seed=4),
    SamplingParams(max_tokens=30, temperature=1.0, presence_penalty=0.7, frequency_penalty=-0.2, seed=5),
    SamplingParams(max_tokens=30, temperature=0.0, repetition_penalty=1.3, logit_bias={3: 4.0}),
    SamplingParams(max_tokens=30, temperature=0.8, top_p=0.7, repetition_penalty=0.8, logit_bias={3: 1.0}, seed=6),
    SamplingParams(max_tokens=30, temperature=0.9, top_p=0.8, logprobs=2, seed=7),
    SamplingParams(max_tokens=30, temperature=0.9, seed=8),
    SamplingParams(max_tokens=30),
]
DRAFTERS: dict[str, Callable[[int], list[Drafter]]] = {
    "none": lambda _: [],
    "ngram": lambda _: [NgramDrafter()],
    "random-tree": lambda vocab: [RandomTreeDrafter(vocab)],
}


def asked() -> list[Request]:
    return [Request(f"r{i}", (4 + i, 5, 6, 5, 6), params) for i, params in enumerate(VARIED)]


def by_definition(engine: Engine) -> Engine:
    """Without the native ways: neither the matcher's nor that of a single row."""
    engine.runner._matcher = token_matcher(native(), follows=False)
    engine.runner._sampler = SimpleNamespace(sample=lambda *_, **__: None)
    return engine


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_native_tokens_are_those_of_the_definition(drafter: str) -> None:
    decoder = decoder_on(RandomWeights(TARGET, 1), native())

    def engine() -> Engine:
        return engine_on(decoder, *DRAFTERS[drafter](decoder.vocab))

    wanted: dict[str, list[int]] = {}
    for request in asked():
        wanted |= answers(by_definition(engine()), [request])
    assert answers(engine(), asked()) == wanted
    assert answers(engine(), asked(), preempt_every=7) == wanted
    assert len({tuple(tokens) for tokens in wanted.values()}) == len(wanted)
