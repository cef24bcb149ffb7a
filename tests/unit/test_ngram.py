"""Prompt lookup: what it copies, how far it trusts a match, and that it learns when to stop."""

from __future__ import annotations

import random

import pytest

from oracle.ngrams import copied
from wager.draft.ngram import MIN_SURVIVAL, PRIOR, NgramDrafter
from wager.draft.registry import DrafterParts, build_drafter
from wager.drafter_spec import DRAFTERS, DrafterSpec
from wager.errors import UsageError
from wager.types import Draft, DraftRequest, SamplingParams

PARAMS = SamplingParams()


def _begun(tokens: list[int], *, longest: int = 3) -> NgramDrafter:
    drafter = NgramDrafter(longest)
    drafter.begin("s", tokens, PARAMS)
    return drafter


def _propose(drafter: NgramDrafter, *, depth: int = 7) -> Draft:
    (draft,) = drafter.propose([DraftRequest("s", 0, depth, PARAMS, 0)])
    return draft


def test_longer_matches_make_longer_drafts_and_the_ask_bounds_them() -> None:
    text = list(range(100, 130))
    lengths = [len(_propose(_begun([*text, 7, *text[3 - m : 3]]), depth=20)) for m in (1, 2, 3)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[2]
    draft = _propose(_begun([*text, 7, *text[:9]]), depth=5)
    assert len(draft) == 5
    assert list(draft.scores) == pytest.approx([PRIOR[-1] ** d for d in range(1, 6)])
    assert len(_propose(_begun([*text, 7, *text[:9]]), depth=0)) == 0
    scores = _propose(_begun([*text, 7, text[0]]), depth=20).scores
    assert scores[:2] == pytest.approx((PRIOR[0], PRIOR[0] * PRIOR[1])) and min(scores) >= MIN_SURVIVAL


def test_a_text_that_never_repeats_itself_is_left_alone_until_it_does() -> None:
    drafter = _begun([0])
    drafter.begin("t", [0, 5, 0], PARAMS)
    for step in range(60):  # after each 0 comes something new
        drafter.accept("s", [1000 + step, 0])
    assert len(_propose(drafter)) == 0
    (other,) = drafter.propose([DraftRequest("t", 3, 2, PARAMS, 0)])
    assert other.tokens == (5, 0), "what is learned stays with the sequence"
    for _ in range(60):
        drafter.accept("s", [7, 0])
    assert _propose(drafter, depth=2).tokens == (7, 0)


def test_a_kind_says_of_its_drafter_what_the_drafter_says_of_itself() -> None:
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


@pytest.mark.parametrize("longest", [0, 9])
def test_a_match_that_cannot_be_looked_up_is_refused(longest: int) -> None:
    with pytest.raises(UsageError, match=f"ngram:{longest}"):
        NgramDrafter(longest)


@pytest.mark.parametrize("longest", [3, 1, 8])
@pytest.mark.parametrize("vocab", [6, 2, 5000])
def test_what_it_copies_is_what_a_search_of_the_whole_text_finds(longest: int, vocab: int) -> None:
    rng, drafter, known, drafted = random.Random(vocab), NgramDrafter(longest), dict[str, list[int]](), 0
    for step in range(200):
        if len(known) < 3 or rng.random() < 0.02:
            name = f"s{step}"
            known[name] = [rng.randrange(vocab) for _ in range(rng.randint(1, 60))]
            drafter.begin(name, known[name], PARAMS)
        for name, text in known.items():
            tokens = [rng.randrange(vocab) for _ in range(rng.randint(1, 3))]
            if rng.random() < 0.5:  # a repetition, so that long matches are met
                start = rng.randrange(len(text))
                tokens = text[start : start + 9]
            text += tokens
            drafter.accept(name, tokens)
        asked = rng.sample(list(known), min(2, len(known)))
        requests = [DraftRequest(name, len(known[name]), rng.randint(1, 15), PARAMS, 0) for name in asked]
        drafts = drafter.propose(requests)
        assert [draft.seq_id for draft in drafts] == asked
        for draft in drafts:
            assert list(draft.tokens) == copied(known[draft.seq_id], longest, len(draft))
            drafted += len(draft)
        if len(known) > 3:
            name = rng.choice(list(known))
            del known[name]
            drafter.end(name)
    assert drafted > 100 or vocab == 5000
