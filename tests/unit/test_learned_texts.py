"""Learned texts on disk: the lookup beside its twin in Python, files that are damaged or cut off, processes that are
killed, full disks, retention, and who may read what."""

from __future__ import annotations

import errno
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.corpus import PythonCorpus
from wager.draft.corpus import learning
from wager.draft.corpus.files import (
    CorpusFile,
    CorpusFileError,
    LearnedText,
    Log,
    Segment,
    corpus_files,
    part_of_segment,
    part_of_texts,
    read_log,
    write_segment,
)
from wager.draft.corpus.learning import LearnedTexts
from wager.draft.lookup import LookupDrafter, LookupSources
from wager.errors import UsageError, WagerError
from wager.kernels import _native
from wager.types import OutputDelta, Request, SamplingParams

TOKENIZER = "ab" * 32
PRINT = bytes.fromhex(TOKENIZER)

texts_of_few_tokens = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=60), min_size=1, max_size=6)


def written(path: Path, texts: Sequence[Sequence[int]]) -> Segment:
    write_segment(path, [part_of_texts(LearnedText(np.array(each, np.int32), 0, 0) for each in texts)], PRINT)
    segment = Segment(CorpusFile(path, 1, 1), PRINT)
    segment.verify()
    return segment


def native_corpus(folder: Path, segments: Sequence[Sequence[Sequence[int]]]) -> _native.Corpus:
    corpus = _native.Corpus()
    corpus.set([written(folder / f"{number}.segment", each).arrays for number, each in enumerate(segments)])
    return corpus


def learned(folder: Path, **limits: Any) -> LearnedTexts:
    return LearnedTexts(folder, TOKENIZER, **limits)


def texts_in(folder: Path) -> list[list[int]]:
    """All texts below a folder, in their order."""
    found: list[list[int]] = []
    for tenant in sorted((folder / TOKENIZER[:16]).iterdir()):
        for file in corpus_files(tenant):
            texts = read_log(file.path, PRINT)[0] if file.is_log else Segment(file, PRINT)
            found += [each.tokens.tolist() for each in texts]
    return found


def random_text(seed: int, size: int = 40) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(size)]


# ---- the lookup ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(texts_of_few_tokens, min_size=1, max_size=3), st.lists(st.integers(0, 3), max_size=40), st.integers(0, 5)
)
def test_the_native_lookup_finds_what_the_one_in_python_does(
    tmp_path_factory: pytest.TempPathFactory, segments: list[list[list[int]]], text: list[int], least: int
) -> None:
    native = native_corpus(tmp_path_factory.mktemp("corpus"), segments)
    for query in (text, segments[0][0][:-1], segments[-1][-1]):
        length, found = native.find(query, least)
        assert (length, found) == PythonCorpus(segments).find(query, least)


@settings(max_examples=40, deadline=None)
@given(st.lists(texts_of_few_tokens, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_a_merged_segment_is_that_of_its_texts(
    tmp_path_factory: pytest.TempPathFactory, segments: list[list[list[int]]], rng: random.Random
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    parts = [part_of_segment(written(folder / f"{at}.segment", each)) for at, each in enumerate(segments)]
    kept: list[list[int]] = []
    for part, texts in zip(parts, segments, strict=True):
        for at, text in enumerate(texts):
            part.kept[at] = keep = rng.random() < 0.7
            kept += [text] * keep
    if not kept:
        return
    write_segment(folder / "merged.segment", parts, PRINT)
    merged = Segment(CorpusFile(folder / "merged.segment", 1, 1), PRINT)
    merged.verify()
    assert [each.tokens.tolist() for each in merged] == kept
    order = np.empty_like(merged.order)
    _native.corpus_order(merged.tokens, order)
    assert np.array_equal(order, merged.order)


@pytest.mark.slow
def test_a_long_order_is_searched_by_its_keys(tmp_path: Path) -> None:
    texts = [random_text(seed, 400) for seed in range(30)]
    native, plain = native_corpus(tmp_path, [texts]), PythonCorpus([texts])
    for text in texts[::7]:
        for end in range(5, 400, 23):
            assert native.find(text[:end], 2) == plain.find(text[:end], 2)
            assert native.find([1001, *text[end - 1 : end]], 2) == (0, [])


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_log_that_is_cut_off_or_damaged_anywhere_gives_its_first_texts(tmp_path: Path) -> None:
    texts, log = [random_text(seed, 5 + seed) for seed in range(4)], Log(tmp_path / "1.log", PRINT)
    for text in texts:
        log.append(text, 7)
    log.close()
    data, path = (tmp_path / "1.log").read_bytes(), tmp_path / "2.log"
    assert [each.tokens.tolist() for each in read_log(tmp_path / "1.log", PRINT)[0]] == texts
    for at in range(48, len(data)):
        path.write_bytes(data[:at])
        found = [each.tokens.tolist() for each in read_log(path, PRINT)[0]]
        assert found == texts[: len(found)] and len(found) < 4
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        found = [each.tokens.tolist() for each in read_log(path, PRINT)[0]]
        assert found == texts[: len(found)] and len(found) < 4
        path.write_bytes(data[:at] + bytes(len(data) - at))  # what a file system may leave after a power cut
        found = [each.tokens.tolist() for each in read_log(path, PRINT)[0]]
        assert found == texts[: len(found)]
    for empty in (b"", bytes(48), data[:48]):
        path.write_bytes(empty)
        assert read_log(path, PRINT)[0] == []


def test_a_segment_that_is_damaged_or_cut_off_anywhere_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "1-1.segment"
    written(path, [random_text(seed) for seed in range(3)])
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(CorpusFileError, match=r"damaged|format|tokenizer"):
                Segment(CorpusFile(path, 1, 1), PRINT).verify()


@pytest.mark.parametrize("kind", ["damaged", "cut off", "foreign", "not one"])
def test_what_is_not_read_is_named_and_the_rest_is(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    for part in range(2):
        texts = learned(tmp_path)
        texts.learn("", [1], random_text(part, (2000, 400)[part]))
        texts.seal()
        texts.close()
    [tenant] = (tmp_path / TOKENIZER[:16]).iterdir()
    first, second = sorted(tenant.glob("*.segment"))
    data = first.read_bytes()
    if kind == "foreign":
        found = [each.tokens.tolist() for each in Segment(CorpusFile(first, 1, 1), PRINT)]
        part = part_of_texts(LearnedText(np.array(each, np.int32), 0, 0) for each in found)
        write_segment(first, [part], bytes(32))
    else:
        first.write_bytes({"damaged": data[:-9] + bytes(9), "cut off": data[:500], "not one": b"?" * 800}[kind])
    (tenant / "9.log").write_bytes(b"nonsense" * 20)
    texts = learned(tmp_path)
    texts.corpus("")
    texts.settle()
    assert texts.corpus("").find(random_text(0, 2000)[:30], 4) == (0, [])
    assert texts.corpus("").find(random_text(1, 400)[:30], 4)[0] == 30
    texts.learn("", [1], random_text(2))  # it goes on
    texts.seal()
    assert texts.corpus("").find(random_text(2)[:30], 4)[0] == 30
    texts.close()
    assert f"{first} " in caplog.text and {"foreign": "another tokenizer"}.get(kind, "damaged") in caplog.text
    assert str(tenant / "9.log") in caplog.text
    assert first.with_name("1-1.segment.unread").exists() and second.exists()


# ---- processes -------------------------------------------------------------------------------------------------------


def test_another_process_and_a_folder_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    texts = learned(tmp_path)
    with pytest.raises(UsageError, match=f"Process {os.getpid()} learns in"):
        learned(tmp_path)
    texts.close()
    learned(tmp_path).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"Nothing can be learned in .*file"):
        learned(tmp_path / "file")
    (tmp_path / TOKENIZER[:16]).rmdir()
    (tmp_path / TOKENIZER[:16]).write_text("")
    with pytest.raises(UsageError, match="Nothing can be learned in"):
        learned(tmp_path)
    (tmp_path / TOKENIZER[:16]).unlink()
    learned(tmp_path).close()  # what was refused holds no lock


WRITER = f"""
import random, sys
from pathlib import Path
from wager.draft.corpus import learning
learning.SEAL_TOKENS, learning._SYNC_S = 300, 0.01
texts = learning.LearnedTexts(Path(sys.argv[1]), {TOKENIZER!r})
for number in range(int(sys.argv[2]), 10**6):
    rng = random.Random(number)
    texts.learn("", [], [rng.randrange(1000) for _ in range(40)])
    if number % 5 == 4:
        texts.settle()
        print(number + 1, flush=True)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_loses_nothing_that_it_had_written(tmp_path: Path) -> None:
    rng, done = random.Random(15), 0
    for _ in range(15):
        with subprocess.Popen([sys.executable, "-c", WRITER, tmp_path, str(done)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            said = writer.stdout.readline()
            time.sleep(rng.random() * 0.1)
            writer.send_signal(signal.SIGKILL)
            said += writer.stdout.read()
        whole = said[: said.rindex(b"\n")].split()
        before, done = done, int(whole[-1])
        texts = learned(tmp_path)
        texts.corpus("")
        texts.settle()
        corpus = texts.corpus("")
        for number in random.Random(done).sample(range(done), min(done, 20)):
            length, [(token, _)] = corpus.find(random_text(number)[:-1], 4)
            assert (length, token) == (32, random_text(number)[-1])
        texts.close()
        numbers = {tuple(random_text(number)): number for number in range(done + 100)}
        kept = [numbers[tuple(each)] for each in texts_in(tmp_path)]
        assert set(range(done)) <= set(kept) and before < done, "nothing is lost, and every text is whole"


def test_a_full_disk_loses_texts_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    texts = learned(tmp_path)
    texts.learn("", [], random_text(1))
    texts.settle()
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        for seed in range(2, 6):
            texts.learn("", [], random_text(seed))
        texts.seal()
        with pytest.raises(WagerError, match=f"1 texts could not be written to {tmp_path}"):
            texts.learn_all([([], random_text(6)), ([], random_text(7))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caplog.text.count("cannot be written (File too large)") == 1, "it is said once a minute"
    texts.learn_all([([], random_text(9)), ([], random_text(2))])  # one of those that could not be written
    assert texts.corpus("").find(random_text(9)[:-1], 4)[0] == 32
    texts.close()
    assert texts_in(tmp_path) == [random_text(seed) for seed in (1, 6, 9, 2)]


def test_a_disk_that_is_full_between_two_rewrites_leaves_what_was_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "_GROWTH", 0)  # no merges
    now, texts = int(time.time()), learned(tmp_path, days=10)
    monkeypatch.setattr(learning.time, "time", lambda: now - 86400 * 5)
    for first in (0, 10):
        for seed in range(first, first + 10):
            texts.learn("", [], random_text(seed), written=now - 86400 * (11 if seed % 2 else 6))
        texts.seal()
    [tenant] = (tmp_path / TOKENIZER[:16]).iterdir()
    before = [file.path.open("rb") for file in corpus_files(tenant)]  # as what is left on a disk
    assert len(before) == 2
    monkeypatch.setattr(learning.time, "time", lambda: now)
    calls = []

    def full(*given: Any, write: Any = learning.write_segment) -> None:
        calls.append(given)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*given)

    monkeypatch.setattr(learning, "write_segment", full)
    texts.learn("", [], random_text(20))
    texts.seal()
    assert len(calls) == 2
    kept = [random_text(seed) for seed in range(0, 20, 2)]
    assert all(texts.corpus("").find(text[:-1], 4)[0] == 32 for text in kept)
    texts.learn("", [], random_text(21))
    texts.seal()
    texts.close()
    assert texts_in(tmp_path) == [*kept, random_text(20), random_text(21)]
    for file in before:
        assert not any(file.read())
        file.close()


# ---- growth and retention --------------------------------------------------------------------------------------------


def test_a_corpus_grows_in_few_segments_and_outlives_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "SEAL_TOKENS", 200)
    expected: list[list[int]] = []
    for run in range(3):
        texts = learned(tmp_path)
        for seed in range(run * 100, run * 100 + 100):
            texts.learn("", [], random_text(seed))
            expected.append(random_text(seed))
            if seed % 5 == 4:
                texts.settle()
        texts.close()
        assert texts_in(tmp_path) == expected
    [tenant] = (tmp_path / TOKENIZER[:16]).iterdir()
    assert len(corpus_files(tenant)) <= 8 and not list(tenant.glob("*.erase"))


def test_the_same_answer_is_kept_once_and_prompts_are_kept_if_that_is_asked_for(tmp_path: Path) -> None:
    question, answer = random_text(1, 100), random_text(2)
    for prompts in (False, True):
        texts = learned(tmp_path / str(prompts), prompts=prompts)
        for _ in range(3):
            texts.learn("", question, answer)
        texts.learn("", [*question, *answer, *random_text(3)], random_text(4))  # the next turn
        texts.close()
        first, second = texts_in(tmp_path / str(prompts))
        assert first == [*(question if prompts else question[-5:]), *answer]
        following = [*random_text(3), *random_text(4)]
        assert second[-80:] == following if prompts else second == [*random_text(3)[-5:], *random_text(4)]
        assert len(second) < 80 + 2 * 40 + 32


def test_an_answer_whose_end_nobody_took_is_no_part_of_the_next_one_of_its_id(tmp_path: Path) -> None:
    texts = learned(tmp_path)
    for answer in ((5, 6, 7), (8, 9)):
        texts.begin(Request("r", (1, 2)))
        texts.take([OutputDelta("r", 0, answer)])
    texts.take([OutputDelta("r", 0, finish_reason="stop")])
    texts.begin(Request("r", (3, 4), SamplingParams(n=2)))
    texts.take([OutputDelta("r", 0, finish_reason="abort")])  # of one before it
    texts.take([OutputDelta("r", choice, (7, choice), finish_reason="stop") for choice in (0, 1)])
    texts.close()
    assert texts_in(tmp_path) == [[1, 2, 8, 9], [3, 4, 7, 0], [3, 4, 7, 1]]


@pytest.mark.parametrize("tokenizer", [TOKENIZER, "cd" * 32])
def test_old_texts_leave_and_of_too_many_those_that_were_used_least_recently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    now = int(time.time())
    texts = learned(tmp_path, days=10, most_bytes=70 * 8 * 401)
    for seed in range(20):
        texts.learn("", [], random_text(seed, 400), written=now - 86400 * 11)
    for seed in range(20, 80):
        texts.learn("", [], random_text(seed, 400), written=now - 5000 + seed)
    texts.seal()
    assert {tuple(each) for each in texts_in(tmp_path)} == {tuple(random_text(seed, 400)) for seed in range(20, 80)}
    texts.corpus("").find(random_text(30, 400)[:100], 4)
    for seed in range(80, 100):
        texts.learn("", [], random_text(seed, 400), written=now - 5000 + seed)
    texts.seal()
    texts.close()
    kept = texts_in(tmp_path)
    newest = [random_text(seed, 400) for seed in range(55, 100)]
    assert [each for each in newest if each not in kept] == []
    assert random_text(30, 400) in kept and random_text(20, 400) not in kept
    gone = np.array(random_text(20, 400), "<i4").tobytes()[:64]
    assert not any(gone in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    monkeypatch.setattr(learning.time, "time", lambda: now + 86400 * 20)
    texts = LearnedTexts(tmp_path, tokenizer, days=10)
    texts.settle()  # nobody asks for that tenant
    texts.close()
    assert texts_in(tmp_path) == []


def test_a_search_for_old_texts_that_fails_does_not_end_the_building(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def oldest_in(file: CorpusFile) -> float:
        raise ValueError(file)

    texts = learned(tmp_path)
    texts.learn("", [], random_text(1))
    texts.seal()
    texts.close()
    monkeypatch.setattr(learning, "_oldest_in", oldest_in)
    texts = learned(tmp_path, days=10)
    texts.learn("", [], random_text(2))
    texts.seal()
    assert [texts.corpus("").find(random_text(seed)[:20], 4)[0] for seed in (1, 2)] == [20, 20]
    texts.close()
    assert "could not be searched" in caplog.text


def test_a_text_that_left_can_be_learned_again(tmp_path: Path) -> None:
    texts = learned(tmp_path, days=10)
    texts.learn("", [], random_text(1), written=int(time.time()) - 86400 * 11)
    texts.seal()
    assert texts_in(tmp_path) == []
    texts.learn("", [], random_text(1))
    texts.close()
    assert texts_in(tmp_path) == [random_text(1)]


def test_a_text_that_is_larger_than_all_may_be_leaves_alone(tmp_path: Path) -> None:
    texts = learned(tmp_path, most_bytes=8 * 4000)
    for seed, size in enumerate((400, 400, 5000)):
        texts.learn("", [], random_text(seed, size))
    texts.seal()
    texts.close()
    assert texts_in(tmp_path) == [random_text(0, 400), random_text(1, 400)]


def test_what_a_killed_process_of_the_same_number_left_half_written_is_erased(tmp_path: Path) -> None:
    texts = learned(tmp_path)
    texts.learn("", [], random_text(1))
    texts.close()
    [tenant] = (tmp_path / TOKENIZER[:16]).iterdir()
    half = tenant / f"1-9.segment.{os.getpid()}-1"
    half.write_bytes(np.array(random_text(2), "<i4").tobytes())
    (tenant / "other.segment.unread").write_bytes(b"x")
    texts = learned(tmp_path)
    texts.corpus("")
    texts.settle()
    texts.close()
    assert not half.exists() and (tenant / "other.segment.unread").exists()
    assert texts_in(tmp_path) == [random_text(1)]


@pytest.mark.parametrize("tokenizer", [TOKENIZER, "cd" * 32])
def test_old_texts_leave_beside_a_damaged_file_and_states_beside_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    texts = learned(tmp_path)
    for tenant in ("anna", "ben"):
        texts.learn(tenant, [], random_text(1))
        texts.seal()
        texts.keep(tenant, "recycle", b"table")
    anna, ben = (tmp_path / TOKENIZER[:16] / texts.folder_name(tenant) for tenant in ("anna", "ben"))
    texts.close()
    (anna / "1-1.segment").unlink()
    (ben / "0-0.segment").write_bytes(b"damaged")
    later = time.time() + 86400 * 31
    monkeypatch.setattr(learning.time, "time", lambda: later)
    texts = LearnedTexts(tmp_path, tokenizer, days=30)
    texts.settle()
    texts.close()
    assert [path.name for folder in (anna, ben) for path in folder.iterdir()] == []


def test_few_logs_are_open_however_many_tenants_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "_MOST_LOGS", 3)
    monkeypatch.setattr(learning, "_SYNC_S", 0.0)
    texts = learned(tmp_path)
    for tenant in range(9):
        texts.learn(str(tenant), [], random_text(tenant))
        texts.settle()
    assert sum(tenant.log is not None for tenant in texts._tenants.values()) <= 3
    texts.close()
    assert len(texts_in(tmp_path)) == 9


# ---- whose text ------------------------------------------------------------------------------------------------------


def test_tenants_have_folders_of_their_own_that_only_their_owner_reads_and_nobody_can_name(tmp_path: Path) -> None:
    os.umask(0o022)
    texts = learned(tmp_path / "new")
    for tenant in ("anna", "ben"):
        texts.learn(tenant, [], random_text(len(tenant)))
    texts.seal()
    assert texts.corpus("anna").find(random_text(4)[:-1], 4)[0] == 32
    assert texts.corpus("anna").find(random_text(3)[:-1], 2) == (0, []) == texts.corpus("").find(random_text(3)[:-1], 2)
    names = [texts.folder_name(tenant) for tenant in ("anna", "ben")]
    texts.close()
    for path in (tmp_path / "new").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
        assert "anna" not in str(path)
    other = learned(tmp_path / "other")
    assert other.folder_name("anna") not in names, "names are keyed: nobody can try keys out"
    other.close()


def test_a_tenant_that_was_let_go_finds_its_texts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "_MOST_TENANTS", 2)
    texts = learned(tmp_path)
    for tenant in range(6):
        texts.learn(str(tenant), [], random_text(tenant))
        texts.seal()
    assert len(texts._tenants) <= 3
    for tenant in range(6):
        texts.corpus(str(tenant))
        texts.settle()
        assert texts.corpus(str(tenant)).find(random_text(tenant)[:-1], 4)[0] == 32
    texts.close()


def test_what_comes_too_fast_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(learning, "_MOST_QUEUED", 100)
    texts = learned(tmp_path)
    with caplog.at_level(logging.WARNING, "wager"):
        texts.learn("", [], random_text(1, 200))
    texts.close()
    assert "some are not learned" in caplog.text and texts_in(tmp_path) == []


def test_how_right_a_tenants_texts_were_is_kept_for_it_alone(tmp_path: Path) -> None:
    def opened() -> tuple[LearnedTexts, Callable[[str], list[tuple[float, float]]], LookupDrafter]:
        learned = LearnedTexts(tmp_path, TOKENIZER)
        drafter = LookupDrafter("suffix", LookupSources(8, learned=learned))
        return learned, lambda tenant: drafter._tables.get(tenant).found(), drafter

    learned, found, drafter = opened()
    prior = found("")
    kept = {"anna": [(0.1, 5.0)] * len(prior), "ben": [(0.2, 6.0)] * len(prior)}
    for tenant, rates in kept.items():
        learned.learn(tenant, [1], [2, 3, 4])
        assert found(tenant) == prior and drafter._tables.get(tenant).start_from(rates)
    assert drafter._tables.get("carl").start_from(kept["ben"])  # of whom nothing was learned
    learned.close()
    states = {path.parent.name for path in tmp_path.rglob("suffix.state")}
    assert states == {learned.folder_name("anna"), learned.folder_name("ben")}
    learned, found, _ = opened()
    assert {tenant: found(tenant) for tenant in kept} == kept
    assert found("carl") == found("") == prior
    learned.close()
