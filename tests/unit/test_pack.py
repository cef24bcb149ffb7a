"""Packing against its definition, row by row: positions, paths, slots, logits rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wager.errors import CacheIntegrityError, UsageError
from wager.kernels.base import BLOCK_SIZE
from wager.types import Draft, Span
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
    batch = pack(spans, drafts, tables)
    row, logits_rows = 0, []
    for sequence, span in enumerate(spans):
        draft = drafts.get(span.seq_id, Draft(span.seq_id))
        first, last = row, row + len(span.tokens) - 1
        assert (batch.query_start_loc[sequence], batch.num_computed_tokens[sequence]) == (
            first,
            span.num_computed_tokens,
        )
        for j, token in enumerate((*span.tokens, *draft.tokens)):
            node = j - len(span.tokens)
            depth = len(draft.path(node)) if node >= 0 else 0
            place = span.num_computed_tokens + j
            assert batch.tokens[row] == token
            assert batch.seq_ids[row] == sequence
            assert batch.positions[row] == (
                place if node < 0 else span.num_computed_tokens + len(span.tokens) - 1 + depth
            )
            before = row - 1 if node < 0 else last + 1 + draft.parents[node]
            assert batch.parents[row] == (before if j else -1)
            assert batch.slot_mapping[row] == tables[span.seq_id][place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
            if span.needs_logits and j >= len(span.tokens) - 1:
                logits_rows.append(row)
            row += 1
    assert batch.rows == row
    assert batch.num_sequences == len(spans)
    assert batch.query_start_loc[len(spans) :].tolist() == [row]
    assert batch.logits_indices.tolist() == logits_rows
    for name in (
        "tokens",
        "positions",
        "parents",
        "slot_mapping",
        "seq_ids",
        "query_start_loc",
        "num_computed_tokens",
        "block_tables",
        "logits_indices",
    ):
        assert getattr(batch, name).dtype == np.int32, name


@settings(max_examples=60, deadline=None)
@given(steps())
def test_slots_are_distinct_and_lie_in_the_tables(step):
    spans, drafts, tables = step
    batch = pack(spans, drafts, tables)
    assert len(set(batch.slot_mapping.tolist())) == batch.rows
    for slot, sequence in zip(batch.slot_mapping, batch.seq_ids, strict=True):
        assert slot // BLOCK_SIZE in batch.block_tables[sequence]


def test_a_chain_is_cached_at_its_own_positions():
    batch = pack([Span("a", 30, (7,), True, 4)], {"a": Draft.chain("a", (1, 2, 3), drafter="n")}, {"a": (4, 9, 5)})
    assert batch.positions.tolist() == [30, 31, 32, 33]
    assert batch.slot_mapping.tolist() == [9 * BLOCK_SIZE + 14, 9 * BLOCK_SIZE + 15, 5 * BLOCK_SIZE, 5 * BLOCK_SIZE + 1]
    assert batch.parents.tolist() == [-1, 0, 1, 2]
    assert batch.logits_indices.tolist() == [0, 1, 2, 3]
    assert batch.block_tables.tolist() == [[4, 9, 5]]


def test_a_prompt_chunk_has_no_logits_rows_and_its_neighbour_has():
    spans = [Span("a", 0, (1, 2, 3), False), Span("b", 5, (4, 5), True)]
    batch = pack(spans, {"b": Draft("b", (6, 7), (-1, -1))}, {"a": [0], "b": [1]})
    assert batch.logits_indices.tolist() == [4, 5, 6]
    assert batch.positions.tolist() == [0, 1, 2, 5, 6, 7, 7]
    assert batch.parents.tolist() == [-1, 0, 1, -1, 3, 4, 4]


def test_tables_hold_the_blocks_in_use_and_are_padded():
    spans = [Span("a", 0, tuple(range(2 * BLOCK_SIZE)), False), Span("b", 0, (1,), True)]
    batch = pack(spans, {}, {"a": [5, 6, 7, 8], "b": [9, 10]})
    assert batch.block_tables.tolist() == [[5, 6], [9, 0]]


def test_nothing_to_pack_is_an_empty_batch():
    batch = pack([], {}, {})
    assert batch.rows == 0
    assert batch.block_tables.shape == (0, 0)


def test_blocks_that_do_not_cover_the_rows_are_named():
    with pytest.raises(CacheIntegrityError, match="'a' holds 1 blocks and its rows need 2"):
        pack([Span("a", BLOCK_SIZE - 1, (1,), True)], {"a": Draft.chain("a", (2,), drafter="n")}, {"a": [3]})


def test_spans_without_rows_and_guesses_in_a_prompt_are_refused():
    with pytest.raises(UsageError, match="no rows"):
        pack([Span("a", 0, (), True)], {}, {"a": [0]})
    with pytest.raises(UsageError, match="prompt chunk"):
        pack([Span("a", 0, (1,), False)], {"a": Draft.chain("a", (2,), drafter="n")}, {"a": [0]})
