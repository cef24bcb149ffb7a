"""Guesses are followed natively as by the rule `match` in plain Python."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wager.engine.wrapped_policies import DraftOfSeveral
from wager.kernels._native import SequenceState
from wager.kernels.cpu import Kernels
from wager.kernels.noise import argmax_gumbel
from wager.kernels.sampling import token_matcher
from wager.types import GREEDY_TEMPERATURE, Draft, Outcome, SamplingParams, Span, Verdict
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
        expected.append(verdict if known else None)
        logits.append(rows)
    joined = np.concatenate(logits)
    greedy = np.array([-1 if np.isnan(row).any() else int(row.argmax()) for row in joined], np.int32)
    names = [f"s{number}" for number in range(len(drafted))]
    spans = [Span("prompt", 0, (1, 2), False), *(Span(name, 0, (1,), True, 9) for name in names)]
    drafts, firsts = {}, np.cumsum([0, *(1 + len(draft) for _, draft in drafted)]).tolist()
    for name, (_, draft) in zip(names, drafted, strict=True):
        if draft.tokens:
            of_several = data.draw(st.booleans())
            by_node = tuple("ab"[node % 2] for node in range(len(draft)))
            drafts[name] = (
                DraftOfSeveral(name, draft.tokens, draft.parents, drafter="d", drafters=by_node)
                if of_several
                else replace(draft, seq_id=name)
            )
    sequences = {name: SimpleNamespace(state=sampled.state) for name, (sampled, _) in zip(names, drafted, strict=True)}
    given = drafts if data.draw(st.booleans()) else MappingProxyType(drafts)
    outcomes, left = token_matcher(KERNELS).match(spans, given, sequences, greedy, joined)
    assert list(outcomes) == names
    assert left == [(name, first) for name, first, each in zip(names, firsts, expected, strict=False) if each is None]
    for name, verdict in zip(names, expected, strict=True):
        if verdict is None:
            assert outcomes[name] is None
            continue
        draft = drafts.get(name, Draft(name))
        by = (*map(draft.drafter_of, verdict.accepted), "")
        assert outcomes[name] == Outcome(verdict._replace(seq_id=name), len(draft), by)
        assert isinstance(outcomes[name], Outcome) and isinstance(outcomes[name].verdict, Verdict)
    none_followed = token_matcher(KERNELS, follows=False).match(spans, given, sequences, greedy, joined)
    assert none_followed == (dict.fromkeys(names), list(zip(names, firsts, strict=False)))


def test_a_greedy_row_without_a_token_is_left_wherever_it_is() -> None:
    span, draft = Span("s", 0, (1,), True, 9), Draft("s", (1, 2), (-1, 0))
    sequences = {"s": SimpleNamespace(state=Sampled().state)}
    for row in range(3):
        greedy = np.array([1, 2, 3], np.int32)
        greedy[row] = -1
        found = token_matcher(KERNELS).match([span], {"s": draft}, sequences, greedy, np.zeros((3, 8), np.float32))
        assert found == ({"s": None}, [("s", 0)])


@pytest.mark.parametrize("logits", [np.zeros((2, 8), np.float32), np.zeros(72, np.float32)])
def test_logits_that_are_no_rows_of_floats_are_refused(logits: Any) -> None:
    drafts, sequences = {"s": Draft("s", (5, 6), (-1, 0))}, {"s": SimpleNamespace(state=Sampled(0.5).state)}
    with pytest.raises((TypeError, ValueError)):
        greedy = np.array([5, 6, 7], np.int32)
        token_matcher(KERNELS).match([Span("s", 0, (1,), True, 9)], drafts, sequences, greedy, logits)


@pytest.mark.parametrize(
    ("spans", "drafts", "sequence"),
    [
        (3, {}, SimpleNamespace(state=Sampled().state)),
        ([("s", 0)], {}, SimpleNamespace(state=Sampled().state)),
        ([Span("s", 0, (1,), True)], {"s": Draft("s", (5,), ())}, SimpleNamespace(state=Sampled().state)),
        ([Span("s", 0, (1,), True)], {"s": Draft("s", ("x",), (-1,))}, SimpleNamespace(state=Sampled().state)),
        ([Span("s", 0, (1,), True)], {"s": "draft"}, SimpleNamespace(state=Sampled().state)),
        ([Span("t", 0, (1,), True)], {}, SimpleNamespace(state=Sampled().state)),
        ([Span("s", 0, (1,), True)], {}, SimpleNamespace()),
        ([Span("s", 0, (1,), True)], {}, SimpleNamespace(state="state")),
    ],
)
def test_what_is_no_span_draft_or_sequence_is_refused(spans: Any, drafts: Any, sequence: Any) -> None:
    greedy, logits = np.zeros(3, np.int32), np.zeros((3, 8), np.float32)
    with pytest.raises((TypeError, ValueError, KeyError, AttributeError, RuntimeError)):
        token_matcher(KERNELS).match(spans, drafts, {"s": sequence}, greedy, logits)
