"""What training would take: scaled from measured runs, which it gives back, and which docs/train.md has."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from in_process import Call, refused
from wager.errors import UsageError
from wager.planner import training
from wager.planner.devices import find_device
from wager.planner.inputs import find_plan_model
from wager.planner.training import HeadShape, TrainingNeeds, plan_training, survival_after

SMALL, LARGE = "SmolLM2-135M-Instruct", "Llama-3.1-8B"
MEASURED = HeadShape("eagle3", 5, 8192, 3072)
NEEDS = TrainingNeeds(41_819, 7.0e6, 12.3e6, 156.2e6)


def planned(model: str = SMALL, hardware: str = "H200", needs: TrainingNeeds = NEEDS) -> training.TrainingPlan:
    return plan_training(find_plan_model(model), find_device(hardware), MEASURED, needs)


def test_the_measured_run_is_given_back() -> None:
    plan = planned()
    assert plan.training_s[0] <= 503 <= plan.training_s[1]
    assert plan.answering_s[0] < 158 < 1.15 * plan.answering_s[1]
    assert plan.survival == (0.743, 0.558, 0.429, 0.354, 0.304) and plan.beyond_curve
    assert plan.head_weights == pytest.approx(13.3e6, rel=0.01)


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_survival_lies_between_the_measured_points_and_ends_with_the_curve(kind: str) -> None:
    known = training.curve(kind)
    for millions, row in zip(known["millions"], known["survival"], strict=True):
        assert survival_after(kind, 1e6 * millions) == pytest.approx(tuple(row))
    for (left, low), (right, high) in pairwise(zip(known["millions"], known["survival"], strict=True)):
        between = survival_after(kind, 1e6 * (left * right) ** 0.5)
        assert between == pytest.approx([(one + other) / 2 for one, other in zip(low, high, strict=True)])
    assert survival_after(kind, 1e12) == tuple(known["survival"][-1]) and survival_after(kind, 0)[0] == 0
    assert planned(needs=replace(NEEDS, trained_tokens=1e9)).beyond_curve


def test_larger_targets_and_slower_machines_take_longer() -> None:
    seconds = [
        planned(model, hardware).training_s[0] + planned(model, hardware).answering_s[0]
        for model, hardware in ((SMALL, "H200"), (SMALL, "A100"), (LARGE, "A100"))
    ]
    assert seconds == sorted(seconds) and seconds[2] > 10 * seconds[1]
    assert planned(hardware="cpu").training_s[0] > 20 * planned().training_s[1]
    with pytest.raises(UsageError, match="more than L4"):
        planned("Llama-3.1-70B", "L4")


def test_the_command_plans_and_writes_nothing(wager: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = f"train --plan --model {LARGE} --hardware H100 --made-up 1000 --temperature 0".split()
    figures = json.loads(wager(*asked, more="--temperature 0.8 --depth 5 --json -").out)
    assert figures["answers"] == 2000 and figures["hardware"] == "H100" and len(figures["survival"]) == 5
    assert 0 < figures["training_s"][0] < figures["training_s"][1] and not list(tmp_path.iterdir())
    (tmp_path / "log.jsonl").write_text('{"prompt": "What is seven times six?", "answer": "42, of course."}')
    plain, known = (json.loads(wager(*asked, "--json", "-", more=more).out) for more in ("", "--answers log.jsonl"))
    assert known["text_tokens"] == plain["text_tokens"] + 6 + 3
    shown = wager(*asked).out
    assert "survival by depth" in shown and "bounds" in shown and "1,000, 0.2 million" in shown


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--plan --kind medusa --made-up 9", "No curve of 'medusa'"),
        ("--made-up 9 --hardware H100 -o x", "no effect without --plan"),
        ("--made-up 9", "no folder to write to"),
        ("--plan --made-up 9 --hardware H101", "is not known"),
        ("--plan", "nothing to train on"),
    ],
)
def test_what_cannot_be_planned_is_refused(wager: Call, more: str, message: str) -> None:
    refused(wager("train", more=more), message)


def test_the_documented_curves_are_the_measured_ones() -> None:
    text = (Path(__file__).parents[2] / "docs/train.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    for kind, column in (("eagle3", 0), ("dspark", 6)):
        known = training.curve(kind)
        documented = {
            float(row[column].split(",")[0]): [float(cell) for cell in row[column + 1 : column + 6] if cell]
            for row in rows
            if len(row) == 10 and row[column][:1].isdigit()
        }
        measured = dict(zip(known["millions"], known["survival"], strict=True))
        assert {at: row[: len(measured[at])] for at, row in documented.items()} == measured
