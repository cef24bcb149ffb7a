"""Draft models with another vocabulary: by the tokens that both have, and by way of text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from corpus import TEXTS as CORPUS
from tokenizer_models import SPECIAL, train

from wager.draft.model import DraftModel
from wager.draft.other_vocabulary import IntersectionSampler, SharedIds, TextRouteDrafter
from wager.errors import TokenizerError
from wager.kernels.base import TargetOutput
from wager.models.tokenizer import Tokenizer
from wager.testing import ToyDistribution, ToyOracle, ToyTarget
from wager.types import NO_TENANT, Draft, DraftRequest, PackedBatch, SamplingParams
from wager.verify.distribution import process

# --- by the tokens that both have ---------------------------------------------------------------------------

WORDS = [chr(ord("a") + i) for i in range(24)] + ["ab", "abc", "<s>", "<end>"]
VOCAB = len(WORDS)
LAW = ToyDistribution(vocab=VOCAB)
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=8, top_p=0.9),
    SamplingParams(temperature=1.1, frequency_penalty=0.8, repetition_penalty=1.3, logit_bias={3: 2.0}),
]


class Words:
    """A vocabulary of a few words; text is encoded letter by letter."""

    def __init__(self, words: Sequence[str], eos: int) -> None:
        self._words, self.eos_ids, self.vocab_size = list(words), (eos,), len(words)

    def token(self, token_id: int) -> str:
        return self._words[token_id]

    def token_bytes(self, token_id: int) -> bytes:
        return self._words[token_id].encode()

    def is_special(self, token_id: int) -> bool:
        return self._words[token_id].startswith("<")

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [self._words.index(letter) for letter in text if letter in self._words]


ORDER = np.random.default_rng(3).permutation(VOCAB).tolist()  # draft id -> target id


class Permuted(ToyTarget):
    """The target itself with other ids, for texts that both spell alike."""

    def __init__(self) -> None:
        super().__init__(LAW, num_blocks=200)

    def forward(self, batch: PackedBatch) -> TargetOutput:
        order = np.array(ORDER)
        output = super().forward(replace(batch, tokens=order[batch.tokens].astype(np.int32)))
        logits = output.logits[:, order]
        return TargetOutput(logits, logits.argmax(axis=1))


TARGET, OTHER = Words(WORDS, 27), Words([WORDS[i] for i in ORDER], ORDER.index(27))


def permuted(**options: object) -> DraftModel:
    model = Permuted()
    sampler = IntersectionSampler(model.vocab, vocab=VOCAB, shared=SharedIds(TARGET, OTHER))
    return DraftModel(model, vocab=VOCAB, sampler=sampler, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", PARAMS)
def test_the_target_itself_with_other_ids_is_always_right(params: SamplingParams) -> None:
    """Also with noise, which is that of the target's ids, through acceptance and refusal."""
    rng = random.Random(2)
    drafter, known = permuted(), [1, 2, 3]
    drafter.begin("s", known, params)
    for _ in range(15):
        ask = DraftRequest("s", len(known), 4, params, 7, 1)
        (draft,) = drafter.propose([ask])
        assert draft.tokens == tuple(ToyOracle(LAW).next_tokens(ask, known, 3))
        told = [*draft.tokens[: rng.randint(0, 4)], rng.randrange(VOCAB)]
        known += told
        drafter.accept("s", told)
    drafter.end("s")
    drafter.block_pool.check({})


def test_its_q_is_that_of_the_targets_ids() -> None:
    drafter, params = permuted(), SamplingParams(temperature=1.0, top_p=0.9)
    drafter.begin("s", [1, 2, 3], params)
    (draft,) = drafter.propose([DraftRequest("s", 3, 3, params, 5, needs_draft_probs=True)])
    assert draft.draft_probs is not None
    for depth, row in enumerate(draft.draft_probs):
        whole = process(LAW([1, 2, 3, *draft.tokens[:depth]]), params).probabilities(VOCAB)
        assert np.array_equal(row, whole) and row[draft.tokens[depth]] > 0


def test_trees_in_another_vocabulary() -> None:
    one, other = permuted(trees=True), DraftModel(ToyTarget(LAW), trees=True)
    for params in PARAMS:
        for drafter in (one, other):
            drafter.begin("s", [4, 5], params)
        ask = DraftRequest("s", 2, 7, params, 3)
        ((mine,), (theirs,)) = one.propose([ask]), other.propose([ask])
        assert (mine.tokens, mine.parents) == (theirs.tokens, theirs.parents)


def test_tokens_that_only_one_has() -> None:
    """`ab` and `abc` are spelled; the draft model's own words are never guessed, and q is 0 for the target's."""
    other = Words([*WORDS[:24], "<s>", "</s>", "x", "yy", "zz"], 25)
    shared = SharedIds(TARGET, other)
    assert shared.own(24) == [0, 1] and shared.own(25) == [0, 1, 2] and shared.own(3) == [3]
    assert shared.own(26) == [24] and shared.own(27) == [25]  # special tokens: as they are written; the end as the end
    assert shared.own_id(24) == -1 and shared.verified_id(25) == 27
    sampler = IntersectionSampler(29, vocab=VOCAB, shared=shared)
    drafter = DraftModel(ToyTarget(ToyDistribution(vocab=29)), vocab=VOCAB, sampler=sampler)
    params = SamplingParams(temperature=1.5)
    for seed in range(30):
        drafter.begin("s", [24, 1, 25, 2], params)
        ask = DraftRequest("s", 4, 4, params, seed, needs_draft_probs=bool(seed % 2))
        (draft,) = drafter.propose([ask])
        assert len(draft) == 4 and not {24, 25} & set(draft.tokens) and max(draft.tokens) < VOCAB
        assert draft.draft_probs is None or not draft.draft_probs[:, [24, 25]].any()
        drafter.accept("s", [24, draft.tokens[0]])
        assert drafter._states["s"].tokens == [0, 1, 1, 0, 1, 2, 2, 0, 1, *shared.own(draft.tokens[0])]


def test_vocabularies_with_nothing_in_common_are_refused() -> None:
    with pytest.raises(TokenizerError, match="has 1 of the target's 28 tokens"):
        SharedIds(TARGET, Words(["<end>", "q1", "q2"], 0))


# --- by way of text -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    loaded = []
    for pre in ("gpt-2", "llama-bpe"):
        path = tmp_path_factory.mktemp(pre)
        train(pre).save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(f'{{"eos_token": "{SPECIAL[1]}"}}')
        loaded.append(Tokenizer.load(path))
    return loaded[0], loaded[1]


class Says:
    """A draft model that says what it is told to, in its own ids."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.says: list[int] = []
        self.calls: list[str] = []

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        self.told = list(tokens)
        self.calls.append("begin")

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        self.told += tokens
        self.calls.append("accept")

    def rewind(self, seq_id: str, length: int) -> None:
        assert 0 < length < len(self.told)
        del self.told[length:]
        self.calls.append("rewind")

    def end(self, seq_id: str) -> None:
        self.told = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        (request,) = requests
        assert request.position == len(self.told) and request.params.greedy
        guesses = self.says[: request.depth]
        scores = [0.9 ** (1 + i) for i in range(len(guesses))]
        return [Draft.chain("s", guesses, drafter="model", scores=scores)]


def ask(known: Sequence[int], depth: int) -> DraftRequest:
    return DraftRequest("s", len(known), depth, SamplingParams(temperature=0.7), 1)


@pytest.mark.parametrize("text", [*CORPUS[:6], "naïve café — 東京 🙂🙂 done.\n\nNext  line\twith   spaces"])
def test_what_the_draft_model_says_is_said_in_the_targets_tokens(text: str, tokenizers: tuple) -> None:
    target, other = tokenizers
    whole, model = target.encode(text, special=False), Says()
    drafter = TextRouteDrafter(model, target, other)  # type: ignore[arg-type]
    drafter.begin("s", whole[:1], SamplingParams())
    known, guessed, right = whole[:1], 0, 0
    rng = random.Random(text)
    while len(known) < len(whole):
        rest = b"".join(map(target.token_bytes, whole[len(known) :])).decode(errors="ignore")
        model.says = other.encode(rest, special=False)
        (draft,) = drafter.propose([ask(known, 5)])
        assert b"".join(map(other.token_bytes, model.told)) == b"".join(map(target.token_bytes, known)) or "�" in rest
        assert len(draft) <= 5 and draft.drafter == "slem"
        assert list(draft.scores) == sorted(draft.scores, reverse=True) and len(draft.scores) == len(draft)
        said = rest.encode()
        spelled = b"".join(map(target.token_bytes, draft.tokens))
        assert said.startswith(spelled) or not rest
        follows = whole[len(known) : len(known) + len(draft)]
        guessed += len(draft)
        right += sum(1 for guess, token in zip(draft.tokens, follows, strict=False) if guess == token)
        step = rng.randint(1, 3)
        drafter.accept("s", whole[len(known) : len(known) + step])
        known = whole[: len(known) + step]
    assert guessed == 0 or right > 0.85 * guessed
    assert model.calls.count("begin") <= 2  # again where the first token merges with what comes


def test_what_is_told_is_what_the_whole_text_is_in_the_other_vocabulary(tokenizers: tuple) -> None:
    """But for where text was cut off within a word; and most of the cache is kept."""
    target, other = tokenizers
    text = " ".join(CORPUS)[:3000]
    whole, model = target.encode(text, special=False), Says()
    drafter = TextRouteDrafter(model, target, other)  # type: ignore[arg-type]
    drafter.begin("s", whole[:20], SamplingParams())
    for place in range(20, 300, 3):
        drafter.propose([ask(whole[:place], 3)])
        drafter.accept("s", whole[place : place + 3])
    told = model.told
    wanted = other.encode(b"".join(map(target.token_bytes, whole[:299])).decode(errors="ignore"), special=False)
    same = next((i for i, (a, b) in enumerate(zip(told, wanted, strict=False)) if a != b), len(wanted))
    assert same > len(wanted) - 15
    assert model.calls.count("begin") == 1 and model.calls.count("rewind") < 60


def test_special_tokens_are_taken_by_what_they_are(tokenizers: tuple) -> None:
    target, other = tokenizers
    start, end = (target.encode(each)[0] for each in SPECIAL)
    model = Says()
    drafter = TextRouteDrafter(model, target, other)  # type: ignore[arg-type]
    prompt = [start, *target.encode("hello there", special=False)]
    drafter.begin("s", prompt, SamplingParams())
    model.says = [*other.encode(" now", special=False), min(other.eos_ids), 300]
    (draft,) = drafter.propose([ask(prompt, 8)])
    assert model.told[0] == other.encode(SPECIAL[0])[0]
    assert draft.tokens[-1] == end and target.decode(draft.tokens[:-1]) == " now"
    model.says = [other.encode(SPECIAL[0])[0]]
    assert drafter.propose([ask(prompt, 8)])[0].tokens == ()


@pytest.mark.parametrize("told", [[], [9, 3]])
def test_a_rewound_draft_model_goes_on_from_there(told: list[int]) -> None:
    """Also at the end of a block, where it is told more before it drafts."""
    drafter, known = DraftModel(ToyTarget(LAW, num_blocks=20)), list(range(20)) * 2
    drafter.begin("s", known, SamplingParams())
    for length in (37, 33, 32, 31, 17, 3):
        request = DraftRequest("s", len(known), 4, SamplingParams(), 0)
        assert drafter.propose([request])[0].tokens == tuple(ToyOracle(LAW).next_tokens(request, known, 1))
        drafter.accept("s", [7, 8])
        drafter.rewind("s", length)
        if told:
            drafter.accept("s", told)
        drafter.block_pool.check()
        known = known[:length] + told
    drafter.end("s")
    drafter.block_pool.check({})


# --- through the production path ----------------------------------------------------------------------------
