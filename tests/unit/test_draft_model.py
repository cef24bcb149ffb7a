"""The draft model: whatever is asked, skipped, accepted or refused, its guesses are those of its own closed form."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from wager.draft.base import Drafter
from wager.draft.combined import InnerDrafter
from wager.draft.model import DraftModel
from wager.draft.ngram import NgramDrafter
from wager.draft.vocabulary import check_same_vocabulary
from wager.errors import TokenizerError
from wager.kernels.arrays import Array
from wager.kernels.base import BLOCK_SIZE, TargetOutput
from wager.kernels.cpu import Kernels
from wager.kernels.noise import argmax_gumbel
from wager.testing import (
    AdversaryDrafter,
    FailingDrafter,
    OracleDrafter,
    OutsideVocabularyDrafter,
    OverlongDrafter,
    RandomTreeDrafter,
    ToyDistribution,
    ToyOracle,
    ToyTarget,
)
from wager.types import Draft, DraftRequest, PackedBatch, SamplingParams
from wager.verify.distribution import History, process

VOCAB = 32
LAW = ToyDistribution(vocab=VOCAB)
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=8, top_p=0.9),
    SamplingParams(repetition_penalty=1.4, presence_penalty=0.5),
    SamplingParams(temperature=1.1, frequency_penalty=0.8, min_p=0.02, logit_bias={3: 2.0}),
]


def _prompt(length: int, *, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def _seen(ask: DraftRequest, known: Sequence[int], prompt: int) -> tuple[int, ...]:
    """What the draft model's law says, computed without a cache."""
    return tuple(ToyOracle(LAW).next_tokens(ask, known, prompt))


class _Text:
    """One sequence as an engine would keep it."""

    def __init__(self, name: str, params: SamplingParams, *, length: int, seed: int) -> None:
        self.name, self.params, self.prompt, self.seed = name, params, length, seed
        self.known = _prompt(length, seed=seed)
        self.choice = seed % 3

    def ask(self, depth: int, *, law: bool = False) -> DraftRequest:
        return DraftRequest(self.name, len(self.known), depth, self.params, self.seed, self.choice, law)

    def accept(self, drafter: DraftModel, tokens: Sequence[int]) -> None:
        self.known += tokens
        drafter.accept(self.name, tokens)


INNER: dict[str, Callable[[], Drafter]] = {
    "ngram": NgramDrafter,
    "right": lambda: OracleDrafter(ToyOracle(LAW)),
    "wrong": lambda: AdversaryDrafter(VOCAB, oracle=ToyOracle(LAW)),
    "trees": lambda: RandomTreeDrafter(VOCAB, oracle=ToyOracle(LAW)),
    "invalid": lambda: OutsideVocabularyDrafter(VOCAB),
    "overlong": OverlongDrafter,
    "failing": lambda: FailingDrafter(calls=30),
    "another model": lambda: DraftModel(ToyTarget(NEAR, num_blocks=30, max_rows=16), prefix_cache=False),
    "a staged model": lambda: DraftModel(ToyTarget(NEAR, num_blocks=30), inner=_inner("ngram")),
    "a model of trees": lambda: DraftModel(ToyTarget(NEAR, num_blocks=30), trees=True),
}
NEAR = replace(LAW, drift=0.3, salt=4)


def _inner(name: str) -> InnerDrafter | None:
    return InnerDrafter(INNER[name](), vocab=VOCAB) if name else None


@pytest.mark.parametrize("pages", [200, 14])
@pytest.mark.parametrize("max_rows", [64, 5])
@pytest.mark.parametrize("inner", ["", *INNER])
def test_guesses_are_its_own_law_through_any_history(pages: int, max_rows: int, inner: str) -> None:
    rng = random.Random(pages + max_rows)
    target = ToyTarget(LAW, num_blocks=pages, max_rows=max_rows, max_sequences=3)
    drafter = DraftModel(target, inner=_inner(inner))
    texts: list[_Text] = []
    declined = guessed = 0
    for step in range(90 if inner else 150):
        if len(texts) < 5 and rng.random() < 0.4:
            seed = step if rng.random() < 0.5 else 1  # half of them share a prompt
            texts.append(_Text(f"s{step}", rng.choice(PARAMS), length=rng.choice((1, 17, 40)), seed=seed))
            drafter.begin(texts[-1].name, texts[-1].known, texts[-1].params)
        chosen = [text for text in texts if rng.random() < 0.7]
        asks = [text.ask(rng.randint(0, 5)) for text in chosen]
        drafts = drafter.propose(asks)
        assert [draft.seq_id for draft in drafts] == [ask.seq_id for ask in asks]
        for text, ask, draft in zip(chosen, asks, drafts, strict=True):
            if len(draft) == 0:
                declined += ask.depth > 0
                continue
            guessed += len(draft)
            assert draft.tokens == _seen(ask, text.known, text.prompt) and len(draft.scores) == ask.depth
        for text in texts:  # some guesses come true, then something else is said; those not asked go on as well
            draft = next((d for d in drafts if d.seq_id == text.name), Draft(""))
            right = rng.randint(0, len(draft))
            half = rng.randint(0, right)
            text.accept(drafter, draft.tokens[:half])
            text.accept(drafter, draft.tokens[half:right])
            if rng.random() < 0.8:
                text.accept(drafter, [rng.randrange(VOCAB) for _ in range(rng.randint(1, 2))])
            drafter.block_pool.check()
        for text in [text for text in texts if len(text.known) > 70 or rng.random() < 0.03]:
            drafter.end(text.name)
            texts.remove(text)
    assert guessed > (100 if inner else 300) and (declined > (3 if inner else 10)) == (pages == 14)
    for text in texts:
        drafter.end(text.name)
    drafter.block_pool.check({})
    assert drafter.block_pool.num_free_blocks == pages


@pytest.mark.parametrize("params", PARAMS)
def test_under_a_law_it_draws_privately_and_says_from_what(params: SamplingParams) -> None:
    drafter = DraftModel(ToyTarget(LAW))
    text = _Text("s", params, length=20, seed=5)
    drafter.begin("s", text.known, params)
    text.accept(drafter, [3, 3])
    ask = text.ask(3, law=True)
    (draft,) = drafter.propose([ask])
    if params.plain and params.greedy:
        assert draft.draft_probs is None and draft.tokens == _seen(ask, text.known, text.prompt)
        return
    history = History(text.known[:20], text.known[20:])
    path: list[int] = []
    assert draft.draft_probs is not None and draft.draft_probs.shape == (3, VOCAB)
    for depth, (token, row) in enumerate(zip(draft.tokens, draft.draft_probs, strict=True), 1):
        shaped = process(LAW([*text.known, *path]), params, history.extended(path))
        assert np.array_equal(row, shaped.probabilities(VOCAB))
        assert token == shaped.choose(text.seed, ask.position + depth - 1, text.choice, private=depth)
        path.append(token)
    assert drafter.samples


class _Counting(ToyTarget):
    """Records the rows of every pass."""

    def __init__(self, **options: int) -> None:
        super().__init__(LAW, **options)
        self.widths: list[int] = []

    def forward(self, batch: PackedBatch) -> TargetOutput:
        self.widths.append(batch.rows)
        return super().forward(batch)


def test_k_guesses_cost_k_passes_and_full_acceptance_owes_two_tokens() -> None:
    target = _Counting()
    drafter = DraftModel(target)
    texts = [_Text(name, PARAMS[0], length=10, seed=7) for name in ("a", "b")]
    for text in texts:
        drafter.begin(text.name, text.known, text.params)
    drafts = drafter.propose([text.ask(3) for text in texts])
    assert target.widths == [20, 2, 2]
    texts[0].accept(drafter, [*drafts[0].tokens, 9])  # all right: the last guess was never fed
    texts[1].accept(drafter, [(drafts[1].tokens[0] + 1) % VOCAB])  # all wrong
    target.widths.clear()
    drafts = drafter.propose([text.ask(2) for text in texts])
    assert target.widths == [3, 2]
    texts[0].accept(drafter, [drafts[0].tokens[0], (drafts[0].tokens[1] + 1) % VOCAB])
    target.widths.clear()
    drafter.propose([texts[0].ask(1)])
    assert target.widths == [1]


def _passes(inner: InnerDrafter | None, params: SamplingParams, *, rounds: int = 12, depth: int = 6) -> int:
    """Of a drafter whose guesses all come true."""
    target = _Counting()
    drafter = DraftModel(target, inner=inner)
    text = _Text("s", params, length=12, seed=4)
    drafter.begin("s", text.known, params)
    for _ in range(rounds):
        ask = text.ask(depth)
        (draft,) = drafter.propose([ask])
        assert draft.tokens == _seen(ask, text.known, text.prompt)
        text.accept(drafter, draft.tokens)
    return len(target.widths)


@pytest.mark.parametrize("params", PARAMS)
def test_an_inner_drafter_that_is_right_saves_passes(params: SamplingParams) -> None:
    alone = _passes(None, params)
    assert alone == 12 * 6 and _passes(_inner("right"), params) == 12
    assert 12 < _passes(_inner("trees"), params) < 0.8 * alone
    assert _passes(_inner("wrong"), params) == alone >= _passes(_inner("failing"), params)
    assert _passes(_inner("another model"), params) < alone


def test_an_inner_drafter_that_fails_is_hardly_asked(caplog: pytest.LogCaptureFixture) -> None:
    inner = _inner("failing")
    assert inner is not None
    _passes(inner, PARAMS[0], rounds=20)
    assert {record.message.partition(",")[0] for record in caplog.records} == {"Drafter 'failing'"}
    assert 2 <= len(caplog.records) <= 4, "the 1st, 2nd, 4th and 8th failure of 100 passes"


def test_a_truth_that_overtakes_a_cut_draft_is_recognised() -> None:
    target = _Counting()
    drafter = DraftModel(target)
    text = _Text("s", PARAMS[0], length=30, seed=3)
    drafter.begin("s", text.known, text.params)
    (draft,) = drafter.propose([text.ask(4)])
    text.accept(drafter, draft.tokens[:1])
    text.accept(drafter, draft.tokens[1:3])  # the engine verified fewer guesses than were made; its own token agreed
    target.widths.clear()
    ask = text.ask(3)
    assert drafter.propose([ask])[0].tokens == _seen(ask, text.known, text.prompt)
    assert sum(target.widths) <= 4
    assert drafter.propose([ask])[0].tokens == _seen(ask, text.known, text.prompt)  # asked twice, nothing accepted


def test_pages_of_refuted_guesses_are_given_back_and_the_last_token_stays_open() -> None:
    drafter = DraftModel(ToyTarget(LAW, num_blocks=8))
    text = _Text("s", PARAMS[0], length=BLOCK_SIZE - 3, seed=3)
    drafter.begin("s", text.known, text.params)
    (draft,) = drafter.propose([text.ask(BLOCK_SIZE)])
    assert drafter.block_pool.num_free_blocks == 6
    text.accept(drafter, draft.tokens[:3])  # known up to the page's end; the rows behind may still turn out true
    assert drafter.block_pool.num_free_blocks == 6
    assert drafter.block_pool.match_prefix("probe", [*text.known, 0]) == 0
    text.accept(drafter, [(draft.tokens[3] + 1) % VOCAB])
    assert drafter.block_pool.num_free_blocks == 7


def test_equal_prompts_are_computed_once() -> None:
    target = _Counting()
    drafter = DraftModel(target)
    for name in ("a", "b"):
        text = _Text(name, PARAMS[0], length=3 * BLOCK_SIZE + 1, seed=2)
        drafter.begin(name, text.known, text.params)
        drafter.propose([text.ask(1)])
        text.accept(drafter, [1])
    assert target.widths == [3 * BLOCK_SIZE + 1, 1]


def test_it_declines_beyond_its_context_and_its_cache() -> None:
    drafter = DraftModel(ToyTarget(LAW, num_blocks=2), max_context=24)
    text = _Text("s", PARAMS[0], length=20, seed=2)
    drafter.begin("s", text.known, text.params)
    assert len(drafter.propose([text.ask(9)])[0]) == 5  # the last guess is never fed: 20 + 4 positions
    text.accept(drafter, [1] * 5)
    assert len(drafter.propose([text.ask(3)])[0]) == 0
    other = _Text("t", PARAMS[0], length=10, seed=3)
    drafter.begin("t", other.known, other.params)
    assert len(drafter.propose([other.ask(3)])[0]) == 0
    drafter.end("s")
    assert len(drafter.propose([other.ask(3)])[0]) == 3


def test_beginning_again_starts_afresh() -> None:
    drafter = DraftModel(ToyTarget(LAW, num_blocks=8))
    for seed in (1, 2, 3):
        text = _Text("s", PARAMS[1], length=60, seed=seed)
        drafter.begin("s", text.known, text.params)
        ask = text.ask(3)
        assert drafter.propose([ask])[0].tokens == _seen(ask, text.known, text.prompt)
    drafter.end("s")
    drafter.end("s")
    drafter.block_pool.check({})


def test_scores_are_the_probability_of_the_whole_path_under_its_own_law() -> None:
    drafter = DraftModel(ToyTarget(LAW))
    for number, params in enumerate(PARAMS):
        text = _Text(f"s{number}", params, length=5, seed=number)
        drafter.begin(text.name, text.known, text.params)
        (draft,) = drafter.propose([text.ask(3)])
        survival, known = 1.0, list(text.known)
        for token, score in zip(draft.tokens, draft.scores, strict=True):
            logits = LAW(known).astype(np.float64)
            survival *= float(np.exp(logits[token]) / np.exp(logits).sum())
            assert score == pytest.approx(survival, rel=1e-4)
            known.append(token)


@pytest.mark.parametrize("law", [False, True])
def test_a_chain_ends_after_the_guess_that_is_in_doubt(law: bool) -> None:
    """And that guess stays: dropping it would make what is verified depend on the draw it is (verification under an
    exact rule)."""
    drafter = DraftModel(ToyTarget(LAW))
    ended = set()
    for number in range(30):
        text = _Text(f"s{number}", SamplingParams(temperature=1.0), length=5, seed=number)
        drafter.begin(text.name, text.known, text.params)
        whole = drafter.propose([text.ask(5, law=law)])[0]
        (draft,) = drafter.propose([replace(text.ask(5, law=law), min_survival=0.05)])
        assert draft.tokens == whole.tokens[: len(draft)]
        assert all(score >= 0.05 for score in draft.scores[:-1])
        assert len(draft) == 5 or draft.scores[-1] < 0.05
        assert draft.draft_probs is None or len(draft.draft_probs) == len(draft)
        ended.add(len(draft))
    assert len(ended) > 2


class _Kernels(Kernels):
    """Samples as the definition says, and counts."""

    calls = 0

    def sample(self, logits: Array, rows: Array, temps: Array, seeds: Array, at: Array, choices: Array) -> Array:
        self.calls += 1
        unsigned = seeds.view(np.uint64)
        tokens = [
            argmax_gumbel(logits[row], float(temps[i]), int(unsigned[i]), int(at[i]), int(choices[i]))
            for i, row in enumerate(rows.tolist())
        ]
        return np.array(tokens, np.int32)


def test_native_sampling_serves_exactly_the_plainly_sampled() -> None:
    kernels = _Kernels()
    drafter = DraftModel(ToyTarget(LAW), kernels=kernels)
    texts = [_Text(f"s{i}", params, length=9, seed=2**63 + i) for i, params in enumerate(PARAMS)]
    for text in texts:
        drafter.begin(text.name, text.known, text.params)
    asks = [text.ask(3) for text in texts]
    for text, ask, draft in zip(texts, asks, drafter.propose(asks), strict=True):
        assert draft.tokens == _seen(ask, text.known, text.prompt)
    assert kernels.calls == 3


@pytest.mark.parametrize(("own", "verified"), [(40, VOCAB), (20, VOCAB)])
def test_ids_and_laws_have_the_verified_models_width(own: int, verified: int) -> None:
    drafter = DraftModel(
        ToyTarget(ToyDistribution(vocab=own)), vocab=verified, kernels=_Kernels() if own > verified else None
    )  # type: ignore[arg-type]
    for seed in range(12):
        text = _Text(f"s{seed}", SamplingParams(temperature=0.0 if seed % 2 else 1.5), length=4, seed=seed)
        drafter.begin(text.name, [1, 2, 3, 4], text.params)
        (draft,) = drafter.propose([text.ask(4)])
        assert all(token < min(own, verified) for token in draft.tokens)
        (draft,) = drafter.propose([text.ask(2, law=True)])
        assert draft.draft_probs is None or draft.draft_probs.shape == (2, verified)


class _Damaged(ToyTarget):
    def forward(self, batch: PackedBatch) -> TargetOutput:
        output = super().forward(batch)
        return TargetOutput(output.logits * float("nan"), np.full_like(output.greedy_tokens, -1))


@pytest.mark.parametrize("params", PARAMS)
def test_logits_that_are_not_numbers_decline_their_ask(params: SamplingParams) -> None:
    drafter = DraftModel(_Damaged(LAW))
    drafter.begin("s", [1, 2], params)
    (draft,) = drafter.propose([DraftRequest("s", 2, 2, params, 0)])
    assert draft.tokens == ()


class _Words:
    def __init__(self, *words: str) -> None:
        self.vocab_size = len(words)
        self._words = words

    def token(self, token_id: int) -> str:
        return self._words[token_id]


def test_vocabularies_must_agree() -> None:
    check_same_vocabulary(_Words("a", "b"), _Words("a", "b"))
    with pytest.raises(TokenizerError, match=r"id 1 is 'x', but 'b'"):
        check_same_vocabulary(_Words("a", "b", "c"), _Words("a", "x"))
    with pytest.raises(TokenizerError, match=r"id 2 is 'c', and the target has none"):
        check_same_vocabulary(_Words("a", "b"), _Words("a", "b", "c"))
    with pytest.raises(TokenizerError, match=r"there is no id 2, which is 'c' in the target"):
        check_same_vocabulary(_Words("a", "b", "c"), _Words("a", "b"))
