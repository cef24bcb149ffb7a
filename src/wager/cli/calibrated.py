"""Stored calibrations for other commands: what `doctor` lists, and what `plan --hardware this` asks.

Opens a model's files for its shape; loads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from wager.arch import ModelSpec, Precision
from wager.cli import console
from wager.economics.costmodel.calibrated import CalibratedCostModel
from wager.economics.latency.calibration import FOLDER, Calibration, fingerprint, latest_calibration
from wager.errors import ModelError, UsageError

THIS = "this"
"""What `plan --hardware` calls the machine that it runs on."""


def stored() -> list[dict[str, Any]]:
    """The stored calibrations, for `doctor`: of each calibration its path, model, kernels, age and errors, the machine
    if it is another, or the "error" that keeps it from being read."""
    from wager.kernels import machine
    from wager.models import hub

    found: list[dict[str, Any]] = []
    here = machine()
    for path in sorted(hub.cache_dir(FOLDER).glob("*.json")):
        try:
            each = Calibration.read(path)
        except UsageError as error:
            found.append({"path": str(path), "error": error.message})
            continue
        other = None if each.setup.machine == here else each.setup.machine
        found.append({"path": str(path), "model": each.setup.model, "kernels": each.setup.kernels,
                      "threads": each.setup.threads, "age": each.age, "when": each.when.isoformat(),
                      "errors": asdict(each.errors), "other_machine": other})  # fmt: skip
    return found


def cost(model: str, values: Mapping[str, Any] | None, *, where: str = "") -> CalibratedCostModel:
    """Steps of `model` as they were measured: by what is stored for this machine, or by the `values` of a calibration
    from the file `where`, which may be another machine's. UsageError if it is of another model or damaged."""
    from wager.bench.machine import describe
    from wager.kernels import machine
    from wager.models import hub

    spec, here = _spec(model), machine()
    name, shape = Path(model).name, fingerprint(spec)
    if values is None:
        found = latest_calibration(hub.cache_dir(FOLDER), shape=shape, machine=here)
    else:
        found = Calibration.from_dict(values, where=where)
    setup, errors = found.setup, found.errors
    if setup.shape != shape:
        raise UsageError(
            f"{where} calibrates {setup.model}, and --model is {name}.",
            "Name that model.",
        )
    local = setup.machine == here
    if not local:
        console.say(f"warning: {where} was made on another machine: {setup.machine}; this one is {here}.")
    label = (
        f"{setup.machine}; {setup.kernels}, measured {found.age}, off by {errors.median:.1%} (median) and "
        f"{errors.p90:.1%} (90th percentile) on steps it was not fitted to"
    )
    served = replace(spec, name=name, precision=Precision.of("bf16"), source="the model's own files")
    return CalibratedCostModel(served, found.surface(), memory=describe().memory if local else None, label=label)


def _spec(model: str) -> ModelSpec:
    """The shape of a model on this machine; UsageError if it is not here, and so was not calibrated here."""
    from wager.models import hub, random_models
    from wager.models.weights import open_weights

    if random_models.is_random(model):
        return random_models.spec_of(model)
    try:
        path = hub.find(model)
    except ModelError as error:
        raise UsageError(f"Only models on this machine can be calibrated: {error.message}", error.hint) from error
    if path is None:
        raise UsageError(
            f"{model} is not on this machine, so it was never calibrated.", f"wager calibrate --model {model}"
        )
    return open_weights(path).spec
