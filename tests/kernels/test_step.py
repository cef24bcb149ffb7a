"""What a step does natively beside the tape, against plain Python: packing into buffers, and following guesses."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wager.errors import WagerError
from wager.kernels._native import BatchPacker, SequenceState
from wager.kernels.base import BLOCK_SIZE
from wager.kernels.cpu import Kernels
from wager.kernels.inputs import Inputs
from wager.kernels.noise import argmax_gumbel
from wager.kernels.sampling import token_matcher
from wager.types import GREEDY_TEMPERATURE, Draft, PackedBatch, SamplingParams, Span
from wager.verify import accept
from wager.verify.distribution import process
from wager.verify.pack import pack

MAX_ROWS, MAX_SEQUENCES, MAX_BLOCKS = 96, 5, 7
VOCAB = 40
KERNELS = Kernels(threads=1)


@st.composite
def steps(draw):
    """Spans with shuffled blocks, and random trees behind those that need logits."""
    spans, drafts, tables = [], {}, {}
    blocks = draw(st.permutations(range(60)))
    for i in range(draw(st.integers(1, MAX_SEQUENCES))):
        name = f"r{i}"
        known = tuple(draw(st.lists(st.integers(0, 99), min_size=1, max_size=10)))
        live = draw(st.booleans())
        spans.append(Span(name, draw(st.integers(0, 5 * BLOCK_SIZE)), known, live, 8))
        if live:
            drafts[name] = draw(trees(name))
        tables[name] = list(blocks[MAX_BLOCKS * i : MAX_BLOCKS * (i + 1)])
    return spans, drafts, tables


@st.composite
def trees(draw, name="s"):
    nodes = draw(st.integers(0, 8))
    parents = tuple(draw(st.integers(-1, node - 1)) if node else -1 for node in range(nodes))
    return Draft(name, tuple(draw(st.integers(0, 3)) for _ in range(nodes)), parents, drafter="d")


def packer() -> BatchPacker:
    inputs = Inputs.allocate(max_rows=MAX_ROWS, max_sequences=MAX_SEQUENCES, max_blocks=MAX_BLOCKS)
    for each in fields(PackedBatch):
        getattr(inputs, each.name)[...] = 77  # what an earlier step left
    return inputs.packer()


def equal(one: PackedBatch, other: PackedBatch) -> bool:
    pairs = [(getattr(one, each.name), getattr(other, each.name)) for each in fields(PackedBatch)]
    return all(left.dtype == right.dtype and np.array_equal(left, right) for left, right in pairs)


@settings(max_examples=60, deadline=None)
@given(st.lists(steps(), min_size=1, max_size=3))
def test_a_batch_packed_into_buffers_is_the_batch(several):
    buffers = packer()
    for spans, drafts, tables in several:
        batch = pack(spans, drafts, tables, into=buffers)
        assert buffers.packed is batch
        assert equal(batch, pack(spans, drafts, tables))


def test_batches_of_one_shape_are_one_view():
    buffers = packer()
    one = pack([Span("a", 3, (1,), True)], {}, {"a": [4]}, into=buffers)
    again = pack([Span("b", 5, (2,), True)], {}, {"b": [6]}, into=buffers)
    assert one is again
    assert again.tokens.tolist() == [2] and again.slot_mapping.tolist() == [6 * BLOCK_SIZE + 5]


LIVE, TABLE = Span("a", 0, (1, 2), True, 8), {"a": [0, 1]}


@pytest.mark.parametrize(
    ("spans", "drafts", "tables"),
    [
        ([Span("a", 0, tuple(range(MAX_ROWS + 1)), True)], {}, {"a": list(range(60))}),
        ([Span("a", MAX_BLOCKS * BLOCK_SIZE, (1,), True)], {}, {"a": list(range(9))}),
        ([LIVE] * (MAX_SEQUENCES + 1), {}, TABLE),
        ([LIVE], {"a": Draft("a", (1, 2), (-1, 1))}, TABLE),
        ([LIVE], {"a": Draft("a", (1,), (-2,))}, TABLE),
        ([LIVE], {"a": Draft("a", (1, 2), (-1,))}, TABLE),
        ([Span("a", 0, (2**40,), True)], {}, TABLE),
        ([Span("a", -1, (1,), True)], {}, TABLE),
    ],
    ids=[
        "more rows than there is room",
        "more blocks than there is room",
        "more sequences than there is room",
        "a parent that does not precede",
        "a parent before the root",
        "parents missing",
        "a token that is too large",
        "a negative position",
    ],
)
def test_what_cannot_be_packed_is_refused(spans: Any, drafts: Any, tables: Any) -> None:
    buffers = packer()
    pack([Span("a", 0, (1,), True)], {}, {"a": [0]}, into=buffers)
    with pytest.raises((WagerError, ValueError)):
        pack(spans, drafts, tables, into=buffers)
    assert buffers.packed is None, "the buffers hold no batch now"


@dataclass(frozen=True)
class Sampled:
    """How a sequence's tokens are chosen; no temperature: not by the matcher."""

    temperature: float | None = 0.0
    filters: tuple[int, float, float] = (0, 1.0, 0.0)
    seed: int = 0
    choice: int = 0
    known: int = 3

    @property
    def state(self) -> SequenceState:
        return SequenceState(
            id="s",
            request_id="s",
            choice=self.choice,
            tokens=[1] * self.known,
            max_length=99,
            stop_ids=[],
            tenant="",
            seed=self.seed,
            temperature=self.temperature,
            filters=self.filters,
            greedy=GREEDY_TEMPERATURE,
        )

    def token(self, row: Any, depth: int) -> int:
        """The token after a row of logits, -1 where there is none."""
        if np.isnan(row).any():
            return -1
        temperature, position = self.temperature or 0.0, self.known + depth
        if self.filters == (0, 1.0, 0.0):
            return int(argmax_gumbel(row, temperature, self.seed, position, self.choice))
        top_k, top_p, min_p = self.filters
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        return process(row, params).choose(self.seed, position, self.choice)


SAMPLED = st.builds(
    Sampled,
    st.sampled_from([0.0, 0.3, 0.9, None]),
    st.sampled_from([(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.83, 0.0), (2, 0.7, 0.05)]),
    st.sampled_from([0, 7, 2**64 - 1]),
    st.integers(0, 2),
    st.integers(1, 30),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SAMPLED, trees()), min_size=1, max_size=4), st.data())
def test_guesses_are_followed_as_by_the_rule(drafted, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    logits, expected = [], []
    for sampled, draft in drafted:
        rows = rng.normal(size=(1 + len(draft), VOCAB)).astype(np.float32)
        rows[:, 4:] -= 9  # the guesses are among the first four
        if data.draw(st.integers(0, 5)) == 0:
            rows[data.draw(st.integers(0, len(draft))), 3] = np.nan
        tokens = [sampled.token(row, depth) for row, depth in zip(rows, [0, *draft.depths], strict=True)]
        verdict = accept.match(draft, tokens)
        reached = verdict.tokens if sampled.temperature else tokens  # of greedy ones every row is looked at
        known = sampled.temperature is not None and min(reached) >= 0
        expected.append((verdict.accepted, verdict.tokens) if known else None)
        logits.append(rows)
    joined = np.concatenate(logits)
    greedy = np.array([-1 if np.isnan(row).any() else int(row.argmax()) for row in joined], np.int32)
    paths = [(sampled.state, draft.tokens, draft.parents) for sampled, draft in drafted]
    assert token_matcher(KERNELS).match(paths, greedy, joined) == expected


@pytest.mark.parametrize("logits", [np.zeros((2, 8), np.float32), np.zeros(72, np.float32)])
def test_logits_that_are_no_rows_of_floats_are_refused(logits: Any) -> None:
    paths = [(Sampled(0.5).state, (5, 6), (-1, 0))]
    with pytest.raises((TypeError, ValueError)):
        token_matcher(KERNELS).match(paths, np.array([5, 6, 7], np.int32), logits)
