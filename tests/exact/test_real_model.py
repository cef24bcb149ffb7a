"""Same bytes on the real model: every drafter, alone and batched, preempted, with cached prefixes.

`wager prove` does the same over many more prompts.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import wager
from wager.draft.base import Drafter
from wager.draft.model import DraftModel
from wager.draft.ngram import NgramDrafter
from wager.loading.load import LoadedEngine, load
from wager.models.transformer import Decoder
from wager.testing import AdversaryDrafter, RandomTreeDrafter, ReferenceOracle
from wager.types import Request, SamplingParams

pytestmark = [pytest.mark.real, pytest.mark.slow]  # by default toys and the kernels show the same

QUESTIONS = (
    "Write the numbers from one to ten in words, then again in words.",
    "Translate into German: The weather is fine today and we will go swimming.",
    "Summarise: The cat sat on the mat. The dog saw the cat. The cat ran, and the dog ran after the cat, "
    "and the mat was empty.",
)

PARAMS = {
    "greedy": SamplingParams(max_tokens=24),
    "sampled": SamplingParams(max_tokens=24, temperature=0.8, seed=5),
    "processed": SamplingParams(
        max_tokens=24, temperature=0.9, top_p=0.9, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.3, seed=7
    ),
}

Texts = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def plain(smollm2: Path) -> LoadedEngine:
    config = wager.EngineConfig.from_options(
        model=str(smollm2), drafter="none", max_context=1024, cache_tokens=4096, max_rows=64
    )
    return load(config.with_options(prefix_cache=False))


@pytest.fixture(scope="module")
def requests(plain: LoadedEngine) -> list[Request]:
    def prompt(question: str) -> tuple[int, ...]:
        text = plain.tokenizer.chat([{"role": "user", "content": question}])
        return tuple(plain.tokenizer.encode(text, special=False))

    return [
        Request(f"{name}-{i}", prompt(question), params)
        for name, params in PARAMS.items()
        for i, question in enumerate(QUESTIONS)
    ]


@pytest.fixture(scope="module")
def texts(plain: LoadedEngine, requests: list[Request]) -> Texts:
    return {c.request_id: c.token_ids for c in plain.generate(requests, concurrency=1)}


def drafter(name: str, plain: LoadedEngine, requests: list[Request], texts: Texts) -> Drafter:
    vocab, oracle = plain.spec.vocab, ReferenceOracle({r.id: [*r.prompt, *texts[r.id]] for r in requests})
    if name == "ngram":
        return NgramDrafter()
    if name == "adversary":
        return AdversaryDrafter(vocab, oracle=oracle)
    if name == "random-tree":
        return RandomTreeDrafter(vocab, oracle=oracle)
    twin = Decoder(
        plain.target.opened.weights, plain.kernels, num_blocks=256, max_rows=64, max_sequences=8, max_blocks=64
    )  # the target as its own draft model: right every time, if the noise and the processors are shared
    return DraftModel(twin, vocab=vocab, max_context=1024, kernels=plain.kernels)


@pytest.mark.parametrize("name", ["ngram", "model", "adversary", "random-tree"])
def test_speculation_changes_no_token(name: str, plain: LoadedEngine, requests: list[Request], texts: Texts) -> None:
    guesser = drafter(name, plain, requests, texts)
    config = plain.target.config.with_options(depth=6, prefix_cache=True)
    engine = load(config, target=plain.target, drafter=guesser)
    steps = itertools.count()

    def shake(_event: object) -> None:
        if next(steps) % 15 == 14:
            engine.preempt_all()

    alone = engine.generate(requests, concurrency=1)
    company = engine.generate(requests, concurrency=8, on_output=shake)
    for done in (alone, company):
        assert {c.request_id: c.token_ids for c in done} == texts
    assert sum(c.stats.preemptions for c in company) > 0
    assert sum(c.stats.cached_tokens for c in company) > 0
    accepted, drafted = (sum(getattr(c.stats, what) for c in alone) for what in ("accepted", "drafted"))
    assert drafted > 0
    lost = 6 * len(requests)  # guesses beyond the end of a text may be right and count for nothing
    assert {"adversary": accepted == 0, "model": accepted >= drafted - lost}.get(name, accepted > 0)


def test_a_prompt_may_be_cut_into_chunks_of_any_size(
    smollm2: Path, plain: LoadedEngine, requests: list[Request]
) -> None:
    """A question of each kind of sampling."""
    few = requests[:: len(QUESTIONS) + 1]
    small = wager.EngineConfig.from_options(
        model=str(smollm2), drafter="ngram", max_context=512, cache_tokens=2048, max_rows=7
    )
    engine = load(small)
    answers = [engine.generate(few, concurrency=3), plain.generate(few, concurrency=1)]
    one, other = ([each.token_ids for each in done] for done in answers)
    assert one == other
