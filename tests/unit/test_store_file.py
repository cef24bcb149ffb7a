"""A static store: what it holds, what its lookup finds, and files that are refused."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizer_models import save_model

import wager
from wager.draft import store_file
from wager.draft.lookup import LookupDrafter, LookupSources, lookup_table
from wager.draft.store_file import LARGEST_VOCABULARY, StoreFile, build_store
from wager.draft.vocabulary import vocabulary_digest
from wager.errors import UsageError, WagerError
from wager.loading.load import load
from wager.models import hub
from wager.types import DraftRequest, Request, SamplingParams

PARAMS = SamplingParams()


def _store(path: Path, answers: list[tuple[list[int], list[int]]], vocab: int = 100, **options: int) -> StoreFile:
    build_store(answers, path, vocab=vocab, tokenizer="t", **options)  # type: ignore[arg-type]
    return StoreFile(path, vocab=vocab, tokenizer="t")


def _texts(vocab: int, count: int) -> list[tuple[list[int], list[int]]]:
    """Texts of a Markov chain that mostly goes on by 1, and sometimes anywhere."""
    rng, texts = random.Random(1), []
    for _ in range(count):
        text = [rng.randrange(vocab)]
        for _ in range(60):
            text.append((text[-1] + 1) % vocab if rng.random() < 0.8 else rng.randrange(vocab))
        texts.append((text[:3], text[3:]))
    return texts


def test_the_likeliest_follower_of_the_longest_context_comes_first(tmp_path: Path) -> None:
    answers = [([1, 2], [3, 4])] * 8 + [([9, 2], [5, 6])] * 4 + [([2], [5])] * 8
    store = _store(tmp_path / "s", answers)
    size, [best, *_] = store.continuations([1, 2])
    assert (size, best.token) == (2, 3)
    size, [best, other] = store.continuations([7, 2])
    assert (size, best.token, other.token) == (1, 5, 3)
    assert best.probability / 255 == pytest.approx(12 / 20, abs=0.15)
    assert store.continuations([55]) == (0, []) and store.continuations([]) == (0, [])


def test_prompts_are_context_and_not_counted(tmp_path: Path) -> None:
    store = _store(tmp_path / "s", [([1, 2, 3, 4], [5])])
    assert store.continuations([4])[1][0].token == 5
    assert store.continuations([1]) == (0, []) and store.header.tokens == 1


def test_probabilities_are_about_how_often_it_is_right(tmp_path: Path) -> None:
    texts = _texts(50, 300)
    store = _store(tmp_path / "s", texts[:200])
    right: Counter[bool] = Counter()
    stated = 0.0
    for prompt, answer in texts[200:]:
        text = prompt + answer
        for end in range(3, len(text)):
            _, found = store.continuations(text[:end])
            right[found[0].token == text[end]] += 1
            stated += found[0].probability / 255
    assert right[True] / right.total() == pytest.approx(0.8, abs=0.05)
    assert stated / right.total() == pytest.approx(right[True] / right.total(), abs=0.08)


def test_a_bounded_store_keeps_the_most_useful(tmp_path: Path) -> None:
    texts = _texts(50, 100)
    whole, small = _store(tmp_path / "a", texts), _store(tmp_path / "b", texts, max_bytes=2000)
    assert small.header.entries < whole.header.entries / 5
    assert os.path.getsize(tmp_path / "b") < 3000
    follow = [small.continuations([token])[1] for token in range(50)]
    assert sum(bool(found) and found[0].token == (token + 1) % 50 for token, found in enumerate(follow)) >= 45


@pytest.mark.parametrize("options", [{}, {"max_bytes": 4000}])
def test_what_is_counted_and_filled_at_a_time_changes_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, int]
) -> None:
    texts = _texts(50, 100)
    _store(tmp_path / "a", texts, **options)
    monkeypatch.setattr(store_file, "_RUN", 100)
    _store(tmp_path / "b", texts, **options)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_text_of_one_token_has_no_context(tmp_path: Path) -> None:
    assert _store(tmp_path / "s", [([], [5])]).continuations([5]) == (0, [])


def test_every_kept_pair_is_found_with_any_hash_collisions(tmp_path: Path) -> None:
    """A table with hardly any free slot still finds what it has, natively too."""
    rng = random.Random(0)
    answers = [([], [rng.randrange(2000) for _ in range(400)]) for _ in range(10)]
    store = _store(tmp_path / "s", answers, vocab=2000)
    drafter = LookupDrafter("store", LookupSources(store=store))
    for _, text in answers[:3]:
        for end in range(1, len(text)):
            _, found = store.continuations(text[:end])
            assert found
            drafter.begin("s", text[:end], PARAMS)
            [draft] = drafter.propose([DraftRequest("s", end, 1, PARAMS, 0)])
            assert draft.tokens in ((found[0].token,), ())


@pytest.mark.parametrize(
    ("answers", "vocab", "message"),
    [
        ([], 10, "no answers"),
        ([([1], [])], 10, "no answers"),
        ([([1], [10])], 10, "token id outside 0 to 9"),
        ([([1], [-1])], 10, "token id outside 0 to 9"),
        ([([1], [2])], LARGEST_VOCABULARY + 1, "cannot hold"),
    ],
)
def test_what_cannot_be_counted_is_refused(
    answers: list[tuple[list[int], list[int]]], vocab: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        build_store(answers, tmp_path / "s", vocab=vocab, tokenizer="t")
    assert not list(tmp_path.iterdir())


# ---- files that are refused ------------------------------------------------------------------------------------------


def _flip(position: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def _header(**changes: object) -> Callable[[bytes], bytes]:
    """Changes values of the header, with the digest that belongs to it."""

    def change(data: bytes) -> bytes:
        length = int.from_bytes(data[8:16], "little")
        text = json.dumps({**json.loads(data[48 : 48 + length]), **changes}).encode()
        return data[:8] + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text + data[48 + length :]

    return change


DAMAGES: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda data: data[:-8], "damaged: it has"),
    (lambda data: b"", "is no store"),
    (lambda data: b"GGUF" + data[4:], "is no store"),
    (lambda data: data[:40], "damaged"),
    (lambda data: data + b"\0" * 8, "damaged: it has"),
    (_flip(60), "header does not have the digest"),
    (_flip(-20), "data do not have the digest"),
    (_header(format=2), "has format 2"),
    (_header(longest=9), "contexts of 9 tokens"),
    (_header(slots="x"), "not as this wager writes it"),
    (_header(homes=1 << 40), "damaged"),
    (_header(unknown=1), "not as this wager writes it"),
]


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "answers.store"
    _store(path, _texts(50, 5))
    whole = path.read_bytes()
    for damage, message in DAMAGES:
        path.write_bytes(damage(whole))
        with pytest.raises(UsageError, match=message) as error:
            StoreFile(path, vocab=100, tokenizer="t")
        assert "answers.store" in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        build_store([([1], [2])], tmp_path / "no" / "s", vocab=10, tokenizer="t")
    with pytest.raises(UsageError, match=r"absent\.store cannot be read"):
        StoreFile(tmp_path / "absent.store", vocab=100, tokenizer="t")
    with pytest.raises(UsageError, match="cannot be read"):
        StoreFile(tmp_path, vocab=100, tokenizer="t")


def test_a_table_without_a_free_slot_at_its_end_is_refused_natively() -> None:
    for slots, homes in ((np.ones(4, np.uint64), 3), (np.zeros(4, np.uint64), 4), (np.zeros(0, np.uint64), 0)):
        store = SimpleNamespace(slots=slots, header=SimpleNamespace(homes=homes))
        with pytest.raises(ValueError, match="the last slot must be free"):
            lookup_table("store", LookupSources(store=store))  # type: ignore[arg-type]


# ---- through an engine -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights and a trained tokenizer."""
    return Path(save_model(tmp_path_factory.mktemp("model")))


def test_an_engine_drafts_from_a_store_of_its_own_answers_and_refuses_another_tokenizers(
    directory: Path, tmp_path: Path
) -> None:
    config = wager.EngineConfig.from_options(model=str(directory), max_rows=32, max_sequences=4, drafter="none")
    plain = load(config)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [Request(f"r{at}", (5 + at, 6, 7), params) for at in range(4)]
    answers = plain.generate(requests)
    pairs = [(request.prompt, answer.token_ids) for request, answer in zip(requests, answers, strict=True)]
    digest, path = vocabulary_digest(plain.tokenizer), tmp_path / "own.store"
    build_store(pairs, path, vocab=plain.tokenizer.vocab_size, tokenizer=digest)
    drafted = load(config.with_options(drafter=f"store:{path}", depth=3)).generate(requests)
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in answers]
    assert sum(answer.stats.accepted for answer in drafted) > 20
    build_store(pairs, path, vocab=plain.tokenizer.vocab_size, tokenizer="another")
    with pytest.raises(WagerError, match="another tokenizer"):
        load(config.with_options(drafter=f"store:{path}"))


@pytest.mark.slow
def test_auto_looks_in_the_store_that_comes_with_wager_for_the_tokenizer(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = wager.EngineConfig.from_options(model=str(directory), max_rows=32, max_sequences=4, drafter="auto")
    monkeypatch.setattr(hub, "SHIPPED", tmp_path)
    assert load(config).drafter_name == "suffix"
    tokenizer = load(config.with_options(drafter="none")).tokenizer
    pairs = [((5, 6), (7, 8, 9))]
    build_store(pairs, tmp_path / "a.store", vocab=tokenizer.vocab_size, tokenizer="another")
    assert load(config).drafter_name == "suffix"
    build_store(pairs, tmp_path / "b.store", vocab=tokenizer.vocab_size, tokenizer=vocabulary_digest(tokenizer))
    assert load(config).drafter_name == "store:tree"
    assert load(config.with_options(verify="block")).drafter_name == "store"
    quantised = config.with_options(model="random:llama:tiny", dtype="q8")
    other = load(quantised.with_options(drafter="none")).tokenizer
    build_store(pairs, tmp_path / "c.store", vocab=other.vocab_size, tokenizer=vocabulary_digest(other))
    assert load(quantised).drafter_name == "store"
    assert load(quantised.with_options(dtype="auto")).drafter_name == "store:tree"
    assert load(config.with_options(drafter="suffix")).drafter_name == "suffix"
    (tmp_path / "b.store").write_bytes((tmp_path / "b.store").read_bytes()[:-8])
    with pytest.raises(WagerError, match=r"b\.store is damaged"):
        load(config)
