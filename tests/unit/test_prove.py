"""wager prove on random models: what it compares, and what it says where a trial or a text shows little."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from every_drafter import every_drafter

from wager.cli import main, prove
from wager.draft.ngram import NgramDrafter
from wager.models.random_models import MODELS
from wager.testing import PROOF_DRAFTERS
from wager.types import Completion, Draft, DraftRequest, FinishReason, Stats

MODEL = "random:llama:tiny"
Proof = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Proof:
    """Runs the command: exit code, JSON, and what it printed."""
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path / "cache"))

    def run(*arguments: str, model: str = MODEL) -> tuple[int, dict[str, Any], str]:
        out = tmp_path / "proof.json"
        code = main(["prove", "--model", model, "--threads", "1", *arguments, "--json", str(out)])
        printed = capfd.readouterr()
        assert out.exists(), printed.err
        return code, json.loads(out.read_text(encoding="utf-8")), printed.out + printed.err

    return run


def completion(name: str, ids: tuple[int, ...], reason: FinishReason = "length", **stats: int) -> Completion:
    return Completion(name, 0, ids, "", reason, Stats(prompt_tokens=1, completion_tokens=len(ids), seed=0, **stats))


@pytest.mark.parametrize(("tokens", "prompts"), [("2", "1"), ("3", "2")])
def test_every_preempted_trial_is_preempted(proof: Proof, tokens: str, prompts: str) -> None:
    code, value, printed = proof("--limit", prompts, "--max-tokens", tokens, "--drafter", "none", "--drafter", "ngram")
    assert code == 0, printed
    trials = [trial for trial in value["outcomes"] if "preempted" in trial["condition"]]
    assert [trial["preemptions"] > 0 for trial in trials] == [True] * 4
    alone = "one prompt, so nothing ran beside it"
    assert all((alone in trial["notes"]) == (prompts == "1") for trial in trials)


@pytest.mark.slow
def test_trials_that_show_little_say_so(proof: Proof, tmp_path: Path) -> None:
    code, value, printed = proof("--limit", "1", "--max-tokens", "1", "--drafter", "ngram", "--drafter", "none")
    assert code == 0
    [note] = {note for trial in value["outcomes"] for note in trial["notes"] if "preemption" in note}
    assert note == "no preemption: every text ended in the step of its first token" and f": {note}." in printed
    assert all(
        (note in trial["notes"]) == ("preempted" in trial["condition"] and not trial["preemptions"])
        for trial in value["outcomes"]
    )
    assert "no guess was made" in printed
    notes = {each["drafter"]: each["note"] for each in value["drafters"]}
    assert notes == {"ngram": "it guessed nothing, so nothing is proven of it", "none": ""}
    assert "ngram: it guessed nothing, so nothing is proven of it." in printed
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": 1, "category": "qa", "prompt": "x"}), encoding="utf-8")
    _, value, _ = proof(str(prompts), "--raw", "--max-tokens", "4", "--drafter", "none")
    warm = {note for trial in value["outcomes"] if "warm" in trial["condition"] for note in trial["notes"]}
    assert any(note.startswith("no prefix cached") for note in warm)


def test_the_first_difference_is_named(proof: Proof, monkeypatch: pytest.MonkeyPatch) -> None:
    change: dict[str, Any] = {}

    def spoiled(engine, requests, condition, *, on_delta=None):
        found = answers(engine, requests, condition, on_delta=on_delta)
        if condition.concurrency > 1:
            found[requests[1].id] = replace(found[requests[1].id], **change)
        return found

    answers = prove.answers
    monkeypatch.setattr(prove, "answers", spoiled)
    arguments = ("--limit", "2", "--max-tokens", "5", "--drafter", "none", "--temperature", "0")
    code, value, printed = proof(*arguments)
    assert code == 0
    assert value["summary"] == {"tokens": 40, "differing": 0, "finish_reasons": 8, "finish_reasons_differing": 0}
    assert "40 token ids and 8 finish reasons compared, none differs." in printed
    change["finish_reason"] = "stop"
    code, value, printed = proof(*arguments)
    assert code == 1
    assert (value["summary"]["differing"], value["summary"]["finish_reasons_differing"]) == (0, 2)
    assert "0 of 40 token ids and 2 of 8 finish reasons differ" in printed
    assert "after token 5: plain ends with length, speculative with stop" in printed
    [first, *_] = [trial["first"] for trial in value["outcomes"] if trial["first"]]
    assert (first["plain_finish_reason"], first["finish_reason"], first["position"]) == ("length", "stop", 5)
    change["token_ids"] = (-7,) * 5
    code, value, printed = proof(*arguments)
    assert (code, value["summary"]["differing"]) == (1, 10)
    assert f"prompt {first['prompt']}, token 0: plain" in printed and "speculative -7" in printed


def test_a_rule_for_chains_leaves_trees_out(proof: Proof) -> None:
    code, value, printed = proof("--limit", "1", "--max-tokens", "4", "--verify", "block")
    assert code == 0, printed
    assert {each["drafter"] for each in value["outcomes"]} == {"none", "ngram", "adversary"}
    assert "random-tree is left out" in printed


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_texts_of_random_models_are_varied(proof: Proof, family: str) -> None:
    """All drafters; an error of the engine could not hide behind a constant text."""
    code, value, printed = proof("--limit", "2", "--max-tokens", "24", model=f"random:{family}:tiny")
    assert code == 0, printed
    assert all(len({*each["token_ids"]}) > 8 for each in value["answers"])
    assert value["summary"]["tokens"] == 2 * 4 * 4 * 48
    assert f"{family}:tiny" in printed  # not an emoji


# ---- every drafter ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "model", "conditions"),
    [
        ("64MiB", MODEL, prove.CONDITIONS[1:2]),
        ("64MiB", MODEL, prove.CONDITIONS[1:]),
        ("", MODEL, prove.CONDITIONS[1:]),
        ("", "random:qwen3-next:tiny", prove.CONDITIONS[1:]),
    ],
)
def test_every_drafter_of_the_registry_can_be_proven(
    proof: Proof, tmp_path: Path, memory: str, model: str, conditions: tuple[str, ...]
) -> None:
    """Each guesses in both modes; combined, too. The cache leaves room for what models and heads keep. Without
    the first condition, which takes a second engine of each drafter."""
    options = every_drafter(model, tmp_path)
    options["staged"] = f"model:{MODEL}+suffix"
    options["merged"] = f"ngram//{options['eagle3']}"
    options["backed"] = f"suffix..{options['eagle3']}"
    options["backed by a tree"] = f"{options['store:tree']}..{options['eagle3:tree']}"
    options["several"] = f"ngram,{options['medusa']}"
    options |= {name: name for name in PROOF_DRAFTERS}
    flags = [flag for option in options.values() for flag in ("--drafter", option)]
    size = ["--memory", memory] if memory else ["--max-context", "1024"]
    size += ["--model", model, *(word for name in conditions for word in ("--condition", name))]
    code, value, printed = proof("--limit", "2", "--max-tokens", "8", "--concurrency", "2", *size, *flags)
    assert code == 0, printed
    assert [each["drafter"] for each in value["drafters"]] == [*options.values()]
    for each in value["drafters"]:
        if each["drafter"] == options["several"]:  # the policy decides
            continue
        assert each["drafted"] > 0, each
        assert each["tokens"] == 2 * len(conditions) * 2 * 8
        assert each["differing"] == each["finish_reasons_differing"] == 0
        assert f"{each['drafter']}: {each['tokens']} token ids" in printed
        assert not each["failures"], each
    guessed = {each["drafter"]: each["accepted"] / each["drafted"] for each in value["drafters"] if each["drafted"]}
    itself = (f"model:{MODEL}", f"tli:{MODEL}") if model == MODEL else ()  # which guesses as it would answer
    for name in ("prediction", "random-tree", *itself):
        assert guessed[name] > 0.2, name
    assert 0.2 < guessed["prediction"] < 0.8 and guessed["adversary"] == 0


def test_a_drafter_that_fails_fails_the_proof(proof: Proof, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and as part of another one; the trials of the others are still made."""

    def fails(self: NgramDrafter, requests: Sequence[DraftRequest]) -> list[Draft]:
        raise RuntimeError("no idea")

    monkeypatch.setattr(NgramDrafter, "propose", fails)
    for drafter in ("ngram", "suffix//ngram"):
        code, value, printed = proof("--limit", "1", "--max-tokens", "4", "--drafter", drafter, "--drafter", "suffix")
        assert code == 1
        assert f"Drafter {drafter} failed during the proof: Drafter 'ngram'" in printed and "no idea" in printed
        assert [bool(each["failure"]) for each in value["drafters"]] == [True, False]
