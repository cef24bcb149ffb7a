"""The figure of `wager plan`: intensities, and for every planned context the parts of a step, the speed-up and the best
depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wager.planner import intensity_plots
from wager.planner.memory import largest_batch
from wager.planner.plan import AcceptanceRates
from wager.planner.roofline import SequenceLoad
from wager.planner.speedup import DepthOutcome, best_outcome
from wager.planner.text import PlanReport
from wager.terminal.plots import (
    BACKGROUND,
    COLOURS,
    DASHES,
    MARKERS,
    OUTLINE,
    REFERENCE,
    count,
    count_axis,
    finish,
    legend,
    legend_beside,
    map_of_counts,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHADES = 24
_RATES = (0.5, 0.6, 0.7, 0.8, 0.9)
_PART_COLOURS = (*COLOURS[:6], "#999999", "#f0e442", "#332288", "#117733", "#882255", "#000000")
_WIDTH, _HEIGHT = 18.0, 4.9
"""Of the figure and of a row of it, in inches."""


def draw(report: PlanReport) -> Figure:
    """Intensity by batch, of attention by rows and of every part, and distinct experts of a mixture; below, a row for
    every planned context: the parts of a plain step, the speed-up for every planned acceptance, and the best depth."""
    cost, contexts = report.query.cost, report.grid.contexts
    spread = f" x {cost.cluster.devices}" if cost.cluster.devices > 1 else ""
    title = f"{cost.model.name} on {cost.device.name}{spread}, drafter {report.query.drafter.name}"
    first = 2 if cost.model.sparse else 1
    figure = new_figure(_WIDTH, _HEIGHT * (first + len(contexts)), title=title)
    rows = figure.subfigures(first + len(contexts), 1, squeeze=False)[:, 0]
    batches = plotted_batches(report)
    if cost.model.sparse:
        panels = [*rows[0].subplots(1, 2), *rows[1].subplots(1, 2)]
        intensity_plots.of_experts(panels[3], report, batches=batches)
    else:
        panels = [*rows[0].subplots(1, 3)]
    intensity_plots.by_batch(panels[0], report)
    intensity_plots.by_rows(panels[1], report)
    intensity_plots.of_parts(panels[2], report)
    for row, context in zip(rows[first:], contexts, strict=True):
        parts, speedups, depths = row.subplots(1, 3)
        _parts(parts, report, context=context, batches=batches)
        _speedups(speedups, report, context=context, batches=batches)
        _depths(depths, report, context=context, batches=batches)
    return figure


def plotted_batches(report: PlanReport) -> list[int]:
    """Batch sizes to plot: between the smallest and largest of the grid; 1 to 256 if it has a single one."""
    low, high = min(report.grid.batches), max(report.grid.batches)
    if low == high:
        low, high = 1, max(256, high)
    steps = [low * (high / low) ** (i / 47) for i in range(48)]
    return sorted({round(step) for step in steps} | set(report.grid.batches))


def _parts(axes: Any, report: PlanReport, *, context: int, batches: Sequence[int]) -> None:
    """Shares of the seconds of a plain step."""
    cost = report.query.cost
    steps = [cost.step([SequenceLoad(context, 1, batch)]) for batch in batches]
    parts = list(steps[0].parts)
    shares = [[step.parts[part].seconds / step.seconds for step in steps] for part in parts]
    axes.stackplot(batches, shares, labels=parts, colors=_PART_COLOURS, edgecolor="white", linewidth=0.6)
    axes.set_ylim(0, 1)
    axes.set_xlim(batches[0], batches[-1])
    count_axis(axes.xaxis)
    legend_beside(axes, top_first=True)
    finish(axes, f"Parts of a plain step, context {count(context)}", x="batch", y="share of its seconds")


def _outcomes(report: PlanReport, rate: AcceptanceRates, batches: Sequence[int], context: int) -> list[DepthOutcome]:
    """At each batch the outcome of the planned depth, or else of the best one."""
    query = report.query
    found = [query.outcomes(rate, batch=batch, context=context) for batch in batches]
    return [best_outcome(depths) if query.depth is None else depths[query.depth] for depths in found]


def _speedups(axes: Any, report: PlanReport, *, context: int, batches: Sequence[int]) -> None:
    """A line for each planned acceptance, its planned batches marked; a single one is shown among others."""
    planned = {rate.label: rate for rate in report.grid.acceptances}
    others = [AcceptanceRates(f"{rate:g}", rate) for rate in _RATES if len(planned) == 1 and f"{rate:g}" not in planned]
    _reference_rates(
        axes,
        {rate.label: [outcome.speedup for outcome in _outcomes(report, rate, batches, context)] for rate in others},
        batches,
    )
    for index, (label, rate) in enumerate(planned.items()):
        values = [outcome.speedup for outcome in _outcomes(report, rate, batches, context)]
        marked = [batches.index(batch) for batch in report.grid.batches]
        axes.plot(
            batches,
            values,
            color=COLOURS[index % 7],
            linestyle=DASHES[index // 7 % len(DASHES)],
            linewidth=1.8,
            marker=MARKERS[index % len(MARKERS)],
            markevery=marked,
            markersize=5,
            label=label,
        )
    axes.axhline(1, **REFERENCE)
    _memory_limit(axes, report, context=context, last=batches[-1])
    count_axis(axes.xaxis)
    legend(axes, title="acceptance")
    depth = "the best depth" if report.query.depth is None else f"depth {report.query.depth}"
    finish(axes, f"Speed-up at {depth}, context {count(context)}", x="batch", y="times plain decoding")


def _reference_rates(axes: Any, curves: Mapping[str, Sequence[float]], batches: Sequence[int]) -> None:
    """Thin lines of other acceptances, named where they are furthest apart; of lines that meet there only the first."""
    if not curves:
        return
    spans = [max(values) - min(values) for values in zip(*curves.values(), strict=True)]
    place = spans.index(max(spans))
    top, named = max(max(values) for values in curves.values()), list[float]()
    for label, values in curves.items():
        axes.plot(batches, values, color="0.6", linewidth=0.9)
        if all(abs(values[place] - other) > 0.05 * (top - 1) for other in named):
            named.append(values[place])
            axes.annotate(
                label,
                (batches[place], values[place]),
                fontsize=8,
                color="0.3",
                ha="center",
                va="center",
                bbox=BACKGROUND,
            )


def _memory_limit(axes: Any, report: PlanReport, *, context: int, last: int) -> None:
    """A line at the largest batch that fits in memory, if it is in the plot."""
    most = largest_batch(report.query.cost, report.query.drafter, context=max(1, context))
    if most is not None and 1 <= most < last:
        axes.axvline(most, color="0.45", linewidth=1, linestyle=":")
        axes.annotate(
            f"memory is full at {most} ",
            (most, 0.02),
            xycoords=("data", "axes fraction"),
            rotation=90,
            ha="right",
            va="bottom",
            fontsize=8,
            color="0.3",
            bbox=BACKGROUND,
        )


def _depths(axes: Any, report: PlanReport, *, context: int, batches: Sequence[int]) -> None:
    """Best depth over batch and constant acceptance; grey where plain decoding is fastest. Planned acceptances that are
    constant are marked; those by depth are in the plot of the speed-up."""
    query = report.query
    rates = [0.3 + 0.68 * i / (_SHADES - 1) for i in range(_SHADES)]
    rows = [
        [
            best_outcome(query.outcomes(AcceptanceRates("", rate), batch=batch, context=context)).depth
            for batch in batches
        ]
        for rate in rates
    ]
    map_of_counts(axes, batches, rates, rows, label="draft tokens")
    for rate in report.grid.acceptances:
        if isinstance(rate.rates, float) and rates[0] <= rate.rates <= rates[-1]:
            axes.axhline(rate.rates, color="white", linewidth=1.2, linestyle="--", path_effects=OUTLINE)
            axes.annotate(
                rate.label,
                (0.01, rate.rates),
                xycoords=("axes fraction", "data"),
                xytext=(0, 2),
                textcoords="offset points",
                color="white",
                fontsize=9,
                path_effects=OUTLINE,
            )
    count_axis(axes.xaxis)
    axes.set_xlim(batches[0], batches[-1])
    finish(axes, f"Best depth, context {count(context)} (grey: plain decoding)", x="batch", y="constant acceptance")
    axes.grid(False)
