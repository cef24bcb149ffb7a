"""`wager train`: from a file of prompts to a head, and what it refuses."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
import torch
from trained import MODEL

from in_process import Call, refused
from wager.draft.store_file import StoreFile
from wager.draft.vocabulary import vocabulary_digest, vocabulary_sample
from wager.models.opening import open_model
from wager.train.data import TrainingTarget

ANSWERED = f"--model {MODEL} --threads 1 --memory 64MiB --answer-tokens 4".split()
SHORT = f"{' '.join(ANSWERED)} --steps 3 --batch 64 --vocabulary 100 --save-every 1 --precision float32".split()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows: list[object] = [{"prompt": f"Say {number} and stop."} for number in range(60)]
    rows.append({"conversations": [{"from": who, "value": "Hello"} for who in ("human", "gpt", "human", "gpt")]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_head_is_trained_and_described_drafts_and_is_refused_for_another_target(
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
    assert result["steps"] == len(result["history"]) == len(result["held_out"]["survival"]) == 3
    about = json.loads((out / "config.json").read_text())["wager"]
    assert (about["target"], about["command"]) == (MODEL, shlex.join(["wager", *given]))
    assert about["figures"]["held_out"] == result["held_out"]
    assert len((out / "answers.jsonl").read_text().splitlines()) > 62, "both turns of a conversation are answered"
    again = wager(*given)
    assert "going on after step 3" in again.err
    assert json.loads(again.out)["held_out"] == result["held_out"]
    engine = ("--threads", "1", "--drafter", f"eagle3:{out}")
    short = ("--limit", "2", "--max-tokens", "8", "--concurrency", "2")
    proved = wager("prove", "--model", MODEL, *engine, *short)
    assert proved.code == 0, proved.err
    measured = wager("acceptance", "--model", MODEL, *engine, *short[:4], "--depth", "3", "--json", "-")
    assert json.loads(measured.out)["drafters"]["eagle3"]["coverage"] > 0.5, measured.err
    refused(wager("run", "hello", "--model", "random:qwen3:tiny", *engine), "trained for", code=1)


def test_a_store_is_built_of_the_answers_and_drafts_without_torch(
    wager: Call, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    out = tmp_path / "store"
    reader, writer = os.pipe()
    os.write(writer, prompts.read_bytes())
    os.close(writer)
    call = ["train", "--kind", "store", *ANSWERED, "--prompts", str(prompts), "-o", str(out)]
    piped = [f"/dev/fd/{reader}" if word == str(prompts) else word for word in call]
    found = wager(*piped, "--json", "-")
    os.close(reader)
    assert found.code == 0, found.err
    result = json.loads(found.out)
    assert result["entries"] > 0 and len(result["held_out"]["survival"]) == 3
    store = StoreFile(out / "answers.store", vocab=512, tokenizer=vocabulary_digest(open_model(MODEL)[2]))
    assert store.header.sample == vocabulary_sample(open_model(MODEL)[2])
    provenance = store.header.provenance
    assert provenance["target_fingerprint"] == TrainingTarget(MODEL, *open_model(MODEL)).fingerprint
    assert provenance["texts"] < 60, "held-out texts are not in it"
    row = json.loads((out / "answers.jsonl").read_text().splitlines()[1])
    assert store.continuations(row["token_ids"][:3])[0] == 3
    drafter = f"store:{out / 'answers.store'}"
    ran = wager("run", "Say 3", "--model", MODEL, "--memory", "64MiB", "--drafter", drafter, "--max-tokens", "4")
    assert ran.code == 0, ran.err
    assert "no text has one" in wager(*call, "--answer-tokens", "0").err
    short = wager(*call[:-1], str(tmp_path / "short"), "--answer-tokens", "1")
    assert short.out == "" and "Held-out texts are too short to say" in short.err
    prompts.write_text('{"prompt": "Say a word."}')
    few = wager(*call[:-1], str(tmp_path / "few"), "--json", "-")
    assert json.loads(few.out)["held_out"] == {"survival": [], "tau": None, "rounds": 0, "texts": 0}
    assert "none is held out to say how often guesses are right" in few.err


@pytest.mark.slow
def test_a_prompt_is_answered_with_a_pruned_draft_model(wager: Call, tmp_path: Path, prompts: Path) -> None:
    out, engine = tmp_path / "draft", ("--model", MODEL, "--threads", "1", "--memory", "64MiB")
    found = wager("train", "--kind", "pruned", *SHORT, "--layers", "1", "--prompts", str(prompts), "-o", str(out))
    assert found.code == 0, found.err
    ran = wager("run", "Say 3", *engine, "--drafter", f"model:{out}", "--max-tokens", "8", "--depth", "2")
    assert ran.code == 0, ran.err
    assert ran.out == wager("run", "Say 3", *engine, "--drafter", "none", "--max-tokens", "8").out
    short = ("--limit", "2", "--max-tokens", "8", "--concurrency", "2")
    proved = wager("prove", *engine[:4], "--drafter", f"model:{out}", *short)
    assert proved.code == 0, proved.err


def test_prompts_alone_are_texts_too(wager: Call, tmp_path: Path, prompts: Path) -> None:
    found = wager("train", *SHORT, "--prompts", str(prompts), "--answer-tokens", "0", "-o", str(tmp_path / "head"))
    assert found.code == 0, found.err
    assert not (tmp_path / "head" / "answers.jsonl").exists()


REFUSED = """
--output {out} | nothing to train on
--prompts {prompts} --output {prompts} | cannot be made: File exists
--prompts {prompts} --output {out}/a/b | cannot be made: No such file
--prompts {prompts} --apart-from {prompts} --output {out} | 'Say 0 and stop.' is in
--prompts {prompts} --taps 1,x --output {out} | '1,x' is no list of layers
--prompts {prompts} --taps 1,1 --output {out} | '1,1' is no list of layers
--prompts {prompts} --taps 1,3 --output {out} | Layer 3 cannot be tapped
--prompts {missing} --output {out} | missing.jsonl
--prompts {prompts} --model random:mixtral:tiny --output {out} | latent attention or experts
--prompts {prompts} --vocabulary 1 --output {out} | --vocabulary
--prompts {prompts} --device cuda --output {out} | --device cuda
--prompts {prompts} --kind pruned --layers 2 --output {out} | 2 of 2 layers cannot be kept
--prompts {prompts} --kind pruned --layers 0,5 --output {out} | Layer 5 cannot be kept
--prompts {prompts} --kind pruned --layers x --output {out} | 'x' is no list of layers
--prompts {prompts} --kind pruned --layers 0 --output {out} | 1<=x<=256
--prompts {prompts} --kind dspark --layers 0,1 --output {out} | Give a number for this kind
--prompts {prompts} --layers 2 --output {out} | --layers has no effect with --kind eagle3
--prompts {prompts} --size 1MiB --output {out} | --size has no effect with --kind eagle3
--prompts {prompts} --kind dspark --no-state-norms --output {out} | --no-state-norms has no effect with --kind dspark
--prompts {prompts} --kind medusa --taps 1 --output {out} | --taps has no effect with --kind medusa
--prompts {prompts} --kind pruned --inner 64 --output {out} | --inner has no effect with --kind pruned
--prompts {prompts} --kind store --output {out} | --steps has no effect with --kind store
--prompts {prompts} --passes 2 --output {out} | --passes has no effect with --steps
--prompts {prompts} --begin-with {folder} --output {out} | --vocabulary has no effect with --begin-with, whose draft
--answers {prompts} --output {out} | --answer-tokens has no effect without --prompts or --made-up
"""
"""Options, and words of the messages."""


def test_what_it_refuses(wager: Call, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {"folder": tmp_path, "prompts": prompts, "missing": tmp_path / "missing.jsonl", "out": tmp_path / "head"}
    for line in REFUSED.strip().splitlines():
        call, _, words = line.format(**paths).partition(" | ")
        if not ("cuda" in call and torch.cuda.is_available()):
            refused(wager("train", *SHORT, *call.split()), words)
    assert not (paths["out"] / "answers.jsonl").exists(), "nothing is answered for options that are refused"
    monkeypatch.setitem(sys.modules, "torch", None)
    found = wager("train", "--prompts", str(prompts), "-o", str(tmp_path / "head"))
    refused(found, "needs PyTorch", "pip install 'wager[train]'")
