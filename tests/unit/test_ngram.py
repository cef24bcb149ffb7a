"""Prompt lookup: what it copies, how far it trusts a match, and that it learns when to stop."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.ngrams import PythonNgramTable
from wager.draft.ngram import MIN_SURVIVAL, PRIOR, NgramDrafter, ngram_table
from wager.draft.registry import MODULES, DrafterParts, build_drafter
from wager.drafter_spec import AUTO, DRAFTERS, DrafterSpec, descriptions, parse_drafters
from wager.errors import UsageError
from wager.types import Draft, DraftRequest, SamplingParams

PARAMS = SamplingParams()


def _begun(tokens: list[int], *, longest: int = 3) -> NgramDrafter:
    drafter = NgramDrafter(longest)
    drafter.begin("s", tokens, PARAMS)
    return drafter


def _propose(drafter: NgramDrafter, *, position: int = 0, depth: int = 7) -> Draft:
    (draft,) = drafter.propose([DraftRequest("s", position, depth, PARAMS, 0)])
    return draft


def test_it_copies_what_followed_the_same_tokens() -> None:
    draft = _propose(_begun([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]))
    assert draft.tokens == (4, 5, 6, 7, 8, 9, 1)
    assert draft.is_chain and draft.drafter == "ngram" and draft.draft_probs is None


def test_the_longest_match_wins_over_a_more_recent_short_one() -> None:
    assert _propose(_begun([1, 2, 3, 40, 9, 3, 50, 9, 1, 2, 3]), depth=1).tokens == (40,)


def test_of_equally_long_matches_the_most_recent_wins() -> None:
    assert _propose(_begun([1, 2, 40, 9, 1, 2, 50, 9, 1, 2]), depth=1).tokens == (50,)


def test_a_copy_that_reaches_the_end_goes_on_periodically() -> None:
    assert _propose(_begun([9, 1, 2, 1, 2])).tokens == (1, 2, 1, 2, 1, 2, 1)
    assert _propose(_begun([5, 5]), depth=4).tokens == (5, 5, 5, 5)


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3, 4], [1, 2, 3, 1, 4]])
def test_an_ending_that_is_new_declines(tokens: list[int]) -> None:
    draft = _propose(_begun(tokens))
    assert len(draft) == 0 and draft.seq_id == "s"


def test_longer_matches_make_longer_drafts_and_the_ask_bounds_them() -> None:
    text = list(range(100, 130))
    lengths = [len(_propose(_begun([*text, 7, *text[3 - m : 3]]), depth=20)) for m in (1, 2, 3)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[2]
    draft = _propose(_begun([*text, 7, *text[:9]]), depth=5)
    assert len(draft) == 5
    assert list(draft.scores) == pytest.approx([PRIOR[-1] ** d for d in range(1, 6)])
    assert len(_propose(_begun([*text, 7, *text[:9]]), depth=0)) == 0


def test_scores_are_survivals_and_worth_a_row() -> None:
    text = list(range(100, 130))
    scores = _propose(_begun([*text, 7, text[0]]), depth=20).scores
    assert scores[0] == pytest.approx(PRIOR[0]) and scores[1] == pytest.approx(PRIOR[0] * PRIOR[1])
    assert all(a >= b >= MIN_SURVIVAL for a, b in zip(scores, scores[1:], strict=False))


def test_a_text_that_never_repeats_itself_is_left_alone_until_it_does() -> None:
    drafter = _begun([0])
    for step in range(60):  # after each 0 comes something new
        drafter.accept("s", [1000 + step, 0])
    assert len(_propose(drafter)) == 0
    for _ in range(60):
        drafter.accept("s", [7, 0])
    assert _propose(drafter, depth=2).tokens == (7, 0)


def test_what_is_learnt_stays_with_the_sequence() -> None:
    drafter = _begun([0])
    drafter.begin("t", [0, 5, 0], PARAMS)
    for step in range(60):
        drafter.accept("s", [1000 + step, 0])
    (draft,) = drafter.propose([DraftRequest("t", 3, 2, PARAMS, 0)])
    assert draft.tokens == (5, 0)


def test_drafts_come_in_the_order_of_the_asks_and_ended_sequences_are_forgotten() -> None:
    drafter = NgramDrafter()
    for name, token in (("a", 1), ("b", 2), ("c", 3)):
        drafter.begin(name, [token, token], PARAMS)
    asks = [DraftRequest(name, 2, 2, PARAMS, 0) for name in ("c", "a", "b")]
    assert [(draft.seq_id, draft.tokens[0]) for draft in drafter.propose(asks)] == [("c", 3), ("a", 1), ("b", 2)]
    drafter.end("a")
    drafter.end("a")
    with pytest.raises(KeyError):
        drafter.propose(asks)


def _naive(tokens: list[int], longest: int) -> int | None:
    """Position after the most recent earlier occurrence of the longest known ending; brute force."""
    for n in range(min(longest, len(tokens)), 0, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                return end
    return None


_TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@settings(max_examples=300, deadline=None)
@given(tokens=_TEXTS, split=st.integers(0, 40), longest=st.integers(1, 4))
def test_the_index_agrees_with_a_search_however_the_text_arrived(tokens: list[int], split: int, longest: int) -> None:
    whole = _propose(_begun(tokens, longest=longest), depth=4)
    hit = _naive(tokens, longest)
    if hit is None:
        assert len(whole) == 0
    else:
        period = len(tokens) - hit
        assert list(whole.tokens) == [tokens[hit + i % period] for i in range(len(whole))] and len(whole) > 0
    parts = _begun(tokens[: max(1, split)], longest=longest)
    parts.accept("s", tokens[max(1, split) :])
    arrived = _propose(parts, depth=4)
    shared = min(len(arrived), len(whole))
    assert arrived.tokens[:shared] == whole.tokens[:shared]


def test_the_names_of_drafters() -> None:
    assert parse_drafters("ngram") == (DrafterSpec("ngram"),)
    assert parse_drafters("ngram:4") == (DrafterSpec("ngram", "4"),)
    assert parse_drafters("model:/some/dir:x, ngram") == (DrafterSpec("model", "/some/dir:x"), DrafterSpec("ngram"))
    assert parse_drafters("none") == () and parse_drafters("auto") == AUTO
    assert {"ngram[:N]", "model[:tree]:PATH", "suffix[:tree][:N]", "none", "auto"} <= set(descriptions())
    assert DRAFTERS["ngram"].range == (1, len(PRIOR))


def test_a_kind_says_of_its_drafter_what_the_drafter_says_of_itself() -> None:
    assert set(MODULES) == set(DRAFTERS)
    for name, option in DRAFTERS.items():
        for trees in (False, True) if option.trees == "optional" else (False,):
            if option.argument in ("none", "number"):
                spec = DrafterSpec(name, trees=trees)
                drafter = build_drafter(spec, DrafterParts(vocab=50))
                assert (drafter.name, drafter.makes_trees) == (spec.label, spec.makes_trees)
    with pytest.raises(UsageError, match="Unknown drafter 'oracle'"):
        build_drafter(DrafterSpec("oracle"), DrafterParts(vocab=50))
    with pytest.raises(UsageError, match="no loaded model"):
        build_drafter(DrafterSpec("model", "x"), DrafterParts(vocab=50))
    with pytest.raises(UsageError, match="no open store"):
        build_drafter(DrafterSpec("store", "x"), DrafterParts(vocab=50))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngarm", "Did you mean 'ngram'"),
        ("", "Known drafters: .*ngram"),
        ("model", "needs an argument"),
        ("model:", "Write model:PATH"),
        ("store", "needs an argument"),
        ("suffix:25", "suffix:25 is out of range"),
        ("none:3", "takes no argument"),
        ("ngram:x", "takes a number"),
        ("ngram:9", "ngram:9 is out of range"),
        ("ngram,none", "stands beside others"),
        ("ngram,ngram", "named twice"),
    ],
)
def test_a_drafter_that_cannot_be_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_drafters(text)
    assert re.search(message, str(error.value))


@pytest.mark.parametrize("longest", [0, 9])
def test_a_match_that_cannot_be_looked_up_is_refused(longest: int) -> None:
    with pytest.raises(UsageError, match=f"ngram:{longest}"):
        NgramDrafter(longest)


@pytest.mark.parametrize("longest", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("vocab", [2, 6, 5000])
def test_the_native_table_drafts_what_the_one_in_python_does(longest: int, vocab: int) -> None:
    native = ngram_table(longest)
    plain, rng, known = PythonNgramTable(longest), random.Random(vocab), {}
    for step in range(400):
        if len(known) < 3 or rng.random() < 0.02:
            name, prompt = f"s{step}", [rng.randrange(vocab) for _ in range(rng.randint(1, 60))]
            known[name] = list(prompt)
            for table in (native, plain):
                table.begin(name, prompt)
        for name in list(known):
            tokens = [rng.randrange(vocab) for _ in range(rng.randint(1, 3))]
            if rng.random() < 0.5:  # a repetition, so that long matches are met
                start = rng.randrange(len(known[name]))
                tokens = known[name][start : start + 9]
            known[name] += tokens
            for table in (native, plain):
                table.accept(name, tokens)
        asked = [name for name in known if rng.random() < 0.7]
        requests = [DraftRequest(name, len(known[name]), rng.randint(1, 15), SamplingParams(), 0) for name in asked]
        drafts = native.propose(requests)
        assert drafts == plain.propose(requests)
        assert [draft.is_chain for draft in drafts] == [True] * len(drafts)
        if rng.random() < 0.01:
            gone = rng.choice(list(known))
            del known[gone]
            for table in (native, plain):
                table.end(gone)
