"""Drafters of drafters and merged ones: how they are written, what they make, and that no text changes with them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tokenizer_models import save_model

import wager
from wager.draft import combined
from wager.draft.base import ComputedRows
from wager.draft.combined import BackedDrafter, MergedDrafter
from wager.drafter_spec import AUTO, DrafterSpec, descriptions, parse_drafters
from wager.errors import UsageError
from wager.kernels.base import TargetOutput
from wager.loading.load import load
from wager.testing.drafters import HistoryDrafter
from wager.types import Draft, DraftPrices, DraftRequest, Request, SamplingParams

# --- how they are written -----------------------------------------------------------------------------------


def test_names_are_parsed() -> None:
    assert parse_drafters("ngram:4") == (DrafterSpec("ngram", "4"),)
    assert parse_drafters("model:/some/dir:x, ngram") == (DrafterSpec("model", "/some/dir:x"), DrafterSpec("ngram"))
    assert parse_drafters("none") == () and parse_drafters("auto") == AUTO
    assert {"ngram[:N]", "model[:tree]:PATH", "suffix[:tree][:N]", "none", "auto"} <= set(descriptions())


def test_staged_and_merged_drafters_are_parsed() -> None:
    ngram, model = DrafterSpec("ngram", "2"), DrafterSpec("model", "/a")
    (staged,) = parse_drafters("model:/a+ngram:2")
    assert staged == replace(model, inner=ngram) and str(staged) == "model:/a+ngram:2"
    (twice,) = parse_drafters("model:/b+model:/a+ngram:2")
    assert twice == DrafterSpec("model", "/b", inner=staged) and twice.models == ["/b", "/a"]
    (merged,) = parse_drafters("ngram:2//model:/a+ngram:2")
    assert merged.parts == (ngram, staged) and str(merged) == "ngram:2//model:/a+ngram:2"
    assert merged.makes_trees and not staged.makes_trees and merged.models == ["/a"]
    (tree,) = parse_drafters("model:tree:/a")
    assert tree == DrafterSpec("model", "/a", trees=True) and tree.makes_trees and str(tree) == "model:tree:/a"
    assert (tree,) == parse_drafters("model-tree:/a") and tree.label == "model:tree"
    assert parse_drafters("ngram//suffix-tree:3")[0].parts == parse_drafters("ngram,suffix:tree:3")
    assert parse_drafters("mtp:tree,mtp:tree:a@before,model:./tree") == (
        DrafterSpec("mtp", trees=True),
        DrafterSpec("mtp", "a@before", trees=True),
        DrafterSpec("model", "./tree"),
    )
    (backed,) = parse_drafters("ngram:2//suffix..model:/a+ngram:2")
    assert backed.backed and backed.parts == (*parse_drafters("ngram:2//suffix"), staged)
    assert str(backed) == "ngram:2//suffix..model:/a+ngram:2" and backed.makes_trees and backed.models == ["/a"]
    assert parse_drafters("ngram, ngram//model:/a") == (DrafterSpec("ngram"), *parse_drafters("ngram//model:/a"))


def test_paths_may_hold_the_signs() -> None:
    for path in ("a+b/c++", "org//name", "x+ngramlike", "/m//models+", "../a..b", "..", "a../ngram"):
        assert parse_drafters(f"model:{path}") == (DrafterSpec("model", path),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngarm", "Did you mean 'ngram'"),
        ("", "Known drafters: .*ngram"),
        ("model:", "Write model:PATH"),
        ("store", "needs an argument"),
        ("suffix:25", "suffix:25 is out of range"),
        ("none:3", "takes no argument"),
        ("ngram:x", "takes a number"),
        ("ngram,none", "stands beside others"),
        ("ngram,ngram", "named twice"),
        ("ngram+ngram", "'ngram' takes no drafter of its own"),
        ("none+ngram", "'none' takes no drafter of its own"),
        ("model:tree:x+ngram", "takes no drafter of its own"),
        ("model:tree", "'model:tree' needs an argument"),
        ("ngram:tree", "takes a number, not 'tree'"),
        ("ngram-tree", "takes a number, not 'tree'"),
        ("ngram//ngram", "named twice"),
        ("auto//ngram", "'auto' stands beside others"),
        ("auto..ngram", "'auto' stands beside others"),
        ("ngram..ngram", "named twice"),
        ("ngram..suffix..model:/a", "joins 3 drafters"),
        ("ngram:99//model:x", "ngram:99 is out of range"),
        ("model:x+ngram:99", "ngram:99 is out of range"),
        ("ngram//nonsense", "Unknown drafter"),
        ("model+ngram", "'model' needs an argument"),
        ("model:/m+eagle3:/h", "reads the target's states"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_drafters(text)
    assert re.search(message, str(refused.value))


def test_merged_drafters_make_trees_which_block_does_not_verify() -> None:
    with pytest.raises(UsageError, match="makes trees"):
        wager.EngineConfig.from_options(drafter="ngram//model:x", verify="block")


# --- what a merged drafter makes ----------------------------------------------------------------------------


class Says(HistoryDrafter):
    """Always the same draft."""

    def __init__(self, name: str, draft: Draft, *, samples: bool = False) -> None:
        super().__init__()
        self.name, self.samples, self._said = name, samples, draft
        self.depths: list[int] = []
        self.least: list[float] = []

    def _draft(self, request: DraftRequest) -> Draft:
        self.depths.append(request.depth)
        self.least.append(request.min_survival)
        return replace(self._said, seq_id=request.seq_id)


VOCAB = 6
CHAIN = Draft.chain("", [1, 2, 3], drafter="chain", scores=[0.8, 0.6, 0.1])
TREE = Draft("", (1, 4, 5), (-1, -1, 0), (0.6, 0.3, 0.5), "tree")
Q = np.tile([0.1, 0.2, 0.3, 0.2, 0.1, 0.1], (2, 1))


def ask(depth: int = 5, *, law: bool = False) -> DraftRequest:
    return DraftRequest("s", 3, depth, SamplingParams(temperature=1.0), 0, needs_draft_probs=law)


def begun(*drafters: HistoryDrafter) -> MergedDrafter:
    merged = MergedDrafter(drafters, vocab=VOCAB)
    merged.begin("s", [1, 2, 3], SamplingParams())
    return merged


def test_one_tree_of_the_likeliest_guesses_of_all() -> None:
    merged = begun(Says("a", CHAIN), Says("b", TREE))
    (draft,) = merged.propose([ask()])
    assert merged.name == draft.drafter == "a//b" and merged.makes_trees and not merged.samples
    assert (draft.tokens, draft.parents) == ((1, 2, 5, 4, 3), (-1, 0, 0, -1, 1))
    assert draft.scores == pytest.approx((0.8, 0.6, 0.5, 0.3, 0.1))
    assert merged.propose([ask(2)])[0].tokens == (1, 2)


def test_drafts_of_its_drafters_are_found_valid_at_once_under_every_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at them in Python takes 10 us and more for each."""
    own, looked = combined.valid_part, list[Draft]()
    monkeypatch.setattr(combined, "valid_part", lambda draft, **limits: looked.append(draft) or own(draft, **limits))
    first, second = (Draft.chain("", [1, 2], drafter=name, scores=[0.8, 0.6]) for name in "ab")
    merged = begun(Says("a", first), Says("b", second))
    assert [merged.propose([ask(law=law)])[0].tokens for law in (False, True)] == [(1, 2), (1, 2, 1, 2)]
    assert not looked
    wrong = begun(Says("a", Draft.chain("", [1, VOCAB], drafter="a")), Says("b", second))
    assert wrong.propose([ask(law=True)])[0].tokens == (1, 1, 2) and len(looked) == 1


def test_a_drafter_that_is_less_often_right_than_it_thinks_gives_way() -> None:
    bold, modest = Draft.chain("", [1], drafter="", scores=[0.9]), Draft.chain("", [2], drafter="", scores=[0.4])
    merged = begun(Says("bold", bold), Says("modest", modest))
    assert merged.propose([ask(1)])[0].tokens == (1,)
    for _ in range(60):
        merged.propose([ask(2)])
        merged.accept("s", [2])
    (draft,) = merged.propose([ask(2)])
    assert draft.tokens == (2, 1) and draft.scores[1] < 0.2
    merged.end("s")
    merged.forget()
    merged.begin("s", [1, 2, 3], SamplingParams())
    assert merged.propose([ask(1)])[0].tokens == (1,)


def test_under_a_law_every_drafter_has_a_fixed_share_and_its_own_q() -> None:
    sampled = Says("q", Draft("", (1, 1), (-1, 0), (), "q", Q), samples=True)
    merged = begun(sampled, Says("chain", CHAIN))
    (draft,) = merged.propose([ask(4, law=True)])
    assert sampled.depths == [2]
    assert (draft.tokens, draft.parents) == ((1, 1, 1, 2), (-1, 0, -1, 2))  # the same guess twice: it was drawn twice
    assert draft.draft_probs is not None and np.array_equal(draft.draft_probs[:2], Q)
    assert np.array_equal(draft.draft_probs[2:], np.eye(VOCAB)[[1, 2]])
    (odd,) = merged.propose([ask(1, law=True)])
    assert odd.tokens == (1,)
    assert begun(Says("a", CHAIN), Says("b", TREE)).propose([ask(5, law=True)])[0].draft_probs is None


@pytest.mark.parametrize("probs", [None, Q[:, :3]])
def test_sampled_guesses_without_their_q_are_dropped(probs: np.ndarray | None) -> None:
    merged = begun(Says("q", Draft("", (1, 1), (-1, 0), (), "q", probs), samples=True), Says("chain", CHAIN))
    (draft,) = merged.propose([ask(4, law=True)])
    assert draft.tokens == (1, 2) and draft.draft_probs is not None and draft.draft_probs.shape == (2, VOCAB)


# --- one that is asked where another is unsure ----------------------------------------------------------------


class Continues(Says):
    """Guesses 4 and 5 behind whatever it is asked to continue."""

    continues = True

    def __init__(self, name: str, draft: Draft) -> None:
        super().__init__(name, draft)
        self.continued: list[DraftRequest] = []

    def _draft(self, request: DraftRequest) -> Draft:
        if not request.after:
            return super()._draft(request)
        self.continued.append(request)
        return Draft.chain(
            request.seq_id, [4, 5][: request.depth], drafter=self.name, scores=[0.9, 0.8][: request.depth]
        )


SURE = Draft.chain("", [1, 2], drafter="", scores=[0.99, 0.97])
UNSURE = Draft.chain("", [1], drafter="", scores=[0.15])
OTHER = Draft.chain("", [2, 3], drafter="", scores=[0.8, 0.6])
DEAR, CHEAP = DraftPrices(row=0.05, call=0.6, guess=0.05), DraftPrices(row=0.05, call=0.01, guess=0.01)


def backed(first: Draft, second: Draft, *, samples: bool = False) -> tuple[BackedDrafter, Continues, Says]:
    parts = Continues("first", first), Says("second", second, samples=samples)
    drafter = BackedDrafter(*parts, vocab=VOCAB)
    drafter.begin("s", [1, 2, 3], SamplingParams())
    return drafter, *parts


def test_guesses_of_the_second_are_continued_by_the_first_and_its_own_stand_beside_them() -> None:
    drafter, first, second = backed(UNSURE, OTHER)
    (draft,) = drafter.propose([ask(5)])
    assert drafter.name == draft.drafter == "first..second" and drafter.makes_trees and drafter.weighs_prices
    paths = {tuple(draft.tokens[node] for node in draft.path(node)) for node in range(len(draft))}
    assert paths == {(2,), (2, 3), (2, 3, 4), (2, 3, 4, 5), (1,)}
    assert draft.computed == 2 and second.depths == [5]
    [asked] = first.continued
    assert (asked.after, asked.position, asked.depth) == ((2, 3), 5, 3)


@pytest.mark.parametrize(("prices", "often"), [(DEAR, False), (CHEAP, True)])
def test_the_second_is_asked_only_where_it_brings_more_than_it_costs(prices: DraftPrices, *, often: bool) -> None:
    """It is right every other time; where the first is sure it has nothing to add."""
    drafter, first, second = backed(UNSURE, replace(OTHER, scores=(0.5, 0.25)))
    for number in range(300):
        first._said = UNSURE if number % 2 else SURE
        (draft,) = drafter.propose([ask()._replace(prices=prices)])
        assert draft.computed in (0, 2)
        drafter.accept("s", [1, 2] if first._said is SURE else [2, 0] if number % 4 == 1 else [3])
    asked = len(second.depths)
    assert 100 < asked < 200 if often else asked < 50


@pytest.mark.slow
def test_a_place_where_asking_did_not_pay_is_tried_again() -> None:
    drafter, _, second = backed(UNSURE, replace(OTHER, scores=(0.5, 0.25)))
    for _ in range(100):
        drafter.propose([ask()._replace(prices=DEAR)])
        drafter.accept("s", [3])
    before, second._said = len(second.depths), OTHER
    for _ in range(3000):
        drafter.propose([ask()._replace(prices=DEAR)])
        drafter.accept("s", [2, 3, 4, 5])
    assert len(second.depths) > before + 1000


def test_the_second_ends_where_its_next_guess_would_not_be_worth_its_price() -> None:
    drafter, _, second = backed(UNSURE, OTHER)
    drafter.propose([ask()._replace(prices=CHEAP)])
    drafter.propose([ask()._replace(prices=DraftPrices(row=0.1, guess=0.2))])
    drafter.propose([ask()._replace(min_survival=0.9)])
    assert second.least[0] < 0.15 and 0.4 < second.least[1] < 0.6 and second.least[2] == 0.9


class Reads(Says):
    """Is shown the target's states."""

    taps = (1,)

    def read(self, output: TargetOutput, computed: Sequence[ComputedRows]) -> None:
        return


def test_a_second_drafter_rests_on_whatever_unknown_sequences_end() -> None:
    drafter = BackedDrafter(Continues("first", UNSURE), Reads("second", OTHER), vocab=VOCAB)
    drafter.begin("s", [1, 2, 3], SamplingParams(), tenant="a")

    def awake() -> int:
        """In how many places of many it is shown states."""
        shown = 0
        for _ in range(400):
            drafter.propose([ask()._replace(prices=DEAR._replace(keeping=0.3))])
            drafter.accept("s", [3])
            shown += drafter.taps is not None
        return shown

    assert 0 < awake() < 100
    drafter.end("unknown")
    assert awake() < 100


def test_under_a_law_a_draft_is_that_of_one_drafter_with_its_q() -> None:
    drafter, _, second = backed(UNSURE, Draft("", (1, 1), (-1, 0), (0.6, 0.4), "q", Q), samples=True)
    (draft,) = drafter.propose([ask(4, law=True)])
    assert draft.tokens == (1, 1) and draft.computed == 2
    assert draft.draft_probs is not None and np.array_equal(draft.draft_probs, Q)
    second._said = Draft("")
    (draft,) = drafter.propose([ask(4, law=True)])
    assert draft.tokens == (1,) and draft.computed == 0
    assert draft.draft_probs is not None and np.array_equal(draft.draft_probs, np.eye(VOCAB)[[1]])


# --- through the production path ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target and a draft model with random weights and one tokenizer."""
    target, draft = (save_model(tmp_path_factory.mktemp("model"), num_hidden_layers=layers) for layers in (2, 1))
    return target, draft


def requests(engine: wager.Engine, texts: Sequence[str]) -> list[Request]:
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=0.8, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=0.7, top_p=0.9, frequency_penalty=0.5, seed=4, ignore_eos=True),
    ]
    encode = engine.tokenizer.encode  # type: ignore[attr-defined]
    return [Request(f"r{i}", tuple(encode(text)), params[i % 3]) for i, text in enumerate(texts)]


TEXTS = ["one two three one two", "the quick brown fox", "the quick brown fox jumps"] * 2
WRITTEN = [
    "suffix..model:{0}",
    "suffix:tree..model:tree:{1}",
    "ngram//suffix..model:{1}+ngram",
    "model:{0}+ngram",
    "model:{1}+model:{0}+ngram",
    "model:tree:{0}",
    "ngram//model:{0}",
    "ngram//model:tree:{1}",
]


@pytest.mark.parametrize("written", WRITTEN)
def test_loaded_combinations_change_no_text(models: tuple[str, str], written: str) -> None:
    options = {"model": models[0], "max_rows": 32, "max_sequences": 4, "cache_tokens": 96}
    plain = load(wager.EngineConfig.from_options(**options, drafter="none"))
    engine = load(wager.EngineConfig.from_options(**options, drafter=written.format(*models), depth=4))
    (spec,) = engine.target.config.with_options(drafter=written.format(*models)).speculation.drafters
    assert engine.drafter_name == spec.label
    wanted = plain.generate(requests(plain, TEXTS), concurrency=3)
    got = engine.generate(requests(engine, TEXTS), concurrency=3)
    assert [each.token_ids for each in got] == [each.token_ids for each in wanted]
    assert sum(each.stats.accepted for each in got) > 0
    assert engine.memory_plan.drafter > 0 and engine.drafter_name != "none"
    warm = engine.generate(requests(engine, TEXTS), concurrency=6)
    assert [each.token_ids for each in warm] == [each.token_ids for each in wanted]
    engine.generate([replace(each, id=f"{each.id}-again") for each in requests(engine, TEXTS)][:1])


def test_a_model_that_guesses_for_itself_is_always_right(models: tuple[str, str]) -> None:
    """A chain is; a tree spends guesses on what else a model might say that is only like the target."""
    options = {"model": models[0], "max_rows": 32, "max_sequences": 4}
    for written in ("model:{0}+ngram", "model:tree:{0}", "model:{0}+model:{1}"):
        engine = load(wager.EngineConfig.from_options(**options, drafter=written.format(*models), depth=4))
        (answer, *_) = engine.generate(requests(engine, TEXTS)[1:2])
        chain = ":tree" not in written
        assert answer.stats.accepted == answer.stats.drafted if chain else answer.stats.accepted > 5
