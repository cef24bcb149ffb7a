"""Calibrations of this machine or another in place of a datasheet: `doctor` lists them, `plan --hardware this` predicts
with them. Opens a model's files for its shape; loads no weights.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from wager.arch import ModelSpec, Precision, find_format, gguf_precision
from wager.bench.machine import describe
from wager.economics.calibration import FOLDER, Calibration, fingerprint, latest_calibration, sizes_of
from wager.economics.surface import LatencySurface
from wager.errors import ModelError, UsageError
from wager.inputs import expand_path
from wager.kernels.cpu import machine
from wager.models import hub, random_models
from wager.models.gguf import open_gguf
from wager.models.weights import open_weights
from wager.planner.cost import Cluster, CostModel
from wager.planner.devices import Device
from wager.planner.inputs import find_plan_model, read_json
from wager.terminal import console

THIS = "this"
"""The name of this machine in `plan --hardware`."""


def stored() -> list[dict[str, Any]]:
    """The stored calibrations, for `doctor`: of each calibration its path, model, kernels, age and errors, the machine
    if it is another, or the "error" that keeps it from being read."""
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


def calibrated_cost(model: str, hardware: str) -> CostModel | None:
    """Step times of `model` by calibration, if the hardware is this machine or a file that `wager calibrate` wrote,
    which may be another machine's or a server's; else None. UsageError if it is of another model or damaged."""
    this_machine = machine()
    if hardware.lower() == THIS:
        spec, stored_in = _spec(model)
        calibration = latest_calibration(hub.cache_dir(FOLDER), shape=fingerprint(spec), machine=this_machine)
    else:
        values = read_json(expand_path(hardware)) if hardware.endswith(".json") else {}
        if "surface" not in values:
            return None
        calibration = Calibration.from_dict(values, where=hardware)
        spec, stored_in = (known_spec if calibration.setup.foreign else _spec)(model)
        name = Path(model).name
        if calibration.setup.shape != (sizes_of if calibration.setup.foreign else fingerprint)(spec):
            raise UsageError(
                f"{hardware} calibrates {calibration.setup.model}, and --model is {name}.", "Name that model."
            )
    setup, errors = calibration.setup, calibration.errors
    local = setup.machine == this_machine
    if not local and not setup.foreign:
        console.warn(f"{hardware} was made on another machine: {setup.machine}; this one is {this_machine}.")
    label = (
        f"{f'{setup.machine}; ' if local else ''}{setup.kernels}, {setup.dtype}, measured {calibration.age}, off by "
        f"{errors.median:.1%} (median) and {errors.p90:.1%} (90th percentile) on steps it was not fitted to"
    )
    precision = stored_in if setup.foreign else replace(_precision(setup.dtype, stored_in), state=4.0)
    if setup.dtype.endswith(" q8 cache"):
        precision = replace(precision, cache=find_format("q8").bytes)
    source = spec.source if setup.foreign else "the model's own files"
    described = replace(spec, name=Path(model).name, precision=precision, source=source)
    memory = describe().memory if local else None
    cost = measured_cost(described, calibration.surface(), memory=memory, label=label)
    return cost if local else replace(cost, cluster=Cluster(replace(cost.device, name=setup.machine)))


def measured_cost(model: ModelSpec, measured: LatencySurface, *, memory: float | None, label: str) -> CostModel:
    """Seconds of steps of `model` as measured, with the machine as a datasheet: bandwidth is the bytes per second of a
    one-row step, peak the FLOPs per second that the last measured rows add."""
    compute = model.precision.weights.compute
    one, many = measured.rows[0], measured.rows[-1]
    first = measured.seconds(one, 1, 0)
    added = measured.seconds(many, 1, 0) - measured.seconds(max(one, many // 2), 1, 0)
    rate = 2 * model.active * (many - max(one, many // 2)) / added if added > 0 else 0.0
    peak = rate or 2 * model.active * many / first
    kinds = {compute, model.precision.attention}  # attention is not quantised with the weights
    device = Device("this machine", dict.fromkeys(kinds, peak), model.streamed_bytes / first, memory, label=label)
    return CostModel(model, Cluster(device), measured=measured)


def _precision(form: str, stored_in: Precision) -> Precision:
    """Number formats of weights whose form a calibration describes (loading.opened.OpenedModel.formats)."""
    names = [part.split()[0] for part in form.split(" + ")]
    if names[0] == "bfloat16":
        return Precision.of("bf16")
    if stored_in != Precision.of("bf16"):
        return stored_in
    return Precision.of(names[0], head="q8_0", router="fp32")


def known_spec(model: str) -> tuple[ModelSpec, Precision]:
    """The shape of a model that `wager plan` knows, which need not be on this machine, and its number formats."""
    spec = random_models.spec_of(model) if hub.is_random(model) else find_plan_model(model)
    return spec, spec.precision


def _spec(model: str) -> tuple[ModelSpec, Precision]:
    """The shape of a model on this machine, and the number formats of its file; UsageError if its files are not stored
    here."""
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
