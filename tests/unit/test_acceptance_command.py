"""`wager acceptance` on a target with a closed form and a drafter of known acceptance: what it estimates, what it
writes, and that `wager plan` and `wager replay` read it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from wager.cli import loading
from wager.cli.verbs import cli
from wager.config import EngineConfig
from wager.errors import UsageError
from wager.llm import LLM
from wager.profiling.acceptance import AcceptanceCounts, AnswerPath, DraftedAnswer, PositionDraft, record_drafts
from wager.testing import SetAcceptanceDrafter, ToyDistribution, ToyOracle
from wager.testing.toy import toy_engine
from wager.types import Draft, Request, SamplingParams

TEXT = ToyDistribution(vocab=64)
RATES = (0.8, 0.6, 0.5)
SURVIVAL = tuple(accumulate(RATES, mul))
"""The true S_1, S_2, S_3."""


class SometimesDeclining(SetAcceptanceDrafter):
    """Has no draft at a third of all positions, whatever they are."""

    name = "gaps"

    def _draft(self, request: Any) -> Any:
        draft = super()._draft(request)
        gap = random.Random(f"gap {request.seq_id} {request.position}").random() < 1 / 3
        return draft.truncate(0) if gap else draft


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Calls the command on a toy engine; `ngram` stands for the drafter of known acceptance, `ngram:1` for the one with
    gaps."""

    def open_engine(config: EngineConfig, *, like: object = None, shared_by: object = ()) -> Any:
        kinds: dict[str, type[SetAcceptanceDrafter]] = {
            "ngram": SetAcceptanceDrafter,
            "ngram:1": SometimesDeclining,
            "auto": SetAcceptanceDrafter,
        }
        drafter = kinds[config.speculation.drafter](TEXT.vocab, RATES, oracle=ToyOracle(TEXT))
        engine: Any = toy_engine(TEXT, drafter=drafter, num_blocks=400, max_rows=256)
        engine.tokenizer = SimpleNamespace(encode=lambda text: [ord(letter) % 64 for letter in text])
        engine.target = SimpleNamespace(opened=SimpleNamespace(fingerprints={}, path=Path("toy")))
        engine.drafter_name, engine.kernels = drafter.name, SimpleNamespace(name="toy", reason="")
        return engine

    monkeypatch.setattr(loading, "open_engine", open_engine)
    rows = [{"id": i, "category": ("code", "math")[i % 2], "prompt": f"prompt {i}"} for i in range(40)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, rows)))

    def call(*arguments: str) -> Result:
        defaults = ["--raw", "--depth", "3", "--max-tokens", "100"]
        return CliRunner().invoke(cli, ["acceptance", str(prompts), *defaults, *arguments], catch_exceptions=False)

    return call


SAMPLED = ["--temperature", "0.8", "--top-p", "0.95", "--seed", "4"]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [[], SAMPLED])
def test_the_estimates_hold_the_truth(run: Any, tmp_path: Path, sampling: list[str]) -> None:
    out = tmp_path / "acceptance.json"
    result = run("--drafter", "ngram", "-o", str(out), *sampling)
    assert result.exit_code == 0
    value = json.loads(out.read_text())
    for true, found, low, high in zip(
        SURVIVAL, value["survival"], value["survival_low"], value["survival_high"], strict=True
    ):
        assert low < true < high
        assert low < found < high
        assert high - low < 0.1
    per_round = sum(SURVIVAL)
    assert value["tau_low"] < 1 + per_round < value["tau_high"]
    true_alpha = per_round / (per_round + 1 - SURVIVAL[-1])
    assert value["alpha_low"] < true_alpha < value["alpha_high"]
    assert value["tau"] == value["depths"][-1]["tau"] == value["tokens"] / value["rounds"]
    assert value["coverage"] == 1.0
    assert value["drafter"] == "set"
    assert value["temperature"] == (0.8 if sampling else 0.0)
    assert value["prompts"] == 40
    assert value["tokens"] == 4000
    assert {name: each["prompts"] for name, each in value["categories"].items()} == {"code": 20, "math": 20}
    assert "acceptance" not in value


@pytest.mark.slow
def test_rounds_without_a_draft_count_as_not_accepted(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "acceptance.json"
    run("--drafter", "ngram:1", "-o", str(out))
    value = json.loads(out.read_text())
    assert value["coverage"] == pytest.approx(2 / 3, abs=0.03)
    assert value["survival"][0] == pytest.approx(RATES[0] * 2 / 3, abs=0.03)
    assert value["survival_given_draft"] == pytest.approx(list(SURVIVAL), abs=0.04)
    true_alpha = sum(SURVIVAL) / (sum(SURVIVAL) + 1 - SURVIVAL[-1])
    assert value["alpha"] == pytest.approx(true_alpha, abs=0.03)
    assert value["depths"][-1]["drafted"] == pytest.approx(3 * 2 / 3, abs=0.1)


def test_plan_and_replay_read_the_files(run: Any, tmp_path: Path) -> None:
    out, trace = tmp_path / "acceptance.json", tmp_path / "trace.jsonl"
    run("--drafter", "ngram", "-o", str(out), "--trace", str(trace), "--limit", "6")
    options = (
        f"--model Llama-3.1-8B --hardware H100 --batch 4 --acceptance {out} --any-model --depth 3 --drafter-shape free "
        "--json -"
    )
    planned = CliRunner().invoke(cli, ["plan", *options.split()], catch_exceptions=False)
    [point] = json.loads(planned.stdout)["points"]
    value = json.loads(out.read_text())
    assert point["tokens_per_round"] == pytest.approx(value["tau"])
    replayed = CliRunner().invoke(
        cli, ["replay", str(trace), "--concurrency", "1", "--policy", "fixed:3", "--json", "-"], catch_exceptions=False
    )
    [at_three] = [p for p in json.loads(replayed.stdout)["points"] if p["policy"] == "fixed:3"]
    assert at_three["tau"] == pytest.approx(value["tau"])


def test_several_drafters_are_measured_side_by_side(run: Any, tmp_path: Path) -> None:
    out, trace = tmp_path / "all.json", tmp_path / "trace.jsonl"
    outputs = ("--json", str(out), "--trace", str(trace))
    result = run("--drafter", "ngram,ngram:1", *outputs, "--max-tokens", "20", "--limit", "8")
    assert result.exit_code == 0
    value = json.loads(out.read_text())
    assert list(value["drafters"]) == ["set", "gaps"]
    assert value["card"]["settings"]["max_tokens"] == 20
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    assert len(rows) == 8
    assert list(rows[0]["drafters"]) == ["set", "gaps"]
    assert all(word in result.stdout for word in ("set", "gaps", "code", "math", "all"))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--drafter ngram,ngram:1 -o x.json", "one drafter"),
        ("--drafter none", "nothing to measure"),
        ("--drafter ngram --drafter ngram", "named twice"),
        ("--drafter ngram --depth 9", "drafts at most 8"),
        ("--drafter suffix:tree --trace x.jsonl", "suffix:tree makes trees, and a trace holds chains"),
        ("--drafter ngram//suffix --trace x.jsonl", "ngram//suffix makes trees, and a trace holds chains"),
    ],
)
def test_misuse_is_named(run: Any, arguments: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        run(*arguments.split())


def test_recorded_answers_count_as_those_that_the_model_gives(tmp_path: Path) -> None:
    """The same answers, generated and from a log; from the log without the model's weights."""
    llm = LLM("random:llama:tiny", drafter="none")
    prompts = [[7 * at % 97 for at in range(12 + row)] * 2 for row in range(6)]
    answers = llm.generate(prompts, SamplingParams(max_tokens=30, ignore_eos=True))
    rows = [
        {"prompt": prompt, "category": "ab"[at % 2], "ignore_eos": True, "response": answer.token_ids}
        for at, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    asked, log = (tmp_path / name for name in ("asked.jsonl", "log.jsonl"))
    asked.write_text("\n".join(map(json.dumps, rows)))
    log.write_text("\n".join(map(json.dumps, [*rows, {"prompt": "unanswered"}])))
    files = [tmp_path / name for name in ("generated.json", "recorded.json")]

    def run(*arguments: object) -> Result:
        words = ["acceptance", *map(str, arguments), "--model", "random:llama:tiny"]
        return CliRunner().invoke(cli, words, catch_exceptions=False)

    assert run(asked, "--drafter", "ngram", "--max-tokens", 30, "-o", files[0]).exit_code == 0
    result = run(log, "--recorded", "--drafter", "ngram", "-o", files[1])
    assert "1 of 7 requests have no answer" in result.stderr
    first, second = (json.loads(path.read_text()) for path in files)
    for part in (first, second), (first["categories"]["a"], second["categories"]["a"]):
        assert part[0]["tokens"] == part[1]["tokens"] >= 90
        assert part[0]["tau"] == pytest.approx(part[1]["tau"], rel=0.05)  # of drafts that a length limit cut
    assert second["target_fingerprint"] == first["target_fingerprint"] and second["temperature"] is None
    several = " ".join(run(log, "--recorded").stdout.split())
    assert all(f"{name}, by depth, all prompts" in several for name in ("ngram", "suffix"))
    for words, complaint in (
        (["--hardware", "h100"], "--hardware has no effect without --recorded"),
        (["--recorded", "--temperature", "1"], "--temperature has no effect with --recorded"),
        (["--recorded", "--drafter", "recycle"], "Drafter recycle needs a model that runs"),
        (["--recorded", "--limit", "1", "--prompts", log], "given twice"),
        (["--recorded", "--hardware", "h100", "--json", tmp_path / "new"], "'random:llama:tiny' is not known"),
    ):
        refused = CliRunner().invoke(cli, ["acceptance", str(log), "--model", "random:llama:tiny", *map(str, words)])
        assert refused.exit_code and complaint in (refused.stderr + str(refused.exception))
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_log_says_what_speculation_would_bring(smollm2: Path, tmp_path: Path) -> None:
    """The speed-up is what `wager plan` makes of the file."""
    log, file = tmp_path / "log.jsonl", tmp_path / "acceptance.json"
    turns = [{"role": "user", "content": "Repeat: one two three four five six."}]
    turns.append({"role": "assistant", "content": "One two three four five six. One two three four five six."})
    log.write_text("\n".join(json.dumps({"messages": turns * 2, "id": row}) for row in range(3)))

    def run(*arguments: object) -> str:
        return CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False).stdout

    shown = run("acceptance", log, "--recorded", "--drafter", "suffix", "--hardware", "h100", "--model", smollm2)
    run("acceptance", log, "--recorded", "--drafter", "suffix", "--model", smollm2, "-o", file)
    context = round(json.loads(file.read_text())["context"])
    options = "--drafter-shape", "free", "--batch", 1, "--context", context, "--json", "-"
    planned = run("plan", "--model", smollm2, "--hardware", "h100", "--acceptance", file, *options)
    [point] = json.loads(planned)["points"]
    best = max(point["depths"], key=lambda outcome: outcome["speedup"])
    [row] = [line.split() for line in shown.splitlines() if line.split()[:1] == ["suffix"]]
    assert row[1:] == [str(best["depth"]), f"{best['tokens']:.2f}", f"{best['speedup']:.2f}"]
    assert best["speedup"] > 2


def test_auto_is_what_the_engine_takes_it_for(run: Any) -> None:
    """The store that comes with a model, not what `auto` is where there is none."""
    result = run("--drafter", "auto", "--depth", "1", "--max-tokens", "4")
    assert result.exit_code == 0, result.stderr
    assert "set, drafts of 1, by category" in " ".join(result.stdout.split())


def test_a_file_that_cannot_be_written_is_named(run: Any) -> None:
    result = run("--drafter", "ngram", "-o", "/nowhere/x.json")
    assert result.exit_code == 2
    assert "'/nowhere/x.json' cannot be written: there is no such folder" in result.stderr


# ---- estimates of answers written by hand ---------------------------------------------------------------------------


def answer(matching: Sequence[int], *, drafted: int = 4, room: int = 4) -> DraftedAnswer:
    """An answer whose drafts all have `drafted` tokens."""
    drafts = tuple(PositionDraft(room, tuple(range(drafted))) for _ in matching)
    return DraftedAnswer(10, drafts, tuple(AnswerPath.chain(count, drafted=drafted) for count in matching))


def test_a_depth_beyond_the_end_of_an_answer_is_unobserved() -> None:
    """Rounds of depth 4 begin at 0, 3 and 7: accepted 2, 3 and 1, where the last has only two tokens to agree with."""
    estimate = AcceptanceCounts([answer([2, 9, 9, 3, 9, 9, 9, 1, 9])], 4).estimate()
    assert estimate.rounds == 3
    assert [each.value for each in estimate.survival] == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert estimate.alpha.value == pytest.approx(6 / (6 + 3))
    assert estimate.tau.value == pytest.approx(9 / 3)
    assert (estimate.tau.low, estimate.tau.high) == (None, None)
    all_right = AcceptanceCounts([answer([2, 1]), answer([4, 3, 2, 1])], 4).estimate()
    assert [each.value for each in all_right.survival] == [1.0] * 4, "the first ends after two"


class TreeOfTwo(SetAcceptanceDrafter):
    """Two candidates, of which the first is right with probability 0.5 and the second with 0.3; one guess below each,
    right with probability 0.6 if its candidate is."""

    name = "two"
    makes_trees = True

    def _draft(self, request: Any) -> Any:
        rng = random.Random(f"{request.seq_id} {request.position}")
        right, below, *_ = [*self._next_tokens(request), 0]
        wrong = [token for token in (7, 8, 9) if token != right]
        draw = rng.random()
        tokens = [right if draw < 0.5 else wrong[0], right if 0.5 <= draw < 0.8 else wrong[1]]
        tokens += [below if rng.random() < 0.6 else (below + 1) % 64 for _ in range(2)]
        return Draft(request.seq_id, tuple(tokens), (-1, -1, 0, 1), (0.5, 0.3, 0.3, 0.18), self.name)


@pytest.mark.slow
def test_estimates_of_trees_of_known_acceptance() -> None:
    """The second candidate is right in 0.6 of the half in which the first is not. Of every number of guesses the
    likeliest are verified, so every way that a round can go is known."""
    engine = toy_engine(TEXT, drafter=TreeOfTwo(64, RATES, oracle=ToyOracle(TEXT)), num_blocks=400)
    requests = [Request(str(i), (1 + i, 2, 3), SamplingParams(max_tokens=150, ignore_eos=True)) for i in range(24)]
    answers = record_drafts(engine, requests, depth=4, concurrency=8).answers
    estimate = AcceptanceCounts(answers, 4).estimate()
    assert estimate.tokens == 24 * 150
    assert [each.value for each in estimate.survival] == pytest.approx([0.8, 0.48, 0, 0], abs=0.04)
    assert [each.tau.value for each in estimate.depths] == pytest.approx([1.5, 1.8, 2.1, 2.28], abs=0.06)
    assert estimate.alpha.value == pytest.approx(1.28 / (1.28 + 0.2 + 0.8 * 0.4), abs=0.03)
