"""docs/lesson.md: its commands run, and print what the page shows."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "dev"))
import lesson

PAGE = lesson.PAGE.read_text(encoding="utf-8")
KERNELS = "avx512-bf16"
"""The kernels that the page's texts come from; others may round differently and choose other tokens."""

EXAMPLES = lesson.examples(PAGE)
IN_TABLES = [
    lesson.Example(call)
    for line in PAGE.splitlines()
    for call in re.findall(r"`(wager \w+ [^`]*)`", line)
    if line.startswith("|")
]
COMPUTED = [example for example in EXAMPLES if not example.uses_model]
LOSING = [example for example in IN_TABLES if not example.uses_model]


def name_of(example: lesson.Example) -> str:
    return example.code.splitlines()[0][:60]


@pytest.mark.parametrize("example", COMPUTED, ids=name_of)
def test_computed_figures_are_those_of_the_page(example: lesson.Example) -> None:
    assert lesson.differences(example, lesson.output_of(example)) == [], "run: python dev/lesson.py --write"


@pytest.mark.slow
@pytest.mark.parametrize("example", LOSING, ids=name_of)
def test_where_the_page_says_not_to_speculate_plain_decoding_is_fastest(example: lesson.Example) -> None:
    output = lesson.output_of(example)
    if "--drafter-shape model:" in example.code:
        assert "not even one request fits" in output
        without = example.code.replace("--drafter-shape model:Llama-3.1-8B", "--drafter-shape free")
        assert "not even one request fits" not in lesson.output_of(lesson.Example(without))
    elif example.code.startswith("wager replay"):
        assert re.search(r" none .* 0\.0 %", output), output
    else:
        assert re.search(r" off +1\.000 ", output), output


@pytest.mark.real
@pytest.mark.slow
def test_the_lessons_commands_run_on_the_model(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page, so that what one stores the next finds."""
    from wager.kernels.cpu import select

    monkeypatch.setenv("WAGER_CACHE", str(tmp_path / "cache"))  # nothing is stored among the user's own calibrations
    name = select().name
    ran = set()
    for example in [example for example in [*EXAMPLES, *IN_TABLES] if example.uses_model]:
        for line in example.code.splitlines():
            verb = shlex.split(line)[1]
            ran.add(verb)
            short = replace(example, code=line + " --seconds 1" * (verb == "calibrate"))
            output = lesson.output_of(short, model=str(smollm2) if verb != "doctor" else None)
            assert output.strip()
            if example.kind == "model" and KERNELS in name:
                assert lesson.differences(example, output) == [], line
    assert {"run", "prove", "calibrate", "bench", "doctor"} <= ran


def test_differences_from_the_page_are_found() -> None:
    assert len(COMPUTED) > 10 and sum(bool(example.shown) for example in EXAMPLES) > 12
    [example] = lesson.examples("```sh\nwager plan\n```\n\n| batch | depth |\n|---|---|\n| 1 | 4 |\n| 8 | 2 |\n")
    printed = "\n context  batch  depth \n ────\n 4096      1      4 \n 4096      8      2 \n"
    assert lesson.differences(example, printed) == []
    assert lesson.differences(example, printed.replace("8      2", "8      3")) == ["| 8 | 2 |"]
    assert len(lesson.differences(example, "")) == 4
    [example] = lesson.examples(
        "```sh\nwager run x\n```\n\n```text model\nround 1: 3 rows, 1.5 ms (draft 0.1)\n  a: b\n```\n"
    )
    for rows, text, missing in ((3, "b", 0), (4, "b", 1), (3, "c", 1)):
        said = f"round 1: {rows} rows, 27 ms (draft 9.25)\n  a: {text}\n"
        assert bool(lesson.differences(example, said)) == bool(missing)
    page = "```sh\nwager replay\n```\n\n| policy | tok/s | vs fixed |\n|---|---|---|\n| {} | 1000 | -0.3 % |\n"
    for policy, rate, change, same in (  # only the adaptive policy's figures may differ a little
        ("adaptive", 1020, "+1.2 %", True),
        ("adaptive", 1050, "-0.3 %", False),
        ("adaptive", 1000, "-4.0 %", False),
        ("fixed:4", 1001, "-0.3 %", False),
    ):
        [example] = lesson.examples(page.format(policy))
        printed = f"\n policy  tok/s  vs fixed \n ────\n {policy}  {rate}  {change} \n"
        assert (lesson.differences(example, printed) == []) == same


def test_every_number_the_lesson_says_of_the_formula() -> None:
    """The expected tokens per round: 3.05 at alpha 0.75 and gamma 4, 3.29 at gamma 5; the experts of 5 rows."""
    assert f"{sum(0.75**k for k in range(5)):.2f}" == "3.05"
    assert f"{sum(0.75**k for k in range(6)):.2f}" == "3.29"
    for accept, depth in ((0.25, 4), (0.5, 4), (0.75, 4), (0.9, 4), (0.25, 5), (0.5, 5), (0.75, 5), (0.9, 5)):
        assert f"| {accept:g} | {depth} | {sum(accept**k for k in range(depth + 1)):.2f} |" in PAGE
    for rows, read in re.findall(r"^ +(\d+) +([\d.]+) +[\d.]+$", PAGE, re.MULTILINE):
        assert read == f"{128 * (1 - (1 - 8 / 128) ** int(rows)):.1f}"
    measured = re.findall(r"^(\d)    (\d\.\d\d)          (\d\.\d\d)$", PAGE, re.MULTILINE)
    assert [int(gamma) for gamma, _, _ in measured] == [2, 4, 5]
    for gamma, tau, formula in measured:
        assert f"{sum(0.75**k for k in range(int(gamma) + 1)):.2f}" == formula
        assert float(tau) == pytest.approx(float(formula), rel=0.02)
