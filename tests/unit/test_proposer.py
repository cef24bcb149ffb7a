"""What a drafter may get wrong without anyone noticing but the clock."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
from faulty_drafters import DecliningDrafter
from hypothesis import given, settings
from hypothesis import strategies as st

from wager.draft.base import Drafter
from wager.draft.lookup import LookupDrafter, LookupSources
from wager.draft.ngram import NgramDrafter
from wager.economics.policy.base import longest_that_fits
from wager.engine.proposer import Proposer
from wager.kernels import _native
from wager.types import Draft, DraftRequest, SamplingParams

VOCAB = 10


class ProposesExactly(DecliningDrafter):
    """Proposes exactly these drafts."""

    def __init__(self, *drafts: Draft, samples: bool = False) -> None:
        super().__init__()
        self.samples = samples
        self._drafts = list(drafts)

    def propose(self, asks: object) -> list[Draft]:
        return self._drafts


def propose(
    *drafts: Draft, room: int = 8, needs_probs: bool = False, samples: bool = False, temperature: float = 1.0
) -> dict[str, Draft]:
    drafter = ProposesExactly(*drafts, samples=samples)
    request = DraftRequest("s", 5, 8, SamplingParams(temperature=temperature), 0, needs_draft_probs=needs_probs)
    return Proposer(drafter, vocab=VOCAB).draft([request], {"s": room}, drafter=drafter.name)


@pytest.mark.parametrize(
    ("tokens", "parents", "kept"),
    [
        ((1, 2, 3), (-1, 0, 1), 3),
        ((1, 2, 10), (-1, 0, 1), 2),  # an id beyond the vocabulary
        ((1, -2, 3), (-1, 0, 1), 1),
        ((1, 2, 3), (-1, 0, 2), 2),  # a node that is its own parent
        ((1, 2, 3), (-1, -2, 1), 1),
        ((1, 2), (-1, 0, 1), 2),  # more parents than tokens
        ((1, 2, 3), (-1, 0), 2),
        ((1, 2.0, 3), (-1, 0, 1), 1),  # what is no integer
        ((1, 2, 3), (-1, 0, "1"), 2),
        (tuple(np.array([1, 2])), (-1, 0), 2),
        ((1, 2), tuple(np.array([-1, 0])), 2),
    ],
)
def test_a_draft_is_cut_where_it_stops_being_a_tree(
    tokens: tuple[int, ...], parents: tuple[int, ...], kept: int
) -> None:
    draft = propose(Draft("s", tokens, parents))["s"]
    assert (draft.tokens, draft.parents) == (tokens[:kept], parents[:kept])
    assert {*map(type, draft.tokens + draft.parents)} == {int}, "as the native step reads them"


def test_a_draft_keeps_to_its_room_and_its_ask() -> None:
    assert propose(Draft("s", (1, 2, 3), (-1, 0, 1)), room=2)["s"].tokens == (1, 2)
    assert propose(Draft("s", (1,), (-1,)), room=0) == {}
    assert propose(Draft("unknown", (1,), (-1,))) == {}
    assert propose(Draft("s")) == {}


@pytest.mark.parametrize("scores", [(0.5,), (0.5, 1.5), (-0.1, 0.5), (math.nan, 0.5)])
def test_scores_that_are_no_probabilities_are_dropped(scores: tuple[float, ...]) -> None:
    assert propose(Draft("s", (1, 2), (-1, 0), (0.9, 0.5)))["s"].scores == (0.9, 0.5)
    assert propose(Draft("s", (1, 2), (-1, 0), scores))["s"].scores == ()


def test_draws_without_their_law_are_dropped_when_the_rule_needs_it() -> None:
    bare = Draft("s", (1, 2), (-1, 0))
    assert propose(bare, needs_probs=True, samples=True) == {}
    assert len(propose(bare, needs_probs=True)["s"]) == 2  # point masses need none
    assert len(propose(bare, needs_probs=True, samples=True, temperature=0.0)["s"]) == 2  # nor do greedy guesses
    good = Draft("s", (1, 2), (-1, 0), draft_probs=np.full((2, VOCAB), 0.1))
    assert propose(good, needs_probs=True, samples=True, room=1)["s"].draft_probs.shape == (1, VOCAB)
    narrow = Draft("s", (1, 2), (-1, 0), draft_probs=np.full((2, VOCAB - 1), 0.1))
    assert propose(narrow, needs_probs=True, samples=True) == {}


def test_a_failing_drafter_is_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(DecliningDrafter):
        name = "failing"

        def propose(self, asks: object) -> list[Draft]:
            raise ValueError("no idea")

    proposer = Proposer(Failing(), vocab=VOCAB)
    with caplog.at_level(logging.WARNING, logger="wager"):
        for _ in range(2):  # the second time it is not asked
            assert proposer.draft([DraftRequest("s", 5, 8, SamplingParams(), 0)], {"s": 8}, drafter="failing") == {}
        assert proposer.failures["failing"] == 1 and proposer.name == "failing"
        two = [DraftRequest(name, 5, 8, SamplingParams(), 0) for name in ("t", "u")]
        assert proposer.draft(two, {"t": 8, "u": 8}, drafter="failing") == {}
    assert proposer.name == "none" and proposer.failed == {"failing": "ValueError: no idea"}
    assert [record.getMessage() for record in caplog.records] == [
        "Drafter 'failing' failed and is left out for one sequence: ValueError: no idea",
        "Drafter 'failing' failed and pauses for 16 steps: ValueError: no idea (failure 2)",
    ]


def test_drafts_before_one_that_is_none_count() -> None:
    requests = [DraftRequest(name, 5, 8, SamplingParams(), 0) for name in ("s", "t")]
    good, none = Draft.chain("s", [1, 2], drafter="exact"), None
    drafter = ProposesExactly(good, none)  # type: ignore[arg-type]
    drafter.name = "exact"
    proposer = Proposer(drafter, vocab=VOCAB)
    assert [*proposer.draft(requests, {"s": 8, "t": 8}, drafter=drafter.name)] == ["s"]
    assert proposer.failed


@pytest.mark.parametrize("drafter", [NgramDrafter(), LookupDrafter("suffix", LookupSources(4))])
def test_a_depth_is_any_integer(drafter: Drafter) -> None:
    drafter.begin("s", [1, 2, 3, 1, 2, 3, 1], SamplingParams())
    request = DraftRequest("s", 7, 2, SamplingParams(), 0)
    [draft] = drafter.propose([request._replace(depth=np.int64(2))])
    assert draft.tokens == (2, 3)
    for depth in (2.0, 2**40, None):
        with pytest.raises((TypeError, ValueError), match=r"integer|int of 32 bits"):
            drafter.propose([request._replace(depth=depth)])  # type: ignore[arg-type]


def test_what_is_too_much_together_is_cut_where_it_is_longest() -> None:
    assert longest_that_fits([3, 5, 1], 9) == 5
    assert longest_that_fits([3, 5, 1], 8) == 4
    assert longest_that_fits([3, 5, 1], 5) == 2
    assert longest_that_fits([3, 5, 1], 2) == 0, "none is preferred"
    assert longest_that_fits([], 0) == 0


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_what_is_found_valid_at_once_is_what_the_definition_keeps(data: st.DataObject) -> None:
    """Chains are checked natively, and whatever is not one in Python: by either way alone the drafts are the same."""

    def drawn(name: str) -> Draft:
        size = data.draw(st.integers(0, 4))
        tokens = tuple(data.draw(st.sampled_from([0, 1, VOCAB - 1, VOCAB, -1, 2**70, True, 1.0])) for _ in range(size))
        parents = tuple(data.draw(st.sampled_from([node - 1, node - 1, node - 1, -1, False])) for node in range(size))
        scores = tuple(data.draw(st.sampled_from([0.5, 1.0, 1, math.nan, -0.1])) for _ in range(size))
        probs = data.draw(st.sampled_from([None, None, np.full((size, VOCAB), 0.1)]))
        drafter = data.draw(st.sampled_from(["exact", "other"]))
        return Draft(name, tokens, parents, data.draw(st.sampled_from([(), scores])), drafter, probs)

    names = data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3))
    drafts = [drawn(name) for name in names]
    requests = [DraftRequest(name, 5, 8, SamplingParams(), 0) for name in dict.fromkeys(names)]
    limits = {request.seq_id: data.draw(st.integers(0, 4)) for request in requests}
    found = []
    for native in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not native:
                patch.setattr(_native, "valid_drafts", lambda *_: None)
            drafter = ProposesExactly(*drafts)
            drafter.name = "exact"
            kept = Proposer(drafter, vocab=VOCAB).draft(requests, limits, drafter="exact")
            found.append({name: repr(draft) for name, draft in kept.items()})
    assert found[0] == found[1]
