"""The plot of `wager bench --url`: distributions of TTFT and ITL, the run over time, each request's time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wager.bench.load_figures import GRID
from wager.terminal import plots

check_suffix = plots.check_suffix

_NOW, _BEFORE = plots.COLOURS[0], plots.COLOURS[1]
_LEAST_S = 1e-5
"""Shorter times, as between chunks that came in one packet, are drawn as this one."""


def write(result: Mapping[str, Any], before: Mapping[str, Any] | None, path: Path) -> None:
    """To a picture; with the curves of an earlier result beside those of this one."""
    plots.write_figure(draw(result, before), path)


def draw(result: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> Any:
    """The figure: four axes."""
    figure = plots.new_figure(11, 8, title=_title(result))
    first, second, third, fourth = figure.subplots(2, 2).flat
    runs = [("this run", result, _NOW, "-")] + ([("before", before, _BEFORE, "--")] if before else [])
    slo = (result["summary"].get("goodput") or {}).get("slo", {})
    _distribution(first, runs, "ttft_s", title="Time to the first token", limit=slo.get("ttft"))
    _distribution(second, runs, "itl_s", title="Time between chunks", limit=slo.get("itl"))
    _timeline(third, runs)
    _requests(fourth, result)
    return figure


def _title(result: Mapping[str, Any]) -> str:
    settings, card = result["card"]["settings"], result["card"]
    load = f"{settings['rate']:g} requests/s" if settings.get("rate") else f"{settings['concurrency']} users"
    return f"{card['model']}, {load}"


def _distribution(axes: Any, runs: Any, name: str, *, title: str, limit: float | None) -> None:
    """The share of requests (or chunks) that took at most so long, p50 p90 p99 marked."""
    for label, result, colour, style in runs:
        values = result["distributions"].get(name)
        if not values:
            continue
        times = [1e3 * max(value, _LEAST_S) for value in values]
        axes.plot(times, GRID, color=colour, linestyle=style, label=label, drawstyle="steps-post")
        marked = [times[GRID.index(point)] for point in (50, 90, 99)]
        axes.plot(marked, (50, 90, 99), color=colour, linestyle="none", marker="o", markersize=5)
        for time, point in zip(marked, (50, 90, 99), strict=True):
            if result is runs[0][1]:
                axes.annotate(
                    f"p{point} {_short(time)}",
                    (time, point),
                    fontsize=8,
                    xytext=(-6, 3),
                    ha="right",
                    textcoords="offset points",
                    bbox=plots.BACKGROUND,
                )
    if limit:
        axes.axvline(1e3 * limit, **{**plots.REFERENCE, "linestyle": ":"}, label="SLO")
    if axes.lines:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(plots.minor_numbers())
        axes.set_xlim(left=0.7 * min(line.get_xdata()[min(2, len(line.get_xdata()) - 1)] for line in axes.lines))
        plots.legend(axes, place="lower right")
    axes.set_ylim(0, 106)
    plots.finish(axes, title, x="ms", y="% at most so long")


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _timeline(axes: Any, runs: Any) -> None:
    """Tokens a second over the run, and below it how many requests were waiting or being answered."""
    for label, result, colour, style in runs:
        line = result["timeline"]
        width, tokens = line["bin_s"], line["tokens"]
        step = max(1, round(1.0 / width)) if width else 1  # of about a second, where the run is longer than some
        step = min(step, max(1, len(tokens) // 20))
        sums = [sum(tokens[at : at + step]) for at in range(0, len(tokens), step)]
        spans = [width * min(step, len(tokens) - at) for at in range(0, len(tokens), step)]
        times = [at * width for at in range(0, len(tokens), step)]
        rates = [total / span for total, span in zip(sums, spans, strict=True)]
        axes.plot(times, rates, color=colour, linestyle=style, drawstyle="steps-post", label=f"tokens/s, {label}")
        if result is runs[0][1]:
            beside = axes.twinx()
            beside.plot([at * width for at in range(len(tokens))], line["requests"], color="0.6", linewidth=0.8)
            beside.set_ylabel("requests not over (grey)")
            beside.set_ylim(0, 1.2 * max(1, *line["requests"]))
            beside.yaxis.set_major_locator(plots.whole_numbers())
    axes.set_ylim(bottom=0)
    plots.legend(axes, place="lower right")
    plots.finish(axes, "The run", x="seconds", y="tokens/s")


def _requests(axes: Any, result: Mapping[str, Any]) -> None:
    """Each request's time to the end in the order in which they were due; failed ones as crosses."""
    rows = result["rows"]
    for wanted, marker, colour, label in ((True, ".", _NOW, "answered"), (False, "x", plots.COLOURS[1], "failed")):
        chosen = [row for row in rows if (row["outcome"] == "ok") is wanted]
        if chosen:
            axes.plot(
                [row["number"] for row in chosen],
                [row["e2e_s"] for row in chosen],
                linestyle="none",
                marker=marker,
                color=colour,
                label=f"{label}: {len(chosen)}",
            )
    axes.set_ylim(0, 1.2 * max((row["e2e_s"] for row in rows), default=1.0))
    if axes.lines:
        plots.legend(axes, place="upper left")
    plots.finish(axes, "Each request", x="number of the request", y="seconds to the end")
