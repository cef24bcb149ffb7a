"""Lookup drafters: what they guess, that native and Python tables agree, and that eviction leaves nothing behind."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

import oracle.lookup
from oracle.corpus import PythonCorpus
from oracle.lookup import PythonLookupTable
from unit.test_learned_texts import native_corpus, written
from wager.draft import lookup
from wager.draft.lookup import LEARNED, MOST_LONGEST, LookupDrafter, LookupSources, lookup_table
from wager.draft.ngram import MIN_SURVIVAL
from wager.draft.store_file import StoreFile, build_store
from wager.errors import UsageError
from wager.kernels._native import Corpus, LookupTable
from wager.types import Draft, DraftRequest, SamplingParams

PARAMS = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8)


def _ask(name: str, depth: int = 7) -> DraftRequest:
    return DraftRequest(name, 0, depth, PARAMS, 0)


def _drafted(drafter: LookupDrafter | LookupTable, name: str = "s", depth: int = 7) -> Draft:
    [draft] = drafter.propose([_ask(name, depth)])
    return draft


def _begun(tokens: list[int], sources: LookupSources | None = None) -> LookupDrafter:
    drafter = LookupDrafter("suffix", sources or LookupSources(8, 1000))
    drafter.begin("s", tokens, PARAMS)
    return drafter


# ---- one text --------------------------------------------------------------------------------------------------------


def test_it_guesses_what_followed_the_longest_match_most_often_and_of_equals_the_latest() -> None:
    draft = _drafted(_begun([1, 2, 3, 40, 41, 9, 3, 50, 9, 1, 2, 3]))
    assert draft.tokens[:2] == (40, 41) and draft.is_chain and draft.drafter == "suffix"
    assert _drafted(_begun([1, 40, 1, 40, 1, 50, 1]), depth=1).tokens == (40,)
    assert _drafted(_begun([1, 40, 1, 50, 1]), depth=1).tokens == (50,)


def test_drafts_end_where_nothing_is_known_or_likely() -> None:
    assert _drafted(_begun([1, 2, 3, 4])).tokens == ()
    assert _drafted(_begun([*range(40), *range(10)]), depth=15).tokens == tuple(range(10, 25))
    assert all(score >= MIN_SURVIVAL for score in _drafted(_begun([5, 1, 5, 2, 5, 3, 5, 4, 5])).scores)
    assert _drafted(_begun([1, 2, 1]), depth=0).tokens == ()


@pytest.mark.parametrize("longest", [-1, MOST_LONGEST + 1])
def test_a_match_that_cannot_be_looked_up_is_refused(longest: int) -> None:
    with pytest.raises(UsageError, match="out of range"):
        LookupDrafter("suffix", LookupSources(longest))


def test_guesses_follow_the_noise_of_a_request_that_samples_unless_its_rule_needs_what_they_were_drawn_from() -> None:
    drafter = _begun([1, 40, 3, 1, 50, 4, 1, 60, 5, 1, 40, 6, 1])
    request = _ask("s", depth=1)
    greedy = drafter.propose([request])
    found = {seed: drafter.propose([request._replace(params=SAMPLED, seed=seed)])[0].tokens for seed in range(300)}
    assert set(found.values()) == {(40,), (50,), (60,)} and greedy[0].tokens == (40,)
    assert drafter.propose([request._replace(params=SAMPLED, seed=7)])[0].tokens == found[7]
    assert drafter.propose([request._replace(params=SAMPLED, needs_draft_probs=True)]) == greedy


@pytest.mark.parametrize("params", [PARAMS, SAMPLED])
def test_a_draft_behind_guesses_is_the_rest_of_the_draft_that_has_them(params: SamplingParams) -> None:
    drafter = _begun([*range(20), *range(4)])
    whole = DraftRequest("s", 24, 9, params, 5)
    [draft] = drafter.propose([whole])
    assert len(draft) > 4
    for size in range(1, len(draft)):
        [rest] = drafter.propose([whole._replace(position=24 + size, depth=9 - size, after=draft.tokens[:size])])
        assert rest.tokens == draft.tokens[size : size + len(rest)] and len(rest) >= len(draft) - size
        above = draft.scores[size - 1]
        known = min(len(rest), len(draft) - size)
        assert [above * score for score in rest.scores[:known]] == pytest.approx(draft.scores[size:])
    assert drafter.propose([whole]) == [draft]


# ---- texts that ended ------------------------------------------------------------------------------------------------


def test_what_one_request_generated_is_guessed_for_the_next() -> None:
    drafter = _begun([*range(20, 29), 1, 2])
    drafter.propose([_ask("s")])
    drafter.accept("s", [3, 4, 5, 6])
    drafter.end("s")
    drafter.begin("t", [7, 8, 3, 4], PARAMS)
    assert _drafted(drafter, "t", depth=2).tokens == (5, 6)
    drafter.begin("u", [30, 20], PARAMS)
    assert _drafted(drafter, "u").tokens == (), "prompts are not shared"
    drafter.end("t")
    drafter.forget()
    drafter.begin("v", [7, 8, 3, 4], PARAMS)
    assert _drafted(drafter, "v").tokens == ()


# ---- in C++ and in Python --------------------------------------------------------------------------------------------


def _store(path: Path, vocab: int, rng: random.Random) -> StoreFile:
    answers = [([rng.randrange(vocab)], [rng.randrange(vocab) for _ in range(200)]) for _ in range(5)]
    build_store(answers, path, vocab=vocab, tokenizer="t")
    return StoreFile(path, vocab=vocab, tokenizer="t")


def remember_little(monkeypatch: pytest.MonkeyPatch, remembered: float, gain_weight: float) -> None:
    """Both tables forget within a test what they have seen of learned texts."""
    for module in (lookup, oracle.lookup):
        monkeypatch.setattr(module, "LEARNED", LEARNED._replace(remembered=remembered, gain_weight=gain_weight))


@pytest.mark.parametrize(
    ("longest", "shared_tokens", "stored", "learned"),
    [
        (8, 300, True, True),
        (3, 0, False, False),
        (2, 120, False, True),
        (0, 100, True, True),
        (24, 90, True, False),
        (1, 200, False, True),
    ],
)
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("vocab", [6, 2, 5000])
def test_the_native_table_drafts_what_the_one_in_python_does(
    longest: int,
    shared_tokens: int,
    vocab: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    stored: bool,
    trees: bool,
    learned: bool,
) -> None:
    remember_little(monkeypatch, 3.0, 1.0)
    rng, known = random.Random(vocab), {}
    sources = LookupSources(longest, shared_tokens, _store(tmp_path / "s", vocab, rng) if stored else None)
    native, plain = lookup_table("suffix", sources, trees=trees), PythonLookupTable("suffix", sources, trees=trees)
    texts = [[[rng.randrange(vocab) for _ in range(80)] for _ in range(3)] for _ in range(2 * learned)]
    corpus = native_corpus(tmp_path, texts)
    if learned:
        native.read(corpus)
        plain.read(PythonCorpus(texts))
        known["learned"] = texts[0][0][:30]
        for table in (native, plain):
            table.begin("learned", known["learned"], [])
    drafted, guessed = 0, dict[str, tuple[int, ...]]()
    for step in range(21):
        if learned and step % 10 == 9:  # segments are merged, and texts leave
            texts = [[each for some in texts for each in some if rng.random() < 0.8] or [[1, 0, 1]]]
            corpus.set([written(tmp_path / f"{step}", texts[0]).arrays])
            plain.read(PythonCorpus(texts))
        if len(known) < 3 or rng.random() < 0.4:
            name, prompt = f"s{step}", [rng.randrange(vocab) for _ in range(rng.randint(1, 60))]
            known[name] = list(prompt)
            prediction = [rng.randrange(vocab) for _ in range(rng.choice((0, 20)))]
            for table in (native, plain):
                table.begin(name, prompt, prediction)
        for name in list(known):
            tokens = [*guessed.pop(name, ())[: rng.randint(0, 9)], rng.randrange(vocab)]
            if rng.random() < 0.5:  # a repetition, of this text or another
                other = known[rng.choice(list(known))]
                start = rng.randrange(len(other))
                tokens = other[start : start + 9]
            known[name] += tokens
            for table in (native, plain):
                table.accept(name, tokens)
        asked = [name for name in known if rng.random() < 0.7]
        requests = [
            DraftRequest(name, len(known[name]), rng.randint(0, 15), rng.choice((PARAMS, SAMPLED)), 2**64 - 1, 3)
            for name in asked
        ]
        requests += [
            each._replace(position=each.position + 3, after=tuple(known[each.seq_id][:3])) for each in requests[:1]
        ]
        drafts = native.propose(requests)
        expected = plain.propose(requests)
        assert [replace(draft, scores=()) for draft in drafts] == [replace(draft, scores=()) for draft in expected]
        assert [draft.scores for draft in drafts] == [pytest.approx(draft.scores, rel=1e-9) for draft in expected]
        drafted += sum(map(len, drafts))
        guessed = {draft.seq_id: draft.tokens for draft in drafts[: len(asked)]}
        if len(known) > 5 or rng.random() < 0.3:
            gone = rng.choice(list(known))
            del known[gone]
            for table in (native, plain):
                table.end(gone)
    assert drafted > 60 or vocab == 5000


def test_another_corpus_does_not_hide_that_the_tree_of_ended_texts_has_changed() -> None:
    """A tenant's corpus may be closed, and opened as a new one, while a sequence runs."""
    table, closed, ended = lookup_table("suffix", LookupSources(5, 1000)), Corpus(), [9, 7, 8, 40, 41]
    for _ in ended:  # as often as the tree will change
        closed.set([])
    table.read(closed)
    for name, prompt in (("ended", ended[:1]), ("s", [5, 7, 8])):
        table.begin(name, prompt, ())
        assert _drafted(table, name).tokens == ()
    table.accept("ended", ended[1:])
    table.end("ended")
    table.read(Corpus())
    assert _drafted(table).tokens[:2] == (40, 41)


# ---- what was learned and is of no use -------------------------------------------------------------------------------


def test_learned_texts_of_another_kind_lose_their_say_and_get_it_back_where_they_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_little(monkeypatch, 200.0, 20.0)
    rng = random.Random(1)
    repeated = rng.sample(range(100, 3000), 250)
    texts = [[[pair, pair + 1, 9] for pair in range(3000, 3040) for _ in range(3)] + [repeated]]
    native, plain = (make("suffix", LookupSources(5, 1000)) for make in (lookup_table, PythonLookupTable))
    native.read(native_corpus(tmp_path, texts))
    plain.read(PythonCorpus(texts))

    def drafted(name: str, tokens: list[int]) -> list[tuple[int, ...]]:
        """The drafts along a text; both tables draft the same."""
        found = []
        for table in (native, plain):
            table.begin(name, [1], [])
        for token in tokens:
            drafts = [table.propose([_ask(name, 3)])[0] for table in (native, plain)]
            assert drafts[0].tokens == drafts[1].tokens and drafts[0].scores == pytest.approx(drafts[1].scores)
            found.append(drafts[0].tokens)
            for table in (native, plain):
                table.accept(name, [token])
        for table in (native, plain):
            table.end(name)
        return found

    def wrong() -> list[int]:
        """After each pair of tokens something else comes than what is learned."""
        return [
            token for pair in rng.sample(range(3000, 3040), 40) for token in (pair, pair + 1, rng.randrange(4000, 9000))
        ]

    first = drafted("first", wrong())
    assert (9,) in {draft[:1] for draft in first[:12]}, "at first what is learned is believed"
    for number in range(2):
        last = drafted(f"{number}", wrong())
    assert (9,) not in {draft[:1] for draft in last}, "then the tenant's other requests do not begin with it"
    back = drafted("back", repeated)
    assert not any(back[2:15]), "it is looked up rarely"
    assert all(len(draft) == 3 for draft in back[-100:-3]), "where it is right it is looked up again, at every place"
