"""Draft requests and checks of drafts: natively they are what Python makes, or they are left to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from wager.engine.native import draft_calls
from wager.engine.proposer import Proposer
from wager.testing import DecliningDrafter
from wager.types import Draft, DraftDecision, DraftRequest, SamplingParams, Span, VerifyRule

VOCAB = 9


@dataclass
class Running:
    id: str
    seed: int
    choice: int
    tokens: list[int] = field(default_factory=lambda: [1, 2, 3])
    params: SamplingParams = SamplingParams(temperature=0.7)  # noqa: RUF009


class Proposes(DecliningDrafter):
    """Proposes these drafts."""

    name = "d"
    drafts: list[Draft]

    def propose(self, requests: object) -> list[Draft]:
        return self.drafts


def proposer(native: bool, rule: VerifyRule = "match") -> Proposer:
    made = Proposer(Proposes(), vocab=VOCAB, rule=rule)
    if not native:
        made._native = None
    return made


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from(["match", "block"]))
def test_requests_are_those_of_python(data, rule):
    names = [f"s{i}" for i in range(data.draw(st.integers(1, 4)))]
    spans = [Span(name, 4, (5,), True, data.draw(st.integers(0, 6))) for name in names]
    decisions = st.builds(
        DraftDecision, st.integers(0, 4), st.sampled_from(["", "d", "other"]), st.sampled_from([0.0, 0.2])
    )
    plan = {name: data.draw(decisions) for name in names if data.draw(st.booleans())}
    sequences = {
        name: Running(name, data.draw(st.sampled_from([0, 2**64 - 1])), index) for index, name in enumerate(names)
    }
    python = proposer(False, rule)
    made = draft_calls().requests(spans, plan, sequences, "d", python._rule.needs_draft_probs)
    assert made == python._requests(spans, plan, sequences, "d")
    assert [list(each) for each in made] == [list(each) for each in python._requests(spans, plan, sequences, "d")]


def _chains() -> st.SearchStrategy[Draft]:
    scores = st.sampled_from([0.0, 0.5, 1.0, 1.5, -0.1, math.nan, 1])

    @st.composite
    def chain(draw):
        size = draw(st.integers(0, 4))
        parents = tuple(range(-1, size - 1))
        if draw(st.integers(0, 5)) == 0:
            parents = tuple(draw(st.integers(-1, 3)) for _ in range(draw(st.integers(0, 4))))
        tokens = tuple(draw(st.integers(0, VOCAB - 1 if draw(st.integers(0, 3)) else VOCAB)) for _ in range(size))
        with_scores = draw(st.booleans())
        likely = tuple(draw(scores if draw(st.integers(0, 6)) == 0 else st.just(0.5)) for _ in range(size))
        return Draft("", tokens, parents, likely if with_scores else (), draw(st.sampled_from(["d", "d", "d", "x"])))

    return chain()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_checked_drafts_are_those_of_python(data):
    count = data.draw(st.integers(1, 3))
    drafts = []
    for index in range(count):
        made = data.draw(_chains())
        name = f"s{index}" if data.draw(st.integers(0, 9)) else "unknown"
        drafts.append(Draft(name, made.tokens, made.parents, made.scores, made.drafter))
    if data.draw(st.integers(0, 9)) == 0:
        drafts.reverse()
    requests = [DraftRequest(f"s{i}", 3, 4, SamplingParams(), 0) for i in range(count)]
    limits = {f"s{i}": data.draw(st.integers(0, 4)) for i in range(count)}
    checked = []
    for native in (True, False):
        tried = proposer(native)
        tried.drafters["d"].drafts = drafts
        checked.append((tried.draft(requests, limits, drafter="d"), list(tried.drafters)))
    assert repr(checked[0]) == repr(checked[1]), "as text, since NaN is not equal to itself"


def test_a_chain_as_it_should_be_is_checked_natively() -> None:
    requests, draft = (
        [DraftRequest("s", 3, 4, SamplingParams(), 0)],
        Draft.chain("s", (1, 2), drafter="d", scores=(0.9, 0.5)),
    )
    assert draft_calls().valid_chains(requests, [draft], {"s": 2}, "d", VOCAB) == {"s": draft}
    assert draft_calls().valid_chains(requests, [draft], {"s": 1}, "d", VOCAB) is None
    needy = [DraftRequest("s", 3, 4, SamplingParams(), 0, needs_draft_probs=True)]
    assert draft_calls().valid_chains(needy, [draft], {"s": 2}, "d", VOCAB) is None


def test_what_is_no_dict_is_left_to_python() -> None:
    class Plan(dict[str, DraftDecision]):
        pass

    spans = [Span("s", 2, (5,), True, 3)]
    sequences = {"s": Running("s", 1, 0)}
    assert draft_calls().requests(spans, Plan(s=DraftDecision(2)), sequences, "d", False)[1]["d"][0].depth == 2
    assert draft_calls().requests(spans, [], sequences, "d", False) is None
    assert draft_calls().valid_chains([], [], [], "d", VOCAB) is None
