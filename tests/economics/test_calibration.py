"""Calibrations as values: shapes to time, held-out errors, files and when they are refused."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from in_process import Call, refused
from wager.arch import TABLE
from wager.economics.calibration import (
    MAX_QUICK_AGE,
    QUICK_FOLDER,
    Calibration,
    Setup,
    find_calibration,
    fingerprint,
    latest_calibration,
    read_quick,
    remove_quick,
    write_quick,
)
from wager.economics.surface import MAX_UNCERTAINTY, DraftCurve, DraftPoint, LatencySurface, StepPoint, fit_draft_curve
from wager.errors import UsageError
from wager.models import random_models
from wager.planner.calibrated import measured_cost
from wager.planner.cost import Cluster, CostModel
from wager.profiling.calibrate import (
    CONTEXT_STEP,
    ShapeLimits,
    StepShape,
    grid_shapes,
    quick_shapes,
    random_shapes,
)

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
TRUTH = LatencySurface(
    ROWS,
    [5e-3, 5.2e-3, 5.4e-3, 5.8e-3, 6.4e-3, 11e-3, 20e-3, 40e-3],
    per_request=6e-5,
    per_context=9e-7,
    per_pair=1.6e-7,
    drafters={"ngram": DraftCurve([1, 32], [6e-6, 1e-4], [0, 0])},
)
HERE = Setup("Processor X, 2 cores", "small", "llama-0123456789ab", "native avx512", 2, "bfloat16")
ROOMY = ShapeLimits(512, 32, 4096, 26000)


def measure(shapes: list[StepShape], *, noise: float = 0.0) -> list[StepPoint]:
    rng = random.Random(0)
    points = []
    for shape in shapes:
        size = (shape.rows, len(shape.depths), sum(shape.contexts))
        points.append(StepPoint(*size, TRUTH.seconds(*size) * math.exp(rng.gauss(0, noise))))
    return points


def calibration(setup: Setup = HERE, **changes: Any) -> Calibration:
    fitted = Calibration.fit(
        setup,
        measure(grid_shapes(ROOMY), noise=0.02),
        measure(random_shapes(ROOMY, 20, seed=1)),
        seconds=60,
        drafters=TRUTH.drafters,
    )
    return replace(fitted, **changes)


# ---- shapes ---------------------------------------------------------------------------------------------------------


SMALL = [ShapeLimits(512, 32, 4096, 5000), ShapeLimits(64, 8, 208, 640), ShapeLimits(4, 1, 16, 16)]


@pytest.mark.parametrize("limits", [ROOMY, *SMALL], ids=str)
def test_shapes_keep_to_the_limits(limits: ShapeLimits) -> None:
    texts = limits.text_lengths()
    assert sum(texts) <= limits.tokens
    assert texts == sorted(texts, reverse=True)
    for shape in [*grid_shapes(limits), *quick_shapes(limits), *random_shapes(limits, 50, seed=3)]:
        assert 1 <= shape.rows <= limits.rows
        assert len(shape.contexts) == len(shape.depths) <= len(texts) <= limits.sequences
        assert all(0 < c <= text and c % CONTEXT_STEP == 0 for c, text in zip(shape.contexts, texts, strict=False)), (
            shape
        )


# ---- the fit and its judgement --------------------------------------------------------------------------------------


def test_held_out_steps_test_the_fit_and_are_not_fitted() -> None:
    good = calibration()
    wrong = [replace(point, seconds=10 * point.seconds) for point in good.held_out]
    judged = Calibration.fit(HERE, good.points, wrong, seconds=60, drafters=TRUTH.drafters)
    assert good.surface_values["uncertainty"] == 1
    assert judged.surface_values == {**good.surface_values, "uncertainty": MAX_UNCERTAINTY}
    assert judged.errors.median == pytest.approx(0.9, abs=0.01)
    with pytest.raises(UsageError, match="to test the fit with"):
        Calibration.fit(HERE, good.points, [], seconds=60)


def test_drafting_splits_into_a_call_and_its_guesses_neither_of_them_negative() -> None:
    falling = fit_draft_curve([DraftPoint(1, 1, 4e-4), DraftPoint(1, 8, 1e-4)])
    assert (falling.per_token, falling.per_call[0] > 0) == ([0.0], True)
    rising = fit_draft_curve([DraftPoint(1, 1, 1e-5), DraftPoint(1, 8, 9e-4)])
    assert (rising.per_call, rising.per_token[0] > 0) == ([0.0], True)


# ---- the file -------------------------------------------------------------------------------------------------------


def test_a_calibration_is_read_back_from_its_file(tmp_path: Path) -> None:
    stored = calibration()
    path = stored.write(tmp_path / "new" / "folder")
    found, why = find_calibration(path.parent, replace(HERE, model="the same by another name"))
    assert found is not None
    assert (found.as_dict(), why) == (stored.as_dict(), "")
    surface = found.surface()
    assert surface.seconds(12, 3, 900) == pytest.approx(stored.surface().seconds(12, 3, 900))
    assert surface.draft_seconds("ngram", 32, 4) == pytest.approx(1e-4)
    assert [file.name for file in path.parent.iterdir()] == [HERE.filename]


def test_a_file_under_a_name_that_is_not_its_own_is_refused(tmp_path: Path) -> None:
    theirs = replace(HERE, shape="other-0", model="large", machine="Processor Y, 64 cores")
    calibration(theirs).write(tmp_path).rename(tmp_path / HERE.filename)
    found, why = find_calibration(tmp_path, HERE)
    assert found is None
    assert "model large (here small, of other sizes)" in why
    assert "machine Processor Y, 64 cores" in why


def test_the_newest_on_this_machine_is_taken(tmp_path: Path) -> None:
    old = datetime.now(UTC) - timedelta(days=3)
    calibration(when=old).write(tmp_path)
    calibration(replace(HERE, threads=1)).write(tmp_path)
    assert latest_calibration(tmp_path, shape=HERE.shape, machine=HERE.machine).setup.threads == 1
    with pytest.raises(UsageError, match="only on Processor X, 2 cores"):
        latest_calibration(tmp_path, shape=HERE.shape, machine="Processor Y, 64 cores")
    with pytest.raises(UsageError, match="never calibrated on this machine"):
        latest_calibration(tmp_path, shape="other-0", machine=HERE.machine)


def test_age_in_words() -> None:
    ages = {5: "just now", 60: "1 minute ago", 30 * 3600: "1 day ago", 9 * 86400: "9 days ago", -7200: "just now"}
    for seconds, said in ages.items():
        assert calibration(when=datetime.now(UTC) - timedelta(seconds=seconds)).age == said


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": 99}, "format 99"),
        ({"setup": {"machine": "x"}}, "damaged"),
        ({"when": "yesterday"}, "yesterday"),
        ({"when": "2026-01-01T00:00:00"}, "no time zone"),
        ({"surface": {"rows": [1, 2]}}, "damaged"),
        ({"points": [[1, 2]]}, "damaged"),
        ({"errors": {"count": 1}}, "damaged"),
        ({"seconds": None}, "damaged"),
        *[(content, "cannot be read" if content != "[1]" else "damaged") for content in ("{", "[1]", "", "\0")],
    ],
)
def test_damage_is_named(tmp_path: Path, change: dict[str, Any] | str, named: str) -> None:
    path = calibration().write(tmp_path)
    path.write_text(change if isinstance(change, str) else json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UsageError, match=named) as caught:
        Calibration.read(path)
    assert str(path) in caught.value.message
    found, why = find_calibration(tmp_path, HERE)
    assert found is None
    assert str(path) in why


def test_a_calibration_that_cannot_be_stored_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / HERE.filename).mkdir()
    for folder in (tmp_path / "file", tmp_path):
        with pytest.raises(UsageError, match="cannot be stored"):
            calibration().write(folder)
    assert {path.name for path in tmp_path.iterdir()} == {"file", HERE.filename}


def test_step_times_that_no_machine_has_are_refused(tmp_path: Path, wager: Call) -> None:
    """A falling curve made plan promise speed-ups of twenty."""
    model = "random:llama:tiny"
    path = calibration(replace(HERE, shape=fingerprint(random_models.spec_of(model)))).write(tmp_path)
    values = json.loads(path.read_text())
    slow = {"requests": [1, 32], "fixed": [1e300, 0], "each": [0, 0]}
    for change, named in (
        ({"seconds": values["surface"]["seconds"][::-1]}, "Step times fall from 0.0"),
        ({"per_request": 1e300}, "A cost of 1e+300 s"),
        ({"per_context": -1e-9}, "A cost of -1e-09 s"),
        ({"per_pair": math.nan}, "A cost of nan s"),
        ({"drafters": {"ngram": slow}}, "A cost of 1e+300 s"),
        ({"uncertainty": 0}, "An uncertainty of 0 is out of range: it is 1 to 5"),
        ({"uncertainty": -1}, "An uncertainty of -1"),
        ({}, ""),
    ):
        path.write_text(json.dumps({**values, "surface": {**values["surface"], **change}}))
        result = wager("plan", "--model", model, "--hardware", str(path), more="--batch 4 --context 100")
        if named:
            refused(result, "is damaged", named, "Run `wager calibrate` again")
        else:
            assert result.code == 0, result.err


# ---- quick measurements, beside calibrations ------------------------------------------------------------------------

QUICK = LatencySurface([1, 4, 16], [1e-3, 2e-3, 7e-3], uncertainty=3.0)


def test_a_quick_measurement_is_read_back_in_its_own_setup_only(tmp_path: Path) -> None:
    assert read_quick(tmp_path, HERE) is None
    write_quick(tmp_path, HERE, QUICK)
    found = read_quick(tmp_path, replace(HERE, model="the same by another name"))
    assert found is not None
    assert found.as_dict() == QUICK.as_dict()
    for change in ({"machine": "Processor Y, 2 cores"}, {"threads": 1}, {"kernels": "reference"}, {"dtype": "q4_1 x9"}):
        other = replace(HERE, **change)
        assert read_quick(tmp_path, other) is None
        (tmp_path / QUICK_FOLDER / HERE.filename).rename(tmp_path / QUICK_FOLDER / other.filename)
        assert read_quick(tmp_path, other) is None  # a file under a name that is not its own
        (tmp_path / QUICK_FOLDER / other.filename).rename(tmp_path / QUICK_FOLDER / HERE.filename)
    assert [file.name for file in (tmp_path / QUICK_FOLDER).iterdir()] == [HERE.filename]


def test_a_calibration_neither_sees_a_quick_measurement_nor_is_replaced_by_it(tmp_path: Path) -> None:
    write_quick(tmp_path, HERE, QUICK)
    assert find_calibration(tmp_path, HERE).calibration is None
    path = calibration().write(tmp_path)
    written = path.read_bytes()
    write_quick(tmp_path, HERE, QUICK)
    assert path.read_bytes() == written
    remove_quick(tmp_path, HERE)
    remove_quick(tmp_path, HERE)
    assert read_quick(tmp_path, HERE) is None
    assert find_calibration(tmp_path, HERE).calibration is not None


def aged(values: dict[str, Any], age: timedelta) -> dict[str, Any]:
    return {**values, "when": (datetime.now(UTC) - age).isoformat()}


@pytest.mark.parametrize(
    "change",
    [
        lambda values: aged(values, MAX_QUICK_AGE + timedelta(minutes=1)),
        lambda values: aged(values, -timedelta(hours=1)),  # the clock was wrong, then or now
        lambda values: {**values, "when": "yesterday"},
        lambda values: {**values, "format": 0},
        lambda values: {**values, "setup": None},
        lambda values: {**values, "surface": {**values["surface"], "seconds": [1.0]}},
        lambda values: [],
    ],
)
def test_a_quick_measurement_that_is_old_or_damaged_is_measured_again(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    write_quick(tmp_path, HERE, QUICK)
    path = tmp_path / QUICK_FOLDER / HERE.filename
    values = json.loads(path.read_text())
    path.write_text(json.dumps(aged(values, MAX_QUICK_AGE - timedelta(minutes=1))))
    assert read_quick(tmp_path, HERE) is not None
    path.write_text(json.dumps(change(values)))
    assert read_quick(tmp_path, HERE) is None


def test_a_folder_that_takes_no_quick_measurement_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / QUICK_FOLDER).write_text("a file where the folder should be")
    write_quick(tmp_path, HERE, QUICK)
    assert read_quick(tmp_path, HERE) is None


# ---- in the cost model ----------------------------------------------------------------------------------------------


def test_a_calibrated_step_is_the_surfaces_divided_as_in_the_roofline() -> None:
    model = TABLE["SmolLM2-135M"]
    cost = measured_cost(model, TRUTH, memory=8e9, label="measured")
    step, roofline = cost.step(300, 2, batch=4), CostModel(model, Cluster(cost.device)).step(300, 2, batch=4)
    assert step.seconds == pytest.approx(TRUTH.seconds(8, 4, 1200))
    assert sum(part.seconds for part in step.parts.values()) == pytest.approx(step.seconds)
    shares = {name: part.seconds / step.seconds for name, part in step.parts.items()}
    assert shares == pytest.approx({name: part.seconds / roofline.seconds for name, part in roofline.parts.items()})
    assert cost.step(300, 0).seconds == 0
