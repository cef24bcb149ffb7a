"""The toy target reads its cache back, and the test drafters have their stated acceptance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from packing import pool_of
from wager.errors import CacheIntegrityError
from wager.kernels.arrays import Array
from wager.kernels.base import BLOCK_SIZE
from wager.testing import (
    AdversaryDrafter,
    OracleDrafter,
    ToyDistribution,
    ToyOracle,
    ToyTarget,
)
from wager.types import Draft, DraftRequest, PackedBatch, SamplingParams, Span
from wager.verify.pack import pack

TOY = ToyDistribution(vocab=32)
PROMPT = tuple(np.random.default_rng(3).integers(0, 32, 40).tolist())
BLOCKS = pool_of({"a": [5, 2, 9, 4], "b": [7, 0, 3, 1]})


def _span(name: str, tokens: tuple[int, ...], start: int, *, live: bool = True) -> Span:
    return Span(name, start, tokens[start:], live, 8)


def _prefilled(toy: ToyDistribution = TOY) -> ToyTarget:
    target = ToyTarget(toy, num_blocks=10)
    target.forward(pack([_span("a", PROMPT[:-1], 0, live=False)], {}, BLOCKS))
    return target


def _same(logits: Array, context: tuple[int, ...]) -> bool:
    return bool(np.array_equal(logits, TOY(context)))


def test_logits_follow_the_closed_form_whatever_the_chunks() -> None:
    single_pass = ToyTarget(TOY, num_blocks=10).forward(pack([_span("a", PROMPT, 0)], {}, BLOCKS))
    assert _same(single_pass.logits[0], PROMPT)
    assert int(single_pass.greedy_tokens[0]) == int(TOY(PROMPT).argmax())
    target = ToyTarget(TOY, num_blocks=10)
    for start, end in ((0, 7), (7, 16), (16, 39)):
        target.forward(pack([_span("a", PROMPT[:end], start, live=False)], {}, BLOCKS))
    both = [_span("b", PROMPT[:9], 0), _span("a", PROMPT, 39)]
    output = target.forward(pack(both, {}, BLOCKS))
    assert _same(output.logits[0], PROMPT[:9]) and _same(output.logits[1], PROMPT)
    short = ToyDistribution(vocab=8, order=3)  # a context shorter than the order has a distribution too
    assert short(()).shape == (8,)
    for context in ((4,), (4, 1)):
        found = ToyTarget(short, num_blocks=10).forward(pack([_span("a", context, 0)], {}, BLOCKS))
        assert np.array_equal(found.logits[0], short(context))


def test_tree_rows_see_their_own_path_and_an_accepted_path_must_be_moved() -> None:
    target = _prefilled()
    draft = Draft("a", (3, 8, 5, 6), (-1, -1, 1, 2))
    output = target.forward(pack([_span("a", PROMPT, 39)], {"a": draft}, BLOCKS))
    for index, path in enumerate([(), (3,), (8,), (8, 5), (8, 5, 6)]):
        assert _same(output.logits[index], PROMPT + path)
    known = (*PROMPT, 8, 5, 6, 1)
    follow = pack([_span("a", known, 43)], {}, BLOCKS)
    assert not _same(target.forward(follow).logits[0], known)
    slots = [BLOCKS.block_table("a")[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(40, 44)]
    target.forward(pack([_span("a", PROMPT, 39)], {"a": draft}, BLOCKS))  # undo what the wrong step wrote
    target.cache.move(np.array(slots[1:], np.int32), np.array(slots[:3], np.int32))
    assert _same(target.forward(follow).logits[0], known)
    assert target.cache.read(slots[0]).ravel().tolist() == [8.0, 40.0]


def _mistakes() -> dict[str, PackedBatch]:
    good = pack([_span("a", (*PROMPT, 4, 9), 39)], {}, BLOCKS)
    tables = good.block_tables.copy()
    tables[0, 0], tables[0, 1] = tables[0, 1], tables[0, 0]
    stale = good.block_tables.copy()
    stale[0, 1] = 8
    shifted = good.slot_mapping.copy()
    shifted[0] += 5
    return {
        "swapped blocks": replace(good, block_tables=tables),
        "stale block": replace(good, block_tables=stale),
        "wrong slot": replace(good, slot_mapping=shifted),
        "wrong position": replace(good, positions=good.positions + np.int32(1)),
        "wrong parent": replace(good, parents=np.array([-1, 0, 0], np.int32)),
        "wrong base": replace(good, num_computed_tokens=good.num_computed_tokens - np.int32(1)),
    }


def test_every_paging_mistake_changes_the_logits() -> None:
    known = (*PROMPT, 4, 9)
    good = pack([_span("a", known, 39)], {}, BLOCKS)
    assert _same(_prefilled().forward(good).logits[0], known)
    for name, batch in _mistakes().items():
        target = _prefilled()
        now = _same(target.forward(batch).logits[0], known)
        later = _same(target.forward(pack([_span("a", (*known, 7), 42)], {}, BLOCKS)).logits[0], (*known, 7))
        assert not (now and later), name  # a wrong slot shows in the step after
    target = _prefilled()
    kept = target.forward(good).logits
    target.cache.clear(BLOCKS.block_table("a")[0])
    target.forward(good)  # into the same buffer
    assert not _same(kept[0], known)


def test_an_invalid_batch_is_refused() -> None:
    target = ToyTarget(TOY, num_blocks=10, max_rows=4)
    with pytest.raises(CacheIntegrityError, match="40 rows"):
        target.forward(pack([_span("a", PROMPT, 0)], {}, BLOCKS))
    batch = pack([_span("a", PROMPT[:3], 0)], {}, BLOCKS)
    with pytest.raises(CacheIntegrityError):
        target.forward(replace(batch, slot_mapping=np.array([3, 3, 4], np.int32)))
    with pytest.raises(CacheIntegrityError):
        target.forward(replace(batch, parents=np.array([1, -1, 0], np.int32)))


# ---- drafters -------------------------------------------------------------------------------------------------------

PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=6, repetition_penalty=1.3, frequency_penalty=0.5),
]


def _text(params: SamplingParams, count: int, *, seed: int = 11) -> list[int]:
    """Token ids of the target, computed directly from its distribution."""
    from wager.verify.distribution import History, process

    output: list[int] = []
    for _ in range(count):
        distribution = process(TOY((*PROMPT, *output)), params, History(PROMPT, output))
        output.append(distribution.choose(seed, len(PROMPT) + len(output), 0))
    return output


def _request(params: SamplingParams, *, known: int = 0, depth: int = 5) -> DraftRequest:
    return DraftRequest("a", len(PROMPT) + known, depth, params, 11)


@pytest.mark.parametrize("params", PARAMS)
def test_the_oracle_is_always_right_and_the_adversary_never(params: SamplingParams) -> None:
    text = _text(params, 12)
    oracle, adversary = OracleDrafter(ToyOracle(TOY)), AdversaryDrafter(32, oracle=ToyOracle(TOY))
    for drafter in (oracle, adversary):
        drafter.begin("a", PROMPT, params)
        drafter.accept("a", text[:4])
    (right,) = oracle.propose([_request(params, known=4)])
    assert list(right.tokens) == text[4:9] and right.is_chain and right.scores == (1.0,) * 5
    (wrong,) = adversary.propose([_request(params, known=4)])
    assert len(wrong) == 5 and all(guess != truth for guess, truth in zip(wrong.tokens, text[4:9], strict=True))
