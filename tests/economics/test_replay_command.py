"""`wager replay` from the command line: table, JSON, traces, and mistakes that are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wager.cli import main

QUICK = ["--rounds", "200", "--output", "64"]


def replayed(*arguments: str, out: Path, quick: list[str] = QUICK) -> dict[str, object]:
    assert main(["replay", *quick, *arguments, "--json", str(out)]) == 0
    found: dict[str, object] = json.loads(out.read_text())
    return found


def test_the_table_has_the_best_fixed_depth_and_the_policies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", *QUICK, "--concurrency", "1,2", "--policy", "adaptive", "--policy", "threshold"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if " user" in line and "per" not in line]
    assert [line[0] for line in lines] == ["1", "1", "1", "2", "2", "2"]
    assert {line[2] for line in lines} >= {"adaptive", "threshold"}
    assert sum("(best)" in line or line[2] == "none" for line in lines) == 2


def test_json_holds_every_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = replayed("--concurrency", "2", "--curve", "dflash", "--curve", "mtp", out=tmp_path / "r.json")
    points = found["points"]
    assert isinstance(points, list)
    names = [point["policy"] for point in points]
    assert {"none", "fixed:dflash:15", "fixed:mtp:8", "threshold", "adaptive"} <= set(names)
    assert set(points[0]) >= {"throughput", "per_user", "per_device", "tau", "regret", "frontier", "pace_p90"}
    assert min(point["regret"] for point in points if point["policy"].startswith("fixed")) == 0
    assert "adaptive" in capsys.readouterr().out


def test_a_trace_at_the_step_times_of_a_model(tmp_path: Path) -> None:
    row = {
        "id": 0,
        "prompt_tokens": 5,
        "tokens": 3,
        "drafters": {"ngram": {"right": [1, 0, 0], "scores": [[0.5], [], []]}},
    }
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps(row) + "\n")
    options = ["--model", "Qwen3-8B", "--hardware", "H100", "--drafter-shape", "free", "--concurrency", "1"]
    found = replayed(str(trace), *options, out=tmp_path / "r.json", quick=[])
    points = {point["policy"]: point for point in found["points"]}  # type: ignore[attr-defined]
    assert set(points) == {"none", "fixed:ngram:1", "threshold", "adaptive"}
    assert points["none"]["tau"] == 1.0
    assert points["fixed:ngram:1"]["tau"] == 1.5
    assert 1 / points["none"]["throughput"] > 2e-3, "eight billion weights take milliseconds to read"


def test_experts_spread_over_ranks_and_a_rate(tmp_path: Path) -> None:
    options = ["--model", "DeepSeek-V3", "--hardware", "H200", "--ep", "16", "--rate", "4", "--curve", "0.8"]
    found = replayed(*options, "--policy", "none", "--objective", "slo:50ms", out=tmp_path / "r.json")
    assert {point["rate"] for point in found["points"]} == {4.0}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "adaptve"], "adaptive"),
        (["--concurrency", "0"], "concurrency"),
        (["--concurrency", "1.5"], "concurrency"),
        (["--concurrency", "1,x"], "concurrency"),
        (["--rate", "nan"], "rate"),
        (["--rate", "1", "--concurrency", "2"], "two kinds"),
        (["--model", "Qwen3-8B"], "together"),
        (["--hardware", "published", "--ep", "8"], "--ep"),
        (["--hardware", "published", "--drafter-shape", "block:4"], "block:4"),
        (["--curve", "1.5"], "1.5"),
        (["--curve", "eagle.json"], "eagle.json"),
        (["--objective", "speed"], "objective"),
        (["--objective", "slo:soon"], "time"),
        (["nowhere.jsonl"], "nowhere.jsonl"),
        (["--json", "/nowhere/at/all.json"], "/nowhere"),
    ],
)
def test_mistakes_are_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_an_unknown_model_fails_as_in_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--model", "Qwen3-8C", "--hardware", "H100"]) == 1
    assert "Qwen3-8B" in capsys.readouterr().err


def test_a_trace_and_a_curve_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    row = {"prompt_tokens": 5, "tokens": 1, "drafters": {"ngram": {"right": [0], "scores": [[]]}}}
    trace.write_text(json.dumps(row) + "\n")
    assert main(["replay", str(trace), "--curve", "mtp"]) == 2
    assert "--curve" in capsys.readouterr().err
