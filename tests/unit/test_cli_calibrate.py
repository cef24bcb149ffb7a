"""`wager calibrate` end to end on a tiny model, and the use of its result by `doctor` and `plan`."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from test_cli import FLAGS, MODEL

from in_process import Call, refused
from wager.cli import main
from wager.cli.calibrate import row_costs
from wager.economics.surface import LatencySurface


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A calibration of the tiny model, measured too briefly to be accurate, and what the command printed."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(out):
        patch.setenv("WAGER_CACHE", str(folder := tmp_path_factory.mktemp("cache")))
        assert main(["calibrate", *FLAGS, "--seconds", "0.2"]) == 0
    [path] = (folder / "calibrations").iterdir()
    return path, out.getvalue()


@pytest.fixture
def stored(calibrated: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That calibration, as this test's own."""
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path))
    (tmp_path / "calibrations").mkdir()
    return Path(shutil.copy(calibrated[0], tmp_path / "calibrations"))


def edit(path: Path, **changes: Any) -> None:
    """Change values of the file; `setup` and `errors` are added to what they are."""
    value = json.loads(path.read_text())
    path.write_text(
        json.dumps({**value, **{k: {**value[k], **v} if type(v) is dict else v for k, v in changes.items()}})
    )


OTHER = "Another Processor, 64 cores"


def test_it_measures_prints_and_stores(calibrated: tuple[Path, str]) -> None:
    path, printed = calibrated
    said = " ".join(printed.split())
    for words in ("requests x context", "Another row costs", "Drafting 4 tokens with ngram takes", f"stored in {path}"):
        assert words in said
    assert "step shapes that were not fitted" in said
    value = json.loads(path.read_text())
    assert value["setup"]["threads"] in (1, None)
    assert len(value["held_out"]) == value["errors"]["count"] > 0
    assert "ngram" in value["surface"]["drafters"]


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_measured(
    wager: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path / "file"))
    done = wager("calibrate")
    refused(done, f"The calibration cannot be stored in {tmp_path / 'file'}")
    assert "measuring" not in done.err


@pytest.mark.slow
def test_drafters_have_room_beside_the_cache(wager: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every command that loads the model once for several of them."""
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path))
    setup = (
        "--model",
        MODEL,
        "--threads",
        "1",
        "--memory",
        "64MiB",
        "--drafter",
        "ngram",
        "--drafter",
        f"model:{MODEL}",
    )
    assert wager("calibrate", *setup, "--seconds", "0.2").code == 0
    (tmp_path / "prompts.jsonl").write_text('{"id": "1", "category": "c", "prompt": "one two"}')
    assert wager("acceptance", str(tmp_path / "prompts.jsonl"), *setup, "--max-tokens", "4").code == 0


@pytest.mark.slow
def test_a_disturbed_or_hasty_calibration_does_not_replace_a_good_one(
    wager: Call, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(stored, errors={"p90": 1e-6}, seconds=60.0)
    before = stored.read_bytes()
    call = ["calibrate", *FLAGS, "--seconds", "0.2"]
    assert "is kept, measured for 60 s, whose error was" in " ".join(wager(*call).err.split())
    edit(stored, errors={"p90": 0.0}, seconds=0.2)
    monkeypatch.setattr("wager.cli.calibrate.DISTURBED", 1e-6)  # whatever is measured now counts as disturbed
    result = wager(*call)
    assert "not stored: the calibration made just now is kept" in " ".join(result.err.split())
    assert result.code == 0
    assert "stored in" in wager(*call, "--replace").err
    value = json.loads(stored.read_text())
    assert value["surface"]["uncertainty"] == pytest.approx(min(5.0, max(1.0, value["errors"]["p90"] / 0.05)))
    assert stored.read_bytes() != before


# ---- doctor and plan ------------------------------------------------------------------------------------------------


def test_a_model_with_room_for_the_states_of_few_sequences_is_calibrated(
    wager: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path))
    words = ("--model", "random:qwen3-next:tiny", "--threads", "1", "--memory", "9MiB", "--seconds", "0.2")
    assert wager("calibrate", *words).code == 0 and len([*tmp_path.glob("calibrations/*.json")]) == 1


def test_doctor_shows_what_is_calibrated(wager: Call, stored: Path) -> None:
    [found] = json.loads(wager("doctor", "--json", "-").out)["calibrations"]
    assert (found["age"], found["other_machine"]) == ("just now", None)
    assert "just now" in wager("doctor").out
    edit(stored, setup={"machine": OTHER})
    assert f"on another machine: {OTHER}" in wager("doctor").out
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
    for extra in ("--tp 2", "--locality 0.8", "--precision fp8", "--overhead 1ms"):
        refused(wager(*plan_call, "--hardware", "this", *extra.split()), extra.split()[0])
    roofline = json.loads(wager(*plan_call, "--hardware", "this", "--drafter-shape", "mtp", "--json", "-").out)
    assert roofline["drafter"]["name"] == "mtp"


def test_plan_counts_the_bytes_of_the_form_that_was_calibrated(wager: Call, stored: Path) -> None:
    """A weight of its layers costs 2 bytes, or the five bits of q4_1."""
    plan_call = ["plan", "--model", MODEL, "--batch", "1", "--context", "100", "--hardware", "this", "--json", "-"]

    def layer_bytes() -> float:
        parts = json.loads(wager(*plan_call).out)["points"][0]["parts"]
        return float(parts["ffn"]["bytes"] + parts["projections"]["bytes"])

    wide = layer_bytes()
    assert json.loads(stored.read_text())["setup"]["dtype"] == "bfloat16"
    edit(stored, setup={"dtype": "q4_1 x14 + q8_0 x1"})
    assert layer_bytes() == pytest.approx(wide / 2 * 5 / 8)
    assert "q4_1 x14 + q8_0 x1" in wager(*plan_call[:-2]).out
    assert "q4_1 x14 + q8_0 x1" in wager("doctor").out


def test_plan_takes_another_machines_file_with_a_warning(wager: Call, stored: Path) -> None:
    edit(stored, setup={"machine": OTHER})
    plan_call = ["plan", "--model", MODEL, "--batch", "1", "--hardware"]
    result = wager(*plan_call, str(stored))
    assert (result.code, OTHER in result.out) == (0, True)
    assert f"was made on another machine: {OTHER}; this one is" in result.err
    refused(wager(*plan_call, "this"), f"only on {OTHER}")
    edit(stored, setup={"shape": "llama-0", "model": "large"})
    refused(wager(*plan_call, str(stored)), "calibrates large, and --model is")


def test_ranges_of_rows_with_one_cost() -> None:
    rows = [1, 2, 4, 8, 16, 32, 64, 128]
    flat_then_steep = LatencySurface(rows, [10e-3 + (0.5e-3 * max(0, n - 16)) for n in rows])
    assert row_costs(flat_then_steep) == [(16, pytest.approx(0.0)), (128, pytest.approx(0.05))]
    assert row_costs(LatencySurface(rows, [1e-3 * n for n in rows])) == [(128, pytest.approx(1.0))]
