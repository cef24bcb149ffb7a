"""The engine's packing against the one by hand of these tests: positions, paths, slots, logits rows."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import batch

from wager.errors import CacheIntegrityError, UsageError
from wager.kernels.base import BLOCK_SIZE
from wager.types import Draft, PackedBatch, Span
from wager.verify.pack import pack


@st.composite
def steps(draw):
    """Spans with shuffled blocks and random trees behind the live ones."""
    spans, drafts, tables = [], {}, {}
    blocks = draw(st.permutations(range(40)))
    for i in range(draw(st.integers(1, 5))):
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


@settings(max_examples=120, deadline=None)
@given(steps())
def test_every_row_is_where_it_belongs(step):
    spans, drafts, tables = step
    packed, rows, logits_rows, first = pack(spans, drafts, tables), [], [], 0
    for span in spans:
        draft, known = drafts.get(span.seq_id, Draft(span.seq_id)), len(span.tokens)
        tokens = (*span.tokens, *draft.tokens)
        parents = (*range(-1, known - 1), *(known + parent for parent in draft.parents))
        in_use = -(-(span.num_computed_tokens + len(tokens)) // BLOCK_SIZE)
        rows.append((span.num_computed_tokens, tokens, parents, tables[span.seq_id][:in_use]))
        logits_rows += range(first + known - 1, first + len(tokens)) if span.needs_logits else ()
        first += len(tokens)
    expected = batch(rows, logits_rows)
    for field in fields(PackedBatch):
        array = getattr(packed, field.name)
        assert array.dtype == np.int32 and np.array_equal(array, getattr(expected, field.name)), field.name
    assert len(set(packed.slot_mapping.tolist())) == packed.rows


def test_nothing_to_pack_is_an_empty_batch():
    empty = pack([], {}, {})
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
        pack([span], {"a": Draft.chain("a", (2,), drafter="n")}, {"a": [3]})
