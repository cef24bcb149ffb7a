"""The command line under attack: extreme and wrong values of every option, files and streams that are none.

Every refusal is a sentence that names what was refused, with exit code 1 or 2; nothing hangs, nothing is accepted in
silence. `python dev/fuzz_commands.py --minutes 60 --seed 7` searches for longer.
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from command_lines import BASES, HUGE, NOT_NUMBERS, NOT_WHOLE, VALID, CommandLine, kind, parameters
from judging import Ending, complaints

from in_process import Call, refused
from wager.cli.verbs import VERBS

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "NO_COLOR": "1"}
RUN = BASES["run"]


# ---- fuzzing --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "count"), [(1, 12), (2, 160)])
def test_composed_command_lines_end_well(seed: int, count: int) -> None:
    script = [sys.executable, str(ROOT / "dev" / "fuzz_commands.py")]
    found = subprocess.run(
        [*script, "--seed", str(seed), "--values", "0", "--count", str(count), "--minutes", "5"],
        capture_output=True,
        text=True,
        timeout=400,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    assert re.search(rf"^{count} command lines .*: 0 ended badly\.$", found.stdout, re.MULTILINE), found.stdout[-500:]


def test_the_fuzzer_finds_what_is_wrong() -> None:
    line = CommandLine(("plan", "--tp", "１"), b"", (("--tp", "１"),))
    assert complaints(line, Ending(2, "", "Error: Invalid value for '--tp': '１' is not a whole number.\n")) == []
    for ending in (
        Ending(0, "1.2", ""),
        Ending(2, "", "error: Something is wrong.\n"),
        Ending(2, "", ""),
        Ending(1, "", "Traceback (most recent call last):\nerror: --tp is wrong.\n"),
        Ending(1, "", "error: --tp " + "1" * 9000 + ".\n"),
        Ending(3, "", "error: --tp is wrong.\n"),
        Ending(None, "", "", "did not end"),
    ):
        assert complaints(line, ending), ending
    nan = CommandLine(("plan", "--json", "-"), b"", (("--json", "-"),))
    assert complaints(nan, Ending(0, '{"speedup": NaN}', "")) and not complaints(nan, Ending(0, '{"speedup": 1}', ""))


def test_every_text_option_has_samples() -> None:
    free = {"system", "prompt"}
    texts = {param.name for verb in VERBS for param in parameters(verb) if kind(param) == "text"}
    assert texts <= set(VALID) | free


@pytest.mark.parametrize("verb", VERBS)
def test_no_number_is_accepted_that_nobody_writes(wager: Call, verb: str) -> None:
    """The same for every option of every command: ASCII digits, no blanks, no nan, and a bound."""
    base = [re.sub(r"^\{(prompts|text)\}$", __file__, each) for each in BASES[verb]]  # a file that is there
    for param in parameters(verb):
        what = kind(param)
        wrong = {"whole": (*NOT_NUMBERS, *NOT_WHOLE, *HUGE), "number": NOT_NUMBERS}.get(what, ())
        for value in wrong:
            flag = param.opts[-1]
            result = wager(verb, *base, f"{flag}={value}")
            refused(result)
            assert flag.lstrip("-") in result.err.replace("_", "-") or value in result.err, result.err
            assert len(result.err) < 1000


# ---- paths ----------------------------------------------------------------------------------------------------------


def test_a_path_that_is_none_is_named(wager: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for model in ("~nosuchuser/x", "x" * 5000, "./" + "y" * 300, "/" + "z/" * 3000):
        for call in (["run", "hi", "--model"], ["pull"], ["plan", "--hardware", "H100", "--model"]):
            result = wager(*call, model)
            refused(result, f"The path '{model[:40]}")
            assert len(result.err) < 500
    for folder in ("~nobodyx/y", "w" * 5000):
        monkeypatch.setenv("WAGER_CACHE", folder)
        refused(wager("doctor"), folder[:40])


def test_a_file_that_cannot_be_written_is_refused_by_its_option(wager: Call, tmp_path: Path) -> None:
    for call in ("plan --json", "run --json", "acceptance -o", "acceptance --trace"):
        verb, option = call.split()
        for path in (f"{tmp_path}/absent/x.svg", "~nosuchuser/x.svg", "/" + "x" * 300 + ".svg", "/tmp"):
            result = wager(verb, *BASES[verb], option, path)
            refused(result, f"'{option}'", path[:20])
            assert option == "--json" or "--json" not in result.err


def test_control_characters_do_not_reach_the_terminal(wager: Call) -> None:
    result = wager("bench", "--prompts", "\x1b[31m\x07.jsonl")
    refused(result, "\\x1b[31m\\x07.jsonl")
    assert "\x1b" not in result.err


def test_a_prompt_that_is_not_utf8_is_named() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "wager.cli", "run", b"a\xff"], capture_output=True, env=ENVIRONMENT, timeout=60
    )
    assert found.returncode == 2
    assert b"Argument 2 is not UTF-8" in found.stderr


# ---- files ----------------------------------------------------------------------------------------------------------

ROW = '{"id": %s, "category": "qa", "prompt": %s}\n'


@pytest.mark.slow
def test_a_folder_and_an_endless_device_are_no_prompt_files(wager: Call, tmp_path: Path) -> None:
    refused(wager("bench", str(tmp_path)), str(tmp_path), "directory")
    refused(wager("bench", "/dev/zero"), "/dev/zero", "longer than")


def test_prompts_may_come_through_a_pipe(wager: Call, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=(ROW % (1, '"x"'),))
    writer.start()
    result = wager("bench", str(path), *BASES["bench"], "--json", "-")
    writer.join()
    assert [row["id"] for row in json.loads(result.out)["rows"]] == [1]


# ---- streams --------------------------------------------------------------------------------------------------------


def shell(command: str, *, encoding: str = "utf-8") -> tuple[list[int], str]:
    """Run the command in bash, `wager` and its base written short; the exit codes of the pipe, and its stderr."""
    command = command.replace("BASE", " ".join(RUN[1:])).replace("wager", f"{sys.executable} -m wager.cli")
    found = subprocess.run(
        ["bash", "-c", f'{{ {command}; echo "${{PIPESTATUS[@]}}" >&9; }} 9>&1 >/dev/null'],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env={**ENVIRONMENT, "PYTHONIOENCODING": encoding},
    )
    return [int(word) for word in found.stdout.split()], found.stderr


@pytest.mark.parametrize("call", ["wager --version", "wager run hi BASE"])
def test_output_that_cannot_be_written_is_an_error(call: str) -> None:
    for closed, number in ((">&-", errno.EBADF), (">/dev/full", errno.ENOSPC)):
        codes, err = shell(f"{call} {closed}")
        assert codes == [1]
        assert f"error: Standard output cannot be written: {os.strerror(number)}.\n" in err
        assert "Traceback" not in err and "Exception ignored" not in err


@pytest.mark.parametrize("call", ["wager plan --help", "wager run hi BASE"])
def test_a_reader_that_goes_away_ends_the_command_quietly(call: str) -> None:
    [code, _], err = shell(f"{call} | head -0")
    assert code == 1
    assert "error" not in err.lower() and "Exception ignored" not in err and "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize(("redirection", "code"), [("<&- 2>&-", 0), ("2>/dev/full", 0), ("<&- >&- 2>&-", 1)])
def test_messages_and_input_may_be_missing_and_nothing_may_be_open(redirection: str, code: int) -> None:
    assert shell(f"wager plan --hardware H100 {redirection}") == ([code], "")


@pytest.mark.slow
def test_input_that_is_closed_or_no_text_is_named() -> None:
    codes, err = shell("wager run BASE <&-")
    assert codes == [2]
    assert "error: Standard input cannot be read: Bad file descriptor.\n" in err
    codes, err = shell("printf 'a\\xff' | wager chat BASE")
    assert codes[1] == 2
    assert "error: Standard input is not UTF-8: byte 0xff" in err


@pytest.mark.slow
def test_json_on_a_terminal_of_another_encoding_is_json(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    codes, _ = shell(f"wager run '\U0001f600 é' BASE --json - > {path}", encoding="latin-1")
    assert codes == [0]
    assert json.loads(path.read_bytes().decode("ascii"))["tokens"] == 3


def test_unbuffered_output_stays_unbuffered() -> None:
    script = "import os, sys; from wager.cli.process import standard_streams; standard_streams().__enter__(); "
    script += "sys.stdout.write('out'); sys.stderr.write('err'); os._exit(0)"
    found = subprocess.run([sys.executable, "-u", "-c", script], capture_output=True, text=True, env=ENVIRONMENT)
    assert (found.stdout, found.stderr) == ("out", "err")
