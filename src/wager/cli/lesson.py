"""`wager lesson`: the lesson on speculative decoding, part by part, with figures drawn of letters.

lesson.md beside this file is the text. What can be computed is not in it: an example (a `sh` or `python` block) is
followed by the columns of the table to show of its output, or by a `text` block of `...`; `{{FORMAT EXPRESSION}}` is a
number, and a line `!NAME` one of FIGURES. A `text model` block holds tokens of the default model, a `text measured`
block or a table after <!-- measured --> what depends on the machine: they were recorded. `python dev/lesson.py` makes
docs/lesson.md of the same text.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wager.errors import UsageError, WagerError
from wager.terminal import console, flags

if TYPE_CHECKING:
    from wager.planner.plan import Deployment

SOURCE = Path(__file__).with_name("lesson.md")

_BLOCK = (
    r"```(?P<language>sh|python)\n(?P<code>.*?)```\n"
    r"(?:\s*(?P<mark><!-- measured -->\n)?"
    r"(?:```text(?P<info>[ \w]*)\n(?P<text>.*?)```|(?P<table>(?:\|[^\n]*\n)+)))?"
)
_PIECE = re.compile(rf"{_BLOCK}|\{{\{{(?P<value>[^\n]+?)\}}\}}|^!(?P<figure>\w+)$", re.DOTALL | re.MULTILINE)
_PART, _ANSWER = re.compile(r"^(?=## )", re.MULTILINE), re.compile(r"^A: (.*?\n)\n", re.DOTALL | re.MULTILINE)
_PROGRESS = re.compile(r"^[A-Z][a-z ]+: \d+ of \d+ [\w ]+\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Example:
    """Code and what is shown of its output; `kind` is "" for what can be computed, "model" or "measured"; `span` is
    the place of what is shown."""

    code: str
    python: bool = False
    shown: str = ""
    table: bool = False
    kind: str = ""
    span: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, match: re.Match[str]) -> Example:
        table = match["table"] is not None
        kind = "measured" if match["mark"] else (match["info"] or "").strip()
        span = match.span("table" if table else "text") if table or match["text"] is not None else (0, 0)
        return cls(
            match["code"], match["language"] == "python", match["table"] or match["text"] or "", table, kind, span
        )

    def output(self) -> str:
        """What the code prints now: stdout, then the messages without the progress. Errors are the commands' own."""
        from wager.cli import cli

        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            if self.python:
                exec(self.code, {})
            for line in [] if self.python else self.code.splitlines():
                cli.main(shlex.split(line)[1:], prog_name="wager", standalone_mode=False)
        return out.getvalue() + _PROGRESS.sub("", err.getvalue())

    def shown_of(self, output: str) -> str:
        """The part of an output that is shown: all lines, or a table of the columns that are shown."""
        if not self.table:
            return "\n".join(line.rstrip() for line in output.splitlines() if line.strip()) + "\n"
        columns = [cell.strip() for cell in self.shown.splitlines()[0].strip("| ").split("|")]
        lines = [re.split(r"  +", line.strip()) for line in output.splitlines()]
        head = next((i for i, cells in enumerate(lines) if set(columns) <= set(cells)), None)
        if head is None:
            raise WagerError(f"No table with the columns {', '.join(columns)} is printed by {self.code.strip()}.")
        place, rows = [lines[head].index(column) for column in columns], []
        for cells in lines[head + 2 :]:
            if len(cells) <= max(place):
                break
            rows.append([cells[index] for index in place])
        kept = self.shown.splitlines(keepends=True)[:2]
        return "".join([*kept, *("| " + " | ".join(cells) + " |\n" for cells in rows)])


def examples(text: str) -> list[Example]:
    """In the order of the text."""
    return [Example.of(match) for match in _PIECE.finditer(text) if match["code"]]


def fill(text: str, draw: Callable[[str, Figure | RoundDrawing], str]) -> str:
    """The text with what its examples print, its numbers, and its figures as `draw` makes them, also of their names."""
    shown = ""

    def piece(match: re.Match[str]) -> str:
        nonlocal shown
        if match["figure"]:
            name = match["figure"]
            return draw(name, RoundDrawing.of(shown) if name == "round" else FIGURES[name]())
        if match["value"]:
            form, expression = match["value"].split(maxsplit=1)
            return format(eval(expression, _names(shown)), form).replace("%", " %")
        example = Example.of(match)
        start, end = (place - match.start() for place in example.span)
        if example.shown:
            shown = example.shown if example.kind else example.shown_of(example.output())
        return match[0] if example.kind or not example.shown else match[0][:start] + shown + match[0][end:]

    return _PIECE.sub(piece, text)


# ---- numbers in sentences --------------------------------------------------------------------------------------------

_MLA_FLOPS_PER_BYTE = 2 * 128 * (2 * 512 + 64) / (2 * (512 + 64))  # DeepSeek-V3: 128 heads, latents of 512 + 64


def _names(shown: str) -> dict[str, Any]:
    """What the numbers of the text are computed from; `said(PATTERN)` is a number of the last output shown, and
    `cell(COLUMN)` one in the first row of its table."""
    from wager.arch import find_model
    from wager.planner.devices import find_device
    from wager.planner.routing import distinct_experts

    def said(pattern: str) -> float:
        found = re.search(pattern, shown)
        if found is None:
            raise WagerError(f"The lesson quotes {pattern!r} of an output that does not have it.")
        return float(found[1])

    def cell(column: str) -> float:
        head, _, row = (line.strip("| ").split(" | ") for line in shown.splitlines()[:3])
        return float(row[head.index(column)])

    functions = dict(
        said=said, cell=cell, tau=_tokens, step=_step, best=_best, needed=needed, distinct=distinct_experts
    )
    devices = dict(h100=find_device("H100"), b200=find_device("B200"))
    return {**functions, **devices, "llama": find_model("Llama-3.1-8B"), "mla": _MLA_FLOPS_PER_BYTE}


@cache
def _deployment(model: str, hardware: str) -> Deployment:
    from wager.planner.options import PlanSettings, plan_deployment

    return plan_deployment(model, hardware, PlanSettings())


def _step(rows: int) -> tuple[float, float, float]:
    """Milliseconds of a step of Llama-3.1-8B on an H100 by `rows` requests without context: of reading, of arithmetic,
    and in all."""
    cost = _deployment("Llama-3.1-8B", "H100").cost
    step = cost.step(0, 1, batch=rows)
    read = sum(part.bytes for part in step.parts.values()) / cost.device.bandwidth
    computed = sum(part.flops for part in step.parts.values()) / cost.device.peak("bf16")
    return 1e3 * read, 1e3 * computed, 1e3 * step.seconds


def _best(rate: float, cost: float, *, deepest: int = 16) -> tuple[float, int]:
    """The largest speed-up at that acceptance rate and its depth; a guess and its row take `cost` plain steps."""
    return max((_speed_up(rate, depth, cost), depth) for depth in range(deepest + 1))


def _speed_up(rate: float, depth: int, cost: float) -> float:
    return _tokens(rate, depth) / (1 + depth * cost)


def _tokens(rate: float, depth: int) -> float:
    """τ, the mean tokens of a round."""
    from wager.economics.acceptance import survival, tokens_per_round

    return tokens_per_round(survival(rate, depth))


def needed(wanted: float, cost: float) -> tuple[float, int]:
    """The least acceptance rate with which some depth reaches a speed-up, and that depth; (nan, 0) if none does. A
    guess takes `cost` plain steps, to draft and to verify."""
    low, high = 0.0, 1.0
    if _best(high, cost)[0] < wanted:
        return math.nan, 0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if _best(middle, cost)[0] >= wanted else (middle, high)
    return high, _best(high, cost)[1]


# ---- figures ---------------------------------------------------------------------------------------------------------

Curves = Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Figure:
    """Curves by label, of points (x, y). `doubling`: marks of x double."""

    title: str
    x: str
    y: str
    curves: Curves
    doubling: bool = False


@dataclass(frozen=True, slots=True)
class RoundDrawing:
    """A round: its guesses, how many were accepted, and the target's own token behind these."""

    title: str
    guesses: Sequence[str]
    accepted: int
    corrected: str

    @classmethod
    def of(cls, shown: str) -> RoundDrawing:
        """The last printed round in which some guesses were accepted and others discarded."""
        pattern = r"guessed by \w+: (.*)\n  accepted (\d+): .*\n  corrected: (\S+)\n  discarded"
        guesses, accepted, corrected = re.findall(pattern, shown)[-1]
        return cls("One round: a guess in the middle is wrong", guesses.split(), int(accepted), corrected)

    def rows(self) -> list[tuple[str, str, str]]:
        """Every guess, the target's choice at its place, and what becomes of the guess."""
        end = self.accepted
        verdicts = [("accepted", guess) for guess in self.guesses[:end]] + [("rejected", self.corrected)]
        verdicts += [("discarded", "–")] * (len(self.guesses) - end - 1)
        return [(guess, choice, verdict) for guess, (verdict, choice) in zip(self.guesses, verdicts, strict=True)]


def _rows() -> Figure:
    steps = {rows: _step(rows) for rows in _doubled(1024)}
    labels = ("reading", "arithmetic", "the pass")
    curves = {label: [(rows, step[index]) for rows, step in steps.items()] for index, label in enumerate(labels)}
    return Figure("A pass of Llama-3.1-8B on an H100", "rows", "ms", curves, doubling=True)


def _tau() -> Figure:
    curves = {f"α = {rate}": [(depth, _tokens(rate, depth)) for depth in range(17)] for rate in (0.5, 0.7, 0.8, 0.9)}
    return Figure("Tokens of a round", "depth γ", "τ", curves)


def _depths() -> Figure:
    curves = {f"α = {rate}": [(depth, _speed_up(rate, depth, 0.1)) for depth in range(17)] for rate in (0.5, 0.7, 0.9)}
    return Figure("Guesses of a tenth of a step each", "depth γ", "speed-up", curves)


def _needs() -> Figure:
    costs, curves = [cost / 100 for cost in range(0, 51, 2)], {}
    for wanted in (1.5, 3.3):
        found = [(cost, *needed(wanted, cost)) for cost in costs]
        curves[f"speed-up {wanted}"] = [(cost, rate) for cost, rate, depth in found if depth]
    return Figure("What a speed-up needs", "d + v, plain steps for a guess", "least α", curves)


def _by_batch(last: int, rate: float, context: int, cases: Mapping[str, tuple[str, str, int | None]]) -> Curves:
    """Speed-up by batch up to `last`, of a model on a device at a depth (None: the best one)."""
    from wager.planner.acceptance import AcceptanceRates

    curves = {}
    for label, (model, hardware, depth) in cases.items():
        rates, deployment = AcceptanceRates(str(rate), rate), replace(_deployment(model, hardware), depth=depth)
        points = [deployment.point(rates, batch=batch, context=context) for batch in _doubled(last)]
        curves[label] = [(point.batch, point.chosen.speedup) for point in points]
    return curves


def _experts() -> Figure:
    cases = {"Qwen3-8B, dense": ("Qwen3-8B", "B200", 4), "Qwen3-30B-A3B": ("Qwen3-30B-A3B", "B200", 4)}
    curves = _by_batch(256, 0.75, 1024, cases)
    return Figure("Four guesses a round on a B200, α = 0.75", "requests", "speed-up", curves, doubling=True)


def _load() -> Figure:
    cases = {"four guesses": ("Llama-3.1-8B", "H100", 4), "the best depth": ("Llama-3.1-8B", "H100", None)}
    curves = _by_batch(1024, 0.6, 256, cases)
    return Figure("Llama-3.1-8B on an H100, α = 0.6", "requests", "speed-up", curves, doubling=True)


def _doubled(last: int) -> list[int]:
    return [2**power for power in range(last.bit_length())]


FIGURES: Mapping[str, Callable[[], Figure]] = {
    "rows": _rows,
    "tau": _tau,
    "depths": _depths,
    "needs": _needs,
    "experts": _experts,
    "load": _load,
}


def in_letters(figure: Figure | RoundDrawing, *, width: int = 60, height: int = 14) -> str:
    """The figure as a block of text."""
    if isinstance(figure, RoundDrawing):
        columns = [("guessed", "the target's", ""), *figure.rows()]
        widths = [max(map(len, column)) for column in columns]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in zip(*columns, strict=True)]
        return "\n".join(["```text", figure.title, "", *lines, "```"])
    scale = math.log2 if figure.doubling else float
    points = {label: [(scale(x), y) for x, y in curve] for label, curve in figure.curves.items()}
    xs, ys = zip(*(point for curve in points.values() for point in curve), strict=True)
    left, right, top = min(xs), max(xs), max(ys)
    grid = [[" "] * width for _ in range(height)]
    for letter, curve in zip("abcd", points.values(), strict=False):
        for column in range(width):
            x = left + (right - left) * column / (width - 1)
            for (x0, y0), (x1, y1) in pairwise(curve):
                if x0 <= x <= x1:
                    y = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
                    grid[round((height - 1) * (1 - y / top))][column] = letter
    labels = [f"{top:.3g}", *[""] * (height - 2), "0"]
    lines = [f"{label:>6} |{''.join(line).rstrip()}" for label, line in zip(labels, grid, strict=True)]
    ends = [f"{2**end if figure.doubling else end:g}" for end in (left, right)]
    axis = f"{'':7}{ends[0]}{figure.x:^{width - len(ends[0]) - len(ends[1])}}{ends[1]}"
    legend = [f"{'':7}{letter}: {label}" for letter, label in zip("abcd", points, strict=False)]
    return "\n".join(["```text", f"{figure.title} ({figure.y})", "", *lines, axis, *legend, "```"])


# ---- the command -----------------------------------------------------------------------------------------------------


@click.command("lesson", cls=flags.Verb)
@click.argument("parts", nargs=-1, type=flags.Count(min=1), metavar="[PART]...")
@click.option("--answers", is_flag=True, help="Show the answers to the questions at once.")
def command(*, parts: tuple[int, ...], answers: bool) -> None:
    """A lesson on speculative decoding, from nothing to the policy, in parts.

    Figures and tables are computed while you read. On a terminal the answer to a question comes with a key, and q ends.
    Elsewhere everything is printed, the answers with --answers.
    """
    introduction, *sections = _PART.split(SOURCE.read_text(encoding="utf-8"))
    glossary = sections.pop()
    for number in parts:
        if number > len(sections):
            raise UsageError(f"The lesson has no part {number}.", f"Its parts are 1 to {len(sections)}.")
    asks = sys.stdin.isatty() and sys.stdout.isatty() and not answers
    shown = [sections[number - 1] for number in parts] or [introduction, *sections, glossary]
    for section in shown:
        with console.working("computing") as _:
            text = fill(section, lambda _name, figure: in_letters(figure))
        texts, hidden = _ANSWER.split(text)[::2], _ANSWER.split(text)[1::2]
        for before, answer in zip(texts, [*hidden, ""], strict=True):
            _print(before)
            if answer and asks and _key("any key: the answer") == "q":
                return
            if answer and (asks or answers):
                _print(answer)
        if asks and section is not shown[-1] and _key("any key: go on; q: end") == "q":
            return


def _print(text: str) -> None:
    """Markdown, drawn on a terminal."""
    if not sys.stdout.isatty():
        click.echo(text.strip("\n") + "\n")
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text, code_theme="ansi_dark", hyperlinks=False))


def _key(words: str) -> str:
    """A key that the reader presses."""
    click.echo(f"[{words}] ", nl=False, err=True)
    key = click.getchar()
    click.echo("\r\033[K", nl=False, err=True)
    return key.lower()
