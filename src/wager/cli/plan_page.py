"""Draws the bill of `wager plan`: roofline, experts hit, speed-up, best depth; alone, or in a page with the table.

matplotlib is optional: without it importing this module is an error that says so.
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from wager.arch import Experts
from wager.cli.plan_text import Answer
from wager.economics.costmodel.bill import AcceptanceRates
from wager.economics.costmodel.roofline import SequenceLoad
from wager.economics.costmodel.speedup import best
from wager.errors import UsageError

try:
    from matplotlib import colormaps
    from matplotlib.figure import Figure
except ImportError as error:
    raise UsageError(
        "Drawings need matplotlib, which is not installed.", "Install it: pip install matplotlib."
    ) from error

_KINDS = (".png", ".svg", ".pdf")
_GRID = {"color": "0.9", "linewidth": 0.6}
_SHADES = 24
_RATES = (0.5, 0.6, 0.7, 0.8, 0.9)


def write_plot(answer: Answer, path: Path) -> None:
    """The four drawings in one file. UsageError for a suffix that is none of a picture."""
    if path.suffix.lower() not in _KINDS:
        raise UsageError(f"{path} is no picture wager can write.", f"End its name in {', '.join(_KINDS)}.")
    try:
        draw(answer).savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"The drawings cannot be written to {path}: {error.strerror}.") from error


def write_page(answer: Answer, path: Path) -> None:
    """A page that stands alone: opening lines, drawings, table, notes."""
    picture = io.StringIO()
    draw(answer).savefig(picture, format="svg")
    columns, rows = answer.table()
    cost = answer.question.cost
    title = html.escape(f"{cost.model.name} on {cost.device.name}")
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in answer.notes())
    opening = html.escape("\n".join(answer.opening()))
    drawn = picture.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    page = _PAGE.format(title=title, opening=opening, picture=drawn, head=head, body=body, notes=notes)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The page cannot be written to {path}: {error.strerror}.") from error


def draw(answer: Answer) -> Figure:
    """Roofline with operating points, experts hit (or what a step is made of), speed-up and best depth by batch."""
    figure = Figure(figsize=(13, 9.5), layout="constrained")
    axes = figure.subplots(2, 2)
    cost = answer.question.cost
    figure.suptitle(f"{cost.model.name} on {cost.device.name}, drafter {answer.question.drafter.name}")
    _roofline(axes[0][0], answer)
    (_experts if cost.model.sparse else _shares)(axes[0][1], answer)
    _speedups(axes[1][0], answer)
    _depths(axes[1][1], answer)
    return figure


def _ladder(answer: Answer) -> list[int]:
    """Batch sizes to draw at: between the smallest and largest that were asked; 1 to 256 if a single one was."""
    low, high = min(answer.grid.batches), max(answer.grid.batches)
    if low == high:
        low, high = 1, max(256, high)
    steps = [low * (high / low) ** (i / 47) for i in range(48)]
    return sorted({round(step) for step in steps} | set(answer.grid.batches))


def _finish(axes: Any, title: str, *, x: str, y: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, which="major", **_GRID)
    axes.set_axisbelow(True)


def _roofline(axes: Any, answer: Answer) -> None:
    """Every part of the billed steps at its intensity and the rate it attains there."""
    device = answer.question.cost.device
    points = [
        (part, each.flops / each.bytes, each.flops / each.seconds, point.batch)
        for point in answer.points
        for part, each in point.step.parts.items()
        if each.flops and each.bytes and each.seconds
    ]
    low = min(0.5, *(point[1] for point in points)) / 2
    high = max(4 * device.ridge(kind) for kind in device.peaks)
    high = max(high, *(2 * point[1] for point in points))
    for kind, peak in device.peaks.items():
        axes.plot([low, device.ridge(kind), high], [low * device.bandwidth, peak, peak], color="0.55", linewidth=1)
        axes.annotate(kind, (high, peak), fontsize=8, ha="right", va="bottom", color="0.35")
    largest = max(point[3] for point in points)
    for index, part in enumerate(dict.fromkeys(point[0] for point in points)):
        own = [point for point in points if point[0] == part]
        sizes = [12 + 70 * math.log1p(point[3]) / math.log1p(largest) for point in own]
        axes.scatter([point[1] for point in own], [point[2] for point in own], s=sizes, label=part, alpha=0.75,
                     color=colormaps["tab10"](index % 10), linewidths=0)  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(fontsize=8, loc="lower right")
    _finish(axes, "Roofline: parts of the billed steps (larger dots: larger batch)", x="FLOP per byte", y="FLOP/s")


def _experts(axes: Any, answer: Answer) -> None:
    """Distinct experts of a layer that a pass reads: plain, and with guesses, with and without locality."""
    question = answer.question
    ffn = next(layer.ffn for layer in question.cost.model.layers if isinstance(layer.ffn, Experts))
    batches, ranks = _ladder(answer), question.cost.cluster.ep
    routing = question.cost.routing

    def hit(tokens: float) -> list[float]:
        return [routing.hit(ffn.count, ffn.active, ranks * batch * tokens) for batch in batches]

    axes.plot(batches, hit(1), label="plain decoding")
    for rows in (2, 4, 8):
        [line] = axes.plot(batches, hit(rows), label=f"{rows - 1} guess{'es' if rows > 2 else ''}")
        if routing.locality < 1:
            label = f"the same, locality {routing.locality:g}"
            axes.plot(batches, hit(routing.effective(rows)), linestyle="--", color=line.get_color(), label=label)
    axes.axhline(ffn.count, color="0.55", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.legend(fontsize=8)
    _finish(axes, f"Experts hit per layer, of {ffn.count} with {ffn.active} a token", x="batch", y="distinct experts")


def _shares(axes: Any, answer: Answer) -> None:
    """What a plain step is made of, for models without experts."""
    cost, batches = answer.question.cost, _ladder(answer)
    steps = [cost.step([SequenceLoad(answer.grid.contexts[0], 1, batch)]) for batch in batches]
    parts = list(steps[0].parts)
    shares = [[step.parts[part].seconds / step.seconds for step in steps] for part in parts]
    axes.stackplot(batches, shares, labels=parts, alpha=0.8)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8, loc="lower right")
    _finish(axes, f"What a plain step is made of, context {answer.grid.contexts[0]}", x="batch", y="share of seconds")


def _curve(answer: Answer, rate: AcceptanceRates, batches: Sequence[int], value: Callable[[Any], float]) -> list[float]:
    """`value` of the best outcome at each batch, at the first context."""
    context = answer.grid.contexts[0]
    return [value(best(answer.question.outcomes(rate, batch=batch, context=context))) for batch in batches]


def _speedups(axes: Any, answer: Answer) -> None:
    batches = _ladder(answer)
    rates = {rate.label: rate for rate in answer.grid.acceptances}
    if len(rates) == 1:
        rates |= {f"{rate:g}": AcceptanceRates(f"{rate:g}", rate) for rate in _RATES if f"{rate:g}" not in rates}
    for rate in sorted(rates.values(), key=lambda rate: rate.label):
        axes.plot(batches, _curve(answer, rate, batches, lambda outcome: outcome.speedup), label=rate.label)
    axes.axhline(1, color="0.55", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.legend(fontsize=8, title="acceptance", title_fontsize=8)
    _finish(axes, f"Speed-up at the best depth, context {answer.grid.contexts[0]}", x="batch", y="over plain decoding")


def _depths(axes: Any, answer: Answer) -> None:
    """Best depth over batch and constant acceptance; grey where off wins."""
    batches = _ladder(answer)
    rates = [0.3 + 0.68 * i / (_SHADES - 1) for i in range(_SHADES)]
    rows = [_curve(answer, AcceptanceRates("", rate), batches, lambda outcome: outcome.depth) for rate in rates]
    colours = colormaps["viridis"].with_extremes(under="0.85")
    most = max(1, max(max(row) for row in rows))
    drawn = axes.pcolormesh(batches, rates, rows, cmap=colours, vmin=0.5, vmax=most + 0.5, shading="nearest")
    axes.figure.colorbar(drawn, ax=axes, label="guesses", extend="min")
    axes.set_xscale("log", base=2)
    _finish(axes, f"Best depth, context {answer.grid.contexts[0]} (grey: off)", x="batch", y="acceptance")
    axes.grid(False)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #222; }}
pre {{ white-space: pre-wrap; background: #f6f6f6; padding: .8rem 1rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }}
th, td {{ padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #e4e4e4; }}
svg {{ width: 100%; height: auto; }}
</style></head><body>
<h1>{title}</h1>
<pre>{opening}</pre>
{picture}
<table><thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table>
{notes}
</body></html>
"""
