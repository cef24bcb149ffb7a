"""EAGLE-3 heads: their guesses are those of a reference without cache or batch, whatever the engine does around them,
and the text is that of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from decoder_engines import answers, decoder_on, engine_on, native, requests
from eagle_heads import VARIANTS, VOCAB, Flags, ReferenceHead
from packing import batch, chain
from recorded_drafts import Recorded, check_text
from tiny_models import TOKENS, spec

from closeness import assert_close
from oracle.kernels import ReferenceKernels
from wager.arch import Dense, Gqa
from wager.draft.heads.autoregressive import HeadDrafter
from wager.kernels.arrays import Array
from wager.kernels.cpu import Kernels
from wager.models.head_eagle import EagleHead, open_eagle
from wager.models.head_files import HeadFiles
from wager.models.random_models import random_weights
from wager.models.transformer import Decoder
from wager.models.weights import Weights
from wager.types import SamplingParams

TARGET = spec((Gqa(6, 2, 16),) * 5, (Dense(64),) * 5)
PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=1.0, seed=7),
    SamplingParams(max_tokens=24, temperature=0.8, top_k=12, top_p=0.9, repetition_penalty=1.2, seed=3),
]


def randn(*shape: int) -> Array:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


def target_weights() -> Weights:
    return random_weights(TARGET, 1)


def reference_of(flags: Flags, weights: Weights) -> ReferenceHead:
    embedding = weights.read("embed.weight")
    return ReferenceHead(flags, target_embedding=embedding, target_output=embedding)


def head_of(
    reference: ReferenceHead, decoder: Decoder, weights: Weights, folder: Path, *, quantised: bool = False
) -> EagleHead:
    opened = open_eagle(HeadFiles(reference.save(folder)), TARGET, quantised=quantised)
    return opened.load(decoder, weights, num_blocks=48)


def tapped(weights: Weights, taps: Sequence[int], tokens: Sequence[int], kernels: Kernels) -> Array:
    """The taps of a text side by side, f32 [tokens, taps * hidden], by a decoder of their own."""
    decoder = decoder_on(weights, kernels, max_rows=96)
    decoder.tap(taps)
    blocks = list(range(6))
    found = decoder.forward(batch([chain(0, tokens, blocks)], [0])).taps
    return np.concatenate([found[tap] for tap in taps], axis=1)


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("quantised", [False, True])
def test_the_text_is_that_of_plain_decoding(params: SamplingParams, quantised: bool, tmp_path: Path) -> None:
    weights, kernels = target_weights(), native()
    reference = reference_of(VARIANTS["eagle3.1"], weights)
    decoder = decoder_on(weights, kernels)
    prompts = [TOKENS[:20], TOKENS[:20], TOKENS[3:40], TOKENS[5:9], [5]]
    asked = requests(prompts, params)

    def made() -> HeadDrafter:
        return HeadDrafter(head_of(reference, decoder, weights, tmp_path, quantised=quantised), kernels=kernels)

    for drafter in check_text(decoder, asked, made, depth=4):
        drafter.block_pool.check({})


def test_entries_of_a_cached_prefix_are_found_or_left_out(tmp_path: Path) -> None:
    """A second request with the same prompt: its states never come. The guesses are those of the whole text if the
    head's own cache has the prefix, else those of a head that sees only what came."""
    weights, kernels = target_weights(), ReferenceKernels("float32")
    reference = reference_of(VARIANTS["eagle3.1"], weights)
    decoder = decoder_on(weights, kernels)
    asked = requests([TOKENS[:40]], SamplingParams(max_tokens=6))
    plain = answers(engine_on(decoder), asked)["r0#0"]
    text = [*TOKENS[:40], *plain]
    taps = tapped(weights, reference.flags.taps, text, kernels)
    for prefix_cache, seen in ((True, 0), (False, 32)):
        drafter = HeadDrafter(head_of(reference, decoder, weights, tmp_path), prefix_cache=prefix_cache)
        recorded = Recorded(drafter, vocab=VOCAB)
        recorded.texts = {"r0": text}
        engine = engine_on(decoder, drafter, depth=3)
        for first in (0, seen):
            recorded.made.clear()
            assert answers(engine, asked)["r0#0"] == plain
            made = {position: draft for (_, position), draft in recorded.drafts.items()}
            assert made
            for position, draft in made.items():
                guesses, _ = reference.guesses(taps[first:], text[first:position], len(draft))
                assert list(draft.tokens) == guesses


@pytest.mark.parametrize("quantised", [False, True])
def test_the_native_kernels_guess_as_the_reference(quantised: bool, tmp_path: Path) -> None:
    weights = target_weights()
    for name in ("eagle3.1", "qwen3", "one-norm"):
        reference = reference_of(VARIANTS[name], weights)
        logits = []
        for kernels in (native(), ReferenceKernels()):
            decoder = decoder_on(weights, kernels)
            head = head_of(reference, decoder, weights, tmp_path / name, quantised=quantised)
            states = randn(10, head.state_width).astype(head.state_dtype)
            packed = batch([chain(0, TOKENS[:10], [3]), chain(0, TOKENS[3:4], [5])], [9, 10])
            output = head.forward(packed, states, randn(1, head.hidden))
            assert output.last_hidden is not None
            logits.append(output.logits.copy())
            assert np.array_equal(output.greedy_tokens, output.logits.argmax(axis=1))
        assert_close(*logits, rtol=0.05, atol=0.35 if quantised else 0.15)


def test_rows_of_the_head_do_not_depend_on_chunks_or_neighbours(tmp_path: Path) -> None:
    weights, kernels = target_weights(), native()
    decoder = decoder_on(weights, kernels)
    head = head_of(reference_of(VARIANTS["eagle3.1"], weights), decoder, weights, tmp_path, quantised=True)
    states, none = randn(20, head.state_width), np.zeros((0, head.hidden), np.float32)
    whole = head.forward(batch([chain(0, TOKENS[:20], [3, 1])], [19]), states, none).logits.copy()
    head.forward(batch([chain(0, TOKENS[:7], [4, 2]), chain(0, TOKENS[8:9], [7])], []), states[[*range(7), 3]], none)
    parts = [chain(7, TOKENS[7:20], [4, 2]), chain(1, TOKENS[9:12], [7])]
    cut = head.forward(batch(parts, [12]), states[[*range(7, 20), 0, 1, 2]], none).logits
    assert np.array_equal(cut, whole)
