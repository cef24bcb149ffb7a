"""Plots of intensity (FLOPs per byte): by batch, by query rows, of every part; and of the experts a pass reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from wager.arch import Experts
from wager.planner.intensity import (
    DENSE_TWIN,
    IntensityCurve,
    attention_curves,
    feed_forward_curves,
    step_intensity,
)
from wager.planner.text import PlanReport
from wager.terminal.plots import (
    BACKGROUND,
    COLOURS,
    DASHES,
    REFERENCE,
    count,
    count_axis,
    finish,
    legend,
    legend_beside,
)

_POINTS = 60
_INTENSITY = "FLOP per byte"


def spread(low: float, high: float, *, points: int = _POINTS) -> list[float]:
    """Numbers from `low` to `high`, evenly spaced in their logarithm, the powers of two between them included."""
    steps = {low * (high / low) ** (i / (points - 1)) for i in range(points)}
    powers = {2.0**k for k in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)}
    return sorted(steps | powers)


def by_batch(axes: Any, report: PlanReport) -> None:
    """Intensity of plain decoding against batch: a mixture of experts beside its dense twin, or a dense model's
    feed-forward; the ridge, the knees, and whole steps at every planned context."""
    cost, contexts, planned = report.query.cost, report.grid.contexts, report.grid.batches
    knees = [curve.knee for curve in feed_forward_curves(cost, [1]) if curve.knee is not None]
    batches = spread(1, max(256, *planned, *(4 * knee for knee in knees)))
    curves = feed_forward_curves(cost, batches)
    for curve, colour in zip(curves, (COLOURS[1], COLOURS[0]) if len(curves) > 1 else COLOURS, strict=False):
        label = f"{curve.name} ({curve.compute})"
        axes.plot(
            curve.counts,
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
    finish(axes, f"Intensity by batch, plain decoding{twin}", x="batch", y=_INTENSITY)


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
    cost, contexts = report.query.cost, report.grid.contexts
    rows = spread(1, max(64, 2 * (report.query.max_depth + 1)))
    by_context = {context: attention_curves(cost, rows, context=context) for context in contexts}
    kinds = list(dict.fromkeys(curve.name for curves in by_context.values() for curve in curves))
    for index, curves in enumerate(by_context.values()):
        for curve in curves:
            colour = COLOURS[kinds.index(curve.name) % len(COLOURS)]
            axes.plot(curve.counts, curve.values, color=colour, linewidth=1.6, linestyle=DASHES[index % len(DASHES)])
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
    device = report.query.cost.device
    points = sorted(
        {
            (name, point.batch, part.flops / part.bytes, part.bound)
            for point in report.points
            for name, part in point.step.parts.items()
            if part.flops and part.bytes
        },
        key=lambda point: point[1],
    )
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
            rotation=90,
            fontsize=8,
            xycoords=("data", "axes fraction"),
            ha="right",
            va="top",
            color="0.3",
        )
    axes.set_xscale("log")
    axes.set_yticks(range(len(parts)), parts)
    axes.set_ylim(len(parts) + 0.4, -2.2)
    axes.legend(fontsize=8, loc="lower left", ncols=3, framealpha=0.9, edgecolor="0.85")
    finish(axes, "Parts of the planned steps and the ridges (larger: larger batch)", x=_INTENSITY, y="")


def of_experts(axes: Any, report: PlanReport, *, batches: Sequence[int]) -> None:
    """Distinct experts of a layer that a pass reads: plain, and with drafts, with and without locality."""
    cost = report.query.cost
    ffn = next(layer.ffn for layer in cost.model.layers if isinstance(layer.ffn, Experts))
    routing, groups = cost.routing, cost.cluster.groups

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
