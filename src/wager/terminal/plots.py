"""What every plot of the command line shares: figures, axes, colours, files.

The colours differ for readers with any colour vision (Okabe and Ito, 2008), and curves differ in more than colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wager.errors import UsageError, WagerError
from wager.terminal import console

try:
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
except ImportError as error:
    raise WagerError(
        "Plots need matplotlib, which is not installed.", 'Install it: pip install "wager[plots]"'
    ) from error

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Blue, vermilion, green, purple, orange, sky blue, black: for curves that differ in kind."""
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
"""Line styles, for curves of one colour."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
REFERENCE = {"color": "0.45", "linewidth": 1.0, "linestyle": "-", "zorder": 1}
"""A line that curves are compared with: a ridge, a speed-up of 1."""
BACKGROUND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5}
"""Behind words that cross a line (bbox=...)."""
OUTLINE = (withStroke(linewidth=2.5, foreground="0.2"),)
"""Makes white lines and words readable on any colour (path_effects=...)."""

_SUFFIXES = (".png", ".svg", ".pdf")
_GRID = {"color": "0.9", "linewidth": 0.6}


def check_suffix(path: Path) -> None:
    """UsageError for a file name that does not end in .png, .svg or .pdf."""
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"{path} is not a picture that wager can write.", f"End its name in {', '.join(_SUFFIXES)}.")


def new_figure(width: float, height: float, *, title: str = "") -> Figure:
    """An empty figure of that size in inches, whose axes are laid out so that no labels overlap."""
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.09, h_pad=0.09))
    if title:
        figure.suptitle(title, fontsize=14)
    return figure


def write_figure(figure: Figure, path: Path) -> None:
    """To a .png, .svg or .pdf file; UsageError for another suffix or a path that cannot be written."""
    check_suffix(path)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise console.unwritable(path, error.strerror or "unknown error") from error


def finish(axes: Any, title: str, *, x: str, y: str) -> None:
    """Title, labels and grid."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, which="major", **_GRID)
    axes.set_axisbelow(True)


def count_axis(axis: Any) -> None:
    """A logarithmic axis (axes.xaxis or axes.yaxis) of whole numbers such as batch sizes: 1, 2, 4, ... 1024, 2k."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(base=2, numticks=14))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _position: count(value)))


def count(value: float) -> str:
    """1024 as 1024, 2048 as 2k, 1048576 as 1M: in powers of two from 2048 on."""
    for size, letter in ((2**20, "M"), (2**10, "k")):
        if value >= size and value % size == 0 and value >= 2048:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def legend(axes: Any, *, title: str = "", place: str = "best") -> None:
    """A legend that does not cover the grid."""
    axes.legend(fontsize=8, title=title or None, title_fontsize=8, loc=place, framealpha=0.9, edgecolor="0.85")


def legend_beside(axes: Any, *, top_first: bool = False) -> None:
    """A legend to the right of the axes; with `top_first` in the order of a stack, what lies on top first."""
    handles, labels = axes.get_legend_handles_labels()
    order = slice(None, None, -1) if top_first else slice(None)
    axes.legend(handles[order], labels[order], fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def map_of_counts(
    axes: Any, x: Sequence[float], y: Sequence[float], rows: Sequence[Sequence[int]], *, label: str
) -> None:
    """Whole numbers over x and y as colours, a row for each y; 0 is grey. `label` is what the colours count."""
    most = max(1, max(max(row) for row in rows))
    colours = colormaps["viridis"].resampled(most).with_extremes(under="0.85")
    mesh = axes.pcolormesh(x, y, rows, cmap=colours, vmin=0.5, vmax=most + 0.5, shading="nearest")
    axes.figure.colorbar(mesh, ax=axes, label=label, extend="min", ticks=MaxNLocator(9, integer=True))
