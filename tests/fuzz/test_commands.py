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
from typing import Any

import pytest
from command_lines import BASES, HUGE, NOT_NUMBERS, NOT_WHOLE, VALID, kind, parameters

import wager as package
from in_process import Call, Result
from wager.cli import VERBS

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(package.__file__).parents[1]), "NO_COLOR": "1"}
RUN = BASES["run"]


def slow(value: str) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


def refused(result: Result, *words: str, code: int = 2) -> None:
    """Assert a refusal in a sentence that contains the words."""
    assert result.code == code, result.err
    assert result.out == ""
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err


# ---- fuzzing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "count"), [(1, 12), pytest.param(2, 160, marks=pytest.mark.slow)])
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
    from command_lines import CommandLine
    from judging import Ending, complaints

    line = CommandLine(("plan", "--tp", "１"), b"", (("--tp", "１"),))
    good = Ending(2, "", "Error: Invalid value for '--tp': '１' is not a whole number.\n")
    assert complaints(line, good) == []
    bad = [
        Ending(0, "1.2", ""),
        Ending(2, "", "error: Something is wrong.\n"),
        Ending(2, "", ""),
        Ending(1, "", "Traceback (most recent call last):\nerror: --tp is wrong.\n"),
        Ending(1, "", "error: --tp " + "1" * 9000 + ".\n"),
        Ending(3, "", "error: --tp is wrong.\n"),
        Ending(None, "", "", "did not end"),
    ]
    assert all(complaints(line, ending) for ending in bad)
    nan = CommandLine(("plan", "--json", "-"), b"", (("--json", "-"),))
    assert complaints(nan, Ending(0, '{"speedup": NaN}', "")) and not complaints(nan, Ending(0, '{"speedup": 1}', ""))


def test_every_text_option_has_samples() -> None:
    free = {"system", "prompt"}
    texts = {param.name for verb in VERBS for param in parameters(verb) if kind(param) == "text"}
    assert texts <= set(VALID) | free


@pytest.mark.parametrize("verb", VERBS)
def test_no_number_is_accepted_that_nobody_writes(wager: Call, verb: str) -> None:
    """The same for every option of every command: ASCII digits, no blanks, no nan, and a bound."""
    for param in parameters(verb):
        what = kind(param)
        wrong = {"whole": (*NOT_NUMBERS, *NOT_WHOLE, *HUGE), "number": NOT_NUMBERS}.get(what, ())
        for value in wrong:
            flag = param.opts[-1]
            result = wager(verb, *BASES[verb], f"{flag}={value}")
            refused(result)
            assert flag.lstrip("-") in result.err.replace("_", "-") or value in result.err, result.err
            assert len(result.err) < 1000


# ---- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*RUN, "--threads", "100000"), ("threads = 100000 is out of range", "threads must be from 1 to")),
        ((*RUN, "--threads", "9" * 22), ("threads = 9999", "threads must be from 1 to")),
        ((*RUN, "--memory", f"{10**30}TiB"), ("--memory", "out of range", "1048576 TiB")),
        ((*RUN, "--memory", "9" * 5000), ("--memory", "out of range")),
        ((*RUN, "--depth", "999999999"), ("--depth", "256")),
        ((*RUN, "--max-context", str(10**20)), ("--max-context",)),
        (("bench", "--repeat", "4294967296"), ("--repeat", "1000")),
        (("bench", "--concurrency", "100000000"), ("--concurrency", "4096")),
        (("plan", "--hardware", "H100", "--depth", "999999999"), ("999999999", "256")),
        (("plan", "--hardware", "H100", "--max-depth", "100000000"), ("100000000", "256")),
        (("replay", "--concurrency", "100000000"), ("concurrency = 100000000", "16384")),
        (("replay", "--policy", f"fixed:{10**9}"), ("fixed:1000000000", "256")),
        (("replay", "--policy", "fixed:" + "9" * 5000), ("policy = ",)),
        (("run", "hi", "--drafter", "ngram:" + "9" * 5000), ("--drafter", "takes a number")),
        (("calibrate", "--seconds", "1e300"), ("seconds = 1e+300", "86400")),
    ],
)
def test_work_without_end_is_refused_with_the_bound(
    wager: Call, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    arguments = arguments if arguments[0] in VERBS else ("run", *arguments)
    refused(wager(*arguments), *words)


# ---- paths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["~nosuchuser/x", "x" * 5000, "./" + "y" * 300, "/" + "z/" * 3000])
@pytest.mark.parametrize("verb", ["run", "pull", "plan"])
def test_a_path_that_is_none_is_named(wager: Call, verb: str, model: str) -> None:
    calls = {"run": ["hi", "--model", model], "pull": [model], "plan": ["--hardware", "H100", "--model", model]}
    result = wager(verb, *calls[verb])
    refused(result, f"The path '{model[:40]}", code=2)
    assert len(result.err) < 500


@pytest.mark.parametrize("folder", ["~nobodyx/y", "w" * 5000])
def test_a_cache_folder_that_is_none_is_named(wager: Call, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setenv("WAGER_CACHE", folder)
    refused(wager("run", "hi"), folder[:40])
    refused(wager("doctor"), folder[:40])


@pytest.mark.parametrize(
    ("verb", "option"),
    [
        ("plan", "--html"),
        ("plan", "--plot"),
        ("plan", "--json"),
        ("run", "--json"),
        ("acceptance", "-o"),
        ("acceptance", "--trace"),
        ("acceptance", "--plot"),
        ("doctor", "--json"),
    ],
)
@pytest.mark.parametrize("path", ["/nonexistent/x.svg", "~nosuchuser/x.svg", "/" + "x" * 300 + ".svg", "/tmp"])
def test_a_file_that_cannot_be_written_is_refused_by_its_option(wager: Call, verb: str, option: str, path: str) -> None:
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


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "holds no prompts"),
        (b"\n\n", "holds no prompts"),
        (ROW % (1, '"x"') + "nonsense\n", "line 2: not JSON"),
        (ROW % (1, '"x"') + "[" * 100_000, "line 2: not JSON"),
        (ROW % ("9" * 6000, '"x"'), "line 1: not JSON"),
        (ROW % (1, '"x"') + ROW % (2, 3), "line 2: prompt = 3"),
        (ROW % (1, '"\\ud800"'), "line 1: half a surrogate pair"),
        (b'{"id": 1, \x00', "line 1: not JSON"),
        (b"\xff\xfe", "not UTF-8 (byte 0xff at 0)"),
    ],
)
def test_a_prompt_file_that_is_none_is_named_with_its_line(
    wager: Call, tmp_path: Path, content: bytes | str, cause: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    refused(wager("bench", str(path)), str(path), cause)


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


def test_a_huge_line_is_refused_for_its_tokens_not_its_bytes(wager: Call, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(ROW % (1, json.dumps("a" * 200_000)))
    result = wager("bench", str(path), *BASES["bench"])
    refused(result, "8192", code=1)


@pytest.mark.parametrize("text", [f"threads = {'9' * 6000}", "depth = " + "[" * 5000, 'model = "a\\u0000b"'])
def test_an_absurd_configuration_file_is_refused(wager: Call, tmp_path: Path, text: str) -> None:
    path = tmp_path / "wager.toml"
    path.write_text(text)
    refused(wager("run", "hi", "--config", str(path)))


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


@pytest.mark.parametrize("call", ["wager --version", slow("wager run hi BASE")])
def test_output_that_cannot_be_written_is_an_error(call: str) -> None:
    for closed in (">&-", ">/dev/full"):
        codes, err = shell(f"{call} {closed}")
        cause = os.strerror(errno.EBADF if closed == ">&-" else errno.ENOSPC)
        assert codes == [1]
        assert f"error: Standard output cannot be written: {cause}.\n" in err
        assert "Traceback" not in err and "Exception ignored" not in err


@pytest.mark.parametrize("call", ["wager plan --help", slow("wager run hi BASE")])
def test_a_reader_that_goes_away_ends_the_command_quietly(call: str) -> None:
    [code, _], err = shell(f"{call} | head -0")
    assert code == 1
    assert "error" not in err.lower() and "Exception ignored" not in err and "Traceback" not in err


@pytest.mark.parametrize("redirection", ["<&- 2>&-", slow("2>/dev/full")])
def test_messages_and_input_may_be_missing(redirection: str) -> None:
    codes, err = shell(f"wager plan --hardware H100 {redirection}")
    assert codes == [0]
    assert err == ""


@pytest.mark.slow
def test_nothing_may_be_open() -> None:
    assert shell("wager plan --hardware H100 <&- >&- 2>&-") == ([1], "")


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


# ---- options without effect -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [("--depth", "4"), ("--policy", "threshold"), ("--objective", "latency")])
def test_an_option_of_drafting_without_a_drafter_is_refused(wager: Call, option: tuple[str, str]) -> None:
    for verb in ("run", "bench", "prove"):
        base = [word for word in BASES[verb] if word != "ngram" and word != "--drafter"]
        refused(wager(verb, *base, "--drafter", "none", *option), f"{option[0]} {option[1]} has no effect")


def test_depth_0_is_no_contradiction(wager: Call) -> None:
    assert wager("run", *RUN, "--drafter", "none", "--depth", "0").code == 0
