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


def test_every_number_the_lesson_says_of_the_formula() -> None:
    """The expected tokens per round, computed and measured, and the experts of some rows."""
    assert len(COMPUTED) > 10 and sum(bool(example.shown) for example in EXAMPLES) > 12
    for accept, depth in ((0.25, 4), (0.5, 4), (0.75, 4), (0.9, 4), (0.25, 5), (0.5, 5), (0.75, 5), (0.9, 5)):
        assert f"| {accept:g} | {depth} | {sum(accept**k for k in range(depth + 1)):.2f} |" in PAGE
    for rows, read in re.findall(r"^ +(\d+) +([\d.]+) +[\d.]+$", PAGE, re.MULTILINE):
        assert read == f"{128 * (1 - (1 - 8 / 128) ** int(rows)):.1f}"
    measured = re.findall(r"^(\d)    (\d\.\d\d)          (\d\.\d\d)$", PAGE, re.MULTILINE)
    assert [int(gamma) for gamma, _, _ in measured] == [2, 4, 5]
    for gamma, tau, formula in measured:
        assert f"{sum(0.75**k for k in range(int(gamma) + 1)):.2f}" == formula
        assert float(tau) == pytest.approx(float(formula), rel=0.02)
