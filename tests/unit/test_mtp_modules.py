"""Modules of multi-token prediction: their guesses are those of a reference without cache or batch, whatever the engine
does around them, and the text is that of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from decoder_engines import answers, decoder_on, engine_on, native, requests
from mtp_modules import LAYERS, VARIANTS, VOCAB, ReferenceModules
from packing import batch, chain
from recorded_drafts import Recorded, keep_drafts
from tiny_models import TOKENS

from closeness import assert_close
from oracle.kernels import ReferenceKernels
from wager.draft.heads.autoregressive import HeadDrafter
from wager.draft.registry import DrafterParts, build_drafter
from wager.drafter_spec import DrafterSpec
from wager.kernels.arrays import Array
from wager.kernels.cpu import Kernels
from wager.models.head_files import HeadFiles
from wager.models.head_mtp import MtpHead, open_mtp
from wager.models.transformer import Decoder
from wager.models.weights import Weights, open_weights
from wager.types import SamplingParams, VerifyRule

PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=1.0, seed=7),
    SamplingParams(max_tokens=24, temperature=0.8, top_k=12, top_p=0.9, repetition_penalty=1.2, seed=3),
]


@cache
def reference_of(name: str) -> ReferenceModules:
    return ReferenceModules(VARIANTS[name])


def head_of(reference: ReferenceModules, folder: Path, decoder: Decoder, *, quantised: bool = False) -> MtpHead:
    """The modules inside the target, or in a directory of their own where their format has one."""
    inside = reference.variant.format != "speculators"
    files = HeadFiles(reference.save_target(folder) if inside else reference.save_modules(folder / "modules"))
    opened = open_mtp(files, decoder.spec, quantised=quantised, inside=inside)
    return opened.load(decoder, open_weights(folder), num_blocks=48)


def drafter_on(
    head: MtpHead, *, kernels: Kernels | None, prefix_cache: bool = True, trees: bool = False
) -> HeadDrafter:
    parts = DrafterParts(VOCAB, head=head, kernels=kernels, prefix_cache=prefix_cache)
    return build_drafter(DrafterSpec("mtp", trees=trees), parts)


def states_of(weights: Weights, tokens: Sequence[int], kernels: Kernels) -> Array:
    """The states of a text behind all layers, f32 [tokens, hidden], by a decoder of their own."""
    decoder = decoder_on(weights, kernels, max_rows=96)
    decoder.tap([LAYERS])
    return decoder.forward(batch([chain(0, tokens, list(range(6)))], [0])).taps[LAYERS].copy()


def check_drafts(
    reference: ReferenceModules, states: Array, text: Sequence[int], recorded: Recorded, *, seq_id: str = "r0"
) -> None:
    """The drafts of a sequence are those of modules that saw the last of its states, as many as are given."""
    first = len(text) - len(states)
    made = {position: draft for (name, position), draft in recorded.drafts.items() if name == seq_id}
    assert made
    for position, draft in made.items():
        guesses, rows = reference.guesses(states, text[first:position], len(draft))
        assert list(draft.tokens) == guesses, position
        probabilities = [np.exp(row.max() - np.logaddexp.reduce(row)) for row in rows]
        assert_close(np.array(draft.scores), np.cumprod(probabilities), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("depth", [2, 5])
@pytest.mark.parametrize("name", VARIANTS)
def test_guesses_are_those_of_the_reference_whatever_the_engine_does(name: str, depth: int, tmp_path: Path) -> None:
    reference, kernels = reference_of(name), ReferenceKernels("float32")
    weights = open_weights(reference.save_target(tmp_path))
    decoder = decoder_on(weights, kernels)
    prompts, params = [TOKENS[:7], TOKENS[:33], TOKENS[2:20]], SamplingParams(max_tokens=14)
    plain = answers(engine_on(decoder), requests(prompts, params))
    drafter = drafter_on(head_of(reference, tmp_path, decoder), kernels=None)
    recorded = Recorded(drafter, vocab=VOCAB)
    recorded.texts = {f"r{i}": [*prompt, *plain[f"r{i}#0"]] for i, prompt in enumerate(prompts)}
    engine = engine_on(decoder, drafter, depth=depth, max_rows=11)
    assert answers(engine, requests(prompts, params), preempt_every=6) == plain
    drafter.block_pool.check({})
    made = recorded.drafts
    assert len(made) > 12 and len(made) > 0.7 * len(recorded.made)  # others were asked for before their states came
    for seq_id, text in recorded.texts.items():
        check_drafts(reference, states_of(weights, text, kernels), text, recorded, seq_id=seq_id)


@pytest.mark.parametrize("name", ["deepseek", "deepseek-three"])
def test_entries_of_a_cached_prefix_are_found_or_left_out(name: str, tmp_path: Path) -> None:
    """A second request with the same prompt: its states never come. The guesses are those of the whole text if the
    modules' own cache has the prefix, else those of modules that see only what came."""
    reference, kernels = reference_of(name), ReferenceKernels("float32")
    weights = open_weights(reference.save_target(tmp_path))
    decoder = decoder_on(weights, kernels)
    asked = requests([TOKENS[:40]], SamplingParams(max_tokens=6))
    plain = answers(engine_on(decoder), asked)["r0#0"]
    text = [*TOKENS[:40], *plain]
    states = states_of(weights, text, kernels)
    for prefix_cache, seen in ((True, 0), (False, 32)):
        head = head_of(reference, tmp_path, decoder)
        drafter = drafter_on(head, kernels=None, prefix_cache=prefix_cache)
        recorded = Recorded(drafter, vocab=VOCAB)
        recorded.texts = {"r0": text}
        engine = engine_on(decoder, drafter, depth=4)
        for first in (0, seen):
            recorded.made.clear()
            assert answers(engine, asked)["r0#0"] == plain
            check_drafts(reference, states[first:], text, recorded)


@pytest.mark.parametrize("name", ["qwen", "deepseek-three"])
@pytest.mark.parametrize("params", PARAMS[:2])
@pytest.mark.parametrize("quantised", [False, True])
def test_modules_that_know_the_target_are_accepted(
    name: str, params: SamplingParams, quantised: bool, tmp_path: Path
) -> None:
    reference, kernels = ReferenceModules(VARIANTS[name]), native()
    reference.make_right()
    decoder = decoder_on(open_weights(reference.save_target(tmp_path)), kernels)
    asked = requests([TOKENS[:20], TOKENS[3:40]], params)
    plain = engine_on(decoder).generate(asked)
    drafter = drafter_on(head_of(reference, tmp_path, decoder, quantised=quantised), kernels=kernels)
    found = engine_on(decoder, drafter, depth=5).generate(asked)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    # of five guesses; the last rounds are cut short
    assert sum(each.stats.accepted for each in found) > 3.5 * sum(each.stats.rounds for each in found)


@pytest.mark.parametrize("name", ["qwen", "deepseek-three"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rules_that_need_q_get_it(name: str, rule: VerifyRule, tmp_path: Path) -> None:
    reference, kernels = reference_of(name), native()
    decoder = decoder_on(open_weights(reference.save_target(tmp_path)), kernels)
    drafter = drafter_on(head_of(reference, tmp_path, decoder), kernels=kernels)
    made = keep_drafts(drafter)
    engine = engine_on(decoder, drafter, rule=rule, depth=2)
    asked = requests([TOKENS[:20]], PARAMS[1])
    assert answers(engine, asked) == answers(engine, asked)
    drafts = [draft for draft in made if len(draft)]
    assert len(drafts) > 12 and drafter.name in engine.proposer.drafters
    for draft in drafts:
        assert draft.draft_probs is not None and draft.draft_probs.shape == (len(draft), VOCAB) and len(draft) <= 2
        assert_close(draft.draft_probs.sum(axis=1), np.ones(len(draft)), rtol=1e-9, atol=0)
        assert all(q[token] > 0 for q, token in zip(draft.draft_probs, draft.tokens, strict=True))


@pytest.mark.parametrize("quantised", [False, True])
def test_the_native_kernels_guess_as_the_reference(quantised: bool, tmp_path: Path) -> None:
    for name in ("mimo", "qwen-experts-two", "deepseek"):
        reference, logits = reference_of(name), []
        for kernels in (native(), ReferenceKernels()):
            decoder = decoder_on(open_weights(reference.save_target(tmp_path / name)), kernels)
            head = head_of(reference, tmp_path / name, decoder, quantised=quantised)
            rng = np.random.default_rng(3)
            states, fed = (rng.standard_normal((rows, head.hidden)).astype(np.float32) for rows in (10, 1))
            packed = batch([chain(0, TOKENS[:10], [3]), chain(0, TOKENS[3:4], [5])], [9, 10])
            output = head.forward(packed, states, fed)
            logits.append(output.logits.copy())
            assert np.array_equal(output.greedy_tokens, output.logits.argmax(axis=1))
        assert_close(*logits, rtol=0.05, atol=0.5 if quantised else 0.25)


@pytest.mark.parametrize("name", ["deepseek", "qwen-experts-two"])
def test_rows_of_a_module_do_not_depend_on_chunks_or_neighbours(name: str, tmp_path: Path) -> None:
    reference, kernels = reference_of(name), native()
    decoder = decoder_on(open_weights(reference.save_target(tmp_path)), kernels)
    head = head_of(reference, tmp_path, decoder, quantised=True)
    states = np.random.default_rng(3).standard_normal((20, head.hidden)).astype(np.float32)
    none = states[:0]
    for module in range(head.modules):
        given = (none, states) if module else (states, none)
        output = head.forward(batch([chain(0, TOKENS[:20], [3, 1])], [19]), *given, module)
        whole, rows = output.logits.copy(), output.taps.get(0)
        part = states[[*range(7), 3]]
        packed = batch([chain(0, TOKENS[:7], [4, 2]), chain(0, TOKENS[8:9], [7])], [])
        head.forward(packed, *((none, part) if module else (part, none)), module)
        part = states[[*range(7, 20), 0, 1, 2]]
        packed = batch([chain(7, TOKENS[7:20], [4, 2]), chain(1, TOKENS[9:12], [7])], [12])
        cut = head.forward(packed, *((none, part) if module else (part, none)), module)
        assert np.array_equal(cut.logits, whole)
        assert rows is None or np.array_equal(cut.taps[0][:13], rows[7:])


@pytest.mark.parametrize(("name", "first"), [("qwen", 0), ("deepseek-three", 16)])
def test_a_cached_block_is_found_by_all_tokens_that_its_entries_embed(name: str, first: int, tmp_path: Path) -> None:
    """Texts that agree in 17 tokens: the first block of a single module embeds no other, that of three modules two."""
    reference, kernels = reference_of(name), ReferenceKernels("float32")
    weights = open_weights(reference.save_target(tmp_path))
    decoder = decoder_on(weights, kernels)
    prompts = [TOKENS[:40], [*TOKENS[:17], *TOKENS[30:45]]]
    params = SamplingParams(max_tokens=5)
    plain = [answers(engine_on(decoder), requests([prompt], params))["r0#0"] for prompt in prompts]
    drafter = drafter_on(head_of(reference, tmp_path, decoder), kernels=None)
    recorded = Recorded(drafter, vocab=VOCAB)
    engine = engine_on(decoder, drafter, depth=4)
    for prompt, answer in zip(prompts, plain, strict=True):
        recorded.texts = {"r0": [*prompt, *answer]}
        recorded.made.clear()
        assert answers(engine, requests([prompt], params))["r0#0"] == answer
    text = recorded.texts["r0"]
    check_drafts(reference, states_of(weights, text, kernels)[first:], text, recorded)
