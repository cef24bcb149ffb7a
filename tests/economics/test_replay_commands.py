"""`wager replay` as a practitioner types it, right and wrong: parsable figures, or one sentence with a hint."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from wager.cli.verbs import cli
from wager.errors import WagerError
from wager.simulation.command import command
from wager.simulation.options import ReplayOptions, replay_query

QUICK = ["--rounds", "120", "--output", "48", "--policy", "none"]


LOOKUP = {"right": [2, 0, 0], "scores": [[0.9, 0.8], [], []]}


ROW: dict[str, Any] = {"id": 1, "prompt_tokens": 3, "tokens": 3, "drafters": {"ngram": LOOKUP}}


def replay(*arguments: str) -> dict[str, Any]:
    """The JSON of a run that succeeds, in which every number is finite."""

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    result = CliRunner().invoke(cli, ["replay", *arguments, "--json", "-"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout, parse_constant=refuse)
    assert found["points"]
    return found


def trace_file(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def with_draft(**changes: Any) -> dict[str, Any]:
    return {**ROW, "drafters": {"ngram": {**LOOKUP, **changes}}}


LINES = [
    "--policy fixed:3 --policy fixed:mtp:3 --policy threshold:0.5 --policy adaptive --concurrency 2,2",
    "--rate 1e-6",
    "--curve mtp,dflash,0.6 --concurrency 2",
    "--curve 1.0 --curve 0 --concurrency 2 --drafter-shape 1.0=free",
    "--curve 0.5 --concurrency 2",
    "--model Llama-3.1-70B --hardware H100 --tp 4 --concurrency 8 --objective latency",
    "--model DeepSeek-V3 --hardware H200 --ep 16 --locality 0.79 --concurrency 8 --drafter-shape mtp",
    "--objective slo:20ms --concurrency 2 --policy adaptive",
    "--model Llama-3.1-8B --hardware L4 --precision fp8 --cache fp8 --overhead 50us --concurrency 2",
    "--max-depth 20 --curve 0.95 --concurrency 1",
    "--concurrency 1024 --rounds 1 --max-depth 1",
    "--policy adaptive --concurrency 2 --believed H100",
]


@pytest.mark.parametrize("line", LINES)
def test_a_line_that_works(line: str) -> None:
    found = replay(*QUICK, *line.split())
    for point in found["points"]:
        assert point["throughput"] > 0
        assert point["tau"] >= 1
        assert math.isfinite(point["regret"])
        assert point["memory"]["fits"] in (True, False, None)


@pytest.mark.parametrize(
    ("line", "requests"), [("--rounds 2000", 6), ("--rounds 1", 1), ("--rounds 2000 --output 10", 600)]
)
def test_rounds_say_how_many_requests_of_an_open_loop_are_served(line: str, requests: int) -> None:
    values = command.make_context("replay", ["--rate", "1", *line.split()]).params
    options = {name: value for name, value in values.items() if name not in ("policies", "json_path")}
    assert [load.requests for load in replay_query(ReplayOptions.of(options)).workloads] == [requests]


@pytest.mark.slow
def test_every_drafter_has_a_price_and_the_output_says_which() -> None:
    found = replay(*QUICK, "--concurrency", "1", "--curve", "0.6,dflash,mtp", "--drafter-shape", "0.6=block:3")
    prices = {price["name"]: (price["shape"], price["depth"]) for price in found["setting"]["prices"]}
    assert prices == {"0.6": ("block:3", 2), "dflash": ("block:16", 15), "mtp": ("mtp", 8)}
    shown = CliRunner().invoke(cli, ["replay", *QUICK, "--concurrency", "1", "--curve", "0.6"]).stdout
    assert "0.6: priced as mtp (no --drafter-shape given), at most 8 deep" in shown
    assert "Qwen3.6-35B-A3B on B200, by the cost model" in shown


@pytest.mark.slow
def test_what_does_not_fit_is_said() -> None:
    found = replay(*QUICK, "--model", "Llama-3.1-70B", "--hardware", "H100", "--concurrency", "1")
    assert all(point["memory"]["fits"] is False for point in found["points"])
    assert any("do not fit" in note for note in found["notes"])


@pytest.mark.slow
def test_an_slo_that_cannot_be_met_is_said() -> None:
    impossible = replay(*QUICK, "--concurrency", "4", "--objective", "slo:1us")
    assert {point["within_slo"] for point in impossible["points"]} == {0.0}
    assert any("cannot be met" in note for note in impossible["notes"])
    easy = replay(*QUICK, "--concurrency", "4", "--objective", "slo:1s")
    assert {point["within_slo"] for point in easy["points"]} == {1.0}
    assert not any("cannot be met" in note for note in easy["notes"])
    assert replay(*QUICK, "--concurrency", "4")["points"][0]["within_slo"] is None


def test_rounds_in_which_some_policies_compute_no_prompt_are_said() -> None:
    """A hundred rounds are answers of 100 tokens in plain decoding and of several hundred with drafts."""
    line = ["--policy", "none", "--concurrency", "1", "--curve", "1", "--prompt", "50000", "--output", "400"]
    few, many = (replay(*line, "--rounds", rounds)["notes"] for rounds in ("100", "2000"))
    assert any("computed no prompt" in note for note in few)
    assert not any("computed no prompt" in note for note in many)


@pytest.mark.slow
def test_a_replay_gives_the_same_figures_twice() -> None:
    line = [*QUICK, "--policy", "adaptive", "--concurrency", "3"]
    assert replay(*line) == replay(*line)


def test_recorded_arrivals_are_kept(tmp_path: Path) -> None:
    rows = [{**ROW, "arrival": time} for time in (9.0, 0.0, 4.0)]
    found = replay(trace_file(tmp_path, *rows), "--policy", "none")
    assert {point["workload"] for point in found["points"]} == {"3 arrivals"}
    assert all(point["throughput"] == pytest.approx(9 / 9, rel=0.02) for point in found["points"]), "9 tokens in 9 s"
    times = tmp_path / "arrivals.txt"
    times.write_text("0\n0.5\n2\n")
    slow = replay(*QUICK[2:], "--load", str(times))
    assert all(point["throughput"] == pytest.approx(3 * 48 / 2, rel=0.05) for point in slow["points"])


# ---- what is refused ------------------------------------------------------------------------------------------------


def refusal(*arguments: str) -> str:
    """The sentence and hint of a run that is refused."""
    result = CliRunner().invoke(cli, ["replay", *arguments])
    assert result.exit_code != 0
    if isinstance(result.exception, SystemExit):
        return result.output
    assert isinstance(result.exception, WagerError), repr(result.exception)
    assert result.exception.message.endswith(".")
    return str(result.exception)


REFUSED = [
    ("--policy adaptve", "adaptive"),
    ("--concurrency 1,x", "concurrency"),
    ("--model Qwen3-8B", "together"),
    ("--model Qwen3-8C --hardware H100", "Qwen3-8B"),
    ("--hardware published", "published"),
    ("--curve eagle.json", "eagle.json"),
    ("--objective speed", "objective"),
    ("--objective slo:soon", "time"),
    ("nowhere.jsonl", "nowhere.jsonl"),
    ("--json /nowhere/at/all.json", "/nowhere"),
    ("--curve foo", "mtp, dflash"),
    ("--curve nan", "nan"),
    ("--curve mtp --curve mtp", "two curves"),
    ("--curve 0.6,,0.7", "curve"),
    ("--drafter-shape dflash=free", "Known are: mtp"),
    ("--drafter-shape free --drafter-shape mtp", "already"),
    ("--drafter-shape block:1", "no draft token"),
    ("--concurrency 1000000000", "16384"),
    (f"--concurrency {'9' * 400}", "concurrency"),
    ("--concurrency=", "concurrency"),
    ("--concurrency 4096 --output 100000", "GB"),
    ("--rate 1e-300", "rate"),
    ("--rate inf", "rate"),
    ("--rate 1 --load recorded", "two kinds"),
    ("--load recorded", "arrival"),
    ("--rounds 100000000000", "rounds"),
    ("--output 0", "output"),
    ("--prompt 300000", "262144"),
    ("--max-depth 0", "max-depth"),
    ("--locality 0", "locality"),
    ("--policy fixed:99", "8"),
    ("--policy adaptive:3", "adaptive"),
    ("--believed H1000", "H100"),
]


def test_a_line_that_is_refused_is_named() -> None:
    for line, said in REFUSED:
        assert said in refusal(*line.split(" ")), line


HOSTILE: list[tuple[Any, str]] = [
    ({**ROW, "prompt_tokens": 10**30}, "prompt_tokens"),
    ({**ROW, "prompt_tokens": -5}, "prompt_tokens = -5"),
    ({**ROW, "prompt_tokens": 2.5}, "prompt_tokens = 2.5"),
    ({**ROW, "tokens": 3.9}, "tokens = 3.9"),
    ({**ROW, "tokens": 4}, "3 positions"),
    ({**ROW, "arrival": -1}, "-1 is not a time"),
    ({**ROW, "arrival": 3.0}, "arrival"),
    ({"tokens": 3, "drafters": {}}, "prompt_tokens"),
    ({**ROW, "drafters": {}}, "drafters"),
    ({**ROW, "drafters": [1]}, "drafters"),
    ({**ROW, "drafters": {"ngram": [1, 2, 3]}}, "right"),
    (with_draft(right=[-1, 0, 0]), "-1"),
    (with_draft(right=[2, 0, 1]), "more matching"),
    (with_draft(right=[1.0, 0, 0]), "1.0"),
    (with_draft(right=[2, 0]), "2 positions"),
    (with_draft(right=[0, 0, 2], scores=[[], [], [0.9, 0.8]]), "2 is no number"),
    (with_draft(scores=[[0.5, 0.8], [], []]), "rise"),
    (with_draft(scores=[[float("nan"), 0.8], [], []]), "NaN"),
    (with_draft(scores=[[1.5, 0.8], [], []]), "1.5"),
    (with_draft(scores=[0.9, [], []]), "list"),
    (with_draft(scores=None), "scores"),
    ([ROW], "not an object"),
]


def test_what_has_no_effect_is_refused(tmp_path: Path) -> None:
    trace, times = trace_file(tmp_path, ROW), tmp_path / "times.txt"
    times.write_text("0\n")
    for option in ("--curve", "--prompt", "--output", "--rounds"):
        assert f"{option} has no effect with TRACE" in refusal(trace, option, "1")
    assert "--rounds has no effect with --load" in refusal("--load", str(times), "--rounds", "9")


def test_a_hostile_row_is_named(tmp_path: Path) -> None:
    for row, said in HOSTILE:
        message = refusal(trace_file(tmp_path, ROW, row), "--concurrency", "1")
        assert said in message
        if said not in ("drafters", "arrival") or "answers of" not in message:
            assert "Line 2 of the trace" in message


def test_a_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    for text in ("", "\n \n", "{", "[" * 100_000, '{"prompt_tokens": ' + "9" * 5000 + "}", "\ufeff{}", "null", "\x00"):
        path.write_text(text, encoding="utf-8")
        assert "broken.jsonl" in refusal(str(path))
    path.write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in refusal(str(path))
    assert "directory" in refusal(str(tmp_path))
    assert "--curve" in refusal(trace_file(tmp_path, ROW), "--curve", "mtp")


def test_arrivals_that_are_no_times_are_named(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.txt"
    for text in ("", "x", "-1\n2", "[1, null]", "nan", "[[1]]", "1e400"):
        path.write_text(text, encoding="utf-8")
        assert "arrivals.txt" in refusal("--load", str(path))


def test_the_table_has_the_best_fixed_depth_and_the_policies() -> None:
    line = [*QUICK[:-2], "--concurrency", "1,2", "--policy", "adaptive", "--policy", "threshold"]
    shown = CliRunner().invoke(cli, ["replay", *line]).stdout
    lines = [line.split() for line in shown.splitlines() if " user" in line and "per" not in line]
    assert [line[0] for line in lines] == ["1", "1", "1", "2", "2", "2"]
    assert {line[2] for line in lines} >= {"adaptive", "threshold"}
    assert sum("(best)" in line or line[2] == "none" for line in lines) == 2


def test_a_trace_at_the_step_times_of_a_model(tmp_path: Path) -> None:
    row = {**ROW, "drafters": {"ngram": {"right": [1, 0, 0], "scores": [[0.5], [], []]}}}
    options = ["--model", "Qwen3-8B", "--hardware", "H100", "--drafter-shape", "free", "--concurrency", "1"]
    points = {point["policy"]: point for point in replay(trace_file(tmp_path, row), *options)["points"]}
    assert set(points) == {"none", "fixed:ngram:1", "threshold", "adaptive"}
    assert set(points["none"]) >= {"throughput", "per_user", "per_device", "tau", "regret", "frontier", "pace_p90"}
    assert points["none"]["tau"] == 1.0
    assert points["fixed:ngram:1"]["tau"] == 1.5
    assert 1 / points["none"]["throughput"] > 2e-3, "eight billion weights take milliseconds to read"
