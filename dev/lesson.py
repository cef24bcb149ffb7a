"""The lesson as a page with figures, and as `wager lesson` shows it, of lesson.md.in beside this file.

python dev/lesson.py            says which files differ from what the lesson gives now
python dev/lesson.py --write    writes them
python dev/lesson.py --record   runs the examples whose output was recorded, and writes it into the source first:
                                with the default model, on a machine that does nothing else

What can be computed is not in the source: an example (a `sh` or `python` block) is followed by the columns of the table
to show of its output, or by a `text` block of `...`; `{{FORMAT EXPRESSION}}` is a number, and a line `!NAME` one of
FIGURES. A `text model` block holds tokens of the default model, a `text measured` block or a table after
<!-- measured --> what depends on the machine: they were recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from html import escape
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from wager.arch import find_model
from wager.cli.lesson import TEXT
from wager.cli.verbs import cli
from wager.economics.acceptance import survival, tokens_per_round
from wager.errors import WagerError
from wager.models.weights import num_parameters
from wager.planner.acceptance import AcceptanceRates
from wager.planner.devices import find_device
from wager.planner.options import PlanSettings, plan_deployment
from wager.planner.plan import Deployment
from wager.planner.routing import distinct_experts

SOURCE = Path(__file__).with_name("lesson.md.in")
DOCS = Path(__file__).parents[1] / "docs"

_BLOCK = (
    r"```(?P<language>sh|python)\n(?P<code>.*?)```\n"
    r"(?:\s*(?P<mark><!-- measured -->\n)?"
    r"(?:```text(?P<info>[ \w]*)\n(?P<text>.*?)```|(?P<table>(?:\|[^\n]*\n)+)))?"
)
_PIECE = re.compile(rf"{_BLOCK}|\{{\{{(?P<value>[^\n]+?)\}}\}}|^!(?P<figure>\w+)$", re.DOTALL | re.MULTILINE)
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
        return _printed(self.code, python=self.python)

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


@cache  # the page and the terminal show the same
def _printed(code: str, *, python: bool) -> str:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if python:
            exec(code, {})
        for line in [] if python else code.splitlines():
            cli.main(shlex.split(line)[1:], prog_name="wager", standalone_mode=False)
    return out.getvalue() + _PROGRESS.sub("", err.getvalue())


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
            return draw(name, RoundDrawing.of(shown) if name == "round" else _figure(name))
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

    def said(pattern: str) -> float:
        found = re.search(pattern, shown)
        if found is None:
            raise WagerError(f"The lesson quotes {pattern!r} of an output that does not have it.")
        return float(found[1])

    def cell(column: str) -> float:
        head, _, row = (line.strip("| ").split(" | ") for line in shown.splitlines()[:3])
        return float(row[head.index(column)])

    functions = dict(
        said=said,
        cell=cell,
        tau=_tokens,
        step=_step,
        best=_best,
        needed=needed,
        distinct=distinct_experts,
        parameters=num_parameters,
    )
    devices = dict(h100=find_device("H100"), b200=find_device("B200"))
    return {**functions, **devices, "llama": find_model("Llama-3.1-8B"), "mla": _MLA_FLOPS_PER_BYTE}


@cache
def _deployment(model: str, hardware: str) -> Deployment:
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


@cache
def _figure(name: str) -> Figure:
    return FIGURES[name]()


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


# ---- the page and the text -------------------------------------------------------------------------------------------

_ANSWER = re.compile(r"^A: (.*?\n)(?=\n|\Z)", re.DOTALL | re.MULTILINE)


def page(source: str) -> tuple[str, dict[str, str]]:
    """docs/lesson.md, and its figures as SVG by the names of their files in docs/lesson/."""
    figures: dict[str, str] = {}

    def draw(name: str, figure: Figure | RoundDrawing) -> str:
        figures[f"{name}.svg"] = svg_of_round(figure) if isinstance(figure, RoundDrawing) else svg(figure)
        return f"![{figure.title}](lesson/{name}.svg)"

    text = fill(source, draw)
    folded = _ANSWER.sub(r"<details><summary>Answer</summary>\n\n\1\n</details>\n", text)
    title, _, rest = folded.partition("\n")
    made = "<!-- Made by `python dev/lesson.py --write` of dev/lesson.md.in, which is the one to edit. -->"
    return f"{title}\n\n{made}\n{rest}", figures


def for_terminals(source: str) -> str:
    """What `wager lesson` shows."""
    return fill(source, lambda _name, figure: in_letters(figure))


def recorded(source: str) -> str:
    """The source with what the commands of its recorded examples print now."""
    parts, done = [], 0
    for example in examples(source):
        if example.kind:
            print(example.code.splitlines()[0], file=sys.stderr)
            parts += [source[done : example.span[0]], example.shown_of(example.output())]
            done = example.span[1]
    return "".join(parts) + source[done:]


# ---- SVG: small files of a few shapes, whose colours follow the reader's ---------------------------------------------

_STYLE = """<style>
svg { background: #fff; font: 12px system-ui, sans-serif; } text { fill: #24292f; }
.axis { stroke: #8c959f; fill: none; } .grid { stroke: #d8dee4; }
.box { fill: none; stroke: #8c959f; } .accepted { fill: #009e73; fill-opacity: .25; stroke: #009e73; }
.rejected { fill: #d55e00; fill-opacity: .25; stroke: #d55e00; } .discarded { stroke-dasharray: 3 3; }
@media (prefers-color-scheme: dark) { svg { background: #0d1117; } text { fill: #e6edf3; } .grid { stroke: #30363d; } }
</style>"""
_COLOURS, _DASHES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7"), ("", "7 3", "2 3", "9 3 2 3")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 260, 48, 150, 34, 40


def svg(figure: Figure) -> str:
    """Curves from 0 up, their names at their ends."""
    place = math.log2 if figure.doubling else float
    xs = [place(x) for curve in figure.curves.values() for x, _ in curve]
    high, step = _ticks(max(y for curve in figure.curves.values() for _, y in curve))
    left, wide, tall = min(xs), _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + wide * (place(x) - left) / (max(xs) - left), _TOP + tall * (1 - y / high)

    shapes = [_text(12, 18, f"{figure.title} ({figure.y})", weight="bold")]
    for mark in range(round(high / step) + 1):
        _, y = at(2**left, mark * step)
        shapes.append(f'<path class="grid" d="M{_LEFT} {y:.1f}h{wide}"/>')
        shapes.append(_text(_LEFT - 6, y + 4, f"{mark * step:g}", anchor="end"))
    for mark in [2.0**power for power in range(0, int(max(xs)) + 1, 2)] if figure.doubling else _x_marks(max(xs)):
        shapes.append(_text(at(mark, 0)[0], _HEIGHT - _BOTTOM + 16, f"{mark:g}", anchor="middle"))
    shapes.append(f'<path class="axis" d="M{_LEFT} {_TOP}v{tall}h{wide}"/>')
    shapes.append(_text(_LEFT + wide / 2, _HEIGHT - 8, figure.x, anchor="middle"))
    ends: list[tuple[float, float]] = []
    for colour, dash, (label, curve) in zip(_COLOURS, _DASHES, figure.curves.items(), strict=False):
        points = [at(x, y) for x, y in curve]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        shapes.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>')
        x, y = points[-1]
        near = [end for place, end in ends if place == x]
        ends.append((x, next(free for free in _around(y) if all(abs(free - end) >= 15 for end in near))))
        shapes.append(_text(x + 6, ends[-1][1] + 4, label))
    return _picture(_WIDTH, _HEIGHT, figure.title, shapes)


def _ticks(most: float) -> tuple[float, float]:
    """The end of an axis from 0 that holds `most`, and the distance of its marks."""
    step = next(s for size in count(-3) for s in (10.0**size, 2 * 10.0**size, 5 * 10.0**size) if most / s <= 6)
    return step * -(-most // step), step


def _x_marks(most: float) -> list[float]:
    high, step = _ticks(most)
    return [mark * step for mark in range(round(high / step) + 1) if mark * step <= most]


def _around(place: float) -> Iterator[float]:
    for distance in count():
        yield place + distance
        yield place - distance


def svg_of_round(drawing: RoundDrawing) -> str:
    """Guesses over the target's own choices, and what became of each."""
    shapes, width, tall = [_text(12, 22, drawing.title, weight="bold")], 92, 30
    for row, words in enumerate(("guessed", "the target's", "")):
        shapes.append(_text(12, 58 + row * 40, words))
    for column, (guess, choice, verdict) in enumerate(drawing.rows()):
        x = 104 + column * (width + 8)
        for row, word in enumerate((guess, choice)):
            shapes.append(
                f'<rect class="box {verdict}" x="{x}" y="{38 + row * 40}" width="{width}" height="{tall}" rx="4"/>'
            )
            shapes.append(_text(x + width / 2, 58 + row * 40, word, anchor="middle"))
        shapes.append(_text(x + width / 2, 138, verdict, anchor="middle"))
    return _picture(112 + len(drawing.guesses) * (width + 8), 152, drawing.title, shapes)


def _text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'


def _picture(width: int, height: int, title: str, shapes: list[str]) -> str:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(title)}</title>'
    return "\n".join([head, _STYLE, *shapes, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    if options.record:
        SOURCE.write_text(recorded(SOURCE.read_text(encoding="utf-8")), encoding="utf-8")
    source = SOURCE.read_text(encoding="utf-8")
    text, figures = page(source)
    (DOCS / "lesson").mkdir(exist_ok=True)
    files = {DOCS / "lesson.md": text, TEXT: for_terminals(source)}
    for path, made in (files | {DOCS / "lesson" / name: figure for name, figure in figures.items()}).items():
        if not path.exists() or path.read_text(encoding="utf-8") != made:
            print(f"{'written' if options.write else 'differs'}: {path.relative_to(DOCS.parent)}")
            if options.write:
                path.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
