"""The latency model of a loaded model: its calibration on this machine, or else a short measurement."""

from __future__ import annotations

import logging
from collections.abc import Callable

from wager.build.opened import OpenedModel
from wager.economics.latency.calibration import FOLDER, find_calibration
from wager.economics.latency.surface import MAX_UNCERTAINTY, LatencySurface
from wager.engine.runner import Runner
from wager.errors import NumericsError, UsageError
from wager.kernels.base import Kernels
from wager.models import hub
from wager.profiling.calibrate import quick_surface, setup

log = logging.getLogger("wager")


def stored(model: OpenedModel, kernels: Kernels, *, report: Callable[[str], None]) -> LatencySurface | None:
    """The calibration of this model on this machine; None without one; damaged or outdated ones are warned of."""
    folder = hub.cache_dir(FOLDER)
    current = setup(kernels, model.spec, model=model.path.name, dtype=model.formats(kernels))
    search = find_calibration(folder, current)
    if search.calibration:
        report(f"step latencies as calibrated {search.calibration.age}")
        return search.calibration.surface()
    if any(folder.glob(f"{current.shape}-*.json")):
        log.warning("%s Steps are measured again; `wager calibrate` stores them.", search.reason)
    return None


def measured(runner: Runner, *, max_context: int, report: Callable[[str], None]) -> LatencySurface:
    """A latency model from a few steps of `runner`, which overwrite its cache; default values, with a warning that says
    why, if that is too small or the model's logits are not finite."""
    report("measuring a few steps")
    try:
        return quick_surface(runner, max_context=max_context)
    except (NumericsError, UsageError) as error:
        log.warning("%s Default step latencies are used until steps were timed.", error.message)
        return LatencySurface([1, 256], [5e-3, 5e-2], uncertainty=MAX_UNCERTAINTY)
