"""The style that plots share: axes show their numbers, wrong suffixes are errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from wager.errors import UsageError
from wager.terminal import plots


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
