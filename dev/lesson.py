"""The figures of docs/lesson.md: runs the page's commands, and compares what they print with what the page shows.

    python dev/lesson.py              says where the page differs from what its commands print
    python dev/lesson.py --write      writes what they print into the page
    python dev/lesson.py --measured   the same for figures that depend on the machine

An example of the page is a `sh` or `python` block and what is shown after it: a `text` block, or a table with some of
the columns that the command prints. `text model` has tokens of the model, times left aside;
`text measured`, or a table after <!-- measured -->, depends on the machine. Lines of `...` stand for lines left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "lesson.md"
LEFT_OUT = "..."
_BLOCK = re.compile(
    r"```(?P<language>sh|python)\n(?P<code>.*?)```\n"
    r"(?:\s*(?P<mark><!-- measured -->\n)?"
    r"(?:```text(?P<info>[ \w]*)\n(?P<text>.*?)```|(?P<table>(?:\|[^\n]*\n)+)))?",
    re.DOTALL,
)
_PROGRESS = re.compile(r"^[A-Z][a-z ]+: \d+ of \d+ [\w ]+\n", re.MULTILINE)
_TIME = re.compile(r"\b[\d.]+(?= ms|, forward|, rest|\))")


@dataclass(frozen=True, slots=True)
class Example:
    """Code and what the page shows of its output: `kind` is "", "model" or "measured"; `span` is its place."""

    code: str
    python: bool = False
    shown: str = ""
    table: bool = False
    kind: str = ""
    span: tuple[int, int] = (0, 0)

    @property
    def uses_model(self) -> bool:
        """Whether it loads the default model."""
        verbs = {shlex.split(line)[1] for line in self.code.splitlines()} if not self.python else set()
        return (
            bool(verbs & {"run", "bench", "prove", "calibrate", "chat", "acceptance"}) or "--hardware this" in self.code
        )


def examples(page: str) -> list[Example]:
    found = []
    for match in _BLOCK.finditer(page):
        table = match["table"] is not None
        kind = "measured" if match["mark"] else (match["info"] or "").strip()
        span = match.span("table" if table else "text") if table or match["text"] is not None else (0, 0)
        shown = match["table"] if table else match["text"] or ""
        found.append(Example(match["code"], match["language"] == "python", shown, table, kind, span))
    return found


# ---- what is compared -----------------------------------------------------------------------------------------------


def differences(example: Example, output: str) -> list[str]:
    """Lines of the page that the output does not have, in order; none if all are there."""
    wanted = example.shown.splitlines()
    if example.table:
        wanted, has = [_squeezed(line) for line in wanted], [_squeezed(line) for line in _as_table(wanted, output)]
    else:
        clean = _timeless if example.kind == "model" else _squeezed
        wanted = [clean(line) for line in wanted if line.strip() and line.strip() != LEFT_OUT]
        has = [clean(line) for line in output.splitlines()]
    missing, start = [], 0
    for line in wanted:
        found = next((i for i in range(start, len(has)) if _same(line, has[i])), None)
        if found is None:
            missing.append(line)
        else:
            start = found + 1
    return missing


def _same(shown: str, printed: str) -> bool:
    """Whether two lines are equal. The adaptive policy's figures may differ a little: a decision that one last bit
    turns changes those after it, so they depend on the processor."""
    if "| adaptive |" not in shown:
        return shown == printed
    one, other = shown.split(), printed.split()
    return len(one) == len(other) and all(map(_near, one, other))


def _near(shown: str, printed: str) -> bool:
    """Within 3 %, within 3 points of a difference in per cent, or the same word."""
    try:
        one, other = float(shown), float(printed)
    except ValueError:
        return shown == printed
    return abs(one - other) <= max(0.03 * abs(one), 3.0 if shown[0] in "+-" else 0.3)


def _squeezed(line: str) -> str:
    return " ".join(line.split())


def _timeless(line: str) -> str:
    return _TIME.sub("#", _squeezed(line))


def _as_table(shown: list[str], output: str) -> list[str]:
    """The printed table as the page shows it: the same columns, every row."""
    columns = [cell.strip() for cell in shown[0].strip("| ").split("|")]
    lines = [re.split(r"  +", line.strip()) for line in output.splitlines()]
    head = next((i for i, cells in enumerate(lines) if set(columns) <= set(cells)), None)
    if head is None:
        return []
    place = [lines[head].index(column) for column in columns]
    rows = []
    for cells in lines[head + 2 :]:
        if len(cells) < max(place) + 1:
            break
        rows.append([cells[index] for index in place])
    return [_row(columns), "|" + "---|" * len(columns), *map(_row, rows)]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


# ---- running --------------------------------------------------------------------------------------------------------


def output_of(example: Example, *, model: str | None = None) -> str:
    """What its code prints: stdout, then the messages without the progress. `model` takes the place of the default one.
    RuntimeError if a command fails."""
    from wager.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if example.python:
            exec(example.code, {})
        for line in [] if example.python else example.code.splitlines():
            extra = ["--model", model] if model and example.uses_model else []
            if main([*shlex.split(line)[1:], *extra]):
                raise RuntimeError(f"{line}: {err.getvalue()}")
    return out.getvalue() + _PROGRESS.sub("", err.getvalue())


def rewritten(page: str, *, measured: bool) -> Iterator[str]:
    """The parts of the page with what its commands print now; of a block with lines left out, only what is missing is
    said. A block of `...` alone is filled."""
    done = 0
    for example in examples(page):
        if example.kind == "measured" and not measured:
            continue
        print(example.code.splitlines()[0], file=sys.stderr)
        output = output_of(example)
        missing = differences(example, output)
        if example.table:
            now = "\n".join(_as_table(example.shown.splitlines(), output)) + "\n"
        elif example.shown.strip() == LEFT_OUT or (missing and LEFT_OUT not in example.shown):
            now = "\n".join(line.rstrip() for line in output.splitlines() if line.strip()) + "\n"
        else:
            now = example.shown
        if missing or now != example.shown:
            print("\n".join(f"  not printed: {line}" for line in missing) or "  changed", file=sys.stderr)
        if now == example.shown:
            continue
        yield page[done : example.span[0]] + now
        done = example.span[1]
    yield page[done:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--measured", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("NO_COLOR", "1")
    page = "".join(rewritten(PAGE.read_text(encoding="utf-8"), measured=options.measured))
    if options.write:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
