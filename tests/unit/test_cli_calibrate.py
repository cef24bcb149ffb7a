"""`wager calibrate` end to end on a tiny model, and the use of its result by `doctor` and `plan`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_cli import FLAGS, MODEL

from in_process import Call
from wager.cli import main
from wager.cli.calibrate import row_costs
from wager.economics.surface import LatencySurface


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path))
    return tmp_path / "calibrations"


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration of the tiny model, measured too briefly to be accurate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WAGER_CACHE", str(folder := tmp_path_factory.mktemp("cache")))
        assert main(["calibrate", *FLAGS, "--seconds", "0.2"]) == 0
    [path] = (folder / "calibrations").iterdir()
    return path


@pytest.fixture
def stored(calibrated: Path, folder: Path) -> Path:
    """That calibration, as this test's own."""
    folder.mkdir()
    return Path(shutil.copy(calibrated, folder))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_it_measures_prints_and_stores(wager: Call, folder: Path) -> None:
    result = wager("calibrate", *FLAGS, "--seconds", "0.2")
    [path] = folder.iterdir()
    assert "requests x context" in result.out
    assert "Another row costs" in result.out
    assert "Drafting 4 tokens with ngram takes" in result.out
    assert "step shapes that were not fitted" in " ".join(result.out.split())
    assert f"stored in {path}" in result.err
    value = json.loads(path.read_text())
    assert value["setup"]["threads"] in (1, None)
    assert len(value["held_out"]) == value["errors"]["count"] > 0
    assert "ngram" in value["surface"]["drafters"]


@pytest.mark.slow
def test_a_disturbed_calibration_does_not_replace_a_good_one(
    wager: Call, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wager.cli.calibrate.DISTURBED", 1e-6)  # whatever is measured now counts as disturbed
    errors = json.loads(stored.read_text())["errors"]
    edit(stored, errors={**errors, "p90": 0.0})
    before = stored.read_bytes()
    result = wager("calibrate", *FLAGS, "--seconds", "0.2")
    assert result.code == 0
    assert "not stored: the calibration made just now is kept" in " ".join(result.err.split())
    assert stored.read_bytes() == before
    edit(stored, errors={**errors, "p90": 100.0})  # greater than any that is measured now
    assert "stored in" in wager("calibrate", *FLAGS, "--seconds", "0.2").err
    assert stored.read_bytes() != before


@pytest.mark.slow
def test_a_hasty_calibration_does_not_replace_a_careful_one_unless_asked(wager: Call, stored: Path) -> None:
    errors = json.loads(stored.read_text())["errors"]
    edit(stored, errors={**errors, "p90": 1e-6}, seconds=60.0)
    before = stored.read_bytes()
    result = wager("calibrate", *FLAGS, "--seconds", "0.2")
    assert "is kept, measured for 60 s, whose error was" in " ".join(result.err.split())
    assert stored.read_bytes() == before
    assert "stored in" in wager("calibrate", *FLAGS, "--seconds", "0.2", "--replace").err
    value = json.loads(stored.read_text())
    assert value["seconds"] == 0.2
    assert value["surface"]["uncertainty"] == pytest.approx(min(5.0, max(1.0, value["errors"]["p90"] / 0.05)))
    refused = wager("calibrate", *FLAGS, "--check", "--replace")
    assert refused.code != 0
    assert "--replace has no effect" in refused.err


def test_json_is_complete_and_alone_on_stdout(wager: Call, folder: Path) -> None:
    result = wager("calibrate", *FLAGS, "--seconds", "0.2", "--drafter", "none", "--json", "-")
    value = json.loads(result.out)
    assert Path(value["path"]).is_file()
    assert value["surface"]["drafters"] == {}
    assert {"setup", "when", "errors", "points", "held_out"} <= set(value)


def test_a_check_reports_both_errors_and_stores_nothing(wager: Call, stored: Path) -> None:
    before = stored.read_bytes()
    result = wager("calibrate", *FLAGS, "--seconds", "0.2", "--check")
    assert result.code == 0
    assert "as stored: off by" in result.out
    assert "corrected by the steps before" in result.out
    value = json.loads(wager("calibrate", *FLAGS, "--seconds", "0.2", "--check", "--json", "-").out)
    assert value["stored"]["count"] == value["corrected"]["count"] > 0
    assert [stored.read_bytes()] == [path.read_bytes() for path in stored.parent.iterdir()] == [before]


def test_a_check_needs_a_calibration_of_this_setup(wager: Call, stored: Path) -> None:
    setup = json.loads(stored.read_text())["setup"]
    edit(stored, setup={**setup, "machine": "Another Processor, 64 cores"})
    result = wager("calibrate", *FLAGS, "--seconds", "0.2", "--check")
    assert result.code == 2
    assert "made for machine Another Processor, 64 cores (here" in result.err
    stored.unlink()
    assert "was never calibrated here" in wager("calibrate", *FLAGS, "--check").err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "0"], "seconds = 0 is out of range"),
        (["--seconds", "-3"], "seconds = -3 is out of range"),
        (["--seconds", "nan"], "'--seconds': 'nan' is not a number"),
        (["--seconds", "soon"], "soon"),
        (["--model", "nobody"], "Model 'nobody' is not known"),
        (["--drafter", "oracel"], "oracel"),
        (["--drafter", "ngram", "--drafter", "ngram:2", "--seconds", "0.1"], "Two drafters have the name 'ngram'"),
        (["--drafter", "ngram,ngram:2", "--seconds", "0.1"], "Two drafters have the name 'ngram'"),
        (["--json", "nowhere/x.json"], "'--json': 'nowhere/x.json' cannot be written"),
        (["--max-context", "16"], "contexts of 16 is too small to measure steps in"),
        (["--depth", "3"], "No such option"),
    ],
)
def test_mistakes_are_named(wager: Call, folder: Path, arguments: list[str], message: str) -> None:
    result = wager("calibrate", *FLAGS, *arguments)
    assert result.code != 0
    assert message in result.err
    assert not folder.exists()


# ---- doctor and plan ------------------------------------------------------------------------------------------------


def test_doctor_shows_what_is_calibrated(wager: Call, stored: Path) -> None:
    [found] = json.loads(wager("doctor", "--json", "-").out)["calibrations"]
    assert found["age"] == "just now"
    assert found["other_machine"] is None
    assert "just now" in wager("doctor").out
    setup = json.loads(stored.read_text())["setup"]
    edit(stored, setup={**setup, "machine": "Another Processor, 64 cores"})
    assert "on another machine: Another Processor, 64 cores" in wager("doctor").out
    stored.write_text("{")
    assert f"The calibration in {stored} cannot be read" in wager("doctor").out
    stored.unlink()
    assert "none: `wager calibrate` measures" in wager("doctor").out


def test_plan_for_this_machine_uses_the_calibration(wager: Call, stored: Path) -> None:
    plan_call = ["plan", "--model", MODEL, "--batch", "1,4", "--context", "100"]
    result = wager(*plan_call, "--hardware", "this")
    assert result.code == 0, result.err
    assert "measured just now" in result.out
    assert "Steps of up to 128 rows were measured" in " ".join(result.out.split())
    value = json.loads(wager(*plan_call, "--hardware", "THIS", "--json", "-").out)
    surface = LatencySurface.from_dict(json.loads(stored.read_text())["surface"])
    assert [point["plain_s"] for point in value["points"]] == pytest.approx(
        [surface.seconds(batch, batch, 100 * batch) for batch in (1, 4)]
    )
    assert value["drafter"]["name"] == "ngram"
    deep = value["points"][0]["depths"][4]
    assert deep["step_s"] == pytest.approx(surface.seconds(5, 1, 100))
    assert deep["draft_s"] == pytest.approx(surface.draft_seconds("ngram", 1, 4))
    roofline = json.loads(wager(*plan_call, "--hardware", "this", "--drafter-shape", "mtp", "--json", "-").out)
    assert roofline["drafter"]["name"] == "mtp"


def test_plan_counts_the_bytes_of_the_form_that_was_calibrated(wager: Call, stored: Path) -> None:
    """A weight of its layers costs 2 bytes, or the five bits of q4_1."""
    plan_call = ["plan", "--model", MODEL, "--batch", "1", "--context", "100", "--hardware", "this", "--json", "-"]

    def layer_bytes() -> float:
        parts = json.loads(wager(*plan_call).out)["points"][0]["parts"]
        return float(parts["ffn"]["bytes"] + parts["projections"]["bytes"])

    wide = layer_bytes()
    setup = json.loads(stored.read_text())["setup"]
    assert setup["dtype"] == "bfloat16"
    edit(stored, setup={**setup, "dtype": "q4_1 x14 + q8_0 x1"})
    assert layer_bytes() == pytest.approx(wide / 2 * 5 / 8)
    assert "q4_1 x14 + q8_0 x1" in wager(*plan_call[:-2]).out
    assert "q4_1 x14 + q8_0 x1" in wager("doctor").out


def test_plan_takes_another_machines_file_with_a_warning(wager: Call, stored: Path, tmp_path: Path) -> None:
    setup = json.loads(stored.read_text())["setup"]
    edit(stored, setup={**setup, "machine": "Another Processor, 64 cores"})
    result = wager("plan", "--model", MODEL, "--hardware", str(stored), "--batch", "1")
    assert result.code == 0
    assert "was made on another machine: Another Processor, 64 cores; this one is" in result.err
    assert "Another Processor, 64 cores" in result.out
    result = wager("plan", "--model", MODEL, "--hardware", "this", "--batch", "1")
    assert result.code == 2
    assert "only on Another Processor, 64 cores" in result.err
    edit(stored, setup={**setup, "shape": "llama-0", "model": "large"})
    result = wager("plan", "--model", MODEL, "--hardware", str(stored), "--batch", "1")
    assert result.code == 2
    assert "calibrates large, and --model is" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Run `wager calibrate`"),
        (["--model", "Llama-3.1-8B"], "Only models on this machine can be calibrated"),
        (["--model", "SmolLM2-135M-Instruct"], "wager calibrate --model SmolLM2-135M-Instruct"),
    ],
)
def test_plan_without_a_calibration_names_the_command(
    wager: Call, folder: Path, arguments: list[str], message: str
) -> None:
    result = wager("plan", "--model", MODEL, "--hardware", "this", *arguments)
    assert result.code == 2
    assert message in result.err


def test_options_that_do_not_change_measurements_are_refused(wager: Call, stored: Path) -> None:
    for extra in (["--tp", "2"], ["--locality", "0.8"], ["--precision", "fp8"], ["--overhead", "1ms"]):
        result = wager("plan", "--model", MODEL, "--hardware", "this", *extra)
        assert result.code == 2
        assert f"{extra[0]}" in result.err


def test_ranges_of_rows_with_one_cost() -> None:
    rows = [1, 2, 4, 8, 16, 32, 64, 128]
    flat_then_steep = LatencySurface(rows, [10e-3 + (0.5e-3 * max(0, n - 16)) for n in rows])
    assert row_costs(flat_then_steep) == [(16, pytest.approx(0.0)), (128, pytest.approx(0.05))]
    assert row_costs(LatencySurface(rows, [1e-3 * n for n in rows])) == [(128, pytest.approx(1.0))]
