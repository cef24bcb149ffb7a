"""Quick measurements of steps, stored so that only the first start of a model on a machine without a calibration takes
them. They lie in a folder of their own: a calibration is looked for first, and never replaced by one of these.
"""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

from wager.economics.latency.calibration import Setup
from wager.economics.latency.surface import LatencySurface
from wager.errors import MALFORMED, UsageError

FOLDER = "quick"
"""Name of their folder, below that of the calibrations."""

MOST_AGE = timedelta(days=7)
"""Older ones are measured again: they were made in half a second, perhaps beside another program."""

_FORMAT = 1


def read_quick(calibrations: Path, setup: Setup) -> LatencySurface | None:
    """The stored measurement for this setup; None if there is none, or it is old, damaged or of another setup."""
    try:
        values = json.loads((calibrations / FOLDER / setup.filename).read_text(encoding="utf-8"))
        age = datetime.now(UTC) - datetime.fromisoformat(values["when"])
        same = values["format"] == _FORMAT and values["setup"] == {**asdict(setup), "model": values["setup"]["model"]}
        if not same or not timedelta(0) <= age <= MOST_AGE:
            return None
        return LatencySurface.from_dict(values["surface"])
    except (OSError, *MALFORMED, UsageError):
        return None


def write_quick(calibrations: Path, setup: Setup, surface: LatencySurface) -> None:
    """Store a measurement, all at once; where that is impossible the next start measures again."""
    path = calibrations / FOLDER / setup.filename
    values = {
        "format": _FORMAT,
        "setup": asdict(setup),
        "when": datetime.now(UTC).isoformat(),
        "surface": surface.as_dict(),
    }
    temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(values) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError:  # a cache that is read-only or full
        pass
    finally:
        with suppress(OSError):
            temporary.unlink()


def remove_quick(calibrations: Path, setup: Setup) -> None:
    """Remove the measurement for a setup that has been calibrated."""
    with suppress(OSError):
        (calibrations / FOLDER / setup.filename).unlink()
