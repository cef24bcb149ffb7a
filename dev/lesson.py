"""docs/lesson.md and its figures, of src/wager/cli/lesson.md.

python dev/lesson.py            says which files differ from what the lesson gives now
python dev/lesson.py --write    writes them
python dev/lesson.py --record   runs the examples whose output was recorded, and writes it into the source first:
                                with the default model, on a machine that does nothing else
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from html import escape
from itertools import count
from pathlib import Path

from wager.cli.lesson import SOURCE, Figure, RoundDrawing, examples, fill

DOCS = Path(__file__).parents[1] / "docs"
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
    made = "<!-- Made by `python dev/lesson.py --write` of src/wager/cli/lesson.md, which is the one to edit. -->"
    return f"{title}\n\n{made}\n{rest}", figures


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
    from math import log2

    place = log2 if figure.doubling else float
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
    text, figures = page(SOURCE.read_text(encoding="utf-8"))
    (DOCS / "lesson").mkdir(exist_ok=True)
    for name, made in {"lesson.md": text, **{f"lesson/{name}": figure for name, figure in figures.items()}}.items():
        path = DOCS / name
        if not path.exists() or path.read_text(encoding="utf-8") != made:
            print(f"{'written' if options.write else 'differs'}: docs/{name}")
            if options.write:
                path.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
