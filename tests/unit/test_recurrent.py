"""Engines on models with recurrent layers: no guess, snapshot or preemption changes a token; prefixes are reused."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from decoder_engines import answers, decoder_on, engine_on, native, requests
from safetensors.numpy import save_file
from tiny_models import spec

import wager
from wager.arch import DeltaNet, Dense, Experts, Gqa, Mamba2, ShortConv
from wager.arch.layers import Absent, Parallel
from wager.arch.spec import Multipliers
from wager.config import CapacityConfig
from wager.draft.base import Drafter
from wager.errors import ModelError, UsageError
from wager.loading.load import load
from wager.loading.opened import running_sequences
from wager.models.head_files import HeadFiles
from wager.models.head_mtp import open_mtp
from wager.models.random_models import random_weights
from wager.models.transformer import Decoder, states_bytes
from wager.testing.drafters import AdversaryDrafter, RandomTreeDrafter, ReferenceOracle, SetAcceptanceDrafter
from wager.types import SamplingParams

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
    return decoder_on(random_weights(MODELS[request.param], 3), native())


@pytest.fixture
def twin(decoder: Decoder) -> Decoder:
    """Another of the same model, with a cache of its own."""
    return decoder_on(random_weights(decoder.spec, 3), native())


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
    assert engine.scheduler.block_pool.num_snapshots == decoder.num_snapshots == 4
    engine.scheduler.block_pool.reset_prefix_cache()
    assert engine.scheduler.block_pool.num_snapshots == 0


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


@pytest.mark.parametrize("drafter", ["layers:0-1", "model:random:qwen3-next:tiny"])
def test_what_cannot_take_back_states_is_refused(drafter: str) -> None:
    options = {"model": "random:qwen3-next:tiny", "max_context": 128, "max_sequences": 4}
    with pytest.raises(UsageError, match="has recurrent layers, so it cannot draft"):
        load(wager.EngineConfig.from_options(**options, drafter=drafter))


def test_modules_with_gated_attention_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "vocab_size": 83, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2}
    config = {"architectures": ["Qwen3NextForCausalLM"], **sizes, "num_attention_heads": 3, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 16}))
    save_file({"mtp.fc.weight": np.zeros((48, 96), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="gated attention"):
        open_mtp(HeadFiles(tmp_path), MODELS["delta"], dtype="bf16")


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
