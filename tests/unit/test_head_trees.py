"""Trees of heads: they are those that a search by the definition finds on a reference without cache or batch, whatever
the engine does around them, and the text is that of plain decoding."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoder_engines import answers, decoder_on, engine_on, native, requests
from eagle_heads import VARIANTS, VOCAB
from packing import batch, chain
from test_block_heads import KINDS as BLOCKS
from test_block_heads import ReferenceBlock
from test_eagle_head import TARGET, reference_of
from test_medusa_heads import FORMATS, IDS, expected_logits, save
from tiny_models import TOKENS

from oracle.kernels import ReferenceKernels
from wager.draft.base import Drafter
from wager.draft.registry import DrafterParts, build_drafter
from wager.draft.trees import sequoia
from wager.drafter_spec import DrafterSpec
from wager.kernels.arrays import Array
from wager.kernels.base import TargetOutput
from wager.kernels.cpu import Kernels
from wager.kernels.noise import gumbel
from wager.models.head_block import open_block
from wager.models.head_eagle import open_eagle
from wager.models.head_files import HeadFiles
from wager.models.head_medusa import open_medusa
from wager.models.random_models import random_weights
from wager.models.transformer import Decoder
from wager.types import Draft, DraftRequest, SamplingParams, VerifyRule

torch.set_num_threads(1)

WEIGHTS = random_weights(TARGET, 1)
GREEDY, SAMPLED = SamplingParams(max_tokens=14), SamplingParams(max_tokens=14, temperature=1.0, seed=7)
HEADS = {
    "eagle3": ("eagle3.1", "speculators", "qwen3"),
    "medusa": ("own outputs", "one output"),
    "dflash": ("dflash", "dspark"),
}
CASES = [(kind, variant) for kind, variants in HEADS.items() for variant in variants]
FIRST = [(kind, variants[-1]) for kind, variants in HEADS.items()]
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
        self, decoder: Decoder, *, quantised: bool = False, trees: bool = True, kernels: Kernels | None = None
    ) -> Any:
        opened: Any = {"eagle3": open_eagle, "medusa": open_medusa, "dflash": open_block}[self.kind](
            HeadFiles(self.folder), TARGET, quantised=quantised
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


def recorded(drafter: Drafter, texts: dict[str, list[int]], *, seed: int = 4) -> list[tuple[DraftRequest, Draft]]:
    """Keeps the drafter's drafts, and hands on the right tokens of `texts` in their place, now and then a wrong one."""
    made: list[tuple[DraftRequest, Draft]] = []
    propose, rng = drafter.propose, random.Random(seed)

    def handed(asked: Sequence[DraftRequest]) -> list[Draft]:
        drafts = propose(asked)
        made.extend(zip(asked, drafts, strict=True))
        found = []
        for request, draft in zip(asked, drafts, strict=True):
            right = texts[request.seq_id][request.position : request.position + len(draft)]
            tokens = [token if rng.random() < 0.7 else (token + 1) % VOCAB for token in right]
            found.append(Draft.chain(request.seq_id, tokens, drafter=drafter.name))
        return found

    drafter.propose = handed  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize(("kind", "variant"), CASES)
def test_trees_are_those_of_a_search_by_the_definition(
    kind: str, variant: str, params: SamplingParams, tmp_path: Path
) -> None:
    head = head_named(kind, variant, tmp_path)
    decoder = decoder_on(WEIGHTS, ReferenceKernels("float32"))
    prompts = [TOKENS[:7], TOKENS[:33], TOKENS[2:20]]
    asked = requests(prompts, params)
    plain = answers(engine_on(decoder), asked)
    texts = {f"r{i}": [*prompt, *plain[f"r{i}#0"]] for i, prompt in enumerate(prompts)}
    drafter = head.drafter(decoder)
    assert drafter.makes_trees and drafter.max_depth >= 15
    made = recorded(drafter, texts)
    assert answers(engine_on(decoder, drafter, depth=4, max_rows=17), asked, preempt_every=6) == plain
    drafts = [(request, draft) for request, draft in made if len(draft)]
    assert len(drafts) > max(8, 0.6 * len(made))
    assert sum(not draft.is_chain for _, draft in drafts) > len(drafts) / 4
    for request, draft in drafts:
        expected, found = best_tree(head, texts[request.seq_id][: request.position], request), paths_of(draft)
        assert len(draft) == request.depth
        assert sum(found.values()) == pytest.approx(sum(expected.values()), rel=2e-3)
        likely = {path for path, value in expected.items() if value > 1.01 * min(expected.values())}
        assert likely <= set(found)
        assert all(found[path] == pytest.approx(expected[path], rel=2e-3, abs=1e-6) for path in likely)


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
@pytest.mark.parametrize(("kind", "variant"), FIRST)
def test_siblings_are_drawn_in_a_shape_that_is_known_before(
    kind: str, variant: str, rule: VerifyRule, tmp_path: Path
) -> None:
    head, kernels = head_named(kind, variant, tmp_path), native()
    decoder = decoder_on(WEIGHTS, kernels)
    asked = requests([TOKENS[:20], TOKENS[4:30]], SAMPLED)
    drafter = head.drafter(decoder, kernels=kernels)
    propose, trees = drafter.propose, 0

    def checked(wanted: Sequence[DraftRequest]) -> list[Draft]:
        nonlocal trees
        rates = drafter.rank_rates.get("").rates
        drafts: list[Draft] = propose(wanted)
        for request, draft in zip(wanted, drafts, strict=True):
            if not len(draft):
                continue
            trees += not draft.is_chain
            template = sequoia(rates, request.depth, min(request.depth, head.depth))
            assert draft.parents == template
            assert draft.draft_probs is not None and draft.draft_probs.shape == (len(draft), VOCAB)
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
    assert drafter.name in engine.proposer.drafters and trees > 8
    drafter.rank_rates.clear()
    assert answers(engine_on(decoder, drafter, depth=6, rule=rule), asked) == first
    greedy = requests([TOKENS[:20], TOKENS[4:30]], GREEDY)
    assert answers(engine_on(decoder, drafter, depth=6, rule=rule), greedy) == answers(engine_on(decoder), greedy)


@pytest.mark.parametrize(("kind", "variant"), CASES)
def test_a_tree_expects_at_least_what_a_chain_of_as_many_guesses_does(kind: str, variant: str, tmp_path: Path) -> None:
    head = head_named(kind, variant, tmp_path)
    decoder = decoder_on(WEIGHTS, native())
    asked = requests([TOKENS[:20], TOKENS[4:30]], SamplingParams(max_tokens=30))
    plain = answers(engine_on(decoder), asked)
    texts = {"r0": [*TOKENS[:20], *plain["r0#0"]], "r1": [*TOKENS[4:30], *plain["r1#0"]]}
    for depth in (3, 7):
        sums: dict[bool, dict[tuple[str, int], float]] = {}
        for trees in (False, True):
            drafter = head.drafter(decoder, trees=trees)
            made = recorded(drafter, texts)
            assert answers(engine_on(decoder, drafter, depth=depth), asked) == plain
            sums[trees] = {(ask.seq_id, ask.position): sum(draft.scores) for ask, draft in made if len(draft)}
        both = sums[False].keys() & sums[True].keys()
        assert len(both) > 6
        assert all(
            sums[True][each] >= (1 - 1e-5) * sums[False][each] for each in both
        )  # float32 in one, 64 in the other
        assert sum(sums[True][each] for each in both) > 1.005 * sum(sums[False][each] for each in both)


@pytest.mark.parametrize(("kind", "variant"), FIRST)
def test_logits_that_are_no_numbers_end_the_trees(kind: str, variant: str, tmp_path: Path) -> None:
    head, kernels = head_named(kind, variant, tmp_path), native()
    decoder = decoder_on(WEIGHTS, kernels)
    drafter = head.drafter(decoder, kernels=kernels)
    loaded = drafter._head
    name = "logits" if kind == "dflash" else "forward"
    working, calls = getattr(loaded, name), 0

    def broken(*arguments: Any) -> TargetOutput:
        nonlocal calls
        calls += 1
        output: TargetOutput = working(*arguments)
        if calls % 3:
            return output
        return TargetOutput(
            output.logits * np.float32("nan"), np.full_like(output.greedy_tokens, -1), output.last_hidden
        )

    setattr(loaded, name, broken)
    for params in (GREEDY, SAMPLED):
        asked = requests([TOKENS[:20], TOKENS[4:30]], params)
        engine = engine_on(decoder, drafter)
        assert answers(engine, asked) == answers(engine_on(decoder), asked)
        assert drafter.name in engine.proposer.drafters and calls > 6
