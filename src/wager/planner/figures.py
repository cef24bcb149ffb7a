"""The figure of `wager plan`: intensities (FLOPs per byte), and for every planned context the parts
of a step, the speed-up and the best depth.

A part of a step is compute-bound where its intensity is above the device's ridge, peak / bandwidth. All figures are
those of the cost model: FLOPs over bytes of the parts of its steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wager.arch import Experts
from wager.planner.acceptance import AcceptanceRates
from wager.planner.intensity import (
    DENSE_TWIN,
    IntensityCurve,
    attention_curves,
    feed_forward_curves,
    step_intensity,
)
from wager.planner.plan import best_outcome
from wager.planner.report import PlanReport, rank_word
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

_POINTS = 60
_INTENSITY = "FLOP per byte"
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
    """Intensity by batch, of attention by rows and of every part, and distinct experts of a mixture; below, a row for
    every planned context: the parts of a plain step, the speed-up for every planned acceptance, and the best depth."""
    cost, contexts = report.deployment.cost, report.contexts
    spread = f" x {cost.cluster.devices}" if cost.cluster.devices > 1 else ""
    title = f"{cost.model.name} on {cost.device.name}{spread}, drafter {report.deployment.drafter.name}"
    first = 2 if cost.model.sparse else 1
    figure = new_figure(_WIDTH, _HEIGHT * (first + len(contexts)), title=title)
    rows = figure.subfigures(first + len(contexts), 1, squeeze=False)[:, 0]
    batches = plotted_batches(report)
    if cost.model.sparse:
        panels = [*rows[0].subplots(1, 2), *rows[1].subplots(1, 2)]
        of_experts(panels[3], report, batches=batches)
    else:
        panels = [*rows[0].subplots(1, 3)]
    by_batch(panels[0], report)
    by_rows(panels[1], report)
    of_parts(panels[2], report)
    for row, context in zip(rows[first:], contexts, strict=True):
        parts, speedups, depths = row.subplots(1, 3)
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


# ---- panels of intensity ---------------------------------------------------------------------------------------------


def spread(low: float, high: float, *, points: int = _POINTS) -> list[float]:
    """Numbers from `low` to `high`, evenly spaced in their logarithm, the powers of two between them included."""
    steps = {low * (high / low) ** (i / (points - 1)) for i in range(points)}
    powers = {2.0**k for k in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)}
    return sorted(steps | powers)


def by_batch(axes: Any, report: PlanReport) -> None:
    """Intensity of plain decoding against batch: a mixture of experts beside its dense twin, or a dense model's
    feed-forward; the ridge, the knees, and whole steps at every planned context."""
    cost, contexts = report.deployment.cost, report.contexts
    planned = [batch * report.deployment.share for batch in report.batches]
    knees = [curve.knee for curve in feed_forward_curves(cost, [1]) if curve.knee is not None]
    batches = spread(1, max(256, *planned, *(4 * knee for knee in knees)))
    curves = feed_forward_curves(cost, batches)
    for curve, colour in zip(curves, (COLOURS[1], COLOURS[0]) if len(curves) > 1 else COLOURS, strict=False):
        label = f"{curve.name} ({curve.compute})"
        axes.plot(
            batches,
            curve.values,
            color=colour,
            linewidth=2.2,
            label=label,
            linestyle=DASHES[1] if curve.name == DENSE_TWIN else DASHES[0],
        )
        _mark_knee(axes, curve, colour=colour)
    for index, context in enumerate(contexts):
        values = [step_intensity(cost, batch=batch, context=context) for batch in batches]
        shade = f"{0.1 + 0.5 * index / len(contexts):.2f}"
        axes.plot(
            batches,
            values,
            color=shade,
            linewidth=1.1,
            linestyle=DASHES[(index + 2) % len(DASHES)],
            label=f"whole step, context {count(context)}",
        )
    _ridges(axes, curves[:1])
    axes.axvspan(min(planned), max(planned), color="0.93", zorder=0, label="planned batches")
    axes.set_yscale("log")
    count_axis(axes.xaxis)
    legend(axes, place="lower right")
    twin = ": mixture and dense twin" if len(curves) > 1 else ""
    whose = f" of a {rank_word(report.deployment)}" if report.deployment.share < 1 else ""
    finish(axes, f"Intensity by batch, plain decoding{twin}", x=f"batch{whose}", y=_INTENSITY)


def _mark_knee(axes: Any, curve: IntensityCurve, *, colour: str) -> None:
    """A dot where the curve meets the ridge; the twin's number above to the left, others below to the right, since the
    twin's knee is never the later one."""
    if curve.knee is None:
        return
    left = curve.name == DENSE_TWIN
    axes.plot([curve.knee], [curve.ridge], "o", color=colour, markersize=7, zorder=5)
    axes.annotate(
        f"knee: {curve.knee:,.0f}" if curve.knee >= 100 else f"knee: {curve.knee:.3g}",
        (curve.knee, curve.ridge),
        textcoords="offset points",
        xytext=(-7, 7) if left else (7, -7),
        ha="right" if left else "left",
        va="bottom" if left else "top",
        fontsize=9,
        color=colour,
        weight="bold",
        bbox=BACKGROUND,
    )


def _ridges(axes: Any, curves: Sequence[IntensityCurve]) -> None:
    """A line for each arithmetic of the curves."""
    ridges = {curve.compute: curve.ridge for curve in curves}
    for (compute, ridge), style in zip(ridges.items(), ("-", (0, (6, 2)), (0, (2, 2))), strict=False):
        axes.axhline(ridge, **{**REFERENCE, "linestyle": style}, label=f"ridge, {compute}: {ridge:,.4g}")


def by_rows(axes: Any, report: PlanReport) -> None:
    """Attention's intensity against query rows: a colour for each kind, a line style for each planned context."""
    cost, contexts = report.deployment.cost, report.contexts
    rows = spread(1, max(64, 2 * (report.deployment.max_depth + 1)))
    by_context = {context: attention_curves(cost, rows, context=context) for context in contexts}
    kinds = list(dict.fromkeys(curve.name for curves in by_context.values() for curve in curves))
    for index, curves in enumerate(by_context.values()):
        for curve in curves:
            colour = COLOURS[kinds.index(curve.name) % len(COLOURS)]
            axes.plot(rows, curve.values, color=colour, linewidth=1.6, linestyle=DASHES[index % len(DASHES)])
            if curve.knee is not None and rows[0] <= curve.knee <= rows[-1]:
                axes.plot([curve.knee], [curve.ridge], "o", color=colour, markersize=6, zorder=5)
    for index, kind in enumerate(kinds):
        axes.plot([], [], color=COLOURS[index % len(COLOURS)], linewidth=2.2, label=kind)
    for index, context in enumerate(contexts):
        axes.plot([], [], color="0.25", linestyle=DASHES[index % len(DASHES)], label=f"context {count(context)}")
    _ridges(axes, [curve for curves in by_context.values() for curve in curves])
    axes.plot([], [], "o", color="0.25", markersize=6, linestyle="none", label="compute-bound\nfrom here on")
    axes.set_yscale("log")
    count_axis(axes.xaxis)
    legend_beside(axes)
    finish(
        axes,
        "Intensity of attention by query rows, any batch",
        x="query rows of a sequence (1 + draft tokens)",
        y=_INTENSITY,
    )


def of_parts(axes: Any, report: PlanReport) -> None:
    """Every part of the planned steps at its intensity, by what it waits for, with the ridges of the device."""
    device = report.deployment.cost.device
    found = [
        (name, point.batch, part.flops / part.bytes, part.bound)
        for point in report.points
        for name, part in point.step.parts.items()
        if part.flops and part.bytes
    ]
    points = sorted(dict.fromkeys(found), key=lambda point: point[1])
    parts = [name for point in report.points[:1] for name in point.step.parts if name in {p[0] for p in points}]
    parts += [name for name in dict.fromkeys(point[0] for point in points) if name not in parts]
    largest = max(point[1] for point in points)
    for bound, colour, marker in (("memory", COLOURS[0], "o"), ("both", COLOURS[2], "D"), ("compute", COLOURS[1], "s")):
        chosen = [point for point in points if point[3] == bound]
        sizes = [14 + 70 * math.log1p(point[1]) / math.log1p(largest) for point in chosen]
        if chosen:
            axes.scatter(
                [point[2] for point in chosen],
                [parts.index(point[0]) for point in chosen],
                s=sizes,
                color=colour,
                marker=marker,
                alpha=0.6,
                linewidths=0,
                label=f"bound by {bound}",
            )
    for ridge in sorted({device.ridge(kind) for kind in device.peaks}):
        kinds = ", ".join(kind for kind in device.peaks if device.ridge(kind) == ridge)
        axes.axvline(ridge, **REFERENCE)
        axes.annotate(
            f"{kinds} {ridge:,.4g} ",
            (ridge, 1),
            xycoords=("data", "axes fraction"),
            rotation=90,
            ha="right",
            va="top",
            **_NOTE,
        )
    axes.set_xscale("log")
    axes.set_yticks(range(len(parts)), parts)
    axes.set_ylim(len(parts) + 0.4, -2.2)
    axes.legend(fontsize=8, loc="lower left", ncols=3, framealpha=0.9, edgecolor="0.85")
    finish(axes, "Parts of the planned steps and the ridges (larger: larger batch)", x=_INTENSITY, y="")


def of_experts(axes: Any, report: PlanReport, *, batches: Sequence[int]) -> None:
    """Distinct experts of a layer that a pass reads: plain, and with drafts, with and without locality."""
    cost = report.deployment.cost
    ffn = next(layer.ffn for layer in cost.model.layers if isinstance(layer.ffn, Experts))
    routing, groups = cost.routing, cost.cluster.groups * report.deployment.share

    def distinct(tokens: float) -> list[float]:
        return [routing.distinct_experts(ffn.count, ffn.active, groups * batch * tokens) for batch in batches]

    for index, rows in enumerate((1, 2, 4, 8)):
        label = "plain decoding" if rows == 1 else f"{rows - 1} draft token{'s' if rows > 2 else ''}"
        axes.plot(batches, distinct(rows), color=COLOURS[index], label=label)
        if routing.locality < 1 and rows > 1:
            label = f"the same, locality {routing.locality:g}"
            axes.plot(batches, distinct(routing.unrelated_tokens(rows)), "--", color=COLOURS[index], label=label)
    axes.axhline(ffn.count, **REFERENCE)
    axes.set_ylim(bottom=0)
    count_axis(axes.xaxis)
    legend(axes, place="lower right")
    finish(
        axes, f"Distinct experts per layer, of {ffn.count} with {ffn.active} a token", x="batch", y="distinct experts"
    )
