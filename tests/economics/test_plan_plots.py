"""The figure of `wager plan`: every curve shows the report's numbers, and nothing overlaps."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from wager.cli import main
from wager.planner import figures
from wager.planner.acceptance import AcceptanceRates
from wager.planner.options import PlanSettings, plan_deployment
from wager.planner.report import PlanReport

HALF, OFTEN = AcceptanceRates("0.5", 0.5), AcceptanceRates("0.8", 0.8)
BY_DEPTH = AcceptanceRates("measured", (0.8, 0.7, 0.6))


def planned(
    model: str,
    *,
    device: str = "B200",
    batches: tuple[int, ...] = (1, 16, 256),
    contexts: tuple[int, ...] = (4096,),
    rates: tuple[AcceptanceRates, ...] = (HALF, OFTEN),
    **settings: Any,
) -> PlanReport:
    deepest = {} if "depth" in settings else {"max_depth": 4}
    deployment = plan_deployment(model, device, PlanSettings(shape="mtp", **deepest, **settings))
    return PlanReport.build(deployment, batches=batches, contexts=contexts, acceptances=rates)


def panels(report: PlanReport) -> dict[str, Any]:
    return {axes.get_title(): axes for axes in figures.draw(report).get_axes() if axes.get_title()}


def titled(found: dict[str, Any], beginning: str) -> list[Any]:
    return [axes for title, axes in found.items() if title.startswith(beginning)]


def lines(axes: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in axes.get_lines()}


def points(line: Any) -> dict[float, float]:
    return dict(zip(map(float, line.get_xdata()), map(float, line.get_ydata()), strict=True))


def words(axes: Any) -> set[str]:
    return {text.get_text().strip() for text in axes.texts}


@pytest.mark.slow
def test_a_full_memory_is_marked() -> None:
    [axes] = titled(panels(planned("Llama-3.1-8B", device="H100", contexts=(32768,))), "Speed-up")
    assert any(text.startswith("memory is full at ") for text in words(axes))


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2, None])
def test_every_context_and_every_acceptance_is_drawn(depth: int | None) -> None:
    """The speed-ups of the table, those of a fixed depth too, at each planned batch."""
    fixed = {} if depth is None else {"depth": depth}
    report = planned("Qwen3-30B-A3B", contexts=(1024, 8192, 32768), rates=(HALF, OFTEN, BY_DEPTH), **fixed)
    found = panels(report)
    for context, words_of in ((1024, "context 1024"), (8192, "context 8k"), (32768, "context 32k")):
        speedups, depths, parts = (
            next(axes for title, axes in found.items() if title.startswith(kind) and words_of in title)
            for kind in ("Speed-up", "Best depth", "Parts of a plain step")
        )
        drawn = lines(speedups)
        for point in report.points:
            if point.context == context:
                assert points(drawn[point.acceptance])[point.batch] == pytest.approx(point.chosen.speedup)
        assert {"0.5", "0.8"} <= words(depths)
        assert len(parts.collections) == len(report.points[0].plain_step.parts)
    at = "the best depth" if depth is None else "depth 2"
    assert len(titled(found, f"Speed-up at {at}")) == 3


def overlapping(boxes: list[Any]) -> list[tuple[Any, Any]]:
    return [
        (one, other)
        for one, other in combinations(boxes, 2)
        if min(one.x1, other.x1) - max(one.x0, other.x0) > 1 and min(one.y1, other.y1) - max(one.y0, other.y0) > 1
    ]


CROWDED: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {"contexts": (1024, 32768), "rates": (HALF, OFTEN, BY_DEPTH)},
    "DeepSeek-V4-Flash": {"contexts": (1024, 32768)},
    "gpt-oss-20b": {"device": "cpu", "rates": (OFTEN,)},
    "DeepSeek-V3": {"device": "H200", "ep": 16, "locality": 0.79, "contexts": (32768,)},
}


@pytest.mark.slow
@pytest.mark.parametrize("model", CROWDED)
def test_nothing_overlaps_and_nothing_is_cut_off(model: str) -> None:
    """Neither plots with their titles, labels and legends, nor words within a plot with each other."""
    report = planned(model, **CROWDED[model])
    figure = figures.draw(report)
    figure.draw_without_rendering()
    renderer = figure._get_renderer()  # type: ignore[attr-defined]
    boxes = [axes.get_tightbbox(renderer) for axes in figure.get_axes()]
    assert overlapping(boxes) == []
    page = figure.bbox
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= page.x1 and box.y1 <= page.y1 for box in boxes)
    for axes in figure.get_axes():
        texts = [text.get_window_extent(renderer) for text in axes.texts]
        assert overlapping(texts) == [], axes.get_title()


ASKED = ["plan", "--model", "Llama-3.1-8B", "--hardware", "H100", "--drafter-cost", "0.05", "--acceptance", "0.9"]


@pytest.mark.slow
def test_a_picture_is_written_beside_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.png"
    assert main([*ASKED, "--batch", "1,64", "--max-depth", "3", "--plot", str(picture)]) == 0
    out, err = capsys.readouterr()
    assert " 3+ " in out, "the deepest that was allowed is marked"
    assert "Plain decoding at context 4096" in " ".join(out.split())
    assert str(picture) in err
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_without_matplotlib_drawing_is_an_error_and_the_table_is_not() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from wager.cli import main\n"
        "ask = ['plan', '--model', 'Llama-3.1-8B', '--hardware', 'H100', '--batch', '1']\n"
        "sys.exit(10 * main(ask) + main([*ask, '--plot', 'x.png']))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "matplotlib, which is not installed" in done.stderr
    assert 'pip install "wager[plots]"' in done.stderr
    assert "speed-up" in done.stdout
