"""The figure and the page of `wager plan`: every curve shows the report's numbers, and nothing overlaps."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import wager
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
def test_the_mixture_stands_beside_its_dense_twin_with_both_knees() -> None:
    report = planned("DeepSeek-V4-Flash", precision="fp8:fp4", contexts=(1024, 32768))
    [axes] = titled(panels(report), "Intensity by batch")
    drawn = lines(axes)
    mixture, twin = points(drawn["experts (fp4)"]), points(drawn["dense twin (fp4)"])
    assert (twin[1], twin[128]) == pytest.approx((2 / 0.53, 256 / 0.53))
    for batch, intensity in {1: 3.77, 2: 4.11, 8: 4.67, 128: 13.82, 512: 52.62, 4096: 421.0}.items():
        assert mixture[batch] == pytest.approx(intensity, rel=1.1e-3)
    marks = sorted(points(line).popitem() for line in axes.get_lines() if line.get_marker() == "o")
    assert marks == [pytest.approx((298.1, 1125), abs=0.1), pytest.approx((10_945.2, 1125), abs=0.5)]
    assert {"knee: 298", "knee: 10,945"} <= words(axes)
    assert "ridge, fp4: 1,125" in drawn
    assert max(mixture) > 10_945
    assert {"whole step, context 1024", "whole step, context 32k"} <= set(drawn)


@pytest.mark.slow
def test_attention_is_drawn_by_kind_and_context() -> None:
    [axes] = titled(panels(planned("DeepSeek-V4-Flash", contexts=(1024, 32768))), "Intensity of attention")
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend[:4] == ["sliding window", "CSA", "indexer", "HCA"]
    assert legend[4:6] == ["context 1024", "context 32k"]
    curves = [line for line in axes.get_lines() if len(line.get_xdata()) > 2]
    assert len(curves) == 8
    assert len({(line.get_color(), line.get_linestyle()) for line in curves}) == 8
    assert {"ridge, bf16: 281.2", "ridge, fp8: 562.5"} <= set(legend)
    [llama] = titled(panels(planned("Llama-3.1-70B")), "Intensity of attention")
    [curve] = [line for line in llama.get_lines() if len(line.get_xdata()) > 2]
    for rows, intensity in {1: 7.99, 2: 15.97, 4: 31.88, 8: 63.50}.items():
        assert points(curve)[rows] == pytest.approx(intensity, abs=0.0051)


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


@pytest.mark.slow
def test_what_fills_the_memory_is_marked() -> None:
    [axes] = titled(panels(planned("Llama-3.1-8B", device="H100", contexts=(32768,))), "Speed-up")
    assert any(text.startswith("memory is full at ") for text in words(axes))


@pytest.mark.slow
def test_parts_are_coloured_by_what_bounds_them() -> None:
    report = planned("DeepSeek-V4-Flash")
    [axes] = titled(panels(report), "Parts of the planned steps")
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["bound by memory", "bound by compute"]
    assert [text.get_text() for text in axes.get_yticklabels()] == list(report.points[0].step.parts)
    for scatter, bound in zip(axes.collections, ("memory", "compute"), strict=True):
        parts = dict.fromkeys(
            (name, point.batch, part.flops / part.bytes)
            for point in sorted(report.points, key=lambda point: point.batch)
            for name, part in point.step.parts.items()
            if part.bound == bound
        )  # in the same order every time
        assert [float(x) for x, _ in scatter.get_offsets()] == pytest.approx([intensity for _, _, intensity in parts])


def overlapping(boxes: list[Any]) -> list[tuple[Any, Any]]:
    return [
        (one, other)
        for one, other in combinations(boxes, 2)
        if min(one.x1, other.x1) - max(one.x0, other.x0) > 1 and min(one.y1, other.y1) - max(one.y0, other.y0) > 1
    ]


CROWDED: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {"contexts": (1024, 32768), "rates": (HALF, OFTEN, BY_DEPTH)},
    "DeepSeek-V4-Flash": {"contexts": (1024, 32768)},
    "Qwen3.6-35B-A3B": {"rates": (HALF,)},
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


ASKED = ["plan", "--model", "DeepSeek-V4-Flash-charts", "--hardware", "B200-charts", "--drafter-cost", "0.1"]


@pytest.mark.slow
def test_a_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    picture = tmp_path / "plan.png"
    outputs = ["--html", str(page), "--plot", str(picture)]
    assert main([*ASKED, "--batch", "1,64", "--max-depth", "3", *outputs]) == 0
    out, err = capsys.readouterr()
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 1
    assert "<td>1.668</td>" not in text  # depth 4 was not allowed
    assert "<td>3+</td>" in text  # the deepest that was allowed, which is marked
    assert "Plain decoding at context 4096" in text
    assert str(page) in err
    assert "speed-up" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_without_matplotlib_drawing_is_an_error_and_the_table_is_not() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from wager.cli import main\n"
        "ask = ['plan', '--model', 'Llama-3.1-8B', '--hardware', 'H100', '--batch', '1']\n"
        "sys.exit(10 * main(ask) + main([*ask, '--plot', 'x.png']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(wager.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 1, done.stderr
    assert "matplotlib, which is not installed" in done.stderr
    assert 'pip install "wager[plots]"' in done.stderr
    assert "speed-up" in done.stdout
