"""The lesson: the page, its figures and the text of `wager lesson` are what the source and the program give."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from in_process import Call, refused

sys.path.insert(0, str(Path(__file__).parents[2] / "dev"))
import lesson

from wager.cli.lesson import TEXT

ROOT = Path(__file__).parents[2]
KERNELS = "avx512-bf16"
"""The kernels that the recorded texts come from; others may round differently and choose other tokens."""

SOURCE = lesson.SOURCE.read_text(encoding="utf-8")
PARTS, PAGE, TERMINAL = (
    re.split(r"^(?=## )", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for path in (lesson.SOURCE, ROOT / "docs" / "lesson.md", TEXT)
)
TIME = re.compile(r"\b[\d.]+(?= ms|, forward|, rest|\))")
LOSING = [
    lesson.Example(call)
    for line in SOURCE.splitlines()
    for call in re.findall(r"`(wager (?:plan|replay) [^`]*)`", line)
    if line.startswith("|")
]


def same(shown: str, made: str) -> bool:
    """Whether two lines are equal. The adaptive policy's figures may differ a little: a decision that one last bit
    turns changes those after it, so they depend on the processor."""
    one, other = shown.split(), made.split()
    return shown == made or ("| adaptive |" in shown and len(one) == len(other) and all(map(near, one, other)))


def near(shown: str, made: str) -> bool:
    """Within 3 %, within 3 points of a difference in per cent, or the same word."""
    try:
        one, other = (float(each.replace(",", "")) for each in (shown, made))
    except ValueError:
        return shown == made
    return abs(one - other) <= max(0.03 * abs(one), 3.0 if shown[0] in "+-" else 0.3)


@pytest.mark.parametrize("part", range(len(PARTS)), ids=lambda part: PARTS[part].splitlines()[0][:40])
def test_the_page_and_the_text_are_what_the_lesson_gives(part: int) -> None:
    """Their tables, texts, numbers and figures; recorded outputs are those of the source."""
    page, figures = lesson.page(PARTS[part])
    for shown, made in ((PAGE[part], page.partition("-->\n")[2]), (TERMINAL[part], lesson.for_terminals(PARTS[part]))):
        lines = made.strip().splitlines()
        kept = shown.strip().splitlines()[-len(lines) :]  # of the page without the title
        different = [pair for pair in zip(kept, lines, strict=True) if not same(*pair)]
        assert different == [], "run: python dev/lesson.py --write"
    for name, picture in figures.items():
        assert (ROOT / "docs" / "lesson" / name).read_text(encoding="utf-8") == picture


def test_every_part_asks_and_every_figure_is_shown() -> None:
    for part in PARTS[1:-1]:
        assert part.count("\nA: ") >= 2
        assert len(re.findall(r"^\*\*\d\.\*\*", part, re.MULTILINE)) == part.count("\nA: ")
    figures = set(re.findall(r"^!(\w+)$", SOURCE, re.MULTILINE))
    assert figures == {*lesson.FIGURES, "round"}
    assert {path.stem for path in (ROOT / "docs" / "lesson").glob("*")} == figures


def test_the_lesson_in_a_pipe_and_parts_that_are_not_there(wager: Call) -> None:
    plain = wager("lesson", "2")
    assert plain.code == 0 and "\n## 2. " in "\n" + plain.out and "## 3." not in plain.out
    assert "the target's  ik        ·brown    –" in plain.out, "the round is drawn"
    assert "A: " not in plain.out
    answered = wager("lesson", "2", "--answers").out
    assert len(answered.splitlines()) > len(plain.out.splitlines())
    refused(wager("lesson", "10"), "no part 10", "1 to 9")


def test_the_lesson_in_a_terminal_waits_for_keys_and_ends_with_q() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-m", "wager.cli", "lesson", "2", "3"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        seen, told = "", []
        while process.poll() is None:
            if select.select([ours], [], [], 0.3)[0]:
                with suppress(OSError):  # the other end was closed
                    seen += os.read(ours, 4096).decode(errors="replace")
            elif "]" in seen[-30:]:  # it waits; a key that comes before it does is lost, so it may be pressed again
                told.append("Three:" in seen)
                os.write(ours, b"q" if "computes." in seen else b"x")
    os.close(ours)
    assert process.returncode == 0
    assert not told[0] and told[-1], "the answer comes with a key"


def test_what_a_speed_up_needs() -> None:
    """The least acceptance, against a search of all rates and depths."""
    for wanted in (1.5, 3.3):
        for cost in (0.0, 0.1, 0.2):
            reached = [
                (rate / 1000, depth)
                for rate in range(1001)
                for depth in range(17)
                if sum((rate / 1000) ** k for k in range(depth + 1)) / (1 + depth * cost) >= wanted
            ]
            assert lesson.needed(wanted, cost)[0] == pytest.approx(min(reached)[0], abs=1e-3)
    assert lesson.needed(3.3, 0.5)[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("example", LOSING, ids=lambda example: example.code[:60])
def test_where_the_page_says_not_to_speculate_plain_decoding_is_fastest(example: lesson.Example) -> None:
    output = example.output()
    if "--drafter-shape model:" in example.code:
        assert "not even one request fits" in output
        without = example.code.replace("--drafter-shape model:Llama-3.1-8B", "--drafter-shape free")
        assert "not even one request fits" not in lesson.Example(without).output()
    elif example.code.startswith("wager replay"):
        assert re.search(r" none .* 0\.0 %", output), output
    else:
        assert re.search(r" off +1\.000 ", output), output


@pytest.mark.real
@pytest.mark.slow
def test_the_recorded_commands_run_on_the_model(
    wager: Call, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the page, so that what one stores the next finds."""
    from wager.kernels.cpu import select

    monkeypatch.setenv("WAGER_CACHE", str(tmp_path / "cache"))  # nothing is stored among the user's own calibrations
    ran = set()
    in_tables = re.findall(r"`(wager (?:run|bench) [^`]*)` \|$", SOURCE, re.MULTILINE)
    recorded = [example for example in lesson.examples(SOURCE) if example.kind or not example.shown]
    for example in [*recorded, *map(lesson.Example, in_tables)]:
        for line in example.code.splitlines():
            verb = shlex.split(line)[1]
            ran.add(verb)
            more = {"doctor": "", "calibrate": f"--model {smollm2} --seconds 1"}.get(verb, f"--model {smollm2}")
            done = wager(*shlex.split(line)[1:], more=more)
            assert done.code == 0 and done.out.strip(), done.err
            if example.kind == "model" and KERNELS in select().name:
                printed = [TIME.sub("#", " ".join(row.split())) for row in (done.out + done.err).splitlines()]
                assert {TIME.sub("#", " ".join(row.split())) for row in example.shown.splitlines()} <= {*printed}, line
            elif example.table and line == example.code.splitlines()[-1]:
                assert example.shown_of(done.out)
    assert {"run", "prove", "acceptance", "calibrate", "bench", "doctor"} <= ran
