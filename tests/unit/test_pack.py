"""The engine's packing against the one by hand of these tests: positions, paths, slots, logits rows."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packing import batch, pool_of
from wager.errors import CacheIntegrityError, UsageError, WagerError
from wager.kernels._native import BatchPacker
from wager.kernels.base import BLOCK_SIZE
from wager.kernels.inputs import Inputs
from wager.types import Draft, PackedBatch, Span
from wager.verify.pack import pack

MAX_ROWS, MAX_SEQUENCES, MAX_BLOCKS = 140, 5, 7


@st.composite
def steps(draw):
    """Spans with shuffled blocks and random trees behind the live ones."""
    spans, drafts, tables = [], {}, {}
    blocks = draw(st.permutations(range(40)))
    for i in range(draw(st.integers(1, MAX_SEQUENCES))):
        name = f"r{i}"
        known = tuple(draw(st.lists(st.integers(0, 99), min_size=1, max_size=20)))
        live = draw(st.booleans())
        spans.append(Span(name, draw(st.integers(0, 3 * BLOCK_SIZE)), known, live, 8))
        nodes = draw(st.integers(0, 8)) if live else 0
        parents = tuple(draw(st.integers(-1, node - 1)) if node else -1 for node in range(nodes))
        if nodes:
            drafts[name] = Draft(name, tuple(draw(st.integers(100, 199)) for _ in range(nodes)), parents)
        tables[name] = blocks[8 * i : 8 * i + 8]
    return spans, drafts, tables


def packer() -> BatchPacker:
    inputs = Inputs.allocate(max_rows=MAX_ROWS, max_sequences=MAX_SEQUENCES, max_blocks=MAX_BLOCKS)
    for field in fields(PackedBatch):
        getattr(inputs, field.name)[...] = 77  # what an earlier step left
    return inputs.packer()


BUFFERS = packer()


@settings(max_examples=60, deadline=None)
@given(steps())
def test_every_row_is_where_it_belongs(step):
    """Packed into arrays of its own, and natively into buffers."""
    spans, drafts, tables = step
    pool, rows, logits_rows, first = pool_of(tables), [], [], 0
    uses = []  # of recurrent states: each sequence's own, from where it stands, and no copies
    packed, into = pack(spans, drafts, pool), pack(spans, drafts, pool, into=BUFFERS)
    assert BUFFERS.packed is into
    for place, span in enumerate(spans):
        draft, known = drafts.get(span.seq_id, Draft(span.seq_id)), len(span.tokens)
        tokens = (*span.tokens, *draft.tokens)
        parents = (*range(-1, known - 1), *(known + parent for parent in draft.parents))
        in_use = -(-(span.num_computed_tokens + len(tokens)) // BLOCK_SIZE)
        rows.append((span.num_computed_tokens, tokens, parents, tables[span.seq_id][:in_use]))
        logits_rows += range(first + known - 1, first + len(tokens)) if span.needs_logits else ()
        first += len(tokens)
        uses.append((place, place if span.num_computed_tokens else -1, known, 0, -1, -1, -1, -1))
    expected = replace(batch(rows, logits_rows), state_uses=np.array(uses, np.int32))
    for field in fields(PackedBatch):
        if field.name == "replays":  # none is used
            continue
        array = getattr(packed, field.name)
        assert array.dtype == np.int32 and np.array_equal(array, getattr(expected, field.name)), field.name
        in_buffer = getattr(into, field.name)
        assert in_buffer.dtype == np.int32 and np.array_equal(in_buffer, array), field.name
    assert len(set(packed.slot_mapping.tolist())) == packed.rows


def test_nothing_to_pack_is_an_empty_batch():
    empty = pack([], {}, pool_of({}))
    assert (empty.rows, empty.block_tables.shape) == (0, (0, 0))


@pytest.mark.parametrize(
    ("span", "error", "words"),
    [
        (Span("a", BLOCK_SIZE - 1, (1,), True), CacheIntegrityError, "'a' holds 1 blocks and its rows need 2"),
        (Span("a", 0, (), True), UsageError, "no rows"),
        (Span("a", 0, (1,), False), UsageError, "prompt chunk"),
    ],
)
def test_what_cannot_be_packed_is_named(span, error, words):
    with pytest.raises(error, match=words):
        pack([span], {"a": Draft.chain("a", (2,), drafter="n")}, pool_of({"a": [3]}))


LIVE = Span("a", 0, (1, 2), True, 8)


@pytest.mark.parametrize(
    ("what", "spans", "draft", "blocks"),
    [
        ("more rows than there is room", [Span("a", 0, tuple(range(MAX_ROWS + 1)), True)], None, range(60)),
        ("more blocks than there is room", [Span("a", MAX_BLOCKS * BLOCK_SIZE, (1,), True)], None, range(9)),
        ("more sequences than there is room", [LIVE] * (MAX_SEQUENCES + 1), None, range(2)),
        ("a parent that does not precede", [LIVE], Draft("a", (1, 2), (-1, 1)), range(2)),
        ("a parent before the root", [LIVE], Draft("a", (1,), (-2,)), range(2)),
        ("parents missing", [LIVE], Draft("a", (1, 2), (-1,)), range(2)),
        ("a token that is too large", [Span("a", 0, (2**40,), True)], None, range(2)),
        ("a negative position", [Span("a", -1, (1,), True)], None, range(2)),
    ],
)
def test_what_does_not_fit_the_buffers_is_refused(what, spans, draft, blocks):
    buffers = packer()
    pack([Span("a", 0, (1,), True)], {}, pool_of({"a": [0]}), into=buffers)
    with pytest.raises((WagerError, ValueError)):
        pack(spans, {"a": draft} if draft else {}, pool_of({"a": blocks}), into=buffers)
    assert buffers.packed is None, f"the buffers hold no batch after {what}"
