"""The command line end to end, on a tiny model with random weights: output, files and errors."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import re
import resource
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import edit
from tokenizer_models import save_model

from in_process import Call, refused
from wager.cli.run import footer
from wager.cli.verbs import VERBS
from wager.errors import UsageError
from wager.models import hub
from wager.serve.limits import read_api_keys
from wager.types import Stats

MODEL = "random:llama:tiny"
FLAGS = ("--model", MODEL, "--threads", "1", "--memory", "256MiB")
REPETITIVE = ("--frequency-penalty", "-2")
"""Prefers tokens that have occurred, so that guesses from them are accepted."""


# ---- misuse -------------------------------------------------------------------------------------------------------

MISUSE = """
rnu | Did you mean 'run'?
run hi --dept 3 | --depth
run hi --top-p 3 | top_p = 3.0
run hi --stop '' | stop
run hi --drafter ' ' | ' ' is empty
run hi --raw --system x | --raw
run hi --rounds --show | --show colours the text; --rounds
run hi --show --json - | --show has no effect with --json -
chat qwen3:4b | A model is given with -m
run hi --json /nowhere/out.json | /nowhere/out.json
run hi --config none.toml | none.toml
run hi --receipt - | '-' is standard output, which this is not written to
acceptance -o same --trace same | Invalid value for '--trace': 'same' is that of '-o' / '--output', too
acceptance --metrics /dev/null -o - --json - | Invalid value for '--json': '-' is that of '-o'
bench --url http://127.0.0.1 --json - --acceptance-file - | Invalid value for '--acceptance-file': '-' is standard
bench --url http://127.0.0.1 --json ./same --acceptance-file same | is that of '--json', too
acceptance --metrics README -o README | Invalid value for '-o' / '--output': 'README' is that of '--metrics', too
plan --hardware h100 --acceptance 0.5,README --json ./README | is that of '--acceptance', too
plan --hardware h100 --batch 1 --batch 8 | --batch is given 2 times
acceptance --metrics README --metrics README | --metrics is given 2 times
run hi --json a --json b | --json is given 2 times
bench README --json README | Invalid value for '--json': 'README' is that of '[FILE]', too
bench --url http://a..b | 'http://a..b' is not the URL of a server
run hi --drafter none --depth 4 | --depth 4 has no effect
run hi --drafter none --policy threshold | --policy threshold has no effect
bench --drafter none --compare | --compare
bench no-such-file.jsonl | no-such-file.jsonl
bench /dev/null --prompts /dev/null | twice
train --output x --prompts none.jsonl | 'none.jsonl' does not exist
run hi --max-tokens 0 | max_tokens must be an integer, at least 1, that
run hi --json-schema none.json | none.json
run hi --json-schema README | an object has 'type' twice
run hi --json-schema /dev/null | The schema /dev/null is not JSON
completion tcsh | tcsh
prove --verify block --temperature 1 | --verify block
prove FLAGS --verify block --drafter random-tree | makes trees
prove --concurrency 1 | --concurrency
prove --condition alone --condition warm-alone --no-prefix-cache | --no-prefix-cache leaves no --condition warm-alone
calibrate --seconds 0 | seconds = 0 is out of range
calibrate --seconds 1e300 | seconds = 1e+300
calibrate --drafter oracel | oracel
calibrate FLAGS --drafter ngram --drafter ngram:2 --seconds 0.1 | Two drafters have the name 'ngram'
calibrate FLAGS --drafter ngram,ngram:2 --seconds 0.1 | Two drafters have the name 'ngram'
calibrate FLAGS --max-context 16 | contexts of 16 is too small to measure steps in
run hi FLAGS --threads 100000 | threads must be from 1 to
run hi --memory 999999999999999999999999999999TiB | 1048576 TiB
run hi FLAGS --max-context 100000000000000000000 | --max-context
bench --repeat 4294967296 | 1<=x<=1000
plan --hardware H100 --depth 999999999 | 256
plan --model MODEL --hardware this | Run `wager calibrate`
plan --model Llama-3.1-8B --hardware this | Only models on this machine can be calibrated
plan --model SmolLM2-135M-Instruct --hardware this | wager calibrate --model SmolLM2-135M-Instruct
replay --concurrency 100000000 | 16384
"""
"""Calls, and words of their messages."""


def test_misuse_is_named_and_exits_with_2(wager: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path))
    (tmp_path / "README").write_text('{"type": 1, "type": 2}')
    monkeypatch.chdir(tmp_path)
    for line in MISUSE.strip().splitlines():
        call, _, words = line.replace("FLAGS", " ".join(FLAGS)).replace("MODEL", MODEL).partition(" | ")
        refused(wager(*shlex.split(call)), words)
    for option, begin in (("--drafter", "ngram:"), ("--memory", ""), ("--threads", "")):
        refused(wager("run", "hi", *FLAGS, option, begin + "9" * 5000), option.strip("-"))
    assert list((tmp_path / "calibrations").glob("*.json")) == []
    assert (tmp_path / "README").read_text() == '{"type": 1, "type": 2}'


def test_a_result_may_have_the_name_of_a_drafter(wager: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call = ["run", "hi", *FLAGS, "--max-tokens", "1", "--drafter", "none", "--json", "none"]
    assert [wager(*call).code for _ in range(2)] == [0, 0]


def test_an_unknown_model_exits_with_1_and_a_hint(wager: Call) -> None:
    unknown = ("error: Model 'smollm2-135m' is not known.", "hint: Did you mean 'smollm2:135m'?")
    for verb in (["run", "hi"], ["calibrate"]):
        refused(wager(*verb, "--model", "smollm2-135m"), *unknown, code=1)


# ---- run ----------------------------------------------------------------------------------------------------------


def test_run_streams_text_and_prints_stats_on_stderr_and_json(wager: Call, tmp_path: Path) -> None:
    call = ["run", "hello hello hello", *FLAGS, "--max-tokens", "24", "--drafter", "ngram"]
    plain = wager(*call)
    last = plain.err.strip().splitlines()[-1]
    form = r"\d+ tokens, [\d.–]+ tok/s, τ [\d.]+ \(ngram: \d+ of \d+ guesses accepted; prompt \d+ tokens"
    assert plain.code == 0 and re.match(form, last)
    value = json.loads(wager(*call, "--json", "-").out)
    assert value["text"] + "\n" == plain.out == wager(*call, "--json", str(tmp_path / "out.json")).out
    assert value["tokens"] == len(value["token_ids"]) == len(value["drafted_by"]) <= 24
    assert json.loads((tmp_path / "out.json").read_text())["token_ids"] == value["token_ids"]


def test_the_seconds_of_the_first_token_are_not_counted_nor_is_it() -> None:
    stats = Stats(prompt_tokens=3, completion_tokens=9, seed=0, rounds=5, decode_s=2.0)
    assert footer(stats, sampled=False).startswith("9 tokens, 4.0 tok/s")
    assert footer(replace(stats, completion_tokens=1, decode_s=0.0), sampled=False).startswith("1 tokens, – tok/s")


def test_show_colours_guessed_tokens(wager: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    call = ["run", "aaaa aaaa", *FLAGS, *REPETITIVE, "--max-tokens", "60", "--drafter", "ngram", "--show"]
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain = wager(*call[:-1])
    shown = wager(*call)
    assert "\x1b[32m" in shown.out
    assert re.sub(r"\x1b\[\d+m", "", shown.out) == plain.out
    legend = next(line for line in shown.err.splitlines() if line.startswith("guessed by"))
    target, guessed = re.findall(r"\d+", re.sub(r"\x1b\[\d+m", "", legend))
    accepted = int(re.search(r"(\d+) of \d+ guesses", shown.err)[1])  # type: ignore[index]
    assert int(guessed) == accepted > 0
    assert int(target) + accepted == int(shown.err.strip().splitlines()[-1].split()[0])
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in wager(*call).out


def test_an_error_in_a_terminal_has_a_colour_unless_none_is_wanted() -> None:
    for no_color in ("", "1"):
        ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "NO_COLOR": no_color}
        subprocess.run([sys.executable, "-m", "wager.cli", "rm", "no/such"], stderr=theirs, env=environment)
        said = os.read(ours, 4096)
        assert b"error: " in said and (b"\x1b" in said) == (not no_color)
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize(
    ("drafter", "extra"), [("ngram,recycle", ["--temperature", "0.9", "--seed", "4"]), ("none", [])]
)
def test_rounds_show_every_guess_and_add_up(wager: Call, drafter: str, extra: list[str], tmp_path: Path) -> None:
    call = ["run", "abab abab", *FLAGS, *REPETITIVE, "--max-tokens", "40", "--drafter", *drafter.split(), *extra]
    plain, shown = wager(*call), wager(*call, "--rounds", "--json", str(tmp_path / "out.json"))
    row = json.loads((tmp_path / "out.json").read_text())
    assert json.loads(wager(*call, "--rounds", "--json", "-").out)["token_ids"] == row["token_ids"]
    rounds = row["round_details"]
    assert "".join(item["text"] for item in rounds) == row["text"] == plain.out[:-1]
    assert [token for item in rounds for token in item["emitted"]] == row["token_ids"]
    assert len(rounds) == row["rounds"]
    assert sum(item["accepted"] for item in rounds) == row["accepted"]
    assert sum(len(item["verified"]) for item in rounds) == row["drafted"]
    assert sum(len(item["emitted"]) for item in rounds) == row["tokens"]
    assert all(len(item["drafted"]) == len(item["drafted_text"]) == len(item["parents"]) for item in rounds)
    assert all(set(item["seconds"]) == {"draft", "forward", "rest"} for item in rounds)
    assert all(item["seconds"]["forward"] > 0 for item in rounds)
    lines = shown.out.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("round")] == [
        f"round {i + 1}" for i in range(len(rounds))
    ]
    assert lines[-1].startswith(f"  {row['tokens']} tokens: {row['accepted']} guessed and accepted, ")
    assert f"{row['accepted']} of {row['drafted']} guesses accepted" in shown.err
    assert ("seed" in shown.err) == ("; seed 4)" in shown.err) == bool(extra), "a greedy answer needs no seed"


def test_the_tokens_of_a_round_are_visible(wager: Call) -> None:
    more = "--raw --max-tokens 60 --drafter ngram --depth 8 --rounds"
    lines = wager("run", "a b\n a b\n a b\n", *FLAGS, *REPETITIVE, more=more).out.splitlines()
    guessed = [line.partition(": ")[2] for line in lines if line.startswith("  guessed by ngram: ")]
    assert guessed[0] == "· a · b \\n · a ·"
    for name in ("accepted ", "discarded ", "corrected: ", "bonus: "):
        assert any(line.startswith(f"  {name}") for line in lines), name


def test_the_prompt_may_come_from_stdin(wager: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = wager("run", "piped in", *FLAGS, "--max-tokens", "8").out
    for arguments in ([], ["-"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("piped in"))
        assert wager("run", *arguments, *FLAGS, "--max-tokens", "8").out == expected
    monkeypatch.setattr(sys, "stdin", io.StringIO("  "))
    assert wager("run", *FLAGS).code == 2


def test_raw_and_system_change_the_prompt(wager: Call) -> None:
    def prompt_tokens(*extra: str) -> int:
        result = wager("run", "hello", *FLAGS, "--max-tokens", "2", "--json", "-", *extra)
        return int(json.loads(result.out)["prompt_tokens"])

    assert prompt_tokens("--raw") == len("hello")
    assert prompt_tokens() == len("user\nhello") + len("assistant\n") + 3
    assert prompt_tokens("--system", "be") == prompt_tokens() + len("system\nbe") + 2


def test_a_prompt_that_does_not_fit_fails_with_the_figures(wager: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(wager("run", "x" * 1100, *FLAGS, "--max-context", "1024"), "1024", code=1)
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 1100 + "\n"))
    refused(wager("chat", *FLAGS, "--max-context", "1024"), "1024", code=1)


def test_a_prompt_may_be_several_words_and_options_short(wager: Call) -> None:
    quoted = wager("run", "say it again", *FLAGS, "--max-tokens", "4", "--temperature", "0.7", "--seed", "3")
    short = wager("run", "say", "it", "again", "-m", MODEL, *FLAGS[2:], more="-n 4 --temp 0.7 --seed 3")
    assert short.out == quoted.out and short.code == 0
    assert "cut off after 4 tokens: -n N allows more" in short.err


def test_words_without_the_effect_that_they_have_elsewhere_are_told(wager: Call, tmp_path: Path) -> None:
    config = tmp_path / "options.toml"
    config.write_text(f'model = "{MODEL}"\nmemory = "256MiB"\nmax-tokens = 2\nthreads = 1\n')
    told = wager("run", "qwen3:4b", "hi", "--top-p", "0.5", "--seed", "3", "--config", str(config))
    assert told.code == 0, told.err
    assert "qwen3:4b is read as a word of the prompt" in told.err
    assert "no effect at temperature 0: --top-p 0.5 and --seed 3." in told.err
    for more in ("--temp 0.7", "--temp 0.7 --model " + MODEL):
        assert "note:" not in wager("run", "a:b hi", "--top-p", "0.5", "--config", str(config), more=more).err


def test_quiet_and_verbose(wager: Call) -> None:
    call = ["run", "hi", *FLAGS, "-n", "2"]
    usual, quiet, verbose = wager(*call), wager(*call, "-q"), wager(*call, "-v")
    assert usual.out == quiet.out == verbose.out
    assert quiet.err == "" and "memory:" in verbose.err and "memory:" not in usual.err
    assert wager(*call).err, "it is of one call"


def test_an_answer_keeps_to_a_schema_and_is_checked_where_no_grammar_can(wager: Call, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    path.write_text(json.dumps(schema))
    call = ["run", "hi", *FLAGS, "-n", "40", "--json-schema", str(path)]
    assert json.loads(wager(*call).out)["a"] in (1, 2)
    path.write_text(json.dumps({**schema, "not": {"required": ["a"]}}))
    broken = wager(*call)
    assert broken.code == 1 and "The answer breaks 'not'" in broken.err and "No grammar can say not" in broken.err


# ---- help -----------------------------------------------------------------------------------------------------------


def test_help_is_short_and_help_all_is_whole(wager: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for verb in ("", *VERBS):
        lines = wager(*verb.split(), "--help").out.splitlines()
        assert len(lines) <= 40 and max(map(len, lines)) <= 80, verb
    short, whole = wager("run", "-h").out, wager("run", "--help-all").out
    assert "--kv-dtype" in whole and "--kv-dtype" not in short and "--max-tokens" in short
    assert re.search(r"\d{10}", "".join(wager(verb, "--help-all").out for verb in VERBS if verb != "lesson")) is None
    assert "adversary" not in wager("prove", "--help-all").out + wager("drafters").out, "it is for proofs"
    assert wager("-V").out == wager("--version").out


def test_a_shell_completes_verbs_options_models_and_drafters(
    wager: Call, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "_WAGER_COMPLETE" in wager("completion", "zsh").out
    monkeypatch.setenv("_WAGER_COMPLETE", "zsh_complete")
    words = {"cali": "calibrate", "run --max-tok": "--max-tokens", "run -m qwen3:4": "qwen3:4b"}
    for begun, completed in {**words, "run --drafter ngram,rec": "ngram,recycle"}.items():
        monkeypatch.setenv("COMP_WORDS", f"wager {begun}")
        monkeypatch.setenv("COMP_CWORD", str(len(begun.split())))
        with pytest.raises(SystemExit) as ended:
            wager()
        assert ended.value.code == 0 and completed in capfd.readouterr().out.split()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_names_are_shown_as_they_are_while_something_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what rich would take for an emoji or for its markup."""
    from wager.terminal import console

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    with console.working("Loading a[/red]") as say:
        say("Loading b:llama:[bold]")
    with console.meter("answers") as update:
        update("Answering c[/red]:llama:", 1, 1)
    assert all(name in stream.getvalue() for name in ("Loading b:llama:[bold]", "Answering c[/red]:llama:"))


@pytest.mark.parametrize("columns", [60, 80])
def test_a_table_is_divided_where_the_terminal_is_narrow(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    from wager.terminal import console

    names = ["family", *(f"figure number {number}" for number in range(9))]
    rows = [[f"row {row}", *(f"{row}.{number}" for number in range(9))] for row in range(2)]
    for stream, tables in ((Terminal(), 3), (io.StringIO(), 1)):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setenv("COLUMNS", str(columns))
        console.table("title", names, rows, to_stdout=True)
        text = re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue())
        assert text.count("family") == tables and all(name in text for name in names)
        assert tables == 1 or max(map(len, text.splitlines())) <= columns
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [["x", load, policy, *rows[0][1:]] for load in ("1 user", "4 users") for policy in ("none", "adaptive")]
    console.table("", ["same", "load", "policy", *names[1:]], rows, to_stdout=True)
    text = re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue())
    heads = [line.split()[:2] for line in text.splitlines() if "figure" in line]
    assert heads[0] == ["same", "load"] and heads[1:] == [["load", "policy"]] * (len(heads) - 1) != []


def test_results_are_written_whole_or_what_was_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wager.terminal import console

    path, link = tmp_path / "results.json", tmp_path / "link"
    path.write_text("earlier")
    path.chmod(0o600)
    link.symlink_to(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))  # stands for a disk that is full
    try:
        with pytest.raises(UsageError, match="cannot be written to"):
            console.write_json({"text": "x" * 1000}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "earlier"
    console.write_json({"a": 1}, link)
    assert json.loads(path.read_text()) == {"a": 1} and path.stat().st_mode & 0o777 == 0o600
    assert link.is_symlink() and sorted(tmp_path.iterdir()) == [link, path]
    with pytest.raises(UsageError, match="/dev/full"):
        console.write_json({"a": 1}, Path("/dev/full"))
    same = path.stat().st_ino
    monkeypatch.setattr(console.os, "access", lambda *_: False)
    console.write_json({"a": 2}, path)
    assert json.loads(path.read_text()) == {"a": 2} and path.stat().st_ino == same, "nothing can be made beside it"


def test_results_are_written_into_a_file_that_nothing_can_take_the_place_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wager.terminal import console

    path, other, long = tmp_path / "results.json", tmp_path / "other", tmp_path / ("x" * 250)
    path.touch()
    other.hardlink_to(path)
    console.write_json({"a": 1}, path)
    assert json.loads(other.read_text()) == {"a": 1}
    other.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(console.os, "geteuid", lambda: path.stat().st_uid + 1)
        same = path.stat().st_ino
        console.write_json({"a": 2}, path)
        assert path.stat().st_ino == same, "a new one would be of another user, and could be read by nobody else"

    def refused(_self: Path, _target: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refused)  # as of a file that is mounted in a container
        console.write_json({"a": 3}, path)
    console.write_json({"a": 4}, long)
    assert (json.loads(path.read_text()), json.loads(long.read_text())) == ({"a": 3}, {"a": 4})
    assert sorted(tmp_path.iterdir()) == [path, long]


def test_what_a_killed_process_left_of_results_is_removed_and_nothing_else(tmp_path: Path) -> None:
    from wager.terminal import console

    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    path = tmp_path / "results.json"
    left, running, own = (
        tmp_path / f"results.json.{end}"
        for end in (f"{ended.pid}-1.unfinished", f"{os.getpid()}-1.unfinished", f"{ended.pid}-11")
    )
    for each in (left, running, own):
        each.touch()
    console.write_json({"a": 1}, path)
    assert sorted(tmp_path.iterdir()) == sorted([path, running, own])


# ---- chat ---------------------------------------------------------------------------------------------------------


def test_chat_remembers_resets_and_exits(wager: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = 'hello there\n\nhello there\n/what\n/reset\n"""hello\nthere"""\n"""/bye"""\n/bye\nnever read\n'
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    result = wager("chat", *FLAGS, "--max-tokens", "6")
    assert result.code == 0
    prompts = [(int(a), int(b)) for a, b in re.findall(r"prompt (\d+) tokens, (\d+) cached", result.err)]
    assert len(prompts) == 4, "what stands in quotes is said, not done"
    assert prompts[1][0] > prompts[0][0] == prompts[2][0]
    assert prompts[1][1] >= 16, "the second turn reuses the cache of the first"
    assert "/what is not known" in result.err
    assert "cut off after 6 tokens" in result.err


# ---- bench and prove ----------------------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    names = [(family, i) for family in ("qa", "coding") for i in range(2)]
    rows = [{"id": f"{family}#{i}", "category": family, "prompt": f"say {family} {i} {i}"} for family, i in names]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize("concurrency", ["1", "3"])
def test_bench_compares_with_plain(wager: Call, prompts: str, tmp_path: Path, concurrency: str) -> None:
    out = tmp_path / "bench.json"
    more = f"--max-tokens 12 --drafter ngram --compare --repeat 2 --concurrency {concurrency} --json {out}"
    result = wager("bench", prompts, *FLAGS, *REPETITIVE, more=more)
    assert result.code == 0
    value = json.loads(out.read_text())
    assert list(value) == ["card", "rows", "summary", "compare"]
    assert "decode" in result.out and "all" in result.out
    assert re.search(r"4 prompts, speculative and plain, 2 times each: at most about \d+ s\.", result.err)
    assert [row["id"] for row in value["rows"]] == ["qa#0", "qa#1", "coding#0", "coding#1"]
    assert set(value["summary"]["per_category"]) == {"qa", "coding"}
    assert value["card"]["settings"]["prefix_cache"] is False
    assert value["compare"]["differing"] == 0
    decoded = value["summary"]["decode_steps"]
    assert decoded["sequences"] == int(concurrency)
    assert 0 < decoded["tokens"] <= 3 * value["summary"]["tokens"]
    plain = value["compare"]["plain"]["decode_steps"]
    assert value["compare"]["decode_step_speedup"] == pytest.approx(decoded["tok_s"] / plain["tok_s"])
    assert value["compare"]["plain"]["mean_acceptance_length"] == 1.0
    assert value["summary"]["tokens"] == sum(len(row["token_ids"]) for row in value["rows"])


def test_requests_of_a_log_are_answered_as_they_were_asked(wager: Call, tmp_path: Path) -> None:
    messages = [{"role": role, "content": "say qa"} for role in ("user", "assistant", "user", "assistant")]
    rows = [
        {"id": "ids", "prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True},
        {"id": "talk", "messages": messages, "task": "chat", "max_tokens": 9},
        {
            "custom_id": "b",
            "url": "/v1/completions",
            "body": {"prompt": "say", "max_tokens": 2, "echo": True},
        },
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    result = wager("bench", str(path), *FLAGS, more="--json -")
    assert result.code == 0 and "sent their echo" in result.err
    value = json.loads(result.out)
    ids, first, second, _ = value["rows"]
    assert (ids["prompt_tokens"], ids["tokens"]) == (3, 3) and first["prompt_tokens"] < second["prompt_tokens"]
    assert [row["id"] for row in value["rows"]] == ["ids", "talk/1", "talk/2", "b"]
    assert {row["category"] for row in value["rows"]} == {"other", "chat"}
    assert value["card"]["settings"]["max_tokens"] is None and value["card"]["settings"]["temperature"] == 0
    rows = json.loads(wager("bench", str(path), *FLAGS, more="--json - --max-tokens 4 --concurrency 4").out)["rows"]
    assert rows[0]["tokens"] == 4 == max(row["tokens"] for row in rows), "an option counts for all"
    assert "--raw is for texts" in wager("bench", str(path), *FLAGS, more="--raw").err


@pytest.mark.slow
def test_bench_states_the_quality_of_what_is_quantised(wager: Call, prompts: str) -> None:
    short = "--limit 1 --max-tokens 2 --json -"
    result = wager("bench", prompts, *FLAGS, "--quality", more=f"--kv-dtype q8 {short}")
    found = json.loads(result.out)["card"]["quality"]
    assert 0 < found["kl"] < found["kl_99"] < 0.1 and 0.9 < found["top1"] <= 1
    assert found["perplexity"] == pytest.approx(found["reference_perplexity"], rel=0.05) and found["tokens"] > 1000
    assert "the same most likely token" in result.err
    for dtype, named in (("auto", "are bfloat16"), ("q8", "a random model has other weights")):
        refused = wager("bench", prompts, *FLAGS, "--quality", more=f"--dtype {dtype} {short}")
        assert refused.code == 2 and named in refused.err


# ---- a file of options --------------------------------------------------------------------------------------------


@pytest.fixture
def options_file(tmp_path: Path) -> Path:
    path = tmp_path / "wager.toml"
    rest = 'drafter = "ngram"\nmax-tokens = 6\ntemperature = 0.5\nseed = 7\nmax_rows = 64\nlogprobs = 1\n'
    rest += "logit-bias = {65 = 100}\n"
    path.write_text(f'model = "{MODEL}"\nthreads = 1\nmemory = "256MiB"\n{rest}', encoding="utf-8")
    return path


def test_a_file_gives_defaults_that_flags_override(wager: Call, options_file: Path) -> None:
    call = ["run", "abab abab", "--config", str(options_file), "--json", "-"]
    result = json.loads(wager(*call).out)
    assert (result["tokens"], result["seed"], result["drafter"]) == (6, 7, "ngram")
    other = json.loads(wager(*call, more="--max-tokens 4 --drafter none").out)
    assert (other["tokens"], other["drafter"]) == (4, "none")
    assert other["token_ids"] == result["token_ids"][:4] == [65] * 4


@pytest.mark.slow
def test_one_file_serves_every_verb(wager: Call, prompts: str, options_file: Path) -> None:
    call = [prompts, "--config", str(options_file), "--limit", "1", "--json", "-"]
    settings = json.loads(wager("bench", *call).out)["card"]["settings"]
    expected = {"drafter": "ngram", "max_rows": 64, "max_tokens": 6, "prefix_cache": False}
    assert {name: settings[name] for name in expected} == expected
    proof = wager("prove", *call)
    assert "answers, plain and with ngram: at most about" in proof.err
    outcomes = json.loads(proof.out)["outcomes"]
    assert {each["drafter"] for each in outcomes} == {"ngram"}


def test_a_file_gives_one_value_of_what_may_be_repeated(wager: Call, prompts: str, options_file: Path) -> None:
    call = ["train", "--plan", "--prompts", prompts, "--config", str(options_file), "--hardware", "H100", "--json", "-"]
    known = wager(*call, "--model", "SmolLM2-135M-Instruct")
    assert json.loads(known.out)["answers"] == 4, known.err


def test_a_bad_file_exits_with_2_and_names_file_and_key(wager: Call, options_file: Path) -> None:
    for text, named in (
        ("dept = 3", "'dept'"),
        ('depth = "three"', "depth = 'three'"),
        ("n = 2", "n = 2"),
        ("top-k = 3\ntop_k = 4", "has 'top_k' twice"),
        ("depth =", "not TOML"),
        ('policy = "fixed"\nobjective = "latency"', "'latency'"),
        (f"threads = {'9' * 6000}", "not TOML"),
        ("depth = " + "[" * 5000, "not TOML"),
        ('model = "a\\u0000b"', "The path 'a\\x00b' cannot be used"),
    ):
        options_file.write_text(text, encoding="utf-8")
        refused(wager("run", "hi", "--config", str(options_file)), named, "" if "\\u0000" in text else "wager.toml")


# ---- pull and doctor ----------------------------------------------------------------------------------------------


def test_pull_prints_the_path_and_shows_progress(wager: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(name: str, progress, *, force: bool) -> Path:
        for done in (*range(0, 101, 10), 100):
            progress(f"Downloading {name}", done * 1_000_000, 100_000_000)
        return Path("/somewhere") / name

    monkeypatch.setattr(hub, "pull", pull)
    result = wager("pull", "tiny")
    assert (result.code, result.out) == (0, "/somewhere/tiny\n")
    assert [line.split(": ")[1] for line in result.err.splitlines()] == ["0 of 100 MB", "100 of 100 MB"]


def test_doctor_shows_the_kernels_and_what_is_missing(
    wager: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path))
    value, text = json.loads(wager("doctor", "--json", "-").out), wager("doctor").out
    assert value["kernels"]["name"] and value["kernels"]["reason"] in text and value["versions"]["torch"] in text
    assert value["models"]["here"] == [] and any("wager pull" in line for line in value["missing"])


def test_doctor_tells_of_a_model_before_it_is_loaded(wager: Call, tmp_path: Path) -> None:
    found = wager("doctor", "random:gemma3:tiny", "--json", "-")
    model = json.loads(found.out)["model"]
    assert (found.code, model["runs"], model["architecture"]) == (0, True, "Gemma3ForCausalLM")
    assert (model["weights"], model["converted"]) == ("bfloat16", {}) and model["weight_bytes"] >= 2 * model[
        "parameters"
    ]
    assert model["position_bytes"] == 4 * 2 * 2 * 16 * 2  # layers, keys and values, heads, dimensions, bf16
    assert "random:gemma3:tiny runs: Gemma3ForCausalLM, 4 layers of 64" in wager("doctor", "random:gemma3:tiny").out
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    refused = wager("doctor", str(tmp_path))
    assert refused.code == 1
    assert "does not run: Architecture 'MambaForCausalLM' is not supported. Known are: llama" in refused.out


@pytest.mark.slow
def test_a_part_for_images_that_is_left_out_is_told_of(
    wager: Call, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(save_model(tmp_path))
    edit(path / "config.json", vision_config={"hidden_size": 8}, dtype="bfloat16")
    told = "its part for images is not used"
    assert told in wager("doctor", str(path)).out
    ran = wager("run", "Hi", "--model", str(path), "--raw", "--max-tokens", "2", "--drafter", "none")
    assert (ran.code, caplog.text.count(told)) == (0, 1)
    assert told in wager("plan", "--model", str(path), "--hardware", "cpu").out
    edit(path / "config.json", vision_config=None)
    assert told not in wager("doctor", str(path)).out


def test_doctor_says_that_a_machine_is_busy(wager: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from wager.bench.machine import machine_load
    from wager.cli import doctor

    paths = [tmp_path / "machine", tmp_path / "container"]
    monkeypatch.setattr("wager.kernels.cpu.physical_cores", lambda: 2)
    monkeypatch.setattr(doctor, "machine_load", lambda: machine_load([str(path) for path in paths]))
    for waited, average, busy, said in (
        ((), 1.5, False, "1.5 on 2 cores"),  # no such files
        ((42.0, 0.0), 0.5, True, "waited for one in 42% of the last 10 s"),
        ((3.0, 60.25), 0.5, True, "end them"),
    ):
        for path, share in zip(paths, waited, strict=False):
            path.write_text(f"some avg10={share} avg60=1.00 avg300=1.00 total=5\nfull avg10=0.00")
        monkeypatch.setattr("os.getloadavg", lambda average=average: (average, 0.0, 0.0))
        assert json.loads(wager("doctor", "--json", "-").out)["load"]["busy"] == busy
        [line] = [line for line in wager("doctor").out.splitlines() if line.startswith("load")]
        assert said in line
        assert ("other programs use the processors" in line) == busy


# ---- as a process -------------------------------------------------------------------------------------------------


def test_interruption_is_quiet_and_exits_with_130() -> None:
    """Ctrl-C reaches the process although the caller of these tests ignores it, as a background shell does: a signal
    that is ignored stays so in a child, one that is handled does not. The answer is longer than what a pipe holds, so
    that the process cannot end before it is read."""
    call = ["run", "hello", *FLAGS, *REPETITIVE, "--rounds", "--drafter", "none", "--max-tokens", "8000"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "wager.cli", *call],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stdout is not None and process.stdout.read(1), "it has begun to answer"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in out + err and err.strip().endswith("interrupted")


@pytest.mark.parametrize(("number", "code", "said"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_a_signal_ends_an_import_of_numpy_quietly(tmp_path: Path, number: str, code: int, said: str) -> None:
    """Its native part would print what a handler raises, and raise an ImportError."""
    (tmp_path / "numpy.py").write_text(f"""
import os, signal
try:
    os.kill(os.getpid(), signal.{number})
except BaseException:
    raise ImportError("numpy._core.umath failed to import") from None
""")
    program = f"""
import importlib, signal, sys
from wager.cli.process import ends_in_order
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {str(tmp_path)!r})
sys.exit(ends_in_order(lambda: importlib.import_module("numpy")))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr.strip()) == (code, said)


def test_a_second_signal_does_not_end_the_removal_of_files_within_an_import(tmp_path: Path) -> None:
    """`timeout` sends its signal twice; what removes files may import."""
    (tmp_path / "late.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    program = f"""
import os, signal, sys, time
sys.path.insert(0, {str(tmp_path)!r})
from wager.cli.process import ends_in_order

def command():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    finally:
        import late
        print("removed")

sys.exit(ends_in_order(command))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, "removed\n", "\nterminated\n")


def test_a_signal_while_the_command_is_imported_ends_it_quietly(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    program = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {str(tmp_path)!r})
from wager.cli import main
sys.exit(main(["--help"]))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "\ninterrupted\n")


def test_files_of_windows_are_read(wager: Call, tmp_path: Path) -> None:
    """With a byte order mark and its ends of lines."""
    row = {"prompt_tokens": 12, "tokens": 3, "drafters": {"a": {"right": [1, 0, 0], "scores": [[0.9], [], []]}}}
    counted = {"drafts": 100, "draft_tokens": 300, "accepted_tokens": 150}
    metrics = [f"vllm:spec_decode_num_{name}_total {value}" for name, value in counted.items()]
    by_position = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 80'
    texts = {"trace": json.dumps(row), "metrics": "\n".join([*metrics, by_position]), "keys": "0123456789abcdef"}
    for name, text in texts.items():
        (tmp_path / name).write_text(f"{text}\n", encoding="utf-8-sig", newline="\r\n")
    assert wager("replay", str(tmp_path / "trace"), more="--concurrency 1").code == 0
    read = wager("acceptance", "--metrics", str(tmp_path / "metrics"), more="--json -")
    assert json.loads(read.out)["rounds"] == 100
    assert read_api_keys(tmp_path / "keys") == ("0123456789abcdef",)
