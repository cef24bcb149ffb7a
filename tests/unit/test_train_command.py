"""`wager train`: from a file of prompts to a head, and what it refuses."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from trained import MODEL

from in_process import Call
from wager.draft.store_file import StoreFile
from wager.draft.vocabulary import vocabulary_digest, vocabulary_sample
from wager.models.opening import open_model
from wager.train.data import TrainingTarget

torch.set_num_threads(1)
SHORT = (
    "--model",
    MODEL,
    "--threads",
    "1",
    "--memory",
    "64MiB",
    "--answer-tokens",
    "4",
    "--steps",
    "3",
    "--batch",
    "64",
    "--vocabulary",
    "100",
    "--save-every",
    "1",
    "--precision",
    "float32",
)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say {number} and stop."}) + "\n" for number in range(60)))
    return path


def test_a_head_is_trained_and_described(
    wager: Call, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "head"
    given = ["train", *SHORT, "--prompts", str(prompts), "--made-up", "2", "-o", str(out), "--json", "-"]
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/wager", *given])
    found = wager(*given)
    assert found.code == 0, found.err
    assert "step 3 of 3: loss" in found.err
    assert f"written to {out}: --drafter eagle3:{out}" in found.err
    result = json.loads(found.out)
    assert result["steps"] == len(result["history"]) == 3
    assert len(result["held_out"]["survival"]) == 3
    config = json.loads((out / "config.json").read_text())
    assert config["wager"]["target"] == MODEL
    assert config["wager"]["command"] == shlex.join(["wager", *given])
    assert config["wager"]["figures"]["held_out"] == result["held_out"]
    assert len((out / "answers.jsonl").read_text().splitlines()) > 60
    again = wager("train", *SHORT, "--prompts", str(prompts), "--made-up", "2", "-o", str(out), "--json", "-")
    assert again.code == 0, again.err
    assert "going on after step 3" in again.err
    assert json.loads(again.out)["held_out"] == result["held_out"]


def test_the_engine_drafts_with_a_trained_head_and_refuses_it_for_another_target(
    wager: Call, tmp_path: Path, prompts: Path
) -> None:
    out = tmp_path / "head"
    assert wager("train", *SHORT, "--prompts", str(prompts), "-o", str(out)).code == 0
    engine = ("--threads", "1", "--drafter", f"eagle3:{out}")
    short = ("--limit", "2", "--max-tokens", "8", "--concurrency", "2")
    proved = wager("prove", "--model", MODEL, *engine, *short)
    assert proved.code == 0, proved.err
    measured = wager("acceptance", "--model", MODEL, *engine, *short[:4], "--depth", "3", "--json", "-")
    assert json.loads(measured.out)["drafters"]["eagle3"]["coverage"] > 0.5, measured.err
    other = wager("run", "hello", "--model", "random:qwen3:tiny", *engine)
    assert other.code == 1
    assert "trained for" in other.err


def test_a_store_is_built_of_the_answers_and_drafts(wager: Call, tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "store"
    found = wager("train", "--kind", "store", *SHORT, "--prompts", str(prompts), "-o", str(out), "--json", "-")
    assert found.code == 0, found.err
    result = json.loads(found.out)
    assert result["entries"] > 0
    assert len(result["held_out"]["survival"]) == 3
    store = StoreFile(out / "answers.store", vocab=512, tokenizer=vocabulary_digest(open_model(MODEL)[2]))
    assert store.header.sample == vocabulary_sample(open_model(MODEL)[2])
    provenance = store.header.provenance
    assert provenance["target_fingerprint"] == TrainingTarget.of(MODEL, *open_model(MODEL)).fingerprint
    assert provenance["texts"] < 60, "held-out texts are not in it"
    row = json.loads((out / "answers.jsonl").read_text().splitlines()[1])
    assert store.continuations(row["token_ids"][:3])[0] == 3
    drafter = f"store:{out / 'answers.store'}"
    ran = wager("run", "Say 3", "--model", MODEL, "--memory", "64MiB", "--drafter", drafter, "--max-tokens", "4")
    assert ran.code == 0, ran.err
    none = wager("train", "--kind", "store", *SHORT, "--prompts", str(prompts), "--answer-tokens", "0", "-o", str(out))
    assert "no text has one" in none.err


def test_a_store_needs_no_torch(wager: Call, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = wager("train", "--kind", "store", *SHORT, "--prompts", str(prompts), "-o", str(tmp_path / "store"))
    assert found.code == 0, found.err


def test_prompts_alone_are_texts_too(wager: Call, tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "head"
    found = wager("train", *SHORT, "--prompts", str(prompts), "--answer-tokens", "0", "-o", str(out))
    assert found.code == 0, found.err
    assert not (out / "answers.jsonl").exists()


def test_without_torch_it_says_what_to_install(
    wager: Call, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = wager("train", "--prompts", str(prompts), "-o", str(tmp_path / "head"))
    assert found.code == 2
    assert "needs PyTorch" in found.err
    assert "pip install 'wager[train]'" in found.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "nothing to train on"),
        (("--prompts", "{prompts}", "--apart-from", "{prompts}"), "'Say 0 and stop.' is in"),
        (("--prompts", "{prompts}", "--taps", "1,x"), "'1,x' is no list of layers"),
        (("--prompts", "{prompts}", "--taps", "1,1"), "'1,1' is no list of layers"),
        (("--prompts", "{prompts}", "--taps", "1,3"), "Layer 3 cannot be tapped"),
        (("--prompts", "{missing}"), "missing.jsonl"),
        (("--answers", "{prompts}"), "line 1"),
        (("--prompts", "{prompts}", "--model", "random:mixtral:tiny"), "latent attention or experts"),
        (("--prompts", "{prompts}", "--vocabulary", "1"), "--vocabulary"),
        (("--prompts", "{prompts}", "--device", "cuda"), "--device cuda"),
    ],
)
def test_what_it_refuses(wager: Call, tmp_path: Path, prompts: Path, arguments: tuple[str, ...], named: str) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    names = {"prompts": str(prompts), "missing": str(tmp_path / "missing.jsonl")}
    found = wager("train", *SHORT, "-o", str(tmp_path / "head"), *(word.format(**names) for word in arguments))
    assert found.code == 2, found.err
    assert named in found.err
    assert "Traceback" not in found.err


def test_an_output_that_is_no_folder_is_refused(wager: Call, tmp_path: Path, prompts: Path) -> None:
    assert "cannot be made: File exists" in wager("train", "--prompts", str(prompts), "-o", str(prompts)).err
    found = wager("train", "--prompts", str(prompts), "-o", str(tmp_path / "a" / "b"))
    assert "cannot be made: No such file" in found.err
