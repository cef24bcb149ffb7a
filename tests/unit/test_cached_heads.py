"""Heads with a cache, EAGLE-3's and modules of multi-token prediction: their guesses are those of a reference without
cache or batch, whatever the engine does around them, and the text is that of plain decoding. Further tests of EAGLE-3,
beside heads without a cache, are in test_heads.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from decoder_engines import answers, decoder_on, engine_on, native, requests
from eagle_heads import VARIANTS as EAGLES
from eagle_heads import VOCAB, Flags, ReferenceHead
from mtp_modules import LAYERS, ReferenceModules
from mtp_modules import VARIANTS as MODULES
from recorded_drafts import Recorded
from tiny_models import TOKENS, spec

from closeness import assert_close
from oracle.kernels import ReferenceKernels
from packing import batch, chain
from wager.arch import Dense, Gqa
from wager.draft.heads.autoregressive import HeadChainDrafter, HeadDrafter
from wager.draft.registry import DrafterParts, build_drafter
from wager.drafter_spec import DrafterSpec
from wager.kernels._native import BlockPool, HeadSequence
from wager.kernels.arrays import Array
from wager.kernels.cpu import Kernels
from wager.models.head_eagle import EagleHead, open_eagle
from wager.models.head_files import HeadFiles
from wager.models.head_mtp import MtpHead, open_mtp
from wager.models.random_models import RandomWeights
from wager.models.transformer import Decoder
from wager.models.weights import Weights, open_weights
from wager.types import Draft, DraftRequest, SamplingParams

TARGET = spec((Gqa(6, 2, 16),) * 5, (Dense(64),) * 5)
"""Of EAGLE-3 heads; modules have a target of their own."""

PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=1.0, seed=7),
    SamplingParams(max_tokens=24, temperature=0.8, top_k=12, top_p=0.9, repetition_penalty=1.2, seed=3),
]


def reference_of(flags: Flags, weights: Weights) -> ReferenceHead:
    embedding = weights.read("embed.weight")
    return ReferenceHead(flags, target_embedding=embedding, target_output=embedding)


@cache
def modules_of(name: str) -> ReferenceModules:
    return ReferenceModules(MODULES[name])


@dataclass
class Case:
    """A random head in a folder, and its target."""

    reference: ReferenceHead | ReferenceModules
    weights: Weights
    folder: Path

    @classmethod
    def of(cls, kind: str, name: str, folder: Path) -> Case:
        if kind == "eagle3":
            weights = RandomWeights(TARGET, 1)
            return cls(reference_of(EAGLES[name], weights), weights, folder)
        return cls(modules_of(name), open_weights(modules_of(name).save_target(folder)), folder)

    def head(self, decoder: Decoder, *, dtype: str = "bf16", blocks: int = 48) -> EagleHead | MtpHead:
        """Modules are inside the target, or in a directory of their own where their format has one."""
        if isinstance(self.reference, ReferenceHead):
            opened = open_eagle(HeadFiles(self.reference.save(self.folder)), TARGET, dtype=dtype)
            return opened.load(decoder, self.weights, num_blocks=blocks)
        inside = self.reference.variant.format != "speculators"
        files = HeadFiles(self.folder if inside else self.reference.save_modules(self.folder / "modules"))
        modules = open_mtp(files, decoder.spec, dtype=dtype, inside=inside)
        return modules.load(decoder, self.weights, num_blocks=blocks)

    def drafter(
        self,
        decoder: Decoder,
        *,
        kernels: Kernels | None = None,
        dtype: str = "bf16",
        prefix_cache: bool = True,
        blocks: int = 48,
    ) -> HeadDrafter:
        head = self.head(decoder, dtype=dtype, blocks=blocks)
        parts = DrafterParts(VOCAB, head=head, kernels=kernels, prefix_cache=prefix_cache)
        made = build_drafter(DrafterSpec("eagle3" if isinstance(self.reference, ReferenceHead) else "mtp"), parts)
        assert isinstance(made, HeadDrafter)
        return made

    def states(self, text: Sequence[int], kernels: Kernels) -> Array:
        """What the head reads of a text, f32 [tokens, taps * hidden], by a decoder of its own."""
        taps = self.reference.flags.taps if isinstance(self.reference, ReferenceHead) else (LAYERS,)
        decoder = decoder_on(self.weights, kernels, max_rows=96)
        decoder.tap(taps)
        found = decoder.forward(batch([chain(0, text, list(range(6)))], [0])).taps
        return np.concatenate([found[tap] for tap in taps], axis=1)

    def check(self, states: Array, text: Sequence[int], recorded: Recorded, *, seq_id: str = "r0") -> None:
        """The drafts of a sequence are those of a head that saw the last of its states, as many as are given."""
        first = len(text) - len(states)
        made = {position: draft for (name, position), draft in recorded.drafts.items() if name == seq_id}
        assert made
        for position, draft in made.items():
            guesses, rows = self.reference.guesses(states, text[first:position], len(draft))
            assert list(draft.tokens) == guesses, position
            probabilities = [np.exp(row.max() - np.logaddexp.reduce(row)) for row in rows]
            assert_close(np.array(draft.scores), np.cumprod(probabilities), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", MODULES)
def test_guesses_are_those_of_the_reference_whatever_the_engine_does(name: str, tmp_path: Path) -> None:
    case, kernels = Case.of("mtp", name, tmp_path), ReferenceKernels("float32")
    decoder = decoder_on(case.weights, kernels)
    prompts, params = [TOKENS[:7], TOKENS[:33], TOKENS[2:20]], SamplingParams(max_tokens=14)
    plain = answers(engine_on(decoder), requests(prompts, params))
    drafter = case.drafter(decoder)
    recorded = Recorded(drafter, vocab=VOCAB)
    recorded.texts = {f"r{i}": [*prompt, *plain[f"r{i}#0"]] for i, prompt in enumerate(prompts)}
    engine = engine_on(decoder, drafter, depth=5, max_rows=11)
    assert answers(engine, requests(prompts, params), preempt_every=6) == plain
    drafter.block_pool.check({})
    made = recorded.drafts
    assert len(made) > 12 and len(made) > 0.7 * len(recorded.made)  # others were asked for before their states came
    for seq_id, text in recorded.texts.items():
        case.check(case.states(text, kernels), text, recorded, seq_id=seq_id)


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("dtype", ["bf16", "q8", "q4"])
def test_the_text_is_that_of_plain_decoding(params: SamplingParams, dtype: str, tmp_path: Path) -> None:
    """Also preempted, in chunks, and in a small cache, and a second time with prefixes in it."""
    case, kernels = Case.of("eagle3", "eagle3.1", tmp_path), native()
    decoder = decoder_on(case.weights, kernels)
    asked = requests([TOKENS[:20], TOKENS[:20], TOKENS[3:40], TOKENS[5:9], [5]], params)
    plain = answers(engine_on(decoder), asked)
    for preempt_every, max_rows, blocks in ((0, 48, 48), (4, 13, 48), (0, 48, 9)):
        drafter = case.drafter(decoder, kernels=kernels, dtype=dtype)
        engine = engine_on(decoder, drafter, depth=4, max_rows=max_rows, num_blocks=blocks)
        for _ in range(2):
            assert answers(engine, asked, preempt_every=preempt_every) == plain
        assert drafter.name in engine.proposer.drafters
        drafter.block_pool.check({})


@pytest.mark.parametrize("params", PARAMS[:2])
def test_rounds_in_cpp_are_those_of_a_pass_for_each_guess(
    params: SamplingParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sequences that are drafted together and whose drafts end at different depths, of prompts that take several
    passes, and in a cache that is too small for all."""
    case, kernels = Case.of("eagle3", "eagle3.1", tmp_path), native()
    decoder = decoder_on(case.weights, kernels)
    asked = requests([TOKENS[:20], TOKENS[3:40], TOKENS[5:9], TOKENS[:31]], params)
    plain, made = answers(engine_on(decoder), asked), []
    for native_rounds, blocks in ((True, 48), (False, 48), (True, 7), (False, 7)):
        drafter, drafts = case.drafter(decoder, kernels=kernels, blocks=blocks), list[Draft]()
        propose = drafter.propose

        def uneven(wanted: Sequence[DraftRequest], propose: Any = propose, drafts: list[Draft] = drafts) -> list[Draft]:
            least = [0.0, 0.03, 0.0, 1e-3]
            wanted = [r._replace(min_survival=least[r.position % 4], depth=1 + r.position % 6) for r in wanted]
            drafts += (found := propose(wanted))
            return cast(list[Draft], found)

        monkeypatch.setattr(drafter, "propose", uneven)
        assert isinstance(drafter, HeadChainDrafter) and drafter._rounds is not None
        if not native_rounds:
            monkeypatch.setattr(drafter, "_rounds", None)
        assert answers(engine_on(decoder, drafter, depth=6), asked) == plain
        drafter.block_pool.check({})
        made.append([(each.seq_id, each.tokens, each.scores) for each in drafts])
    assert made[0] == made[1] and made[2] == made[3]
    assert {len(tokens) for _, tokens, _ in made[0]} >= {1, 2, 3, 4, 5, 6}
    assert sum(not tokens for _, tokens, _ in made[2]) > sum(not tokens for _, tokens, _ in made[0])


SAME, FORKED = TOKENS[:40], [*TOKENS[:17], *TOKENS[30:45]]
"""Prompts after the first one: it again, and one that agrees with it in 17 tokens."""


@pytest.mark.parametrize(
    ("kind", "name", "prompt", "prefix_cache", "seen"),
    [
        ("mtp", "deepseek-three", FORKED, True, 16),  # its first block embeds two tokens more, of which one differs
        ("mtp", "deepseek-three", SAME, True, 0),
        ("mtp", "deepseek-three", SAME, False, 32),
        ("mtp", "deepseek", SAME, True, 0),
        ("mtp", "qwen", FORKED, True, 0),
        ("eagle3", "eagle3.1", SAME, True, 0),
        ("eagle3", "eagle3.1", SAME, False, 32),
    ],
)
def test_entries_of_a_cached_prefix_are_found_or_left_out(
    kind: str, name: str, prompt: list[int], prefix_cache: bool, seen: int, tmp_path: Path
) -> None:
    """The states of a cached prefix never come again. The guesses are those of the whole text if the head's own cache
    has the prefix, found by all tokens that its entries embed; else those of a head that sees only what came."""
    case, kernels = Case.of(kind, name, tmp_path), ReferenceKernels("float32")
    decoder = decoder_on(case.weights, kernels)
    asked = [requests([each], SamplingParams(max_tokens=6)) for each in (TOKENS[:40], prompt)]
    plain = [answers(engine_on(decoder), each) for each in asked]
    drafter = case.drafter(decoder, prefix_cache=prefix_cache)
    recorded = Recorded(drafter, vocab=VOCAB)
    engine = engine_on(decoder, drafter, depth=4)
    for request, answer, first in zip(asked, plain, (0, seen), strict=True):
        text = [*request[0].prompt, *answer["r0#0"]]
        recorded.texts = {"r0": text}
        recorded.made.clear()
        assert answers(engine, request) == answer
        case.check(case.states(text, kernels)[first:], text, recorded)


@pytest.mark.parametrize("dtype", ["bf16", "q8", "q4"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("eagle3", "eagle3.1"),
        ("eagle3", "qwen3"),
        ("eagle3", "one-norm"),
        ("mtp", "mimo"),
        ("mtp", "qwen-experts-two"),
        ("mtp", "deepseek"),
    ],
)
def test_the_native_kernels_guess_as_the_reference(kind: str, name: str, dtype: str, tmp_path: Path) -> None:
    case, logits = Case.of(kind, name, tmp_path), []
    for kernels in (native(), ReferenceKernels()):
        head = case.head(decoder_on(case.weights, kernels), dtype=dtype)
        rng = np.random.default_rng(3)
        states = rng.standard_normal((10, head.state_width)).astype(np.float32)
        fed = rng.standard_normal((1, head.hidden)).astype(np.float32)
        output = head.forward(batch([chain(0, TOKENS[:10], [3]), chain(0, TOKENS[3:4], [5])], [9, 10]), states, fed)
        logits.append(output.by_target().logits.copy())
        assert output.fed is not None and np.array_equal(output.tokens, output.by_target().logits.argmax(axis=1))
        assert np.array_equal(output.by_target().greedy_tokens, output.tokens)
    assert_close(*logits, rtol=0.05, atol=0.25 if dtype == "bf16" else 0.5)


def test_states_wait_until_they_are_taken_and_wrong_ones_are_refused() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    taps = [rows, -rows]
    sequence = HeadSequence(TOKENS[:9], width=4, most=1024, tenant="", temperature=None)
    assert sequence.read(taps, 0, range(3)) == 3 and sequence.read(taps, 1, (0, 1, 4)) == 1
    assert sequence.num_states == 4 and sequence.num_known == 8
    found = np.zeros((4, 4), np.float32)
    sequence.take(found[:1])
    sequence.take(found[1:])
    assert np.array_equal(found, np.concatenate([rows, -rows], axis=1)[[0, 1, 2, 4]])
    assert sequence.read(taps, 6, [5]) == 1 and sequence.num_states == 1, "behind a gap they begin anew"
    few = HeadSequence(TOKENS[:9], width=4, most=2, tenant="", temperature=None)
    assert few.read(taps, 0, range(6)) == 2 and few.read(taps, 6, [0, 1]) == 2 and few.num_states == 4
    pool = BlockPool(4, prefix_cache=True, lead=1)
    assert few.join(pool, "few") and (few.origin, few.num_states) == (6, 2), "the last ones count"
    with pytest.raises(ValueError, match="no states"):
        HeadSequence(TOKENS[:9], width=4, most=0, tenant="", temperature=None)
    assert not sequence.join(pool, "s"), "a state is missing"
    assert sequence.read(taps, 7, [1]) == 1 and sequence.join(pool, "s")
    assert (sequence.origin, sequence.num_entries, sequence.num_known) == (6, 0, 2)
    pool.reserve("s", 16)
    sequence.origin = 0
    for wrong in (
        lambda: sequence.read([rows], 8, [0]),
        lambda: sequence.read([], 8, [0]),
        lambda: sequence.read([rows, rows.astype(np.float64)], 8, [0]),
        lambda: sequence.read(taps, 8, [6]),
        lambda: sequence.read(taps, 8, [-1]),
        lambda: sequence.take(np.zeros((3, 4), np.float32)),
        lambda: sequence.take(np.zeros((1, 3), np.float32)),
        lambda: sequence.commit(pool, "s", 9),
    ):
        with pytest.raises((ValueError, IndexError)):
            wrong()
    assert sequence.num_states == 2
