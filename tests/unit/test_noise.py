"""The noise field's bits: published answers, the layout of the contract, and pinned values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wager.kernels import noise

ONES = 2**32 - 1
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""Published with Random123 (Salmon et al. 2011) for Philox4x32-10."""

PINNED_GUMBEL = [-0.10020556500477874, -0.6659804830570992, -1.2020634195336675, 1.0368817640538528]
PINNED_UNIFORM = 0.9827194803494607

word = st.integers(0, ONES)
seeds = st.integers(0, 2**64 - 1)


def test_published_answers():
    for counter, key, answer in KNOWN:
        assert noise.philox(counter, key) == answer
        words = noise.philox_words(np.array([counter[0]], np.uint64), counter[1:], key[0] | key[1] << 32)
        assert tuple(words[:, 0].tolist()) == answer


@settings(max_examples=50, deadline=None)
@given(st.lists(word, min_size=1, max_size=9), word, word, word, seeds)
def test_the_vector_form_is_the_definition(blocks, c1, c2, c3, seed):
    words = noise.philox_words(np.array(blocks, np.uint64), (c1, c2, c3), seed)
    for i, block in enumerate(blocks):
        assert tuple(words[:, i].tolist()) == noise.philox((block, c1, c2, c3), (seed & ONES, seed >> 32))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 49151), st.sampled_from([(noise.FIELD, 0), (noise.DRAFT, 3)]), seeds)
def test_layout(token, domain, seed):
    """The contract, word by word, for even and odd ids; and for scalar draws."""
    (domain, depth), position, choice = domain, 977, 5
    words = noise.philox((token // 2, position, choice + 256 * depth, domain), (seed & ONES, seed >> 32))
    low, high = words[2:] if token % 2 else words[:2]
    u = ((((high << 32) | low) >> 12) + 0.5) / 2**52
    expected = -np.log(-np.log1p(-u))
    got = noise.gumbel(seed, position, np.array([token]), choice=choice, domain=domain, depth=depth)
    assert got.tolist() == pytest.approx([expected], rel=1e-15)
    w0, w1, _, _ = noise.philox((4, 10, 2, noise.RESIDUAL), (9, 0))
    expected = (((w1 << 32 | w0) >> 12) + 0.5) / 2**52
    assert noise.uniform(9, 10, choice=2, domain=noise.RESIDUAL, index=4) == expected


def test_pinned_values():
    """A change here changes every sampled text: raise ARITHMETIC_VERSION."""
    got = noise.gumbel(1234, 56, np.array([0, 1, 2, 49151]), choice=1)
    assert got.tolist() == pytest.approx(PINNED_GUMBEL, rel=1e-14)
    assert noise.uniform(1234, 56, choice=1) == PINNED_UNIFORM


def test_the_extreme_cells_are_finite():
    """u nearest 0 gives the largest number, u nearest 1 the smallest; neither rounds to 0 or 1."""
    for word, g in ((0, 36.73680057), (ONES, -3.60377899)):
        cell = np.array([word], np.uint64)
        assert noise._to_gumbel(cell, cell)[0] == pytest.approx(g, abs=1e-7)
    draws = [noise.uniform(5, 0, index=i) for i in range(2000)]
    assert 0 < min(draws) < max(draws) < 1
    assert len(set(draws)) == 2000


def test_greedy_takes_the_lowest_id_of_the_largest_and_none_where_logits_are_not_finite():
    z = np.array([0, 3, 1, 3, 3], np.float32)
    assert noise.argmax_gumbel(z, 0.0, 1, 2) == noise.argmax_gumbel(z, 1e-4, 1, 2) == 1
    for bad in (np.nan, np.inf, -np.inf):
        for temperature in (0.0, 1.0):
            assert noise.argmax_gumbel(np.array([0, bad, 1], np.float32), temperature, 1, 2) == -1
