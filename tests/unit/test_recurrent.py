"""Engines on models with recurrent layers: no guess, snapshot or preemption changes a token; prefixes are reused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from decoder_engines import answers, decoder_on, engine_on, native, requests
from tiny_models import spec

import wager
from wager.arch import DeltaNet, Dense, Experts, Gqa, Mamba2, ShortConv
from wager.arch.layers import Absent, Parallel
from wager.arch.spec import Multipliers
from wager.config import CapacityConfig
from wager.draft.base import Drafter
from wager.draft.model import DraftModel
from wager.errors import UsageError
from wager.loading.load import load
from wager.loading.opened import running_sequences
from wager.models.random_models import RandomWeights
from wager.models.transformer import Decoder, states_bytes
from wager.testing.drafters import AdversaryDrafter, RandomTreeDrafter, ReferenceOracle, SetAcceptanceDrafter
from wager.types import DraftRequest, OutputDelta, Request, SamplingParams

STATE = DeltaNet(2, 4, 16, 32, 4)
MAMBA = Mamba2(4, 16, 2, 32, 4)
ALONE = Dense(64, gated=False)
MODELS = {
    "delta": spec(
        (STATE, STATE, Gqa(6, 2, 16, gated=True, rotated=8), STATE),
        (Dense(64), Experts(9, 3, 1, 24, 20, shared_gate=True), Dense(64), Dense(64)),
        qk_norm=True,
    ),
    "mamba": spec((MAMBA, Gqa(6, 2, 16, rotation="none"), MAMBA), (Dense(64),) * 3),
    "parallel": spec(
        (Parallel(Gqa(6, 2, 16), replace(MAMBA, normed=False)),) * 3,
        (Dense(64),) * 3,
        multipliers=Multipliers(0.9, 0.4, 0.6, 0.9, 0.5, 0.3, 0.4, 0.6, 0.5),
    ),
    "alone": spec(
        (MAMBA, Absent(), Gqa(6, 2, 16, rotation="none"), MAMBA, Absent()),
        (Absent(), ALONE, Absent(), Absent(), ALONE),
        activation="relu2",
    ),
    "convolutions": spec((ShortConv(48, 3), Gqa(6, 2, 16), ShortConv(48, 3)), (Dense(64),) * 3),
}
VOCAB = MODELS["delta"].vocab
PROMPTS = [[int(t) for t in np.random.default_rng(n).integers(0, 83, n)] for n in (1, 5, 16, 17, 40)]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=30, ignore_eos=True, n=3)


@pytest.fixture(scope="module", params=MODELS)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return decoder_on(RandomWeights(MODELS[request.param], 3), native())


@pytest.fixture
def twin(decoder: Decoder) -> Decoder:
    """Another of the same model, with a cache of its own."""
    return decoder_on(RandomWeights(decoder.spec, 3), native())


def drafters(texts: Mapping[str, Sequence[int]]) -> list[Drafter]:
    oracle = ReferenceOracle(texts)
    right = SetAcceptanceDrafter(VOCAB, (0.9, 0.8, 0.7), oracle=oracle)
    return [right, RandomTreeDrafter(VOCAB, oracle=oracle), AdversaryDrafter(VOCAB, oracle=oracle)]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_no_draft_and_no_preemption_changes_a_token(decoder: Decoder, params: SamplingParams) -> None:
    asked = requests(PROMPTS, params)
    one = {}
    for request in asked:  # each alone, nothing drafted
        one |= answers(engine_on(decoder, prefix_cache=False), [request])
    prompts = {request.id: request.prompt for request in asked}
    texts = {name.removesuffix("#0"): [*prompts[name.partition("#")[0]], *tokens] for name, tokens in one.items()}
    assert answers(engine_on(decoder), asked) == one
    for drafter in drafters(texts):
        for options in ({}, {"max_rows": 12}, {"num_blocks": 12}, {"snapshots": 1}, {"prefix_cache": False}):
            engine = engine_on(decoder, drafter, **options)
            assert answers(engine, asked) == one, (drafter.name, options)
        engine = engine_on(decoder, drafter)
        assert answers(engine, asked, preempt_every=3) == one, drafter.name
        assert answers(engine, asked) == one, drafter.name  # with a warm prefix cache


def test_a_step_that_fails_behind_its_pass_changes_no_token(decoder: Decoder) -> None:
    """The pass has moved the states of all sequences by then."""
    asked, calls = requests(PROMPTS, SAMPLED), itertools.count()
    one = answers(engine_on(decoder), asked)
    texts = {f"r{i}#{c}".removesuffix("#0"): [*p, *one[f"r{i}#{c}"]] for i, p in enumerate(PROMPTS) for c in range(3)}
    engine = engine_on(decoder, RandomTreeDrafter(VOCAB, oracle=ReferenceOracle(texts)))
    accept, step = engine.runner.accept, engine.step

    def failing(*given: Any) -> Any:
        if next(calls) % 5 == 3:
            raise KeyboardInterrupt
        return accept(*given)

    def until_it_succeeds() -> list[OutputDelta]:
        with suppress(KeyboardInterrupt):
            return step()
        return until_it_succeeds()

    engine.runner.accept, engine.step = failing, until_it_succeeds  # type: ignore[method-assign]
    engine.proposer = engine.proposer  # binds the stages anew
    assert answers(engine, asked) == one


def test_a_prefix_is_found_up_to_a_snapshot(decoder: Decoder, twin: Decoder) -> None:
    """At the end of a prompt, where texts were seen to part, and in an answer; and no answer changes."""
    engine = engine_on(decoder)

    def ask(text: Sequence[int], max_tokens: int) -> tuple[list[int], int]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        cached: dict[str, int] = {}
        [got] = answers(engine, requests([text], params), cached=cached).values()
        [expected] = answers(engine_on(twin, prefix_cache=False), requests([text], params)).values()
        assert got == expected
        return got, cached["r0#0"]

    texts = [[*PROMPTS[4][:37], *[i] * 20] for i in range(3)]
    # the second finds no snapshot and takes one where it parts from the first; the last is the first again
    assert [ask(text, 4)[1] for text in (*texts, texts[0])] == [0, 0, 32, 48]
    answer, _ = ask(PROMPTS[4], 30)
    assert ask([*PROMPTS[4], *answer[:28], 1, 2], 4)[1] == 64
    engine.scheduler.block_pool.reset_prefix_cache()
    assert ask(texts[0], 4)[1] == 0


@pytest.mark.slow
def test_texts_that_share_beginnings_answer_as_alone(decoder: Decoder, twin: Decoder) -> None:
    """Request after request, some at once, with few snapshots and blocks, guesses in trees, and preemption."""
    rng = random.Random(5)
    beginnings = [[rng.randrange(83) for _ in range(16 * n + 3)] for n in (1, 2, 3)]
    texts = [[*rng.choice(beginnings), *[rng.randrange(2)] * rng.randrange(1, 25)] for _ in range(24)]
    asked = requests(texts, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    alone = {}
    for request in asked:
        alone |= answers(engine_on(twin, prefix_cache=False), [request])
    right = ReferenceOracle({r.id: [*r.prompt, *alone[f"{r.id}#0"]] for r in asked})
    hits = 0
    for snapshots, blocks in ((4, 40), (2, 14), (1, 40)):
        tree = RandomTreeDrafter(VOCAB, oracle=right)
        engine = engine_on(decoder, tree, depth=6, snapshots=snapshots, num_blocks=blocks, max_rows=24)
        for first in range(0, len(asked), 4):
            cached: dict[str, int] = {}
            got = answers(engine, asked[first : first + 4], preempt_every=first % 3 * 2, cached=cached)
            assert got == {name: alone[name] for name in got}
            hits += sum(size > 0 for size in cached.values())
    assert hits > 10


def test_the_prompt_of_several_choices_is_computed_once(decoder: Decoder) -> None:
    several = SamplingParams(temperature=1.0, seed=1, max_tokens=4, ignore_eos=True, n=3)
    engine = engine_on(decoder, prefix_cache=False)
    cached: dict[str, int] = {}
    answers(engine, requests([PROMPTS[4]], several), cached=cached)
    assert cached == {"r0#0": 0, "r0#1": 32, "r0#2": 32}


OPTIONS: dict[str, Any] = {"model": "random:qwen3-next:tiny", "max_context": 128, "max_sequences": 4}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-next", "lfm2", "granite-h", "falcon-h1", "nemotron-h"])
def test_a_model_with_recurrent_layers_drafts_for_itself(family: str) -> None:
    """Its states are those of the target: every guess is right, also where guesses were taken back before."""
    model = f"random:{family}:tiny"
    engine = load(wager.EngineConfig.from_options(**{**OPTIONS, "model": model}, drafter=f"model:{model}", depth=3))
    plain = load(wager.EngineConfig.from_options(**{**OPTIONS, "model": model}, drafter="none"))
    asked = [
        Request(f"r{i}", tuple(PROMPTS[i]), SamplingParams(temperature=i % 2, seed=i, max_tokens=30, ignore_eos=True))
        for i in range(4)
    ]
    wanted, found = plain.generate(asked, concurrency=3), engine.generate(asked, concurrency=3)
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    assert sum(each.stats.drafted for each in found) > 60
    assert all(each.stats.accepted == each.stats.drafted for each in found)


@pytest.mark.parametrize("drafter", ["layers:0-1", "layers:0.3", "model:random:qwen3.5:tiny"])
def test_wrong_guesses_of_a_model_with_recurrent_layers_are_taken_back(drafter: str) -> None:
    plain = load(wager.EngineConfig.from_options(**OPTIONS, drafter="none"))
    engine = load(wager.EngineConfig.from_options(**OPTIONS, drafter=drafter, depth=3))
    drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True)
    asked = [Request(f"r{i}", tuple(PROMPTS[i]), drawn) for i in range(4)]
    wanted = plain.generate(asked, concurrency=3)
    for _ in range(2):  # the second time with the slots that the first gave back
        found = engine.generate(asked, concurrency=3)
        assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    assert sum(each.stats.drafted for each in found) > sum(each.stats.accepted for each in found)


def test_a_draft_with_states_is_what_one_from_the_whole_text_is() -> None:
    """Whatever was accepted of it: none, some, all, and in one call or token by token."""
    weights = RandomWeights(MODELS["delta"], 3)
    sizes = {"num_blocks": 40, "max_rows": 32, "max_sequences": 2, "max_blocks": 20, "spare_states": 2}
    kept, anew = (DraftModel(Decoder(weights, native(), **sizes), kernels=native()) for _ in range(2))
    rng, text = np.random.default_rng(2), [int(i) for i in PROMPTS[1]]
    kept.begin("s", text, SamplingParams())
    for round_ in range(24):
        ask = DraftRequest("s", len(text), 4, SamplingParams(), 0, 0)
        [draft] = kept.propose([ask])
        anew.begin("s", text, SamplingParams())
        [wanted] = anew.propose([ask])
        assert draft.tokens == wanted.tokens and len(draft.tokens) == 4
        tokens = [*draft.tokens[: round_ % 5], int(rng.integers(VOCAB))]
        for part in [tokens] if round_ % 2 else [[token] for token in tokens]:
            kept.accept("s", part)
        text += tokens


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"drafter": "model:tree:random:qwen3-next:tiny"}, "guesses a tree"),
        ({"drafter": "layers:0-1+ngram"}, "has a drafter of its own"),
        ({"drafter": "slem:random:qwen3-next:tiny"}, "translates another vocabulary"),
        ({"drafter": "model:random:qwen3-next:tiny", "draft_threads": 1}, "drafts ahead"),
    ],
)
def test_what_needs_more_than_chains_is_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=f"has recurrent layers, and a drafter .* that {what}"):
        load(wager.EngineConfig.from_options(**OPTIONS, **options))


@pytest.mark.slow
def test_the_plan_has_the_states_of_a_draft_model() -> None:
    """Two for each sequence, of the layers that are run."""
    found = []
    for drafter in ("layers:0-1", "layers:0.3"):  # the last layer has attention
        engine = load(wager.EngineConfig.from_options(**OPTIONS, drafter=drafter, max_rows=32))
        found.append(engine.memory_plan.drafter)
    kind = engine.target.opened.spec.recurrent
    assert kind is not None
    assert found[0] - found[1] == 4 * (2 * 4 * kind.state.elements + 32 * kind.state.width)


def test_the_plan_has_the_states() -> None:
    config = wager.EngineConfig.from_options(
        model="random:qwen3-next:tiny", max_context=128, max_sequences=4, drafter="none"
    )
    engine = load(config)
    states = engine.target.decoder.states
    assert states is not None
    assert engine.memory_plan.states == states.nbytes
    assert "recurrent states of 4 sequences" in engine.memory_plan.describe()


def test_states_that_would_fill_the_memory_are_of_fewer_sequences() -> None:
    """By default; a number that is given holds."""
    spec_of = MODELS["delta"]
    each = states_bytes(spec_of, max_rows=512, max_sequences=16)
    for memory, sequences in ((8 * each, 16), (8 * each - 8, 8), (1 << 20, 8), (1 << 40, 64)):
        capacity = CapacityConfig(memory=memory)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("wager.loading.opened.budget", lambda *, limit: (limit, ""))
            assert running_sequences(capacity, spec_of) == sequences
            assert running_sequences(replace(capacity, max_sequences=100), spec_of) == 100
            assert running_sequences(replace(capacity, max_rows=12), spec_of) <= 12
    assert running_sequences(CapacityConfig(memory=1 << 20), spec()) == 64
