"""The latency model of a loaded model: its calibration on this machine, or else a short measurement that is stored."""

from __future__ import annotations

import logging
from collections.abc import Callable

from wager.arch.spec import ModelSpec
from wager.economics.calibration import FOLDER, Setup, find_calibration, fingerprint, read_quick, write_quick
from wager.economics.surface import MAX_UNCERTAINTY, LatencySurface
from wager.engine.runner import Runner
from wager.errors import NumericsError, UsageError
from wager.kernels.cpu import Kernels, machine
from wager.loading.opened import OpenedModel
from wager.models import hub

log = logging.getLogger("wager")


def stored(model: OpenedModel, kernels: Kernels, *, report: Callable[[str], None]) -> LatencySurface | None:
    """The calibration of this model on this machine, else its last quick measurement; None without either. A
    calibration that is damaged or outdated is warned of."""
    folder, current = hub.cache_dir(FOLDER), _setup(model, kernels)
    search = find_calibration(folder, current)
    if search.calibration:
        report(f"step latencies as calibrated {search.calibration.age}")
        return search.calibration.surface()
    if any(folder.glob(f"{current.shape}-*.json")):
        log.warning("%s Steps are measured again; `wager calibrate` stores them.", search.reason)
    return read_quick(folder, current)


def measured(runner: Runner, model: OpenedModel, kernels: Kernels, *, report: Callable[[str], None]) -> LatencySurface:
    """A latency model from a few steps of `runner`, which overwrite its cache, stored for the next start; default
    values, with a warning that says why, if that is too small or the model's logits are not finite."""
    from wager.profiling.calibrate import quick_surface

    report("measuring a few steps")
    try:
        surface = quick_surface(runner, max_context=model.limits.context)
    except (NumericsError, UsageError) as error:
        log.warning("%s Default step latencies are used until steps were timed.", error.message)
        return LatencySurface([1, 256], [5e-3, 5e-2], uncertainty=MAX_UNCERTAINTY)
    write_quick(hub.cache_dir(FOLDER), _setup(model, kernels), surface)
    return surface


def setup(kernels: Kernels, spec: ModelSpec, *, model: str, dtype: str) -> Setup:
    """The setup that a calibration made now is valid for; `model` is the model's name, `dtype` describes the form of
    its weights and cache (OpenedModel.formats)."""
    return Setup(machine(), model, fingerprint(spec), kernels.name, kernels.threads, dtype)


def _setup(model: OpenedModel, kernels: Kernels) -> Setup:
    return setup(kernels, model.spec, model=model.path.name, dtype=model.formats(kernels))
