"""Texts to train on: weights, batches, held-out ones, answers by an engine and files of them, the draft vocabulary."""

from __future__ import annotations

import json
import os
import resource
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from trained import texts

from wager.errors import UsageError
from wager.models.opening import open_model
from wager.prompts import encode_content, read_prompts
from wager.testing import ToyDistribution
from wager.testing.toy import toy_engine
from wager.train import answers
from wager.train.data import DraftVocabulary, TextWeights, TrainingData, TrainingTarget, TrainingText
from wager.types import Request, SamplingParams

KNOWN = np.ones(512, bool)


def test_every_text_is_in_one_batch_of_a_pass_and_batches_keep_their_size() -> None:
    """They are a function of the seed and the pass."""
    data = TrainingData(tuple(texts(300)), 32)
    seen = []
    for seed, number in ((4, 0), (4, 1), (5, 0)):
        batches = data.batches(tokens=256, seed=seed, number=number)
        assert batches == data.batches(tokens=256, seed=seed, number=number)
        assert batches not in seen
        seen.append(batches)
        assert Counter(text for batch in batches for text in batch) == Counter(data.train)
        assert all(len(batch) * min(32, max(len(text.ids) for text in batch)) <= 256 for batch in batches)
        padding = sum(data.padded(batch, TextWeights(KNOWN, 1, 0))[0].size for batch in batches) / data.tokens
        assert padding < 1.15


def test_held_out_texts_are_chosen_by_their_prompt_and_never_trained_on() -> None:
    data = TrainingData(tuple(texts(2000)), 32)
    assert 0.01 < len(data.held_out) / len(data.texts) < 0.05
    assert not set(data.held_out) & set(data.train)
    text = data.held_out[0]
    assert TrainingText((*text.ids, 5, 6), text.prompt_length).held_out


def test_weights_leave_out_what_all_texts_share_unknown_tokens_and_the_end() -> None:
    known = KNOWN.copy()
    known[41] = False
    found = TextWeights(known, 0.25, shared=3).of(TrainingText((1, 2, 3, 40, 41, 42, 43), 5), 7)
    # distributions after tokens 0 and 1 guess shared tokens; after 2 and 3 prompt tokens, of which 41 is not known
    assert found.tolist() == [0, 0, 0.25, 0, 1, 1, 0]


def test_repeated_texts_count_once_and_none_is_refused() -> None:
    found = texts(20)
    data = TrainingData((*found, *found), 32)
    assert len(data.texts) == 40 and len(data.train) <= 20
    assert data.shared_beginning == 3
    with pytest.raises(UsageError, match="no texts"):
        TrainingData((), 32)


def test_the_vocabulary_is_the_most_frequent_ids_in_order() -> None:
    found = DraftVocabulary.of([[5, 5, 9, 9, 2], [2, 9]], size=12, most=3, always=[11])
    assert found.ids.tolist() == [2, 9, 11], "of equals the smaller id"
    assert found.offsets().tolist() == [2, 8, 9]
    assert np.flatnonzero(found.known()).tolist() == [2, 9, 11]
    assert DraftVocabulary.of([[1]], size=12, most=None).whole
    with pytest.raises(UsageError, match="too small"):
        DraftVocabulary.of([[1]], size=12, most=1, always=[1, 2])


PROMPTS = [(number, number + 1, 3) for number in range(40)]


def asked(prompts: list[tuple[int, ...]], temperature: float = 0) -> list[Request]:
    params = SamplingParams(max_tokens=5, seed=1, temperature=temperature)
    return [Request(f"asked-{number}", prompt, params) for number, prompt in enumerate(prompts)]


def answered(path: Path, prompts: list[tuple[int, ...]] = PROMPTS) -> list[TrainingText]:
    missing = answers.unanswered(asked(prompts), path, target="me")
    answers.answer(answers.EngineAuthor(toy_engine(ToyDistribution(vocab=64)), 3), missing, path)
    return list(answers.read_answers(path, target="me", vocab=64))


def test_answers_go_on_after_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    whole = answered(tmp_path / "whole.jsonl")
    assert [text.ids[:3] for text in whole] == PROMPTS
    assert all(len(text.ids) == 8 and text.prompt_length == 3 for text in whole)
    path = tmp_path / "cut.jsonl"
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:11]) + lines[11][:9])
    assert answers.unanswered(asked(PROMPTS), path, target="me") == asked(PROMPTS)[10:]
    assert answers.unanswered(asked(PROMPTS, 0.5), path, target="me") == asked(PROMPTS, 0.5), "another temperature"
    assert answered(path) == whole
    path.write_text('{"targ')  # killed while it wrote the first line
    assert answered(path) == whole
    assert json.loads(path.read_text().splitlines()[0]) == {"target": "me"}


def test_a_full_disk_is_named_by_the_answers_and_they_go_on_later(tmp_path: Path) -> None:
    path, limits = tmp_path / "answers.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            answers.unanswered(asked(PROMPTS), path, target="me")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(path)
    assert [text.ids[:3] for text in answered(path)] == PROMPTS
    full, author = Path("/dev/full"), answers.EngineAuthor(toy_engine(ToyDistribution(vocab=64)), 3)
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        answers.answer(author, asked(PROMPTS), full)


def test_answers_of_another_model_and_broken_ones_are_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    answered(path, PROMPTS[:2])
    with pytest.raises(UsageError, match="line 1: these are answers of another model"):
        list(answers.read_answers(path, target="you"))
    with pytest.raises(UsageError, match="line 2: a token id is not of this model"):
        list(answers.read_answers(path, target="me", vocab=1))
    path.write_text('{"prompt_ids": [1], "token_ids": [2]}\n{"prompt": 3}\n')
    with pytest.raises(UsageError, match=r"line 2: .* is no answer"):
        list(answers.read_answers(path, target="me"))


@pytest.mark.parametrize("names", [(b"prompt_ids", b"token_ids"), (b"prompt", b"answer")])
def test_answers_may_come_through_a_pipe(tmp_path: Path, names: tuple[bytes, bytes]) -> None:
    model = "random:llama:tiny"
    target = TrainingTarget(model, *open_model(model))
    reader, writer = os.pipe()
    os.write(writer, b'{"%b": [1, 2], "%b": [3]}\n' % names)
    os.close(writer)
    sources = answers.TextSources(answers=(Path(f"/dev/fd/{reader}"),))
    found = answers.collect_texts(target, sources, tmp_path, author=pytest.fail, on_output=pytest.fail)
    os.close(reader)
    assert found == [TrainingText((1, 2, 3), 2)]


def test_answers_may_be_a_log_of_requests(tmp_path: Path) -> None:
    model, path = "random:llama:tiny", tmp_path / "log.jsonl"
    folder, weights, tokenizer = open_model(model)
    target = TrainingTarget(model, folder, weights, tokenizer)

    def texts(*rows: object) -> list[TrainingText]:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources = answers.TextSources(answers=(path,))
        return answers.collect_texts(target, sources, tmp_path, author=pytest.fail, on_output=pytest.fail)

    turns = [{"role": "user", "content": "Say a word."}, {"role": "assistant", "content": "Word."}]
    said, asked_again = texts({"messages": turns}, {"prompt": [5, 6], "answer": [7]})
    assert tokenizer.decode(said.ids[said.prompt_length :]) == "Word."
    assert said.ids[: said.prompt_length] == tuple(encode_content(tokenizer, turns[:1]))
    assert asked_again == TrainingText((5, 6, 7), 2)
    assert answers.count_tokens(path) == len("Say a word.") // 4 + len("Word.") // 4 + 3
    measured = tmp_path / "measured.jsonl"
    measured.write_text('{"prompt": "Say a word."}')
    sources = answers.TextSources(answers=(path,), apart_from=(measured,))
    with pytest.raises(UsageError, match="Say a word"):
        answers.collect_texts(target, sources, tmp_path, author=pytest.fail, on_output=pytest.fail)
    path.write_text(json.dumps([{"prompt": [5, 6], "answer": [7], "target": "of another field"}]))
    sources = answers.TextSources(answers=(path,))
    assert answers.collect_texts(target, sources, tmp_path, author=pytest.fail, on_output=pytest.fail) == [asked_again]
    path.write_text('{"target": "any"}\n{"prompt_ids": [5, 6], "token_ids": [7]}\n')
    assert answers.count_tokens(path) == 3
    with pytest.raises(UsageError, match="has no answers"):
        texts({"prompt": "Say a word."})
    with pytest.raises(UsageError, match="not of this model"):
        texts({"prompt": [5], "answer": [weights.spec.vocab]})


def test_prompts_without_room_for_an_answer_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target, path = TrainingTarget("random:llama:tiny", *open_model("random:llama:tiny")), tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * size}) + "\n" for size in (8000, 9000, 10)))
    author = answers.EngineAuthor(toy_engine(ToyDistribution(vocab=512)), 1)
    sources = answers.TextSources(prompts=read_prompts(path), answer_tokens=500)
    found = answers.collect_texts(target, sources, tmp_path, author=lambda: author, on_output=lambda _: lambda _: None)
    assert len(found) == 1
    assert "2 of 3 prompts leave no room in the context for an answer of 500 tokens" in caplog.text
