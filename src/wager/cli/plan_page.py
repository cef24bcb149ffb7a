"""Plots for `wager plan`: roofline, distinct experts, speed-up, best depth; alone, or in a page with the table.

matplotlib is optional: without it, importing this module raises a UsageError.
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from wager.arch import Experts
from wager.cli.plan_text import PlanReport
from wager.economics.costmodel.plan import AcceptanceRates
from wager.economics.costmodel.roofline import SequenceLoad
from wager.economics.costmodel.speedup import best_outcome
from wager.errors import UsageError

try:
    from matplotlib import colormaps
    from matplotlib.figure import Figure
except ImportError as error:
    raise UsageError("Plots need matplotlib, which is not installed.", "Install it: pip install matplotlib.") from error

_KINDS = (".png", ".svg", ".pdf")
_GRID = {"color": "0.9", "linewidth": 0.6}
_SHADES = 24
_RATES = (0.5, 0.6, 0.7, 0.8, 0.9)


def write_plot(report: PlanReport, path: Path) -> None:
    """The four plots in one file. UsageError for a suffix other than .png, .svg or .pdf."""
    if path.suffix.lower() not in _KINDS:
        raise UsageError(f"{path} is not a picture that wager can write.", f"End its name in {', '.join(_KINDS)}.")
    try:
        draw(report).savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"The plots cannot be written to {path}: {error.strerror}.") from error


def write_page(report: PlanReport, path: Path) -> None:
    """An HTML page: summary, plots, table, notes."""
    picture = io.StringIO()
    draw(report).savefig(picture, format="svg")
    columns, rows = report.table()
    cost = report.query.cost
    title = html.escape(f"{cost.model.name} on {cost.device.name}")
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in report.notes())
    summary = html.escape("\n".join(report.summary()))
    svg = picture.getvalue()
    svg = svg[svg.index("<svg") :]
    page = _PAGE.format(title=title, summary=summary, picture=svg, head=head, body=body, notes=notes)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The page cannot be written to {path}: {error.strerror}.") from error


def draw(report: PlanReport) -> Figure:
    """Roofline with operating points, distinct experts (or the parts of a step), speed-up and best depth by batch."""
    figure = Figure(figsize=(13, 9.5), layout="constrained")
    axes = figure.subplots(2, 2)
    cost = report.query.cost
    figure.suptitle(f"{cost.model.name} on {cost.device.name}, drafter {report.query.drafter.name}")
    _roofline(axes[0][0], report)
    (_experts if cost.model.sparse else _shares)(axes[0][1], report)
    _speedups(axes[1][0], report)
    _depths(axes[1][1], report)
    return figure


def _batch_sizes(report: PlanReport) -> list[int]:
    """Batch sizes to plot: between the smallest and largest of the grid; 1 to 256 if it has a single one."""
    low, high = min(report.grid.batches), max(report.grid.batches)
    if low == high:
        low, high = 1, max(256, high)
    steps = [low * (high / low) ** (i / 47) for i in range(48)]
    return sorted({round(step) for step in steps} | set(report.grid.batches))


def _finish(axes: Any, title: str, *, x: str, y: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, which="major", **_GRID)
    axes.set_axisbelow(True)


def _roofline(axes: Any, report: PlanReport) -> None:
    """Every part of the planned steps at its intensity and the rate it attains there."""
    device = report.query.cost.device
    points = [
        (part, cost.flops / cost.bytes, cost.flops / cost.seconds, point.batch)
        for point in report.points
        for part, cost in point.step.parts.items()
        if cost.flops and cost.bytes and cost.seconds
    ]
    low = min(0.5, *(point[1] for point in points)) / 2
    high = max(4 * device.ridge(kind) for kind in device.peaks)
    high = max(high, *(2 * point[1] for point in points))
    for kind, peak in device.peaks.items():
        axes.plot([low, device.ridge(kind), high], [low * device.bandwidth, peak, peak], color="0.55", linewidth=1)
        axes.annotate(kind, (high, peak), fontsize=8, ha="right", va="bottom", color="0.35")
    largest = max(point[3] for point in points)
    for index, part in enumerate(dict.fromkeys(point[0] for point in points)):
        of_part = [point for point in points if point[0] == part]
        sizes = [12 + 70 * math.log1p(point[3]) / math.log1p(largest) for point in of_part]
        axes.scatter([point[1] for point in of_part], [point[2] for point in of_part], s=sizes, label=part, alpha=0.75,
                     color=colormaps["tab10"](index % 10), linewidths=0)  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(fontsize=8, loc="lower right")
    _finish(axes, "Roofline: parts of the planned steps (larger dots: larger batch)", x="FLOP per byte", y="FLOP/s")


def _experts(axes: Any, report: PlanReport) -> None:
    """Distinct experts of a layer that a pass reads: plain, and with drafts, with and without locality."""
    query = report.query
    ffn = next(layer.ffn for layer in query.cost.model.layers if isinstance(layer.ffn, Experts))
    batches, ranks = _batch_sizes(report), query.cost.cluster.ep
    routing = query.cost.routing

    def distinct(tokens: float) -> list[float]:
        return [routing.distinct_experts(ffn.count, ffn.active, ranks * batch * tokens) for batch in batches]

    axes.plot(batches, distinct(1), label="plain decoding")
    for rows in (2, 4, 8):
        [line] = axes.plot(batches, distinct(rows), label=f"{rows - 1} draft token{'s' if rows > 2 else ''}")
        if routing.locality < 1:
            label = f"the same, locality {routing.locality:g}"
            axes.plot(
                batches, distinct(routing.unrelated_tokens(rows)), linestyle="--", color=line.get_color(), label=label
            )
    axes.axhline(ffn.count, color="0.55", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.legend(fontsize=8)
    _finish(
        axes, f"Distinct experts per layer, of {ffn.count} with {ffn.active} a token", x="batch", y="distinct experts"
    )


def _shares(axes: Any, report: PlanReport) -> None:
    """The parts of a plain step, for models without experts."""
    cost, batches = report.query.cost, _batch_sizes(report)
    steps = [cost.step([SequenceLoad(report.grid.contexts[0], 1, batch)]) for batch in batches]
    parts = list(steps[0].parts)
    shares = [[step.parts[part].seconds / step.seconds for step in steps] for part in parts]
    axes.stackplot(batches, shares, labels=parts, alpha=0.8)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8, loc="lower right")
    _finish(axes, f"Parts of a plain step, context {report.grid.contexts[0]}", x="batch", y="share of seconds")


def _best_by_batch(
    report: PlanReport, rate: AcceptanceRates, batches: Sequence[int], value: Callable[[Any], float]
) -> list[float]:
    """`value` of the best outcome at each batch, at the first context."""
    context = report.grid.contexts[0]
    return [value(best_outcome(report.query.outcomes(rate, batch=batch, context=context))) for batch in batches]


def _speedups(axes: Any, report: PlanReport) -> None:
    batches = _batch_sizes(report)
    rates = {rate.label: rate for rate in report.grid.acceptances}
    if len(rates) == 1:
        rates |= {f"{rate:g}": AcceptanceRates(f"{rate:g}", rate) for rate in _RATES if f"{rate:g}" not in rates}
    for rate in sorted(rates.values(), key=lambda rate: rate.label):
        axes.plot(batches, _best_by_batch(report, rate, batches, lambda outcome: outcome.speedup), label=rate.label)
    axes.axhline(1, color="0.55", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.legend(fontsize=8, title="acceptance", title_fontsize=8)
    _finish(axes, f"Speed-up at the best depth, context {report.grid.contexts[0]}", x="batch", y="over plain decoding")


def _depths(axes: Any, report: PlanReport) -> None:
    """Best depth over batch and constant acceptance; grey where plain decoding is fastest."""
    batches = _batch_sizes(report)
    rates = [0.3 + 0.68 * i / (_SHADES - 1) for i in range(_SHADES)]
    rows = [_best_by_batch(report, AcceptanceRates("", rate), batches, lambda outcome: outcome.depth) for rate in rates]
    colours = colormaps["viridis"].with_extremes(under="0.85")
    most = max(1, max(max(row) for row in rows))
    mesh = axes.pcolormesh(batches, rates, rows, cmap=colours, vmin=0.5, vmax=most + 0.5, shading="nearest")
    axes.figure.colorbar(mesh, ax=axes, label="draft tokens", extend="min")
    axes.set_xscale("log", base=2)
    _finish(axes, f"Best depth, context {report.grid.contexts[0]} (grey: plain decoding)", x="batch", y="acceptance")
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
<pre>{summary}</pre>
{picture}
<table><thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table>
{notes}
</body></html>
"""
