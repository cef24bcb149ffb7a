"""The style that plots share: survival curves show their values, axes their numbers, wrong suffixes an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from wager.errors import UsageError
from wager.terminal import plots


def test_a_survival_curve_shows_its_values_and_its_interval() -> None:
    figure = plots.new_figure(5, 4, title="Drafts")
    axes = figure.subplots()
    plots.draw_survival(
        axes, [plots.SurvivalCurve("all", (0.7, 0.5), (0.6, 0.4), (0.8, 0.6)), plots.SurvivalCurve("code", (0.9,))]
    )
    first, second = axes.get_lines()
    assert (list(first.get_xdata()), list(first.get_ydata())) == ([0, 1, 2], [1.0, 0.7, 0.5])
    assert (list(second.get_xdata()), list(second.get_ydata())) == ([0, 1], [1.0, 0.9])
    [band] = axes.collections
    low, high = band.get_paths()[0].get_extents().get_points()
    assert (tuple(low), tuple(high)) == ((0.0, 0.4), (2.0, 1.0))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["all", "code"]
    many = plots.new_figure(5, 4).subplots()
    plots.draw_survival(many, [plots.SurvivalCurve(str(index), (0.5,)) for index in range(20)])
    assert len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in many.get_lines()}) == 20


def test_an_axis_of_counts_names_powers_of_two() -> None:
    axes = plots.new_figure(5, 4).subplots()
    axes.plot([1, 4096], [1, 2])
    plots.count_axis(axes.xaxis)
    shown = [label.get_text() for label in axes.get_xticklabels()]
    assert {"1", "2", "1024", "4k"} <= set(shown)
    assert [plots.count(value) for value in (3, 10945, 131072, 2**20)] == ["3", "10945", "128k", "1M"]


def test_files_are_written_and_other_suffixes_refused(tmp_path: Path) -> None:
    figure = plots.new_figure(3, 2)
    plots.write_figure(figure, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="not a picture"):
        plots.write_figure(figure, tmp_path / "x.gif")
    with pytest.raises(UsageError, match="cannot be written"):
        plots.write_figure(figure, tmp_path / "none" / "x.svg")
