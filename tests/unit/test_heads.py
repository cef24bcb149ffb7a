"""Chains and trees of heads: they are those that a search by the definition finds on a reference without cache or
batch, whatever the engine does around them, and the text is that of plain decoding."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoder_engines import answers, decoder_on, engine_on, native, requests
from eagle_heads import VARIANTS, VOCAB
from recorded_drafts import Recorded
from test_block_heads import KINDS as BLOCKS
from test_block_heads import ReferenceBlock
from test_cached_heads import TARGET, reference_of
from test_medusa_heads import FORMATS, IDS, expected_logits, save
from tiny_models import TOKENS

from closeness import assert_close
from oracle.kernels import ReferenceKernels
from packing import batch, chain
from wager.draft.registry import DrafterParts, build_drafter
from wager.draft.trees import sequoia
from wager.drafter_spec import DrafterSpec
from wager.kernels._native import BlockPool
from wager.kernels.arrays import Array
from wager.kernels.base import TargetOutput
from wager.kernels.cpu import Kernels
from wager.kernels.noise import gumbel
from wager.models.head_block import open_block
from wager.models.head_eagle import open_eagle
from wager.models.head_files import HeadFiles, HeadOutput
from wager.models.head_medusa import open_medusa
from wager.models.random_models import RandomWeights
from wager.models.transformer import Decoder
from wager.types import Draft, DraftRequest, SamplingParams, Span, VerifyRule
from wager.verify.pack import pack

WEIGHTS = RandomWeights(TARGET, 1)
GREEDY, SAMPLED = SamplingParams(max_tokens=14), SamplingParams(max_tokens=14, temperature=1.0, seed=7)
HEADS = {"eagle3": VARIANTS, "medusa": FORMATS, "dflash": BLOCKS}
CASES = [(kind, variant) for kind, variants in HEADS.items() for variant in variants]
SOME = [("eagle3", "speculators"), ("medusa", "one output"), ("dflash", "dspark")]
Logits = Callable[[Sequence[int], Sequence[int]], tuple[Array, "float | None"]]
"""Text and path behind it -> logits by the target's ids, and how sure the head is of its best guess (None: by them)."""


@dataclass
class Head:
    """A random head's files, and what it says by the definition."""

    kind: str
    folder: Path
    logits: Logits
    depth: int

    def drafter(
        self, decoder: Decoder, *, dtype: str = "bf16", trees: bool = True, kernels: Kernels | None = None
    ) -> Any:
        opened: Any = {"eagle3": open_eagle, "medusa": open_medusa, "dflash": open_block}[self.kind](
            HeadFiles(self.folder), TARGET, dtype=dtype
        )
        head = opened.load(decoder, WEIGHTS, num_blocks=48)
        return build_drafter(DrafterSpec(self.kind, trees=trees), DrafterParts(VOCAB, head=head, kernels=kernels))


@cache
def states_of(text: tuple[int, ...], taps: tuple[int, ...]) -> tuple[Array, Array]:
    """The taps of a text side by side, and what enters the last norm, [tokens, ...]."""
    decoder = decoder_on(WEIGHTS, ReferenceKernels("float32"), max_rows=96)
    decoder.tap(taps)
    output = decoder.forward(batch([chain(0, text, list(range(6)))], range(len(text))))
    assert output.last_hidden is not None
    tapped = [output.taps[tap] for tap in taps]
    return np.concatenate(tapped, axis=1) if tapped else np.zeros(0), output.last_hidden.copy()


def by_target(ids: Array, logits: Array) -> Array:
    whole = np.full(VOCAB, -1e30)
    whole[ids] = logits
    return whole


def head_named(kind: str, variant: str, folder: Path) -> Head:
    if kind == "eagle3":
        eagle = reference_of(VARIANTS[variant], WEIGHTS)

        def eagle_logits(text: Sequence[int], path: Sequence[int]) -> tuple[Array, float | None]:
            taps, _ = states_of(tuple(text), eagle.flags.taps)
            return by_target(eagle.ids, list(eagle.rows(taps, text, path))[-1]), None

        return Head(kind, eagle.save(folder), eagle_logits, 8)
    if kind == "medusa":
        config, files, values = FORMATS[variant]
        ids = IDS if "token_map" in files else np.arange(VOCAB)

        def medusa_logits(text: Sequence[int], path: Sequence[int]) -> tuple[Array, float | None]:
            _, last = states_of(tuple(text), ())
            return by_target(ids, expected_logits(values, last[len(text) - 2], ids)[len(path)]), None

        return Head(kind, save(folder, config, files), medusa_logits, 3)
    block = ReferenceBlock(BLOCKS[variant])
    if block.kind.confidence:  # less certain of itself
        block.tensors["confidence_head.proj.weight"] *= 0.3
        block.tensors["confidence_head.proj.bias"] -= 1.5

    def block_logits(text: Sequence[int], path: Sequence[int]) -> tuple[Array, float | None]:
        taps, _ = states_of(tuple(text), block.kind.taps)
        slot = block.slots(taps, text)[len(path)]
        logits, rate = block.slot_logits(slot, [text[-1], *path][-1])
        return by_target(block.ids, logits.numpy()), rate if block.kind.confidence else None

    return Head(kind, block.save(folder), block_logits, 4 if block.kind.anchor_guesses else 3)


def candidates(
    head: Head, text: Sequence[int], path: tuple[int, ...], request: DraftRequest
) -> list[tuple[int, float]]:
    """Tokens behind a path and the probability of each by the definition, likeliest first."""
    logits, rate = head.logits(text, path)
    temperature = request.params.temperature
    if temperature:
        noise = gumbel(request.seed, request.position + len(path), vocab=VOCAB, choice=request.choice)
        logits = temperature * (logits / temperature + noise)
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    order = np.argsort(-shares)
    if rate is not None:
        best = shares[order[0]]
        shares = shares * min(rate / best, (1 - rate) / (1 - best))
        shares[order[0]] = rate
    return [(int(token), float(shares[token])) for token in order]


def best_tree(head: Head, text: Sequence[int], request: DraftRequest) -> dict[tuple[int, ...], float]:
    """The likeliest paths, found by taking the likeliest node whose parent was taken, again and again."""
    found: dict[tuple[int, ...], float] = {}
    heap: list[tuple[float, tuple[int, ...]]] = []

    def expand(path: tuple[int, ...], value: float) -> None:
        if len(path) < min(head.depth, request.depth):
            for token, probability in candidates(head, text, path, request):
                heapq.heappush(heap, (-value * probability, (*path, token)))

    expand((), 1.0)
    while heap and len(found) < request.depth:
        value, path = heapq.heappop(heap)
        found[path] = -value
        expand(path, -value)
    return found


def paths_of(draft: Draft) -> dict[tuple[int, ...], float]:
    paths = [tuple(draft.tokens[each] for each in draft.path(node)) for node in range(len(draft))]
    assert len(set(paths)) == len(draft)
    return dict(zip(paths, draft.scores, strict=True))


def best_chain(head: Head, text: Sequence[int], request: DraftRequest) -> dict[tuple[int, ...], float]:
    """The likeliest token under the noise, again and again; what it is worth is its share without noise."""
    found: dict[tuple[int, ...], float] = {}
    path, value = (), 1.0
    for _ in range(min(head.depth, request.depth)):
        token, _ = candidates(head, text, path, request)[0]
        logits, rate = head.logits(text, path)
        value *= float(np.exp(logits[token] - np.logaddexp.reduce(logits))) if rate is None else rate
        path = (*path, token)
        found[path] = value
    return found


@pytest.mark.parametrize(
    ("kind", "variant", "params", "trees"),
    [(*case, params, trees) for case in CASES for params, trees in ((GREEDY, True), (SAMPLED, False))]
    + [(*CASES[0], GREEDY, False), (*CASES[0], SAMPLED, True)],
)
def test_guesses_are_those_of_a_search_by_the_definition(
    kind: str, variant: str, params: SamplingParams, trees: bool, tmp_path: Path
) -> None:
    """Noise is for what all kinds share, so one of them has it in trees too."""
    head = head_named(kind, variant, tmp_path)
    decoder = decoder_on(WEIGHTS, ReferenceKernels("float32"))
    prompts = [TOKENS[:7], TOKENS[:33], TOKENS[2:20]]
    asked = requests(prompts, params)
    plain = answers(engine_on(decoder), asked)
    texts = {f"r{i}": [*prompt, *plain[f"r{i}#0"]] for i, prompt in enumerate(prompts)}
    drafter = head.drafter(decoder, trees=trees)
    assert drafter.makes_trees == trees and drafter.max_depth == (15 if trees else head.depth)
    recorded = Recorded(drafter, vocab=VOCAB)
    recorded.texts = texts
    assert answers(engine_on(decoder, drafter, depth=4, max_rows=17), asked, preempt_every=6) == plain
    if kind != "medusa":
        drafter.block_pool.check({})
    drafts = recorded.drafts
    assert len(drafts) > max(8, 0.6 * len(recorded.made))
    assert any(not draft.is_chain for draft in drafts.values()) == trees
    for (seq_id, position), draft in drafts.items():
        request, text, found = recorded.asked[seq_id, position], texts[seq_id][:position], paths_of(draft)
        expected = best_tree(head, text, request) if trees else best_chain(head, text, request)
        assert len(draft) == len(expected) == (request.depth if trees else min(request.depth, head.depth))
        assert sum(found.values()) == pytest.approx(sum(expected.values()), rel=2e-3)
        likely = {path for path, value in expected.items() if value > 1.01 * min(expected.values()) or not trees}
        assert likely <= set(found)
        assert all(found[path] == pytest.approx(expected[path], rel=2e-3, abs=1e-6) for path in likely)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "chains"), [("rejection", False), ("traversal", False), ("rejection", True)])
@pytest.mark.parametrize(("kind", "variant"), SOME)
def test_rules_that_need_q_get_it_and_siblings_are_drawn_in_a_shape_that_is_known_before(
    kind: str, variant: str, rule: VerifyRule, chains: bool, tmp_path: Path
) -> None:
    """q is a distribution over the target's ids that is 0 where the head guesses nothing."""
    head, kernels = head_named(kind, variant, tmp_path), native()
    decoder = decoder_on(WEIGHTS, kernels)
    asked = requests([TOKENS[:20], TOKENS[4:30]], SAMPLED)
    drafter = head.drafter(decoder, kernels=kernels, trees=not chains)
    propose, made = drafter.propose, list[Draft]()
    never = head.logits(TOKENS[:9], ())[0] < -1e29

    def checked(wanted: Sequence[DraftRequest]) -> list[Draft]:
        rates = () if chains else drafter.rank_rates.get("").rates
        drafts: list[Draft] = propose(wanted)
        for request, draft in zip(wanted, drafts, strict=True):
            if not len(draft):
                continue
            made.append(draft)
            deepest = min(request.depth, head.depth)
            assert draft.parents == (
                tuple(range(-1, deepest - 1)) if chains else sequoia(rates, request.depth, deepest)
            )
            assert draft.draft_probs is not None and draft.draft_probs.shape == (len(draft), VOCAB)
            assert not draft.draft_probs[:, never].any()
            for parent in {-1, *draft.parents}:
                nodes = [node for node, above in enumerate(draft.parents) if above == parent]
                left = draft.draft_probs[nodes[0]].copy()
                for node in nodes:  # each from what the siblings before it have left
                    assert draft.draft_probs[node] == pytest.approx(left / left.sum())
                    assert left[draft.tokens[node]] > 0
                    left[draft.tokens[node]] = 0
        return drafts

    drafter.propose = checked
    engine = engine_on(decoder, drafter, depth=6, rule=rule)
    first = answers(engine, asked)
    assert drafter.name in engine.proposer.drafters
    assert sum(draft.is_chain == chains for draft in made) > 8
    if not chains:
        drafter.rank_rates.clear()
    assert answers(engine_on(decoder, drafter, depth=6, rule=rule), asked) == first
    greedy = requests([TOKENS[:20], TOKENS[4:30]], GREEDY)
    assert answers(engine_on(decoder, drafter, depth=6, rule=rule), greedy) == answers(engine_on(decoder), greedy)


@pytest.mark.parametrize("dtype", ["bf16", "q8", "q4"])
@pytest.mark.parametrize("variant", BLOCKS)
def test_blocks_on_the_native_kernels_are_those_of_the_reference(variant: str, dtype: str, tmp_path: Path) -> None:
    """And the guesses of a tape for all of them are those that are taken one after the other."""
    folder, found = ReferenceBlock(BLOCKS[variant]).save(tmp_path), []
    for kernels in (native(), ReferenceKernels()):
        decoder, pool = decoder_on(WEIGHTS, kernels), BlockPool(48, prefix_cache=False)
        head = open_block(HeadFiles(folder), TARGET, dtype=dtype).load(decoder, WEIGHTS, num_blocks=48)
        lengths = {"a": 10, "b": 3}
        for seq_id, length in lengths.items():
            pool.reserve(seq_id, length + head.slots)
        states = np.random.default_rng(3).standard_normal((13, head.state_width)).astype(np.float32)
        known = [Span(name, 0, tuple(TOKENS[:n]), needs_logits=False) for name, n in lengths.items()]
        head.extend(pack(known, {}, pool, into=head.context_buffers), states)
        last = [TOKENS[10], TOKENS[3]]
        blocks = [
            Span(name, n, (token, *head.masks), needs_logits=True)
            for (name, n), token in zip(lengths.items(), last, strict=True)
        ]
        head.run(pack(blocks, {}, pool, into=head.buffers))
        depth, before, tokens, rates = head.max_depth, last, [], []
        for step in range(depth):
            output, sure = head.logits([head.guess_row(block, step) for block in range(2)], before)
            found.append(output.logits.copy())
            before = output.greedy_tokens.tolist()
            tokens.append(before)
            shares = np.exp(output.logits - np.logaddexp.reduce(output.logits, axis=1, keepdims=True)).max(axis=1)
            rates.append(shares if sure[0] is None else sure)
        chained, chances = head.chains(last, depth)
        assert np.array_equal(chained, np.transpose(tokens))
        assert_close(chances, np.transpose(rates).astype(np.float32), rtol=1e-3, atol=1e-3)
    half = len(found) // 2
    assert_close(found[0], found[half], rtol=0.05, atol=0.25 if dtype == "bf16" else 0.5)


def test_logits_that_are_no_numbers_end_the_draft(tmp_path: Path) -> None:
    """In all kinds of heads, whose texts are those of plain decoding."""
    kernels = native()
    decoder = decoder_on(WEIGHTS, kernels)
    asked = [
        replace(request, id=f"{request.id}{number}")
        for number, params in enumerate((GREEDY, SAMPLED))
        for request in requests([TOKENS[:20], TOKENS[4:30]], params)
    ]
    plain = answers(engine_on(decoder), asked)
    for (kind, variant), trees in itertools.product(SOME, (True, False)):
        drafter = head_named(kind, variant, tmp_path / kind).drafter(decoder, kernels=kernels, trees=trees)
        name = "forward" if kind != "dflash" else "logits" if trees else "chains"
        working, calls = getattr(drafter._head, name), itertools.count(1)

        def broken(*given: Any, working: Any = working, calls: Iterator[int] = calls) -> Any:
            output = working(*given)
            if next(calls) % 3:
                return output
            if isinstance(output, HeadOutput):
                nothing = np.full_like(output.tokens, -1)
                return replace(output, logits=output.logits * np.float32("nan"), tokens=nothing)
            first, rates = output
            if isinstance(first, TargetOutput):
                nothing = np.full_like(first.greedy_tokens, -1)
                return replace(first, logits=first.logits * np.float32("nan"), greedy_tokens=nothing), rates
            return np.full_like(first, -1), rates

        def broken_states(output: TargetOutput, *given: Any, read: Any = drafter.read, calls: Any = calls) -> None:
            factor = np.float32(1 if next(calls) % 3 else "nan")
            read(replace(output, taps={tap: factor * rows for tap, rows in output.taps.items()}), *given)

        if getattr(drafter, "_rounds", None) is None:
            setattr(drafter._head, name, broken)
        else:  # whose passes are all in C++
            drafter.read = broken_states
        engine = engine_on(decoder, drafter)
        assert answers(engine, asked) == plain
        assert drafter.name in engine.proposer.drafters and next(calls) > 7
