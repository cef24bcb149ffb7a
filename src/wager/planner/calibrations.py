"""Stored calibrations for other commands: `doctor` lists them, `plan --hardware this` predicts with them.

Opens a model's files for its shape; loads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from wager.arch import ModelSpec, Precision, find_format, gguf_precision
from wager.economics.calibration import FOLDER, Calibration, fingerprint, latest_calibration
from wager.errors import ModelError, UsageError
from wager.planner.calibrated import CalibratedCostModel
from wager.terminal import console

THIS = "this"
"""The name of this machine in `plan --hardware`."""


def stored() -> list[dict[str, Any]]:
    """The stored calibrations, for `doctor`: of each calibration its path, model, kernels, age and errors, the machine
    if it is another, or the "error" that keeps it from being read."""
    from wager.kernels import machine
    from wager.models import hub

    listed: list[dict[str, Any]] = []
    this_machine = machine()
    for path in sorted(hub.cache_dir(FOLDER).glob("*.json")):
        try:
            calibration = Calibration.read(path)
        except UsageError as error:
            listed.append({"path": str(path), "error": error.message})
            continue
        setup = calibration.setup
        other = None if setup.machine == this_machine else setup.machine
        listed.append(
            {
                "path": str(path),
                "model": setup.model,
                "kernels": setup.kernels,
                "threads": setup.threads,
                "dtype": setup.dtype,
                "age": calibration.age,
                "when": calibration.when.isoformat(),
                "errors": asdict(calibration.errors),
                "other_machine": other,
            }
        )
    return listed


def cost(model: str, values: Mapping[str, Any] | None, *, where: str = "") -> CalibratedCostModel:
    """Measured step times of `model`: from the calibration stored for this machine, or from the `values` of a
    calibration in the file `where`, which may be another machine's. UsageError if it is of another model or damaged."""
    from wager.bench.machine import describe
    from wager.kernels import machine
    from wager.models import hub

    (spec, stored_in), this_machine = _spec(model), machine()
    name, shape = Path(model).name, fingerprint(spec)
    if values is None:
        calibration = latest_calibration(hub.cache_dir(FOLDER), shape=shape, machine=this_machine)
    else:
        calibration = Calibration.from_dict(values, where=where)
    setup, errors = calibration.setup, calibration.errors
    if setup.shape != shape:
        raise UsageError(
            f"{where} calibrates {setup.model}, and --model is {name}.",
            "Name that model.",
        )
    local = setup.machine == this_machine
    if not local:
        console.say(f"warning: {where} was made on another machine: {setup.machine}; this one is {this_machine}.")
    label = (
        f"{setup.machine}; {setup.kernels}, {setup.dtype}, measured {calibration.age}, off by {errors.median:.1%} "
        f"(median) and {errors.p90:.1%} (90th percentile) on steps it was not fitted to"
    )
    precision = _precision(setup.dtype, stored_in)
    if setup.dtype.endswith(" q8 cache"):
        precision = replace(precision, cache=find_format("q8").bytes)
    described = replace(spec, name=name, precision=precision, source="the model's own files")
    return CalibratedCostModel(
        described, calibration.surface(), memory=describe().memory if local else None, label=label
    )


def _precision(form: str, stored_in: Precision) -> Precision:
    """Number formats of weights whose form a calibration describes (loading.opened.OpenedModel.formats)."""
    names = [part.split()[0] for part in form.split(" + ")]
    if names[0] == "bfloat16":
        return Precision.of("bf16")
    if stored_in != Precision.of("bf16"):
        return stored_in
    return Precision.of(names[0], head="q8_0", router="fp32")


def _spec(model: str) -> tuple[ModelSpec, Precision]:
    """The shape of a model on this machine, and the number formats of its file; UsageError if its files are not stored
    here."""
    from wager.models import hub, random_models
    from wager.models.gguf import open_gguf
    from wager.models.weights import open_weights

    bf16 = Precision.of("bf16")
    if hub.is_random(model):
        return random_models.spec_of(model), bf16
    try:
        path = hub.find(model)
    except ModelError as error:
        raise UsageError(f"Only models on this machine can be calibrated: {error.message}", error.hint) from error
    if path is None:
        raise UsageError(
            f"{model} is not on this machine, so it was never calibrated.",
            f"Calibrate it: wager calibrate --model {model}.",
        )
    return open_weights(path).spec, gguf_precision(open_gguf(path).sizes) if path.is_file() else bf16
