"""The figure of `wager plan`: for every planned context the parts of a plain step, the speed-up and the best depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wager.planner.acceptance import AcceptanceRates
from wager.planner.plan import best_outcome
from wager.planner.report import PlanReport
from wager.terminal.plots import (
    BACKGROUND,
    COLOURS,
    DASHES,
    MARKERS,
    OUTLINE,
    REFERENCE,
    check_suffix,
    count,
    count_axis,
    finish,
    legend,
    legend_beside,
    map_of_counts,
    new_figure,
    write_figure,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHADES = 24
_RATES = (0.5, 0.6, 0.7, 0.8, 0.9)
_PART_COLOURS = (*COLOURS[:6], "#999999", "#f0e442", "#332288", "#117733", "#882255", "#000000")
_WIDTH, _HEIGHT = 18.0, 4.9
"""The width of the figure and the height of a row, in inches."""
_NOTE: dict[str, Any] = {"fontsize": 8, "color": "0.3"}


def write_plot(report: PlanReport, path: Path) -> None:
    """The plots in one file. UsageError for a suffix other than .png, .svg or .pdf."""
    check_suffix(path)
    write_figure(draw(report), path)


def draw(report: PlanReport) -> Figure:
    """A row for every planned context: the parts of a plain step, the speed-up for every planned acceptance, and the
    best depth."""
    cost, contexts = report.deployment.cost, report.contexts
    spread = f" x {cost.cluster.devices}" if cost.cluster.devices > 1 else ""
    title = f"{cost.model.name} on {cost.device.name}{spread}, drafter {report.deployment.drafter.name}"
    figure = new_figure(_WIDTH, _HEIGHT * len(contexts), title=title)
    rows = figure.subplots(len(contexts), 3, squeeze=False)
    batches = plotted_batches(report)
    for (parts, speedups, depths), context in zip(rows, contexts, strict=True):
        _parts(parts, report, context=context, batches=batches)
        _speedups(speedups, report, context=context, batches=batches)
        _depths(depths, report, context=context, batches=batches)
    return figure


def plotted_batches(report: PlanReport) -> list[int]:
    """Batch sizes to plot: between the smallest and largest of the grid; 1 to 256 if it has a single one."""
    low, high = min(report.batches), max(report.batches)
    if low == high:
        low, high = 1, max(256, high)
    steps = [low * (high / low) ** (i / 47) for i in range(48)]
    return sorted({round(step) for step in steps} | set(report.batches))


def _parts(axes: Any, report: PlanReport, *, context: int, batches: Sequence[int]) -> None:
    """Shares of the seconds of a plain step."""
    cost = report.deployment.cost
    steps = [cost.step(context, 1, batch=batch * report.deployment.share) for batch in batches]
    parts = list(steps[0].parts)
    shares = [[step.parts[part].seconds / step.seconds for step in steps] for part in parts]
    axes.stackplot(batches, shares, labels=parts, colors=_PART_COLOURS, edgecolor="white", linewidth=0.6)
    axes.set_ylim(0, 1)
    axes.set_xlim(batches[0], batches[-1])
    count_axis(axes.xaxis)
    legend_beside(axes, top_first=True)
    finish(axes, f"Parts of a plain step, context {count(context)}", x="batch", y="share of its seconds")


def _speedups(axes: Any, report: PlanReport, *, context: int, batches: Sequence[int]) -> None:
    """A line for each planned acceptance, its planned batches marked; a single one is shown among others."""
    deployment = report.deployment

    def speedups(rate: AcceptanceRates) -> list[float]:
        """At each batch that of the planned depth, or else the best one."""
        found = [deployment.outcomes(rate, batch=batch, context=context) for batch in batches]
        chosen = [deployment.choose(each) for each in found]
        return [outcome.speedup for outcome in chosen]

    planned = {rate.label: rate for rate in report.acceptances}
    others = [AcceptanceRates(f"{rate:g}", rate) for rate in _RATES if len(planned) == 1 and f"{rate:g}" not in planned]
    _reference_rates(axes, {rate.label: speedups(rate) for rate in others}, batches)
    for index, (label, rate) in enumerate(planned.items()):
        axes.plot(
            batches,
            speedups(rate),
            color=COLOURS[index % 7],
            linestyle=DASHES[index // 7 % len(DASHES)],
            linewidth=1.8,
            marker=MARKERS[index % len(MARKERS)],
            markevery=[batches.index(batch) for batch in report.batches],
            markersize=5,
            label=label,
        )
    axes.axhline(1, **REFERENCE)
    _memory_limit(axes, report, context=context, last=batches[-1])
    count_axis(axes.xaxis)
    legend(axes, title="acceptance")
    depth = "the best depth" if deployment.depth is None else f"depth {deployment.depth}"
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
            axes.annotate(label, (batches[place], values[place]), ha="center", va="center", bbox=BACKGROUND, **_NOTE)


def _memory_limit(axes: Any, report: PlanReport, *, context: int, last: int) -> None:
    """A line at the largest batch that fits in memory, if it is in the plot."""
    most = report.deployment.largest_batch(max(1, context))
    if most is not None and 1 <= most < last:
        axes.axvline(most, color="0.45", linewidth=1, linestyle=":")
        axes.annotate(
            f"memory is full at {most} ",
            (most, 0.02),
            xycoords=("data", "axes fraction"),
            rotation=90,
            ha="right",
            va="bottom",
            bbox=BACKGROUND,
            **_NOTE,
        )


def _depths(axes: Any, report: PlanReport, *, context: int, batches: Sequence[int]) -> None:
    """Best depth over batch and constant acceptance; grey where plain decoding is fastest. Planned acceptances that are
    constant are marked; those by depth are in the plot of the speed-up."""
    deployment = report.deployment
    rates = [0.3 + 0.68 * i / (_SHADES - 1) for i in range(_SHADES)]
    rows = [
        [
            best_outcome(deployment.outcomes(AcceptanceRates("", rate), batch=batch, context=context)).depth
            for batch in batches
        ]
        for rate in rates
    ]
    map_of_counts(axes, batches, rates, rows, label="draft tokens")
    for rate in report.acceptances:
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
