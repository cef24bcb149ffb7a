"""Guesses are followed natively as by the rule `match` in plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wager.kernels._native import SequenceState
from wager.kernels.cpu import Kernels
from wager.kernels.noise import argmax_gumbel
from wager.kernels.sampling import token_matcher
from wager.types import GREEDY_TEMPERATURE, Draft, SamplingParams
from wager.verify import accept
from wager.verify.distribution import process

VOCAB = 40
KERNELS = Kernels(threads=1)


@st.composite
def trees(draw, name="s"):
    nodes = draw(st.integers(0, 8))
    parents = tuple(draw(st.integers(-1, node - 1)) if node else -1 for node in range(nodes))
    return Draft(name, tuple(draw(st.integers(0, 3)) for _ in range(nodes)), parents, drafter="d")


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
