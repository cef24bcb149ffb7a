"""Quick measurements on disk: read back in their own setup while new, beside calibrations, never over them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from wager.economics.calibration import (
    MAX_QUICK_AGE,
    QUICK_FOLDER,
    Calibration,
    Setup,
    find_calibration,
    read_quick,
    remove_quick,
    write_quick,
)
from wager.economics.surface import LatencySurface, StepPoint

HERE = Setup("Processor X, 2 cores", "small", "llama-0123456789ab", "native avx512", 2, "bfloat16")
SURFACE = LatencySurface([1, 4, 16], [1e-3, 2e-3, 7e-3], uncertainty=3.0)


def test_one_is_read_back_in_its_own_setup_only(tmp_path: Path) -> None:
    assert read_quick(tmp_path, HERE) is None
    write_quick(tmp_path, HERE, SURFACE)
    found = read_quick(tmp_path, replace(HERE, model="the same by another name"))
    assert found is not None
    assert found.as_dict() == SURFACE.as_dict()
    for change in ({"machine": "Processor Y, 2 cores"}, {"threads": 1}, {"kernels": "reference"}, {"dtype": "q4_1 x9"}):
        other = replace(HERE, **change)
        assert read_quick(tmp_path, other) is None
        (tmp_path / QUICK_FOLDER / HERE.filename).rename(tmp_path / QUICK_FOLDER / other.filename)
        assert read_quick(tmp_path, other) is None  # a file under a name that is not its own
        (tmp_path / QUICK_FOLDER / other.filename).rename(tmp_path / QUICK_FOLDER / HERE.filename)
    assert [file.name for file in (tmp_path / QUICK_FOLDER).iterdir()] == [HERE.filename]


def test_a_calibration_neither_sees_it_nor_is_replaced_by_it(tmp_path: Path) -> None:
    write_quick(tmp_path, HERE, SURFACE)
    assert find_calibration(tmp_path, HERE).calibration is None
    points = [StepPoint(rows, 1, 100, 1e-3 * rows) for rows in (1, 2, 4)]
    path = Calibration.fit(HERE, points, points[:1], seconds=1).write(tmp_path)
    written = path.read_bytes()
    write_quick(tmp_path, HERE, SURFACE)
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
def test_one_that_is_old_or_damaged_is_measured_again(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    write_quick(tmp_path, HERE, SURFACE)
    path = tmp_path / QUICK_FOLDER / HERE.filename
    values = json.loads(path.read_text())
    path.write_text(json.dumps(aged(values, MAX_QUICK_AGE - timedelta(minutes=1))))
    assert read_quick(tmp_path, HERE) is not None
    path.write_text(json.dumps(change(values)))
    assert read_quick(tmp_path, HERE) is None


def test_a_folder_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / QUICK_FOLDER).write_text("a file where the folder should be")
    write_quick(tmp_path, HERE, SURFACE)
    assert read_quick(tmp_path, HERE) is None
