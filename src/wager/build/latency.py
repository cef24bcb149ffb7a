"""What steps of a loaded model take: as calibrated on this machine, or else measured for a moment."""

from __future__ import annotations

import logging
from collections.abc import Callable

from wager.build.opened import OpenedModel
from wager.economics.latency.calibration import FOLDER, find_calibration
from wager.economics.latency.surface import LatencySurface
from wager.engine.runner import Runner
from wager.errors import UsageError
from wager.kernels.base import Kernels
from wager.models import hub
from wager.profiling.calibrate import quick_surface, setup

log = logging.getLogger("wager")


def stored(model: OpenedModel, kernels: Kernels, *, report: Callable[[str], None]) -> LatencySurface | None:
    """The calibration of this model on this machine; None, with a warning, where it is damaged or of another one."""
    folder = hub.cache_dir(FOLDER)
    here = setup(kernels, model.spec, model=model.path.name)
    found = find_calibration(folder, here)
    if found.calibration:
        report(f"step latencies as calibrated {found.calibration.age}")
        return found.calibration.surface()
    if any(folder.glob(f"{here.shape}-*.json")):
        log.warning("%s Steps are measured anew; `wager calibrate` stores them.", found.reason)
    return None


def measured(runner: Runner, *, max_context: int, report: Callable[[str], None]) -> LatencySurface:
    """A latency model from a few steps of `runner`, which overwrite its cache; assumed where that is too small."""
    report("measuring a few steps")
    try:
        return quick_surface(runner, max_context=max_context)
    except UsageError as error:
        log.warning("%s Step latencies are assumed until steps were timed.", error.message)
        return LatencySurface([1, 256], [5e-3, 5e-2])
