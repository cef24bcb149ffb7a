"""The expert tax, plotted: what measure_expert_tax.py measured, beside the formula's bytes and roofline.

Runs are grouped by the bandwidth that memory had, since that moves the roofline. Prints the tables of
docs/expert_tax.md too, and how far runs of one bandwidth are from their mean.

usage: python dev/plot_expert_tax.py docs/expert_tax.json docs/expert_tax.svg
"""

from __future__ import annotations

import argparse
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib import rcParams
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from measure_expert_tax import MODELS, ROWS

from wager.models.random_models import spec_of
from wager.planner.cost import Cluster, CostModel
from wager.planner.devices import Device
from wager.planner.routing import distinct_experts

MARGINAL, BREAK_EVEN = (1, 4, 16, 64), (1, 2, 4, 8, 16, 32)
ALIKE = 1.2
"""Runs are of one group as long as the fastest memory is less than this many times the slowest."""
DEPARTS = 0.03
"""The roofline with counted experts is shown too where it differs by more than this."""
MEASURED, BYTES, ROOFLINE, COUNTED = "measured", "bytes", "roofline", "roofline, experts counted"
STYLES = {MEASURED: "-", ROOFLINE: "--", COUNTED: ":"}
COLOURS = ("#c25a1a", "#5b3fa3")

Run = Mapping[str, Any]
Curve = Sequence[float]


def relative(values: Curve) -> list[float]:
    return [value / values[0] for value in values]


class Curves:
    """Step time of a model by rows, in steps of one row, while memory had one bandwidth: as measured in each run, their
    mean, and by the formula; and distinct experts of a layer, expected and counted."""

    def __init__(self, name: str, runs: Sequence[Run]) -> None:
        found = [run["models"][name] for run in runs]
        self.name, self.how = name.split(":")[1], spec_of(name).experts
        self.runs = [relative(each["seconds"]) for each in found]
        self.bandwidth = fmean(run["bandwidth"] for run in runs)
        device = Device("here", {"bf16": fmean(run["peak"] for run in runs)}, self.bandwidth, None)
        cost = CostModel(spec_of(name), Cluster(device))
        context = runs[0]["context"]
        steps = [cost.step(context, 1, batch=rows) for rows in ROWS]
        read = [sum(part.bytes for part in step.parts.values()) for step in steps]
        roofline = relative([step.seconds for step in steps])
        self.kinds: dict[str, Curve] = {
            MEASURED: [math.exp(fmean(map(math.log, each))) for each in zip(*self.runs, strict=True)],
            BYTES: relative(read),
            ROOFLINE: roofline,
        }
        self.one, self.megabytes = fmean(each["seconds"][0] for each in found), read[0] / 1e6
        self.share = steps[0].seconds / self.one
        self.experts: dict[str, Curve] = {}
        if how := self.how:
            counted = [fmean(each) for each in zip(*(f["experts"] for f in found), strict=True)]
            self.experts = {"expected": [distinct_experts(how.count, how.active, n) for n in ROWS], "counted": counted}
            with_counted = relative(
                [
                    cost.step(context, 1, batch=rows, distinct_experts=n).seconds
                    for rows, n in zip(ROWS, counted, strict=True)
                ]
            )
            if max(abs(a / b - 1) for a, b in zip(with_counted, roofline, strict=True)) > DEPARTS:
                self.kinds[COUNTED] = with_counted

    @property
    def label(self) -> str:
        return f"{self.bandwidth / 1e9:.0f} GB/s"

    @property
    def agreement(self) -> str:
        """What one row takes, and how far runs are from their mean."""
        mean = self.kinds[MEASURED]
        off = [abs(a / b - 1) for run in self.runs for a, b in zip(run, mean, strict=True)]
        return (
            f"{self.name} at {self.label}, {len(self.runs)} runs: one row {self.one * 1e3:.2f} ms for "
            f"{self.megabytes:.0f} MB, {self.share:.0%} of it by the roofline; runs are off their mean by "
            f"{median(off):.1%} (median), {max(off):.1%} (most)"
        )


def by_bandwidth(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs by the bandwidth of memory, the slowest first."""
    found: list[list[Run]] = []
    for run in sorted(runs, key=lambda run: run["bandwidth"]):
        if not found or run["bandwidth"] > ALIKE * found[-1][0]["bandwidth"]:
            found.append([])
        found[-1].append(run)
    return found


def marginal_cost(curve: Curve, rows: int) -> float:
    """Marginal cost d log seconds / d log rows, from the row counts beside `rows`."""
    at = ROWS.index(rows)
    left, right = max(at - 1, 0), min(at + 1, len(ROWS) - 1)
    return math.log(curve[right] / curve[left]) / math.log(ROWS[right] / ROWS[left])


def break_even(curve: Curve, requests: int) -> float:
    """The acceptance from which one draft token a request pays off: what it adds to a step, as a share."""
    return curve[ROWS.index(2 * requests)] / curve[ROWS.index(requests)] - 1


# ---- the page -----------------------------------------------------------------------------------------------------


def table(lines: Mapping[str, Curve], head: Sequence[object], *, form: str = ".2f") -> str:
    rows = [["", *map(str, head)], ["---"] * (len(head) + 1)]
    rows += [[name, *(f"{value:{form}}" for value in line)] for name, line in lines.items()]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def beside(
    value: Callable[[Curve, int], float], at: Sequence[int], drawn: Sequence[Sequence[Curves]], kinds: Sequence[str]
) -> str:
    """A table of `value` of some kinds of curves at some row counts, the bandwidths side by side."""
    head = [f"{curves[0].label}: {each}" if each == at[0] else each for curves in drawn for each in at]
    lines = {
        f"{first.name}, {kind}": [value(each[i].kinds[kind], point) for each in drawn for point in at]
        for i, first in enumerate(drawn[0])
        for kind in kinds
        if all(kind in each[i].kinds for each in drawn)
    }
    return table(lines, head)


def tables(drawn: Sequence[Sequence[Curves]]) -> str:
    """Steps at each bandwidth, experts, marginal costs, and the acceptance from which one draft token pays off."""
    found = []
    for curves in drawn:
        steps = {f"{each.name}, {kind}": curve for each in curves for kind, curve in each.kinds.items()}
        found.append(f"{curves[0].label}:\n\n{table(steps, ROWS)}")
    experts = {f"{each.name}, {kind}": curve for each in drawn[0] for kind, curve in each.experts.items()}
    found.append(table(experts, ROWS, form=".1f"))
    found.append(beside(marginal_cost, MARGINAL, drawn, [MEASURED, BYTES, ROOFLINE, COUNTED]))
    return "\n".join([*found, beside(break_even, BREAK_EVEN, drawn, [MEASURED])])


def draw(drawn: Sequence[Sequence[Curves]]) -> Figure:
    """A panel for each model. A colour for each bandwidth, a line style each for measured and calculated values."""
    figure = Figure(figsize=(9.5, 7.6), layout="constrained", facecolor="white")
    axes = figure.subplots(2, 2, sharex=True, sharey=True).flatten()
    wide, blank = {"color": "0.55", "linewidth": 3, "alpha": 0.6}, Line2D([], [], linestyle="")
    legend = [(Line2D([], [], **wide), "bytes, by the formula"), (blank, ""), (blank, "")]
    for each, colour in zip(drawn, COLOURS, strict=False):
        for kind, stroke in STYLES.items():
            legend.append((Line2D([], [], color=colour, linestyle=stroke), f"{kind} ({each[0].label})"))
    for axis, of_model in zip(axes, zip(*drawn, strict=True), strict=True):
        axis.plot(ROWS, of_model[0].kinds[BYTES], **wide)
        for each, colour in zip(of_model, COLOURS, strict=False):
            for kind, stroke in STYLES.items():
                if kind in each.kinds:
                    axis.plot(ROWS, each.kinds[kind], stroke, color=colour, linewidth=1.3)
            for run in each.runs:
                axis.plot(ROWS, run, "o", color=colour, markersize=3, markerfacecolor="none")
        how = of_model[0].how
        axis.set_title(f"{of_model[0].name}: {f'{how.active} of {how.count} experts' if how else 'dense'}", fontsize=11)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks([2**power for power in range(7)], [str(2**power) for power in range(7)])
        axis.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        axis.minorticks_off()
        axis.grid(True, color="0.9", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*zip(*legend, strict=True), loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    figure.supxlabel("rows of a step", fontsize=10)
    figure.supylabel("step time, in steps of one row", fontsize=10)
    return figure


def write(figure: Figure, path: Path) -> None:
    """The same bytes for the same runs; text stays text, and a tenth of a point is precise enough."""
    rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "wager", "font.sans-serif": ["DejaVu Sans", "Arial"]})
    if path.suffix != ".svg":
        return figure.savefig(path, dpi=110)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    short = re.sub(r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", drawn.getvalue())
    path.write_text(re.sub(r"\s*\n\s*", "\n", short))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("runs", type=Path)
    options.add_argument("picture", type=Path)
    args = options.parse_args()
    drawn = [[Curves(name, runs) for name in MODELS] for runs in by_bandwidth(json.loads(args.runs.read_text()))]
    write(draw(drawn), args.picture)
    print(tables(drawn))
    print("\n".join(each.agreement for curves in drawn for each in curves))


if __name__ == "__main__":
    main()
