"""What a step does natively beside the tape, against plain Python: packing, and following guesses."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wager.kernels.base import BLOCK_SIZE, BatchBuffers
from wager.kernels.cpu import Kernels
from wager.kernels.inputs import Inputs
from wager.kernels.matcher import token_matcher
from wager.kernels.noise import argmax_gumbel
from wager.kernels.packer import input_packer
from wager.types import Draft, Outcome, PackedBatch, SamplingParams, Span
from wager.verify import accept
from wager.verify.distribution import process
from wager.verify.pack import pack

MAX_ROWS, MAX_SEQUENCES, MAX_BLOCKS = 96, 5, 7
NO_LOGITS = np.zeros((0, 40), np.float32)


@dataclass
class Running:
    """What the matcher asks of a sequence."""

    greedy: Any = True
    temperature: float | None = None
    filters: Any = None
    seed: int = 0
    choice: int = 0
    tokens: list[int] = field(default_factory=list)


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
        nodes = draw(st.integers(0, 8)) if live else 0
        parents = tuple(draw(st.integers(-1, node - 1)) if node else -1 for node in range(nodes))
        if nodes:
            drafts[name] = Draft(name, tuple(draw(st.integers(0, 3)) for _ in range(nodes)), parents, drafter="d")
        tables[name] = list(blocks[MAX_BLOCKS * i : MAX_BLOCKS * (i + 1)])
    return spans, drafts, tables


def packer() -> BatchBuffers:
    inputs = Inputs.allocate(max_rows=MAX_ROWS, max_sequences=MAX_SEQUENCES, max_blocks=MAX_BLOCKS)
    for each in fields(PackedBatch):
        getattr(inputs, each.name)[...] = 77  # what an earlier step left
    return input_packer(inputs)


def equal(one: PackedBatch, other: PackedBatch) -> bool:
    pairs = [(getattr(one, each.name), getattr(other, each.name)) for each in fields(PackedBatch)]
    return all(left.dtype == right.dtype and np.array_equal(left, right) for left, right in pairs)


@settings(max_examples=150, deadline=None)
@given(st.lists(steps(), min_size=1, max_size=3))
def test_a_batch_packed_into_buffers_is_the_batch(several):
    buffers = packer()
    for spans, drafts, tables in several:
        batch = pack(spans, drafts, tables, into=buffers)
        assert buffers.packed is batch
        assert equal(batch, pack(spans, drafts, tables))


def test_batches_of_one_shape_are_one_view():
    buffers = packer()
    one = buffers.pack([Span("a", 3, (1,), True)], {}, {"a": [4]})
    again = buffers.pack([Span("b", 5, (2,), True)], {}, {"b": [6]})
    assert one is again and again is not None
    assert again.tokens.tolist() == [2] and again.slot_mapping.tolist() == [6 * BLOCK_SIZE + 5]


def _declined() -> dict[str, tuple[Any, Any, Any]]:
    live, chunk = Span("a", 0, (1, 2), True, 8), Span("a", 0, (1, 2), False)
    table = {"a": [0, 1]}
    return {
        "no rows": ([Span("a", 0, (), True)], {}, table),
        "draft behind a chunk": ([chunk], {"a": Draft.chain("a", (1,), drafter="d")}, table),
        "too few blocks": ([Span("a", 31, (1, 2), True)], {}, table),
        "no blocks": ([live], {}, {}),
        "more rows than there is room": ([Span("a", 0, tuple(range(MAX_ROWS + 1)), True)], {}, {"a": list(range(60))}),
        "more blocks than there is room": ([Span("a", MAX_BLOCKS * BLOCK_SIZE, (1,), True)], {}, {"a": list(range(9))}),
        "more sequences than there is room": ([live] * (MAX_SEQUENCES + 1), {}, table),
        "a parent that does not precede": ([live], {"a": Draft("a", (1, 2), (-1, 1))}, table),
        "a parent before the root": ([live], {"a": Draft("a", (1,), (-2,))}, table),
        "parents missing": ([live], {"a": Draft("a", (1, 2), (-1,))}, table),
        "a token that is no int": ([Span("a", 0, (1.5,), True)], {}, table),  # type: ignore[arg-type]
        "a token that is too large": ([Span("a", 0, (2**40,), True)], {}, table),
        "a negative position": ([Span("a", -1, (1,), True)], {}, table),
        "a block table that is no list": ([live], {}, {"a": range(3)}),
        "no span": ([None], {}, table),
        "drafts that are no dict": ([live], [], table),
    }


@pytest.mark.parametrize("what", list(_declined()))
def test_what_does_not_fit_is_declined(what: str) -> None:
    buffers = packer()
    buffers.pack([Span("a", 0, (1,), True)], {}, {"a": [0]})
    assert buffers.pack(*_declined()[what]) is None
    assert buffers.packed is None, "the buffers hold no batch now"


@settings(max_examples=200, deadline=None)
@given(steps(), st.data())
def test_greedy_guesses_are_followed_as_by_the_rule(step, data):
    spans, drafts, _ = step
    sequences = {span.seq_id: Running(data.draw(st.sampled_from([True, True, True, False]))) for span in spans}
    greedy, expected = [], {}
    for span in spans:
        if span.needs_logits:
            draft = drafts.get(span.seq_id, Draft(span.seq_id))
            targets = data.draw(st.lists(st.integers(-1, 3), min_size=1 + len(draft), max_size=1 + len(draft)))
            greedy += targets
            expected[span.seq_id] = None
            if sequences[span.seq_id].greedy and min(targets) >= 0:
                verdict = accept.match(draft, targets)
                drafted_by = (draft.drafter,) * len(verdict.accepted) + ("",)
                expected[span.seq_id] = Outcome(verdict, len(draft), drafted_by)
    found, complete = token_matcher(None).match(spans, drafts, greedy, NO_LOGITS, sequences)
    assert found == expected and list(found) == list(expected)
    assert complete == (None not in expected.values())


def test_outcomes_are_values_like_those_made_in_python():
    spans, drafts = [Span("a", 0, (1,), True, 4)], {"a": Draft.chain("a", (5, 6), drafter="d")}
    found, _ = token_matcher(None).match(spans, drafts, [5, 9, 1], NO_LOGITS, {"a": Running()})
    outcome = found["a"]
    made = Outcome(accept.match(drafts["a"], [5, 9, 1]), 2, ("d", ""))
    assert (outcome, hash(outcome), repr(outcome)) == (made, hash(made), repr(made))
    with pytest.raises(AttributeError):
        outcome.drafted = 3


VOCAB = 40


@settings(max_examples=60, deadline=None)
@given(steps(), st.data())
def test_sampled_guesses_are_followed_as_by_the_rule(step, data):
    spans, drafts, _ = step
    kernels, rng = Kernels(threads=1), np.random.default_rng(data.draw(st.integers(0, 99)))
    spans = [replace(span, needs_logits=True) for span in spans]
    sequences, logits, expected = {}, [], {}
    for span in spans:
        temperature = data.draw(st.sampled_from([0.3, 0.9, None]))
        known = list(range(span.num_computed_tokens + len(span.tokens)))
        choice, seed = data.draw(st.integers(0, 2)), data.draw(st.sampled_from([0, 7, 2**64 - 1]))
        filters = data.draw(st.sampled_from([None, (3, 1.0, 0.0), (0, 0.83, 0.0), (2, 0.7, 0.05)]))
        sequence = Running(temperature is None, temperature, filters, seed, choice, known)
        sequences[span.seq_id] = sequence
        draft = drafts.get(span.seq_id, Draft(span.seq_id))
        rows = rng.normal(size=(1 + len(draft), VOCAB)).astype(np.float32)
        rows[:, 4:] -= 9  # the guesses are among the first four
        if data.draw(st.integers(0, 5)) == 0:
            rows[data.draw(st.integers(0, len(draft))), 3] = np.nan
        depths = [0, *draft.depths]
        tokens = [_sampled(kernels, row, sequence, depth) for row, depth in zip(rows, depths, strict=True)]
        verdict = accept.match(draft, tokens)
        reached = tokens if temperature is None else verdict.tokens  # of greedy ones every row is looked at
        drafted_by = (draft.drafter,) * len(verdict.accepted) + ("",)
        expected[span.seq_id] = None if min(reached) < 0 else Outcome(verdict, len(draft), drafted_by)
        logits.append(rows)
    joined = np.concatenate(logits)
    greedy = [-1 if np.isnan(row).any() else int(row.argmax()) for row in joined]
    found, complete = token_matcher(kernels).match(spans, drafts, greedy, joined, sequences)
    assert found == expected and list(found) == list(expected)
    assert complete == (None not in expected.values())


def _sampled(kernels: Kernels, row: Any, sequence: Running, depth: int) -> int:
    """The token after a row of logits, -1 where there is none."""
    if np.isnan(row).any():
        return -1
    temperature, position = sequence.temperature or 0.0, len(sequence.tokens) + depth
    if sequence.filters is None:
        return int(argmax_gumbel(row, temperature, sequence.seed, position, sequence.choice))
    top_k, top_p, min_p = sequence.filters
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return process(row, params).choose(sequence.seed, position, sequence.choice)


@pytest.mark.parametrize("logits", [np.zeros((2, 8), np.float32), np.zeros((9, 8)), np.zeros(72, np.float32), [0.5]])
def test_logits_that_are_no_rows_of_floats_are_left_to_python(logits: Any) -> None:
    spans, drafts = [Span("a", 0, (1,), True, 4)], {"a": Draft.chain("a", (5, 6), drafter="d")}
    sampled = {"a": Running(False, 0.5, None, 0, 0, [1])}
    assert token_matcher(Kernels(threads=1)).match(spans, drafts, [5, 6, 7], logits, sampled) is None


@pytest.mark.parametrize(
    ("greedy", "sequences"),
    [([5], {"a": Running()}), ([5, 6, 7], {}), ([5, "x", 7], {"a": Running()}), ([5, 6, 7], {"a": object()})],
    ids=["too few rows", "an unknown sequence", "a token that is no int", "a sequence that does not say"],
)
def test_what_is_not_as_it_should_be_is_left_to_python(greedy: list[Any], sequences: dict[str, Any]) -> None:
    spans, drafts = [Span("a", 0, (1,), True, 4)], {"a": Draft.chain("a", (5, 6), drafter="d")}
    assert token_matcher(None).match(spans, drafts, greedy, NO_LOGITS, sequences) is None
