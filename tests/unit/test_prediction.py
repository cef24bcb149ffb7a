"""Predicted outputs: the pointer follows edits, drafts shrink and grow, and the text stays that of plain decoding."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wager.cli import main
from wager.draft.base import Drafter
from wager.draft.lookup import LookupDrafter, LookupSources
from wager.draft.ngram import MIN_SURVIVAL
from wager.draft.prediction import LONGEST, PredictionDrafter
from wager.errors import RequestError
from wager.testing import ToyDistribution
from wager.testing.toy import toy_engine
from wager.types import Draft, DraftRequest, Request, SamplingParams

TEXT = list(range(100, 300))
LAW = ToyDistribution(vocab=48, order=2, sharpness=6.0, eos=3, eos_bias=-1.0)


def _begun(prediction: list[int], *, drafter: Drafter | None = None) -> Drafter:
    drafter = drafter or PredictionDrafter()
    drafter.begin("s", [1, 2], SamplingParams(prediction=prediction))
    return drafter


def _drafted(drafter: Drafter, depth: int = LONGEST) -> Draft:
    [draft] = drafter.propose([DraftRequest("s", 0, depth, SamplingParams(), 0)])
    return draft


def _passes(drafter: Drafter, output: list[int], depth: int = LONGEST) -> int:
    """Passes of the target until `output` is written."""
    at, passes = 0, 0
    while at < len(output):
        right = 0
        for guess, token in zip(_drafted(drafter, depth).tokens, output[at:], strict=False):
            if guess != token:
                break
            right += 1
        new = output[at : at + right + 1]
        drafter.accept("s", new)
        at, passes = at + len(new), passes + 1
    return passes


def test_it_guesses_from_the_beginning_and_goes_on_where_it_was_right() -> None:
    drafter = _begun(TEXT)
    assert _drafted(drafter).tokens[:3] == (100, 101, 102)
    drafter.accept("s", TEXT[:10])
    draft = _drafted(drafter)
    assert draft.tokens[:3] == (110, 111, 112) and draft.is_chain and draft.drafter == "prediction"
    assert all(MIN_SURVIVAL <= b <= a <= 1 for a, b in zip(draft.scores, draft.scores[1:], strict=False))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_what_is_edited_anywhere_is_found_again(data: st.DataObject) -> None:
    """A text with one edit, in whatever place, takes far fewer passes than it has tokens."""
    at, gone = data.draw(st.integers(0, 180)), data.draw(st.integers(0, 15))
    new = data.draw(st.lists(st.integers(500, 900), max_size=8))
    assert _passes(_begun(TEXT), [*TEXT[:at], *new, *TEXT[at + gone :]]) <= 24 + len(new)


def test_without_a_prediction_or_a_place_it_declines() -> None:
    drafter = PredictionDrafter()
    drafter.begin("s", [1, 2, 1], SamplingParams())
    drafter.accept("s", [2])
    assert len(_drafted(drafter)) == 0
    drafter.end("s")
    drafter = _begun([1, 2, 3])
    drafter.accept("s", [9, 9])
    assert len(_drafted(drafter)) == 0
    drafter.accept("s", [1, 2])
    assert _drafted(drafter).tokens == (3,)
    drafter.accept("s", [3])
    assert len(_drafted(drafter)) == 0


def test_lookup_drafters_read_it_too() -> None:
    drafter = _begun(TEXT, drafter=LookupDrafter("suffix", LookupSources(5, 100)))
    drafter.accept("s", [7, 8, 140, 141])
    assert _drafted(drafter, 4).tokens == (142, 143, 144, 145)


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_text_is_that_of_plain_decoding_and_the_prediction_saves_passes(rule: str, temperature: float) -> None:
    rng = random.Random(3)
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=5, ignore_eos=True)
    prompts = [[rng.randrange(48) for _ in range(size)] for size in (3, 20, 33, 20)]
    requests = [Request(f"r{at}", tuple(prompt), params) for at, prompt in enumerate(prompts)]
    plain = [answer.token_ids for answer in toy_engine(LAW).generate(requests)]
    predicted = []
    for request, tokens in zip(requests, plain, strict=True):
        edited = [*tokens[:15], 1, 2, *tokens[18:]]
        predicted.append(replace(request, params=replace(params, prediction=edited)))
    engine = toy_engine(LAW, drafter=PredictionDrafter(), depth=8, rule=rule, num_blocks=24, max_rows=40)  # type: ignore[arg-type]
    for answer, tokens in zip(engine.generate(predicted), plain, strict=True):
        if rule == "match" or temperature == 0:
            assert answer.token_ids == tokens
            assert answer.stats.rounds < 25
    engine.check()


def test_an_engine_refuses_unknown_ids_and_text_that_it_cannot_encode() -> None:
    engine = toy_engine(LAW)
    with pytest.raises(RequestError, match="token 48 under prediction"):
        engine.add(Request("r", (1,), SamplingParams(prediction=[48])))
    with pytest.raises(RequestError, match="needs a tokenizer"):
        engine.add(Request("r", (1,), SamplingParams(prediction="text")))


def test_run_reads_a_file_of_the_predicted_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str, code: int = 0) -> str:
        base = ("run", "hello", "--model", "random:llama:tiny", "--max-tokens", "12", "--threads", "1")
        assert main([*base, *arguments]) == code
        captured = capsys.readouterr()
        return captured.out + captured.err

    text = run("--drafter", "none").rpartition("12 tokens")[0].strip("\n")
    file = tmp_path / "answer.txt"
    file.write_text(text, encoding="utf-8")
    for drafter in ("prediction", "suffix", "auto"):
        assert text in run("--drafter", drafter, "--prediction", str(file))
    assert "no effect with --drafter ngram" in run("--drafter", "ngram", "--prediction", str(file), code=2)
    assert "absent.txt" in run("--prediction", str(tmp_path / "absent.txt"), code=2)
