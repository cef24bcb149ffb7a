"""EAGLE-3 heads: their guesses are those of a reference without cache or batch, whatever the engine does around them,
and the text is that of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from decoder_engines import answers, decoder_on, engine_on, requests
from eagle_heads import VARIANTS, VOCAB, Flags, ReferenceHead
from packing import batch, chain
from tiny_models import TOKENS, spec

from closeness import assert_close
from wager.arch import Dense, Gqa
from wager.draft.heads.autoregressive import HeadDrafter
from wager.kernels.arrays import Array
from wager.kernels.base import Kernels
from wager.kernels.reference import ReferenceKernels
from wager.models.head_eagle import EagleHead, open_eagle
from wager.models.head_files import HeadFiles
from wager.models.random_weights import random_weights
from wager.models.transformer import Decoder
from wager.models.weights import Weights
from wager.types import Draft, DraftRequest, SamplingParams

TARGET = spec((Gqa(6, 2, 16),) * 5, (Dense(64),) * 5)
PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=1.0, seed=7),
    SamplingParams(max_tokens=24, temperature=0.8, top_k=12, top_p=0.9, repetition_penalty=1.2, seed=3),
]


def native() -> Kernels:
    pytest.importorskip("wager.kernels._native", reason="the native extension is not built")
    from wager.kernels.cpu import CpuKernels

    return CpuKernels(threads=2)


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


class _Recorded(HeadDrafter):
    """Keeps what was drafted, and hands on something else: the right tokens of `texts`, now and then a wrong one, so
    that drafts are accepted in part."""

    texts: dict[str, list[int]]

    def __init__(self, head: EagleHead, *, kernels: Kernels | None = None) -> None:
        super().__init__(head, kernels=kernels)
        self.made: dict[tuple[str, int], Draft] = {}
        self.texts, self._rng = {}, random.Random(4)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = super().propose(requests)
        handed = []
        for request, draft in zip(requests, drafts, strict=True):
            assert draft.seq_id == request.seq_id
            self.made[request.seq_id, request.position] = draft
            right = self.texts[request.seq_id][request.position : request.position + len(draft)]
            tokens = [token if self._rng.random() < 0.7 else (token + 1) % VOCAB for token in right]
            handed.append(Draft.chain(request.seq_id, tokens, drafter=self.name))
        return handed


@pytest.mark.parametrize("name", VARIANTS)
def test_guesses_are_those_of_the_reference_whatever_the_engine_does(name: str, tmp_path: Path) -> None:
    weights, kernels = target_weights(), ReferenceKernels("float32")
    reference = reference_of(VARIANTS[name], weights)
    decoder = decoder_on(weights, kernels)
    prompts, params = [TOKENS[:7], TOKENS[:33], TOKENS[2:20]], SamplingParams(max_tokens=14)
    plain = answers(engine_on(decoder), requests(prompts, params))
    drafter = _Recorded(head_of(reference, decoder, weights, tmp_path))
    drafter.texts = {f"r{i}": [*prompt, *plain[f"r{i}#0"]] for i, prompt in enumerate(prompts)}
    engine = engine_on(decoder, drafter, depth=3, max_rows=11)
    assert answers(engine, requests(prompts, params), preempt_every=6) == plain
    assert len(drafter.made) > 12
    assert drafter.block_pool.num_free_blocks == 48
    drafter.block_pool.check({})
    made = {key: draft for key, draft in drafter.made.items() if len(draft)}
    assert len(made) > 0.7 * len(drafter.made)  # the others were asked for before their states were there
    for (seq_id, position), draft in made.items():
        text = drafter.texts[seq_id]
        taps = tapped(weights, reference.flags.taps, text, kernels)
        guesses, rows = reference.guesses(taps, text[:position], len(draft))
        assert list(draft.tokens) == guesses, (seq_id, position)
        probabilities = [np.exp(row.max() - np.logaddexp.reduce(row)) for row in rows]
        assert_close(np.array(draft.scores), np.cumprod(probabilities), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("quantised", [False, True])
def test_the_text_is_that_of_plain_decoding(params: SamplingParams, quantised: bool, tmp_path: Path) -> None:
    weights, kernels = target_weights(), native()
    reference = reference_of(VARIANTS["eagle3.1"], weights)
    decoder = decoder_on(weights, kernels)
    prompts = [TOKENS[:20], TOKENS[:20], TOKENS[3:40], TOKENS[5:9], [5]]
    asked = requests(prompts, params)
    plain = answers(engine_on(decoder), asked)
    for preempt_every, max_rows, blocks in ((0, 48, 48), (4, 13, 48), (0, 48, 9)):
        head = head_of(reference, decoder, weights, tmp_path, quantised=quantised)
        drafter = HeadDrafter(head, kernels=kernels)
        engine = engine_on(decoder, drafter, max_rows=max_rows, num_blocks=blocks)
        for _ in range(2):  # the second time with prefixes in the cache
            assert answers(engine, asked, preempt_every=preempt_every) == plain
        assert "head" in engine.proposer.drafters
        drafter.block_pool.check({})
